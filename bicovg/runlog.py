"""The run folder: what is written where, and when.

``config.json`` first and complete, ``env.json``, ``metrics.jsonl`` (deterministic values only), ``timing.jsonl``
(speed, memory, wall time), ``summary.json`` last.
"""

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bicovg.config import Config, from_json, to_json
from bicovg.errors import UserError


def new_run_folder(config: Config, out: str | None) -> Path:
    """Create ``out``, or ``runs/<recipe>-s<seed>-<time>``, and write config.json into it."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = Path(out) if out else Path("runs") / f"{config.recipe}-s{config.seed}-{stamp}"
    if out is None and path.exists():
        path = path.with_name(f"{path.name}-{os.getpid()}")
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"--out {path} exists: choose another folder, or continue it with --resume {path}") from None
    except OSError as error:
        raise UserError(f"cannot create {path}: {error.strerror}; choose a writable folder with --out") from None
    (path / "config.json").write_text(to_json(config))
    return path


def read_config(run: Path) -> Config:
    path = run / "config.json"
    if not path.is_file():
        raise UserError(f"{run} is not a run folder: it has no config.json")
    try:
        return from_json(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def read_summary(run: Path) -> dict[str, Any]:
    path = run / "summary.json"
    if not path.is_file():
        read_config(run)
        raise UserError(f"{run} has no summary.json: the run is unfinished; continue it with train --resume {run}")
    try:
        summary: dict[str, Any] = json.loads(path.read_text())
    except ValueError:
        raise UserError(f"{path} is not valid JSON: make it anew with `bicovg eval {run}`") from None
    return summary


def write_json(path: Path, value: Any) -> None:
    """Whole or absent: written beside, then renamed over."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    temporary.replace(path)


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
    """The commit of the checkout this package runs from, ``+`` where the tree has changes, or None."""
    here = Path(__file__).parent

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
    """Appends to a run folder's two line files."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def append(self, name: str, record: dict[str, Any]) -> None:
        with (self.run / name).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def metrics_size(self) -> int:
        """Bytes of metrics.jsonl, kept in each checkpoint so that a resume can cut what came after it."""
        path = self.run / "metrics.jsonl"
        return path.stat().st_size if path.exists() else 0

    def cut_metrics(self, size: int) -> None:
        path = self.run / "metrics.jsonl"
        if path.exists():
            os.truncate(path, size)


def read_lines(run: Path, name: str) -> list[dict[str, Any]]:
    """The records of metrics.jsonl or timing.jsonl; a torn last line is left out."""
    path = run / name
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            records.append(json.loads(line))
    return records
