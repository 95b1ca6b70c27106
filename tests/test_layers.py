"""bicovg.layers against the loops of tests/reference/layers.py, and what the method relies on."""

import math

import jaxtyping
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import assert_matches, random_tensor
from reference import layers as textbook
from torch.autograd import forward_ad

from bicovg.draws import DROPOUT, keep_mask, make_keys
from bicovg.layers import (
    FeatureAlignment,
    RMSNorm,
    RMSPool,
    feature_alignment,
    keyed_dropout,
    rms_norm,
    rms_pool,
    safe_sqrt,
)

seeds = st.integers(0, 2**31)
batches = st.integers(1, 3)
channels = st.integers(1, 3)
sizes = st.integers(1, 6)
pool_sizes = st.integers(2, 7)


# RMSNorm


@given(seeds, batches, channels, sizes, sizes)
def test_rms_norm_matches_the_textbook(seed: int, B: int, C: int, H: int, W: int) -> None:
    assert_matches(rms_norm, textbook.rms_norm, random_tensor(seed, B, C, H, W))


def test_rms_norm_uses_the_eps_it_is_given() -> None:
    x = random_tensor(0, 2, 3, 4, 4)
    assert_matches(RMSNorm(eps=0.5), lambda x: textbook.rms_norm(x, 0.5), x)


@given(seeds, st.floats(1e-2, 1e3))
def test_rms_norm_ignores_the_scale_of_a_sample(seed: int, factor: float) -> None:
    x = random_tensor(seed, 2, 3, 4, 4)
    torch.testing.assert_close(rms_norm(factor * x), rms_norm(x), rtol=3e-4, atol=0.0)  # eps / (factor * rms)


def test_rms_norm_leaves_every_sample_with_unit_mean_square() -> None:
    x = random_tensor(0, 4, 3, 5, 5) * torch.tensor([1e-2, 1.0, 10.0, 1e4]).view(4, 1, 1, 1)
    mean_squares = rms_norm(x).square().mean(dim=(1, 2, 3))
    torch.testing.assert_close(mean_squares, torch.ones(4, dtype=torch.float64), rtol=1e-3, atol=0.0)


