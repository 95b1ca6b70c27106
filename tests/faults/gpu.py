"""What only a GPU can show: the guard and the saver in the captured engine, their cost, and an exact resume.

Run as ``gpu.py``: prints JSON. With names (``gpu.py saving``) only those parts. ``gpu.py small`` takes a tiny network
and whatever device there is, to try the code.
"""

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read once, at the first product of the process

import torch

from bicovg.checkpoint import METRICS, MODEL, OPTIMIZER, find_checkpoint
from bicovg.choosing import make_engine
from bicovg.config import override
from bicovg.data.splits import load_splits, make_loaders
from bicovg.errors import NonFiniteError
from bicovg.optim import make_optimizers
from bicovg.preparation import build_on
from bicovg.recipes import get_recipe
from bicovg.saving import Saver
from bicovg.state import Progress, Snapshot
from bicovg.stopping import TIME_UP, Stopper, StopRequested
from bicovg.trainer import Trainer
from bicovg.updates import FusedUpdates

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(recipe):
    precision = "bfloat16" if DEVICE == "cuda" else "float32"
    changes = {"data.name": "synthetic", "train.device": DEVICE, "train.precision": precision}
    config = override(get_recipe(recipe), changes)
    place = torch.device(DEVICE)
    net = build_on(config, place)
    optimizers = make_optimizers(net, config.optim, place)
    return make_engine(net, optimizers, config, make_loaders(load_splits(config.data), config, place)["train"])


def endless(engine):
    for epoch in itertools.count():
        yield from engine.steps(epoch)


def timed(steps, count):
    """Seconds of ``count`` steps."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in itertools.islice(steps, count):
        pass
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def guard_cost(recipe, count, rounds):
    """Share of a step that the guard takes: engines with and without it, in turns."""
    guarded, bare = make(recipe), make(recipe)
    if isinstance(bare.guard, FusedUpdates):
        bare.guard = bare.make_updates(bool(bare.guard.shadows), guarded=False)
    else:
        bare.guard = None
    loops = [endless(guarded), endless(bare)]
    for loop in loops:
        timed(loop, count)
    times = [[timed(loop, count) for loop in loops] for _ in range(rounds)]
    with_guard, without = (statistics.median(column) for column in zip(*times, strict=True))
    return {"share": with_guard / without - 1, "milliseconds_per_step": 1000 * without / count}


def saving_cost(recipe, count, rounds):
    """Share of an epoch of ``count`` steps that one checkpoint of it takes."""
    engine = make(recipe)
    loop = endless(engine)
    losses = torch.zeros(2, len(engine.net.exits), dtype=torch.float64)
    timed(loop, 20)
    plain, saving, blocked = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(Path(folder), 2, 0)
        for number in range(rounds):
            plain.append(timed(loop, count))
            begun = time.perf_counter()
            saver.save(Snapshot(engine.net, engine.optimizers, losses, Progress(step=number), b""))
            blocked.append(time.perf_counter() - begun)
            saving.append(blocked[-1] + timed(loop, count))
        saver.close()
    share = statistics.median(saving) / statistics.median(plain) - 1
    return {"share": share, "blocked_seconds": statistics.median(blocked), "epoch_seconds": statistics.median(plain)}


def planted(recipe, block):
    """A NaN weight in a captured step: everything freezes at once, and the host learns the block and the step."""
    engine = make(recipe)
    for _ in itertools.islice(endless(engine), 4):
        pass
    unit, part = next((u, b) for u in engine.net.units for b in u.blocks if b.index == block)
    with torch.no_grad():
        part.conv.weight[0, 0, 0, 0] = torch.nan
    if isinstance(engine.guard, FusedUpdates):
        engine.guard.settle()  # the step computes with copies of the weights
    later = list(engine.net.units)[list(engine.net.units).index(unit) :]

    def bits():
        tensors = [t for u in later for t in (*u.parameters(), *u.buffers())]
        return [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).clone() for tensor in tensors]

    before, message = bits(), ""
    try:
        for _ in itertools.islice(engine.steps(7), 6):
            pass
        engine.guard.flush()
    except NonFiniteError as error:
        message = str(error)
    same = all(torch.equal(a, b) for a, b in zip(before, bits(), strict=True))
    return {"kept_bits": same, "message": message, "first_step": 7 * len(engine.loader)}


class StopAt(Stopper):
    """Stops a trainer after a given step."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def wish(self):
        self.step -= 1
        return TIME_UP if self.step <= 0 else 0


RESUMED = [
    ("strict", "interleaved", "float32"),
    *(
        (scope, s, "bfloat16")
        for scope in ("strict", "hgb", "grouped", "end-to-end")
        for s in ("interleaved", "summed")
    ),
]


def resumed(folder, small, scope, schedule, precision):
    """Whether a run stopped in the middle of an epoch ends with the bits of one that was not (deterministic mode)."""
    folder = f"{folder}/{scope}-{schedule}-{precision}"
    changes = {"train.device": DEVICE, "train.epochs": 2, "train.deterministic": True, "fusion.steps": 2}
    changes |= {"train.precision": precision, "train.schedule": schedule, "model.scope": scope, "model.group_size": 2}
    changes |= {"model.alignment": scope != "strict", "train.clip_norm": 1.0 if schedule == "interleaved" else None}
    config = override(get_recipe("digits"), changes | ({"model.width": 0.25} if small else {}))
    whole = Trainer.start(config, f"{folder}/whole")
    whole.train()
    part = Trainer.start(config, f"{folder}/part")
    try:
        part.train(StopAt(len(part.loaders["train"]) + 3))
        raise AssertionError("the run did not stop")
    except StopRequested:
        Trainer.resume(part.run, config).train()
    ends = [find_checkpoint(Path(folder) / name)[0] for name in ("whole", "part")]
    same = {name: len({(end / name).read_bytes() for end in ends}) == 1 for name in (MODEL, OPTIMIZER, METRICS)}
    return {"scope": scope, "schedule": schedule, "precision": precision, "engine": whole.engine.name, **same}


def main(words):
    small = "small" in words
    recipe = "digits" if small else "tiny-imagenet-bicovg"
    with tempfile.TemporaryDirectory() as folder:
        parts = {
            "planted": lambda: planted(recipe, 2),
            "guard": lambda: guard_cost(recipe, *((10, 2) if small else (60, 9))),
            "guard_without_clip": lambda: guard_cost(
                "digits" if small else "cifar100-bicovg", *((10, 2) if small else (300, 9))
            ),
            "saving": lambda: saving_cost(recipe, *((10, 1) if small else (390, 3))),
            "resumed": lambda: [resumed(folder, small, *kind) for kind in RESUMED],
        }
        unknown = set(words) - set(parts) - {"small"}
        assert not unknown, f"no such part: {unknown}"
        wanted = set(words) & set(parts) or set(parts)
        print(json.dumps({name: part() for name, part in parts.items() if name in wanted}))


if __name__ == "__main__":
    main(sys.argv[1:])
