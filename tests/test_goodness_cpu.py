"""Goodness on a CPU with its gradient written out, against the loops of tests/reference and against its definition."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import assert_matches, random_tensor
from reference import goodness as textbook
from torch.autograd import forward_ad

from bicovg.goodness import BiCovG, bicovg
from bicovg.kernels import goodness_cpu
from bicovg.kernels.goodness_cpu import fits_cpu, lean_bicovg
from bicovg.networks import local_network
from bicovg.recipes import RECIPES, get_recipe

FORMATS = {
    "contiguous": lambda f: f.contiguous(),
    "channels_last": lambda f: f.contiguous(memory_format=torch.channels_last),
    "strided": lambda f: f.repeat_interleave(2, dim=3)[..., ::2],
}


@st.composite
def even_maps(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """f, W and scales whose cells are equal and lie in each other."""
    scales = draw(st.sampled_from([(1,), (2,), (3,), (1, 2), (2, 1), (2, 4), (1, 2, 4), (1, 3)]))
    sides = [max(scales) * draw(st.integers(1, 6 // max(scales))) for _ in "HW"]
    B, C, N = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    seed = draw(st.integers(0, 2**31))
    return random_tensor(seed, B, C, *sides), random_tensor(seed + 1, N, C), scales


@given(even_maps(), st.sampled_from(list(FORMATS)))
def test_it_matches_the_textbook(case: tuple[torch.Tensor, torch.Tensor, tuple[int, ...]], layout: str) -> None:
    f, weight, scales = case
    lay = FORMATS[layout]
    assert fits_cpu(lay(f), weight, scales)
    assert_matches(lambda f, w: lean_bicovg(lay(f), w, scales), lambda f, w: textbook.bicovg(f, w, scales), f, weight)
    assert_matches(lambda f: lean_bicovg(lay(f), None, scales), lambda f: textbook.bicovg(f, None, scales), f)
    # where one of them is a constant
    assert_matches(lambda f: lean_bicovg(lay(f), weight, scales), lambda f: textbook.bicovg(f, weight, scales), f)
    assert_matches(lambda w: lean_bicovg(lay(f), w, scales), lambda w: textbook.bicovg(f, w, scales), weight)


def block_shapes() -> list[tuple[int, int, tuple[int, ...], int]]:
    """(C, side, scales, r) of every block of the recipes that train on maps of up to 64 pixels a side."""
    found = set()
    for name in RECIPES:
        config = get_recipe(name)
        side, model = config.data.image_size, config.model
        if side > 64 or not model.cross_channel or not model.multi_scale:
            continue
        for index, (channels, scales) in enumerate(zip(model.channels, model.scales, strict=True)):
            found.add((channels, side, tuple(scales), model.reduction))
            side //= 2 if index in model.pools else 1
    return sorted(found)


@pytest.mark.parametrize(("channels", "side", "scales", "reduction"), block_shapes())
def test_it_is_the_definition_up_to_rounding_at_every_blocks_shape(
    channels: int, side: int, scales: tuple[int, ...], reduction: int
) -> None:
    f = torch.randn(2, channels, side, side).relu().contiguous(memory_format=torch.channels_last)
    weight = torch.randn(channels // reduction, channels) / channels**0.5
    assert fits_cpu(f, weight, scales)
    found = []
    for function, kind in ((lean_bicovg, torch.float32), (bicovg, torch.float64)):
        leaves = [x.to(kind).requires_grad_() for x in (f, weight)]
        goodness = function(*leaves, scales)
        slope = torch.linspace(-1, 1, goodness.numel(), dtype=kind).view_as(goodness)
        found.append([goodness.detach(), *torch.autograd.grad(goodness, leaves, slope)])
    for mine, exact in zip(*found, strict=True):
        assert (mine - exact).norm() <= 2e-6 * exact.norm()
    assert found[0][1].is_contiguous(memory_format=torch.channels_last), "the order in which the next kernel is fast"


@pytest.mark.parametrize(
    ("shape", "kind", "scales"),
    [
        ((2, 8, 7, 8), torch.float32, (1, 2)),
        ((2, 8, 6, 6), torch.float32, (2, 3)),
        ((2, 8, 8, 8), torch.bfloat16, (1, 2)),
        ((0, 8, 8, 8), torch.float32, (1, 2)),
        ((2, 8, 2, 2), torch.float32, (2, 4)),
    ],
)
def test_what_it_is_not_made_for_is_left_to_the_definition(
    shape: tuple[int, ...], kind: torch.dtype, scales: tuple[int, ...]
) -> None:
    assert not fits_cpu(torch.zeros(shape, dtype=kind), None, scales)


def test_autocast_and_mixed_types_are_left_to_the_definition() -> None:
    f, weight = torch.randn(2, 8, 4, 4), torch.randn(1, 8)
    assert fits_cpu(f, weight, (1, 2))
    assert not fits_cpu(f, weight.double(), (1, 2))
    with torch.autocast("cpu", torch.bfloat16):
        assert not fits_cpu(f, weight, (1, 2))


def test_the_module_takes_it_in_training_and_evaluation_unless_it_is_to_be_plain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    monkeypatch.setattr(goodness_cpu, "lean_bicovg", lambda *given: calls.append(given) or lean_bicovg(*given))
    goodness, f = BiCovG(16, (1, 2)), torch.randn(2, 16, 4, 4)
    trained = goodness(f)
    with torch.no_grad():
        evaluated = goodness(f)
    assert len(calls) == 2
    assert torch.equal(trained, evaluated)
    goodness.plain = True
    torch.testing.assert_close(goodness(f), trained)
    goodness.plain = False
    goodness(torch.randn(2, 16, 5, 5))
    assert len(calls) == 2


def test_it_is_as_exact_as_the_definition_on_large_maps() -> None:
    f = torch.rand(1, 8, 224, 224)
    found, exact = lean_bicovg(f, None, (1,)), bicovg(f.double(), None, (1,))
    assert (found - exact).abs().max() <= 2e-6 * exact.max()


@pytest.mark.parametrize("power", [1, 2])
def test_second_derivatives_are_those_of_the_definition(power: int) -> None:
    inputs = random_tensor(0, 2, 8, 4, 4), random_tensor(1, 2, 8)

    def penalised(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        """Gradients of a loss with a penalty on its own gradient."""
        f, weight = (x.clone().requires_grad_() for x in inputs)
        loss = function(f, weight, (1, 2)).pow(power).sum()
        slopes = torch.autograd.grad(loss, (f, weight), create_graph=True)
        (loss + sum(slope.square().sum() for slope in slopes)).backward()
        return [f.grad, weight.grad]

    def hessian(function: Callable[..., torch.Tensor]) -> torch.Tensor:
        small, weight = inputs[0][:1, :2, :2, :2], inputs[1][:, :2]
        whole: torch.Tensor = torch.autograd.functional.hessian(
            lambda f: function(f, weight, (1, 2)).pow(power).sum(), small
        )
        return whole

    for mine, exact in zip(penalised(lean_bicovg), penalised(bicovg), strict=True):
        torch.testing.assert_close(mine, exact)
    torch.testing.assert_close(hessian(lean_bicovg), hessian(bicovg))
    assert hessian(bicovg).any()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in its first jvp
def test_functional_transforms_work_on_the_module() -> None:
    goodness, f = BiCovG(8, (1, 2)).double(), random_tensor(0, 3, 8, 4, 4)
    weights = dict(goodness.named_parameters())

    def loss(weights: dict[str, torch.Tensor], f: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = torch.func.functional_call(goodness, weights, (f[None],)).square().sum()
        return total

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, f)["weight"]
    for sample, found in zip(f, each, strict=True):
        torch.testing.assert_close(torch.autograd.grad(loss(weights, sample), goodness.weight)[0], found)
    value, slope = torch.func.jvp(goodness, (f,), (f,))
    torch.testing.assert_close(slope, 2 * value)  # goodness is quadratic in f


def test_a_second_derivative_where_the_matrix_is_made_from_the_map_or_the_map_from_it() -> None:
    """What one was made from must not get the gradient that the other's part has given it already."""
    f, weight = random_tensor(0, 2, 8, 4, 4), random_tensor(1, 2, 8)

    def slopes(function: Callable[..., torch.Tensor], from_map: bool) -> list[torch.Tensor]:
        leaf = (f if from_map else weight).clone().requires_grad_()
        given = (leaf, leaf.mean(dim=(0, 2, 3)) * weight) if from_map else (f * leaf.mean(), leaf)
        (first,) = torch.autograd.grad(function(*given, (1, 2)).square().sum(), leaf, create_graph=True)
        return [first, *torch.autograd.grad(first.square().sum(), leaf)]

    for from_map in (False, True):
        for mine, exact in zip(slopes(lean_bicovg, from_map), slopes(bicovg, from_map), strict=True):
            torch.testing.assert_close(mine, exact)


