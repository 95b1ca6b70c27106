"""Ten thousand steps with saving and evaluation: memory and open files stay where they were."""

import os
import time
from pathlib import Path

import pytest
from settings import FULL, TINY, VARIANTS

RUNS = ("strict-interleaved", "strict-summed", "hgb-interleaved")
WORDS = ["--train.batch_size", "8", "--train.epochs", "157", "--train.eval_every", "20", "--train.save_every", "20"]
STEPS = 157 * 64
BRIEFLY_OPEN = 4  # files that a sample may find more of, when it falls into a save
GROWTH = 8 << 20  # bytes of resident memory between a fifth of the run and its end


def measure(pid):
    """Resident bytes and open files of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd"))


def watch(trials):
    """Samples of every process until all have ended."""
    samples = {pid: [] for pid in trials}
    running = set(trials)
    while running:
        time.sleep(0.5)
        for pid in list(running):
            try:
                ended = Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
                if not ended:
                    samples[pid].append(measure(pid))
            except (OSError, IndexError):
                ended = True
            if ended:
                running.remove(pid)
    return samples


@pytest.mark.skipif(not FULL, reason="takes minutes: `make faults` runs it")
@pytest.mark.row("10,000-step soak")
def test_memory_and_open_files_stay_flat_over_ten_thousand_steps(nursery, scratch, row):
    trials = {}
    for name in RUNS:
        words = [*TINY, *VARIANTS[name], *WORDS, "--train.save_seconds", "1", "--out", scratch / name]
        trial = nursery.fork(words)
        trials[trial.pid] = (name, trial)
    samples = watch(trials)
    for pid, (name, trial) in trials.items():
        code = nursery.wait(trial)
        with row.trial(name):
            assert code == 0, trial.output[-1500:]
            assert f"step-{STEPS:09d}" in " ".join(os.listdir(scratch / name / "checkpoints"))
            fifth = len(samples[pid]) // 5
            early, late = samples[pid][fifth : 2 * fifth], samples[pid][-fifth - 2 : -2]
            assert len(late) > 5, "too few samples"
            grown = max(size for size, _ in late) - max(size for size, _ in early)
            assert grown < GROWTH, f"resident memory grew by {grown >> 20} MB"
            # a save holds a file or two open for a moment, so a leak shows in the fewest that are open
            assert min(files for _, files in late) <= min(files for _, files in early), "open files grew"
            assert max(files for _, files in late) <= max(files for _, files in early) + BRIEFLY_OPEN
