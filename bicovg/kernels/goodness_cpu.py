"""Goodness on a CPU, with its gradient written out.

``lean_bicovg`` equals ``bicovg.goodness.bicovg``, which stays the definition, up to rounding. Where autograd would send
every scale's gradient through a chain of expanded copies of its own, here all scales' gradients are added up on the
finest grid first. With p = W f, and with A and B the gradients of the energies of f and of p on that grid, times
2 / (pixels of a cell), each pixel taking its cell's:

    df = A f + W^T (B p),    dW = (B p) f^T

All of it happens in channels_last order, another is copied first: there the projections are one product of two
matrices, and pools the fastest sums. A gradient's own gradient, and ``torch.func``, go through the definition.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from bicovg.goodness import bicovg, transformed


def fits_cpu(f: Tensor, weight: Tensor | None, scales: tuple[int, ...]) -> bool:
    """Whether ``lean_bicovg`` computes this: full precision, and grids of equal cells that lie in each other."""
    if f.device.type != "cpu" or f.dtype not in (torch.float32, torch.float64):
        return False
    if torch.compiler.is_compiling() or transformed():  # inductor fuses the definition by itself
        return False
    if torch.is_autocast_enabled("cpu") or (weight is not None and weight.dtype != f.dtype):
        return False
    finest, (H, W) = max(scales), f.shape[2:]
    even = H % finest == 0 and W % finest == 0 and all(finest % scale == 0 for scale in scales)
    return even and f.numel() > 0


def lean_bicovg(
    f: Float[Tensor, "b c h w"], weight: Float[Tensor, "n c"] | None, scales: tuple[int, ...]
) -> Float[Tensor, "b d"]:
    """``bicovg(f, weight, scales)`` where ``fits_cpu`` says so; differentiable once."""
    if torch.is_grad_enabled() and (f.requires_grad or (weight is not None and weight.requires_grad)):
        goodness: Tensor = _LeanGoodness.apply(f, weight, scales)  # type: ignore[no-untyped-call]
        return goodness
    return _energies(_maps(f, weight), scales)


class _LeanGoodness(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, f: Tensor, weight: Tensor | None, scales: tuple[int, ...]) -> Tensor:
        maps = _maps(f, weight)
        ctx.save_for_backward(f, weight, *maps[1:])
        ctx.scales = scales
        return _energies(maps, scales)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        f, weight, *projected = ctx.saved_tensors
        wanted: tuple[bool, bool, bool] = ctx.needs_input_grad
        if torch.is_grad_enabled():  # the gradient is to have one of its own
            return *_gradients_with_graph(f, weight, ctx.scales, grad, wanted), None
        maps = [f.contiguous(memory_format=torch.channels_last), *projected]
        with torch.autocast("cpu", enabled=False):
            return *_gradients(maps, weight, ctx.scales, grad, wanted), None


def _gradients_with_graph(
    f: Tensor, weight: Tensor | None, scales: tuple[int, ...], grad: Float[Tensor, "b d"], wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """df and dW by autograd; of views, as one of f and weight may have been made from the other."""
    own_f, own_weight = f.view_as(f), None if weight is None else weight.view_as(weight)
    inputs = [x for x, needed in zip((own_f, own_weight), wanted, strict=False) if needed and x is not None]
    with torch.autocast("cpu", enabled=False):
        found = iter(torch.autograd.grad(bicovg(own_f, own_weight, scales), inputs, grad, create_graph=True))
    df, dweight = (next(found) if needed else None for needed in wanted[:2])
    return df, dweight


def _gradients(
    maps: Sequence[Tensor],
    weight: Tensor | None,
    scales: tuple[int, ...],
    grad: Float[Tensor, "b d"],
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """df and dW, as far as they are wanted."""
    parts = torch.split(grad, [x.shape[1] * scale * scale for scale in scales for x in maps], dim=1)
    f = maps[0]
    df = _weigh(f, _slopes(f, parts[:: len(maps)], scales)) if wanted[0] else None
    if weight is None:
        return df, None
    dp = _rows(_weigh(maps[1], _slopes(maps[1], parts[1::2], scales)))
    if df is not None:
        _rows(df).addmm_(dp, weight)
    return df, dp.t() @ _rows(f) if wanted[1] else None


def _maps(f: Float[Tensor, "b c h w"], weight: Float[Tensor, "n c"] | None) -> list[Tensor]:
    """What energies are taken of: f and, where there is a weight, p; both channels_last."""
    f = f.contiguous(memory_format=torch.channels_last)
    if weight is None:
        return [f]
    B, _, H, W = f.shape
    return [f, (_rows(f) @ weight.t()).view(B, H, W, -1).permute(0, 3, 1, 2)]


def _energies(maps: Sequence[Float[Tensor, "b _ h w"]], scales: tuple[int, ...]) -> Float[Tensor, "b d"]:
    """Of every map on every grid, in the order of ``bicovg``; coarse grids come from the finest.

    A pool adds one value after the other; rows first and then columns keeps that exact on large maps.
    """
    finest = max(scales)
    H, W = (side // finest for side in maps[0].shape[2:])
    fine = [F.avg_pool2d(F.avg_pool2d(x.square(), (H, 1)), (1, W)) for x in maps]
    return torch.cat([F.avg_pool2d(x, finest // scale).flatten(1) for scale in scales for x in fine], dim=1)


def _slopes(x: Float[Tensor, "b c h w"], grads: Sequence[Tensor], scales: tuple[int, ...]) -> Float[Tensor, "b i j c"]:
    """The gradient of a map over the map itself, in each cell of the finest grid."""
    B, C, H, W = x.shape
    finest, found = max(scales), []
    for scale, grad in zip(scales, grads, strict=True):
        times = finest // scale
        cells = grad.reshape(B, C, scale, 1, scale, 1).permute(0, 2, 3, 4, 5, 1) * (2 * scale * scale / (H * W))
        found.append(cells.expand(B, scale, times, scale, times, C).reshape(B, finest, finest, C))
    return torch.stack(found).sum(dim=0) if len(found) > 1 else found[0]


def _weigh(x: Float[Tensor, "b c h w"], slopes: Float[Tensor, "b i j c"]) -> Float[Tensor, "b c h w"]:
    """Every pixel times its cell's slope."""
    B, C, H, W = x.shape
    s = slopes.shape[1]
    cells = x.permute(0, 2, 3, 1).view(B, s, H // s, s, W // s, C)
    return (cells * slopes[:, :, None, :, None]).view(B, H, W, C).permute(0, 3, 1, 2)


def _rows(x: Float[Tensor, "b c h w"]) -> Float[Tensor, "p c"]:
    """A pixel a row, of what lies in channels_last order: the same memory."""
    return x.permute(0, 2, 3, 1).view(-1, x.shape[1])
