"""The block's tail on CUDA: RMSPool (where asked), keyed dropout, RMSNorm, with the gradient where one is needed.

``fused_tail(f, ...)`` equals ``rms_norm(keyed_dropout(rms_pool(f), ...))`` of ``bicovg.layers`` without its
intermediate roundings, and with exactly the mask of ``bicovg.draws.keep_mask``. It builds no graph: in strict
scope nothing behind a block's goodness needs a gradient. ``block_tail`` is the same behind batch norm and ReLU, with
a graph, for blocks inside a unit.

A small sample stays in one program's registers: f is read once, h written once. A larger one takes two
kernels, sum of squares first, because no program sees the whole sample.

The gradient takes two passes over y, h and dh. RMSNorm's needs a sum over the sample and batch norm's need sums over
the batch of what RMSNorm's gives; that is linear in dh and h, so the first pass sums both parts per sample and channel
and two small kernels join them. The second writes dy. Nothing but y, h and one number a sample is kept.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bicovg.kernels.tiles import device_guard, next_power

WHOLE = 32768  # elements of a sample held in registers; half of it while pooling, which loads four times as many
TILE = 4096  # elements a program otherwise
BACKWARD_TILE = 2048  # elements of h a program of the gradient's kernels; half of it while pooling
BACKWARD_CHANNELS = 64
PROGRAMS = 1056  # of the first backward pass at least, where the map has pixels for so many


def launch_tail(
    h: Tensor,
    rms: Tensor,
    f: Tensor,
    pool: bool,
    drop: float,
    keys: Tensor | None,
    index: int,
    eps: float,
    stats: Tensor | None = None,
) -> None:
    """Fill h from f, both channels_last; with ``stats`` (see ``norm_triton``) f holds y, from which f is made."""
    from bicovg.kernels.tail_triton import normalise_kernel, square_kernel, whole_kernel

    B, C, H, W = f.shape
    pixels = h.shape[2] * h.shape[3]
    BC = next_power(C)
    dropped = drop > 0.0
    assert keys is not None or not dropped, "dropout needs keys"
    table = f if keys is None else keys
    threshold, gain = round(drop * (1 << 16)), 1.0 / (1.0 - drop)
    shape = {"C": C, "H": H, "W": W, "POOL": pool, "DROP": dropped, "NORM": stats is not None, "BC": BC}
    inputs = (f, f if stats is None else stats, table, index, threshold, gain)
    PB = next_power(pixels)
    with device_guard(f):
        if (WHOLE // 2 if pool else WHOLE) >= PB * BC:
            warps = min(16, max(4, PB * BC // 1024))
            whole_kernel[(B,)](h, rms, *inputs, eps, **shape, PB=PB, num_warps=warps)
            return
        PB = max(1, TILE // BC)
        tiles = math.ceil(pixels / PB)
        part = torch.empty((B, tiles), dtype=torch.float32, device=f.device)
        square_kernel[(B, tiles)](h, part, *inputs, **shape, PB=PB, num_warps=4)
        normalise_kernel[(B, tiles)](
            h, rms, part, *inputs, eps, **shape, PB=PB,
            TILES=tiles, PARTS=next_power(tiles), num_warps=4,
        )  # fmt: skip


def launch_tail_backward(
    dh: Tensor, h: Tensor, y: Tensor, stats: Tensor, rms: Tensor, pool: bool, drop: float, eps: float
) -> tuple[Tensor, Tensor]:
    """dy, and (2, C) float32: dbeta, dgamma; all maps channels_last."""
    from bicovg.kernels.tail_backward_triton import (
        tail_factors_kernel,
        tail_finish_kernel,
        tail_gradient_kernel,
        tail_sums_kernel,
    )

    B, C, H, W = y.shape
    pixels, slots = h.shape[2] * h.shape[3], math.ceil(H / 2) * math.ceil(W / 2) if pool else H * W
    BC = min(BACKWARD_CHANNELS, max(16, next_power(C)))
    PB = min((BACKWARD_TILE // 2 if pool else BACKWARD_TILE) // BC, max(16, next_power(slots)))
    chunks = math.ceil(C / BC)
    pieces = max(1, min(math.ceil(pixels / PB), math.ceil(PROGRAMS / (B * chunks))))
    part = torch.empty((B, pieces, 5, C), dtype=torch.float32, device=y.device)
    factors = torch.empty((B, 2), dtype=torch.float32, device=y.device)
    sums = torch.empty((2, C), dtype=torch.float32, device=y.device)
    dy = torch.empty_like(y)
    shape = {"C": C, "H": H, "W": W, "POOL": pool, "PB": PB, "BC": BC}
    with device_guard(y):
        tail_sums_kernel[(B, pieces, chunks)](part, dh, h, y, stats, **shape, num_warps=4)
        tail_factors_kernel[(B,)](
            factors, part, rms, 1.0 / (1.0 - drop), eps, pieces, C * pixels, C=C, BC=next_power(C), num_warps=4
        )
        tail_finish_kernel[(math.ceil(C / 16),)](
            sums, part, factors, B * pieces, pieces, C=C, RB=64, BC=16, num_warps=4
        )
        tail_gradient_kernel[(B, math.ceil(slots / PB), chunks)](
            dy, dh, h, y, stats, factors, sums, B * H * W, **shape, num_warps=4
        )
    return dy, sums


def _output(f: Tensor, pool: bool, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
    """Uninitialised h, and root mean squares."""
    B, C, H, W = f.shape
    size = (B, C, H // 2, W // 2) if pool else (B, C, H, W)
    h = torch.empty(size, dtype=f.dtype, device=f.device, memory_format=layout)
    return h, torch.empty(B, dtype=torch.float32, device=f.device)


def _run(
    f: Tensor, stats: Tensor | None, pool: bool, drop: float, keys: Tensor | None, index: int, eps: float
) -> tuple[Tensor, Tensor]:
    """h, channels_last, and root mean squares."""
    h, rms = _output(f, pool, torch.channels_last)
    keys = None if keys is None else keys.contiguous()
    launch_tail(h, rms, f.contiguous(memory_format=torch.channels_last), pool, drop, keys, index, eps, stats)
    return h, rms


def _layout(f: Tensor) -> torch.memory_format:
    """h takes f's memory format."""
    last = f.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


