"""The run folder: what is written where, and when.

``config.json`` first and complete, ``env.json``, ``metrics.jsonl`` (deterministic values only), ``timing.jsonl``
(speed, memory, wall time), ``events.jsonl`` (what the guard found), ``summary.json`` last. A checkpoint carries the
metrics up to its step, so a resumed run continues the file without a line twice or missing.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bicovg import run_schema
from bicovg.checkpoint import METRICS
from bicovg.config import Config, from_json, to_json
from bicovg.durable import append_line, leftover, read_regular, replace_file, sync_folder
from bicovg.errors import StorageError, UserError
from bicovg.stopping import LOCK, RunLock

if TYPE_CHECKING:
    from bicovg.data.splits import Splits

RESULTS = ("summary.json", "analysis.json", "early_exit.json", "report.html")
MAX_TEXT = 1 << 28


def new_run_folder(config: Config, out: str | None) -> tuple[Path, RunLock]:
    """Create ``out``, or ``runs/<recipe>-s<seed>-<time>``, lock it, write config.json. It may be there, but empty."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = Path(out) if out else Path("runs") / f"{config.recipe}-s{config.seed}-{stamp}"
    if out is None and path.exists():
        path = path.with_name(f"{path.name}-{os.getpid()}")
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=holds_nothing(path))
        for folder in missing:
            sync_folder(folder.parent)
        lock = RunLock(path)
        try:
            if not holds_nothing(path):  # another process has begun a run here since, and ended
                raise FileExistsError
            replace_file(path / "config.json", to_json(config).encode())
        except BaseException:
            lock.release()
            raise
    except FileExistsError:
        raise UserError(f"--out {path} exists: choose another folder, or continue it with --resume {path}") from None
    except OSError as error:
        raise StorageError(f"cannot create {path}: {error.strerror}; choose a writable folder with --out") from None
    return path, lock


def holds_nothing(path: Path) -> bool:
    """Whether a folder is empty, but for what a run leaves that died before it had a config.json."""
    left = {leftover(path / "config.json"), path / LOCK}
    return path.is_dir() and left.issuperset(path.iterdir())


def drop_results(run: Path) -> None:
    """Remove what was made of the weights so far: training is about to change them."""
    try:
        for name in RESULTS:
            (run / name).unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"cannot remove {error.filename}: {error.strerror}; move it away") from None


def read_config(run: Path) -> Config:
    path = run / "config.json"
    if not os.path.lexists(path):
        if holds_nothing(run):
            raise UserError(f"{run} is an empty folder: begin a run in it with `bicovg train RECIPE --out {run}`")
        raise UserError(f"{run} is not a run folder: it has no config.json")
    text = _read_text(path)
    config = from_json(text, str(path))
    if not _is_writable(text):
        raise UserError(f"{path} holds half a character: restore it or start a new run")
    return config


def expand_runs(paths: Iterable[str]) -> list[Path]:
    """Run folders as they are, and for a folder of ``train --seeds`` the runs inside it."""
    found: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(path.glob("*/config.json")) if not os.path.lexists(path / "config.json") else []
        found += [file.parent for file in inside] or [path]
    return found


def _read_text(path: Path, strict: bool = True) -> str:
    try:
        return read_regular(path, MAX_TEXT).decode(errors="strict" if strict else "replace")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; restore it") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text: restore it") from None


