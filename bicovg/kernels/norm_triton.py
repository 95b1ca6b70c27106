"""Triton kernels of the fused batch norm; launched by ``bicovg.kernels.block``, which explains the design.

y is (rows, C) in memory, rows = B * H * W: a channels_last map. ``stats`` is (4, C) float32: mean, 1 / std, and the
scale and shift that ``f = relu(scale * y + shift)`` needs.
"""
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl


@triton.jit
def relu(z: tl.tensor) -> tl.tensor:
    """max(z, 0), but NaN stays NaN, so that the guard sees it."""
    return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def activate(
    y: tl.tensor, stats: tl.tensor, c: tl.tensor, mask: tl.tensor, C: tl.constexpr, BC: tl.constexpr
) -> tl.tensor:
    """``relu(scale * y + shift)`` of a tile (rows, BC) in float32; 0 outside the mask."""
    if C % BC == 0:
        scale = tl.load(stats + 2 * C + c)
        shift = tl.load(stats + 3 * C + c)
    else:
        scale = tl.load(stats + 2 * C + c, mask=c < C, other=0.0)
        shift = tl.load(stats + 3 * C + c, mask=c < C, other=0.0)
    z = y.to(tl.float32) * scale[None, :] + shift[None, :]
    return tl.where(mask, relu(z), 0.0)


@triton.jit
def load_centred(
    y: tl.tensor, r: tl.tensor, c: tl.tensor, pivot: tl.tensor, rows: tl.tensor, C: tl.constexpr
) -> tl.tensor:
    """y - pivot of rows r and channels c in float32, 0 where there is none."""
    mask = (r < rows)[:, None] & (c < C)[None, :]
    x = tl.load(y + r.to(tl.int64)[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, x - pivot[None, :], 0.0)


@triton.jit
def moments_kernel(
    part: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    C: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Sums of y - pivot and of its square over a program's rows; the pivot, y's first row, tames cancellation."""
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    pivot = tl.load(y + c, mask=c < C, other=0.0).to(tl.float32)
    total = tl.zeros([BR, BC], dtype=tl.float32)
    square = tl.zeros([BR, BC], dtype=tl.float32)
    for r0 in tl.range(tl.program_id(0) * BR, rows, tl.num_programs(0) * BR, num_stages=STAGES):
        x = load_centred(y, r0 + tl.arange(0, BR), c, pivot, rows, C)
        total += x
        square += x * x
    at = part + tl.program_id(0) * (2 * C) + c
    tl.store(at, tl.sum(total, axis=0), mask=c < C)
    tl.store(at + C, tl.sum(square, axis=0), mask=c < C)


@triton.jit
def store_statistics(
    stats: tl.tensor,
    running_mean: tl.tensor,
    running_var: tl.tensor,
    batches: tl.tensor,
    pivot: tl.tensor,
    total: tl.tensor,
    square: tl.tensor,
    gamma: tl.tensor,
    beta: tl.tensor,
    rows: tl.tensor,
    momentum: tl.tensor,
    eps: tl.tensor,
    c: tl.tensor,
    C: tl.constexpr,
) -> None:
    """Statistics of channels c from the sums of y - pivot and of its square; the running statistics move here too."""
    ok = c < C
    offset = total / rows
    variance = relu(square / rows - offset * offset)
    mean = offset + pivot
    rstd = 1.0 / tl.sqrt(variance + eps)
    scale = tl.load(gamma + c, mask=ok, other=0.0) * rstd
    tl.store(stats + c, mean, mask=ok)
    tl.store(stats + C + c, rstd, mask=ok)
    tl.store(stats + 2 * C + c, scale, mask=ok)
    tl.store(stats + 3 * C + c, tl.load(beta + c, mask=ok, other=0.0) - mean * scale, mask=ok)
    old = tl.load(running_mean + c, mask=ok, other=0.0)
    tl.store(running_mean + c, old + momentum * (mean - old), mask=ok)
    old = tl.load(running_var + c, mask=ok, other=0.0)
    unbiased = variance * (rows / tl.maximum(rows - 1.0, 1.0))
    tl.store(running_var + c, old + momentum * (unbiased - old), mask=ok)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)


@triton.jit
def statistics_kernel(
    stats: tl.tensor,
    running_mean: tl.tensor,
    running_var: tl.tensor,
    batches: tl.tensor,
    part: tl.tensor,
    y: tl.tensor,
    gamma: tl.tensor,
    beta: tl.tensor,
    rows: tl.tensor,
    parts: tl.tensor,
    momentum: tl.tensor,
    eps: tl.tensor,
    C: tl.constexpr,
    PB: tl.constexpr,
    BC: tl.constexpr,
) -> None:
    """Batch statistics from the programs' sums, in a fixed order."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    ok = c < C
    total = tl.zeros([BC], dtype=tl.float32)
    square = tl.zeros([BC], dtype=tl.float32)
    for p0 in range(0, parts, PB):
        row = p0 + tl.arange(0, PB)
        mask = (row < parts)[:, None] & ok[None, :]
        at = part + row[:, None] * (2 * C) + c[None, :]
        total += tl.sum(tl.load(at, mask=mask, other=0.0), axis=0)
        square += tl.sum(tl.load(at + C, mask=mask, other=0.0), axis=0)
    pivot = tl.load(y + c, mask=ok, other=0.0).to(tl.float32)
    store_statistics(
        stats, running_mean, running_var, batches, pivot, total, square, gamma, beta, rows, momentum, eps, c, C
    )  # fmt: skip


@triton.jit
def few_rows_kernel(
    stats: tl.tensor,
    running_mean: tl.tensor,
    running_var: tl.tensor,
    batches: tl.tensor,
    y: tl.tensor,
    gamma: tl.tensor,
    beta: tl.tensor,
    rows: tl.tensor,
    momentum: tl.tensor,
    eps: tl.tensor,
    C: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
) -> None:
    """Batch statistics in one launch, a program going through all rows of its channels."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    pivot = tl.load(y + c, mask=c < C, other=0.0).to(tl.float32)
    total = tl.zeros([BR, BC], dtype=tl.float32)
    square = tl.zeros([BR, BC], dtype=tl.float32)
    for r0 in range(0, rows, BR):
        x = load_centred(y, r0 + tl.arange(0, BR), c, pivot, rows, C)
        total += x
        square += x * x
    total = tl.sum(total, axis=0)
    square = tl.sum(square, axis=0)
    store_statistics(
        stats, running_mean, running_var, batches, pivot, total, square, gamma, beta, rows, momentum, eps, c, C
    )  # fmt: skip
