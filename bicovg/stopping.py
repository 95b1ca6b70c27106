"""How a run is asked to stop, and how two runs are kept out of one folder.

SIGTERM, SIGINT and SIGUSR1 (a batch scheduler's warning) only set a flag; the training loop looks at it between two
steps, saves and leaves with 128 + the signal's number. A second Ctrl-C ends the process at once.
"""

import fcntl
import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from bicovg.durable import read_regular
from bicovg.errors import StorageError, UserError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
LOCK = "lock"
TIME_UP = 1  # a wish to stop that is no exit code: below those of all signals


class StopRequested(Exception):
    """Leave the loop, save, and end with the stopper's exit code."""


class Stopper:
    """Collects reasons to stop; as a context manager it listens to signals (in the main thread only).

    Attributes:
        reason: what asked to stop, in words; None while nothing has.
    """

    def __init__(self, max_seconds: float | None = None) -> None:
        self.begun, self.max_seconds = time.monotonic(), max_seconds
        self.reason: str | None = None
        self.exit_code = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stopper":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.exit_code == 0:
            self.reason, self.exit_code = signal.Signals(number).name, 128 + number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, self._leave)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        """The second Ctrl-C: nothing is waited for, as every file is whole at any moment."""
        try:
            if os.isatty(1):
                os.write(1, b"\x1b[?25h")  # a display may have hidden the cursor
            os.write(2, b"bicovg: interrupted\n")
        except OSError:  # nobody reads any more
            pass
        os._exit(128 + number)

    def wish(self) -> int:
        """0, or why this process wishes to stop: the exit code of its signal, or TIME_UP."""
        late = self.max_seconds is not None and time.monotonic() - self.begun >= self.max_seconds
        return self.exit_code or (TIME_UP if late else 0)

    def obey(self, wish: int) -> None:
        """Raises StopRequested where ``wish``, this process's or another's, is to stop."""
        if wish == TIME_UP:
            self.reason = "the time limit" if self.max_seconds is None else f"the limit of {self.max_seconds:g} s"
        elif wish and not self.exit_code:
            self.reason, self.exit_code = f"{signal.Signals(wish - 128).name} on another rank", wish
        if wish:
            raise StopRequested

    def check_signals(self) -> None:
        """Between two batches of anything: raises StopRequested if a signal came."""
        self.obey(self.exit_code)

    def check(self) -> None:
        """After a training step: raises StopRequested if a signal came or the time is up."""
        self.obey(self.wish())


class RunLock:
    """One process per run folder. The kernel drops the lock when its holder dies, however it dies."""

    def __init__(self, run: Path) -> None:
        path, self._descriptor = run / LOCK, -1
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        except BlockingIOError:
            self.release()
            holder = read_regular(path, 1 << 10).decode(errors="replace").strip() or "another process"
            raise UserError(f"{run} is in use by {holder}: wait until it has ended, or stop it") from None
        except OSError as error:
            self.release()
            raise StorageError(f"cannot write {path}: {error.strerror}; make the run folder writable") from None

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
