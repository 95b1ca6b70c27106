"""Triton kernels of the fused block's backward pass; ``bicovg.kernels.block`` explains the design.

Vocabulary and geometry as in ``goodness_triton``; ``stats`` as in ``norm_triton``. Per pixel, with A and q the slopes
of the energies (2 x the gradient of a cell / its pixels) and ``on = f > 0``:
``dz = on * (A f + W^T q)``, ``q = A' p``.
"""
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl

from bicovg.kernels.goodness_triton import cell_size, find_pixels, tile_mask
from bicovg.kernels.norm_triton import relu


@triton.jit
def atom_of(i: tl.tensor, H: tl.constexpr, L: tl.constexpr) -> tl.tensor:
    """The atom of a map's row: the last one whose edge, floor(atom * H / L), is not behind it."""
    return ((i + 1) * L - 1) // H


@triton.jit
def slope_of(
    grad: tl.tensor,
    b: tl.tensor,
    i: tl.tensor,
    j: tl.tensor,
    k: tl.tensor,
    mask: tl.tensor,
    K: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
) -> tl.tensor:
    """The slopes of energies k in atoms (i, j) of samples b, both scales added; all broadcast together."""
    row = grad + b.to(tl.int64) * (K * (S1 * S1 + S2 * S2))
    i1 = i // (L // S1)
    j1 = j // (L // S1)
    at = row + k * (S1 * S1) + (i1 * S1 + j1)
    slope = tl.load(at, mask=mask, other=0.0).to(tl.float32) * (2.0 / cell_size(i1, j1, H, W, S1))
    if S2 > 0:
        i2 = i // (L // S2)
        j2 = j // (L // S2)
        at = row + K * S1 * S1 + k * (S2 * S2) + (i2 * S2 + j2)
        slope += tl.load(at, mask=mask, other=0.0).to(tl.float32) * (2.0 / cell_size(i2, j2, H, W, S2))
    return slope


