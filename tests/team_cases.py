"""Teams of real processes for tests: forked from the test's own, one thread each, talking over gloo."""

import contextlib
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bicovg.distributed import ALONE, Processes, Team
from bicovg.networks import LocalNetwork, local_network

HANG = 60.0
FORK = multiprocessing.get_context("fork")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fork_all(works: list[Callable[[], Any]]) -> list[Any]:
    """What each work returns in a process of its own; raises with the trace of the first that failed."""
    pipes, children = [FORK.Pipe(duplex=False) for _ in works], []
    for work, (_, answer) in zip(works, pipes, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer Pythons warn of forks beside threads
            child = FORK.Process(target=_report, args=(work, answer))
            child.start()
        answer.close()
        children.append(child)
    found = []
    for child, (listening, _) in zip(children, pipes, strict=True):
        try:
            answered = listening.poll(HANG)
            found.append(pickle.loads(listening.recv_bytes()) if answered else (False, f"hung for {HANG:g} s"))
        except EOFError:
            child.join()
            found.append((True, child.exitcode))
    for child in children:
        child.join(HANG)
        child.kill()
    failed = [value for fine, value in found if not fine]
    assert not failed, failed[0]
    return [value for _, value in found]


def _report(work: Callable[[], Any], answer: Any) -> None:
    torch.set_num_threads(1)
    try:
        found = True, work()
    except BaseException:
        found = False, traceback.format_exc()
    answer.send_bytes(pickle.dumps(found))  # send() would pass tensors through memory that dies with this process
    answer.close()
    os._exit(0)


def run_team(work: Callable[..., Any], world: int, *arguments: Any, stages: int = 1, delay: int = 1) -> list[Any]:
    """``work(team, *arguments)`` in each of ``world`` processes, by rank; one process is this one, alone."""
    if world == 1:
        return [work(ALONE, *arguments)]
    with tempfile.NamedTemporaryFile() as file:

        def become(rank: int) -> Any:
            store = dist.FileStore(file.name, world)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=HANG / 2)
            )
            return work(Processes(store, rank, world, stages, delay), *arguments)

        return fork_all([lambda rank=rank: become(rank) for rank in range(world)])  # type: ignore[misc]


def run_command(words: list[str], world: int, log: Path, before: Callable[[int], None] | None = None) -> list[int]:
    """Exit codes of ``bicovg WORDS`` in ``world`` processes with torchrun's variables; output goes to ``log``."""
    port = free_port()

    def become(rank: int) -> int:
        from bicovg.cli import main

        announced = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in announced.items()}, MASTER_ADDR="127.0.0.1")
        if before is not None:
            before(rank)
        with open(f"{log}-{rank}", "w", buffering=1) as out:
            sys.stdout = sys.stderr = out
            with contextlib.redirect_stdout(out):
                return main(words)

    return fork_all([lambda rank=rank: become(rank) for rank in range(world)])  # type: ignore[misc]


def small_net(dtype: torch.dtype = torch.float32, **changes: Any) -> LocalNetwork:
    """Four blocks on 8-px maps, always the same."""
    torch.manual_seed(0)
    settings = {"groups": (2, 2), "batch_norm": False, "dropout": 0.0, **changes}
    return local_network(4, (8, 8, 16, 16), (1,), in_channels=1, hidden=8, **settings).to(dtype)


def small_batches(steps: int, batch: int, dtype: torch.dtype = torch.float32) -> list[tuple[Any, ...]]:
    """(images, labels, sample indices) of each step."""
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(64, 1, 8, 8, generator=generator, dtype=dtype)
    labels = torch.randint(0, 4, (64,), generator=generator)
    order = torch.stack([torch.randperm(64, generator=generator)[:batch] for _ in range(steps)])
    return [(images[chosen], labels[chosen], chosen) for chosen in order]


def own_share(team: Team, batch: int) -> slice:
    return slice(team.share * batch // team.data, (team.share + 1) * batch // team.data)
