"""Every table of README and docs, from ``records/`` and the benchmark files; what has no record yet says "not run"."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from bicovg.bench_report import FOLDER
from bicovg.calibration import is_calibrated
from bicovg.diagnostics import mean_gain
from bicovg.recipes import get_recipe
from bicovg.records import Record, load_records, seed_values
from bicovg.report.bench_tables import NOT_RUN, agreement_table, efficiency_table, markdown, speed_table
from bicovg.report.cells import Records, accuracy, cell, each, length, of_recipe, settings_changed, what_changed
from bicovg.report.paper import ABLATION, BESIDE, DIAGNOSTICS, MAIN, mean_of
from bicovg.report.pictures import PREDICTS_FROM
from bicovg.report.record_charts import comparable, exit_means, is_candidate, is_full

FITTED_ON = {
    "train": "on train",
    "augmented": "on augmented train",
    "heldout": "on held-out",
    "heldout_temperatures": "on held-out, with temperatures",
}
READ_UNDER = {"grouped": "bicovg-fal", "bp-deep": "bp"}  # recipes to be read beside another one


def results_table(records: Records) -> str:
    """Every row of the paper's main table and every other record, accuracies by name, beside the paper's.

    Tuning candidates are left out: they are judged on held-out images, see ``tuning_table``.
    """
    header = ["record", "scope", "epochs", "precision", "changed", "seeds", "last", "best (test-chosen)"]
    header += ["best (held-out-chosen)", "mean", "fused on train", "fused on held-out", "paper: best", "paper: fused"]
    rows = []
    for recipe, (best, fused) in MAIN.items():
        found = of_recipe(records, recipe, unchanged=False)
        rows += [[*result_cells(record), *(("-", "-") if record["changes"] else (best, fused))] for record in found]
        if not found:
            config = get_recipe(recipe)
            known = [recipe, config.model.scope, str(config.train.epochs), "-", "", "-"]
            rows.append([*known, NOT_RUN, *[""] * 5, best, fused])
    others = [one for one in records.values() if one["recipe"] not in MAIN and not is_candidate(one)]
    others.sort(key=lambda record: str(record["name"]))
    rows += [[*result_cells(record), "", ""] for record in others]
    return markdown(header, rows)


def result_cells(record: Record) -> list[str]:
    rules = (("last",), ("best_test_chosen",), ("best_heldout_chosen",), ("mean",), ("fusion", "train"))
    return [
        record["name"],
        record["scope"],
        length(record),
        record["precision"],
        settings_changed(record),
        str(len(record["seeds"])),
        *[accuracy(record, *keys) for keys in (*rules, ("fusion", "heldout"))],
    ]


def tuning_table(records: Records) -> str:
    """Recipes with a changed setting, on held-out images alone: what a choice may be made on."""
    header = ["recipe", "epochs", "changed", "seeds", "held-out top-1, last exit", "mean of exits"]
    tuned = {(record["recipe"], record["epochs"]) for record in records.values() if is_candidate(record)}
    found = [one for one in records.values() if one["holdout"] and (one["recipe"], one["epochs"]) in tuned]
    rows = []
    for record in sorted(found, key=lambda one: (one["recipe"], -one["epochs"], what_changed(one), one["name"])):
        last = [(entry.get("heldout_top1") or [None])[-1] for entry in record["runs"]]
        known = [record["recipe"], length(record), what_changed(record) or "nothing", str(len(last))]
        several = len(record["exit_blocks"]) > 1
        rows.append([*known, cell(last), cell(seed_values(record, "heldout_mean")) if several else "-"])
    return markdown(header, rows or [[NOT_RUN, *[""] * (len(header) - 1)]])


def headline_table(records: Records) -> str:
    """For the README: the full runs of the paper's main table, and of ours that stand beside them."""
    header = ["data", "recipe", "scope", "seeds", "last exit", "mean of exits", "fused on train", "paper"]
    printed = {recipe: fused or best for recipe, (best, fused) in MAIN.items()} | BESIDE
    rows = []
    for recipe, paper in printed.items():
        for record in of_recipe(records, recipe, unchanged=False):
            whole = is_full(record) and record["precision"] == "bfloat16"
            if whole and not record["holdout"]:
                values = [accuracy(record, *keys) for keys in (("last",), ("mean",), ("fusion", "train"))]
                changes = settings_changed(record)
                known = [record["data"], f"{recipe}, {changes}" if changes else recipe, record["scope"]]
                rows.append([*known, str(len(record["seeds"])), *values, "-" if changes else paper])
    return markdown(header, sorted(rows, key=lambda row: row[0]) or [[NOT_RUN, *[""] * (len(header) - 1)]])


