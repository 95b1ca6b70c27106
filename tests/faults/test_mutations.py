"""The suite itself is tested: each way to break the save path makes it fail."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MUTANTS
from settings import count

ROOT = Path(__file__).parents[2]


def start_suite(folder, tests):
    """The named tests in the copy at ``folder``."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("BICOVG_")}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def copy_tree(folder):
    for name in ("bicovg", "tests", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        ignored = {"ignore": shutil.ignore_patterns("__pycache__")} if (ROOT / name).is_dir() else {}
        copy(ROOT / name, folder / name, **ignored)


def apply(folder, file, old, new):
    path = folder / file
    source = path.read_text()
    assert source.count(old) == 1, f"{file} has changed: the mutant no longer fits"
    path.write_text(source.replace(old, new))


@pytest.mark.row("mutation check: the save path broken on purpose is noticed")
def test_the_suite_fails_when_the_save_path_is_broken(scratch, row):
    chosen = MUTANTS[: count(len(MUTANTS), 3)]
    running = []
    for number, (_, file, old, new, test, _) in enumerate(chosen):
        folder = scratch / f"mutant-{number}"
        folder.mkdir()
        copy_tree(folder)
        apply(folder, file, old, new)
        running.append(start_suite(folder, [test]))
    for (label, *_, complaint), process in zip(chosen, running, strict=True):
        with process:
            output = process.communicate(timeout=300)[0]
        with row.trial(label):
            assert process.returncode == 1, f"the suite did not notice:\n{output[-1500:]}"
            assert complaint in output, f"it failed for another reason:\n{output[-1500:]}"
