"""Records: one folder per claimed number, made from finished runs and read by tables and figures. No torch.

``records/NAME/record.json`` holds the settings, and per seed the accuracies, the diagnostics, speed, memory, machine,
commit and command; ``records/NAME/s<seed>/`` holds that run's ``config.json``, ``metrics.jsonl``, ``summary.json`` and,
where they are there, ``env.json``, ``timing.jsonl`` and ``early_exit.json``. Every value comes from a run's files and
is compared with them when a record is read; what a run lacks is null. Settings and paths that belong to a machine are
left out.
"""

import argparse
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from bicovg.config import Config, override, to_json, walk_settings
from bicovg.errors import UserError
from bicovg.recipes import RECIPES, get_recipe
from bicovg.records_check import (
    ANEW,
    ENVIRONMENT,
    RESTORE,
    SUMMARY,
    check_curve,
    check_environment,
    check_later,
    check_record,
    check_summary,
    check_timing,
    from_environment,
    from_summary,
    from_timing,
    later_commands,
)
from bicovg.runlog import (
    expand_runs,
    read_config,
    read_early_exit,
    read_environment,
    read_json,
    read_summary,
    read_timing,
    write_json,
)

FOLDER = Path("records")
MACHINE_SETTINGS = ("data.root", "data.prefetch", "train.device", "train.threads")
SETTINGS = {
    "scope": "model.scope",
    "group_size": "model.group_size",
    "alignment": "model.alignment",
    "data": "data.name",
    "holdout": "data.holdout",
    "epochs": "train.epochs",
    "batch_size": "train.batch_size",
    "schedule": "train.schedule",
    "precision": "train.precision",
    "clip_norm": "train.clip_norm",
    "clip_scope": "train.clip_scope",
}
# settings that say how a run went, not what it computes; epochs, precision and held-out share have names of their own
RUNNING: tuple[str, ...] = (
    *("about", "seed", *MACHINE_SETTINGS, "train.overlap", "train.engine", "train.eval_every", "train.save_every"),
    *("train.save_seconds", "train.keep", "train.nonfinite", "train.processes", "train.stages", "train.cuts"),
    *("train.queue_depth", "train.timeout", "train.deterministic"),
)
NAMED = ("train.epochs", "train.precision", "data.holdout")
Record = dict[str, Any]


def add_parser(commands: Any) -> argparse.ArgumentParser:
    text = "make a record of finished runs that differ in their seed alone"
    parser: argparse.ArgumentParser = commands.add_parser("record", help=text, description=text, allow_abbrev=False)
    parser.add_argument("runs", metavar="RUN", nargs="+")
    parser.add_argument("--out", metavar="records/NAME", required=True, help="folder of the record")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--replace", action="store_true", help="take the place of an existing record")
    existing.add_argument("--add", action="store_true", help="add these seeds to an existing record")
    return parser


def run(args: argparse.Namespace) -> int:
    record = write_record(expand_runs(args.runs), Path(args.out), args.replace, args.add)
    for entry in record["runs"]:
        last, mean = entry["last"]["top1"], entry["mean"]["top1"]
        print(f"seed {entry['seed']}: last exit {last:.2f}, mean of exits {mean:.2f} % top-1")
    print(f"written: {args.out}")
    return 0


def write_record(runs: list[Path], out: Path, replace: bool = False, add: bool = False) -> Record:
    """Build, check and write a record folder, whole or not at all; with ``add`` beside the seeds it has."""
    out = Path(os.path.abspath(out))
    check_place(out, runs, replace, add)
    configs = [read_config(path) for path in runs]
    record = build_record(out.name, runs, configs)
    kept = read_record(out) if add else None
    if kept is not None:
        record = join_records(out, kept, record, configs[0])
    scratch = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # a folder of a name of its own: nothing that was there before is touched but the record to replace
        scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        draft = scratch / "new"
        for seed in [] if kept is None else kept["seeds"]:
            shutil.copytree(out / f"s{seed}", draft / f"s{seed}")
        for path, config in zip(runs, configs, strict=True):
            folder = draft / f"s{config.seed}"
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(to_json(portable(config)))
            shutil.copyfile(path / "metrics.jsonl", folder / "metrics.jsonl")
            if os.path.lexists(path / "timing.jsonl"):
                shutil.copyfile(path / "timing.jsonl", folder / "timing.jsonl")
            write_json(folder / "summary.json", portable_summary(read_summary(path)))
            if os.path.lexists(path / "env.json"):
                write_json(folder / "env.json", portable_environment(read_environment(path)))
            curve = read_early_exit(path, len(record["exit_blocks"]))
            if curve is not None:
                (folder / "early_exit.json").write_text(json.dumps(curve) + "\n")
        write_json(draft / "record.json", record)
        read_record(draft)
        swap_folders(draft, out, scratch / "old")
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}; choose a writable folder") from None
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    return record


