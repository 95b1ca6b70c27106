"""Classify image files with a finished run. Takes images and nothing else: no label can reach it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bicovg.checkpoint import walk_back
from bicovg.config import Config
from bicovg.data.augment import normalise
from bicovg.errors import UserError
from bicovg.fusion import mean_logits
from bicovg.networks import LocalNetwork
from bicovg.preparation import build_on, check_config, pick_device
from bicovg.runlog import read_config, read_data, read_summary
from bicovg.state import read_weights

BATCH = 64


def read_image(path: Path, config: Config) -> Float[Tensor, "c h w"]:
    """One file as floats in [0, 1], resized and centre cropped to the network's input."""
    from PIL import Image

    from bicovg.data.decode import decode_image, fit_pixels

    size, resize = config.data.image_size, config.data.resize
    try:
        pixels = decode_image(path.read_bytes(), short_side=resize or None)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if isinstance(pixels, str):
        raise UserError(f"cannot use {path}: {pixels}")
    if resize:
        top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
        pixels = pixels[top : top + size, left : left + size]
    pixels = fit_pixels(pixels, size=size)
    if isinstance(pixels, str):
        raise UserError(f"cannot use {path}: {pixels}")
    if config.data.image_channels == 1:
        pixels = np.asarray(Image.fromarray(pixels).convert("L"))[..., None]
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).float() / 255


def combine(logits: Float[Tensor, "e b k"], head: str, run: Path, exits: list[int]) -> Float[Tensor, "b k"]:
    """One prediction from all exits: mean, fused, best (chosen on held-out images), last, or one block."""
    if head == "mean":
        return mean_logits(logits)
    if head == "last":
        return logits[-1]
    if head == "fused":
        fitted = read_summary(run)["fusion"]
        record = fitted["heldout"] or fitted["train"]
        if record is None:
            raise UserError(f"{run} has no fusion weights: fit them with `bicovg fuse {run}`, or use --head mean")
        return torch.einsum("e,ebk->bk", logits.new_tensor(record["weights"]), logits)
    if head == "best":
        chosen = read_summary(run)["test"].get("best_heldout_chosen")
        if chosen is None:
            raise UserError(
                f"{run} held no images out to choose its best block on: use --head mean, or name a block among {exits}"
            )
        return logits[chosen["exit"]]
    if head.isdecimal() and int(head) in exits:
        return logits[exits.index(int(head))]
    raise UserError(f"--head {head!r} is unknown: choose mean, fused, best, last or a block among {exits}")


def load_run(run: Path, device: str) -> tuple[LocalNetwork, Config]:
    """The trained network of a run folder, in eval mode; needs no data set."""
    config = read_config(run)
    check_config(config)
    net = build_on(config, pick_device(device))
    _, weights, _ = walk_back(run, lambda path: read_weights(path, net))
    if weights is None:
        raise UserError(f"{run} has no usable checkpoint yet: train it with `bicovg train --resume {run}`")
    net.load_state_dict(weights)
    return net.eval(), config


@torch.no_grad()
def predict_files(
    run: Path, names: list[str], head: str = "mean", top: int = 5, device: str = "auto"
) -> Iterator[tuple[str, list[tuple[str, float]]]]:
    """For each file its most probable classes, best first."""
    net, config = load_run(run, device)
    if top < 1:
        raise UserError(f"--top {top} must be at least 1")
    classes, means, stds = read_data(run, config)
    where = next(net.parameters()).device
    mean, std = torch.tensor(means), torch.tensor(stds)
    for start in range(0, len(names), BATCH):
        part = names[start : start + BATCH]
        images = torch.stack([read_image(Path(name), config) for name in part])
        logits = net(normalise(images, mean, std).to(where)).float()
        probabilities = combine(logits, head, run, net.exits).softmax(dim=1)
        values, indices = probabilities.topk(min(top, len(classes)), dim=1)
        for name, row, ids in zip(part, values.tolist(), indices.tolist(), strict=True):
            yield name, [(classes[i], p) for i, p in zip(ids, row, strict=True)]
