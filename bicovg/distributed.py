"""Several processes as one run, started by torchrun: who is who, and what they say to each other.

The processes form a grid of ``data`` x ``stages``: rank r works on share ``r // stages`` of every batch (data parallel)
and on stage ``r % stages`` of the network (block parallel). Rank 0 leads: it alone writes and prints. A process that
was not started by torchrun, or is the only one, is ``ALONE``, for which every exchange gives back what it was given.
"""

import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from bicovg.config import TrainConfig
from bicovg.errors import UserError
from bicovg.meeting import meet
from bicovg.stopping import StopRequested
from bicovg.survivors import Survivors

has_met = False  # whether this process has ever been one of several


class PeerLost(UserError):
    """Another process of the run has died or does not answer."""

    exit_code = 5


class Team:
    """One process alone.

    Attributes:
        rank, world: of all processes.
        data, share: how many shares a batch has, and which is this process's.
        stages, stage: how many stages the network has, and which is this process's.
    """

    rank, world = 0, 1
    data, share = 1, 0
    stages, stage = 1, 0

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def tell(self, text: str) -> str:
        """Rank 0's text."""
        return text

    def copy_leader(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's values in every process's tensors."""

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        return tensor

    def add_stages(self, tensor: Tensor) -> Tensor:
        """The sum over the stages that work on this process's share, in place."""
        return tensor

    def consult(self, wish: int, due: bool) -> tuple[int, bool]:
        """The largest wish to stop and whether rank 0 wants a checkpoint; every process learns it at the same call."""
        return wish, due

    def meet(self) -> None:
        """Wait until every process is here."""


ALONE = Team()


class Processes(Team):
    """This process among the others of a run.

    Args:
        delay: calls of ``consult`` until its answer is known, so that nobody waits for it. Stages of a pipeline are
            several steps apart, so they need more.
    """

    def __init__(self, store: Any, rank: int, world: int, stages: int = 1, delay: int = 1) -> None:
        self.store, self.rank, self.world, self.stages, self.delay = store, rank, world, stages, delay
        self.data, self.share, self.stage = world // stages, rank // stages, rank % stages
        self.sharers, self.pipeline = self._make_groups()
        self.survivors = Survivors(store, rank, world)
        self._asked: deque[tuple[Any, Tensor]] = deque()
        self._answered_due = 0

    def _make_groups(self) -> tuple[Any, Any]:
        """Those with the same stage, and those with the same share; every process must make every group."""
        everyone = dist.group.WORLD
        if self.stages == 1 or self.data == 1:
            return everyone, everyone
        columns = [dist.new_group(list(range(stage, self.world, self.stages))) for stage in range(self.stages)]
        first = range(0, self.world, self.stages)
        rows = [dist.new_group(list(range(begin, begin + self.stages))) for begin in first]
        return columns[self.stage], rows[self.share]

    def tell(self, text: str) -> str:
        blob = torch.frombuffer(bytearray(f"{text}\n".encode()), dtype=torch.uint8)  # never empty
        length = torch.tensor([len(blob)])
        with self.talking():
            dist.broadcast(length, 0)
            blob = blob if self.leads else torch.zeros(int(length), dtype=torch.uint8)
            dist.broadcast(blob, 0)
        return bytes(blob.tolist()).decode()[:-1]

    @torch.no_grad()
    def copy_leader(self, tensors: Iterable[Tensor]) -> None:
        with self.talking():
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def add(self, tensor: Tensor) -> Tensor:
        with self.talking():
            dist.all_reduce(tensor)
        return tensor

    def add_stages(self, tensor: Tensor) -> Tensor:
        if self.stages > 1:
            with self.talking():
                dist.all_reduce(tensor, group=self.pipeline)
        return tensor

    def consult(self, wish: int, due: bool) -> tuple[int, bool]:
        flags = torch.tensor([wish, int(due and self.leads)])
        with self.talking():
            self._asked.append((dist.all_reduce(flags, dist.ReduceOp.MAX, async_op=True), flags))
            if len(self._asked) <= self.delay:
                return 0, False
            work, flags = self._asked.popleft()
            work.wait()
        wish, due = flags.tolist()
        if self._answered_due:  # asked before the checkpoint that has been made since
            self._answered_due -= 1
            return wish, False
        if due:
            self._answered_due = len(self._asked)
        return wish, bool(due)

    def meet(self) -> None:
        self.add(torch.zeros(1))

    def leave(self) -> None:
        """Take the connections down, and their threads: one that lets go of a tensor while Python ends aborts it.

        They live as long as a group or an exchange is held anywhere.
        """
        self.survivors.leave()
        self._asked.clear()
        self.sharers = self.pipeline = None
        with suppress(RuntimeError):
            dist.destroy_process_group()

    @contextmanager
    def talking(self) -> Iterator[None]:
        """Around every exchange: a failure becomes one sentence that names who is missing."""
        self.survivors.exchanges += 1
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(f"{self.survivors.name_lost()}: {_first_line(error)}") from None
        finally:
            self.survivors.exchanges -= 1


def grid_from_environment(train: TrainConfig) -> tuple[int, int]:
    """(rank, world) that torchrun announced, if the config fits them."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    stages = train.stages
    if world % stages:
        raise UserError(
            f"--train.stages {stages} needs a multiple of {stages} processes and there are {world}: start it with "
            f"`torchrun --nproc-per-node {stages} -m bicovg train ...`"
        )
    if train.processes and world != train.processes * stages:
        raise UserError(
            f"--train.processes {train.processes} with {stages} stages needs {train.processes * stages} processes and "
            f"there are {world}: start it with `torchrun --nproc-per-node {train.processes * stages} -m bicovg train "
            "...`, or give --train.processes 0 for any number"
        )
    if stages > 1 and (train.schedule, train.clip_scope) != ("interleaved", "unit"):
        raise UserError("--train.stages needs --train.schedule interleaved and --train.clip_scope unit")
    return rank, world


@contextmanager
def join_team(train: TrainConfig) -> Iterator[Team]:
    """The team of a run; only its leader's standard output is heard."""
    rank, world = grid_from_environment(train)
    if world == 1:
        yield ALONE
        return
    delay = 1 if train.stages == 1 else train.stages * (train.queue_depth + 1)
    team = Processes(*connect(train), train.stages, delay)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere) if rank else nullcontext():
        try:
            yield team
        except (PeerLost, StopRequested):  # the others know
            raise
        except Exception as error:
            team.survivors.say_farewell(_first_line(error))
            raise
    team.leave()


def end_process(code: int) -> NoReturn:
    """End a process of a team at once: a thread of a connection that lives on would abort Python as it winds up."""
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def connect(train: TrainConfig) -> tuple[Any, int, int]:
    """Meet the others: NCCL for tensors on GPUs, gloo for those on the host."""
    global has_met
    has_met = True
    on_gpu = train.device == "cuda" or (train.device == "auto" and torch.cuda.is_available())
    if on_gpu:
        local, present = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= present:
            raise UserError(
                f"process {local} of this machine has no GPU of its own, there are {present}: start at most {present} "
                "with --nproc-per-node, or give --train.device cpu"
            )
        torch.cuda.set_device(local)
    try:
        return meet(train.timeout, on_gpu)
    except RuntimeError as error:
        raise PeerLost(f"the processes of this run did not find each other: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return f"{(str(error).splitlines() or [type(error).__name__])[0]:.160}"
