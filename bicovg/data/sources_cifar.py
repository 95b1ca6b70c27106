"""The official CIFAR-100 binary archive: the .tar.gz itself, or the folder unpacked from it.

A record is one coarse label byte, one fine label byte and 3,072 pixels (red plane, green plane, blue plane).
Nothing is ever extracted to disk: members of an archive are read as streams.
"""

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

import numpy as np

from bicovg.data.sources_sample import Sample, Source
from bicovg.errors import UserError

RECORD = 2 + 3072
_FILES = {"train": "train.bin", "test": "test.bin"}
_NAMES = "fine_label_names.txt"
_BLOCK = 256  # records read at a time
_DAMAGE = (OSError, EOFError, tarfile.TarError, zlib.error)  # what reading a damaged archive raises


def refuse_pickle(path: Path) -> UserError:
    """Why the python version of CIFAR is not read, and what to get instead."""
    return UserError(
        f"{path} is the python version of CIFAR, a pickle, and loading a pickle executes code it carries: "
        f"get the binary version (cifar-100-binary.tar.gz from the CIFAR home page) instead"
    )


@contextmanager
def _open_member(path: Path, name: str) -> Iterator[tuple[IO[bytes], int]]:
    """Stream and size of ``name`` in the folder or archive ``path``."""
    try:
        if path.is_dir():
            with (path / name).open("rb") as stream:
                yield stream, (path / name).stat().st_size
            return
        with tarfile.open(path, "r:" if path.suffix == ".tar" else "r:gz") as archive:
            for member in archive:
                if PurePosixPath(member.name).parts[-2:-1] == ("cifar-100-python",):
                    raise refuse_pickle(path)
                if member.isfile() and PurePosixPath(member.name).name == name:
                    content = archive.extractfile(member)
                    assert content is not None  # member.isfile()
                    yield content, member.size
                    return
    except _DAMAGE as error:
        raise UserError(f"cannot read {name} of {path} ({error}): fetch the archive again") from error
    raise UserError(f"{path} holds no {name}: give the CIFAR-100 binary archive")


def _check_archive(path: Path) -> None:
    """Read a compressed archive to its end, where its checksum stands: members alone would never reach it."""
    try:
        with gzip.open(path) as stream:
            while stream.read(1 << 20):
                pass
    except _DAMAGE as error:
        raise UserError(f"{path} is damaged ({error}): fetch the archive again") from error


def _count_records(path: Path, name: str) -> int:
    with _open_member(path, name) as (_, size):
        if size == 0 or size % RECORD:
            raise UserError(f"{name} of {path} has {size} bytes, not a multiple of {RECORD}: fetch the archive again")
        return size // RECORD


def _read_samples(path: Path, name: str) -> Iterator[Sample]:
    with _open_member(path, name) as (stream, size):
        for start in range(0, size // RECORD, _BLOCK):
            block = stream.read(min(_BLOCK * RECORD, size - start * RECORD))
            if len(block) % RECORD or not block:
                raise UserError(f"{name} of {path} ends early: fetch the archive again")
            records = np.frombuffer(block, np.uint8).reshape(-1, RECORD)
            images = records[:, 2:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            for row, (image, label) in enumerate(zip(images, records[:, 1].tolist(), strict=True)):
                yield Sample(f"{name}[{start + row}]", image, label)


def read_cifar(path: Path) -> Source:
    """``path`` is the folder with train.bin, test.bin and fine_label_names.txt, or the archive of it."""
    if path.is_file() and path.suffix != ".tar":
        _check_archive(path)
    with _open_member(path, _NAMES) as (stream, _):
        lines = stream.read(1 << 16).decode("ascii", "replace").splitlines()
    classes = tuple(line.strip() for line in lines if line.strip())
    if not classes:
        raise UserError(f"{_NAMES} of {path} is empty: fetch the archive again")
    members = [*_FILES.values(), _NAMES]
    return Source(
        format="cifar-binary",
        classes=classes,
        counts={split: _count_records(path, name) for split, name in _FILES.items()},
        open_split=lambda split: _read_samples(path, _FILES[split]),
        whole_files={name: path / name for name in members} if path.is_dir() else {path.name: path},
    )
