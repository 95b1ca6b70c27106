"""Batch norm over the whole batch of several processes, so that their number does not change what is computed."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bicovg.config import Config
from bicovg.distributed import Processes


class SumOverShares(torch.autograd.Function):
    """The sum over the processes that share a batch; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Processes) -> Tensor:
        ctx.team = team
        with team.talking():
            total = x.clone()
            dist.all_reduce(total, group=team.sharers)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return SumOverShares.forward(ctx, grads[0].contiguous(), ctx.team), None


class SyncedBatchNorm(nn.BatchNorm2d):
    """``nn.BatchNorm2d`` with the mean and variance of all shares together, in training."""

    team: Processes

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        wide = x if x.dtype == torch.float64 else x.float()
        count = wide.numel() // wide.shape[1] * self.team.data
        mean = self._sum(wide) / count
        centred = wide - mean.view(-1, 1, 1)
        variance = self._sum(centred.square()) / count
        self._follow(mean, variance, count)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return (centred * scale.view(-1, 1, 1) + self.bias.view(-1, 1, 1)).to(x.dtype)

    def _sum(self, x: Tensor) -> Tensor:
        total: Tensor = SumOverShares.apply(x.sum(dim=(0, 2, 3)), self.team)  # type: ignore[no-untyped-call]
        return total

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Move the running statistics as batch norm does, the variance without bias."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance * (count / max(1, count - 1)), self.momentum)


def apply_norm_stats(net: nn.Module, config: Config, team: Processes) -> None:
    """Batch norm over all shares of a batch, where the config asks for it and there are several."""
    if config.train.batch_norm_stats == "synced" and team.data > 1:
        sync_batch_norm(net, team)


def sync_batch_norm(net: nn.Module, team: Processes) -> None:
    """Turn every batch norm of ``net`` into a synced one, its parameters and buffers untouched."""
    for module in net.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = SyncedBatchNorm
            module.team = team  # type: ignore[assignment]
