"""What must hold inside a record, and between it and the run's files beside it.

Fields present, accuracies possible, every derived number equal to its definition, every value that of the run's files.
"""

import math
import os
import statistics
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

from bicovg.diagnostics import decline_area, effective_layers, tail_retention
from bicovg.errors import UserError
from bicovg.run_schema import (
    PERCENT,
    SEED,
    SIZE,
    blocks,
    boolean,
    check_file,
    fields,
    fusions,
    listed,
    maybe,
    number,
    tested,
    text,
    whole,
)
from bicovg.run_schema import summary as summary_schema
from bicovg.runlog import read_environment, read_json, read_metrics, read_timing

RECORD_FIELDS = {
    "name", "recipe", "about", "scope", "group_size", "alignment", "data", "holdout", "epochs", "recipe_epochs",
    "batch_size", "schedule", "precision", "clip_norm", "clip_scope", "seeds", "exit_blocks", "parameters", "runs",
}  # fmt: skip
RUN_FIELDS = {
    "seed", "exits", "last", "best_test_chosen", "best_heldout_chosen", "mean", "fusion", "DA", "TR", "wall_seconds",
    "images_per_second", "peak_memory_bytes", "engine", "device", "gpu", "torch", "cuda", "python", "commit",
    "command", "typed",
}  # fmt: skip
LATER_FIELDS = {"afterwards", "heldout_top1"}  # older records lack them
CLOSE = 1e-6
NEAR = 0.1  # points, of the last epoch's evaluation and the summary's, which may come from another process or GPU
REPAIR = "make the record anew with `bicovg record`"
ANEW, RESTORE = "make the record anew", "restore it from the run"
FITTED_ON = ("train", "augmented", "heldout")
FITTED_BY_TRAINING = ("train", "heldout")
TEMPERATURES = "_temperatures"
SUMMARY = (
    *("recipe", "seed", "scope", "data", "epochs", "exit_blocks", "test", "heldout_top1", "fusion", "parameters"),
    *("engine", "wall_seconds"),
)
ENVIRONMENT = ("device", "gpu", "torch", "cuda", "python", "commit")
RECORD = fields(
    {
        **dict.fromkeys(("name", "recipe", "about", "scope", "data", "schedule", "precision", "clip_scope"), text),
        **dict.fromkeys(("epochs", "batch_size", "group_size"), whole(1)),
        **dict.fromkeys(("recipe_epochs", "parameters"), maybe(whole())),
        "alignment": boolean,
        "holdout": number(0, 1),
        "clip_norm": maybe(SIZE),
        "seeds": listed(SEED),
        "exit_blocks": blocks,
    }
)
RUN = {
    "seed": SEED,
    **dict.fromkeys(("DA", "TR"), maybe(number())),
    **dict.fromkeys(("wall_seconds", "images_per_second", "peak_memory_bytes"), maybe(SIZE)),
    **dict.fromkeys(("engine", "device", "gpu", "torch", "cuda", "python", "commit", "command", "typed"), maybe(text)),
}


