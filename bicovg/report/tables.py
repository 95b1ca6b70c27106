"""Every table and figure of README and docs, made anew from ``records/`` and the benchmark files.

A table stands in a Markdown file between ``<!-- table: NAME -->`` and ``<!-- end of table -->``, figures between
``<!-- figures: KIND -->`` and ``<!-- end of figures -->``. What has no record yet says "not run". No number is typed by
hand.
"""

import json
import os
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from bicovg.bench_report import FOLDER
from bicovg.diagnostics import mean_gain
from bicovg.errors import UserError
from bicovg.recipes import get_recipe
from bicovg.records import Record, as_word, changed_settings, load_records, seed_values
from bicovg.report.bench_tables import NOT_RUN, efficiency_table, markdown, speed_table
from bicovg.report.figures import compose
from bicovg.report.paper import ABLATION, DIAGNOSTICS, MAIN
from bicovg.report.pictures import PREDICTS_FROM
from bicovg.report.record_charts import DATA, KINDS, comparable, exit_means, record_charts
from bicovg.report.svg import svg_file
from bicovg.runlog import read_early_exit

MARKED = re.compile(r"(<!-- (table|figures): ([a-z0-9-]+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)
FIGURES = Path("docs") / "figures"
FITTED_ON = {
    "train": "on train",
    "augmented": "on augmented train",
    "heldout": "on held-out",
    "heldout_temperatures": "on held-out, with temperatures",
}
Records = dict[str, Record]


def read_records(root: Path = Path()) -> Records:
    """Every record of a checkout, with what it changed of its recipe as ``changes``.

    Each seed has its early-exit curve as ``early_exit``, or None.
    """
    records = load_records(root / "records")
    for name, record in records.items():
        for entry in record["runs"]:
            folder = root / "records" / name / f"s{entry['seed']}"
            entry["early_exit"], record["changes"] = read_early_exit(folder), changed_settings(folder)
    return records


def cell(values: Sequence[float | None], digits: int = 2) -> str:
    """``mean`` of one seed, ``mean +- std`` of several; a dash where one seed lacks the value."""
    numbers = [value for value in values if value is not None]
    if not numbers or len(numbers) < len(values):
        return "-"
    mean = f"{statistics.fmean(numbers):.{digits}f}"
    return mean if len(numbers) == 1 else f"{mean} +- {statistics.stdev(numbers):.{digits}f}"


def of_recipe(records: Records, recipe: str, unchanged: bool = True) -> list[Record]:
    """Records of a recipe: the longest first, then those that held nothing out; or also those that changed it."""
    found = [one for one in records.values() if one["recipe"] == recipe and not (unchanged and one["changes"])]
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
        found = of_recipe(records, recipe, unchanged=False)
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


def headline_table(records: Records) -> str:
    """For the README: the full runs of the paper's main table and of its backbones end to end."""
    header = ["data", "recipe", "seeds", "last exit", "mean of exits", "fused on train", "paper"]
    rows = []
    for recipe in (*MAIN, "tiny-imagenet-bp"):
        for record in of_recipe(records, recipe):
            whole = record["epochs"] == record["recipe_epochs"] and record["precision"] == "bfloat16"
            if whole and not record["holdout"]:
                cells, paper = result_cells(record), [number for number in MAIN.get(recipe, ()) if number]
                rows.append([record["data"], recipe, cells[4], cells[5], *cells[7:9], paper[-1] if paper else "-"])
    return markdown(header, sorted(rows, key=lambda row: row[0]) or [[NOT_RUN, *[""] * (len(header) - 1)]])


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
            if comparable(a, b)
        ]
        rows += [[name, data, length(b), *diagnostic_cells(a, b), paper] for a, b in pairs]
        if not pairs:
            rows.append([name, data, "-", NOT_RUN, *[""] * 4, paper])
    return markdown(header, rows)


def readings_table(records: Records) -> str:
    """Records that changed a setting of their recipe, under the one of equal length that did not."""
    header = ["record", "recipe", "epochs", "changed", "seeds", "last", "mean", "fused on train"]
    rows = []
    for record in sorted(records.values(), key=lambda one: (one["data"], one["recipe"], -one["epochs"], one["name"])):
        rivals = [
            other
            for other in of_recipe(records, record["recipe"], unchanged=False)
            if other["epochs"] == record["epochs"]
            and not other["holdout"]
            and what_changed(other) != what_changed(record)
        ]
        if rivals and not record["holdout"]:
            keys = (("last",), ("mean",), ("fusion", "train"))
            values = [cell(seed_values(record, *key, "top1")) for key in keys]
            known = [record["name"], record["recipe"], length(record), what_changed(record) or "nothing"]
            rows.append([*known, str(len(record["seeds"])), *values])
    return markdown(header, rows or [[NOT_RUN, *[""] * (len(header) - 1)]])


def what_changed(record: Record) -> str:
    changes = [f"{path} {as_word(value)}" for path, value in record["changes"].items()]
    return ", ".join([*changes, *(["float32"] if record["precision"] == "float32" else [])])


def diagnostic_cells(a: Record, b: Record) -> list[str]:
    gains = mean_gain(exit_means(a), exit_means(b))
    changes = []
    for keys in (("DA",), ("TR",), ("fusion", "train", "N_eff")):
        before, after = seed_values(a, *keys), seed_values(b, *keys)
        known = None not in (*before, *after)
        changes.append(statistics.fmean(after) - statistics.fmean(before) if known else None)
    cells = [f"{gain:+.2f}" for gain in gains]
    return cells + ["-" if change is None else f"{change:+.3f}" for change in changes]


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