def _is_writable(text: str) -> bool:
    """Whether the texts in valid JSON can be written again: an escaped half of a surrogate pair cannot."""
    if "\\ud" not in text.lower():
        return True
    try:
        json.dumps(json.loads(text), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def read_json(path: Path, repair: str) -> dict[str, Any]:
    """A JSON object, or a UserError with the repair."""
    text = _read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not valid JSON: {repair}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object: {repair}")
    if not _is_writable(text):
        raise UserError(f"{path} holds half a character: {repair}")
    return value


def read_summary(run: Path) -> dict[str, Any]:
    path = run / "summary.json"
    if not path.is_file():
        read_config(run)
        raise UserError(f"{run} has no summary.json: the run is unfinished; continue it with train --resume {run}")
    repair = f"make it anew with `bicovg eval {run}`"
    summary = read_json(path, repair)
    run_schema.check_file(path, summary, run_schema.summary, repair)
    return summary


def read_data(run: Path, config: Config) -> tuple[list[str], list[float], list[float]]:
    """Class names, mean and std that a run wrote down when it opened its data set."""
    data = _read_data(run, config)
    return data["classes"], [float(x) for x in data["mean"]], [float(x) for x in data["std"]]


def _read_data(run: Path, config: Config) -> dict[str, Any]:
    path = run / "data.json"
    repair = f"resume the run once with `bicovg train --resume {run}`, which writes it anew"
    data: dict[str, Any] = read_json(path, repair)
    check = run_schema.data(config.data.num_classes, config.data.image_channels)
    run_schema.check_file(path, data, check, repair)
    return data


def check_same_data(run: Path, config: Config, splits: "Splits") -> None:
    """Refuse another data set than the run noted: under its name there may be another by now.

    A data.json that is not there or damaged says nothing. One of an older run has the names of the classes alone; they
    may be numbers in one store and words in another, as not every copy of a data set has words.
    """
    try:
        data = _read_data(run, config)
    except UserError:
        return
    if "fingerprint" in data:
        same = data["fingerprint"] == splits.fingerprint
    else:
        kinds = {all(name.isdecimal() for name in names) for names in (data["classes"], splits.classes)}
        same = data["classes"] == splits.classes or len(kinds) == 2
    if not same:
        raise UserError(
            f"{config.data.name} holds other images or labels than those of {run}: it was packed anew, or elsewhere; "
            "pack the run's own again, in another folder if need be (--data.root of train, else --data-root), or train "
            "a new run"
        )


def read_early_exit(run: Path, exits: int | None = None) -> dict[str, Any] | None:
    """What ``bicovg eval --early-exit`` has measured, None where it has not; ``exits`` is their number, where known."""
    path, repair = run / "early_exit.json", f"make it anew with `bicovg eval {run} --early-exit`"
    if not os.path.lexists(path):
        return None
    found = read_json(path, repair)
    run_schema.check_file(path, found, run_schema.early_exit, repair)
    if exits not in (None, len(found["exit_blocks"])):
        raise UserError(f"{path} is of {len(found['exit_blocks'])} exits, the run has {exits}: {repair}")
    return found


def read_environment(run: Path) -> dict[str, Any]:
    """Versions, device and command of a run; empty where it has no env.json."""
    path, repair = run / "env.json", "restore it, or remove it"
    if not os.path.lexists(path):
        return {}
    found = read_json(path, repair)
    run_schema.check_file(path, found, run_schema.ENVIRONMENT, repair)
    return found


def write_json(path: Path, value: Any) -> None:
    """Whole or absent: written beside, synced, renamed over."""
    _replace(path, (json.dumps(value, indent=2) + "\n").encode())


def _replace(path: Path, blob: bytes) -> None:
    try:
        replace_file(path, blob)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; correct that and run the command again") from None


def describe_environment(device: str, threads: int) -> dict[str, Any]:
    """Commit, versions, device, threads, command."""
    import numpy
    import torch

    gpu = torch.cuda.get_device_name() if device.startswith("cuda") else None
    return {
        "commit": find_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "cuda": torch.version.cuda,
        "device": device,
        "gpu": gpu,
        "cpu_count": os.cpu_count(),
        "threads": threads,
        "platform": platform.platform(),
        "command": " ".join(["bicovg", *sys.argv[1:]]),
    }


def find_commit() -> str | None:
    """The commit of the checkout this package runs from, ``+`` where the tree has changes.

    ``BICOVG_COMMIT``, where set, has the word: a copied tree's own history may not be its own. None if nobody knows.
    """
    named, here = os.environ.get("BICOVG_COMMIT"), Path(__file__).parent
    if named:
        return named

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "runlog.py") is None:
        return None
    commit = git("rev-parse", "HEAD")
    return commit and commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


class RunLog:
    """Appends to a run folder's line files, if this process ``writes``."""

    def __init__(self, run: Path, writes: bool = True) -> None:
        self.run, self.writes, self._metrics = run, writes, b""

    def append(self, name: str, record: dict[str, Any]) -> None:
        if not self.writes:
            return
        line = json.dumps(record)
        try:
            append_line(self.run / name, line)
            if name == METRICS:
                self._metrics += f"{line}\n".encode()
        except OSError as error:
            raise StorageError(
                f"cannot write {self.run / name}: {error.strerror}; correct that, then go on with "
                f"`bicovg train --resume {self.run}`"
            ) from None

    def metrics(self) -> bytes:
        """metrics.jsonl so far, whatever others have done to the file meanwhile."""
        return self._metrics

    def restore(self, metrics: bytes, epoch: int, step: int) -> None:
        """The line files as they stood at a checkpoint; of timing and events, what lies before it."""
        _replace(self.run / METRICS, metrics)
        self._metrics = metrics
        for name, key, limit in (("timing.jsonl", "epoch", epoch), ("events.jsonl", "step", step)):
            records = [record or {} for record in _parse_lines(self.run / name, strict=False)]
            kept = [record for record in records if isinstance(record.get(key), int) and record[key] < limit]
            if kept or (self.run / name).exists():
                _replace(self.run / name, "".join(json.dumps(record) + "\n" for record in kept).encode())


def _parse_lines(path: Path, strict: bool = True) -> list[dict[str, Any] | None]:
    """Every whole line as a JSON object, None where it is none; a torn last line is left out.

    Unless ``strict``, what is not text is no object either, instead of an error.
    """
    records: list[dict[str, Any] | None] = []
    for line in _read_text(path, strict).split("\n")[:-1] if path.exists() else ():
        try:
            record = json.loads(line) if _is_writable(line) else None
        except (ValueError, RecursionError):
            record = None
        records.append(record if isinstance(record, dict) else None)
    return records


def read_lines(run: Path, name: str, check: run_schema.Check | None = None) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, timing.jsonl or events.jsonl, each passed to ``check``."""
    records, repair = [], "remove that line, or resume the run"
    for number, record in enumerate(_parse_lines(run / name), start=1):
        if record is None:
            raise UserError(f"line {number} of {run / name} is not a JSON object: {repair}")
        if check is not None:
            run_schema.check_file(run / f"{name} line {number}", record, check, repair)
        records.append(record)
    return records


def read_metrics(run: Path, exits: int | None = None) -> list[dict[str, Any]]:
    """The epochs of metrics.jsonl; without the number of exits, all must have as many as the first."""
    if exits is None:
        first = next(iter(read_lines(run, "metrics.jsonl")), {}).get("loss")
        exits = len(first) if isinstance(first, list) else 0
    return read_lines(run, "metrics.jsonl", run_schema.metrics(exits))


def read_timing(run: Path) -> list[dict[str, Any]]:
    """The epochs of timing.jsonl."""
    return read_lines(run, "timing.jsonl", run_schema.TIMING)
