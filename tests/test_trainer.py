"""The trainer: what a run folder holds, a clean stop and resume, held-out curves, seeds."""

import hashlib
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from bicovg.checkpoint import FILES, MANIFEST, METRICS, make_manifest
from bicovg.cli import main
from bicovg.config import Config, from_json, override
from bicovg.data.splits import load_splits
from bicovg.errors import NonFiniteError
from bicovg.recipes import get_recipe
from bicovg.runlog import read_lines
from bicovg.stopping import Stopper
from bicovg.trainer import Trainer

# 512 training images of 4 classes in 4 steps an epoch; dropout and augmentation on, so that their draws count
TINY = {
    "data.name": "synthetic",
    "data.num_classes": 4,
    "data.augment.crop_pad": 1,
    "data.augment.flip": True,
    "model.channels": (8, 8),
    "model.pools": (0,),
    "model.scales": ((1, 2), (1, 2)),
    "model.groups": (1, 1),
    "train.batch_size": 128,
    "train.epochs": 3,
    "fusion.steps": 20,
}


def tiny(**changes: Any) -> Config:
    return override(Config(), {**TINY, **{path.replace("__", "."): value for path, value in changes.items()}})


def words(config: dict[str, Any]) -> list[str]:
    """A config as command-line flags."""
    text = {path: json.dumps(value) if not isinstance(value, str) else value for path, value in config.items()}
    return [word for path, value in text.items() for word in (f"--{path}", value)]


def last_state(run: Path) -> dict[str, str]:
    """Hashes of weights and optimizer state of the newest checkpoint."""
    newest = sorted((run / "checkpoints").iterdir())[-1]
    return {
        name: hashlib.sha256((newest / f"{name}.safetensors").read_bytes()).hexdigest()
        for name in ("model", "optimizer")
    }


def results(run: Path) -> dict[str, Any]:
    """A summary without what depends on the clock."""
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    del summary["wall_seconds"]
    return summary


def test_run_folder_holds_config_environment_metrics_timing_summary_and_checkpoints(finished_run: Path) -> None:
    names = {path.name for path in finished_run.iterdir()}
    assert {"config.json", "env.json", "metrics.jsonl", "timing.jsonl", "summary.json", "checkpoints"} <= names
    config = from_json((finished_run / "config.json").read_text())
    assert (config.recipe, config.model.channels, config.train.epochs) == ("digits", (8, 8, 8, 8), 2)
    environment = json.loads((finished_run / "env.json").read_text())
    assert {"commit", "torch", "python", "device", "threads", "command"} <= set(environment)
    assert environment["torch"] == torch.__version__
    assert environment["threads"] == torch.get_num_threads()


def test_metrics_hold_deterministic_values_and_timing_holds_the_rest(finished_run: Path) -> None:
    metrics, timing = read_lines(finished_run, "metrics.jsonl"), read_lines(finished_run, "timing.jsonl")
    assert [record["epoch"] for record in metrics] == [record["epoch"] for record in timing] == [0, 1]
    for record in metrics:
        assert set(record) == {"epoch", "step", "lr", "loss", "split", "top1", "top5", "mean_top1"}
        assert len(record["loss"]) == len(record["top1"]) == len(record["top5"]) == 4
        assert all(math.isfinite(value) for value in record["loss"])
        assert all(a <= b for a, b in zip(record["top1"], record["top5"], strict=True))
    for record in timing:
        assert record["images_per_second"] > 0
        assert record["peak_memory_bytes"] > 1e6
        assert {"train_seconds", "eval_seconds", "loader_wait_share"} <= set(record)


def test_last_short_batch_is_dropped_in_training_and_kept_in_evaluation(tmp_path: Path) -> None:
    trainer = Trainer.start(tiny(train__batch_size=100, train__epochs=1), str(tmp_path / "run"))
    trainer.train()
    assert read_lines(tmp_path / "run", "metrics.jsonl")[-1]["step"] == 5  # of 512 images, 12 wait
    for split, count in (("train", 512), ("test", 8)):
        logits, labels = trainer.logits(split)
        assert logits.shape == (2, count, 4)
        assert len(labels) == count


def test_same_seed_gives_the_same_bits_and_another_seed_does_not(tmp_path: Path) -> None:
    states = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        Trainer.start(tiny(seed=seed, train__epochs=1), str(tmp_path / name)).train()
        states.append((last_state(tmp_path / name), (tmp_path / name / "metrics.jsonl").read_bytes()))
    assert states[0] == states[1]
    assert states[0] != states[2]


