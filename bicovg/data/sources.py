"""Readers: from a path on disk to a ``Source`` of labelled samples with explicit splits.

The format is found from what the path holds; nothing found on disk is executed (no pickle) or extracted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bicovg.data.sources_cifar import read_cifar, refuse_pickle
from bicovg.data.sources_folders import (
    find_splits,
    list_folders,
    read_class_folders,
    read_image_tree,
    read_tiny_imagenet,
)
from bicovg.data.sources_parquet import read_parquet
from bicovg.data.sources_sample import SPLITS, Sample, Source, read_class_list
from bicovg.errors import UserError

__all__ = ["FORMATS", "SPLITS", "Sample", "Source", "detect_format", "open_source", "read_class_list"]

FORMATS = ("parquet", "cifar-binary", "tiny-imagenet", "image-tree", "class-folders")
_INNER = ("cifar-100-binary", "cifar-100-python", "tiny-imagenet-200")  # what the official archives unpack to
_EXPECTED = (
    "parquet shards, the CIFAR-100 binary archive, the Tiny-ImageNet folder, train/ and val/ folders of "
    "classes, or one folder per class"
)


class NothingToReadError(UserError):
    """A folder without folders and without any format's files."""


@contextmanager
def _name_unreadable(path: Path) -> Iterator[None]:
    """A folder that may not be read is the user's to mend."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {error.filename or path} ({error.strerror}): give a readable path") from error


def _detect_in_folder(path: Path) -> str:
    if next(path.glob("*.parquet"), None) is not None:
        return "parquet"
    if (path / "train.bin").is_file() and (path / "test.bin").is_file():
        return "cifar-binary"
    if all((path / name).is_file() for name in ("train", "test", "meta")) or (path / "data_batch_1").is_file():
        raise refuse_pickle(path)
    if (path / "wnids.txt").is_file() and (path / "val" / "val_annotations.txt").is_file():
        return "tiny-imagenet"
    if find_splits(path):
        return "image-tree"
    if list_folders(path):
        return "class-folders"
    raise NothingToReadError(f"{path} holds nothing that can be read: give {_EXPECTED}")


def detect_format(path: Path) -> tuple[str, Path]:
    """The format of what ``path`` holds, and the folder or file that holds it."""
    with _name_unreadable(path):
        if path.is_dir():
            inner = [path / name for name in _INNER if (path / name).is_dir()]
            path = inner[0] if len(inner) == 1 else path
            return _look_deeper(_detect_in_folder(path), path)
        return _detect_file(path), path


def _look_deeper(format: str, path: Path) -> tuple[str, Path]:
    """As archives unpack, and as clones of a model hub keep their shards: in one folder more. No class stands alone."""
    folders = list_folders(path)
    if format != "class-folders" or len(folders) != 1 or (path / folders[0]).is_symlink():
        return format, path
    try:
        inner = detect_format(path / folders[0])
    except NothingToReadError:  # but images
        return format, path
    return inner if inner[0] != "class-folders" else (format, path)


def _detect_file(path: Path) -> str:
    if not path.exists():
        raise UserError(f"{path} does not exist: give the path of {_EXPECTED}")
    if "cifar-100-python" in path.name:
        raise refuse_pickle(path)
    if path.name.endswith((".tar.gz", ".tgz", ".tar")):
        return "cifar-binary"
    if path.suffix == ".parquet":
        raise UserError(f"{path} is one shard: give the folder {path.parent} that holds all of them")
    raise UserError(f"{path} is a file of unknown kind: unpack it, then give {_EXPECTED}")


def open_source(
    path: Path,
    format: str | None = None,
    class_list: Path | None = None,
    test_share: float = 0.2,
    seed: int = 0,
) -> Source:
    """Open what ``path`` holds.

    Args:
        format: one of ``FORMATS``, when detection is to be overridden.
        class_list: file with the class folders to use, in label order (folder formats only).
        test_share: share of each class that becomes the test split, and
        seed: which images those are, when the source has no splits of its own.
    """
    with _name_unreadable(path):
        return _open(path, format, class_list, test_share, seed)


def _open(path: Path, format: str | None, class_list: Path | None, test_share: float, seed: int) -> Source:
    if format is None:
        format, path = detect_format(path)
    elif format not in FORMATS:
        raise UserError(f"unknown format {format!r}: use one of {', '.join(FORMATS)}")
    elif not path.exists():
        raise UserError(f"{path} does not exist: give the path of {_EXPECTED}")
    if class_list is not None and format not in ("image-tree", "class-folders"):
        raise UserError(f"a class list cannot be used with format {format}: leave out --classes")
    if format == "parquet":
        return read_parquet(path)
    if format == "cifar-binary":
        return read_cifar(path)
    if format == "tiny-imagenet":
        return read_tiny_imagenet(path)
    if format == "image-tree":
        return read_image_tree(path, class_list)
    return read_class_folders(path, class_list, test_share, seed)
