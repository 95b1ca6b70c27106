"""``bicovg bench RECIPE``: speed and memory of a recipe's backbone, trained locally and end to end.

Each configuration runs in a fresh process (``bicovg.bench_worker``). With ``--ab``, the processes of several
configurations stay alive at once and take turns, block of steps by block of steps, so that a ratio of two speeds
is not a ratio of two moments.
"""

import argparse
import math
import random
import statistics
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import takewhile
from typing import Any

from bicovg.bench_cases import BARE, BASELINE, CONSTANT, FAL, STRICT, Case, make_cases, pick_cases
from bicovg.bench_client import OUT_OF_TIME, Answer, Deadline, Worker
from bicovg.bench_report import (
    describe_case,
    find_timed,
    merge_memory,
    merge_results,
    print_rows,
    print_side_by_side,
    results_path,
)
from bicovg.bench_turns import Round, Side, compare_sides
from bicovg.config import Config, override, walk_settings
from bicovg.errors import UserError
from bicovg.roofline import describe_roofline

ENGINE_CHOICES = ("auto", "fastest", "graph", "graph-plain", "graph-inductor", "compiled", "eager")
STEADY_STEPS = {"cuda": 18, "cpu": 1}  # the steady peak is taken over steps 3 to 20 of a GPU
TURNS = (STRICT, BASELINE, FAL, CONSTANT, BARE)
SLACK = 1.02  # over what a row held, as another process may search out other algorithms
AT_ONCE, PARTS = 8, 64  # of the search of the smallest memory: processes, and the parts of the range it tells apart
CONTEXT = 1 << 30  # bytes a process needs beside what torch allocates
Row = dict[str, Any]


def add_parser(commands: Any) -> argparse.ArgumentParser:
    text = "measure speed and memory of a recipe's backbone, local against end-to-end"
    parser: argparse.ArgumentParser = commands.add_parser("bench", help=text, description=text, allow_abbrev=False)
    parser.add_argument("recipe", metavar="RECIPE", help="a name from `bicovg recipes`")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these configurations alone")
    parser.add_argument(
        "--ab",
        nargs="*",
        metavar="NAME",
        help="measure configurations side by side, taking turns, each in its fastest engine "
        f"(default: {' '.join(TURNS)})",
    )
    parser.add_argument("--engine", default="auto", choices=ENGINE_CHOICES, help="auto is what training would use")
    parser.add_argument("--steps", type=int, default=20, help="training steps in a timed block")
    parser.add_argument("--repeats", type=int, default=10, help="timed blocks of each configuration")
    parser.add_argument("--batch", type=int, help="images per step (default: the recipe's)")
    parser.add_argument("--size", type=int, help="side of the images (default: the recipe's)")
    text = "instead: what this many stages of units would gain on as many devices, predicted and, if possible, measured"
    parser.add_argument("--stages", type=int, nargs="+", metavar="N", help=text)
    parser.add_argument("--smallest-memory", action="store_true", help="search the smallest memory that still runs")
    text = "memory alone, which may be measured beside other work; speeds that the results have stay"
    parser.add_argument("--untimed", action="store_true", help=text)
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="stop cleanly with what there is")
    parser.add_argument("--out", metavar="JSON", help="default benchmarks/results/<gpu>-torch<version>-<recipe>.json")
    for setting in walk_settings(Config()):
        parser.add_argument(f"--{setting.path}", metavar="X", default=argparse.SUPPRESS, help=setting.help)
    return parser


def run(config: Config, args: argparse.Namespace) -> int:
    """Measure, print and write; exit code 1 if nothing could be measured."""
    if args.stages and min(args.stages) < 2:
        raise UserError(f"--stages {min(args.stages)} must be at least 2")
    for flag in ("steps", "repeats"):
        if getattr(args, flag) < 1:
            raise UserError(f"--{flag} {getattr(args, flag)} must be at least 1")
    if args.untimed and (args.ab is not None or args.stages or args.engine == "fastest"):
        raise UserError("--untimed measures memory alone; --ab, --stages and --engine fastest, speeds: choose one")
    if config.train.micro_batches > 1:
        own = "bench has configurations of its own for that, such as --only strict-accumulate-4"
        raise UserError(f"--train.micro_batches {config.train.micro_batches} is not for bench: {own}")
    changes = {"train.batch_size": args.batch, "data.image_size": args.size, "data.name": "synthetic"}
    config = override(config, {path: value for path, value in changes.items() if value is not None})
    if args.stages:
        from bicovg.bench_stages import run_stages

        return run_stages(config, args, Bench(args, config.train.device).machine)
    cases = make_cases(config)
    with closing(Bench(args, config.train.device)) as bench:
        path = results_path(args.out, bench.machine, config.recipe)
        if args.ab is None:
            chosen = pick_cases(cases, args.only)
            if args.untimed:
                find_timed(path, config.recipe, [{**describe_case(c), "engine_asked": args.engine} for c in chosen])
            rows = bench.measure_all(chosen)
            written = {"rows": rows}
            print_rows(rows, config)
        else:
            table = bench.measure_side_by_side(pick_cases(cases, args.ab or TURNS))
            rows, written = table["sides"], {"side_by_side": [table]}
            print_side_by_side(table, config)
    (merge_memory if args.untimed else merge_results)(path, config, bench.machine, **written)
    print(f"written: {path}")
    return 0 if any(row["status"] == "ok" for row in rows) else 1