def fusion_gain_table(records: Records) -> str:
    """Full runs of the paper's rows: fusion beside the single best block, as the paper has them, and what it gains."""
    header = ["recipe", "scope", "seeds", "best (test-chosen)", "paper: best", "fused on train", "paper: fused"]
    header += ["fusion gains", "paper: gains"]
    rows = []
    for recipe, (best, fused) in MAIN.items():
        for record in of_recipe(records, recipe):
            if fused and is_full(record) and not record["holdout"]:
                keys = (("best_test_chosen", "top1"), ("fusion", "train", "top1"))
                ours = [seed_values(record, *key) for key in keys]
                gain = cell([None if None in pair else pair[1] - pair[0] for pair in zip(*ours, strict=True)])
                printed = f"{mean_of(fused) - mean_of(best):.2f}" if best else "-"
                known = [recipe, record["scope"], str(len(record["seeds"]))]
                rows.append([*known, cell(ours[0]), best or "-", cell(ours[1]), fused, gain, printed])
    return markdown(header, rows or [[NOT_RUN, *[""] * (len(header) - 1)]])


def top5_table(records: Records) -> str:
    """Top-5 of full runs by the rules of the main table."""
    header = ["record", "scope", "epochs", "seeds", "last", "mean", "fused on train"]
    rows = []
    for record in sorted(records.values(), key=lambda record: str(record["name"])):
        if is_full(record) and record["data"] != "digits":
            values = [accuracy(record, *keys, of="top5") for keys in (("last",), ("mean",), ("fusion", "train"))]
            rows.append([record["name"], record["scope"], length(record), str(len(record["seeds"])), *values])
    return markdown(header, rows or [[NOT_RUN, *[""] * (len(header) - 1)]])


def digits_table(records: Records) -> str:
    """For the README: every block of the built-in digits' strict records."""
    found = [record for record in records.values() if record["data"] == "digits" and record["scope"] == "strict"]
    blocks = found[0]["exit_blocks"] if found else [0]
    header = ["record", *(f"block {block}" for block in blocks), "mean of blocks", "fused on train"]
    rows = []
    for record in found:
        curves = zip(*seed_values(record, "exits", "top1"), strict=True)
        combined = [accuracy(record, *keys) for keys in (("mean",), ("fusion", "train"))]
        rows.append([record["name"], *(cell(values) for values in curves), *combined])
    return markdown(header, rows or [[NOT_RUN, *[""] * (len(header) - 1)]])


def ablation_table(records: Records) -> str:
    """The four points of the ablation and the reductions, on data sets and lengths of which there are records."""
    header = ["configuration", "data", "epochs", "precision", "seeds", "mean", "fused on train", "paper: fused"]
    rows = []
    for data, points in ABLATION.items():
        for suffix, (name, paper) in points.items():
            found = of_recipe(records, f"{data}-{suffix}")
            for record in found:
                known = [name, data, length(record), record["precision"], str(len(record["seeds"]))]
                rows.append([*known, accuracy(record, "mean"), accuracy(record, "fusion", "train"), paper])
            if not found:
                rows.append([name, data, "-", "-", "-", NOT_RUN, "", paper])
    return markdown(header, rows)


def fusion_table(records: Records) -> str:
    """What weighting the exits is worth: the plain mean beside Logistic Fusion fitted on different images."""
    header = ["record", "scope", "seeds", "mean", *FITTED_ON.values()]
    rows = []
    for record in sorted(records.values(), key=lambda record: str(record["name"])):
        if len(record["exit_blocks"]) > 1 and record["data"] != "digits" and not is_candidate(record):
            entries = [entry["fusion"] for entry in record["runs"]]
            fitted = [cell([(entry.get(name) or {}).get("top1") for entry in entries]) for name in FITTED_ON]
            known = [record["name"], record["scope"], str(len(entries)), accuracy(record, "mean")]
            rows.append([*known, *fitted])
    return markdown(header, rows or [[NOT_RUN, *[""] * (len(header) - 1)]])


def diagnostics_table(records: Records) -> str:
    """SG, DG and the changes of DA, TR and N_eff, between records of equal length."""
    header = ["change", "data", "epochs", "seeds", "SG", "DG", "DA", "TR", "N_eff", "paper: SG, DG, DA, TR, N_eff"]
    rows = []
    for data, (before, after), paper in DIAGNOSTICS:
        name = f"{before} to {after}"
        pairs = [
            (a, b)
            for a in of_recipe(records, f"{data}-{before}")
            for b in of_recipe(records, f"{data}-{after}")
            if comparable(a, b)
        ]
        for a, b in pairs:
            seeds = f"{len(a['seeds'])} to {len(b['seeds'])}"
            rows.append([name, data, length(b), seeds, *diagnostic_cells(a, b), paper])
        if not pairs:
            rows.append([name, data, "-", "-", NOT_RUN, *[""] * 4, paper])
    return markdown(header, rows)


