"""What a GPU machine would compile first: kernels become machine code for an H200 here, too, by Triton's compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytest.importorskip("triton")
BROKEN = """
import triton
import triton.language as tl
from compile_kernels import only_compile

@triton.jit
def half_kernel(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), tl.load(x + tl.arange(0, SIZE)) / 2)

found = only_compile()
import torch
half_kernel[(1,)](torch.zeros(16), SIZE=16)
assert [name.split()[0] for name in found] == ["half_kernel"]
try:
    half_kernel[(1,)](torch.zeros(17), SIZE=17)
except Exception as error:
    assert "power of 2" in str(error), error
else:
    raise SystemExit("a kernel that cannot be compiled went unnoticed")
"""


def run(*words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    places = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    done = subprocess.run(
        [sys.executable, "-W", "error", *words],
        env=environment | {"PYTHONPATH": places},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_kernels_of_a_block_an_image_and_the_updates_compile_for_an_h200_without_a_warning() -> None:
    said = run(str(ROOT / "benchmarks" / "compile_kernels.py"), "--blocks", "1", "--types", "bfloat16").splitlines()
    rows = {line.split()[0] for line in said[:-1]}
    assert {"forward_kernel", "products_kernel", "gradient_kernel", "tail_sums_kernel"} <= rows
    assert {"image_kernel", "image_weight_kernel", "cross_entropy_kernel", "update_kernel"} <= rows
    assert all(" registers " in line and " bytes spilled " in line for line in said[:-1])
    assert said[-1].startswith(f"{len(said) - 1} kernels compiled for compute capability 9.0")


def test_a_kernel_that_does_not_compile_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    run(str(script))
