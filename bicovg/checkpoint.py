"""Checkpoints: a folder of safetensors and JSON, whole or absent. Nothing executes on load.

Written under a temporary name, every file and the folder fsynced, the manifest (size and SHA-256 of every file) last,
then renamed. The two newest are kept; an older one goes only after the new one stands and verifies.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from torch.optim import Optimizer

from bicovg.errors import UserError
from bicovg.networks import LocalNetwork

SCHEMA = 1
KEEP = 2


def pack_optimizer(index: int, optimizer: Optimizer, names: dict[Tensor, str]) -> dict[str, Tensor]:
    """Optimizer state as flat tensors named ``unit.parameter.key``."""
    packed = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if value is not None:
                packed[f"{index}|{names[parameter]}|{key}"] = torch.as_tensor(value)
    return packed


def save_checkpoint(
    run: Path, net: LocalNetwork, optimizers: list[Optimizer], progress: dict[str, Any], loss_sum: Tensor
) -> Path:
    """Write ``checkpoints/step-N``; ``progress`` must hold ``step`` and is plain JSON."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in net.named_parameters()}
    optimizer_state = {}
    for index, optimizer in enumerate(optimizers):
        optimizer_state.update(pack_optimizer(index, optimizer, names))
    optimizer_state["loss_sum"] = loss_sum
    files = {
        "model.safetensors": save({k: _plain(v) for k, v in net.state_dict().items()}),
        "optimizer.safetensors": save({k: _plain(v) for k, v in optimizer_state.items()}),
        "progress.json": (json.dumps(progress, indent=2) + "\n").encode(),
    }
    folder = run / "checkpoints"
    folder.mkdir(exist_ok=True)
    final = folder / f"step-{progress['step']:09d}"
    partial = folder / f".partial-{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name, blob in files.items():
        _write_synced(partial / name, blob)
    manifest = {
        "schema": SCHEMA,
        "files": {
            name: {"bytes": len(blob), "sha256": hashlib.sha256(blob).hexdigest()} for name, blob in files.items()
        },
    }
    _write_synced(partial / "manifest.json", (json.dumps(manifest, indent=2) + "\n").encode())
    _sync_folder(partial)
    if final.exists():  # the same step again: the state is the same, replace it whole
        shutil.rmtree(final)
    partial.rename(final)
    _sync_folder(folder)
    if verify_checkpoint(final) is None:
        for old in list_checkpoints(run)[:-KEEP]:
            shutil.rmtree(old)
    return final


def _plain(tensor: Tensor) -> Tensor:
    """A contiguous CPU copy: safetensors stores no strides."""
    return tensor.detach().cpu().contiguous().clone()


def _write_synced(path: Path, blob: bytes) -> None:
    with path.open("wb") as file:
        file.write(blob)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def list_checkpoints(run: Path) -> list[Path]:
    """Oldest first."""
    return sorted((run / "checkpoints").glob("step-*"))


def verify_checkpoint(path: Path) -> str | None:
    """Why this checkpoint cannot be used, or None."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        if manifest["schema"] != SCHEMA:
            return f"schema {manifest['schema']!r} is not {SCHEMA}"
        for name in ("model.safetensors", "optimizer.safetensors", "progress.json"):
            expected = manifest["files"][name]
            blob = (path / name).read_bytes()
            if len(blob) != expected["bytes"]:
                return f"{name} has {len(blob)} bytes, the manifest says {expected['bytes']}"
            if hashlib.sha256(blob).hexdigest() != expected["sha256"]:
                return f"{name} does not match its checksum"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def find_checkpoint(run: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and a line for each that was skipped."""
    skipped: list[str] = []
    for path in reversed(list_checkpoints(run)):
        reason = verify_checkpoint(path)
        if reason is None:
            return path, skipped
        skipped.append(f"skipped {path.name}: {reason}")
    return None, skipped


def load_weights(path: Path, net: LocalNetwork) -> None:
    """Model weights and buffers, in place."""
    try:
        net.load_state_dict(load_file(path / "model.safetensors"))
    except RuntimeError as error:
        first = str(error).splitlines()[-1].strip()
        raise UserError(f"{path} does not fit the network of its config.json: {first}") from None


def load_training_state(path: Path, net: LocalNetwork, optimizers: list[Optimizer]) -> tuple[dict[str, Any], Tensor]:
    """Optimizer state into ``optimizers``; returns progress and the running loss sum.

    Call before a step is captured in a CUDA graph: the state tensors are new.
    """
    stored = load_file(path / "optimizer.safetensors")
    loss_sum = stored.pop("loss_sum")
    parameters = dict(net.named_parameters())
    for name, value in stored.items():
        index, parameter_name, key = name.split("|")
        parameter = parameters[parameter_name]
        scalar_on_cpu = key == "step" and not optimizers[int(index)].defaults.get("capturable", False)
        device = "cpu" if scalar_on_cpu and not optimizers[int(index)].defaults.get("fused") else parameter.device
        state = value.to(device)
        if state.shape == parameter.shape and parameter.dim() == 4:
            state = state.contiguous(memory_format=_memory_format(parameter))
        optimizers[int(index)].state[parameter][key] = state
    return json.loads((path / "progress.json").read_text()), loss_sum


def _memory_format(tensor: Tensor) -> torch.memory_format:
    return torch.contiguous_format if tensor.is_contiguous() else torch.channels_last
