"""Step time of one recipe under several engines, each in a fresh process, with the largest kernels of each.

python benchmarks/engines.py --recipe cifar100-bicovg --modes graph,graph-eager --profile
python benchmarks/engines.py --recipe cifar100-bicovg --modes graph:2,graph:4,graph:4:torch     streams; torch's updates
One more option of a mode: ``search`` has cuDNN try every algorithm it knows.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def measure(recipe: str, mode: str, steps: int, batch: int, profile: bool, overrides: dict) -> dict:
    import torch

    import bicovg.captured
    from bicovg.captured import GraphEngine
    from bicovg.config import override
    from bicovg.data.splits import load_splits, make_loaders
    from bicovg.engine import CompiledEngine, EagerEngine
    from bicovg.optim import make_optimizers
    from bicovg.profiling import peak_memory
    from bicovg.recipes import get_recipe
    from bicovg.trainer import build_on

    torch.backends.cudnn.benchmark = True
    mode, *options = mode.split(":")
    bicovg.captured.FUSED_UPDATES = "torch" not in options
    if "search" in options:
        torch.backends.cudnn.benchmark_limit = 0
    for streams in (int(option) for option in options if option.isdigit()):
        bicovg.captured.LANES = streams
        overrides = {**overrides, "train.overlap": streams > 1}  # 1: small units may still overlap
    config = get_recipe(recipe)
    config = override(config, {"data.name": "synthetic", "train.precision": "bfloat16", **overrides})
    if batch:
        config = override(config, {"train.batch_size": batch})
    device = torch.device("cuda")
    net = build_on(config, device)
    optimizers = make_optimizers(net, config.optim, device)
    loaders = make_loaders(load_splits(config.data), config, device)
    kinds = {
        "eager": lambda *a: EagerEngine(*a),
        "compiled": lambda *a: CompiledEngine(*a),
        "graph": lambda *a: GraphEngine(*a),
        "graph-eager": lambda *a: GraphEngine(*a, compiled=False),
    }
    engine = kinds[mode](net, optimizers, config, loaders["train"])
    began = time.perf_counter()
    per_epoch = len(loaders["train"])

    def run(count: int) -> list[float]:
        marks, done, epoch = [torch.cuda.Event(enable_timing=True)], 0, 0
        marks[0].record()
        while done < count:
            for _ in engine.steps(epoch):
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()
                done += 1
                if done == count:
                    break
            epoch += 1
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]

    run(max(5, per_epoch))
    warm = time.perf_counter() - began
    torch.cuda.reset_peak_memory_stats()
    times = sorted(run(steps))
    median = statistics.median(times)
    result = {
        "recipe": recipe,
        "mode": ":".join([mode, *options]),
        "ms": median,
        "p10_p90": [times[len(times) // 10], times[9 * len(times) // 10]],
        "images_per_second": config.train.batch_size / median * 1e3,
        "peak_bytes": peak_memory(device) - loaders["train"].resident_images.nbytes,
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "warmup_s": warm,
    }
    if profile:
        result["kernels"] = profile_kernels(run)
    return result


def profile_kernels(run) -> list:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as seen:
        run(5)
    rows = [(e.device_time_total / 5, e.count // 5, e.key) for e in seen.key_averages() if e.device_time_total]
    return sorted(rows, reverse=True)[:45]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="cifar100-bicovg")
    parser.add_argument("--modes", default="graph")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--set", default="{}", help="JSON of config overrides")
    parser.add_argument("--out")
    parser.add_argument("--child", action="store_true")
    args = parser.parse_args()
    if args.child:
        row = measure(args.recipe, args.modes, args.steps, args.batch, args.profile, json.loads(args.set))
        print("RESULT " + json.dumps(row))
        return
    for mode in args.modes.split(","):
        words = [sys.executable, __file__, "--child", "--recipe", args.recipe, "--modes", mode]
        words += ["--steps", str(args.steps), "--batch", str(args.batch), "--set", args.set]
        done = subprocess.run(words + ["--profile"] * args.profile, capture_output=True, text=True, env=os.environ)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            print(args.recipe, mode, "FAILED", done.stderr[-3000:], flush=True)
            continue
        row = json.loads(lines[0][7:])
        print(
            f"{row['recipe']:22} {mode:16} {row['ms']:8.3f} ms {row['images_per_second']:9.0f} img/s"
            f"  peak {row['peak_bytes'] / 1e9:.2f} GB without data, reserved {row['peak_reserved'] / 1e9:.2f}"
            f"  warm-up {row['warmup_s']:.0f} s",
            flush=True,
        )
        for microseconds, count, key in row.get("kernels", []):
            print(f"   {microseconds:9.1f} us  x{count:<4} {key[:130]}")
        if args.out:
            with open(args.out, "a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
