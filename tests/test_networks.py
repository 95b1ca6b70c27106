"""Networks: sizes the paper gives, scopes, alignment, checkpointing, dry run."""

import pytest
import torch
from reference.network import block as reference_block
from torch.func import jacfwd, jacrev

from bicovg import FeatureAlignment, local_network, vgg8, vgg16, vgg16_classic
from bicovg.draws import keep_mask, make_keys
from bicovg.networks import count_parameters, dry_run


def tiny(**options):
    settings = {"dropout": 0.0, "groups": (2, 2), **options}
    torch.manual_seed(0)
    return local_network(3, (8, 16, 16, 16), (1,), ((2, 4), (1, 2), (1, 2), (1, 2)), **settings)


def blocks_of(net):
    return [block for unit in net.units for block in unit.blocks]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 32_916_672),
        ({"alignment": True}, 34_358_464),
        ({"scope": "hgb", "group_size": 2, "alignment": True}, 33_563_680),
        ({"scope": "hgb", "group_size": 4, "alignment": True}, 30_606_992),
    ],
)
def test_vgg16_has_the_stated_number_of_parameters(options, expected):
    with torch.device("meta"):
        assert count_parameters(vgg16(100, **options)) == expected


def test_classic_vgg16_has_the_stated_number_of_parameters():
    with torch.device("meta"):
        assert count_parameters(vgg16_classic(100)) == 134_670_244


def test_what_the_classic_net_reads_reaches_its_head():
    """It has no norm: begun by PyTorch's default, thirteen convolutions leave a ten-thousandth of what differs."""
    torch.manual_seed(0)
    net = vgg16_classic(10, width=0.25)
    maps: list[torch.Tensor] = []
    for conv in net.units[0].convs:
        conv.register_forward_hook(lambda module, inputs, y: maps.append(y.detach()))
    net.eval()(torch.randn(8, 3, 64, 64))
    between = [one.mean(dim=(2, 3)).std(dim=0).mean() for one in maps]  # images
    assert 0.1 < between[-1] / between[0] < 100
    assert all(not module.bias.any() for module in (*net.units[0].convs, *net.units[0].head))


def test_goodness_dimensions_are_the_papers():
    with torch.device("meta"):
        dims = [block.goodness.dim for block in blocks_of(vgg16(100))]
        assert dims == [2880, 2880, 1440, 1440] + [2880] * 12
        assert [b.goodness.dim for b in blocks_of(vgg8(100))] == [2880, 1440, 1440] + [2880] * 5


def test_width_scales_channels_but_not_grid_scales():
    with torch.device("meta"):
        thin = blocks_of(vgg16(100, width=0.5))
    assert [b.conv.out_channels for b in thin[:5]] == [64, 64, 128, 128, 256]
    assert [b.goodness.scales for b in thin] == [(2, 4)] * 2 + [(1, 2)] * 14


@pytest.mark.parametrize(
    ("build", "options", "places"),
    [
        (vgg8, {}, [4]),
        (vgg8, {"scope": "grouped"}, [4]),
        (vgg16, {}, [2, 4, 8, 12]),
        (vgg16, {"scope": "hgb", "group_size": 4}, [4, 8, 12]),
    ],
)
def test_alignment_stands_where_the_paper_puts_it(build, options, places):
    with torch.device("meta"):
        found = [b.index for b in blocks_of(build(10, alignment=True, **options)) if b.alignment is not None]
    assert found == places


@pytest.mark.parametrize(
    ("options", "units", "exits"),
    [
        ({}, 4, [0, 1, 2, 3]),
        ({"scope": "grouped"}, 2, [0, 1, 2, 3]),
        ({"scope": "hgb", "group_size": 2}, 2, [1, 3]),
        ({"scope": "end-to-end"}, 1, [3]),
        ({"scope": "end-to-end", "exits": "all"}, 1, [0, 1, 2, 3]),
    ],
)
def test_scope_decides_units_and_exits(options, units, exits):
    net = tiny(**options)
    assert len(net.units) == units
    assert net.exits == exits
    assert net.eval()(torch.randn(2, 3, 8, 8)).shape == (len(exits), 2, 3)


def test_ablation_points_are_switches_of_one_module():
    sizes = {}
    for cross_channel in (False, True):
        for multi_scale in (False, True):
            net = tiny(cross_channel=cross_channel, multi_scale=multi_scale)
            sizes[cross_channel, multi_scale] = [b.goodness.dim for b in blocks_of(net)]
    assert sizes[False, False] == [8, 16, 16, 16]
    assert sizes[True, False] == [9, 18, 18, 18]
    assert sizes[False, True] == [160, 80, 80, 80]
    assert sizes[True, True] == [180, 90, 90, 90]


def test_batch_norm_off_gives_the_convolution_its_bias():
    for block in blocks_of(tiny(batch_norm=False)):
        assert block.norm is None
        assert block.conv.bias is not None
    assert all(b.conv.bias is None for b in blocks_of(tiny()))


