"""One optimizer per unit, one schedule for all."""

import math

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from bicovg.config import OptimConfig
from bicovg.errors import UserError
from bicovg.networks import LocalNetwork


def make_optimizers(net: LocalNetwork, config: OptimConfig, device: torch.device) -> list[Optimizer]:
    """One per unit; on CUDA with the learning rate in a device tensor, so that a graph can read it."""
    on_gpu, fused = device.type == "cuda", device.type in ("cuda", "cpu")  # one pass over memory, no temporaries
    lr: float | torch.Tensor = torch.tensor(config.lr, device=device) if on_gpu else config.lr
    made: list[Optimizer] = []
    for unit in net.units:
        if config.name == "adamw":
            made.append(AdamW(unit.parameters(), lr, weight_decay=config.weight_decay, fused=fused, capturable=on_gpu))
        elif config.name == "sgd":
            made.append(
                SGD(
                    unit.parameters(),
                    lr,
                    momentum=config.momentum,
                    weight_decay=config.weight_decay,
                    fused=fused,
                )
            )
        else:
            raise UserError(f"optimizer {config.name!r} is unknown: choose adamw or sgd")
    return made


def clip_gradients(part: nn.Module, clip_norm: float) -> Tensor:
    """Scale the gradients of ``part`` to a norm of at most ``clip_norm``, without a host sync; returns their norm."""
    return nn.utils.clip_grad_norm_(part.parameters(), clip_norm)


def learning_rate(step: int, steps: int, warmup_steps: int, lr: float, lr_min: float) -> float:
    """Linear from 0 over the warm-up, then a cosine from ``lr`` to ``lr_min``, per step."""
    if step < warmup_steps:
        return lr * step / warmup_steps
    share = (step - warmup_steps) / max(1, steps - warmup_steps)
    return lr_min + (lr - lr_min) * (1 + math.cos(math.pi * share)) / 2


def set_learning_rate(optimizers: list[Optimizer], lr: float) -> None:
    """Into the device tensor where there is one (all units share it), else as a number."""
    shared: set[torch.Tensor] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                shared.add(group["lr"])
            else:
                group["lr"] = lr
    for tensor in shared:
        tensor.fill_(lr)
