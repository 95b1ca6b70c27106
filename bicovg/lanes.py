"""GPU streams for the units of a strict or hgb net: one unit's backward pass beside the next ones' forward passes.

Unit l + 1 needs only unit l's output, never its gradient, so it can begin as soon as that is written. Backprop has no
such freedom. With n streams unit l runs on stream l % n: forward, backward, clip and optimizer in order there.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class OneLane:
    """Everything in order on the current stream: what a CPU, and a step that asks for nothing, gets."""

    @contextmanager
    def lane(self, index: int) -> Iterator[None]:
        """Run unit ``index`` in here."""
        yield

    def hand_over(self, output: Tensor | None) -> Tensor | None:
        """Say that the unit's output is complete; the next unit may read it. Saying it twice does no harm."""
        return output

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Around what must follow the same section of the unit before: the guard's check."""
        yield

    def join(self) -> None:
        """Wait, on the device, for all lanes."""


class Lanes(OneLane):
    """Unit l on stream l % ``count``.

    Memory freed on one stream may be reused there while another still reads it, so outputs are kept for a while. Unit
    l's is read by unit l + 1. A unit u begins after the outputs of all units before it are complete, and unit
    l + 1 + count comes after unit l + 1 on its stream: from u = l + count + 2 on, nobody reads unit l's output.
    """

    def __init__(self, count: int = 2) -> None:
        self.streams = [torch.cuda.Stream() for _ in range(count)]  # type: ignore[no-untyped-call]
        self.ready: torch.cuda.Event | None = None
        self.checked: torch.cuda.Event | None = None
        self.held: dict[int, Tensor | None] = {}
        self.index = 0

    @contextmanager
    def lane(self, index: int) -> Iterator[None]:
        self.index = index
        stream = self.streams[index % len(self.streams)]
        if index < len(self.streams):
            stream.wait_stream(torch.cuda.current_stream())
        if self.ready is not None:
            stream.wait_event(self.ready)
        self.held.pop(index - len(self.streams) - 2, None)
        with torch.cuda.stream(stream):
            yield

    def hand_over(self, output: Tensor | None) -> Tensor | None:
        if self.index not in self.held:
            self.held[self.index] = output
            self.ready = torch.cuda.current_stream().record_event()
        return output

    @contextmanager
    def in_order(self) -> Iterator[None]:
        if self.checked is not None:
            torch.cuda.current_stream().wait_event(self.checked)
        yield
        self.checked = torch.cuda.current_stream().record_event()

    def join(self) -> None:
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)
        self.ready = self.checked = None
        self.held.clear()
