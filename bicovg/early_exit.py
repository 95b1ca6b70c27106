"""Early exit: stop at the first block that is confident enough. Per-block readouts give this for nothing.

At exit l the prediction is made from the exits so far, by one of the rules of ``bicovg.calibration``. Its confidence is
the largest of ``softmax(z / T_l)``; the temperatures T_l are fitted, one per exit, on images that were held out of
training. Where none were, freshly augmented training images must do, and it is said; T_l is then at least 1, because
what a network remembers is no reason to make it surer of itself. Compute is counted in multiply-adds of convolutions
and matrix products.

Legend: E exits, N images, K classes.
"""

import copy
import math
from collections.abc import Collection, Generator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bicovg.blocks import Block, Unit
from bicovg.calibration import RULES, calibration_error, combine_exits, fit_temperature, rule_weights
from bicovg.errors import UserError
from bicovg.evaluation import both_accuracies
from bicovg.fusion import weigh_exits
from bicovg.networks import LocalNetwork

SPEEDUPS = (1.25, 1.5, 2.0, 3.0)
MOST_IMAGES = 10_000  # to fit temperatures on
THRESHOLDS = 120  # of a curve, at most


def walk_exits(
    net: LocalNetwork, images: Float[Tensor, "b c h w"], only: Collection[int] | None = None
) -> Generator[Float[Tensor, "b k"], Bool[Tensor, " b"] | None, None]:
    """The logits of one exit after the other, each computed only when it is asked for.

    Send a mask to go on with those samples alone.

    Args:
        only: positions of the exits that are wanted; goodness and readout of the others are not computed.
    """
    wanted = [place for place in range(len(net.exits)) if only is None or place in only]
    x, place = net.prepare(images), -1
    for unit in net.units:
        if not isinstance(unit, Unit):
            assert len(net.exits) == 1, "only units of blocks can be left between two exits"
            _, logits = unit(x, None, False)
            yield logits[0]
            return
        for block in unit.blocks:
            assert isinstance(block, Block)
            f = block.features(x)
            place += block.goodness is not None
            if block.goodness is not None and place in wanted:
                keep = yield block.judge(f)
                if place == wanted[-1]:
                    return
                f = f if keep is None else f[keep]
            x = block.emit(f, None)