def readings_table(records: Records) -> str:
    """Records of equal length that differ in a setting, or in a recipe that is to be read beside another."""
    header = ["record", "recipe", "scope", "epochs", "changed", "seeds", "last", "mean", "fused on train"]
    rows = []
    for record in sorted(records.values(), key=reading_order):
        if any(meet(record, other) for other in records.values()):
            values = [accuracy(record, *keys) for keys in (("last",), ("mean",), ("fusion", "train"))]
            known = [record["name"], record["recipe"], record["scope"], length(record)]
            known.append(what_changed(record) or "nothing")
            rows.append([*known, str(len(record["seeds"])), *values])
    return markdown(header, rows or [[NOT_RUN, *[""] * (len(header) - 1)]])


def reading_order(record: Record) -> tuple[str, str, int, str, str]:
    return record["data"], read_under(record), -record["epochs"], record["recipe"], record["name"]


def read_under(record: Record) -> str:
    """The recipe beside which a record is read, mostly its own."""
    data, recipe = record["data"], str(record["recipe"])
    other = READ_UNDER.get(recipe.removeprefix(f"{data}-"))
    return recipe if other is None else f"{data}-{other}"


def meet(one: Record, other: Record) -> bool:
    """Whether two records trained equally long on all images, and differ in what is to be read."""
    alike = one["epochs"] == other["epochs"] and not one["holdout"] and not other["holdout"]
    differ = (one["recipe"], what_changed(one)) != (other["recipe"], what_changed(other))
    return alike and differ and read_under(one) == read_under(other)


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
    """Accuracy at less compute, from records of full runs that measured it."""
    header = ["record", "scope", "predicts from", "whole network", "less compute", "blocks computed, mean", "top-1"]
    header += ["points lost", "calibrated on", "confidence error, before -> after"]
    rows = []
    for record in records.values():
        measured = [entry["early_exit"] for entry in record["runs"] if entry.get("early_exit")]
        for rule in measured[0]["rules"] if measured and is_full(record) and not is_candidate(record) else ():
            curves = [found["rules"][rule] for found in measured if rule in found["rules"]]
            full = cell([curve["full"]["top1"] for curve in curves])
            fitted = any(is_calibrated(curve["temperatures"]) for curve in curves)
            source = measured[0]["calibrated_on"] if fitted else "not calibrated"
            errors = (cell([curve.get(key, [None])[-1] for curve in curves], 1) for key in ("ece_before", "ece_after"))
            confidence = " -> ".join(errors)
            for points in zip(*(curve["points"] for curve in curves), strict=False):
                less, blocks = cell([1 / p["compute"] for p in points]) + "x", blocks_computed(points, record)
                top1, lost = (cell([point[name] for point in points]) for name in ("top1", "points_lost"))
                known = [record["name"], record["scope"], PREDICTS_FROM.get(rule, rule), full]
                rows.append([*known, less, blocks, top1, lost, source, confidence])
    return markdown(header, rows or [[NOT_RUN, *[""] * (len(header) - 1)]])


def blocks_computed(points: Sequence[dict[str, Any]], record: Record) -> str:
    """How many blocks an image passed before it left, mean over the images; one point per seed."""
    blocks = record["exit_blocks"]
    if any("exits" not in point for point in points):
        return "-"
    shares = [zip(point["exits"], blocks, strict=True) for point in points]
    return cell([sum(share * (block + 1) for share, block in pairs) for pairs in shares]) + f" of {blocks[-1] + 1}"


def times_table(records: Records) -> str:
    """What full runs of the real data sets took, evaluations included: seed by seed, as some had the device to
    themselves and some had not.
    """
    header = ["record", "epochs", "seeds", "wall time, s", "images/s, median of epochs", "peak GB", "measured on"]
    rows = []
    for record in records.values():
        if is_full(record) and record["data"] != "digits":
            seconds, speeds, peaks = (
                seed_values(record, key) for key in ("wall_seconds", "images_per_second", "peak_memory_bytes")
            )
            places = {f"{run['gpu'] or 'CPU'}, torch {(run['torch'] or '?').split('+')[0]}" for run in record["runs"]}
            known = [record["name"], length(record), ", ".join(map(str, record["seeds"])), each(seconds, 0)]
            peak = each([None if one is None else one / 1e9 for one in peaks])
            rows.append([*known, each(speeds, 0), peak, "; ".join(sorted(places))])
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


TABLES: dict[str, Callable[[Records], str]] = {
    "headline": headline_table,
    "results": results_table,
    "tuning": tuning_table,
    "ablation": ablation_table,
    "fusion": fusion_table,
    "fusion-gain": fusion_gain_table,
    "top5": top5_table,
    "digits": digits_table,
    "diagnostics": diagnostics_table,
    "readings": readings_table,
    "early-exit": early_exit_table,
    "times": times_table,
    "engines": lambda records: engines_table(),
    "agreement": lambda records: agreement_table(),
    "speed": lambda records: speed_table(),
    "efficiency": lambda records: efficiency_table(),
}
