"""Block parallel and data parallel on a CPU: speed over one process, and bytes that cross per step.

    python benchmarks/stages.py                        about ten minutes on two free cores
    python benchmarks/stages.py --steps 2 --rounds 1 --width 0.125

Speed: a strict VGG-8 step on CIFAR-shaped noise, one process with one thread against two stages with one thread each,
in turns; the units are measured first and the planner chooses the cut. Other work on the machine slows the stages more
than the one process, so the load average stands beside every round, and the processor seconds per step of every
process, which depend on it less.
Bytes: payload handed to the communication library in one step, by each process; of DistributedDataParallel, which
trains the same blocks end to end, what its buckets and its broadcast of buffers hold.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bicovg.bench_stages import ask_processes, predict
from bicovg.config import Config, override
from bicovg.networks import vgg8
from bicovg.recipes import get_recipe
from bicovg.runlog import describe_environment

RESULTS = Path(__file__).parent / "results"


def make_config(args: argparse.Namespace) -> Config:
    changes = {
        "train.batch_size": args.batch,
        "train.threads": 1,
        "train.device": "cpu",
        "train.engine": "eager",
        "model.width": args.width,
        "data.name": "synthetic",
    }
    return override(get_recipe("cifar100-bicovg"), changes)


def ask_blocks(config: Config, processes: int, steps: int, blocks: int = 1) -> list[dict[str, Any]]:
    return ask_processes({"do": "train", "config": asdict(config), "steps": steps, "blocks": blocks}, processes)


def measure_speed(config: Config, args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of one process and of two stages, in turns."""
    units = ask_processes({"do": "units", "config": asdict(config)}, 1)[0]
    plan = predict(units, 2)
    staged = override(config, {"train.stages": 2, "train.cuts": tuple(plan["cuts"])})
    rounds = []
    for _ in range(args.rounds):
        load = os.getloadavg()[0]
        speeds, busy = {}, {}
        for name, chosen, processes in (("one_process", config, 1), ("two_stages", staged, 2)):
            answers = ask_blocks(chosen, processes, args.steps)
            speeds[name] = round(args.batch * args.steps / max(answer["seconds"][0] for answer in answers), 2)
            busy[name] = [round(answer["cpu_seconds_per_step"], 3) for answer in answers]
        speedup = round(speeds["two_stages"] / speeds["one_process"], 3)
        rounds.append({**speeds, "speedup": speedup, "cpu_seconds_per_step": busy, "load": load})
        print(json.dumps(rounds[-1]), flush=True)
    return {
        "units": units,
        "plan": plan,
        "rounds": rounds,
        "median_speedup": statistics.median(turn["speedup"] for turn in rounds),
        "best_speedup": max(turn["speedup"] for turn in rounds),
        "median_speedup_by_cpu_seconds": statistics.median(by_cpu_seconds(turn) for turn in rounds),
    }


def by_cpu_seconds(turn: dict[str, Any]) -> float:
    """What two free cores would give: the one process's work over that of the busier stage."""
    busy = turn["cpu_seconds_per_step"]
    return round(float(busy["one_process"][0] / max(busy["two_stages"])), 3)


def measure_bytes(config: Config) -> dict[str, Any]:
    """Payload per step and process of both modes, and of DistributedDataParallel on the same backbone."""
    small = override(config, {"train.batch_size": 4, "model.width": 1.0})
    units = ask_processes({"do": "units", "config": asdict(small)}, 1)[0]
    cuts = predict(units, 2)["cuts"]
    staged = override(small, {"train.stages": 2, "train.cuts": tuple(cuts)})
    shares = [answer["bytes_per_step"] for answer in ask_blocks(small, 2, 2)]
    stages = [answer["bytes_per_step"] for answer in ask_blocks(staged, 2, 2)]
    return {
        "data_parallel_2": shares,
        "block_parallel_2": {"batch": 4, "cut": cuts, "bytes": stages, "bytes_per_image": (stages[0] - 4) / 4},
        "ddp": count_ddp_bytes(),
    }


def count_ddp_bytes() -> dict[str, int]:
    """What DistributedDataParallel reduces and broadcasts in one end-to-end step."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = {}
    for name, options in (("one_exit", {}), ("exits_at_every_block", {"exits": "all"})):
        net = vgg8(100, scope="end-to-end", **options)
        wrapped = torch.nn.parallel.DistributedDataParallel(net)
        counted: list[int] = []

        def hook(
            _: object, bucket: dist.GradBucket, counted: list[int] = counted
        ) -> torch.futures.Future[torch.Tensor]:
            counted.append(bucket.buffer().nbytes)
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        wrapped.register_comm_hook(None, hook)
        wrapped(torch.randn(4, 3, 32, 32)).sum().backward()
        found[name] = sum(counted) + sum(buffer.nbytes for buffer in net.buffers())
    dist.destroy_process_group()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="block parallel and data parallel on a CPU")
    parser.add_argument("--steps", type=int, default=15, help="steps in a timed block")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=RESULTS / f"stages-cpu-torch{torch.__version__.split('+')[0]}.json")
    args = parser.parse_args()
    config = make_config(args)
    speed, traffic = measure_speed(config, args), measure_bytes(config)
    environment = describe_environment("cpu", 1)
    environment["command"] = " ".join(["python", "benchmarks/stages.py", *sys.argv[1:]])
    date = time.strftime("%Y-%m-%d", time.gmtime())
    result = {"date": date, "environment": environment, "batch": args.batch, "width": args.width}
    args.out.write_text(json.dumps({**result, "speed": speed, "bytes_per_step": traffic}, indent=2) + "\n")
    print(f"speed-up of two stages, median of {args.rounds}: {speed['median_speedup']:.2f}x; written: {args.out}")


if __name__ == "__main__":
    main()