class _Checker:
    """Raises a UserError that names the file, the place and the value."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def need(self, fine: bool, what: str) -> None:
        if not fine:
            raise UserError(f"{self.path}: {what}; {REPAIR}")

    def fields(self, tree: Any, names: set[str], where: str, optional: Set[str] = frozenset()) -> None:
        self.need(isinstance(tree, dict), f"{where} is not an object")
        missing, extra = sorted(names - tree.keys()), sorted(tree.keys() - names - optional)
        self.need(not missing, f"{where} lacks the fields {', '.join(missing)}")
        self.need(not extra, f"{where} has the unknown fields {', '.join(extra)}")

    def ordered(self, tree: dict[str, float], where: str) -> None:
        self.need(tree["top1"] <= tree["top5"], f"{where} has a top-1 of {tree['top1']} above its top-5 {tree['top5']}")

    def equal(self, value: Any, expected: float, where: str) -> None:
        fine = isinstance(value, int | float) and math.isclose(value, expected, rel_tol=CLOSE, abs_tol=CLOSE)
        self.need(fine, f"{where} is {value!r}, but the values beside it give {expected!r}")


def check_record(path: Path, record: Any) -> None:
    """Refuse a record that is incomplete or contradicts itself."""
    check = _Checker(path)
    check.fields(record, RECORD_FIELDS, "the record")
    check.need(bool(record["runs"]) and isinstance(record["runs"], list), "it has no runs")
    check_file(path, record, RECORD, REPAIR)
    for place, entry in enumerate(record["runs"]):
        check.fields(entry, RUN_FIELDS, f"run {place}", LATER_FIELDS)
    exits = len(record["exit_blocks"])
    fusion = {"fusion": fusions(exits, "train", "augmented", "heldout")}
    later = {"afterwards": listed(text), "heldout_top1": maybe(listed(PERCENT, exits))}
    for kind in (fields({**RUN, **fusion}, later), tested(exits)):
        check_file(path, record, fields({"runs": listed(kind)}), REPAIR)
    for entry in record["runs"]:
        check_run(check, entry, f"seed {entry['seed']}")
    seeds = [entry["seed"] for entry in record["runs"]]
    check.need(seeds == record["seeds"] and len(set(seeds)) == len(seeds), f"its seeds {record['seeds']} are not those")


def check_run(check: _Checker, entry: dict[str, Any], where: str) -> None:
    """One seed's numbers, each of its type already."""
    top1, top5 = entry["exits"]["top1"], entry["exits"]["top5"]
    for index, pair in enumerate(zip(top1, top5, strict=True)):
        check.ordered(dict(zip(("top1", "top5"), pair, strict=True)), f"{where}, exit {index}")
    for name in ("last", "best_test_chosen", "mean"):
        check.ordered(entry[name], f"{where}, {name}")
    check.equal(entry["last"]["top1"], top1[-1], f"{where}, last.top1")
    check.equal(entry["best_test_chosen"]["exit"], top1.index(max(top1)), f"{where}, best_test_chosen.exit")
    check.equal(entry["best_test_chosen"]["top1"], max(top1), f"{where}, best_test_chosen.top1")
    chosen = entry["best_heldout_chosen"]
    if chosen is not None:
        check.ordered(chosen, f"{where}, best_heldout_chosen")
        check.equal(chosen["top1"], top1[chosen["exit"]], f"{where}, best_heldout_chosen.top1")
    for name, expected in (("DA", decline_area(top1)), ("TR", tail_retention(top1))):
        if entry[name] is not None:
            check.equal(entry[name], expected, f"{where}, {name}")
    for name, fitted in entry["fusion"].items():
        if fitted is not None:
            check.ordered(fitted, f"{where}, fusion on {name}")
            check.equal(fitted["N_eff"], effective_layers(fitted["weights"]), f"{where}, fusion on {name}, N_eff")


def from_summary(summary: dict[str, Any]) -> dict[str, Any]:
    """The values of a seed that its summary.json holds."""
    test = summary["test"]
    diagnostics = test.get("diagnostics") or {}
    return {
        "exits": test["exits"],
        "last": test["last"],
        "best_test_chosen": test["best_test_chosen"],
        "best_heldout_chosen": test.get("best_heldout_chosen"),
        "mean": test["mean"],
        "heldout_top1": summary.get("heldout_top1"),
        "fusion": {**dict.fromkeys(FITTED_ON), **summary["fusion"]},
        "DA": diagnostics.get("DA"),
        "TR": diagnostics.get("TR"),
        "wall_seconds": summary.get("wall_seconds"),
        "engine": summary.get("engine"),
    }


def from_environment(environment: dict[str, Any]) -> dict[str, Any]:
    """The values of a seed that its env.json holds."""
    return {**{field: environment.get(field) for field in ENVIRONMENT}, "typed": environment.get("command")}


