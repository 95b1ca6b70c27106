"""Launches of the fused block's backward pass; ``bicovg.kernels.block`` explains the design."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bicovg.kernels.goodness import scale_pair
from bicovg.kernels.tiles import (
    count_sms,
    cut_batch,
    device_guard,
    fills_tiles,
    gradient_tile,
    next_power,
    products_tile,
    sums_tile,
)

SCALED = 4096  # elements of p a program
SLOPES = 1024  # elements of A a program: few, because all programs get the registers of the one that needs most
MOST_PIECES = 256  # of the sum of A f^2
FINISHED = 8  # channels a program of those that add the workers' sums: whole sectors of memory
ADDED = 8192  # elements of those sums a program has under way


def differentiate_into(
    dy: Tensor,
    q: Tensor,
    grad: Tensor,
    g: Tensor | None,
    y: Tensor,
    stats: Tensor,
    cast: Tensor | None,
    p: Tensor,
    scales: Sequence[int],
) -> Tensor:
    """Fill dy, which may be y, and q, which may be p; returns (N + 2, C) float32: dW, dbeta, dgamma.

    g, what the forward pass has made, is needed where there is a W.
    """
    by_products = cast is not None and len(cast) > 0
    slopes, energy = launch_slopes(q, p, grad.contiguous(), g if by_products else None, y, scales)
    sums = launch_sums(slopes, energy, y, cast, q, stats, scales)
    launch_gradient(dy, slopes, sums, y, cast, q, stats, scales)
    return sums


def launch_slopes(
    q: Tensor, p: Tensor, grad: Tensor, g: Tensor | None, y: Tensor, scales: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """Fill q, which may be p: p times the slopes of its energies.

    Returns the slopes A of f's energies, (B, L * L, C) float32, and, given g, the sum of A f^2 in pieces (any, C).
    """
    from bicovg.kernels.slopes_triton import slopes_kernel

    (B, C, H, W), N = y.shape, p.shape[1]
    L = math.lcm(*scales)
    S1, S2 = scale_pair(scales)
    slopes = torch.empty((B, L * L, C), dtype=torch.float32, device=y.device)
    BA = max(16, next_power(math.ceil(B * L * L / MOST_PIECES)))
    BC, NP = min(max(16, SLOPES // BA), next_power(C)), max(16, next_power(N)) if N else 16
    cut = cut_batch(B, H, W, scales, max(16, SCALED // NP), whole=False)
    pieces = math.ceil(B * L * L / BA)
    energy = None if g is None else torch.empty((pieces, C), dtype=torch.float32, device=y.device)
    programs = pieces * math.ceil(C / BC) + (cut.tiles if N else 0)
    with device_guard(y):
        slopes_kernel[(programs,)](
            slopes, slopes if energy is None else energy, q, p, grad, grad if g is None else g, B,
            C=C, N=N, H=H, W=W, L=L, S1=S1, S2=S2, T=cut.T, G=cut.G, Q=cut.Q, BA=BA, BC=BC, NP=NP,
            ENERGY=energy is not None, num_warps=4,
        )  # fmt: skip
    return slopes, energy


def count_workers(y: Tensor, pieces: int, chunks: int, per_sm: int) -> int:
    """Programs for each of the ``chunks`` blocks of channels, to share ``pieces`` of work."""
    return max(1, min(pieces, per_sm * count_sms(y) // chunks))


def packs_pairs(y: Tensor) -> bool:
    """Whether the device compares and multiplies two bfloat16 in one instruction."""
    return y.dtype == torch.bfloat16 and (not y.is_cuda or torch.cuda.get_device_capability(y.device) >= (9, 0))


def atom_columns(NP: int) -> int:
    """Columns of the products that sum over atoms: as many as q's where registers allow.

    Triton then makes their common operand once, not once for either.
    """
    return NP if NP <= 32 else 16


def launch_sums(
    slopes: Tensor,
    energy: Tensor | None,
    y: Tensor,
    cast: Tensor | None,
    q: Tensor,
    stats: Tensor,
    scales: Sequence[int],
) -> Tensor:
    """(N + 2, C) float32: dW, dbeta, dgamma. With a W, and so ``energy``, the pass over y is matrix products alone."""
    from bicovg.kernels.block_backward_triton import finish_kernel, products_kernel, sums_kernel

    B, C, H, W = y.shape
    N = 0 if cast is None else cast.shape[0]
    tile = sums_tile(C, y.dtype) if energy is None else products_tile(C, N, H, y.dtype)
    BC, NP = min(tile.channels, max(16, next_power(C))), max(16, next_power(N)) if N else 16
    rows, chunks = B * H * W, math.ceil(C / BC)
    cut = cut_batch(B, H, W, scales, tile.pixels, whole=False)
    workers = count_workers(y, math.ceil(rows / tile.pixels) if energy is None else cut.tiles, chunks, tile.per_sm)
    part = torch.empty((workers, 2 * N + 2, C), dtype=torch.float32, device=y.device)
    sums = torch.empty((N + 2, C), dtype=torch.float32, device=y.device)
    with device_guard(y):
        if energy is None:
            sums_kernel[(chunks, workers)](
                part, y, slopes, stats, rows, C=C, H=H, W=W, L=cut.L, BR=tile.pixels, BC=BC, STAGES=tile.stages,
                num_warps=tile.warps, maxnreg=tile.registers,
            )  # fmt: skip
        else:
            products_kernel[(chunks, workers)](
                part, y, q, slopes, stats, B, cut.tiles, C=C, N=N, H=H, W=W, L=cut.L, T=cut.T, G=cut.G, Q=cut.Q,
                BC=BC, NP=NP, GP=max(atom_columns(NP), cut.G), FULL=fills_tiles(y, cut, tile.pixels, N, BC, NP),
                PACKED=packs_pairs(y), PRECISION="ieee", STAGES=tile.stages, num_warps=tile.warps,
                maxnreg=tile.registers,
            )  # fmt: skip
        finish_kernel[(math.ceil(C / FINISHED),)](
            sums, part, part if energy is None else energy, y if cast is None else cast, stats, workers,
            0 if energy is None else len(energy), C=C, N=N, BC=FINISHED, NP=NP,
            PB=0 if energy is None else next_power(len(energy)), WB=min(ADDED // (NP * FINISHED), next_power(workers)),
            num_warps=8,
        )  # fmt: skip
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
