"""What must hold inside a record: fields present, accuracies possible, every derived number equal to its definition."""

import math
from pathlib import Path
from typing import Any

from bicovg.diagnostics import decline_area, effective_layers, tail_retention
from bicovg.errors import UserError
from bicovg.run_schema import (
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

RECORD_FIELDS = {
    "name", "recipe", "about", "scope", "group_size", "alignment", "data", "holdout", "epochs", "recipe_epochs",
    "batch_size", "schedule", "precision", "clip_norm", "clip_scope", "seeds", "exit_blocks", "parameters", "runs",
}  # fmt: skip
RUN_FIELDS = {
    "seed", "exits", "last", "best_test_chosen", "best_heldout_chosen", "mean", "fusion", "DA", "TR", "wall_seconds",
    "images_per_second", "peak_memory_bytes", "engine", "device", "gpu", "torch", "cuda", "python", "commit",
    "command", "typed",
}  # fmt: skip
CLOSE = 1e-6
REPAIR = "make the record anew with `bicovg record`"
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

    def fields(self, tree: Any, names: set[str], where: str) -> None:
        self.need(isinstance(tree, dict), f"{where} is not an object")
        missing, extra = sorted(names - tree.keys()), sorted(tree.keys() - names)
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
        check.fields(entry, RUN_FIELDS, f"run {place}")
    exits = len(record["exit_blocks"])
    fusion = {"fusion": fusions(exits, "train", "augmented", "heldout")}
    for kind in (fields({**RUN, **fusion}), tested(exits)):
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
