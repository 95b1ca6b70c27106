"""Classify image files with a finished run. Takes images and nothing else: no label can reach it."""

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from bicovg.checkpoint import none_usable, walk_back
from bicovg.config import Config
from bicovg.data.augment import normalise
from bicovg.data.crops import resize_centre, to_planes
from bicovg.durable import read_regular
from bicovg.early_exit import predict_early
from bicovg.errors import UserError
from bicovg.fusion import weigh_exits
from bicovg.identity import identify
from bicovg.networks import LocalNetwork
from bicovg.preparation import build_on, check_config, pick_device
from bicovg.runlog import read_config, read_data, read_early_exit, read_summary
from bicovg.state import read_weights

BATCH = 64
MOST_BYTES = 1 << 28  # of a file, as in packing
FITTED_BY = {  # head -> flags of ``bicovg fuse``
    f"fused-{on}{'-temperatures' * scaled}": f" --on {on}{' --temperatures' * scaled}"
    for on in ("train", "augmented", "heldout")
    for scaled in (False, True)
}
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


def read_image(path: Path, config: Config) -> Float[Tensor, "c h w"]:
    """One file as floats in [0, 1], resized and cropped to the network's input as evaluation does it."""
    from PIL import Image

    from bicovg.data.decode import decode_image

    size, resize = config.data.image_size, config.data.resize
    try:
        data = read_regular(path.resolve(), MOST_BYTES)  # a link to an image will do, a pipe will not
        pixels = decode_image(data, size=None if resize else size, short_side=resize or None)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    if isinstance(pixels, str):
        raise UserError(f"cannot use {path}: {pixels}")
    if config.data.image_channels == 1:
        pixels = np.asarray(Image.fromarray(pixels).convert("L"))[..., None]
    images = torch.from_numpy(np.array(pixels))[None]
    if resize:
        return resize_centre(images, resize, size, torch.tensor([pixels.shape[:2]]))[0]
    return to_planes(images)[0]


def read_images(names: list[str], config: Config, rejected: list[str] | None) -> tuple[list[str], list[Tensor]]:
    """The files that can be used, and their images; ``rejected`` as in ``predict_files``."""
    found: list[tuple[str, Tensor]] = []
    for name in names:
        try:
            found.append((name, read_image(Path(name), config)))
        except UserError as error:
            if rejected is None:
                raise
            rejected.append(str(error))
    return [name for name, _ in found], [image for _, image in found]


def head_weights(head: str, run: Path, exits: list[int]) -> list[float]:
    """Weight of every exit in one prediction: mean, fused, best (chosen on held-out images), last, or one block.

    A fusion with temperatures divides each exit's weight by its temperature, so they need not add up to 1.
    """
    if head == "mean":
        return [1 / len(exits)] * len(exits)
    if head == "fused" or head.startswith("fused-"):
        if len(exits) == 1:
            raise UserError(f"{run} has a single exit: there is nothing to fuse; use --head last")
        return fused_weights(head, run)
    if head == "best":
        chosen = read_summary(run)["test"].get("best_heldout_chosen")
        if chosen is None:
            raise UserError(
                f"{run} held no images out to choose its best block on: use --head mean, or name a block among {exits}"
            )
        place = chosen["exit"]
    elif head == "last":
        place = len(exits) - 1
    elif head.isdecimal() and int(head) in exits:
        place = exits.index(int(head))
    else:
        raise UserError(
            f"--head {head!r} is unknown: choose mean, fused, fused-NAME, best, last or a block among {exits}"
        )
    return [float(index == place) for index in range(len(exits))]


def fused_weights(head: str, run: Path) -> list[float]:
    """``fused``: as fitted on held-out images, else on training images; ``fused-augmented`` and the like: that fit."""
    fitted = {
        f"fused-{name.replace('_', '-')}": record for name, record in read_summary(run)["fusion"].items() if record
    }
    record = fitted.get("fused-heldout") or fitted.get("fused-train") if head == "fused" else fitted.get(head)
    if record is None:
        which = f"no {head}, but {', '.join(fitted)}" if fitted else "no fusion weights"
        flags = {"fused": "", **FITTED_BY}.get(head)
        how = "use one of these" if flags is None and fitted else f"fit them with `bicovg fuse {run}{flags or ''}`"
        raise UserError(f"{run} has {which}: {how}, or use --head mean")
    temperatures = record.get("temperatures") or [1.0] * len(record["weights"])
    return [float(weight) / float(t) for weight, t in zip(record["weights"], temperatures, strict=True)]


def deciding_exits(logits: Float[Tensor, "e b k"], weights: Float[Tensor, " e"]) -> Int[Tensor, " b"]:
    """The exit that gave the winning class the largest part of its lead over the second."""
    if logits.shape[2] < 2:
        return weights.argmax().expand(logits.shape[1])
    parts = weights[:, None, None] * logits
    first, second = parts.sum(dim=0).topk(2, dim=1).indices.unbind(dim=1)
    images = torch.arange(len(first), device=first.device)
    return (parts[:, images, first] - parts[:, images, second]).argmax(dim=0)


