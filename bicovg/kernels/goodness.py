"""Fused goodness for CUDA: one read of f gives all energies, one pass gives df and dW.

``fused_bicovg`` equals ``bicovg.goodness.bicovg``, the definition and oracle. Legend as there; p = W f.

* Forward: a program sums f^2 and p^2 over a tile of pixels, channel block by channel block, in float32. When
  the tile holds whole samples (small maps) it writes g itself; otherwise a second, tiny kernel adds the tile
  sums in a fixed order. Where one block holds all channels of a large map, a program takes a whole atom, tile by
  tile. Nothing is atomic, so results repeat bit for bit.
* Backward: ``df = 2 A f + W^T (2 B p)`` and ``dW = sum (2 B p) f^T``, A and B being the cell gradients of all
  scales divided by the cell sizes. Each worker owns one block of channels, keeps W and its dW on the chip and
  loops over tiles; the workers' dW are summed last. When one block holds all channels, p is recomputed;
  otherwise that would read f several times, so the forward pass stores p, N / C of f's bytes.
* bfloat16 f: bfloat16 operands, float32 sums. float32 f: products in full float32 ("ieee", not tf32).

f is used in channels_last order; another order is copied first. There is no double backward.
"""

import importlib.util
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from bicovg.goodness import bicovg
from bicovg.kernels.tiles import (
    backward_tile,
    count_sms,
    cut_batch,
    device_guard,
    fills_tiles,
    forward_tile,
    next_power,
    stores_projection,
)

MOST_PROJECTIONS = 256  # p of one tile must fit the register file
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def fused_available(f: Tensor) -> bool:
    """Whether the fused kernels run on f: on CUDA with Triton, or in Triton's interpreter (float32 only)."""
    if f.is_cuda:
        return _HAS_TRITON and f.dtype in (torch.bfloat16, torch.float32)
    return _HAS_TRITON and f.dtype == torch.float32 and os.environ.get("TRITON_INTERPRET") == "1"


def scale_pair(scales: Sequence[int]) -> tuple[int, int]:
    return scales[0], scales[1] if len(scales) > 1 else 0


def launch_forward(
    g: Tensor,
    p: Tensor,
    f: Tensor,
    weight: Tensor | None,
    scales: Sequence[int],
    stats: Tensor | None = None,
) -> None:
    """Fill g (B, D), and p (B * H * W, N) unless it is empty; f channels_last, weight of f's dtype.

    With ``stats`` (see ``norm_triton``) f holds y, from which f is made on the way in.
    """
    from bicovg.kernels.goodness_triton import combine_kernel, forward_kernel, stream_kernel

    B, C, H, W = f.shape
    N = 0 if weight is None else weight.shape[0]
    S1, S2 = scale_pair(scales)
    tile = forward_tile(C, N, H, W, scales, f.dtype)
    cut = cut_batch(B, H, W, scales, tile.pixels, whole=True)
    BC, NP = min(tile.channels, max(16, next_power(C))), max(16, next_power(N)) if N else 16
    streams = cut.T > 1 and C <= BC
    parts = 1 if streams else cut.T
    out = g if cut.direct else g.new_empty(B * cut.AP * parts * (C + N), dtype=torch.float32)
    narrow = f.dtype == torch.bfloat16  # FULL and WAIT use assembler, which the interpreter, float32 alone, refuses
    inputs = (out, p, f, f if weight is None else weight, f if stats is None else stats, B)
    options: dict[str, Any] = {
        "C": C, "N": N, "H": H, "W": W, "L": cut.L, "T": cut.T, "Q": cut.Q, "BC": BC, "NP": NP,
        "KEEP": p.numel() > 0, "NORM": stats is not None,
        "FULL": narrow and fills_tiles(f, cut, tile.pixels, N, BC, NP), "WAIT": narrow and tile.asynchronous,
        "PRECISION": "ieee", "STAGES": tile.stages, "num_warps": tile.warps, "maxnreg": tile.registers,
    }  # fmt: skip
    with device_guard(f):
        if streams:
            stream_kernel[(min(B * cut.AP, tile.per_sm * count_sms(f)),)](*inputs, **options)
        else:
            forward_kernel[(cut.tiles,)](*inputs, S1=S1, S2=S2, AP=cut.AP, G=cut.G, DIRECT=cut.direct, **options)
        if not cut.direct:
            block = 256
            blocks = sum(math.ceil((C + N) * s * s / block) for s in scales)
            combine_kernel[(B, blocks)](
                g, out, K=C + N, H=H, W=W, L=cut.L, S1=S1, S2=S2, T=parts, BD=block, num_warps=4
            )


