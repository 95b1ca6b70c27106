"""Epochs, evaluation, logging, checkpoints, resume."""

import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bicovg.checkpoint import FOLDER, METRICS, Unusable, checkpoint_name, none_usable, read_checked, walk_back
from bicovg.choosing import fall_back, make_engine
from bicovg.config import Config
from bicovg.data.loader import Batch, Loader
from bicovg.data.splits import Splits, load_splits, make_loaders
from bicovg.display import Display
from bicovg.distributed import ALONE, Team
from bicovg.errors import NonFiniteError, NonFiniteStateError, UserError
from bicovg.evaluation import collect_logits, gather_logits
from bicovg.guard import NonFinite
from bicovg.identity import identify
from bicovg.networks import LocalNetwork
from bicovg.optim import make_optimizers
from bicovg.preparation import build_on, check_config, check_fit, pick_device, set_up_process
from bicovg.profiling import peak_memory, reset_peak_memory
from bicovg.runlog import RunLog, check_same_data, describe_environment, drop_results, new_run_folder, write_json
from bicovg.saving import Saver
from bicovg.state import Progress, Snapshot, load_state, read_progress, read_weights
from bicovg.stopping import RunLock, Stopper, StopRequested
from bicovg.summary import keep_fusions, make_summary, measure_curve


