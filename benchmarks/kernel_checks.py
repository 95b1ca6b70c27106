"""The kernels of a whole block, as training uses them, against float64: batch norm, ReLU, goodness, tail, gradients.

Training uses them in two ways (``bicovg.blocks``). A block inside a unit keeps y and differentiates its tail too. A
unit's last block makes h without a graph and then lets dy take y's place; only a y that is not channels_last, as a
network in contiguous layout makes it, is copied by the kernels instead and stays. The first way is compared with
float64, and the second must give the same bits, in place and from a contiguous y: it is the same kernels at the same
launch shapes, and nothing in them is atomic.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from kernel_blocks import DEVICE, LAST, Block, draw
from torch import Tensor, nn
from torch.nn import functional as F

from bicovg.draws import make_keys
from bicovg.goodness import bicovg
from bicovg.kernels.block import block_goodness, block_statistics
from bicovg.kernels.tail import block_tail, fused_tail
from bicovg.layers import keyed_dropout, rms_norm, rms_pool

NEAR = 1e-5  # an f this small may round to 0 or not
FIELDS = ("g", "dy", "dgamma", "dbeta", "dW", "h", "tail dy", "tail dgamma", "tail dbeta")  # no dW without a W
SAMPLED = ("g", "dy", "h", "tail dy")  # have a row a sample
WAYS = {"in place": LAST, "contiguous": torch.contiguous_format}  # of a unit's last block; fields, too


class Distance:
    """Relative error norms, gathered over chunks of a batch: of all of it, and of its worst sample."""

    def __init__(self) -> None:
        self.squares: list[Tensor] = []

    def add(self, x: Tensor, reference: Tensor) -> None:
        error, size = (a.square().flatten(1).sum(1) for a in (x.double() - reference, reference))
        self.squares.append(torch.stack([error, size]))

    def values(self, name: str) -> dict[str, float]:
        error, size = torch.cat(self.squares, 1)
        worst = float((error / size).max())  # which is NaN where one is
        return {name: math.sqrt(float(error.sum() / size.sum())), f"{name} of a sample": math.sqrt(worst)}


def cut_rows(x: Tensor) -> Iterator[slice]:
    """A batch in pieces whose float64 is small."""
    chunk = max(1, (1 << 26) // x[0].numel())
    for part in range(0, len(x), chunk):
        yield slice(part, part + chunk)


def distance(x: Tensor, reference: Tensor) -> float:
    return float((x.detach().double() - reference).norm() / reference.norm())


def distances(name: str, x: Tensor, reference: Tensor) -> dict[str, float]:
    """The relative error norm, and that of the worst sample where there are samples."""
    if name not in SAMPLED:
        return {name: distance(x, reference)}
    gathered = Distance()
    for rows in cut_rows(x):
        gathered.add(x.detach()[rows], reference[rows])
    return gathered.values(name)


@contextmanager
def poisoned() -> Iterator[None]:
    """Uninitialised memory is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def make_norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, device=DEVICE)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.uniform_(norm.bias, -0.5, 0.5)
    return norm


def clear_edges(y: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    """y with its few values moved, by a step that bfloat16 has, whose f is within rounding of 0.

    There ReLU opens in one precision and not in another, and each such pixel is a wrong gradient of full size: in 100
    million of them enough for an error of 1e-4, and in a sample of 2,048 for one of 3e-2, which says nothing of the
    kernels.
    """
    z = F.batch_norm(y.double(), None, None, norm.weight.double(), norm.bias.double(), True, 0.0, norm.eps)
    return torch.where(z.abs() < NEAR, y + (y.abs() / 128).clamp(min=10 * NEAR), y)


def with_mixing(tensors: tuple[Tensor, ...], mixing: Tensor | None) -> tuple[Tensor, ...]:
    return tensors if mixing is None else (*tensors, mixing)


def fused(
    block: Block, y: Tensor, weight: Tensor, norm: nn.BatchNorm2d, grads: list[Tensor], keys: Tensor
) -> list[Tensor]:
    """All of FIELDS by the kernels, as inside a unit."""
    leaf, mixing = y.detach().requires_grad_(), weight.clone().requires_grad_() if len(weight) else None
    stats = block_statistics(leaf, norm)
    g = block_goodness(leaf, stats, norm, mixing, block.scales)
    found = torch.autograd.grad(g, with_mixing((leaf, norm.weight, norm.bias), mixing), grads[0])
    h = block_tail(leaf, stats, norm, block.pool, 0.1, keys, 3)
    tail = torch.autograd.grad(h, (leaf, norm.weight, norm.bias), grads[1].to(h.dtype))
    return [g, *found, h, *tail]


def finished(
    block: Block, y: Tensor, weight: Tensor, norm: nn.BatchNorm2d, grads: list[Tensor], keys: Tensor
) -> list[Tensor]:
    """FIELDS up to h by the kernels, as at a unit's end: dy takes the place of a y that is channels_last."""
    leaf, mixing = y.detach().requires_grad_(), weight.clone().requires_grad_() if len(weight) else None
    shadow = weight.to(y.dtype) if len(weight) else None
    stats = block_statistics(leaf, norm)
    h = fused_tail(leaf, block.pool, 0.1, keys, 3, stats)
    g = block_goodness(leaf, stats, norm, mixing, block.scales, overwrite=True, shadow=shadow)
    dy, *found = torch.autograd.grad(g, with_mixing((leaf, norm.weight, norm.bias), mixing), grads[0])
    assert (dy.data_ptr() == y.data_ptr()) is y.is_contiguous(memory_format=LAST), "dy is not where it should be"
    return [g, dy, *found, h]


def count_unequal(found: list[Tensor], wanted: list[Tensor]) -> float:
    """How many are not the same bit for bit; one that has a NaN is not."""
    return float(sum(not torch.equal(a, b) for a, b in zip(found, wanted, strict=True)))


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


def check_block(block: Block, dtype: torch.dtype, ways: Iterable[str] = tuple(WAYS)) -> dict[str, float]:
    """Relative error of each of FIELDS, of the worst sample of those SAMPLED, and differing results of each way."""
    f, weight, grad, keys = draw(block, dtype)
    weight = weight.to(dtype).float()
    side = block.size // 2 if block.pool else block.size
    down = torch.randn(block.batch, block.channels, side, side, device=DEVICE).to(dtype).contiguous(memory_format=LAST)
    norm = make_norm(block.channels)
    y = clear_edges(f - 0.3, norm).contiguous(memory_format=LAST)
    given = (weight, norm, [grad, down], keys)
    with poisoned():
        mine = fused(block, y, *given)
        errors = {}
        for way in ways:
            errors[way] = count_unequal(finished(block, y.clone(memory_format=WAYS[way]), *given), mine[:-3])
    names = [name for name in FIELDS if name != "dW" or block.projections]
    for name, a, b in zip(names, mine, plain(block, y, *given), strict=True):
        errors |= distances(name, a, b)
    return errors
