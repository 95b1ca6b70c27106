"""Axes: from values to pixels, with round ticks."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """A range of values laid over a range of pixels; logarithmic where ``log``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        """The pixel of a value, clamped to the axis."""
        low, high, value = (self._scaled(v) for v in (self.low, self.high, min(max(value, self.low), self.high)))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def ticks(self, wanted: int = 5, whole: bool = False) -> list[float]:
        """About ``wanted`` round values inside the range; ``whole`` ones, where the range is that long."""
        if self.log:
            return _log_ticks(self.low, self.high, wanted)
        ticks = _linear_ticks(self.low, self.high, wanted, (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10))
        return [t for t in ticks if t == round(t)] if whole and self.high - self.low >= 1 else ticks


def fit_axis(
    values: Iterable[float], start: float, end: float, *, log: bool = False, zero: bool = False, margin: float = 0.05
) -> Axis:
    """An axis that holds all finite values with a little room; a range of nothing is widened.

    Args:
        log: logarithmic, if every value is positive, and not so small that it stands for 0.
        zero: whether 0 must be in the range.
    """
    finite = [v for v in values if math.isfinite(v)]
    if zero:
        finite.append(0.0)
    if not finite:
        return Axis(0.0, 1.0, start, end)
    low, high = min(finite), max(finite)
    if log and low > 1e-30:
        pad = max((high / low) ** margin, 1.02)
        return Axis(low / pad, high * pad, start, end, log=True)
    room = (high - low) * margin if high > low else max(abs(high), 1.0) * 0.05
    bottom = low if zero and low == 0 else low - room
    top = high if zero and high == 0 and low < 0 else high + room
    return Axis(bottom, top, start, end)


def percent_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """As ``fit_axis``, never leaving 0..100."""
    axis = fit_axis(values, start, end)
    low, high = max(axis.low, 0.0), min(axis.high, 100.0)
    return Axis(low, high, start, end) if low < high else Axis(0.0, 100.0, start, end)


def _linear_ticks(low: float, high: float, wanted: int, factors: Sequence[float]) -> list[float]:
    rough = (high - low) / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in factors if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(step * (first + i), 12) for i in range(int((high - first * step) / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float, wanted: int) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 4, 5, 6, 7, 8, 9)):
        found = [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]
        if len(found) >= min(wanted, 3):
            skip = math.ceil(len(found) / (2 * wanted))
            return found[::skip]
    return _linear_ticks(low, high, wanted, (1, 2, 5, 10))


def short_number(value: float) -> str:
    """A tick's label: few digits, ``k`` and ``M`` for thousands and millions."""
    size = abs(value)
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / {'G': 1e9, 'M': 1e6, 'k': 1e3}[letter]:.4g}{letter}"
    if value == 0 or size >= 1e-3:
        return f"{value:.4g}"
    return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
