"""Logistic Fusion with a temperature per exit."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bicovg.config import FusionConfig
from bicovg.evaluation import report_fusion
from bicovg.fusion import LogisticFusion


def two_exits() -> tuple[Tensor, Tensor]:
    """(2, N, K): a sound exit, and one that is nearly as often right but ten times too sure of itself."""
    labels = torch.arange(400) % 4
    right = F.one_hot(labels, 4).float()
    return torch.stack([right * 2 + torch.randn(400, 4), 10 * (right * 1.5 + torch.randn(400, 4))]), labels


def test_temperatures_start_without_any_effect() -> None:
    logits, _ = two_exits()
    assert torch.equal(LogisticFusion(2, temperatures=True)(logits), LogisticFusion(2)(logits))


def test_a_temperature_scales_its_own_exit_alone() -> None:
    logits, _ = two_exits()
    fusion = LogisticFusion(2, temperatures=True)
    with torch.no_grad():
        fusion.log_temperature[1] = torch.tensor(4.0).log()
    cooled = torch.stack([logits[0], logits[1] / 4])
    torch.testing.assert_close(fusion(logits), LogisticFusion(2)(cooled))


def test_an_over_confident_exit_gets_a_higher_temperature_and_a_lower_loss() -> None:
    logits, labels = two_exits()
    plain, scaled = (LogisticFusion(2, temperatures=t).fit(logits, labels, steps=300, lr=0.02) for t in (False, True))
    assert scaled.log_temperature[1] > scaled.log_temperature[0]
    assert F.cross_entropy(scaled(logits), labels) < F.cross_entropy(plain(logits), labels)


@pytest.mark.parametrize("temperatures", [False, True])
def test_the_report_names_temperatures_only_where_they_were_fitted(temperatures: bool) -> None:
    data = two_exits()
    record, fusion = report_fusion(data, data, FusionConfig(steps=5), temperatures)
    assert ("temperatures" in record) == temperatures
    if temperatures:
        assert record["temperatures"] == pytest.approx(fusion.log_temperature.exp().tolist())
    assert sum(record["weights"]) == pytest.approx(1.0)
