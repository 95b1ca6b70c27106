"""Batch norm, ReLU and goodness fused, against float64; see ``test_kernels.py`` for how these run."""

import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import BOTH_DTYPES, DEVICE, LAST, LOOSE, distance, draw_maps, draw_weight, make_norm
from kernel_cases import poisoned as poisoned  # a fixture for every case here too
from torch import nn
from torch.nn import functional as F

from bicovg.goodness import bicovg
from bicovg.kernels import block, block_backward
from bicovg.kernels.block_backward_triton import find_edge
from bicovg.kernels.tiles import Tile

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
from kernel_blocks import Block, small_blocks
from kernel_checks import WAYS, check_block


@BOTH_DTYPES
@pytest.mark.parametrize("few", [True, False], ids=["fewer-launches", "more-programs"])
@pytest.mark.parametrize(
    ("shape", "scales", "projections", "last"),
    [
        ((3, 24, 7, 5), (1, 2), 3, True),
        ((2, 40, 8, 8), (2, 4), 5, True),
        ((2, 16, 3, 3), (1,), 0, False),
        ((5, 33, 2, 2), (1, 2), 4, True),
        ((2, 520, 3, 3), (1, 2), 4, True),
        ((2, 24, 13, 12), (1, 2), 3, True),
        ((2, 16, 10, 8), (1, 2), 16, True),
        ((3, 37, 6, 9), (2, 3), 19, False),
    ],
)
def test_block_equals_batch_norm_relu_and_goodness(
    shape: tuple[int, ...],
    scales: tuple[int, ...],
    projections: int,
    last: bool,
    few: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """g, the running statistics, and the gradients of y, gamma, beta and W, through the batch statistics."""
    monkeypatch.setattr(block, "FEW_ROWS", 1000 if few else 0)
    monkeypatch.setattr(block_backward, "ADDED", 8192 if few else 256)
    monkeypatch.setattr(block_backward, "SCALED", 4096 if few else 256)
    monkeypatch.setattr(block_backward, "SLOPES", 1024 if few else 64)
    C = shape[1]
    y = (draw_maps(shape, last) - 0.4 + 3.0 * torch.rand(C, 1, 1, device=DEVICE)).to(dtype)
    if last:
        y = y.contiguous(memory_format=LAST)
    norm, oracle = make_norm(C), nn.BatchNorm2d(C, device=DEVICE)
    oracle.load_state_dict(norm.state_dict())
    oracle = oracle.double()
    weight = draw_weight(projections, C, dtype)
    leaves = [x.clone().requires_grad_() for x in (y, weight) if x is not None]
    wide = [x.double().requires_grad_() for x in (y, weight) if x is not None]
    assert block.fuses_block(y, weight, scales)
    stats = block.block_statistics(leaves[0], norm)
    g = block.block_goodness(leaves[0], stats, norm, leaves[1] if projections else None, scales)
    reference = bicovg(F.relu(oracle(wide[0])), wide[1] if projections else None, scales)
    grad = torch.randn_like(reference)
    g.backward(grad.float())
    reference.backward(grad)
    limit = LOOSE if dtype == torch.bfloat16 else 1e-5  # scale * y + shift cancels where y's mean is far from 0
    assert distance(g, reference) < limit
    pairs = [*zip(leaves, wide, strict=True), (norm.weight, oracle.weight), (norm.bias, oracle.bias)]
    for leaf, wanted in pairs:
        assert leaf.grad is not None
        assert wanted.grad is not None
        assert distance(leaf.grad, wanted.grad) < limit
    for name, wanted_buffer in oracle.named_buffers():
        assert torch.allclose(norm.get_buffer(name).double(), wanted_buffer.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("part", small_blocks(), ids=lambda b: f"C{b.channels}-N{b.projections}-{b.scales}-{b.pool}")
def test_block_and_tail_of_recipe_blocks(part: Block) -> None:
    """What ``benchmarks/kernels.py`` checks on a GPU, of one small image."""
    errors = check_block(part, torch.float32, ways=())
    assert {name: error for name, error in errors.items() if not error < 1e-5} == {}


@BOTH_DTYPES
@pytest.mark.parametrize("projections", [5, 0])
def test_the_last_block_of_a_unit_gets_the_same_bits(projections: int, dtype: torch.dtype) -> None:
    """dy in y's place, h without a graph, and a y in contiguous layout."""
    errors = check_block(Block("", 2, 40, 8, (2, 4), True, projections), dtype)
    assert errors.keys() >= WAYS.keys()
    assert {
        name: error for name, error in errors.items() if not error < (1e-5 if dtype == torch.float32 else LOOSE)
    } == {}


@pytest.mark.parametrize("pixels", [16, 32, 64])
def test_every_geometry_of_the_first_pass_gives_the_same_sums(pixels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of one atom, of part of one, and of several; all their rows there or not."""
    monkeypatch.setattr(block_backward, "products_tile", lambda *_: Tile(pixels, 16, 4, 1))
    for shape, scales in (((2, 16, 16, 16), (1, 2)), ((4, 16, 4, 4), (1, 2)), ((3, 24, 7, 5), (2, 3))):
        y = (torch.randn(shape, device=DEVICE) + 0.5).contiguous(memory_format=LAST)
        norm, weight = make_norm(shape[1]), torch.randn(16, shape[1], device=DEVICE)
        leaf, w = y.clone().requires_grad_(), weight.clone().requires_grad_()
        block.block_goodness(leaf, block.block_statistics(y, norm), norm, w, scales).square().sum().backward()
        wide, wide_w, gamma, beta = (x.detach().double().requires_grad_() for x in (y, weight, norm.weight, norm.bias))
        f = F.relu(F.batch_norm(wide, None, None, gamma, beta, True, 0.0, norm.eps))
        bicovg(f, wide_w, scales).square().sum().backward()
        for mine, wanted in ((leaf, wide), (w, wide_w), (norm.weight, gamma), (norm.bias, beta)):
            assert mine.grad is not None
            assert wanted.grad is not None
            assert distance(mine.grad, wanted.grad) < 1e-5, (shape, scales)


@pytest.mark.parametrize("even", [False, True], ids=["any-gradient", "even-gradient"])
def test_a_channel_without_spread_or_with_a_negative_one_has_its_gradient(even: bool) -> None:
    """gamma of 0, below 0 and near 0, where its gradient cannot come by dividing; beta of 0, above and below."""
    gamma = torch.tensor([1.0, -1.0, 0.0, -0.0, 0.0, 0.0, 1e-5, -1e-5, 1e-3, -1e-3, 1e-30, 1.0, -2.0, 1e-3, 0.5, 1.0])
    beta = torch.tensor([0.3, 0.3, 0.5, 0.5, -0.5, 0.0, 0.7, 0.7, 0.7, 0.7, 0.0, 0.0, -0.2, 0.0, 9.0, -9.0])
    y = (2.0 + torch.randn(4, 16, 6, 6, device=DEVICE)).contiguous(memory_format=LAST)
    norm, oracle = make_norm(16), nn.BatchNorm2d(16, device=DEVICE).double()
    weight = torch.randn(3, 16, device=DEVICE) * (0.0 if even else 1.0)
    with torch.no_grad():
        norm.weight.copy_(gamma)
        norm.bias.copy_(beta)
        oracle.weight.copy_(gamma)
        oracle.bias.copy_(beta)
    leaf, wide = y.clone().requires_grad_(), y.double().requires_grad_()
    g = block.block_goodness(leaf, block.block_statistics(y, norm), norm, weight, (1, 2))
    reference = bicovg(F.relu(oracle(wide)), weight.double(), (1, 2))
    grad = torch.ones_like(reference) if even else torch.rand_like(reference)
    g.backward(grad.float())
    reference.backward(grad)
    assert norm.weight.grad is not None
    assert leaf.grad is not None
    if even:  # what xhat^2 brings is then all there is
        small = slice(6, 10)
        assert distance(norm.weight.grad[small], oracle.weight.grad[small]) < 1e-3
    scale = oracle.bias.grad.abs().clamp(min=1.0)  # a channel that is off has neither
    assert ((norm.weight.grad - oracle.weight.grad).abs() / scale).max() < 1e-3
    assert ((norm.bias.grad - oracle.bias.grad).abs() / scale).max() < 1e-5
    assert (norm.weight.grad - oracle.weight.grad).abs()[[0, 1, 11, 12]].max() < 1e-4 * scale.max()
    assert distance(leaf.grad, wide.grad) < 1e-4


@BOTH_DTYPES
def test_a_block_may_put_its_gradient_in_the_place_of_y(dtype: torch.dtype) -> None:
    """The same gradients bit for bit, in y's own memory; a second backward pass is refused, not wrong."""
    norm, weight = make_norm(24), torch.randn(3, 24, device=DEVICE)
    leaf = torch.randn(3, 24, 7, 5, device=DEVICE).to(dtype).contiguous(memory_format=LAST)
    found = []
    for overwrite in (False, True):
        x, w = leaf.clone().requires_grad_(), weight.clone().requires_grad_()
        y = x * 1.0
        seen: list[int] = []
        y.register_hook(lambda grad, seen=seen: seen.append(grad.data_ptr()))
        g = block.block_goodness(y, block.block_statistics(y, norm), norm, w, (1, 2), overwrite)
        g.square().sum().backward(retain_graph=True)
        assert (seen == [y.data_ptr()]) == overwrite
        found.append([x.grad, w.grad, norm.weight.grad, norm.bias.grad])
        norm.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        g.square().sum().backward()


@pytest.mark.parametrize("few_rows", [1000, 0])
def test_statistics_survive_a_mean_far_from_zero(few_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "FEW_ROWS", few_rows)
    y = (torch.randn(4, 8, 6, 6, device=DEVICE) + 300.0).contiguous(memory_format=LAST)
    stats = block.block_statistics(y, make_norm(8))
    spread = y.double().var(dim=(0, 2, 3), unbiased=False)
    assert torch.allclose(stats[1].double(), (spread + 1e-5).rsqrt(), rtol=1e-5)


def test_statistics_of_one_image_do_not_depend_on_its_layout() -> None:
    y = torch.randn(1, 8, 4, 4, device=DEVICE)
    found = [block.block_statistics(x, make_norm(8))[:2] for x in (y, y.contiguous(memory_format=LAST))]
    assert torch.equal(*found)


def test_statistics_in_evaluation_are_the_running_ones() -> None:
    norm = make_norm(8).eval()
    before = {name: value.clone() for name, value in norm.named_buffers()}
    y = torch.randn(2, 8, 4, 4, device=DEVICE).contiguous(memory_format=LAST)
    stats = block.block_statistics(y, norm)
    f = F.relu(stats[2].view(-1, 1, 1) * y + stats[3].view(-1, 1, 1))
    assert torch.allclose(f, F.relu(norm(y)), atol=1e-6)
    assert all(torch.equal(value, before[name]) for name, value in norm.named_buffers())


@triton.jit
def edge_kernel(out: tl.tensor, scale: tl.tensor, shift: tl.tensor, SIZE: tl.constexpr) -> None:
    at = tl.arange(0, SIZE)
    sign, edge = find_edge(tl.load(scale + at), tl.load(shift + at))
    tl.store(out + at, sign.to(tl.float32))
    tl.store(out + SIZE + at, edge.to(tl.float32))


def test_a_comparison_in_bfloat16_finds_exactly_what_is_on() -> None:
    """For every y that is a bfloat16, and so for the ones next to the edge."""
    scale, shift = torch.randn(2, 4096, device=DEVICE)
    shift[::3] = -scale[::3] * torch.randn(4096, device=DEVICE)[::3].bfloat16()  # nearly one itself
    scale[:3], shift[:3] = torch.tensor([0.0, -0.0, 0.0]), torch.tensor([0.5, 0.5, -0.5])
    shift[3:5] = 0.0
    found = torch.empty(2, 4096, device=DEVICE)
    edge_kernel[(1,)](found, scale, shift, SIZE=4096)
    sign, edge = found
    assert torch.equal(edge.bfloat16().float(), edge)
    near = (-shift.double() / scale.double()).nan_to_num(0.0, 1.0, -1.0).bfloat16().view(torch.int16)
    for step in range(-3, 4):
        y = (near + step).view(torch.bfloat16).double()
        z = scale.double() * y + shift.double()
        wrong = (sign.double() * y > edge.double()) != (z > 0)
        assert (z[wrong].abs() <= 2e-7 * shift[wrong].abs().double()).all()  # the edge itself is a float32
        assert not wrong[4::3].any()
        assert not wrong[5::3].any()
    assert (sign[:3] * 3.0 > edge[:3]).tolist() == [True, True, False]
