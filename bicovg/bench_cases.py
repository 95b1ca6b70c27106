"""What ``bicovg bench`` measures: a recipe's backbone under every scope, and the rivals a sceptic would name. No torch.

Every case trains the same backbone on images of the same shape with the recipe's own augmentation, precision, clip
and batch; only where the graph is cut, when the units are stepped and what is kept in memory differs.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bicovg.backbones import VGG16
from bicovg.config import Config, nearest, override
from bicovg.errors import UserError
from bicovg.recipes import CLASSIC

UNIT_BLOCKS = (1, 2, 4, 8, 16)
MICRO_BATCHES = (2, 4)
BASELINE = "end-to-end"
STRICT, FAL, CONSTANT, BARE = "strict", "strict-fal", "strict-constant", "strict-bare"
# Steps without goodness do all of an update's work with a learning rate of 0: moved by their stand-in's gradient,
# activations would vanish, and a GPU at its power limit runs faster on zeros.
FROZEN = {"optim.lr": 0.0, "optim.lr_min": 0.0}


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        stand_in: what takes goodness' place (see ``bicovg.bench_variants``), None for goodness itself.
    """

    name: str
    config: Config
    stand_in: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {"config": asdict(self.config), "stand_in": self.stand_in}


def make_cases(config: Config) -> dict[str, Case]:
    """Every case of a recipe's backbone, by name, in the order of the table."""
    if config.model.method != "bicovg":
        raise UserError(
            f"recipe {config.recipe} has the method {config.model.method!r}: bench needs a recipe of method bicovg "
            "and measures its rivals beside it"
        )
    cases: dict[str, Case] = {}

    def add(name: str, changes: dict[str, Any], stand_in: str | None = None) -> None:
        plain: dict[str, Any] = {
            "model.scope": "strict",
            "model.group_size": 1,
            "model.alignment": False,
            "model.exits": "last",
            "model.checkpointing": False,
            "train.micro_batches": 1,
        }
        cases[name] = Case(name, override(config, {**plain, **changes}), stand_in)

    end_to_end = {"model.scope": "end-to-end"}
    add(STRICT, {})
    add(FAL, {"model.alignment": True})
    add(CONSTANT, FROZEN, stand_in="constant")
    add(BARE, FROZEN, stand_in="bare")
    micro = {parts: {"train.micro_batches": parts} for parts in MICRO_BATCHES if config.train.batch_size % parts == 0}
    for parts, changes in micro.items():
        add(f"{STRICT}-accumulate-{parts}", changes)
    for m in (m for m in UNIT_BLOCKS if len(config.model.channels) % m == 0):
        for schedule in ("interleaved", "summed"):
            units = {"model.scope": "hgb", "model.group_size": m, "model.alignment": True}
            add(f"hgb-{m}-{schedule}", {**units, "train.schedule": schedule})
    add(BASELINE, end_to_end)
    add(f"{BASELINE}-checkpointed", {**end_to_end, "model.checkpointing": True})
    for parts, changes in micro.items():
        add(f"{BASELINE}-accumulate-{parts}", {**end_to_end, **changes})
    if config.model.channels == VGG16.channels:
        add("classic", {f"model.{field}": value for field, value in CLASSIC.items()})
    return cases


def pick_cases(cases: dict[str, Case], names: Sequence[str] | None) -> list[Case]:
    """The named cases in the order given, or all of them."""
    for name in names or ():
        if name not in cases:
            raise UserError(f"unknown configuration {name!r}{nearest(name, list(cases))} (known: {', '.join(cases)})")
    return [cases[name] for name in names] if names else list(cases.values())