def test_stem_halves_the_image_before_block_0():
    net = tiny(stem=2).eval()
    images = torch.randn(2, 3, 16, 16)
    pooled = torch.nn.functional.avg_pool2d(images, 2)
    assert torch.equal(net(images), tiny(stem=1).eval()(pooled))


def test_alignment_starts_as_the_exact_identity():
    layer = FeatureAlignment(16, hidden=8)
    h = torch.randn(2, 16, 5, 5)
    assert torch.equal(layer(h), h)


@pytest.mark.parametrize("exits", ["last", "all"])
def test_checkpointing_changes_no_bit_of_gradients_or_buffers(exits):
    images, labels = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
    keys = torch.arange(4)
    results = []
    for checkpointing in (False, True):
        net = tiny(scope="end-to-end", exits=exits, checkpointing=checkpointing, dropout=0.1)
        credit = net.units[0].learn(images, labels, keys, emit=False)
        torch.autograd.backward([loss for loss, _ in credit.roots])
        results.append([p.grad for p in net.parameters()] + list(net.buffers()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scope": "hgb", "group_size": 3}, "group_size 3 does not divide the 4 blocks"),
        ({"scope": "loose"}, "scope 'loose' is unknown"),
        ({"scope": "grouped", "groups": (1, 2)}, "groups \\(1, 2\\) must be"),
        ({"reduction": 5}, "block 0: 8 channels cannot be divided by reduction 5"),
        ({"alignment": (9,)}, "alignment \\(9,\\) must be block indices"),
    ],
)
def test_impossible_networks_are_refused_with_the_reason(options, message):
    with pytest.raises(ValueError, match=message):
        tiny(**options)


def test_dry_run_names_the_block_whose_scale_exceeds_its_map():
    with pytest.raises(ValueError, match="block 2: scale 2 does not fit a 1x1 map"):
        dry_run(lambda: local_network(3, (8, 8, 8), (0, 1), dropout=0.0), (3, 4, 4))


def test_predictions_do_not_depend_on_the_rest_of_the_batch():
    net = tiny().eval()
    images = torch.randn(6, 3, 8, 8)
    assert torch.allclose(net(images)[:, :3], net(images[:3]), atol=1e-5)


def test_a_strict_network_in_training_equals_the_textbook_block_by_block():
    """Odd map, pool, dropout, batch norm, FAL: every unit's output and logits against loops over pixels."""
    torch.manual_seed(0)
    scales = ((2, 4), (1, 2), (1, 2))
    net = local_network(
        3, (8, 16, 8), (0,), scales, dropout=0.3, reduction=4, groups=(1, 1, 1), alignment=True, hidden=6
    ).double()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.5)
    x, keys = torch.randn(3, 3, 7, 5, dtype=torch.float64), torch.tensor([4, -9, 1 << 40])
    for unit, block in zip(net.units, blocks_of(net), strict=True):
        parts = {
            "conv": block.conv.weight, "gamma": block.norm.weight, "beta": block.norm.bias,
            "mixing": block.goodness.weight, "readout": block.readout.weight, "bias": block.readout.bias,
        }  # fmt: skip
        if block.alignment is not None:
            parts |= {"w1": block.alignment.w1.weight, "w2": block.alignment.w2.weight}
        side = [n // 2 if block.pool else n for n in x.shape[2:]]
        keep = keep_mask(make_keys(keys, block.index), (block.conv.out_channels, *side), 0.3).flatten(1)
        parts = {name: value.detach() for name, value in parts.items()}
        wanted, wanted_logits = reference_block(x, parts, block.pool, keep, 0.3, scales[block.index])
        x, (logits,) = unit.train()(x, keys)
        assert torch.allclose(x, wanted, atol=1e-10)
        assert torch.allclose(logits, wanted_logits, atol=1e-10)
    assert sum(block.alignment is not None for block in blocks_of(net)) == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in its first jvp
def test_functional_transforms_work_on_a_whole_network():
    net = tiny(alignment=True).eval().double()
    assert any(block.alignment is not None for block in blocks_of(net))
    weights, images = dict(net.named_parameters()), torch.randn(3, 3, 8, 8, dtype=torch.float64)

    def loss(weights, image):
        return torch.func.functional_call(net, weights, (image[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, images)
    for index, image in enumerate(images):
        wanted = torch.autograd.grad(loss(weights, image), list(weights.values()))
        for (name, found), exact in zip(each.items(), wanted, strict=True):
            torch.testing.assert_close(found[index], exact, msg=name)
    forwards, backwards = (kind(lambda weights: loss(weights, images[0]))(weights) for kind in (jacfwd, jacrev))
    for name, found in forwards.items():
        torch.testing.assert_close(found, backwards[name], msg=name)


@pytest.mark.parametrize("drop", [-0.5, 1.0, 1.5, float("nan")])
def test_a_dropout_that_is_no_probability_is_refused(drop: float) -> None:
    with pytest.raises(ValueError, match=r"dropout .* must be at least 0 and below 1"):
        local_network(3, (8, 8), (), dropout=drop)
    with pytest.raises(ValueError, match=r"dropout .* must be at least 0 and below 1"):
        vgg16_classic(10, width=0.05, dropout=drop)
