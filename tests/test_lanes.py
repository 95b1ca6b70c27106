"""Streams: what runs where, and that no memory is reused while another stream may still read it.

Streams and events are stand-ins that note the order a device would have to keep: each stream's work in turn, and what
an event waits for.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bicovg.lanes import Lanes, first_small_unit
from bicovg.recipes import get_recipe


@dataclasses.dataclass(eq=False)
class Work:
    """Something done on a stream, after what it waits for."""

    name: str
    waits: list["Work"]

    def follows(self, other: "Work") -> bool:
        seen, rest = set(), [self]
        while rest:
            work = rest.pop()
            if work is other:
                return True
            rest += [w for w in work.waits if id(w) not in seen]
            seen.update(map(id, work.waits))
        return False


class Stream:
    """``captured``: it takes part in the capture, which begins on the device's own stream and spreads by waiting."""

    def __init__(self, captured: bool = False) -> None:
        self.last: list[Work] = []
        self.captured = captured

    def do(self, name: str, waits: tuple[Work, ...] = ()) -> Work:
        work = Work(name, [*self.last, *waits])
        self.last = [work]
        return work

    def record_event(self) -> Work:
        return self.do("event")

    def wait_event(self, event: Work) -> None:
        self.captured = True
        self.do("wait", (event,))

    def wait_stream(self, other: "Stream") -> None:
        assert other.captured, "a captured stream may not wait for one that takes no part"
        self.captured = True
        self.do("wait", tuple(other.last))


class Device:
    """In the place of ``torch.cuda``."""

    Stream = Stream

    def __init__(self) -> None:
        self.current = Stream(captured=True)

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Output:
    """A unit's output, whose memory its stream may reuse once nobody holds it."""

    def __init__(self, freed: list[int], unit: int) -> None:
        self.freed, self.unit = freed, unit

    def __del__(self) -> None:
        self.freed.append(self.unit)


@given(st.integers(1, 5), st.integers(0, 9), st.integers(2, 16))
def test_an_output_is_kept_until_its_stream_has_seen_it_read(count: int, first: int, units: int) -> None:
    device = Device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cuda", device)
        lanes = Lanes(count, first)
        freed: list[int] = []
        reads: dict[int, Work] = {}
        x: Any = None
        for unit in range(units):
            with lanes.lane(unit):
                here = device.current
                if unit:
                    assert x.unit == unit - 1
                    reads[unit - 1] = here.do(f"read {unit - 1}")
                x = lanes.hand_over(Output(freed, unit))  # type: ignore[arg-type]
                reads_again = here.do(f"backward of {unit}")  # the weight gradient reads the input too
                if unit:
                    reads[unit - 1] = reads_again
                lanes.hand_over(x)
            later = here.do("work that may take freed memory")
            for old in freed:
                if old + 1 <= unit and lanes.stream_of(old) == lanes.stream_of(unit) and old + 1 in range(units):
                    assert later.follows(reads[old]), (old, unit)
        lanes.join()
        assert all(device.current.last[0].follows(read) for read in reads.values())


def test_a_unit_on_another_stream_waits_for_the_output_alone() -> None:
    device = Device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cuda", device)
        lanes = Lanes(2)
        with lanes.lane(0):
            written = device.current.do("write the output")
            lanes.hand_over(Output([], 0))  # type: ignore[arg-type]
            backward = device.current.do("backward")
        with lanes.lane(1):
            read = device.current.do("read the output")
        assert read.follows(written)
        assert not read.follows(backward)


def test_the_first_stream_is_the_steps_own() -> None:
    device = Device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cuda", device)
        own, lanes = device.current, Lanes(2)
        for unit in range(3):
            with lanes.lane(unit):
                assert (device.current is own) == (unit % 2 == 0)
                lanes.hand_over(Output([], unit))  # type: ignore[arg-type]


def test_units_before_the_first_small_one_share_a_stream_and_are_not_held() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cuda", Device())
        lanes = Lanes(2, first=3)
        assert [lanes.stream_of(unit) for unit in range(8)] == [0, 0, 0, 0, 1, 0, 1, 0]
        freed: list[int] = []
        for unit in range(8):
            with lanes.lane(unit):
                lanes.hand_over(Output(freed, unit))  # type: ignore[arg-type]
            if unit < 3:
                assert freed == list(range(unit + 1))
        assert len(freed) < 8


def test_a_step_that_raised_leaves_nothing_to_the_next() -> None:
    device = Device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cuda", device)
        lanes = Lanes(2)
        with lanes.lane(0):  # and no join
            lanes.hand_over(Output([], 0))  # type: ignore[arg-type]
        batch = device.current.do("write the batch")
        with lanes.lane(0):
            assert device.current.do("read the batch").follows(batch)
        assert not lanes.held


@pytest.mark.parametrize(
    ("recipe", "first"),
    [("imagenet100-bicovg", 8), ("cifar100-bicovg", 5), ("imagenet100-bp", 1), ("imagenet100-bp-classic", 1)],
)
def test_small_units_have_a_sixteenth_of_the_largest_ones_activations(recipe: str, first: int) -> None:
    assert first_small_unit(get_recipe(recipe)) == first
