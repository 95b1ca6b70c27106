"""Triton kernels of the fused goodness; launched by ``bicovg.kernels.goodness``, which explains the design.

Vocabulary: the map is cut into L x L *atoms* (L = lcm of the scales, edges floor(i * H / L)), so every cell
of every scale is a rectangle of whole atoms. A tile is G atoms of Q pixel slots each, a power of two of them a row;
slots past an atom's edge are masked. A large atom is cut into T steps of Q slots. f is (B, H, W, C) in memory,
K = C + N energies.
"""
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl

from bicovg.kernels.norm_triton import relu


@triton.jit
def find_atoms(slot: tl.tensor, batch: tl.tensor, L: tl.constexpr, AP: tl.constexpr) -> tl.tensor:
    """Sample, atom row, atom column and existence of each atom slot (AP slots a sample, L * L in use)."""
    b = slot // AP
    a = slot % AP
    return b, a // L, a % L, (b < batch) & (a < L * L)


@triton.jit
def find_pixels(
    first: tl.tensor,
    step: tl.tensor,
    batch: tl.tensor,
    H: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    AP: tl.constexpr,
    G: tl.constexpr,
    Q: tl.constexpr,
) -> tl.tensor:
    """The first pixel of a tile's first sample, each of the G * Q rows' distance from it, and which rows exist.

    Only that one number needs 64 bits; the rows' addresses are 32-bit distances from it.
    """
    r = tl.arange(0, G * Q)
    sample = first * G // AP
    b, i, j, ok = find_atoms(first * G + r // Q, batch, L, AP)
    q = step * Q + r % Q
    M: tl.constexpr = triton.next_power_of_2((W + L - 1) // L)  # slots of an atom's row
    row = i * H // L + q // M
    col = j * W // L + q % M
    ok = ok & (row < (i + 1) * H // L) & (col < (j + 1) * W // L)
    return tl.full((), H * W, tl.int64) * sample, ((b - sample) * H + row) * W + col, ok


@triton.jit
def cell_size(i: tl.tensor, j: tl.tensor, H: tl.constexpr, W: tl.constexpr, S: tl.constexpr) -> tl.tensor:
    """Pixels of cell (i, j) of the S x S grid."""
    return ((i + 1) * H // S - i * H // S) * ((j + 1) * W // S - j * W // S)


@triton.jit
def tile_mask(ok: tl.tensor, c: tl.tensor, C: tl.constexpr, BC: tl.constexpr) -> tl.tensor:
    """Rows and columns that exist; no column test when blocks divide C, which keeps loads wide."""
    if C % BC == 0:
        return ok[:, None]
    else:  # noqa: RET505  (Triton compiles only the branch taken when both are written out)
        return ok[:, None] & (c < C)[None, :]


@triton.jit
def store_cells(
    g: tl.tensor,
    energy: tl.tensor,
    ch: tl.tensor,
    ch_ok: tl.tensor,
    first: tl.tensor,
    batch: tl.tensor,
    D: tl.constexpr,
    OFF: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    AP: tl.constexpr,
    G: tl.constexpr,
    BC: tl.constexpr,
) -> None:
    """Write one scale's cell means from the atom sums ``energy`` (G, BC) of G / AP whole samples."""
    b, i, j, ok = find_atoms(first * G + tl.arange(0, G), batch, L, AP)
    if S == L:  # an atom is a cell
        at = g + b.to(tl.int64)[:, None] * D + OFF + ch[None, :] * (S * S) + (i * S + j)[:, None]
        size = cell_size(i, j, H, W, S).to(tl.float32)
        tl.store(at, energy / size[:, None], mask=ok[:, None] & ch_ok[None, :])
    else:
        R: tl.constexpr = G // AP
        sample = first * R + tl.arange(0, R)
        cell = i // (L // S) * S + j // (L // S)
        for target in tl.static_range(S * S):
            inside = tl.where((ok & (cell == target))[:, None], energy, 0.0)
            total = tl.sum(tl.reshape(inside, [R, AP, BC]), axis=1)
            size = cell_size(target // S, target % S, H, W, S)
            at = g + sample.to(tl.int64)[:, None] * D + OFF + ch[None, :] * (S * S) + target
            tl.store(at, total / size, mask=(sample < batch)[:, None] & ch_ok[None, :])


@triton.jit
def store_energy(
    out: tl.tensor,
    energy: tl.tensor,
    ch: tl.tensor,
    ch_ok: tl.tensor,
    first: tl.tensor,
    step: tl.tensor,
    batch: tl.tensor,
    K: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    AP: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
    BC: tl.constexpr,
    DIRECT: tl.constexpr,
) -> None:
    """Atom sums (G, BC): into g when the tile holds whole samples, else into the (B, L * L, T, K) parts."""
    if DIRECT:
        D: tl.constexpr = K * (S1 * S1 + S2 * S2)
        store_cells(out, energy, ch, ch_ok, first, batch, D, 0, S1, H, W, L, AP, G, BC)
        if S2 > 0:
            store_cells(out, energy, ch, ch_ok, first, batch, D, K * S1 * S1, S2, H, W, L, AP, G, BC)
    else:
        slot = first * G + tl.arange(0, G)
        at = out + (slot * T + step).to(tl.int64)[:, None] * K + ch[None, :]
        tl.store(at, energy, mask=(slot < batch * AP)[:, None] & ch_ok[None, :])


@triton.jit
def pin(x: tl.tensor) -> tl.tensor:
    """x, float32, computed here: what an assembler statement takes is not repeated in another layout, nor put off."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def forward_kernel(
    out: tl.tensor,
    p: tl.tensor,
    f: tl.tensor,
    w: tl.tensor,
    stats: tl.tensor,
    batch: tl.tensor,
    C: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    AP: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
    Q: tl.constexpr,
    BC: tl.constexpr,
    NP: tl.constexpr,
    DIRECT: tl.constexpr,
    KEEP: tl.constexpr,
    NORM: tl.constexpr,
    FULL: tl.constexpr,
    WAIT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Sums of f^2 and (W f)^2 over the atoms of one tile, f read once; p = W f is kept on request.

    With NORM the tensor f holds y, and f = relu(batch norm(y)) is made on the way in. FULL: every row of every tile
    exists, so that no mask is needed. WAIT: for every product before going on (see ``tiles``).
    """
    first = tl.program_id(0) // T
    step = tl.program_id(0) % T
    K: tl.constexpr = C + N
    base, pixel, ok = find_pixels(first, step, batch, H, W, L, AP, G, Q)
    f += base * C
    n = tl.arange(0, NP)
    proj = tl.zeros([G * Q, NP], dtype=tl.float32)
    for c0 in tl.range(0, C, BC, num_stages=STAGES):
        c = c0 + tl.arange(0, BC)
        mask = tile_mask(ok, c, C, BC)
        if FULL:
            x = tl.load(f + (pixel[:, None] * C + c[None, :]))
        else:
            x = tl.load(f + (pixel[:, None] * C + c[None, :]), mask=mask, other=0.0)
        wide = x.to(tl.float32)
        if NORM:
            ok_c = c < C
            scale = tl.load(stats + 2 * C + c, mask=ok_c, other=0.0)
            shift = tl.load(stats + 3 * C + c, mask=ok_c, other=0.0)
            wide = relu(wide * scale[None, :] + shift[None, :])
            wide = pin(wide) if FULL else tl.where(mask, wide, 0.0)  # either keeps Triton from computing f twice
            x = wide.to(x.dtype)
        energy = tl.sum(tl.reshape(wide * wide, [G, Q, BC]), axis=1)
        store_energy(
            out, energy, c, c < C, first, step, batch, K, H, W, L, S1, S2, AP, T, G, BC, DIRECT
        )  # fmt: skip
        if N > 0:
            weight = tl.load(w + n[:, None] * C + c[None, :], mask=tile_mask(n < N, c, C, BC), other=0.0)
            proj = tl.dot(x, tl.trans(weight), proj, input_precision=PRECISION)
            if WAIT:
                proj = pin(proj)
    if N > 0:
        if KEEP:
            at = p + base * N + (pixel[:, None] * N + n[None, :])
            if FULL:
                tl.store(at, proj.to(p.dtype.element_ty))
            else:
                tl.store(at, proj.to(p.dtype.element_ty), mask=tile_mask(ok, n, N, NP))
        energy = tl.sum(tl.reshape(proj * proj, [G, Q, NP]), axis=1)
        store_energy(
            out, energy, C + n, n < N, first, step, batch, K, H, W, L, S1, S2, AP, T, G, NP, DIRECT
        )  # fmt: skip


@triton.jit
def stream_kernel(
    out: tl.tensor,
    p: tl.tensor,
    f: tl.tensor,
    w: tl.tensor,
    stats: tl.tensor,
    batch: tl.tensor,
    C: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    T: tl.constexpr,
    Q: tl.constexpr,
    BC: tl.constexpr,
    NP: tl.constexpr,
    KEEP: tl.constexpr,
    NORM: tl.constexpr,
    FULL: tl.constexpr,
    WAIT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """The same for large atoms one after the other, where one block holds all channels: W and sums stay on the chip."""
    c = tl.arange(0, BC)
    n = tl.arange(0, NP)
    ok_c = c < C
    if NORM:
        scale = tl.load(stats + 2 * C + c, mask=ok_c, other=0.0)
        shift = tl.load(stats + 3 * C + c, mask=ok_c, other=0.0)
    if N > 0:
        weight = tl.load(w + n[:, None] * C + c[None, :], mask=tile_mask(n < N, c, C, BC), other=0.0)
        squares = tl.zeros([Q, NP], dtype=tl.float32)
    total = tl.zeros([16, BC], dtype=tl.float32)
    own = tl.cdiv(batch * (L * L) - tl.program_id(0), tl.num_programs(0))
    for i in tl.range(0, own * T, num_stages=STAGES):  # all steps of all atoms in one loop: loads never pause
        atom = tl.program_id(0) + i // T * tl.num_programs(0)
        base, pixel, ok = find_pixels(atom, i % T, batch, H, W, L, L * L, 1, Q)
        mask = tile_mask(ok, c, C, BC)
        if FULL:
            x = tl.load(f + base * C + (pixel[:, None] * C + c[None, :]))
        else:
            x = tl.load(f + base * C + (pixel[:, None] * C + c[None, :]), mask=mask, other=0.0)
        wide = x.to(tl.float32)
        if NORM:
            wide = relu(wide * scale[None, :] + shift[None, :])
            wide = pin(wide) if FULL else tl.where(mask, wide, 0.0)
            x = wide.to(x.dtype)
        total += tl.sum(tl.reshape(wide * wide, [Q // 16, 16, BC]), axis=0)
        if N > 0:
            proj = tl.dot(x, tl.trans(weight), input_precision=PRECISION)
            if WAIT:
                proj = pin(proj)
            squares += proj * proj
            if KEEP:
                at = p + base * N + (pixel[:, None] * N + n[None, :])
                if FULL:
                    tl.store(at, proj.to(p.dtype.element_ty))
                else:
                    tl.store(at, proj.to(p.dtype.element_ty), mask=tile_mask(ok, n, N, NP))
        if i % T == T - 1:
            place = out + atom.to(tl.int64) * (C + N)
            tl.store(place + c, tl.sum(total, axis=0), mask=ok_c)
            total = tl.zeros([16, BC], dtype=tl.float32)
            if N > 0:
                tl.store(place + C + n, tl.sum(squares, axis=0), mask=n < N)
                squares = tl.zeros([Q, NP], dtype=tl.float32)


@triton.jit
def combine_scale(
    g: tl.tensor,
    part: tl.tensor,
    b: tl.tensor,
    block: tl.tensor,
    K: tl.constexpr,
    D: tl.constexpr,
    OFF: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    T: tl.constexpr,
    BD: tl.constexpr,
) -> None:
    """BD elements of one scale's part of g from the atom sums, added in a fixed order."""
    e = block * BD + tl.arange(0, BD)
    ok = e < K * S * S
    i = e % (S * S) // S
    j = e % S
    k: tl.constexpr = L // S
    total = tl.zeros([BD], dtype=tl.float32)
    for u in range(k * k * T):
        atom = (i * k + u // T // k) * L + j * k + u // T % k
        row = (b.to(tl.int64) * (L * L) + atom) * T + u % T
        total += tl.load(part + row * K + e // (S * S), mask=ok, other=0.0)
    size = cell_size(i, j, H, W, S).to(tl.float32)
    tl.store(g + b.to(tl.int64) * D + OFF + e, total / size, mask=ok)


@triton.jit
def combine_kernel(
    g: tl.tensor,
    part: tl.tensor,
    K: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    T: tl.constexpr,
    BD: tl.constexpr,
) -> None:
    """Atom sums to cell means; the second grid axis runs over the blocks of scale 1, then of scale 2."""
    D: tl.constexpr = K * (S1 * S1 + S2 * S2)
    blocks: tl.constexpr = (K * S1 * S1 + BD - 1) // BD
    b = tl.program_id(0)
    block = tl.program_id(1)
    if block < blocks:
        combine_scale(g, part, b, block, K, D, 0, S1, H, W, L, T, BD)
    elif S2 > 0:
        combine_scale(g, part, b, block - blocks, K, D, K * S1 * S1, S2, H, W, L, T, BD)
