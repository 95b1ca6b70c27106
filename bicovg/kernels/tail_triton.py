"""Triton kernels of the block's tail (RMSPool, keyed dropout, RMSNorm); launched by ``bicovg.kernels.tail``.

A tile is PB pixels of the (pooled) map times all channels, padded to BC. f and h are (B, H, W, C) in memory.
"""
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl

from bicovg.kernels.norm_triton import activate


@triton.jit
def mix(x: tl.tensor) -> tl.tensor:
    """``bicovg.draws.mix``."""
    x = x - 7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def block_key(key: tl.tensor, index: tl.tensor) -> tl.tensor:
    """The low half of ``bicovg.draws.make_keys(key, index)``."""
    return mix(mix(key) ^ index).to(tl.int32)


@triton.jit
def keep_elements(
    key: tl.tensor, pixel: tl.tensor, c: tl.tensor, threshold: tl.tensor, PIXELS: tl.constexpr
) -> tl.tensor:
    """``bicovg.draws.keep_mask``: hash of the sample's key and the element's index in (C, H, W) order."""
    x = c[None, :] * PIXELS + pixel[:, None] + key
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -2073254261
    return ((x >> 8) & 0xFFFFFF) >= threshold


@triton.jit
def load_square(
    at: tl.tensor, stats: tl.tensor, c: tl.tensor, ok: tl.tensor, C: tl.constexpr, NORM: tl.constexpr, BC: tl.constexpr
) -> tl.tensor:
    """Squares of one pixel of each pooling window."""
    x = tl.load(at, mask=ok, other=0.0)
    if NORM:
        x = activate(x, stats, c, ok, C, BC)
    return x.to(tl.float32) * x.to(tl.float32)


