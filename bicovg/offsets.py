"""The gradient of an offset that is constant over a convolution's input map, without the input's own gradient.

``y = conv3x3(x + o)`` with padding 1: every pixel of y adds ``W[tap] o`` for the taps that lie inside the map. So the
gradient of o is W, tap by tap, times the sum of dy over the pixels whose tap lies inside: all of them, less the first
or the last row and column. Nine sums per sample and channel stand for a convolution as large as the forward one.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from bicovg.goodness import widen


def border_sums(dy: Float[Tensor, "b d h w"]) -> Float[Tensor, "b d 3 3"]:
    """For each tap of a 3 x 3 kernel the sum over the pixels at which it lies inside the map; at least float32."""
    columns = _without_edges(widen(dy), 2)  # (b, d, w, 3)
    return _without_edges(columns, 2)


def _without_edges(x: Tensor, dim: int) -> Tensor:
    """Sums over ``dim`` without its first, with all and without its last element, in a new last dimension."""
    total = x.sum(dim)
    return torch.stack([total - x.select(dim, 0), total, total - x.select(dim, -1)], dim=-1)


def contract_sums(sums: Float[Tensor, "b d 3 3"], weight: Float[Tensor, "d c 3 3"]) -> Float[Tensor, "b c"]:
    """The offset's gradient from the border sums of dy."""
    with torch.autocast(sums.device.type, enabled=False):
        return sums.flatten(1) @ weight.to(sums.dtype).permute(0, 2, 3, 1).flatten(0, 2)


class _Attach(torch.autograd.Function):
    """y as it is; backward, dy as it is, and from it the offset's gradient.

    The weight, whose own gradient the convolution has, is an input for the gradient of the gradient.
    """

    @staticmethod
    def forward(y: Tensor, offset: Tensor, weight: Tensor, plain: bool) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, offset, weight, plain = inputs
        ctx.save_for_backward(weight)
        ctx.dtype, ctx.plain = offset.dtype, plain

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        from bicovg.kernels.borders import fused_border_sums

        if not ctx.needs_input_grad[1]:
            return grads[0], None, None, None
        (weight,) = ctx.saved_tensors
        sums = border_sums(grads[0]) if ctx.plain else fused_border_sums(grads[0])
        return grads[0], contract_sums(sums, weight).to(ctx.dtype), None, None


def attach_offset(
    y: Float[Tensor, "b d h w"], offset: Float[Tensor, "b c"], weight: Float[Tensor, "d c 3 3"], plain: bool = False
) -> Float[Tensor, "b d h w"]:
    """y, with the offset as an ancestor: it gets the gradient it would have got as part of the convolution's input.

    Args:
        y: made with ``weight``, padding 1, from an input that holds the offset and carries no graph.
    """
    attached: Tensor = _Attach.apply(y, offset, weight, plain)  # type: ignore[no-untyped-call]
    return attached