def test_forward_mode_goes_through_the_definition() -> None:
    goodness, f = BiCovG(8, (1, 2)).double(), random_tensor(0, 3, 8, 4, 4)
    with forward_ad.dual_level():
        value, slope = forward_ad.unpack_dual(goodness(forward_ad.make_dual(f, f)))
    torch.testing.assert_close(slope, 2 * value)


@pytest.mark.parametrize("twice", [False, True])
def test_it_keeps_its_precision_where_the_backward_pass_runs_under_autocast(twice: bool) -> None:
    f, weight = torch.randn(2, 8, 4, 4), torch.randn(1, 8, requires_grad=True)
    total = lean_bicovg(f, weight, (1, 2)).sum()
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = torch.autograd.grad(total, weight, create_graph=twice)
    (wanted,) = torch.autograd.grad(bicovg(f, weight, (1, 2)).sum(), weight)
    torch.testing.assert_close(found, wanted)


def test_a_compiler_gets_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    f = torch.randn(2, 16, 4, 4)
    assert fits_cpu(f, None, (1, 2))
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    assert not fits_cpu(f, None, (1, 2))


@pytest.mark.parametrize("channels", [1, 3])
def test_maps_of_a_block_lie_in_its_order(channels: int) -> None:
    net = local_network(5, (8, 16), (0,), in_channels=channels)
    x: torch.Tensor | None = torch.randn(2, channels, 8, 8)
    for unit in net.units:
        assert x is not None
        f = unit.blocks[0].features(x)
        assert f.is_contiguous(memory_format=torch.channels_last)
        assert not f.is_contiguous()
        x, _ = unit(x, torch.arange(2))
        assert x is not None
        assert x.is_contiguous(memory_format=torch.channels_last)
