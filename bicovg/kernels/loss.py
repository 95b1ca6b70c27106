"""Cross-entropy on CUDA: the mean loss and the gradient of the logits from one small kernel.

PyTorch takes eight launches for the two, which a strict network pays once per block.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from bicovg.kernels.goodness import fused_available
from bicovg.kernels.tiles import device_guard, next_power

MOST_CLASSES = 2048
ELEMENTS = 4096  # of the logits a tile


@torch.library.custom_op(
    "bicovg::cross_entropy", mutates_args=(), schema="(Tensor logits, Tensor labels) -> (Tensor, Tensor)"
)
def cross_entropy_op(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss, and its gradient, both float32. One program: the sum has one order."""
    from bicovg.kernels.loss_triton import cross_entropy_kernel

    rows, classes = logits.shape
    loss, grad = _outputs(logits, labels)
    BK = max(16, next_power(classes))
    with device_guard(logits):
        cross_entropy_kernel[(1,)](
            loss, grad, logits.contiguous(), labels.contiguous(), rows, classes, BR=ELEMENTS // BK, BK=BK, num_warps=8
        )
    return loss, grad


@cross_entropy_op.register_fake
def _outputs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits.new_empty(()), logits.new_empty(logits.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
    (slope,) = ctx.saved_tensors
    return slope * grad, None


cross_entropy_op.register_autograd(_differentiate, setup_context=_save)


def exit_loss(logits: Float[Tensor, "b k"], labels: Int[Tensor, " b"], plain: bool = False) -> Float[Tensor, ""]:
    """``cross_entropy(logits, labels)``, by the kernel where it can take them and ``plain`` does not forbid it."""
    fits = logits.dtype == torch.float32 and fused_available(logits) and logits.shape[1] <= MOST_CLASSES
    if plain or not fits:
        return F.cross_entropy(logits, labels)
    loss: Tensor = torch.ops.bicovg.cross_entropy(logits, labels)[0]
    return loss