@pytest.mark.parametrize("changes", [{}, {"model.scope": "hgb", "model.group_size": 2, "optim.name": "sgd"}])
def test_a_run_stopped_after_every_step_and_resumed_equals_the_uninterrupted_run(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = words({**TINY, **changes})
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main(["train", "digits", *flags, "--out", str(whole)]) == 0
    assert main(["train", "digits", *flags, "--out", str(broken), "--max-seconds", "1e-9"]) == 0
    stops = 0
    while not (broken / "summary.json").exists():
        stops += 1
        text = capsys.readouterr().out
        assert re.search(r"stopped .* at step \d+", text)
        assert f"bicovg train --resume {broken}" in text
        assert stops < 20
        assert main(["train", "--resume", str(broken), "--max-seconds", "1e-9"]) == 0
    assert stops >= 11  # 12 steps in all
    assert last_state(broken) == last_state(whole)
    assert (broken / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert results(broken) == results(whole)


def test_resume_of_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    Trainer.start(tiny(train__epochs=1), str(run)).train()
    before = last_state(run), (run / "metrics.jsonl").read_bytes(), results(run)
    assert main(["train", "--resume", str(run)]) == 0
    assert (last_state(run), (run / "metrics.jsonl").read_bytes(), results(run)) == before


def test_eval_writes_the_same_accuracies_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    Trainer.start(tiny(train__epochs=1), str(run)).train()
    before = results(run)
    (run / "summary.json").unlink()
    assert main(["eval", str(run)]) == 0
    after = results(run)
    assert after["test"] == before["test"]
    assert after["fusion"] == before["fusion"]


@pytest.mark.parametrize("images", ["train", "heldout", "augmented"])
def test_fuse_fits_on_the_images_it_is_told_to(images: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    Trainer.start(tiny(train__epochs=1, data__holdout=0.25), str(run)).train()
    assert main(["fuse", str(run), "--on", images]) == 0
    record = results(run)["fusion"][images]
    assert sum(record["weights"]) == pytest.approx(1.0)
    assert 1 <= record["N_eff"] <= 2
    others = [r["weights"] for name, r in results(run)["fusion"].items() if r and name != images]
    assert record["weights"] not in others


def test_curves_are_on_held_out_images_where_there_are_any_and_say_so(tmp_path: Path) -> None:
    for name, share, split in (("a", 0.25, "heldout"), ("b", 0.0, "test")):
        Trainer.start(tiny(train__epochs=1, data__holdout=share), str(tmp_path / name)).train()
        assert read_lines(tmp_path / name, "metrics.jsonl")[0]["split"] == split
        summary = results(tmp_path / name)
        held = [summary["heldout_top1"], summary["test"]["best_heldout_chosen"], summary["fusion"]["heldout"]]
        assert all(value is not None for value in held) if share else held == [None, None, None]


def test_evaluation_every_second_epoch_still_evaluates_the_last(tmp_path: Path) -> None:
    Trainer.start(tiny(train__eval_every=2), str(tmp_path / "run")).train()
    assert ["top1" in record for record in read_lines(tmp_path / "run", "metrics.jsonl")] == [False, True, True]


def test_learning_rate_follows_the_schedule_per_step(tmp_path: Path) -> None:
    config = tiny(optim__warmup_epochs=1.0, optim__lr=0.01, optim__lr_min=0.001)
    Trainer.start(config, str(tmp_path / "run")).train()
    rates = [record["lr"] for record in read_lines(tmp_path / "run", "metrics.jsonl")]
    cosine = [0.001 + 0.009 * (1 + math.cos(math.pi * share / 8)) / 2 for share in (3, 7)]
    assert rates == pytest.approx([0.01 * 3 / 4, *cosine])


def test_seeds_make_one_run_each_and_print_mean_and_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = words({**TINY, "train.epochs": 1})
    assert main(["train", "digits", *flags, "--seeds", "3", "7", "--out", str(tmp_path / "runs")]) == 0
    text = capsys.readouterr().out
    tops = []
    for seed in (3, 7):
        run = tmp_path / "runs" / f"s{seed}"
        assert from_json((run / "config.json").read_text()).seed == seed
        tops.append(results(run)["test"]["mean"]["top1"])
    mean, half = sum(tops) / 2, abs(tops[0] - tops[1]) / 2
    assert "n = 2" in text
    assert f"{mean:.2f} +- {half * math.sqrt(2):.2f}" in text


def test_the_same_command_goes_on_with_seeds_that_a_stop_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train, runs = Trainer.train, tmp_path / "my runs"
    line = ["train", "digits", *words({**TINY, "train.epochs": 2}), "--seeds", "3", "7", "9", "--out", str(runs)]

    def stop_seed_7(trainer: Trainer, stopper: Stopper | None = None) -> Any:
        if trainer.config.seed == 7 and stopper is not None:
            stopper.exit_code = 130
        return train(trainer, stopper)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train", stop_seed_7)
        assert main(line) == 130
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2:] == [
        f"go on with: bicovg train --resume '{runs / 's7'}'",
        "not begun: seeds 9; the same command goes on with all",
    ]
    shutil.rmtree(runs / "s3" / "checkpoints")  # to save space: a finished seed is left as it is
    before = {path: path.read_bytes() for path in (runs / "s3").iterdir() if path.is_file()}
    assert main(line) == 0
    assert "n = 3" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in (runs / "s3").iterdir() if path.is_file()} == before
    (runs / "s7" / "report.html").unlink()  # as a stop behind the training leaves it
    assert main(line) == 0
    assert (runs / "s7" / "report.html").exists()
    assert main([*line, "--optim.lr", "0.5"]) == 2
    assert "holds a run with other settings" in capsys.readouterr().err


def test_shuffled_labels_change_no_logit(tmp_path: Path) -> None:
    trainer = Trainer.start(tiny(train__epochs=1), str(tmp_path / "run"))
    trainer.train()
    logits, labels = trainer.logits("test")
    loader = trainer.loaders["test"]
    loader.resident_labels = loader.resident_labels.flip(0)
    shuffled, other = trainer.logits("test")
    assert not torch.equal(labels, other)
    assert torch.equal(logits, shuffled)


def test_the_network_of_a_seed_does_not_depend_on_what_ran_before(tmp_path: Path) -> None:
    first = Trainer.start(tiny(), str(tmp_path / "a")).net.state_dict()
    torch.rand(10)
    second = Trainer.start(tiny(), str(tmp_path / "b")).net.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_held_out_images_are_stratified_and_the_same_for_every_training_seed() -> None:
    config = get_recipe("digits")
    one = load_splits(override(config, {"data.holdout": 0.1}).data)
    two = load_splits(override(config, {"data.holdout": 0.1, "seed": 9}).data)
    assert one.heldout is not None
    assert two.heldout is not None
    assert torch.equal(one.heldout.labels, two.heldout.labels)
    counts = torch.bincount(one.heldout.labels, minlength=10)
    assert counts.max() - counts.min() <= 1
    assert len(one.heldout) + len(one.train) == len(load_splits(config.data).train)


def test_results_of_earlier_weights_go_when_training_goes_on_and_stay_when_it_is_over(tmp_path: Path) -> None:
    run, made = tmp_path / "run", ("summary.json", "early_exit.json", "analysis.json", "report.html")
    flags = words({**TINY, "data.holdout": 0.1})
    assert main(["train", "digits", *flags, "--out", str(run), "--max-seconds", "1e-9"]) == 0
    assert main(["eval", str(run)]) == 0
    assert not (run / "summary.json").exists()
    assert main(["eval", str(run), "--early-exit"]) == 0
    for name in made:
        (run / name).touch()
    assert main(["train", "--resume", str(run)]) == 0
    assert {name for name in made if (run / name).exists()} == {"summary.json", "analysis.json", "report.html"}
    assert main(["fuse", str(run), "--on", "augmented"]) == 0
    assert main(["fuse", str(run), "--on", "heldout", "--temperatures"]) == 0
    fused = results(run)["fusion"]
    assert len(fused["heldout_temperatures"]["temperatures"]) == 2
    assert fused["heldout_temperatures"]["weights"] != fused["heldout"]["weights"]
    for again in (["train", "--resume", str(run)], ["eval", str(run)]):
        assert main(again) == 0
        assert results(run)["fusion"] == fused


def test_an_epoch_of_skipped_steps_alone_ends_the_run(tmp_path: Path) -> None:
    trainer = Trainer.start(tiny(train__nonfinite="skip"), str(tmp_path / "run"))
    with torch.no_grad():
        next(trainer.net.parameters()).fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="every step of epoch 1 was skipped"):
        trainer.train()


