"""Triton kernel of the fused goodness's backward pass; vocabulary and geometry in ``goodness_triton``."""
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl

from bicovg.kernels.goodness_triton import find_atoms, find_pixels, tile_mask
from bicovg.kernels.slopes_triton import slope_of


@triton.jit
def load_slopes(
    grad: tl.tensor,
    ch: tl.tensor,
    ch_ok: tl.tensor,
    slot: tl.tensor,
    batch: tl.tensor,
    K: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
) -> tl.tensor:
    """(G, channels): 2 * sum over scales of the gradient of the atom's cell / the pixels of that cell."""
    b, i, j, ok = find_atoms(slot, batch, L, L * L)
    mask = ok[:, None] & ch_ok[None, :]
    return slope_of(grad, b[:, None], i[:, None], j[:, None], ch[None, :], mask, K, H, W, L, S1, S2)


@triton.jit
def scale_rows(x: tl.tensor, slope: tl.tensor, G: tl.constexpr, Q: tl.constexpr, BC: tl.constexpr) -> tl.tensor:
    """Multiply the Q rows of each atom by the atom's slopes."""
    return tl.reshape(tl.reshape(x.to(tl.float32), [G, Q, BC]) * slope[:, None, :], [G * Q, BC])


@triton.jit
def backward_kernel(
    df: tl.tensor,
    part: tl.tensor,
    grad: tl.tensor,
    f: tl.tensor,
    w: tl.tensor,
    p: tl.tensor,
    batch: tl.tensor,
    tiles: tl.tensor,
    workers: tl.tensor,
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
    BC: tl.constexpr,
    NP: tl.constexpr,
    KEPT: tl.constexpr,
    MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """df and this worker's share of dW for one block of channels, looping over tiles; W stays on the chip."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    n = tl.arange(0, NP)
    K: tl.constexpr = C + N
    if N > 0:
        weight = tl.load(w + n[:, None] * C + c[None, :], mask=tile_mask(n < N, c, C, BC), other=0.0)
        dw = tl.zeros([BC, NP], dtype=tl.float32)
    for tile in tl.range(tl.program_id(1), tiles, workers, num_stages=STAGES):
        slot = tile // T * G + tl.arange(0, G)
        start, pixel, ok = find_pixels(tile // T, tile % T, batch, H, W, L, L * L, G, Q)
        mask = tile_mask(ok, c, C, BC)
        x = tl.load(f + start * C + (pixel[:, None] * C + c[None, :]), mask=mask, other=0.0)
        slope_f = load_slopes(grad, c, c < C, slot, batch, K, H, W, L, S1, S2)
        if N > 0:
            if KEPT:
                at = p + start * N + (pixel[:, None] * N + n[None, :])
                proj = tl.load(at, mask=tile_mask(ok, n, N, NP), other=0.0)
            else:
                proj = tl.dot(x, tl.trans(weight), input_precision=PRECISION)
            slope = load_slopes(grad, C + n, n < N, slot, batch, K, H, W, L, S1, S2)
            q = scale_rows(proj, slope, G, Q, NP).to(x.dtype)
            d = tl.dot(q, weight, input_precision=PRECISION) + scale_rows(x, slope_f, G, Q, BC)
            dw = tl.dot(tl.trans(x), q, dw, input_precision=PRECISION)
        else:
            d = scale_rows(x, slope_f, G, Q, BC)
        if MASK:
            d = tl.where(x == 0.0, 0.0, d)
        tl.store(df + start * C + (pixel[:, None] * C + c[None, :]), d.to(df.dtype.element_ty), mask=mask)
    if N > 0:
        at = part + tl.program_id(1).to(tl.int64) * (N * C) + n[None, :] * C + c[:, None]
        tl.store(at, dw, mask=(c < C)[:, None] & (n < N)[None, :])
