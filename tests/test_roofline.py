"""The roofline's counts against the networks themselves and against published figures."""

from dataclasses import replace

import pytest
import torch

from bicovg.config import Config, override
from bicovg.methods import build_network
from bicovg.networks import ClassicVGG16
from bicovg.networks import count_parameters as count_network
from bicovg.recipes import RECIPES, get_recipe
from bicovg.roofline import (
    CLASSIC_CHANNELS,
    CLASSIC_POOLS,
    PEAKS,
    count_bytes,
    count_macs,
    count_parameters,
    describe_roofline,
    find_peak,
    speed_limit,
    step_passes,
    trace_layers,
)

FAMILIES = {"cifar100": (2.90, 2.01, 1.44), "tiny-imagenet": (13.2, 9.05, 1.455), "imagenet100": (40.3, 27.6, 1.46)}


def plain_hgb(family: str, m: int) -> Config:
    return override(get_recipe(f"{family}-bicovg"), {"model.scope": "hgb", "model.group_size": m})


@pytest.mark.parametrize("family", FAMILIES)
def test_gmac_of_backprop_and_strict_are_the_published_ones(family: str) -> None:
    end_to_end, strict, ratio = FAMILIES[family]
    counted = count_macs(get_recipe(f"{family}-bp")) / 1e9, count_macs(get_recipe(f"{family}-bicovg")) / 1e9
    assert counted == (pytest.approx(end_to_end, rel=5e-3), pytest.approx(strict, rel=5e-3))
    assert counted[0] / counted[1] == pytest.approx(ratio, abs=5e-3)


@pytest.mark.parametrize(
    ("family", "m", "ratio"),
    [
        ("cifar100", 2, 1.10),
        ("cifar100", 4, 1.045),
        ("tiny-imagenet", 2, 1.124),
        ("tiny-imagenet", 4, 1.03),
        ("imagenet100", 2, 1.125),
        ("imagenet100", 4, 1.03),
    ],
)
def test_speed_limits_of_hgb_are_the_published_ones(family: str, m: int, ratio: float) -> None:
    assert count_macs(get_recipe(f"{family}-bp")) / count_macs(plain_hgb(family, m)) == pytest.approx(ratio, abs=5e-3)


def test_the_classic_vgg16_costs_1_68_times_a_strict_step_at_224_px() -> None:
    classic, strict = get_recipe("imagenet100-bp-classic"), get_recipe("imagenet100-bicovg")
    assert count_macs(classic) / count_macs(strict) == pytest.approx(1.68, abs=5e-3)


def test_the_classic_table_is_the_networks_own() -> None:
    assert (CLASSIC_CHANNELS, CLASSIC_POOLS) == (ClassicVGG16.CHANNELS, ClassicVGG16.POOLS)


@pytest.mark.parametrize("name", RECIPES)
def test_parameters_from_the_tables_are_those_of_the_network(name: str) -> None:
    config = get_recipe(name)
    with torch.device("meta"):
        net = build_network(config.model, config.data.num_classes, config.data.image_channels)
    assert count_parameters(config) == count_network(net)


def test_map_sizes_from_the_tables_are_those_of_the_network() -> None:
    config = override(get_recipe("imagenet100-bicovg"), {"data.image_size": 100, "model.width": 0.125})
    net = build_network(config.model, 100, 3).eval()
    x = net.prepare(torch.zeros(1, 3, 100, 100))
    for layer, unit in zip(trace_layers(config), net.units, strict=True):
        assert x[0].numel() == layer.inputs
        assert unit.blocks[0].features(x)[0].numel() == layer.features
        x, _ = unit(x)
        assert x[0].numel() == layer.outputs


def test_goodness_moves_41_5_megabytes_per_image_at_224_px_in_bfloat16() -> None:
    """One read of f forward, one read of f and one write of its gradient backward."""
    features = sum(layer.features for layer in trace_layers(get_recipe("imagenet100-bicovg")))
    assert 3 * 2 * features / 1e6 == pytest.approx(41.5, abs=0.05)


def test_each_scope_adds_exactly_the_gradients_it_needs() -> None:
    def named(config: Config, name: str) -> list[int | None]:
        return [item.block for item in step_passes(config) if item.name == name]

    assert named(get_recipe("cifar100-bicovg"), "input gradient") == []
    assert named(get_recipe("cifar100-bicovg-fal"), "input gradient") == []
    assert named(get_recipe("cifar100-hgb4"), "input gradient") == [1, 2, 3, 5, 6, 7]
    assert named(get_recipe("cifar100-bp"), "input gradient") == [1, 2, 3, 4, 5, 6, 7]
    assert named(get_recipe("cifar100-bp"), "goodness backward") == [7]
    assert named(get_recipe("cifar100-bp-deep"), "goodness backward") == list(range(8))
    assert named(get_recipe("cifar100-bicovg-fal"), "alignment") == [4]
    assert named(get_recipe("cifar100-bp-checkpointed"), "convolution") == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7]


def test_limit_is_bounded_by_arithmetic_and_by_traffic_alone() -> None:
    config, peak = get_recipe("tiny-imagenet-bicovg"), PEAKS["H200"]
    limit = speed_limit(config, peak)
    assert limit < peak.flops / (2 * count_macs(config))
    assert limit < peak.bandwidth / count_bytes(config)
    assert 1 / limit < 2 * count_macs(config) / peak.flops + count_bytes(config) / peak.bandwidth


def test_optimizer_traffic_per_image_falls_with_the_batch() -> None:
    config = get_recipe("tiny-imagenet-bicovg")
    large = override(config, {"train.batch_size": 2 * config.train.batch_size})
    saved = count_bytes(config) - count_bytes(large)
    assert saved == pytest.approx(count_parameters(config) * 20 / config.train.batch_size / 2)


def test_devices_without_known_limits_and_other_precisions_get_nulls() -> None:
    config = get_recipe("tiny-imagenet-bicovg")
    assert find_peak("NVIDIA H200", "bfloat16") == PEAKS["H200"]
    for gpu, precision in ((None, "bfloat16"), ("NVIDIA GeForce RTX 5090", "bfloat16"), ("NVIDIA H200", "float32")):
        changed = replace(config, train=replace(config.train, precision=precision))
        found = describe_roofline(changed, gpu, 1000.0)
        assert (found["limit_images_per_second"], found["share"], found["flops_share"]) == (None, None, None)
    known = describe_roofline(config, "NVIDIA H200", 1000.0)
    assert known["share"] == pytest.approx(1000 / speed_limit(config, PEAKS["H200"]))
    assert known["flops_share"] == pytest.approx(1000 * 2 * count_macs(config) / 989e12)
