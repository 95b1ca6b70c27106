"""Configurations measured side by side: what one side is, and what a list of rounds says about two of them."""

import statistics
from dataclasses import dataclass, field
from typing import Any

from bicovg.bench_cases import BARE, BASELINE, CONSTANT, STRICT, Case
from bicovg.bench_client import Answer, Worker

Round = dict[str, float]  # milliseconds per step of every side that ran


@dataclass
class Side:
    """A configuration whose process stays alive.

    Attributes:
        built: the worker's answer to ``build``.
        timed: its newest good answer to ``time``.
        error: why it cannot go on, or None.
        milliseconds: of a step, when last timed.
        tried: images per second, or the reason of failure, of every engine that was tried.
    """

    case: Case
    engine: str
    worker: Worker
    built: Answer
    timed: Answer = field(default_factory=dict)
    milliseconds: float | None = None
    tried: dict[str, float | str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.error: str | None = self.built.pop("error", None)

    def time_block(self, steps: int, repeats: int = 1) -> float | None:
        """Milliseconds per step, the median of ``repeats`` blocks; None if the worker has failed."""
        self.milliseconds = None
        if self.error is None:
            answer = self.worker.ask({"do": "time", "steps": steps, "repeats": repeats})
            self.error = answer.get("error")
            if self.error is None:
                self.timed, self.milliseconds = answer, statistics.median(answer["milliseconds"])
        return self.milliseconds

    def images_per_second(self) -> float | None:
        return None if self.milliseconds is None else self.case.config.train.batch_size / self.milliseconds * 1e3


def compare_sides(rounds: list[Round]) -> dict[str, Any]:
    """Speed of every side over the baseline's, round by round, and the share of the strict step spent in goodness.

    ``goodness share = 1 - t(readouts fed a constant) / t(step)``, and at most the same with the bare step, which spares
    batch norm's and ReLU's backward pass too.
    """

    def paired(top: str, bottom: str) -> list[float]:
        return [turn[top] / turn[bottom] for turn in rounds if top in turn and bottom in turn]

    ratios = {}
    for name in sorted({name for turn in rounds for name in turn} - {BASELINE, CONSTANT, BARE}):
        values = paired(BASELINE, name)  # a shorter step is a higher speed
        if values:
            ratios[name] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {
        f"speed_over_{BASELINE}": ratios,
        "goodness_share": share(paired(CONSTANT, STRICT)),
        "goodness_share_at_most": share(paired(BARE, STRICT)),
    }


def share(times: list[float]) -> float | None:
    return 1 - statistics.median(times) if times else None
