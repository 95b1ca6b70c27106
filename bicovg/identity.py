"""Which settings make a run the run it is, and which only say where, how fast and how safely it goes on."""

import hashlib
import json
from typing import Any

from bicovg.config import Config, walk_settings

MOVABLE = {  # does not change what a run computes
    "data.root",
    "data.prefetch",
    "train.device",
    "train.threads",
    "train.engine",
    "train.save_every",
    "train.save_seconds",
    "train.keep",
    "train.nonfinite",
    "train.processes",
    "train.stages",
    "train.cuts",
    "train.queue_depth",
    "train.timeout",
}


def identify(config: Config) -> str:
    """A name for all settings but the movable ones: what a checkpoint says whose it is.

    A setting that came later has no part in it while it does what was done before.
    """
    counted = (s for s in walk_settings(config) if s.path not in MOVABLE and not s.as_before)
    settings = {s.path: _plain(s.default) for s in counted}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    """The same for 1 and 1.0, which are the same setting."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
