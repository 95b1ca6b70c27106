"""Triton kernels of the fused block's backward pass; ``bicovg.kernels.block`` explains the design.

Vocabulary and geometry as in ``goodness_triton``; ``stats`` as in ``norm_triton``. Per pixel, with A and q the slopes
of the energies (2 x the gradient of a cell / its pixels) and ``on = f > 0``:
``dz = on * (A f + W^T q)``, ``q = A' p``.
"""
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl

from bicovg.kernels.goodness_triton import find_pixels, tile_mask
from bicovg.kernels.norm_triton import relu
from bicovg.kernels.slopes_triton import atom_of, scale_atoms


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
    return scale_atoms(x, slope, G, Q, BC)


@triton.jit
def find_slopes(r: tl.tensor, H: tl.constexpr, W: tl.constexpr, L: tl.constexpr) -> tl.tensor:
    """The row of ``slopes`` that each pixel r of the (B, H, W) belongs to."""
    return (r // (H * W) * L + atom_of(r // W % H, H, L)) * L + atom_of(r % W, W, L)


@triton.jit
def sums_kernel(
    part: tl.tensor,
    y: tl.tensor,
    slopes: tl.tensor,
    stats: tl.tensor,
    rows: tl.tensor,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """A worker's sums over pixels for one block of channels where there is no W: A f and A f y."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    ok_c = c < C
    scale = tl.load(stats + 2 * C + c, mask=ok_c, other=0.0)
    shift = tl.load(stats + 3 * C + c, mask=ok_c, other=0.0)
    first = tl.zeros([16, BC], dtype=tl.float32)
    second = tl.zeros([16, BC], dtype=tl.float32)
    row = tl.arange(0, BR)
    begin = tl.program_id(1) * BR
    stride = tl.num_programs(1) * BR
    y += begin.to(tl.int64) * C  # moved along, so that what is added within the loop fits 32 bits
    for r0 in tl.range(begin, rows, stride, num_stages=STAGES):
        mask = tile_mask(row < rows - r0, c, C, BC)
        x = tl.load(y + (row[:, None] * C + c[None, :]), mask=mask, other=0.0)
        at = slopes + (find_slopes(r0 + row, H, W, L)[:, None] * C + c[None, :])
        slope = tl.load(at, mask=mask, other=0.0)  # 0 in rows that do not exist: what f is there is no matter
        wide = x.to(tl.float32)
        a = relu(wide * scale[None, :] + shift[None, :]) * slope
        first += tl.sum(tl.reshape(a, [BR // 16, 16, BC]), axis=0)
        second += tl.sum(tl.reshape(a * wide, [BR // 16, 16, BC]), axis=0)
        y += stride * C
    part += tl.program_id(1).to(tl.int64) * (2 * C)
    tl.store(part + c, tl.sum(first, axis=0), mask=ok_c)
    tl.store(part + C + c, tl.sum(second, axis=0), mask=ok_c)


@triton.jit
def find_edge(scale: tl.tensor, shift: tl.tensor) -> tl.tensor:
    """(sign, edge) in bfloat16 such that scale * y + shift > 0 where sign * y > edge, for every y that is a bfloat16.

    The true edge is rounded down to the next bfloat16, which no bfloat16 lies between.
    """
    sign = tl.where(scale < 0.0, -1.0, 1.0)
    none = scale == 0.0
    edge = tl.where(none, tl.where(shift > 0.0, -3e38, 3e38), -shift / tl.where(none, 1.0, tl.abs(scale)))
    bits = edge.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits + 0xFFFF, bits) & -65536
    return sign.to(tl.bfloat16), bits.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def products_kernel(
    part: tl.tensor,
    y: tl.tensor,
    q: tl.tensor,
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
    GP: tl.constexpr,
    FULL: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """A worker's sums over pixels for one block of channels: on q^T, (on y) q^T, and A on, A on y.

    All of them are matrix products, of what y and a comparison give without rounding. FULL: every row of every tile
    exists. PACKED: two bfloat16 an instruction.
    """
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    n = tl.arange(0, NP)
    ok_c = c < C
    scale = tl.load(stats + 2 * C + c, mask=ok_c, other=0.0)
    shift = tl.load(stats + 3 * C + c, mask=ok_c, other=0.0)
    if PACKED:
        sign, edge = find_edge(scale, shift)
        sign = tl.broadcast_to(sign[:, None], [BC, G * Q])
        edge = tl.broadcast_to(edge[:, None], [BC, G * Q])
    count = tl.zeros([BC, NP], dtype=tl.float32)
    moment = tl.zeros([BC, NP], dtype=tl.float32)
    first = tl.zeros([BC, GP], dtype=tl.float32)
    second = tl.zeros([BC, GP], dtype=tl.float32)
    slot = tl.arange(0, GP)
    own = (tl.arange(0, G * Q) // Q)[:, None] == slot[None, :]  # the atom of every row
    inside = tl.where(own, 1.0, 0.0).to(y.dtype.element_ty)
    for tile in tl.range(tl.program_id(1), tiles, tl.num_programs(1), num_stages=STAGES):
        begin = tile // T * G
        if G == 1:  # the slopes first: what they are needed for comes last
            slope = tl.load(slopes + (begin * C + c), mask=ok_c, other=0.0)[:, None]
        else:
            exists = (slot < G) & (begin + slot < batch * (L * L))
            at = slopes + ((begin + slot)[None, :] * C + c[:, None])
            slope = tl.load(at, mask=ok_c[:, None] & exists[None, :], other=0.0)
        start, pixel, ok = find_pixels(tile // T, tile % T, batch, H, W, L, L * L, G, Q)
        # y as the products take it, channels down: a tile of rows would go through shared memory once more
        at = y + start * C + (pixel[None, :] * C + c[:, None])
        at_q = q + start * N + (pixel[:, None] * N + n[None, :])
        if FULL:
            x = tl.load(at)
            scaled = tl.load(at_q)
        else:  # what is on in rows that do not exist is no matter: they are in no atom, and q is 0 there
            x = tl.load(at, mask=tl.trans(tile_mask(ok, c, C, BC)), other=0.0)
            scaled = tl.load(at_q, mask=tile_mask(ok, n, N, NP), other=0.0)
            inside = tl.where(own & ok[:, None], 1.0, 0.0).to(x.dtype)
        if PACKED:
            on = tl.inline_asm_elementwise(
                "{ .reg .b32 signed; mul.rn.bf16x2 signed, $1, $2; set.gt.bf16x2.bf16x2 $0, signed, $3; }",
                "=r,r,r,r",
                [x, sign, edge],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=2,
            )
            kept = tl.inline_asm_elementwise(
                "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, on], dtype=tl.bfloat16, is_pure=True, pack=2
            )
        else:
            z = x.to(tl.float32) * scale[:, None] + shift[:, None]
            on = tl.where(z > 0.0, 1.0, 0.0).to(x.dtype)
            kept = tl.where(z > 0.0, x, 0.0).to(x.dtype)
        count = tl.dot(on, scaled, count, input_precision=PRECISION)
        moment = tl.dot(kept, scaled, moment, input_precision=PRECISION)
        here = tl.dot(on, inside, input_precision=PRECISION)
        there = tl.dot(kept, inside, input_precision=PRECISION)
        first += here * slope
        second += there * slope
    part += tl.program_id(1).to(tl.int64) * ((2 * N + 2) * C)
    at = part + n[None, :] * C + c[:, None]
    keep = ok_c[:, None] & (n < N)[None, :]
    tl.store(at, count, mask=keep)
    tl.store(at + N * C, moment, mask=keep)
    tl.store(part + 2 * N * C + c, tl.sum(first, axis=1), mask=ok_c)
    tl.store(part + (2 * N + 1) * C + c, tl.sum(second, axis=1), mask=ok_c)


@triton.jit
def weigh_slopes(
    on: tl.tensor,
    moment: tl.tensor,
    energy: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    scale: tl.tensor,
    shift: tl.tensor,
) -> tl.tensor:
    """The sums of A f and A f xhat from those of A on, A on y and A f^2: f^2 = f (gamma xhat + beta) where f is on.

    Where gamma is so small that dividing by it would amplify rounding, f is on everywhere or nowhere, and xhat^2, of
    which little comes in, stands for its mean: 1.
    """
    gamma = scale / rstd
    beta = shift + mean * scale
    first = scale * moment + shift * on
    small = tl.abs(gamma) <= 5e-3 * tl.abs(beta)
    near = beta * rstd * (moment - mean * on) + gamma * on
    second = tl.where(small, near, (energy - beta * first) / tl.where(small, 1.0, gamma))
    return first, second


@triton.jit
def finish_kernel(
    sums: tl.tensor,
    part: tl.tensor,
    energy: tl.tensor,
    w: tl.tensor,
    stats: tl.tensor,
    workers: tl.tensor,
    pieces: tl.tensor,
    C: tl.constexpr,
    N: tl.constexpr,
    BC: tl.constexpr,
    NP: tl.constexpr,
    PB: tl.constexpr,
    WB: tl.constexpr,
) -> None:
    """(N + 2, C): dW, the sum of dz (dbeta) and of dz * xhat (dgamma), from the workers' sums.

    f = scale * y + shift where it is on, so dW needs no sum of its own, and W carries both sums to dz. PB: 0 where the
    workers have the sums of A f and A f y themselves, or at least the ``pieces`` in which the sum of A f^2 comes. WB:
    workers added at once.
    """
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    n = tl.arange(0, NP)
    ok = c < C
    keep = (n < N)[:, None] & ok[None, :]
    at = n[:, None] * C + c[None, :]
    first = tl.zeros([WB, BC], dtype=tl.float32)
    second = tl.zeros([WB, BC], dtype=tl.float32)
    if N > 0:
        counts = tl.zeros([WB, NP, BC], dtype=tl.float32)
        moments = tl.zeros([WB, NP, BC], dtype=tl.float32)
    for begin in range(0, workers, WB):
        worker = begin + tl.arange(0, WB)
        own = part + worker[:, None] * ((2 * N + 2) * C) + c[None, :]
        there = (worker < workers)[:, None] & ok[None, :]
        first += tl.load(own + 2 * N * C, mask=there, other=0.0)
        second += tl.load(own + (2 * N + 1) * C, mask=there, other=0.0)
        if N > 0:
            own = part + (worker[:, None, None] * ((2 * N + 2) * C) + at[None, :, :])
            there = (worker < workers)[:, None, None] & keep[None, :, :]
            counts += tl.load(own, mask=there, other=0.0)
            moments += tl.load(own + N * C, mask=there, other=0.0)
    first = tl.sum(first, axis=0)
    second = tl.sum(second, axis=0)
    mean = tl.load(stats + c, mask=ok, other=0.0)
    rstd = tl.load(stats + C + c, mask=ok, other=1.0)
    scale = tl.load(stats + 2 * C + c, mask=ok, other=0.0)
    shift = tl.load(stats + 3 * C + c, mask=ok, other=0.0)
    if PB > 0:
        piece = tl.arange(0, PB)
        own = (piece < pieces)[:, None] & ok[None, :]
        total = tl.sum(tl.load(energy + piece[:, None] * C + c[None, :], mask=own, other=0.0), axis=0)
        first, second = weigh_slopes(first, second, total, mean, rstd, scale, shift)
    else:
        second = rstd * (second - mean * first)
    if N > 0:
        count = tl.sum(counts, axis=0)
        moment = tl.sum(moments, axis=0)
        tl.store(sums + at, scale[None, :] * moment + shift[None, :] * count, mask=keep)
        weight = tl.load(w + at, mask=keep, other=0.0).to(tl.float32)
        through = tl.sum(weight * count, axis=0)
        first += through
        second += rstd * (tl.sum(weight * moment, axis=0) - mean * through)
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