def later_commands(fusion: dict[str, Any], early_exit: bool) -> list[str]:
    """The commands after training that made a run's other numbers."""
    commands = []
    for name, fitted in fusion.items():
        if fitted and name not in FITTED_BY_TRAINING:
            flag = " --temperatures" if name.endswith(TEMPERATURES) else ""
            commands.append(f"bicovg fuse RUN --on {name.removesuffix(TEMPERATURES)}{flag}")
    return [*commands, *(["bicovg eval RUN --early-exit"] if early_exit else [])]


def check_summary(path: Path, record: dict[str, Any], entry: dict[str, Any]) -> None:
    """The record's values are those of the run's summary; older records have none beside them."""
    if not os.path.lexists(path):
        return
    summary = read_json(path, RESTORE)
    check_file(path, summary, summary_schema, RESTORE)
    shared = {field: record[field] for field in ("recipe", "scope", "epochs", "exit_blocks", "parameters")}
    compare(path, {**summary, **from_summary(summary)}, {**shared, **entry}, (*shared, "seed", *from_summary(summary)))


def check_environment(folder: Path, entry: dict[str, Any]) -> None:
    """The record's machine, versions and commit are those of the run's env.json; older records have none."""
    path = folder / "env.json"
    if os.path.lexists(path):
        found = from_environment(read_environment(folder))
        compare(path, found, entry, found)


def from_timing(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Speed and memory of a seed, from the epochs that measured them."""
    speeds, peaks = (
        [line[name] for line in lines if line[name]] for name in ("images_per_second", "peak_memory_bytes")
    )
    speed = statistics.median(speeds) if speeds else None
    return {"images_per_second": speed, "peak_memory_bytes": max(peaks, default=None)}


def check_timing(folder: Path, entry: dict[str, Any]) -> None:
    """The record's speed and memory are those of the run's epochs; older records have no such file."""
    path = folder / "timing.jsonl"
    if os.path.lexists(path):
        found = from_timing(read_timing(folder))
        compare(path, found, entry, found)


def compare(path: Path, found: dict[str, Any], noted: dict[str, Any], names: Iterable[str]) -> None:
    """Refuse a record that notes another value than the file; what it does not note is left alone."""
    for name in names:
        if name in noted and noted[name] != found.get(name):
            raise UserError(f"{path} has another {name} than its record: {ANEW}")


def check_curve(folder: Path, epochs: int, entry: dict[str, Any], repair: str) -> None:
    """The metrics end with the last epoch and with the accuracies that it gave.

    Nearly so, where a summary stands beside them that has the very numbers.
    """
    limit = NEAR if os.path.lexists(folder / "summary.json") else CLOSE
    lines = read_metrics(folder, len(entry["exits"]["top1"]))
    if not lines or lines[-1]["epoch"] + 1 != epochs:
        raise UserError(f"{folder}/metrics.jsonl does not end with epoch {epochs - 1}: {repair}")
    for name, noted in final_curve(lines[-1].get("split"), entry).items():
        if not agree(lines[-1].get(name, noted), noted, limit):
            raise UserError(f"{folder}/metrics.jsonl ends with other accuracies ({name}) than its summary: {repair}")


def final_curve(split: str | None, entry: dict[str, Any]) -> dict[str, Any]:
    """What the last line of the metrics should say, as far as the run's values tell."""
    if split == "test":
        return {**entry["exits"], "mean_top1": entry["mean"]["top1"]}
    heldout = entry.get("heldout_top1") if split == "heldout" else None
    return {} if heldout is None else {"top1": heldout}


def agree(found: Any, noted: Any, limit: float) -> bool:
    """Whether two accuracies, or two lists of them, are equal within a limit."""
    pairs = zip(found, noted, strict=True) if isinstance(noted, list) else [(found, noted)]
    return all(abs(a - b) <= limit for a, b in pairs)


def check_later(folder: Path, entry: dict[str, Any]) -> None:
    """What was run after training is what made the numbers that are there; older records do not say it."""
    expected = later_commands(entry["fusion"], os.path.lexists(folder / "early_exit.json"))
    if entry.get("afterwards", expected) != expected:
        raise UserError(f"{folder} has other numbers than its record's afterwards {entry['afterwards']} make: {ANEW}")
