"""One of two processes killed at a random moment: torchrun restarts both, and the run ends as if nothing had happened.

Most trials use torchrun's agent as a library, in a process forked from this one, whose workers are forked in turn; one
in ten goes through the front door, ``python -m torch.distributed.run``, where every process imports torch anew.
"""

import contextlib
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from conftest import assert_same_state, final_state
from settings import TINY, VARIANTS, count
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import bicovg.survivors
from bicovg.cli import main

HANG = 60.0
FORK = multiprocessing.get_context("fork")
FRONT_DOOR = [
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"),
    *("--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", "-m", "bicovg"),
]


STAGED = "strict-interleaved in two stages"
TRIED = {name: VARIANTS[name] for name in ("strict-interleaved", "hgb-summed")}
TRIED[STAGED] = [*VARIANTS["strict-interleaved"], "--train.stages", "2"]


def words_for(run, variant):
    return [*TINY, *TRIED[variant], "--out", str(run)]


def become_worker(words, folder):
    """A worker of the agent: says who it is, then runs the command."""
    torch.set_num_threads(1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # the agent's handlers came along with the fork
    bicovg.survivors.SILENCE = 0.5  # two processes notice each other's death at once
    announce(folder)
    code = main(words)
    (folder / f"done-{os.environ['RANK']}").touch()
    sys.exit(code)


def announce(folder):
    (folder / f".rank-{os.environ['RANK']}").write_text(str(os.getpid()))
    os.rename(folder / f".rank-{os.environ['RANK']}", folder / f"rank-{os.environ['RANK']}")


def become_agent(words, folder):
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(log, number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=2,
        start_method="fork",
        monitor_interval=0.05,
    )
    elastic_launch(config, become_worker)(words, folder)
    os._exit(0)


class Launch:
    """A run of two processes under torchrun's agent, forked or through the front door."""

    def __init__(self, words, folder, real=False):
        folder.mkdir(exist_ok=True)
        self.folder, self.real = folder, real
        if real:
            environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
            with open(folder / "log", "w") as log:
                self.process = subprocess.Popen([*FRONT_DOOR, *words], env=environment, stdout=log, stderr=log)
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.process = FORK.Process(target=become_agent, args=(words, folder))
            self.process.start()

    def workers(self):
        """Process ids by rank, once both run."""
        while self.code() is None:
            found = self._find()
            if len(found) == 2:
                return found
            time.sleep(0.01)
        return {}

    def _find(self):
        if not self.real:
            return {rank: int(path.read_text()) for rank in (0, 1) if (path := self.folder / f"rank-{rank}").exists()}
        found = {}
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in map(int, children):
            named = re.search(rb"\0RANK=(\d)\0", Path(f"/proc/{pid}/environ").read_bytes())
            if named:
                found[int(named[1])] = pid
        return found

    def kill(self, rank, workers):
        """Whether there was still something to kill. A forked worker that is done hands its result to the agent."""
        if self.code() is not None or rank not in workers:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(workers[rank], signal.SIGSTOP)
            done = (self.folder / f"done-{rank}").exists()
            os.kill(workers[rank], signal.SIGCONT if done else signal.SIGKILL)
            return not done
        return False

    def code(self):
        return self.process.poll() if self.real else self.process.exitcode

    def wait(self):
        end = time.monotonic() + HANG
        while self.code() is None and time.monotonic() < end:
            time.sleep(0.01)
        if self.code() is None:
            self.process.kill()
            raise AssertionError(f"hung for {HANG:g} s:\n{self.output[-2000:]}")
        return self.code()

    @property
    def output(self):
        return (self.folder / "log").read_text(errors="replace")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Final state and duration of each variant's run of two processes."""
    # once here, so that everything that a run imports on its way comes along with every fork
    assert main([*TINY, "--train.epochs", "1", "--out", str(tmp_path_factory.mktemp("torchrun") / "warm-up")]) == 0
    found = {}
    for variant in TRIED:
        folder = tmp_path_factory.mktemp("torchrun")
        launch = Launch(words_for(folder / "run", variant), folder)
        launch.workers()
        begun = time.monotonic()
        assert launch.wait() == 0, launch.output[-2000:]
        found[variant] = (final_state(folder / "run"), time.monotonic() - begun)
    return found


@pytest.mark.row("one of two processes killed under torchrun")
def test_one_of_two_processes_killed_is_restarted_and_ends_bit_equal(uninterrupted, scratch, row):
    wanted, rng, tried = count(40, 4), random.Random(), 0
    while row.trials < wanted and tried < 3 * wanted:
        variant, rank, real = list(TRIED)[tried % 3], tried // 3 % 2, tried % 10 == 0
        reference, duration = uninterrupted[variant]
        run, folder = scratch / f"run-{tried}", scratch / f"launch-{tried}"
        launch, tried = Launch(words_for(run, variant), folder, real), tried + 1
        workers = launch.workers()
        while real and launch.code() is None and not (run / "config.json").exists():
            time.sleep(0.01)  # imports take longer than the run
        time.sleep(rng.uniform(0, duration))
        if not launch.kill(rank, workers):
            launch.wait()
            continue  # it had ended before the kill: not a trial
        with row.trial(f"{variant}, rank {rank}{', front door' if real else ''}"):
            assert launch.wait() == 0, launch.output[-2000:]
            if "failed (exitcode: -9)" in launch.output:
                assert re.search(rf"local_rank: {rank} ", launch.output), launch.output[-2000:]
            assert_same_state(run, reference)


@pytest.mark.parametrize("to_torchrun", [True, False][: count(2, 1)], ids=["torchrun", "worker"][: count(2, 1)])
def test_a_batch_schedulers_signal_saves_and_the_same_command_goes_on(to_torchrun, scratch):
    """As the job script of docs/distributed.md: SIGUSR1 to torchrun stops all; to a worker, torchrun starts anew."""
    run, folder = scratch / "run", scratch / "launch"
    words = [*TINY, "--train.epochs", "60", "--out", str(run)]
    launch = Launch(words, folder, real=True)
    workers = launch.workers()
    while launch.code() is None and not (run / "metrics.jsonl").exists():
        time.sleep(0.01)
    os.kill(launch.process.pid if to_torchrun else workers[1], signal.SIGUSR1)
    code = launch.wait()
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values()), "a worker was left behind"
    assert "stopped by SIGUSR1" in launch.output, launch.output[-2000:]
    assert f"go on with: bicovg train --resume {run}" in launch.output
    assert (code != 0) == to_torchrun
    assert (run / "summary.json").exists() == (not to_torchrun)
    if to_torchrun:
        again = Launch(words, folder, real=True)
        assert again.wait() == 0, again.output[-2000:]
        assert len((run / "metrics.jsonl").read_text().splitlines()) == 60
