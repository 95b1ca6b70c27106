"""What every reader hands to the packer: samples, class names, and how many samples each split has."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from bicovg.errors import UserError

SPLITS = ("train", "valid", "test")
_ALIASES = {"train": "train", "test": "test", "val": "valid", "valid": "valid", "validation": "valid"}


class Sample(NamedTuple):
    """One labelled image, not yet decoded.

    Attributes:
        name: where it comes from, relative to the source; what a rejection is reported under.
        image: encoded bytes, the file that holds them (read by the decoding thread), or raw RGB pixels.
    """

    name: str
    image: bytes | Path | UInt8[np.ndarray, "h w 3"]
    label: int


@dataclass(frozen=True)
class Source:
    """A data set as found on disk; reading starts only when ``samples`` is iterated.

    Attributes:
        counts: samples per split, known before anything is decoded.
        whole_files: name -> path of the files that hold many samples or the names, for the source's hash.
            Files that hold one sample each are hashed while they are read.
        options: choices that change what is read; recorded in the store.
    """

    format: str
    classes: tuple[str, ...]
    counts: Mapping[str, int]
    open_split: Callable[[str], Iterator[Sample]]
    whole_files: Mapping[str, Path] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)

    def samples(self, split: str) -> Iterator[Sample]:
        if split not in self.counts:
            raise UserError(f"unknown split {split!r}: this source has {', '.join(self.counts)}")
        return self.open_split(split)


def name_splits(found: Iterable[str], where: Path) -> dict[str, str]:
    """Map the split names used on disk to train / valid / test.

    Public copies of Tiny-ImageNet and ImageNet have labels for train and validation only, and papers test on
    the validation images: without a test split, validation becomes ``test``.
    """
    found = sorted(found)
    named = {name: _ALIASES[name] for name in found if name in _ALIASES}
    if len(named) < len(found):
        odd = next(name for name in found if name not in _ALIASES)
        raise UserError(f"unknown split {odd!r} in {where}: name it one of {', '.join(_ALIASES)}")
    if len(set(named.values())) < len(named):
        raise UserError(f"{where} has several validation splits ({', '.join(found)}): keep one of them")
    if "test" not in named.values():
        named = {name: "test" if split == "valid" else split for name, split in named.items()}
    for needed in ("train", "test"):
        if needed not in named.values():
            raise UserError(f"{where} has no {needed} split (found: {', '.join(found) or 'none'}): add it")
    return dict(sorted(named.items(), key=lambda item: SPLITS.index(item[1])))


def read_lines(path: Path) -> list[str]:
    """The non-empty lines of a text file, without comment lines (``#``)."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} as a text file ({error}): give a UTF-8 text file") from error
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def _split_class(line: str, folders: Collection[str]) -> list[str]:
    """Folder and description; a folder with spaces is known by being there, or by the tab behind it."""
    by_tab, by_space = [part.strip() for part in line.split("\t", 1)], line.split(maxsplit=1)
    for parts in ([line], by_tab, by_space):
        if parts[0] in folders:
            return parts
    return by_tab if len(by_tab) == 2 else by_space


def read_class_list(path: Path, folders: Collection[str] = ()) -> dict[str, str]:
    """Folder name -> class name, in label order, from lines ``FOLDER [description]``.

    Args:
        folders: those that are there; a line that is the name of one, spaces and all, has no description.
    """
    pairs = [_split_class(line, folders) for line in read_lines(path)]
    classes = {pair[0]: "\t".join(pair) for pair in pairs}
    if not classes:
        raise UserError(f"class list {path} is empty: write one class folder name a line")
    if len(classes) < len(pairs):
        raise UserError(f"class list {path} names {len(pairs) - len(classes)} classes twice: remove the repetitions")
    return classes
