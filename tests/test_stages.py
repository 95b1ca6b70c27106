"""Block parallel: stages on several processes end, bit for bit, where one process ends."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from team_cases import run_team

from bicovg.checkpoint import MODEL, OPTIMIZER, find_checkpoint
from bicovg.config import Config, override
from bicovg.data import splits
from bicovg.distributed import ALONE, Team
from bicovg.queues import Inbox, Outbox
from bicovg.signals import Credit
from bicovg.stages import StageEngine, measure_units
from bicovg.stopping import Stopper, StopRequested
from bicovg.trainer import Trainer

# batch norm, dropout and FAL on, its map large enough for sums to depend on their order; 16 steps an epoch, so that a
# queue of 8 can fill
TINY: dict[str, Any] = {
    "data.name": "synthetic",
    "data.num_classes": 4,
    "data.image_size": 16,
    "data.augment.flip": True,
    "model.channels": (8, 8, 8, 16),
    "model.pools": (1,),
    "model.scales": ((1, 2),) * 4,
    "model.groups": (2, 2),
    "model.alignment": True,
    "model.dropout": 0.2,
    "train.batch_size": 32,
    "train.epochs": 2,
    "train.clip_norm": 1.0,
    "train.device": "cpu",
    "train.save_seconds": 0.05,
    "fusion.steps": 5,
}


@pytest.fixture(scope="module", autouse=True)
def _small_evaluations() -> Iterator[None]:
    """Evaluation in batches of 3, so that every stage has some."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splits, "EVAL_BATCH", 3)
        yield


def tiny(**changes: Any) -> Config:
    return override(Config(), {**TINY, **{path.replace("__", "."): value for path, value in changes.items()}})


def train(team: Team, config: Config, out: Path) -> None:
    Trainer.start(config, str(out), team).train()


def end_state(run: Path) -> dict[str, Any]:
    newest, _ = find_checkpoint(run)
    assert newest is not None
    summary = json.loads((run / "summary.json").read_text())
    return {
        "checkpoint": newest.name,
        "weights": (newest / MODEL).read_bytes(),
        "optimizer": (newest / OPTIMIZER).read_bytes(),
        "metrics": (run / "metrics.jsonl").read_bytes(),
        "results": (summary["test"], summary["fusion"]),
    }


