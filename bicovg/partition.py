"""Which consecutive units go on which process, so that the slowest stage is as fast as it can be. No torch.

A pipeline takes as long per batch as its slowest stage. Among the cuts whose slowest stage is within ``TOLERANCE`` of
the fastest possible, those after a pool are preferred: the tensor that crosses there is four times smaller.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from bicovg.errors import UserError

TOLERANCE = 0.05


def plan_cuts(times: Sequence[float], stages: int, pooled: Sequence[bool] = ()) -> tuple[int, ...]:
    """The first unit of every stage but the first.

    Args:
        times: of each unit, in any one measure.
        pooled: whether each unit ends with a pool; empty for none.
    """
    if not 1 <= stages <= len(times):
        raise UserError(f"--train.stages {stages} is out of range: the network has {len(times)} units")
    afters = [0, *[0 if index < len(pooled) and pooled[index] else 1 for index in range(len(times) - 1)]]
    fastest, _ = _best(times, stages, [0] * len(times), float("inf"))
    _, cuts = _best(times, stages, afters, fastest[1] * (1 + TOLERANCE))
    return cuts


def _best(
    times: Sequence[float], stages: int, costs: Sequence[int], bound: float
) -> tuple[tuple[int, float], tuple[int, ...]]:
    """Least sum of the cuts' costs, then least slowest stage, of all plans whose stages keep to ``bound``."""
    before = [0.0, *accumulate(times)]
    units = len(times)
    # after k stages: for every unit the next one may begin with, the best (cost, slowest) and its cuts
    best: dict[int, tuple[tuple[int, float], tuple[int, ...]]] = {0: ((0, 0.0), ())}
    for left in range(stages - 1, -1, -1):
        after: dict[int, tuple[tuple[int, float], tuple[int, ...]]] = {}
        for begin, ((cost, slowest), cuts) in best.items():
            for end in range(begin + 1, units - left + 1) if left else (units,):
                time = before[end] - before[begin]
                if time > bound * (1 + 1e-9):
                    continue
                score = (cost + (costs[end] if left else 0), max(slowest, time))
                if end not in after or score < after[end][0]:
                    after[end] = score, (*cuts, end) if left else cuts
        best = after
    return best[units]


def check_cuts(cuts: Sequence[int], stages: int, units: int) -> tuple[int, ...]:
    """``cuts`` if they divide ``units`` units into ``stages`` stages."""
    if len(cuts) != stages - 1 or any(a >= b for a, b in pairwise((0, *cuts, units))):
        raise UserError(
            f"--train.cuts {','.join(map(str, cuts))} does not divide {units} units into {stages} stages: give "
            f"{stages - 1} increasing unit numbers between 1 and {units - 1}"
        )
    return tuple(cuts)


def stage_times(times: Sequence[float], cuts: Sequence[int]) -> list[float]:
    """The time of every stage."""
    return [sum(times[begin:end]) for begin, end in pairwise((0, *cuts, len(times)))]


def predict_speedup(times: Sequence[float], cuts: Sequence[int]) -> float:
    """Over one process, once the pipeline is full and where sending costs nothing."""
    return sum(times) / max(stage_times(times, cuts))
