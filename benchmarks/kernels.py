"""Checks and times the fused kernels on one CUDA GPU, at every block shape of every recipe.

    python benchmarks/kernels.py                 check, then time against eager and compiled PyTorch
    python benchmarks/kernels.py --only check    (or time)
    python benchmarks/kernels.py --sweep         time launch shapes, for the tables in bicovg/kernels/tiles.py

Times are medians of captured graphs that rotate over enough inputs to leave the cache. GB/s counts the fewest
bytes: forward reads f; backward reads f and writes df; tail reads f and writes h.
"""

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kernel_blocks import (
    BLOCKS,
    PEAK,
    Block,
    cast,
    draw,
    forward,
    input_sets,
    microseconds,
    recipe_blocks,
    run_all,
)
from kernel_checks import Distance, check_block, cut_rows, distance, poisoned, with_mixing
from kernel_edges import IMAGE, SUMS_LIMIT, Edge, check_edge, recipe_edges
from kernel_sweep import run_sweep
from machine import describe
from torch import Tensor

from bicovg.draws import make_keys
from bicovg.goodness import bicovg
from bicovg.kernels.goodness import fused_bicovg
from bicovg.kernels.tail import fused_tail
from bicovg.layers import keyed_dropout, rms_norm, rms_pool

# Of the batch and of each sample alike. In bfloat16 df, dy and h are off by their rounding, 2.5e-3 at most, the worst
# sample by 1.5 times as much; a lost tile of 32 x 64 is 3.6e-2 of the largest sample. g is a float32, off by 7.4e-4 at
# most; a lost tile of 16 pixels of 112 x 112 is 4e-3 of it in 4 x 4 cells.
LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
G_LIMIT = 2.5e-3  # in bfloat16
LARGE = 1 << 27  # elements of f
CHECKERS = {True: 5, False: 14}  # processes for large blocks, of which one takes some 20 GB in float64, and others
COMPILED = (0, 9, 13)  # blocks also timed against torch.compile, which takes long to compile


Task = tuple[Block | Edge, torch.dtype, bool | None]


def plain_tail(f: Tensor, pool: bool, drop: float, keys: Tensor) -> Tensor:
    return rms_norm(keyed_dropout(rms_pool(f) if pool else f, drop, keys))


def check(block: Block, dtype: torch.dtype, last: bool) -> dict[str, float]:
    """Relative errors of g, df, dW and h against float64, and of the worst sample."""
    f, w, grad, keys = draw(block, dtype, last)
    leaf, weight = f.detach().requires_grad_(), w.clone().requires_grad_() if len(w) else None
    with poisoned():
        g = fused_bicovg(leaf, weight, block.scales)
        df, *dw = torch.autograd.grad(g, with_mixing((leaf,), weight), grad)
        h = fused_tail(f, block.pool, 0.1, keys, 3)
    assert df.stride() == f.stride()
    gathered = {name: Distance() for name in ("g", "df", "h")}
    total = torch.zeros_like(w, dtype=torch.float64)
    for rows in cut_rows(f):
        wide, wide_w = f[rows].double().requires_grad_(), w.double().requires_grad_() if len(w) else None
        reference = bicovg(wide, wide_w, block.scales)
        slopes = torch.autograd.grad(reference, with_mixing((wide,), wide_w), grad[rows].double())
        gathered["g"].add(g.detach()[rows], reference.detach())
        gathered["df"].add(df[rows], slopes[0])
        gathered["h"].add(h[rows], plain_tail(f[rows].double(), block.pool, 0.1, make_keys(keys[rows], 3)))
        total += slopes[1] if len(slopes) > 1 else 0.0
    errors = {"dW": distance(dw[0], total)} if dw else {}
    for name, part in gathered.items():
        errors |= part.values(name)
    return errors


SMALL = Block("small", 4, 128, 8, (2, 4), True, 16)


def small_goodness(x: Tensor, w: Tensor) -> Tensor:
    return fused_bicovg(torch.relu(x), w, SMALL.scales)


def small_step(goodness: Callable[..., Tensor], x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """g, df and dW."""
    leaf, weight = x.detach().requires_grad_(), w.detach().requires_grad_()
    g = goodness(leaf, weight)
    return g.detach(), *torch.autograd.grad(g, (leaf, weight), grad)


def check_contracts() -> None:
    f, w, _, keys = draw(SMALL, torch.bfloat16)
    args = (f.requires_grad_(), w.requires_grad_(), w.detach().bfloat16(), [2, 4], True, True)
    torch.library.opcheck(torch.ops.bicovg.goodness, args)
    torch.library.opcheck(torch.ops.bicovg.tail, (f.detach(), None, True, 0.1, keys, 3, 1e-6))


def check_compiled() -> None:
    inputs = draw(SMALL, torch.bfloat16)[:3]
    expected = small_step(small_goodness, *inputs)
    found = small_step(torch.compile(small_goodness, fullgraph=True), *inputs)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), "compiled differs"


