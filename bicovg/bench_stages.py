"""``bicovg bench RECIPE --stages 2 4 8``: what blocks in parallel would gain, and, where devices exist, what they do.

Every unit's part of a step is timed in one process; the planner balances those times, and the prediction is the whole
over the slowest stage. Stages launch their kernels one by one, so on a GPU that can take longer than the kernels
themselves: a second prediction, from the device's times alone, is for stages that would not wait for launches.

Where the machine has a GPU, or a CPU core, for every stage, the pipeline itself is measured against one process, in
turns. On a CPU every process has one thread. No torch.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from bicovg.bench_report import describe_run, heading, make_table, show
from bicovg.config import Config, override
from bicovg.errors import UserError
from bicovg.partition import plan_cuts, predict_speedup

Row = dict[str, Any]


def run_stages(config: Config, args: argparse.Namespace, machine: dict[str, Any]) -> int:
    """Measure the units, print and, with ``--out``, write the table."""
    config = one_thread(override(config, {"train.engine": "eager"}), machine)
    units = ask_processes({"do": "units", "config": asdict(config)}, 1)[0]
    count = len(units["seconds"])
    rows = [predict(units, stages) for stages in args.stages if stages <= count]
    if not rows:
        raise UserError(f"--stages {min(args.stages)} is more than the network has units, {count}")
    for stages in (stages for stages in args.stages if stages > count):
        print(f"{stages} stages are left out: the network has {count} units")
    devices = machine["gpus"] if machine["device"] == "cuda" else os.cpu_count() or 1
    for row in rows:
        row["measured"] = measure(config, row, args) if row["stages"] <= devices else None
    print_rows(config, units, rows, devices)
    if args.out:
        from pathlib import Path

        from bicovg.runlog import write_json

        about = {"recipe": config.recipe, "precision": config.train.precision, **describe_run(machine)}
        write_json(Path(args.out), {**about, "units": units, "rows": rows})
        print(f"written: {args.out}")
    return 0


def one_thread(config: Config, machine: dict[str, Any]) -> Config:
    return override(config, {"train.threads": 1}) if machine["device"] == "cpu" else config


def predict(units: dict[str, Any], stages: int) -> Row:
    cuts = plan_cuts(units["seconds"], stages, units["pooled"])
    row: Row = {
        "stages": stages,
        "cuts": list(cuts),
        "predicted": predict_speedup(units["seconds"], cuts),
        "bytes_per_batch": [units["bytes"][cut - 1] for cut in cuts],
    }
    if units["device_seconds"]:
        row["device_cuts"] = list(plan_cuts(units["device_seconds"], stages, units["pooled"]))
        row["device_predicted"] = predict_speedup(units["device_seconds"], row["device_cuts"])
    return row


def measure(config: Config, row: Row, args: argparse.Namespace) -> dict[str, Any]:
    """Images per second of one process and of the stages, in turns."""
    staged = override(config, {"train.stages": row["stages"], "train.cuts": tuple(row["cuts"])})
    rounds = []
    for _ in range(args.repeats):
        alone = images_per_second(config, 1, args.steps)
        together = images_per_second(staged, row["stages"], args.steps)
        rounds.append({"one_process": alone, "stages": together, "speedup": together / alone})
    return {"rounds": rounds, "speedup": statistics.median(turn["speedup"] for turn in rounds)}


def images_per_second(config: Config, processes: int, steps: int) -> float:
    request = {"do": "train", "config": asdict(config), "steps": steps, "blocks": 1}
    answers = ask_processes(request, processes)
    slowest: float = max(answer["seconds"][0] for answer in answers)
    return config.train.batch_size * steps / slowest


def ask_processes(request: dict[str, Any], processes: int) -> list[dict[str, Any]]:
    """What each of ``processes`` new processes answers, by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(processes):
        announced = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in announced.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "bicovg.bench_pipeline", json.dumps(request)]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    answers = []
    for rank, process in enumerate(started):
        text = process.communicate()[0].strip()
        if process.returncode or not text:
            raise UserError(f"process {rank} of {processes} failed with {process.returncode}: its words stand above")
        answers.append(json.loads(text.splitlines()[-1]))
    return answers


def print_rows(config: Config, units: dict[str, Any], rows: list[Row], devices: int) -> None:
    on_gpu = bool(units["device_seconds"])
    extra = ["by device time alone", "begin with unit"] if on_gpu else []
    columns = ["stages", "begin with unit", "predicted", *extra, "measured"]
    table = make_table(f"{heading(config)}: blocks in parallel", columns)
    for row in rows:
        measured = row["measured"]
        found = f"{measured['speedup']:.2f}x" if measured else f"needs {row['stages']} devices, there are {devices}"
        cells = [f"{row['device_predicted']:.2f}x", begins(row["device_cuts"])] if on_gpu else []
        table.add_row(str(row["stages"]), begins(row["cuts"]), f"{row['predicted']:.2f}x", *cells, found)
    show(table)
    print(f"one step in one process: {describe_times(units['seconds'])}")
    if on_gpu:
        print(f"by device time alone: {describe_times(units['device_seconds'])}")


def begins(cuts: list[int]) -> str:
    return " ".join(map(str, (0, *cuts)))


def describe_times(seconds: list[float]) -> str:
    shares = " ".join(f"{100 * unit / sum(seconds):.1f}" for unit in seconds)
    return f"{1e3 * sum(seconds):.1f} ms; share of each unit in percent: {shares}"
