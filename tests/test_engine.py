"""Engines: compiled, captured and eager steps train the same network, and nothing recompiles after the first steps."""

import functools
import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bicovg.captured
from bicovg.aside import conv_aside
from bicovg.blocks import Block
from bicovg.captured import GraphEngine, move_aside
from bicovg.choosing import fall_back, make_engine
from bicovg.config import Config, override
from bicovg.data.splits import load_splits, make_loaders
from bicovg.draws import DROPOUT, make_keys
from bicovg.engine import CompiledEngine, EagerEngine, TrainingState
from bicovg.errors import UserError
from bicovg.goodness import BiCovG
from bicovg.optim import make_optimizers
from bicovg.preparation import build_on
from bicovg.recipes import get_recipe
from bicovg.trainer import Trainer

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def small_config(**changes: object) -> Config:
    digits = get_recipe("digits")
    return override(digits, {"train.epochs": 2, "train.device": "cpu", "model.width": 0.25, **changes})


def make(kind: type[EagerEngine], config: Config, device: str = "cpu") -> EagerEngine:
    place = torch.device(device)
    net = build_on(config, place)
    optimizers = make_optimizers(net, config.optim, place)
    loaders = make_loaders(load_splits(config.data), config, place)
    return kind(net, optimizers, config, loaders["train"])


def run(engine: EagerEngine, count: int) -> Tensor:
    """Losses (count, E) of the first steps."""
    losses: list[Tensor] = []
    epoch = 0
    while len(losses) < count:
        for loss in engine.steps(epoch):
            losses.append(loss.clone())
            if len(losses) == count:
                break
        epoch += 1
    return torch.stack(losses)


def recompilations() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def compare_compiled() -> None:
    """The tracer is what can recompile or break a unit in two; inductor's C++ would take minutes: on the GPU, below."""
    torch.compile = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    config = small_config(**{"model.alignment": True})
    eager = run(make(EagerEngine, config), 12)
    engine = make(CompiledEngine, config)
    compiled = run(engine, 2)
    graphs = recompilations()
    assert graphs > 0
    compiled = torch.cat([compiled, run(engine, 10)])  # from the first batch again, with the weights it has
    assert recompilations() == graphs
    assert torch.allclose(compiled[:2], eager[:2], atol=1e-4)
    assert compiled[-1].sum() < compiled[0].sum()


