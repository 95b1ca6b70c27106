"""The three kinds of credit meet the engine at one seam."""

import pytest
import torch
from torch import nn

from bicovg import LocalNetwork, local_step
from bicovg.config import OptimConfig
from bicovg.optim import make_optimizers
from bicovg.signals import assign_gradients, delta_credit, loss_credit, teaching_credit

CPU = torch.device("cpu")


class ToyUnit(nn.Module):
    """A linear layer that learns by whichever credit it is told to use."""

    exits = (0,)

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.kind = nn.Linear(3, 2, bias=False), kind

    def learn(self, x, labels, keys=None, emit=True):
        y = self.layer(x.flatten(1))
        target = nn.functional.one_hot(labels, 2).float()
        error = (y - target) / len(x)
        loss = 0.5 * (y - target).square().sum() / len(x)
        if self.kind == "loss":
            return loss_credit(None, [loss])
        report = loss.detach()[None]
        if self.kind == "teaching":
            return teaching_credit(None, report, y, error.detach())
        return delta_credit(None, report, [(self.layer.weight, -(error.detach().T @ x.flatten(1)))])


def test_loss_teaching_and_delta_give_the_same_update_for_the_same_rule():
    images, labels = torch.randn(5, 3, 1, 1), torch.tensor([0, 1, 1, 0, 1])
    weights = []
    for kind in ("loss", "teaching", "delta"):
        net = LocalNetwork([ToyUnit(kind)])
        optimizers = [torch.optim.SGD(net.parameters(), 0.1)]
        for schedule in ("interleaved", "summed"):
            losses = local_step(net, optimizers, images, labels, schedule)
            assert losses.shape == (1,)
        weights.append(net.units[0].layer.weight.detach().clone())
    assert torch.allclose(weights[0], weights[1], atol=1e-6)
    assert torch.allclose(weights[0], weights[2], atol=1e-6)
    assert not torch.allclose(weights[0], ToyUnit("loss").layer.weight)


def test_sgd_of_rate_one_moves_a_parameter_by_exactly_its_delta():
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.SGD([parameter], 1.0)
    assign_gradients([delta_credit(None, torch.zeros(1), [(parameter, torch.tensor([0.25, -0.5]))])])
    optimizer.step()
    assert parameter.tolist() == [1.25, 1.5]


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_delta_moves_its_parameter_whatever_its_order_in_memory(name):
    """Fused optimizers walk memory: a gradient has to lie as its parameter does."""
    numbers = torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, -6.0]])
    given = {
        "rows": numbers,
        "columns": numbers.t().contiguous().t(),
        "expanded": torch.tensor([[1.0], [-2.0]]).expand(2, 3),
        "gaps": numbers.repeat_interleave(2, dim=1)[:, ::2],
    }
    for order, delta in given.items():
        unit = ToyUnit("delta")
        weight, before = unit.layer.weight, unit.layer.weight.detach().clone()
        net = LocalNetwork([unit])
        (optimizer,) = make_optimizers(net, OptimConfig(name=name, lr=1.0, weight_decay=0.0, momentum=0.0), CPU)
        assert optimizer.param_groups[0]["fused"]
        for share in (0.5, 0.5):  # as micro-batches do
            assign_gradients([delta_credit(None, torch.zeros(1), [(weight, delta)])], share)
        optimizer.step()
        moved = delta if name == "sgd" else delta.sign()  # AdamW's first step is the rate, towards the sign
        torch.testing.assert_close(weight.detach(), before + moved, msg=order)


def test_a_delta_of_the_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"delta of shape \(3,\) must match its parameter \(2, 3\)"):
        delta_credit(None, torch.zeros(1), [(nn.Parameter(torch.zeros(2, 3)), torch.zeros(3))])


def test_a_teaching_signal_of_the_wrong_shape_is_refused():
    with pytest.raises(ValueError, match="must match the activation"):
        teaching_credit(None, torch.zeros(1), torch.zeros(2, 3), torch.zeros(3, 2))