@dataclass
class Trainer:
    """One run: build with ``start`` or ``resume``, then ``train``; or ``open`` to evaluate.

    Of several processes, each has one with the same ``team``; only the leader's writes.
    """

    config: Config
    run: Path
    net: LocalNetwork
    splits: Splits
    device: torch.device
    progress: Progress = field(default_factory=Progress)
    lock: RunLock | None = None
    stopper: Stopper = field(default_factory=Stopper)
    team: Team = ALONE

    @classmethod
    def start(cls, config: Config, out: str | None = None, team: Team = ALONE) -> "Trainer":
        """Check everything, then create the run folder."""
        check_config(config)
        device = pick_device(config.train.device)
        splits = load_splits(config.data)
        set_up_process(config)
        net = build_on(config, device)
        check_fit(config, splits, net, team)
        trainer = cls(config, Path(), net, splits, device, team=team)
        trainer._make_ready()
        run = Path()
        if team.leads:
            run, trainer.lock = new_run_folder(config, out)
        trainer.run = trainer.log.run = trainer.saver.run = Path(team.tell(str(run)))
        if team.leads:
            trainer._open_log(b"")
        return trainer

    @classmethod
    def resume(cls, run: Path, config: Config, team: Team = ALONE) -> "Trainer":
        """Continue from the newest checkpoint that can be used, or from the beginning if none was written yet."""
        check_config(config)
        set_up_process(config)
        device = pick_device(config.train.device)
        lock = RunLock(run) if team.leads else None
        try:
            return cls._resume(run, config, device, lock, team)
        except BaseException:
            if lock is not None:
                lock.release()
            raise

    @classmethod
    def _resume(cls, run: Path, config: Config, device: torch.device, lock: RunLock | None, team: Team) -> "Trainer":
        net, splits = build_on(config, device), load_splits(config.data)
        check_fit(config, splits, net, team)
        check_same_data(run, config, splits)
        trainer = cls(config, run, net, splits, device, lock=lock, team=team)
        trainer._make_ready()
        if not team.leads:
            trainer._follow(team.tell(""))
            return trainer
        path, metrics, skipped = walk_back(run, trainer._load, identify(config))
        say_skipped(skipped)
        if path is None and skipped:
            raise UserError(f"{none_usable(run, skipped)}, or move {run / FOLDER} away to begin anew")
        trainer.saver.unfit = set(skipped)
        team.tell(path.name if path else "")
        print(f"resuming {run} from {path.name if path else 'the beginning: it has no checkpoint yet'}")
        trainer._open_log(metrics or b"")
        return trainer

    @classmethod
    def open(cls, run: Path, config: Config, team: Team = ALONE) -> "Trainer":
        """The newest weights of a run, to evaluate; nothing is written."""
        check_config(config)
        device = pick_device(config.train.device)
        set_up_process(config)
        net = build_on(config, device)
        path, weights, skipped = walk_back(
            run, lambda path: (read_weights(path, net), read_progress(path)), identify(config)
        )
        say_skipped(skipped)
        if path is None or weights is None:
            raise UserError(none_usable(run, skipped))
        net.load_state_dict(weights[0])
        splits = load_splits(config.data)
        check_same_data(run, config, splits)
        trainer = cls(config, run, net, splits, device, weights[1], team=team)
        trainer._make_ready()
        return trainer

    def _make_ready(self) -> None:
        self.team.copy_leader((*self.net.parameters(), *self.net.buffers()))
        self.log = RunLog(self.run, writes=self.team.leads)
        train = self.config.train
        self.saver = Saver(self.run, train.keep, train.save_seconds, identify(self.config))
        self.optimizers = make_optimizers(self.net, self.config.optim, self.device)
        # sum of the finite losses of each exit since the epoch began, and their number
        self.losses = torch.zeros(2, len(self.net.exits), dtype=torch.float64, device=self.device)
        self.loaders = make_loaders(self.splits, self.config, self.device, self.team)
        self.engine = make_engine(self.net, self.optimizers, self.config, self.loaders["train"], self.team)
        self._saved: str | None = None

    def _load(self, checkpoint: Path) -> bytes:
        """Take a checkpoint's state; returns the metrics up to it. Nothing has changed where it is Unusable."""
        metrics, epochs = read_checked(checkpoint, METRICS), read_progress(checkpoint).epoch
        if metrics.count(b"\n") != epochs or not metrics.endswith(b"\n" if epochs else b""):
            raise Unusable(f"its {METRICS} does not hold one line for each of {epochs} epochs")
        self.progress = load_state(
            checkpoint, self.net, self.optimizers, self.losses, self.config.train.epochs, len(self.loaders["train"])
        )
        return metrics

    def _follow(self, name: str) -> None:
        """Take the checkpoint that the leader took."""
        try:
            if name:
                self._load(self.run / FOLDER / name)
        except Unusable as reason:
            repair = "put the run folder where every machine sees it"
            raise UserError(f"{name} of {self.run} cannot be used here, {reason}: {repair}") from None

    def _open_log(self, metrics: bytes) -> None:
        self.log.restore(metrics, self.progress.epoch, self.progress.step)
        grid = {"processes": self.team.data, "stages": self.team.stages}
        write_json(self.run / "env.json", describe_environment(self.device.type, torch.get_num_threads()) | grid)
        splits = self.splits
        data = {"classes": splits.classes, "mean": splits.mean, "std": splits.std, "fingerprint": splits.fingerprint}
        write_json(self.run / "data.json", data)
        if self.progress.epoch < self.config.train.epochs:
            drop_results(self.run)

    def train(self, stopper: Stopper | None = None) -> dict[str, Any]:
        """Run to the end and return the summary; raises StopRequested, all saved, if ``stopper`` asked to stop."""
        self.stopper = stopper or self.stopper
        self._begun = time.monotonic() - self.progress.seconds
        try:
            try:
                return self._run_to_the_end()
            except StopRequested:
                self.save(wait=True)
                raise
        except NonFiniteError as error:
            self._note_events()
            raise NonFiniteError(f"{error}: {self._advise(error)}") from None
        finally:
            self._close()

    def _run_to_the_end(self) -> dict[str, Any]:
        if self.team.world == 1:
            self._warm_up()
        with Display(self.config, self.net.exits, self.engine.name) as display:
            while self.progress.epoch < self.config.train.epochs:
                self._train_epoch(display)
                self._close_epoch(display)
        self.save(wait=True)
        summary = keep_fusions(self.run, self.summarise())
        if self.team.leads:
            write_json(self.run / "summary.json", summary)
        return summary

    def _warm_up(self) -> None:
        """Compile and capture; where that fails, the next engine takes its place."""
        ready = self.progress.epoch >= self.config.train.epochs
        while not ready:
            try:
                self.engine.warm_up()
                ready = True
            except Exception as error:
                self.engine = fall_back(self.engine, error)

    def _advise(self, error: NonFiniteError) -> str:
        """What to do about it: skipping steps mends neither weights that are bad already nor a run that does so."""
        new = "lower --optim.lr or set --train.clip_norm in a new run"
        again = f"bicovg train --resume {shlex.quote(str(self.run))}"
        if isinstance(error, NonFiniteStateError) or self.config.train.nonfinite == "skip":
            return f"{new}; `{again}` goes on from the last good checkpoint"
        return f"{new}, or go on without such steps by `{again} --train.nonfinite skip`"

    def _close(self) -> None:
        failure = sys.exc_info()[1]
        try:
            self.saver.close()
        except NonFiniteError:
            if not isinstance(failure, NonFiniteError):  # else the same fault, met again where it was to be saved
                raise
        finally:
            if self.lock is not None:
                self.lock.release()

    def _train_epoch(self, display: Display) -> None:
        """The rest of the current epoch; StopRequested, if it comes, comes between two steps."""
        reset_peak_memory(self.device)
        loader, progress = self.loaders["train"], self.progress
        self._epoch_begun, self._epoch_start = time.perf_counter(), progress.step_in_epoch
        waited = loader.wait_seconds
        self._pause(self.stopper.exit_code)
        for losses in self.engine.steps(progress.epoch, progress.step_in_epoch):
            self._add_losses(losses)
            progress.step_in_epoch += 1
            progress.step += 1
            display.step(progress.epoch, progress.step_in_epoch, len(loader))
            self._note_events()
            if self._pause(self.stopper.wish(), self.saver.due()):
                self.save()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self._epoch_seconds = time.perf_counter() - self._epoch_begun
        self._epoch_waited = loader.wait_seconds - waited

    def _pause(self, wish: int, due: bool = False) -> bool:
        """Between two batches: StopRequested if a process wishes to stop; whether to write a checkpoint."""
        wish, due = self.team.consult(wish, due)
        self.stopper.obey(wish)
        return due

    def _add_losses(self, losses: Tensor) -> None:
        sums = self.losses[:, self.engine.exits]
        if self.config.train.nonfinite == "skip":
            finite = losses.isfinite()
            sums += torch.stack([losses.where(finite, 0), finite])
        else:  # the run stops before a loss that is not finite is reported
            sums[0] += losses
            sums[1] += 1

    def _all_losses(self) -> Tensor:
        """The running losses with those of other stages."""
        own = torch.zeros_like(self.losses)
        own[:, self.engine.exits] = self.losses[:, self.engine.exits]
        return self.team.add_stages(own)

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
            "peak_memory_bytes": peak_memory(self.device, self.engine.workspace),
        }
        losses = self._all_losses()
        if not losses[1].all():
            raise NonFiniteError(f"every step of epoch {progress.epoch + 1} was skipped")
        metrics: dict[str, Any] = {
            "epoch": progress.epoch,
            "step": progress.step,
            "lr": self.engine.learning_rate(progress.step - 1),
            "loss": (losses[0] / losses[1].clamp(min=1)).tolist(),
        }
        last = progress.epoch + 1 == config.epochs
        if last or (progress.epoch + 1) % config.eval_every == 0:
            metrics.update(measure_curve(self))
        timing["eval_seconds"] = time.perf_counter() - self._epoch_begun - self._epoch_seconds
        self.log.append("metrics.jsonl", metrics)
        self.log.append("timing.jsonl", timing)
        seconds = timing["train_seconds"] + timing["eval_seconds"]
        display.update(metrics, timing, (config.epochs - progress.epoch - 1) * seconds)
        progress.epoch, progress.step_in_epoch = progress.epoch + 1, 0
        self.losses.zero_()
        if config.save_every and progress.epoch % config.save_every == 0:
            self.save()

    @property
    def counters(self) -> Team:
        """The processes among which ``logits`` are spread; stages of one network each have all of them."""
        return self.team if self.team.data > 1 else ALONE

    def logits(self, split: str, epoch: int = 0) -> tuple[Tensor, Tensor]:
        """Exit logits and labels of ``train`` (plain), ``augmented``, ``heldout`` or ``test`` images."""
        loader = self.loaders[{"train": "plain"}.get(split, split)]
        batches, classes = self._take_turns(loader, epoch), self.config.data.num_classes
        logits, labels = collect_logits(self.net, self.engine.judge, batches, classes)
        return gather_logits(logits, loader, self.team) if self.team.stages > self.team.data == 1 else (logits, labels)

    def _take_turns(self, loader: Loader, epoch: int) -> Iterator[Batch]:
        """This process's batches, every ``world``-th of all; all processes pause equally often."""
        batches = loader.batches(epoch, min(self.team.rank, len(loader)), self.team.world)
        for _ in range(0, len(loader), self.team.world):
            self._pause(self.stopper.exit_code)
            yield from islice(batches, 1)

    def save(self, wait: bool = False) -> None:
        """Hand a checkpoint of this step to the saver's thread; ``wait`` until it is on disk."""
        self._flush_guard()
        name = checkpoint_name(self.progress.step, self.progress.epoch)
        if name != self._saved and self.team.share == 0:
            self.progress.seconds = time.monotonic() - self._begun
            losses = self._all_losses()
            snapshot = Snapshot(self.net, self.optimizers, losses, self.progress, self.log.metrics())
            self._log_events(self.engine.complete(snapshot))
            if self.team.leads:
                self.saver.save(snapshot)
        self._saved = name
        if wait:
            self.saver.wait()
            self.team.meet()

    def _flush_guard(self) -> None:
        """Nothing is saved or reported before the host has seen every flag up to here."""
        if self.engine.guard is not None:
            self.engine.guard.flush()
            self._note_events()

    def _note_events(self) -> None:
        if self.engine.guard is not None and self.team.stage == 0:  # a later stage's come with its state
            self._log_events(self.engine.guard.events)

    def _log_events(self, events: list[NonFinite]) -> None:
        while events:
            self.log.append("events.jsonl", {"event": "nonfinite", **asdict(events.pop(0))})

    def summarise(self) -> dict[str, Any]:
        """Final accuracies on test by every rule."""
        return make_summary(self)


def say_skipped(skipped: Mapping[str, str]) -> None:
    """A line for each checkpoint that was walked back from."""
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}")
