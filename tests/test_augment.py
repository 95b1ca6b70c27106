"""Augmentation against the per-image loops of tests/reference/augment.py and the stated distributions."""

import colorsys
import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_cases import N, assert_images_match, distance_from_uniform, keys_of, random_images
from reference import augment as slow
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bicovg.data import augment as fast
from bicovg.data import crops
from bicovg.data.augment import Augmentation, draw_parameters, make_constants
from bicovg.data.images import TensorImages
from bicovg.data.loader import Loader
from bicovg.draws import draw_uniforms
from bicovg.errors import UserError
from bicovg.recipes import get_recipe

CIFAR = Augmentation(crop_pad=4, flip=True, brightness=0.4, contrast=0.4, saturation=0.4, grayscale=0.2)
TINY = Augmentation(crop_pad=8, flip=True, brightness=0.4, contrast=0.4, saturation=0.4)
IMAGENET = Augmentation(resized_crop=12, flip=True, brightness=0.4, contrast=0.4, saturation=0.4)
HUE = Augmentation(crop_pad=1, brightness=0.9, contrast=0.9, saturation=1.5, hue=0.5, grayscale=0.3)
MEAN, STD = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2, 0.25, 0.3])


def augment(images: Tensor, keys: Tensor, recipe: Augmentation, mean: Any = None, std: Any = None) -> Tensor:
    """With the identity as normalisation where none is given."""
    channels = images.shape[3]
    mean = torch.zeros(channels) if mean is None else mean
    std = torch.ones(channels) if std is None else std
    return fast.augment(images, keys, recipe, make_constants(recipe, mean, std))


def parameters_of(keys: Tensor, recipe: Augmentation) -> Tensor:
    return draw_parameters(keys, make_constants(recipe, MEAN, STD))


def loop(images: Tensor, keys: Tensor, recipe: Augmentation, mean: Tensor, std: Tensor) -> Tensor:
    """The reference, image by image, given the same draws."""
    rows = draw_uniforms(keys, 32).tolist()
    settings = dataclasses.asdict(recipe), mean.tolist(), std.tolist()
    return torch.from_numpy(
        np.stack([slow.augment(i, row, *settings) for i, row in zip(images.numpy(), rows, strict=True)])
    )


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("field", ["brightness", "contrast", "saturation", "hue", "grayscale", "flip", "crop_pad"])
@pytest.mark.parametrize("strength", [0.25, 0.5, 2.0])
def test_each_operation_alone_equals_the_loop(field: str, strength: float, channels: int) -> None:
    limits = {"hue": 0.5, "grayscale": 1.0}
    value: Any = {"flip": True, "crop_pad": int(4 * strength)}.get(field, min(strength, limits.get(field, strength)))
    recipe, images, keys = Augmentation(**{field: value}), random_images(12, 5, 3, channels), keys_of(12)
    result, expected = augment(images, keys, recipe), loop(images, keys, recipe, torch.zeros(3), torch.ones(3))
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=2e-6)
    untouched = augment(images, keys, Augmentation())
    assert not torch.equal(result, untouched) or (channels == 1 and field in ("saturation", "hue", "grayscale"))


def test_colour_operations_of_equal_rank_keep_their_order() -> None:
    recipe = Augmentation(brightness=0.9, contrast=0.9, saturation=0.9, hue=0.5)
    images, drawn = random_images(6, 4, 4), parameters_of(keys_of(6), recipe)
    ranks = drawn[:, fast.RANK : fast.GRAYSCALE]
    ranks -= draw_uniforms(keys_of(6), 11)[:, 7:] - 0.5
    draws = draw_uniforms(keys_of(6), 12)
    draws[:, 7:11] = 0.5
    x = crops.to_planes(images)
    expected = [
        slow.jitter_colour(i / 255, row, recipe.strengths)
        for i, row in zip(images.numpy(), draws.tolist(), strict=True)
    ]
    gray = make_constants(recipe, MEAN, STD).gray
    assert_images_match(fast.jitter_colour(x, drawn, recipe.strengths, gray), expected, atol=1e-5)


@pytest.mark.parametrize(
    "recipe", [CIFAR, TINY, IMAGENET, HUE, Augmentation(), Augmentation(short_side=12, centre_crop=9)]
)
@pytest.mark.parametrize("shape", [(16, 16, 3), (13, 19, 3), (8, 8, 1)])
def test_a_whole_recipe_equals_the_loop(recipe: Augmentation, shape: tuple[int, int, int]) -> None:
    images, keys = random_images(12, *shape), keys_of(12)
    mean, std = MEAN[: shape[2]], STD[: shape[2]]
    result = augment(images, keys, recipe, mean, std)
    assert result.dtype == torch.float32
    assert result.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(result.double(), loop(images, keys, recipe, mean, std), rtol=0, atol=2e-5)


@pytest.mark.parametrize("recipe", [IMAGENET, Augmentation(short_side=12, centre_crop=9)])
def test_what_surrounds_an_image_on_its_canvas_has_no_influence(recipe: Augmentation) -> None:
    sizes = torch.tensor([[13, 19], [17, 12], [12, 12], [20, 14]])
    canvas, keys = random_images(4, 20, 24), keys_of(4)
    result = fast.augment(canvas, keys, recipe, make_constants(recipe, MEAN, STD), sizes)
    for b, (height, width) in enumerate(sizes.tolist()):
        alone = augment(canvas[b : b + 1, :height, :width], keys[b : b + 1], recipe, MEAN, STD)
        torch.testing.assert_close(result[b : b + 1], alone, rtol=0, atol=2e-5)


