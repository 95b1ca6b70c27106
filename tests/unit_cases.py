"""Blocks, units and losses, fused against plain; see ``test_kernels.py`` for how these run."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import DEVICE, LAST, distance, make_norm, poisoned  # noqa: F401  (a fixture for every case here too)
from torch import Tensor
from torch.nn import functional as F

from bicovg.bench_variants import replace_goodness
from bicovg.blocks import Block
from bicovg.kernels import block, borders, image, loss, tail
from bicovg.networks import local_network
from bicovg.offsets import border_sums
from bicovg.signals import assign_gradients, wake_autograd
from bicovg.step import local_step

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import kernel_edges
from kernel_edges import BORDERS, IMAGE, Edge, check_edge


@pytest.mark.parametrize(("scope", "checkpointing"), [("hgb", False), ("end-to-end", False), ("end-to-end", True)])
def test_units_of_several_blocks_learn_like_plain_ones(scope: str, checkpointing: bool) -> None:
    compare_with_plain(scope=scope, group_size=2, alignment=scope == "hgb", checkpointing=checkpointing)


@pytest.mark.parametrize("alignment", [False, True])
def test_fused_units_learn_like_plain_ones(alignment: bool) -> None:
    compare_with_plain(alignment=alignment)


def compare_with_plain(**options: object) -> None:
    """Three steps of a net on the kernels and on the plain functions: equal losses, weights and statistics."""
    torch.use_deterministic_algorithms(False)
    wake_autograd(torch.device(DEVICE))
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
    (value, root, slope), wanted = loss.exit_loss(logits, labels), F.cross_entropy(wide, labels)
    wanted.backward()
    assert root is logits
    assert value.shape == (1,)
    assert abs(value.item() - wanted.item()) < 1e-5
    assert slope is not None
    assert wide.grad is not None
    assert distance(slope, wide.grad) < 1e-5


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_loss_of_a_logit_that_is_not_finite_is_not_finite(bad: float) -> None:
    logits = torch.zeros(5, 10, device=DEVICE)
    logits[3, 2] = bad
    value, _, slope = loss.exit_loss(logits, torch.arange(5, device=DEVICE))
    assert not value.isfinite()
    assert slope is not None
    assert not slope.isfinite().all()


def test_a_wide_or_double_loss_takes_the_plain_way() -> None:
    for logits in (torch.randn(3, loss.MOST_CLASSES + 1, device=DEVICE), torch.randn(3, 4, device=DEVICE).double()):
        labels = torch.zeros(3, dtype=torch.int64, device=DEVICE)
        value, root, slope = loss.exit_loss(logits, labels)
        assert torch.equal(root, F.cross_entropy(logits, labels))
        assert torch.equal(value, root.view(1))
        assert slope is None


@pytest.mark.parametrize("workers", [528, 1], ids=["one-tile", "all-tiles"])
@pytest.mark.parametrize("layout", [LAST, torch.contiguous_format], ids=["last", "first"])
@pytest.mark.parametrize(
    ("batch", "channels", "outputs", "height", "width"),
    [(3, 3, 24, 7, 8), (1, 1, 16, 1, 1), (3, 7, 130, 6, 6), (2, 4, 20, 11, 3)],
)
def test_the_convolution_of_an_image_and_its_weights_gradient(
    batch: int,
    channels: int,
    outputs: int,
    height: int,
    width: int,
    layout: torch.memory_format,
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(image, "WORKERS", workers)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    x = torch.randn(batch, channels, height, width, device=DEVICE).to(dtype).contiguous(memory_format=layout)
    weight = torch.randn(outputs, channels, 3, 3, device=DEVICE).to(dtype).contiguous(memory_format=layout)
    weight.requires_grad_()
    assert image.fits_image(x, weight)
    y = image.image_conv(x, weight)
    wide = weight.detach().double().requires_grad_()
    wanted = F.conv2d(x.double(), wide, padding=1)
    assert y.is_contiguous(memory_format=LAST)
    limit = 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert distance(y.detach(), wanted.detach()) < limit
    grad = torch.randn_like(y)
    (found,), (oracle,) = torch.autograd.grad(y, [weight], grad), torch.autograd.grad(wanted, [wide], grad.double())
    assert found.dtype == dtype
    assert distance(found, oracle) < limit


def test_a_convolution_that_is_no_images_goes_the_plain_way() -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    weight = torch.zeros(8, 3, 3, 3, device=DEVICE, dtype=dtype)
    x = torch.zeros(1, 3, 4, 4, device=DEVICE, dtype=dtype)
    assert image.fits_image(x, weight)
    assert not image.fits_image(x.requires_grad_(), weight)
    assert not image.fits_image(torch.zeros(1, 8, 4, 4, device=DEVICE, dtype=dtype), weight)
    assert not image.fits_image(x.detach().double(), weight)
    assert not image.fits_image(x.detach(), weight[:, :, :1, :1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32])
@pytest.mark.parametrize("layout", [LAST, torch.contiguous_format], ids=["last", "first"])
@pytest.mark.parametrize(
    ("channels", "height", "width"), [(16, 1, 1), (24, 1, 7), (40, 5, 1), (130, 9, 8), (64, 8, 8), (16, 16, 13)]
)
def test_border_sums_of_a_map(
    channels: int, height: int, width: int, layout: torch.memory_format, dtype: torch.dtype
) -> None:
    dy = torch.randn(3, channels, height, width, device=DEVICE).to(dtype).contiguous(memory_format=layout)
    found, wanted = borders.fused_border_sums(dy), border_sums(dy.double())
    assert borders.fused_available(dy)
    assert found.dtype == torch.float32
    if height > 1 and width > 1:
        assert distance(found, wanted) < 1e-6
    else:  # taps that are never inside sum up to 0
        assert (found - wanted).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("edge", "names"),
    [
        (Edge("", IMAGE, 2, 3, 24, 5), {"y", "y of a sample", "dW"}),
        (Edge("", IMAGE, 3, 1, 32, 8), {"y", "y of a sample", "dW"}),
        (Edge("", BORDERS, 3, 8, 24, 7), {"sums", "sums of a sample"}),
    ],
    ids=str,
)
def test_entrances_as_they_are_checked_at_every_recipes_shapes(edge: Edge, names: set[str]) -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    errors = check_edge(edge, dtype)
    assert errors.keys() == names
    limit = 1e-2 if dtype == torch.bfloat16 and edge.kind == IMAGE else 1e-5
    assert {name: error for name, error in errors.items() if not error < limit} == {}


def test_a_lost_row_of_an_entrance_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    for kind, operator in ((IMAGE, "image_conv_op"), (BORDERS, "border_sums_op")):
        right = getattr(kernel_edges, operator)

        def lose(*given: Tensor, right: Any = right) -> Tensor:
            found: Tensor = right(*given).clone()
            found[1, :, 0] = 0.0
            return found

        monkeypatch.setattr(kernel_edges, operator, lose)
        assert max(check_edge(Edge("", kind, 3, 3, 24, 7), dtype).values()) > 0.1, kind


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
