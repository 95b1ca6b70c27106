"""Epochs, evaluation, logging, checkpoints, resume."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bicovg.checkpoint import find_checkpoint, load_training_state, load_weights, save_checkpoint
from bicovg.config import Config
from bicovg.data.splits import Splits, load_splits, make_loaders
from bicovg.display import Display
from bicovg.engine import ENGINES, make_engine
from bicovg.errors import UserError
from bicovg.evaluation import collect_logits, exit_accuracies, report_exits, report_fusion
from bicovg.fusion import mean_logits, top_k_accuracy
from bicovg.limits import check_settings
from bicovg.methods import build_network
from bicovg.networks import LocalNetwork, count_parameters, dry_run
from bicovg.optim import make_optimizers
from bicovg.profiling import peak_memory, reset_peak_memory
from bicovg.runlog import RunLog, describe_environment, new_run_folder, write_json
from bicovg.step import check_step


def pick_device(name: str) -> torch.device:
    """``auto`` takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--train.device cuda: no CUDA device is visible; use cpu or auto")
    if name not in ("cpu", "cuda"):
        raise UserError(f"--train.device {name!r} is unknown: choose auto, cpu or cuda")
    return torch.device(name)


def check_config(config: Config) -> None:
    """Everything that can be known to be wrong before data is opened or a folder is made."""
    check_settings(config)
    train, data = config.train, config.data
    try:
        check_step(train.schedule, train.clip_norm, train.clip_scope, train.precision)
        dry_run(
            lambda: build_network(config.model, data.num_classes, data.image_channels),
            (data.image_channels, data.image_size, data.image_size),
        )
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from None
    if train.engine not in ENGINES:
        raise UserError(f"--train.engine {train.engine!r} is unknown: choose one of {', '.join(ENGINES)}")