def test_every_crop_offset_is_equally_likely() -> None:
    pad, side = 4, 9
    images = torch.zeros(N, side, side, 1, dtype=torch.uint8)
    images[:, pad, pad] = 255  # lands at (2 pad - top, 2 pad - left)
    found = augment(images, keys_of(N), Augmentation(crop_pad=pad)).flatten(1)
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
    x = augment(images, keys_of(N), recipe)
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
    x = augment(pixels.expand(N, 1, 2, 3), keys_of(N), recipe)
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
    order = parameters_of(keys_of(N), HUE)[:, fast.RANK : fast.GRAYSCALE].argsort(dim=1)
    counts = torch.bincount((order * torch.tensor([64, 16, 4, 1])).sum(dim=1)).double()
    counts = counts[counts > 0]
    assert len(counts) == 24
    assert float(((counts - N / 24) ** 2 / (N / 24)).sum()) < 49.7  # 23 degrees of freedom, 0.1 %


def test_samples_of_one_batch_get_different_draws() -> None:
    images = random_images(1, 16, 16).expand(64, -1, -1, -1)
    for recipe in (CIFAR, TINY, IMAGENET):
        looks = augment(images, keys_of(64), recipe, MEAN, STD).flatten(1)
        spread = [column for column in parameters_of(keys_of(64), recipe).T if column.min() < column.max()]
        assert len(spread) == (31 if recipe.resized_crop else 11)  # all but hue, which is off
        assert all(len(set(column.tolist())) > 60 for column in spread)
        assert len({tuple(row) for row in looks.tolist()}) == 64


def test_a_sample_does_not_depend_on_its_batch() -> None:
    images, keys = random_images(32, 16, 16), keys_of(32)
    chosen = torch.tensor([5, 30, 7])
    for recipe in (CIFAR, HUE, IMAGENET):
        whole = augment(images, keys, recipe, MEAN, STD)
        few = augment(images[chosen], keys[chosen], recipe, MEAN, STD)
        assert torch.equal(whole[chosen], few)


def test_switching_an_operation_on_leaves_the_other_draws_alone() -> None:
    jitter, more = parameters_of(keys_of(8), TINY), parameters_of(keys_of(8), dataclasses.replace(IMAGENET, hue=0.1))
    unchanged = [fast.FLIP, *range(fast.STRENGTH, fast.STRENGTH + fast.HUE), *range(fast.RANK, fast.RANK + fast.HUE)]
    assert torch.equal(jitter[:, unchanged], more[:, unchanged])


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
        fast.augment(random_images(2, 8, 8), keys_of(2), CIFAR, make_constants(CIFAR, MEAN, STD), torch.full((2, 2), 8))


class CountKernels(TorchDispatchMode):
    """Counts what is launched on a GPU: operations that are not views."""

    views = ("view", "reshape_alias", "unsqueeze", "select", "slice", "permute", "transpose", "expand", "unbind")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__.strip("_").removeprefix("unsafe_") not in self.views
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("recipe", "bound"), [("cifar100-bicovg", 105), ("tiny-imagenet-bicovg", 101), ("imagenet100-bicovg", 216)]
)
def test_a_batch_takes_a_bounded_number_of_kernels(recipe: str, bound: int) -> None:
    """Uncompiled, from indices to network input; 44 of them are the three hashes of epoch, index and column."""
    data = get_recipe(recipe).data
    source = TensorImages(random_images(4, data.image_size, data.image_size), torch.zeros(4))
    augmentation = Augmentation(**dataclasses.asdict(data.augment))
    loader = Loader(source, 4, seed=0, augmentation=augmentation, mean=MEAN, std=STD)
    indices, epoch = torch.arange(4), torch.tensor(0)
    with CountKernels() as counter:
        loader.assemble(indices, epoch)
    assert 0 < counter.count <= bound


COMPILED = """
import sys
import torch
from bicovg.data.augment import Augmentation, augment, make_constants
from bicovg.data.loader import sample_keys
from bicovg.draws import AUGMENT, make_keys
colour = dict(flip=True, brightness=0.4, contrast=0.4, saturation=0.4, grayscale=0.2)
recipes = [Augmentation(crop_pad=2, **colour), Augmentation(resized_crop=6, flip=True),
           Augmentation(crop_pad=2, hue=0.1), Augmentation(), Augmentation(short_side=8, centre_crop=6)]
images = torch.randint(0, 256, (4, 8, 9, 3), dtype=torch.uint8)
root = make_keys(7, AUGMENT)
indices = torch.tensor([3, 1, 4, 5])
backend, count = sys.argv[1], int(sys.argv[2])
for recipe in recipes[:count]:
    constants = make_constants(recipe, torch.rand(3), torch.rand(3) + 0.1)
    def build(images, indices, epoch):
        return augment(images, sample_keys(root, epoch, indices), recipe, constants)
    compiled = torch.compile(build, backend=backend, fullgraph=True, dynamic=False)
    for epoch in (torch.tensor(0), torch.tensor(1)):
        result, expected = compiled(images, indices, epoch), build(images, indices, epoch)
        assert result.stride() == expected.stride()
        torch.testing.assert_close(result, expected, rtol=0, atol=2e-5)
print("no graph break")
"""


@pytest.mark.parametrize(("backend", "recipes"), [("aot_eager", 5), ("inductor", 2)])
def test_nothing_breaks_the_graph_under_compile(backend: str, recipes: int) -> None:
    """In a process of its own: the shape checks of the test run are no part of what users compile."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler, and there is no g++ here")
    root = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", COMPILED, backend, str(recipes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "no graph break\n", done.stderr
