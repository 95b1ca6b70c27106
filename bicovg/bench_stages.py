"""``bicovg bench RECIPE --stages 2 4 8``: what blocks in parallel would gain, and, where devices exist, what they do.

Every unit's part of a step is timed in one process; the planner balances those times, and the prediction is the whole
over the slowest stage. Where the machine has a GPU, or a CPU core, for every stage, the pipeline itself is measured
against one process, in turns. On a CPU every process has one thread. No torch.
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

from bicovg.bench_report import heading, make_table, show
from bicovg.config import Config, override
from bicovg.errors import UserError
from bicovg.partition import plan_cuts, predict_speedup

Row = dict[str, Any]


def run_stages(config: Config, args: argparse.Namespace, machine: dict[str, Any]) -> int:
    """Measure the units, print and, with ``--out``, write the table."""
    config = one_thread(override(config, {"train.engine": "eager"}), machine)
    units = ask_processes({"do": "units", "config": asdict(config)}, 1)[0]
    rows = [predict(units, stages) for stages in args.stages if stages <= len(units["seconds"])]
    devices = machine["gpus"] if machine["device"] == "cuda" else os.cpu_count() or 1
    for row in rows:
        row["measured"] = measure(config, row, args) if row["stages"] <= devices else None
    print_rows(config, units, rows, devices)
    if args.out:
        from pathlib import Path

        from bicovg.runlog import write_json

        write_json(Path(args.out), {"recipe": config.recipe, **machine, "units": units, "rows": rows})
        print(f"written: {args.out}")
    return 0


def one_thread(config: Config, machine: dict[str, Any]) -> Config:
    return override(config, {"train.threads": 1}) if machine["device"] == "cpu" else config


def predict(units: dict[str, Any], stages: int) -> Row:
    cuts = plan_cuts(units["seconds"], stages, units["pooled"])
    return {
        "stages": stages,
        "cuts": list(cuts),
        "predicted": predict_speedup(units["seconds"], cuts),
        "bytes_per_batch": [units["bytes"][cut - 1] for cut in cuts],
    }


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
    total = sum(units["seconds"])
    shares = " ".join(f"{100 * seconds / total:.1f}" for seconds in units["seconds"])
    table = make_table(f"{heading(config)}: blocks in parallel", ["stages", "begin with unit", "predicted", "measured"])
    for row in rows:
        measured = row["measured"]
        found = f"{measured['speedup']:.2f}x" if measured else f"needs {row['stages']} devices, there are {devices}"
        cuts = " ".join(map(str, (0, *row["cuts"])))
        table.add_row(str(row["stages"]), cuts, f"{row['predicted']:.2f}x", found)
    show(table)
    print(f"one step in one process: {1e3 * total:.1f} ms; share of each unit in percent: {shares}")
