"""What a benchmark changes in a network before it trains: gradient accumulation, and steps without goodness.

Without goodness, a block still needs a gradient, or its convolution would be spared the weight gradient as well. Two
stand-ins feed the readout a constant and hand back a gradient that is already there:

* ``constant``: f is its own gradient; convolution, batch norm and ReLU do all their work, the tail too. Only goodness
  is missing, but what is left runs as the plain functions, which may be slower than the fused kernels of the real step;
* ``bare``: y, the convolution's output, is its own gradient; the forward kernels are those of the real step, and batch
  norm and ReLU have no backward pass. So it takes less time than the real step would without goodness.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bicovg.blocks import Block
from bicovg.networks import LocalNetwork
from bicovg.signals import Credit, assign_gradients


class ConstantGoodness(nn.Module):
    """Takes the place of BiCovG; its attributes keep a block on the plain path."""

    plain, weight, scales = True, None, (1,)

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


def replace_goodness(net: LocalNetwork, stand_in: str) -> None:
    """Take goodness out of every exit; ``stand_in`` is ``constant`` or ``bare``."""
    for block in net.modules():
        if isinstance(block, Block) and block.readout is not None:
            block.goodness = ConstantGoodness(block.readout.in_features)
            if stand_in == "bare":
                block.finish = _bare_finish(block)  # type: ignore[method-assign]


def _bare_finish(block: Block) -> Callable[..., tuple[Tensor | None, Tensor]]:
    def finish(x: Tensor, keys: Tensor | None, emit: bool) -> tuple[Tensor | None, Tensor]:
        y = block.convolve(x)
        assert block.goodness is not None
        assert block.readout is not None
        logits: Tensor = block.readout(block.goodness(y))
        return _emit_from_y(block, y.detach(), keys, emit), logits

    return finish


@torch.no_grad()
def _emit_from_y(block: Block, y: Tensor, keys: Tensor | None, emit: bool) -> Tensor | None:
    """h from y, by the same kernels as the real step where they can take it."""
    from bicovg.kernels.block import block_statistics, fuses_block
    from bicovg.kernels.tail import fused_tail

    if block.norm is not None and fuses_block(y, None, (1,)):
        stats, drop = block_statistics(y, block.norm), block.dropout if block.training else 0.0
        return fused_tail(y, block.pool, drop, keys, block.index, stats) if emit else None
    f = block.activate(y)
    return block.emit(f, keys) if emit else None


def accumulate_gradients(unit: nn.Module, parts: int) -> None:
    """Let a unit that emits nothing learn from ``parts`` micro-batches one after the other: the mean of their losses.

    Equal to the whole batch but for batch norm, which sees each micro-batch by itself.
    """
    learn: Callable[..., Credit] = unit.learn  # type: ignore[assignment]

    def learn_in_parts(x: Tensor, labels: Tensor, keys: Tensor | None = None, emit: bool = True) -> Credit:
        assert not emit, "only the last unit can accumulate: others would need to join their outputs"
        pieces = [None] * parts if keys is None else keys.chunk(parts)
        losses: list[Tensor] = []
        for images, targets, mine in zip(x.chunk(parts), labels.chunk(parts), pieces, strict=True):
            credit = learn(images, targets, mine, False)
            credit.roots = [(loss / parts, grad) for loss, grad in credit.roots]
            losses.append(credit.losses)
            if len(losses) < parts:
                assign_gradients([credit])
                del credit
        credit.losses = torch.stack(losses).mean(dim=0)
        return credit

    unit.learn = learn_in_parts  # type: ignore[assignment]
