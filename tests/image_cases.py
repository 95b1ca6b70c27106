"""Images, keys and comparisons shared by the tests of augmentation and crops."""

import numpy as np
import torch
from torch import Tensor

from bicovg.draws import AUGMENT, make_keys

N = 10_000  # draws whose statistics are tested


def random_images(count: int, height: int, width: int, channels: int = 3) -> Tensor:
    """Random bytes, with both edge values in every image."""
    images = torch.randint(0, 256, (count, height, width, channels), dtype=torch.uint8)
    images[:, 0, 0], images[:, -1, -1], images[:, 0, -1, 0], images[:, -1, 0, -1] = 0, 255, 255, 255
    return images


def keys_of(count: int, seed: int = 0, epoch: int = 0) -> Tensor:
    return make_keys(seed, AUGMENT, epoch, torch.arange(count))


def assert_images_match(batch: Tensor, images: list[np.ndarray], atol: float = 2e-6) -> None:
    """(B, C, H, W) against a list of (H, W, C)."""
    expected = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    torch.testing.assert_close(batch.double(), expected.double(), rtol=0, atol=atol)


def distance_from_uniform(values: Tensor) -> float:
    """Kolmogorov-Smirnov distance times sqrt(n): above 2.5 once in 100,000 correct distributions."""
    steps = torch.arange(len(values) + 1, dtype=torch.float64) / len(values)
    ordered = values.double().sort().values
    distance = torch.maximum((ordered - steps[:-1]).abs().max(), (ordered - steps[1:]).abs().max())
    return float(distance * len(values) ** 0.5)
