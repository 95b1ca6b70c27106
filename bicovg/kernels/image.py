"""The 3 x 3 convolution of an image's few channels on CUDA, padding 1, with the gradient of its weights.

cuDNN takes five times as long for it as writing y does, with the channels padded to eight as well. Here the 27 numbers
around a pixel are gathered on the way in, and one small product makes all its outputs.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from bicovg.kernels.goodness import fused_available
from bicovg.kernels.tiles import device_guard, next_power

MOST_CHANNELS = 7
ROWS, CHANNELS = 128, 128  # of y a program
SUMMED_ROWS = 64  # of dy at a time
WORKERS = 528  # programs that share the rows of dy, at most


def fits_image(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels can take this convolution: in bfloat16, or in Triton's interpreter, of an image."""
    if x.shape[1] > MOST_CHANNELS or x.requires_grad or not fused_available(x) or weight.shape[2:] != (3, 3):
        return False
    return working_dtype(x) == (torch.bfloat16 if x.is_cuda else torch.float32)


def working_dtype(x: Tensor) -> torch.dtype:
    """The type a convolution of x computes in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _sizes(x: Tensor, D: int) -> dict[str, Any]:
    _, C, H, W = x.shape
    BD = min(CHANNELS, max(16, next_power(D)))
    return {"C": C, "D": D, "H": H, "W": W, "BD": BD, "KP": next_power(9 * C), "PRECISION": "ieee"}


@torch.library.custom_op("bicovg::image_conv", mutates_args=(), schema="(Tensor x, Tensor weight) -> Tensor")
def image_conv_op(x: Tensor, weight: Tensor) -> Tensor:
    """y, channels_last, of x and a weight of one type."""
    from bicovg.kernels.image_triton import image_kernel

    y: Tensor = _output(x, weight)
    x = x.contiguous(memory_format=torch.channels_last)
    B, _, H, W = x.shape
    sizes = _sizes(x, weight.shape[0])
    grid = (math.ceil(B * H * W / ROWS), math.ceil(weight.shape[0] / sizes["BD"]))
    with device_guard(x):
        image_kernel[grid](y, x, weight, B * H * W, *weight.stride(), **sizes, BR=ROWS, num_warps=4)
    return y


@image_conv_op.register_fake
def _output(x: Tensor, weight: Tensor) -> Tensor:
    size = (x.shape[0], weight.shape[0], *x.shape[2:])
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


@torch.library.custom_op("bicovg::image_conv_weight", mutates_args=(), schema="(Tensor dy, Tensor x) -> Tensor")
def image_conv_weight_op(dy: Tensor, x: Tensor) -> Tensor:
    """The weight's gradient in x's type, channels_last."""
    from bicovg.kernels.image_triton import image_weight_kernel

    dy, x = (t.contiguous(memory_format=torch.channels_last) for t in (dy, x))
    B, C, H, W = x.shape
    D, rows = dy.shape[1], B * H * W
    sizes = _sizes(x, D)
    workers = max(1, min(WORKERS, math.ceil(rows / SUMMED_ROWS)))
    part = torch.empty((workers, D, sizes["KP"]), dtype=torch.float32, device=x.device)
    with device_guard(x):
        image_weight_kernel[(workers, math.ceil(D / sizes["BD"]))](
            part, dy, x, rows, **sizes, BR=SUMMED_ROWS, STAGES=2 if sizes["KP"] < 64 else 1, num_warps=4
        )
    total = part.sum(dim=0)[:, : 9 * C].to(x.dtype).contiguous()
    return total.view(D, 3, 3, C).permute(0, 3, 1, 2)


@image_conv_weight_op.register_fake
def _(dy: Tensor, x: Tensor) -> Tensor:
    return x.new_empty((dy.shape[1], 3, 3, x.shape[1])).permute(0, 3, 1, 2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _differentiate(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None]:
    (x,) = ctx.saved_tensors
    return None, torch.ops.bicovg.image_conv_weight(dy, x) if ctx.needs_input_grad[1] else None


image_conv_op.register_autograd(_differentiate, setup_context=_save)


def image_conv(x: Float[Tensor, "b c h w"], weight: Float[Tensor, "d c 3 3"]) -> Float[Tensor, "b d h w"]:
    """``conv2d(x, weight, padding=1)`` in the type autocast would choose, channels_last; no gradient for x."""
    dtype = working_dtype(x)
    y: Tensor = torch.ops.bicovg.image_conv(x.to(dtype), weight.to(dtype))
    return y
