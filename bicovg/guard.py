"""Keeps NaN and Inf out of the weights: every unit is checked before its optimizer steps, on the device.

``flags[u + 1]`` is 1 when unit u must not step: its losses or gradients are not finite, or ``flags[u]`` is 1. So a bad
unit holds back the units after it, and under policy ``stop``, where ``flags[0]`` is the last flag of the step before,
every unit of every later step, until the host has read the flags. Fused optimizers obey the flag on the device (the
protocol of torch's gradient scaler); others are asked from the host. Batch-norm buffers move in the forward pass,
before anything is known: they are copied when a step begins and put back, where the flag is set, when it ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bicovg.errors import NonFiniteError
from bicovg.lanes import OneLane
from bicovg.networks import LocalNetwork
from bicovg.optim import clip_gradients

POLICIES = ("stop", "skip")
PERIOD = 50  # steps between two looks of the host at a GPU's flags
SKIP_LIMIT = 100  # failing steps in a row after which ``skip`` gives up


@dataclass(frozen=True)
class NonFinite:
    """Where a non-finite loss or gradient arose."""

    step: int
    unit: int
    blocks: str

    def __str__(self) -> str:
        return f"the loss or gradient of {self.blocks} was not finite at step {self.step}"


class Unguarded:
    """Steps without looking: what a loop gets that brings no guard."""

    def __enter__(self) -> "Unguarded":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def check(self, index: int, losses: Tensor, norm: Tensor | None = None) -> None:
        pass

    def step(self, index: int, optimizer: Optimizer) -> None:
        optimizer.step()

    def finish(
        self,
        index: int,
        unit: nn.Module,
        losses: Tensor,
        optimizer: Optimizer,
        clip_norm: float | None,
        lanes: OneLane,
    ) -> None:
        """All that follows the backward pass of unit ``index``: clip, check, step, free the gradients."""
        norm = None if clip_norm is None else clip_gradients(unit, clip_norm)
        with lanes.in_order():
            self.check(index, losses, norm)
        self.step(index, optimizer)
        optimizer.zero_grad()


class Guard(Unguarded):
    """The guard of one network; give it to ``local_step``, and call ``record`` after each step.

    Args:
        policy: ``stop`` raises NonFiniteError from ``record`` or ``flush``; ``skip`` goes on without the step.
        shared: one clip norm covers all units, so one bad unit holds back all.

    Attributes:
        events: what ``skip`` skipped.
    """

    def __init__(
        self, net: LocalNetwork, optimizers: Sequence[Optimizer], policy: str = "stop", shared: bool = False
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"non-finite policy {policy!r} is unknown: choose stop or skip")
        self.units: list[nn.Module] = list(net.units)
        self.policy = policy
        U, device = len(self.units), next(net.parameters()).device
        self.flags = torch.zeros(U + 1, device=device)
        self._flag = list(self.flags.unbind())
        self._obeyed = [self._flag[U if shared else u + 1] for u in range(U)]
        self._one = torch.ones((), device=device)
        self._copies = copy_buffers(self.units, [U if shared else u + 1 for u in range(U)])
        self._fused = [all(group.get("fused") for group in o.param_groups) for o in optimizers]
        for optimizer, fused in zip(optimizers, self._fused, strict=True):
            if fused:
                make_momentum(optimizer)
        self.events: list[NonFinite] = []
        self._log = FlagLog(self.flags)
        self._streak = 0

    def __enter__(self) -> "Guard":
        if self.policy == "stop":
            self._flag[0].copy_(self._flag[-1])
        for copy in self._copies:
            copy.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            for copy in self._copies:
                copy.put_back(self.flags)

    @torch.no_grad()
    def check(self, index: int, losses: Tensor, norm: Tensor | None = None) -> None:
        """Set the unit's flag from its losses and its gradients, or from their ``norm`` where that is known."""
        flag = self._flag[index + 1]
        flag.copy_(self._flag[index])
        found = [p.grad for p in self.units[index].parameters() if p.grad is not None] if norm is None else [norm]
        probe = [losses.to(found[0].dtype), *found] if found else [losses]
        # one kernel; multiplies by one, and sets the flag where a value is not finite
        torch._amp_foreach_non_finite_check_and_unscale_(probe, flag, self._one)

    def step(self, index: int, optimizer: Optimizer) -> None:
        """Step the unit's optimizer unless its flag is set."""
        if self._fused[index]:
            optimizer.found_inf = self._obeyed[index]  # type: ignore[attr-defined]
            optimizer.step()
            del optimizer.found_inf  # type: ignore[attr-defined]
        elif not self._obeyed[index].item():
            optimizer.step()

    def record(self, step: int) -> None:
        """Note this step's flags; the host looks at once on a CPU, every ``PERIOD`` steps and late on a GPU."""
        self._examine(self._log.append(step))

    def flush(self) -> None:
        """Wait for every flag noted so far and look at it."""
        self._examine(self._log.drain())

    def reset(self) -> None:
        """Forget everything: before a run, or after a warm-up."""
        self.flags.zero_()
        self._log.drain()

    def _examine(self, seen: list[tuple[int, list[float]]]) -> None:
        for step, flags in seen:
            if not flags[-1]:
                self._streak = 0
            elif not flags[0]:
                unit = flags.index(1.0) - 1
                event = NonFinite(step, unit, name_blocks(self.units[unit]))
                self.events.append(event)
                self._streak += 1
                if self.policy == "stop":
                    raise NonFiniteError(f"{event}; the weights were left as they were")
                if self._streak >= SKIP_LIMIT:
                    raise NonFiniteError(f"{event}, the last of {SKIP_LIMIT} skipped steps in a row")