def check_in_a_process(call: str, module: str = __name__) -> None:
    """The test run checks shapes at every call, which the compiler cannot trace."""
    code = f"import torch; torch.set_num_threads(1); import {module}; {module}.{call}"
    here = Path(__file__).parent  # with its parent on the path, too: the package need not be installed
    paths = os.pathsep.join([str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], cwd=here, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_compiled_steps_follow_eager_ones_and_compile_once() -> None:
    check_in_a_process("compare_compiled()")


def compare_seeds() -> None:
    """The tracer's graphs are what inductor looks up among those it has compiled before."""
    graphs: list[str] = []

    def keep(graph: Any, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph.code)
        return graph.forward  # type: ignore[no-any-return]

    torch.compile = functools.partial(torch.compile, backend=keep, fullgraph=True)
    seen, changes = [], {"train.schedule": "summed", "data.augment.crop_pad": 1, "data.augment.brightness": 0.4}
    for seed in (0, 3):
        engine = make(GraphEngine, small_config(seed=seed, **changes))
        assert isinstance(engine, GraphEngine)
        engine.epoch.fill_(2)
        engine.step.fill_(40)
        labels, keys = engine.prepare(engine.indices, engine.epoch, engine.step)
        batch = engine.loader.assemble(engine.indices, 2)
        assert torch.equal(keys, make_keys(seed, DROPOUT, 40, engine.indices))
        assert torch.equal(labels, batch.labels)
        torch.testing.assert_close(engine.images, batch.images)
        seen.append(batch.images)
    assert not torch.equal(*seen)
    assert len(set(graphs)) == 1, "a seed is a constant of what is compiled"


def test_another_seed_needs_no_other_compilation() -> None:
    check_in_a_process("compare_seeds()")


def test_training_state_comes_back_in_place() -> None:
    config = small_config()
    engine = make(EagerEngine, config)
    state = TrainingState(engine.net, engine.optimizers)
    before = {name: value.clone() for name, value in engine.net.state_dict().items()}
    places = {name: value.data_ptr() for name, value in engine.net.state_dict().items()}
    run(engine, 3)
    assert any(not torch.equal(value, before[name]) for name, value in engine.net.state_dict().items())
    state.restore()
    for name, value in engine.net.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.data_ptr() == places[name]
    moments = [t for o in engine.optimizers for s in o.state.values() for t in s.values() if isinstance(t, Tensor)]
    assert moments
    assert all(not moment.any() for moment in moments)


def test_auto_is_eager_on_a_cpu_and_graph_falls_back_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for wanted, said in (("auto", ""), ("graph", "engine graph needs a CUDA device: running eager\n")):
        config = small_config(**{"train.engine": wanted})
        engine = make(EagerEngine, config)
        chosen = make_engine(engine.net, engine.optimizers, config, engine.loader)
        assert chosen.name == "eager"
        assert capsys.readouterr().out == said


def test_an_engine_that_cannot_compile_gives_way_to_the_next_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = {}
    for wanted in ("eager", "compiled"):
        if wanted == "compiled":
            monkeypatch.setattr(torch, "compile", failing_compiler())
        trainer = Trainer.start(small_config(**{"train.engine": wanted, "train.epochs": 1}), str(tmp_path / wanted))
        trainer.train()
        ends[wanted] = [p.clone() for p in trainer.net.parameters()]
        assert trainer.engine.name == "eager"
    assert capsys.readouterr().out.count("engine compiled failed (no C++ here): running eager\n") == 1
    assert all(torch.equal(a, b) for a, b in zip(*ends.values(), strict=True))


def failing_compiler() -> Callable[..., Any]:
    """In the place of torch.compile: fails like inductor, when the second unit is called and the first has learned."""
    calls = itertools.count()

    def compile_nothing(function: Callable[..., Any], **options: object) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            if next(calls):
                raise RuntimeError("no C++ here\nand a long story")
            return function(*args, **keywords)

        return call

    return compile_nothing


def hidden(inner: Exception) -> Exception:
    """As torch raises it where a capture ran out of memory and then cannot be ended."""
    try:
        try:
            raise inner
        finally:
            raise RuntimeError("unjoined work")
    except RuntimeError as error:
        return error


def test_no_shadow_outlives_an_engine_that_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the next engine would convolve with it, and the weights would never learn."""
    monkeypatch.setattr(torch, "compile", failing_compiler())
    engine = make(CompiledEngine, small_config())
    blocks = [module for module in engine.net.modules() if isinstance(module, Block)]
    for block in blocks:
        block.shadow = block.conv.weight.detach().clone().requires_grad_()
    after = fall_back(engine, hidden(RuntimeError("no room for a kernel")))
    assert "(no room for a kernel)" in capsys.readouterr().out
    before = [block.conv.weight.clone() for block in blocks]
    run(after, 1)
    assert not any(torch.equal(block.conv.weight, old) for block, old in zip(blocks, before, strict=True))


OUT_OF_MEMORY = torch.OutOfMemoryError("full")


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, hidden(OUT_OF_MEMORY), UserError("a wrong setting")])
def test_no_other_engine_mends_what_is_no_matter_of_engines(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", failing_compiler())
    engine = make(CompiledEngine, small_config())
    with pytest.raises(type(error)):
        fall_back(engine, error)
    with pytest.raises(RuntimeError, match="a real fault"):
        fall_back(make(EagerEngine, small_config()), RuntimeError("a real fault"))


def test_the_plain_engine_uses_no_kernel_of_ours_and_trains_alike_on_a_cpu() -> None:
    config = small_config(**{"train.engine": "plain"})
    engine = make(EagerEngine, config)
    before = run(engine, 3)
    other = make(EagerEngine, config)
    plain = make_engine(other.net, other.optimizers, config, other.loader)
    assert plain.name == "plain"
    marked = [module for module in plain.net.modules() if isinstance(module, Block | BiCovG)]
    assert marked
    assert all(module.plain for module in marked)
    torch.testing.assert_close(run(plain, 3), before, rtol=1e-5, atol=1e-6)


AGREE = Path(__file__).parent.parent / "benchmarks" / "agree.py"


@NEEDS_GPU
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_captured_compiled_and_eager_losses_agree_over_200_steps_and_nothing_recompiles(
    precision: str, tmp_path: Path
) -> None:
    recipes = ("digits", "digits-hgb2", "digits-bp")
    command = [sys.executable, str(AGREE), *recipes, "--precision", precision, "--out", str(tmp_path / "agree.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def test_engines_that_do_not_agree_are_told_apart() -> None:
    spec = importlib.util.spec_from_file_location("agree", AGREE)
    assert spec is not None
    assert spec.loader is not None
    agree = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agree)
    eager = torch.linspace(2.0, 1.0, 200)[:, None].expand(200, 3)
    assert agree.judge(eager + 1e-3, eager, 0, "float32")["ok"]
    late = eager.clone()
    late[150:, 1] += 0.015  # one exit alone
    off = {"at once": eager + 5e-3, "later": late, "not finite": torch.full_like(eager, torch.nan)}
    for name, curve in off.items():
        assert not agree.judge(curve, eager, 0, "float32")["ok"], name
    assert not agree.judge(eager, eager, 1, "float32")["ok"]
    assert agree.judge(eager + 5e-3, eager, 0, "bfloat16")["ok"]


class Inline:
    """In the place of Aside, for a CPU: notes what is read, and makes the gradient at once."""

    def __init__(self) -> None:
        self.read: list[Tensor] = []

    def run(self, make: Callable[[], Tensor], *read: Tensor) -> Tensor:
        self.read += read
        return make()


def test_a_weight_gradient_made_aside_is_autograds_own() -> None:
    x, weight = torch.randn(2, 5, 7, 6, dtype=torch.float64), torch.randn(4, 5, 3, 3, dtype=torch.float64)
    found = []
    for aside in (None, Inline()):
        leaf, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        for _ in range(2):  # two micro-batches add up
            y = torch.conv2d(leaf, w, padding=1) if aside is None else conv_aside(leaf, w, aside)  # type: ignore[arg-type]
            y.sin().sum().backward()
        found.append((y, leaf.grad, w.grad))
        if aside is not None:
            assert len(aside.read) == 4, "both tensors that the gradient reads must outlive it"
    for mine, wanted in zip(*found, strict=True):
        assert mine is not None
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("overlap", "blocks"), [(True, range(16)), (False, range(8, 16))])
def test_without_overlap_only_small_blocks_gradients_are_made_aside(
    overlap: bool, blocks: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bicovg.captured, "Aside", Inline)
    config = override(get_recipe("imagenet100-bp"), {"train.overlap": overlap, "model.width": 0.125})
    net = build_on(config, torch.device("meta"))
    move_aside(net, config)
    assert [block.index for block in net.modules() if isinstance(block, Block) and block.aside] == list(blocks)


def compare_streams(recipe: str) -> None:
    config = override(get_recipe(recipe), {"train.device": "cuda", "train.precision": "bfloat16"})
    losses = [run(make(GraphEngine, override(config, {"train.overlap": on}), "cuda"), 40) for on in (True, False)]
    assert torch.equal(*losses)


@NEEDS_GPU
@pytest.mark.parametrize("recipe", ["digits", "digits-bp", "digits-hgb2"])
def test_streams_change_no_bit(recipe: str) -> None:
    check_in_a_process(f"compare_streams({recipe!r})")
