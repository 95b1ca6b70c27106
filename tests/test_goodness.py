"""bicovg.goodness against the loops of tests/reference/goodness.py, and what the method relies on."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import assert_matches, random_tensor
from reference import goodness as textbook

from bicovg.goodness import (
    BiCovG,
    Readout,
    bicovg,
    cell_bounds,
    cross_channel_energy,
    mean_cells,
    mean_grids,
    spatial_energy,
)

seeds = st.integers(0, 2**31)


@st.composite
def maps(draw: st.DrawFn, smallest: int = 1) -> tuple[int, torch.Tensor, int]:
    """(seed, f of any odd or even shape, a scale that fits it)."""
    B, C = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    H, W = draw(st.integers(smallest, 7)), draw(st.integers(smallest, 7))
    seed = draw(seeds)
    return seed, random_tensor(seed, B, C, H, W), draw(st.integers(1, min(H, W, 4)))


# Values and gradients


@given(maps())
def test_mean_cells_matches_the_textbook(case: tuple[int, torch.Tensor, int]) -> None:
    _, x, scale = case
    assert_matches(lambda x: mean_cells(x, scale), lambda x: textbook.mean_cells(x, scale), x)


@given(maps())
def test_spatial_energy_matches_the_textbook(case: tuple[int, torch.Tensor, int]) -> None:
    _, f, scale = case
    assert_matches(lambda f: spatial_energy(f, scale), lambda f: textbook.spatial_energy(f, scale), f)


@given(maps(), st.integers(1, 3))
def test_cross_channel_energy_matches_the_textbook(case: tuple[int, torch.Tensor, int], projections: int) -> None:
    seed, f, scale = case
    weight = random_tensor(seed + 1, projections, f.shape[1])
    assert_matches(
        lambda f, w: cross_channel_energy(f, w, scale),
        lambda f, w: textbook.cross_channel_energy(f, w, scale),
        f,
        weight,
    )


@given(maps(smallest=2), st.sampled_from([(1,), (2,), (1, 2), (2, 1)]))
def test_bicovg_matches_the_textbook(case: tuple[int, torch.Tensor, int], scales: tuple[int, ...]) -> None:
    seed, f, _ = case
    weight = random_tensor(seed + 1, 2, f.shape[1])
    assert_matches(lambda f, w: bicovg(f, w, scales), lambda f, w: textbook.bicovg(f, w, scales), f, weight)
    assert_matches(lambda f: bicovg(f, None, scales), lambda f: textbook.bicovg(f, None, scales), f)


@given(seeds, st.integers(1, 3), st.integers(1, 6), st.integers(1, 4))
def test_readout_matches_the_textbook(seed: int, batch: int, dim: int, classes: int) -> None:
    readout = Readout(dim, classes).double()
    g = random_tensor(seed, batch, dim)

    def call(g: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = torch.func.functional_call(readout, {"weight": weight, "bias": bias}, (g,))
        return logits

    assert_matches(call, textbook.readout, g, readout.weight.detach(), readout.bias.detach())


# The grid


@given(st.integers(1, 40), st.integers(1, 40))
def test_cells_tile_the_axis_in_order_without_gap_or_overlap(size: int, scale: int) -> None:
    covered = [i for start, end in cell_bounds(size, scale) for i in range(start, end)]
    assert covered == list(range(size))
    assert [start for start, _ in cell_bounds(size, scale)] == [i * size // scale for i in range(scale)]


def test_cells_of_a_seven_wide_map_at_scale_two_are_three_and_four_wide() -> None:
    assert cell_bounds(7, 2) == [(0, 3), (3, 7)]


def test_adaptive_pooling_is_not_the_partition_used_at_seven_by_seven() -> None:
    f = torch.zeros(1, 1, 7, 7)
    f[0, 0, 3, 3] = 1.0  # the centre lies in exactly one cell
    energies = spatial_energy(f, 2)
    torch.testing.assert_close(energies, torch.tensor([[0.0, 0.0, 0.0, 1 / 16]]))
    assert torch.count_nonzero(torch.nn.functional.adaptive_avg_pool2d(f.square(), 2)) == 4


@given(maps())
def test_cell_means_times_cell_sizes_add_up_to_the_total(case: tuple[int, torch.Tensor, int]) -> None:
    _, x, scale = case
    heights, widths = (torch.tensor([end - start for start, end in cell_bounds(size, scale)]) for size in x.shape[2:])
    total = (mean_cells(x, scale) * heights[:, None] * widths).sum(dim=(2, 3))
    torch.testing.assert_close(total, x.sum(dim=(2, 3)))


def test_order_is_channel_then_row_then_column() -> None:
    f = torch.arange(8, dtype=torch.float64).reshape(1, 2, 2, 2)
    assert spatial_energy(f, 2).tolist() == [[0.0, 1.0, 4.0, 9.0, 16.0, 25.0, 36.0, 49.0]]


# Invariances


@given(maps(), st.randoms(use_true_random=False))
def test_permuting_channels_permutes_the_spatial_energy(case, random) -> None:  # type: ignore[no-untyped-def]
    _, f, scale = case
    B, C, _, _ = f.shape
    order = random.sample(range(C), C)
    permuted = spatial_energy(f[:, order], scale)
    torch.testing.assert_close(permuted, spatial_energy(f, scale).view(B, C, -1)[:, order].flatten(1))


@given(maps(), st.randoms(use_true_random=False))
def test_permuting_channels_with_the_columns_of_w_keeps_the_cross_channel_energy(case, random) -> None:  # type: ignore[no-untyped-def]
    seed, f, scale = case
    order = random.sample(range(f.shape[1]), f.shape[1])
    weight = random_tensor(seed + 1, 2, f.shape[1])
    permuted = cross_channel_energy(f[:, order], weight[:, order], scale)
    torch.testing.assert_close(permuted, cross_channel_energy(f, weight, scale))


@given(maps(), st.randoms(use_true_random=False))
def test_one_cell_energy_ignores_where_pixels_stand(case, random) -> None:  # type: ignore[no-untyped-def]
    _, f, _ = case
    pixels = f.flatten(2)
    order = random.sample(range(pixels.shape[2]), pixels.shape[2])
    torch.testing.assert_close(spatial_energy(pixels[..., order].view_as(f), 1), spatial_energy(f, 1))


def test_two_cell_energy_sees_where_pixels_stand() -> None:
    f = random_tensor(0, 1, 2, 4, 4)
    assert not torch.allclose(spatial_energy(f.flip(2), 2), spatial_energy(f, 2))


@given(maps(smallest=2), st.floats(-8.0, 8.0))
def test_scaling_f_by_a_scales_goodness_by_a_squared(case: tuple[int, torch.Tensor, int], factor: float) -> None:
    seed, f, _ = case
    weight = random_tensor(seed + 1, 2, f.shape[1])
    torch.testing.assert_close(bicovg(factor * f, weight, (1, 2)), factor**2 * bicovg(f, weight, (1, 2)))


def test_cross_channel_energy_sees_correlation_that_spatial_energy_cannot() -> None:
    aligned = torch.tensor([1.0, -1.0, 1.0, -1.0]).expand(2, 4).reshape(1, 2, 2, 2)
    opposed = aligned * torch.tensor([1.0, -1.0]).view(1, 2, 1, 1)
    both = torch.ones(1, 2)
    assert torch.equal(spatial_energy(aligned, 1), spatial_energy(opposed, 1))
    assert cross_channel_energy(aligned, both, 1).item() == 4.0
    assert cross_channel_energy(opposed, both, 1).item() == 0.0


@pytest.mark.parametrize("shape", [(2, 8, 7, 5), (2, 8, 4, 4)])
def test_memory_format_does_not_change_goodness(shape: tuple[int, ...]) -> None:
    f = random_tensor(0, *shape)
    weight = random_tensor(1, 2, 8)
    channels_last = f.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(bicovg(channels_last, weight, (1, 2, 4)), bicovg(f, weight, (1, 2, 4)))


# Precision


@pytest.mark.parametrize("scale", [1, 2, 3])
def test_bfloat16_spatial_energy_is_the_float32_energy_of_the_rounded_input(scale: int) -> None:
    f = torch.randn(2, 4, 8, 8).bfloat16()
    energy = spatial_energy(f, scale)
    assert energy.dtype == torch.float32
    assert torch.equal(energy, spatial_energy(f.float(), scale))


def test_bfloat16_bicovg_squares_and_averages_in_float32() -> None:
    f, weight = torch.randn(2, 16, 8, 8).bfloat16(), torch.randn(2, 16).bfloat16()
    goodness = bicovg(f, weight, (1, 2))
    assert goodness.dtype == torch.float32
    # only the projection itself may round to bfloat16 (8 bits); squares and means may not round again
    torch.testing.assert_close(goodness, bicovg(f.float(), weight.float(), (1, 2)), rtol=2**-6, atol=1e-4)
    torch.testing.assert_close(goodness[:, :16], spatial_energy(f.float(), 1), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("height", "width", "scales"), [(8, 8, (1, 2)), (8, 12, (2, 4)), (7, 8, (1, 2)), (9, 6, (2, 3))]
)
def test_coarse_grids_made_from_fine_ones_are_those_of_the_map(
    height: int, width: int, scales: tuple[int, ...]
) -> None:
    """Also where the fine cells are uneven, or do not tile the coarse ones, and that way is barred."""
    x = torch.rand(2, 3, height, width, dtype=torch.float64)
    for grid, scale in zip(mean_grids(x, scales), scales, strict=True):
        torch.testing.assert_close(grid, mean_cells(x, scale).flatten(1), rtol=1e-14, atol=0)


def test_module_under_bfloat16_autocast_returns_float32() -> None:
    goodness = BiCovG(16)
    f = torch.randn(2, 16, 4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = goodness(f.bfloat16())
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, goodness(f), rtol=0.05, atol=0.02)


def test_goodness_of_a_zero_map_and_its_gradient_are_zero() -> None:
    f = torch.zeros(2, 8, 4, 4, requires_grad=True)
    goodness = BiCovG(8)(f)
    goodness.sum().backward()
    assert f.grad is not None
    assert torch.count_nonzero(goodness) == torch.count_nonzero(f.grad) == 0


# The modules


@pytest.mark.parametrize(("channels", "scales", "dim"), [(128, (2, 4), 2880), (256, (1, 2), 1440), (512, (1, 2), 2880)])
def test_dimensions_of_the_paper(channels: int, scales: tuple[int, ...], dim: int) -> None:
    goodness = BiCovG(channels, scales)
    assert goodness.dim == dim
    with torch.no_grad():
        assert goodness(torch.randn(1, channels, 4, 4)).shape == (1, dim)


@pytest.mark.parametrize("reduction", [4, 8, 16])
@pytest.mark.parametrize("scales", [(1,), (1, 2), (2, 4)])
@pytest.mark.parametrize("cross_channel", [False, True])
def test_dim_states_the_width_of_the_output(scales: tuple[int, ...], reduction: int, cross_channel: bool) -> None:
    goodness = BiCovG(16, scales, reduction, cross_channel)
    assert goodness(torch.randn(3, 16, 5, 6)).shape == (3, goodness.dim)


def test_per_channel_point_of_the_ablation_is_one_energy_per_channel_without_parameters() -> None:
    goodness = BiCovG(12, scales=(1,), cross_channel=False)  # 8 does not divide 12, which nothing here needs
    f = torch.randn(2, 12, 3, 3)
    assert list(goodness.parameters()) == []
    torch.testing.assert_close(goodness(f), spatial_energy(f, 1))


@pytest.mark.parametrize("reduction", [4, 8, 16])
def test_both_scales_share_one_projection_matrix(reduction: int) -> None:
    shapes = [parameter.shape for parameter in BiCovG(32, (1, 2), reduction).parameters()]
    assert shapes == [(32 // reduction, 32)]


def test_module_computes_the_function_with_its_own_matrix() -> None:
    goodness = BiCovG(16, (1, 3))
    f = torch.randn(2, 16, 7, 7)
    assert torch.equal(goodness(f), bicovg(f, goodness.weight, (1, 3)))


def assert_fills_uniform_range(values: torch.Tensor, bound: float) -> None:
    """U(-bound, bound): never outside, reaching both ends, with the standard deviation of a uniform."""
    assert values.abs().max() <= bound
    assert values.min() < -0.9 * bound
    assert values.max() > 0.9 * bound
    assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)


def test_projection_starts_uniform_within_one_over_root_c() -> None:
    weight = BiCovG(256).weight
    assert weight is not None
    assert_fills_uniform_range(weight.detach(), 1 / 16)


def test_readout_weight_and_bias_start_uniform_within_one_over_root_d() -> None:
    readout = Readout(400, 300)
    assert_fills_uniform_range(readout.weight.detach(), 1 / 20)
    assert_fills_uniform_range(readout.bias.detach(), 1 / 20)


# Errors


@pytest.mark.parametrize(("height", "width"), [(3, 8), (8, 3)])
def test_scale_larger_than_the_map_is_refused_with_scale_and_map(height: int, width: int) -> None:
    with pytest.raises(ValueError, match=rf"scale 4 does not fit a {height}x{width} map.*between 1 and 3"):
        spatial_energy(torch.randn(1, 2, height, width), 4)


@pytest.mark.parametrize(("channels", "reduction"), [(12, 8), (4, 8), (16, 0)])
def test_channels_not_divisible_by_r_are_refused_with_both_numbers(channels: int, reduction: int) -> None:
    with pytest.raises(ValueError, match=rf"\b{channels}\b.*\b{reduction}\b"):
        BiCovG(channels, reduction=reduction)


@pytest.mark.parametrize("scales", [(), (0, 2), (-1,)])
def test_scales_that_are_empty_or_not_positive_are_refused(scales: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="scales"):
        BiCovG(8, scales)
