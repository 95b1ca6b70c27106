"""What the files of a run folder must hold; the first value that does not fit is named in one sentence. No torch.

A check takes a value and its place in the file (``test.last.top1``) and raises Misfit. Fields that a check does not
know are left alone: a later version may add some. Lengths are in E exits and K classes.
"""

import math
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bicovg.errors import UserError

LARGE = 1e100  # beyond any measured value, and far enough from overflow to be drawn
Check = Callable[[Any, str], None]


class Misfit(Exception):
    """A value that is not what its place asks for."""


def check_file(path: Path, value: Any, check: Check, repair: str) -> None:
    """Apply a check to what ``path`` holds; a misfit becomes a UserError with the repair."""
    try:
        check(value, "")
    except Misfit as misfit:
        raise UserError(f"{path}: {misfit}; {repair}") from None


def need(fine: bool, place: str, value: Any, wanted: str) -> None:
    if not fine:
        raise Misfit(f"{place or 'it'} is {reprlib.repr(value)}, not {wanted}")


def number(low: float = -LARGE, high: float = LARGE, wanted: str = "a finite number in its range") -> Check:
    """A number between bounds, both allowed."""

    def check(value: Any, place: str) -> None:
        need(isinstance(value, int | float) and type(value) is not bool and low <= value <= high, place, value, wanted)

    return check


def measured(value: Any, place: str) -> None:
    """A number that may be NaN or infinite, as the loss of a run that went wrong."""
    if not isinstance(value, float) or math.isfinite(value):
        number()(value, place)


def whole(low: int = 0, high: int = 10**15) -> Check:
    def check(value: Any, place: str) -> None:
        need(type(value) is int and low <= value <= high, place, value, f"a whole number from {low} to {high}")

    return check


def boolean(value: Any, place: str) -> None:
    need(isinstance(value, bool), place, value, "true or false")


def text(value: Any, place: str) -> None:
    need(isinstance(value, str), place, value, "a text")


def maybe(inner: Check) -> Check:
    """What ``inner`` takes, or null."""

    def check(value: Any, place: str) -> None:
        if value is not None:
            inner(value, place)

    return check


def listed(inner: Check, length: int | None = None) -> Check:
    """A list, of ``length`` where that is given."""

    def check(value: Any, place: str) -> None:
        need(isinstance(value, list), place, value, "a list")
        if length is not None and len(value) != length:
            raise Misfit(f"{place} has {len(value)} values, not {length}")
        for index, item in enumerate(value):
            inner(item, f"{place}[{index}]")

    return check


def named(inner: Check) -> Check:
    """An object whose values all pass ``inner``."""

    def check(value: Any, place: str) -> None:
        need(isinstance(value, dict), place, value, "an object")
        for name, item in value.items():
            inner(item, f"{place}.{name}".lstrip("."))

    return check


def fields(needed: Mapping[str, Check], extra: Mapping[str, Check] | None = None) -> Check:
    """An object with the ``needed`` fields; those of ``extra`` are checked where they are there."""

    def check(value: Any, place: str) -> None:
        need(isinstance(value, dict), place, value, "an object")
        for name in needed:
            if name not in value:
                raise Misfit(f"the field {place}.{name} is missing".replace(" .", " "))
        for name, inner in {**needed, **(extra or {})}.items():
            if name in value:
                inner(value[name], f"{place}.{name}".lstrip("."))

    return check


PERCENT = number(0, 100, "a percentage")
SHARE = number(0, 1, "a share between 0 and 1")
POSITIVE = number(1e-30, wanted="a finite number above 0")
SIZE = number(0, wanted="a finite number of at least 0")
EPOCH = whole(0, 10**9)
SEED = whole(0, 2**63 - 1)
BOTH = {"top1": PERCENT, "top5": PERCENT}


def blocks(value: Any, place: str) -> None:
    """The block index of every exit."""
    listed(whole(0, 10**6))(value, place)
    need(bool(value) and value == sorted(set(value)), place, value, "a list of blocks in order")


def weights(count: int) -> Check:
    """One weight per exit, as a softmax gives them."""

    def check(value: Any, place: str) -> None:
        listed(SHARE, count)(value, place)
        need(abs(math.fsum(value) - 1) < 1e-3, place, value, "a list of weights that add up to 1")

    return check


def fused(count: int) -> Check:
    extra = {"temperatures": listed(POSITIVE, count)}
    return maybe(fields({**BOTH, "weights": weights(count), "N_eff": SIZE}, extra))


def fusions(count: int, *needed: str) -> Check:
    """What was fitted, by the images it was fitted on."""

    def check(value: Any, place: str) -> None:
        fields(dict.fromkeys(needed, fused(count)))(value, place)
        named(fused(count))(value, place)

    return check