@dataclass
class Progress:
    """Where a run stands; with the weights, all a resume needs."""

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    metrics_bytes: int = 0
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass
class Trainer:
    """One run: build with ``start`` or ``resume``, then ``train``."""

    config: Config
    run: Path
    net: LocalNetwork
    splits: Splits
    device: torch.device
    progress: Progress = field(default_factory=Progress)

    @classmethod
    def start(cls, config: Config, out: str | None = None) -> "Trainer":
        """Check everything, then create the run folder."""
        check_config(config)
        device = pick_device(config.train.device)
        splits = load_splits(config.data)
        if config.train.batch_size > len(splits.train):
            raise UserError(
                f"--train.batch_size {config.train.batch_size} is larger than the {len(splits.train)} training images"
            )
        run = new_run_folder(config, out)
        return cls(config, run, build_on(config, device), splits, device)._ready(None)

    @classmethod
    def resume(cls, run: Path, config: Config) -> "Trainer":
        """Continue from the newest checkpoint that verifies, or from the beginning if there is none yet."""
        check_config(config)
        device = pick_device(config.train.device)
        trainer = cls(config, run, build_on(config, device), load_splits(config.data), device)
        path, skipped = find_checkpoint(run)
        for line in skipped:
            print(line)
        print(f"resuming {run} from {path.name if path else 'the beginning: it has no usable checkpoint'}")
        return trainer._ready(path)

    @classmethod
    def open(cls, run: Path, config: Config) -> "Trainer":
        """The newest weights of a run, to evaluate; nothing is written."""
        device = pick_device(config.train.device)
        trainer = cls(config, run, build_on(config, device), load_splits(config.data), device)
        path, _ = find_checkpoint(run)
        if path is None:
            raise UserError(f"{run} has no usable checkpoint yet: train it with `bicovg train --resume {run}`")
        return trainer._ready(path, writing=False)

    def _ready(self, checkpoint: Path | None, writing: bool = True) -> "Trainer":
        if self.config.train.threads:
            torch.set_num_threads(self.config.train.threads)
        self.log = RunLog(self.run)
        self.optimizers = make_optimizers(self.net, self.config.optim, self.device)
        self.loss_sum = torch.zeros(len(self.net.exits), dtype=torch.float64, device=self.device)
        if checkpoint is not None:
            load_weights(checkpoint, self.net)
            progress, loss_sum = load_training_state(checkpoint, self.net, self.optimizers)
            self.progress = Progress(**progress)
            self.loss_sum.copy_(loss_sum)
        self.loaders = make_loaders(self.splits, self.config, self.device)
        self.engine = make_engine(self.net, self.optimizers, self.config, self.loaders["train"])
        if writing:
            self.log.cut_metrics(self.progress.metrics_bytes)
            write_json(self.run / "env.json", describe_environment(self.device.type, torch.get_num_threads()))
            write_json(
                self.run / "data.json",
                {"classes": self.splits.classes, "mean": self.splits.mean, "std": self.splits.std},
            )
        return self

    def train(self, max_seconds: float | None = None) -> dict[str, Any] | None:
        """Run to the end and return the summary; None if ``max_seconds`` ran out first (resumable)."""
        begun = time.monotonic()
        before = self.progress.seconds
        config = self.config.train
        with Display(self.config, self.net.exits, self.engine.name) as display:
            while self.progress.epoch < config.epochs:
                finished = self._train_epoch(begun, max_seconds)
                self.progress.seconds = before + time.monotonic() - begun
                if not finished:
                    self.save()
                    return None
                self._close_epoch(display)
                if config.save_every and self.progress.epoch % config.save_every == 0:
                    self.save()
        self.progress.seconds = before + time.monotonic() - begun
        self.save()
        summary = self.summarise()
        write_json(self.run / "summary.json", summary)
        return summary

    def _train_epoch(self, begun: float, max_seconds: float | None) -> bool:
        """The rest of the current epoch; False if the time ran out (at a step boundary)."""
        reset_peak_memory(self.device)
        loader, progress = self.loaders["train"], self.progress
        self._epoch_begun, self._epoch_start = time.perf_counter(), progress.step_in_epoch
        waited = loader.wait_seconds
        for losses in self.engine.steps(progress.epoch, progress.step_in_epoch):
            self.loss_sum += losses
            progress.step_in_epoch += 1
            progress.step += 1
            out_of_time = max_seconds is not None and time.monotonic() - begun >= max_seconds
            if out_of_time and progress.step_in_epoch < len(loader):
                return False
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self._epoch_seconds = time.perf_counter() - self._epoch_begun
        self._epoch_waited = loader.wait_seconds - waited
        return True

    def _close_epoch(self, display: Display) -> None:
        """Evaluate, log, show; then the next epoch begins."""
        progress, config = self.progress, self.config.train
        steps = progress.step_in_epoch - self._epoch_start
        timing: dict[str, Any] = {
            "epoch": progress.epoch,
            "images_per_second": steps * config.batch_size / self._epoch_seconds,
            "train_seconds": self._epoch_seconds,
            "loader_wait_share": self._epoch_waited / self._epoch_seconds,
            "peak_memory_bytes": peak_memory(self.device),
        }
        metrics: dict[str, Any] = {
            "epoch": progress.epoch,
            "step": progress.step,
            "lr": self.engine.learning_rate(progress.step - 1),
            "loss": (self.loss_sum / progress.step_in_epoch).tolist(),
        }
        last = progress.epoch + 1 == config.epochs
        if last or (progress.epoch + 1) % config.eval_every == 0:
            metrics.update(self._evaluate_curve())
        timing["eval_seconds"] = time.perf_counter() - self._epoch_begun - self._epoch_seconds
        self.log.append("metrics.jsonl", metrics)
        self.log.append("timing.jsonl", timing)
        remaining = config.epochs - progress.epoch - 1
        display.update(metrics, timing, remaining * (timing["train_seconds"] + timing["eval_seconds"]))
        if not all(math.isfinite(value) for value in metrics["loss"]):
            exit_ = next(i for i, value in enumerate(metrics["loss"]) if not math.isfinite(value))
            raise UserError(
                f"the loss of block {self.net.exits[exit_]} is not finite in epoch {progress.epoch}: "
                "lower --optim.lr or set --train.clip_norm"
            )
        progress.epoch, progress.step_in_epoch = progress.epoch + 1, 0
        self.loss_sum.zero_()

    def _evaluate_curve(self) -> dict[str, Any]:
        split = "heldout" if "heldout" in self.loaders else "test"
        logits, labels = self.logits(split)
        return {
            "split": split,
            **exit_accuracies(logits, labels),
            "mean_top1": top_k_accuracy(mean_logits(logits), labels),
        }

    def logits(self, split: str, epoch: int = 0) -> tuple[Tensor, Tensor]:
        """Exit logits and labels of ``train`` (plain), ``augmented``, ``heldout`` or ``test`` images."""
        loader = self.loaders[{"train": "plain"}.get(split, split)]
        return collect_logits(self.net, loader.batches(epoch), self.config.train.precision)

    def save(self) -> None:
        """Write a checkpoint of this step."""
        self.progress.metrics_bytes = self.log.metrics_size()
        save_checkpoint(self.run, self.net, self.optimizers, self.progress.as_json(), self.loss_sum)

    def summarise(self) -> dict[str, Any]:
        """Final accuracies on test by every rule; nothing is chosen on test but what says so."""
        test = self.logits("test")
        heldout = self.logits("heldout") if "heldout" in self.loaders else None
        heldout_top1 = exit_accuracies(*heldout)["top1"] if heldout else None
        fusion: dict[str, Any] = {"train": None, "heldout": None, "augmented": None}
        if len(self.net.exits) > 1:
            fusion["train"], _ = report_fusion(self.logits("train"), test, self.config.fusion)
            if heldout:
                fusion["heldout"], _ = report_fusion(heldout, test, self.config.fusion)
        return {
            "recipe": self.config.recipe,
            "seed": self.config.seed,
            "scope": self.config.model.scope,
            "data": self.config.data.name,
            "epochs": self.progress.epoch,
            "exit_blocks": self.net.exits,
            "test": report_exits(*test, heldout_top1),
            "heldout_top1": heldout_top1,
            "fusion": fusion,
            "parameters": count_parameters(self.net),
            "engine": self.engine.name,
            "wall_seconds": self.progress.seconds,
        }


def build_on(config: Config, device: torch.device) -> LocalNetwork:
    """The network of a config, initialised from its seed on the CPU (so that devices agree), then moved."""
    torch.manual_seed(config.seed)
    net = build_network(config.model, config.data.num_classes, config.data.image_channels)
    if device.type == "cuda":
        return net.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
    return net.to(device)
