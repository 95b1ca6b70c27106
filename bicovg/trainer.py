"""Epochs, evaluation, logging, checkpoints, resume."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bicovg.checkpoint import METRICS, checkpoint_name, read_checked, walk_back
from bicovg.config import Config
from bicovg.data.loader import Batch
from bicovg.data.splits import Splits, load_splits, make_loaders
from bicovg.display import Display
from bicovg.engine import make_engine
from bicovg.errors import NonFiniteError, UserError
from bicovg.evaluation import collect_logits, exit_accuracies, report_exits, report_fusion
from bicovg.fusion import mean_logits, top_k_accuracy
from bicovg.networks import LocalNetwork, count_parameters
from bicovg.optim import make_optimizers
from bicovg.preparation import build_on as build_on
from bicovg.preparation import check_config as check_config
from bicovg.preparation import pick_device as pick_device
from bicovg.preparation import set_up_process
from bicovg.profiling import peak_memory, reset_peak_memory
from bicovg.runlog import RunLog, describe_environment, new_run_folder, write_json
from bicovg.saving import Saver
from bicovg.state import Progress, Snapshot, load_state, read_progress, read_weights
from bicovg.stopping import RunLock, Stopper, StopRequested


@dataclass
class Trainer:
    """One run: build with ``start`` or ``resume``, then ``train``; or ``open`` to evaluate."""

    config: Config
    run: Path
    net: LocalNetwork
    splits: Splits
    device: torch.device
    progress: Progress = field(default_factory=Progress)
    lock: RunLock | None = None
    stopper: Stopper = field(default_factory=Stopper)

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
        set_up_process(config)
        net = build_on(config, device)
        run = new_run_folder(config, out)
        trainer = cls(config, run, net, splits, device, lock=RunLock(run))
        trainer._make_ready()
        trainer._open_log(b"")
        return trainer

    @classmethod
    def resume(cls, run: Path, config: Config) -> "Trainer":
        """Continue from the newest checkpoint that can be used, or from the beginning if none was written yet."""
        check_config(config)
        set_up_process(config)
        device = pick_device(config.train.device)
        lock = RunLock(run)
        trainer = cls(config, run, build_on(config, device), load_splits(config.data), device, lock=lock)
        trainer._make_ready()
        path, metrics, skipped = walk_back(run, trainer._load)
        for line in skipped:
            print(line)
        if path is None and skipped:
            raise UserError(
                f"none of the {len(skipped)} checkpoints of {run} can be used: restore one, or move "
                f"{run / 'checkpoints'} away to begin anew"
            )
        print(f"resuming {run} from {path.name if path else 'the beginning: it has no checkpoint yet'}")
        trainer._open_log(metrics or b"")
        return trainer

    @classmethod
    def open(cls, run: Path, config: Config) -> "Trainer":
        """The newest weights of a run, to evaluate; nothing is written."""
        check_config(config)
        device = pick_device(config.train.device)
        set_up_process(config)
        net = build_on(config, device)
        path, weights, skipped = walk_back(run, lambda path: (read_weights(path, net), read_progress(path)))
        for line in skipped:
            print(line)
        if path is None or weights is None:
            raise UserError(f"{run} has no usable checkpoint yet: train it with `bicovg train --resume {run}`")
        net.load_state_dict(weights[0])
        trainer = cls(config, run, net, load_splits(config.data), device, weights[1])
        trainer._make_ready()
        return trainer

    def _make_ready(self) -> None:
        self.log = RunLog(self.run)
        self.saver = Saver(self.run, self.config.train.keep, self.config.train.save_seconds)
        self.optimizers = make_optimizers(self.net, self.config.optim, self.device)
        # sum of the finite losses of each exit since the epoch began, and their number
        self.losses = torch.zeros(2, len(self.net.exits), dtype=torch.float64, device=self.device)
        self.loaders = make_loaders(self.splits, self.config, self.device)
        self.engine = make_engine(self.net, self.optimizers, self.config, self.loaders["train"])

    def _load(self, checkpoint: Path) -> bytes:
        """Take a checkpoint's state; returns the metrics up to it. Nothing has changed where it is Unusable."""
        metrics = read_checked(checkpoint, METRICS)
        self.progress = load_state(
            checkpoint, self.net, self.optimizers, self.losses, self.config.train.epochs, len(self.loaders["train"])
        )
        return metrics

    def _open_log(self, metrics: bytes) -> None:
        self.log.restore(metrics, self.progress.epoch, self.progress.step)
        write_json(self.run / "env.json", describe_environment(self.device.type, torch.get_num_threads()))
        write_json(
            self.run / "data.json",
            {"classes": self.splits.classes, "mean": self.splits.mean, "std": self.splits.std},
        )

    def train(self, stopper: Stopper | None = None) -> dict[str, Any]:
        """Run to the end and return the summary; raises StopRequested, all saved, if ``stopper`` asked to stop."""
        self.stopper = stopper or self.stopper
        self._begun = time.monotonic() - self.progress.seconds
        try:
            with Display(self.config, self.net.exits, self.engine.name) as display:
                while self.progress.epoch < self.config.train.epochs:
                    self._train_epoch(display)
                    self._close_epoch(display)
            self.save(wait=True)
            summary = self.summarise()
            write_json(self.run / "summary.json", summary)
            return summary
        except StopRequested:
            self.save(wait=True)
            raise
        except NonFiniteError as error:
            self._note_events()
            raise NonFiniteError(
                f"{error}: lower --optim.lr or set --train.clip_norm in a new run, or go on without such steps by "
                f"`bicovg train --resume {self.run} --train.nonfinite skip`"
            ) from None
        finally:
            self.saver.close()
            if self.lock is not None:
                self.lock.release()

    def _train_epoch(self, display: Display) -> None:
        """The rest of the current epoch; StopRequested, if it comes, comes between two steps."""
        reset_peak_memory(self.device)
        loader, progress = self.loaders["train"], self.progress
        self._epoch_begun, self._epoch_start = time.perf_counter(), progress.step_in_epoch
        waited = loader.wait_seconds
        self.stopper.check_signals()
        for losses in self.engine.steps(progress.epoch, progress.step_in_epoch):
            self._add_losses(losses)
            progress.step_in_epoch += 1
            progress.step += 1
            display.step(progress.epoch, progress.step_in_epoch, len(loader))
            self._note_events()
            self.stopper.check()
            if self.saver.due():
                self.save()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self._epoch_seconds = time.perf_counter() - self._epoch_begun
        self._epoch_waited = loader.wait_seconds - waited

    def _add_losses(self, losses: Tensor) -> None:
        if self.config.train.nonfinite == "skip":
            finite = losses.isfinite()
            self.losses += torch.stack([losses.where(finite, 0), finite])
        else:  # the run stops before a loss that is not finite is reported
            self.losses[0] += losses
            self.losses[1] += 1

    def _close_epoch(self, display: Display) -> None:
        """Evaluate, log, show; then the next epoch begins. A stop during evaluation leaves the epoch open."""
        self._flush_guard()
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
            "loss": (self.losses[0] / self.losses[1].clamp(min=1)).tolist(),
        }
        last = progress.epoch + 1 == config.epochs
        if last or (progress.epoch + 1) % config.eval_every == 0:
            metrics.update(self._evaluate_curve())
        timing["eval_seconds"] = time.perf_counter() - self._epoch_begun - self._epoch_seconds
        self.log.append("metrics.jsonl", metrics)
        self.log.append("timing.jsonl", timing)
        remaining = config.epochs - progress.epoch - 1
        display.update(metrics, timing, remaining * (timing["train_seconds"] + timing["eval_seconds"]))
        progress.epoch, progress.step_in_epoch = progress.epoch + 1, 0
        self.losses.zero_()
        if config.save_every and progress.epoch % config.save_every == 0:
            self.save()

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
        return collect_logits(self.net, self._interruptible(loader.batches(epoch)), self.config.train.precision)

    def _interruptible(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.stopper.check_signals()
            yield batch

    def save(self, wait: bool = False) -> None:
        """Hand a checkpoint of this step to the saver's thread; ``wait`` until it is on disk."""
        self._flush_guard()
        if not self.saver.has(checkpoint_name(self.progress.step, self.progress.epoch)):
            self.progress.seconds = time.monotonic() - self._begun
            self.saver.save(Snapshot(self.net, self.optimizers, self.losses, self.progress, self.log.metrics()))
        if wait:
            self.saver.wait()

    def _flush_guard(self) -> None:
        """Nothing is saved or reported before the host has seen every flag up to here."""
        if self.engine.guard is not None:
            self.engine.guard.flush()
            self._note_events()

    def _note_events(self) -> None:
        while self.engine.guard is not None and self.engine.guard.events:
            event = self.engine.guard.events.pop(0)
            self.log.append("events.jsonl", {"event": "nonfinite", **asdict(event)})

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