def tested(count: int) -> Check:
    """The accuracies of every exit, and of every choice among them."""
    chosen = fields({**BOTH, "exit": whole(0, count - 1)})
    exits = fields({"top1": listed(PERCENT, count), "top5": listed(PERCENT, count)})
    needed = {"exits": exits, "last": fields(BOTH), "mean": fields(BOTH), "best_test_chosen": chosen}
    diagnostics = maybe(fields({}, {"DA": maybe(number()), "TR": maybe(number())}))
    return fields({**needed, "best_heldout_chosen": maybe(chosen)}, {"diagnostics": diagnostics})


def summary(value: Any, place: str) -> None:
    fields({"recipe": text, "seed": SEED, "scope": text, "exit_blocks": blocks})(value, place)
    count = len(value["exit_blocks"])
    optional = {
        "data": text,
        "epochs": EPOCH,
        "heldout_top1": maybe(listed(PERCENT, count)),
        "parameters": maybe(whole()),
        "engine": maybe(text),
        "wall_seconds": maybe(number(0, 1e12)),
    }
    fields({"test": tested(count), "fusion": fusions(count, "train", "heldout")}, optional)(value, place)


def metrics(count: int) -> Check:
    """One line of metrics.jsonl."""
    needed = {"epoch": EPOCH, "lr": number(), "loss": listed(measured, count)}
    curves = {"split": text, "top1": listed(PERCENT, count), "top5": listed(PERCENT, count), "mean_top1": PERCENT}

    def check(value: Any, place: str) -> None:
        fields(needed, {"step": whole()})(value, place)
        if any(name in value for name in curves):
            fields(curves)(value, place)

    return check


TIMING = fields(
    {
        "epoch": EPOCH,
        "images_per_second": SIZE,
        "train_seconds": number(0, 1e9),
        "loader_wait_share": SIZE,
        "peak_memory_bytes": SIZE,
    },
    {"eval_seconds": number(0, 1e9)},
)
ENVIRONMENT = fields(
    {}, dict.fromkeys(("commit", "python", "torch", "cuda", "device", "gpu", "command", "platform"), maybe(text))
)
CONFIG = fields(
    {
        "data": fields({"name": text, "image_size": whole(1), "num_classes": whole(1)}),
        "model": fields({"scope": text}, {"channels": listed(whole(1))}),
        "train": fields({"epochs": whole(1, 10**9)}),
    },
    {"recipe": text, "about": text, "seed": SEED},
)


def data(classes: int, channels: int) -> Check:
    """data.json: the names of the classes, and how pixels are normalised."""
    return fields(
        {"classes": listed(text, classes), "mean": listed(number(), channels), "std": listed(POSITIVE, channels)},
        {"fingerprint": text},
    )


def analysis(count: int) -> Check:
    """analysis.json, see ``bicovg.report.analysis``."""

    def check(value: Any, place: str) -> None:
        fields({"head": text, "classes": listed(text)})(value, place)
        K = len(value["classes"])
        need(K > 0, "classes", value["classes"], "a list of names")
        index = whole(0, K - 1)
        mistake = {"index": whole(), "true": index, "predicted": index, "picture": text}
        mistake |= {"confidence": SHARE, "true_confidence": SHARE}
        fields(
            {
                "confusion": listed(listed(whole(), K), K),
                "class_top1": listed(listed(PERCENT, K), count),
                "mistakes": listed(fields(mistake)),
            }
        )(value, place)

    return check


def early_exit(value: Any, place: str) -> None:
    fields({"exit_blocks": blocks, "calibrated_on": text, "measured_on": text})(value, place)
    count = len(value["exit_blocks"])
    point = {"top1": PERCENT, "compute": number(1e-9, 1, "a share above 0, at most 1")}
    picked = {**point, "speedup": POSITIVE, "points_lost": number(-100, 100)}
    shares = {"exits": weights(count)}  # of the images, by the exit they left at
    errors = listed(PERCENT, count)
    rule = fields(
        {
            "temperatures": listed(POSITIVE, count),
            "full": fields({"top1": PERCENT}),
            "points": listed(fields(picked, shares)),
            "curve": listed(fields(point, shares)),
        },
        {"weights": listed(listed(number(), count), count), "ece_before": errors, "ece_after": errors},
    )
    fields({"rules": named(rule)}, {"images": whole(1), "macs": listed(whole(), count), "use": text})(value, place)
    need(value.get("use", "") in {"", *value["rules"]}, "use", value.get("use"), "one of its rules")
