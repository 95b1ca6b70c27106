"""Blocks, units and losses, fused against plain; see ``test_kernels.py`` for how these run."""

import math

import pytest
import torch
from kernel_cases import DEVICE, LAST, distance, make_norm, poisoned  # noqa: F401  (a fixture for every case here too)
from torch import Tensor
from torch.nn import functional as F

from bicovg.bench_variants import replace_goodness
from bicovg.blocks import Block
from bicovg.kernels import block, loss, tail
from bicovg.networks import local_network
from bicovg.signals import assign_gradients
from bicovg.step import local_step


@pytest.mark.parametrize(("scope", "checkpointing"), [("hgb", False), ("end-to-end", False), ("end-to-end", True)])
def test_units_of_several_blocks_learn_like_plain_ones(scope: str, checkpointing: bool) -> None:
    compare_with_plain(scope=scope, group_size=2, alignment=scope == "hgb", checkpointing=checkpointing)


@pytest.mark.parametrize("alignment", [False, True])
def test_fused_units_learn_like_plain_ones(alignment: bool) -> None:
    compare_with_plain(alignment=alignment)


def compare_with_plain(**options: object) -> None:
    """Three steps of a net on the kernels and on the plain functions: equal losses, weights and statistics."""
    torch.use_deterministic_algorithms(False)
    images = torch.rand(2, 3, 8, 8, device=DEVICE)
    labels, keys = torch.tensor([0, 2], device=DEVICE), torch.arange(2, device=DEVICE)
    nets = []
    for plain in (False, True):
        torch.manual_seed(0)
        net = local_network(
            num_classes=3, channels=(16, 24, 16, 16), pools=(1,), scales=((2, 4), (1, 2), (1, 2), (1, 2)),
            groups=(1, 3), dropout=0.2, **options,
        ).to(DEVICE)  # fmt: skip
        for module in net.modules():
            if isinstance(module, Block):
                module.plain = plain
        optimizers = [torch.optim.SGD(unit.parameters(), 0.1, momentum=0.9) for unit in net.units]
        losses = [local_step(net, optimizers, images, labels, clip_norm=1.0, keys=keys) for _ in range(3)]
        nets.append((torch.stack(losses), net.state_dict()))
    assert torch.allclose(nets[0][0], nets[1][0], atol=1e-4)
    for name, value in nets[0][1].items():
        assert torch.allclose(value.double(), nets[1][1][name].double(), atol=2e-4), name


@pytest.mark.parametrize(("rows", "classes"), [(1, 2), (7, 10), (37, 100), (300, 200), (5, 2000)])
def test_loss_and_its_gradient_equal_cross_entropy(rows: int, classes: int) -> None:
    logits = (5 * torch.randn(rows, classes, device=DEVICE)).requires_grad_()
    labels = torch.randint(classes, (rows,), device=DEVICE)
    wide = logits.detach().double().requires_grad_()
    mine, wanted = loss.exit_loss(logits, labels), F.cross_entropy(wide, labels)
    (3.0 * mine).backward()
    (3.0 * wanted).backward()
    assert mine.grad_fn is not None
    assert "cross_entropy" in mine.grad_fn.name()
    assert abs(mine.item() - wanted.item()) < 1e-5
    assert logits.grad is not None
    assert wide.grad is not None
    assert distance(logits.grad, wide.grad) < 1e-5


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_loss_of_a_logit_that_is_not_finite_is_not_finite(bad: float) -> None:
    logits = torch.zeros(5, 10, device=DEVICE)
    logits[3, 2] = bad
    assert not loss.exit_loss(logits, torch.arange(5, device=DEVICE)).isfinite()


def test_a_wide_or_double_loss_takes_the_plain_way() -> None:
    for logits in (torch.randn(3, loss.MOST_CLASSES + 1, device=DEVICE), torch.randn(3, 4, device=DEVICE).double()):
        labels = torch.zeros(3, dtype=torch.int64, device=DEVICE)
        assert torch.equal(loss.exit_loss(logits, labels), F.cross_entropy(logits, labels))


@pytest.mark.parametrize("layout", [LAST, torch.contiguous_format], ids=["last", "first"])
def test_a_block_fed_a_constant_differentiates_batch_norm_and_relu_all_the_same(layout: torch.memory_format) -> None:
    """The benchmark's step without goodness: f is its own gradient."""
    gradients = []
    for plain in (False, True):
        torch.manual_seed(0)
        net = local_network(3, (24,), pools=(), scales=((1, 2),), groups=(1,)).to(DEVICE, memory_format=layout)  # type: ignore[call-overload]
        replace_goodness(net, "constant")
        (part,) = net.units[0].blocks  # type: ignore[misc]
        part.plain = plain
        assert part.fusible() is not plain
        images = torch.rand(4, 3, 6, 6, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
        credit = net.train().units[0].learn(images, torch.arange(3, device=DEVICE).repeat(2)[:4], None, False)  # type: ignore[operator]
        assign_gradients([credit])
        gradients.append({name: p.grad for name, p in net.named_parameters() if p.grad is not None})
    mine, wanted = gradients
    assert mine.keys() == wanted.keys()
    assert any("norm" in name for name in mine)
    assert any("conv" in name for name in mine)
    for name, value in mine.items():
        assert distance(value, wanted[name]) < 1e-4, name


@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_in_a_weight_reaches_the_loss_and_what_is_handed_on() -> None:
    """ReLU by a plain maximum would make it 0, and nobody would notice."""
    net = local_network(3, (16, 16), pools=(), scales=((1, 2), (1, 2)), groups=(1, 1)).to(DEVICE, memory_format=LAST)  # type: ignore[call-overload]
    last = net.units[1].blocks[0]  # type: ignore[index]
    with torch.no_grad():
        last.norm.bias[0] = math.nan  # type: ignore[union-attr]
        last.goodness.weight.zero_()  # type: ignore[union-attr]
    optimizers = [torch.optim.SGD(unit.parameters(), 0.1) for unit in net.units]
    images, labels = torch.rand(4, 3, 6, 6, device=DEVICE), torch.tensor([0, 1, 2, 0], device=DEVICE)
    losses = local_step(net, optimizers, images, labels)
    assert losses[0].isfinite()
    assert losses[1].isnan()
    y = torch.randn(2, 16, 4, 4, device=DEVICE).contiguous(memory_format=LAST)
    norm = make_norm(16)
    with torch.no_grad():
        norm.bias[3] = math.nan
    h = tail.fused_tail(y, False, 0.0, None, 0, block.block_statistics(y, norm))
    assert h.isnan().any()


def test_a_block_hands_over_early_in_training_alone() -> None:
    net = local_network(3, (16,), pools=(), scales=((1, 2),), groups=(1,)).to(DEVICE, memory_format=LAST)  # type: ignore[call-overload]
    handed: list[Tensor] = []
    net.units[0].blocks[0].emitted = handed.append  # type: ignore[index,union-attr,assignment]
    for training in (False, True):
        net.train(training)
        with torch.no_grad():
            net.units[0](torch.rand(2, 3, 6, 6, device=DEVICE), torch.arange(2, device=DEVICE))
        assert len(handed) == training
