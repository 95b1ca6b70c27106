"""What a run folder holds, read for looking at: no torch, no network, nothing written.

A run that still goes on has no summary and no analysis yet; everything else here copes with that.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bicovg import run_schema
from bicovg.config import from_json
from bicovg.errors import UserError
from bicovg.limits import check_settings
from bicovg.records_check import check_record
from bicovg.roofline import trace_layers
from bicovg.runlog import read_early_exit, read_environment, read_json, read_metrics, read_summary, read_timing

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
    config = _read_json(path / "config.json", run_schema.CONFIG, "restore it or make the run anew")
    if config is None:
        raise UserError(f"{path} is not a run folder: it has no config.json")
    summary = read_summary(path) if os.path.lexists(path / "summary.json") else None
    entry = _record_entry(path, config)
    summary = entry["summary"] if entry else summary
    metrics = read_metrics(path, len(summary["exit_blocks"]) if summary else None)
    exits = _find_exits(config, metrics, summary)
    repair = f"remove it, and `bicovg report {path}` makes it anew"
    return RunData(
        path=path,
        label=f"{entry['name'] if entry else config.get('recipe', path.name)}, seed {config.get('seed', '?')}",
        config=config,
        env=read_environment(path) or (entry["env"] if entry else {}),
        metrics=metrics,
        timing=read_timing(path),
        exits=exits,
        summary=summary,
        analysis=_read_json(path / "analysis.json", run_schema.analysis(len(exits)), repair),
        early_exit=read_early_exit(path, len(exits)),
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
    file = path.parent / "record.json"
    if not os.path.lexists(file):
        return None
    record = read_json(file, "make the record anew with `bicovg record`")
    check_record(file, record)
    entry = next((run for run in record["runs"] if run["seed"] == config.get("seed")), None)
    if entry is None:
        return None
    names = ("exits", "last", "best_test_chosen", "best_heldout_chosen", "mean")
    return {
        "name": record["name"],
        "summary": {
            **{name: record[name] for name in ("recipe", "scope", "data", "epochs", "exit_blocks", "parameters")},
            "seed": entry["seed"],
            "test": {name: entry[name] for name in names},
            "fusion": entry["fusion"],
            "wall_seconds": entry["wall_seconds"],
        },
        "env": {name: entry[name] for name in ("device", "gpu", "torch", "cuda", "python", "commit", "command")},
    }


def _find_exits(config: Json, metrics: Sequence[Json], summary: Json | None) -> list[int]:
    """Block indices of the exits: from the summary, or from the layer tables, or simply counted."""
    if summary is not None:
        return list(summary["exit_blocks"])
    count = len(metrics[0]["loss"]) if metrics else None
    try:
        known = from_json(json.dumps(config))
        check_settings(known)
        exits = [layer.index for layer in trace_layers(known) if layer.goodness]
    except (ValueError, LookupError, ArithmeticError):  # no layer tables, or a configuration no network can have
        exits = []
    return exits if count in (None, len(exits)) else list(range(count))


def _read_json(path: Path, check: run_schema.Check, repair: str) -> Json | None:
    """A checked JSON object, or None where there is no such file."""
    if not os.path.lexists(path):
        return None
    found = read_json(path, repair)
    run_schema.check_file(path, found, check, repair)
    return found


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
