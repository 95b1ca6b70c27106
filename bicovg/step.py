"""One training step. Start reading here.

The images pass through the units in order. Each unit computes its own losses, differentiates them inside itself,
and is stepped by its own optimizer. Nothing else happens:

* ``interleaved`` finishes each unit (backward, clip, step, free) before the next begins: one unit's activations
  are alive at a time;
* ``summed`` runs all forwards, then one backward over all losses.

In micro-batches either is done part by part, and what follows the backward passes, clip and step, after the last one:
all units' gradients are alive then.

Both give the same parameters bit for bit (CPU, float32), because no unit's gradient depends on another unit.
"""

import math
from collections import deque
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.optim import Optimizer

from bicovg.guard import Guard, Unguarded
from bicovg.lanes import OneLane
from bicovg.networks import LocalNetwork
from bicovg.optim import clip_gradients
from bicovg.reduction import NoReduction
from bicovg.signals import Credit, assign_gradients

PRECISIONS: dict[str | None, torch.dtype | None] = {None: None, "float32": None, "bfloat16": torch.bfloat16}


def local_step(
    net: LocalNetwork,
    optimizers: Sequence[Optimizer],
    images: Float[Tensor, "b c h w"],
    labels: Int[Tensor, " b"],
    schedule: str = "interleaved",
    clip_norm: float | None = None,
    precision: str | None = None,
    clip_scope: str = "unit",
    keys: Int[Tensor, " b"] | None = None,
    guard: Guard | None = None,
    lanes: OneLane | None = None,
    reduction: NoReduction | None = None,
    micro_batches: int = 1,
) -> Float[Tensor, " e"]:
    """Train every unit once on one batch.

    Args:
        optimizers: one per unit.
        clip_norm: bound on the gradient norm, of each unit (``clip_scope="unit"``) or of all (``"global"``).
        precision: ``bfloat16`` for autocast; None or ``float32`` for none.
        keys: per-sample dropout keys; drawn from the generator when absent.
        guard: holds back a unit, and those after it, whose loss or gradient is not finite.
        lanes: GPU streams for interleaved units to overlap on.
        reduction: averages each unit's gradients over several processes.
        micro_batches: equal parts of the batch that pass one after the other, for memory; their gradients are averaged.
            Batch norm sees each part by itself.

    Returns:
        The loss of every exit.
    """
    keys = net.train().sample_keys(images) if keys is None else keys
    return prepared_step(
        net,
        optimizers,
        net.prepare(images),
        labels,
        keys,
        schedule=schedule,
        clip_norm=clip_norm,
        precision=precision,
        clip_scope=clip_scope,
        guard=guard,
        lanes=lanes,
        reduction=reduction,
        micro_batches=micro_batches,
    )


def prepared_step(
    net: LocalNetwork,
    optimizers: Sequence[Optimizer],
    x: Float[Tensor, "b c h w"],
    labels: Int[Tensor, " b"],
    keys: Int[Tensor, " b"] | None,
    *,
    schedule: str,
    clip_norm: float | None,
    precision: str | None,
    clip_scope: str,
    guard: Guard | None,
    lanes: OneLane | None,
    reduction: NoReduction | None,
    micro_batches: int = 1,
) -> Float[Tensor, " e"]:
    """``local_step`` from the first unit's input on."""
    check_step(schedule, clip_norm, clip_scope, precision)
    if len(optimizers) != len(net.units):
        raise ValueError(f"{len(optimizers)} optimizers for {len(net.units)} units: give one per unit")
    net.train()
    dtype, parts = PRECISIONS[precision], cut_batch(x, labels, keys, micro_batches)
    watch, shared = Unguarded() if guard is None else guard, reduction or NoReduction()
    try:
        with watch, torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not None):
            if schedule == "summed":
                return _summed(net, optimizers, parts, clip_norm, clip_scope, watch, shared)
            return _interleaved(net, optimizers, parts, clip_norm, watch, lanes or OneLane(), shared)
    except BaseException:
        for optimizer in optimizers:  # of parts that came before: the next step must not add to them
            optimizer.zero_grad()
        raise


