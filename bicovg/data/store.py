"""The packed store: decode a source once into memory-mapped pixels, then open it in no time.

``pack`` writes, ``PackedStore.open`` reads. The layout on disk is described in ``store_files``.
"""

import hashlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from bicovg.data.decode import MAX_PIXELS, pillow_version
from bicovg.data.sources_sample import Source
from bicovg.data.store_files import (
    PARTIAL,
    SCHEMA,
    Progress,
    check_name,
    data_root,
    is_store,
    list_partial,
    lock_name,
    publish,
    verify_files,
)
from bicovg.data.store_holdout import stratified_holdout
from bicovg.data.store_read import PackedSplit, PackedStore
from bicovg.data.store_write import (
    ChannelSums,
    Chunk,
    Fit,
    SplitWriter,
    decode_in_order,
    group_samples,
)
from bicovg.errors import UserError

__all__ = [
    "PackedSplit",
    "PackedStore",
    "RejectedImages",
    "data_root",
    "pack",
    "stratified_holdout",
    "verify_files",
]


class RejectedImages(UserError):
    """Too many images of a source cannot be used; ``rejected`` lists all of them."""

    def __init__(self, rejected: list[dict[str, str]], total: int, allowed: float) -> None:
        self.rejected = rejected
        first = ", ".join(f"{entry['path']} ({entry['reason']})" for entry in rejected[:3])
        super().__init__(
            f"{len(rejected)} of {total} images cannot be used, above the allowed share of {allowed:.4g}: "
            f"{first}{', ...' if len(rejected) > 3 else ''}; replace them or raise --max-rejected"
        )


@dataclass
class _Packing:
    """What accumulates over the splits while packing."""

    source: Source
    fit: Fit
    jobs: int
    progress: Progress | None
    sums: ChannelSums = field(default_factory=ChannelSums)
    rejected: list[dict[str, str]] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    class_counts: dict[str, np.ndarray] = field(default_factory=dict)

    def write_store(self, target: Path, max_rejected: float) -> None:
        """Write beside ``target`` and rename at the end; whatever goes wrong before leaves nothing."""
        partial = target.with_name(f"{target.name}{PARTIAL}{os.getpid()}")
        partial.mkdir()
        try:
            writers = {split: self.write_split(partial, split) for split in self.source.counts}
            self.check(max_rejected)
            publish(partial, target, self.describe(target.name, writers, max_rejected))
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def write_split(self, folder: Path, split: str) -> SplitWriter:
        """Decode and append all samples of ``split``; its files are on disk when this returns."""
        writer = SplitWriter(folder, split)
        done, total = 0, self.source.counts[split]
        self.class_counts[split] = np.zeros(len(self.source.classes), dtype=np.int64)
        groups = group_samples(self.source.samples(split), self.fit)
        finished = False
        try:
            with closing(decode_in_order(groups, self.fit, self.jobs)) as chunks:
                for chunk in chunks:
                    self._count(chunk, split)
                    writer.append(chunk)
                    done += chunk.seen
                    if self.progress is not None:
                        self.progress(split, done, total)
            finished = True
        finally:
            writer.close(sync=finished)
        if done != total:
            raise UserError(f"the {split} split gave {done} images where {total} were announced: fetch it again")
        return writer

    def _count(self, chunk: Chunk, split: str) -> None:
        classes = len(self.source.classes)
        wrong = [label for label in chunk.labels if not 0 <= label < classes]
        if wrong:
            raise UserError(
                f"label {wrong[0]} in the {split} split is outside 0..{classes - 1}: "
                f"correct the labels or the list of class names"
            )
        np.add.at(self.class_counts[split], chunk.labels, 1)
        self.rejected += [{"split": split, "path": path, "reason": reason} for path, reason in chunk.rejected]
        self.digests.update(chunk.digests)
        if split == "train":
            self.sums.add(chunk.sums)

    def check(self, max_rejected: float) -> None:
        """Refuse a data set with too many bad images or with a class that has none."""
        total = sum(self.source.counts.values())
        if len(self.rejected) > max_rejected * total:
            raise RejectedImages(self.rejected, total, max_rejected)
        for split, counts in self.class_counts.items():
            if not counts.all():
                name = self.source.classes[int(np.flatnonzero(counts == 0)[0])]
                raise UserError(f"class {name!r} has no usable image in the {split} split: add one or drop the class")

    def hash_source(self) -> str:
        """Hash of (name, hash of content) of every file read, in the order of their names."""
        for name, path in self.source.whole_files.items():
            with path.open("rb") as stream:
                self.digests[name] = hashlib.file_digest(stream, "sha256").hexdigest()
        lines = [f"{name}\0{digest}\n" for name, digest in sorted(self.digests.items())]
        return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()

    def describe(self, name: str, writers: Mapping[str, SplitWriter], max_rejected: float) -> dict[str, Any]:
        """The manifest: no times and no paths of this machine, so that packing again gives the same bytes."""
        sizes = sorted(set().union(*(writer.sizes for writer in writers.values())))
        fixed = len(sizes) == 1 and self.fit.short_side is None
        options = {"size": self.fit.size, "short_side": self.fit.short_side, "max_rejected": max_rejected}
        return {
            "schema": SCHEMA,
            "name": name,
            "kind": "fixed" if fixed else "variable",
            "size": sizes[0] if fixed else None,
            "classes": self.source.classes,
            "splits": {
                split: {"count": int(self.class_counts[split].sum()), "files": writer.describe(not fixed)}
                for split, writer in writers.items()
            },
            "mean": self.sums.mean(),
            "std": self.sums.std(),
            "rejected": self.rejected,
            "source": {"format": self.source.format, "sha256": self.hash_source(), **self.source.options},
            "options": options | {"max_pixels": MAX_PIXELS, "pillow": pillow_version},
        }


