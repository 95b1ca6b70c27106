"""Isolation audit, through the real step: what a unit's loss may touch, and what it may not."""

import pytest
import torch

from bicovg import LocalNetwork, local_network, local_step
from bicovg.signals import Credit

SCOPES = {
    "strict": {},
    "strict-fal": {"alignment": True},
    "grouped-fal": {"scope": "grouped", "alignment": True},
    "hgb2-fal": {"scope": "hgb", "group_size": 2, "alignment": True},
    "bp": {"scope": "end-to-end"},
    "bp-deep": {"scope": "end-to-end", "exits": "all"},
}


def make_net(options: dict[str, object]) -> LocalNetwork:
    torch.manual_seed(0)
    net = local_network(4, (8, 16, 16, 16), (1,), ((2, 4), (1, 2), (1, 2), (1, 2)), groups=(2, 2), hidden=8, **options)  # type: ignore[arg-type]
    for module in net.modules():
        if hasattr(module, "w2"):  # a FAL that has left the identity passes gradients to its W1 too
            torch.nn.init.normal_(module.w2.weight)
    return net


def magnify(credit: Credit, exit_: int) -> Credit:
    """The same credit with one of the unit's losses multiplied by 5."""
    loss, incoming = credit.roots[exit_]
    credit.roots[exit_] = (5 * loss, incoming)
    return credit


def step_once(options: dict[str, object], schedule: str, disturbed: tuple[int, int] | None = None) -> dict:  # type: ignore[type-arg]
    """State after one step of a net in which one exit's loss was disturbed, by (unit, exit of the unit)."""
    net = make_net(options)
    if disturbed is not None:
        unit = net.units[disturbed[0]]
        learn = unit.learn
        unit.learn = lambda *args, **kwargs: magnify(learn(*args, **kwargs), disturbed[1])
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.randn(6, 3, 8, 8, generator=generator), torch.tensor([0, 1, 2, 3, 0, 1])
    optimizers = [torch.optim.SGD(u.parameters(), 0.1, momentum=0.9) for u in net.units]
    local_step(net, optimizers, images, labels, schedule, keys=torch.arange(6))
    return {name: value.clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("schedule", ["interleaved", "summed"])
@pytest.mark.parametrize("name", SCOPES)
def test_a_disturbed_loss_changes_its_own_unit_and_no_bit_of_any_other(name: str, schedule: str) -> None:
    options = SCOPES[name]
    plain = step_once(options, schedule)
    for index, unit in enumerate(make_net(options).units):
        for exit_ in range(len(unit.exits)):
            changed = step_once(options, schedule, (index, exit_))
            touched = {key.split(".")[1] for key in plain if not torch.equal(plain[key], changed[key])}
            assert touched == {str(index)}


@pytest.mark.parametrize("name", ["strict", "strict-fal", "grouped-fal", "hgb2-fal"])
def test_later_units_cannot_be_felt_by_earlier_ones(name: str) -> None:
    """A net cut short after its first unit trains that unit to the same bits."""
    options = SCOPES[name]
    whole = step_once(options, "interleaved")
    net = make_net(options)
    first = LocalNetwork([net.units[0]])
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.randn(6, 3, 8, 8, generator=generator), torch.tensor([0, 1, 2, 3, 0, 1])
    optimizer = torch.optim.SGD(first.parameters(), 0.1, momentum=0.9)
    local_step(first, [optimizer], images, labels, keys=torch.arange(6))
    for key, value in first.state_dict().items():
        assert torch.equal(value, whole[key]), key


def test_alignment_learns_from_its_own_units_losses_only() -> None:
    for options in (SCOPES["strict-fal"], SCOPES["hgb2-fal"], SCOPES["grouped-fal"]):
        plain = step_once(options, "interleaved")
        names = [key for key in plain if "alignment" in key]
        owners = {int(key.split(".")[1]) for key in names}
        assert names
        for index, unit in enumerate(make_net(options).units):
            for exit_ in range(len(unit.exits)):
                changed = step_once(options, "interleaved", (index, exit_))
                moved = any(not torch.equal(plain[key], changed[key]) for key in names)
                assert moved == (index in owners)


@pytest.mark.parametrize("name", SCOPES)
def test_logits_need_no_labels_and_keep_no_graph_across_units(name: str) -> None:
    net = make_net(SCOPES[name]).eval()
    images = torch.randn(3, 3, 8, 8)
    logits = net(images)
    for exit_, owner in enumerate(index for index, unit in enumerate(net.units) for _ in unit.exits):
        net.zero_grad()
        logits[exit_].sum().backward(retain_graph=True)
        touched = [any(p.grad is not None and p.grad.any() for p in unit.parameters()) for unit in net.units]
        assert [index for index, hit in enumerate(touched) if hit] == [owner]


@pytest.mark.parametrize("m", [1, 2, 4])
def test_hgb_of_m_blocks_has_the_parameters_of_its_units_and_no_more(m: int) -> None:
    net = make_net({"scope": "hgb", "group_size": m})
    assert [unit.exits for unit in net.units] == [[end] for end in range(m - 1, 4, m)]
    readouts = [name for name, _ in net.named_parameters() if "readout.weight" in name]
    assert len(readouts) == 4 // m


def test_hgb_of_one_block_is_the_strict_scope_bit_for_bit() -> None:
    one = step_once({"scope": "hgb", "group_size": 1}, "interleaved")
    two = step_once({}, "interleaved")
    assert all(torch.equal(one[key], two[key]) for key in two)
    assert one.keys() == two.keys()