@triton.jit
def load_values(
    f: tl.tensor,
    stats: tl.tensor,
    keys: tl.tensor,
    index: tl.tensor,
    b: tl.tensor,
    pixel: tl.tensor,
    c: tl.tensor,
    threshold: tl.tensor,
    gain: tl.tensor,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    POOL: tl.constexpr,
    DROP: tl.constexpr,
    NORM: tl.constexpr,
    BC: tl.constexpr,
) -> tl.tensor:
    """float32 tile after pool and dropout; elements outside the map or the channels are 0."""
    PH: tl.constexpr = H // 2 if POOL else H
    PW: tl.constexpr = W // 2 if POOL else W
    ok = (pixel < PH * PW)[:, None] & (c < C)[None, :]
    if POOL:
        corner = (b.to(tl.int64) * H + pixel // PW * 2) * W + pixel % PW * 2
        at = f + corner[:, None] * C + c[None, :]
        mean = load_square(at, stats, c, ok, C, NORM, BC)
        mean += load_square(at + C, stats, c, ok, C, NORM, BC)
        mean += load_square(at + W * C, stats, c, ok, C, NORM, BC)
        mean += load_square(at + (W + 1) * C, stats, c, ok, C, NORM, BC)
        value = tl.sqrt(mean * 0.25)
    else:
        at = f + (b.to(tl.int64) * (H * W) + pixel)[:, None] * C + c[None, :]
        x = tl.load(at, mask=ok, other=0.0)
        if NORM:
            x = activate(x, stats, c, ok, C, BC)
        value = x.to(tl.float32)
    if DROP:
        keep = keep_elements(block_key(tl.load(keys + b), index), pixel, c, threshold, PH * PW)
        value = tl.where(keep, value * gain, 0.0)
    return value


@triton.jit
def whole_kernel(
    h: tl.tensor,
    rms: tl.tensor,
    f: tl.tensor,
    stats: tl.tensor,
    keys: tl.tensor,
    index: tl.tensor,
    threshold: tl.tensor,
    gain: tl.tensor,
    eps: tl.tensor,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    POOL: tl.constexpr,
    DROP: tl.constexpr,
    NORM: tl.constexpr,
    PB: tl.constexpr,
    BC: tl.constexpr,
) -> None:
    """One program a sample: read, pool, drop, normalise and write with the sample held in registers."""
    PIXELS: tl.constexpr = (H // 2) * (W // 2) if POOL else H * W
    b = tl.program_id(0)
    pixel = tl.arange(0, PB)
    c = tl.arange(0, BC)
    value = load_values(f, stats, keys, index, b, pixel, c, threshold, gain, C, H, W, POOL, DROP, NORM, BC)
    root = tl.sqrt(tl.sum(tl.sum(value * value, axis=0), axis=0) / (C * PIXELS))
    value = value / (root + eps)
    tl.store(rms + b, root)
    at = h + (b.to(tl.int64) * PIXELS + pixel)[:, None] * C + c[None, :]
    tl.store(at, value.to(h.dtype.element_ty), mask=(pixel < PIXELS)[:, None] & (c < C)[None, :])


@triton.jit
def square_kernel(
    h: tl.tensor,
    part: tl.tensor,
    f: tl.tensor,
    stats: tl.tensor,
    keys: tl.tensor,
    index: tl.tensor,
    threshold: tl.tensor,
    gain: tl.tensor,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    POOL: tl.constexpr,
    DROP: tl.constexpr,
    NORM: tl.constexpr,
    PB: tl.constexpr,
    BC: tl.constexpr,
) -> None:
    """Sum of squares of one tile; a pooled tile is also written, as reading it back beats pooling twice."""
    PIXELS: tl.constexpr = (H // 2) * (W // 2) if POOL else H * W
    b = tl.program_id(0)
    pixel = tl.program_id(1) * PB + tl.arange(0, PB)
    c = tl.arange(0, BC)
    value = load_values(f, stats, keys, index, b, pixel, c, threshold, gain, C, H, W, POOL, DROP, NORM, BC)
    square = tl.sum(tl.sum(value * value, axis=0), axis=0)
    tl.store(part + b * tl.num_programs(1) + tl.program_id(1), square)
    if POOL:
        at = h + (b.to(tl.int64) * PIXELS + pixel)[:, None] * C + c[None, :]
        tl.store(at, value.to(h.dtype.element_ty), mask=(pixel < PIXELS)[:, None] & (c < C)[None, :])


@triton.jit
def normalise_kernel(
    h: tl.tensor,
    rms: tl.tensor,
    part: tl.tensor,
    f: tl.tensor,
    stats: tl.tensor,
    keys: tl.tensor,
    index: tl.tensor,
    threshold: tl.tensor,
    gain: tl.tensor,
    eps: tl.tensor,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    POOL: tl.constexpr,
    DROP: tl.constexpr,
    NORM: tl.constexpr,
    PB: tl.constexpr,
    BC: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Divide one tile by its sample's root mean square, from the TILES sums of squares of that sample."""
    PIXELS: tl.constexpr = (H // 2) * (W // 2) if POOL else H * W
    b = tl.program_id(0)
    pixel = tl.program_id(1) * PB + tl.arange(0, PB)
    c = tl.arange(0, BC)
    tile = tl.arange(0, PARTS)
    square = tl.sum(tl.load(part + b * TILES + tile, mask=tile < TILES, other=0.0), axis=0)
    root = tl.sqrt(square / (C * PIXELS))
    if tl.program_id(1) == 0:
        tl.store(rms + b, root)
    ok = (pixel < PIXELS)[:, None] & (c < C)[None, :]
    at = h + (b.to(tl.int64) * PIXELS + pixel)[:, None] * C + c[None, :]
    if POOL:
        value = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    else:
        value = load_values(f, stats, keys, index, b, pixel, c, threshold, gain, C, H, W, POOL, DROP, NORM, BC)
    value = value / (root + eps)
    tl.store(at, value.to(h.dtype.element_ty), mask=ok)
