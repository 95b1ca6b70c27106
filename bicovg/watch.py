"""``bicovg watch RUN``: the report page of a run while it goes on, served to this machine alone.

The server is bound to 127.0.0.1, answers GET and HEAD of two addresses (the page and its updates) and writes
nothing. No address names a file, so none can name one outside the run folder. A request whose Host header is not
this machine is refused: a foreign page whose name was pointed at 127.0.0.1 cannot read the run.
"""

import hashlib
import os
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from bicovg.display import Display
from bicovg.errors import UserError
from bicovg.report.collect import RunData, read_run, read_runs
from bicovg.report.page import policy, render_page
from bicovg.runlog import read_config

PORT = 8765
FILES = (
    "config.json",
    "env.json",
    "metrics.jsonl",
    "timing.jsonl",
    "summary.json",
    "analysis.json",
    "early_exit.json",
)
LOCAL_NAMES = ("127.0.0.1", "localhost")


class LivePage:
    """The page of a run folder, made anew when one of its files has changed."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.lock = threading.Lock()
        self.shown: list[RunData] = []
        self.version, self.body = "", b""

    def fetch(self) -> tuple[str, bytes]:
        """Version and page; a file that cannot be read right now leaves the last state standing, and is named."""
        with self.lock:
            try:
                version, warning = self._version(), ""
                if version != self.version:
                    self.shown = read_runs([self.run])
            except UserError as error:
                if not self.shown:
                    raise
                warning = f"{error} (shown is the last state that could be read)"
                version = hashlib.sha256(warning.encode()).hexdigest()[:16]
            if version != self.version:
                self.body = render_page(self.shown, live="/live", warning=warning).encode()
                self.version = version
            return self.version, self.body

    def _version(self) -> str:
        state = []
        for name in FILES:
            path = self.run / name
            if path.is_symlink() and not path.resolve().is_relative_to(self.run.resolve()):
                raise UserError(f"{path} leads out of the run folder: put the file itself there")
            try:
                found = path.stat()
                state.append((name, found.st_mtime_ns, found.st_size))
            except OSError:
                state.append((name, 0, -1))
        return hashlib.sha256(repr(state).encode()).hexdigest()[:16]


class Handler(BaseHTTPRequestHandler):
    """Answers ``/`` and ``/live`` and refuses everything else."""

    server_version, sys_version = "bicovg", ""
    server: "Server"

    def do_GET(self) -> None:
        if not self._is_local():
            self._answer(HTTPStatus.FORBIDDEN, b"only this machine may look\n")
            return
        if self.path not in ("/", "/live"):
            self._answer(HTTPStatus.NOT_FOUND, b"there is the page, and nothing else\n")
            return
        try:
            version, body = self.server.page.fetch()
        except UserError as error:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{error}\n".encode())
            return
        if self.headers.get("If-None-Match") == version:
            self._answer(HTTPStatus.NOT_MODIFIED, b"", version)
        else:
            self._answer(HTTPStatus.OK, body, version)

    do_HEAD = do_GET

    def _refuse(self) -> None:
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, b"read-only\n")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse

    def _is_local(self) -> bool:
        """The peer is this machine, and so is the name it asked for."""
        port = self.server.server_address[1]
        names = {name for host in LOCAL_NAMES for name in (host, f"{host}:{port}")}
        return self.client_address[0] == "127.0.0.1" and self.headers.get_all("Host", [""])[0] in names

    def _answer(self, status: HTTPStatus, body: bytes, version: str = "") -> None:
        page = status == HTTPStatus.OK
        self.send_response(status)
        self.send_header("Content-Type", f"text/{'html' if page else 'plain'}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", policy(live=True) + "; frame-ancestors 'none'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")
        if version:
            self.send_header("ETag", version)
        self.end_headers()
        if self.command != "HEAD" and status != HTTPStatus.NOT_MODIFIED:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: the terminal shows the run."""


class Server(ThreadingHTTPServer):
    """Bound to this machine; port 0 takes any free one."""

    daemon_threads = True

    def __init__(self, run: Path, port: int) -> None:
        self.page = LivePage(run)
        self.page.fetch()
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except (OSError, OverflowError) as error:
            reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else "no such port"
            raise UserError(f"port {port} cannot be used ({reason}): give another with --port") from None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


def open_server(run: Path, port: int | None) -> Server:
    """On the port asked for; without one on 8765, or where that is taken on any free one."""
    if port is not None:
        return Server(run, port)
    try:
        return Server(run, PORT)
    except UserError:
        return Server(run, 0)


def follow(run: Path, shown: int, display: Display) -> tuple[int, RunData]:
    """Show the newest epoch if there is one; returns how many there are now."""
    found = read_run(run)
    count = min(len(found.metrics), len(found.timing))
    if count > shown:
        metrics, timing = found.metrics[count - 1], found.timing[-1]
        left = found.epochs - metrics["epoch"] - 1
        steps = metrics.get("step", 0) // (metrics["epoch"] + 1)
        display.step(metrics["epoch"], steps, steps)
        display.update(metrics, timing, max(left, 0) * (timing["train_seconds"] + timing.get("eval_seconds", 0.0)))
    return count, found


def watch(run: Path, port: int | None, events: Any = None) -> int:
    """Serve until interrupted; the terminal shows the table that ``train`` shows.

    Args:
        events: told of every new epoch, see ``bicovg.tensorboard``.
    """
    config = read_config(run)
    with open_server(run, port) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(f"watching {run} at {server.address} (Ctrl-C ends it)", flush=True)
        shown, first, trouble = 0, read_run(run), ""
        try:
            with Display(config, first.exits, config.train.engine) as display:
                while True:
                    try:
                        shown, found = follow(run, shown, display)
                        if events is not None:
                            events.record(found)
                        trouble = ""
                    except UserError as error:
                        if str(error) != trouble:
                            display.note(f"{error} (watching on)")
                        trouble = str(error)
                    time.sleep(1.0)
        except KeyboardInterrupt:
            server.shutdown()
            return 0