def times_table(records: Records) -> str:
    """What full runs took, of the real data sets: evaluations included, one seed's mean where there are several."""
    header = ["record", "epochs", "seeds", "wall time, s", "images/s, median of epochs", "peak GB", "measured on"]
    rows = []
    for record in records.values():
        if record["epochs"] == record["recipe_epochs"] and record["data"] != "digits":
            seconds, speeds, peaks = (
                seed_values(record, key) for key in ("wall_seconds", "images_per_second", "peak_memory_bytes")
            )
            places = {f"{run['gpu'] or 'CPU'}, torch {(run['torch'] or '?').split('+')[0]}" for run in record["runs"]}
            known = [record["name"], length(record), str(len(record["seeds"])), cell(seconds, 0)]
            peak = cell([None if one is None else one / 1e9 for one in peaks])
            rows.append([*known, cell(speeds, 0), peak, "; ".join(sorted(places))])
    return markdown(header, rows or [[NOT_RUN, *[""] * (len(header) - 1)]])


def engines_table() -> str:
    """The same training in two engines, two seeds each: records that lie beside the benchmarks."""
    header = ["engine", "recipe", "epochs", "seeds", "last", "mean", "fused on train", "mean of each seed"]
    rows = []
    for record in load_records(FOLDER / "engines").values():
        means = seed_values(record, "mean", "top1")
        values = [cell(seed_values(record, *key, "top1")) for key in (("last",), ("mean",), ("fusion", "train"))]
        known = [record["runs"][0]["engine"], record["recipe"], str(record["epochs"]), str(len(record["seeds"]))]
        rows.append([*known, *values, ", ".join(f"{mean:.2f}" for mean in means)])
    return markdown(header, rows or [[NOT_RUN, *[""] * (len(header) - 1)]])


def agreement_table() -> str:
    """How far 200 steps of the other engines are from the eager ones, from ``benchmarks/agree.py``."""
    header = ["recipe", "precision", "engine", "first 5 losses", "means of 20 losses", "compiled after the third step"]
    rows = []
    for path in sorted(FOLDER.glob("agree-*.json")):
        for row in json.loads(path.read_text())["rows"]:
            for engine in ("compiled", "graph"):
                found = row[engine]
                first, later = found["largest_difference_first_steps"], found["largest_difference_of_means"]
                cells = [row["recipe"], row["precision"], engine, f"{first:.1e}", f"{later:.1e}"]
                rows.append([*cells, str(found["recompiled"])])
    return markdown(header, rows or [[NOT_RUN, *[""] * (len(header) - 1)]])


TABLES: dict[str, Callable[[Records], str]] = {
    "headline": headline_table,
    "results": results_table,
    "ablation": ablation_table,
    "fusion": fusion_table,
    "diagnostics": diagnostics_table,
    "readings": readings_table,
    "early-exit": early_exit_table,
    "times": times_table,
    "engines": lambda records: engines_table(),
    "agreement": lambda records: agreement_table(),
    "speed": lambda records: speed_table(),
    "efficiency": lambda records: efficiency_table(),
}

WHOLE = "-full"


def fill_tables(text: str, records: Records, origin: str = "the text", figures: str = FIGURES.name) -> str:
    """A Markdown text with all its tables and links to figures made anew.

    Args:
        figures: the figures' folder, as seen from the text.
    """

    def fill(match: re.Match[str]) -> str:
        start, what, name, end = match.groups()
        known: Sequence[str] = list(TABLES) if what == "table" else [*KINDS, *(f"{kind}{WHOLE}" for kind in KINDS)]
        if name not in known:
            raise UserError(f"{origin} asks for the {what} {name!r}: choose one of {', '.join(known)}")
        made = TABLES[name](records) if what == "table" else links(name, records, figures)
        return f"{start}\n{made}\n{end}"

    return MARKED.sub(fill, text)


def links(kind: str, records: Records, figures: str) -> str:
    """``kind``, or, with ``-full``, without short runs' figures."""
    charts = record_charts(kind.removesuffix(WHOLE), records)
    if kind.endswith(WHOLE):
        charts = [chart for chart in charts if not chart.title.endswith("(short)")]
    return (
        "\n\n".join(f"![{chart.title}]({figures}/{chart.name}.svg)" for chart in charts) + "\n" if charts else NOT_RUN
    )


def draw_figures(records: Records) -> dict[str, str]:
    """Every figure's file by name."""
    charts = [chart for kind in KINDS for chart in record_charts(kind, records)]
    return {f"{chart.name}.svg": svg_file(compose(chart)) for chart in charts}


def marked_files(root: Path = Path()) -> list[Path]:
    """README and docs with a table in them."""
    return [path for path in (root / "README.md", *sorted(root.glob("docs/*.md"))) if has_table(path)]


def has_table(path: Path) -> bool:
    return path.is_file() and MARKED.search(path.read_text()) is not None


def fill_file(path: Path, records: Records, root: Path = Path()) -> str:
    """What should stand in a file of a checkout."""
    folder = Path(os.path.relpath(root / FIGURES, path.parent)).as_posix()
    return fill_tables(path.read_text(), records, str(path), folder)


def update_tables(root: Path = Path()) -> list[Path]:
    """Rewrite the files whose tables are not those of the records, and the figures; returns what changed."""
    records, files = read_records(root), marked_files(root)
    fresh = {path: fill_file(path, records, root) for path in files}
    drawn = any("<!-- figures: " in text for text in fresh.values())
    if drawn:
        fresh |= {root / FIGURES / name: text for name, text in draw_figures(records).items()}
    changed = [path for path, text in fresh.items() if not path.is_file() or path.read_text() != text]
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(fresh[path])
    ours = [path for kind in KINDS for data in DATA for path in sorted((root / FIGURES).glob(f"{kind}-{data}-*.svg"))]
    stale = [path for path in ours if drawn and path not in fresh]
    for path in stale:
        path.unlink()
    return changed + stale
