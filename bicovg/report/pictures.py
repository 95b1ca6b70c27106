"""Which charts a run gives. The page and the figures draw the same ones."""

import re
from collections.abc import Sequence
from typing import Any

from bicovg.calibration import is_calibrated
from bicovg.diagnostics import effective_layers
from bicovg.report.charts import WIDE, WIDTH, Chart, Rule, Series, bar_chart, grid_chart, line_chart
from bicovg.report.collect import RunData
from bicovg.report.scene import BARS, STRONG, Ink, depth_ink, run_dash, run_ink

MEAN = Ink("#000000", "#ffffff")

PREDICTS_FROM = {"mean": "mean of blocks so far", "own": "the block alone", "fused": "fusion of blocks so far"}


def slug(text: str) -> str:
    """A label as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "run"


def run_charts(run: RunData) -> list[Chart]:
    """Charts about one run alone, in the order of the page; those without data are left out."""
    found = [accuracy_curves(run), final_bars(run), loss_curves(run), fusion_weights([run]), early_exit_curves([run])]
    return [chart for chart in found if chart is not None]


def image_charts(run: RunData) -> list[Chart]:
    """Charts made from the test images."""
    if run.analysis is None:
        return []
    return [confusion_grid(run, run.analysis), class_grid(run, run.analysis)]


def accuracy_curves(run: RunData, peers: Sequence[RunData] = ()) -> Chart | None:
    """Top-1 of every exit over the epochs: the picture of depth at work. Shares its axis with ``peers``."""
    records = run.evaluated
    if not records:
        return None
    lines = _exit_lines(run, [record["top1"] for record in records])
    if len(run.exits) > 1:
        lines.append(Series("mean", [record["mean_top1"] for record in records], MEAN, (5, 3), 2.0))
    where = "held-out training images" if run.split == "heldout" else f"{run.split} images"
    return line_chart(
        f"accuracy-by-block-{slug(run.label)}",
        "Accuracy per block",
        [record["epoch"] + 1 for record in records],
        lines,
        y_label="top-1, %",
        note=f"Top-1 of every exit on {where}, after each epoch.",
        percent=True,
        span=[value for peer in peers for record in peer.evaluated for value in record["top1"]],
    )


def loss_curves(run: RunData, peers: Sequence[RunData] = ()) -> Chart | None:
    """Training loss of every exit over the epochs. Shares its axis with ``peers``."""
    if not run.metrics:
        return None
    lines = _exit_lines(run, [record["loss"] for record in run.metrics])
    return line_chart(
        f"loss-by-block-{slug(run.label)}",
        "Loss per block",
        [record["epoch"] + 1 for record in run.metrics],
        lines,
        y_label="cross-entropy (log)",
        note="Mean training loss of every exit, with augmentation and dropout.",
        log=True,
        span=[value for peer in peers for record in peer.metrics for value in record["loss"]],
    )


def _exit_lines(run: RunData, rows: Sequence[Sequence[float]]) -> list[Series]:
    count = len(run.exits)
    return [
        Series(f"block {block}", [row[i] for row in rows], depth_ink(i, count)) for i, block in enumerate(run.exits)
    ]


def final_bars(run: RunData) -> Chart | None:
    """Final top-1 of every exit, with what best, mean and fused make of them."""
    if run.summary is None:
        return None
    top1 = run.summary["test"]["exits"]["top1"]
    rules = []
    if len(top1) > 1:
        rules = [Rule("best (test-chosen)", max(top1), STRONG), Rule("mean", run.summary["test"]["mean"]["top1"], MEAN)]
    for name, record in run.summary["fusion"].items():
        if record:
            rules.append(Rule(f"fused on {name}", record["top1"], BARS, (2, 2)))
    return bar_chart(
        f"final-by-block-{slug(run.label)}",
        "Final accuracy per block",
        [str(block) for block in run.exits],
        [Series("top-1", top1)],
        y_label="top-1, %",
        note="On test images. The best block is chosen on those same images, so it flatters itself.",
        percent=True,
        rules=rules,
        inks=[depth_ink(i, len(top1)) for i in range(len(top1))],
    )


def fusion_weights(runs: Sequence[RunData]) -> Chart | None:
    """Logistic Fusion's weight on every exit, and how many exits that amounts to."""
    chosen: list[tuple[str, list[int], list[float]]] = []
    for run in runs:
        fits = {name: fit for name, fit in (run.summary or {"fusion": {}})["fusion"].items() if fit}
        for name, fit in fits.items() if len(runs) == 1 else list(fits.items())[:1]:
            label = f"fitted on {name}" if len(runs) == 1 else f"{run.label}, on {name}"
            chosen.append((label, run.exits, fit["weights"]))
    if not chosen:
        return None
    counts = [f"{label}: N_eff {effective_layers(weights):.2f} of {len(weights)}" for label, _, weights in chosen]
    name = "fusion-weights" if len(runs) > 1 else f"fusion-weights-{slug(runs[0].label)}"
    return weight_bars(name, "Fusion weights", chosen, "; ".join(counts) + ".")


