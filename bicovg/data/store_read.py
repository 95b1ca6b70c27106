"""Reading a packed store: memory-mapped images, labels and the facts about them."""

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from bicovg.data.sources_sample import SPLITS
from bicovg.data.store_files import (
    Progress,
    check_name,
    check_sizes,
    is_store,
    list_files,
    pack_command,
    read_manifest,
    verify_files,
)
from bicovg.errors import UserError

CHECKED_BYTES = 2 << 30  # image files up to this size are hashed before training


class PackedSplit:
    """One split of a store. Images stay on disk and are read through the memory map.

    Attributes:
        labels: int64, one per image.
        index: rows (byte offset, height, width) when sizes differ, else None.
        flat: all images as one run of bytes.
    """

    def __init__(self, folder: Path, name: str, count: int, size: tuple[int, int] | None) -> None:
        self.name = name
        self.size = size
        self.labels: Int[np.ndarray, " n"] = np.fromfile(folder / f"{name}.labels", "<i4").astype(np.int64)
        self.flat: UInt8[np.ndarray, " bytes"] = np.memmap(folder / f"{name}.images", np.uint8, "r")
        self.index: Int[np.ndarray, "n 3"] | None = None
        expected = count * 3 * (size[0] * size[1] if size else 0)
        if size is None:
            self.index = np.fromfile(folder / f"{name}.index", "<i8").astype(np.int64).reshape(-1, 3)
            ends = self.index[:, 0] + 3 * self.index[:, 1] * self.index[:, 2]
            if len(self.index) != count or (self.index[1:, 0] != ends[:-1]).any():
                raise UserError(f"{folder / name}.index does not describe {count} images: pack the data set again")
            expected = int(ends[-1])
        if len(self.labels) != count or len(self.flat) != expected:
            raise UserError(f"the {name} files in {folder} do not hold {count} images: pack the data set again")

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def images(self) -> UInt8[np.ndarray, "n h w 3"]:
        """All images at once; only a store of one size has this."""
        if self.size is None:
            raise UserError(f"images of the {self.name} split differ in size: read them one by one with .image(i)")
        return self.flat.reshape(len(self), *self.size, 3)

    def image(self, i: int) -> UInt8[np.ndarray, "h w 3"]:
        """Image ``i`` as a view of the memory map."""
        if self.index is None:
            image: UInt8[np.ndarray, "h w 3"] = self.images[i]
            return image
        start, height, width = self.index[i].tolist()
        return self.flat[start : start + 3 * height * width].reshape(height, width, 3)


class PackedStore:
    """A data set packed by ``bicovg data pack``.

    Attributes:
        size: (height, width) of every image, or None when they differ.
        classes: the class names in label order.
        mean, std: per channel over the train split, pixels scaled to [0, 1].
        rejected: images of the source that could not be used, each with split, path and reason.
        fingerprint: the same for two stores of the same images and labels.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.name: str = manifest["name"]
        self.kind: str = manifest["kind"]
        self.size: tuple[int, int] | None = tuple(manifest["size"]) if manifest["size"] else None
        self.classes: tuple[str, ...] = tuple(manifest["classes"])
        self.mean: tuple[float, ...] = tuple(manifest["mean"])
        self.std: tuple[float, ...] = tuple(manifest["std"])
        self.rejected: list[dict[str, str]] = manifest["rejected"]
        self.source_hash: str = manifest["source"]["sha256"]
        # what is trained and judged on, wherever it lies: images, labels and their order
        known = [manifest["size"], {name: entry["sha256"] for name, entry in list_files(manifest).items()}]
        self.fingerprint = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
        splits = sorted(manifest["splits"], key=SPLITS.index)
        self.counts: dict[str, int] = {split: manifest["splits"][split]["count"] for split in splits}

    @classmethod
    def open(cls, root: Path, name: str, pack_options: str = "") -> "PackedStore":
        """Open a store after the cheap checks: description unchanged, every file there and of its size.

        Args:
            pack_options: what the command in an error should have beside its name and path.
        """
        root = Path(root)
        folder = root / check_name(name)
        if not folder.is_dir():
            raise UserError(f"data set {name!r} is not packed in {root}: run {pack_command(root, name, pack_options)}")
        if not is_store(folder):
            raise UserError(f"{folder} is not a packed store: give another root or name, or move that folder away")
        try:
            manifest = read_manifest(folder)
            problems = check_sizes(folder, manifest)
        except ValueError as error:
            problems = [str(error)]
        if problems:
            command = pack_command(root, name, f"{pack_options} --force")
            raise UserError(f"data set {name!r} in {root} is damaged, {problems[0]}: run {command}")
        return cls(folder, manifest)

    def split(self, name: str) -> PackedSplit:
        if name not in self.counts:
            raise UserError(f"unknown split {name!r}: data set {self.name!r} has {', '.join(self.counts)}")
        return PackedSplit(self.folder, name, self.counts[name], self.size)

    def verify(self, progress: Progress | None = None) -> list[str]:
        """Problems found by reading every byte; empty when the store is exactly what was packed."""
        return verify_files(self.folder, progress)

    def check_content(self) -> None:
        """Refuse a store whose files have changed; of a store too large to read in seconds, all but the images."""
        problems = verify_files(self.folder, limit=CHECKED_BYTES)
        if problems:
            command = pack_command(self.folder.parent, self.name, " --force")
            raise UserError(f"data set {self.name!r} is damaged, {problems[0]}: run {command}")
