"""Records as tables see them: which belong to a recipe, and what stands in a cell."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from bicovg.records import Record, as_word, changed_settings, load_records, seed_values
from bicovg.report.record_charts import is_candidate
from bicovg.runlog import read_early_exit, read_metrics

Records = dict[str, Record]


def read_records(root: Path = Path()) -> Records:
    """Every record of a checkout, with what it changed of its recipe as ``changes``.

    Each seed has its early-exit curve as ``early_exit`` and the mean of exits on held-out images as ``heldout_mean``,
    or None.
    """
    records = load_records(root / "records")
    for name, record in records.items():
        for entry in record["runs"]:
            folder = root / "records" / name / f"s{entry['seed']}"
            entry["early_exit"], record["changes"] = read_early_exit(folder), changed_settings(folder)
            last = read_metrics(folder)[-1]
            entry["heldout_mean"] = last["mean_top1"] if last.get("split") == "heldout" else None
    return records


def of_recipe(records: Records, recipe: str, unchanged: bool = True) -> list[Record]:
    """Records of a recipe but for tuning candidates: the longest first, then those that held nothing out.

    With ``unchanged=False`` also those that changed a setting.
    """
    found = [one for one in records.values() if one["recipe"] == recipe and not is_candidate(one)]
    found = [one for one in found if not (unchanged and one["changes"])]
    return sorted(found, key=lambda record: (-record["epochs"], record["holdout"], record["name"]))


def cell(values: Sequence[float | None], digits: int = 2) -> str:
    """``mean`` of one seed, ``mean +- std`` of several; a dash where one seed lacks the value."""
    numbers = [value for value in values if value is not None]
    if not numbers or len(numbers) < len(values):
        return "-"
    mean = f"{statistics.fmean(numbers):.{digits}f}"
    return mean if len(numbers) == 1 else f"{mean} +- {statistics.stdev(numbers):.{digits}f}"


def each(values: Sequence[float | None], digits: int = 2) -> str:
    """Every seed's value."""
    return ", ".join("-" if value is None else f"{value:.{digits}f}" for value in values)


def accuracy(record: Record, *keys: str, of: str = "top1") -> str:
    """Top-1, or top-5, by one rule; a network with one exit has no rule but the last."""
    single = len(record["exit_blocks"]) == 1
    return "-" if single and keys != ("last",) else cell(seed_values(record, *keys, of))


def length(record: Record) -> str:
    """Epochs; a run shorter than its recipe says so, and one that trained on fewer images."""
    whole, held = record["recipe_epochs"], record["holdout"]
    epochs = str(record["epochs"]) if whole in (None, record["epochs"]) else f"{record['epochs']} of {whole}, short"
    return f"{epochs}, {held:.0%} held out" if held else epochs


def settings_changed(record: Record) -> str:
    return ", ".join(f"{path} {as_word(value)}" for path, value in record["changes"].items())


def what_changed(record: Record) -> str:
    """Settings, and the precision where that is float32."""
    return ", ".join(filter(None, (settings_changed(record), "float32" * (record["precision"] == "float32"))))
