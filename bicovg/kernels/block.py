"""Batch norm, ReLU, goodness and tail of a strict exit block, from the convolution's output y, on CUDA.

f is never stored: every kernel reads y and makes ``f = relu(batch norm(y))`` on the way in. Passes over y:

* forward: batch statistics; goodness; the tail (see ``bicovg.kernels.tail``);
* backward: one pass for the sums behind dW, dgamma and dbeta, one that writes dy.

The second pass needs the sums of dz, the gradient at batch norm's output, which the first does not compute: where f
is on it is linear in y, so two small matrix sums, q against on and q against on * y, carry dW and, through W, both
sums of dz (``finish_kernel``). Those of f's own energies follow from g, which is quadratic in f, and from the sums of
on and of on * y over atoms (``weigh_slopes``). No pass stores dz. q, p times its slopes, takes p's place before both.

``block_statistics`` and ``block_goodness`` together equal ``bicovg(relu(batch_norm(y)))`` with f in float32, rounded to
y's dtype where it meets W. The gradient flows through the batch statistics too; there is no double backward.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bicovg.kernels.block_backward import differentiate_into
from bicovg.kernels.goodness import MOST_PROJECTIONS, forward_outputs, fused_available, launch_forward
from bicovg.kernels.tiles import device_guard, next_power

MOMENT_TILE = (32, 128)  # rows, channels
FEW_ROWS = 2048  # up to here one launch makes the statistics
MOMENT_PROGRAMS = 528  # four a multiprocessor of the largest GPUs


def fuses_block(y: Tensor, weight: Tensor | None, scales: tuple[int, ...]) -> bool:
    """Whether the kernels can take this block; what they cannot goes the plain way, errors included."""
    fits = bool(scales) and len(scales) <= 2 and 1 <= min(scales) <= max(scales) <= min(y.shape[2:])
    return fits and fused_available(y) and (weight is None or weight.shape[0] <= MOST_PROJECTIONS)


def as_rows(y: Tensor) -> Tensor:
    """The (B * H * W, C) view of a channels_last map; another layout is copied, also that of one image."""
    return y.permute(0, 2, 3, 1).reshape(-1, y.shape[1]).contiguous()


@torch.library.custom_op(
    "bicovg::statistics",
    mutates_args=("running_mean", "running_var", "batches"),
    schema="(Tensor y, Tensor gamma, Tensor beta, Tensor(a!) running_mean, Tensor(b!) running_var, "
    "Tensor(c!) batches, float momentum, float eps) -> Tensor",
)
def statistics_op(
    y: Tensor,
    gamma: Tensor,
    beta: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    batches: Tensor,
    momentum: float,
    eps: float,
) -> Tensor:
    """(4, C) float32 as ``norm_triton`` describes; the running statistics move as ``nn.BatchNorm2d`` moves them."""
    from bicovg.kernels.norm_triton import few_rows_kernel, moments_kernel, statistics_kernel

    rows, C = as_rows(y).shape
    running = (running_mean, running_var, batches)
    stats = torch.empty((4, C), dtype=torch.float32, device=y.device)
    if rows <= FEW_ROWS:
        with device_guard(y):
            few_rows_kernel[(math.ceil(C / 16),)](
                stats, *running, as_rows(y), gamma, beta, rows, momentum, eps, C=C, BR=128, BC=16, num_warps=4
            )
        return stats
    BR, BC = MOMENT_TILE[0], min(MOMENT_TILE[1], max(16, next_power(C)))
    chunks = math.ceil(C / BC)
    parts = max(1, min(MOMENT_PROGRAMS // chunks, math.ceil(rows / BR)))
    part = torch.empty((parts, 2, C), dtype=torch.float32, device=y.device)
    with device_guard(y):
        moments_kernel[(parts, chunks)](part, as_rows(y), rows, C=C, BR=BR, BC=BC, STAGES=3, num_warps=4)
        statistics_kernel[(math.ceil(C / 16),)](
            stats, *running, part, as_rows(y), gamma, beta, rows, parts, momentum, eps,
            C=C, PB=min(256, next_power(parts)), BC=16, num_warps=8,
        )  # fmt: skip
    return stats


@statistics_op.register_fake
def _(
    y: Tensor,
    gamma: Tensor,
    beta: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    batches: Tensor,
    momentum: float,
    eps: float,
) -> Tensor:
    return y.new_empty((4, y.shape[1]), dtype=torch.float32)


@torch.library.custom_op(
    "bicovg::block_goodness",
    mutates_args=(),
    schema="(Tensor y, Tensor stats, Tensor gamma, Tensor beta, Tensor? weight, Tensor? cast, int[] scales, "
    "bool keep, bool overwrite) -> (Tensor, Tensor)",
)
def block_goodness_op(
    y: Tensor,
    stats: Tensor,
    gamma: Tensor,
    beta: Tensor,
    weight: Tensor | None,
    cast: Tensor | None,
    scales: Sequence[int],
    keep: bool,
    overwrite: bool,
) -> tuple[Tensor, Tensor]:
    """g (float32) and p, which is empty unless ``keep``; ``cast`` is ``weight`` in y's dtype."""
    g, p = forward_outputs(y, weight, scales, keep, always=True)
    launch_forward(g, p, y.contiguous(memory_format=torch.channels_last), cast, scales, stats)
    return g, p


