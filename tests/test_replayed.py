"""Which calls of an evaluation are replayed; the graphs themselves need a GPU (tests/test_engine.py)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from bicovg.replayed import MOST, ReplayedForward


class Graph:
    """In the place of a CUDA graph: computes anew, from the tensor it was captured with into the one it made."""

    replays = 0

    def replay(self) -> None:
        self.replays += 1
        captured = self.owner.captures[self.key]
        captured.found.copy_(captured.given * self.owner.factor)

    owner: Any
    key: Any


class Doubling:
    """A forward pass that counts its calls and whether each is being captured."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[bool] = []
        self.capturing, self.error, self.factor = False, error, 2.0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls.append(self.capturing)
        if self.capturing and self.error is not None:
            raise self.error
        return x * self.factor


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was captured, with its options; streams are noted as they are set."""
    made: list[Any] = []

    @contextmanager
    def capture(graph: Graph, **options: Any) -> Iterator[None]:
        made.append((graph, options))
        forward = options["pool"]
        forward.capturing = True
        try:
            yield
        except Exception as error:
            raise RuntimeError("the capture cannot be ended") from error
        finally:
            forward.capturing = False

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the stream before")
    monkeypatch.setattr(torch.cuda, "set_stream", made.append)
    return made


def replayed(forward: Doubling) -> ReplayedForward:
    """The graph's pool is the forward pass itself here: the capture tells it so."""
    found = ReplayedForward(forward, pool=forward)
    inner = found._capture

    def capture(key: Any, x: Tensor) -> None:
        inner(key, x)
        if key in found.captures:
            graph = found.captures[key].graph
            graph.owner, graph.key = found, key
            found.factor = forward.factor  # type: ignore[attr-defined]

    found._capture = capture  # type: ignore[method-assign]
    return found


def test_a_shape_is_called_once_then_captured_then_replayed(graphs: list[Any]) -> None:
    forward = Doubling()
    judge = replayed(forward)
    inputs = [torch.randn(4, 3) for _ in range(4)]
    kept = [judge(x) for x in inputs]
    assert forward.calls == [False, True]
    assert [float((a - 2 * b).abs().max()) for a, b in zip(kept, inputs, strict=True)] == [0.0] * 4
    (graph, options), stream = graphs
    assert graph.replays == 3
    assert options == {"pool": forward, "capture_error_mode": "thread_local"}
    assert stream == "the stream before"


def test_another_shape_layout_or_type_is_another_graph(graphs: list[Any]) -> None:
    forward = Doubling()
    judge = replayed(forward)
    square = torch.randn(3, 3)
    for _ in range(3):
        for x in (square, square.t(), square.double(), square[:2]):
            assert torch.equal(judge(x), 2 * x)
    assert forward.calls == [False] * 4 + [True] * 4
    assert len(judge.captures) == 4


def test_what_is_given_back_stays_when_the_next_is_computed(graphs: list[Any]) -> None:
    judge = replayed(Doubling())
    x = torch.ones(2)
    for _ in range(2):
        judge(x)
    first = judge(x)
    judge(5 * x)
    assert torch.equal(first, 2 * x)
    assert torch.equal(x, torch.ones(2))


def test_only_so_many_shapes_are_captured(graphs: list[Any]) -> None:
    forward = Doubling()
    judge = replayed(forward)
    for _ in range(3):
        for size in range(1, MOST + 3):
            assert torch.equal(judge(torch.ones(size)), 2 * torch.ones(size))
    assert len(judge.captures) == MOST
    assert forward.calls.count(True) == MOST
    assert forward.calls.count(False) == (MOST + 2) + 2 * 2


def test_where_capturing_fails_it_goes_on_eagerly_and_says_so_once(
    graphs: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    forward = Doubling(RuntimeError("not while capturing\nand a long story"))
    judge = replayed(forward)
    for _ in range(3):
        for size in (2, 3):
            assert torch.equal(judge(torch.ones(size)), 2 * torch.ones(size))
    said = "evaluation cannot be captured (not while capturing): launching its kernels one by one\n"
    assert capsys.readouterr().out == said
    assert forward.calls.count(True) == 1
    assert graphs[1:] == ["the stream before"]
