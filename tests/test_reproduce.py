"""benchmarks/reproduce.py: its plans are what the records say, and it makes records."""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bicovg.cli import build_parser, split_overrides
from bicovg.config import override, to_json
from bicovg.recipes import get_recipe
from bicovg.records import MACHINE_SETTINGS, flatten, load_records

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import reproduce as reproduce_script  # noqa: E402 (beside the results, not in the package)
from reproduce import PLANS  # noqa: E402

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


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_what_a_plan_does_with_a_finished_run_its_record_has(name: str) -> None:
    planned = [" ".join(["bicovg", *words]) for words in PLANS[name].afterwards("RUN")]
    for run in RECORDS[name]["runs"]:
        found = run.get("afterwards", planned)
        assert set(planned) <= set(found) or (PLANS[name].short and not found), "short runs were trained alone at first"


def test_the_list_says_which_seeds_have_no_record(tmp_path: Path) -> None:
    (tmp_path / "cifar100-strict").mkdir()
    (tmp_path / "cifar100-strict" / "record.json").write_text(json.dumps({"seeds": [1]}))
    command = [sys.executable, str(ROOT / "benchmarks" / "reproduce.py"), "--list", "--records"]
    found = {}
    for folder in (tmp_path, ROOT / "records"):
        lines = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=True).stdout.splitlines()
        found[folder] = {line.split()[0]: line for line in lines}
        assert found[folder].keys() == PLANS.keys()
    assert "seeds 0,1       missing 0 " in found[tmp_path]["cifar100-strict"]
    assert "bicovg train cifar100-bicovg --train.precision bfloat16" in found[tmp_path]["cifar100-strict"]
    assert "missing 0,1,2,3,4 " in found[tmp_path]["digits"]
    assert "missing" not in found[ROOT / "records"]["digits"]


def reproduce(folder: Path, *words: str) -> list[str]:
    places = ["--runs", str(folder / "runs"), "--records", str(folder / "records")]
    small = ["--", "--model.channels", "8,8,8,8", "--data.root", str(folder)]
    return [sys.executable, str(ROOT / "benchmarks" / "reproduce.py"), *places, *words, *small]


def run_to_the_end(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def verbs(output: str) -> list[str]:
    """What is said of every run, after the seconds."""
    return [line.split()[2] for line in output.splitlines()]


def test_seeds_go_into_one_record_are_not_trained_twice_and_a_failure_stops_nobody(tmp_path: Path) -> None:
    short = ["--train.epochs", "1"]
    done = run_to_the_end([*reproduce(tmp_path, "digits:0", "cifar100-short-cc", "digits:0,1"), *short])
    assert done.returncode == 1, done.stdout + done.stderr
    assert sorted(verbs(done.stdout)) == ["FAILED", "FAILED", *["done"] * 2, *["training"] * 2]
    assert "FAILED (2), see" in done.stdout
    assert "bicovg: this network cannot be built" in (tmp_path / "runs" / "cifar100-short-cc" / "s0.log").read_text()
    record = load_records(tmp_path / "records")["digits"]
    assert record["seeds"] == [0, 1]
    assert record["runs"][1]["command"].startswith("bicovg train digits --seed 1 --model.channels [8,8,8,8]")
    again = run_to_the_end([*reproduce(tmp_path, "digits:0"), *short])
    assert again.returncode == 0
    assert "has seed 0 already" in again.stdout


def test_a_run_that_was_finished_but_not_recorded_is_recorded_and_not_trained_again(tmp_path: Path) -> None:
    command = [*reproduce(tmp_path, "digits:0"), "--train.epochs", "1"]
    assert run_to_the_end(command).returncode == 0
    (before,) = load_records(tmp_path / "records")["digits"]["runs"]
    shutil.rmtree(tmp_path / "records")
    assert run_to_the_end(command).returncode == 0
    (after,) = load_records(tmp_path / "records")["digits"]["runs"]
    assert after["exits"] == before["exits"]
    assert "resuming" in (tmp_path / "runs" / "digits" / "s0.log").read_text()


def test_an_interrupt_ends_those_that_train_and_those_that_wait(tmp_path: Path) -> None:
    command = [*reproduce(tmp_path, "digits:0,1"), "--train.epochs", "900"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        waiting = tmp_path / "runs" / "digits" / "s1" / "env.json"
        deadline = time.monotonic() + 120
        while not waiting.exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(2.0)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=150)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode not in (0, None)
    for seed in (0, 1):
        said = (tmp_path / "runs" / "digits" / f"s{seed}.log").read_text()
        # the interrupt reaches all, and the first to end terminates the others: either may be the one that is named
        assert re.search(r"stopped by SIG(INT|TERM) at step", said), said


def test_a_run_that_dies_while_it_waits_is_named_and_the_next_goes_on(tmp_path: Path, capsys: Any) -> None:
    class Line:
        """In the place of a connection: says "ready", and may be broken by then."""

        def __init__(self, broken: bool) -> None:
            self.broken, self.told = broken, False

        def recv(self) -> str:
            return "said"

        def send(self, word: str) -> None:
            if self.broken:
                raise BrokenPipeError
            self.told = True

    class Process:
        def __init__(self, code: int) -> None:
            self.exitcode = code

        def join(self, timeout: float | None = None) -> None: ...
        def terminate(self) -> None: ...
        def kill(self) -> None: ...

    lines = [Line(False), Line(True), Line(False)]
    made = iter([(Process(line.broken), line) for line in lines])
    args = argparse.Namespace(runs=str(tmp_path), records=str(tmp_path), data_root=None, more=[])
    jobs = [reproduce_script.Job("digits", seed, args) for seed in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reproduce_script, "start", lambda job: next(made))
        assert reproduce_script.run_all(jobs) == 1
    assert [line.told for line in lines] == [True, False, True]
    assert verbs(capsys.readouterr().out) == ["training", "FAILED", "training", "done", "FAILED", "done"]


@pytest.mark.parametrize("words", [["digits:x"], ["no-such-record"], []])
def test_what_cannot_be_meant_is_refused_at_once(words: list[str], tmp_path: Path) -> None:
    done = run_to_the_end(reproduce(tmp_path, *words))
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
