"""Charts that hold several runs at once, one line or one set of bars per run; and those that every page has."""

from collections.abc import Callable, Sequence
from typing import Any

from bicovg.diagnostics import mean_gain
from bicovg.report.charts import Chart, Series, bar_chart, line_chart
from bicovg.report.collect import Json, RunData
from bicovg.report.pictures import early_exit_curves, fusion_weights
from bicovg.report.scene import run_dash, run_ink


def compared_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Accuracies of several runs, one beside the other."""
    found = [final_lines(runs), mean_curves(runs), gains(runs), fusion_weights(runs), early_exit_curves(runs)]
    return [chart for chart in found if chart is not None]


def progress_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Learning rate, speed and memory of one run or more."""
    found = [learning_rates(runs), speeds(runs), memories(runs)]
    return [chart for chart in found if chart is not None]


def final_lines(runs: Sequence[RunData]) -> Chart | None:
    """Final top-1 per block, one line per run."""
    done = [run for run in runs if run.summary]
    if not done:
        return None
    blocks = sorted({block for run in done for block in run.exits})
    series = []
    for index, run in enumerate(runs):
        if run.summary:
            top1 = dict(zip(run.exits, run.summary["test"]["exits"]["top1"], strict=True))
            series.append(Series(run.label, [top1.get(b) for b in blocks], run_ink(index), run_dash(index)))
    return line_chart(
        "final-by-block",
        "Final accuracy per block",
        blocks,
        series,
        x_label="block",
        y_label="top-1, %",
        note="On test images.",
        percent=True,
        markers=True,
    )


def mean_curves(runs: Sequence[RunData]) -> Chart | None:
    """Top-1 of the mean of the blocks over the epochs, one line per run."""
    return _over_epochs(
        runs,
        "mean-accuracy",
        "Accuracy of the mean of blocks",
        lambda record: record.get("mean_top1"),
        y_label="top-1, %",
        note="On " + " and ".join(sorted({f"{run.split} images" for run in runs})) + ", after each epoch.",
        percent=True,
    )


def gains(runs: Sequence[RunData]) -> Chart | None:
    """What every later run gains over the first, block by block."""
    first = runs[0]
    rivals = [
        (i, run) for i, run in enumerate(runs) if i and run.summary and first.summary and run.exits == first.exits
    ]
    if not rivals or first.summary is None:
        return None
    base, series, notes = first.summary["test"]["exits"]["top1"], [], []
    for index, run in rivals:
        assert run.summary is not None
        top1 = run.summary["test"]["exits"]["top1"]
        shallow, deep = mean_gain(base, top1)
        notes.append(f"{run.label}: SG {shallow:+.2f}, DG {deep:+.2f}")
        series.append(Series(run.label, [b - a for a, b in zip(base, top1, strict=True)], run_ink(index)))
    return bar_chart(
        "gain-by-block",
        f"Gain per block over {first.label}",
        [str(block) for block in first.exits],
        series,
        y_label="points of top-1",
        note="; ".join(notes) + " (mean gain of the shallow and of the deep half, in points).",
    )


def learning_rates(runs: Sequence[RunData]) -> Chart | None:
    return _over_epochs(
        runs, "learning-rate", "Learning rate", lambda record: record["lr"], note="At the end of each epoch."
    )


def speeds(runs: Sequence[RunData]) -> Chart | None:
    return _over_epochs(
        runs,
        "speed",
        "Training speed",
        lambda record: record["images_per_second"],
        timing=True,
        y_label="images / s",
        note="Training steps only, evaluation not counted.",
        zero=True,
    )


def memories(runs: Sequence[RunData]) -> Chart | None:
    kinds = {str(run.env.get("device")) for run in runs}
    notes = {"cuda": "Allocated on the GPU.", "cpu": "Resident peak of the process."}
    note = " ".join(text for kind, text in notes.items() if kind in kinds)
    return _over_epochs(
        runs,
        "memory",
        "Peak memory",
        lambda record: record["peak_memory_bytes"] / 1e9,
        timing=True,
        y_label="GB",
        note=note,
        zero=True,
    )


def _over_epochs(
    runs: Sequence[RunData],
    name: str,
    title: str,
    pick: Callable[[Json], float | None],
    timing: bool = False,
    **options: Any,
) -> Chart | None:
    """One line per run of a number that every epoch's record holds."""
    tables = []
    for run in runs:
        records = run.timing if timing else run.metrics
        tables.append({record["epoch"] + 1: pick(record) for record in records if pick(record) is not None})
    epochs = sorted({epoch for table in tables for epoch in table})
    if not epochs:
        return None
    series = [
        Series(run.label, [table.get(epoch) for epoch in epochs], run_ink(i), run_dash(i))
        for i, (run, table) in enumerate(zip(runs, tables, strict=True))
        if table
    ]
    return line_chart(name, title, epochs, series, **options)
