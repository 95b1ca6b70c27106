"""Triton kernel behind ``bicovg.kernels.borders``."""
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl

from bicovg.kernels.goodness_triton import tile_mask


@triton.jit
def borders_kernel(
    sums: tl.tensor,
    dy: tl.tensor,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """(C, 9) of one sample and BC channels; row 3 i + j of the product: the pixels whose tap (i, j) is in the map."""
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    tap = tl.arange(0, 16)
    i = (tap // 3)[:, None]
    j = (tap % 3)[:, None]
    dy += tl.program_id(0).to(tl.int64) * (H * W * C)
    total = tl.zeros([16, BC], dtype=tl.float32)
    for begin in tl.range(0, H * W, BP, num_stages=STAGES):
        pixel = begin + tl.arange(0, BP)
        x = tl.load(dy + (pixel[:, None] * C + c[None, :]), mask=tile_mask(pixel < H * W, c, C, BC), other=0.0)
        row = (pixel // W)[None, :] + i - 1
        col = (pixel % W)[None, :] + j - 1
        inside = (row >= 0) & (row < H) & (col >= 0) & (col < W)
        total = tl.dot(tl.where(inside, 1.0, 0.0).to(x.dtype), x, total, input_precision=PRECISION)
    at = sums + tl.program_id(0).to(tl.int64) * (C * 9) + c[None, :] * 9 + tap[:, None]
    tl.store(at, total, mask=(tap < 9)[:, None] & (c < C)[None, :])
