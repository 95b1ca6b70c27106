"""What a benchmark changes in a network before it trains: steps without goodness.

Without goodness, a block still needs a gradient, or its convolution would be spared the weight gradient as well. Two
stand-ins feed the readout a constant and hand back a gradient that costs nothing to make:

* ``constant``: f is its own gradient. Convolution, batch norm, ReLU and tail do all their work, by the fused block's
  kernels where those can take it; the sums of the backward pass come from a kernel that the real step does not use.
  Only goodness is missing: its share is measured against this;
* ``bare``: y, the convolution's output, is its own gradient, so batch norm and ReLU have no backward pass either.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bicovg.blocks import Block
from bicovg.goodness import BiCovG
from bicovg.networks import LocalNetwork


class ConstantGoodness(nn.Module):
    """Takes the place of BiCovG."""

    plain, weight, scales = False, None, (1,)

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        constant: Tensor = _Constant.apply(x, self.dim)  # type: ignore[no-untyped-call]
        return constant


class _Constant(torch.autograd.Function):
    """Ones forward; backward, the input itself as its gradient, so that no kernel runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(x)
        return torch.ones((len(x), dim), device=x.device, dtype=torch.float64 if x.dtype == torch.float64 else None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


class _FusedConstant(torch.autograd.Function):
    """The same from y: backward, f as its own gradient, through ReLU and batch norm by the fused kernels."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, stats: Tensor, gamma: Tensor, beta: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(y, stats)
        return torch.ones((len(y), dim), device=y.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, stats = ctx.saved_tensors
        B, C, H, W = y.shape
        dy, none = y.detach(), y.new_empty((0, 0))
        energy = torch.full((B, C), H * W / 2, device=y.device)  # the gradient of the energies that makes f's own
        if y.is_contiguous(memory_format=torch.channels_last) and not torch.compiler.is_compiling():
            sums = torch.ops.bicovg.block_goodness_backward_(energy, None, dy, stats, None, none, [1])
        else:
            dy, sums = torch.ops.bicovg.block_goodness_backward(energy, None, dy, stats, None, none, [1])
        return dy, None, sums[1], sums[0], None


def replace_goodness(net: LocalNetwork, stand_in: str) -> None:
    """Take goodness out of every exit; ``stand_in`` is ``constant`` or ``bare``."""
    for block in net.modules():
        if isinstance(block, Block) and block.readout is not None:
            known, replaced = block.fusible(), block.goodness
            block.goodness = ConstantGoodness(block.readout.in_features)
            block.finish = _finish_without(block, stand_in == "bare", replaced)  # type: ignore[method-assign]
            block.fusible = partial(_still_fusible, block, known)  # type: ignore[method-assign]


def _still_fusible(block: Block, known: bool) -> bool:
    return known and not block.plain


def _finish_without(
    block: Block, bare: bool, replaced: nn.Module | None
) -> Callable[..., tuple[Tensor | None, Tensor]]:
    from bicovg.kernels.block import block_statistics, fuses_block
    from bicovg.kernels.tail import fused_tail

    goodness, readout, norm = block.goodness, block.readout, block.norm
    assert goodness is not None
    assert readout is not None

    def fuses(y: Tensor) -> bool:
        """Whether the real block would be."""
        if not isinstance(replaced, BiCovG) or not block.fusible() or not block.training:
            return False
        return fuses_block(y, replaced.weight, replaced.scales)

    def finish(x: Tensor, keys: Tensor | None, emit: bool) -> tuple[Tensor | None, Tensor]:
        y = block.convolve(x)
        if norm is None or not fuses(y):
            f = block.activate(y)
            with torch.no_grad():
                h = block.emit(f.detach(), keys) if emit else None
            return h, readout(goodness(y if bare else f))
        stats, h, drop = block_statistics(y, norm), None, block.dropout if block.training else 0.0
        if emit:
            h = fused_tail(y.detach(), block.pool, drop, keys, block.index, stats)
            if block.emitted is not None and block.training:
                block.emitted(h)
        if bare:
            return h, readout(goodness(y))
        constant: Tensor = _FusedConstant.apply(y, stats, norm.weight, norm.bias, goodness.dim)  # type: ignore[no-untyped-call]
        return h, readout(constant)

    return finish