@torch.library.custom_op(
    "bicovg::tail",
    mutates_args=(),
    schema="(Tensor f, Tensor? stats, bool pool, float drop, Tensor? keys, int index, float eps) -> (Tensor, Tensor)",
)
def tail_op(
    f: Tensor, stats: Tensor | None, pool: bool, drop: float, keys: Tensor | None, index: int, eps: float
) -> tuple[Tensor, Tensor]:
    """h in f's dtype and memory format; each sample's root mean square before RMSNorm, in float32."""
    h, rms = _run(f, stats, pool, drop, keys, index, eps)
    return (h if _layout(f) == torch.channels_last else h.contiguous()), rms


@tail_op.register_fake
def _(
    f: Tensor, stats: Tensor | None, pool: bool, drop: float, keys: Tensor | None, index: int, eps: float
) -> tuple[Tensor, Tensor]:
    return _output(f, pool, _layout(f))


@torch.library.custom_op(
    "bicovg::block_tail",
    mutates_args=(),
    schema="(Tensor y, Tensor stats, Tensor gamma, Tensor beta, bool pool, float drop, Tensor? keys, int index, "
    "float eps) -> (Tensor, Tensor)",
)
def block_tail_op(
    y: Tensor,
    stats: Tensor,
    gamma: Tensor,
    beta: Tensor,
    pool: bool,
    drop: float,
    keys: Tensor | None,
    index: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """What ``tail_op`` gives, of ``relu(batch norm(y))``; gamma and beta are named for their gradients."""
    return _run(y, stats, pool, drop, keys, index, eps)


@block_tail_op.register_fake
def _(
    y: Tensor,
    stats: Tensor,
    gamma: Tensor,
    beta: Tensor,
    pool: bool,
    drop: float,
    keys: Tensor | None,
    index: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    return _output(y, pool, torch.channels_last)


@torch.library.custom_op(
    "bicovg::block_tail_backward",
    mutates_args=(),
    schema="(Tensor dh, Tensor h, Tensor y, Tensor stats, Tensor rms, bool pool, float drop, float eps) "
    "-> (Tensor, Tensor)",
)
def block_tail_backward_op(
    dh: Tensor, h: Tensor, y: Tensor, stats: Tensor, rms: Tensor, pool: bool, drop: float, eps: float
) -> tuple[Tensor, Tensor]:
    """dy (channels_last), and (2, C) float32: dbeta, dgamma."""
    last = torch.channels_last
    return launch_tail_backward(
        dh.contiguous(memory_format=last), h, y.contiguous(memory_format=last), stats, rms, pool, drop, eps
    )


@block_tail_backward_op.register_fake
def _(
    dh: Tensor, h: Tensor, y: Tensor, stats: Tensor, rms: Tensor, pool: bool, drop: float, eps: float
) -> tuple[Tensor, Tensor]:
    dy = torch.empty_like(y, memory_format=torch.channels_last)
    return dy, y.new_empty((2, y.shape[1]), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    y, stats, _, _, pool, drop, _, _, eps = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(y, stats, *output)
    ctx.pool, ctx.drop, ctx.eps = pool, drop, eps


def _differentiate(ctx: Any, dh: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    y, stats, h, rms = ctx.saved_tensors
    if dh is None:
        return (None,) * 9
    dy, sums = torch.ops.bicovg.block_tail_backward(dh, h, y, stats, rms, ctx.pool, ctx.drop, ctx.eps)
    return dy, None, sums[1], sums[0], None, None, None, None, None


block_tail_op.register_autograd(_differentiate, setup_context=_save)


def fused_tail(
    f: Float[Tensor, "b c h w"],
    pool: bool,
    drop: float,
    keys: Int[Tensor, " b"] | None,
    index: int,
    stats: Float[Tensor, "4 c"] | None = None,
    eps: float = 1e-6,
) -> Float[Tensor, "b c p q"]:
    """``rms_norm(keyed_dropout(rms_pool(f) if pool else f, drop, make_keys(keys, index)), eps)``, without a graph.

    Args:
        f: activations after ReLU; call it where ``fused_available(f)``.
        pool: whether RMSPool 2x2 comes first; an odd map drops its last row / column.
        drop: dropout rate; 0 in evaluation, and then ``keys`` may be None.
        keys: one int64 key a sample.
        index: the block's position, hashed into the keys.
        stats: where given, ``f`` holds y and f is ``relu(batch norm(y))`` by these statistics.
        eps: added to the root mean square.
    """
    h: Tensor = torch.ops.bicovg.tail(f.detach(), stats, pool, drop, keys if drop > 0.0 else None, index, eps)[0]
    return h


def block_tail(
    y: Float[Tensor, "b c h w"],
    stats: Float[Tensor, "4 c"],
    norm: nn.BatchNorm2d,
    pool: bool,
    drop: float,
    keys: Int[Tensor, " b"] | None,
    index: int,
    eps: float = 1e-6,
) -> Float[Tensor, "b c p q"]:
    """``fused_tail`` of y with a graph, ``stats`` being the batch statistics of this very y; channels_last."""
    h: Tensor = torch.ops.bicovg.block_tail(
        y, stats, norm.weight, norm.bias, pool, drop, keys if drop > 0.0 else None, index, eps
    )[0]
    return h
