"""Fused kernels against their definitions in float64; see ``test_kernels.py`` for how these run.

Uninitialised memory is NaN throughout (deterministic mode fills it), so an element nobody wrote shows up.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from bicovg.draws import keep_mask, make_keys
from bicovg.goodness import bicovg
from bicovg.kernels import block, tail, tiles
from bicovg.kernels import goodness as fused
from bicovg.kernels.borders import border_sums_op
from bicovg.kernels.image import image_conv_op, image_conv_weight_op
from bicovg.kernels.loss import cross_entropy_op
from bicovg.kernels.tiles import Tile
from bicovg.layers import keyed_dropout, rms_norm, rms_pool

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
from kernel_blocks import small_blocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAST = torch.channels_last
BOTH_LAYOUTS = pytest.mark.parametrize("last", [True, False], ids=["channels_last", "contiguous"])
NEEDS_CUDA = pytest.mark.skipif(DEVICE != "cuda", reason="bfloat16 needs CUDA: the interpreter multiplies it wrongly")
BOTH_DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=NEEDS_CUDA)], ids=["float32", "bfloat16"]
)
LOOSE = 1e-2  # limit in bfloat16, which rounds by 2e-3 what is stored in it


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False  # float32 is what is compared
    yield
    torch.use_deterministic_algorithms(False)


def draw_maps(shape: tuple[int, ...], last: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    f = torch.randn(shape, device=DEVICE).relu().to(dtype)
    return f.contiguous(memory_format=LAST) if last else f


def draw_weight(projections: int, channels: int, dtype: torch.dtype) -> Tensor | None:
    """A W in float32, of values that ``dtype`` has; None without projections."""
    if not projections:
        return None
    return (torch.randn(projections, channels, device=DEVICE) / channels**0.5).to(dtype).float()


def distance(x: Tensor, reference: Tensor) -> float:
    return float((x.detach().double() - reference.detach()).norm() / reference.detach().norm())


def check_goodness(f: Tensor, projections: int, scales: tuple[int, ...], relu_mask: bool = False) -> None:
    """Value, df and dW within reach of float64, df laid out like f."""
    weight, limit = draw_weight(projections, f.shape[1], f.dtype), LOOSE if f.dtype == torch.bfloat16 else 1e-6
    leaves = [x.clone().requires_grad_() for x in (f, weight) if x is not None]
    wide = [x.double().requires_grad_() for x in (f, weight) if x is not None]
    g = fused.fused_bicovg(leaves[0], leaves[1] if projections else None, scales, relu_mask)
    reference = bicovg(wide[0], wide[1] if projections else None, scales)
    grad = torch.randn_like(reference)
    g.backward(grad.float())
    reference.backward(grad)
    if relu_mask:
        assert wide[0].grad is not None
        wide[0].grad[f == 0] = 0.0
    assert g.dtype == torch.float32
    assert distance(g, reference) < limit
    for leaf, oracle in zip(leaves, wide, strict=True):
        assert leaf.grad is not None
        assert oracle.grad is not None
        assert leaf.grad.stride() == leaf.stride()
        assert distance(leaf.grad, oracle.grad) < limit


@pytest.mark.parametrize("shape", dict.fromkeys((b.channels, b.projections, b.scales, b.size) for b in small_blocks()))
def test_goodness_of_recipe_blocks(shape: tuple[int, int, tuple[int, ...], int]) -> None:
    channels, projections, scales, size = shape
    check_goodness(draw_maps((1, channels, size, size)), projections, scales)


@BOTH_DTYPES
@BOTH_LAYOUTS
@pytest.mark.parametrize(
    ("shape", "scales", "projections"),
    [
        ((3, 24, 7, 7), (1, 2), 5),
        ((3, 24, 7, 7), (1, 2), 0),
        ((2, 17, 5, 3), (2, 3), 5),
        ((2, 16, 5, 9), (3,), 0),
        ((3, 40, 1, 1), (1,), 5),
        ((3, 33, 9, 6), (1, 2), 19),
        ((2, 131, 7, 11), (2, 4), 7),
    ],
)
def test_goodness_of_odd_maps(
    shape: tuple[int, ...], scales: tuple[int, ...], projections: int, last: bool, dtype: torch.dtype
) -> None:
    check_goodness(draw_maps(shape, last, dtype), projections, scales)


@given(
    batch=st.integers(1, 3),
    channels=st.integers(1, 40),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    projections=st.integers(0, 20),
    data=st.data(),
)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_goodness_of_any_shape(
    batch: int, channels: int, size: tuple[int, int], projections: int, data: st.DataObject
) -> None:
    scales = data.draw(st.lists(st.integers(1, min(*size, 4)), min_size=1, max_size=2).map(tuple))
    f = draw_maps((batch, channels, *size), data.draw(st.booleans()))
    f += 0.1  # a map of zeros has no relative error
    check_goodness(f, projections, scales, data.draw(st.booleans()))


@pytest.mark.parametrize("projections", [6, 0])
@pytest.mark.parametrize(
    "tile", [Tile(16, 16), Tile(16, 32), Tile(64, 32), Tile(256, 16)], ids=["steps", "stream", "parts", "direct"]
)
def test_every_way_to_cut_the_batch_gives_the_same_goodness(
    tile: Tile, projections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = tiles.cut_batch(2, 12, 11, (1, 2), tile.pixels, whole=True)
    assert (cut.T > 1, cut.direct) == {16: (True, False), 64: (False, False), 256: (False, True)}[tile.pixels]
    monkeypatch.setattr(fused, "forward_tile", lambda *_: tile)
    monkeypatch.setattr(fused, "backward_tile", lambda *_: tile)
    check_goodness(draw_maps((2, 20, 12, 11)), projections, (1, 2))


def test_recomputed_projection_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "stores_projection", lambda *_: False)
    monkeypatch.setattr(fused, "backward_tile", lambda *_: Tile(32, 64))
    check_goodness(draw_maps((2, 40, 8, 8)), 5, (2, 4), relu_mask=True)


@BOTH_DTYPES
def test_relu_mask_zeroes_the_gradient_where_f_is_zero(dtype: torch.dtype) -> None:
    f = draw_maps((2, 16, 4, 4), dtype=dtype)
    assert (f == 0).any()
    check_goodness(f, 2, (1, 2), relu_mask=True)


def test_bfloat16_tables_hold_usable_tiles() -> None:
    for table in (tiles.FORWARD, tiles.BACKWARD):
        for tile in table.values():
            assert tile.pixels >= 16
            assert tile.pixels & (tile.pixels - 1) == 0
            assert tile.channels >= 16
            assert tile.channels & (tile.channels - 1) == 0
    for (channels, _), tile in tiles.BACKWARD.items():
        assert tiles.stores_projection(channels, torch.bfloat16) or tile.channels >= channels


@pytest.mark.parametrize(("projections", "scales"), [(257, (1, 2)), (4, (1, 2, 4))], ids=["wide", "deep"])
def test_what_the_kernels_cannot_do_falls_back(projections: int, scales: tuple[int, ...]) -> None:
    check_goodness(draw_maps((1, 8, 4, 4)), projections, scales, relu_mask=True)


def test_a_scale_larger_than_the_map_is_an_error() -> None:
    with pytest.raises(ValueError, match="do not fit a 3x4 map"):
        fused.fused_bicovg(draw_maps((1, 8, 3, 4)), None, (1, 4))


def test_availability_depends_on_the_type() -> None:
    f = draw_maps((1, 1, 2, 2))
    assert fused.fused_available(f)
    assert not fused.fused_available(f.double())
    assert not fused.fused_available(f.half())


def test_operators_keep_their_contracts() -> None:
    torch.use_deterministic_algorithms(False)  # NaN fills differ between the runs that opcheck compares
    f = draw_maps((2, 16, 4, 4)).requires_grad_()
    weight = torch.randn(2, 16, device=DEVICE, requires_grad=True)
    torch.library.opcheck(torch.ops.bicovg.goodness, (f, weight, weight.detach(), [1, 2], True, False))
    keys = torch.arange(2, device=DEVICE)
    torch.library.opcheck(torch.ops.bicovg.tail, (f.detach(), None, True, 0.1, keys, 3, 1e-6))
    norm = make_norm(16)
    y, affine = f.detach().contiguous(memory_format=LAST), (norm.weight, norm.bias)
    running = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
    with torch.no_grad():
        torch.library.opcheck(torch.ops.bicovg.statistics, (y, *affine, *running, 0.1, 1e-5))
    stats = block.block_statistics(y, norm)
    given = (stats, *affine, weight, weight.detach(), [1, 2], True, False)
    torch.library.opcheck(torch.ops.bicovg.block_goodness, (y.requires_grad_(), *given))
    g, p = (x.detach() for x in torch.ops.bicovg.block_goodness(y, *given))
    for name in ("block_goodness_backward", "block_goodness_backward_"):
        inputs = (torch.randn_like(g), g, y.detach().clone(), stats, weight.detach(), p.clone(), [1, 2])
        torch.library.opcheck(getattr(torch.ops.bicovg, name), inputs)
    logits = torch.randn(4, 7, device=DEVICE)
    torch.library.opcheck(cross_entropy_op, (logits, torch.arange(4, device=DEVICE)))
    x = torch.randn(2, 3, 5, 4, device=DEVICE)
    torch.library.opcheck(image_conv_op, (x, torch.randn(16, 3, 3, 3, device=DEVICE, requires_grad=True)))
    torch.library.opcheck(image_conv_weight_op, (torch.randn(2, 16, 5, 4, device=DEVICE), x))
    torch.library.opcheck(border_sums_op, (torch.randn(2, 16, 5, 4, device=DEVICE),))


@BOTH_DTYPES
@pytest.mark.parametrize("whole", [1 << 15, 0], ids=["registers", "two-kernels"])
@pytest.mark.parametrize("drop", [0.0, 0.3])
@pytest.mark.parametrize(
    ("shape", "pool", "last"),
    [
        ((3, 24, 7, 5), True, True),
        ((3, 24, 7, 5), False, False),
        ((2, 16, 2, 2), True, False),
        ((2, 19, 5, 6), True, True),
    ],
)
def test_tail_equals_the_layers(
    shape: tuple[int, ...],
    pool: bool,
    last: bool,
    drop: float,
    whole: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tail, "WHOLE", whole)
    monkeypatch.setattr(tail, "TILE", 64)
    f = draw_maps(shape, last, dtype)
    f[0] = 0.0  # an all-zero sample stays zero
    keys = torch.randint(-(1 << 62), 1 << 62, shape[:1], device=DEVICE)
    h = tail.fused_tail(f, pool, drop, keys if drop else None, 5)
    wide = f.double()
    reference = rms_norm(keyed_dropout(rms_pool(wide) if pool else wide, drop, make_keys(keys, 5)))
    assert h.dtype == dtype
    assert distance(h, reference) < (LOOSE if dtype == torch.bfloat16 else 1e-6)
    assert h.is_contiguous(memory_format=LAST if last else torch.contiguous_format)


def test_tail_drops_exactly_the_keyed_elements() -> None:
    f = torch.rand(3, 8, 6, 4, device=DEVICE).add(0.1).contiguous(memory_format=LAST)
    keys = torch.tensor([1, -5, 1 << 40], device=DEVICE)
    kept = keep_mask(make_keys(keys, 2), f.shape[1:], 0.25)
    assert torch.equal(tail.fused_tail(f, False, 0.25, keys, 2) != 0, kept)


def make_norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, device=DEVICE)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.uniform_(-0.5, 0.5)
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 1.5)
    return norm


@BOTH_DTYPES
@BOTH_LAYOUTS
@pytest.mark.parametrize("pool", [True, False])
def test_tail_of_a_block_equals_the_layers_behind_batch_norm(pool: bool, last: bool, dtype: torch.dtype) -> None:
    norm, keys = make_norm(27), torch.tensor([3, -9, 1 << 50], device=DEVICE)
    y = torch.randn(3, 27, 7, 5, device=DEVICE).to(dtype)
    y = y.contiguous(memory_format=LAST) if last else y
    stats = block.block_statistics(y, norm)
    f = F.relu(F.batch_norm(y.double(), None, None, norm.weight.double(), norm.bias.double(), True, 0.0, norm.eps))
    reference = rms_norm(keyed_dropout(rms_pool(f) if pool else f, 0.2, make_keys(keys, 4)))
    found = tail.fused_tail(y, pool, 0.2, keys, 4, stats)
    assert distance(found, reference) < (LOOSE if dtype == torch.bfloat16 else 1e-5)


@BOTH_DTYPES
@pytest.mark.parametrize(("whole", "drop"), [(1 << 15, 0.0), (0, 0.3)], ids=["registers", "two-kernels-dropout"])
@pytest.mark.parametrize(
    ("shape", "pool", "last"),
    [
        ((3, 24, 7, 5), True, True),
        ((3, 19, 7, 5), False, True),
        ((3, 24, 7, 5), False, False),
        ((4, 70, 2, 2), True, False),
    ],
)
def test_tail_of_an_inner_block_has_the_gradient_of_the_layers(
    shape: tuple[int, ...],
    pool: bool,
    last: bool,
    drop: float,
    whole: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """h, and the gradients of y, gamma and beta, through RMSNorm, dropout, pool, ReLU and the batch statistics."""
    monkeypatch.setattr(tail, "WHOLE", whole)
    monkeypatch.setattr(tail, "TILE", 64)
    monkeypatch.setattr(tail, "BACKWARD_TILE", 1024)
    C = shape[1]
    y = (torch.randn(shape, device=DEVICE) + torch.rand(C, 1, 1, device=DEVICE)).to(dtype)
    y = y.contiguous(memory_format=LAST) if last else y
    norm, oracle = make_norm(C), nn.BatchNorm2d(C, device=DEVICE)
    oracle.load_state_dict(norm.state_dict())
    oracle = oracle.double()
    keys = torch.randint(-(1 << 62), 1 << 62, shape[:1], device=DEVICE)
    leaf, wide = y.clone().requires_grad_(), y.double().requires_grad_()
    h = tail.block_tail(leaf, block.block_statistics(leaf, norm), norm, pool, drop, keys, 4)
    f = F.relu(oracle(wide))
    reference = rms_norm(keyed_dropout(rms_pool(f) if pool else f, drop, make_keys(keys, 4)))
    grad = torch.randn_like(reference).to(dtype)
    h.backward(grad)
    reference.backward(grad.double())
    limit = LOOSE if dtype == torch.bfloat16 else 1e-5
    assert distance(h, reference) < limit
    for mine, wanted in ((leaf, wide), (norm.weight, oracle.weight), (norm.bias, oracle.bias)):
        assert mine.grad is not None
        assert wanted.grad is not None
        assert distance(mine.grad, wanted.grad) < limit


def test_tail_of_a_sample_that_is_all_zero_has_no_gradient_of_its_own() -> None:
    norm = make_norm(16)
    y = torch.randn(3, 16, 4, 4, device=DEVICE).contiguous(memory_format=LAST)
    y[1] = -50.0  # ReLU closes all of it
    leaf = y.clone().requires_grad_()
    h = tail.block_tail(leaf, block.block_statistics(leaf, norm), norm, True, 0.0, None, 0)
    assert (h[1] == 0).all()
    h.square().sum().backward()
    wide = y.double().requires_grad_()
    f = F.relu(F.batch_norm(wide, None, None, norm.weight.double(), norm.bias.double(), True))
    rms_norm(rms_pool(f)).square().sum().backward()
    assert leaf.grad is not None
    assert wide.grad is not None
    assert leaf.grad.isfinite().all()
    assert (leaf.grad - wide.grad).abs().max() < 1e-4


def test_asynchronous_tiles_are_told_and_the_plain_backward_pass_has_none() -> None:
    """The rule at the head of ``tiles.py``; of the fused block's passes the compiler is asked."""
    assert not any(tile.asynchronous for tile in tiles.BACKWARD.values())
    assert tiles.Tile(64, 64, 4, 2).asynchronous
    assert not any(
        tile.asynchronous for tile in (tiles.Tile(32, 64, 4, 2), tiles.Tile(64, 64, 2, 2), tiles.Tile(64, 64, 4, 1))
    )
