"""Whether all engines train alike: 200 steps of each on one CUDA GPU, every exit's losses compared with the eager ones.

    python benchmarks/agree.py digits digits-hgb2 digits-bp --out agree.json
    python benchmarks/agree.py cifar100-bicovg --precision bfloat16 --data-root DATA --out agree.json

The engines add the same numbers in another order (``plain``, without our kernels, also rounds f in bfloat16), and
training amplifies that: the first steps must agree closely, later ones in the mean of 20, as single steps are noisy.
After the third step nothing may be compiled.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from machine import describe

from bicovg.bench_worker import compiled_graphs
from bicovg.captured import GraphEngine
from bicovg.config import Config, override
from bicovg.data.splits import load_splits, make_loaders
from bicovg.engine import CompiledEngine, EagerEngine, PlainEngine
from bicovg.optim import make_optimizers
from bicovg.preparation import build_on
from bicovg.recipes import get_recipe

STEPS, FIRST, MEAN_OF = 200, 5, 20
LIMITS = {"float32": 2e-3, "bfloat16": 2e-2}  # of the first steps' losses
LATER = 1e-2  # of the means of 20 losses
OTHERS = (PlainEngine, CompiledEngine, GraphEngine)


def train(kind: type[EagerEngine], config: Config) -> tuple[Tensor, int]:
    """Losses (STEPS, exits), and graphs compiled after the third step."""
    device = torch.device("cuda")
    net = build_on(config, device)
    loader = make_loaders(load_splits(config.data), config, device)["train"]
    engine = kind(net, make_optimizers(net, config.optim, device), config, loader)
    losses: list[Tensor] = []
    graphs = epoch = 0
    while len(losses) < STEPS:
        for loss in engine.steps(epoch):
            losses.append(loss.clone())
            if len(losses) == 3:
                graphs = compiled_graphs()
            if len(losses) == STEPS:
                break
        epoch += 1
    return torch.stack(losses).cpu(), compiled_graphs() - graphs


def judge(curve: Tensor, eager: Tensor, recompiled: int, precision: str) -> dict[str, Any]:
    """How far a curve (STEPS, exits) is from the eager one at most, and whether that is near enough."""
    mine, wanted = (x.unflatten(0, (-1, MEAN_OF)).mean(dim=1) for x in (curve, eager))
    first, later = ((a - b).abs().max().item() for a, b in ((curve[:FIRST], eager[:FIRST]), (mine, wanted)))
    return {
        "largest_difference_first_steps": first,
        "largest_difference_of_means": later,
        "limits": [LIMITS[precision], LATER],
        "recompiled": recompiled,
        "ok": first <= LIMITS[precision] and later <= LATER and recompiled == 0 and bool(curve.isfinite().all()),
    }


def compare(recipe: str, precision: str, root: str | None) -> dict[str, Any]:
    changes = {"train.device": "cuda", "train.epochs": 9, "train.precision": precision}
    config = override(get_recipe(recipe), changes | ({"data.root": root} if root else {}))
    eager, _ = train(EagerEngine, config)
    means = eager.mean(dim=1).view(-1, MEAN_OF).mean(dim=1).tolist()
    row: dict[str, Any] = {"recipe": recipe, "precision": precision, "eager_means": means}
    for kind in OTHERS:
        curve, recompiled = train(kind, config)
        row[kind.name] = judge(curve, eager, recompiled, precision)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--precision", choices=LIMITS, default="float32")
    parser.add_argument("--data-root")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = [compare(recipe, args.precision, args.data_root) for recipe in args.recipes]
    args.out.write_text(json.dumps(describe() | {"rows": rows}, indent=1) + "\n")
    print(json.dumps(rows))
    return 0 if all(row[kind.name]["ok"] for row in rows for kind in OTHERS) else 1


if __name__ == "__main__":
    sys.exit(main())
