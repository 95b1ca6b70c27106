"""Crops against the per-image loops of tests/reference/augment.py, Pillow, and the stated distributions."""

import itertools

import numpy as np
import pytest
import torch
from image_cases import N, assert_images_match, distance_from_uniform, keys_of, random_images
from reference import augment as slow
from torch import Tensor

from bicovg.data import augment as fast
from bicovg.data import crops
from bicovg.data.augment import Augmentation, draw_parameters, make_constants
from bicovg.draws import draw_uniforms


def draw_boxes(keys: Tensor, size: tuple[int, int]) -> Tensor:
    recipe = Augmentation(resized_crop=12)
    drawn = draw_parameters(keys, make_constants(recipe, torch.zeros(3), torch.ones(3)))
    place, areas, ratios = drawn[:, :2], drawn[:, fast.AREA : fast.RATIO], drawn[:, fast.RATIO :]
    return crops.draw_boxes(place, areas, ratios, torch.tensor(size).expand(len(keys), 2))


@pytest.mark.parametrize(("shape", "pad"), [((7, 5, 3), 2), ((8, 8, 1), 3), ((1, 4, 3), 1), ((6, 3, 3), 7)])
def test_crop_and_flip_equal_the_loop_at_every_offset(shape: tuple[int, int, int], pad: int) -> None:
    cases = list(itertools.product(range(2 * pad + 1), range(2 * pad + 1), [False, True]))
    images = random_images(len(cases), *shape)
    top, left, flip = (torch.tensor(column) for column in zip(*cases, strict=True))
    result = crops.crop_padded(images, top.int(), left.int(), pad, flip)
    expected = [slow.crop_padded(i, *case[:2], pad, case[2]) for i, case in zip(images.numpy(), cases, strict=True)]
    assert np.array_equal(result.numpy(), np.stack(expected))


@pytest.mark.parametrize("size", [(32, 32), (37, 50), (256, 341), (9, 60), (8, 200), (200, 8), (1, 1)])
def test_crop_boxes_equal_the_loop(size: tuple[int, int]) -> None:
    keys = keys_of(1000)
    expected = [list(slow.draw_box(row, *size)) for row in draw_uniforms(keys, 32).tolist()]
    assert draw_boxes(keys, size).tolist() == expected


def test_resized_crop_equals_the_loop_and_pillow() -> None:
    image_module = pytest.importorskip("PIL.Image")
    images = random_images(6, 23, 31)
    boxes = [(0, 0, 23, 31), (3, 5, 4, 3), (20, 28, 3, 3), (1, 2, 17, 16), (22, 30, 1, 1), (5, 0, 10, 31)]
    flips = [False, True, False, True, False, True]
    result = crops.crop_resized(images, torch.tensor(boxes), 10, torch.tensor(flips))
    cases = list(zip(images.numpy(), boxes, flips, strict=True))
    assert_images_match(result, [slow.crop_resized(image, box, 10, flip) for image, box, flip in cases])
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
    result = crops.resize_centre(images, 16, 13, torch.tensor(size).expand(2, 2))
    assert_images_match(result, [slow.resize_centre(image, 16, 13) for image in images.numpy()])
    height, width = (16 * side // min(size) for side in size)
    top, left = round((height - 13) / 2), round((width - 13) / 2)
    bilinear = image_module.Resampling.BILINEAR
    large = [image_module.fromarray(image).resize((width, height), bilinear) for image in images.numpy()]
    pillow = [np.asarray(image)[top : top + 13, left : left + 13] / 255 for image in large]
    assert_images_match(result, pillow, atol=1.01 / 255)


def test_an_image_that_already_has_the_short_side_is_only_cropped() -> None:
    images = random_images(3, 16, 21)
    result = crops.resize_centre(images, 16, 12, torch.tensor([16, 21]).expand(3, 2))
    assert torch.equal(result, images[:, 2:14, 4:16].permute(0, 3, 1, 2) / 255)


def test_resized_crops_keep_area_ratio_and_place_within_their_ranges() -> None:
    side = 1000
    boxes = draw_boxes(keys_of(N), (side, side)).double()
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
