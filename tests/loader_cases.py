"""Small image sources and loaders shared by the tests of the loader."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bicovg.data.augment import Augmentation
from bicovg.data.images import ImageSource, MappedImages, TensorImages, VariableImages
from bicovg.data.loader import Batch, Loader

RECIPE = Augmentation(crop_pad=2, flip=True, brightness=0.4, contrast=0.4, saturation=0.4, grayscale=0.2)
CROPS = Augmentation(resized_crop=8, flip=True, brightness=0.4)
COUNT, BATCH = 45, 8
IMAGES = np.random.default_rng(1).integers(0, 256, (COUNT, 10, 12, 3), dtype=np.uint8)
LABELS = np.arange(COUNT) * 7 % 10
STATISTICS: dict[str, Any] = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.3)}


class Pictures:
    """Images of several sizes, by position."""

    def __init__(self, count: int) -> None:
        generator = np.random.default_rng(0)
        sizes = generator.integers(9, 50, (count, 2))
        self.pictures = [generator.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in sizes]

    def image(self, i: int) -> np.ndarray:
        return self.pictures[i]


def make_source(kind: str, folder: Path) -> ImageSource:
    if kind == "tensor":
        return TensorImages(torch.from_numpy(IMAGES), torch.from_numpy(LABELS))
    if kind == "variable":
        return VariableImages(Pictures(COUNT), LABELS)
    np.save(folder / "images.npy", IMAGES)
    return MappedImages(np.load(folder / "images.npy", mmap_mode="r"), LABELS)


def make_loader(source: ImageSource, **changes: Any) -> Loader:
    augmentation = CROPS if source.sizes is not None else RECIPE
    settings = {"seed": 3, "augmentation": augmentation, "resident": False, **STATISTICS, **changes}
    return Loader(source, settings.pop("batch_size", BATCH), **settings)


def digest(batch: Batch) -> str:
    parts = [tensor.cpu().contiguous().numpy().tobytes() for tensor in batch]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def digests(loader: Loader, epoch: int = 0, start_step: int = 0) -> list[str]:
    return [digest(batch) for batch in loader.batches(epoch, start_step)]
