"""bicovg.draws: pinned integers, and the statistics a stateless draw must have.

Every statistic is that of a fixed set of keys, so a test passes or fails for good; the bounds are five
standard deviations of the ideal generator.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bicovg import draws
from bicovg.draws import draw_permutation, draw_uniforms, extend_keys, keep_mask, make_keys, mix

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]
MASK64, MASK32 = (1 << 64) - 1, (1 << 32) - 1
int64s = st.integers(-(1 << 63), (1 << 63) - 1)

GOLDEN_KEYS = [-7908037669599293713, -5512013023202242728, 4309132208694930218]
GOLDEN_UNIFORMS = [[7100309, 1897354, 14373775], [7378366, 4494166, 7689158]]  # in units of 2^-24
GOLDEN_PERMUTATION = [5, 4, 8, 3, 7, 9, 2, 0, 1, 6]
GOLDEN_MASK = ["110100111111111001111111", "101110001100111111110011"]


def splitmix64(x: int) -> int:
    """The published finaliser in unbounded integers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def lowbias32(x: int) -> int:
    """The published 32-bit hash."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK32
    return x ^ (x >> 16)


def assert_flat(counts: Tensor) -> None:
    """Chi-square of counts that should be equal."""
    expected = counts.sum().item() / counts.numel()
    freedom = counts.numel() - 1
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def assert_independent(u: Tensor, v: Tensor) -> None:
    """Uniforms u and v fill the unit square evenly: an 8 x 8 grid of joint counts is flat."""
    cells = (u * 8).long() * 8 + (v * 8).long()
    assert_flat(torch.bincount(cells.flatten(), minlength=64).double())


# Pinned integers: a change here breaks every resumed run


def test_mix_gives_the_published_splitmix64_outputs() -> None:
    # the first output of splitmix64 seeded with 0, 1 and 2
    expected = [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1, 0x975835DE1C9756CE]
    assert [value & MASK64 for value in mix(torch.arange(3)).tolist()] == expected


@given(st.lists(int64s, min_size=1, max_size=8))
def test_mix_equals_splitmix64_in_unbounded_integers(values: list[int]) -> None:
    mixed = mix(torch.tensor(values)).tolist()
    assert [value & MASK64 for value in mixed] == [splitmix64(value & MASK64) for value in values]


def test_keys_are_pinned() -> None:
    assert make_keys(0, draws.AUGMENT, 3, torch.arange(3)).tolist() == GOLDEN_KEYS


def test_uniforms_are_pinned() -> None:
    assert (draw_uniforms(make_keys(1, torch.arange(2)), 3) * (1 << 24)).tolist() == GOLDEN_UNIFORMS


def test_permutation_is_pinned() -> None:
    assert draw_permutation(10, 0, draws.ORDER, 0).tolist() == GOLDEN_PERMUTATION


def test_keep_mask_is_pinned() -> None:
    mask = keep_mask(make_keys(0, draws.DROPOUT, torch.arange(2)), (24,), 0.25)
    assert ["".join(str(bit) for bit in row) for row in mask.int().tolist()] == GOLDEN_MASK


def test_streams_have_different_numbers() -> None:
    streams = [draws.ORDER, draws.AUGMENT, draws.DROPOUT, draws.SPLIT, draws.INIT]
    assert streams == [1, 2, 3, 4, 5]


# Keys


@pytest.mark.parametrize("device", DEVICES)
@given(parts=st.lists(int64s, max_size=4))
def test_integers_and_0d_tensors_give_the_same_key(device: str, parts: list[int]) -> None:
    from_integers = make_keys(*parts)
    from_tensors = make_keys(*[torch.tensor(part, device=device) for part in parts])
    assert from_integers.dtype == from_tensors.dtype == torch.int64
    assert from_integers.item() == from_tensors.item()


@given(st.lists(int64s, max_size=4))
def test_key_is_the_chain_of_mixes_over_its_parts(parts: list[int]) -> None:
    key = 0
    for part in parts:
        key = splitmix64(key ^ (part & MASK64))
    assert int(make_keys(*parts)) & MASK64 == key


@given(st.lists(int64s, max_size=2), st.lists(int64s, max_size=2))
def test_a_key_can_be_extended(first: list[int], more: list[int]) -> None:
    assert torch.equal(extend_keys(make_keys(*first), *more), make_keys(*first, *more))


@pytest.mark.parametrize("device", DEVICES)
def test_tensor_parts_broadcast_and_every_entry_equals_its_scalar_key(device: str) -> None:
    epochs, indices = torch.arange(3, device=device), torch.tensor([5, 0, -7, 1 << 40], device=device)
    keys = make_keys(11, epochs[:, None], 2, indices)
    assert keys.device.type == device
    assert keys.tolist() == [[make_keys(11, e, 2, i).item() for i in indices.tolist()] for e in range(3)]


def test_order_of_the_parts_matters() -> None:
    assert make_keys(1, 2).item() != make_keys(2, 1).item()
    assert make_keys(0, 0).item() != make_keys(0).item()


def test_keys_of_a_grid_of_seeds_epochs_and_samples_are_all_different() -> None:
    grid = torch.arange(32)
    keys = make_keys(grid[:, None, None], grid[:, None], torch.arange(64))
    assert torch.unique(keys).numel() == 32 * 32 * 64


def test_one_flipped_bit_of_a_part_flips_half_of_the_key() -> None:
    parts = torch.arange(256)
    flips = parts[:, None] ^ (torch.ones((), dtype=torch.int64) << torch.arange(64))
    changed = make_keys(3, parts)[:, None] ^ make_keys(3, flips)  # (256, 64)
    bits = (changed[..., None] >> torch.arange(64)) & 1
    per_flipped_bit = bits.double().mean(dim=(0, 2))
    assert (per_flipped_bit - 0.5).abs().max() < 5 * 0.5 / math.sqrt(256 * 64)


# Uniforms


def test_uniforms_are_flat_over_the_unit_interval_and_never_one() -> None:
    u = draw_uniforms(make_keys(0, draws.AUGMENT, torch.arange(8192)), 16)
    assert u.dtype == torch.float32
    assert u.min() >= 0.0
    assert u.max() < 1.0
    assert_flat(torch.histc(u, bins=64, min=0.0, max=1.0).double())


def test_each_lane_is_flat() -> None:
    u = draw_uniforms(make_keys(0, draws.AUGMENT, torch.arange(8192)), 8)
    for lane in u.T:
        assert_flat(torch.histc(lane, bins=32, min=0.0, max=1.0).double())


def test_neighbouring_samples_draw_independently() -> None:
    u = draw_uniforms(make_keys(0, draws.AUGMENT, torch.arange(16385)), 1)[:, 0]
    assert_independent(u[:-1], u[1:])


def test_neighbouring_lanes_draw_independently() -> None:
    u = draw_uniforms(make_keys(0, draws.AUGMENT, torch.arange(4096)), 5)
    assert_independent(u[:, :-1], u[:, 1:])


@pytest.mark.parametrize("part", ["seed", "stream", "epoch"])
def test_neighbouring_seeds_streams_and_epochs_draw_independently(part: str) -> None:
    indices = torch.arange(16384)
    base = {"seed": 0, "stream": draws.AUGMENT, "epoch": 0}
    near = {**base, part: base[part] + 1}
    u = draw_uniforms(make_keys(*base.values(), indices), 1)
    v = draw_uniforms(make_keys(*near.values(), indices), 1)
    assert_independent(u, v)


def test_more_lanes_do_not_change_the_first_ones() -> None:
    keys = make_keys(4, torch.arange(6).view(2, 3))
    assert draw_uniforms(keys, 7).shape == (2, 3, 7)
    assert torch.equal(draw_uniforms(keys, 7)[..., :3], draw_uniforms(keys, 3))


def test_draws_of_a_sample_do_not_depend_on_its_batch() -> None:
    indices = torch.tensor([9, 4, 77])
    together = draw_uniforms(make_keys(4, indices), 3)
    alone = torch.stack([draw_uniforms(make_keys(4, index), 3) for index in indices.tolist()])
    assert torch.equal(together, alone)


def test_draws_ignore_and_keep_the_generator_state() -> None:
    first = draw_uniforms(make_keys(4, torch.arange(3)), 3)
    before = torch.get_rng_state()
    torch.manual_seed(1)
    moved = torch.get_rng_state()
    again = draw_uniforms(make_keys(4, torch.arange(3)), 3)
    permutation = draw_permutation(5, 1)
    assert not torch.equal(before, moved)
    assert torch.equal(first, again)
    assert sorted(permutation.tolist()) == [0, 1, 2, 3, 4]
    assert torch.equal(torch.get_rng_state(), moved)


# Permutations


@given(st.integers(0, 300), st.integers(0, 2**31), st.integers(0, 400))
def test_permutation_holds_every_index_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(draw_permutation(size, seed, draws.ORDER, epoch).tolist()) == list(range(size))


def test_permutations_of_different_epochs_and_seeds_differ() -> None:
    orders = {
        tuple(draw_permutation(50, seed, draws.ORDER, epoch).tolist()) for seed in range(5) for epoch in range(20)
    }
    assert len(orders) == 100


def test_every_permutation_of_four_is_equally_likely() -> None:
    weights = torch.tensor([64, 16, 4, 1])
    codes = torch.stack([(draw_permutation(4, 0, draws.ORDER, epoch) * weights).sum() for epoch in range(2400)])
    _, counts = torch.unique(codes, return_counts=True)
    assert counts.numel() == 24
    assert_flat(counts.double())


# Dropout masks


@given(int64s, st.integers(1, 7), st.integers(1, 6), st.floats(0.0, 1.0))
def test_keep_mask_equals_halves_of_lowbias32_in_unbounded_integers(key: int, C: int, P: int, drop: float) -> None:
    expected = []
    for c, pixel in itertools.product(range(C), range(P)):
        shared = lowbias32(((key & MASK32) + c // 2 * P + pixel) & MASK32)
        half = shared >> 16 if c % 2 == 0 else shared & 0xFFFF
        expected.append(half >= round(drop * (1 << 16)))
    assert keep_mask(torch.tensor([key]), (C, P), drop).flatten().tolist() == expected
    assert keep_mask(torch.tensor([key]), (C, P, 1), drop).shape == (1, C, P, 1)


@pytest.mark.parametrize("shape", [(1, 4, 4), (2, 1, 1), (5, 3, 4), (6, 2, 5), (7, 1, 3)])
def test_keep_mask_is_the_same_in_either_order_of_memory(shape: tuple[int, ...]) -> None:
    keys = make_keys(0, draws.DROPOUT, torch.arange(3))
    mask, other = keep_mask(keys, shape, 0.4), keep_mask(keys, shape, 0.4, channels_last=True)
    assert torch.equal(mask, other)
    assert other.stride(1) == 1 or shape[0] == 1 or shape[1:] == (1, 1)


@pytest.mark.parametrize("drop", [0.1, 0.5, 0.9])
def test_keep_mask_drops_at_the_rate_asked_for(drop: float) -> None:
    mask = keep_mask(make_keys(0, draws.DROPOUT, torch.arange(256)), (4096,), drop)
    sigma = math.sqrt(drop * (1 - drop) / mask.numel())
    assert mask.dtype == torch.bool
    assert mask.double().mean().item() == pytest.approx(1 - drop, abs=5 * sigma)


def test_keep_mask_rate_is_even_over_samples_and_over_features() -> None:
    mask = keep_mask(make_keys(0, draws.DROPOUT, torch.arange(2048)), (2048,), 0.1).double()
    sigma = math.sqrt(0.1 * 0.9 / 2048)
    assert (mask.mean(dim=0) - 0.9).abs().max() < 5 * sigma
    assert (mask.mean(dim=1) - 0.9).abs().max() < 5 * sigma


def test_keep_masks_of_neighbouring_samples_features_and_steps_are_independent() -> None:
    samples = torch.arange(257)
    mask = keep_mask(make_keys(0, draws.DROPOUT, 0, samples), (1025,), 0.5)
    next_step = keep_mask(make_keys(0, draws.DROPOUT, 1, samples), (1025,), 0.5)
    pairs = {
        "samples": (mask[:-1], mask[1:]),
        "features": (mask[:, :-1], mask[:, 1:]),
        "halves of a hash": (mask[:, 0:-1:2], mask[:, 1::2]),
        "steps": (mask, next_step),
    }
    for neighbours, (a, b) in pairs.items():
        agreement = (a == b).double().mean().item()
        assert agreement == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(a.numel())), neighbours


def test_keep_mask_differs_between_any_two_samples() -> None:
    mask = keep_mask(make_keys(0, draws.DROPOUT, torch.arange(128)), (512,), 0.1)
    assert torch.unique(mask, dim=0).shape[0] == 128


def test_keep_mask_at_rate_zero_keeps_all_and_at_rate_one_drops_all() -> None:
    keys = make_keys(0, torch.arange(8))
    assert keep_mask(keys, (1000,), 0.0).all()
    assert not keep_mask(keys, (1000,), 1.0).any()


def test_what_a_low_rate_drops_a_higher_rate_drops_too() -> None:
    keys = make_keys(0, torch.arange(8))
    low, high = keep_mask(keys, (1000,), 0.1), keep_mask(keys, (1000,), 0.4)
    assert (low | ~high).all()
    assert high.sum() < low.sum()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_device_draws_equal_cpu_draws() -> None:
    indices = torch.arange(64)
    keys, device_keys = make_keys(3, indices), make_keys(3, indices.cuda())
    assert torch.equal(device_keys.cpu(), keys)
    assert torch.equal(draw_uniforms(device_keys, 5).cpu(), draw_uniforms(keys, 5))
    assert torch.equal(keep_mask(device_keys, (100,), 0.3).cpu(), keep_mask(keys, (100,), 0.3))
