"""The guard: a NaN or Inf reaches no weight, whoever carries it; the event names its block and step."""

import copy

import pytest
import torch
from planting import plant

from bicovg import local_network, local_step, vgg16_classic
from bicovg.errors import NonFiniteError
from bicovg.guard import SKIP_LIMIT, Guard

SCOPES = {
    "strict": {},
    "hgb": {"scope": "hgb", "group_size": 2},
    "grouped": {"scope": "grouped", "alignment": True},
}
SITES = ["pixel", "activation", "loss", "gradient", "weight"]


def make_net(**options):
    torch.manual_seed(0)
    return local_network(4, (8, 8, 8, 8), (1,), ((1, 2),) * 4, groups=(2, 2), hidden=4, in_channels=1, **options)


def make_optimizers(net, name, fused):
    if name == "sgd":
        return [torch.optim.SGD(u.parameters(), 0.05, momentum=0.9, fused=fused) for u in net.units]
    return [torch.optim.AdamW(u.parameters(), 2e-3, fused=fused) for u in net.units]


def draw_batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 1, 8, 8, generator=generator), torch.arange(8) % 4, torch.arange(8) + 100 * step


class Run:
    """A small network with its optimizers and guard, stepped by hand."""

    def __init__(self, optimizer="adamw", fused=False, policy="stop", schedule="interleaved", clip=None, **options):
        self.net = make_net(**options)
        self.optimizers = make_optimizers(self.net, optimizer, fused)
        self.settings = {"schedule": schedule, "clip_norm": clip}
        self.guard = Guard(self.net, self.optimizers, policy)

    def step(self, number):
        images, labels, keys = draw_batch(number)
        return local_step(self.net, self.optimizers, images, labels, keys=keys, guard=self.guard, **self.settings)

    def bits(self, unit):
        """Every bit of a unit's parameters, buffers and optimizer state."""
        module, optimizer = self.net.units[unit], self.optimizers[unit]
        state = [value for p in module.parameters() for value in optimizer.state.get(p, {}).values()]
        tensors = [*module.parameters(), *module.buffers(), *state]
        return [tensor.detach().numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("schedule", ["interleaved", "summed"])
@pytest.mark.parametrize("site", SITES)
def test_a_bad_unit_keeps_its_bits_earlier_units_step_and_later_units_wait(site, schedule, optimizer, fused):
    settings = {"optimizer": optimizer, "fused": fused, "schedule": schedule}
    for scope, clip, value in (("strict", None, torch.nan), ("hgb", 1.0, torch.inf), ("grouped", None, -torch.inf)):
        run, clean = (Run(**settings, clip=clip, **SCOPES[scope]) for _ in range(2))
        for number in range(2):
            run.step(number)
            clean.step(number)
        unit, _ = plant(run.net, site, 2, value)
        before = [run.bits(u) for u in range(len(run.net.units))]
        run.step(2)
        clean.step(2)
        for u in range(len(run.net.units)):
            expected = clean.bits(u) if u < unit else before[u]
            assert run.bits(u) == expected, f"{scope}, unit {u} of bad unit {unit}"


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_once_stopped_no_unit_moves_until_the_host_has_looked(fused):
    run = Run("sgd", fused)
    run.step(0)
    _, undo = plant(run.net, "gradient", 1, torch.nan)
    run.step(1)
    undo()
    frozen = [run.bits(u) for u in range(4)]
    for number in range(2, 5):
        run.step(number)
    assert [run.bits(u) for u in range(4)] == frozen


@pytest.mark.parametrize("scope", list(SCOPES))
@pytest.mark.parametrize("block", range(4))
def test_the_event_names_the_block_and_the_step(scope, block):
    run = Run(**SCOPES[scope])
    run.step(0)
    run.guard.record(0)
    plant(run.net, "gradient", block, torch.nan)
    run.step(1)
    name = f"block {block}" if scope == "strict" else f"blocks {block // 2 * 2}-{block // 2 * 2 + 1}"
    with pytest.raises(NonFiniteError, match=rf"of {name} was not finite at step 1"):
        run.guard.record(1)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_skip_leaves_out_the_bad_step_alone_and_lists_it(fused):
    run = Run("adamw", fused, policy="skip")
    for number in range(4):
        _, undo = plant(run.net, "loss", 1, torch.inf) if number == 2 else (None, lambda: None)
        before = [run.bits(u) for u in range(4)]
        run.step(number)
        run.guard.record(number)
        undo()
        moved = [run.bits(u) != before[u] for u in range(4)]
        assert moved == ([True, False, False, False] if number == 2 else [True] * 4)
    assert [(event.step, event.unit, event.blocks) for event in run.guard.events] == [(2, 1, "block 1")]


def test_skip_gives_up_when_every_step_fails():
    run = Run("sgd", policy="skip")
    plant(run.net, "weight", 0, torch.nan)
    for number in range(SKIP_LIMIT - 1):
        run.step(number)
        run.guard.record(number)
    run.step(SKIP_LIMIT)
    with pytest.raises(NonFiniteError, match=f"the last of {SKIP_LIMIT} skipped steps"):
        run.guard.record(SKIP_LIMIT)


def test_a_held_back_first_step_leaves_fused_momentum_at_zero():
    run = Run("sgd", fused=True, policy="skip")
    _, undo = plant(run.net, "loss", 0, torch.nan)
    run.step(0)
    undo()
    clean = Run("sgd", fused=True)
    run.step(1)
    clean.step(1)
    assert run.bits(3) == clean.bits(3)


def test_under_a_global_clip_one_bad_unit_holds_back_all():
    run = Run("sgd", schedule="summed")
    run.guard = Guard(run.net, run.optimizers, shared=True)
    run.settings |= {"clip_norm": 1.0, "clip_scope": "global"}
    run.step(0)
    before = [run.bits(u) for u in range(4)]
    plant(run.net, "gradient", 2, torch.nan)
    run.step(1)
    assert [run.bits(u) for u in range(4)] == before
    with pytest.raises(NonFiniteError, match="block 2"):
        run.guard.record(1)


def test_a_clean_run_is_the_same_with_and_without_a_guard():
    for options in SCOPES.values():
        run, bare = Run("sgd", **options), Run("sgd", **options)
        bare.guard = None
        for number in range(5):
            assert torch.equal(run.step(number), bare.step(number))
            run.guard.record(number)
        for a, b in zip(run.net.state_dict().values(), bare.net.state_dict().values(), strict=True):
            assert torch.equal(a, b)


def test_the_guard_works_in_double_precision_and_without_batch_norm():
    net = make_net(batch_norm=False).double()
    guard = Guard(net, optimizers := make_optimizers(net, "sgd", False))
    images, labels, keys = draw_batch(0)
    local_step(net, optimizers, images.double(), labels, keys=keys, guard=guard)
    guard.record(0)
    images[0] = torch.nan
    before = copy.deepcopy(net.state_dict())
    local_step(net, optimizers, images.double(), labels, keys=keys, guard=guard)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values(), strict=True))
    with pytest.raises(NonFiniteError, match="block 0"):
        guard.record(1)


def test_a_network_without_blocks_is_named_by_its_exit():
    net = vgg16_classic(4, width=0.02)
    guard = Guard(net, [torch.optim.SGD(net.parameters(), 0.1)])
    guard.flags[1] = 1
    with pytest.raises(NonFiniteError, match="block 12"):
        guard.record(0)


def test_an_unknown_policy_is_refused():
    net = make_net()
    with pytest.raises(ValueError, match="choose stop or skip"):
        Guard(net, make_optimizers(net, "sgd", False), "pray")
