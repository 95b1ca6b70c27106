"""Set-up shared by all tests: one thread, fixed seeds, shapes checked at every call of a public function."""

import functools
import os
import signal
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from hypothesis import settings

from bicovg.gpu_memory import ALLOCATORS, WORKSPACE

# A shell that starts the suite in the background ignores interrupts, and processes under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Only these modules are instrumented: a Triton kernel must reach its compiler as it was written.
SHAPE_CHECKED = [
    "bicovg.goodness",
    "bicovg.kernels.goodness_cpu",
    "bicovg.layers",
    "bicovg.draws",
    "bicovg.blocks",
    "bicovg.networks",
    "bicovg.step",
    "bicovg.fusion",
    "bicovg.diagnostics",
    "bicovg.data.augment",
    "bicovg.data.crops",
]
imported_early = [name for name in SHAPE_CHECKED if name in sys.modules]
assert not imported_early, f"imported before the shape checks were installed: {imported_early}"
jaxtyping.install_import_hook(SHAPE_CHECKED, "beartype.beartype")

# Bit-equality tests compare runs at a fixed thread count.
torch.set_num_threads(1)

settings.register_profile("bicovg", deadline=None, max_examples=25)
settings.register_profile("bicovg-ci", settings.get_profile("bicovg"), derandomize=True, print_blob=True)
settings.load_profile("bicovg-ci" if os.environ.get("CI") else "bicovg")


@pytest.fixture(autouse=True)
def _seed_torch(request: pytest.FixtureRequest) -> None:
    """A seed of its own for each test, so that neither order nor selection changes what a test sees."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


MEMORY_SETTINGS = {name: os.environ.get(name) for name in (WORKSPACE, *ALLOCATORS)}


@pytest.fixture(autouse=True)
def _keep_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run, also one of a session's fixture, asked of torch's memory is not there for the next test."""
    for name, value in MEMORY_SETTINGS.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


SMALL = ["digits", "--model.channels", "8,8,8,8", "--train.epochs", "2", "--data.holdout", "0.1"]


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small digits run of two epochs, made by the command line; tests that change it work on a copy."""
    from bicovg.cli import main

    run = tmp_path_factory.mktemp("runs") / "small"
    assert main(["train", *SMALL, "--out", str(run)]) == 0
    return run


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Makes a finished run folder as the trainer leaves it, of a seed and with settings of one's own."""
    from record_cases import make_finished

    return functools.partial(make_finished, tmp_path / "runs")


@pytest.fixture(scope="session")
def records() -> dict[str, dict[str, Any]]:
    """The records of this checkout."""
    from prose_cases import ROOT

    from bicovg.report.cells import read_records

    return read_records(ROOT)


@pytest.fixture(scope="session")
def text() -> str:
    """docs/reproduction.md without its line breaks."""
    from prose_cases import words

    return words("docs/reproduction.md")
