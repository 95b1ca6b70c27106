"""Runs of several processes through the command line: what is written, who speaks, how they stop and go on."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from team_cases import run_command, run_team

from bicovg import trainer
from bicovg.checkpoint import MODEL, find_checkpoint, list_checkpoints
from bicovg.cli import main
from bicovg.config import Config, TrainConfig, override
from bicovg.data import splits
from bicovg.distributed import Team, grid_from_environment
from bicovg.errors import UserError
from bicovg.recipes import get_recipe
from bicovg.trainer import Trainer

TINY = [
    *("train", "digits", "--data.name", "synthetic", "--data.num_classes", "4", "--data.image_size", "4"),
    *("--model.channels", "8,8", "--model.pools", "0", "--model.scales", "[[1,2],[1,2]]", "--model.groups", "1,1"),
    *("--model.batch_norm", "false", "--data.holdout", "0.1", "--train.batch_size", "48", "--train.epochs", "2"),
    *("--train.device", "cpu", "--fusion.steps", "5", "--optim.name", "sgd", "--optim.lr", "0.005"),
]


def weights(run: Path) -> dict[str, Any]:
    newest, _ = find_checkpoint(run)
    assert newest is not None
    return load_file(newest / MODEL)


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def largest_gap(run: Path, other: Path) -> float:
    return max(float((tensor - weights(other)[name]).abs().max()) for name, tensor in weights(run).items())


@pytest.fixture(scope="module", autouse=True)
def _small_evaluations() -> Iterator[None]:
    """Evaluation in batches of 3, so that every process has some, and not all of them as many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splits, "EVAL_BATCH", 3)
        yield


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("alone") / "run"
    assert main([*TINY, "--out", str(run)]) == 0
    return run


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_run_of_several_processes_is_written_once_and_ends_where_one_process_ends(
    one_process: Path, tmp_path: Path, world: int
) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    assert run_command([*TINY, "--out", str(run)], world, log) == [0] * world
    assert largest_gap(run, one_process) <= 1e-6
    assert {path.name for path in run.iterdir()} == {path.name for path in one_process.iterdir()}
    assert [line["top1"] for line in metrics(run)] == [line["top1"] for line in metrics(one_process)]
    summary, expected = (json.loads((path / "summary.json").read_text()) for path in (run, one_process))
    assert summary["test"] == expected["test"]
    assert summary["fusion"]["train"]["weights"] == pytest.approx(expected["fusion"]["train"]["weights"], abs=1e-4)
    assert json.loads((run / "env.json").read_text())["processes"] == world
    assert "run folder:" in Path(f"{log}-0").read_text()
    assert all(Path(f"{log}-{rank}").read_text() == "" for rank in range(1, world))


def test_processes_that_begin_with_other_weights_and_buffers_take_rank_0s(tmp_path: Path) -> None:
    def begin_elsewhere(rank: int) -> None:
        build = trainer.build_on

        def build_another(*arguments: Any) -> Any:
            net = build(*arguments)
            for tensor in (*net.parameters(), *net.buffers()):
                tensor.data += rank
            return net

        trainer.build_on = build_another  # type: ignore[attr-defined]

    normed = ["true" if word == "false" else word for word in TINY]
    runs = [tmp_path / "as usual", tmp_path / "elsewhere"]
    for run, before in zip(runs, (None, begin_elsewhere), strict=True):
        assert run_command([*normed, "--out", str(run)], 2, tmp_path / "log", before) == [0, 0]
    assert any(name.endswith("running_mean") for name in weights(runs[0]))
    assert largest_gap(*runs) == 0.0
    assert metrics(runs[0]) == metrics(runs[1])


def count_evaluated(team: Team, config: Config, out: Path) -> dict[str, list[int]]:
    """Which images of each split this process has judged, by their place."""
    run = Trainer.start(config, str(out), team)
    found = {}
    for name in ("test", "heldout", "plain"):
        loader = run.loaders[name]
        found[name] = [int(index) for batch in run._take_turns(loader, 0) for index in batch.indices]
        found[f"all of {name}"] = list(range(len(loader.source)))
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_image_is_evaluated_once_by_one_process(world: int, tmp_path: Path) -> None:
    config = override(get_recipe("digits"), {"data.name": "synthetic", "data.num_classes": 4, "data.image_size": 4})
    config = override(config, {"data.holdout": 0.1, "train.device": "cpu", "train.batch_size": 48})
    shares = run_team(count_evaluated, world, config, tmp_path / "run")
    for name in ("test", "heldout", "plain"):
        judged = [index for share in shares for index in share[name]]
        assert sorted(judged) == shares[0][f"all of {name}"], name
        assert len(judged) % 3, "the last batch is as full as the others"
    assert all(share["plain"] for share in shares)


