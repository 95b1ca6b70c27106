"""What a run folder holds, read for looking at: no torch, no network, nothing written.

A run that still goes on has no summary and no analysis yet; everything else here copes with that.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bicovg.config import from_json
from bicovg.errors import UserError
from bicovg.roofline import trace_layers
from bicovg.runlog import read_json, read_summary

Json = dict[str, Any]


@dataclass
class RunData:
    """A run folder's files, parsed.

    Attributes:
        label: short name, unique among the runs of one page.
        config: config.json as it stands, also of another version of this package.
        exits: block index of every exit.
        summary: None while the run goes on.
        analysis: confusion matrix and mistakes, see ``bicovg.report.analysis``; None where not made.
        recorded: the folder is a seed's of a record (see ``bicovg.records``): no weights, no analysis to be had.
    """

    path: Path
    label: str
    config: Json
    env: Json
    metrics: list[Json]
    timing: list[Json]
    exits: list[int]
    summary: Json | None
    analysis: Json | None
    early_exit: Json | None
    recorded: bool = False

    @property
    def epochs(self) -> int:
        """Epochs the run is meant to last."""
        return int(self.config["train"]["epochs"])

    @property
    def evaluated(self) -> list[Json]:
        """The epochs whose accuracies were measured."""
        return [record for record in self.metrics if "top1" in record]

    @property
    def split(self) -> str:
        """The images the curves are on."""
        return str(self.evaluated[-1]["split"]) if self.evaluated else "test"

    @property
    def scope(self) -> str:
        return str(self.config["model"]["scope"])


def read_run(path: Path) -> RunData:
    """Everything a run folder holds; refuses what is no run folder or is damaged, in one sentence."""
    if not path.exists():
        raise UserError(f"{path} does not exist: give a run folder")
    config = _read_json(path / "config.json", ("data", "model", "train"))
    if config is None:
        raise UserError(f"{path} is not a run folder: it has no config.json")
    metrics = _read_jsonl(path / "metrics.jsonl", ("epoch", "lr", "loss"))
    summary = read_summary(path) if (path / "summary.json").exists() else None
    entry = _record_entry(path, config) if summary is None else None
    summary = entry["summary"] if entry else summary
    return RunData(
        path=path,
        label=f"{entry['name'] if entry else config.get('recipe', path.name)}, seed {config.get('seed', '?')}",
        config=config,
        env=_read_json(path / "env.json") or (entry["env"] if entry else {}),
        metrics=metrics,
        timing=_read_jsonl(path / "timing.jsonl", ("epoch", "images_per_second", "peak_memory_bytes")),
        exits=_find_exits(config, metrics, summary),
        summary=summary,
        analysis=_read_json(path / "analysis.json", ("head", "classes", "confusion", "class_top1", "mistakes")),
        early_exit=_read_json(path / "early_exit.json", ("rules", "calibrated_on", "measured_on")),
        recorded=entry is not None,
    )


def read_runs(paths: Sequence[Path]) -> list[RunData]:
    """Several runs, with labels made unique by their folder's name where recipe and seed agree."""
    resolved = [path.resolve() for path in paths]
    for index, path in enumerate(resolved):
        if path in resolved[:index]:
            raise UserError(f"{paths[index]} is given twice: name each run once")
    runs = [read_run(path) for path in paths]
    for marks in ([run.path.name for run in runs], [str(index + 1) for index in range(len(runs))]):
        labels = [run.label for run in runs]
        for run, mark in zip(runs, marks, strict=True):
            if labels.count(run.label) > 1:
                run.label = f"{run.label} ({mark})"
    return runs


def _record_entry(path: Path, config: Json) -> Json | None:
    """What the record one folder up says of this seed, in a summary's form; None where there is no record."""
    record = _read_json(path.parent / "record.json")
    entry = next((run for run in (record or {}).get("runs", []) if run.get("seed") == config.get("seed")), None)
    if record is None or entry is None:
        return None
    names = ("exits", "last", "best_test_chosen", "best_heldout_chosen", "mean")
    return {
        "name": record["name"],
        "summary": {
            **{name: record[name] for name in ("recipe", "scope", "data", "epochs", "exit_blocks", "parameters")},
            "seed": entry["seed"],
            "test": {name: entry[name] for name in names},
            "fusion": entry["fusion"],
            "wall_seconds": entry["wall_seconds"] or 0.0,
        },
        "env": {name: entry[name] for name in ("device", "gpu", "torch", "cuda", "python", "commit", "command")},
    }


def _find_exits(config: Json, metrics: Sequence[Json], summary: Json | None) -> list[int]:
    """Block indices of the exits: from the summary, or from the layer tables, or simply counted."""
    if summary is not None:
        return list(summary["exit_blocks"])
    count = len(metrics[0]["loss"]) if metrics else None
    try:
        exits = [layer.index for layer in trace_layers(from_json(json.dumps(config))) if layer.goodness]
    except ValueError:  # a method without layer tables, or the configuration of another version
        exits = []
    return exits if count in (None, len(exits)) else list(range(count))


def _read_json(path: Path, needed: Sequence[str] = ()) -> Json | None:
    """A JSON object with the ``needed`` fields, or None where there is no such file."""
    if not path.exists():
        return None
    repair = "restore it or make the run anew"
    found = read_json(path, repair)
    missing = [name for name in needed if name not in found]
    if missing:
        raise UserError(f"{path} lacks the field {missing[0]!r}: {repair}")
    return found


def _read_jsonl(path: Path, needed: Sequence[str]) -> list[Json]:
    """The records of a line file, each with the ``needed`` fields; a torn last line is left out."""
    try:
        lines = path.read_text().splitlines(keepends=True)
        records = [json.loads(line) for line in lines if line.endswith("\n")]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}): restore it or make the run anew") from None
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or not all(name in record for name in needed):
            raise UserError(f"{path} line {number} is no epoch's record: restore it or make the run anew")
    return records


def flatten(tree: Json, prefix: str = "") -> dict[str, Any]:
    """``{"optim": {"lr": 1}}`` as ``{"optim.lr": 1}``."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def differences(trees: Sequence[Json]) -> dict[str, list[Any]]:
    """The fields in which configurations differ, with every one's value; a field that one lacks is None there."""
    flats = [flatten(tree) for tree in trees]
    names = list(dict.fromkeys(name for flat in flats for name in flat))
    rows = {name: [flat.get(name) for flat in flats] for name in names}
    return {name: row for name, row in rows.items() if any(value != row[0] for value in row)}