def weight_bars(
    name: str, title: str, chosen: Sequence[tuple[str, list[int], list[float]]], note: str = "", width: float = WIDTH
) -> Chart:
    """Bars of (label, exit blocks, weights), one set of each."""
    blocks = sorted({block for _, exits, _ in chosen for block in exits})
    series = []
    for index, (label, exits, weights) in enumerate(chosen):
        by_block = dict(zip(exits, weights, strict=True))
        series.append(Series(label, [by_block.get(b) for b in blocks], run_ink(index)))
    if width == WIDTH and len(series) * len(blocks) > 40:
        width = WIDE
    return bar_chart(name, title, [str(block) for block in blocks], series, y_label="weight", note=note, width=width)


def early_exit_curves(runs: Sequence[RunData]) -> Chart | None:
    """Accuracy against compute, as the confidence threshold moves."""
    chosen: list[tuple[str, Any]] = []
    for run in runs:
        for rule, curve in (run.early_exit or {"rules": {}})["rules"].items():
            if len(runs) == 1:
                chosen.append((PREDICTS_FROM.get(rule, rule), curve))
            elif rule == "mean":
                chosen.append((run.label, curve))
    if not chosen:
        return None
    source = next(run.early_exit for run in runs if run.early_exit)
    fitted = any(is_calibrated(curve["temperatures"]) for _, curve in chosen)
    confidences = f"temperatures fitted on {source['calibrated_on']} images" if fitted else "confidences not calibrated"
    note = f"Stops at the first block confident enough; {confidences}, measured on {source['measured_on']} images."
    name = "early-exit" if len(runs) > 1 else f"early-exit-{slug(runs[0].label)}"
    return compute_curves(name, "Early exit", [(label, curve["curve"]) for label, curve in chosen], note)


def compute_curves(
    name: str, title: str, chosen: Sequence[tuple[str, list[dict[str, Any]]]], note: str = "", width: float = WIDTH
) -> Chart:
    """Accuracy against compute of (label, points), one line of each."""
    costs = sorted({100 * point["compute"] for _, points in chosen for point in points})
    series = []
    for index, (label, points) in enumerate(chosen):
        values = {100 * point["compute"]: point["top1"] for point in points}
        series.append(Series(label, [values.get(cost) for cost in costs], run_ink(index), run_dash(index)))
    return line_chart(
        name,
        title,
        costs,
        series,
        x_label="multiply-adds, % of the whole network",
        y_label="top-1, %",
        note=note,
        percent=True,
        width=width,
    )


def confusion_grid(run: RunData, analysis: dict[str, Any]) -> Chart:
    """True class against predicted class, in percent of the true class."""
    shares = [[100 * count / max(1, sum(row)) for count in row] for row in analysis["confusion"]]
    return grid_chart(
        f"confusion-{slug(run.label)}",
        "Confusion matrix",
        analysis["classes"],
        analysis["classes"],
        shares,
        row_label="true class",
        column_label="predicted class",
        note=f"Prediction: {analysis['head']}. Percent of each true class; the diagonal is right.",
        square=True,
    )


def class_grid(run: RunData, analysis: dict[str, Any]) -> Chart:
    """Accuracy of every class at every block, hardest classes on top."""
    columns = list(zip(*analysis["class_top1"], strict=True))
    order = sorted(range(len(columns)), key=lambda k: (columns[k][-1], k))
    low = min(90.0, 10.0 * (min(map(min, columns)) // 10))
    return grid_chart(
        f"classes-by-block-{slug(run.label)}",
        "Accuracy of each class by block",
        [analysis["classes"][k] for k in order],
        [str(block) for block in run.exits],
        [list(columns[k]) for k in order],
        row_label="class, hardest first",
        column_label="block",
        note=f"Top-1 on test images: clear at {low:.0f} %, full colour at 100 %. Hardest at the last block first.",
        low=low,
        ink=Ink("#0f7b62", "#4fd1ae"),
    )
