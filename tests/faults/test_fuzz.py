"""Thousands of mutated headers, manifests and configs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from settings import TINY, VARIANTS, count

HERE = Path(__file__).parent


@pytest.mark.row("fuzzed checkpoint headers, manifests and configs")
def test_nothing_mutated_crashes_hangs_or_fills_the_memory(nursery, scratch, row):
    run = scratch / "run"
    trial = nursery.run([*TINY, *VARIANTS["strict-interleaved"], "--out", run])
    assert trial.code == 0, trial.output
    wanted = count(10_000, 600)
    done = subprocess.run(
        [sys.executable, str(HERE / "fuzz.py"), str(run), str(wanted), "0"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    row.trials, row.failures = result["tried"], result["failures"]
    assert result["tried"] == wanted
    assert result["refused"] > 0.5 * wanted
    assert result["slowest"] < 1.0, f"one case took {result['slowest']:.1f} s"
    assert result["megabytes"] < 100, f"{result['megabytes']:.0f} MB more than before"
