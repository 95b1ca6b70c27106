"""What goodness takes of a strict step, and why its stand-ins must not learn: each step in turn, with clock and power.

    python benchmarks/share.py tiny-imagenet-bicovg imagenet100-bicovg

One process, one GPU. ``learning`` is the recipe's learning rate, ``frozen`` a rate of 0 (see ``bicovg.bench_cases``).
Times are medians over blocks of steps; gamma and beta are the first block's means after them.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from machine import describe

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bicovg.bench_cases import BARE, CONSTANT, FROZEN, STRICT, make_cases
from bicovg.bench_worker import Session
from bicovg.config import override
from bicovg.recipes import get_recipe


class Meter:
    """Clock and power of the GPU, sampled while something runs; nothing where there is no nvidia-smi."""

    COMMAND = ("nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "100")

    def __enter__(self) -> "Meter":
        try:
            self.process = subprocess.Popen(self.COMMAND, stdout=subprocess.PIPE, text=True)
        except OSError:
            self.process = None
        return self

    def __exit__(self, *_: object) -> None:
        text = ""
        if self.process is not None:
            self.process.terminate()
            text = self.process.communicate()[0]
        rows = [[float(cell) for cell in line.split(",")] for line in text.splitlines() if line.count(",") == 1]
        rows = rows[len(rows) // 4 :]  # the first ones show what was before
        self.found = {
            name: statistics.median(row[i] for row in rows) if rows else None for i, name in enumerate(("mhz", "watts"))
        }


def measure(recipe: str, kind: str, frozen: bool, args: argparse.Namespace) -> dict[str, Any]:
    config = override(get_recipe(recipe), {"data.name": "synthetic", "train.precision": args.precision})
    case = make_cases(config)[kind]
    rates = FROZEN if frozen else {"optim.lr": config.optim.lr, "optim.lr_min": config.optim.lr_min}
    case = replace(case, config=override(case.config, rates))
    session = Session({**case.as_json(), "engine": args.engine, "fraction": None})
    session.warm_up(5)
    with Meter() as meter:
        blocks = session.time_blocks(args.steps, args.blocks)["milliseconds"]
    norm = next(module for module in session.net.modules() if isinstance(module, torch.nn.BatchNorm2d))
    row = {
        "recipe": recipe,
        "step": kind,
        "weights": "frozen" if frozen else "learning",
        "milliseconds": statistics.median(blocks),
        "blocks": blocks,
        **meter.found,
        "gamma": norm.weight.mean().item(),
        "beta": norm.bias.mean().item(),
    }
    del session
    gc.collect()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--steps", type=int, default=80, help="of a block")
    parser.add_argument("--blocks", type=int, default=14)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--engine", default="graph")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for recipe in args.recipes:
        for kind, frozen in (
            (STRICT, False),
            (STRICT, True),
            (CONSTANT, True),
            (CONSTANT, False),
            (BARE, True),
            (STRICT, False),
        ):
            rows.append(measure(recipe, kind, frozen, args))
            shown = {key: value for key, value in rows[-1].items() if key != "blocks"}
            print(json.dumps(shown), flush=True)
    args.out.write_text(json.dumps(describe() | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
