"""Two GPU streams for the units of a strict or hgb net: one unit's backward pass beside the next one's forward pass.

Unit l + 1 needs only unit l's output, never its gradient, so it can begin as soon as that is written. Backprop has no
such freedom. Unit l runs on stream l % 2: forward, backward, clip and optimizer in order there.
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
        """Say that the unit's output is complete; the next unit may read it."""
        return output

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Around what must follow the same section of the unit before: the guard's check."""
        yield

    def join(self) -> None:
        """Wait, on the device, for all lanes."""


class TwoLanes(OneLane):
    """Even units on one stream, odd ones on another. Outputs are kept until ``join``, so all are alive at once."""

    def __init__(self) -> None:
        self.streams = [torch.cuda.Stream(), torch.cuda.Stream()]  # type: ignore[no-untyped-call]
        self.ready: torch.cuda.Event | None = None
        self.checked: torch.cuda.Event | None = None
        self.held: list[Tensor | None] = []

    @contextmanager
    def lane(self, index: int) -> Iterator[None]:
        stream = self.streams[index % 2]
        if index < 2:
            stream.wait_stream(torch.cuda.current_stream())
        if self.ready is not None:
            stream.wait_event(self.ready)
        with torch.cuda.stream(stream):
            yield

    def hand_over(self, output: Tensor | None) -> Tensor | None:
        # memory freed on one stream may be reused there while the other still reads it: keep it until the join
        self.held.append(output)
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
