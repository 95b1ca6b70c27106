"""On a GPU: the guard and the checkpoints of the captured engine, and what they cost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def measure(*words):
    """In a process of its own: this one checks shapes at every call, which the compiler cannot trace."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / "gpu.py"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check_what_holds_anywhere(result):
    planted = result["planted"]
    assert planted["kept_bits"]
    assert planted["message"].startswith("the loss or gradient of block 2 was not finite at step ")
    assert f"at step {planted['first_step']};" in planted["message"]
    assert len({(one["scope"], one["schedule"]) for one in result["resumed"]}) == 8
    for resumed in result["resumed"]:
        for name in ("model.safetensors", "optimizer.safetensors", "metrics.jsonl"):
            assert resumed[name], resumed


def test_the_measuring_script_works_on_any_device():
    check_what_holds_anywhere(measure("small"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_guard_costs_under_one_percent_and_saving_under_two():
    result = measure()
    print(json.dumps(result))
    check_what_holds_anywhere(result)
    assert {resumed["engine"] for resumed in result["resumed"]} == {"graph"}
    for guard in ("guard", "guard_without_clip"):
        assert result[guard]["share"] < 0.01, result[guard]
    assert result["saving"]["share"] < 0.02, result["saving"]
