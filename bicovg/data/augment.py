"""Augmentation per sample on the batch: uint8 (B, H, W, C) in, normalised float32 (B, C, H, W) out.

Every random choice is a column of ``draws``, a function of the sample's key alone, so a sample looks the same
in whatever batch, process or prefetch slot it comes. All functions are branch-free tensor arithmetic without
host synchronisation: they run on any device, compiled with ``fullgraph=True``, and in a captured CUDA graph.
Semantics follow torchvision's transforms; docs/augmentation.md lists the differences.

Legend: B batch, H W image, C channels, S output size. Outputs are channels_last in memory.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from bicovg.draws import draw_uniforms
from bicovg.errors import UserError

# Columns of ``draws``. A sample's column does not change when other operations are switched on or off.
TOP, LEFT, FLIP = 0, 1, 2
STRENGTH = 3  # four: brightness, contrast, saturation, hue
RANK = 7  # four: a sample applies its colour operations in ascending order of these
GRAYSCALE = 11
ATTEMPTS = 12  # resized crop only: ten areas, then ten aspect ratios

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
CROP_TRIES, CROP_AREA, CROP_RATIO = 10, (0.08, 1.0), (3 / 4, 4 / 3)

Bytes = UInt8[Tensor, "b h w c"]
Images = Float[Tensor, "b c h w"]
Square = Float[Tensor, "b c s s"]
Draws = Float[Tensor, "b n"]
Pairs = Int[Tensor, "b 2"]
Factor = Float[Tensor, " b"]
Whole = Int[Tensor, " b"]
Mask = Bool[Tensor, " b"]
Stat = Float[Tensor, " c"]


@dataclass(frozen=True)
class Augmentation:
    """What is done to an image before it is normalised; the default does nothing, 0 switches a field off.

    Attributes:
        crop_pad: zeros around the image before a random crop of its own size.
        flip: mirror left-right with probability 1/2.
        resized_crop: output size of a random resized crop.
        brightness: factor drawn from [max(0, 1 - v), 1 + v]; likewise ``contrast`` and ``saturation``.
        hue: shift drawn from [-v, v], in turns of the colour circle.
        grayscale: probability of losing colour.
        short_side: evaluation: the short side after a resize, before a central square of ``centre_crop``.
    """

    crop_pad: int = 0
    flip: bool = False
    resized_crop: int = 0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    grayscale: float = 0.0
    short_side: int = 0
    centre_crop: int = 0

    def __post_init__(self) -> None:
        crops = (self.crop_pad, self.resized_crop, self.centre_crop)
        if min(*crops, *self.strengths, self.grayscale) < 0 or self.hue > 0.5 or self.grayscale > 1:
            raise UserError(f"{self} is out of range: no field below 0, hue at most 0.5, grayscale at most 1")
        if sum(crop > 0 for crop in crops) > 1:
            raise UserError(f"{self} asks for several crops: keep one of crop_pad, resized_crop, centre_crop")
        if (self.short_side > 0) != (self.centre_crop > 0) or self.short_side < self.centre_crop:
            raise UserError(f"{self} needs both short_side and centre_crop, the crop no larger than the side")

    @property
    def strengths(self) -> tuple[float, float, float, float]:
        return (self.brightness, self.contrast, self.saturation, self.hue)

    @property
    def output_size(self) -> int:
        return self.resized_crop or self.centre_crop


def draw_augmentation(keys: Int[Tensor, " b"], augmentation: Augmentation) -> Draws:
    """All uniforms a sample needs, one row per key; the columns are named at the top of this module."""
    return draw_uniforms(keys, ATTEMPTS + 2 * CROP_TRIES if augmentation.resized_crop else ATTEMPTS)


def pick(uniforms: Factor, count: int | Whole) -> Whole:
    """An integer in [0, count) per sample, each equally likely."""
    return (uniforms.double() * count).long()


def crop_padded(images: Bytes, top: Whole, left: Whole, pad: int, flip: Mask | None = None) -> Bytes:
    """Pad with zeros, crop back to H x W at (top, left) of the padded image, mirror: one gather."""
    B, H, W, C = images.shape
    rows = torch.arange(H, device=images.device) + (top - pad)[:, None]
    columns = torch.arange(W, device=images.device)
    if flip is not None:
        columns = torch.where(flip[:, None], W - 1 - columns, columns)
    columns = columns + (left - pad)[:, None]
    pixels = (rows.clamp(0, H - 1) * W)[:, :, None] + columns.clamp(0, W - 1)[:, None, :]
    pixels = pixels + torch.arange(B, device=images.device)[:, None, None] * (H * W)
    picked = images.reshape(B * H * W, C).index_select(0, pixels.flatten()).view(B, H, W, C)
    inside = ((rows >= 0) & (rows < H))[:, :, None] & ((columns >= 0) & (columns < W))[:, None, :]
    return picked * inside.unsqueeze(-1) if pad else picked


def flip_horizontal(images: Bytes, flip: Mask) -> Bytes:
    """Mirror the samples where ``flip`` is set."""
    still = torch.zeros_like(flip, dtype=torch.int64)
    return crop_padded(images, still, still, 0, flip)


def draw_boxes(draws: Draws, sizes: Pairs) -> Int[Tensor, "b 4"]:
    """Random resized crop's (top, left, height, width): the first of ten tries that fits, else a centre crop.

    In float64, so that rounding to whole pixels does not depend on the device.
    """
    H, W = sizes[:, 0].double(), sizes[:, 1].double()
    tries = draws[:, ATTEMPTS : ATTEMPTS + 2 * CROP_TRIES].double()
    area = (H * W)[:, None] * (CROP_AREA[0] + (CROP_AREA[1] - CROP_AREA[0]) * tries[:, :CROP_TRIES])
    low, high = math.log(CROP_RATIO[0]), math.log(CROP_RATIO[1])
    ratio = (low + (high - low) * tries[:, CROP_TRIES:]).exp()
    widths, heights = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (widths > 0) & (widths <= W[:, None]) & (heights > 0) & (heights <= H[:, None])
    found, chosen = fits.any(dim=1), fits.byte().argmax(dim=1, keepdim=True)  # argmax: the first maximum
    # no try fitted: the whole image, its longer side cut to the nearest allowed ratio
    whole_h = torch.minimum(H, (W / CROP_RATIO[0]).round())
    whole_w = torch.minimum(W, (H * CROP_RATIO[1]).round())
    height = torch.where(found, heights.gather(1, chosen)[:, 0], whole_h).long()
    width = torch.where(found, widths.gather(1, chosen)[:, 0], whole_w).long()
    room_h, room_w = sizes[:, 0] - height, sizes[:, 1] - width
    top = torch.where(found, pick(draws[:, TOP], room_h + 1), room_h // 2)
    left = torch.where(found, pick(draws[:, LEFT], room_w + 1), room_w // 2)
    return torch.stack([top, left, height, width], dim=1)


def resample_weights(
    start: Whole, extent: Whole, resized: Whole, offset: Whole, count: int, length: int
) -> Float[Tensor, "b s n"]:
    """Rows of the antialiased bilinear (triangle) filter, one axis.

    Pixels [start, start + extent) of ``length`` become ``resized``, of which ``count`` from ``offset`` on are
    wanted. Pixels outside weigh 0, as if the image had been cropped first.
    """
    scale = (extent / resized).float()[:, None]
    wanted = torch.arange(count, device=start.device) + offset[:, None]
    centre = start[:, None] + (wanted + 0.5) * scale  # (B, S)
    pixel = torch.arange(length, device=start.device)
    weight = 1 - (pixel + 0.5 - centre[:, :, None]).abs() / scale.clamp(min=1.0)[:, :, None]
    inside = (pixel >= start[:, None]) & (pixel < (start + extent)[:, None])
    weight = weight.clamp(min=0.0) * inside[:, None]
    return weight / weight.sum(dim=2, keepdim=True)


def resample(
    images: Bytes, start: Pairs, extent: Pairs, resized: Pairs, offset: Pairs, size: int, flip: Mask | None
) -> Square:
    """One filter per axis and sample: two batched matrix products, never below float32; values in [0, 1]."""
    B, H, W, C = images.shape
    rows, columns = (
        resample_weights(start[:, axis], extent[:, axis], resized[:, axis], offset[:, axis], size, length)
        for axis, length in enumerate((H, W))
    )
    if flip is not None:
        columns = torch.where(flip[:, None, None], columns.flip(1), columns)
    planes = images.permute(0, 3, 1, 2) / 255
    with torch.autocast(images.device.type, enabled=False):
        narrow = planes.reshape(B, C * H, W) @ columns.mT
        x = rows[:, None] @ narrow.view(B, C, H, size)
    return x.clamp(0.0, 1.0).contiguous(memory_format=torch.channels_last)


def crop_resized(images: Bytes, boxes: Int[Tensor, "b 4"], size: int, flip: Mask | None = None) -> Square:
    """Cut out (top, left, height, width), resize it to size x size with antialiasing, mirror."""
    resized = torch.full_like(boxes[:, 2:], size)
    return resample(images, boxes[:, :2], boxes[:, 2:], resized, torch.zeros_like(resized), size, flip)


def resize_centre(images: Bytes, short_side: int, size: int, sizes: Pairs, flip: Mask | None) -> Square:
    """The usual test transform: short side to ``short_side``, antialiased, then the centre size x size."""
    resized = short_side * sizes // sizes.amin(dim=1, keepdim=True)
    offset = ((resized - size).double() / 2).round().long()
    return resample(images, torch.zeros_like(sizes), sizes, resized, offset, size, flip)


def luminance(x: Images) -> Float[Tensor, "b 1 h w"]:
    """Gray value of each pixel; a one-channel image is its own."""
    if x.shape[1] == 1:
        return x
    return 0.2989 * x[:, 0:1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:3]


def blend(x: Images, other: Tensor | float, factor: Factor) -> Images:
    """``factor x + (1 - factor) other``, clamped to [0, 1]."""
    share = factor[:, None, None, None]
    return (share * x + (1 - share) * other).clamp(0.0, 1.0)


def adjust_brightness(x: Images, factor: Factor) -> Images:
    """Blend with black."""
    return blend(x, 0.0, factor)


def adjust_contrast(x: Images, factor: Factor) -> Images:
    """Blend with the mean gray value of the sample."""
    return blend(x, luminance(x).mean(dim=(1, 2, 3), keepdim=True), factor)


def adjust_saturation(x: Images, factor: Factor) -> Images:
    """Blend with the sample's gray version."""
    return blend(x, luminance(x), factor)


