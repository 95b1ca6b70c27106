"""From exit logits to one prediction, against loops with the gradient and Adam written out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import fusion as textbook
from reference import random_tensor

from bicovg import LogisticFusion
from bicovg.config import FusionConfig
from bicovg.evaluation import report_exits, report_fusion
from bicovg.fusion import first_best, mean_logits, top_k_accuracy

shapes = st.tuples(st.integers(0, 99), st.integers(1, 4), st.integers(1, 6), st.integers(2, 5))


def draw(seed: int, exits: int, samples: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random_tensor(seed, exits, samples, classes), torch.arange(samples) * 7 % classes


def double(fusion: LogisticFusion) -> LogisticFusion:
    return fusion.to(torch.float64)  # type: ignore[no-any-return]


@given(shapes)
def test_fitted_weights_follow_the_textbook_step_for_step(case: tuple[int, int, int, int]) -> None:
    logits, labels = draw(*case)
    fitted = double(LogisticFusion(case[1])).fit(logits, labels, steps=12, lr=0.05)
    expected = textbook.fit(logits.tolist(), labels.tolist(), steps=12, lr=0.05)
    # a gradient that is 0 in exact arithmetic (one exit) is rounding noise, which Adam blows up to a full step
    if case[1] > 1:
        assert fitted.weights.tolist() == pytest.approx(expected, rel=1e-7)
    torch.testing.assert_close(
        fitted(logits), torch.tensor(textbook.fuse(fitted.weights.tolist(), logits.tolist()), dtype=torch.float64)
    )


@given(shapes, st.integers(1, 5))
def test_top_k_accuracy_matches_the_textbook_with_ties(case: tuple[int, int, int, int], k: int) -> None:
    logits, labels = draw(*case)
    coarse = logits[0].round()  # many ties
    assert top_k_accuracy(coarse, labels, k) == pytest.approx(textbook.top_k(coarse.tolist(), labels.tolist(), k))


def test_a_constant_predictor_and_a_nan_score_nothing() -> None:
    labels = torch.tensor([0, 1, 2])
    assert top_k_accuracy(torch.zeros(3, 3), labels) == 0
    assert top_k_accuracy(torch.full((3, 3), math.nan), labels, k=3) == 0


def test_fusion_starts_as_the_uniform_mean() -> None:
    logits, _ = draw(0, 5, 7, 3)
    fusion = double(LogisticFusion(5))
    assert fusion.weights.tolist() == [0.2] * 5
    torch.testing.assert_close(fusion(logits), mean_logits(logits))
    torch.testing.assert_close(mean_logits(logits), sum(logits) / 5)


def test_fit_uses_500_steps_of_adam_at_a_hundredth_unless_told_otherwise() -> None:
    logits, labels = draw(1, 3, 6, 4)
    plain = double(LogisticFusion(3)).fit(logits, labels)
    told = double(LogisticFusion(3)).fit(logits, labels, steps=500, lr=0.01)
    shorter = double(LogisticFusion(3)).fit(logits, labels, steps=499, lr=0.01)
    assert torch.equal(plain.alpha, told.alpha)
    assert not torch.equal(plain.alpha, shorter.alpha)
    assert (FusionConfig().steps, FusionConfig().lr) == (500, 0.01)


def test_fit_gives_the_weight_to_the_exit_that_knows_the_labels() -> None:
    logits, labels = draw(2, 4, 200, 5)
    logits[2] = 5.0 * torch.nn.functional.one_hot(labels, 5)
    weights = LogisticFusion(4).fit(logits.float(), labels).weights
    assert weights[2] > 0.8
    assert weights.sum().item() == pytest.approx(1.0)


def test_reordering_the_exits_reorders_the_weights() -> None:
    logits, labels = draw(3, 4, 50, 5)
    order = torch.tensor([2, 0, 3, 1])
    one = double(LogisticFusion(4)).fit(logits, labels, steps=50).weights
    two = double(LogisticFusion(4)).fit(logits[order], labels, steps=50).weights
    torch.testing.assert_close(one[order], two)


def test_bfloat16_logits_are_fused_in_float32() -> None:
    logits, _ = draw(4, 3, 5, 4)
    coarse = logits.bfloat16()
    assert LogisticFusion(3)(coarse).dtype == torch.float32
    assert mean_logits(coarse).dtype == torch.float32


@given(st.lists(st.integers(0, 3).map(float), min_size=1, max_size=8))
def test_best_is_the_first_of_equal_maxima(acc: list[float]) -> None:
    assert first_best(acc) == acc.index(max(acc))


def test_report_labels_what_was_chosen_on_test_and_what_on_held_out_images() -> None:
    labels = torch.tensor([0, 1, 2, 0])
    right = torch.nn.functional.one_hot(labels, 3).float()
    logits = torch.stack([right.roll(1, dims=1), right, right.roll(1, dims=1)])
    report = report_exits(logits, labels, heldout_top1=[50.0, 10.0, 20.0])
    assert report["best_test_chosen"] == {"exit": 1, "top1": 100.0, "top5": 100.0}
    assert report["best_heldout_chosen"] == {"exit": 0, "top1": 0.0, "top5": 100.0}
    assert report["last"]["top1"] == 0.0
    assert report_exits(logits, labels, None)["best_heldout_chosen"] is None


def test_fusion_is_fitted_on_one_split_and_measured_on_the_other() -> None:
    labels = torch.arange(40) % 4
    right = 3.0 * torch.nn.functional.one_hot(labels, 4)
    wrong = right.roll(1, dims=1)
    fit_on, test = torch.stack([right, wrong]), torch.stack([wrong, right])
    record, fusion = report_fusion((fit_on, labels), (test, labels), FusionConfig())
    assert record["weights"][0] > 0.9  # the exit that is right on the fitting split
    assert record["top1"] == 0.0  # and wrong on the other
    assert record["N_eff"] == pytest.approx(1 / sum(w * w for w in fusion.weights.tolist()), rel=1e-5)


def test_a_fit_needs_no_gradients_around_it() -> None:
    logits, labels = draw(3, 3, 5, 4)
    fitted = LogisticFusion(3).fit(logits.float(), labels, steps=12).weights
    with torch.no_grad():
        torch.testing.assert_close(LogisticFusion(3).fit(logits.float(), labels, steps=12).weights, fitted)
