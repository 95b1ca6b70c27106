"""The sums of ``bicovg.offsets`` on CUDA in one pass over dy: a product with nine rows of zeros and ones."""

import math

import torch
from torch import Tensor

from bicovg.kernels.goodness import fused_available
from bicovg.kernels.tiles import device_guard, next_power
from bicovg.offsets import border_sums

PIXELS, CHANNELS = 64, 64  # of dy at a time


@torch.library.custom_op("bicovg::border_sums", mutates_args=(), schema="(Tensor dy) -> Tensor")
def border_sums_op(dy: Tensor) -> Tensor:
    """(B, D, 3, 3) float32."""
    from bicovg.kernels.borders_triton import borders_kernel

    sums: Tensor = _output(dy)
    dy = dy.contiguous(memory_format=torch.channels_last)
    B, C, H, W = dy.shape
    BC = min(CHANNELS, max(16, next_power(C)))
    with device_guard(dy):
        borders_kernel[(B, math.ceil(C / BC))](
            sums, dy, C=C, H=H, W=W, BP=min(PIXELS, max(16, next_power(H * W))), BC=BC, PRECISION="ieee", STAGES=3,
            num_warps=4,
        )  # fmt: skip
    return sums


@border_sums_op.register_fake
def _output(dy: Tensor) -> Tensor:
    return torch.empty((*dy.shape[:2], 3, 3), dtype=torch.float32, device=dy.device)


def fused_border_sums(dy: Tensor) -> Tensor:
    """``border_sums`` by the kernel where it can run."""
    return border_sums_op(dy) if fused_available(dy) else border_sums(dy)
