"""A trained run as something to hand on: a folder for a model hub, with torch.export and ONNX files beside it.

The folder holds ``model.safetensors``, ``config.json`` and a model card; ``bicovg.load`` needs nothing else. Images
go in as floats in [0, 1]: normalisation, network and head are one module. What no exit of the head needs is left out.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from bicovg import __version__
from bicovg.blocks import Unit
from bicovg.config import Config, from_json
from bicovg.data.splits import load_splits
from bicovg.early_exit import walk_exits
from bicovg.errors import UserError
from bicovg.methods import build_network
from bicovg.model_card import model_card
from bicovg.networks import LocalNetwork
from bicovg.predict import head_weights, load_run
from bicovg.records import portable
from bicovg.runlog import read_data, read_json, read_summary

FORMATS = ("hub", "torch", "onnx")
FORMAT_VERSION = 1
TOLERANCE = 1e-4
CHECKED_BATCHES = (1, 64)


class Predictor(nn.Module):
    """Images in [0, 1] to class logits.

    Args:
        net: a network whose last exit has a weight that is not 0.
        weights: one per exit.

    Attributes:
        classes: class names, in the order of the logits.
    """

    def __init__(
        self,
        net: LocalNetwork,
        weights: Sequence[float],
        classes: Sequence[str],
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        super().__init__()
        self.net, self.weights, self.classes = net, tuple(weights), tuple(classes)
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(std)[:, None, None], persistent=False)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b k"]:
        fits = images.is_floating_point() and (images.dtype != torch.float64 or self.mean.dtype == torch.float64)
        if images.dim() != 4 or images.shape[1] != len(self.mean) or not fits:
            known = f"{str(images.dtype).removeprefix('torch.')} {tuple(images.shape)}"
            raise ValueError(f"images are {known}: give float32 in [0, 1], (batch, {len(self.mean)}, height, width)")
        x = (images - self.mean) / self.std
        used = [place for place, weight in enumerate(self.weights) if weight]
        parts = [self.weights[p] * z for p, z in zip(used, walk_exits(self.net, x, used), strict=True)]
        return torch.stack(parts).sum(dim=0)


def cut_network(net: LocalNetwork, exits: int) -> LocalNetwork:
    """The part of a network that its first ``exits`` exits need."""
    units: list[nn.Module] = []
    for unit in net.units:
        missing = exits - sum(len(kept.exits) for kept in units)  # type: ignore[misc, arg-type]
        if missing <= 0:
            break
        if isinstance(unit, Unit) and len(unit.exits) > missing:
            last = unit.exits[missing - 1]
            unit = Unit([block for block in unit.blocks if block.index <= last])  # type: ignore[misc, operator]
        units.append(unit)
    return LocalNetwork(units, net.stem)


def make_predictor(
    net: LocalNetwork, weights: Sequence[float], classes: Sequence[str], mean: Sequence[float], std: Sequence[float]
) -> Predictor:
    """A predictor of the exits up to the last with a weight."""
    needed = max(index for index, weight in enumerate(weights) if weight) + 1
    return Predictor(cut_network(net, needed), weights[:needed], classes, mean, std).eval()


def export_run(run: Path, head: str, out: Path, formats: Sequence[str] = FORMATS) -> dict[str, Any]:
    """Write the folder ``out``, whole or not at all; returns what the check found."""
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        raise UserError(f"--format {','.join(formats)!r} is unknown: choose from {', '.join(FORMATS)}, comma between")
    if out.exists():
        raise UserError(f"{out} exists: choose another folder with --out")
    summary = read_summary(run)
    net, config = load_run(run, "cpu")
    classes, mean, std = read_data(run, config)
    weights = head_weights(head, run, net.exits)
    predictor = make_predictor(net, weights, classes, mean, std)
    draft = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        checks = write_formats(predictor, config, draft, formats)
        if "hub" in formats:
            write_hub(predictor, config, head, weights, draft)
            card = model_card(out.name, config, summary, head, predictor.net.exits, checks)
            (draft / "README.md").write_text(card)
        draft.rename(out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}; choose a writable folder with --out") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return checks


def write_hub(predictor: Predictor, config: Config, head: str, weights: Sequence[float], folder: Path) -> None:
    """Weights and everything ``load`` needs to know."""
    blob = save({name: value.contiguous() for name, value in predictor.net.state_dict().items()})
    (folder / "model.safetensors").write_bytes(blob)
    data = config.data
    description = {
        "library": "bicovg",
        "library_version": __version__,
        "format_version": FORMAT_VERSION,
        "head": head,
        "weights": list(weights),
        "exit_blocks": predictor.net.exits,
        "classes": list(predictor.classes),
        "mean": predictor.mean.flatten().tolist(),
        "std": predictor.std.flatten().tolist(),
        "input": {"shape": [None, data.image_channels, data.image_size, data.image_size], "range": [0, 1]},
        "config": asdict(portable(config)),
    }
    (folder / "config.json").write_text(json.dumps(description, indent=2) + "\n")


def load(path: str | Path) -> Predictor:
    """A predictor from an exported folder. Reads safetensors and JSON only: nothing executes.

    ``bicovg.load(path)(images)`` gives logits (B, K) of float images (B, C, H, W) in [0, 1].
    """
    folder = Path(path)
    repair = "export the run again with `bicovg export`"
    if not (folder / "model.safetensors").is_file():
        raise UserError(f"{folder} has no model.safetensors: give a folder made by `bicovg export`")
    found = read_json(folder / "config.json", repair)
    if found.get("library") != "bicovg" or found.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{folder / 'config.json'} is not of an export of version {FORMAT_VERSION}: {repair}")
    try:
        config = from_json(json.dumps(add_defaults(found["config"])), str(folder / "config.json"))
        data = config.data
        with torch.device("meta"):
            net = build_network(config.model, data.num_classes, data.image_channels)
        predictor = make_predictor(net, found["weights"], found["classes"], found["mean"], found["std"])
        predictor.net.load_state_dict(load_file(folder / "model.safetensors"), assign=True)
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, SafetensorError) as error:
        reason = str(error).splitlines()[-1].strip() if str(error) else type(error).__name__
        raise UserError(f"{folder} cannot be loaded ({reason}): {repair}") from None
    return predictor.requires_grad_(False)


def add_defaults(tree: dict[str, Any]) -> dict[str, Any]:
    """A stored configuration with the settings that came after it at their defaults, so that old exports load."""

    def merge(default: Any, stored: Any) -> Any:
        if not isinstance(default, dict) or not isinstance(stored, dict):
            return stored
        return {**default, **{name: merge(default.get(name), value) for name, value in stored.items()}}

    merged: dict[str, Any] = merge(asdict(Config()), tree)
    return merged


def write_formats(predictor: Predictor, config: Config, folder: Path, formats: Sequence[str]) -> dict[str, Any]:
    """torch.export and ONNX files, each compared with PyTorch; a difference too large is an error."""
    from bicovg.export_graph import open_onnx, open_torch, trace, write_onnx, write_torch

    images, kinds = sample_images(config)
    checks: dict[str, Any] = {"images": kinds, "largest_difference": {}}
    batches = [batch for size in CHECKED_BATCHES for batch in torch.split(images, size)]
    with torch.no_grad():
        expected = [predictor(batch).numpy() for batch in batches]
    writers = {"torch": (write_torch, open_torch), "onnx": (write_onnx, open_onnx)}
    wanted = {name: pair for name, pair in writers.items() if name in formats}
    program = trace(predictor, images[:2]) if wanted else None
    for name, (write, open_file) in wanted.items():
        assert program is not None
        run = open_file(write(program, folder))
        results = [run(batch) for batch in batches]
        gap = max(float(np.abs(a - b).max()) for a, b in zip(results, expected, strict=True))
        if not all(np.allclose(a, b, TOLERANCE, TOLERANCE) for a, b in zip(results, expected, strict=True)):
            raise UserError(f"the {name} export differs from PyTorch by {gap:.2g} in a logit: use another format")
        checks["largest_difference"][name] = gap
    return checks


def sample_images(config: Config) -> tuple[Float[Tensor, "n c h w"], str]:
    """64 random images, and 64 test images where the data set is at hand and needs no resizing."""
    data = config.data
    shape = (data.image_channels, data.image_size, data.image_size)
    random = torch.rand(64, *shape, generator=torch.Generator().manual_seed(0))
    try:
        test = load_splits(data).test
        pixels = test.gather(np.arange(min(64, len(test))))
    except UserError:
        return random, "random"
    if pixels.shape[1:] != (data.image_size, data.image_size, data.image_channels):
        return random, "random"
    real = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    return torch.cat([random, real]), "random and test"
