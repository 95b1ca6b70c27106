"""What only the trained weights and the test images can tell: confusions, per-class accuracy, confident mistakes.

Made once, at the end of training, and kept in the run folder as ``analysis.json``, so that the page can be made
anew where neither weights nor images are at hand.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from bicovg.data.images import ImageSource
from bicovg.fusion import mean_logits
from bicovg.report.png import data_uri, encode_png

MISTAKES = 24
PICTURE_SIDE = 96  # larger pictures are shrunk to about this


def analyse(
    logits: Float[Tensor, "e n k"], labels: Int[Tensor, " n"], images: ImageSource, classes: list[str]
) -> dict[str, Any]:
    """``analysis.json`` of a run, from the exit logits of its test images in order.

    Predictions are those of the uniform mean of the exits.
    """
    logits, labels = logits.cpu(), labels.cpu()
    K = len(classes)
    probabilities = mean_logits(logits).softmax(dim=1)
    confidence, predicted = probabilities.max(dim=1)
    confusion = torch.bincount(labels * K + predicted, minlength=K * K).view(K, K)
    return {
        "head": "mean of blocks" if len(logits) > 1 else "last block",
        "classes": classes,
        "confusion": confusion.tolist(),
        "class_top1": class_accuracies(logits, labels, K).tolist(),
        "mistakes": find_mistakes(confidence, predicted, labels, probabilities, images),
    }


def class_accuracies(logits: Float[Tensor, "e n k"], labels: Int[Tensor, " n"], classes: int) -> Float[Tensor, "e k"]:
    """Top-1 in percent of every exit on every class; 0 for a class without images."""
    right = (logits.argmax(dim=2) == labels).double()
    sums = torch.zeros(len(logits), classes, dtype=torch.float64).index_add_(1, labels, right)
    return 100 * sums / torch.bincount(labels, minlength=classes).clamp(min=1)


def find_mistakes(
    confidence: Float[Tensor, " n"],
    predicted: Int[Tensor, " n"],
    labels: Int[Tensor, " n"],
    probabilities: Float[Tensor, "n k"],
    images: ImageSource,
) -> list[dict[str, Any]]:
    """The wrong predictions made with the most confidence, each with its picture."""
    wrong = (predicted != labels).nonzero().flatten()
    order = wrong[confidence[wrong].argsort(descending=True, stable=True)][:MISTAKES]
    return [
        {
            "index": i,
            "true": int(labels[i]),
            "predicted": int(predicted[i]),
            "confidence": round(float(confidence[i]), 4),
            "true_confidence": round(float(probabilities[i, labels[i]]), 4),
            "picture": picture(images, i),
        }
        for i in order.tolist()
    ]


def picture(images: ImageSource, index: int) -> str:
    """The image at ``index`` as a data URI."""
    pixels = images.gather(np.array([index]))[0]
    if images.sizes is not None:
        height, width = images.sizes[index]
        pixels = pixels[:height, :width]
    pixels = shrink(pixels)
    height, width, channels = pixels.shape
    return data_uri(encode_png(pixels.tobytes(), width, height, channels))


def shrink(pixels: UInt8[np.ndarray, "h w c"]) -> UInt8[np.ndarray, "p q c"]:
    """Means of square cells, where the picture is larger than a page needs."""
    step = min(-(-max(pixels.shape[:2]) // PICTURE_SIDE), *pixels.shape[:2])
    height, width, channels = pixels.shape[0] // step, pixels.shape[1] // step, pixels.shape[2]
    cells = pixels[: height * step, : width * step].reshape(height, step, width, step, channels)
    small: UInt8[np.ndarray, "p q c"] = cells.mean(axis=(1, 3)).round().astype(np.uint8)
    return small
