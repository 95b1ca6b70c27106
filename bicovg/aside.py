"""Weight gradients of an end-to-end network on a GPU stream of their own, while the backward pass goes on.

In a unit of several blocks a convolution's weight gradient is needed by nobody before the optimizer; only the gradient
of its input is. So it runs on a second stream beside the next blocks' backward kernels, which fill what it leaves idle:
what streams do for the units of a strict network (``bicovg.lanes``), done for backprop.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bicovg.lanes import OneLane

MOST = 2  # gradients under way whose inputs are kept


class Aside(OneLane):
    """One unit on the current stream, its weight gradients on another.

    Memory that is freed on the current stream may be written there at once, so what the other stream reads is kept
    until the current one has waited for it.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.kept: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    @contextmanager
    def lane(self, index: int) -> Iterator[None]:
        self.kept.clear()  # of a step that raised
        yield

    def run(self, make: Callable[[], Tensor], *read: Tensor) -> Tensor:
        """The result of ``make``, which reads these tensors; complete after ``gather``."""
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            made = make()
            self.kept.append((self.stream.record_event(), read))
        if len(self.kept) > MOST:
            current.wait_event(self.kept[0][0])
            self.kept.popleft()
        return made

    def gather(self) -> None:
        if self.kept:
            torch.cuda.current_stream().wait_event(self.kept[-1][0])
            self.kept.clear()


class _ConvAside(torch.autograd.Function):
    """A 3 x 3 convolution, padding 1, whose weight, a leaf, gets its gradient by ``aside.run``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, aside: Aside) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.aside = weight, aside
        return F.conv2d(x, weight, padding=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        (x,), (dy,), weight = ctx.saved_tensors, grads, ctx.weight

        def differentiate(which: int) -> Tensor:
            mask = [place == which for place in range(3)]
            rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)  # stride, padding, dilation, no transpose, groups
            made: Tensor = torch.ops.aten.convolution_backward(dy, x, weight, None, *rest)[which]
            return made

        def add() -> Tensor:
            made = differentiate(1)
            if weight.grad is not None:
                made = weight.grad.add_(made)
            return made if made.stride() == weight.stride() else torch.empty_like(weight).copy_(made)

        weight.grad = ctx.aside.run(add, x, dy)
        return differentiate(0) if ctx.needs_input_grad[0] else None, None, None


def conv_aside(x: Tensor, weight: Tensor, aside: Aside) -> Tensor:
    """``conv2d(x, weight, padding=1)``; the backward pass fills ``weight.grad`` beside itself."""
    y: Tensor = _ConvAside.apply(x, weight, aside)  # type: ignore[no-untyped-call]
    return y
