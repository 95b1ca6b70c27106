"""What a run's evaluations report: the curve of every exit after an epoch, every rule's accuracy at the end."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bicovg.errors import UserError
from bicovg.evaluation import exit_accuracies, report_exits, report_fusion
from bicovg.fusion import mean_logits, top_k_accuracy
from bicovg.networks import count_parameters
from bicovg.runlog import read_summary

if TYPE_CHECKING:
    from bicovg.trainer import Trainer


def measure_curve(trainer: "Trainer") -> dict[str, Any]:
    """Top-1 and top-5 of every exit and of their mean, on held-out images or, where there are none, on test."""
    trainer.engine.share_weights()
    split = "heldout" if "heldout" in trainer.loaders else "test"
    logits, labels = trainer.logits(split)
    return {
        "split": split,
        **exit_accuracies(logits, labels, trainer.counters),
        "mean_top1": top_k_accuracy(mean_logits(logits), labels, team=trainer.counters),
    }


def make_summary(trainer: "Trainer") -> dict[str, Any]:
    """Final accuracies on test by every rule; nothing is chosen on test but what says so."""
    trainer.engine.share_weights()
    team, test = trainer.counters, trainer.logits("test")
    heldout = trainer.logits("heldout") if "heldout" in trainer.loaders else None
    heldout_top1 = exit_accuracies(*heldout, team)["top1"] if heldout else None
    fusion: dict[str, Any] = {"train": None, "heldout": None, "augmented": None}
    if len(trainer.net.exits) > 1:
        fusion["train"], _ = report_fusion(trainer.logits("train"), test, trainer.config.fusion, team=team)
        if heldout:
            fusion["heldout"], _ = report_fusion(heldout, test, trainer.config.fusion, team=team)
    return {
        "recipe": trainer.config.recipe,
        "seed": trainer.config.seed,
        "scope": trainer.config.model.scope,
        "data": trainer.config.data.name,
        "epochs": trainer.progress.epoch,
        "exit_blocks": trainer.net.exits,
        "test": report_exits(*test, heldout_top1, team),
        "heldout_top1": heldout_top1,
        "fusion": fusion,
        "parameters": count_parameters(trainer.net),
        "engine": trainer.engine.name,
        "wall_seconds": trainer.progress.seconds,
    }


def keep_fusions(run: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """The summary with what ``bicovg fuse`` has added to the one in the run folder, where that has the same exits."""
    try:
        before = read_summary(run)
    except UserError:
        return summary
    if before["test"]["exits"] != summary["test"]["exits"]:
        return summary
    added = {name: record for name, record in before["fusion"].items() if not summary["fusion"].get(name)}
    return summary | {"fusion": summary["fusion"] | added}
