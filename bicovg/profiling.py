"""Time and peak memory of steps: of the device on a GPU, of the saved activations or the process on a CPU."""

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device, workspace: int | None = None) -> int:
    """Bytes: in use on the GPU since the last reset, or the process's resident peak on a CPU.

    Replaying a captured graph allocates nothing, so torch's own peak does not see what the graph works in: the
    graph's pool, which nothing else can use, is added to what is allocated. ``workspace`` is what ``graph_workspace``
    found before, as it looks at every block of memory there is.
    """
    if device.type == "cuda":
        held = torch.cuda.memory_allocated(device) + (graph_workspace(device) if workspace is None else workspace)
        return max(torch.cuda.max_memory_allocated(device), held)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def graph_workspace(device: torch.device) -> int:
    """Bytes that captured graphs keep for themselves beyond what is allocated in their pools."""
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = [s for s in torch.cuda.memory_snapshot() if s["device"] == index]  # type: ignore[no-untyped-call]
    return sum(s["total_size"] - s["allocated_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))


def time_steps(run: Callable[[int], None], steps: int, device: torch.device, lead_in: int = 1) -> float:
    """Milliseconds per step of ``run(steps)``, after ``lead_in`` steps that fill the device's queue."""
    run(lead_in)
    if device.type != "cuda":
        begun = time.perf_counter()
        run(steps)
        return (time.perf_counter() - begun) * 1e3 / steps
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run(steps)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / steps


@dataclass
class SavedBytes:
    """Bytes that autograd keeps for backward: alive now, and the peak."""

    live: int = 0
    peak: int = 0


class _Held:
    """A saved tensor that reports its own death; storages shared by several saves count once."""

    def __init__(self, tensor: Tensor, tally: SavedBytes, counts: dict[int, int], exclude: set[int]) -> None:
        self.tensor, self.tally, self.counts = tensor, tally, counts
        storage = tensor.untyped_storage()
        self.key, self.size = storage.data_ptr(), 0 if storage.data_ptr() in exclude else storage.nbytes()
        counts[self.key] = counts.get(self.key, 0) + 1
        if counts[self.key] == 1:
            tally.live += self.size
            tally.peak = max(tally.peak, tally.live)

    def __del__(self) -> None:
        self.counts[self.key] -= 1
        if self.counts[self.key] == 0:
            self.tally.live -= self.size


@contextmanager
def track_saved_bytes(exclude: torch.nn.Module | None = None) -> Iterator[SavedBytes]:
    """Count what autograd saves for backward inside the block; parameters of ``exclude`` are not counted."""
    tally, counts = SavedBytes(), {}  # type: ignore[var-annotated]
    skip = {p.untyped_storage().data_ptr() for p in exclude.parameters()} if exclude is not None else set()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: _Held(tensor, tally, counts, skip), lambda held: held.tensor
    ):
        yield tally
