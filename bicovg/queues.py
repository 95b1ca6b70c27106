"""In-order bounded queues between two neighbouring stages of a network: activations downstream, nothing upstream.

For every batch a stage sends two messages: the activations, as soon as they are computed, and one number, once its
units have been checked: whether a loss or gradient was not finite, so that the units after it skip this step, too.
"""

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bicovg.distributed import Processes

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
ACTIVATIONS, FLAG, HEADER = 1, 2, 3  # tags


def in_a_row(tensor: Tensor) -> Tensor:
    """The numbers of a tensor without gaps, in the order in which they lie in memory.

    The other side gives them the same strides, those of dimensions of size 1 included: libraries choose by strides how
    they compute, and so what is rounded.
    """
    return tensor.as_strided((tensor.numel(),), (1,))


class Outbox:
    """To the next stage.

    Args:
        depth: batches that may wait for the next stage; one more makes this stage wait.

    Attributes:
        bytes_sent: so far.
    """

    def __init__(self, team: Processes, depth: int) -> None:
        self.team, self.depth, self.next = team, depth, team.rank + 1
        self.bytes_sent = 0
        self._strides: tuple[int, ...] | None = None
        self._waiting: deque[list[tuple[Any, Tensor]]] = deque()

    def put(self, tensor: Tensor) -> None:
        """Send the activations of a batch as they lie in memory; all batches lie as the first one does."""
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        if not tensor.permute(order).is_contiguous():
            tensor = tensor.contiguous()
        with self.team.talking():
            if self._strides is None:
                self._strides = tensor.stride()
                rest = [0] * (4 - tensor.dim())
                sizes = [*tensor.shape, *rest, *self._strides, *rest]
                dist.send(torch.tensor([DTYPES.index(tensor.dtype), tensor.dim(), *sizes]), self.next, tag=HEADER)
            elif tensor.stride() != self._strides:
                tensor = torch.empty_strided(
                    tensor.shape, self._strides, dtype=tensor.dtype, device=tensor.device
                ).copy_(tensor)
            if len(self._waiting) >= self.depth:
                for work, _ in self._waiting.popleft():
                    work.wait()
            self._waiting.append([(dist.isend(in_a_row(tensor), self.next, tag=ACTIVATIONS), tensor)])
        self.bytes_sent += tensor.nbytes

    def put_flag(self, flag: Tensor) -> None:
        """Send whether the batch failed here or before."""
        copy = flag.detach().reshape(1).clone()
        with self.team.talking():
            self._waiting[-1].append((dist.isend(copy, self.next, tag=FLAG), copy))
        self.bytes_sent += copy.nbytes


class Inbox:
    """From the stage before. One batch is received ahead, while the stage works on the one before it."""

    def __init__(self, team: Processes, device: torch.device) -> None:
        self.team, self.device, self.previous = team, device, team.rank - 1
        self._like: Tensor | None = None
        self._ahead: deque[tuple[Any, Tensor, Any, Tensor]] = deque()
        self._flag: tuple[Any, Tensor] | None = None

    def _learn_shape(self) -> Tensor:
        header = torch.zeros(10, dtype=torch.int64)
        dist.recv(header, self.previous, tag=HEADER)
        code, dims, *sizes = header.tolist()
        shape, strides = sizes[:dims], sizes[4 : 4 + dims]
        return torch.empty_strided(shape, strides, dtype=DTYPES[code], device=self.device)

    def expect(self) -> None:
        """Ask for the next batch."""
        with self.team.talking():
            if self._like is None:
                self._like = self._learn_shape()
            tensor, flag = torch.empty_like(self._like), torch.zeros(1, device=self.device)
            works = [
                dist.irecv(in_a_row(tensor), self.previous, tag=ACTIVATIONS),
                dist.irecv(flag, self.previous, tag=FLAG),
            ]
        self._ahead.append((works[0], tensor, works[1], flag))

    def take(self) -> Tensor:
        """The activations of the oldest batch asked for."""
        work, tensor, later, flag = self._ahead.popleft()
        with self.team.talking():
            work.wait()
        self._flag = later, flag
        return tensor

    def take_flag(self) -> Tensor:
        """Whether that batch failed in an earlier stage."""
        assert self._flag is not None
        (work, flag), self._flag = self._flag, None
        with self.team.talking():
            work.wait()
        return flag[0]
