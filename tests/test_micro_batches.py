"""A batch in parts: what each part sees, what their gradients add up to, and what it saves."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine import NEEDS_GPU, check_in_a_process, make, run, small_config
from test_step import IDS as SCOPE_NAMES
from test_step import SCOPES as PLAIN_SCOPES
from test_step import draw_batch, make_net, make_optimizers
from torch import Tensor, nn

from bicovg import local_step
from bicovg.captured import GraphEngine
from bicovg.cli import main
from bicovg.config import from_json, override, to_json
from bicovg.engine import EagerEngine
from bicovg.errors import UserError
from bicovg.guard import Guard
from bicovg.identity import identify
from bicovg.lanes import OneLane
from bicovg.networks import LocalNetwork
from bicovg.preparation import check_config
from bicovg.profiling import track_saved_bytes
from bicovg.recipes import get_recipe
from bicovg.reduction import NoReduction
from bicovg.signals import assign_gradients, delta_credit, teaching_credit

SCOPES = [*PLAIN_SCOPES, {"scope": "end-to-end", "checkpointing": True}]
IDS = [*SCOPE_NAMES, "bp-checkpointed"]
BEFORE = "181a5674065a57f1222f7638a9954f6a"  # the digits' recipe, when it had no setting for parts


def move_once(net: LocalNetwork, batch: tuple[Tensor, ...], **options: Any) -> tuple[list[Tensor], Tensor]:
    """By how much a step of SGD with a learning rate of 1 moves every parameter of a copy, and the losses."""
    net = copy.deepcopy(net)
    before = [p.detach().clone() for p in net.parameters()]
    images, labels, keys = batch
    optimizers = [torch.optim.SGD(unit.parameters(), 1.0) for unit in net.units]
    losses = local_step(net, optimizers, images, labels, keys=keys, **options)
    return [p.detach() - old for p, old in zip(net.parameters(), before, strict=True)], losses


@pytest.mark.parametrize("schedule", ["interleaved", "summed"])
@pytest.mark.parametrize("options", SCOPES, ids=IDS)
def test_without_batch_norm_parts_learn_what_the_whole_batch_does(options: dict[str, Any], schedule: str) -> None:
    """Batch norm alone mixes the samples of a batch; dropout masks belong to samples."""
    net = make_net(batch_norm=False, dropout=0.3, **options).double()
    images, *rest = draw_batch(0, size=12)
    batch = (images.double(), *rest)
    whole, losses = move_once(net, batch, schedule=schedule)
    for parts in (2, 3, 12):
        moved, found = move_once(net, batch, schedule=schedule, micro_batches=parts)
        torch.testing.assert_close(found, losses, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(moved, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", SCOPES, ids=IDS)
def test_with_batch_norm_a_step_is_the_mean_of_what_each_part_would_do_alone(options: dict[str, Any]) -> None:
    net = make_net(dropout=0.3, **options).double()
    images, labels, keys = draw_batch(0, size=12)
    images = images.double()
    alone = [move_once(net, part) for part in zip(images.chunk(3), labels.chunk(3), keys.chunk(3), strict=True)]
    moved, losses = move_once(net, (images, labels, keys), micro_batches=3)
    torch.testing.assert_close(losses, torch.stack([found for _, found in alone]).mean(dim=0))
    for mine, theirs in zip(moved, zip(*(moves for moves, _ in alone), strict=True), strict=True):
        torch.testing.assert_close(mine, torch.stack(theirs).mean(dim=0), rtol=1e-9, atol=1e-12)
    whole, _ = move_once(net, (images, labels, keys))
    assert not torch.allclose(whole[0], moved[0], rtol=1e-3), "batch norm must see each part by itself"


@pytest.mark.parametrize("options", SCOPES, ids=IDS)
def test_schedules_agree_bit_for_bit_in_parts_too(options: dict[str, Any]) -> None:
    ends = []
    for schedule in ("interleaved", "summed"):
        net = make_net(dropout=0.2, **options)
        optimizers, curve = make_optimizers(net, "sgd"), []
        guard = Guard(net, optimizers)
        for step in range(20):
            images, labels, keys = draw_batch(step)
            more: dict[str, Any] = {"clip_norm": 1.0, "keys": keys, "guard": guard, "micro_batches": 4}
            curve.append(local_step(net, optimizers, images, labels, schedule, **more))
            guard.record(step)
        ends.append([torch.stack(curve), *net.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_units_see_the_parts_in_order_and_are_stepped_once() -> None:
    net, seen = make_net(), []
    events: list[Any] = []
    for unit in net.units:
        unit.blocks[0].conv.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))

    class Noting(NoReduction):
        def launch(self, index: int, unit: nn.Module, losses: Tensor) -> None:
            events.append(("sent", index))

    class Lane(OneLane):
        def join(self) -> None:
            events.append("joined")

    optimizers = [torch.optim.SGD(unit.parameters(), 0.1) for unit in net.units]
    for index, optimizer in enumerate(optimizers):
        optimizer.register_step_post_hook(lambda *_, index=index: events.append(("stepped", index)))
    images, labels, keys = draw_batch(0)
    local_step(net, optimizers, images, labels, keys=keys, reduction=Noting(), lanes=Lane(), micro_batches=2)
    assert seen == [4] * 8
    assert events == ["joined", *[(what, unit) for unit in range(4) for what in ("sent", "stepped")], "joined"]


@pytest.mark.parametrize("options", [{}, {"scope": "end-to-end"}], ids=["strict", "bp"])
def test_parts_keep_less_for_the_backward_pass(options: dict[str, Any]) -> None:
    images, labels, keys = draw_batch(0, size=32)
    peaks = []
    for parts in (1, 4):
        net = make_net(**options)
        optimizers = make_optimizers(net, "sgd")
        with track_saved_bytes(exclude=net) as tally:
            local_step(net, optimizers, images, labels, keys=keys, micro_batches=parts)
        peaks.append(tally.peak)
    assert 0.24 < peaks[1] / peaks[0] < 0.3


def test_a_value_that_is_not_finite_in_one_part_holds_the_unit_back() -> None:
    net = make_net()
    optimizers = make_optimizers(net, "sgd")
    guard = Guard(net, optimizers, policy="skip")
    before = [value.clone() for value in net.state_dict().values()]
    images, labels, keys = draw_batch(0)
    images[1, 0, 0, 0] = torch.nan  # of the first part of four
    local_step(net, optimizers, images, labels, keys=keys, guard=guard, micro_batches=4)
    guard.record(0)
    assert [(event.step, event.unit) for event in guard.events] == [(0, 0)]
    assert all(torch.equal(value, old) for value, old in zip(net.state_dict().values(), before, strict=True))


def test_a_share_of_every_kind_of_credit_is_that_share_of_its_gradient() -> None:
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    bias = nn.Parameter(torch.zeros(2))
    for _ in range(2):
        activation = weight.square()
        assign_gradients([teaching_credit(None, torch.zeros(1), activation, torch.tensor([1.0, 10.0]))], 0.25)
        assign_gradients([delta_credit(None, torch.zeros(1), [(bias, torch.tensor([4.0, -8.0]))])], 0.25)
    assert weight.grad is not None
    assert bias.grad is not None
    assert weight.grad.tolist() == [2.0, 30.0]
    assert bias.grad.tolist() == [-2.0, 4.0]


@pytest.mark.parametrize("parts", [0, -1, 3, 16])
def test_parts_that_are_not_equal_are_refused(parts: int) -> None:
    net = make_net()
    images, labels, _ = draw_batch(0)
    with pytest.raises(ValueError, match=f"8 images cannot be cut into {parts} equal micro-batches"):
        local_step(net, make_optimizers(net, "sgd"), images, labels, micro_batches=parts)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--train.micro_batches", "3"],
            "--train.batch_size 64 cannot be cut into --train.micro_batches 3 equal parts",
        ),
        (["--train.micro_batches", "0"], "--train.micro_batches 0 is out of range: it must be at least 1"),
        (
            ["--train.micro_batches", "64", "--model.pools", "0,1,2", "--model.scales", "[[1],[1],[1],[1]]"],
            "batch norm needs more than one value a channel",
        ),
    ],
)
def test_settings_that_cannot_be_meant_are_one_sentence(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "digits", *words, "--out", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("other", "value"), [("stages", 2), ("batch_norm_stats", "synced")])
def test_what_parts_do_not_go_with_is_refused(other: str, value: Any) -> None:
    config = override(get_recipe("digits"), {"train.micro_batches": 2, f"train.{other}": value})
    with pytest.raises(UserError, match=rf"--train\.micro_batches 2 does not go with --train\.{other} {value}"):
        check_config(config)


def test_a_step_that_fails_in_a_later_part_leaves_no_gradient_behind() -> None:
    net = make_net()
    calls = iter(range(8))

    def fail_late(*_: Any) -> None:
        if next(calls) == 6:
            raise RuntimeError("out of something")

    net.units[1].blocks[0].conv.register_forward_hook(fail_late)
    images, labels, keys = draw_batch(0)
    with pytest.raises(RuntimeError, match="out of something"):
        local_step(net, make_optimizers(net, "sgd"), images, labels, keys=keys, micro_batches=8)
    assert all(p.grad is None for p in net.parameters())


def test_a_run_from_before_there_were_parts_is_the_run_it_was() -> None:
    config = get_recipe("digits")
    tree = json.loads(to_json(config))
    del tree["train"]["micro_batches"]
    assert from_json(json.dumps(tree)) == config
    assert identify(config) == BEFORE
    assert identify(override(config, {"train.micro_batches": 2})) != BEFORE
    del tree["train"]["epochs"]
    with pytest.raises(UserError, match=r"field train\.epochs is missing"):
        from_json(json.dumps(tree))


def test_a_run_in_parts_trains_and_says_so_in_its_settings(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    words = ["--model.channels", "8,8,8,8", "--train.epochs", "1", "--train.micro_batches", "4", "--fusion.steps", "2"]
    assert main(["train", "digits", "--train.device", "cpu", *words, "--out", out]) == 0
    assert '"micro_batches": 4' in (tmp_path / "run" / "config.json").read_text()


def test_an_engine_cuts_its_batches() -> None:
    whole = run(make(EagerEngine, small_config()), 3)
    parts = run(make(EagerEngine, small_config(**{"train.micro_batches": 2})), 3)
    assert parts.shape == whole.shape
    assert not torch.equal(parts, whole)


def compare_captured(recipe: str, precision: str) -> None:
    changes = {"train.device": "cuda", "train.precision": precision, "train.micro_batches": 4}
    config = override(get_recipe(recipe), changes)
    eager, captured = (run(make(kind, config, "cuda"), 40) for kind in (EagerEngine, GraphEngine))
    assert (captured[:5] - eager[:5]).abs().max() < (2e-3 if precision == "float32" else 2e-2)
    assert (captured.mean(dim=0) - eager.mean(dim=0)).abs().max() < 1e-2


@NEEDS_GPU
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", ["digits", "digits-hgb2", "digits-bp"])
def test_a_captured_step_in_parts_follows_the_eager_one(recipe: str, precision: str) -> None:
    check_in_a_process(f"compare_captured({recipe!r}, {precision!r})", __name__)
