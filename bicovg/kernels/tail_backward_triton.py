"""Triton kernels of the tail's gradient; launched by ``bicovg.kernels.tail``, which explains the design.

A tile is PB pixels of h times BC channels. y is (B, H, W, C) in memory, h and its gradient dh (B, PH, PW, C). With
u the pooled activation, gain = 1 / (1 - drop) and R the sample's root mean square r plus eps, where h is not zero

    h = gain u / R,    du = alpha dh - beta h,    alpha = gain / R,    beta = gain mean(dh h) / r,

and where h is zero so is the gradient: the element was dropped, or ReLU closed it (all four of it, while pooling).
"""
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl

from bicovg.kernels.norm_triton import activate


@triton.jit
def load_pixel(
    at: tl.tensor,
    stats: tl.tensor,
    c: tl.tensor,
    ok: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    C: tl.constexpr,
    BC: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """f and the normalised y of one pixel of each pooling window, in float32."""
    y = tl.load(at, mask=ok, other=0.0)
    f = activate(y, stats, c, ok, C, BC)
    return f, (y.to(tl.float32) - mean[None, :]) * rstd[None, :]


@triton.jit
def tail_sums_kernel(
    part: tl.tensor,
    dh: tl.tensor,
    h: tl.tensor,
    y: tl.tensor,
    stats: tl.tensor,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    POOL: tl.constexpr,
    PB: tl.constexpr,
    BC: tl.constexpr,
) -> None:
    """Over a piece of one sample's pixels: what the gradients at batch norm's output sum to, and sum to against x.

    x being the normalised y, each sum comes in two halves, one to be weighted by alpha, one by -beta; the fifth is
    the sum of dh h, from which beta follows.
    """
    PH: tl.constexpr = H // 2 if POOL else H
    PW: tl.constexpr = W // 2 if POOL else W
    b, piece, pieces = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    inside = c < C
    mean = tl.load(stats + c, mask=inside, other=0.0)
    rstd = tl.load(stats + C + c, mask=inside, other=0.0)
    dh_sum = tl.zeros([PB, BC], dtype=tl.float32)
    h_sum = tl.zeros([PB, BC], dtype=tl.float32)
    dh_x = tl.zeros([PB, BC], dtype=tl.float32)
    h_x = tl.zeros([PB, BC], dtype=tl.float32)
    product = tl.zeros([PB, BC], dtype=tl.float32)
    for p0 in range(piece * PB, PH * PW, pieces * PB):
        pixel = p0 + tl.arange(0, PB)
        ok = (pixel < PH * PW)[:, None] & inside[None, :]
        at = (b.to(tl.int64) * (PH * PW) + pixel)[:, None] * C + c[None, :]
        value = tl.load(h + at, mask=ok, other=0.0).to(tl.float32)
        grad = tl.load(dh + at, mask=ok, other=0.0).to(tl.float32)
        product += grad * value
        if POOL:
            corner = (b.to(tl.int64) * H + pixel // PW * 2) * W + pixel % PW * 2
            near = y + corner[:, None] * C + c[None, :]
            f0, x0 = load_pixel(near, stats, c, ok, mean, rstd, C, BC)
            f1, x1 = load_pixel(near + C, stats, c, ok, mean, rstd, C, BC)
            f2, x2 = load_pixel(near + W * C, stats, c, ok, mean, rstd, C, BC)
            f3, x3 = load_pixel(near + (W + 1) * C, stats, c, ok, mean, rstd, C, BC)
            root = tl.sqrt((f0 * f0 + f1 * f1 + f2 * f2 + f3 * f3) * 0.25)
            slope = tl.where(value != 0.0, 0.25 / tl.where(value != 0.0, root, 1.0), 0.0)
            total = slope * (f0 + f1 + f2 + f3)
            cross = slope * (f0 * x0 + f1 * x1 + f2 * x2 + f3 * x3)
            dh_sum += tl.where(value != 0.0, grad * total, 0.0)
            h_sum += value * total
            dh_x += tl.where(value != 0.0, grad * cross, 0.0)
            h_x += value * cross
        else:
            x = (tl.load(y + at, mask=ok, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
            open_grad = tl.where(value != 0.0, grad, 0.0)
            dh_sum += open_grad
            h_sum += value
            dh_x += open_grad * x
            h_x += value * x
    to = part + (b * pieces + piece) * (5 * C) + c
    tl.store(to, tl.sum(dh_sum, axis=0), mask=inside)
    tl.store(to + C, tl.sum(h_sum, axis=0), mask=inside)
    tl.store(to + 2 * C, tl.sum(dh_x, axis=0), mask=inside)
    tl.store(to + 3 * C, tl.sum(h_x, axis=0), mask=inside)
    tl.store(to + 4 * C, tl.sum(product, axis=0), mask=inside)


@triton.jit
def tail_factors_kernel(
    factors: tl.tensor,
    part: tl.tensor,
    rms: tl.tensor,
    gain: tl.tensor,
    eps: tl.tensor,
    pieces: tl.tensor,
    elements: tl.tensor,
    C: tl.constexpr,
    BC: tl.constexpr,
) -> None:
    """(B, 2) float32: alpha and beta of each sample; 0 where the sample is all zero."""
    b = tl.program_id(0)
    c = tl.arange(0, BC)
    total = tl.zeros([BC], dtype=tl.float32)
    for piece in range(pieces):
        total += tl.load(part + ((b * pieces + piece) * 5 + 4) * C + c, mask=c < C, other=0.0)
    r = tl.load(rms + b)
    some = tl.where(r == 0.0, 0.0, gain)
    r = tl.where(r == 0.0, 1.0, r)
    tl.store(factors + 2 * b, some / (r + eps))
    tl.store(factors + 2 * b + 1, some * tl.sum(total, axis=0) / (elements * r))


@triton.jit
def tail_finish_kernel(
    sums: tl.tensor,
    part: tl.tensor,
    factors: tl.tensor,
    rows: tl.tensor,
    pieces: tl.tensor,
    C: tl.constexpr,
    RB: tl.constexpr,
    BC: tl.constexpr,
) -> None:
    """(2, C) float32: dbeta, dgamma; a row is one piece of one sample."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = c < C
    plain = tl.zeros([RB, BC], dtype=tl.float32)
    cross = tl.zeros([RB, BC], dtype=tl.float32)
    for r0 in range(0, rows, RB):
        row = r0 + tl.arange(0, RB)
        ok = (row < rows)[:, None] & inside[None, :]
        alpha = tl.load(factors + row // pieces * 2, mask=row < rows, other=0.0)[:, None]
        beta = tl.load(factors + row // pieces * 2 + 1, mask=row < rows, other=0.0)[:, None]
        at = part + row[:, None] * (5 * C) + c[None, :]
        plain += alpha * tl.load(at, mask=ok, other=0.0) - beta * tl.load(at + C, mask=ok, other=0.0)
        cross += alpha * tl.load(at + 2 * C, mask=ok, other=0.0) - beta * tl.load(at + 3 * C, mask=ok, other=0.0)
    tl.store(sums + c, tl.sum(plain, axis=0), mask=inside)
    tl.store(sums + C + c, tl.sum(cross, axis=0), mask=inside)


@triton.jit
def store_pixel(
    at: tl.tensor,
    ok: tl.tensor,
    dz: tl.tensor,
    y: tl.tensor,
    stats: tl.tensor,
    c: tl.tensor,
    bias: tl.tensor,
    tilt: tl.tensor,
    C: tl.constexpr,
) -> None:
    """``scale * (dz - mean(dz) - x mean(dz x))``, x being the normalised y."""
    mean = tl.load(stats + c, mask=c < C, other=0.0)
    rstd = tl.load(stats + C + c, mask=c < C, other=0.0)
    scale = tl.load(stats + 2 * C + c, mask=c < C, other=0.0)
    x = (y.to(tl.float32) - mean[None, :]) * rstd[None, :]
    value = scale[None, :] * (dz - bias[None, :] - x * tilt[None, :])
    tl.store(at, value.to(at.dtype.element_ty), mask=ok)


@triton.jit
def tail_gradient_kernel(
    dy: tl.tensor,
    dh: tl.tensor,
    h: tl.tensor,
    y: tl.tensor,
    stats: tl.tensor,
    factors: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    POOL: tl.constexpr,
    PB: tl.constexpr,
    BC: tl.constexpr,
) -> None:
    """dy of one tile; a pooled map's tile also covers the last row and column that an odd map drops."""
    b = tl.program_id(0)
    slot = tl.program_id(1) * PB + tl.arange(0, PB)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    inside = c < C
    alpha = tl.load(factors + 2 * b)
    beta = tl.load(factors + 2 * b + 1)
    bias = tl.load(sums + c, mask=inside, other=0.0) / rows
    tilt = tl.load(sums + C + c, mask=inside, other=0.0) / rows
    if POOL:
        PH: tl.constexpr = H // 2
        PW: tl.constexpr = W // 2
        WIDE: tl.constexpr = (W + 1) // 2
        i, j = slot // WIDE, slot % WIDE
        pooled = ((i < PH) & (j < PW))[:, None] & inside[None, :]
        at = (b.to(tl.int64) * (PH * PW) + i * PW + j)[:, None] * C + c[None, :]
        value = tl.load(h + at, mask=pooled, other=0.0).to(tl.float32)
        grad = tl.load(dh + at, mask=pooled, other=0.0).to(tl.float32)
        near = ((b.to(tl.int64) * H + i * 2) * W + j * 2)[:, None] * C + c[None, :]
        ok0 = (i * 2 < H)[:, None] & inside[None, :]
        ok1 = ((i * 2 < H) & (j * 2 + 1 < W))[:, None] & inside[None, :]
        ok2 = (i * 2 + 1 < H)[:, None] & inside[None, :]
        ok3 = ((i * 2 + 1 < H) & (j * 2 + 1 < W))[:, None] & inside[None, :]
        y0 = tl.load(y + near, mask=ok0, other=0.0)
        y1 = tl.load(y + near + C, mask=ok1, other=0.0)
        y2 = tl.load(y + near + W * C, mask=ok2, other=0.0)
        y3 = tl.load(y + near + (W + 1) * C, mask=ok3, other=0.0)
        f0 = activate(y0, stats, c, ok0, C, BC)
        f1 = activate(y1, stats, c, ok1, C, BC)
        f2 = activate(y2, stats, c, ok2, C, BC)
        f3 = activate(y3, stats, c, ok3, C, BC)
        root = tl.sqrt((f0 * f0 + f1 * f1 + f2 * f2 + f3 * f3) * 0.25)
        root = tl.where(value != 0.0, root, 1.0)
        slope = tl.where(value != 0.0, (alpha * grad - beta * value) * (0.25 / root), 0.0)
        store_pixel(dy + near, ok0, slope * f0, y0, stats, c, bias, tilt, C)
        store_pixel(dy + near + C, ok1, slope * f1, y1, stats, c, bias, tilt, C)
        store_pixel(dy + near + W * C, ok2, slope * f2, y2, stats, c, bias, tilt, C)
        store_pixel(dy + near + (W + 1) * C, ok3, slope * f3, y3, stats, c, bias, tilt, C)
    else:
        ok = (slot < H * W)[:, None] & inside[None, :]
        at = (b.to(tl.int64) * (H * W) + slot)[:, None] * C + c[None, :]
        value = tl.load(h + at, mask=ok, other=0.0).to(tl.float32)
        grad = tl.load(dh + at, mask=ok, other=0.0).to(tl.float32)
        dz = tl.where(value != 0.0, alpha * grad - beta * value, 0.0)
        store_pixel(dy + at, ok, dz, tl.load(y + at, mask=ok, other=0.0), stats, c, bias, tilt, C)