def test_bad_weights_are_told_apart_from_bad_steps_also_when_a_stop_meets_them(tmp_path: Path) -> None:
    """Skipping steps mends neither; a guard's own sentence is not lost to the saver's."""
    advice = "goes on from the last good checkpoint"
    for number, (stops, changes, sentence) in enumerate(
        (
            (True, {}, r"was not finite at step 0.*--train\.nonfinite skip"),
            (False, {"train__save_seconds": 1e-9}, r"was not finite at step 0.*--train\.nonfinite skip"),
            (True, {"train__nonfinite": "skip"}, rf"is not finite at step 1 and was not saved: lower .* {advice}"),
        )
    ):
        trainer = Trainer.start(tiny(**changes), str(tmp_path / f"run{number}"))
        with torch.no_grad():
            next(trainer.net.parameters()).view(-1)[0] = torch.nan
        with pytest.raises(NonFiniteError, match=sentence):
            trainer.train(Stopper(1e-9) if stops else None)


def test_a_config_that_was_changed_by_hand_does_not_go_on_as_if_nothing_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", "digits", *words(TINY), "--out", str(run), "--max-seconds", "1e-9"]) == 0
    whole = (run / "config.json").read_text()
    for before, after in (('"seed": 0', '"seed": 1'), ('"epochs": 3', '"epochs": 4')):
        assert before in whole
        (run / "config.json").write_text(whole.replace(before, after, 1))
        assert main(["train", "--resume", str(run)]) == 2
        assert "it belongs to a run of other settings than config.json has" in capsys.readouterr().out
    (run / "config.json").write_text(whole)
    assert main(["train", "--resume", str(run), "--train.threads", "1", "--train.keep", "3"]) == 0


