"""When a checkpoint is written, and by whom: a thread, one checkpoint at a time, while training goes on."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from bicovg.checkpoint import write_checkpoint
from bicovg.errors import StorageError
from bicovg.state import Snapshot


class Saver:
    """Writes the checkpoints of one run.

    A failed write raises StorageError at the next call, and the run ends loudly with its last good checkpoint intact.

    Args:
        seconds: time after which the next checkpoint is due; 0 for never.
        owner: whose they are (``identify``).
    """

    def __init__(self, run: Path, keep: int, seconds: float, owner: str = "") -> None:
        self.run, self.keep, self.seconds, self.owner = run, keep, seconds, owner
        self.unfit: set[str] = set()  # names of checkpoints that are whole, but that the run could not take
        self._pool = ThreadPoolExecutor(1, "bicovg-saver")
        self._writing: Future[Path] | None = None
        self._last_time = time.monotonic()

    def due(self) -> bool:
        """Whether it is time; also the place where a failed write comes to light."""
        if self._writing is not None and self._writing.done():
            self.wait()
        return self.seconds > 0 and time.monotonic() - self._last_time >= self.seconds

    def save(self, snapshot: Snapshot) -> None:
        """Hand over to the thread, once it is done with the one before."""
        self.wait()
        self._writing = self._pool.submit(self._write, snapshot)
        self._last_time = time.monotonic()

    def wait(self) -> None:
        """Until everything handed over is on disk and verified."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Wait, and end the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def _write(self, snapshot: Snapshot) -> Path:
        try:
            files = snapshot.files()
            path = write_checkpoint(self.run, snapshot.name, files, self.keep, self.owner, self.unfit)
            self.unfit.discard(snapshot.name)
            return path
        except OSError as error:
            raise StorageError(
                f"cannot save {snapshot.name} in {self.run}: {error.strerror or error}; the last good checkpoint is "
                f"intact: correct that, then go on with `bicovg train --resume {self.run}`"
            ) from None
