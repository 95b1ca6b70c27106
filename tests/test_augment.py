"""Augmentation against the per-image loops of tests/reference/augment.py, Pillow, and the stated distributions."""

import colorsys
import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bicovg.data import augment as fast
from bicovg.data.augment import Augmentation, augment, draw_augmentation
from bicovg.draws import AUGMENT, make_keys
from bicovg.errors import UserError
from tests.reference import augment as slow

CIFAR = Augmentation(crop_pad=4, flip=True, brightness=0.4, contrast=0.4, saturation=0.4, grayscale=0.2)
TINY = Augmentation(crop_pad=8, flip=True, brightness=0.4, contrast=0.4, saturation=0.4)
IMAGENET = Augmentation(resized_crop=12, flip=True, brightness=0.4, contrast=0.4, saturation=0.4)
HUE = Augmentation(crop_pad=1, brightness=0.9, contrast=0.9, saturation=1.5, hue=0.5, grayscale=0.3)
MEAN, STD = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2, 0.25, 0.3])
N = 10_000


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


@pytest.mark.parametrize(("shape", "pad"), [((7, 5, 3), 2), ((8, 8, 1), 3), ((1, 4, 3), 1), ((6, 3, 3), 7)])
def test_crop_and_flip_equal_the_loop_at_every_offset(shape: tuple[int, int, int], pad: int) -> None:
    cases = list(itertools.product(range(2 * pad + 1), range(2 * pad + 1), [False, True]))
    images = random_images(len(cases), *shape)
    top, left, flip = (torch.tensor(column) for column in zip(*cases, strict=True))
    result = fast.crop_padded(images, top, left, pad, flip)
    expected = [slow.crop_padded(i, *case[:2], pad, case[2]) for i, case in zip(images.numpy(), cases, strict=True)]
    assert np.array_equal(result.numpy(), np.stack(expected))
    assert torch.equal(fast.flip_horizontal(images, flip)[flip], images[flip].flip(2))
    assert torch.equal(fast.flip_horizontal(images, flip)[~flip], images[~flip])


@pytest.mark.parametrize("size", [(32, 32), (37, 50), (256, 341), (9, 60), (8, 200), (200, 8), (1, 1)])
def test_crop_boxes_equal_the_loop(size: tuple[int, int]) -> None:
    draws = draw_augmentation(keys_of(1000), IMAGENET)
    boxes = fast.draw_boxes(draws, torch.tensor(size).expand(1000, 2))
    assert boxes.tolist() == [list(slow.draw_box(row, *size)) for row in draws.tolist()]


def test_resized_crop_equals_the_loop_and_pillow() -> None:
    image_module = pytest.importorskip("PIL.Image")
    images = random_images(6, 23, 31)
    boxes = [(0, 0, 23, 31), (3, 5, 4, 3), (20, 28, 3, 3), (1, 2, 17, 16), (22, 30, 1, 1), (5, 0, 10, 31)]
    flips = [False, True, False, True, False, True]
    result = fast.crop_resized(images, torch.tensor(boxes), 10, torch.tensor(flips))
    cases = list(zip(images.numpy(), boxes, flips, strict=True))
    assert_images_match(result, [slow.crop_resized(image, box, 10, flip) for image, box, flip in cases])
    assert result.is_contiguous(memory_format=torch.channels_last)
    pillow = []
    for image, (top, left, height, width), flip in cases:
        cut = image_module.fromarray(image).crop((left, top, left + width, top + height))
        small = np.asarray(cut.resize((10, 10), image_module.Resampling.BILINEAR))
        pillow.append((small[:, ::-1] if flip else small) / 255)
    assert_images_match(result, pillow, atol=1.01 / 255)  # Pillow rounds to bytes after each axis