def count_exit_macs(net: LocalNetwork, image_shape: tuple[int, int, int]) -> list[int]:
    """Multiply-adds of one image up to and with every exit."""
    shadow = copy.deepcopy(net).to("meta").eval()
    image = torch.empty(1, *image_shape, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        return [counter.get_total_flops() // 2 for _ in walk_exits(shadow, image)]


def first_confident(confidence: Float[Tensor, "e n"], threshold: float) -> Int[Tensor, " n"]:
    """The first exit whose confidence reaches the threshold; the last one where none does."""
    sure = confidence >= threshold
    sure[-1] = True
    return sure.int().argmax(dim=0)


def measure_point(
    combined: Float[Tensor, "e n k"],
    confidence: Float[Tensor, "e n"],
    labels: Int[Tensor, " n"],
    macs: list[int],
    threshold: float,
) -> dict[str, Any]:
    """Accuracy and compute at one threshold."""
    exits = first_confident(confidence, threshold)
    chosen = combined[exits, torch.arange(len(labels), device=labels.device)]
    cost = torch.tensor(macs, dtype=torch.float64, device=labels.device)[exits].mean().item()
    shares = torch.bincount(exits, minlength=len(macs)).double() / len(labels)
    return {
        "threshold": threshold,
        **both_accuracies(chosen, labels),
        "compute": cost / macs[-1],
        "macs": cost,
        "exits": [round(share, 4) for share in shares.tolist()],
    }


def spread_thresholds(confidence: Float[Tensor, "e n"]) -> list[float]:
    """Thresholds that let about equal shares of the images leave early, from all to none."""
    places = torch.linspace(0, 1, THRESHOLDS, dtype=torch.float64, device=confidence.device)
    # by rank: torch.quantile refuses the many confidences of a large test set
    values = confidence[:-1].flatten().sort().values
    found = values[(places * (len(values) - 1)).long()].tolist()
    return [*sorted({0.0, *found}), 2.0]


def trace_curve(
    combined: Float[Tensor, "e n k"], labels: Int[Tensor, " n"], temperatures: list[float], macs: list[int]
) -> list[dict[str, Any]]:
    """Accuracy against compute; the last point is the whole network."""
    scale = combined.new_tensor(temperatures)[:, None, None]
    confidence = (combined / scale).softmax(dim=2).amax(dim=2)
    return [measure_point(combined, confidence, labels, macs, t) for t in spread_thresholds(confidence)]


def pick_points(curve: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each speed-up the most demanding threshold that reaches it: chosen by compute, so without a label."""
    full = curve[-1]
    found = []
    for speedup in SPEEDUPS:
        affordable = [point for point in curve if point["compute"] <= 1 / speedup]
        if affordable:
            point = max(affordable, key=lambda point: point["threshold"])
            found.append({"speedup": speedup, **point, "points_lost": full["top1"] - point["top1"]})
    return found


def measure_early_exit(
    fit: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], macs: list[int], heldout: bool
) -> dict[str, dict[str, Any]]:
    """Per rule: weights and temperatures fitted on one split's (logits, labels), error and curve on another's.

    Args:
        heldout: the first split was held out of training.
    """
    stride = max(1, math.ceil(len(fit[1]) / MOST_IMAGES))
    fit_logits, fit_labels = fit[0][:, ::stride].float(), fit[1][::stride]
    rules = {}
    for rule in RULES if heldout else ("mean", "own"):
        weights = rule_weights(rule, fit_logits, fit_labels)
        known, unseen = combine_exits(fit_logits, weights), combine_exits(test[0], weights)
        temperatures = [fit_temperature(exit_, fit_labels, 0.02 if heldout else 1.0) for exit_ in known]
        scaled = [exit_ / t for exit_, t in zip(unseen, temperatures, strict=True)]
        curve = trace_curve(unseen, test[1], temperatures, macs)
        rules[rule] = {
            "weights": [[round(w, 6) for w in row] for row in weights.tolist()],
            "temperatures": temperatures,
            "ece_before": [calibration_error(exit_, test[1]) for exit_ in unseen],
            "ece_after": [calibration_error(exit_, test[1]) for exit_ in scaled],
            "full": {name: curve[-1][name] for name in ("top1", "top5")},
            "points": pick_points(curve),
            "curve": curve,
        }
    return rules


def describe_early_exit(trainer: Any) -> dict[str, Any]:
    """``early_exit.json`` of a trained run."""
    net, data = trainer.net, trainer.config.data
    if len(net.exits) < 2:
        raise UserError(f"{trainer.run} has a single exit: there is nothing to leave early by")
    calibrated_on = "heldout" if "heldout" in trainer.loaders else "augmented"
    unseen = trainer.config.train.epochs  # an epoch whose augmentation no step has used
    fit, test = trainer.logits(calibrated_on, unseen), trainer.logits("test")
    macs = count_exit_macs(net, (data.image_channels, data.image_size, data.image_size))
    return {
        "calibrated_on": {"heldout": "held-out", "augmented": "augmented training"}[calibrated_on],
        "calibration_images": min(len(fit[1]), MOST_IMAGES),
        "measured_on": "test",
        "images": len(test[1]),
        "exit_blocks": net.exits,
        "macs": macs,
        "use": "fused" if calibrated_on == "heldout" else "mean",
        "rules": measure_early_exit(fit, test, macs, calibrated_on == "heldout"),
    }


@torch.no_grad()
def predict_early(
    net: LocalNetwork,
    images: Float[Tensor, "b c h w"],
    weights: Float[Tensor, "e e"],
    temperatures: list[float],
    threshold: float,
) -> tuple[Float[Tensor, "b k"], Int[Tensor, " b"]]:
    """Probabilities, and the exit each sample left by; samples that have left are computed no further."""
    waiting = torch.arange(len(images), device=images.device)
    left_by = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    walk = walk_exits(net, images)
    seen = next(walk).float()[None]  # logits of the waiting samples at the exits so far
    found = torch.zeros_like(seen[0])
    for index, temperature in enumerate(temperatures):
        z = weigh_exits(weights[index, : index + 1], seen)
        probabilities = (z / temperature).softmax(dim=1)
        sure = (probabilities.amax(dim=1) >= threshold) | (index + 1 == len(temperatures))
        found[waiting[sure]], left_by[waiting[sure]] = probabilities[sure], index
        waiting, seen = waiting[~sure], seen[:, ~sure]
        if len(waiting) == 0:
            break
        seen = torch.cat([seen, walk.send(~sure).float()[None]])
    return found, left_by