def test_rms_norm_of_a_sample_does_not_depend_on_its_batch() -> None:
    x = torch.randn(4, 3, 5, 5)
    torch.testing.assert_close(rms_norm(x)[1:2], rms_norm(x[1:2]), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rms_norm_of_a_zero_sample_and_its_gradient_are_zero(dtype: torch.dtype) -> None:
    x = torch.randn(3, 2, 4, 4).to(dtype)
    x[1] = 0.0
    x.requires_grad_()
    y = rms_norm(x)
    (grad,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert torch.count_nonzero(y[1]) == torch.count_nonzero(grad[1]) == 0
    assert torch.count_nonzero(grad[0]) > 0
    assert torch.isfinite(grad).all()


# RMSPool


@given(seeds, batches, channels, pool_sizes, pool_sizes)
def test_rms_pool_matches_the_textbook(seed: int, B: int, C: int, H: int, W: int) -> None:
    assert_matches(rms_pool, textbook.rms_pool, random_tensor(seed, B, C, H, W))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in its first jvp
@pytest.mark.parametrize("graph", [True, False])
def test_functional_transforms_meet_no_infinite_slope_at_zero(graph: bool) -> None:
    x = torch.zeros(2, 1, 2, 2)
    with torch.set_grad_enabled(graph):
        value, slope = torch.func.jvp(rms_pool, (x,), (torch.ones_like(x),))
        each = torch.func.grad(lambda x: torch.func.vmap(rms_pool)(x[:, None]).sum())(x)
        with forward_ad.dual_level():
            plain = forward_ad.unpack_dual(rms_pool(forward_ad.make_dual(x, torch.ones_like(x))))
    for found in (value, slope, each, *plain):
        assert not found.any()


def test_rms_pool_with_another_window_matches_the_textbook() -> None:
    x = random_tensor(0, 2, 2, 7, 8)
    assert_matches(RMSPool(size=3), lambda x: textbook.rms_pool(x, 3), x)


@given(seeds, st.integers(1, 3), st.integers(1, 3))
def test_rms_pool_of_an_odd_map_ignores_its_last_row_and_column(seed: int, p: int, q: int) -> None:
    x = random_tensor(seed, 2, 2, 2 * p + 1, 2 * q + 1)
    pooled = rms_pool(x)
    assert pooled.shape == (2, 2, p, q)
    assert torch.equal(pooled, rms_pool(x[:, :, :-1, :-1]))


def test_rms_pool_of_an_even_map_keeps_the_mean_square() -> None:
    x = random_tensor(0, 2, 3, 6, 4)
    torch.testing.assert_close(rms_pool(x).square().mean(dim=(2, 3)), x.square().mean(dim=(2, 3)))


@given(seeds, st.floats(-100.0, 100.0))
def test_rms_pool_scales_with_the_magnitude_of_its_input(seed: int, factor: float) -> None:
    x = random_tensor(seed, 1, 2, 4, 4)
    torch.testing.assert_close(rms_pool(factor * x), abs(factor) * rms_pool(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rms_pool_of_a_zero_window_and_its_gradient_are_zero(dtype: torch.dtype) -> None:
    x = torch.randn(2, 2, 4, 4).to(dtype)
    x[0, 1, 2:, :2] = 0.0
    x.requires_grad_()
    y = rms_pool(x)
    (grad,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert y[0, 1, 1, 0] == 0.0
    assert torch.count_nonzero(grad[0, 1, 2:, :2]) == 0
    assert torch.count_nonzero(grad[0, 1, :2, :2]) > 0
    assert torch.isfinite(grad).all()


# Shapes, zeros, NaN and precision


def test_shapes_in_signatures_are_checked_in_the_test_run() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        rms_pool(torch.ones(4, 4))


def test_safe_sqrt_has_the_slope_of_sqrt_away_from_zero() -> None:
    x = torch.tensor([4.0, 0.25], requires_grad=True)
    (slope,) = torch.autograd.grad(safe_sqrt(x).sum(), x)
    assert safe_sqrt(x).tolist() == [2.0, 0.5]
    assert slope.tolist() == [0.25, 1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rms_pool_does_not_hide_a_non_finite_activation(bad: float) -> None:
    x = torch.ones(1, 1, 4, 4)
    x[0, 0, 0, 1] = bad
    pooled = rms_pool(x)
    assert not torch.isfinite(pooled[0, 0, 0, 0])
    assert torch.isfinite(pooled).sum() == 3


def test_rms_norm_does_not_hide_a_nan_in_the_rest_of_its_sample() -> None:
    x = torch.ones(2, 1, 2, 2)
    x[0, 0, 0, 0] = math.nan
    normed = rms_norm(x)
    assert torch.isnan(normed[0]).all()
    assert torch.isfinite(normed[1]).all()


@pytest.mark.parametrize("layer", [rms_norm, rms_pool])
def test_bfloat16_layers_round_the_float32_result_once(layer) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(2, 4, 6, 6).bfloat16()
    y = layer(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, layer(x.float()).bfloat16())


@pytest.mark.parametrize("layer", [rms_norm, rms_pool])
def test_squares_that_overflow_float16_do_not_overflow_the_layer(layer) -> None:  # type: ignore[no-untyped-def]
    x = torch.full((1, 1, 2, 2), 300.0, dtype=torch.float16)
    assert torch.equal(layer(x), layer(x.float()).half())
    assert torch.isfinite(layer(x)).all()


@pytest.mark.parametrize("layer", [rms_norm, rms_pool])
def test_layers_do_not_depend_on_the_memory_format(layer) -> None:  # type: ignore[no-untyped-def]
    x = random_tensor(0, 2, 4, 5, 6)
    torch.testing.assert_close(layer(x.contiguous(memory_format=torch.channels_last)), layer(x))


# Keyed dropout


@given(seeds, batches, channels, sizes, st.floats(0.0, 0.95))
def test_keyed_dropout_matches_the_textbook_under_its_mask(seed: int, B: int, C: int, H: int, drop: float) -> None:
    x = random_tensor(seed, B, C, H, 3)
    keys = make_keys(seed, DROPOUT, torch.arange(B))
    keep = keep_mask(keys, (C, H, 3), drop).flatten(1)
    assert_matches(lambda x: keyed_dropout(x, drop, keys), lambda x: textbook.dropout(x, keep, drop), x)


def test_keyed_dropout_at_rate_zero_returns_its_input() -> None:
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(keyed_dropout(x, 0.0, make_keys(0, torch.arange(2))), x)


def test_keyed_dropout_of_a_sample_does_not_depend_on_its_place_in_the_batch() -> None:
    x = torch.randn(5, 3, 4, 4)
    keys = make_keys(7, torch.arange(5))
    order = torch.tensor([3, 0, 4, 1, 2])
    assert torch.equal(keyed_dropout(x[order], 0.5, keys[order]), keyed_dropout(x, 0.5, keys)[order])
    assert torch.equal(keyed_dropout(x[3:4], 0.5, keys[3:4]), keyed_dropout(x, 0.5, keys)[3:4])


def test_keyed_dropout_keeps_the_expected_value() -> None:
    x = torch.ones(64, 4, 16, 16)
    dropped = keyed_dropout(x, 0.1, make_keys(0, torch.arange(64)))
    assert sorted(torch.unique(dropped).tolist()) == pytest.approx([0.0, 1 / 0.9])
    assert dropped.mean().item() == pytest.approx(1.0, abs=5 * math.sqrt(0.1 / 0.9 / x.numel()))


def test_keyed_dropout_keeps_the_dtype_and_ignores_the_memory_format() -> None:
    x = torch.randn(2, 4, 5, 6).bfloat16()
    keys = make_keys(0, torch.arange(2))
    dropped = keyed_dropout(x, 0.3, keys)
    assert dropped.dtype == torch.bfloat16
    assert torch.equal(keyed_dropout(x.contiguous(memory_format=torch.channels_last), 0.3, keys), dropped)


# Feature Alignment Layer


@given(seeds, batches, channels, sizes, sizes, st.integers(1, 4))
def test_feature_alignment_matches_the_textbook(seed: int, B: int, C: int, H: int, W: int, hidden: int) -> None:
    h = random_tensor(seed, B, C, H, W)
    w1, w2 = random_tensor(seed + 1, hidden, C), random_tensor(seed + 2, C, hidden)
    assert_matches(feature_alignment, textbook.feature_alignment, h, w1, w2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_feature_alignment_starts_as_the_exact_identity(dtype: torch.dtype) -> None:
    h = (torch.randn(2, 16, 5, 7) * 100.0).to(dtype)
    assert torch.equal(FeatureAlignment(16, hidden=32).to(dtype)(h), h)


def test_feature_alignment_can_leave_the_identity_through_w2_alone_at_first() -> None:
    layer = FeatureAlignment(8, hidden=16)
    layer(torch.randn(4, 8, 3, 3)).square().sum().backward()
    assert layer.w1.weight.grad is not None
    assert layer.w2.weight.grad is not None
    assert torch.count_nonzero(layer.w1.weight.grad) == 0
    assert torch.count_nonzero(layer.w2.weight.grad) > 0


def test_feature_alignment_adds_one_offset_per_sample_and_channel() -> None:
    layer = FeatureAlignment(4, hidden=8).double()
    torch.nn.init.normal_(layer.w2.weight)
    h = random_tensor(0, 3, 4, 5, 5)
    offset = layer(h) - h
    torch.testing.assert_close(offset, offset[:, :, :1, :1].expand_as(h))
    assert offset.abs().max() > 0.01


def test_feature_alignment_has_two_matrices_no_bias_and_hidden_512_by_default() -> None:
    shapes = {name: tuple(p.shape) for name, p in FeatureAlignment(64).named_parameters()}
    assert shapes == {"w1.weight": (512, 64), "w2.weight": (64, 512)}


def test_feature_alignment_w1_starts_in_the_default_range_of_a_linear_layer() -> None:
    w1 = FeatureAlignment(64).w1.weight.detach()
    assert w1.abs().max() <= 1 / 8
    assert w1.std().item() == pytest.approx(1 / 8 / math.sqrt(3), rel=0.05)
