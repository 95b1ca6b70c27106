"""Processes that are killed or told to stop at any moment, and go on as if nothing had happened."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import assert_same_state
from settings import TINY, VARIANTS, count

from bicovg.checkpoint import find_checkpoint

KILLS_PER_RUN = 10


def words_for(run, variant):
    """Start the run, or continue it if it has begun."""
    if (run / "config.json").exists():
        return ["train", "--resume", run]
    return [*TINY, *VARIANTS[variant], "--out", run]


@pytest.mark.row("SIGKILL at random times")
def test_a_run_killed_at_random_times_ends_bit_equal(nursery, references, scratch, row):
    wanted, rng, runs, durations = count(300, 30), random.Random(), 0, {}
    while row.trials < wanted:
        variant = list(VARIANTS)[runs % len(VARIANTS)]
        run, runs = scratch / f"run-{runs}", runs + 1
        reference, duration = references[variant]
        duration = durations.get(variant, duration)
        for number in range(min(KILLS_PER_RUN, wanted - row.trials)):
            trial = nursery.fork(words_for(run, variant))
            ended = trial.interrupt(signal.SIGKILL, rng.uniform(0, duration))
            code = nursery.wait(trial)
            if code == 0:  # it had ended before the kill: not a trial, but if it was whole, a measure of its time
                durations[variant] = ended if ended and number == 0 else duration
                break
            with row.trial(variant):
                assert code == -signal.SIGKILL, f"exit code {code}:\n{trial.output[-1500:]}"
        trial = nursery.run(words_for(run, variant))
        try:
            assert trial.code == 0, trial.output[-1500:]
            assert_same_state(run, reference)
        except AssertionError as error:
            row.failures.append(f"{variant} at the end: {error}")
        shutil.rmtree(run)


def stopped_at(run, trial):
    """The step the process says it stopped at; the newest checkpoint must be of that step."""
    step = int(re.search(r"stopped by SIG\w+ at step (\d+)", trial.output)[1])
    newest, _ = find_checkpoint(run)
    assert newest.name.startswith(f"step-{step:09d}-"), f"stopped at {step}, saved {newest.name}"


@pytest.mark.row("SIGTERM, SIGINT, SIGUSR1 at random times")
def test_a_signal_saves_at_the_step_boundary_and_exits_with_its_code(nursery, references, scratch, row):
    wanted, rng, runs, durations = count(180, 18), random.Random(), 0, {}
    while row.trials < wanted:
        variant = list(VARIANTS)[runs % len(VARIANTS)]
        run, runs = scratch / f"run-{runs}", runs + 1
        reference, duration = references[variant]
        duration = durations.get(variant, duration)
        for attempt in range(6):
            number = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)[row.trials % 3]
            trial = nursery.fork(words_for(run, variant))
            ended = trial.interrupt(number, rng.uniform(0, duration))
            code = nursery.wait(trial)
            if code == 0:  # it had ended before the signal: not a trial
                durations[variant] = ended if ended and attempt == 0 else duration
                break
            with row.trial(f"{variant}, {number.name}"):
                # before the handlers stand, the signal itself ends the process: a shell reports the same number
                assert code in (128 + number, -number), f"exit code {code}:\n{trial.output[-1500:]}"
                if "stopped by" in trial.output:
                    stopped_at(run, trial)
        trial = nursery.run(words_for(run, variant))
        try:
            assert trial.code == 0, trial.output[-1500:]
            assert_same_state(run, reference)
        except AssertionError as error:
            row.failures.append(f"{variant} at the end: {error}")
        shutil.rmtree(run)


def test_the_installed_command_survives_a_kill_and_a_signal(references, scratch):
    """The same once through the front door: python -m bicovg, started by hand."""
    run, variant = scratch / "run", "strict-interleaved"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}

    def start(*words):
        command = [sys.executable, "-m", "bicovg", *map(str, words)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def wait_for(condition, process):
        while process.poll() is None and not condition():
            time.sleep(0.005)

    with start(*TINY, *VARIANTS[variant], "--out", run) as first:
        wait_for(lambda: any((run / "checkpoints").glob("step-*")), first)
        first.kill()
    with start("train", "--resume", run) as second:
        wait_for(lambda: f"process {second.pid} " in (run / "lock").read_text(), second)
        second.send_signal(signal.SIGUSR1)
        output = second.communicate()[0]
    assert second.returncode in (0, 138), output
    with start("train", "--resume", run) as third:
        output = third.communicate()[0]
    assert third.returncode == 0, output
    assert_same_state(run, references[variant][0])
