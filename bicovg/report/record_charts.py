"""The paper's figures from ``records/``: accuracy per block, what BiCovG gains per block, fusion weights; early exit.

Records of one data set and one length share a figure, or, where they are many, one of goodnesses, one of other readings
and one of scopes; several seeds are drawn as their mean. Tuning candidates are in none: what is drawn was measured on
test images.
"""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from bicovg.diagnostics import effective_layers
from bicovg.records import Record, seed_values
from bicovg.report.charts import PRINT, Chart, Rule, Series, bar_chart, line_chart
from bicovg.report.pictures import compute_curves, weight_bars
from bicovg.report.scene import run_dash, run_ink

DATA = {
    "cifar100": "CIFAR-100, VGG-8",
    "tiny-imagenet": "Tiny-ImageNet, VGG-16",
    "imagenet100": "ImageNet-100, VGG-16",
    "digits": "digits",
}
SHORT = " (short)"  # in the title of what is not full runs alone
MOST = 8  # records in one figure
POINTS = ("per-channel", "cc", "ms", "bicovg")  # of the ablation
Records = dict[str, Record]


def groups(records: Records) -> Iterator[tuple[str, str, list[Record]]]:
    """(file name's end, title, records) of every data set and length, the longest first."""
    for data, title in DATA.items():
        own = [record for record in records.values() if record["data"] == data and not is_candidate(record)]
        for epochs in sorted({record["epochs"] for record in own}, reverse=True):
            same = sorted((record for record in own if record["epochs"] == epochs), key=lambda one: str(one["name"]))
            short = not all(map(is_full, same))
            yield f"{data}-{epochs}", f"{title}, {epochs} epochs{SHORT if short else ''}", same


def readable(end: str, title: str, records: list[Record]) -> Iterator[tuple[str, str, list[Record]]]:
    """A group as it is or, of too many records, by what they show; plain BiCovG, the common measure, in every part."""
    if len(records) <= MOST:
        yield end, title, records
        return
    parts: dict[str, list[Record]] = {"goodness": [], "readings": [], "scopes": []}
    usual = statistics.mode(record["precision"] for record in records)
    for record in records:
        kind = str(record["recipe"]).removeprefix(f"{record['data']}-")
        as_recipe = not record["changes"] and not record["holdout"] and record["precision"] == usual
        if kind in ("bicovg", "digits") and as_recipe:
            names = list(parts)
        elif record["scope"] != "strict":
            names = ["scopes"]
        else:
            names = ["goodness" if kind in POINTS and as_recipe else "readings"]
        for name in names:
            parts[name].append(record)
    for name, found in parts.items():
        if found:
            yield f"{end}-{name}", f"{title}: {name}", found


def label(record: Record) -> str:
    """A record's name within its data set, and how many seeds it has."""
    name, seeds = str(record["name"]).removeprefix(f"{record['data']}-"), len(record["seeds"])
    return name if seeds == 1 else f"{name}, {seeds} seeds"


def exit_means(record: Record) -> list[float]:
    """Top-1 of every exit, mean over seeds."""
    return [statistics.fmean(column) for column in zip(*seed_values(record, "exits", "top1"), strict=True)]


def by_block(end: str, title: str, records: list[Record]) -> Chart | None:
    """A line for every network with several exits; one with a single exit is a level across the figure."""
    several = [record for record in records if len(record["exit_blocks"]) > 1]
    if not several:
        return None
    blocks = sorted({block for record in several for block in record["exit_blocks"]})
    series = []
    for index, record in enumerate(several):
        top1 = dict(zip(record["exit_blocks"], exit_means(record), strict=True))
        series.append(Series(label(record), [top1.get(b) for b in blocks], run_ink(index), run_dash(index)))
    single = [record for record in records if len(record["exit_blocks"]) == 1]
    rules = [Rule(label(one), exit_means(one)[0], run_ink(len(series) + i)) for i, one in enumerate(single)]
    return line_chart(
        f"by-block-{end}",
        title,
        blocks,
        series,
        x_label="block",
        y_label="top-1, %",
        percent=True,
        markers=True,
        width=PRINT,
        rules=rules,
    )


