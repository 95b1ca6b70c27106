"""Run folders made up for the tests of the report: as large as one likes, without training anything."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from bicovg.config import to_json
from bicovg.diagnostics import decline_area, tail_retention
from bicovg.recipes import get_recipe
from bicovg.records import write_record
from bicovg.report.png import data_uri, encode_png
from bicovg.roofline import trace_layers

LIFTS = {"per-channel": -4.0, "bicovg": 0.0}


def make_run(
    path: Path,
    recipe: str = "digits",
    seed: int = 0,
    epochs: int = 6,
    *,
    done: int | None = None,
    classes: list[str] | None = None,
    lift: float = 0.0,
    about: str | None = None,
) -> Path:
    """A run folder after ``done`` of ``epochs`` epochs; finished, with summary and analysis, if that is all."""
    config = get_recipe(recipe)
    config = replace(config, seed=seed, train=replace(config.train, epochs=epochs), about=about or config.about)
    path.mkdir(parents=True)
    (path / "config.json").write_text(to_json(config))
    (path / "env.json").write_text(json.dumps({"torch": "2.13.0", "device": "cpu", "command": "bicovg train"}))
    exits = [layer.index for layer in trace_layers(config) if layer.goodness]
    finished = epochs if done is None else done
    for epoch in range(finished):
        append_epoch(path, epoch, epochs, exits, seed, lift)
    if finished == epochs:
        (path / "summary.json").write_text(json.dumps(_summary(config, exits, seed, lift)))
        names = classes or [str(k) for k in range(config.data.num_classes)]
        (path / "analysis.json").write_text(json.dumps(_analysis(names, len(exits), seed)))
    return path


def accuracy(block: int, share: float, seed: int, lift: float) -> float:
    """A smooth curve that grows with time and depth, never above 100."""
    noise = random.Random(f"{block}-{share:.4f}-{seed}").uniform(-0.4, 0.4)
    return min(max(78 - 40 * math.exp(-0.5 * block) + lift - 45 * math.exp(-6 * share) + noise, 0.0), 100.0)


def append_epoch(path: Path, epoch: int, epochs: int, exits: list[int], seed: int = 0, lift: float = 0.0) -> None:
    """One more line in metrics.jsonl and timing.jsonl, as the trainer writes them."""
    share = (epoch + 1) / epochs
    top1 = [accuracy(block, share, seed, lift) for block in exits]
    metrics = {
        "epoch": epoch,
        "step": 24 * (epoch + 1),
        "lr": 1e-5 + 1e-3 * (1 + math.cos(math.pi * share)) / 2,
        "loss": [3 * math.exp(-2 * share - 0.1 * block) for block in exits],
        "split": "test",
        "top1": top1,
        "top5": [min(100.0, value + 12) for value in top1],
        "mean_top1": min(100.0, max(top1) + 1.5),
    }
    timing = {
        "epoch": epoch,
        "images_per_second": 900.0 + seed + epoch % 7,
        "train_seconds": 1.5,
        "eval_seconds": 0.1,
        "loader_wait_share": 0.01,
        "peak_memory_bytes": 450_000_000,
    }
    for name, record in (("metrics.jsonl", metrics), ("timing.jsonl", timing)):
        with (path / name).open("a") as file:
            file.write(json.dumps(record) + "\n")


def _both(top1: float) -> dict[str, float]:
    return {"top1": top1, "top5": min(100.0, top1 + 12)}


def _summary(config: Any, exits: list[int], seed: int, lift: float) -> dict[str, Any]:
    top1 = [accuracy(block, 1.0, seed, lift) for block in exits]
    best = max(range(len(top1)), key=top1.__getitem__)
    raw = [math.exp(0.4 * i) for i in range(len(exits))]
    weights = [value / sum(raw) for value in raw]
    count = sum(weights) ** 2 / sum(w * w for w in weights)
    fused = {**_both(max(top1) + 0.7), "weights": weights, "N_eff": count} if len(exits) > 1 else None
    return {
        "recipe": config.recipe,
        "seed": seed,
        "scope": config.model.scope,
        "data": config.data.name,
        "epochs": config.train.epochs,
        "exit_blocks": exits,
        "test": {
            "exits": {"top1": top1, "top5": [min(100.0, v + 12) for v in top1]},
            "last": _both(top1[-1]),
            "best_test_chosen": {"exit": best, **_both(top1[best])},
            "best_heldout_chosen": None,
            "mean": _both(min(100.0, max(top1) + 1.5)),
            "diagnostics": {"DA": 1.0, "TR": 0.99},
        },
        "heldout_top1": None,
        "fusion": {"train": fused, "heldout": None, "augmented": None},
        "parameters": 165_528,
        "engine": "eager",
        "wall_seconds": 321.0,
    }


def _analysis(classes: list[str], exits: int, seed: int) -> dict[str, Any]:
    """Every class right three times in four, the rest taken for its neighbours."""
    K, draw = len(classes), random.Random(seed)
    confusion = [[0] * K for _ in range(K)]
    for k in range(K):
        confusion[k][k] = 75
        for _ in range(25):
            confusion[k][(k + draw.choice((1, 2, 5))) % K] += 1
    picture = data_uri(encode_png(bytes(draw.randrange(256) for _ in range(16 * 16 * 3)), 16, 16, 3))
    mistakes = [
        {
            "index": 7 * i,
            "true": i % K,
            "predicted": (i + 1) % K,
            "confidence": 0.99 - 0.01 * i,
            "true_confidence": 0.005,
            "picture": picture,
        }
        for i in range(24)
    ]
    return {
        "head": "mean of blocks",
        "classes": classes,
        "confusion": confusion,
        "class_top1": [[40 + (7 * k + 3 * e) % 60 for k in range(K)] for e in range(exits)],
        "mistakes": mistakes,
    }


def make_record(folder: Path, run: Path) -> Path:
    summary = json.loads((run / "summary.json").read_text())
    top1 = summary["test"]["exits"]["top1"]
    summary["test"]["diagnostics"] = {"DA": decline_area(top1), "TR": tail_retention(top1)}
    (run / "summary.json").write_text(json.dumps(summary))
    write_record([run], folder)
    return folder


def change_config(run: Path, section: str, name: str, value: object) -> None:
    config = json.loads((run / "config.json").read_text())
    config[section][name] = value
    (run / "config.json").write_text(json.dumps(config))