def assert_same_end(run: Path, expected: dict[str, Any]) -> None:
    found = end_state(run)
    assert [name for name in expected if found[name] != expected[name]] == []


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The end of the same run in one process, by optimizer."""
    found = {}
    for name in ("adamw", "sgd"):
        run = tmp_path_factory.mktemp("alone") / name
        train(ALONE, tiny(optim__name=name), run)
        found[name] = end_state(run)
    return found


@pytest.mark.parametrize(("stages", "depth", "name"), [(2, 1, "adamw"), (2, 8, "sgd"), (4, 1, "sgd"), (4, 8, "adamw")])
def test_stages_at_any_queue_depth_end_bit_equal_to_one_process(
    one_process: dict[str, dict[str, Any]], tmp_path: Path, stages: int, depth: int, name: str
) -> None:
    config = tiny(optim__name=name, train__stages=stages, train__queue_depth=depth)
    run_team(train, stages, config, tmp_path / "run", stages=stages, delay=stages * (depth + 1))
    assert_same_end(tmp_path / "run", one_process[name])


def test_a_map_of_one_channel_lies_behind_the_cut_as_before_it(tmp_path: Path) -> None:
    """It is in two orders at once, and the next convolution goes by its strides."""
    changes = {"model__channels": (8, 1, 8), "model__scales": ((1, 2),) * 3, "model__cross_channel": False}
    config = tiny(**changes, model__groups=(), model__alignment=False)
    train(ALONE, config, tmp_path / "one")
    staged = override(config, {"train.stages": 2, "train.cuts": (2,)})
    run_team(train, 2, staged, tmp_path / "two", stages=2, delay=6)
    assert_same_end(tmp_path / "two", end_state(tmp_path / "one"))


LAYOUTS = {
    "plain": torch.arange(24.0).view(2, 3, 2, 2),
    "channels_last": torch.arange(24.0).view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "one channel": torch.arange(8.0).view(2, 1, 2, 2),
    "one channel, channels_last": torch.arange(8.0).view(2, 2, 2, 1).permute(0, 3, 1, 2),
    "one pixel": torch.arange(6.0).view(2, 1, 1, 3).permute(0, 3, 1, 2),
    "gaps": torch.arange(24.0).view(2, 3, 2, 2)[:, :, :, ::2],
    "a slice": torch.arange(24.0).view(2, 3, 2, 2)[1:],
    "rows": torch.arange(6.0).view(2, 3).t(),
}


def hand_over(team: Team, name: str) -> tuple[list[list[list[float]]], tuple[int, ...]]:
    """Rank 1's two batches and their strides; the second lies in another order before it is sent."""
    if team.rank == 0:
        outbox, first = Outbox(team, 1), LAYOUTS[name]
        for batch in (first, (2 * first).transpose(-1, -2).contiguous().transpose(-1, -2)):
            outbox.put(batch)
            outbox.put_flag(torch.zeros(()))
        team.meet()
        return [], ()
    inbox, taken = Inbox(team, torch.device("cpu")), []
    for _ in (1, 2):
        inbox.expect()
        taken.append(inbox.take())
        inbox.take_flag()
    team.meet()
    return [one.tolist() for one in taken], taken[0].stride()


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_what_arrives_lies_in_memory_as_what_was_sent(name: str) -> None:
    sent = LAYOUTS[name]
    _, (values, strides) = run_team(hand_over, 2, name, stages=2)
    assert values == [sent.tolist(), (2 * sent).tolist()]
    assert strides == (sent.contiguous() if name == "gaps" else sent).stride()


def test_two_shares_of_two_stages_end_bit_equal_to_two_shares(tmp_path: Path) -> None:
    run_team(train, 2, tiny(), tmp_path / "shares")
    run_team(train, 4, tiny(train__stages=2), tmp_path / "grid", stages=2, delay=3)
    expected = end_state(tmp_path / "shares")
    del expected["results"]  # fused and counted over four processes: the weights of the fusion in another order
    assert_same_end(tmp_path / "grid", expected)


def train_until(team: Team, config: Config, run: Path, step: int) -> tuple[int, int]:
    """Train, rank 1 signalled after ``step`` steps; where it stopped, and the exit code."""
    trainer = Trainer.start(config, str(run), team)
    stopper, add = Stopper(), trainer._add_losses

    def add_and_signal(losses: torch.Tensor) -> None:
        add(losses)
        if trainer.progress.step == step and team.rank == 1:
            stopper._note(signal.SIGTERM, None)

    trainer._add_losses = add_and_signal  # type: ignore[method-assign]
    with pytest.raises(StopRequested):
        trainer.train(stopper)
    return trainer.progress.step, stopper.exit_code


def resume(team: Team, config: Config, run: Path) -> None:
    Trainer.resume(run, config, team).train()


@pytest.mark.parametrize("step", [5, 20])
def test_a_signal_stops_all_stages_at_one_step_and_the_run_goes_on_with_another_number(
    one_process: dict[str, dict[str, Any]], tmp_path: Path, step: int
) -> None:
    run = tmp_path / "run"
    stopped = run_team(train_until, 2, tiny(train__stages=2), run, step, stages=2, delay=6)
    assert stopped[0] == stopped[1] == (step + 1 + 6, 143)
    if step == 5:
        resume(ALONE, tiny(), run)
    else:
        run_team(resume, 4, tiny(train__stages=4, train__cuts=(1, 2, 3)), run, stages=4, delay=9)
    assert_same_end(run, one_process["adamw"])


