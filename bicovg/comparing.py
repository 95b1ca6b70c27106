"""``bicovg compare``: accuracy per block of finished runs side by side, several seeds as mean and spread."""

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from bicovg.config import Config
from bicovg.diagnostics import mean_gain
from bicovg.display import combined_rows, wide_console
from bicovg.errors import UserError
from bicovg.runlog import expand_runs, read_config, read_summary


def group_runs(paths: list[str]) -> list[list[Path]]:
    """Finished runs that differ in nothing but their seed belong together; groups in order of first appearance."""
    groups: dict[Config, dict[int, Path]] = {}
    for path in expand_runs(paths):
        config, done = read_config(path), read_summary(path).get("epochs")
        if done is not None and done != config.train.epochs:
            raise UserError(
                f"{path} stopped after {done} of {config.train.epochs} epochs: finish it with "
                f"`bicovg train --resume {path}`"
            )
        group = groups.setdefault(replace(config, seed=0), {})
        if config.seed in group:
            raise UserError(f"{group[config.seed]} and {path} are runs of the same seed: give one of them")
        group[config.seed] = path
    return [list(group.values()) for group in groups.values()]


def compare(args: argparse.Namespace) -> int:
    """Accuracy per block of each group, mean over seeds; gains of every group over the first."""
    groups = group_runs(args.runs)
    console = wide_console()
    console.print(comparison_table(groups))
    curves = [block_means(group) for group in groups]
    names, data = name_groups(groups), [read_config(group[0]).data.name for group in groups]
    for name, curve, other in zip(names[1:], curves[1:], data[1:], strict=True):
        if other != data[0]:
            print(f"{name} over {names[0]}: {other} against {data[0]}, no gain between data sets")
            continue
        if len(curve) != len(curves[0]):
            print(f"{name} over {names[0]}: {len(curve)} exits against {len(curves[0])}, no gain per block")
            continue
        shallow, deep = mean_gain(curves[0], curve)
        print(f"{name} over {names[0]}: SG {shallow:+.2f}  DG {deep:+.2f} points")
    return 0


def name_groups(groups: list[list[Path]]) -> list[str]:
    """The recipe of each, and its first run where another has that recipe, too."""
    names = [read_config(group[0]).recipe for group in groups]
    return [
        f"{name} ({group[0]})" if names.count(name) > 1 else name for name, group in zip(names, groups, strict=True)
    ]


def block_means(runs: list[Path]) -> list[float]:
    """Top-1 of every exit, mean over runs."""
    curves = [read_summary(run)["test"]["exits"]["top1"] for run in runs]
    return [statistics.fmean(column) for column in zip(*curves, strict=True)]


def spread(values: list[float]) -> str:
    """``mean +- std`` with the sample standard deviation."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.fmean(values):.2f} +- {statistics.stdev(values):.2f}"


def comparison_table(groups: list[list[Path]]) -> Table:
    """One column per group: every block, then every combined prediction, mean +- std over seeds."""
    table = Table(title="test top-1, %")
    table.add_column("prediction")
    columns: list[dict[str, str]] = []
    for name, group in zip(name_groups(groups), groups, strict=True):
        config = read_config(group[0])
        table.add_column(f"{escape(name)}\n{config.model.scope}, n = {len(group)}", justify="right")
        summaries = [read_summary(run) for run in group]
        column = {}
        for row, block in enumerate(summaries[0]["exit_blocks"]):
            column[f"block {block}"] = spread([s["test"]["exits"]["top1"][row] for s in summaries])
        rows = [{label: pair["top1"] for label, pair in combined_rows(summary)} for summary in summaries]
        for label in rows[0]:
            if all(label in row for row in rows):  # a fusion fitted for some seeds alone has no mean over seeds
                column[label] = spread([row[label] for row in rows])
        columns.append(column)
    for label in sorted({label for column in columns for label in column}, key=_label_order):
        table.add_row(label, *[column.get(label, "-") for column in columns])
    return table


def _label_order(label: str) -> tuple[int, int, str]:
    kind, _, rest = label.partition(" ")
    if kind == "block":
        return (0, int(rest), "")
    order = ["last", "best", "mean", "fused"]
    return (1, order.index(kind), label)
