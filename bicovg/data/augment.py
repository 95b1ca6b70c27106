"""Augmentation per sample on the batch: uint8 (B, H, W, C) in, normalised float32 (B, C, H, W) out.

Every random choice of a sample is one row of ``draw_parameters``, a function of the sample's key alone, so a sample
looks the same in whatever batch, process or prefetch slot it comes. All functions are branch-free tensor arithmetic
without host synchronisation: they run on any device, compiled with ``fullgraph=True``, and in a captured CUDA graph.
Semantics follow torchvision's transforms; docs/augmentation.md lists the differences.

Legend: B batch, H W image, C channels, S output size, P parameters. Colours are worked on plane by plane, where
reading a pixel's three values is cheap; outputs are channels_last in memory.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from bicovg.data import crops
from bicovg.data.crops import Bytes, Mask, Pairs, Square
from bicovg.draws import draw_uniforms
from bicovg.errors import UserError

# Columns of ``draw_parameters``. A sample's column does not change when other operations are switched on or off.
TOP, LEFT, FLIP = 0, 1, 2
STRENGTH = 3  # four: brightness, contrast, saturation, hue
RANK = 7  # four: a sample applies its colour operations in ascending order of these
GRAYSCALE = 11
AREA, RATIO = 12, 22  # resized crop only: ten shares of the area, then ten logarithms of the aspect ratio

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
CROP_TRIES, CROP_AREA = 10, (0.08, 1.0)
GRAY = (0.2989, 0.587, 0.114)
RANK_STEP = 2.0**-26  # below the draws' resolution: it only settles which of two equal ranks comes first

Images = Float[Tensor, "b c h w"]
Parameters = Float64[Tensor, "b p"]
Keys = Int[Tensor, " b"]
Gray = Float[Tensor, "c 1 1"]
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

    @property
    def random(self) -> bool:
        return bool(self.crop_pad or self.flip or self.resized_crop or max(*self.strengths, self.grayscale))


class Constants(NamedTuple):
    """Tensors that ``augment`` needs beside the images. Made once: a captured graph cannot make them from lists.

    Attributes:
        low, span: a parameter is ``low + span * uniform``.
        gray: the channels' weights in gray times C, so that means over channels are gray values.
    """

    low: Float64[Tensor, " p"]
    span: Float64[Tensor, " p"]
    gray: Gray
    mean: Stat
    std: Stat


def make_constants(augmentation: Augmentation, mean: Stat, std: Stat) -> Constants:
    """Ranges of the parameters and the statistics, on the device of ``mean``.

    A colour operation that is off ranks after all that are on, so that the first few places hold only the latter.
    """
    strengths = augmentation.strengths
    lows = [max(0.0, 1 - v) for v in strengths[:HUE]]
    columns = 2 * [(0.0, 2.0 * augmentation.crop_pad + 1)] + [(0.0, 1.0)]
    columns += [(low, 1 + v - low) for low, v in zip(lows, strengths, strict=False)]
    columns += [(-augmentation.hue, 2 * augmentation.hue)]
    columns += [(RANK_STEP * op + (v == 0), 1.0) for op, v in enumerate(strengths)] + [(0.0, 1.0)]
    if augmentation.resized_crop:
        shortest, longest = (math.log(ratio) for ratio in crops.RATIO)
        columns += CROP_TRIES * [(CROP_AREA[0], CROP_AREA[1] - CROP_AREA[0])]
        columns += CROP_TRIES * [(shortest, longest - shortest)]
    if not augmentation.random:
        columns = []
    low, span = torch.tensor(columns, dtype=torch.float64, device=mean.device).view(-1, 2).unbind(1)
    weights = GRAY if len(mean) == 3 else (1.0,)
    gray = torch.tensor(weights, device=mean.device)[:, None, None] * len(weights)
    return Constants(low, span, gray, mean, std)


def draw_parameters(keys: Keys, constants: Constants) -> Parameters:
    """All a sample's random choices, each uniform in its range; the columns are named at the top of this module.

    In float64, so that rounding to whole pixels does not depend on the device.
    """
    return draw_uniforms(keys, len(constants.low)) * constants.span + constants.low


def gray_value(shares: Images) -> Float[Tensor, "b 1 h w"]:
    """Gray value of each pixel, from the channels times ``Constants.gray``; a one-channel image is its own."""
    return shares.mean(dim=1, keepdim=True)


def turn_hue(x: Images, shift: Float[Tensor, " b"]) -> Images:
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
    return torch.stack([value - chroma * torch.minimum(k, 4 - k).clamp(0.0, 1.0) for k in turns], dim=1)


def jitter_colour(x: Images, parameters: Parameters, strengths: tuple[float, ...], gray: Gray) -> Images:
    """Brightness, contrast, saturation and hue, in an order of each sample's own; ``x`` is overwritten.

    The first three are one blend ``factor x + (1 - factor) other`` with black, the sample's mean gray or each
    pixel's gray, so in each place a single blend with factor and other chosen per sample serves all. Only hue is
    computed in every place and kept where it belongs, the blend's factor being 1 there.
    """
    count = sum(strength > 0 for strength in strengths)
    drawn, ranks = parameters.mT[STRENGTH:RANK], parameters.mT[RANK:GRAYSCALE]  # (4, B)
    places = (ranks[:, None] > ranks).sum(dim=1)  # how many operations come before each
    here = places[:, None] == torch.arange(count, device=x.device)[:, None]  # (4, count, B)
    factor = (drawn[:, None] * here).sum(dim=0).float()
    if strengths[HUE]:
        factor = factor.masked_fill(here[HUE], 1.0)
    rest = (1 - factor).masked_fill(here[BRIGHTNESS], 0.0)
    factor, rest, here = (each[..., None, None, None] for each in (factor, rest, here))
    for place in range(count):
        if strengths[HUE]:
            x = torch.where(here[HUE, place], turn_hue(x, drawn[HUE].float()), x)
        shares = x * gray
        other = torch.where(here[CONTRAST, place], shares.mean(dim=(1, 2, 3), keepdim=True), gray_value(shares))
        x = x.mul_(factor[place]).add_(other.mul_(rest[place])).clamp_(0.0, 1.0)
    return x


def normalise(x: Images, mean: Stat, std: Stat) -> Images:
    """``(x - mean) / std`` per channel."""
    return (x - mean[:, None, None]) / std[:, None, None]


def cut_square(
    images: Bytes, parameters: Parameters, augmentation: Augmentation, flip: Mask | None, sizes: Pairs | None
) -> Square:
    """The crops that give the output a size of its own."""
    a, (B, H, W, _) = augmentation, images.shape
    if sizes is None:
        sizes = torch.stack([torch.full((B,), n, device=images.device) for n in (H, W)], dim=1)
    if not a.resized_crop:
        return crops.resize_centre(images, a.short_side, a.centre_crop, sizes, flip)
    place, areas, ratios = parameters[:, TOP:FLIP], parameters[:, AREA:RATIO], parameters[:, RATIO:]
    return crops.crop_resized(images, crops.draw_boxes(place, areas, ratios, sizes), a.resized_crop, flip)


def augment(
    images: Bytes, keys: Keys, augmentation: Augmentation, constants: Constants, sizes: Pairs | None = None
) -> Float[Tensor, "b c p q"]:
    """Crop, flip, jitter, grayscale, normalise: each image as its key says.

    ``sizes`` are the true (H, W) of images that stand in the top left corner of a common canvas; the output
    must then have a size of its own.
    """
    a, flip = augmentation, None
    if sizes is not None and not a.output_size:
        raise UserError(f"images of several sizes need one output size: {a} has no resized_crop or centre_crop")
    parameters = draw_parameters(keys, constants)
    if a.flip:
        flip = parameters[:, FLIP] < 0.5
    if a.output_size:
        x = cut_square(images, parameters, a, flip, sizes)
    elif a.crop_pad or a.flip:
        top, left = parameters[:, TOP:FLIP].int().unbind(1)
        x = crops.to_planes(crops.crop_padded(images, top, left, a.crop_pad, flip))
    else:
        x = images.permute(0, 3, 1, 2) / 255
    if max(a.strengths) > 0:
        x = jitter_colour(x, parameters, a.strengths, constants.gray)
    if a.grayscale:
        chosen = parameters[:, GRAYSCALE, None, None, None] < a.grayscale
        x = torch.where(chosen, gray_value(x * constants.gray), x)
    return normalise(x, constants.mean, constants.std).contiguous(memory_format=torch.channels_last)
