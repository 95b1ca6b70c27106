"""A forward pass as captured CUDA graphs, one for each shape of its input.

In an evaluation of small images kernels are short: launching them one by one can take longer than they do.
"""

import gc
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bicovg.errors import first_cause

MOST = 8  # shapes that are captured; a split has two, its whole batches' and its last one's


class Capture(NamedTuple):
    """A graph with the tensors it reads and writes."""

    graph: Any
    given: Tensor
    found: Tensor


class ReplayedForward:
    """Calls ``forward`` for a shape that is new, replays it for one that comes again.

    The first call is what a capture needs before it: libraries load and search their algorithms. Parameters are read
    where they lie, so a graph stays right while they learn in place. Where capturing fails, ``forward`` is called as
    it is from then on, with one line saying why.

    Args:
        forward: from one tensor to another, without autograd.
        pool: memory of a graph that is never replayed at the same time, such as the training step's; what lies in it
            between two of its replays is overwritten, but for tensors that are still referred to.
    """

    def __init__(self, forward: Callable[[Tensor], Tensor], pool: Any) -> None:
        self.forward, self.pool = forward, pool
        self.seen: set[Hashable] = set()
        self.captures: dict[Hashable, Capture] = {}
        self.failed = False

    def __call__(self, x: Tensor) -> Tensor:
        key = (x.shape, x.stride(), x.dtype, x.device)
        if key in self.seen and key not in self.captures and len(self.captures) < MOST and not self.failed:
            self._capture(key, x)
        self.seen.add(key)
        if key not in self.captures:
            return self.forward(x)
        graph, given, found = self.captures[key]
        given.copy_(x)
        graph.replay()
        return found.clone()

    def _capture(self, key: Hashable, x: Tensor) -> None:
        stream = torch.cuda.current_stream()
        gc.collect()  # what a finalizer frees must not be freed in the middle
        try:
            graph, given = torch.cuda.CUDAGraph(), x.clone()
            # a checkpoint may be on its way to the disk: what its thread does is no fault of this one's capture
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                found = self.forward(given)
            self.captures[key] = Capture(graph, given, found)
        except Exception as error:
            self.failed = True
            print(f"evaluation cannot be captured ({first_cause(error)}): launching its kernels one by one", flush=True)
        finally:
            torch.cuda.set_stream(stream)  # which a capture that cannot be ended leaves otherwise
