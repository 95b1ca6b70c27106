"""Augmentation of one image at a time, one pixel at a time, in Python floats.

Images are nested as (H, W, C) arrays; ``draws`` is one row of uniforms with the columns docs/augmentation.md lists.
"""

import colorsys
import math

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.float64]


def crop_padded(image: NDArray[np.uint8], top: int, left: int, pad: int, flip: bool) -> NDArray[np.uint8]:
    """Build the padded image, cut H x W out of it, mirror the cut."""
    H, W, C = image.shape
    padded = np.zeros((H + 2 * pad, W + 2 * pad, C), np.uint8)
    padded[pad : pad + H, pad : pad + W] = image
    cut = padded[top : top + H, left : left + W]
    return cut[:, ::-1] if flip else cut


def draw_box(draws: list[float], height: int, width: int) -> tuple[int, int, int, int]:
    """Random resized crop as torchvision words it: ten tries, then the fallback to a centre crop."""
    for i in range(10):
        area = height * width * (0.08 + 0.92 * draws[12 + i])
        low, high = math.log(3 / 4), math.log(4 / 3)
        ratio = math.exp(low + (high - low) * draws[22 + i])
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return math.floor(draws[0] * (height - h + 1)), math.floor(draws[1] * (width - w + 1)), h, w
    h, w = height, width
    if width / height < 3 / 4:
        h = round(width / (3 / 4))
    elif width / height > 4 / 3:
        w = round(height * (4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w


def resize_axis(line: Image, resized: int) -> Image:
    """Antialiased bilinear resize along the first axis."""
    length = len(line)
    scale = length / resized
    support = max(scale, 1.0)
    result = []
    for k in range(resized):
        centre = (k + 0.5) * scale
        total, weights = np.zeros(line.shape[1:]), 0.0
        for i in range(length):
            weight = max(0.0, 1 - abs(i + 0.5 - centre) / support)
            total, weights = total + weight * line[i], weights + weight
        result.append(total / weights)
    return np.array(result)


def resize(image: Image, height: int, width: int) -> Image:
    """Antialiased bilinear resize to height x width."""
    return resize_axis(resize_axis(image, height).swapaxes(0, 1), width).swapaxes(0, 1)


def crop_resized(image: NDArray[np.uint8], box: tuple[int, int, int, int], size: int, flip: bool) -> Image:
    """Cut first, then resize: pixels outside the box have no say."""
    top, left, height, width = box
    small = resize(image[top : top + height, left : left + width] / 255, size, size)
    return small[:, ::-1] if flip else small


def resize_centre(image: NDArray[np.uint8], short_side: int, size: int) -> Image:
    """Short side to ``short_side``, long side truncated to a whole pixel, centre cut."""
    H, W, _ = image.shape
    if H <= W:
        height, width = short_side, int(short_side * W / H)
    else:
        height, width = int(short_side * H / W), short_side
    top, left = round((height - size) / 2), round((width - size) / 2)
    return resize(image / 255, height, width)[top : top + size, left : left + size]


def gray_pixel(pixel: Image) -> float:
    if len(pixel) == 1:
        return float(pixel[0])
    return float(0.2989 * pixel[0] + 0.587 * pixel[1] + 0.114 * pixel[2])


def map_pixels(image: Image, function: object) -> Image:
    H, W, C = image.shape
    assert callable(function)
    pixels = [[np.clip(function(image[i, j]), 0.0, 1.0) for j in range(W)] for i in range(H)]
    return np.array(pixels, dtype=np.float64).reshape(H, W, C)


def adjust_brightness(image: Image, factor: float) -> Image:
    return map_pixels(image, lambda pixel: factor * pixel)


def adjust_contrast(image: Image, factor: float) -> Image:
    grays = [gray_pixel(pixel) for row in image for pixel in row]
    mean = sum(grays) / len(grays)
    return map_pixels(image, lambda pixel: factor * pixel + (1 - factor) * mean)


def adjust_saturation(image: Image, factor: float) -> Image:
    return map_pixels(image, lambda pixel: factor * pixel + (1 - factor) * gray_pixel(pixel))


def adjust_hue(image: Image, shift: float) -> Image:
    def turn(pixel: Image) -> Image:
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel.tolist())
        return np.array(colorsys.hsv_to_rgb((hue + shift) % 1.0, saturation, value))

    return image if image.shape[2] == 1 else map_pixels(image, turn)


def to_grayscale(image: Image) -> Image:
    return map_pixels(image, lambda pixel: np.full(len(pixel), gray_pixel(pixel)))


def jitter_colour(image: Image, draws: list[float], strengths: tuple[float, ...]) -> Image:
    """The four operations in ascending order of columns 7 to 10."""
    operations = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)
    for op in sorted(range(4), key=lambda op: (draws[7 + op], op)):
        strength, uniform = strengths[op], draws[3 + op]
        if strength == 0:
            continue
        low, high = (-strength, strength) if op == 3 else (max(0.0, 1 - strength), 1 + strength)
        image = operations[op](image, low + (high - low) * uniform)
    return image


def augment(
    image: NDArray[np.uint8], draws: list[float], settings: dict[str, float], mean: list[float], std: list[float]
) -> Image:
    """Everything for one image; ``settings`` are the fields of an Augmentation. Returns (C, H, W)."""
    flip = bool(settings["flip"]) and draws[2] < 0.5
    pad, size = int(settings["crop_pad"]), int(settings["resized_crop"])
    if size:
        x = crop_resized(image, draw_box(draws, *image.shape[:2]), size, flip)
    elif settings["centre_crop"]:
        x = resize_centre(image, int(settings["short_side"]), int(settings["centre_crop"]))
    else:
        offsets = [math.floor(draws[column] * (2 * pad + 1)) for column in (0, 1)]
        x = crop_padded(image, offsets[0], offsets[1], pad, flip) / 255
    x = jitter_colour(x, draws, tuple(settings[k] for k in ("brightness", "contrast", "saturation", "hue")))
    if draws[11] < settings["grayscale"]:
        x = to_grayscale(x)
    return np.stack([(x[:, :, c] - mean[c]) / std[c] for c in range(x.shape[2])])