def join_records(out: Path, kept: Record, new: Record, config: Config) -> Record:
    """The record at ``out`` with the new one's seeds, which must have its settings and none of its seeds."""
    twice = sorted(set(kept["seeds"]) & set(new["seeds"]))
    if twice:
        raise UserError(f"{out} has seed {twice[0]} already: --add takes other seeds")
    theirs = flatten(read_json(out / f"s{kept['seeds'][0]}" / "config.json", RESTORE))
    mine = flatten(json.loads(to_json(portable(config))))
    usual = flatten(json.loads(to_json(get_recipe(config.recipe) if config.recipe in RECIPES else Config())))
    unsaid = ("seed", "about", "train.engine", *MACHINE_SETTINGS)
    changed = [path for path in mine if path not in unsaid and theirs.get(path, usual[path]) != mine[path]]
    changed += [field for field in ("exit_blocks", "parameters") if kept[field] != new[field]]
    if changed:
        raise UserError(f"the runs differ from {out} in {', '.join(changed)}: record them apart")
    runs = sorted([*kept["runs"], *new["runs"]], key=lambda entry: int(entry["seed"]))
    return {**kept, "seeds": [entry["seed"] for entry in runs], "runs": runs}


def check_place(out: Path, runs: list[Path], replace: bool, add: bool = False) -> None:
    """Refuse a place whose writing would destroy anything but a record that is to be replaced or added to."""
    for path in runs:
        one, other = out.resolve(), path.resolve()
        if one.is_relative_to(other) or other.is_relative_to(one):
            raise UserError(f"--out {out} is, holds or lies in the run {path}: give a folder of its own")
    if not os.path.lexists(out):
        if add:
            raise UserError(f"--out {out} does not exist: leave --add out to make it")
        return
    if not (replace or add):
        raise UserError(
            f"--out {out} exists: choose another name, take its place with --replace or its side with --add"
        )
    if not (out / "record.json").is_file():
        raise UserError(
            f"--out {out} has no record.json, and only a record is replaced or added to: choose another name"
        )


def swap_folders(draft: Path, out: Path, old: Path) -> None:
    """Put ``draft`` at ``out``; what was there goes to ``old``, and comes back if that fails."""
    try:
        if os.path.lexists(out):
            out.rename(old)
        draft.rename(out)
    except BaseException:  # an interrupt, too
        if os.path.lexists(old) and not os.path.lexists(out):
            old.rename(out)
        raise


def build_record(name: str, runs: list[Path], configs: list[Config]) -> Record:
    """The content of record.json, from the runs' own files."""
    first = configs[0]
    for path, config in zip(runs, configs, strict=True):
        changed = differences(config, first, ("seed", "train.engine", *MACHINE_SETTINGS))
        if changed:
            raise UserError(f"{path} differs from {runs[0]} in {', '.join(changed)}: record them apart")
    seeds = [config.seed for config in configs]
    if len(set(seeds)) != len(seeds):
        raise UserError(f"seeds {seeds} name one twice: give one run per seed")
    known = {setting.path: setting.default for setting in walk_settings(first)}
    order = sorted(range(len(runs)), key=seeds.__getitem__)
    summaries = [read_summary(path) for path in runs]
    return {
        "name": name,
        "recipe": first.recipe,
        "about": first.about,
        **{field: known[path] for field, path in SETTINGS.items()},
        "recipe_epochs": get_recipe(first.recipe).train.epochs if first.recipe in RECIPES else None,
        "seeds": sorted(seeds),
        "exit_blocks": summaries[0]["exit_blocks"],
        "parameters": summaries[0].get("parameters"),
        "runs": [describe_run(runs[i], configs[i], summaries[i]) for i in order],
    }


def describe_run(path: Path, config: Config, summary: dict[str, Any]) -> dict[str, Any]:
    """One seed's values."""
    if summary.get("seed") != config.seed or summary.get("epochs") != config.train.epochs:
        raise UserError(
            f"{path}/summary.json is of seed {summary.get('seed')} after {summary.get('epochs')} epochs, its config of "
            f"seed {config.seed} and {config.train.epochs} epochs: finish the run with train --resume {path}"
        )
    measured, timing = from_summary(summary), from_timing(read_timing(path))
    check_curve(path, config.train.epochs, measured, f"resume the run with `bicovg train --resume {path}`")
    return {
        "seed": config.seed,
        **measured,
        **timing,
        **from_environment(portable_environment(read_environment(path))),
        "command": reproduce(config),
        "afterwards": later_commands(measured["fusion"], os.path.lexists(path / "early_exit.json")),
    }


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves of a nested object by dotted path."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        inner = flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        leaves.update(inner)
    return leaves