@pytest.mark.parametrize("size", [(20, 27), (33, 16), (16, 16), (11, 9)])
def test_test_transform_equals_the_loop_and_pillow(size: tuple[int, int]) -> None:
    image_module = pytest.importorskip("PIL.Image")
    images = random_images(2, *size)
    result = fast.resize_centre(images, 16, 13, torch.tensor(size).expand(2, 2), None)
    assert_images_match(result, [slow.resize_centre(image, 16, 13) for image in images.numpy()])
    height, width = (16 * side // min(size) for side in size)
    top, left = round((height - 13) / 2), round((width - 13) / 2)
    bilinear = image_module.Resampling.BILINEAR
    large = [image_module.fromarray(image).resize((width, height), bilinear) for image in images.numpy()]
    pillow = [np.asarray(image)[top : top + 13, left : left + 13] / 255 for image in large]
    assert_images_match(result, pillow, atol=1.01 / 255)


def test_an_image_that_already_has_the_short_side_is_only_cropped() -> None:
    images = random_images(3, 16, 21)
    result = fast.resize_centre(images, 16, 12, torch.tensor([16, 21]).expand(3, 2), None)
    assert torch.equal(result, images[:, 2:14, 4:16].permute(0, 3, 1, 2) / 255)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ["adjust_brightness", "adjust_contrast", "adjust_saturation", "adjust_hue"])
def test_each_colour_operation_equals_the_loop(name: str, channels: int) -> None:
    factors = [-0.5, -0.25, 0.0, 0.1, 1 / 3, 0.5] if name == "adjust_hue" else [0.0, 0.25, 0.6, 1.0, 1.4, 3.0]
    images = random_images(6, 5, 3, channels).numpy() / 255
    x = torch.from_numpy(images).float().permute(0, 3, 1, 2)
    result = getattr(fast, name)(x, torch.tensor(factors))
    loop = getattr(slow, name)
    assert_images_match(result, [loop(image, factor) for image, factor in zip(images, factors, strict=True)])


def test_grayscale_equals_the_loop_and_spares_the_others() -> None:
    images = random_images(4, 5, 3).numpy() / 255
    x = torch.from_numpy(images).float().permute(0, 3, 1, 2)
    result = fast.to_grayscale(x, torch.tensor([True, False, True, False]))
    assert_images_match(result[::2], [slow.to_grayscale(image) for image in images[::2]])
    assert torch.equal(result[1::2], x[1::2])


@pytest.mark.parametrize(
    "recipe", [CIFAR, TINY, IMAGENET, HUE, Augmentation(), Augmentation(short_side=12, centre_crop=9)]
)
@pytest.mark.parametrize("shape", [(16, 16, 3), (13, 19, 3), (8, 8, 1)])
def test_a_whole_recipe_equals_the_loop(recipe: Augmentation, shape: tuple[int, int, int]) -> None:
    images = random_images(12, *shape)
    draws = draw_augmentation(keys_of(12), recipe)
    mean, std = MEAN[: shape[2]], STD[: shape[2]]
    result = augment(images, draws, recipe, mean, std)
    expected = [
        slow.augment(image, row, dataclasses.asdict(recipe), mean.tolist(), std.tolist())
        for image, row in zip(images.numpy(), draws.tolist(), strict=True)
    ]
    assert result.dtype == torch.float32
    assert result.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(result.double(), torch.from_numpy(np.stack(expected)), rtol=0, atol=2e-5)


@pytest.mark.parametrize("recipe", [IMAGENET, Augmentation(short_side=12, centre_crop=9)])
def test_what_surrounds_an_image_on_its_canvas_has_no_influence(recipe: Augmentation) -> None:
    sizes = torch.tensor([[13, 19], [17, 12], [12, 12], [20, 14]])
    canvas, draws = random_images(4, 20, 24), draw_augmentation(keys_of(4), recipe)
    result = augment(canvas, draws, recipe, MEAN, STD, sizes)
    for b, (height, width) in enumerate(sizes.tolist()):
        alone = augment(canvas[b : b + 1, :height, :width], draws[b : b + 1], recipe, MEAN, STD)
        torch.testing.assert_close(result[b : b + 1], alone, rtol=0, atol=2e-5)


