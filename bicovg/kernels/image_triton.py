"""Triton kernels of the convolution that reads the image; launched by ``bicovg.kernels.image``.

x is (B, H, W, C) in memory, y and dy are (rows, D), rows = B * H * W. A pixel's patch is the 9 C numbers around it, tap
by tap, zero outside the image, in KP columns: the convolution is one product with the weights (KP, D).
"""
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl


@triton.jit
def load_patches(
    x: tl.tensor,
    r: tl.tensor,
    rows: tl.tensor,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    KP: tl.constexpr,
) -> tl.tensor:
    """The patches (BR, KP) of pixels r."""
    k = tl.arange(0, KP)
    di = k // (3 * C) - 1
    dj = k // C % 3 - 1
    i = (r // W % H)[:, None] + di[None, :]
    j = (r % W)[:, None] + dj[None, :]
    inside = (i >= 0) & (i < H) & (j >= 0) & (j < W)
    at = x + r.to(tl.int64)[:, None] * C + ((di * W + dj) * C + k % C)[None, :]
    return tl.load(at, mask=inside & (r < rows)[:, None] & (k < 9 * C)[None, :], other=0.0)


@triton.jit
def image_kernel(
    y: tl.tensor,
    x: tl.tensor,
    w: tl.tensor,
    rows: tl.tensor,
    stride_d: tl.tensor,
    stride_c: tl.tensor,
    stride_i: tl.tensor,
    stride_j: tl.tensor,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    KP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """BR rows of y, BD of its channels."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    k = tl.arange(0, KP)
    at = (k % C * stride_c + k // (3 * C) * stride_i + k // C % 3 * stride_j)[:, None] + (d * stride_d)[None, :]
    weight = tl.load(w + at, mask=(k < 9 * C)[:, None] & (d < D)[None, :], other=0.0)
    patches = load_patches(x, r, rows, C, H, W, KP)
    out = tl.dot(patches, weight, input_precision=PRECISION)
    at = y + r.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(at, out.to(y.dtype.element_ty), mask=(r < rows)[:, None] & (d < D)[None, :])


@triton.jit
def image_weight_kernel(
    part: tl.tensor,
    dy: tl.tensor,
    x: tl.tensor,
    rows: tl.tensor,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    KP: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """A worker's sum over pixels of dy times patch, (D, KP)."""
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    k = tl.arange(0, KP)
    total = tl.zeros([KP, BD], dtype=tl.float32)
    for first in tl.range(tl.program_id(0) * BR, rows, tl.num_programs(0) * BR, num_stages=STAGES):
        r = first + tl.arange(0, BR)
        at = dy + r.to(tl.int64)[:, None] * D + d[None, :]
        slope = tl.load(at, mask=(r < rows)[:, None] & (d < D)[None, :], other=0.0)
        patches = load_patches(x, r, rows, C, H, W, KP)
        total = tl.dot(tl.trans(patches), slope, total, input_precision=PRECISION)
    at = part + tl.program_id(0).to(tl.int64) * (D * KP) + d[None, :] * KP + k[:, None]
    tl.store(at, total, mask=(d < D)[None, :])