@triton.jit
def slopes_kernel(
    slopes: tl.tensor,
    q: tl.tensor,
    p: tl.tensor,
    grad: tl.tensor,
    batch: tl.tensor,
    rows: tl.tensor,
    C: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    NP: tl.constexpr,
) -> None:
    """Two kinds of programs: the slopes A of one atom's channels, (B, L * L, C); and q = A' p of BR pixels, maybe p."""
    chunks: tl.constexpr = (C + BC - 1) // BC
    pid = tl.program_id(0)
    count = batch * (L * L * chunks)
    if pid < count:
        atom = pid // chunks % (L * L)
        b = pid // (chunks * L * L)
        c = pid % chunks * BC + tl.arange(0, BC)
        slope = slope_of(grad, b, atom // L, atom % L, c, c < C, C + N, H, W, L, S1, S2)
        tl.store(slopes + (b.to(tl.int64) * (L * L) + atom) * C + c, slope, mask=c < C)
    elif N > 0:
        r = (pid - count) * BR + tl.arange(0, BR)
        n = tl.arange(0, NP)
        mask = tile_mask(r < rows, n, N, NP)
        i = atom_of(r // W % H, H, L)
        j = atom_of(r % W, W, L)
        k = (C + n)[None, :]
        factor = slope_of(grad, (r // (H * W))[:, None], i[:, None], j[:, None], k, mask, C + N, H, W, L, S1, S2)
        at = r.to(tl.int64)[:, None] * N + n[None, :]
        x = tl.load(p + at, mask=mask, other=0.0).to(tl.float32) * factor
        tl.store(q + at, x.to(q.dtype.element_ty), mask=mask)


@triton.jit
def scale_tile(
    x: tl.tensor,
    slopes: tl.tensor,
    slot: tl.tensor,
    slots: tl.tensor,
    c: tl.tensor,
    C: tl.constexpr,
    G: tl.constexpr,
    Q: tl.constexpr,
    BC: tl.constexpr,
) -> tl.tensor:
    """A tile (G * Q, BC) of channels c times the slopes of its atoms, float32."""
    mask = (slot < slots)[:, None] & (c < C)[None, :]
    slope = tl.load(slopes + (slot[:, None] * C + c[None, :]), mask=mask, other=0.0)
    if G == 1:
        return x.to(tl.float32) * slope
    else:  # noqa: RET505
        return tl.reshape(tl.reshape(x.to(tl.float32), [G, Q, BC]) * slope[:, None, :], [G * Q, BC])


@triton.jit
def find_slopes(r: tl.tensor, H: tl.constexpr, W: tl.constexpr, L: tl.constexpr) -> tl.tensor:
    """The row of ``slopes`` that each pixel r of the (B, H, W) belongs to."""
    return (r // (H * W) * L + atom_of(r // W % H, H, L)) * L + atom_of(r % W, W, L)


@triton.jit
def sums_kernel(
    part: tl.tensor,
    y: tl.tensor,
    q: tl.tensor,
    slopes: tl.tensor,
    stats: tl.tensor,
    rows: tl.tensor,
    C: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    NP: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """A worker's sums over pixels for one block of channels: q on^T, q (on y)^T, and A f, A f y."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    n = tl.arange(0, NP)
    ok_c = c < C
    scale = tl.load(stats + 2 * C + c, mask=ok_c, other=0.0)
    shift = tl.load(stats + 3 * C + c, mask=ok_c, other=0.0)
    first = tl.zeros([16, BC], dtype=tl.float32)
    second = tl.zeros([16, BC], dtype=tl.float32)
    if N > 0:
        count = tl.zeros([NP, BC], dtype=tl.float32)
        moment = tl.zeros([NP, BC], dtype=tl.float32)
    row = tl.arange(0, BR)
    begin = tl.program_id(1) * BR
    stride = tl.num_programs(1) * BR
    y += begin.to(tl.int64) * C  # moved along, so that what is added within the loop fits 32 bits
    q += begin.to(tl.int64) * N
    for r0 in tl.range(begin, rows, stride, num_stages=STAGES):
        ok = row < rows - r0
        mask = tile_mask(ok, c, C, BC)
        x = tl.load(y + (row[:, None] * C + c[None, :]), mask=mask, other=0.0)
        at = slopes + (find_slopes(r0 + row, H, W, L)[:, None] * C + c[None, :])
        slope = tl.load(at, mask=mask, other=0.0)  # 0 in rows that do not exist, as is q: what is on there is no matter
        wide = x.to(tl.float32)
        z = wide * scale[None, :] + shift[None, :]
        a = relu(z) * slope
        first += tl.sum(tl.reshape(a, [BR // 16, 16, BC]), axis=0)
        second += tl.sum(tl.reshape(a * wide, [BR // 16, 16, BC]), axis=0)
        if N > 0:
            at = q + (row[:, None] * N + n[None, :])
            scaled = tl.trans(tl.load(at, mask=tile_mask(ok, n, N, NP), other=0.0))
            count = tl.dot(scaled, tl.where(z > 0.0, 1.0, 0.0).to(x.dtype), count, input_precision=PRECISION)
            moment = tl.dot(scaled, tl.where(z > 0.0, x, 0.0).to(x.dtype), moment, input_precision=PRECISION)
        y += stride * C
        q += stride * N
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
    part: tl.tensor,
    w: tl.tensor,
    stats: tl.tensor,
    workers: tl.tensor,
    C: tl.constexpr,
    N: tl.constexpr,
    BC: tl.constexpr,
    NP: tl.constexpr,
) -> None:
    """(N + 2, C): dW, the sum of dz (dbeta) and of dz * xhat (dgamma), from the workers' sums.

    f = scale * y + shift where it is on, so dW needs no sum of its own, and W carries both sums to dz.
    """
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    n = tl.arange(0, NP)
    ok = c < C
    keep = (n < N)[:, None] & ok[None, :]
    at = n[:, None] * C + c[None, :]
    first = tl.zeros([BC], dtype=tl.float32)
    second = tl.zeros([BC], dtype=tl.float32)
    count = tl.zeros([NP, BC], dtype=tl.float32)
    moment = tl.zeros([NP, BC], dtype=tl.float32)
    for _ in range(workers):
        first += tl.load(part + 2 * N * C + c, mask=ok, other=0.0)
        second += tl.load(part + (2 * N + 1) * C + c, mask=ok, other=0.0)
        if N > 0:
            count += tl.load(part + at, mask=keep, other=0.0)
            moment += tl.load(part + N * C + at, mask=keep, other=0.0)
        part += (2 * N + 2) * C
    mean = tl.load(stats + c, mask=ok, other=0.0)
    rstd = tl.load(stats + C + c, mask=ok, other=0.0)
    if N > 0:
        scale = tl.load(stats + 2 * C + c, mask=ok, other=0.0)
        shift = tl.load(stats + 3 * C + c, mask=ok, other=0.0)
        tl.store(sums + at, scale[None, :] * moment + shift[None, :] * count, mask=keep)
        weight = tl.load(w + at, mask=keep, other=0.0).to(tl.float32)
        first += tl.sum(weight * count, axis=0)
        second += tl.sum(weight * moment, axis=0)
    second = rstd * (second - mean * first)
    tl.store(sums + N * C + c, first, mask=ok)
    tl.store(sums + (N + 1) * C + c, second, mask=ok)


@triton.jit
def gradient_kernel(
    dy: tl.tensor,
    y: tl.tensor,
    q: tl.tensor,
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
    ok_c = c < C
    mean = tl.load(stats + c, mask=ok_c, other=0.0)
    rstd = tl.load(stats + C + c, mask=ok_c, other=0.0)
    scale = tl.load(stats + 2 * C + c, mask=ok_c, other=0.0)
    shift = tl.load(stats + 3 * C + c, mask=ok_c, other=0.0)
    first = tl.load(sums + N * C + c, mask=ok_c, other=0.0) / rows
    slope_y = tl.load(sums + (N + 1) * C + c, mask=ok_c, other=0.0) / rows * rstd
    # mean(dz) + xhat * mean(dz xhat) is linear in y: everything but the part of dz in dy = base + scale * dz
    base_y = -scale * slope_y
    base_1 = -scale * (first - slope_y * mean)
    if N > 0:
        weight = tl.load(w + n[:, None] * C + c[None, :], mask=tile_mask(n < N, c, C, BC), other=0.0)
    for tile in tl.range(tl.program_id(1), tiles, tl.num_programs(1), num_stages=STAGES):
        slot = tile // T * G + tl.arange(0, G)
        start, pixel, ok = find_pixels(tile // T, tile % T, batch, H, W, L, L * L, G, Q)
        mask = tile_mask(ok, c, C, BC)
        x = tl.load(y + start * C + (pixel[:, None] * C + c[None, :]), mask=mask)
        wide = x.to(tl.float32)
        z = wide * scale[None, :] + shift[None, :]
        d = scale_tile(z, slopes, slot, batch * (L * L), c, C, G, Q, BC)
        if N > 0:
            at = q + start * N + (pixel[:, None] * N + n[None, :])
            scaled = tl.load(at, mask=tile_mask(ok, n, N, NP), other=0.0)
            # rounded first, so that it changes registers at half the cost
            d += tl.dot(scaled, weight, input_precision=PRECISION).to(x.dtype).to(tl.float32)
        base = wide * base_y[None, :] + base_1[None, :]
        d = tl.where(z > 0.0, base + scale[None, :] * d, base)
        at = dy + start * C + (pixel[:, None] * C + c[None, :])
        tl.store(at, d.to(dy.dtype.element_ty), mask=mask)
