"""Block parallel: consecutive units on different processes, batches passing through them like a pipeline.

Unit l of step t needs what unit l - 1 made in step t and nothing else: no gradient comes back and no weight is ever
stale. So every stage does exactly what one process would have done, bit for bit, whatever the depth of the queues;
it only does it while the other stages work on other batches.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch.optim import Optimizer

from bicovg.config import Config
from bicovg.data.loader import Batch, Loader
from bicovg.distributed import Processes
from bicovg.engine import EagerEngine, TrainingState
from bicovg.guard import Guard, NonFinite
from bicovg.lanes import OneLane
from bicovg.networks import LocalNetwork
from bicovg.partition import check_cuts, plan_cuts
from bicovg.queues import Inbox, Outbox
from bicovg.reduction import UnitReduction
from bicovg.state import Snapshot
from bicovg.step import local_step
from bicovg.synced_norm import apply_norm_stats

STATE = 4  # tag
HOLD_CYCLES = 500_000_000  # of a GPU's clock, a quarter of a second: longer than launching a step takes


class StageLane(OneLane):
    """Hands the last unit's output to the next stage, and the guard's flag along with it."""

    def __init__(self, last: int, inbox: Inbox | None, outbox: Outbox | None, guard: Guard) -> None:
        self.last, self.inbox, self.outbox, self.guard = last, inbox, outbox, guard
        self.index, self.checked = 0, False

    @contextmanager
    def lane(self, index: int) -> Iterator[None]:
        self.index = index
        yield

    def hand_over(self, output: Tensor | None) -> Tensor | None:
        if self.outbox is not None and self.index == self.last:
            assert output is not None
            self.outbox.put(output)
        return output

    @contextmanager
    def in_order(self) -> Iterator[None]:
        if self.inbox is not None and not self.checked:
            first, failed = self.guard.flags[0], self.inbox.take_flag()
            # under "stop" the flag also stands for this stage's own failure in a step before
            first.copy_(torch.maximum(first, failed) if self.guard.policy == "stop" else failed)
        self.checked = True
        yield

    def join(self) -> None:
        self.checked = False
        if self.outbox is not None:
            self.outbox.put_flag(self.guard.flags[-1])


class StageEngine(EagerEngine):
    """Trains the units of this process's stage; ``net`` and ``optimizers`` are the whole network's."""

    name = "stages"

    def __init__(
        self, net: LocalNetwork, optimizers: list[Optimizer], config: Config, loader: Loader, team: Processes
    ) -> None:
        self.team, train = team, config.train
        cuts = choose_cuts(net, optimizers, config, loader, team)
        apply_norm_stats(net, config, team)  # after the measuring, which one process does alone
        self.bounds = (0, *cuts, len(net.units))
        begin, end = self.bounds[team.stage], self.bounds[team.stage + 1]
        self.own = range(begin, end)
        edges = [0, *accumulate(len(unit.exits) for unit in net.units)]  # type: ignore[arg-type]
        self.exits = slice(edges[begin], edges[end])
        first, last = team.stage == 0, team.stage + 1 == team.stages
        part = LocalNetwork([net.units[u] for u in self.own], net.stem if first else 1, hands_on=not last)
        super().__init__(part, optimizers[begin:end], config, loader)
        self.whole = net
        assert self.guard is not None
        self.inbox = None if first else Inbox(team, loader.device)
        self.outbox = None if last else Outbox(team, train.queue_depth)
        self.lanes = StageLane(len(self.own) - 1, self.inbox, self.outbox, self.guard)
        if team.data > 1:
            self.reduction = UnitReduction(team, train.batch_norm_stats == "local")

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """The first stage's come from the loader, the others' from the stage before; each makes its own labels."""
        if self.inbox is None:
            yield from self.loader.batches(epoch, start)
            return
        order = self.loader.order(epoch).to(self.loader.device)
        if start < len(self.loader):
            self.inbox.expect()
        for step in range(start, len(self.loader)):
            indices = order[slice(*self.loader.share(step))]
            activations = self.inbox.take()
            if step + 1 < len(self.loader):
                self.inbox.expect()
            yield Batch(indices, activations, self.loader.resident_labels[indices])

    def share_weights(self) -> None:
        """Every stage gets every unit's weights and buffers from the stage that trains it."""
        first = self.team.rank - self.team.stage
        with self.team.talking(), torch.no_grad():
            for stage in range(self.team.stages):
                for index in range(self.bounds[stage], self.bounds[stage + 1]):
                    unit = self.whole.units[index]
                    for tensor in (*unit.parameters(), *unit.buffers()):
                        dist.broadcast(tensor, first + stage, group=self.team.pipeline)

    def complete(self, snapshot: Snapshot) -> list[NonFinite]:
        """Bring every stage's part of the state, and what its guard has found, to the first."""
        assert self.guard is not None
        events: list[NonFinite] = []
        snapshot.wait()
        with self.team.talking():
            if self.team.stage:
                first = self.team.rank - self.team.stage
                found = [asdict(event) | {"unit": self.own[event.unit]} for event in self.guard.events]
                send_bytes(json.dumps(found).encode(), first)
                send_bytes(save(self._own_state(snapshot)), first)
                self.guard.events.clear()
                return events
            for stage in range(1, self.team.stages):
                events += [NonFinite(**event) for event in json.loads(receive_bytes(self.team.rank + stage))]
                for name, tensor in load(receive_bytes(self.team.rank + stage)).items():
                    kind, _, rest = name.partition(" ")
                    (snapshot.model if kind == "model" else snapshot.moments)[rest] = tensor
        return events

    def _own_state(self, snapshot: Snapshot) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for index in self.own:
            model = {name: tensor for name, tensor in snapshot.model.items() if name.startswith(f"units.{index}.")}
            moments = {name: tensor for name, tensor in snapshot.moments.items() if name.startswith(f"{index}|")}
            named |= {f"model {name}": tensor.contiguous() for name, tensor in model.items()}
            named |= {f"moments {name}": tensor.contiguous() for name, tensor in moments.items()}
        return named