def adjust_hue(x: Images, shift: Factor) -> Images:
    """Turn the colour circle by ``shift`` turns, keeping value and chroma; gray images stay as they are.

    In sextants h of the circle, channel n = 5, 3, 1 (red, green, blue) is
    ``value - chroma * clamp(min(k, 4 - k), 0, 1)`` with ``k = (n + h) mod 6``.
    """
    if x.shape[1] == 1:
        return x
    red, green, blue = x.unbind(1)
    value = x.amax(dim=1)
    chroma = value - x.amin(dim=1)
    safe = torch.where(chroma > 0, chroma, 1.0)
    sextant = torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)
    sextant = torch.where(value == red, (green - blue) / safe, sextant) + 6 * shift[:, None, None]
    turns = [torch.remainder(n + sextant, 6.0) for n in (5, 3, 1)]
    channels = [value - chroma * torch.minimum(k, 4 - k).clamp(0.0, 1.0) for k in turns]
    return torch.stack(channels, dim=-1).permute(0, 3, 1, 2)  # stays channels_last


def to_grayscale(x: Images, chosen: Mask) -> Images:
    """Replace all channels by the gray value in the samples where ``chosen`` is set."""
    return torch.where(chosen[:, None, None, None], luminance(x), x)


def jitter_colour(x: Images, draws: Draws, strengths: tuple[float, ...]) -> Images:
    """Brightness, contrast, saturation and hue, in an order of each sample's own.

    The first three are one blend with black, mean gray or gray, so at each position a single blend with a
    target chosen per sample serves all; only hue is computed at every position and kept where it belongs.
    """
    active = [op for op in range(4) if strengths[op] > 0]
    order = torch.stack([draws[:, RANK + op] for op in active], dim=1).argsort(dim=1, stable=True)
    for position in range(len(active)):
        gray = luminance(x)
        factor, target, turned = torch.ones_like(draws[:, 0]), torch.zeros_like(gray), x
        for column, op in enumerate(active):
            here = order[:, position] == column
            if op == HUE:
                shift = strengths[HUE] * (2 * draws[:, STRENGTH + HUE] - 1)
                turned = torch.where(here[:, None, None, None], adjust_hue(x, shift), x)
                continue
            low = max(0.0, 1 - strengths[op])
            factor = torch.where(here, low + (1 + strengths[op] - low) * draws[:, STRENGTH + op], factor)
            if op != BRIGHTNESS:
                other = gray if op == SATURATION else gray.mean(dim=(1, 2, 3), keepdim=True)
                target = torch.where(here[:, None, None, None], other, target)
        x = blend(turned, target, factor)  # factor 1 where hue was turned
    return x


