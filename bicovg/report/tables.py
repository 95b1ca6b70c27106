"""Every table of README and docs, made anew from ``records/`` and the benchmark files. No number is typed by hand.

A table stands in a Markdown file between ``<!-- table: NAME -->`` and ``<!-- end of table -->``. What has no record
yet says "not run".
"""

import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from bicovg.diagnostics import mean_gain
from bicovg.errors import UserError
from bicovg.recipes import get_recipe
from bicovg.records import Record, load_records, seed_values
from bicovg.report.bench_tables import NOT_RUN, efficiency_table, markdown, speed_table
from bicovg.report.paper import ABLATION, DIAGNOSTICS, MAIN
from bicovg.runlog import read_early_exit

MARKED = re.compile(r"(<!-- table: ([a-z0-9-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
PREDICTS_FROM = {"mean": "mean of blocks so far", "own": "the block alone", "fused": "fusion of blocks so far"}
FITTED_ON = {
    "train": "on train",
    "augmented": "on augmented train",
    "heldout": "on held-out",
    "heldout_temperatures": "on held-out, with temperatures",
}
Records = dict[str, Record]


def read_records(root: Path = Path()) -> Records:
    """Every record of a checkout, each seed with its early-exit curve as ``early_exit``, or None."""
    records = load_records(root / "records")
    for name, record in records.items():
        for entry in record["runs"]:
            entry["early_exit"] = read_early_exit(root / "records" / name / f"s{entry['seed']}")
    return records


def cell(values: Sequence[float | None], digits: int = 2) -> str:
    """``mean`` of one seed, ``mean +- std`` of several; a dash where one seed lacks the value."""
    numbers = [value for value in values if value is not None]
    if not numbers or len(numbers) < len(values):
        return "-"
    mean = f"{statistics.fmean(numbers):.{digits}f}"
    return mean if len(numbers) == 1 else f"{mean} +- {statistics.stdev(numbers):.{digits}f}"


def of_recipe(records: Records, recipe: str) -> list[Record]:
    """Records of a recipe: the longest first, then those that held nothing out."""
    found = [record for record in records.values() if record["recipe"] == recipe]
    return sorted(found, key=lambda record: (-record["epochs"], record["holdout"], record["name"]))


def length(record: Record) -> str:
    """Epochs; a run shorter than its recipe says so, and one that trained on fewer images."""
    whole, held = record["recipe_epochs"], record["holdout"]
    epochs = str(record["epochs"]) if whole in (None, record["epochs"]) else f"{record['epochs']} of {whole}, short"
    return f"{epochs}, {held:.0%} held out" if held else epochs


def results_table(records: Records) -> str:
    """Every row of the paper's main table and every other record, accuracies by name, beside the paper's."""
    header = ["record", "scope", "epochs", "precision", "seeds", "last", "best (test-chosen)", "mean"]
    header += ["fused on train", "fused on held-out", "paper: best", "paper: fused"]
    rows = []
    for recipe, (best, fused) in MAIN.items():
        found = of_recipe(records, recipe)
        rows += [[*result_cells(record), best, fused] for record in found]
        if not found:
            config = get_recipe(recipe)
            known = [recipe, config.model.scope, str(config.train.epochs), "-", "-"]
            rows.append([*known, NOT_RUN, *[""] * 4, best, fused])
    others = sorted((r for r in records.values() if r["recipe"] not in MAIN), key=lambda r: str(r["name"]))
    rows += [[*result_cells(record), "", ""] for record in others]
    return markdown(header, rows)


def result_cells(record: Record) -> list[str]:
    accuracies = (("last",), ("best_test_chosen",), ("mean",), ("fusion", "train"), ("fusion", "heldout"))
    single = len(record["exit_blocks"]) == 1
    return [
        record["name"],
        record["scope"],
        length(record),
        record["precision"],
        str(len(record["seeds"])),
        *[cell(seed_values(record, *keys, "top1")) if not single or keys == ("last",) else "-" for keys in accuracies],
    ]


def ablation_table(records: Records) -> str:
    """The four points of the ablation and the reductions, on data sets and lengths of which there are records."""
    header = ["configuration", "data", "epochs", "seeds", "mean", "fused on train", "paper: fused"]
    rows = []
    for data, points in ABLATION.items():
        for suffix, (name, paper) in points.items():
            for record in of_recipe(records, f"{data}-{suffix}"):
                values = [cell(seed_values(record, *keys, "top1")) for keys in (("mean",), ("fusion", "train"))]
                rows.append([name, data, length(record), str(len(record["seeds"])), *values, paper])
            if not of_recipe(records, f"{data}-{suffix}"):
                rows.append([name, data, "-", "-", NOT_RUN, "", paper])
    return markdown(header, rows)


def fusion_table(records: Records) -> str:
    """What weighting the exits is worth: the plain mean beside Logistic Fusion fitted on different images."""
    header = ["record", "seeds", "mean", *FITTED_ON.values()]
    rows = []
    for record in sorted(records.values(), key=lambda record: str(record["name"])):
        if len(record["exit_blocks"]) > 1 and record["data"] != "digits":
            entries = [entry["fusion"] for entry in record["runs"]]
            fitted = [cell([(entry.get(name) or {}).get("top1") for entry in entries]) for name in FITTED_ON]
            rows.append([record["name"], str(len(entries)), cell(seed_values(record, "mean", "top1")), *fitted])
    return markdown(header, rows or [[NOT_RUN, *[""] * (len(header) - 1)]])


def diagnostics_table(records: Records) -> str:
    """SG, DG and the changes of DA, TR and N_eff, between records of equal length."""
    header = ["change", "data", "epochs", "SG", "DG", "DA", "TR", "N_eff", "paper: SG, DG, DA, TR, N_eff"]
    rows = []
    for data, (before, after), paper in DIAGNOSTICS:
        name = f"{before} to {after}"
        pairs = [
            (a, b)
            for a in of_recipe(records, f"{data}-{before}")
            for b in of_recipe(records, f"{data}-{after}")
            if a["epochs"] == b["epochs"] and a["holdout"] == b["holdout"]
        ]
        rows += [[name, data, length(b), *diagnostic_cells(a, b), paper] for a, b in pairs]
        if not pairs:
            rows.append([name, data, "-", NOT_RUN, *[""] * 4, paper])
    return markdown(header, rows)


def diagnostic_cells(a: Record, b: Record) -> list[str]:
    gains = mean_gain(mean_curve(a), mean_curve(b))
    changes = []
    for keys in (("DA",), ("TR",), ("fusion", "train", "N_eff")):
        before, after = seed_values(a, *keys), seed_values(b, *keys)
        known = None not in (*before, *after)
        changes.append(statistics.fmean(after) - statistics.fmean(before) if known else None)
    cells = [f"{gain:+.2f}" for gain in gains]
    return cells + ["-" if change is None else f"{change:+.3f}" for change in changes]


def mean_curve(record: Record) -> list[float]:
    """Top-1 of every exit, mean over seeds."""
    return [statistics.fmean(column) for column in zip(*seed_values(record, "exits", "top1"), strict=True)]


def early_exit_table(records: Records) -> str:
    """Accuracy at less compute, from records that measured it."""
    header = ["record", "predicts from", "whole network", "less compute", "top-1", "points lost", "calibrated on"]
    rows = []
    for record in records.values():
        measured = [entry["early_exit"] for entry in record["runs"] if entry.get("early_exit")]
        for rule in measured[0]["rules"] if measured else ():
            curves = [found["rules"][rule] for found in measured if rule in found["rules"]]
            full = cell([curve["full"]["top1"] for curve in curves])
            for points in zip(*(curve["points"] for curve in curves), strict=False):
                less = cell([1 / point["compute"] for point in points]) + "x"
                top1, lost = (cell([point[name] for point in points]) for name in ("top1", "points_lost"))
                label, source = PREDICTS_FROM.get(rule, rule), measured[0]["calibrated_on"]
                rows.append([record["name"], label, full, less, top1, lost, source])
    return markdown(header, rows or [[NOT_RUN, *[""] * 6]])


TABLES: dict[str, Callable[[Records], str]] = {
    "results": results_table,
    "ablation": ablation_table,
    "fusion": fusion_table,
    "diagnostics": diagnostics_table,
    "early-exit": early_exit_table,
    "speed": lambda records: speed_table(),
    "efficiency": lambda records: efficiency_table(),
}


def fill_tables(text: str, records: Records, origin: str = "the text") -> str:
    """A Markdown text with all its tables made anew."""

    def fill(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise UserError(f"{origin} asks for the table {match[2]!r}: choose one of {', '.join(TABLES)}")
        return match[1] + "\n" + TABLES[match[2]](records) + "\n" + match[3]

    return MARKED.sub(fill, text)


def marked_files(root: Path = Path()) -> list[Path]:
    """README and docs with a table in them."""
    return [path for path in (root / "README.md", *sorted(root.glob("docs/*.md"))) if has_table(path)]


def has_table(path: Path) -> bool:
    return path.is_file() and MARKED.search(path.read_text()) is not None


def update_tables(root: Path = Path()) -> list[Path]:
    """Rewrite the files whose tables are not those of the records; returns them."""
    records, changed = read_records(root), []
    for path in marked_files(root):
        text = path.read_text()
        fresh = fill_tables(text, records, str(path))
        if fresh != text:
            path.write_text(fresh)
            changed.append(path)
    return changed