def test_every_crop_offset_is_equally_likely() -> None:
    pad, side = 4, 9
    images = torch.zeros(N, side, side, 1, dtype=torch.uint8)
    images[:, pad, pad] = 255  # lands at (2 pad - top, 2 pad - left)
    draws = draw_augmentation(keys_of(N), Augmentation(crop_pad=pad))
    found = augment(images, draws, Augmentation(crop_pad=pad), torch.zeros(1), torch.ones(1)).flatten(1)
    assert (found.sum(dim=1) == 1).all()
    counts = torch.bincount(found.argmax(dim=1), minlength=side * side).double()
    expected = N / (2 * pad + 1) ** 2
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert counts.min() > 0
    assert chi_square < 124.8  # 80 degrees of freedom, 0.1 %


def test_flips_happen_half_of_the_time_and_grayscale_as_often_as_stated() -> None:
    images = torch.zeros(N, 1, 2, 3, dtype=torch.uint8)
    images[:, :, 0, 0] = 255
    recipe = Augmentation(flip=True, grayscale=0.2)
    x = augment(images, draw_augmentation(keys_of(N), recipe), recipe, torch.zeros(3), torch.ones(3))
    flipped, gray = x[:, 0, 0, 1] > 0, x[:, 1].amax(dim=(1, 2)) > 0
    assert abs(flipped.double().mean() - 0.5) < 0.02
    assert abs(gray.double().mean() - 0.2) < 0.016
    assert abs((flipped & gray).double().mean() - 0.1) < 0.012


@pytest.mark.parametrize("field", ["brightness", "contrast", "saturation", "hue"])
@pytest.mark.parametrize("strength", [0.4, 1.5])
def test_jitter_factors_are_uniform_over_their_range(field: str, strength: float) -> None:
    strength = min(strength, 0.5) if field == "hue" else strength
    settings: dict[str, Any] = {field: strength}
    recipe = Augmentation(**settings)
    pixels = torch.tensor([[90, 60, 60], [60, 60, 60]], dtype=torch.uint8)
    x = augment(pixels.expand(N, 1, 2, 3), draw_augmentation(keys_of(N), recipe), recipe, torch.zeros(3), torch.ones(3))
    low, high = max(0.0, 1 - strength), 1 + strength
    if field == "brightness":
        value = x[:, 1, 0, 0] / (60 / 255)
    elif field == "contrast":
        value = (x[:, 0, 0, 0] - x[:, 0, 0, 1]) / (30 / 255)
    elif field == "saturation":
        value = (x[:, 0, 0, 0] - x[:, 1, 0, 0]) / (30 / 255)
    else:
        hues = [colorsys.rgb_to_hsv(*pixel)[0] for pixel in x[:, :, 0, 0].tolist()]
        value = torch.tensor([hue - 1 if hue > 0.5 else hue for hue in hues])
        low, high = -strength, strength
    unit = (value - low) / (high - low)
    assert unit.min() > -1e-4
    assert unit.max() < 1 + 1e-4
    assert distance_from_uniform(unit) < 2.5


def test_every_order_of_the_colour_operations_is_equally_likely() -> None:
    draws = draw_augmentation(keys_of(N), CIFAR)
    order = draws[:, fast.RANK : fast.RANK + 4].argsort(dim=1)
    counts = torch.bincount((order * torch.tensor([64, 16, 4, 1])).sum(dim=1)).double()
    counts = counts[counts > 0]
    assert len(counts) == 24
    assert float(((counts - N / 24) ** 2 / (N / 24)).sum()) < 49.7  # 23 degrees of freedom, 0.1 %