def normalise(x: Images, mean: Stat, std: Stat) -> Images:
    """``(x - mean) / std`` per channel."""
    return (x - mean[:, None, None]) / std[:, None, None]


def augment(
    images: Bytes, draws: Draws, augmentation: Augmentation, mean: Stat, std: Stat, sizes: Pairs | None = None
) -> Float[Tensor, "b c p q"]:
    """Crop, flip, jitter, grayscale, normalise.

    ``sizes`` are the true (H, W) of images that stand in the top left corner of a common canvas; the output
    must then have a size of its own.
    """
    a, (B, H, W, _) = augmentation, images.shape
    if sizes is not None and not a.output_size:
        raise UserError(f"images of several sizes need one output size: {a} has no resized_crop or centre_crop")
    if sizes is None:
        sizes = torch.stack([torch.full((B,), n, device=images.device) for n in (H, W)], dim=1)
    flip = draws[:, FLIP] < 0.5 if a.flip else None
    if a.resized_crop:
        x = crop_resized(images, draw_boxes(draws, sizes), a.resized_crop, flip)
    elif a.centre_crop:
        x = resize_centre(images, a.short_side, a.centre_crop, sizes, flip)
    else:
        if a.crop_pad or flip is not None:
            top, left = (pick(draws[:, column], 2 * a.crop_pad + 1) for column in (TOP, LEFT))
            images = crop_padded(images, top, left, a.crop_pad, flip)
        x = images.permute(0, 3, 1, 2) / 255
    if max(a.strengths) > 0:
        x = jitter_colour(x, draws, a.strengths)
    if a.grayscale:
        x = to_grayscale(x, draws[:, GRAYSCALE] < a.grayscale)
    return normalise(x, mean, std)
