"""Values that no run can use are refused by the field's name, before anything is opened or written. No torch.

What each field allows stands beside its default in ``bicovg.config``; what depends on several fields or on the data
is checked where it is known (``bicovg.preparation``, ``bicovg.data.splits``).
"""

import math
from collections.abc import Iterator
from typing import Any

from bicovg.config import Config, Setting, nearest, walk_settings
from bicovg.errors import UserError


def check_settings(config: Config) -> None:
    """Raise a UserError for the first value outside its field's choices or bounds."""
    for setting in walk_settings(config):
        for value in _leaves(setting.default):
            if not _allowed(value, setting):
                raise UserError(f"--{setting.path} {value} {_sentence(value, setting)}")


def _leaves(value: Any) -> Iterator[Any]:
    """The value itself, or every entry of a list of any depth."""
    if isinstance(value, tuple):
        for item in value:
            yield from _leaves(item)
    elif value is not None:
        yield value


def _allowed(value: Any, setting: Setting) -> bool:
    limits = setting.limits
    if "choices" in limits:
        return value in limits["choices"]
    if isinstance(value, str | bool):
        return True
    return (
        bool(abs(value) < _largest(value))
        and value >= limits.get("low", -math.inf)
        and value > limits.get("above", -math.inf)
        and value <= limits.get("high", math.inf)
        and value < limits.get("below", math.inf)
    )


def _largest(value: float) -> float:
    """What an int64 or a float32 can hold."""
    return 1 << 62 if isinstance(value, int) else 3e38


def _sentence(value: Any, setting: Setting) -> str:
    limits = setting.limits
    if "choices" in limits:
        known = [str(choice) for choice in limits["choices"]]
        return f"is unknown{nearest(str(value), known)}: choose {', '.join(known[:-1])} or {known[-1]}"
    words = {"low": "at least", "above": "above", "high": "at most", "below": "below"}
    bounds = [f"{words[name]} {bound}" for name, bound in limits.items()]
    if not {"high", "below"} & set(limits) and not abs(value) < _largest(value):
        bounds.append(f"below {_largest(value):g}")
    return f"is out of range: it must be {' and '.join(bounds)}"
