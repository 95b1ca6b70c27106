"""Interleaved and summed training are the same run, whatever the configuration."""

import random

import pytest
import torch
from settings import count

from bicovg import local_network, local_step
from bicovg.guard import Guard

STEPS = 100


def draw_configuration(seed):
    rng = random.Random(seed)
    scope = rng.choice(["strict", "grouped", "hgb", "end-to-end"])
    options = {
        "scope": scope,
        "group_size": rng.choice([1, 2]),
        "alignment": rng.random() < 0.5,
        "dropout": rng.choice([0.0, 0.1, 0.4]),
        "batch_norm": rng.random() < 0.8,
        "exits": rng.choice(["last", "all"]),
    }
    return options, rng.choice(["sgd", "adamw"]), rng.choice([None, 0.5, 1.0])


def train(seed, schedule):
    options, optimizer, clip = draw_configuration(seed)
    torch.manual_seed(seed)
    net = local_network(4, (8,) * 4, (1,), ((1, 2),) * 4, in_channels=1, groups=(2, 2), hidden=4, **options)
    make = {"sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), "adamw": lambda p: torch.optim.AdamW(p, 2e-3)}
    optimizers = [make[optimizer](unit.parameters()) for unit in net.units]
    guard = Guard(net, optimizers)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        images, labels = torch.randn(8, 1, 4, 4, generator=generator), torch.arange(8) % 4
        local_step(net, optimizers, images, labels, schedule, clip, keys=torch.arange(8) + 8 * step, guard=guard)
        guard.record(step)
    moments = [value for o in optimizers for state in o.state.values() for value in state.values()]
    return [tensor.detach().numpy().tobytes() for tensor in (*net.state_dict().values(), *moments)]


@pytest.mark.row("interleaved against summed, 100 steps")
def test_interleaved_and_summed_agree_bit_for_bit(row):
    for seed in range(count(20, 3)):
        with row.trial(f"seed {seed}: {draw_configuration(seed)}"):
            assert train(seed, "interleaved") == train(seed, "summed")
