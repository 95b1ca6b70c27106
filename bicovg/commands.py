"""The commands that need torch: train, resume, eval, fuse, predict, checkpoint."""

import argparse
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from bicovg.calibration import is_calibrated
from bicovg.checkpoint import find_checkpoint, list_checkpoints, verify_checkpoint
from bicovg.comparing import comparison_table
from bicovg.config import Config, TrainConfig, override
from bicovg.display import summary_table, wide_console
from bicovg.distributed import ALONE, Team, join_team
from bicovg.errors import StorageError, UserError
from bicovg.evaluation import report_fusion
from bicovg.identity import MOVABLE, identify
from bicovg.launching import begin_run, find_finished
from bicovg.report.command import finish_run
from bicovg.runlog import read_config, read_summary, write_json
from bicovg.stopping import RunLock, Stopper, StopRequested
from bicovg.summary import keep_fusions
from bicovg.trainer import Trainer


def make_stopper(max_seconds: float | None) -> Stopper:
    if max_seconds is not None and not 0 < max_seconds < float("inf"):
        raise UserError(f"--max-seconds {max_seconds:g} is out of range: give a number of seconds above 0")
    return Stopper(max_seconds)


def train(config: Config, args: argparse.Namespace) -> int:
    """One run, or one per seed."""
    with join_team(config.train) as team, make_stopper(args.max_seconds) as stopper:
        if args.seeds is None:
            return 0 if finish(begin_run(config, args.out, team), stopper) else stopper.exit_code
        return train_seeds(config, args, team, stopper)


def train_seeds(config: Config, args: argparse.Namespace, team: Team, stopper: Stopper) -> int:
    """One run per seed; with ``--out`` those that are done are left as they are, and one that was stopped goes on."""
    if len(set(args.seeds)) != len(args.seeds):
        raise UserError(f"--seeds {' '.join(map(str, args.seeds))} names a seed twice")
    folders = {seed: Path(args.out) / f"s{seed}" for seed in args.seeds} if args.out else {}
    if team.leads and folders and Path(args.out).exists() and not any(map(os.path.lexists, folders.values())):
        raise UserError(f"--out {args.out} exists: choose another folder")
    done = team.tell(" ".join(map(str, find_finished(config, folders) if team.leads else ())))
    runs: list[Path] = []
    for position, seed in enumerate(args.seeds):
        if str(seed) in done.split():
            runs.append(folders[seed])
            continue
        out = str(folders[seed]) if folders else None
        trainer = begin_run(replace(config, seed=seed), out, team, again=True)
        if not finish(trainer, stopper, quiet=True):
            left = [seed for seed in args.seeds[position + 1 :] if not (folders and os.path.lexists(folders[seed]))]
            if left and team.leads:
                how = "the same command goes on with all" if folders else "train them with another --seeds"
                print(f"not begun: seeds {' '.join(map(str, left))}; {how}", flush=True)
            return stopper.exit_code
        runs.append(trainer.run)
    if team.leads:
        wide_console().print(comparison_table([runs]))
        print("runs: " + " ".join(map(str, runs)))
    return 0


def resume(args: argparse.Namespace, changes: dict[str, Any]) -> int:
    """Continue a run folder; only where and how fast it runs may change."""
    if args.recipe or args.out or args.seeds:
        raise UserError("--resume continues a run as it is: give no recipe, --out or --seeds beside it")
    for path in changes:
        if path not in MOVABLE:
            raise UserError(f"--{path} cannot change on --resume: it would be another run; start a new one instead")
    run = Path(args.resume)
    config = override(read_config(run), changes)
    with join_team(config.train) as team, make_stopper(args.max_seconds) as stopper:
        trainer = Trainer.resume(run, config, team)
        return 0 if finish(trainer, stopper) else stopper.exit_code


def finish(trainer: Trainer, stopper: Stopper, quiet: bool = False) -> bool:
    """Train to the end and print the result; False if it was stopped first."""
    try:
        summary = trainer.train(stopper)
        if not trainer.team.leads:
            return True
        trainer.team = ALONE  # what follows is the leader's alone
        wide_console().print(summary_table(summary))
        page = finish_run(trainer)
    except StopRequested:
        print(f"stopped by {stopper.reason} at step {trainer.progress.step}")
        print(f"go on with: bicovg train --resume {shlex.quote(str(trainer.run))}", flush=True)
        return False
    if not quiet:
        print(f"run folder: {trainer.run}\nreport: {page}")
    return True


def open_run(args: argparse.Namespace, team: Team = ALONE) -> Trainer:
    """A finished or stopped run with its newest weights, nothing written."""
    run = Path(args.run)
    config = read_config(run)
    changes = {"train.device": args.device, "train.engine": "eager"}
    if getattr(args, "data_root", None):
        changes["data.root"] = args.data_root
    return Trainer.open(run, override(config, changes), team)


def evaluate(args: argparse.Namespace) -> int:
    if args.early_exit:
        return evaluate_early_exit(open_run(args))
    with join_team(TrainConfig(device=args.device)) as team:
        trainer = open_run(args, team)
        summary = keep_fusions(trainer.run, trainer.summarise())
        wide_console().print(summary_table(summary))
        done, epochs = trainer.progress.epoch, trainer.config.train.epochs
        if done < epochs:
            print(f"after {done} of {epochs} epochs: summary.json is written when the run is finished")
        else:
            store_summary(trainer, summary)
    return 0


