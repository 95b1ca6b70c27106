"""Fixtures of the fault suite: forked trials, a scratch folder in memory, and the count of trials per row."""

import json
import os
import shutil
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from nursery import Nursery
from settings import TINY, VARIANTS

from bicovg.checkpoint import MODEL, OPTIMIZER, find_checkpoint


def memory_folder():
    """Kills lose no page cache, so their files may live in memory, where fsync is quick."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture(scope="session")
def nursery():
    logs = tempfile.mkdtemp(prefix="bicovg-faults-", dir=memory_folder())
    os.chmod(logs, 0o755)  # the working folder of trials that become an ordinary user
    made = Nursery(logs)
    yield made
    made.close()
    shutil.rmtree(logs)


@pytest.fixture
def scratch():
    folder = tempfile.mkdtemp(prefix="bicovg-fault-", dir=memory_folder())
    os.chmod(folder, 0o755)
    yield Path(folder)
    shutil.rmtree(folder)


class Row:
    """One row of the table: its trials and what failed. A trial's failure does not end the row."""

    def __init__(self, name):
        self.name, self.trials, self.failures, self.begun = name, 0, [], time.monotonic()

    @contextmanager
    def trial(self, label):
        self.trials += 1
        try:
            yield
        except AssertionError as error:
            self.failures.append(f"{label}: {error}")

    def close(self):
        if path := os.environ.get("BICOVG_FAULT_ROWS"):
            entry = {
                "row": self.name,
                "trials": self.trials,
                "failures": len(self.failures),
                "seconds": time.monotonic() - self.begun,
            }
            with open(path, "a") as file:
                file.write(json.dumps(entry) + "\n")
        assert self.trials, "the row ran no trial"
        assert not self.failures, f"{len(self.failures)} of {self.trials} failed:\n" + "\n".join(self.failures[:10])


@pytest.fixture
def row(request):
    """The row named by the test's ``row`` mark."""
    made = Row(request.node.get_closest_marker("row").args[0])
    yield made
    made.close()


def pytest_configure(config):
    config.addinivalue_line("markers", "row(name): which row of the fault table the test fills")


def final_state(run):
    """What must be equal byte for byte: weights and buffers, optimizer state, metrics."""
    newest, skipped = find_checkpoint(run)
    assert newest is not None, f"no usable checkpoint: {skipped}"
    return {
        "checkpoint": newest.name,
        "weights": (newest / MODEL).read_bytes(),
        "optimizer": (newest / OPTIMIZER).read_bytes(),
        "metrics": (run / "metrics.jsonl").read_bytes(),
        "results": json.loads((run / "summary.json").read_text())["test"],
    }


def assert_same_state(run, reference):
    found = final_state(run)
    for name, value in reference.items():
        assert found[name] == value, f"{name} differs from the uninterrupted run"


@pytest.fixture(scope="session")
def references(nursery):
    """Final state and duration of the uninterrupted run of each variant."""
    folder, found = Path(tempfile.mkdtemp(prefix="bicovg-reference-", dir=memory_folder())), {}
    for name, words in VARIANTS.items():
        begun = time.monotonic()
        trial = nursery.run([*TINY, *words, "--out", folder / name])
        assert trial.code == 0, trial.output
        found[name] = (final_state(folder / name), time.monotonic() - begun)
    yield found
    shutil.rmtree(folder)