def portable(config: Config) -> Config:
    """A config without what belongs to the machine it ran on."""
    default = {setting.path: setting.default for setting in walk_settings(Config())}
    return override(config, {path: default[path] for path in MACHINE_SETTINGS})


def portable_summary(summary: dict[str, Any]) -> dict[str, Any]:
    """The fields of a summary that are known, and known to name no folder."""
    return {field: summary[field] for field in SUMMARY if field in summary}


def portable_environment(environment: dict[str, Any]) -> dict[str, Any]:
    """The fields of an env.json that a record uses."""
    known = {field: environment.get(field) for field in ENVIRONMENT}
    return {**known, "command": without_folders(environment.get("command"))}


def differences(one: Config, other: Config, ignored: tuple[str, ...]) -> list[str]:
    """Paths of the settings in which two configs differ."""
    theirs = {setting.path: setting.default for setting in walk_settings(other)}
    names = [] if one.recipe == other.recipe else ["recipe"]
    return names + [s.path for s in walk_settings(one) if s.default != theirs[s.path] and s.path not in ignored]


def reproduce(config: Config) -> str | None:
    """The command that starts this run again; None where its recipe is not one of ours any more."""
    if config.recipe not in RECIPES:
        return None
    changed = differences(config, get_recipe(config.recipe), MACHINE_SETTINGS)
    values = {setting.path: setting.default for setting in walk_settings(config)}
    words = [word for path in changed for word in (f"--{path}", as_word(values[path]))]
    return " ".join(["bicovg", "train", config.recipe, *words])


def as_word(value: Any) -> str:
    """A setting's value as the command line reads it."""
    if isinstance(value, tuple):
        return json.dumps(value, separators=(",", ":"))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def without_folders(command: str | None) -> str | None:
    """A command as it was typed, absolute paths cut to their last part."""
    return None if command is None else re.sub(r"(?<![\w.])/(?:[^\s/=]+/)*([^\s/=]+)", r"\1", command)


def read_record(folder: Path) -> Record:
    """One record, checked against itself and against the runs' files beside it."""
    path = folder / "record.json"
    record = read_json(path, "make the record anew with `bicovg record`")
    check_record(path, record)
    for entry in record["runs"]:
        check_copies(folder / f"s{entry['seed']}", record, entry)
    return record


def check_copies(folder: Path, record: Record, entry: dict[str, Any]) -> None:
    """The run's files beside the record are those of this record."""
    # read as plain JSON: a record stays readable when a later version adds a setting
    values = flatten(read_json(folder / "config.json", RESTORE))
    for field, path in {**SETTINGS, "recipe": "recipe", "seed": "seed"}.items():
        noted = entry["seed"] if field == "seed" else record[field]
        if path not in values or values[path] != noted:
            found = values.get(path, "nothing")
            raise UserError(f"{folder}/config.json has {path} {found!r}, its record {noted!r}: {ANEW}")
    check_curve(folder, record["epochs"], entry, ANEW)
    check_summary(folder / "summary.json", record, entry)
    check_environment(folder, entry)
    check_timing(folder, entry)
    check_later(folder, entry)


def changed_settings(folder: Path) -> dict[str, Any]:
    """What a record's run computed otherwise than its recipe, by path; empty where the recipe is not ours."""
    values = flatten(read_json(folder / "config.json", RESTORE))
    if values["recipe"] not in RECIPES:
        return {}
    usual = flatten(json.loads(to_json(get_recipe(values["recipe"]))))
    unsaid = (*RUNNING, *NAMED)
    return {path: values[path] for path in usual if path not in unsaid and values.get(path, usual[path]) != usual[path]}


def load_records(root: Path | str = FOLDER) -> dict[str, Record]:
    """Every record below ``root`` by name, each checked."""
    folders = sorted(path.parent for path in Path(root).glob("*/record.json"))
    return {folder.name: read_record(folder) for folder in folders}


def seed_values(record: Record, *keys: str | int) -> list[Any]:
    """One value per seed: ``seed_values(record, "fusion", "train", "top1")``; None where a seed lacks it."""
    found = []
    for entry in record["runs"]:
        value: Any = entry
        for key in keys:
            value = None if value is None else value[key]
        found.append(value)
    return found
