"""The step: schedules agree bit for bit, nothing leaks between units, memory does not grow with depth."""

import copy

import pytest
import torch

from bicovg import local_network, local_step, optim
from bicovg.config import OptimConfig
from bicovg.profiling import track_saved_bytes
from bicovg.step import clip_gradients

SCOPES = [
    {},
    {"alignment": True},
    {"scope": "grouped", "alignment": True},
    {"scope": "hgb", "group_size": 2, "alignment": True},
    {"scope": "end-to-end"},
    {"scope": "end-to-end", "exits": "all"},
]
IDS = ["strict", "strict-fal", "grouped-fal", "hgb2-fal", "bp", "bp-deep"]


def make_net(seed=0, **options):
    torch.manual_seed(seed)
    return local_network(4, (8, 16, 16, 16), (1,), ((2, 4), (1, 2), (1, 2), (1, 2)), groups=(2, 2), hidden=8, **options)


def make_optimizers(net, name):
    """Those of the trainer."""
    lr, decay = {"sgd": (0.05, 1e-4), "adamw": (2e-3, 1e-3)}[name]
    return optim.make_optimizers(net, OptimConfig(name, lr, weight_decay=decay), torch.device("cpu"))


def draw_batch(step, size=8):
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(size, 3, 8, 8, generator=generator)
    return images, torch.randint(4, (size,), generator=generator), torch.arange(size) + 1000 * step


def train(schedule, optimizer, steps, clip_norm=None, **options):
    net = make_net(**options)
    optimizers = make_optimizers(net, optimizer)
    losses = []
    for step in range(steps):
        images, labels, keys = draw_batch(step)
        losses.append(local_step(net, optimizers, images, labels, schedule, clip_norm, keys=keys))
    return net, optimizers, torch.stack(losses)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("options", SCOPES, ids=IDS)
