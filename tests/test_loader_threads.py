"""The thread that reads ahead: its errors, its end, how far it goes, and the time spent waiting for it."""

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest
from loader_cases import IMAGES, LABELS, digests, make_loader

from bicovg.data.augment import augment
from bicovg.data.images import MappedImages


class Faulty(MappedImages):
    """Counts its gathers, is slow, and fails at the one numbered ``fail_at``."""

    def __init__(self, fail_at: int = -1, seconds: float = 0.0) -> None:
        super().__init__(IMAGES, LABELS)
        self.fail_at, self.seconds, self.gathers = fail_at, seconds, 0

    def gather(self, indices: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        time.sleep(self.seconds)
        self.gathers += 1
        if self.gathers == self.fail_at + 1:
            raise OSError("the disk went away")
        return super().gather(indices, out)


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("bicovg-loader")]


@pytest.fixture(autouse=True)
def _threads_end() -> Any:
    yield
    assert loader_threads() == []


def test_an_error_in_the_thread_reaches_the_consumer_at_its_step() -> None:
    for prefetch in (0, 1, 4):
        batches = make_loader(Faulty(fail_at=3), prefetch=prefetch).batches(0)
        assert len([next(batches) for _ in range(3)]) == 3
        with pytest.raises(OSError, match="the disk went away"):
            next(batches)
        assert loader_threads() == []


def test_closing_or_dropping_the_iterator_ends_the_thread() -> None:
    loader = make_loader(Faulty(seconds=0.01), prefetch=3)
    batches = loader.batches(0)
    next(batches)
    assert len(loader_threads()) == 1
    batches.close()
    assert loader_threads() == []
    for _ in loader.batches(0):
        break
    gc.collect()
    assert loader_threads() == []


@pytest.mark.parametrize("prefetch", [1, 2, 4])
def test_the_thread_stays_within_the_prefetch_depth(prefetch: int) -> None:
    source = Faulty()
    batches = make_loader(source, prefetch=prefetch, batch_size=4).batches(0)
    for consumed in range(1, 5):
        next(batches)
        deadline = time.monotonic() + 10
        while source.gathers < consumed + prefetch and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert source.gathers == consumed + prefetch
    batches.close()


def test_waiting_for_reads_is_counted_and_reads_that_prefetch_hides_are_not() -> None:
    for prefetch, pause, least, most in ((0, 0.0, 0.5, 60.0), (2, 0.15, 0.1, 0.4)):
        loader = make_loader(Faulty(seconds=0.1), prefetch=prefetch)
        assert loader.wait_seconds == 0
        for _ in loader.batches(0):
            time.sleep(pause)
        assert least <= loader.wait_seconds < most


def test_augmentation_on_the_cpu_counts_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: Any) -> Any:
        time.sleep(0.02)
        return augment(*arguments)

    monkeypatch.setattr("bicovg.data.loader.augment", slow)
    loader = make_loader(MappedImages(IMAGES, LABELS), resident=True)
    digests(loader)
    assert loader.wait_seconds > 0.02 * len(loader)
