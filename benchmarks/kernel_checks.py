"""The kernels of a whole block, as training uses them, against float64: batch norm, ReLU, goodness, tail, gradients."""

import torch
from kernel_blocks import DEVICE, LAST, Block, draw
from torch import Tensor, nn
from torch.nn import functional as F

from bicovg.draws import make_keys
from bicovg.goodness import bicovg
from bicovg.kernels.block import block_goodness, block_statistics
from bicovg.kernels.tail import block_tail
from bicovg.layers import keyed_dropout, rms_norm, rms_pool

NEAR = 1e-5  # an f this small may round to 0 or not
FIELDS = ("g", "dy", "dgamma", "dbeta", "dW", "h", "tail dy", "tail dgamma", "tail dbeta")  # no dW without a W


def distance(x: Tensor, reference: Tensor) -> float:
    return float((x.detach().double() - reference).norm() / reference.norm())


def make_norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, device=DEVICE)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.uniform_(norm.bias, -0.5, 0.5)
    return norm


def clear_edges(y: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    """y with its few values moved whose f is within rounding of 0.

    There ReLU opens in one precision and not in another, and each such pixel is a wrong gradient of full size: in 100
    million of them enough for an error of 1e-4, which says nothing of the kernels. In bfloat16, where y itself is
    rounded before both, a larger limit covers them.
    """
    z = F.batch_norm(y.double(), None, None, norm.weight.double(), norm.bias.double(), True, 0.0, norm.eps)
    return torch.where(z.abs() < NEAR, y + 10 * NEAR, y)


def with_mixing(tensors: tuple[Tensor, ...], mixing: Tensor | None) -> tuple[Tensor, ...]:
    return tensors if mixing is None else (*tensors, mixing)


def fused(
    block: Block, y: Tensor, weight: Tensor, norm: nn.BatchNorm2d, grads: list[Tensor], keys: Tensor
) -> list[Tensor]:
    """All of FIELDS by the kernels; uninitialised memory is NaN."""
    leaf, mixing = y.detach().requires_grad_(), weight.clone().requires_grad_() if len(weight) else None
    torch.use_deterministic_algorithms(True, warn_only=True)
    stats = block_statistics(leaf, norm)
    g = block_goodness(leaf, stats, norm, mixing, block.scales)
    found = torch.autograd.grad(g, with_mixing((leaf, norm.weight, norm.bias), mixing), grads[0])
    h = block_tail(leaf, stats, norm, block.pool, 0.1, keys, 3)
    tail = torch.autograd.grad(h, (leaf, norm.weight, norm.bias), grads[1].to(h.dtype))
    torch.use_deterministic_algorithms(False)
    return [g, *found, h, *tail]


def plain(
    block: Block, y: Tensor, weight: Tensor, norm: nn.BatchNorm2d, grads: list[Tensor], keys: Tensor
) -> list[Tensor]:
    """The same by the definitions, in float64."""
    wide, mixing = y.double().requires_grad_(), weight.double().requires_grad_() if len(weight) else None
    gamma, beta = (p.detach().double().requires_grad_() for p in (norm.weight, norm.bias))
    f = F.relu(F.batch_norm(wide, None, None, gamma, beta, True, 0.0, norm.eps))
    g = bicovg(f, mixing, block.scales)
    found = torch.autograd.grad(g, with_mixing((wide, gamma, beta), mixing), grads[0].double(), retain_graph=True)
    h = rms_norm(keyed_dropout(rms_pool(f) if block.pool else f, 0.1, make_keys(keys, 3)))
    tail = torch.autograd.grad(h, (wide, gamma, beta), grads[1].double())
    return [g.detach(), *found, h.detach(), *tail]


def check_block(block: Block, dtype: torch.dtype) -> dict[str, float]:
    """Relative error of each of FIELDS."""
    f, weight, grad, keys = draw(block, dtype)
    y = (f - 0.3).contiguous(memory_format=LAST)
    weight = weight.to(dtype).float()
    side = block.size // 2 if block.pool else block.size
    down = torch.randn(block.batch, block.channels, side, side, device=DEVICE).to(dtype).contiguous(memory_format=LAST)
    norm = make_norm(block.channels)
    if dtype == torch.float32:
        y = clear_edges(y, norm).contiguous(memory_format=LAST)
    mine = fused(block, y, weight, norm, [grad, down], keys)
    wanted = plain(block, y, weight, norm, [grad, down], keys)
    names = [name for name in FIELDS if name != "dW" or block.projections]
    return {name: distance(a, b) for name, a, b in zip(names, mine, wanted, strict=True)}
