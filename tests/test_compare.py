"""Comparing runs: seeds are pooled, spreads are printed, gains are SG and DG of the mean curves."""

import json
import re
from pathlib import Path
from statistics import fmean, stdev

import pytest

from bicovg.cli import main
from bicovg.config import override, to_json
from bicovg.recipes import get_recipe


def write_run(folder: Path, recipe: str, seed: int, top1: list[float], fused: float) -> str:
    """A finished run as far as ``compare`` can see."""
    run = folder / f"{recipe}-{seed}"
    run.mkdir()
    (run / "config.json").write_text(to_json(override(get_recipe(recipe), {"seed": seed})))
    pair = {"top1": top1[-1], "top5": 100.0}
    several = len(top1) > 1
    fusion = {"top1": fused, "top5": 100.0, "weights": [1 / len(top1)] * len(top1), "N_eff": float(len(top1))}
    summary = {
        "recipe": recipe,
        "seed": seed,
        "scope": "strict",
        "exit_blocks": list(range(len(top1))),
        "test": {
            "exits": {"top1": top1, "top5": [100.0] * len(top1)},
            "last": pair,
            "best_test_chosen": {"exit": 0, **pair},
            "best_heldout_chosen": None,
            "mean": pair,
        },
        "heldout_top1": None,
        "fusion": {"train": fusion if several else None, "heldout": None, "augmented": None},
    }
    (run / "summary.json").write_text(json.dumps(summary))
    return str(run)


def compare(runs: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["compare", *runs]) == 0
    return capsys.readouterr().out


def test_gains_are_those_of_the_mean_curves_over_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = {0: [50.0, 90.0, 97.0, 98.0], 1: [54.0, 92.0, 98.0, 98.0]}
    full = {0: [97.0, 98.0, 99.0, 97.0], 1: [98.0, 99.0, 98.0, 98.0], 2: [96.0, 97.0, 97.0, 96.0]}
    runs = [write_run(tmp_path, "digits-per-channel", seed, curve, 98.0 + seed) for seed, curve in plain.items()]
    runs += [write_run(tmp_path, "digits", seed, curve, 99.0) for seed, curve in full.items()]
    text = compare(runs, capsys)
    means = [[fmean(column) for column in zip(*curves.values(), strict=True)] for curves in (plain, full)]
    gains = [b - a for a, b in zip(*means, strict=True)]
    shallow, deep = fmean(gains[:2]), fmean(gains[2:])
    assert f"digits over digits-per-channel: SG {shallow:+.2f}  DG {deep:+.2f} points" in text
    assert shallow > 5


def test_every_value_is_printed_with_its_spread_over_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tops, fused = [90.0, 92.0, 97.0], [98.0, 99.0, 99.5]
    runs = [write_run(tmp_path, "digits", seed, [tops[seed], 99.0], fused[seed]) for seed in range(3)]
    text = compare(runs, capsys)
    assert "n = 3" in text
    assert re.search(rf"block 0\D+{fmean(tops):.2f} \+- {stdev(tops):.2f}", text)
    assert re.search(rf"fused \(fitted on train\)\D+{fmean(fused):.2f} \+- {stdev(fused):.2f}", text)


def test_a_single_run_has_no_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = compare([write_run(tmp_path, "digits", 0, [90.0, 95.0], 96.0)], capsys)
    assert "n = 1" in text
    assert "+-" not in text
    assert "SG" not in text


def test_runs_that_differ_in_more_than_their_seed_stand_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_run(tmp_path, "digits", 0, [90.0, 95.0], 96.0)
    two = write_run(tmp_path, "digits", 1, [91.0, 96.0], 97.0)
    config = override(get_recipe("digits"), {"seed": 1, "optim.lr": 0.5})
    Path(two, "config.json").write_text(to_json(config))
    text = compare([one, two], capsys)
    assert text.count("n = 1") == 2
    assert "SG +1.00  DG +1.00" in text


def test_runs_with_unequal_exits_are_shown_without_a_gain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path, "digits", 0, [90.0, 95.0], 96.0)
    two = write_run(tmp_path, "digits-bp", 0, [97.0], 0.0)
    text = compare([one, two], capsys)
    assert "1 exits against 2, no gain per block" in text
    assert re.search(r"block 1\D+95.00\D+-", text)


def test_a_folder_of_seeds_stands_for_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / name for name in ("plain", "full")]
    for folder, recipe in zip(folders, ("digits-per-channel", "digits"), strict=True):
        folder.mkdir()
        runs = [write_run(folder, recipe, seed, [90.0 + seed, 95.0], 96.0) for seed in range(3)]
        assert len(runs) == 3
    pooled = compare([str(folder) for folder in folders], capsys)
    listed = compare([str(run) for folder in folders for run in sorted(folder.iterdir())], capsys)
    assert pooled == listed
    assert "n = 3" in pooled


def test_a_fusion_that_only_some_seeds_have_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path, "digits", seed, [90.0, 95.0], 96.0) for seed in range(2)]
    for seed, name in ((0, "augmented"), (1, "train_temperatures")):
        path = Path(runs[seed]) / "summary.json"
        summary = json.loads(path.read_text())
        summary["fusion"][name] = summary["fusion"]["train"] | {"top1": 50.0}
        path.write_text(json.dumps(summary))
    for order in (runs, runs[::-1]):
        out = compare(order, capsys)
        assert "fused (fitted on train)" in out
        assert "augmented" not in out
        assert "temperatures" not in out
        assert "50.0" not in out


def test_one_seed_twice_and_an_unfinished_run_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, "digits", 0, [90.0, 95.0], 96.0)
    assert main(["compare", run, run]) == 2
    assert "same seed" in capsys.readouterr().err
    path = Path(run) / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"epochs": 3}))
    assert main(["compare", run]) == 2
    assert "stopped after 3 of 30 epochs" in capsys.readouterr().err


def test_columns_of_one_recipe_are_told_apart_and_data_sets_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write_run(tmp_path, "digits", seed, [70.0, 80.0], 80.0) for seed in (0, 1, 2)]
    changes = ({}, {"optim.lr": 0.5}, {"data.name": "pets"})
    for run, change in zip(runs, changes, strict=True):
        (Path(run) / "config.json").write_text(to_json(override(get_recipe("digits"), change)))
    assert main(["compare", *runs]) == 0
    text = capsys.readouterr().out
    first = f"digits ({runs[0]})"
    assert f"digits ({runs[1]}) over {first}: SG +0.00  DG +0.00 points\n" in text
    assert f"digits ({runs[2]}) over {first}: pets against digits, no gain between data sets\n" in text