def train_with_nan(team: Team, config: Config, run: Path, unit: int) -> None:
    """The loss of ``unit`` is NaN at its sixth step."""
    trainer = Trainer.start(config, str(run), team)
    module, calls = trainer.net.units[unit], []
    learn = module.learn

    def plant(*arguments: Any, **options: Any) -> Credit:
        credit = learn(*arguments, **options)
        calls.append(0)
        if len(calls) == 6:
            credit.roots = [(root * torch.nan, grad) for root, grad in credit.roots]
            credit.losses *= torch.nan
        return credit

    module.learn = plant
    trainer.train()


@pytest.mark.parametrize("unit", [1, 3])
def test_a_step_skipped_by_one_unit_is_skipped_by_those_after_it_in_every_stage(tmp_path: Path, unit: int) -> None:
    changes = {"train__nonfinite": "skip", "train__epochs": 1, "train__cuts": (2,)}
    train_with_nan(ALONE, tiny(**changes), tmp_path / "one", unit)
    config = tiny(**changes, train__stages=2)
    run_team(train_with_nan, 2, config, tmp_path / "two", unit, stages=2, delay=6)
    assert_same_end(tmp_path / "two", end_state(tmp_path / "one"))
    events = [(tmp_path / name / "events.jsonl").read_text() for name in ("one", "two")]
    assert events[0] == events[1]
    assert f'"unit": {unit}, "blocks": "block {unit}"' in events[0]


def exchange(team: Team, depth: int) -> list[Any]:
    """Rank 0 sends ten batches; rank 1 is in no hurry."""
    if team.rank == 0:
        outbox, longest = Outbox(team, depth), 0
        for number in range(10):
            outbox.put(torch.full((2, 3, 4, 4), float(number)))
            longest = max(longest, len(outbox._waiting))
            outbox.put_flag(torch.tensor(float(number % 2)))
        team.meet()
        return [longest, outbox.bytes_sent]
    inbox, taken = Inbox(team, torch.device("cpu")), []
    for _ in range(10):
        inbox.expect()
        taken.append((float(inbox.take().mean()), float(inbox.take_flag())))
    team.meet()
    return taken


@pytest.mark.parametrize("depth", [1, 8])
def test_a_queue_keeps_its_order_and_its_bound(depth: int) -> None:
    (longest, sent), taken = run_team(exchange, 2, depth, stages=2)
    assert taken == [(float(number), float(number % 2)) for number in range(10)]
    assert longest <= depth
    assert sent == 10 * (2 * 3 * 4 * 4 * 4 + 4)


def count_bytes(team: Team, config: Config, run: Path) -> int:
    trainer = Trainer.start(config, str(run), team)
    trainer.train()
    assert isinstance(trainer.engine, StageEngine)
    return trainer.engine.outbox.bytes_sent if trainer.engine.outbox else 0


def test_a_stage_sends_its_last_units_output_and_nothing_goes_back(tmp_path: Path) -> None:
    config = tiny(train__stages=2, train__cuts=(2,), train__epochs=1)
    sent = run_team(count_bytes, 2, config, tmp_path / "run", stages=2, delay=6)
    activations = 32 * 8 * 8 * 8 * 4  # batch, channels and pooled map of block 1, float32
    assert sent == [16 * (activations + 4), 0]


def test_measuring_the_units_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    trainer = Trainer.start(tiny(), str(tmp_path / "run"))
    before = {name: tensor.clone() for name, tensor in trainer.net.state_dict().items()}
    times = measure_units(trainer.net, trainer.optimizers, trainer.config, trainer.loaders["train"])
    assert len(times) == 4
    assert min(times) > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.net.state_dict().items())
    assert all(not optimizer.state for optimizer in trainer.optimizers)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpus_own_times_are_shorter_than_those_with_launches(tmp_path: Path) -> None:
    trainer = Trainer.start(tiny(train__device="cuda", train__engine="eager"), str(tmp_path / "run"))
    given = (trainer.net, trainer.optimizers, trainer.config, trainer.loaders["train"])
    launched, alone = measure_units(*given), measure_units(*given, device_time=True)
    assert len(alone) == 4
    assert min(alone) > 0
    assert sum(alone) < sum(launched)
