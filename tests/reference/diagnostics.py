"""The diagnostics in exact rational arithmetic."""

from fractions import Fraction


def peak_exit(acc: list[float]) -> int:
    """The first exit no other exit beats."""
    peak = 0
    for exit_index in range(len(acc)):
        if acc[exit_index] > acc[peak]:
            peak = exit_index
    return peak


def decline_area(acc: list[float]) -> Fraction:
    peak = peak_exit(acc)
    total = Fraction(0)
    for exit_index in range(peak + 1, len(acc)):
        total += max(Fraction(0), Fraction(acc[peak]) - Fraction(acc[exit_index]))
    return total


def tail_retention(acc: list[float]) -> Fraction:
    count = min(4, len(acc))
    total = Fraction(0)
    for exit_index in range(len(acc) - count, len(acc)):
        total += Fraction(acc[exit_index])
    return total / count / Fraction(acc[peak_exit(acc)])


def mean_gain(acc_a: list[float], acc_b: list[float]) -> tuple[Fraction, Fraction]:
    """Needs at least two exits: the halves of one exit are a convention, not arithmetic."""
    half = len(acc_a) // 2
    shallow, deep = Fraction(0), Fraction(0)
    for exit_index in range(len(acc_a)):
        gain = Fraction(acc_b[exit_index]) - Fraction(acc_a[exit_index])
        if exit_index < half:
            shallow += gain
        else:
            deep += gain
    return shallow / half, deep / (len(acc_a) - half)


def effective_layers(weights: list[float]) -> Fraction:
    total, squares = Fraction(0), Fraction(0)
    for weight in weights:
        total += Fraction(weight)
        squares += Fraction(weight) ** 2
    return total**2 / squares