def comparable(a: Record, b: Record) -> bool:
    """Whether two records trained equally long, on the same images, in the same precision."""
    return all(a[name] == b[name] for name in ("epochs", "holdout", "precision"))


def is_candidate(record: Record) -> bool:
    """Whether a record tries settings on held-out images; on its test numbers nothing is to be chosen."""
    return record["holdout"] > 0 and (bool(record["changes"]) or not is_full(record))


def is_full(record: Record) -> bool:
    """Whether a record's runs are as long as its recipe says."""
    return record["recipe_epochs"] in (None, record["epochs"])


def gain(end: str, title: str, records: list[Record]) -> Chart | None:
    """BiCovG over per-channel goodness, where both are there and differ in nothing else."""
    unchanged = [record for record in records if not record["changes"]]
    pairs = [
        (a, b)
        for a in unchanged
        for b in unchanged
        if a["recipe"] == f"{a['data']}-per-channel"
        and b["recipe"] in (f"{a['data']}-bicovg", "digits")
        and comparable(a, b)
    ]
    if not pairs:
        return None
    before, after = max(pairs, key=lambda pair: (len(pair[0]["seeds"]) + len(pair[1]["seeds"]), not pair[0]["holdout"]))
    gains = [b - a for a, b in zip(exit_means(before), exit_means(after), strict=True)]
    return bar_chart(
        f"gain-{end}",
        f"BiCovG over per-channel goodness: {title}",
        [str(block) for block in after["exit_blocks"]],
        [Series("gain", gains)],
        y_label="points of top-1",
        width=PRINT,
    )


def fusion(end: str, title: str, records: list[Record]) -> Chart | None:
    """Weights fitted on training images, and how many exits they amount to."""
    fitted = [record for record in records if None not in seed_values(record, "fusion", "train")]
    several = [record for record in fitted if len(record["exit_blocks"]) > 1]
    if not several:
        return None
    chosen = []
    for record in several:
        fits = [entry["fusion"]["train"]["weights"] for entry in record["runs"]]
        weights = [statistics.fmean(column) for column in zip(*fits, strict=True)]
        amount = statistics.fmean(effective_layers(fit) for fit in fits)
        chosen.append((f"{label(record)} (N_eff {amount:.1f})", record["exit_blocks"], weights))
    return weight_bars(f"fusion-{end}", f"Fusion weights: {title}", chosen, width=PRINT)


def early_exit(end: str, title: str, records: list[Record]) -> Chart | None:
    """Accuracy of the mean of the blocks so far against multiply-adds, by threshold; full runs, first seed."""
    curves: list[tuple[str, list[dict[str, Any]]]] = []
    for record in records:
        found = record["runs"][0].get("early_exit")
        if found and "mean" in found["rules"] and is_full(record):
            name = str(record["name"]).removeprefix(f"{record['data']}-")
            curves.append((f"{name}, seed {record['runs'][0]['seed']}", found["rules"]["mean"]["curve"]))
    heading = f"Early exit by the mean of the blocks so far: {title}"
    return compute_curves(f"early-exit-{end}", heading, curves, width=PRINT) if curves else None


KINDS: dict[str, Callable[[str, str, list[Record]], Chart | None]] = {
    "by-block": by_block,
    "gain": gain,
    "fusion": fusion,
    "early-exit": early_exit,
}


CUT = ("by-block", "fusion")  # kinds that draw every record of a group


def record_charts(kind: str, records: Records) -> list[Chart]:
    """Every figure of a kind that the records allow."""
    whole = groups(records)
    cut = (part for group in whole for part in readable(*group)) if kind in CUT else whole
    found = [KINDS[kind](*group) for group in cut]
    return [chart for chart in found if chart is not None]
