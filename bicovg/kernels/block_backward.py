"""Launches of the fused block's backward pass; ``bicovg.kernels.block`` explains the design."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bicovg.kernels.goodness import scale_pair
from bicovg.kernels.tiles import cut_batch, device_guard, gradient_tile, next_power, sums_tile

SCALED = 4096  # elements of p a program
FEW_WORKERS = 16  # up to here their sums are added where they are used


def differentiate_into(
    dy: Tensor,
    q: Tensor,
    grad: Tensor,
    y: Tensor,
    stats: Tensor,
    cast: Tensor | None,
    p: Tensor,
    scales: Sequence[int],
) -> Tensor:
    """Fill dy, which may be y, and q, which may be p; returns (N + 2, C) float32: dW, dbeta, dgamma."""
    slopes = launch_slopes(q, p, grad.contiguous(), y, scales)
    sums = launch_sums(slopes, y, cast, q, stats, scales)
    launch_gradient(dy, slopes, sums, y, cast, q, stats, scales)
    return sums


def launch_slopes(q: Tensor, p: Tensor, grad: Tensor, y: Tensor, scales: Sequence[int]) -> Tensor:
    """Fill q, which may be p: p times the slopes of its energies. Returns those of f, (B, L * L, C) float32."""
    from bicovg.kernels.block_backward_triton import slopes_kernel

    (B, C, H, W), (rows, N) = y.shape, p.shape
    L = math.lcm(*scales)
    S1, S2 = scale_pair(scales)
    slopes = torch.empty((B, L * L, C), dtype=torch.float32, device=y.device)
    BC, NP = min(512, next_power(C)), max(16, next_power(N)) if N else 16
    BR = max(1, SCALED // NP)
    programs = B * L * L * math.ceil(C / BC) + (math.ceil(rows / BR) if N else 0)
    with device_guard(y):
        slopes_kernel[(programs,)](
            slopes, q, p, grad, B, rows, C=C, N=N, H=H, W=W, L=L, S1=S1, S2=S2, BC=BC, BR=BR, NP=NP, num_warps=4
        )
    return slopes


def count_workers(y: Tensor, pieces: int, chunks: int, per_sm: int) -> int:
    """Programs for each of the ``chunks`` blocks of channels, to share ``pieces`` of work."""
    sms = torch.cuda.get_device_properties(y.device).multi_processor_count if y.is_cuda else 2
    return max(1, min(pieces, per_sm * sms // chunks))


def launch_sums(
    slopes: Tensor, y: Tensor, cast: Tensor | None, q: Tensor, stats: Tensor, scales: Sequence[int]
) -> Tensor:
    """(N + 2, C) float32: dW, dbeta, dgamma."""
    from bicovg.kernels.block_backward_triton import finish_kernel, sums_kernel

    B, C, H, W = y.shape
    N = 0 if cast is None else cast.shape[0]
    tile = sums_tile(C, N, H, y.dtype)
    BC, NP = min(tile.channels, max(16, next_power(C))), max(16, next_power(N)) if N else 16
    rows = B * H * W
    chunks = math.ceil(C / BC)
    workers = count_workers(y, math.ceil(rows / tile.pixels), chunks, tile.per_sm)
    part = torch.empty((workers, 2 * N + 2, C), dtype=torch.float32, device=y.device)
    sums = torch.empty((N + 2, C), dtype=torch.float32, device=y.device)
    with device_guard(y):
        sums_kernel[(chunks, workers)](
            part, y, q, slopes, stats, rows, C=C, N=N, H=H, W=W, L=math.lcm(*scales), BR=tile.pixels, BC=BC, NP=NP,
            PRECISION="ieee", STAGES=tile.stages, num_warps=tile.warps, maxnreg=tile.registers,
        )  # fmt: skip
        if workers > FEW_WORKERS:
            part = part.sum(dim=0, keepdim=True)
        finish_kernel[(math.ceil(C / 16),)](
            sums, part, y if cast is None else cast, stats, len(part), C=C, N=N, BC=16, NP=NP, num_warps=4
        )
    return sums


def launch_gradient(
    dy: Tensor,
    slopes: Tensor,
    sums: Tensor,
    y: Tensor,
    cast: Tensor | None,
    q: Tensor,
    stats: Tensor,
    scales: Sequence[int],
) -> None:
    """Fill dy, channels_last; it may be y."""
    from bicovg.kernels.block_backward_triton import gradient_kernel

    B, C, H, W = y.shape
    N = 0 if cast is None else cast.shape[0]
    tile = gradient_tile(C, N, H, y.dtype)
    cut = cut_batch(B, H, W, scales, tile.pixels, whole=False)
    BC = min(tile.channels, max(16, next_power(C)))
    chunks = math.ceil(C / BC)
    workers = count_workers(y, cut.tiles, chunks, tile.per_sm)
    with device_guard(y):
        gradient_kernel[(chunks, workers)](
            dy, y, q, y if cast is None else cast, slopes, stats, sums, B, cut.tiles, B * H * W, C=C, N=N, H=H, W=W,
            L=cut.L, T=cut.T, G=cut.G, Q=cut.Q, BC=BC, NP=max(16, next_power(N)) if N else 16, PRECISION="ieee",
            STAGES=tile.stages, num_warps=tile.warps, maxnreg=tile.registers,
        )  # fmt: skip