def check_captured() -> None:
    inputs = draw(SMALL, torch.bfloat16)[:3]
    expected = small_step(small_goodness, *inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = small_step(small_goodness, *inputs)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), "captured differs"


def check_integration() -> dict[str, str]:
    """Operator contracts, torch.compile without graph breaks, graph capture: each 'ok' or what went wrong."""
    results = {}
    for test in (check_contracts, check_captured, check_compiled):
        try:
            test()
            results[test.__name__] = "ok"
        except Exception as error:
            traceback.print_exc()
            results[test.__name__] = f"{type(error).__name__}: {error}"[:300]
    return results


def plain_step(goodness: Callable[..., Tensor], block: Block, f: Tensor, w: Tensor, grad: Tensor) -> Any:
    """Forward and backward of the definition, as a mixed-precision trainer runs it."""
    leaf, weight = f.detach().requires_grad_(), w.detach().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        g = goodness(leaf, weight, block.scales)
    return torch.autograd.grad(g, (leaf, weight), grad)


def measure(block: Block, compiled: bool) -> dict[str, float]:
    """Microseconds of the fused kernels and of what they replace."""
    data = input_sets(block)
    kept = [forward(block, f, w)[1] for f, w, _, _ in data]
    scales = list(block.scales)

    def backward(i: int) -> Any:
        f, w, grad, _ = data[i]
        return torch.ops.bicovg.goodness_backward(grad, f, cast(f, w), kept[i], scales, True)

    def run(call: Callable[..., Any]) -> float:
        return microseconds(lambda i: call(*data[i]), len(data))

    row = {
        "forward": run(lambda f, w, _, __: forward(block, f, w)),
        "backward": microseconds(backward, len(data)),
        "tail": run(lambda f, _, __, keys: fused_tail(f, block.pool, 0.1, keys, 3)),
        "eager": run(lambda f, w, grad, _: plain_step(bicovg, block, f, w, grad)),
        "eager_tail": run(lambda f, _, __, keys: plain_tail(f, block.pool, 0.1, keys)),
    }
    if compiled:
        torch._dynamo.reset()
        fast = torch.compile(bicovg, dynamic=False)
        row["compiled"] = run(lambda f, w, grad, _: plain_step(fast, block, f, w, grad))
    return row


def build(block: Block) -> None:
    """Compile what ``measure`` times into Triton's disk cache (in a process of its own)."""
    f, w, grad, keys = draw(block, torch.bfloat16)
    _g, p = forward(block, f, w)
    torch.ops.bicovg.goodness_backward(grad, f, cast(f, w), p, list(block.scales), True)
    fused_tail(f, block.pool, 0.1, keys, 3)
    torch.cuda.synchronize()


def is_within(name: str, error: float, dtype: torch.dtype) -> bool:
    """Whether an error is within its limit; NaN is not, nor is a count of 1."""
    special = {"sums": SUMS_LIMIT} | ({"g": G_LIMIT} if dtype == torch.bfloat16 else {})
    return error < special.get(name.split()[0], LIMITS[dtype])


def run_check(task: Task) -> dict[str, Any]:
    """One row: goodness and tail of f in one layout or the other, or, for None, the kernels of the whole block."""
    block, dtype, last = task
    row = describe_task(task)
    try:
        if isinstance(block, Edge):
            errors = check_edge(block, dtype)
        else:
            errors = check_block(block, dtype) if last is None else check(block, dtype, last)
        row |= errors | {"ok": all(is_within(name, error, dtype) for name, error in errors.items())}
    except Exception as error:
        row |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:300]}
    torch.cuda.empty_cache()
    return row


def describe_task(task: Task) -> dict[str, Any]:
    block, dtype, last = task
    if isinstance(block, Edge):
        return {"edge": str(block), "kind": block.kind, "dtype": str(dtype)}
    which = {"block": str(block), "scales": list(block.scales), "pool": block.pool, "projections": block.projections}
    return which | {"dtype": str(dtype)} | ({} if last is None else {"channels_last": last})


def run_checks(report: dict[str, Any]) -> bool:
    """Fill ``report`` with a row for every check; True when every error is within its limit."""
    report |= {"integration": check_integration(), "checks": [], "blocks": [], "edges": []}
    print("integration:", report["integration"], flush=True)
    for large, processes in CHECKERS.items():
        tasks = [task for task in make_tasks() if is_large(task[0]) is large]
        for task, result in zip(tasks, run_all(run_check, tasks, processes), strict=True):
            lost = isinstance(result, Exception)
            row = describe_task(task) | {"ok": False, "error": repr(result)} if lost else result
            report["edges" if "edge" in row else "blocks" if task[2] is None else "checks"].append(row)
            if not row["ok"]:
                print("WRONG", row, flush=True)
    integrated = all(value == "ok" for value in report["integration"].values())
    return integrated and all(row["ok"] for name in ("checks", "blocks", "edges") for row in report[name])


