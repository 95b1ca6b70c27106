"""The gradient of a constant offset at a convolution's input, against the one that autograd finds the long way."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from bicovg.blocks import Block
from bicovg.goodness import BiCovG
from bicovg.layers import FeatureAlignment
from bicovg.networks import local_network
from bicovg.offsets import attach_offset, border_sums, contract_sums

SIZES = [(1, 1), (1, 5), (4, 1), (2, 3), (7, 4), (8, 8)]


def aligned_block(channels: int = 6, wider: int = 10) -> Block:
    torch.manual_seed(0)
    alignment = FeatureAlignment(channels, hidden=12)
    torch.nn.init.normal_(alignment.w2.weight)
    return Block(
        1, channels, wider, pool=False, dropout=0.0, batch_norm=True, num_classes=3,
        goodness=BiCovG(wider, (1,), 2, True), alignment=alignment,
    ).double()  # fmt: skip


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_border_sums_give_the_offset_the_gradient_of_the_whole_input(height: int, width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, height, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, 3, 3, dtype=torch.float64)
    y = F.conv2d(x, weight, padding=1)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, [x], dy)
    found = contract_sums(border_sums(dy), weight)
    assert (found - dx.sum((2, 3))).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sums_are_wide_and_the_offset_gets_its_own_type(dtype: torch.dtype) -> None:
    y = torch.randn(2, 5, 4, 4).to(dtype)
    offset, weight = torch.zeros(2, 3, dtype=dtype, requires_grad=True), torch.randn(5, 3, 3, 3).to(dtype)
    assert border_sums(y).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    attached = attach_offset(y, offset, weight)
    assert torch.equal(attached, y)
    (found,) = torch.autograd.grad(attached, [offset], torch.ones_like(y))
    assert found.dtype == dtype


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_block_behind_an_alignment_learns_as_if_its_input_had_a_gradient(layout: torch.memory_format) -> None:
    x = torch.rand(4, 6, 5, 7, dtype=torch.float64).contiguous(memory_format=layout)
    block = aligned_block()
    assert block.alignment is not None

    def learn(y: Tensor) -> list[Tensor]:
        loss = block.judge(block.activate(y)).square().sum()
        return list(torch.autograd.grad(loss, list(block.parameters())))

    short = learn(block.convolve(x))
    long = learn(F.conv2d(block.alignment(x), block.conv.weight, padding=1))
    for mine, wanted in zip(short, long, strict=True):
        assert (mine - wanted).abs().max() <= 1e-12 * max(1.0, float(wanted.abs().max()))


def test_the_gradient_of_the_gradient_is_that_of_the_long_way() -> None:
    x = torch.rand(2, 6, 4, 4, dtype=torch.float64)
    block = aligned_block()
    assert block.alignment is not None
    found = []
    for y in (block.convolve(x), F.conv2d(block.alignment(x), block.conv.weight, padding=1)):
        (first,) = torch.autograd.grad(y.pow(3).sum(), [block.alignment.w2.weight], create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [block.conv.weight])[0])
    assert (found[0] - found[1]).abs().max() <= 1e-12 * found[1].abs().max()


def test_a_function_of_the_parameters_can_be_differentiated() -> None:
    block, x = aligned_block().eval(), torch.rand(2, 6, 4, 4, dtype=torch.float64)
    given = dict(block.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        y = torch.func.functional_call(block, parameters, (x, None))[1]
        return y.square().sum()

    found = torch.func.grad(loss)({name: value.detach() for name, value in given.items()})
    wanted = torch.autograd.grad(block(x, None)[1].square().sum(), list(given.values()))
    assert all((found[name] - value).abs().max() < 1e-12 for name, value in zip(given, wanted, strict=True))


def test_an_alignment_that_does_not_learn_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    block = aligned_block()
    assert block.alignment is not None
    block.alignment.requires_grad_(requires_grad=False)
    monkeypatch.setattr("bicovg.kernels.borders.fused_border_sums", lambda dy: pytest.fail("computed"))
    block.convolve(torch.rand(2, 6, 4, 4, dtype=torch.float64)).sum().backward()
    assert block.conv.weight.grad is not None


def test_the_alignment_of_a_units_entrance_costs_no_convolution() -> None:
    def backward_flops(alignment: bool) -> int:
        net = local_network(3, (8, 16), (), ((1,),) * 2, groups=(1, 1), alignment=alignment, hidden=4, dropout=0.0)
        with FlopCounterMode(display=False) as counter:
            _, logits = net.units[1](torch.rand(2, 8, 16, 16))
            logits[0].sum().backward()
        return counter.get_flop_counts()["Global"][torch.ops.aten.convolution_backward]

    assert backward_flops(True) == backward_flops(False) > 0


def test_an_alignment_inside_a_unit_passes_the_gradient_on() -> None:
    torch.manual_seed(0)
    net = local_network(3, (8, 8), (), ((1,),) * 2, scope="end-to-end", alignment=(1,), hidden=4, dropout=0.0)
    torch.nn.init.normal_(net.units[0].blocks[1].alignment.w2.weight)  # type: ignore[index,union-attr]
    _, logits = net.units[0](torch.rand(2, 3, 6, 6))
    logits[0].sum().backward()
    assert net.units[0].blocks[0].conv.weight.grad.abs().max() > 0  # type: ignore[index,union-attr]
