"""How a run begins: anew, or, when torchrun has restarted its processes, where its last checkpoint stands."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bicovg.checkpoint import list_checkpoints
from bicovg.config import Config, override, walk_settings
from bicovg.data.splits import load_splits
from bicovg.distributed import Team
from bicovg.errors import UserError
from bicovg.identity import MOVABLE
from bicovg.runlog import check_same_data, holds_nothing, read_config, read_summary
from bicovg.trainer import Trainer


def begin_run(config: Config, out: str | None, team: Team, again: bool = False) -> Trainer:
    """A new run in ``out``; under ``torchrun --max-restarts``, or ``again``, that which is there, if it is this one."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if restarts and out is None:
        raise UserError("torchrun --max-restarts needs --out DIR, so that a restarted run finds its folder")
    begun = team.leads and out is not None and (restarts or again) and find_begun(config, Path(out))
    if team.leads and out is not None and not begun:
        refuse_taken(Path(out))  # before data is opened and a network built for nothing
    if out is not None and team.tell("begun" if begun else "new") == "begun":
        return Trainer.resume(Path(out), config, team)
    return Trainer.start(config, out, team)


def find_begun(config: Config, run: Path) -> bool:
    """Whether this very run has begun in the folder."""
    if not run.exists():
        return False
    if holds_nothing(run):
        return False
    found, settings = read_config(run), {setting.path: setting.default for setting in walk_settings(config)}
    if override(found, {path: settings[path] for path in MOVABLE}) != config:
        raise UserError(f"--out {run} holds a run with other settings: choose another folder")
    return True


def is_finished(config: Config, run: Path) -> bool:
    """Whether this very run is done in the folder: trained, judged and, as far as it can still be, reported."""
    if not (find_begun(config, run) and (run / "summary.json").is_file()):
        return False
    reported = (run / "report.html").is_file() or not list_checkpoints(run)
    return bool(read_summary(run).get("epochs") == config.train.epochs) and reported


def find_finished(config: Config, folders: Mapping[int, Path]) -> set[int]:
    """Seeds that are done; where others are not, all that have begun must be of the data set that is there."""
    done = {seed for seed, run in folders.items() if is_finished(replace(config, seed=seed), run)}
    begun = [run for run in folders.values() if os.path.lexists(run)]
    if begun and len(done) < len(folders):
        splits = load_splits(config.data)
        for run in begun:
            check_same_data(run, config, splits)
    return done


def refuse_taken(run: Path) -> None:
    """A new run needs a folder that is not there, or holds nothing."""
    if os.path.lexists(run) and not holds_nothing(run):
        raise UserError(f"--out {run} exists: choose another folder, or continue it with --resume {run}")
