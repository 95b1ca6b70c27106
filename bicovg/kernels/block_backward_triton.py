"""Triton kernels of the fused block's backward pass; ``bicovg.kernels.block`` explains the design.

Vocabulary and geometry as in ``goodness_triton``; ``stats`` as in ``norm_triton``. Per pixel, with A and q the slopes
of the energies (2 x the gradient of a cell / its pixels) and ``on = f > 0``:
``dz = on * (A f + W^T q)``, ``q = A' p``.
"""
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl

from bicovg.kernels.goodness_triton import cell_size, find_pixels, tile_mask


@triton.jit
def slopes_kernel(
    slopes: tl.tensor,
    grad: tl.tensor,
    K: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    """(B, L * L, K): the slopes of each atom's energies, both scales added, channels side by side."""
    b = tl.program_id(0)
    i = tl.program_id(1) // L
    j = tl.program_id(1) % L
    k = tl.program_id(2) * BK + tl.arange(0, BK)
    D: tl.constexpr = K * (S1 * S1 + S2 * S2)
    row = grad + b.to(tl.int64) * D
    i1 = i // (L // S1)
    j1 = j // (L // S1)
    at = row + k * (S1 * S1) + i1 * S1 + j1
    slope = tl.load(at, mask=k < K, other=0.0).to(tl.float32) * (2.0 / cell_size(i1, j1, H, W, S1))
    if S2 > 0:
        i2 = i // (L // S2)
        j2 = j // (L // S2)
        at = row + K * S1 * S1 + k * (S2 * S2) + i2 * S2 + j2
        slope += tl.load(at, mask=k < K, other=0.0).to(tl.float32) * (2.0 / cell_size(i2, j2, H, W, S2))
    tl.store(slopes + (b.to(tl.int64) * (L * L) + tl.program_id(1)) * K + k, slope, mask=k < K)


@triton.jit
def scale_tile(
    x: tl.tensor,
    slopes: tl.tensor,
    slot: tl.tensor,
    slots: tl.tensor,
    k: tl.tensor,
    last: tl.tensor,
    K: tl.constexpr,
    G: tl.constexpr,
    Q: tl.constexpr,
    BC: tl.constexpr,
) -> tl.tensor:
    """A tile (G * Q, BC) times the slopes of its atoms, float32; columns k up to ``last``."""
    mask = (slot < slots)[:, None] & (k < last)[None, :]
    slope = tl.load(slopes + slot.to(tl.int64)[:, None] * K + k[None, :], mask=mask, other=0.0)
    if G == 1:
        return x.to(tl.float32) * slope
    else:  # noqa: RET505
        return tl.reshape(tl.reshape(x.to(tl.float32), [G, Q, BC]) * slope[:, None, :], [G * Q, BC])


@triton.jit
def sums_kernel(
    part: tl.tensor,
    y: tl.tensor,
    p: tl.tensor,
    slopes: tl.tensor,
    stats: tl.tensor,
    batch: tl.tensor,
    tiles: tl.tensor,
    C: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
    Q: tl.constexpr,
    BC: tl.constexpr,
    NP: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """A worker's sums over pixels for one block of channels: q on^T, q (on y)^T, and A f, A f xhat."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    n = tl.arange(0, NP)
    K: tl.constexpr = C + N
    ok_c = c < C
    mean = tl.load(stats + c, mask=ok_c, other=0.0)
    rstd = tl.load(stats + C + c, mask=ok_c, other=0.0)
    scale = tl.load(stats + 2 * C + c, mask=ok_c, other=0.0)
    shift = tl.load(stats + 3 * C + c, mask=ok_c, other=0.0)
    first = tl.zeros([G * Q, BC], dtype=tl.float32)
    second = tl.zeros([G * Q, BC], dtype=tl.float32)
    if N > 0:
        count = tl.zeros([NP, BC], dtype=tl.float32)
        moment = tl.zeros([NP, BC], dtype=tl.float32)
    for tile in tl.range(tl.program_id(1), tiles, tl.num_programs(1), num_stages=STAGES):
        slot = tile // T * G + tl.arange(0, G)
        pixel, ok = find_pixels(tile // T, tile % T, batch, H, W, L, L * L, G, Q)
        mask = tile_mask(ok, c, C, BC)
        x = tl.load(y + pixel[:, None] * C + c[None, :], mask=mask, other=0.0)
        wide = x.to(tl.float32)
        z = wide * scale[None, :] + shift[None, :]
        on = (z > 0.0) & mask
        a = scale_tile(tl.where(on, z, 0.0), slopes, slot, batch * (L * L), c, C, K, G, Q, BC)
        first += a
        second += a * ((wide - mean[None, :]) * rstd[None, :])
        if N > 0:
            proj = tl.load(p + pixel[:, None] * N + n[None, :], mask=tile_mask(ok, n, N, NP), other=0.0)
            q = tl.trans(scale_tile(proj, slopes, slot, batch * (L * L), C + n, K, K, G, Q, NP).to(x.dtype))
            count = tl.dot(q, on.to(x.dtype), count, input_precision=PRECISION)
            moment = tl.dot(q, tl.where(on, x, 0.0).to(x.dtype), moment, input_precision=PRECISION)
    own = part + tl.program_id(1).to(tl.int64) * ((2 * N + 2) * C)
    if N > 0:
        at = own + n[:, None] * C + c[None, :]
        keep = (n < N)[:, None] & ok_c[None, :]
        tl.store(at, count, mask=keep)
        tl.store(at + N * C, moment, mask=keep)
    tl.store(own + 2 * N * C + c, tl.sum(first, axis=0), mask=ok_c)
    tl.store(own + (2 * N + 1) * C + c, tl.sum(second, axis=0), mask=ok_c)


@triton.jit
def finish_kernel(
    sums: tl.tensor,
    total: tl.tensor,
    w: tl.tensor,
    stats: tl.tensor,
    C: tl.constexpr,
    N: tl.constexpr,
    BC: tl.constexpr,
    NP: tl.constexpr,
) -> None:
    """(N + 2, C): dW, the sum of dz (dbeta) and of dz * xhat (dgamma), from the workers' added sums.

    f = scale * y + shift where it is on, so dW needs no sum of its own, and W carries both sums to dz.
    """
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    n = tl.arange(0, NP)
    ok = c < C
    first = tl.load(total + 2 * N * C + c, mask=ok, other=0.0)
    second = tl.load(total + (2 * N + 1) * C + c, mask=ok, other=0.0)
    if N > 0:
        keep = (n < N)[:, None] & ok[None, :]
        at = n[:, None] * C + c[None, :]
        count = tl.load(total + at, mask=keep, other=0.0)
        moment = tl.load(total + N * C + at, mask=keep, other=0.0)
        scale = tl.load(stats + 2 * C + c, mask=ok, other=0.0)
        shift = tl.load(stats + 3 * C + c, mask=ok, other=0.0)
        tl.store(sums + at, scale[None, :] * moment + shift[None, :] * count, mask=keep)
        weight = tl.load(w + at, mask=keep, other=0.0).to(tl.float32)
        mean = tl.load(stats + c, mask=ok, other=0.0)
        rstd = tl.load(stats + C + c, mask=ok, other=0.0)
        first += tl.sum(weight * count, axis=0)
        second += rstd * tl.sum(weight * (moment - mean[None, :] * count), axis=0)
    tl.store(sums + N * C + c, first, mask=ok)
    tl.store(sums + (N + 1) * C + c, second, mask=ok)


@triton.jit
def gradient_kernel(
    dy: tl.tensor,
    y: tl.tensor,
    p: tl.tensor,
    w: tl.tensor,
    slopes: tl.tensor,
    stats: tl.tensor,
    sums: tl.tensor,
    batch: tl.tensor,
    tiles: tl.tensor,
    rows: tl.tensor,
    C: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
    Q: tl.constexpr,
    BC: tl.constexpr,
    NP: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """dy = scale * (dz - mean(dz) - xhat * mean(dz * xhat)) for one block of channels; W stays on the chip."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    n = tl.arange(0, NP)
    K: tl.constexpr = C + N
    ok_c = c < C
    mean = tl.load(stats + c, mask=ok_c, other=0.0)
    rstd = tl.load(stats + C + c, mask=ok_c, other=0.0)
    scale = tl.load(stats + 2 * C + c, mask=ok_c, other=0.0)
    shift = tl.load(stats + 3 * C + c, mask=ok_c, other=0.0)
    first = tl.load(sums + N * C + c, mask=ok_c, other=0.0) / rows
    slope_y = tl.load(sums + (N + 1) * C + c, mask=ok_c, other=0.0) / rows * rstd
    offset = first - slope_y * mean  # mean(dz) + xhat * mean(dz xhat) = offset + slope_y * y
    if N > 0:
        weight = tl.load(w + n[:, None] * C + c[None, :], mask=tile_mask(n < N, c, C, BC), other=0.0)
    for tile in tl.range(tl.program_id(1), tiles, tl.num_programs(1), num_stages=STAGES):
        slot = tile // T * G + tl.arange(0, G)
        pixel, ok = find_pixels(tile // T, tile % T, batch, H, W, L, L * L, G, Q)
        mask = tile_mask(ok, c, C, BC)
        x = tl.load(y + pixel[:, None] * C + c[None, :], mask=mask, other=0.0)
        wide = x.to(tl.float32)
        z = wide * scale[None, :] + shift[None, :]
        d = scale_tile(z, slopes, slot, batch * (L * L), c, C, K, G, Q, BC)
        if N > 0:
            proj = tl.load(p + pixel[:, None] * N + n[None, :], mask=tile_mask(ok, n, N, NP), other=0.0)
            q = scale_tile(proj, slopes, slot, batch * (L * L), C + n, K, K, G, Q, NP).to(x.dtype)
            # rounded first, so that it changes registers at half the cost
            d += tl.dot(q, weight, input_precision=PRECISION).to(x.dtype).to(tl.float32)
        d = tl.where(z > 0.0, d, 0.0) - offset[None, :] - slope_y[None, :] * wide
        tl.store(dy + pixel[:, None] * C + c[None, :], (scale[None, :] * d).to(dy.dtype.element_ty), mask=mask)
