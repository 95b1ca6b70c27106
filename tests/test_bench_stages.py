"""bench --stages: predictions from measured units, measurements where every stage has a device."""

import json
import os
from pathlib import Path

import pytest

from bicovg.bench_stages import predict, print_rows
from bicovg.cli import main
from bicovg.partition import plan_cuts, predict_speedup
from bicovg.recipes import get_recipe


def test_bench_predicts_every_number_of_stages_and_measures_those_that_have_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    words = ["--batch", "8", "--model.width", "0.25", "--steps", "2", "--repeats", "1", "--train.device", "cpu"]
    out = tmp_path / "stages.json"
    assert main(["bench", "digits", "--stages", "2", "4", "8", *words, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    seconds, pooled = found["units"]["seconds"], found["units"]["pooled"]
    assert (len(seconds), pooled) == (4, [False, True, False, False])
    assert found["units"]["bytes"] == [8 * channels * side**2 * 4 for channels, side in ((8, 8), (16, 4), (16, 4))]
    assert [row["stages"] for row in found["rows"]] == [2, 4]  # four units cannot make eight stages
    for row in found["rows"]:
        cuts = plan_cuts(seconds, row["stages"], pooled)
        assert row["cuts"] == list(cuts)
        assert row["predicted"] == predict_speedup(seconds, cuts)
    two, four = (row["measured"] for row in found["rows"])
    assert two["speedup"] == two["rounds"][0]["stages"] / two["rounds"][0]["one_process"]
    assert four is None
    printed = capsys.readouterr().out
    assert "needs 4 devices, there are 2" in printed
    assert "8 stages are left out: the network has 4 units" in printed


def test_one_stage_is_nothing_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "digits", "--stages", "9", "--batch", "8", "--train.device", "cpu"]) == 2
    assert "--stages 9 is more than the network has units, 4" in capsys.readouterr().err
    assert main(["bench", "digits", "--stages", "1"]) == 2
    assert "--stages 1 must be at least 2" in capsys.readouterr().err


def test_on_a_gpu_the_times_of_the_device_alone_have_a_prediction_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Launches take as long for a small unit as for a large one: what stages gain then says little of the units."""
    units = {
        "seconds": [0.004] * 4,
        "device_seconds": [0.004, 0.001, 0.001, 0.002],
        "pooled": [False] * 4,
        "bytes": [8, 4, 2],
    }
    row = predict(units, 2)
    assert (row["cuts"], row["predicted"]) == ([2], pytest.approx(2.0))
    assert (row["device_cuts"], row["device_predicted"]) == ([1], pytest.approx(2.0))
    row = predict(units, 4)
    assert row["predicted"] == pytest.approx(4.0)
    assert row["device_predicted"] == pytest.approx(2.0)
    print_rows(get_recipe("digits"), units, [{**row, "measured": None}], devices=1)
    said = capsys.readouterr().out
    assert "by device time alone: 8.0 ms" in said
    assert "needs 4 devices, there are 1" in said