def name_blocks(unit: nn.Module) -> str:
    """``block 3`` or ``blocks 4-7``."""
    inside = [block.index for block in getattr(unit, "blocks", [])] or list(unit.exits)  # type: ignore[arg-type]
    return f"block {inside[0]}" if len(inside) == 1 else f"blocks {inside[0]}-{inside[-1]}"


def make_momentum(optimizer: Optimizer) -> None:
    """Zero momentum where SGD has none yet: a first step held back would leave its buffer uninitialised."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


class BufferCopy:
    """Buffers of one dtype, copied and put back with a few kernels for all units together."""

    def __init__(self, buffers: list[Tensor], owners: list[int]) -> None:
        self.views = [buffer.view(-1) for buffer in buffers]
        self.sizes = [view.numel() for view in self.views]
        self.saved = torch.cat(self.views)
        owner = torch.tensor(owners, device=self.saved.device)
        self.owner = owner.repeat_interleave(torch.tensor(self.sizes, device=self.saved.device))

    @torch.no_grad()
    def take(self) -> None:
        torch.cat(self.views, out=self.saved)

    @torch.no_grad()
    def put_back(self, flags: Tensor) -> None:
        held = flags.index_select(0, self.owner) > 0
        kept = torch.where(held, self.saved, torch.cat(self.views))
        torch._foreach_copy_(self.views, torch.split(kept, self.sizes))


def copy_buffers(units: list[nn.Module], owners: list[int]) -> list[BufferCopy]:
    """One ``BufferCopy`` for each dtype among the units' buffers."""
    found: dict[torch.dtype, tuple[list[Tensor], list[int]]] = {}
    for unit, owner in zip(units, owners, strict=True):
        for buffer in unit.buffers():
            buffers, places = found.setdefault(buffer.dtype, ([], []))
            buffers.append(buffer)
            places.append(owner)
    return [BufferCopy(*group) for group in found.values()]


class FlagLog:
    """Rows of flags on their way to the host: read late, so that a GPU is never waited for."""

    def __init__(self, flags: Tensor) -> None:
        self.flags, self.on_gpu = flags, flags.is_cuda
        self.rows = flags.new_zeros(PERIOD if self.on_gpu else 1, len(flags))
        self.landed = torch.zeros(self.rows.shape, pin_memory=self.on_gpu)
        self.arrived = torch.cuda.Event() if self.on_gpu else None  # type: ignore[no-untyped-call]
        self.noted: list[int] = []
        self.sent: list[int] = []

    def append(self, step: int) -> list[tuple[int, list[float]]]:
        """Note a row; returns those that have reached the host, if it is time to look."""
        self.rows[len(self.noted)].copy_(self.flags)
        self.noted.append(step)
        if not self.on_gpu:
            return self.drain()
        if len(self.noted) < PERIOD:
            return []
        seen = self._receive()
        self._send()
        return seen

    def drain(self) -> list[tuple[int, list[float]]]:
        """Everything noted, waiting for the device."""
        seen = self._receive()
        self._send()
        return seen + self._receive()

    def _send(self) -> None:
        self.landed.copy_(self.rows, non_blocking=True)
        if self.arrived is not None:
            self.arrived.record()
        self.sent, self.noted = self.noted, []

    def _receive(self) -> list[tuple[int, list[float]]]:
        if self.arrived is not None and self.sent:
            self.arrived.synchronize()
        seen, self.sent = list(zip(self.sent, self.landed.tolist(), strict=False)), []
        return seen
