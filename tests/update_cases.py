"""Fused clip, finite check and optimizer against torch's own; see ``test_kernels.py`` for how these run."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bicovg.blocks import Block
from bicovg.config import OptimConfig
from bicovg.errors import NonFiniteError
from bicovg.guard import Guard
from bicovg.lanes import OneLane
from bicovg.networks import LocalNetwork, local_network
from bicovg.optim import make_optimizers
from bicovg.signals import Credit
from bicovg.step import local_step
from bicovg.updates import RUN, FusedUpdates, make_state, updates_available

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ADAMW = OptimConfig(name="adamw", lr=3e-3, weight_decay=0.02)
SGD = OptimConfig(name="sgd", lr=0.05, momentum=0.9, weight_decay=1e-3)
PLAIN = OptimConfig(name="sgd", lr=0.1, momentum=0.0)
# Two nets are compared: on a GPU their convolutions must not differ by the algorithm or by TF32.
torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
IMAGES = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Trained:
    """A small net, trained by ``local_step`` with one guard or the other."""

    def __init__(
        self, optim: OptimConfig, fused: bool, policy: str = "stop", shadows: bool = False, kernels: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.net: LocalNetwork = local_network(
            3, (24, 40, 24), pools=(1,), scales=((2, 4), (1, 2), (1, 2)), groups=(1, 2), alignment=True, hidden=64
        ).to(DEVICE, memory_format=torch.channels_last)  # type: ignore[call-overload]
        for module in self.net.modules():
            if isinstance(module, Block):
                module.plain = not (shadows or kernels)  # the other kernels have their own cases
        self.optimizers = make_optimizers(self.net, optim, DEVICE)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:  # the kernels read the learning rate from the device
                group["lr"] = torch.tensor(optim.lr, device=DEVICE) if fused else group["lr"]
        kind: Any = FusedUpdates if fused else Guard
        self.guard = kind(self.net, self.optimizers, policy, *((shadows,) if fused else ()))

    def with_updates(self) -> "Trained":
        """The same net with fused updates and shadows from here on."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = torch.as_tensor(group["lr"], device=DEVICE)
        self.guard = FusedUpdates(self.net, self.optimizers, shadows=True)
        return self

    def step(self, number: int, **settings: Any) -> Tensor:
        labels, keys = torch.tensor([0, 1, 2, 1], device=DEVICE), torch.arange(4, device=DEVICE) + 10 * number
        losses = local_step(
            self.net, self.optimizers, IMAGES.to(DEVICE), labels, keys=keys, guard=self.guard, **settings
        )
        self.guard.record(number)
        return losses

    def tensors(self) -> dict[str, Tensor]:
        found = {name: value.detach() for name, value in self.net.state_dict().items()}
        for unit, optimizer in enumerate(self.optimizers):
            for row, state in optimizer.state_dict()["state"].items():
                found |= {f"{unit}.{row}.{name}": value for name, value in state.items()}
        return {name: value.detach().double().clone() for name, value in found.items()}


@pytest.mark.parametrize("clip_norm", [None, 0.5], ids=["free", "clipped"])
@pytest.mark.parametrize("optim", [ADAMW, SGD, PLAIN], ids=["adamw", "sgd", "plain"])
def test_updates_equal_torchs_clip_and_optimizer(optim: OptimConfig, clip_norm: float | None) -> None:
    mine, wanted = Trained(optim, True), Trained(optim, False)
    assert max(len(table.runs) for table in mine.guard.tables) > 3, "some parameter must take several programs"
    for number in range(4):
        losses = [trained.step(number, clip_norm=clip_norm) for trained in (mine, wanted)]
        assert torch.allclose(*losses, atol=1e-5)
    reference = wanted.tensors()
    for name, value in mine.tensors().items():
        assert torch.allclose(value, reference[name], rtol=1e-4, atol=2e-6), name
    assert mine.tensors().keys() == reference.keys()