def check_step(schedule: str, clip_norm: float | None, clip_scope: str, precision: str | None) -> None:
    """Refuse settings that cannot mean what they say."""
    if schedule not in ("interleaved", "summed"):
        raise ValueError(f"schedule {schedule!r} is unknown: choose interleaved or summed")
    if clip_scope not in ("unit", "global"):
        raise ValueError(f"clip scope {clip_scope!r} is unknown: choose unit or global")
    if precision == "float16":
        raise ValueError("precision float16 is refused: its squares overflow above 256; use bfloat16 or float32")
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r} is unknown: choose float32 or bfloat16")
    if clip_norm is not None and not 0 < clip_norm < math.inf:
        raise ValueError(f"clip norm {clip_norm:g} must be above 0 and finite, or None for no clipping")
    if clip_norm is None and clip_scope == "global":
        raise ValueError("a global clip scope says nothing without a clip norm: set both or neither")
    if clip_norm is not None and clip_scope == "global" and schedule == "interleaved":
        raise ValueError(
            "a global clip norm needs every gradient before any step, so it cannot be interleaved: "
            "use schedule summed or clip scope unit"
        )


Part = tuple[Tensor, Tensor, Tensor | None]  # images, labels, keys


def cut_batch(x: Tensor, labels: Tensor, keys: Tensor | None, parts: int) -> list[Part]:
    """A batch in equal parts."""
    if parts == 1:
        return [(x, labels, keys)]
    if parts < 1 or len(x) % parts:
        raise ValueError(
            f"{len(x)} images cannot be cut into {parts} equal micro-batches: choose a divisor of {len(x)}"
        )
    pieces = [None] * parts if keys is None else keys.chunk(parts)
    return list(zip(x.chunk(parts), labels.chunk(parts), pieces, strict=True))


def _interleaved(
    net: LocalNetwork,
    optimizers: Sequence[Optimizer],
    parts: Sequence[Part],
    clip_norm: float | None,
    guard: Unguarded,
    lanes: OneLane,
    reduction: NoReduction,
) -> Tensor:
    losses: list[Tensor] = []
    waiting: deque[int] = deque()

    def finish(index: int) -> None:
        reduction.collect(index)
        guard.finish(index, net.units[index], losses[index], optimizers[index], clip_norm, lanes)

    for number, (images, labels, keys) in enumerate(parts, 1):
        x: Tensor | None = images
        for index, unit in enumerate(net.units):
            with lanes.lane(index):
                credit = unit.learn(x, labels, keys, emit=net.hands_on or index + 1 < len(net.units))  # type: ignore[operator]
                x = lanes.hand_over(credit.output)
                _note_losses(losses, index, credit.losses, len(parts))
                assign_gradients([credit], 1 / len(parts))
                lanes.gather()
                del credit  # the unit's graph goes here, before the next unit builds its own
                if number == len(parts):
                    reduction.launch(index, unit, losses[index])
                    waiting.append(index)
                    if len(waiting) > reduction.lag:
                        finish(waiting.popleft())
        if number < len(parts):
            lanes.join()
    for index in waiting:
        finish(index)
    lanes.join()
    return torch.cat(losses)


def _note_losses(losses: list[Tensor], index: int, found: Tensor, parts: int) -> None:
    """Gather the mean of a unit's losses over the parts of the batch."""
    found = found if parts == 1 else found / parts
    if index == len(losses):
        losses.append(found)
    else:
        losses[index] = losses[index] + found


def _summed(
    net: LocalNetwork,
    optimizers: Sequence[Optimizer],
    parts: Sequence[Part],
    clip_norm: float | None,
    clip_scope: str,
    guard: Unguarded,
    reduction: NoReduction,
) -> Tensor:
    losses: list[Tensor] = []
    for images, labels, keys in parts:
        x: Tensor | None = images
        credits: list[Credit] = []
        for index, unit in enumerate(net.units):
            credits.append(unit.learn(x, labels, keys, emit=index + 1 < len(net.units)))  # type: ignore[operator]
            x = credits[-1].output
            _note_losses(losses, index, credits[-1].losses, len(parts))
        assign_gradients(credits, 1 / len(parts))
        del credits
    for index, (unit, found) in enumerate(zip(net.units, losses, strict=True)):
        reduction.launch(index, unit, found)
    for index, (unit, found) in enumerate(zip(net.units, losses, strict=True)):
        reduction.collect(index)
        norm = clip_gradients(unit, clip_norm) if clip_norm is not None and clip_scope == "unit" else None
        guard.check(index, found, norm)
    if clip_norm is not None and clip_scope == "global":
        clip_gradients(net, clip_norm)
    for index, optimizer in enumerate(optimizers):
        guard.step(index, optimizer)
        optimizer.zero_grad()
    return torch.cat(losses)
