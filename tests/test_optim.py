"""One optimizer per unit, one learning rate for all of them."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bicovg import local_network
from bicovg.config import OptimConfig
from bicovg.engine import Schedule
from bicovg.errors import UserError
from bicovg.optim import learning_rate, make_optimizers, set_learning_rate
from bicovg.recipes import get_recipe

CPU = torch.device("cpu")


def make_net() -> torch.nn.Module:
    return local_network(3, (8, 8, 8, 8), groups=(2, 2), alignment=True, hidden=4)


@given(st.integers(2, 1000), st.floats(1e-4, 1.0), st.floats(0, 1))
def test_cosine_starts_at_the_peak_and_never_rises(steps: int, lr: float, share: float) -> None:
    rates = [learning_rate(step, steps, 0, lr, share * lr) for step in range(steps + 1)]
    assert rates[0] == pytest.approx(lr)
    assert rates[-1] == pytest.approx(share * lr, abs=1e-12)
    assert all(b <= a + 1e-12 for a, b in pairwise(rates))
    assert rates[steps // 2] == pytest.approx(
        share * lr + (lr - share * lr) * 0.5 * (1 + math.cos(math.pi * (steps // 2) / steps))
    )


@given(st.integers(1, 50), st.integers(51, 500), st.floats(1e-4, 1.0))
def test_warm_up_is_linear_from_zero_and_meets_the_cosine_at_its_peak(warm: int, steps: int, lr: float) -> None:
    for step in range(warm):
        assert learning_rate(step, steps, warm, lr, 0.0) == pytest.approx(lr * step / warm)
    assert learning_rate(warm, steps, warm, lr, 0.0) == pytest.approx(lr)
    assert learning_rate(steps, steps, warm, lr, 0.0) == pytest.approx(0.0, abs=1e-12)


def test_recipes_schedule_counts_in_steps_of_the_loader() -> None:
    hgb = Schedule(get_recipe("tiny-imagenet-hgb4"), steps_per_epoch=390)
    assert (hgb(0), hgb(5 * 390)) == (0.0, pytest.approx(0.05))
    assert hgb(195) == pytest.approx(0.05 / 10)
    assert hgb(90 * 390) == pytest.approx(5e-4)
    strict = Schedule(get_recipe("tiny-imagenet-bicovg"), steps_per_epoch=390)
    assert strict(0) == pytest.approx(0.05)
    assert strict(45 * 390) == pytest.approx((0.05 + 5e-4) / 2)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_every_parameter_has_exactly_one_optimizer_that_of_its_unit(name: str) -> None:
    net = make_net()
    optimizers = make_optimizers(net, OptimConfig(name=name), CPU)
    for unit, optimizer in zip(net.units, optimizers, strict=True):
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in owned} == {id(p) for p in unit.parameters()}
    assert sum(len(group["params"]) for o in optimizers for group in o.param_groups) == len(list(net.parameters()))


def test_weight_decay_and_momentum_reach_the_optimizer() -> None:
    (sgd, *_) = make_optimizers(make_net(), OptimConfig(name="sgd", momentum=0.7, weight_decay=0.3), CPU)
    assert (sgd.defaults["momentum"], sgd.defaults["weight_decay"]) == (0.7, 0.3)
    (adamw, *_) = make_optimizers(make_net(), OptimConfig(name="adamw", weight_decay=0.2), CPU)
    assert adamw.defaults["weight_decay"] == 0.2


def test_learning_rate_reaches_numbers_and_shared_tensors_alike() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    shared = torch.tensor(0.5)
    optimizers = [
        torch.optim.SGD(parameters[:1], 0.5),
        torch.optim.AdamW(parameters[1:2], shared, foreach=False, capturable=False),
        torch.optim.AdamW(parameters[2:], shared, foreach=False, capturable=False),
    ]
    set_learning_rate(optimizers, 0.125)
    assert optimizers[0].param_groups[0]["lr"] == 0.125
    assert all(o.param_groups[0]["lr"] is shared for o in optimizers[1:])
    assert shared.item() == 0.125


def test_an_unknown_optimizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="'adam' is unknown: choose adamw or sgd"):
        make_optimizers(make_net(), OptimConfig(name="adam"), CPU)
