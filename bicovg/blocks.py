"""The block and the unit: what is computed where, and what is isolated from what.

Block: ``conv3x3 -> batch norm -> ReLU = f``; goodness and readout look at f;
``f -> RMSPool? -> dropout -> RMSNorm = h``.
Unit: consecutive blocks and everything their losses train. A unit's input never carries a graph and its output is
computed without one, so no gradient can leave it: isolation is structural, not a matter of careful detaching.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bicovg.draws import make_keys
from bicovg.goodness import BiCovG, Readout, transformed
from bicovg.layers import FeatureAlignment, add_offset, check_dropout, keyed_dropout, rms_norm, rms_pool
from bicovg.offsets import attach_offset
from bicovg.signals import Credit, exit_credit

if TYPE_CHECKING:
    from bicovg.aside import Aside


def _ordered(x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
    """On a CPU in channels_last order, in which all that follows is fastest; on a GPU a trainer's weights bring it."""
    if x.device.type != "cpu" or transformed():  # ``vmap`` does not know the order of memory
        return x
    return x.contiguous(memory_format=torch.channels_last)


class Block(nn.Module):
    """One convolution with its norm, and, where it is an exit, goodness and readout.

    Args:
        index: position in the network; part of the dropout key and of error messages.
        goodness: a module from f to a vector of length ``dim``, such as BiCovG; None where the block is no exit.
        alignment: the FAL at this block's entrance, or None.

    Attributes:
        plain: keep to the plain functions even where fused kernels could run.
        emitted: called with h as soon as it is written, in the last block of a unit on the fused kernels.
        shadow: the convolution's weight in bfloat16, which takes its place and its gradient in training.
        aside: where the shadow's gradient is computed, in a network trained end to end on a GPU.
    """

    plain = False
    emitted: Callable[[Tensor], object] | None = None
    shadow: Tensor | None = None
    aside: "Aside | None" = None

    def __init__(
        self,
        index: int,
        in_channels: int,
        channels: int,
        *,
        pool: bool,
        dropout: float,
        batch_norm: bool,
        num_classes: int,
        goodness: nn.Module | None,
        alignment: FeatureAlignment | None,
    ) -> None:
        super().__init__()
        self.index, self.pool, self.dropout = index, pool, check_dropout(dropout)
        self.alignment = alignment
        self.conv = nn.Conv2d(in_channels, channels, 3, padding=1, bias=not batch_norm)
        self.norm = nn.BatchNorm2d(channels) if batch_norm else None
        self.goodness = goodness
        self.readout = Readout(cast(int, goodness.dim), num_classes) if goodness is not None else None
        self.recomputing = False

    def convolve(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d h w"]:
        """The convolution's output y, behind the FAL where there is one.

        At a unit's entrance the FAL is all that needs a gradient of the convolution's input, and only its sum.
        """
        if self.alignment is None:
            return self._convolve(x)
        if x.requires_grad or not torch.is_grad_enabled() or transformed():
            return self._convolve(self.alignment(x))
        offset = self.alignment.offset(x)
        y = self._convolve(add_offset(x, offset.detach()))
        return attach_offset(y, offset, self._weight(), self.plain)

    def _weight(self) -> Tensor:
        """What the convolution computes with."""
        return self.shadow if self.shadow is not None and self.training else self.conv.weight

    def _convolve(self, x: Tensor) -> Tensor:
        weight = self._weight()
        if self._reads_image(x, weight):
            from bicovg.kernels.image import image_conv

            return image_conv(x, weight)
        if weight is self.shadow:
            if self.aside is not None and self.conv.bias is None and torch.is_grad_enabled():
                from bicovg.aside import conv_aside

                return conv_aside(x, weight, self.aside)
            return F.conv2d(x, weight, self.conv.bias, padding=1)
        return _ordered(self.conv(x))

    def _reads_image(self, x: Tensor, weight: Tensor) -> bool:
        """Whether the convolution runs as the kernel for few channels."""
        if self.plain or self.conv.bias is not None:
            return False
        from bicovg.kernels.image import fits_image

        return fits_image(x, weight)

    def features(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d h w"]:
        """The post-ReLU, pre-pool activations f of an input."""
        return self.activate(self.convolve(x))

    def activate(self, y: Float[Tensor, "b d h w"]) -> Float[Tensor, "b d h w"]:
        """f from y."""
        return F.relu(y if self.norm is None else self._normalise(y, self.norm))

    def _normalise(self, y: Tensor, norm: nn.BatchNorm2d) -> Tensor:
        if not (self.training and self.recomputing):
            return norm(y)  # type: ignore[no-any-return]
        # checkpointing runs the forward twice: the running statistics must move once, so copies take the second
        assert norm.running_mean is not None
        assert norm.running_var is not None
        means, variances = norm.running_mean.clone(), norm.running_var.clone()
        return F.batch_norm(y, means, variances, norm.weight, norm.bias, True, 0.0, norm.eps)

    def judge(self, f: Float[Tensor, "b d h w"]) -> Float[Tensor, "b k"]:
        """Class logits of this exit."""
        assert self.goodness is not None
        assert self.readout is not None
        try:
            return self.readout(self.goodness(f))  # type: ignore[no-any-return]
        except ValueError as error:
            raise ValueError(f"block {self.index}: {error}") from None

    def emit(self, f: Float[Tensor, "b d h w"], keys: Int[Tensor, " b"] | None) -> Float[Tensor, "b d p q"]:
        """The next block's input h. ``keys`` (one per sample) key the dropout mask in training."""
        drop = self.dropout if self.training else 0.0
        h = rms_pool(f) if self.pool else f
        if drop:
            assert keys is not None
            h = keyed_dropout(h, drop, make_keys(keys, self.index))
        return rms_norm(h)

    def forward(
        self, x: Float[Tensor, "b c h w"], keys: Int[Tensor, " b"] | None
    ) -> tuple[Float[Tensor, "b d p q"], Float[Tensor, "b k"] | None]:
        """h with its graph, and the logits if this block is an exit."""
        y = self.convolve(x)
        if self._fuses(y):
            return self._forward_fused(y, keys)
        f = self.activate(y)
        return self.emit(f, keys), self.judge(f) if self.goodness is not None else None

    def finish(
        self, x: Float[Tensor, "b c h w"], keys: Int[Tensor, " b"] | None, emit: bool
    ) -> tuple[Float[Tensor, "b d p q"] | None, Float[Tensor, "b k"] | None]:
        """The same as the last block of a unit: h without a graph, and only where asked for."""
        y = self.convolve(x)
        if self._fuses(y):
            return self._finish_fused(y, keys, emit)
        f = self.activate(y)
        logits = self.judge(f) if self.goodness is not None else None
        with torch.no_grad():
            return self.emit(f.detach(), keys) if emit else None, logits

    def fusible(self) -> bool:
        """Whether the kernels of ``bicovg.kernels`` know everything behind this block's convolution."""
        known = isinstance(self.goodness, BiCovG) and not self.goodness.plain
        return not self.plain and type(self.norm) is nn.BatchNorm2d and (self.goodness is None or known)

    def _fuses(self, y: Tensor) -> bool:
        """Whether batch norm, goodness and tail run as those kernels here."""
        if not self.fusible() or (torch.is_grad_enabled() and not self.training):  # they differentiate batch statistics
            return False
        from bicovg.kernels.block import fuses_block
        from bicovg.kernels.goodness import fused_available

        if self.goodness is None:
            return fused_available(y)
        if not isinstance(self.goodness, BiCovG):
            return False
        return fuses_block(y, self.goodness.weight, self.goodness.scales)

    def _judge_fused(self, y: Tensor, stats: Tensor, overwrite: bool = False) -> Tensor | None:
        """The logits if this block is an exit."""
        from bicovg.kernels.block import block_goodness

        if self.goodness is None:
            return None
        assert self.norm is not None
        assert isinstance(self.goodness, BiCovG)
        assert self.readout is not None
        weight, shadow = self.goodness.weight, self.goodness.shadow if self.training else None
        goodness = block_goodness(y, stats, self.norm, weight, self.goodness.scales, overwrite, shadow)
        return self.readout(goodness)  # type: ignore[no-any-return]

    def _forward_fused(self, y: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor | None]:
        from bicovg.kernels.block import block_statistics
        from bicovg.kernels.tail import block_tail

        assert self.norm is not None
        stats = block_statistics(y, self.norm, self.recomputing)
        drop = self.dropout if self.training else 0.0
        return block_tail(y, stats, self.norm, self.pool, drop, keys, self.index), self._judge_fused(y, stats)

    def _finish_fused(self, y: Tensor, keys: Tensor | None, emit: bool) -> tuple[Tensor | None, Tensor | None]:
        """h first, which the next unit waits for; then nobody needs y but goodness, whose gradient takes its place."""
        from bicovg.kernels.block import block_statistics
        from bicovg.kernels.tail import fused_tail

        assert self.norm is not None
        stats, h = block_statistics(y, self.norm), None
        if emit:
            h = fused_tail(y, self.pool, self.dropout if self.training else 0.0, keys, self.index, stats)
            if self.emitted is not None and self.training:
                self.emitted(h)
        return h, self._judge_fused(y, stats, overwrite=True)


@contextmanager
def recomputing(block: Block) -> Iterator[None]:
    """Marks the second forward of a checkpointed block."""
    block.recomputing = True
    try:
        yield
    finally:
        block.recomputing = False


class Unit(nn.Module):
    """Blocks trained together by the losses of their exits.

    Args:
        blocks: consecutive blocks; gradients flow between them and nowhere else.
        checkpointing: recompute inner activations in the backward pass instead of keeping them.
    """

    def __init__(self, blocks: Sequence[Block], checkpointing: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.checkpointing = checkpointing
        self.exits = [block.index for block in blocks if block.goodness is not None]

    def forward(
        self, x: Float[Tensor, "b c h w"], keys: Int[Tensor, " b"] | None = None, emit: bool = True
    ) -> tuple[Float[Tensor, "b d p q"] | None, list[Float[Tensor, "b k"]]]:
        """Returns the next unit's input (no graph; None unless ``emit``) and the logits of every exit."""
        logits: list[Tensor] = []
        *inner, last = self.blocks
        assert isinstance(last, Block)
        x = x.detach()
        for block in inner:
            x, judged = self._run_inner(block, x, keys)
            if judged is not None:
                logits.append(judged)
        h, judged = last.finish(x, keys, emit)
        if judged is not None:
            logits.append(judged)
        return h, logits

    def _run_inner(self, block: nn.Module, x: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert isinstance(block, Block)
        if not (self.checkpointing and self.training and torch.is_grad_enabled()):
            return block(x, keys)  # type: ignore[no-any-return]
        return checkpoint(  # type: ignore[no-any-return]
            block,
            x,
            keys,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), recomputing(block)),
        )

    def learn(
        self,
        x: Float[Tensor, "b c h w"],
        labels: Int[Tensor, " b"],
        keys: Int[Tensor, " b"] | None = None,
        emit: bool = True,
    ) -> Credit:
        """Forward and this unit's credit: cross-entropy at each of its exits."""
        from bicovg.kernels.loss import exit_loss

        h, logits = self(x, keys, emit)
        plain = any(block.plain for block in self.blocks)
        return exit_credit(h, [exit_loss(z, labels, plain) for z in logits])
