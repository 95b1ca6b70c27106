"""Confidence that means something: rules that combine the exits so far, and a temperature for each.

A rule is a lower triangular matrix of weights: row l says what exit l predicts from.

* ``mean``: the uniform mean of exits 0 to l; the last row is the plain mean of all;
* ``own``: exit l alone;
* ``fused``: Logistic Fusion of exits 0 to l, fitted for every l. On training images it would give all weight to the
  deepest exits, so it is fitted on held-out images or not at all.

Legend: E exits, N images, K classes.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from bicovg.fusion import LogisticFusion, whole_float32

RULES = ("mean", "own", "fused")
BINS = 15  # of the calibration error


def rule_weights(rule: str, logits: Float[Tensor, "e n k"], labels: Int[Tensor, " n"]) -> Float[Tensor, "e e"]:
    """The matrix of a rule; ``logits`` and ``labels`` are what ``fused`` is fitted on."""
    E = len(logits)
    if rule == "own":
        return torch.eye(E, device=logits.device)
    if rule == "mean":
        ones = torch.ones(E, E, device=logits.device).tril()
        return ones / ones.sum(dim=1, keepdim=True)
    weights = torch.zeros(E, E, device=logits.device)
    for last in range(E):
        fusion = LogisticFusion(last + 1).to(logits.device).fit(logits[: last + 1], labels)
        weights[last, : last + 1] = fusion.weights.detach()
    return weights


def combine_exits(logits: Float[Tensor, "e n k"], weights: Float[Tensor, "e e"]) -> Float[Tensor, "e n k"]:
    """What every exit predicts, by a rule's weights."""
    with whole_float32():
        return torch.einsum("le,enk->lnk", weights, logits.float())


def fit_temperature(logits: Float[Tensor, "n k"], labels: Int[Tensor, " n"], least: float = 0.02) -> float:
    """The T between ``least`` and 50 that minimises the cross-entropy of ``logits / T``, by golden section."""
    logits = logits.double()

    def loss(log_t: float) -> float:
        return float(F.cross_entropy(logits / math.exp(log_t), labels))

    golden = (math.sqrt(5) - 1) / 2
    low, high = math.log(least), math.log(50)
    a, b = high - golden * (high - low), low + golden * (high - low)
    at_a, at_b = loss(a), loss(b)
    while high - low > 1e-4:
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - golden * (high - low)
            at_a = loss(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + golden * (high - low)
            at_b = loss(b)
    return math.exp((low + high) / 2)


def is_calibrated(temperatures: Sequence[float]) -> bool:
    """Whether any exit got a temperature; on images of training most stay at 1, the least that they may have."""
    return any(abs(temperature - 1) > 1e-3 for temperature in temperatures)


def calibration_error(logits: Float[Tensor, "n k"], labels: Int[Tensor, " n"]) -> float:
    """ECE in points: confidence against accuracy, in bins of equal width, weighted by their size."""
    confidence, predicted = logits.softmax(dim=1).max(dim=1)
    right = (predicted == labels).double()
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64, device=logits.device)
    gaps.index_add_(0, bins, confidence.double() - right)
    return 100 * float(gaps.abs().sum()) / len(labels)
