"""Numbers in the sentences of docs/reproduction.md are those of the records, computed here anew."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from bicovg.diagnostics import mean_gain
from bicovg.records import Record, load_records, seed_values
from bicovg.report.paper import ABLATION
from bicovg.report.record_charts import exit_means

ROOT = Path(__file__).parent.parent
STRICT, WHOLE, HGB = "tiny-imagenet-strict", "tiny-imagenet-end-to-end", "tiny-imagenet-hgb4"
PLAIN, FAL, HELD = "cifar100-strict", "cifar100-strict-fal", "cifar100-strict-holdout"
BEFORE, AFTER, SCALES, MIXED = (f"cifar100-short-{name}" for name in ("per-channel", "bicovg", "ms", "cc"))
FUSED = ("fusion", "train", "top1")


@pytest.fixture(scope="module")
def records() -> dict[str, Record]:
    return load_records(ROOT / "records")


@pytest.fixture(scope="module")
def text() -> str:
    return " ".join((ROOT / "docs" / "reproduction.md").read_text().split())


def mean(record: Record, *keys: str) -> float:
    return statistics.fmean(seed_values(record, *keys))


def exits(record: Record) -> list[float]:
    found: list[float] = record["runs"][0]["exits"]["top1"]
    return found


def last_losses(name: str) -> list[float]:
    lines = (ROOT / "records" / name / "s0" / "metrics.jsonl").read_text().splitlines()
    found: list[float] = json.loads(lines[-1])["loss"]
    return found


def test_the_table_of_what_was_wanted(records: dict[str, Record], text: str) -> None:
    strict, hgb, fal = (records[name] for name in (STRICT, HGB, FAL))
    for said in (
        f"| 56 | {mean(strict, *FUSED):.2f}, three seeds: met |",
        f"| 58.5 | {mean(strict, 'mean', 'top1'):.2f}: met; end to end on the same backbone has "
        f"{mean(records[WHOLE], 'last', 'top1'):.2f}, three seeds |",
        f"| 57 | {mean(hgb, *FUSED):.2f}, one seed: met |",
        f"| 72.0 | {mean(fal, *FUSED):.2f}, one seed of three |",
        f"| 74 | {mean(fal, 'mean', 'top1'):.2f}, one seed of three;",
    ):
        assert said in text
    assert [len(record["seeds"]) for record in (strict, hgb, fal, records[WHOLE])] == [3, 1, 1, 3]


def test_what_is_said_of_end_to_end(records: dict[str, Record], text: str) -> None:
    strict, hgb, whole = (records[name] for name in (STRICT, HGB, WHOLE))
    alone, last = mean(whole, "last", "top1"), mean(strict, "last", "top1")
    pairs = zip(seed_values(strict, "mean", "top1"), seed_values(whole, "last", "top1"), strict=True)
    lead = sorted(mine - other for mine, other in pairs)
    rules = [mean(hgb, *keys) - alone for keys in (("last", "top1"), FUSED, ("mean", "top1"))]
    for said in (
        f"has {alone:.2f} over three seeds (the paper prints 54.17",
        f"seed by seed by {lead[0]:.1f} to {lead[-1]:.1f} points, comes as far with fusion",
        f"on train ({mean(strict, *FUSED):.2f}), and stays {alone - last:.1f} points below it",
        f"by {rules[0]:.1f} points with the last exit, {rules[1]:.1f} with fusion, {rules[2]:.1f} with the mean",
        f"training loss {last_losses(WHOLE)[0]:.3f} at the end",
    ):
        assert said in text
    assert abs(mean(strict, *FUSED) - alone) < 0.3
    assert sum(0.32 < loss < 0.63 for loss in last_losses(STRICT)) > 8
    assert all(0.015 < loss < 0.035 for loss in last_losses(HGB)[-3:])


def test_what_is_said_of_goodness_and_fal(records: dict[str, Record], text: str) -> None:
    before, after, scales, plain, fal = (records[name] for name in (BEFORE, AFTER, SCALES, PLAIN, FAL))
    shallow, deep = mean_gain(exit_means(before), exit_means(after))
    old, new, bare, mixed = exits(before), exits(after), exits(scales), records[MIXED]
    points = {name: float(ABLATION["tiny-imagenet"][name][1]) for name in ("per-channel", "cc", "ms")}
    paper = {name: value - points["per-channel"] for name, value in points.items()}
    behind = [max(exits(one)) - exits(one)[-1] for one in (fal, plain)]
    for said in (
        f"the shallow half gains {shallow:.1f} and the deep half {deep:.1f}",
        f"grows from {before['runs'][0]['DA']:.0f} to {after['runs'][0]['DA']:.1f}",
        f"(by {plain['runs'][0]['DA'] - fal['runs'][0]['DA']:.2f}, where the paper has it grow",
        f"{new[0]:.1f} instead of {old[0]:.1f} % at the first, {new[1]:.1f} instead of {old[1]:.1f} at the second, "
        f"{new[-1]:.1f} instead of {old[-1]:.1f} at the last",
        f"(the last block at {bare[-1]:.1f}, the mean {mean(after, 'mean', 'top1') - mean(scales, 'mean', 'top1'):.1f} "
        "below), and projections at one scale",
        f"(fused {mean(mixed, *FUSED):.1f} instead of {mean(before, *FUSED):.1f}, the mean "
        f"{mean(mixed, 'mean', 'top1') - mean(before, 'mean', 'top1'):.1f} above, the last block "
        f"{old[-1] - exits(mixed)[-1]:.1f} below; the paper gains {paper['cc']:.1f} by them on Tiny-ImageNet, and "
        f"{paper['ms']:.1f} by the scales, both fused)",
        f"the fusion rise by {mean(fal, *FUSED) - mean(plain, *FUSED):.1f}, which is noise",
        f"The last block rises by {exits(fal)[-1] - exits(plain)[-1]:.1f} and is then {behind[0]:.1f} below "
        f"the best one instead of {behind[1]:.1f}",
        f"half of the weight ({records[HELD]['runs'][0]['fusion']['heldout']['weights'][0]:.2f})",
    ):
        assert said in text
    assert f"{mean(fal, 'mean', 'top1') - mean(plain, 'mean', 'top1'):.1f}" == "0.2"


def test_what_is_said_of_early_exit_memory_and_time(records: dict[str, Record], text: str) -> None:
    lost = {
        name: [third_saved(name, seed)["points_lost"] for seed in records[name]["seeds"]]
        for name in (STRICT, PLAIN, FAL, HELD)
    }
    cifar = [points for name in (PLAIN, FAL, HELD) for points in lost[name]]
    tiny = statistics.fmean(lost[STRICT])
    assert f"{min(cifar):.1f} to {max(cifar):.1f} points of the mean are lost on CIFAR-100 and {tiny:.1f} on" in text
    seconds = {name: seed_values(record, "wall_seconds") for name, record in records.items()}
    cifar = [value for name in (PLAIN, FAL, HELD) for value in seconds[name]]
    large = [value for name in (STRICT, WHOLE, HGB) for value in seconds[name]]
    assert [round(time / 30) / 2 for time in (min(cifar), max(cifar), min(large), max(large))] == [4.5, 6, 6.5, 9.5]
    assert "take four and a half to six minutes, Tiny-ImageNet's 90 six and a half to nine and a half" in text
    path = ROOT / "benchmarks" / "results" / "nvidia-h200-torch2.11.0-imagenet100-bicovg.json"
    rows = {row["name"]: row["memory"]["steady_bytes"] for row in json.loads(path.read_text())["rows"]}
    for schedule, order in (("interleaved", 1), ("summed", -1)):
        peaks = [rows[f"hgb-{m}-{schedule}"] for m in (1, 2, 4, 8, 16)]
        assert peaks == sorted(peaks)[::order], "take more and more memory interleaved and less and less summed"


def third_saved(name: str, seed: int) -> dict[str, Any]:
    """The point of the mean's early-exit curve at 1.5 times less compute."""
    found = json.loads((ROOT / "records" / name / f"s{seed}" / "early_exit.json").read_text())
    points: list[dict[str, Any]] = found["rules"]["mean"]["points"]
    return min(points, key=lambda point: abs(1 / point["compute"] - 1.5))
