"""Where a loader's images come from: arrays and tensors of one size, or a packed store of several."""

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bicovg.data.crops import Bytes
from bicovg.errors import UserError

CANVAS_STEP = 32  # canvases of images of several sizes grow in these steps, so that few shapes occur

Indices = NDArray[np.int64]
Pixels = NDArray[np.uint8]


class ImageSource(Protocol):
    """uint8 images by position. ``sizes`` is None where all have one size, else (N, 2): height, width."""

    labels: Tensor
    sizes: Indices | None

    def __len__(self) -> int: ...

    def batch_shape(self, indices: Indices) -> tuple[int, ...]:
        """(B, H, W, C) of what ``gather`` fills."""

    def gather(self, indices: Indices, out: Pixels | None = None) -> Pixels:
        """The images at ``indices``, in ``out`` where one is given."""


class MappedImages:
    """An array (N, H, W, C), or an object with one as ``images``, read where it lies; or a subset of it."""

    def __init__(self, images: Any, labels: Any, subset: Any = None) -> None:
        self.array: Pixels = np.asarray(getattr(images, "images", images))
        if self.array.ndim != 4 or self.array.dtype != np.uint8:
            raise UserError(f"images are {self.array.dtype} {self.array.shape}: give uint8 (N, H, W, C)")
        self.subset, self.labels = choose(len(self.array), labels, subset)
        self.sizes: Indices | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def batch_shape(self, indices: Indices) -> tuple[int, ...]:
        return (len(indices), *self.array.shape[1:])

    def gather(self, indices: Indices, out: Pixels | None = None) -> Pixels:
        return np.take(self.array, self.subset[indices], axis=0, out=out, mode="clip")  # "raise" would buffer


class TensorImages(MappedImages):
    """A uint8 tensor (N, H, W, C) in memory; a loader on its device uses it without a copy."""

    def __init__(self, images: Bytes, labels: Any) -> None:
        super().__init__(images.cpu().numpy(), labels)
        self.tensor = images


class VariableImages:
    """Images of several sizes: any object whose ``image(i)`` is a uint8 (H, W, C) array.

    An ``index`` attribute with rows (offset, height, width) spares looking at every image once.
    """

    def __init__(self, images: Any, labels: Any, subset: Any = None) -> None:
        self.images = images
        self.subset, self.labels = choose(len(labels), labels, subset)
        index = getattr(images, "index", None)
        if not isinstance(index, np.ndarray):
            index = np.array([(0, *images.image(i).shape[:2]) for i in range(len(labels))]).reshape(-1, 3)
        self.sizes: Indices | None = index[self.subset, 1:].astype(np.int64)
        self.channels = images.image(0).shape[2]

    def __len__(self) -> int:
        return len(self.labels)

    def batch_shape(self, indices: Indices) -> tuple[int, ...]:
        assert self.sizes is not None
        height, width = -(-self.sizes[indices].max(axis=0) // CANVAS_STEP) * CANVAS_STEP
        return (len(indices), int(height), int(width), self.channels)

    def gather(self, indices: Indices, out: Pixels | None = None) -> Pixels:
        """Images stand in the top left corner of their canvas; the rest of a given ``out`` stays as it is."""
        out = np.zeros(self.batch_shape(indices), np.uint8) if out is None else out
        for canvas, position in zip(out, self.subset[indices], strict=True):
            image = self.images.image(int(position))
            canvas[: image.shape[0], : image.shape[1]] = image
        return out


def choose(count: int, labels: Any, subset: Any) -> tuple[Indices, Tensor]:
    """The positions a source offers (all of them by default) and their labels."""
    values = np.asarray(labels).astype(np.int64)
    if len(values) != count:
        raise UserError(f"{count} images have {len(values)} labels: give one label per image")
    chosen = np.arange(count) if subset is None else np.asarray(subset).astype(np.int64)
    if len(chosen) and not 0 <= chosen.min() <= chosen.max() < count:
        raise UserError(f"subset {chosen} leaves the {count} images: give positions in 0..{count - 1}")
    return chosen, torch.from_numpy(values[chosen])
