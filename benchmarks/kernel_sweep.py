"""Launch-shape sweep of the fused block's kernels (``benchmarks/kernels.py --sweep``).

Every trial is first checked against the plain functions in float32, because a launch shape can be fast and wrong
(see ``bicovg/kernels/tiles.py``); then it is timed. Prints the best tiles of each (C, H), ready for the tables there.
"""

from typing import Any, NamedTuple

import torch
from kernel_blocks import BLOCKS, LAST, Block, draw, microseconds, run_all
from torch import Tensor, nn
from torch.nn import functional as F

from bicovg.goodness import bicovg
from bicovg.kernels import block as kernels
from bicovg.kernels import block_backward as backward
from bicovg.kernels import tiles
from bicovg.kernels.goodness import forward_outputs, launch_forward
from bicovg.kernels.tiles import Tile

FORWARD = [
    Tile(64, 64, 2, 2), Tile(64, 64, 2, 3), Tile(32, 64, 2, 3), Tile(64, 128, 4, 1), Tile(128, 64, 4, 1),
    Tile(16, 128, 4, 3), Tile(64, 64, 4, 1), Tile(64, 64, 2, 2, 2, 128), Tile(64, 64, 2, 1, 2, 128), Tile(32, 32, 1, 2),
    Tile(32, 32, 1, 3), Tile(32, 64, 1, 3), Tile(16, 64, 1, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3),
    Tile(128, 64, 4, 2), Tile(128, 64, 4, 3),
    Tile(32, 128, 2, 2, 8), Tile(32, 128, 2, 3, 8), Tile(32, 128, 2, 3, 5), Tile(32, 128, 2, 3, 1000),
    Tile(32, 128, 2, 4, 8), Tile(32, 128, 4, 3, 5), Tile(16, 128, 2, 3, 8), Tile(64, 128, 4, 2, 2),
    Tile(64, 128, 4, 3, 2), Tile(32, 256, 4, 3, 3), Tile(16, 256, 2, 3, 5), Tile(16, 256, 4, 3, 3),
    Tile(32, 256, 8, 3, 2), Tile(64, 256, 4, 2, 2), Tile(64, 256, 8, 2, 1), Tile(64, 32, 2, 3), Tile(64, 32, 2, 4),
    Tile(32, 32, 1, 4),
]  # fmt: skip
PRODUCTS = [
    Tile(64, 64, 4, 1, 3), Tile(64, 64, 4, 1, 4), Tile(64, 64, 4, 2, 3), Tile(64, 64, 4, 2, 4), Tile(64, 64, 4, 3, 2),
    Tile(64, 64, 4, 3, 3), Tile(64, 64, 4, 3, 5), Tile(64, 64, 4, 4, 2), Tile(64, 64, 4, 4, 3), Tile(64, 64, 4, 4, 5),
    Tile(64, 64, 4, 3, 3, 168), Tile(64, 64, 4, 4, 3, 168), Tile(128, 64, 4, 1, 2), Tile(128, 64, 4, 1, 3),
    Tile(128, 64, 4, 2, 2), Tile(128, 64, 4, 2, 3), Tile(128, 64, 4, 3, 2), Tile(128, 64, 4, 3, 3),
    Tile(128, 64, 4, 4, 2), Tile(128, 64, 4, 3, 3, 168), Tile(64, 128, 8, 3, 2), Tile(128, 128, 8, 3, 1),
]  # fmt: skip
GRADIENT = [
    Tile(32, 64, 4, 3, 4), Tile(32, 64, 4, 2, 8), Tile(32, 64, 2, 3, 8), Tile(32, 64, 2, 2, 8), Tile(32, 128, 4, 3, 4),
    Tile(32, 128, 4, 2, 4), Tile(64, 64, 4, 1, 6), Tile(32, 64, 1, 2, 12), Tile(16, 64, 1, 2, 15),
    Tile(32, 32, 1, 2, 16), Tile(64, 64, 4, 2, 4), Tile(64, 64, 4, 3, 4), Tile(64, 64, 4, 3, 3), Tile(128, 64, 4, 2, 2),
    Tile(128, 64, 4, 3, 2), Tile(64, 128, 4, 3, 2), Tile(64, 64, 8, 3, 2),
]  # fmt: skip
CANDIDATES = {"forward": FORWARD, "products": PRODUCTS, "gradient": GRADIENT}
TABLES = {"forward": tiles.FORWARD, "products": tiles.PRODUCTS, "gradient": tiles.GRADIENT}


class Trial(NamedTuple):
    """One launch shape of one kernel on one block."""

    block: Block
    kernel: str
    tile: Tile


class Case(NamedTuple):
    """What the kernels of one block need."""

    y: Tensor
    weight: Tensor
    norm: nn.BatchNorm2d
    stats: Tensor
    grad: Tensor
    g: Tensor
    p: Tensor


def list_trials(recipes: tuple[str, ...]) -> list[Trial]:
    """All trials, each (C, H) once, in its first recipe."""
    seen: dict[tuple[int, int], Block] = {}
    for block in BLOCKS:
        if block.recipe in recipes:
            seen.setdefault((block.channels, block.size), block)
    return [
        Trial(block, kernel, tile) for block in seen.values() for kernel in CANDIDATES for tile in CANDIDATES[kernel]
    ]