def evaluate_early_exit(trainer: Trainer) -> int:
    """Calibrate every exit, measure accuracy against compute on test, keep both in early_exit.json."""
    from bicovg.early_exit import describe_early_exit

    found = describe_early_exit(trainer)
    wide_console().print(early_exit_table(found))
    used = found["rules"][found["use"]]
    if is_calibrated(used["temperatures"]):
        before, after = used["ece_before"][-1], used["ece_after"][-1]
        source = f"temperatures fitted on {found['calibrated_on']} images"
        print(f"{source}: confidences are off by {after:.1f} points in the mean, {before:.1f} without")
    else:
        print("not calibrated: the training images call for no temperature, so confidences may be too high;")
        print("to calibrate them, hold images out of training (--data.holdout)")
    write_json(trainer.run / "early_exit.json", found)
    print(f"written: {trainer.run / 'early_exit.json'}")
    return 0


def early_exit_table(found: dict[str, Any]) -> Table:
    """Accuracy at a few amounts of compute, for both rules."""
    table = Table(title=f"early exit on {found['images']} {found['measured_on']} images")
    for column in ("predicts from", "less compute", "threshold", "top-1", "points lost"):
        table.add_column(column, justify="left" if column == "predicts from" else "right")
    for rule, record in found["rules"].items():
        name = {"mean": "mean of the blocks so far", "own": "the block alone"}.get(rule, "fusion of the blocks so far")
        table.add_row(name, "1.00x", "never", f"{record['full']['top1']:.2f}", "")
        for point in record["points"]:
            lost = f"{point['points_lost']:+.2f}"
            table.add_row("", f"{1 / point['compute']:.2f}x", f"{point['threshold']:.4f}", f"{point['top1']:.2f}", lost)
    return table


def store_summary(trainer: Trainer, summary: dict[str, Any]) -> bool:
    """The leader writes summary.json, unless the run is being trained right now; whether this process has."""
    run = trainer.run
    if not trainer.team.leads:
        return False
    try:
        lock = RunLock(run)
    except StorageError:
        raise
    except UserError as busy:
        print(f"summary.json was not written: {busy}")
        return False
    write_json(run / "summary.json", summary)
    lock.release()
    return True


def fuse(args: argparse.Namespace) -> int:
    """Fit on the chosen images, report on test, keep the weights in summary.json."""
    with join_team(TrainConfig(device=args.device)) as team:
        return fuse_run(open_run(args, team), args)


def fuse_run(trainer: Trainer, args: argparse.Namespace) -> int:
    if len(trainer.net.exits) < 2:
        raise UserError(f"{trainer.run} has a single exit: there is nothing to fuse")
    if args.on == "heldout" and "heldout" not in trainer.loaders:
        raise UserError(f"{trainer.run} held nothing out: train it with --data.holdout 0.02, or use --on train")
    summary = read_summary(trainer.run)
    unseen = trainer.config.train.epochs  # an epoch whose augmentation no step has used
    fit_on, test = trainer.logits(args.on, unseen), trainer.logits("test")
    record, _ = report_fusion(fit_on, test, trainer.config.fusion, args.temperatures, trainer.counters)
    summary["fusion"][args.on + "_temperatures" * args.temperatures] = record
    wide_console().print(summary_table(summary))
    head = f"fused-{args.on}{'-temperatures' * args.temperatures}"
    print(f"fusion fitted on {args.on}: top-1 {record['top1']:.2f}, N_eff {record['N_eff']:.2f}")
    if store_summary(trainer, summary):
        print(f"predict or export with it: --head {head}")
    return 0


def checkpoint(args: argparse.Namespace) -> int:
    """``list`` what is there and how large, or ``verify`` every byte: 1 if one is damaged."""
    run = Path(args.run)
    owner = identify(read_config(run))
    found = list_checkpoints(run)
    if not found:
        raise UserError(f"{run} has no checkpoint yet: train it with `bicovg train --resume {run}`")
    damaged = 0
    for path in found:
        words = size_in_words(path) if args.action == "list" else verify_checkpoint(path, owner)
        if not os.path.lexists(path):
            continue  # the run's own trainer has retired it since
        if args.action == "list":
            print(f"{path.name}  {words}")
        else:
            damaged += words is not None
            print(f"{path.name}  {'every byte is as written' if words is None else 'CANNOT BE USED: ' + words}")
    if args.action == "verify":
        newest, _ = find_checkpoint(run, owner)
        print(f"--resume would use {newest.name if newest else 'none of them'}")
    return 1 if damaged else 0


def size_in_words(path: Path) -> str:
    """Of all files in a folder, as far as they are there."""
    try:
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file()) if path.is_dir() else 0
    except FileNotFoundError:
        size = 0
    return f"{size / 1e6:,.1f} MB"


def predict(args: argparse.Namespace) -> int:
    from bicovg.predict import format_csv, format_json, predict_files

    run = Path(args.run)
    rejected: list[str] = []
    found = list(predict_files(run, args.images, args.head, args.top, args.device, args.early_exit, rejected))
    if rejected and not found:
        raise UserError(rejected[0])
    for sentence in rejected:
        print(f"bicovg: {sentence}", file=sys.stderr)
    if args.format != "table":
        print(format_json(found) if args.format == "json" else format_csv(found))
        return int(bool(rejected))
    rule = args.head if args.early_exit is None else f"early exit at {args.early_exit:g}"
    table = Table(title=f"{run}: {rule}")
    for column in ("image", "class", "probability", "decided by"):
        table.add_column(column)
    for image in found:
        for position, (label, probability) in enumerate(image.classes):
            first = position == 0
            table.add_row(
                escape(image.image) if first else "",
                escape(label),
                f"{probability:.3f}",
                f"block {image.block}" if first else "",
            )
    wide_console().print(table)
    return int(bool(rejected))
