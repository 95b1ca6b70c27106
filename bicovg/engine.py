"""Runs training steps: eager anywhere, compiled or as one captured CUDA graph on a GPU.

The captured step holds everything: gather by index, augmentation draws, all units, clipping, optimizer. The host
only copies the next indices and numbers into static buffers.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bicovg.config import Config
from bicovg.data.loader import Loader
from bicovg.draws import DROPOUT, make_keys
from bicovg.networks import LocalNetwork
from bicovg.optim import learning_rate, set_learning_rate
from bicovg.step import local_step

ENGINES = ("auto", "graph", "compiled", "eager")


class Schedule:
    """Learning rate as a function of the global step."""

    def __init__(self, config: Config, steps_per_epoch: int) -> None:
        self.config = config.optim
        self.total = config.train.epochs * steps_per_epoch
        self.warmup = round(config.optim.warmup_epochs * steps_per_epoch)

    def __call__(self, step: int) -> float:
        return learning_rate(step, self.total, self.warmup, self.config.lr, self.config.lr_min)


class EagerEngine:
    """One ``local_step`` per batch of the loader."""

    name = "eager"

    def __init__(
        self, net: LocalNetwork, optimizers: list[Optimizer], config: Config, loader: Loader
    ) -> None:
        self.net, self.optimizers, self.config, self.loader = net, optimizers, config, loader
        self.learning_rate = Schedule(config, len(loader))

    def steps(self, epoch: int, start: int = 0) -> Iterator[Tensor]:
        """Train from step ``start`` of ``epoch`` on; yields the losses (E,) of each step, on the device."""
        for offset, batch in enumerate(self.loader.batches(epoch, start)):
            step = epoch * len(self.loader) + start + offset
            set_learning_rate(self.optimizers, self.learning_rate(step))
            keys = make_keys(self.config.seed, DROPOUT, step, batch.indices)
            yield local_step(
                self.net, self.optimizers, batch.images, batch.labels, keys=keys, **self._settings()
            )

    def _settings(self) -> dict[str, Any]:
        train = self.config.train
        return {
            "schedule": train.schedule,
            "clip_norm": train.clip_norm,
            "precision": train.precision,
            "clip_scope": train.clip_scope,
        }


def make_engine(
    net: LocalNetwork, optimizers: list[Optimizer], config: Config, loader: Loader
) -> EagerEngine:
    """The engine ``train.engine`` asks for."""
    return EagerEngine(net, optimizers, config, loader)
