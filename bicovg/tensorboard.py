"""TensorBoard as an extra: event files made from ``metrics.jsonl`` and ``timing.jsonl``, which stay the source."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bicovg.errors import UserError
from bicovg.report.collect import RunData


class EventWriter:
    """Writes what is new in a run since it was last told of it.

    Args:
        folder: what ``tensorboard --logdir`` is given.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("event files need TensorBoard: pip install 'bicovg[tensorboard]'") from None
        try:
            self.writer: Any = SummaryWriter(str(folder))
        except OSError as error:
            raise UserError(f"cannot write into {folder}: {error.strerror}; give another folder") from None
        self.written: set[tuple[str, int]] = set()

    def record(self, run: RunData) -> None:
        """Add the epochs that were not there before."""
        for kind, records in (("metrics", run.metrics), ("timing", run.timing)):
            for line in records:
                if (kind, line["epoch"]) in self.written:
                    continue
                self.written.add((kind, line["epoch"]))
                for name, value in scalars(line, run.exits):
                    self.writer.add_scalar(name, value, line["epoch"] + 1)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


def scalars(line: dict[str, Any], exits: list[int]) -> Iterator[tuple[str, float]]:
    """One epoch's record as named numbers: ``top1/block 3``, ``lr``, ``images_per_second``."""
    for name, value in line.items():
        if isinstance(value, list) and len(value) == len(exits) and all(isinstance(v, int | float) for v in value):
            yield from ((f"{name}/block {block}", float(v)) for block, v in zip(exits, value, strict=True))
        elif name not in ("epoch", "step") and isinstance(value, int | float):
            yield name, float(value)