def test_resized_crops_keep_area_ratio_and_place_within_their_ranges() -> None:
    side = 1000
    boxes = fast.draw_boxes(draw_augmentation(keys_of(N), IMAGENET), torch.full((N, 2), side)).double()
    top, left, height, width = boxes.unbind(1)
    area, ratio = height * width / side**2, width / height
    assert 0.079 < area.min() < 0.082
    assert 0.95 < area.max() <= 1
    assert 0.74 < ratio.min() < 0.76
    assert 1.32 < ratio.max() < 1.35
    fits_always = area < 0.75  # whatever the ratio, so no try of such an area is ever rejected
    assert distance_from_uniform((area[fits_always] - 0.08) / 0.67) < 2.5
    logs = ratio[area < 0.7].log() / np.log(4 / 3) / 2 + 0.5
    assert distance_from_uniform(logs) < 2.5
    for start, extent in ((top, height), (left, width)):
        assert start.min() >= 0
        assert (start + extent).max() == side
        assert distance_from_uniform((start + 0.5) / (side - extent + 1)) < 2.5


def test_samples_of_one_batch_get_different_draws() -> None:
    images = random_images(1, 16, 16).expand(64, -1, -1, -1)
    for recipe in (CIFAR, TINY, IMAGENET):
        draws = draw_augmentation(keys_of(64), recipe)
        looks = augment(images, draws, recipe, MEAN, STD).flatten(1)
        assert len({tuple(row) for row in draws.tolist()}) == 64
        assert len({tuple(row) for row in looks.tolist()}) == 64


def test_a_sample_does_not_depend_on_its_batch() -> None:
    images, keys = random_images(32, 16, 16), keys_of(32)
    chosen = torch.tensor([5, 30, 7])
    for recipe in (CIFAR, HUE, IMAGENET):
        whole = augment(images, draw_augmentation(keys, recipe), recipe, MEAN, STD)
        few = augment(images[chosen], draw_augmentation(keys[chosen], recipe), recipe, MEAN, STD)
        assert torch.equal(whole[chosen], few)


def test_switching_an_operation_on_leaves_the_other_draws_alone() -> None:
    assert torch.equal(draw_augmentation(keys_of(8), CIFAR), draw_augmentation(keys_of(8), IMAGENET)[:, :12])


def test_a_senseless_augmentation_is_refused() -> None:
    for settings in ({"crop_pad": -1}, {"hue": 0.6}, {"grayscale": 1.5}, {"contrast": -0.1}):
        with pytest.raises(UserError, match="out of range"):
            Augmentation(**settings)
    with pytest.raises(UserError, match="several crops"):
        Augmentation(crop_pad=4, resized_crop=32)
    for side, crop in ((256, 0), (0, 224), (200, 224)):
        with pytest.raises(UserError, match="centre_crop"):
            Augmentation(short_side=side, centre_crop=crop)


def test_images_of_several_sizes_need_one_output_size() -> None:
    with pytest.raises(UserError, match="resized_crop"):
        augment(random_images(2, 8, 8), draw_augmentation(keys_of(2), CIFAR), CIFAR, MEAN, STD, torch.full((2, 2), 8))


COMPILED = """
import torch
from bicovg.data.augment import Augmentation
from bicovg.data.loader import make_batch, sample_keys
colour = dict(flip=True, brightness=0.4, contrast=0.4, saturation=0.4, grayscale=0.2)
recipes = [Augmentation(crop_pad=2, **colour), Augmentation(crop_pad=2, hue=0.1), Augmentation(),
           Augmentation(resized_crop=6, **colour), Augmentation(short_side=8, centre_crop=6)]
images = torch.randint(0, 256, (4, 8, 9, 3), dtype=torch.uint8)
mean, std, indices = torch.rand(3), torch.rand(3) + 0.1, torch.tensor([3, 1, 4, 5])
for recipe in recipes:
    def build(images, indices, epoch):
        return make_batch(images, sample_keys(7, epoch, indices), recipe, mean, std)
    compiled = torch.compile(build, backend="eager", fullgraph=True)
    for epoch in (torch.tensor(0), torch.tensor(1)):
        assert torch.equal(compiled(images, indices, epoch), build(images, indices, epoch)), recipe
print("no graph break")
"""


def test_nothing_breaks_the_graph_under_compile() -> None:
    """In a process of its own: the shape checks of the test run are no part of what users compile."""
    root = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "no graph break\n", done.stderr
