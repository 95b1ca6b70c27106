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
    config = _read_json(path / "config.json")
    if config is None:
        raise UserError(f"{path} is not a run folder: it has no config.json")
    if not all(isinstance(config.get(part), dict) for part in ("data", "model", "train")):
        raise UserError(f"{path / 'config.json'} is not a run's configuration: restore it or give another folder")
    metrics, summary = _read_jsonl(path / "metrics.jsonl"), _read_json(path / "summary.json")
    return RunData(
        path=path,
        label=f"{config.get('recipe', path.name)}, seed {config.get('seed', '?')}",
        config=config,
        env=_read_json(path / "env.json") or {},
        metrics=metrics,
        timing=_read_jsonl(path / "timing.jsonl"),
        exits=_find_exits(config, metrics, summary),
        summary=summary,
        analysis=_read_json(path / "analysis.json"),
        early_exit=_read_json(path / "early_exit.json"),
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


def _read_json(path: Path) -> Json | None:
    """A JSON object, or None where there is no such file."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise UserError(f"{path} is not valid JSON: restore it or make the run anew") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object: restore it or make the run anew")
    return value


def _read_jsonl(path: Path) -> list[Json]:
    """The records of a line file; a torn last line is left out."""
    try:
        lines = path.read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    try:
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except ValueError:
        raise UserError(f"{path} has a line that is not valid JSON: restore it or make the run anew") from None


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
