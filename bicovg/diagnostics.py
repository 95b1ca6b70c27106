"""What a curve of per-exit accuracies, or a set of fusion weights, says about the use of depth.

Paper: section 4.3. Plain Python floats, no torch, so that tables and the command line can use it at no cost.
Legend: E exits in order of depth, acc[l] the accuracy of exit l (any unit; DA, SG and DG keep that unit),
l* the first exit that reaches the highest accuracy.
"""

import math
from collections.abc import Sequence

from bicovg.errors import UserError


def decline_area(acc: Sequence[float]) -> float:
    """DA, what is lost after the peak: ``sum over l > l* of max(0, acc[l*] - acc[l])``."""
    _check_finite("accuracies", acc)
    best = max(acc)
    peak = list(acc).index(best)  # index gives the first of equal maxima
    return math.fsum(best - value for value in acc[peak + 1 :])


def tail_retention(acc: Sequence[float]) -> float:
    """TR, the share of the peak kept at the end: ``mean(last min(4, E) accuracies) / acc[l*]``.

    A curve that is zero everywhere has lost nothing after its peak (its DA is 0): its TR is 1.
    """
    _check_finite("accuracies", acc)
    best = max(acc)
    return _mean(acc[-4:]) / best if best > 0 else 1.0


def mean_gain(acc_a: Sequence[float], acc_b: Sequence[float]) -> tuple[float, float]:
    """(SG, DG), the mean gain of B over A in the shallow and the deep half of the exits.

    The first E // 2 exits are shallow, the rest deep: 8|8 for E = 16; the middle exit of an odd E is deep.
    A single exit is both halves, so SG and DG are then equal.
    """
    if len(acc_a) != len(acc_b):
        raise UserError(f"A has {len(acc_a)} exits and B has {len(acc_b)}: compare runs with equally many exits")
    _check_finite("accuracies of A", acc_a)
    _check_finite("accuracies of B", acc_b)
    gains = [b - a for a, b in zip(acc_a, acc_b, strict=True)]
    half = len(gains) // 2
    return _mean(gains[:half] or gains), _mean(gains[half:])


def effective_layers(weights: Sequence[float]) -> float:
    """N_eff, the participation ratio ``(sum w)^2 / sum w^2``: 1 for a single exit, E for uniform weights."""
    _check_finite("fusion weights", weights)
    largest = max(abs(weight) for weight in weights)
    if largest == 0:
        raise UserError(f"all {len(weights)} fusion weights are 0: give at least one that is not")
    scaled = [weight / largest for weight in weights]  # the ratio is scale-free; squares of tiny weights are not
    return math.fsum(scaled) ** 2 / math.fsum(weight * weight for weight in scaled)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _check_finite(what: str, values: Sequence[float]) -> None:
    """A NaN would pass silently through ``max``, so it is refused here."""
    if not values:
        raise UserError(f"{what} are empty: give one value per exit")
    for exit_index, value in enumerate(values):
        if not math.isfinite(value):
            raise UserError(f"{what} hold {value} at exit {exit_index}: give finite numbers only")