def send_bytes(blob: bytes, rank: int) -> None:
    dist.send(torch.tensor([len(blob)]), rank, tag=STATE)
    dist.send(torch.frombuffer(bytearray(blob), dtype=torch.uint8), rank, tag=STATE)


def receive_bytes(rank: int) -> bytes:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, rank, tag=STATE)
    blob = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(blob, rank, tag=STATE)
    return blob.numpy().tobytes()


def choose_cuts(
    net: LocalNetwork, optimizers: list[Optimizer], config: Config, loader: Loader, team: Processes
) -> tuple[int, ...]:
    """The config's cuts, or those that balance the unit times that rank 0 measures."""
    if config.train.cuts:
        return check_cuts(config.train.cuts, team.stages, len(net.units))
    told = ""
    if team.leads:
        times = measure_units(net, optimizers, config, loader)
        cuts = plan_cuts(times, team.stages, ends_with_pool(net))
        told = ",".join(map(str, cuts))
        print(f"stages begin with the units 0,{told}", flush=True)
    return tuple(int(cut) for cut in team.tell(told).split(","))


def ends_with_pool(net: LocalNetwork) -> list[bool]:
    """Whether each unit's last block has a pool."""
    return [bool(unit.blocks[-1].pool) if hasattr(unit, "blocks") else False for unit in net.units]  # type: ignore[union-attr,index]


def measure_units(
    net: LocalNetwork,
    optimizers: list[Optimizer],
    config: Config,
    loader: Loader,
    repeats: int = 3,
    device_time: bool = False,
) -> list[float]:
    """Least seconds that each unit's part of a training step takes; network and optimizers are left as they were.

    With ``device_time`` those of a GPU alone, as if nobody had to launch its kernels.
    """
    state, clock = TrainingState(net, optimizers), DeviceClock() if device_time else UnitClock(loader.device)
    known = [set(optimizer.state) for optimizer in optimizers]
    batch = next(loader.batches(0))
    train = config.train
    for _ in range(repeats + 1):  # the first is slower
        clock.begin()
        local_step(
            net, optimizers, batch.images, batch.labels, "interleaved", train.clip_norm, train.precision,
            keys=batch.indices, lanes=clock,
        )  # fmt: skip
        clock.end()
    state.restore()
    for optimizer, before in zip(optimizers, known, strict=True):
        for parameter in set(optimizer.state) - before:
            del optimizer.state[parameter]
    return [min(unit) for unit in zip(*clock.rounds[1:], strict=True)]


class UnitClock(OneLane):
    """Notes when each unit begins."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rounds: list[list[float]] = []
        self._marks: list[Any] = []

    def now(self) -> Any:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def between(self, before: Any, after: Any) -> float:
        return float(after - before)

    def begin(self) -> None:
        self._marks = []

    @contextmanager
    def lane(self, index: int) -> Iterator[None]:
        self._marks.append(self.now())
        yield

    def end(self) -> None:
        marks = [*self._marks, self.now()]
        self.rounds.append([self.between(before, after) for before, after in pairwise(marks)])


class DeviceClock(UnitClock):
    """The same on the device's own clock: it waits until all of a step is launched, then runs it without a pause."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda"))

    def now(self) -> Any:
        return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]

    def between(self, before: Any, after: Any) -> float:
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3

    def begin(self) -> None:
        super().begin()
        torch.cuda._sleep(HOLD_CYCLES)  # type: ignore[no-untyped-call]