@block_goodness_op.register_fake
def _(
    y: Tensor,
    stats: Tensor,
    gamma: Tensor,
    beta: Tensor,
    weight: Tensor | None,
    cast: Tensor | None,
    scales: Sequence[int],
    keep: bool,
    overwrite: bool,
) -> tuple[Tensor, Tensor]:
    return forward_outputs(y, weight, scales, keep, always=True)


@torch.library.custom_op(
    "bicovg::block_goodness_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor? g, Tensor y, Tensor stats, Tensor? cast, Tensor p, int[] scales) -> (Tensor, Tensor)",
)
def block_goodness_backward_op(
    grad: Tensor, g: Tensor | None, y: Tensor, stats: Tensor, cast: Tensor | None, p: Tensor, scales: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """dy (channels_last), and (N + 2, C) float32: dW, dbeta, dgamma."""
    y = y.contiguous(memory_format=torch.channels_last)
    dy = torch.empty_like(y)
    return dy, differentiate_into(dy, torch.empty_like(p), grad, g, y, stats, cast, p, scales)


@torch.library.custom_op(
    "bicovg::block_goodness_backward_",
    mutates_args=("y", "p"),
    schema="(Tensor grad, Tensor? g, Tensor(a!) y, Tensor stats, Tensor? cast, Tensor(b!) p, int[] scales) -> Tensor",
)
def block_goodness_backward_in_place_op(
    grad: Tensor, g: Tensor | None, y: Tensor, stats: Tensor, cast: Tensor | None, p: Tensor, scales: Sequence[int]
) -> Tensor:
    """The same with dy in y's place and q in p's; y channels_last. A program writes only what it alone has read."""
    return differentiate_into(y, p, grad, g, y, stats, cast, p, scales)


@block_goodness_backward_in_place_op.register_fake
def _(
    grad: Tensor, g: Tensor | None, y: Tensor, stats: Tensor, cast: Tensor | None, p: Tensor, scales: Sequence[int]
) -> Tensor:
    N = 0 if cast is None else cast.shape[0]
    return y.new_empty((N + 2, y.shape[1]), dtype=torch.float32)


@block_goodness_backward_op.register_fake
def _(
    grad: Tensor, g: Tensor | None, y: Tensor, stats: Tensor, cast: Tensor | None, p: Tensor, scales: Sequence[int]
) -> tuple[Tensor, Tensor]:
    N = 0 if cast is None else cast.shape[0]
    dy = torch.empty_like(y, memory_format=torch.channels_last)
    return dy, y.new_empty((N + 2, y.shape[1]), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    y, stats, _, _, weight, cast, scales, _, overwrite = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(y, stats, cast, *output)
    ctx.scales, ctx.has_weight = scales, weight is not None
    ctx.overwrite = overwrite and y.is_contiguous(memory_format=torch.channels_last)


def _differentiate(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    y, stats, cast, g, p = ctx.saved_tensors
    g = g.detach()
    if ctx.overwrite:
        dy = y.detach()
        sums = torch.ops.bicovg.block_goodness_backward_(grad, g, dy, stats, cast, p.detach(), ctx.scales)
    else:
        dy, sums = torch.ops.bicovg.block_goodness_backward(grad, g, y, stats, cast, p, ctx.scales)
    return dy, None, sums[-1], sums[-2], sums[:-2] if ctx.has_weight else None, *[None] * 4


block_goodness_op.register_autograd(_differentiate, setup_context=_save)


@torch.no_grad()
def block_statistics(y: Float[Tensor, "b c h w"], norm: nn.BatchNorm2d, again: bool = False) -> Float[Tensor, "4 c"]:
    """Batch statistics of y, moving ``norm``'s running ones; in evaluation, the running ones themselves.

    With ``again``, for a forward pass that checkpointing repeats, the running statistics stay.
    """
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    if not norm.training:
        rstd = torch.rsqrt(norm.running_var + norm.eps)
        scale = norm.weight * rstd
        return torch.stack([norm.running_mean, rstd, scale, norm.bias - norm.running_mean * scale])
    running = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
    moving = [buffer.clone() for buffer in running] if again else running
    stats: Tensor = torch.ops.bicovg.statistics(y.detach(), norm.weight, norm.bias, *moving, norm.momentum, norm.eps)
    return stats


def block_goodness(
    y: Float[Tensor, "b c h w"],
    stats: Float[Tensor, "4 c"],
    norm: nn.BatchNorm2d,
    weight: Float[Tensor, "n c"] | None,
    scales: tuple[int, ...],
    overwrite: bool = False,
    shadow: Float[Tensor, "n c"] | None = None,
) -> Float[Tensor, "b d"]:
    """``bicovg(relu(batch_norm(y)), weight, scales)`` in float32, ``stats`` being those of this very y.

    With ``overwrite`` the backward pass puts dy in y's place: for a y that nothing else needs by then. ``shadow`` is
    the weight in y's dtype, where it is at hand.
    """
    cast = shadow if shadow is not None or weight is None else weight.detach().to(y.dtype)
    overwrite = overwrite and not torch.compiler.is_compiling()
    g: Tensor = torch.ops.bicovg.block_goodness(
        y, stats, norm.weight, norm.bias, weight, cast, list(scales), torch.is_grad_enabled(), overwrite
    )[0]
    return g
