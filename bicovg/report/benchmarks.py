"""Speed and memory against backprop, from the files that ``bicovg bench`` writes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bicovg.bench_cases import BASELINE
from bicovg.bench_report import FOLDER
from bicovg.recipes import RECIPES, get_recipe
from bicovg.report.charts import WIDE, Chart, Series, bar_chart
from bicovg.report.collect import Json, RunData
from bicovg.report.scene import BARS, STRONG

SHORT = {
    "strict": "strict",
    "strict-fal": "strict + FAL",
    "strict-accumulate-4": "strict in 4",
    "hgb-2-interleaved": "hgb 2",
    "hgb-4-interleaved": "hgb 4",
    BASELINE: "end-to-end",
    f"{BASELINE}-checkpointed": "checkpointed",
    f"{BASELINE}-accumulate-2": "in 2 parts",
    f"{BASELINE}-accumulate-4": "in 4 parts",
    "classic": "classic VGG",
}


def bench_charts(runs: Sequence[RunData], folder: Path = FOLDER) -> list[Chart]:
    """Images a second and steady memory of the runs' backbones, where a benchmark of them lies in ``folder``."""
    charts = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        result = read_bench(path)
        if result is not None and any(_same_backbone(result["recipe"], run.config) for run in runs):
            charts += _charts(result, path.stem)
    return charts


def read_bench(path: Path) -> dict[str, Any] | None:
    """A benchmark file, or None for a file of another kind."""
    try:
        found = json.loads(path.read_text())
        usable = found["recipe"] in RECIPES and isinstance(found["rows"], list) and isinstance(found["runs"], list)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if usable else None


def _same_backbone(recipe: str, config: Json) -> bool:
    benched = get_recipe(recipe)
    return bool(
        list(benched.model.channels) == config["model"].get("channels")
        and benched.data.image_size == config["data"]["image_size"]
    )


def _charts(result: dict[str, Any], name: str) -> list[Chart]:
    rows = [row for row in result["rows"] if row["name"] in SHORT and row["status"] == "ok"]
    if not any(row["name"] == BASELINE for row in rows):
        return []
    machine = next(entry for entry in result["runs"] if entry["id"] == rows[0]["run"])
    where = f"{machine.get('gpu') or 'CPU'}, torch {machine['torch']}, {rows[0]['precision']}"
    note = f"{result['recipe']} at {rows[0]['image_size']} px, batch {rows[0]['batch_size']}, {where}."
    if any("accumulate" in row["name"] for row in rows):
        note += " In 2 or 4: the batch cut into so many micro-batches; without another word, end-to-end's."
    labels = [SHORT[row["name"]] for row in rows]
    inks = [STRONG if row["scope"] == "end-to-end" else BARS for row in rows]
    speeds = [row["images_per_second"]["median"] for row in rows]
    plots = [("speed", "Training speed against backprop", "images / s", speeds)]
    if all(row["memory"]["steady_bytes"] for row in rows):
        peaks = [(row["memory"]["steady_bytes"] - (row["memory"]["data_bytes"] or 0)) / 1e9 for row in rows]
        plots.append(("memory", "Peak memory against backprop", "GB", peaks))
    elif all(row["memory"]["saved_bytes"] for row in rows):
        saved = [row["memory"]["saved_bytes"] / 1e6 for row in rows]
        plots.append(("memory", "Kept for the backward pass, against backprop", "MB", saved))
    options: dict[str, Any] = {"x_label": "", "note": note, "width": WIDE, "inks": inks}
    return [
        bar_chart(f"bench-{kind}-{name}", title, labels, [Series(unit, values)], y_label=unit, **options)
        for kind, title, unit, values in plots
    ]
