"""Launch-shape sweep of the goodness kernels (``benchmarks/kernels.py --sweep``).

Prints the best tiles of each (C, H) as lines ready for ``bicovg/kernels/tiles.py``. "kept" means the forward pass
stores p for the backward pass; where one block of channels can hold all of C both ways are timed, and the sums of
forward and backward decide.
"""

from typing import Any, NamedTuple

import torch
from kernel_blocks import BLOCKS, Block, build_all, cast, draw, forward, input_sets, microseconds

from bicovg.kernels import tiles
from bicovg.kernels.tiles import Tile

LARGE = [
    Tile(64, 64, 4, 3), Tile(64, 64, 4, 4), Tile(64, 128, 4, 3), Tile(128, 64, 4, 3), Tile(128, 64, 8, 3),
    Tile(128, 64, 8, 4), Tile(128, 128, 8, 3), Tile(256, 64, 8, 3),
]  # fmt: skip
SMALL = [
    Tile(16, 64, 4, 4), Tile(16, 128, 4, 3), Tile(16, 256, 4, 2), Tile(32, 128, 4, 3), Tile(64, 64, 4, 3),
    Tile(64, 128, 4, 3), Tile(64, 128, 8, 3),
]  # fmt: skip
KEPT = [
    Tile(64, 64, 4, 3, 3, 168), Tile(64, 64, 4, 2, 3, 168), Tile(64, 128, 4, 3), Tile(64, 128, 8, 3, 1),
    Tile(64, 128, 8, 3, 2, 128), Tile(64, 128, 8, 2, 2, 128), Tile(64, 64, 8, 3, 2, 128),
]  # fmt: skip
KEPT_SMALL = [
    Tile(64, 64, 4, 1), Tile(64, 64, 8, 1), Tile(64, 128, 8, 1), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1),
    Tile(16, 64, 4, 1), Tile(64, 64, 8, 2),
]  # fmt: skip
RECOMPUTED = {
    128: [Tile(64, 128, 4, 2), Tile(64, 128, 4, 3), Tile(64, 128, 4, 2, 3, 168), Tile(64, 128, 8, 3, 2, 128),
          Tile(64, 128, 8, 2, 2, 128), Tile(128, 128, 8, 3, 1)],
    256: [Tile(64, 256, 8, 2, 1), Tile(64, 256, 8, 3, 1), Tile(32, 256, 8, 3, 1)],
}  # fmt: skip


class Trial(NamedTuple):
    """One launch shape of one kernel on one block."""

    block: Block
    forward: bool
    kept: bool
    tile: Tile


def list_trials() -> list[Trial]:
    """All trials, each (C, H) once, in its first recipe."""
    seen: dict[tuple[int, int], Block] = {}
    for block in BLOCKS:
        seen.setdefault((block.channels, block.size), block)
    trials = []
    for (C, H), block in seen.items():
        recomputed = RECOMPUTED.get(C, [])
        for tile in SMALL if H <= 8 else LARGE:
            trials += [Trial(block, True, kept, tile) for kept in ((True, False) if recomputed else (True,))]
        trials += [Trial(block, False, True, tile) for tile in (KEPT_SMALL if H <= 4 else KEPT)]
        trials += [Trial(block, False, False, tile) for tile in recomputed]
    return trials


def apply(trial: Trial) -> None:
    """Make the launchers use the trial's tile."""
    tiles.RECOMPUTE_CHANNELS = 0 if trial.kept else trial.block.channels
    table = tiles.FORWARD if trial.forward else tiles.BACKWARD
    table.clear()
    table[trial.block.channels, trial.block.size] = trial.tile


def build(trial: Trial) -> None:
    """Compile the trial's kernels into Triton's disk cache, on few samples to spare memory."""
    block = trial.block._replace(batch=16)  # a multiple of 16 like the true batch: the same compiled kernel
    apply(trial)
    f, w, grad, _ = draw(block, torch.bfloat16)
    _, p = forward(block, f, w)
    if not trial.forward:
        torch.ops.bicovg.goodness_backward(grad, f, cast(f, w), p, list(block.scales), True)
    torch.cuda.synchronize()


def measure(trial: Trial, data: list[Any]) -> float:
    """Microseconds of the trial's kernel."""
    apply(trial)
    block = trial.block
    if trial.forward:
        return microseconds(lambda i: forward(block, *data[i][:2]), len(data), 0.02)
    kept = [forward(block, f, w)[1] for f, w, _, _ in data]

    def backward(i: int) -> Any:
        f, w, grad, _ = data[i]
        return torch.ops.bicovg.goodness_backward(grad, f, cast(f, w), kept[i], list(block.scales), True)

    return microseconds(backward, len(data), 0.02)


def run_sweep() -> list[dict[str, Any]]:
    """Compile all trials in parallel, time them one by one, print the best three of each kernel and block."""
    trials = list_trials()
    built = build_all(build, trials)
    rows: list[dict[str, Any]] = []
    data: list[Any] = []
    for index, trial in enumerate(trials):
        if index == 0 or trial.block != trials[index - 1].block:
            data = []
            data = input_sets(trial.block)
        row = {
            "C": trial.block.channels, "H": trial.block.size, "B": trial.block.batch,
            "kernel": "forward" if trial.forward else "backward", "kept": trial.kept, "tile": str(trial.tile),
        }  # fmt: skip
        try:
            if isinstance(built[index], Exception):
                raise built[index]
            row["us"] = measure(trial, data)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:200]
        rows.append(row)
    for key in dict.fromkeys((row["C"], row["H"], row["kernel"], row["kept"]) for row in rows):
        group = [row for row in rows if (row["C"], row["H"], row["kernel"], row["kept"]) == key]
        best = sorted((row for row in group if "us" in row), key=lambda row: float(row["us"]))[:3]
        C, H, kernel, kept = key
        print(f"{kernel:8} ({C}, {H}) {'kept' if kept else 'recomputed'}, {len(group)} tried")
        for row in best:
            print(f"  {row['us']:8.1f} us  {row['tile']}")
    for row in rows:
        if "error" in row:
            print("failed:", row["kernel"], row["C"], row["H"], row["tile"], row["error"])
    return rows