def make_tasks() -> list[Task]:
    """Everything to be checked; the image's convolution in float32 is cuDNN's."""
    tasks: list[Task] = [
        (block, dtype, last) for block in recipe_blocks() for dtype in LIMITS for last in (True, False, None)
    ]
    for edge in recipe_edges():
        tasks += [(edge, dtype, None) for dtype in LIMITS if edge.kind != IMAGE or dtype == torch.bfloat16]
    return tasks


def is_large(block: Block | Edge) -> bool:
    return block.batch * block.channels * block.size**2 >= LARGE


def run_times(report: dict[str, Any], deadline: float) -> None:
    """Fill ``report['times']``; torch.compile is left out once the deadline has passed."""
    report["times"] = []
    for index, block in enumerate(BLOCKS):
        row: dict[str, Any] = {"block": str(block)}
        try:
            row |= measure(block, index in COMPILED and time.monotonic() < deadline)
        except Exception as error:
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        report["times"].append(row)
        torch.cuda.empty_cache()


def bandwidth(block: Block, row: dict[str, Any], name: str) -> str:
    """Share of the copy bandwidth a kernel reaches on its fewest bytes."""
    size = 2 * block.batch * block.channels * block.size**2
    out = {"forward": 0.0, "backward": 1.0, "tail": 0.25 if block.pool else 1.0}[name] * size
    return f"{row[name]:8.1f} {(size + out) / row[name] / 1e3:6.0f} {(size + out) / row[name] * 1e6 / PEAK:4.0%}"


def worst(rows: list[dict[str, Any]], name: str) -> float:
    """The largest error; one that is no number is infinite."""
    return max(math.inf if math.isnan(row[name]) else row[name] for row in rows if name in row)


def print_tables(report: dict[str, Any]) -> None:
    """One line a block, last, so that the end of the output is the result."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in report.get("checks", []):
        layout = "channels_last" if row["channels_last"] else "contiguous"
        groups.setdefault(f"{row['dtype']:15} {layout:13}", []).append(row)
    for row in report.get("blocks", []):
        groups.setdefault(f"{row['dtype']:15} {'whole blocks':13}", []).append(row)
    for row in report.get("edges", []):
        groups.setdefault(f"{row['dtype']:15} {row['kind']:13}", []).append(row)
    for title, rows in groups.items():
        names = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, float))
        text = "  ".join(f"{name} {worst(rows, name):.1e}" for name in names)
        print(f"{len(rows)} rows, {sum(not row['ok'] for row in rows)} wrong, worst error {title} {text}")
    if "times" not in report:
        return
    print(f"{'us, GB/s, share':28} {'forward':>20} {'backward':>20} {'tail':>20} {'eager':>8} {'compiled':>8} "
          f"{'ratio':>5} {'eager tail':>10}")  # fmt: skip
    for block, row in zip(BLOCKS, report["times"], strict=True):
        if "error" in row:
            print(f"{block!s:28} {row['error']}")
            continue
        cells = " ".join(bandwidth(block, row, name) for name in ("forward", "backward", "tail"))
        ratio = row["eager"] / (row["forward"] + row["backward"])
        compiled = f"{row['compiled']:8.1f}" if "compiled" in row else f"{'-':>8}"
        print(f"{block!s:28} {cells} {row['eager']:8.1f} {compiled} {ratio:5.1f} {row['eager_tail']:10.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=("check", "time"), help="leave the other half out")
    parser.add_argument(
        "--sweep", nargs="*", metavar="RECIPE", help="time launch shapes instead (vgg8, vgg16-224, ...)"
    )
    parser.add_argument("--seconds", type=float, default=110, help="no torch.compile timing after this long")
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/kernels-<gpu>-...)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device here: the interpreter's tests are tests/test_kernels.py")
    begin = time.monotonic()
    report = describe()
    fine = True
    if args.sweep is not None:
        report["sweep"] = run_sweep(tuple(args.sweep or ("vgg8", "vgg16-64")))
    else:
        if args.only != "time":
            fine = run_checks(report)
            print(f"checked after {time.monotonic() - begin:.0f} s", flush=True)
        if args.only != "check":
            for result in run_all(build, BLOCKS):
                if isinstance(result, Exception):
                    print("build failed:", result, flush=True)
            run_times(report, begin + args.seconds)
    report["seconds"] = round(time.monotonic() - begin, 1)
    gpu = report["gpu"].replace(" ", "-").lower()
    kind = "kernels" if args.sweep is None else "-".join(["sweep", *args.sweep])
    default = Path(__file__).parent / "results" / f"{kind}-{gpu}-torch{torch.__version__.split('+')[0]}.json"
    out = args.out or default
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print_tables(report)
    print(f"{'all checks passed' if fine else 'CHECKS FAILED'}, {report['seconds']} s, {out}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
