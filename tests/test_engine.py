"""Engines: compiled, captured and eager steps train the same network, and nothing recompiles after the first steps."""

import functools
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bicovg.config import Config, override
from bicovg.data.splits import load_splits, make_loaders
from bicovg.engine import CompiledEngine, EagerEngine, GraphEngine, TrainingState, make_engine
from bicovg.optim import make_optimizers
from bicovg.preparation import build_on
from bicovg.recipes import get_recipe

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
    """The tracer is what can recompile; inductor's C++ would take minutes, so its place is on the GPU, below."""
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    config = small_config()
    eager = run(make(EagerEngine, config), 12)
    engine = make(CompiledEngine, config)
    compiled = run(engine, 2)
    graphs = recompilations()
    assert graphs > 0
    compiled = torch.cat([compiled, run(engine, 10)])  # from the first batch again, with the weights it has
    assert recompilations() == graphs
    assert torch.allclose(compiled[:2], eager[:2], atol=1e-4)
    assert compiled[-1].sum() < compiled[0].sum()


def check_in_a_process(call: str) -> None:
    """The test run checks shapes at every call, which the compiler cannot trace."""
    code = f"import torch; torch.set_num_threads(1); import test_engine; test_engine.{call}"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_compiled_steps_follow_eager_ones_and_compile_once() -> None:
    check_in_a_process("compare_compiled()")


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


AGREE = Path(__file__).parent.parent / "benchmarks" / "agree.py"


@NEEDS_GPU
@pytest.mark.parametrize("recipe", ["digits", "digits-hgb2", "digits-bp"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_captured_compiled_and_eager_losses_agree_over_200_steps_and_nothing_recompiles(
    recipe: str, precision: str, tmp_path: Path
) -> None:
    command = [sys.executable, str(AGREE), recipe, "--precision", precision, "--out", str(tmp_path / "agree.json")]
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
    late = torch.where(torch.arange(200)[:, None] < 150, eager, eager + 0.2)
    off = {"at once": eager + 5e-3, "later": late, "not finite": torch.full_like(eager, torch.nan)}
    for name, curve in off.items():
        assert not agree.judge(curve, eager, 0, "float32")["ok"], name
    assert not agree.judge(eager, eager, 1, "float32")["ok"]
    assert agree.judge(eager + 5e-3, eager, 0, "bfloat16")["ok"]


def compare_streams() -> None:
    config = override(get_recipe("digits"), {"train.device": "cuda", "train.precision": "bfloat16"})
    losses = [run(make(GraphEngine, override(config, {"train.overlap": on}), "cuda"), 40) for on in (True, False)]
    assert torch.equal(*losses)


@NEEDS_GPU
def test_two_streams_change_no_bit() -> None:
    check_in_a_process("compare_streams()")
