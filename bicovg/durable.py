"""Files that survive a crash, and reads that cannot be led astray.

A file is written under another name, synced, renamed; then its folder is synced. Every operation is one plain call of
``os``, which is what lets the tests record them and replay a power loss after each. No symbolic link is followed.
"""

import os
import shutil
import stat
from pathlib import Path

_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


def write_synced(path: Path, blob: bytes | memoryview) -> None:
    """A new file that is on the disk, not only in its cache, when this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o644)
    try:
        left = memoryview(blob)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable: a rename lives in the folder, not in the file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def leftover(path: Path) -> Path:
    """What a process that dies in ``replace_file`` leaves behind."""
    return path.with_name(f".{path.name}.tmp")


def replace_file(path: Path, blob: bytes) -> None:
    """The old content or the new, whole, whatever happens."""
    temporary = leftover(path)
    if os.path.lexists(temporary):
        os.unlink(temporary)
    write_synced(temporary, blob)
    os.rename(temporary, path)
    sync_folder(path.parent)


def append_line(path: Path, line: str) -> None:
    """Add a line, whole or not at all; not synced: what must survive is kept in the checkpoints too."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _NO_LINK, 0o644)
    try:
        size, left = os.fstat(descriptor).st_size, memoryview(f"{line}\n".encode())
        try:
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def open_regular(path: Path, limit: int) -> tuple[int, int]:
    """Descriptor and size of a plain file; a link, pipe or device, or a file above ``limit``, is an OSError."""
    # without O_NONBLOCK the opening of a pipe would wait for its other end
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _NO_LINK)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_size <= limit:
        return descriptor, found.st_size
    os.close(descriptor)
    if stat.S_ISREG(found.st_mode):
        raise OSError(f"{path.name} has {found.st_size} bytes, more than the {limit} it may have")
    raise OSError(f"{path.name} is not a plain file")


def read_regular(path: Path, limit: int) -> bytes:
    """The bytes of a plain file of at most ``limit`` bytes."""
    descriptor, size = open_regular(path, limit)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(size)


def discard(path: Path) -> None:
    """Remove whatever is called so: a folder with all it holds, a file, or a link (not what it points to)."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)
