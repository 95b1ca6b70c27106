"""How the processes of one attempt find each other, and only each other.

torchrun keeps one key-value store over its restarts, and there the addresses of processes that have died still stand.
So the processes first agree on a word that no earlier attempt has used, and keep all their keys below it: each one
leaves a fresh name, rank 0 answers every name with its word, and goes on once a name of every rank has
thanked for that word: names that earlier attempts left behind cannot.
"""

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.nn  # noqa: F401  (imported later, as torch.compile does, it would hold our group for good)
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

PLACE = "bicovg/meeting"
POLL = 0.01


def meet(timeout: float, on_gpu: bool) -> tuple[Any, int, int]:
    """(store, rank, world) of this attempt, all processes connected; RuntimeError where they do not find each other."""
    store, rank, world = next(rendezvous("env://"))
    word = agree_on_word(store, rank, world, timeout)
    fresh = PrefixStore(f"{PLACE}/{word}", store)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=fresh,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    return fresh, rank, world


def agree_on_word(store: Any, rank: int, world: int, timeout: float) -> str:
    """A word of rank 0's that is new, the same in every process of this attempt."""
    name, end = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}", time.monotonic() + timeout
    if rank:
        store.set(f"{PLACE}/name/{rank}", name)
        wait_for(lambda: store.check([f"{PLACE}/word/{name}"]), end)
        word = str(store.get(f"{PLACE}/word/{name}").decode())
        store.set(f"{PLACE}/thanks/{word}/{name}", "")
        return word
    missing = set(range(1, world))

    def greet() -> bool:
        for other in [rank for rank in missing if store.check([f"{PLACE}/name/{rank}"])]:
            its_name = store.get(f"{PLACE}/name/{other}").decode()
            store.set(f"{PLACE}/word/{its_name}", name)
            if store.check([f"{PLACE}/thanks/{name}/{its_name}"]):
                missing.discard(other)
        return not missing

    wait_for(greet, end)
    return name


def wait_for(done: Callable[[], bool], end: float) -> None:
    while not done():
        if time.monotonic() > end:
            raise RuntimeError("not every process has come")
        time.sleep(POLL)
