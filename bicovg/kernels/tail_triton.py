"""Triton kernels of the block's tail (RMSPool, keyed dropout, RMSNorm); launched by ``bicovg.kernels.tail``.

A tile is PB pixels of the (pooled) map times all channels, padded to BC. f and h are (B, H, W, C) in memory.
"""
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl

from bicovg.kernels.norm_triton import relu


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
    """``bicovg.draws.keep_mask``: channels 2 i and 2 i + 1 share a hash, which a thread that holds both makes once."""
    x = (c >> 1)[None, :] * PIXELS + pixel[:, None] + key
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -2073254261
    x = x ^ ((x >> 16) & 0xFFFF)
    return ((x >> (16 - (c & 1) * 16)[None, :]) & 0xFFFF) >= threshold


@triton.jit
def load_tile(at: tl.tensor, ok: tl.tensor, FULL: tl.constexpr) -> tl.tensor:
    """float32; 0 where not ``ok``, which is not asked of a tile that is ``FULL``."""
    if FULL:
        return tl.load(at).to(tl.float32)
    else:  # noqa: RET505  (Triton compiles only the branch taken when both are written out)
        return tl.load(at, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def load_active(
    at: tl.tensor,
    scale: tl.tensor,
    shift: tl.tensor,
    ok: tl.tensor,
    NORM: tl.constexpr,
    FULL: tl.constexpr,
) -> tl.tensor:
    """f in float32, made from y where NORM; 0 outside the tile."""
    x = load_tile(at, ok, FULL)
    if NORM:
        x = relu(x * scale[None, :] + shift[None, :])
        if not FULL:
            x = tl.where(ok, x, 0.0)
    return x


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
    PB: tl.constexpr,
    BC: tl.constexpr,
) -> tl.tensor:
    """float32 tile after pool and dropout; elements outside the map or the channels are 0. ``gain`` is 1 or above."""
    PH: tl.constexpr = H // 2 if POOL else H
    PW: tl.constexpr = W // 2 if POOL else W
    FULL: tl.constexpr = (PH * PW) % PB == 0 and C == BC
    ok = (pixel < PH * PW)[:, None] & (c < C)[None, :]
    scale = c.to(tl.float32)
    shift = scale
    if NORM:
        scale = tl.load(stats + 2 * C + c, mask=c < C, other=0.0)
        shift = tl.load(stats + 3 * C + c, mask=c < C, other=0.0)
    if POOL:
        corner = (b.to(tl.int64) * H + pixel // PW * 2) * W + pixel % PW * 2
        at = f + corner[:, None] * C + c[None, :]
        x = load_active(at, scale, shift, ok, NORM, FULL)
        mean = x * x
        x = load_active(at + C, scale, shift, ok, NORM, FULL)
        mean += x * x
        x = load_active(at + W * C, scale, shift, ok, NORM, FULL)
        mean += x * x
        x = load_active(at + (W + 1) * C, scale, shift, ok, NORM, FULL)
        mean += x * x
        value = tl.sqrt(mean * (0.25 * gain * gain))
    else:
        at = f + (b.to(tl.int64) * (H * W) + pixel)[:, None] * C + c[None, :]
        if NORM:  # ReLU lets a positive factor through, so the gain goes with the few scales
            value = load_active(at, scale * gain, shift * gain, ok, NORM, FULL)
        else:
            value = load_tile(at, ok, FULL) * gain
    if DROP:
        keep = keep_elements(block_key(tl.load(keys + b), index), pixel, c, threshold, PH * PW)
        value = tl.where(keep, value, 0.0)
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
    value = load_values(f, stats, keys, index, b, pixel, c, threshold, gain, C, H, W, POOL, DROP, NORM, PB, BC)
    root = tl.sqrt(tl.sum(value * value) / (C * PIXELS))
    value = value * (1.0 / (root + eps))
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
    value = load_values(f, stats, keys, index, b, pixel, c, threshold, gain, C, H, W, POOL, DROP, NORM, PB, BC)
    square = tl.sum(value * value)
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
        value = load_values(f, stats, keys, index, b, pixel, c, threshold, gain, C, H, W, POOL, DROP, NORM, PB, BC)
    value = value * (1.0 / (root + eps))
    tl.store(at, value.to(h.dtype.element_ty), mask=ok)
