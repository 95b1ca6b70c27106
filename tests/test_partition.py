"""The planner: no plan is faster than its tolerance allows, and a cut after a pool wins where it costs little."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bicovg.errors import UserError
from bicovg.partition import TOLERANCE, check_cuts, plan_cuts, predict_speedup, stage_times


def slowest(times: list[float], cuts: tuple[int, ...]) -> float:
    return max(stage_times(times, cuts))


@given(st.data())
def test_the_slowest_stage_is_within_the_tolerance_of_every_other_plan(data: st.DataObject) -> None:
    times = data.draw(st.lists(st.floats(0.01, 10), min_size=2, max_size=8))
    pooled = data.draw(st.lists(st.booleans(), min_size=len(times), max_size=len(times)))
    stages = data.draw(st.integers(1, len(times)))
    cuts = plan_cuts(times, stages, pooled)
    assert check_cuts(cuts, stages, len(times)) == cuts
    plans = list(combinations(range(1, len(times)), stages - 1))
    best = min(slowest(times, plan) for plan in plans)
    assert slowest(times, cuts) <= best * (1 + TOLERANCE) * (1 + 1e-6)
    near = [plan for plan in plans if slowest(times, plan) <= best * (1 + TOLERANCE) * (1 - 1e-6)]
    after_pools = [sum(pooled[cut - 1] for cut in plan) for plan in near]
    assert sum(pooled[cut - 1] for cut in cuts) >= max(after_pools, default=0)


def test_a_cut_moves_to_a_pool_that_costs_little_and_not_to_one_that_costs_much() -> None:
    times = [1.0, 1.0, 0.02, 1.0, 1.0]
    assert plan_cuts(times, 2, [False, True, False, False, False]) == (2,)
    assert plan_cuts(times, 2, [False, False, True, False, False]) == (3,)
    assert plan_cuts(times, 2, [True, False, False, False, False]) in ((2,), (3,))


def test_vgg16_by_work_has_the_cuts_and_limits_that_are_known() -> None:
    # multiply-adds of a strict step, forward and weight gradient, per block at 112 px
    sides = [112, 112, 56, 56, *[28] * 4, *[14] * 4, *[7] * 4]
    channels = [3, 128, 128, 256, 256, *[512] * 12]
    work = [side**2 * channels[i] * channels[i + 1] for i, side in enumerate(sides)]
    assert plan_cuts(work, 2) == (6,)
    assert predict_speedup(work, (6,)) == pytest.approx(1.80, abs=0.01)
    assert predict_speedup(work, plan_cuts(work, 4)) == pytest.approx(3.25, rel=TOLERANCE)
    assert predict_speedup(work, plan_cuts(work, 8)) == pytest.approx(5.85, rel=TOLERANCE)


@pytest.mark.parametrize("cuts", [(), (0,), (4,), (2, 3), (-1,)])
def test_cuts_that_do_not_divide_the_units_are_refused(cuts: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"--train\.cuts"):
        check_cuts(cuts, 2, 4)


def test_more_stages_than_units_are_refused() -> None:
    with pytest.raises(UserError, match=r"--train\.stages 3 is out of range: the network has 2 units"):
        plan_cuts([1.0, 1.0], 3)
