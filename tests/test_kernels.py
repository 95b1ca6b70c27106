"""Runs the kernel tests in Triton's interpreter, in a process of its own.

The interpreter must be chosen before Triton is first imported, and must not be seen by any other test: hence a
process. The cases are in ``kernel_cases.py``, ``unit_cases.py`` and ``update_cases.py``; ``TRITON_INTERPRET=1 pytest
FILE`` runs them by hand, and on a machine with a GPU ``pytest FILE`` runs them there.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_equal_their_definitions_in_the_interpreter() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/kernel_cases.py",
        "tests/unit_cases.py",
        "tests/update_cases.py",
    ]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_kernels_import_without_triton() -> None:
    code = (
        "import sys, torch; sys.modules['triton'] = None\n"
        "import importlib.util; found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'triton' else found(name, *a)\n"
        "from bicovg.kernels.goodness import fused_available\n"
        "import bicovg.kernels.tail\n"
        "assert not fused_available(torch.zeros(1, 1, 1, 1))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
