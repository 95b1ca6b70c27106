"""A finished run of made-up numbers, and ways to spoil it: what tests of records begin with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bicovg.config import Config, override, to_json
from bicovg.diagnostics import decline_area, effective_layers, tail_retention
from bicovg.recipes import get_recipe

TOP1, TOP5 = [40.0, 55.5, 54.0, 53.0], [70.0, 80.0, 81.0, 79.0]
WEIGHTS = [0.1, 0.2, 0.3, 0.4]
Maker = Callable[..., Path]


def make_summary(config: Config) -> dict[str, Any]:
    fused = {"top1": 57.0, "top5": 83.0, "weights": WEIGHTS, "N_eff": effective_layers(WEIGHTS)}
    return {
        "recipe": config.recipe,
        "seed": config.seed,
        "scope": config.model.scope,
        "epochs": config.train.epochs,
        "exit_blocks": [0, 1, 2, 3],
        "test": {
            "exits": {"top1": TOP1, "top5": TOP5},
            "last": {"top1": 53.0, "top5": 79.0},
            "best_test_chosen": {"exit": 1, "top1": 55.5, "top5": 80.0},
            "best_heldout_chosen": None,
            "mean": {"top1": 58.0 + config.seed, "top5": 84.0},
            "diagnostics": {"DA": decline_area(TOP1), "TR": tail_retention(TOP1)},
        },
        "fusion": {"train": fused, "heldout": None, "augmented": None},
        "parameters": 1234,
        "engine": "graph",
        "wall_seconds": 61.5,
    }


def last_epoch(top1: list[float], seed: int = 0) -> dict[str, Any]:
    accuracies = {"split": "test", "top1": top1, "top5": TOP5, "mean_top1": 58.0 + seed}
    return {"epoch": 1, "lr": 0.1, "loss": [1.0] * 4, **accuracies}


def make_finished(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A finished run folder as the trainer leaves it."""
    config = override(get_recipe("digits"), {"seed": seed, "train.epochs": 2, **changes})
    path = folder / f"s{seed}-{len(list(folder.glob('*')))}"
    path.mkdir(parents=True)
    (path / "config.json").write_text(to_json(config))
    (path / "summary.json").write_text(json.dumps(make_summary(config)))
    env = {"commit": "abc+", "torch": "2.11.0", "gpu": "NVIDIA H200", "command": "bicovg train --out /mnt/x/run7"}
    (path / "env.json").write_text(json.dumps(env))
    metrics = [{"epoch": 0, "lr": 0.1, "loss": [1.0] * 4}, last_epoch(TOP1, seed)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    idle = {"train_seconds": 1.0, "loader_wait_share": 0.0}
    timing = [{"epoch": e, "images_per_second": v, "peak_memory_bytes": e} for e, v in ((0, 10.0), (1, 30.0))]
    timing = [{**line, **idle} for line in timing]
    (path / "timing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in timing))
    return path


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))
