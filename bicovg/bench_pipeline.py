"""One process of a measured run of several: started with torchrun's variables, says what it measured as one JSON line.

``units`` times every unit in one process; ``train`` times blocks of training steps, by stages or by shares. Used by
``bicovg.bench_stages``.
"""

import json
import sys
import time
from itertools import count
from typing import Any

import torch

from bicovg.bench_worker import synthetic_loader
from bicovg.choosing import make_engine
from bicovg.config import Config, from_json
from bicovg.distributed import Team, end_process, join_team
from bicovg.engine import EagerEngine
from bicovg.networks import dry_run
from bicovg.optim import make_optimizers
from bicovg.preparation import build_on, pick_device, set_up_process
from bicovg.reduction import UnitReduction
from bicovg.signals import wake_autograd
from bicovg.stages import StageEngine, ends_with_pool, measure_units


def measure_network(config: Config) -> dict[str, Any]:
    """Seconds of every unit's part of a step, whether it ends with a pool, and the bytes it would hand on.

    ``device_seconds`` are those of a GPU alone, without the launches; None on a CPU.
    """
    device = pick_device(config.train.device)
    net, loader = build_on(config, device), synthetic_loader(config, device)
    wake_autograd(device)
    given = (net, make_optimizers(net, config.optim, device), config, loader)
    return {
        "seconds": measure_units(*given),
        "device_seconds": measure_units(*given, device_time=True) if device.type == "cuda" else None,
        "pooled": ends_with_pool(net),
        "bytes": output_bytes(config),
    }


def output_bytes(config: Config) -> list[int]:
    """Size of each unit's output for one batch."""
    data, sizes = config.data, []
    with torch.device("meta"):
        shape = (data.image_channels, data.image_size, data.image_size)
        net = dry_run(lambda: build_on(config, torch.device("meta")), shape).eval()
        x = net.prepare(torch.empty(config.train.batch_size, *shape))
        for unit in net.units[:-1]:
            x, _ = unit(x)
            sizes.append(x.numel() * (2 if config.train.precision == "bfloat16" else 4))
    return sizes


def train_blocks(config: Config, team: Team, steps: int, blocks: int) -> dict[str, Any]:
    """Seconds of each block of ``steps`` steps, from the moment all processes begin to the last one's end."""
    device = pick_device(config.train.device)
    net, loader = build_on(config, device), synthetic_loader(config, device)
    loader.rank, loader.world = team.share, team.data
    engine = make_engine(net, make_optimizers(net, config.optim, device), config, loader, team)
    stream = (losses for epoch in count() for losses in engine.steps(epoch))
    for _ in range(3):
        next(stream)
    seconds, before, busy = [], bytes_sent(engine), time.process_time()
    for _ in range(blocks):
        team.meet()
        begun = time.perf_counter()
        for _ in range(steps):
            next(stream)
        team.meet()
        seconds.append(time.perf_counter() - begun)
    return {
        "seconds": seconds,
        "cpu_seconds_per_step": (time.process_time() - busy) / (steps * blocks),
        "bytes_per_step": (bytes_sent(engine) - before) / (steps * blocks),
    }


def bytes_sent(engine: EagerEngine) -> int:
    """Payload of all-reduces and of sends so far."""
    reduced = engine.reduction.bytes_sent if isinstance(engine.reduction, UnitReduction) else 0
    sent = engine.outbox.bytes_sent if isinstance(engine, StageEngine) and engine.outbox else 0
    return reduced + sent


def main() -> None:
    request = json.loads(sys.argv[1])
    config = from_json(json.dumps(request["config"]))
    set_up_process(config)
    if request["do"] == "units":
        print(json.dumps(measure_network(config)))
        return
    with join_team(config.train) as team:
        print(json.dumps(train_blocks(config, team, request["steps"], request["blocks"])), file=sys.__stdout__)
    if team.world > 1:
        end_process(0)


if __name__ == "__main__":
    main()
