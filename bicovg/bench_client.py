"""The other end of ``bicovg.bench_worker``: starts it, asks it, and turns whatever happens to it into an answer."""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PATIENCE = 20.0  # seconds an idle worker gets to leave before it is killed
OUT_OF_TIME = "the time limit was reached"

Answer = dict[str, Any]


class Deadline:
    """A moment after which nothing new is begun; None for never."""

    def __init__(self, seconds: float | None) -> None:
        self.end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        return None if self.end is None else max(0.0, self.end - time.monotonic())

    def passed(self) -> bool:
        return self.left() == 0.0


class Worker:
    """A fresh process that measures one configuration. Answers hold ``error`` where something went wrong."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline
        self.messages = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the process)
        root = str(Path(__file__).resolve().parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bicovg.bench_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.messages,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        self.pending = b""

    def ask(self, request: dict[str, Any]) -> Answer:
        """Send one request and wait for its answer, no longer than the deadline allows."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            return {"error": self._epitaph()}
        line = self._read_line()
        if line is None:
            self.process.kill()
            return {"error": OUT_OF_TIME}
        answer: Answer = json.loads(line) if line else {"error": self._epitaph()}
        return answer

    def _read_line(self) -> bytes | None:
        """The next line; empty if the process has ended, None if time ran out first."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self.pending:
                if not selector.select(self.deadline.left()):
                    return None
                piece = os.read(self.process.stdout.fileno(), 1 << 16)
                if not piece:
                    return b""
                self.pending += piece
        line, _, self.pending = self.pending.partition(b"\n")
        return line

    def _epitaph(self) -> str:
        code = self.process.wait()
        self.messages.seek(0)
        lines = [line.strip() for line in self.messages if line.strip()]
        return f"the process ended with code {code}" + (f": {lines[-1][:300]}" if lines else "")

    def close(self) -> None:
        """Let the process leave, or end it."""
        try:
            if self.process.poll() is None:
                self.process.communicate(b'{"do": "quit"}\n', timeout=PATIENCE)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self.process.kill()
        finally:
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout, self.messages):
                if stream is not None:
                    stream.close()

    def kill(self) -> None:
        """End the process without waiting for it to leave."""
        self.process.kill()
        self.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()
