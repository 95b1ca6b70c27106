"""Runs training steps: eager anywhere, compiled on a GPU; ``bicovg.captured`` has the whole step as one CUDA graph.

``plain`` is eager without a kernel of ours, from the functions that define the method: slow on a GPU, and what the
other engines are compared with.
"""

from collections.abc import Iterator
from contextlib import closing
from types import TracebackType

import torch
from torch import Tensor
from torch.optim import Optimizer

from bicovg.blocks import Block
from bicovg.config import Config
from bicovg.data.loader import Batch, Loader
from bicovg.draws import DROPOUT, make_keys
from bicovg.goodness import BiCovG
from bicovg.guard import Guard, NonFinite
from bicovg.lanes import OneLane
from bicovg.networks import LocalNetwork
from bicovg.optim import learning_rate, set_learning_rate
from bicovg.reduction import NoReduction
from bicovg.state import Snapshot
from bicovg.step import PRECISIONS, prepared_step


class Schedule:
    """Learning rate as a function of the global step."""

    def __init__(self, config: Config, steps_per_epoch: int) -> None:
        self.config = config.optim
        self.total = config.train.epochs * steps_per_epoch
        self.warmup = round(config.optim.warmup_epochs * steps_per_epoch)

    def __call__(self, step: int) -> float:
        return learning_rate(step, self.total, self.warmup, self.config.lr, self.config.lr_min)


class EagerEngine:
    """One step per batch of the loader.

    Attributes:
        exits: which of the network's exits this process trains; all of them, but for a stage of it.
        whole: what is evaluated: ``net``, or the network that it is a stage of.
        workspace: bytes that a captured step keeps for itself.
    """

    name = "eager"
    exits = slice(None)
    workspace = 0

    def __init__(self, net: LocalNetwork, optimizers: list[Optimizer], config: Config, loader: Loader) -> None:
        self.net, self.optimizers, self.config, self.loader = net, optimizers, config, loader
        self.whole = net
        self.learning_rate = Schedule(config, len(loader))
        self.guard: Guard | None = self.make_guard()
        self.lanes: OneLane | None = None
        self.reduction: NoReduction | None = None

    def warm_up(self) -> None:
        """Whatever has to be compiled or captured before the first step; leaves weights and optimizers as they are."""

    def make_guard(self) -> Guard:
        train = self.config.train
        shared_clip = train.clip_norm is not None and train.clip_scope == "global"
        return Guard(self.net, self.optimizers, train.nonfinite, shared_clip)

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """What the steps train on."""
        return self.loader.batches(epoch, start)

    def complete(self, snapshot: Snapshot) -> list[NonFinite]:
        """Add what other processes train to a snapshot of this one; returns what their guards have found."""
        return []

    def share_weights(self) -> None:
        """Give every process the whole network as it is now, to evaluate it."""

    def judge(self, images: Tensor) -> Tensor:
        """Logits (E, B, K) of every exit, in float32, for a network that is in evaluation."""
        dtype = PRECISIONS[self.config.train.precision]
        with torch.autocast(images.device.type, dtype=dtype, enabled=dtype is not None):
            logits: Tensor = self.whole(images)
            return logits.float()

    def record(self, step: int) -> None:
        """Let the guard note the step just made; raises NonFiniteError when a failure has become known."""
        if self.guard is not None:
            self.guard.record(step)

    def steps(self, epoch: int, start: int = 0) -> Iterator[Tensor]:
        """Train from step ``start`` of ``epoch`` on; yields the losses (E,) of each step, on the device."""
        for offset, batch in enumerate(self.batches(epoch, start)):
            step = epoch * len(self.loader) + start + offset
            set_learning_rate(self.optimizers, self.learning_rate(step))
            losses = self.train_batch(batch, step)
            self.record(step)
            yield losses

    def train_batch(self, batch: Batch, step: int | Tensor) -> Tensor:
        """All units once; ``step`` keys the dropout masks."""
        keys = make_keys(self.config.seed, DROPOUT, step, batch.indices)
        return self.train_prepared(self.net.prepare(batch.images), batch.labels, keys)

    def train_prepared(self, x: Tensor, labels: Tensor, keys: Tensor) -> Tensor:
        """All units once, from the first one's input."""
        train = self.config.train
        return prepared_step(
            self.net,
            self.optimizers,
            x,
            labels,
            keys,
            schedule=train.schedule,
            clip_norm=train.clip_norm,
            precision=train.precision,
            clip_scope=train.clip_scope,
            guard=self.guard,
            lanes=self.lanes,
            reduction=self.reduction,
            micro_batches=train.micro_batches,
        )


class CompiledEngine(EagerEngine):
    """Units compiled by inductor, launched one kernel at a time."""

    name = "compiled"

    def __init__(self, net: LocalNetwork, optimizers: list[Optimizer], config: Config, loader: Loader) -> None:
        super().__init__(net, optimizers, config, loader)
        compile_units(net)

    def warm_up(self) -> None:
        with TrainingState(self.net, self.optimizers), closing(self.loader.batches(0)) as batches:
            self.train_batch(next(batches), 0)
        assert self.guard is not None
        self.guard.reset()


class PlainEngine(EagerEngine):
    """Eager steps of the plain PyTorch functions alone."""

    name = "plain"

    def __init__(self, net: LocalNetwork, optimizers: list[Optimizer], config: Config, loader: Loader) -> None:
        make_plain(net)
        super().__init__(net, optimizers, config, loader)


class TrainingState:
    """A copy of weights, buffers and optimizer state, put back in place: captured addresses stay valid.

    As a context manager it puts them back at the end, also after an error.
    """

    def __init__(self, net: LocalNetwork, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers
        self.tensors = [(t, t.detach().clone()) for t in (*net.parameters(), *net.buffers())]
        self.moments = {
            tensor: tensor.clone()
            for optimizer in optimizers
            for state in optimizer.state.values()
            for tensor in state.values()
            if isinstance(tensor, Tensor)
        }

    def __enter__(self) -> "TrainingState":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()  # other streams may be updating still
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, copy in self.tensors:
            tensor.copy_(copy)
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                for tensor in state.values():
                    if isinstance(tensor, Tensor):
                        # state that the warm-up made is zero in a fresh run, for both SGD and AdamW
                        tensor.copy_(self.moments[tensor]) if tensor in self.moments else tensor.zero_()


def compile_units(net: LocalNetwork) -> None:
    """Compile each unit's forward; blocks share code objects, so the cache must hold one entry per unit."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(net.units) + 64)
    for unit in net.units:
        unit.forward = torch.compile(unit.forward, dynamic=False)


def make_plain(net: LocalNetwork) -> None:
    """Let the network compute without a kernel of ours."""
    for module in net.modules():
        if isinstance(module, Block | BiCovG):
            module.plain = True
