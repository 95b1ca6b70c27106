"""What sentences of docs are computed from: names of records, and numbers of records and benchmark files."""

import json
import statistics
from pathlib import Path
from typing import Any

from bicovg.records import Record, seed_values

ROOT = Path(__file__).parent.parent
STRICT, WHOLE, HGB = "tiny-imagenet-strict", "tiny-imagenet-end-to-end", "tiny-imagenet-hgb4"
LARGE_FAL = "tiny-imagenet-strict-fal"
PLAIN, FAL, HELD = "cifar100-strict", "cifar100-strict-fal", "cifar100-strict-holdout"
SMALL_WHOLE, TUNED = "cifar100-end-to-end", "cifar100-end-to-end-tuned"
LARGE_HELD, GROUPED, SMALL_HGB = "tiny-imagenet-strict-holdout", "cifar100-grouped", "cifar100-hgb4"
SHARED = {  # not alone on the card
    (SMALL_WHOLE, 0),
    (SMALL_WHOLE, 2),
    (TUNED, 0),
    (PLAIN, 1),
    (LARGE_FAL, 0),
    (HGB, 0),
    (WHOLE, 1),
    (LARGE_HELD, 0),
}
BEFORE, AFTER, SCALES, MIXED, ALIGNED = (
    f"cifar100-short-{name}" for name in ("per-channel", "bicovg", "ms", "cc", "bicovg-fal")
)
ONE_LOSS, DEEP, PAIRS, BARE = (f"cifar100-short-{name}" for name in ("bp", "bp-deep", "hgb2", "no-norm"))
FINE, COARSE, FLOAT = (f"cifar100-short-{name}" for name in ("r4", "r16", "float32"))
LARGE_BEFORE, LARGE_AFTER, LARGE_SCALES, ONE_CLIP = (
    f"tiny-imagenet-short-{name}" for name in ("per-channel", "bicovg", "ms", "clip-global")
)
FUSED = ("fusion", "train", "top1")
RULES = (("mean", "top1"), FUSED, ("last", "top1"))
SETTINGS = ("as-is", "lr1e-3-wd0.05", "lr1e-3-wd0.5", "sgd-lr0.05-wd5e-4")  # of end to end
IN_PARTS = (("strict", 2), ("strict", 4), ("end-to-end", 4))
ROOF = ("limit_images_per_second", "megabytes_per_image")


def words(path: str) -> str:
    """A page's text without its line breaks."""
    return " ".join((ROOT / path).read_text().split())


def mean(record: Record, *keys: str) -> float:
    return statistics.fmean(seed_values(record, *keys))


def exits(record: Record) -> list[float]:
    found: list[float] = record["runs"][0]["exits"]["top1"]
    return found


def last_losses(name: str, seed: int = 0) -> list[float]:
    lines = (ROOT / "records" / name / f"s{seed}" / "metrics.jsonl").read_text().splitlines()
    found: list[float] = json.loads(lines[-1])["loss"]
    return found


def gains(one: Record, other: Record) -> list[float]:
    """Points of the mean of exits, of fusion and of the last exit."""
    return [mean(one, *keys) - mean(other, *keys) for keys in RULES]


def bench_file(recipe: str) -> dict[str, Any]:
    path = ROOT / "benchmarks" / "results" / f"nvidia-h200-torch2.11.0-{recipe}.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def speed(row: dict[str, Any]) -> float:
    return float(row["images_per_second"]["median"])


def third_saved(name: str, seed: int) -> dict[str, Any]:
    """The point of the mean's early-exit curve at 1.5 times less compute."""
    found = json.loads((ROOT / "records" / name / f"s{seed}" / "early_exit.json").read_text())
    points: list[dict[str, Any]] = found["rules"]["mean"]["points"]
    return min(points, key=lambda point: abs(1 / point["compute"] - 1.5))
