"""Cross-entropy on CUDA: the loss and the gradient of the logits from one small kernel.

PyTorch takes eight launches for the two, which a strict network pays once per block.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from bicovg.kernels.goodness import fused_available
from bicovg.kernels.tiles import device_guard, next_power

MOST_CLASSES = 2048
ELEMENTS = 512  # of the logits a program: many small ones, as backward waits for them


@torch.library.custom_op(
    "bicovg::cross_entropy", mutates_args=(), schema="(Tensor logits, Tensor labels) -> (Tensor, Tensor)"
)
def cross_entropy_op(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss (1,), and its gradient, both float32."""
    from bicovg.kernels.loss_triton import cross_entropy_kernel

    rows, classes = logits.shape
    losses, grad = logits.new_empty((1, rows)), logits.new_empty(logits.shape)
    BK = max(16, next_power(classes))
    BR = max(1, ELEMENTS // BK)
    with device_guard(logits):
        cross_entropy_kernel[(math.ceil(rows / BR),)](
            losses, grad, logits.contiguous(), labels.contiguous(), rows, classes, BR=BR, BK=BK, num_warps=2
        )
    return losses.sum(dim=1), grad


@cross_entropy_op.register_fake
def _(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits.new_empty((1,)), logits.new_empty(logits.shape)


def exit_loss(
    logits: Float[Tensor, "b k"], labels: Int[Tensor, " b"], plain: bool = False
) -> tuple[Float[Tensor, "1"], Tensor, Tensor | None]:
    """``cross_entropy(logits, labels)``: its value, and what to differentiate with which incoming gradient.

    That is the loss itself; or, where the kernel can take the logits and ``plain`` does not forbid it, the logits.
    """
    fits = logits.dtype == torch.float32 and fused_available(logits) and logits.shape[1] <= MOST_CLASSES
    if plain or not fits:
        loss = F.cross_entropy(logits, labels)
        return loss.detach().view(1), loss, None
    value, slope = torch.ops.bicovg.cross_entropy(logits.detach(), labels)
    return value, logits, slope
