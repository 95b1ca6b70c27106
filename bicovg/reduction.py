"""Data parallel: one unit's gradients, averaged over the processes while the next unit computes.

A unit's message leaves when its backward pass ends. It holds the unit's gradients, its losses and, where batch norm
normalises each share by itself, its running statistics, so that every process holds the same network after every step.
The answer is waited for one unit later, right before that unit's clip and step: two units' gradients are alive at once.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bicovg.distributed import Processes


class NoReduction:
    """One process: a unit can be clipped and stepped as soon as its backward pass is done."""

    lag = 0

    def launch(self, index: int, unit: nn.Module, losses: Tensor) -> None:
        """Send what the unit's backward pass gave."""

    def collect(self, index: int) -> None:
        """Wait for the answer and put the mean over all processes in its place."""


class UnitReduction(NoReduction):
    """Averages over the processes that share a batch.

    Args:
        statistics: whether the units' running statistics are averaged, too.

    Attributes:
        bytes_sent: payload handed to all-reduce so far.
    """

    lag = 1

    def __init__(self, team: Processes, statistics: bool) -> None:
        self.team, self.statistics = team, statistics
        self.bytes_sent = 0
        self._under_way: dict[int, tuple[Any, Tensor, list[Tensor]]] = {}

    @torch.no_grad()
    def launch(self, index: int, unit: nn.Module, losses: Tensor) -> None:
        tensors = [p.grad for p in unit.parameters() if p.grad is not None] + [losses]
        if self.statistics:
            tensors += [buffer for buffer in unit.buffers() if buffer.is_floating_point()]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self.bytes_sent += flat.nbytes
        with self.team.talking():
            work = dist.all_reduce(flat, group=self.team.sharers, async_op=True)
        self._under_way[index] = work, flat, tensors

    @torch.no_grad()
    def collect(self, index: int) -> None:
        work, flat, tensors = self._under_way.pop(index)
        with self.team.talking():
            work.wait()
        flat /= self.team.data
        for tensor, mean in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view(tensor.shape))