def test_eval_and_fuse_in_shares_give_the_same_summary(one_process: Path, tmp_path: Path) -> None:
    expected = json.loads((one_process / "summary.json").read_text())
    log = tmp_path / "log"
    assert run_command(["eval", str(one_process), "--device", "cpu"], 3, log) == [0, 0, 0]
    found = json.loads((one_process / "summary.json").read_text())
    assert (found["test"], found["heldout_top1"]) == (expected["test"], expected["heldout_top1"])
    assert run_command(["fuse", str(one_process), "--on", "heldout", "--device", "cpu"], 2, log) == [0, 0]
    fused = json.loads((one_process / "summary.json").read_text())["fusion"]["heldout"]
    assert fused["weights"] == pytest.approx(expected["fusion"]["heldout"]["weights"], abs=1e-5)


def signal_soon(run: Path, rank: int) -> Any:
    """In that process: SIGTERM to itself once the first checkpoint stands."""

    def before(here: int) -> None:
        def wait_and_signal() -> None:
            while not list_checkpoints(run):
                time.sleep(0.002)
            os.kill(os.getpid(), signal.SIGTERM)

        if here == rank:
            threading.Thread(target=wait_and_signal, daemon=True).start()

    return before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_process_stops_all_and_another_number_goes_on(
    one_process: Path, tmp_path: Path, rank: int
) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    words = [*TINY, "--train.epochs", "2", "--train.save_seconds", "0.001", "--out", str(run)]
    assert run_command(words, 2, log, signal_soon(run, rank)) == [143, 143]
    said = Path(f"{log}-0").read_text()
    step = re.search(r"stopped by SIGTERM( on another rank)? at step (\d+)", said)
    assert step is not None, said
    assert bool(step[1]) == (rank != 0)
    assert list_checkpoints(run)[-1].name.startswith(f"step-{int(step[2]):09d}-")
    assert run_command(["train", "--resume", str(run)], 4 if rank else 3, log) == [0] * (4 if rank else 3)
    assert largest_gap(run, one_process) <= 1e-6
    assert [line["step"] for line in metrics(run)] == [line["step"] for line in metrics(one_process)]


def test_a_batch_that_cannot_be_shared_is_one_sentence(tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = [*TINY, "--train.batch_size", "47", "--out", str(tmp_path / "run")]
    assert run_command(words, 2, log) == [2, 2]
    assert Path(f"{log}-0").read_text() == "bicovg: rank 0: batch size 47 must be a multiple of the 2 processes\n"


@pytest.mark.parametrize(
    ("settings", "world", "expected"),
    [
        ({"stages": 2}, 3, "--train.stages 2 needs a multiple of 2 processes and there are 3: start it with `torchrun"),
        ({"stages": 2}, 1, "--train.stages 2 needs a multiple of 2 processes and there are 1: start it with `torchrun"),
        ({"processes": 2}, 1, "--train.processes 2 with 1 stages needs 2 processes and there are 1"),
        ({"stages": 2, "schedule": "summed"}, 2, "--train.stages needs --train.schedule interleaved"),
    ],
)
def test_settings_that_do_not_fit_the_number_of_processes_are_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], world: int, expected: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(UserError) as error:
        grid_from_environment(TrainConfig(**settings))
    assert str(error.value).startswith(expected)


def test_torchruns_restarts_need_a_folder_and_refuse_another_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_process: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert main(TINY) == 2
    assert "torchrun --max-restarts needs --out DIR" in capsys.readouterr().err
    assert main([*TINY, "--optim.lr", "0.1", "--out", str(one_process)]) == 2
    assert "holds a run with other settings" in capsys.readouterr().err
    assert main([*TINY, "--out", str(one_process)]) == 0
    assert "resuming" in capsys.readouterr().out
