"""benchmarks/reproduce.py: its plans are what the records say, and it makes records."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bicovg.cli import build_parser, split_overrides
from bicovg.config import override, to_json
from bicovg.recipes import get_recipe
from bicovg.records import MACHINE_SETTINGS, flatten, load_records

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from reproduce import PLANS  # noqa: E402 (beside the results, not in the package)

RECORDS = load_records(ROOT / "records")


def test_every_record_is_planned() -> None:
    assert set(RECORDS) <= set(PLANS)


@pytest.mark.parametrize("name", sorted(PLANS))
def test_a_plan_is_a_run_that_can_be_begun_and_what_its_record_says(name: str) -> None:
    plan = PLANS[name]
    recipe = get_recipe(plan.recipe)
    args = build_parser().parse_args(["train", plan.recipe, *plan.flags])
    planned = flatten(json.loads(to_json(override(recipe, split_overrides(args, recipe)))))
    unsaid = ("seed", "about", "train.engine", *MACHINE_SETTINGS)
    for seed in RECORDS[name]["seeds"] if name in RECORDS else []:
        kept = flatten(json.loads((ROOT / "records" / name / f"s{seed}" / "config.json").read_text()))
        assert {k: v for k, v in kept.items() if k not in unsaid and planned[k] != v} == {}
        assert seed in plan.seeds


def test_seeds_are_trained_one_after_the_other_into_one_record(tmp_path: Path) -> None:
    words = ["digits:0,1", "--runs", str(tmp_path / "runs"), "--records", str(tmp_path / "records")]
    small = ["--", "--train.epochs", "1", "--model.channels", "8,8,8,8"]
    command = [sys.executable, str(ROOT / "benchmarks" / "reproduce.py"), *words, *small]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    record = load_records(tmp_path / "records")["digits"]
    assert record["seeds"] == [0, 1]
    assert record["runs"][1]["command"].startswith("bicovg train digits --seed 1 --model.channels [8,8,8,8]")
    assert [line.split()[2] for line in done.stdout.splitlines()] == ["training", "training", "done", "done"]


def test_a_run_that_fails_is_named_and_the_next_goes_on(tmp_path: Path) -> None:
    words = ["cifar100-short-cc", "digits:0", "--runs", str(tmp_path / "runs"), "--records", str(tmp_path / "records")]
    small = ["--", "--train.epochs", "1", "--data.root", str(tmp_path)]
    command = [sys.executable, str(ROOT / "benchmarks" / "reproduce.py"), *words, *small]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "FAILED (2), see" in done.stdout
    assert "cifar100" in (tmp_path / "runs" / "cifar100-short-cc" / "s0.log").read_text()
    assert list(load_records(tmp_path / "records")) == ["digits"]