def test_a_linked_checkpoint_folder_costs_a_finished_run_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", "digits", *words(TINY), "--out", str(run)]) == 0
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    (run / "checkpoints").rename(tmp_path / "aside")
    (run / "checkpoints").symlink_to(tmp_path / "aside")
    for command in (["train", "--resume", str(run)], ["checkpoint", "list", str(run)], ["eval", str(run)]):
        assert main(command) == 4
        assert "symbolic link: move the checkpoints into their run folder" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file() and path.name != "lock"} == {
        name: blob for name, blob in before.items() if name != "lock"
    }


def test_a_checkpoint_whose_metrics_are_torn_is_not_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["train", "digits", *words(TINY), "--out", str(run)]) == 0
    newest, older = sorted((run / "checkpoints").iterdir())[::-1]
    files = {name: (newest / name).read_bytes() for name in FILES}
    files[METRICS] = files[METRICS][:-9]
    owner = json.loads((newest / MANIFEST).read_text())["owner"]
    (newest / METRICS).write_bytes(files[METRICS])
    (newest / MANIFEST).write_bytes(make_manifest(files, owner))
    assert main(["train", "--resume", str(run)]) == 0
    shown = capsys.readouterr().out
    assert f"skipped {newest.name}: its {METRICS} does not hold one line for each of 3 epochs" in shown
    assert f"resuming {run} from {older.name}" in shown
    assert len(read_lines(run, "metrics.jsonl")) == 3


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["train", "--resume", ""], "--resume was given no run folder"),
        (["train", "digits", "--out", "x" * 300], "is too long for a file's name: shorten it"),
        (["report", "x" * 300], "is too long for a file's name: shorten it"),
        (
            ["train", "digits", "--optim.lr", "1e300"],
            "--optim.lr 1e+300 is out of range: it must be at least 0 and below 3e+38",
        ),
        (["train", "digits", "--fusion.lr", "1e300"], "--fusion.lr 1e+300 is out of range"),
        (["train", "digits", "--seed", str(1 << 62)], "is out of range: it must be"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    command: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    shown = capsys.readouterr().err
    assert sentence in shown
    assert shown.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_too_little_memory_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def build(*_: Any) -> None:
        torch.empty(1 << 58, dtype=torch.uint8)

    monkeypatch.setattr("bicovg.trainer.build_on", build)
    assert main(["train", "digits", *words(TINY)]) == 2
    assert "there is not enough memory: choose a smaller --train.batch_size" in capsys.readouterr().err
    monkeypatch.setattr("bicovg.trainer.build_on", lambda *_: (_ for _ in ()).throw(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        main(["train", "digits", *words(TINY)])


def test_a_folder_in_a_results_place_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["train", "digits", *words(TINY), "--out", str(run), "--max-seconds", "1e-9"]) == 0
    (run / "summary.json").mkdir()
    assert main(["train", "--resume", str(run)]) == 4
    assert "cannot remove" in capsys.readouterr().err