def make_case(block: Block) -> Case:
    y, weight, grad, _ = draw(block, torch.bfloat16)
    y = (y - 0.3).contiguous(memory_format=LAST)
    norm = nn.BatchNorm2d(block.channels, device="cuda")
    stats = kernels.block_statistics(y, norm)
    g, p = forward_outputs(y, weight, block.scales, keep=True, always=True)
    launch_forward(g, p, y, weight.bfloat16(), block.scales, stats)
    return Case(y, weight, norm, stats, grad, g, p)


def apply(trial: Trial) -> None:
    """Make the launchers use the trial's tile."""
    table = TABLES[trial.kernel]
    table.clear()
    table[trial.block.channels, trial.block.size] = trial.tile


def distance(x: Tensor, reference: Tensor) -> float:
    return float((x.float() - reference).norm() / reference.norm())


def check(trial: Trial) -> float:
    """The largest relative error of g, dy, dW, dgamma and dbeta against the plain functions in float32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    block = trial.block._replace(batch=16)  # a multiple of 16 like the true batch: the same compiled kernel
    case = make_case(block)
    apply(trial)
    leaf, weight = case.y.detach().requires_grad_(), case.weight.requires_grad_()
    g = kernels.block_goodness(leaf, case.stats, case.norm, weight, block.scales)
    wanted = (leaf, weight, case.norm.weight, case.norm.bias)
    found = torch.autograd.grad(g, wanted, case.grad)
    wide, wide_weight = case.y.float().requires_grad_(), case.weight.detach().bfloat16().float().requires_grad_()
    reference = bicovg(F.relu(case.norm(wide)), wide_weight, block.scales)
    oracle = torch.autograd.grad(reference, (wide, wide_weight, case.norm.weight, case.norm.bias), case.grad)
    return max(distance(a, b) for a, b in zip((g.detach(), *found), (reference.detach(), *oracle), strict=True))


def measure(trial: Trial, cases: list[Case]) -> float:
    """Microseconds of the trial's kernel (gradient: with the slopes and sums it follows left out)."""
    apply(trial)
    scales = trial.block.scales
    casts = [case.weight.bfloat16() for case in cases]
    scaled = [torch.empty_like(case.p) for case in cases]
    slopes = [
        backward.launch_slopes(q, case.p, case.grad, case.g, case.y, scales)
        for case, q in zip(cases, scaled, strict=True)
    ]
    sums = [
        backward.launch_sums(*s, c.y, w, q, c.stats, scales)
        for s, c, w, q in zip(slopes, cases, casts, scaled, strict=True)
    ]
    gradients = [torch.empty_like(case.y) for case in cases]

    def run(i: int) -> Any:
        y, weight, _, stats, _, _, p = cases[i]
        if trial.kernel == "forward":
            g, _ = forward_outputs(y, weight, scales, keep=False)
            return launch_forward(g, p, y, casts[i], scales, stats)
        if trial.kernel == "products":
            return backward.launch_sums(*slopes[i], y, casts[i], scaled[i], stats, scales)
        return backward.launch_gradient(gradients[i], slopes[i][0], sums[i], y, casts[i], scaled[i], stats, scales)

    return microseconds(run, len(cases), 0.01)


def run_sweep(recipes: tuple[str, ...]) -> list[dict[str, Any]]:
    """Compile and check all trials in parallel, time them one by one, print the best of each kernel and block."""
    trials = list_trials(recipes)
    checked = run_all(check, trials)
    rows: list[dict[str, Any]] = []
    cases: list[Case] = []
    for index, trial in enumerate(trials):
        block, error = trial.block, checked[index]
        if index == 0 or block != trials[index - 1].block:
            for table in TABLES.values():
                table.clear()
            size = 2 * block.batch * block.channels * block.size**2
            cases = []
            cases = [make_case(block) for _ in range(min(16, 1 + int(1.2e8) // size))]
        row = {"C": block.channels, "H": block.size, "kernel": trial.kernel, "tile": str(trial.tile), "error": error}
        try:
            if isinstance(error, Exception):
                raise error
            row["us"] = measure(trial, cases)
            row["ok"] = error < 2e-2
        except Exception as failure:
            row |= {"error": f"{type(failure).__name__}: {failure}"[:200], "ok": False}
        rows.append(row)
        ideal = (2 if trial.kernel == "gradient" else 1) * 2 * block.batch * block.channels * block.size**2 / 4.3e6
        row["ideal_us"] = ideal
    print_best(rows)
    return rows


def print_best(rows: list[dict[str, Any]]) -> None:
    for kernel in CANDIDATES:
        for C, H in dict.fromkeys((row["C"], row["H"]) for row in rows):
            group = [row for row in rows if (row["C"], row["H"], row["kernel"]) == (C, H, kernel)]
            good = sorted((row for row in group if row["ok"]), key=lambda row: float(row["us"]))
            wrong = [row["tile"] for row in group if not row["ok"] and "us" in row]
            print(f"{kernel} ({C}, {H}): {len(good)} of {len(group)} right; memory alone {group[0]['ideal_us']:.1f} us")
            for row in good[:3]:
                print(f"  {row['us']:8.1f} us  {row['tile']}")
            for tile in wrong:
                print(f"  wrong: {tile}")
            for row in group:
                if "us" not in row:
                    print("  failed:", row["tile"], row["error"])
