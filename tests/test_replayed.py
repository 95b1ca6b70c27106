"""Evaluations that are replayed: which calls, and, on a GPU, that they change nothing."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_engine import NEEDS_GPU, check_in_a_process, make, small_config
from torch import Tensor

import bicovg.captured
from bicovg.captured import GraphEngine
from bicovg.config import Config, override
from bicovg.engine import EagerEngine
from bicovg.gpu_memory import spare_memory
from bicovg.recipes import get_recipe
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


def train_and_judge(config: Config, parts: tuple[int, ...]) -> tuple[GraphEngine, Tensor]:
    """Six epochs, each followed by an evaluation of so many images, replayed and not; the engine and its losses."""
    engine = make(GraphEngine, config, "cuda")
    assert isinstance(engine, GraphEngine)
    size = engine.loader.assemble(engine.indices, 0).images.shape[1:]
    images, curve = torch.randn(max(parts, default=1), *size).cuda(), []  # a failed capture keeps the GPU's generator
    for epoch in range(6):
        curve += [loss.clone() for loss in engine.steps(epoch)]
        engine.net.eval()
        for part in parts:
            with torch.no_grad():
                found, known = engine.judge(images[:part]), EagerEngine.judge(engine, images[:part])
            assert torch.equal(found, known), (epoch, part, (found - known).abs().max())
    return engine, torch.stack(curve)


def as_in_training() -> None:
    """What the command line and ``choose_engine`` set, but for algorithms that differ from search to search."""
    spare_memory()
    torch.backends.cudnn.deterministic = True


def compare_evaluations(recipe: str, precision: str) -> None:
    """Replayed logits are the eager ones, before and after the weights have moved; training does not notice."""
    as_in_training()
    config = override(get_recipe(recipe), {"train.device": "cuda", "train.precision": precision, "train.epochs": 8})
    engine, evaluated = train_and_judge(config, (400, 20))
    assert engine.replayed is not None
    assert len(engine.replayed.captures) == 2
    del engine
    gc.collect()
    engine, alone = train_and_judge(config, ())
    assert engine.replayed is None
    assert torch.equal(evaluated, alone), (evaluated - alone).abs().max()


def compare_failed_capture() -> None:
    """A forward pass that cannot be captured is called as it is, and training does not notice."""
    as_in_training()
    config = override(get_recipe("digits"), {"train.device": "cuda", "train.precision": "bfloat16", "train.epochs": 8})
    judge, waits = EagerEngine.judge, []
    alone = train_and_judge(config, ())[1]  # first: torch 2.11 does not clean up after a capture that failed
    gc.collect()

    def waiting(engine: EagerEngine, images: Tensor) -> Tensor:
        logits = judge(engine, images)
        waits.append(logits.sum().item())
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagerEngine, "judge", waiting)
        engine, evaluated = train_and_judge(config, (400, 20))
    assert engine.replayed is not None
    assert engine.replayed.failed
    assert not engine.replayed.captures
    assert torch.equal(evaluated, alone)


@NEEDS_GPU
@pytest.mark.parametrize(
    ("recipe", "precision"), [("digits-hgb2", "bfloat16"), ("digits", "float32"), ("digits-bp", "bfloat16")]
)
def test_a_replayed_evaluation_is_the_eager_one_and_changes_no_training(recipe: str, precision: str) -> None:
    check_in_a_process(f"compare_evaluations({recipe!r}, {precision!r})", __name__)


@NEEDS_GPU
def test_an_evaluation_that_cannot_be_captured_changes_no_training() -> None:
    check_in_a_process("compare_failed_capture()", __name__)


class Captured:
    """In the place of a captured step."""

    def pool(self) -> str:
        return "the step's memory"


def test_evaluations_are_replayed_once_there_is_a_captured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Replayed:
        def __init__(self, forward: Callable[[Tensor], Tensor], pool: str) -> None:
            self.forward = forward
            made.append(pool)

        def __call__(self, images: Tensor) -> Tensor:
            return -self.forward(images)

    monkeypatch.setattr(bicovg.captured, "ReplayedForward", Replayed)
    plain = make(EagerEngine, small_config())
    engine = GraphEngine.__new__(GraphEngine)
    EagerEngine.__init__(engine, plain.net, plain.optimizers, plain.config, plain.loader)
    engine.graph, engine.replays, engine.replayed = None, True, None
    images = plain.loader.assemble(torch.arange(6), 0).images
    engine.net.eval()
    with torch.no_grad():
        known = plain.judge(images)
        assert torch.equal(engine.judge(images), known)
        engine.graph, engine.replays = Captured(), False  # type: ignore[assignment]
        assert torch.equal(engine.judge(images), known)
        engine.replays = True
        for _ in range(2):
            assert torch.equal(engine.judge(images), -known)
        assert made == ["the step's memory"]
        engine.net.train()
        with pytest.raises(AssertionError, match="a graph of training"):
            engine.judge(images)


def test_an_engine_judges_as_its_network_does_in_the_runs_precision() -> None:
    answers = []
    for precision in ("float32", "bfloat16"):
        engine = make(EagerEngine, small_config(**{"train.precision": precision}))
        images = engine.loader.assemble(torch.arange(6), 0).images
        engine.net.eval()
        with torch.no_grad():
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16"):
                known = engine.net(images)
            found = engine.judge(images)
        assert found.dtype == torch.float32
        assert torch.equal(found, known.float())
        answers.append(found)
    assert not torch.equal(*answers)
