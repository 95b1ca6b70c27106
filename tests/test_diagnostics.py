"""bicovg.diagnostics against exact rational arithmetic, worked examples and its error sentences."""

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import diagnostics as textbook

from bicovg.diagnostics import decline_area, effective_layers, mean_gain, tail_retention
from bicovg.errors import UserError

accuracy = st.floats(0.0, 100.0)
curves = st.lists(accuracy, min_size=1, max_size=20)
curve_pairs = st.lists(st.tuples(accuracy, accuracy), min_size=2, max_size=20)


@given(curves)
def test_decline_area_equals_the_exact_sum(acc: list[float]) -> None:
    assert decline_area(acc) == pytest.approx(float(textbook.decline_area(acc)), rel=1e-12, abs=1e-12)


@given(curves.filter(lambda acc: max(acc) > 1e-3))
def test_tail_retention_equals_the_exact_ratio(acc: list[float]) -> None:
    assert tail_retention(acc) == pytest.approx(float(textbook.tail_retention(acc)), rel=1e-12, abs=1e-12)


@given(curve_pairs)
def test_mean_gain_equals_the_exact_means(pairs: list[tuple[float, float]]) -> None:
    acc_a, acc_b = [a for a, _ in pairs], [b for _, b in pairs]
    shallow, deep = textbook.mean_gain(acc_a, acc_b)
    assert mean_gain(acc_a, acc_b) == pytest.approx((float(shallow), float(deep)), rel=1e-9, abs=1e-12)


@given(st.lists(st.floats(0.0, 1e300), min_size=1, max_size=20).filter(any))
def test_effective_layers_equals_the_exact_ratio_at_any_scale(weights: list[float]) -> None:
    assert effective_layers(weights) == pytest.approx(float(textbook.effective_layers(weights)), rel=1e-9)


def test_worked_curve_with_one_peak() -> None:
    acc = [20.0, 50.0, 40.0, 45.0, 30.0]
    assert decline_area(acc) == 10.0 + 5.0 + 20.0
    assert tail_retention(acc) == pytest.approx((50.0 + 40.0 + 45.0 + 30.0) / 4 / 50.0)


def test_decline_starts_at_the_first_of_equal_peaks() -> None:
    assert decline_area([50.0, 40.0, 50.0, 45.0]) == 10.0 + 5.0


def test_curve_that_never_falls_has_no_decline() -> None:
    assert decline_area([0.1, 0.2, 0.2, 0.9]) == 0.0


def test_tail_is_all_exits_when_there_are_fewer_than_four() -> None:
    assert tail_retention([80.0, 40.0]) == pytest.approx(0.75)
    assert tail_retention([80.0]) == 1.0


def test_tail_retention_of_an_all_zero_curve_is_one() -> None:
    assert tail_retention([0.0, 0.0, 0.0]) == 1.0


def test_gain_of_sixteen_exits_splits_eight_and_eight() -> None:
    assert mean_gain([0.0] * 16, [1.0] * 8 + [3.0] * 8) == (1.0, 3.0)


def test_middle_exit_of_an_odd_count_is_deep() -> None:
    assert mean_gain([0.0] * 5, [2.0, 2.0, 9.0, 0.0, 0.0]) == (2.0, 3.0)


def test_single_exit_is_both_halves() -> None:
    assert mean_gain([10.0], [12.5]) == (2.5, 2.5)


def test_gain_changes_sign_when_the_runs_are_swapped() -> None:
    acc_a, acc_b = [10.0, 30.0, 20.0], [15.0, 25.0, 40.0]
    shallow, deep = mean_gain(acc_a, acc_b)
    assert mean_gain(acc_b, acc_a) == (-shallow, -deep)
    assert shallow == 5.0


def test_gain_of_runs_with_unequal_exits_is_refused_with_both_counts() -> None:
    with pytest.raises(ValueError, match="A has 8 exits and B has 4"):
        mean_gain([0.5] * 8, [0.5] * 4)


def test_effective_layers_is_one_for_a_single_weight_and_e_for_uniform_ones() -> None:
    assert effective_layers([0.0, 1.0, 0.0, 0.0]) == 1.0
    assert effective_layers([1 / 16] * 16) == pytest.approx(16.0)


def test_effective_layers_refuses_weights_that_are_all_zero() -> None:
    with pytest.raises(UserError, match="all 3 fusion weights are 0"):
        effective_layers([0.0, 0.0, 0.0])


@pytest.mark.parametrize("diagnostic", [decline_area, tail_retention, effective_layers])
@pytest.mark.parametrize(
    ("values", "message"),
    [([], "are empty"), ([0.5, math.nan, 0.1], "nan at exit 1"), ([math.inf], "inf at exit 0")],
)
def test_empty_and_non_finite_curves_are_refused(diagnostic, values, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=message):
        diagnostic(values)


def test_gain_names_the_run_that_holds_a_nan() -> None:
    with pytest.raises(UserError, match="accuracies of B hold nan at exit 1"):
        mean_gain([0.5, 0.5], [0.5, math.nan])


def test_importing_diagnostics_does_not_import_torch() -> None:
    code = "import sys, bicovg.diagnostics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
