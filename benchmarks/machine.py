"""What a result on a GPU says of itself: when, from which commit, by which command and on what it was measured."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bicovg.runlog import find_commit


def describe() -> dict[str, Any]:
    """The head of a JSON report; paths given to ``--out`` and ``--data-root`` are of no interest to others."""
    script, *words = sys.argv
    while hidden := {"--out", "--data-root"} & set(words):
        at = words.index(hidden.pop())
        del words[at : at + 2]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": find_commit(),
        "command": " ".join(["python", f"benchmarks/{Path(script).name}", *words]),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
    }
