"""Runs the kernel tests in Triton's interpreter, and its compiler for a GPU, in processes of their own.

The interpreter must be chosen before Triton is first imported, and must not be seen by any other test: hence a
process. The cases are in ``kernel_cases.py``, ``block_cases.py``, ``unit_cases.py`` and ``update_cases.py``;
``TRITON_INTERPRET=1 pytest FILE`` runs them by hand, and on a machine with a GPU ``pytest FILE`` runs them there.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@NEEDS_TRITON
def test_kernels_equal_their_definitions_in_the_interpreter() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/kernel_cases.py",
        "tests/block_cases.py",
        "tests/unit_cases.py",
        "tests/update_cases.py",
    ]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def compile_for_a_gpu(cache: Path, *words: str) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    env |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", str(ROOT / "tests" / "compile_kernels.py"), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@NEEDS_TRITON
def test_every_kernel_compiles_for_a_gpu_and_waits_for_its_matrix_products(tmp_path: Path) -> None:
    """The interpreter takes what the compiler refuses, and never pipelines."""
    found = compile_for_a_gpu(tmp_path)
    defined = {
        name
        for path in (ROOT / "bicovg" / "kernels").glob("*_triton.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    assert set(found["seen"]) == defined
    assert found["complaints"] == []


@NEEDS_TRITON
def test_a_launch_shape_that_does_not_wait_is_noticed(tmp_path: Path) -> None:
    (complaint,) = compile_for_a_gpu(tmp_path, "racy")["complaints"]
    assert complaint.startswith("forward_kernel goes on while a matrix product is in flight")


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