@contextmanager
def _termination_raises() -> Iterator[None]:
    """SIGTERM leaves through the same clean-up as Ctrl-C; only the main thread may set this."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def count_cores() -> int:
    """The cores this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_request(source: Source, root: Path, target: Path, fit: Fit, force: bool) -> None:
    """Everything that can be refused before the first image is decoded."""
    for field_name, value in (("size", fit.size), ("short side", fit.short_side)):
        if value is not None and not 1 <= value <= 4096:
            raise UserError(f"{field_name} {value} must lie between 1 and 4096 pixels")
    if fit.size is not None and fit.short_side is not None:
        raise UserError("both a size and a short side are given: give one of them")
    if target.exists() and not is_store(target):
        raise UserError(f"{target} exists and is not a packed store: choose another name or root")
    if target.exists() and not force:
        raise UserError(f"{target} exists already: add --force to replace it, or choose another name")
    root.mkdir(parents=True, exist_ok=True)
    need = sum(source.counts.values()) * 3 * (fit.size or 0) ** 2
    free = shutil.disk_usage(root).free
    if need > free:
        raise UserError(f"{root} has {free >> 20} MiB free and the store needs {need >> 20} MiB: free space there")


def pack(
    source: Source,
    root: Path,
    name: str,
    *,
    size: int | None = None,
    short_side: int | None = None,
    jobs: int | None = None,
    force: bool = False,
    max_rejected: float = 0.001,
    progress: Progress | None = None,
) -> PackedStore:
    """Decode ``source`` into the store ``<root>/<name>``, which appears whole at the end or not at all.

    With neither ``size`` nor ``short_side`` images keep their own size; the store is of fixed size if
    all are equal.

    Args:
        size: store squares of this many pixels: short side resized, centre cropped.
        short_side: resize to this short side and keep the whole width; the store is of variable size.
        jobs: decoding threads; default one per core.
        max_rejected: share of images that may be unusable.
        progress: called with (split, images done, images in all).
    """
    root, fit = Path(root), Fit(size, short_side)
    target = root / check_name(name)
    packing = _Packing(source, fit, jobs or count_cores(), progress)
    try:
        _check_request(source, root, target, fit, force)
        with lock_name(root, name), _termination_raises():
            for leftover in list_partial(root, name):
                shutil.rmtree(leftover)
            packing.write_store(target, max_rejected)
    except OSError as error:
        raise UserError(f"packing {name} stopped ({error}): correct that and pack again") from error
    return PackedStore.open(root, name)