def launch_backward(
    df: Tensor, grad: Tensor, f: Tensor, weight: Tensor | None, p: Tensor, scales: Sequence[int], mask: bool
) -> Tensor:
    """Fill df and return dW (N, C) float32; f and df channels_last, p empty when it was not kept."""
    from bicovg.kernels.goodness_backward_triton import backward_kernel

    B, C, H, W = f.shape
    N = 0 if weight is None else weight.shape[0]
    S1, S2 = scale_pair(scales)
    tile = backward_tile(C, N, H, W, scales, f.dtype)
    cut = cut_batch(B, H, W, scales, tile.pixels, whole=False)
    block = min(tile.channels, max(16, next_power(C)))
    assert p.numel() or not N or block >= C, "p can be recomputed only from all channels"
    chunks = math.ceil(C / block)
    workers = max(1, min(cut.tiles, tile.per_sm * count_sms(f) // chunks))
    part = torch.empty((workers, N, C), dtype=torch.float32, device=f.device)
    with device_guard(f):
        backward_kernel[(chunks, workers)](
            df, part, grad, f, f if weight is None else weight, p, B, cut.tiles, workers,
            C=C, N=N, H=H, W=W, L=cut.L, S1=S1, S2=S2, T=cut.T, G=cut.G, Q=cut.Q,
            BC=block, NP=max(16, next_power(N)) if N else 16,
            KEPT=p.numel() > 0, MASK=mask, PRECISION="ieee",
            STAGES=tile.stages, num_warps=tile.warps, maxnreg=tile.registers,
        )  # fmt: skip
    return part.sum(dim=0)


def forward_outputs(
    f: Tensor, weight: Tensor | None, scales: Sequence[int], keep: bool, always: bool = False
) -> tuple[Tensor, Tensor]:
    """Uninitialised g and p; p is empty when it need not be kept (``always``: even where it could be recomputed)."""
    B, C, H, W = f.shape
    N = 0 if weight is None else weight.shape[0]
    g = f.new_empty((B, sum((C + N) * s * s for s in scales)), dtype=torch.float32)
    rows = B * H * W if keep and N and (always or stores_projection(C, f.dtype)) else 0
    return g, f.new_empty((rows, N))


@torch.library.custom_op(
    "bicovg::goodness",
    mutates_args=(),
    schema="(Tensor f, Tensor? weight, Tensor? cast, int[] scales, bool keep, bool relu_mask) -> (Tensor, Tensor)",
)
def goodness_op(
    f: Tensor, weight: Tensor | None, cast: Tensor | None, scales: Sequence[int], keep: bool, relu_mask: bool
) -> tuple[Tensor, Tensor]:
    """g and, where the backward pass wants it, p; ``cast`` is ``weight`` in f's dtype, made once for both."""
    g, p = forward_outputs(f, weight, scales, keep)
    cast = None if cast is None else cast.contiguous()
    launch_forward(g, p, f.contiguous(memory_format=torch.channels_last), cast, scales)
    return g, p


@goodness_op.register_fake
def _(
    f: Tensor, weight: Tensor | None, cast: Tensor | None, scales: Sequence[int], keep: bool, relu_mask: bool
) -> tuple[Tensor, Tensor]:
    return forward_outputs(f, weight, scales, keep)


@torch.library.custom_op(
    "bicovg::goodness_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor f, Tensor? cast, Tensor p, int[] scales, bool relu_mask) -> (Tensor, Tensor)",
)
def goodness_backward_op(
    grad: Tensor, f: Tensor, cast: Tensor | None, p: Tensor, scales: Sequence[int], relu_mask: bool
) -> tuple[Tensor, Tensor]:
    """df (f's dtype and layout) and dW (float32; (0, C) without a weight)."""
    x = f.contiguous(memory_format=torch.channels_last)
    cast = None if cast is None else cast.contiguous()
    df = torch.empty_like(f)
    dx = df if df.is_contiguous(memory_format=torch.channels_last) else torch.empty_like(x)
    dw = launch_backward(dx, grad.float().contiguous(), x, cast, p, scales, relu_mask)
    if dx is not df:
        df.copy_(dx)
    return df, dw


@goodness_backward_op.register_fake
def _(
    grad: Tensor, f: Tensor, cast: Tensor | None, p: Tensor, scales: Sequence[int], relu_mask: bool
) -> tuple[Tensor, Tensor]:
    N = 0 if cast is None else cast.shape[0]
    return torch.empty_like(f), f.new_empty((N, f.shape[1]), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    f, weight, cast, scales, _, relu_mask = inputs
    ctx.set_materialize_grads(False)  # p's gradient is always absent: do not fill zeros for it
    ctx.save_for_backward(f, cast, output[1])
    ctx.scales, ctx.relu_mask = scales, relu_mask
    ctx.weight_dtype = None if weight is None else weight.dtype


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    f, cast, p = ctx.saved_tensors
    df, dw = torch.ops.bicovg.goodness_backward(grad, f, cast, p, ctx.scales, ctx.relu_mask)
    return df, None if cast is None else dw.to(ctx.weight_dtype), None, None, None, None


goodness_op.register_autograd(_differentiate, setup_context=_save)


def fused_bicovg(
    f: Float[Tensor, "b c h w"],
    weight: Float[Tensor, "n c"] | None,
    scales: tuple[int, ...],
    relu_mask: bool = False,
) -> Float[Tensor, "b d"]:
    """``bicovg(f, weight, scales)`` in float32 by the fused kernels; call it where ``fused_available(f)``.

    Args:
        f: activations after ReLU.
        weight: float32 or f's dtype; its gradient is accumulated in float32.
        scales: one or two; more, or over 256 projections, fall back to the plain function.
        relu_mask: zero df where f is 0, so that the caller may skip ReLU's own backward pass.
    """
    _, _, H, W = f.shape
    if not scales or not 1 <= min(scales) <= max(scales) <= min(H, W):
        raise ValueError(f"scales {scales} do not fit a {H}x{W} map: use scales between 1 and {min(H, W)}")
    if len(scales) > 2 or (weight is not None and weight.shape[0] > MOST_PROJECTIONS):
        return bicovg(torch.relu(f) if relu_mask else f, weight, scales)
    keep = torch.is_grad_enabled() and (f.requires_grad or (weight is not None and weight.requires_grad))
    cast = None if weight is None else weight.detach().to(f.dtype)
    g: Tensor = torch.ops.bicovg.goodness(f, weight, cast, list(scales), keep, relu_mask)[0]
    return g
