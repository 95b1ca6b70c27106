"""Triton kernel of the slopes, the gradient of the goodness per pixel and energy; geometry as in ``goodness_triton``.

The slope A of an energy in an atom is 2 x the gradient of each cell that holds it / the cell's pixels.
"""
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl

from bicovg.kernels.goodness_triton import cell_size, find_pixels, tile_mask


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
def energy_of(
    grad: tl.tensor,
    g: tl.tensor,
    b: tl.tensor,
    i: tl.tensor,
    j: tl.tensor,
    k: tl.tensor,
    mask: tl.tensor,
    K: tl.constexpr,
    L: tl.constexpr,
    S: tl.constexpr,
    OFF: tl.constexpr,
    D: tl.constexpr,
) -> tl.tensor:
    """Twice grad * g of energies k in the cells of one scale that hold atoms (i, j), shared among a cell's atoms."""
    at = b.to(tl.int64) * D + OFF + k * (S * S) + (i // (L // S) * S + j // (L // S))
    product = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32) * tl.load(g + at, mask=mask, other=0.0)
    return product * (2.0 * S * S / (L * L))


@triton.jit
def store_slopes(
    slopes: tl.tensor,
    energy: tl.tensor,
    grad: tl.tensor,
    g: tl.tensor,
    batch: tl.tensor,
    piece: tl.tensor,
    chunk: tl.tensor,
    C: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    BA: tl.constexpr,
    BC: tl.constexpr,
    ENERGY: tl.constexpr,
) -> None:
    """The slopes of BA atoms and BC channels and, with ENERGY, the sums over those atoms."""
    K: tl.constexpr = C + N
    D: tl.constexpr = K * (S1 * S1 + S2 * S2)
    atom = piece * BA + tl.arange(0, BA)
    b = (atom // (L * L))[:, None]
    i = (atom % (L * L) // L)[:, None]
    j = (atom % L)[:, None]
    c = chunk * BC + tl.arange(0, BC)
    mask = (atom < batch * (L * L))[:, None] & (c < C)[None, :]
    slope = slope_of(grad, b, i, j, c[None, :], mask, K, H, W, L, S1, S2)
    tl.store(slopes + (atom.to(tl.int64)[:, None] * C + c[None, :]), slope, mask=mask)
    if ENERGY:
        part = energy_of(grad, g, b, i, j, c[None, :], mask, K, L, S1, 0, D)
        if S2 > 0:
            part += energy_of(grad, g, b, i, j, c[None, :], mask, K, L, S2, K * S1 * S1, D)
        tl.store(energy + piece * C + c, tl.sum(part, axis=0), mask=c < C)


@triton.jit
def scale_atoms(x: tl.tensor, slope: tl.tensor, G: tl.constexpr, Q: tl.constexpr, BN: tl.constexpr) -> tl.tensor:
    """A tile (G * Q, BN) times the slopes (G, BN) of its atoms, float32."""
    if G == 1:
        return x.to(tl.float32) * slope
    else:  # noqa: RET505  (Triton compiles only the branch taken when both are written out)
        return tl.reshape(tl.reshape(x.to(tl.float32), [G, Q, BN]) * slope[:, None, :], [G * Q, BN])


@triton.jit
def scale_pixels(
    q: tl.tensor,
    p: tl.tensor,
    grad: tl.tensor,
    batch: tl.tensor,
    tile: tl.tensor,
    C: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
    Q: tl.constexpr,
    NP: tl.constexpr,
) -> None:
    """q = A' p for a tile of G atoms of Q pixels each, whose slopes are looked up once an atom."""
    n = tl.arange(0, NP)
    slot = tile // T * G + tl.arange(0, G)
    mask = (slot < batch * (L * L))[:, None] & (n < N)[None, :]
    b = (slot // (L * L))[:, None]
    i = (slot % (L * L) // L)[:, None]
    j = (slot % L)[:, None]
    slope = slope_of(grad, b, i, j, (C + n)[None, :], mask, C + N, H, W, L, S1, S2)
    start, pixel, ok = find_pixels(tile // T, tile % T, batch, H, W, L, L * L, G, Q)
    mask = tile_mask(ok, n, N, NP)
    at = pixel[:, None] * N + n[None, :]
    x = scale_atoms(tl.load(p + start * N + at, mask=mask, other=0.0), slope, G, Q, NP)
    tl.store(q + start * N + at, x.to(q.dtype.element_ty), mask=mask)


@triton.jit
def slopes_kernel(
    slopes: tl.tensor,
    energy: tl.tensor,
    q: tl.tensor,
    p: tl.tensor,
    grad: tl.tensor,
    g: tl.tensor,
    batch: tl.tensor,
    C: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
    Q: tl.constexpr,
    BA: tl.constexpr,
    BC: tl.constexpr,
    NP: tl.constexpr,
    ENERGY: tl.constexpr,
) -> None:
    """Two kinds of programs: the slopes A (B, L * L, C) of BA atoms; and q = A' p of a tile, where q may be p.

    With ENERGY the first kind also sums A f^2 over its atoms' pixels, for every channel.
    """
    chunks: tl.constexpr = (C + BC - 1) // BC
    pid = tl.program_id(0)
    count = (batch * (L * L) + BA - 1) // BA * chunks
    if pid < count:
        store_slopes(
            slopes, energy, grad, g, batch, pid // chunks, pid % chunks, C, N, H, W, L, S1, S2, BA, BC, ENERGY
        )  # fmt: skip
    elif N > 0:
        scale_pixels(q, p, grad, batch, pid - count, C, N, H, W, L, S1, S2, T, G, Q, NP)
