"""The one seam between a method and the engine: the credit a unit receives in a step.

A unit's ``learn`` returns a ``Credit``. There are three kinds of credit signal:

* ``loss_credit``: scalars, differentiated inside the unit only (BiCovG, HGB, backprop, ...); ``exit_credit`` where a
  loss comes with its gradient;
* ``teaching_credit``: a tensor shaped like the unit's output, pushed through one local vector-Jacobian product;
* ``delta_credit``: explicit parameter updates, no autograd.

All three end as ``.grad`` of the unit's own parameters, so clipping, finite checks, all-reduce and the optimizer
exist once, for every method.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class Credit:
    """What one unit hands the engine.

    Attributes:
        output: the next unit's input, without a graph; None after the last unit.
        losses: (e,) detached values to report, one per exit of the unit.
        roots: tensors to differentiate, each with its incoming gradient (None for scalars).
        updates: parameters with the direction they should move in.
    """

    output: Tensor | None
    losses: Tensor
    roots: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    updates: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)


def loss_credit(output: Tensor | None, losses: Sequence[Tensor]) -> Credit:
    """Credit by scalar losses."""
    return Credit(output, torch.stack([loss.detach() for loss in losses]), [(loss, None) for loss in losses])


def exit_credit(output: Tensor | None, exits: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> Credit:
    """The same from losses that bring (1,) values, what to differentiate, and the gradient there if it is known."""
    values = [value for value, _, _ in exits]
    losses = values[0] if len(values) == 1 else torch.cat(values)
    return Credit(output, losses, [(root, slope) for _, root, slope in exits])


def teaching_credit(output: Tensor | None, losses: Tensor, activation: Tensor, teaching: Tensor) -> Credit:
    """Credit by a teaching signal: ``teaching`` takes the place of d loss / d activation."""
    if teaching.shape != activation.shape:
        raise ValueError(
            f"teaching signal of shape {tuple(teaching.shape)} must match the activation {tuple(activation.shape)}"
        )
    return Credit(output, losses, [(activation, teaching)])


def delta_credit(output: Tensor | None, losses: Tensor, updates: Iterable[tuple[nn.Parameter, Tensor]]) -> Credit:
    """Credit by explicit updates: SGD with learning rate 1 moves each parameter by exactly its delta."""
    updates = list(updates)
    for parameter, delta in updates:
        if delta.shape != parameter.shape:
            raise ValueError(f"delta of shape {tuple(delta.shape)} must match its parameter {tuple(parameter.shape)}")
    return Credit(output, losses, updates=updates)


def assign_gradients(credits: Sequence[Credit], share: float = 1.0) -> None:
    """Turn credit, or a ``share`` of it, into ``.grad``: one backward over all roots, then the explicit updates.

    Autocast is off meanwhile: every product is differentiated in the type it was computed in, the readouts' in float32.
    """
    roots = [root for credit in credits for root in credit.roots]
    if share != 1:
        roots = [(root * share, None) if grad is None else (root, grad * share) for root, grad in roots]
    if roots:
        with torch.autocast(roots[0][0].device.type, enabled=False):
            torch.autograd.backward([tensor for tensor, _ in roots], [grad for _, grad in roots])
    for credit in credits:
        for parameter, whole in credit.updates:
            if parameter.grad is None:  # optimizers rely on a gradient that lies in memory as its parameter does
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad -= (whole if share == 1 else whole * share).detach()


def wake_autograd(device: torch.device) -> None:
    """A number's gradient on a GPU: autograd's thread there warns if a matrix product is the first that it does."""
    if device.type == "cuda":
        torch.autograd.backward(torch.zeros((), device=device, requires_grad=True).square())
