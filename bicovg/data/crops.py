"""Crops of a batch, one place per sample: padded, resized at random, resized for evaluation. See augment.py.

Legend: B batch, H W image, C channels, S output size.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int, UInt8
from torch import Tensor

from bicovg.errors import UserError

MAX_PLACES = 1 << 31  # the places of a batch's pixels are 32-bit integers
RATIO = (3 / 4, 4 / 3)  # allowed shapes of a resized crop, width / height

Bytes = UInt8[Tensor, "b h w c"]
Square = Float[Tensor, "b c s s"]
Pairs = Int[Tensor, "b 2"]
Whole = Int[Tensor, " b"]
Mask = Bool[Tensor, " b"]


def to_planes(images: Bytes) -> Float[Tensor, "b c h w"]:
    """Values in [0, 1], one plane per channel in memory."""
    return images.permute(0, 3, 1, 2).contiguous() / 255


def line(count: int, flip: Mask | None, device: torch.device) -> Int[Tensor, "#b n"]:
    """0, 1, ..., count - 1 per sample, backwards where ``flip`` is set."""
    forward = torch.arange(count, dtype=torch.int32, device=device)[None]
    return forward if flip is None else torch.where(flip[:, None], count - 1 - forward, forward)


def crop_padded(images: Bytes, top: Whole, left: Whole, pad: int, flip: Mask | None = None) -> Bytes:
    """Pad with zeros, crop back to H x W at (top, left) of the padded image, mirror: one gather."""
    B, H, W, C = images.shape
    width, size = W + 2 * pad, (W + 2 * pad) * (H + 2 * pad)
    if B * size >= MAX_PLACES:
        raise UserError(f"{B} images of {H}x{W}, padded by {pad}, are too many pixels at once: use a smaller batch")
    padded = F.pad(images, (0, 0, pad, pad, pad, pad)) if pad else images
    corners = torch.arange(0, B * size, size, dtype=torch.int32, device=images.device) + (top * width + left)
    rows = torch.arange(0, H * width, width, dtype=torch.int32, device=images.device)
    pixels = (corners[:, None] + rows)[:, :, None] + line(W, flip, images.device)[:, None]  # (B, H, W)
    return padded.reshape(-1, C).index_select(0, pixels.flatten()).view(B, H, W, C)


def draw_boxes(
    place: Float64[Tensor, "b 2"], areas: Float64[Tensor, "b n"], ratios: Float64[Tensor, "b n"], sizes: Pairs
) -> Int[Tensor, "b 4"]:
    """Random resized crop's (top, left, height, width): the first try that fits, else a centre crop.

    Args:
        place: uniforms in [0, 1) that say where in the room left over the crop stands.
        areas: of the tries, as shares of the image's.
        ratios: of the tries, logarithms of width / height.
        sizes: (height, width) of the images.
    """
    H, W = sizes.double()[:, :, None].unbind(1)  # (B, 1)
    area, ratio = H * W * areas, ratios.exp()
    widths, heights = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (widths > 0) & (widths <= W) & (heights > 0) & (heights <= H)
    tries = fits.shape[1]
    # not argmax of fits: compiled for a CPU by torch 2.11 it does not always give the first of several maxima
    chosen = torch.where(fits, torch.arange(tries, device=sizes.device), tries).amin(dim=1, keepdim=True)
    # where no try fitted: the whole image, its longer side cut to the nearest allowed ratio
    height = torch.cat([heights, torch.minimum(H, (W / RATIO[0]).round())], dim=1).gather(1, chosen)
    width = torch.cat([widths, torch.minimum(W, (H * RATIO[1]).round())], dim=1).gather(1, chosen)
    extent = torch.cat([height, width], dim=1)
    room = sizes - extent
    start = torch.where(chosen < tries, place * (room + 1), room / 2).floor()
    return torch.cat([start, extent], dim=1).long()


def resample_taps(
    start: Whole, extent: Whole, resized: Whole, wanted: Int[Tensor, "b s"], length: int, count: int
) -> tuple[Int[Tensor, "b s t"], Float[Tensor, "b s t"]]:
    """The antialiased bilinear (triangle) filter on one axis: the ``count`` pixels of each output, and their shares.

    Pixels [start, start + extent) of ``length`` become ``resized``, of which those at ``wanted`` are made.
    Pixels outside weigh 0, as if the image had been cropped first.
    """
    scale = (extent / resized).float()[:, None]
    centre, reach = start[:, None] + (wanted + 0.5) * scale, scale.clamp(min=1.0)  # (B, S)
    first = (centre - reach + 0.5).floor().int()  # the next pixel before it is out of reach
    pixel = first[:, :, None] + torch.arange(count, dtype=torch.int32, device=start.device)
    weight = 1 - (pixel + 0.5 - centre[:, :, None]).abs() / reach[:, :, None]
    inside = (pixel >= start[:, None, None]) & (pixel < (start + extent)[:, None, None])
    weight = weight.clamp(min=0.0) * inside
    return pixel.clamp(0, length - 1), weight / weight.sum(dim=2, keepdim=True)


def count_taps(scale: float) -> int:
    """Pixels within reach of an output where ``scale`` of them, at most, become one."""
    return int(2 * max(scale, 1.0)) + 1


def resample(
    images: Bytes,
    start: Pairs,
    extent: Pairs,
    resized: Pairs,
    offset: Pairs,
    size: int,
    flip: Mask | None,
    scale: float,
) -> Square:
    """Rows, then columns: each output is a weighted sum of the few pixels near it, in float32; values in [0, 1].

    ``scale``: at most this many pixels of either axis become one.
    """
    B, H, W, C = images.shape
    taps = count_taps(scale)
    (row, row_weight), (column, column_weight) = (
        resample_taps(start[:, axis], extent[:, axis], resized[:, axis], offset[:, axis, None] + wanted, length, taps)
        for axis, length, wanted in (
            (0, H, line(size, None, images.device)),
            (1, W, line(size, flip, images.device)),
        )
    )
    sample = torch.arange(B, dtype=torch.int32, device=images.device)[:, None, None]
    low = add_taps(images.reshape(B * H, W * C), row + H * sample, row_weight)  # (B, S, W C)
    turned = low.view(B, size, W, C).transpose(1, 2).reshape(B * W, size * C)
    x = add_taps(turned, column + W * sample, column_weight)  # (B, S, S C), columns first
    return x.view(B, size, size, C).permute(0, 3, 2, 1).contiguous().div_(255).clamp_(0.0, 1.0)


def add_taps(lines: Tensor, places: Int[Tensor, "b s t"], weights: Float[Tensor, "b s t"]) -> Float[Tensor, "b s n"]:
    """Weighted sums of the lines at ``places``."""
    B, S, taps = places.shape
    total = torch.zeros((B, S, lines.shape[1]), device=lines.device)
    for tap in range(taps):
        near = lines.index_select(0, places[:, :, tap].flatten()).view_as(total)
        total.addcmul_(near.float(), weights[:, :, tap, None])
    return total


def crop_resized(images: Bytes, boxes: Int[Tensor, "b 4"], size: int, flip: Mask | None = None) -> Square:
    """Cut out (top, left, height, width), resize it to size x size with antialiasing, mirror."""
    resized = torch.full_like(boxes[:, 2:], size)
    scale = max(images.shape[1:3]) / size
    return resample(images, boxes[:, :2], boxes[:, 2:], resized, torch.zeros_like(resized), size, flip, scale)


def resize_centre(images: Bytes, short_side: int, size: int, sizes: Pairs, flip: Mask | None = None) -> Square:
    """The usual test transform: short side to ``short_side``, antialiased, then the centre size x size."""
    resized = short_side * sizes // sizes.amin(dim=1, keepdim=True)
    offset = ((resized - size).double() / 2).round().long()
    scale = min(images.shape[1:3]) / max(short_side - 1, 0.5)  # the longer side is rounded down, by less than one pixel
    return resample(images, torch.zeros_like(sizes), sizes, resized, offset, size, flip, scale)
