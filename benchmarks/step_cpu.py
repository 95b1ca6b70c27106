"""Steps per second and peak memory of strict, hgb and end-to-end training on a CPU.

    python benchmarks/step_cpu.py                  every case, each in a process of its own, some minutes
    python benchmarks/step_cpu.py --steps 1 --repeats 1

Two families of nets: VGG-8 at a quarter of its width on CIFAR-shaped noise, and nets of constant width with 4, 8 and
16 blocks, which show how memory goes with depth. ``saved_mb`` is what autograd keeps for the backward pass at its
peak (of a checkpointed net without the one block that is being computed again); ``resident_mb`` is how much the
process grew over what it held before the first step, at its peak. Other work on the machine slows the steps; the load
average before the start is written down, and with one thread ``cpu_seconds_per_step`` depends on it little.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bicovg import LocalNetwork, local_network, local_step, vgg8
from bicovg.profiling import peak_memory, track_saved_bytes
from bicovg.runlog import describe_environment

RESULTS = Path(__file__).parent / "results"
CPU = torch.device("cpu")
BATCH, CLASSES = 64, 100
SCOPES: dict[str, dict[str, Any]] = {
    "strict": {},
    "hgb-2": {"scope": "hgb", "group_size": 2},
    "hgb-4": {"scope": "hgb", "group_size": 4},
    "end-to-end": {"scope": "end-to-end"},
    "end-to-end-checkpointed": {"scope": "end-to-end", "checkpointing": True},
}
CASES = {
    "vgg8": [("strict", "summed"), ("hgb-2", "summed"), *[(scope, "interleaved") for scope in SCOPES]],
    **{f"depth-{depth}": [(scope, "interleaved") for scope in ("strict", "end-to-end")] for depth in (4, 8, 16)},
}


def build(family: str, scope: str) -> tuple[LocalNetwork, torch.Tensor]:
    """The net of a case and a batch of noise of its shape."""
    if family == "vgg8":
        return vgg8(CLASSES, width=0.25, **SCOPES[scope]), torch.randn(BATCH, 3, 32, 32)
    depth = int(family.removeprefix("depth-"))
    return local_network(CLASSES, (64,) * depth, in_channels=64, **SCOPES[scope]), torch.randn(BATCH, 64, 16, 16)


def measure(family: str, scope: str, schedule: str, steps: int, repeats: int) -> dict[str, Any]:
    """One case, in this process: memory of the first steps, then the median speed over blocks of steps."""
    torch.manual_seed(0)
    net, images = build(family, scope)
    labels, keys = torch.arange(BATCH) % CLASSES, torch.arange(BATCH)
    optimizers = [torch.optim.SGD(unit.parameters(), 0.01, momentum=0.9) for unit in net.units]

    def step() -> None:
        local_step(net, optimizers, images, labels, schedule, keys=keys)

    before = peak_memory(CPU)
    step()
    step()
    grown = peak_memory(CPU) - before
    with track_saved_bytes(exclude=net) as saved:
        step()
    speeds, costs = [], []
    for _ in range(repeats):
        begun, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        speeds.append(steps / (time.perf_counter() - begun))
        costs.append((time.process_time() - busy) / steps)
    return {
        "family": family,
        "scope": scope,
        "schedule": schedule,
        "steps_per_second": round(statistics.median(speeds), 3),
        "all_blocks": [round(speed, 3) for speed in speeds],
        "cpu_seconds_per_step": round(statistics.median(costs), 4),
        "saved_mb": round(saved.peak / 1e6, 3),
        "resident_mb": round(grown / 1e6, 1),
    }


def measure_apart(case: tuple[str, str, str], args: argparse.Namespace) -> dict[str, Any]:
    """The same in a fresh process, because a process's resident peak never falls."""
    command = [sys.executable, __file__, "--case", *case]
    for option in ("steps", "repeats", "threads"):
        command += [f"--{option}", str(getattr(args, option))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="steps per second and peak memory on a CPU")
    parser.add_argument("--steps", type=int, default=4, help="steps in a timed block")
    parser.add_argument("--repeats", type=int, default=5, help="timed blocks")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / f"cpu-torch{torch.__version__.split('+')[0]}.json")
    parser.add_argument("--case", nargs=3, metavar=("FAMILY", "SCOPE", "SCHEDULE"), help="one case, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.case:
        print(json.dumps(measure(*args.case, args.steps, args.repeats)))
        return
    load, rows = os.getloadavg()[0], []
    print(f"{'net':9}{'scope':25}{'schedule':13}{'steps/s':>8}{'CPU s/step':>12}{'saved MB':>10}{'resident MB':>13}")
    for family, cases in CASES.items():
        for scope, schedule in cases:
            row = measure_apart((family, scope, schedule), args)
            rows.append(row)
            print(
                f"{family:9}{scope:25}{schedule:13}{row['steps_per_second']:8.2f}"
                f"{row['cpu_seconds_per_step']:12.3f}{row['saved_mb']:10.1f}"
                f"{row['resident_mb']:13.1f}",
                flush=True,
            )
    environment = describe_environment("cpu", torch.get_num_threads())
    environment["command"] = " ".join(["python", "benchmarks/step_cpu.py", *sys.argv[1:]])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    date = time.strftime("%Y-%m-%d", time.gmtime())
    result = {"date": date, "environment": environment, "load_average": load, "batch": BATCH, "rows": rows}
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