class Bench:
    """The measurements of one command."""

    def __init__(self, args: argparse.Namespace, device: str) -> None:
        self.args, self.deadline = args, Deadline(args.time_limit)
        self.ahead: deque[Worker] = deque()
        with Worker(Deadline(None)) as worker:
            self.machine = worker.ask({"do": "describe", "device": device})
        if "error" in self.machine:
            raise UserError(f"no worker could be started: {self.machine['error']}")

    def start_ahead(self, workers: int) -> None:
        """Let workers import, most of what a row takes, while another measures; not where it measures this CPU."""
        while self.machine["device"] == "cuda" and len(self.ahead) < workers:
            self.ahead.append(Worker(self.deadline))

    def take_worker(self) -> Worker:
        return self.ahead.popleft() if self.ahead else Worker(self.deadline)

    def close(self) -> None:
        """End the workers that were not needed."""
        while self.ahead:
            self.ahead.popleft().kill()

    def candidates(self, case: Case) -> tuple[str, ...]:
        """Engines to choose the fastest from; backprop is also tried without a single kernel of ours."""
        if self.machine["device"] == "cpu":
            return ("eager",)
        return ("graph", "graph-inductor") if case.config.model.scope == "end-to-end" else ("graph",)

    def build(self, worker: Worker, case: Case, engine: str, fraction: float | None = None) -> Answer:
        steady = STEADY_STEPS[self.machine["device"]]
        return worker.ask(
            {"do": "build", **case.as_json(), "engine": engine, "fraction": fraction, "steady_steps": steady}
        )

    def measure_all(self, cases: list[Case]) -> list[Row]:
        """Every case in turn, each in a fresh process."""
        rows = []
        for case in cases:
            if self.deadline.passed():
                rows.append(self.row(case, self.args.engine, {"error": OUT_OF_TIME}))
                continue
            rows.append(self.measure(case))
            print(summary_line(rows[-1]), flush=True)
        return rows

    def measure(self, case: Case) -> Row:
        """One row, in the engine asked for or in the fastest."""
        engines = self.candidates(case) if self.args.engine == "fastest" else (self.args.engine,)
        rows = [self.measure_in(case, engine) for engine in engines]
        best = max(rows, key=lambda row: row["images_per_second"]["median"] or 0.0)
        best["tried"] = {row["engine_asked"]: row["images_per_second"]["median"] or row["reason"] for row in rows}
        if self.args.smallest_memory and self.machine["device"] == "cuda" and best["status"] == "ok":
            best["memory"]["smallest_bytes"] = self.smallest_memory(case, best)
        return best

    def measure_in(self, case: Case, engine: str) -> Row:
        with self.take_worker() as worker:
            self.start_ahead(1)
            built = self.build(worker, case, engine)
            if "error" in built or self.args.untimed:
                return self.row(case, engine, built)
            timed = worker.ask({"do": "time", "steps": self.args.steps, "repeats": self.args.repeats})
            return self.row(case, engine, {**built, **timed})

    def smallest_memory(self, case: Case, row: Row) -> int | None:
        """Bytes of the smallest share of the device's memory in which a fresh process still trains.

        Several shares are tried at once, as many as fit beside each other: all that the row held and some below it;
        then some between the smallest that was enough and the next. None where the time did not suffice, or where not
        even all that the row held was enough.
        """
        memory, total = row["memory"], self.machine["gpu_bytes"]
        held = max(memory["first_steps_bytes"], memory["reserved_bytes"])
        low, high = float(memory["steady_bytes"]) / 2, float(min(total, held * SLACK))
        exact, at_once = 1.001 * (high - low) / PARTS, max(1, min(AT_ONCE, int(total // (high + CONTEXT))))
        sizes = [high, *between(low, high, at_once - 1)]
        while True:
            built = self.build_at_once(case, row["engine_asked"], [size / total for size in sizes])
            if any(answer.get("error") == OUT_OF_TIME for answer in built):
                return None
            enough = sum(1 for _ in takewhile(lambda answer: "error" not in answer, built))
            if sizes[0] == high and not enough:
                return None
            low = sizes[enough] if enough < len(sizes) else low
            high = sizes[enough - 1] if enough else high
            if high - low <= exact:
                return round(high)
            sizes = between(low, high, at_once)

    def build_at_once(self, case: Case, engine: str, fractions: list[float]) -> list[Answer]:
        """One process for each share of the device's memory, all at the same time: nothing is timed here."""
        self.start_ahead(len(fractions))
        with ExitStack() as stack, ThreadPoolExecutor(len(fractions)) as pool:
            workers = [stack.enter_context(self.take_worker()) for _ in fractions]
            return list(pool.map(lambda worker, share: self.build(worker, case, engine, share), workers, fractions))

    def row(self, case: Case, engine: str, answer: Answer) -> Row:
        """A row of the table from what the worker said, whatever it said."""
        batch = case.config.train.batch_size
        blocks = [batch / ms * 1e3 for ms in answer.get("milliseconds", [])]
        failed = "error" in answer
        median = statistics.median(blocks) if blocks and not failed else None
        return {
            **describe_case(case),
            "status": "failed" if failed else "ok",
            "reason": answer.get("error"),
            "engine_asked": engine,
            "engine": answer.get("engine"),
            "steps": self.args.steps,
            "images_per_second": spread(blocks, median),
            "milliseconds_per_step": None if median is None else batch / median * 1e3,
            "memory": {**dict.fromkeys(MEMORY_FIELDS), **answer.get("memory", {})},
            "roofline": describe_roofline(case.config, self.machine["gpu"], None if case.stand_in else median),
            "parameters": answer.get("parameters"),
            "warmup_seconds": answer.get("warmup_seconds"),
            "recompiled": answer.get("recompiled"),
            "finite": answer.get("finite"),
        }

    def measure_side_by_side(self, cases: list[Case]) -> dict[str, Any]:
        """All cases alive at once; first each one's fastest engine, then blocks of steps in turn."""
        self.start_ahead(sum(len(self.engines(case)) for case in cases))
        with ExitStack() as stack:
            sides = [self.fastest_side(case, stack) for case in cases]
            rounds: list[Round] = []
            while len(rounds) < self.args.repeats and not self.deadline.passed():
                # in another order each time: no side always follows the same one, which has heated the device
                order = random.Random(len(rounds)).sample(sides, len(sides))
                times = {side.case.name: side.time_block(self.args.steps) for side in order}
                rounds.append({name: ms for name, ms in times.items() if ms is not None})
        rows = [self.side_row(side, rounds) for side in sides]
        return {"sides": rows, "rounds": len(rounds), **compare_sides(rounds)}

    def engines(self, case: Case) -> tuple[str, ...]:
        """To be tried for a side: the one asked for, or all that could be the fastest."""
        asked = self.args.engine
        return self.candidates(case) if asked in ("auto", "fastest") else (asked,)

    def fastest_side(self, case: Case, stack: ExitStack) -> Side:
        """Build a case in every candidate engine, keep the process of the fastest alive."""
        sides = []
        for engine in self.engines(case):
            worker = stack.enter_context(self.take_worker())
            sides.append(Side(case, engine, worker, self.build(worker, case, engine)))
            sides[-1].time_block(self.args.steps, repeats=3)
        best = min(sides, key=lambda side: side.milliseconds or math.inf)
        best.tried = {side.engine: side.images_per_second() or side.error for side in sides}
        for side in sides:
            if side is not best:
                side.worker.close()
        return best

    def side_row(self, side: Side, rounds: list[Round]) -> Row:
        """A side as a row of its own, with the speeds of the rounds it took part in."""
        times = [turn[side.case.name] for turn in rounds if side.case.name in turn]
        answer = {**side.built, **side.timed, "milliseconds": times}
        if not times:
            answer["error"] = side.error or OUT_OF_TIME
        return {**self.row(side.case, side.engine, answer), "tried": side.tried}


def between(low: float, high: float, count: int) -> list[float]:
    """``count`` values inside a range, evenly, the largest first."""
    return [high - (high - low) * (place + 1) / (count + 1) for place in range(count)]


MEMORY_FIELDS = (
    "steady_bytes",
    "first_steps_bytes",
    "reserved_bytes",
    "smallest_bytes",
    "resident_bytes",
    "saved_bytes",
    "data_bytes",
)


def spread(blocks: list[float], median: float | None) -> dict[str, Any]:
    """Median and extremes of the blocks' speeds, with every block's."""
    return {
        "median": median,
        "min": min(blocks, default=None),
        "max": max(blocks, default=None),
        "blocks": blocks,
    }


def summary_line(row: Row) -> str:
    speed = row["images_per_second"]["median"]
    found = f"{speed:.0f} img/s, engine {row['engine']}" if speed else f"engine {row['engine']}, not timed"
    return f"{row['name']}: {found if row['status'] == 'ok' else row['reason']}"