def test_interleaved_equals_summed_bit_for_bit_over_100_steps(optimizer, options):
    one = train("interleaved", optimizer, 100, clip_norm=1.0, **options)
    two = train("summed", optimizer, 100, clip_norm=1.0, **options)
    assert torch.equal(one[2], two[2])
    for (name, a), b in zip(one[0].state_dict().items(), two[0].state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert one[2][-1].isfinite().all()


def test_hgb_of_all_blocks_equals_end_to_end_bit_for_bit():
    one = train("interleaved", "sgd", 20, scope="hgb", group_size=4)
    two = train("interleaved", "sgd", 20, scope="end-to-end")
    assert torch.equal(one[2], two[2])
    assert all(torch.equal(a, b) for a, b in zip(one[0].parameters(), two[0].parameters(), strict=True))


def gradients_with(net, scale_exit=None):
    """Gradients of a summed step in which one exit's loss is multiplied by 3."""
    net = copy.deepcopy(net).train()
    images, labels, keys = draw_batch(0)
    x, seen = images, 0
    for unit in net.units:
        credit = unit.learn(x, labels, keys)
        for loss, _ in credit.roots:
            (loss * (3.0 if seen == scale_exit else 1.0)).backward(retain_graph=True)
            seen += 1
        x = credit.output
    return {name: p.grad.clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize("options", SCOPES, ids=IDS)
def test_a_blocks_loss_changes_no_gradient_outside_its_unit(options):
    net = make_net(**options)
    for block in net.modules():  # FAL's W1 gets no gradient while W2 is zero
        if hasattr(block, "w2"):
            torch.nn.init.normal_(block.w2.weight)
    plain = gradients_with(net)
    exit_units = [index for index, unit in enumerate(net.units) for _ in unit.exits]
    for exit_, owner in enumerate(exit_units):
        changed = gradients_with(net, scale_exit=exit_)
        touched = {int(name.split(".")[1]) for name in plain if not torch.equal(plain[name], changed[name])}
        assert touched == {owner}


def test_every_parameter_receives_a_gradient_in_every_scope():
    for options in SCOPES:
        grads = gradients_with(make_net(**options))
        for name, grad in grads.items():
            if "alignment.w1" not in name:  # zero until W2 has moved
                assert grad.abs().sum() > 0, name


def test_alignment_is_trained_by_its_consumers_loss_and_owned_by_its_unit():
    net = make_net(alignment=True)
    assert "units.2.blocks.0.alignment.w2.weight" in dict(net.named_parameters())
    plain, changed = gradients_with(net), gradients_with(net, scale_exit=2)
    name = "units.2.blocks.0.alignment.w2.weight"
    assert torch.allclose(changed[name], 3 * plain[name], rtol=1e-4, atol=1e-6)
    for other in (0, 1, 3):
        assert torch.equal(gradients_with(net, scale_exit=other)[name], plain[name])


def test_prediction_is_the_same_whatever_the_labels():
    net = make_net()
    images, labels, _ = draw_batch(0)
    before = net.eval()(images)
    shuffled = labels[torch.randperm(len(labels))]
    assert torch.equal(before, net(images))
    credit_a = net.units[0].learn(images, labels)
    credit_b = net.units[0].learn(images, shuffled)
    assert torch.equal(credit_a.output, credit_b.output)


def test_unit_outputs_carry_no_graph():
    for options in SCOPES[:4]:
        net = make_net(**options)
        images, labels, keys = draw_batch(0)
        output = net.units[0].learn(images, labels, keys).output
        assert output.grad_fn is None
        assert not output.requires_grad


def peak_saved(depth, schedule, **options):
    torch.manual_seed(0)
    net = local_network(4, (16,) * depth, (), ((1, 2),) * depth, in_channels=16, **options)
    optimizers = [torch.optim.SGD(u.parameters(), 0.01) for u in net.units]
    images, labels = torch.randn(8, 16, 8, 8), torch.randint(4, (8,))
    with track_saved_bytes(exclude=net) as tally:
        local_step(net, optimizers, images, labels, schedule, keys=torch.arange(8))
    assert tally.live == 0
    return tally.peak


def test_interleaved_activation_memory_does_not_grow_with_depth():
    four, eight, sixteen = (peak_saved(depth, "interleaved") for depth in (4, 8, 16))
    assert four == eight == sixteen
    assert peak_saved(8, "summed") > 1.9 * peak_saved(4, "summed")
    assert peak_saved(16, "interleaved", scope="end-to-end") > 5 * sixteen


def test_checkpointing_lowers_end_to_end_activation_memory():
    plain = peak_saved(8, "interleaved", scope="end-to-end")
    assert peak_saved(8, "interleaved", scope="end-to-end", checkpointing=True) < 0.6 * plain


def test_clip_bounds_each_unit_and_keeps_its_direction():
    net = make_net()
    images, labels, keys = draw_batch(0)
    for unit in net.units:
        credit = unit.learn(images, labels, keys)
        torch.autograd.backward([1000 * loss for loss, _ in credit.roots])
        before = torch.cat([p.grad.flatten() for p in unit.parameters()])
        clip_gradients(unit, 1.0)
        after = torch.cat([p.grad.flatten() for p in unit.parameters()])
        assert after.norm() == pytest.approx(1.0, rel=1e-3)
        assert torch.nn.functional.cosine_similarity(before, after, dim=0) > 0.9999
        images = credit.output


def test_global_clip_bounds_all_units_together():
    sizes = {}
    for scope in ("unit", "global"):
        net = make_net()
        start = [p.clone() for p in net.parameters()]
        optimizers = [torch.optim.SGD(u.parameters(), 1.0) for u in net.units]
        images, labels, keys = draw_batch(0)
        local_step(net, optimizers, images, labels, "summed", 0.01, clip_scope=scope, keys=keys)
        moved = torch.cat([(a - b).flatten() for a, b in zip(start, net.parameters(), strict=True)])
        sizes[scope] = moved.norm().item()
    assert sizes["global"] == pytest.approx(0.01, rel=1e-2)
    assert sizes["unit"] == pytest.approx(0.01 * 4**0.5, rel=1e-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 1.0, "clip_scope": "global"}, "cannot be interleaved"),
        ({"precision": "float16"}, "float16 is refused"),
        ({"precision": "int8"}, "precision 'int8' is unknown"),
        ({"schedule": "backwards"}, "schedule 'backwards' is unknown"),
        ({"clip_scope": "net"}, "clip scope 'net' is unknown"),
        ({"clip_norm": -1.0}, "clip norm -1 must be above 0"),
        ({"clip_norm": float("nan")}, "clip norm nan must be above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, message):
    net = make_net()
    with pytest.raises(ValueError, match=message):
        local_step(net, make_optimizers(net, "sgd"), *draw_batch(0)[:2], **options)


def test_bfloat16_training_follows_float32():
    losses = {}
    for precision in ("float32", "bfloat16"):
        net = make_net(dropout=0.0)
        optimizers = make_optimizers(net, "sgd")
        images, labels, keys = draw_batch(0, size=32)
        for _ in range(20):
            loss = local_step(net, optimizers, images, labels, precision=precision, keys=keys)
        losses[precision] = loss
        assert all(p.dtype == torch.float32 for p in net.parameters())
    assert torch.allclose(losses["float32"], losses["bfloat16"], rtol=0.1, atol=0.05)


def test_dropout_depends_on_keys_alone():
    net = make_net(dropout=0.5).train()
    images, labels, keys = draw_batch(0)
    unit = net.units[0]
    first = unit.learn(images, labels, keys).output
    torch.manual_seed(123)
    assert torch.equal(first, unit.learn(images, labels, keys).output)
    assert not torch.equal(first, unit.learn(images, labels, keys + 1).output)