def load_run(run: Path, device: str) -> tuple[LocalNetwork, Config]:
    """The trained network of a run folder, in eval mode; needs no data set."""
    config = read_config(run)
    check_config(config)
    net = build_on(config, pick_device(device))
    _, weights, skipped = walk_back(run, lambda path: read_weights(path, net), identify(config))
    if weights is None:
        raise UserError(none_usable(run, skipped))
    net.load_state_dict(weights)
    return net.eval(), config


def find_images(names: list[str]) -> list[str]:
    """Files as they are named; of a folder all images but hidden ones, at any depth, in the order of their paths."""
    found: list[str] = []
    for name in names:
        path = Path(name)
        if not path.exists():
            raise UserError(f"{name} does not exist: give image files or a folder of them")
        images = (p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and not p.is_dir())
        seen = (p for p in images if not any(part.startswith(".") for part in p.relative_to(path).parts))
        inside = sorted(map(str, seen)) if path.is_dir() else [name]
        if not inside:
            raise UserError(f"{name} holds no image: give a folder with {', '.join(SUFFIXES)} files")
        found += inside
    return found


def read_calibration(run: Path, exits: list[int]) -> tuple[Float[Tensor, "e e"], list[float]]:
    """Weights and temperatures of the rule to use, from the run's early_exit.json."""
    if len(exits) == 1:
        raise UserError(f"{run} has a single exit: there is nothing to leave early by; leave out --early-exit")
    found, repair = read_early_exit(run, len(exits)), f"calibrate the run with `bicovg eval {run} --early-exit`"
    if found is None:
        raise UserError(f"{run} has no early_exit.json: {repair}")
    rule = found["rules"].get(found.get("use"), {})
    if "weights" not in rule:
        raise UserError(f"{run / 'early_exit.json'} does not fit the run: {repair}")
    return torch.tensor(rule["weights"], dtype=torch.float32), [float(t) for t in rule["temperatures"]]


@dataclass(frozen=True)
class Prediction:
    """One image's most probable classes, best first, and the block that decided (early exit: that it left by)."""

    image: str
    classes: list[tuple[str, float]]
    block: int


@torch.no_grad()
def predict_files(
    run: Path,
    names: list[str],
    head: str = "mean",
    top: int = 5,
    device: str = "auto",
    early_exit: float | None = None,
    rejected: list[str] | None = None,
) -> Iterator[Prediction]:
    """Classify files and folders of images; with ``early_exit``, no further than this confidence needs.

    Args:
        rejected: takes a sentence for every file that cannot be used, and the others are classified; without it, the
            first such file is an error.
    """
    if top < 1:
        raise UserError(f"--top {top} must be at least 1")
    if early_exit is not None and not 0 <= early_exit <= 1:
        raise UserError(f"--early-exit {early_exit:g} must be a confidence between 0 and 1, for example 0.9")
    if early_exit is not None and head != "mean":
        raise UserError(f"--head {head} and --early-exit exclude each other: early exit has a rule of its own")
    read_config(run)
    files = find_images(names)
    net, config = load_run(run, device)
    classes, means, stds = read_data(run, config)
    where = next(net.parameters()).device
    mean, std = torch.tensor(means), torch.tensor(stds)
    weights = torch.tensor(head_weights(head, run, net.exits), device=where)
    calibration = None if early_exit is None else read_calibration(run, net.exits)
    for start in range(0, len(files), BATCH):
        part, images = read_images(files[start : start + BATCH], config, rejected)
        if not part:
            continue
        x = normalise(torch.stack(images), mean, std).to(where)
        if early_exit is not None and calibration is not None:
            rule, temperatures = calibration
            probabilities, exits = predict_early(net, x, rule.to(where), temperatures, early_exit)
        else:
            logits = net(x).float()
            probabilities = weigh_exits(weights, logits).softmax(dim=1)
            exits = deciding_exits(logits, weights)
        values, indices = probabilities.topk(min(top, len(classes)), dim=1)
        for name, row, ids, exit_ in zip(part, values.tolist(), indices.tolist(), exits.tolist(), strict=True):
            yield Prediction(name, [(classes[i], p) for i, p in zip(ids, row, strict=True)], net.exits[exit_])


def format_json(predictions: Iterable[Prediction]) -> str:
    """A list of objects, one an image."""
    rows = [
        {
            "image": p.image,
            "block": p.block,
            "classes": [{"class": label, "probability": probability} for label, probability in p.classes],
        }
        for p in predictions
    ]
    return json.dumps(rows, indent=2)


def format_csv(predictions: Iterable[Prediction]) -> str:
    """One line an image and rank."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["image", "block", "rank", "class", "probability"])
    for p in predictions:
        for rank, (label, probability) in enumerate(p.classes, 1):
            writer.writerow([p.image, p.block, rank, label, f"{probability:.6f}"])
    return out.getvalue().rstrip("\n")
