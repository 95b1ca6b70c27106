"""GPU streams for the units of a strict or hgb net: one unit's backward pass beside the next ones' forward passes.

Unit l + 1 needs only unit l's output, never its gradient, so it can begin as soon as that is written. (Backprop can
only move its weight gradients aside: ``bicovg.aside``.) With n streams the units take turns on them: forward, backward,
clip and optimizer in order there.

Each stream has memory of its own, so overlap costs what the units on the other streams need. Where that matters the
first, large units stay on one stream and only small ones overlap. The first stream is the step's own, whose memory the
images' augmentation has used before.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bicovg.backbones import unit_sizes
from bicovg.config import Config
from bicovg.roofline import trace_layers

SMALL = 1 / 16  # of the largest unit's activations


def first_small_unit(config: Config) -> int:
    """The first unit from which on all are small; a classic network, one unit, has none."""
    model = config.model
    if model.method == "classic":
        return 1
    features = iter([layer.features for layer in trace_layers(config)])
    sizes = unit_sizes(len(model.channels), model.scope, model.group_size, model.groups)
    largest = [max(next(features) for _ in range(size)) for size in sizes]
    return 1 + max(unit for unit, size in enumerate(largest) if size > SMALL * max(largest))


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

    def gather(self) -> None:
        """Wait, on the device, for gradients that are made beside the backward pass."""

    def join(self) -> None:
        """Wait, on the device, for all lanes."""


class Lanes(OneLane):
    """Units from ``first`` on in turns on ``count`` streams; those before it on the first stream, one after the other.

    Memory freed on one stream may be reused there while another still reads it, so outputs read on another stream are
    kept for a while. Unit l's is read by unit l + 1. A unit begins after the outputs of all units before it are
    complete, and unit l + 1 + count comes after unit l + 1 on its stream: whatever comes after that unit's output finds
    unit l's unread. When that unit is begun unit l's output may go, as unit l's own stream is not its turn yet.
    """

    def __init__(self, count: int = 2, first: int = 0) -> None:
        self.count, self.first = count, first
        self.streams: list[torch.cuda.Stream] = []
        self.begun: torch.cuda.Event | None = None
        self.ready: torch.cuda.Event | None = None
        self.checked: torch.cuda.Event | None = None
        self.held: dict[int, Tensor | None] = {}
        self.index, self.handed_over = 0, False
        self.used: set[int] = set()
        self.others = [torch.cuda.Stream() for _ in range(count - 1)]  # type: ignore[no-untyped-call]

    def stream_of(self, index: int) -> int:
        """Which stream unit ``index`` runs on."""
        return max(0, index - self.first) % self.count

    @contextmanager
    def lane(self, index: int) -> Iterator[None]:
        if index == 0:
            self._forget()  # a step that raised has not joined
            self.streams = [torch.cuda.current_stream(), *self.others]
            self.begun = self.streams[0].record_event()
        self.index, self.handed_over = index, False
        number = self.stream_of(index)
        stream = self.streams[number]
        if number > 0 and number not in self.used:
            assert self.begun is not None, "the first unit comes first"
            stream.wait_event(self.begun)
            self.used.add(number)
        if self.ready is not None:
            stream.wait_event(self.ready)
        self.held.pop(index - self.count - 1, None)
        with torch.cuda.stream(stream):
            yield

    def hand_over(self, output: Tensor | None) -> Tensor | None:
        if not self.handed_over:
            self.handed_over = True
            self.ready = torch.cuda.current_stream().record_event()
            if self.stream_of(self.index) != self.stream_of(self.index + 1):
                self.held[self.index] = output
        return output

    @contextmanager
    def in_order(self) -> Iterator[None]:
        if self.checked is not None:
            torch.cuda.current_stream().wait_event(self.checked)
        yield
        self.checked = torch.cuda.current_stream().record_event()

    def join(self) -> None:
        for number in sorted(self.used):  # a capture refuses to wait for a stream that took no part in it
            self.streams[0].wait_stream(self.streams[number])
        self._forget()

    def _forget(self) -> None:
        self.used.clear()
        self.held.clear()
        self.begun = self.ready = self.checked = None