def test_parameters_that_miss_steps_are_corrected_by_their_own_counts() -> None:
    """In step s every parameter but the s-th of a unit has a gradient."""
    mine, wanted = Trained(ADAMW, True), Trained(ADAMW, False)
    for step in range(3):
        for trained in (mine, wanted):
            trained.net.train()
            for unit, (module, optimizer) in enumerate(zip(trained.net.units, trained.optimizers, strict=True)):
                generator = torch.Generator().manual_seed(10 * step + unit)
                for place, parameter in enumerate(module.parameters()):
                    drawn = torch.randn(parameter.shape, generator=generator).to(DEVICE)
                    grad = torch.empty_like(parameter).copy_(drawn)  # laid out like the parameter
                    parameter.grad = None if place == step else grad
                with trained.guard:
                    losses = torch.zeros(1, device=DEVICE)
                    trained.guard.finish(unit, module, losses, optimizer, None, OneLane())
    reference = wanted.tensors()
    counts = {float(value) for name, value in reference.items() if name.endswith(".step")}
    assert counts == {2.0, 3.0}
    for name, value in mine.tensors().items():
        assert torch.allclose(value, reference[name], rtol=1e-4, atol=2e-6), name


@pytest.mark.parametrize("optim", [ADAMW, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_unit_keeps_its_bits_and_those_behind_it(optim: OptimConfig, bad: float) -> None:
    """Parameters, moments, step counts and batch-norm buffers; the unit before it has stepped."""
    trained = Trained(optim, True)
    trained.step(0)
    with torch.no_grad():
        trained.net.units[1].blocks[0].readout.weight[0, 0] = bad  # type: ignore[index,union-attr]
    before = trained.tensors()
    with pytest.raises(NonFiniteError, match="block 1 was not finite at step 1"):
        (trained.step(1), trained.guard.flush())  # a CPU raises in the step, a GPU when it is asked
    for name, value in trained.tensors().items():
        first = name.startswith(("units.0.", "0."))
        if not first:
            assert torch.equal(value.nan_to_num(7.0), before[name].nan_to_num(7.0)), name
    moved = [n for n, value in trained.tensors().items() if not torch.equal(value, before[n])]
    assert any(name.startswith("units.0.") for name in moved)


def test_skip_goes_on_with_the_next_step() -> None:
    trained = Trained(ADAMW, True, policy="skip")
    trained.step(0)
    weight = trained.net.units[2].blocks[0].readout.weight  # type: ignore[index,union-attr]
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = torch.nan
    trained.step(1)
    with torch.no_grad():
        weight.copy_(kept)
    losses = trained.step(2)
    trained.guard.flush()
    assert losses.isfinite().all()
    assert [event.step for event in trained.guard.events] == [1]
    counts = [float(state["step"]) for state in trained.optimizers[2].state_dict()["state"].values()]
    assert set(counts) == {2.0}
    assert {float(s["step"]) for s in trained.optimizers[0].state_dict()["state"].values()} == {3.0}


def test_shadows_train_as_autocast_does() -> None:
    """The weights that steps compute with are the rounded weights, and their gradients arrive unrounded by casts."""
    mine, wanted = Trained(SGD, True, shadows=True), Trained(SGD, False, kernels=True)
    for number in range(3):
        losses = [trained.step(number, clip_norm=1.0, precision="bfloat16") for trained in (mine, wanted)]
        assert torch.allclose(*losses, atol=2e-3)
    assert len(mine.guard.shadows) == 6
    for parameter, shadow in mine.guard.shadows.items():
        # Triton's interpreter cuts digits off where a GPU rounds
        error = (shadow.float() - parameter).abs()
        assert (error <= parameter.abs() * 2.0 ** (-8 if DEVICE.type == "cuda" else -7)).all()
        assert shadow.stride() == parameter.stride()
        assert shadow.grad is None
    reference = wanted.tensors()
    for name, value in mine.tensors().items():
        assert (value - reference[name]).norm() <= 0.02 * reference[name].norm() + 1e-3, name
    with torch.no_grad():
        mine.net.units[0].blocks[0].conv.weight.zero_()  # type: ignore[index,union-attr]
    mine.guard.settle()
    assert (mine.guard.shadows[mine.net.units[0].blocks[0].conv.weight] == 0).all()  # type: ignore[index,union-attr]


def test_a_step_without_the_guard_trains_the_weights_themselves() -> None:
    trained = Trained(SGD, True, shadows=True)
    trained.step(0, precision="bfloat16")
    weight = trained.net.units[0].blocks[0].conv.weight  # type: ignore[index,union-attr]
    before = weight.detach().clone()
    trained.guard = Guard(trained.net, trained.optimizers)
    trained.step(1, precision="bfloat16")
    assert not torch.equal(weight, before)


@pytest.mark.parametrize("late", [False, True])
def test_a_frozen_convolution_stays(late: bool) -> None:
    trained = Trained(SGD, False)
    weight = trained.net.units[1].blocks[0].conv.weight  # type: ignore[index,union-attr]
    weight.requires_grad_(late)
    for block in trained.net.modules():
        if isinstance(block, Block):
            block.plain = False
    before = weight.detach().clone()
    trained = trained.with_updates()
    weight.requires_grad_(False)
    trained.step(0, precision="bfloat16")
    assert torch.equal(weight, before)


def test_summed_steps_are_refused_and_leave_no_gradient_behind() -> None:
    trained = Trained(SGD, True, shadows=True)
    with pytest.raises(TypeError, match="interleaved"):
        trained.step(0, schedule="summed", precision="bfloat16")
    assert all(shadow.grad is None for shadow in trained.guard.shadows.values())


@pytest.mark.filterwarnings("ignore:overflow")
def test_large_finite_gradients_are_steps_where_no_norm_is_taken() -> None:
    trained = Trained(PLAIN, True)
    trained.step(0)
    scale = 1e20
    for unit in trained.net.units:
        learn = unit.learn
        unit.learn = lambda *a, learn=learn, **k: enlarge(learn(*a, **k), scale)  # type: ignore[misc,assignment,operator]
    for optimizer in trained.optimizers:
        optimizer.param_groups[0]["lr"].fill_(1e-25)
    trained.step(1)
    trained.guard.flush()
    with pytest.raises(NonFiniteError):
        (trained.step(2, clip_norm=1.0), trained.guard.flush())


def enlarge(credit: Credit, scale: float) -> Credit:
    credit.roots = [(loss * scale, grad) for loss, grad in credit.roots]
    return credit


def test_many_runs_are_added_up() -> None:
    """More partial sums than ``decide_kernel`` takes at once."""
    weight = nn.Parameter(torch.zeros(1100 * RUN, device=DEVICE))
    net = LocalNetwork([Lonely(weight)])
    optimizer = torch.optim.SGD([weight], lr=torch.ones((), device=DEVICE))
    guard = FusedUpdates(net, [optimizer])
    weight.grad = torch.full_like(weight, 2.0)
    with guard:
        guard.finish(0, net.units[0], torch.zeros(1, device=DEVICE), optimizer, 3.0, OneLane())
    assert abs(weight.double().norm().item() - 3.0) < 1e-4


class Lonely(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.exits, self.blocks = weight, [0], ()


def test_a_parameter_without_gradient_is_left_alone() -> None:
    trained = Trained(ADAMW, True)
    extra = trained.net.units[0].blocks[0].readout.bias  # type: ignore[index,union-attr]
    extra.requires_grad_(False)
    before = extra.clone()
    trained.step(0)
    assert torch.equal(extra, before)
    assert trained.optimizers[0].state[extra]["step"] == 0
    assert trained.optimizers[0].state[trained.net.units[0].blocks[0].readout.weight]["step"] == 1  # type: ignore[index,union-attr]


def test_what_the_kernels_do_not_know_is_left_to_torch() -> None:
    weight, lr = [nn.Parameter(torch.zeros(3))], torch.tensor(0.1)
    double = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    assert updates_available([torch.optim.AdamW(weight, lr, foreach=False), torch.optim.SGD(weight, lr, momentum=0.9)])
    strange = [
        torch.optim.SGD(weight, 0.1),
        torch.optim.SGD(weight, lr, momentum=0.9, nesterov=True),
        torch.optim.AdamW(weight, lr, amsgrad=True, foreach=False),
        torch.optim.AdamW(weight, lr, betas=(0.0, 0.9), foreach=False),
        torch.optim.Adam(weight, lr, foreach=False),
        torch.optim.SGD([double], lr),
        torch.optim.SGD([{"params": weight}, {"params": [nn.Parameter(torch.ones(2))]}], lr),
    ]
    assert not any(updates_available([optimizer]) for optimizer in strange)


def test_state_is_what_torch_would_make() -> None:
    for kind, settings in ((torch.optim.AdamW, {"capturable": False}), (torch.optim.SGD, {"momentum": 0.9})):
        made, wanted = ([nn.Parameter(torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last))] for _ in range(2))
        optimizer, reference = kind(made, lr=0.1, **settings), kind(wanted, lr=0.1, **settings)
        wanted[0].grad = torch.zeros_like(wanted[0])
        reference.step()
        make_state(optimizer)
        mine, torchs = (o.state_dict()["state"][0] for o in (optimizer, reference))
        assert mine.keys() == torchs.keys()
        for name, value in mine.items():
            assert (value.dtype, value.stride()) == (torchs[name].dtype, torchs[name].stride())
    assert RUN >= 1024
