"""The end of a unit's part of a captured GPU step: clip, finite check and optimizer, in three kernels a unit.

What torch offers does the same in a dozen launches, each spread over few programs. Here

* ``examine`` sums the squares of the unit's gradients: their norm, and whether all of them are finite;
* ``decide`` sets the unit's flag (see ``bicovg.guard``), the clip factor and the step counts;
* ``update`` steps parameters and moments where the flag allows, and writes the **shadows**: bfloat16 copies of the
  weights that the next step computes with, so that no step casts a weight. A convolution's shadow also takes the
  gradient, which then is never cast either.

The kernels find the tensors in a table of addresses. A captured graph keeps its addresses, so the table is filled once,
after the capture (``settle``); in the steps before it, each time.
"""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from bicovg.blocks import Block
from bicovg.goodness import BiCovG
from bicovg.guard import Guard
from bicovg.kernels.tiles import device_guard, next_power
from bicovg.lanes import OneLane
from bicovg.networks import LocalNetwork

RUN = 2048  # elements a program


@dataclass
class Runs:
    """Tensors of given sizes cut into runs of ``RUN`` elements: whose each one is, and where it begins."""

    owner: Tensor
    start: Tensor

    @classmethod
    def cut(cls, sizes: Sequence[int], device: torch.device) -> "Runs":
        pieces = [(row, first) for row, size in enumerate(sizes) for first in range(0, size, RUN)]
        owner, start = torch.tensor(pieces or [(0, 0)], dtype=torch.int64, device=device).unbind(dim=1)
        return cls(owner.contiguous(), start.contiguous())

    def __len__(self) -> int:
        return len(self.owner)


class UnitTable:
    """The addresses of one unit's parameters and all that belongs to them."""

    def __init__(self, optimizer: Optimizer, shadows: dict[Tensor, Tensor]) -> None:
        (self.group,) = optimizer.param_groups
        self.parameters: list[Tensor] = self.group["params"]
        self.optimizer, self.shadows = optimizer, shadows
        device = self.parameters[0].device
        self.runs = Runs.cut([p.numel() for p in self.parameters], device)
        self.table = torch.zeros((len(self.parameters), 8), dtype=torch.int64, device=device)
        self.part = torch.zeros(len(self.runs), device=device)
        self.factor = torch.ones((), device=device)
        self.corrections = torch.ones((len(self.parameters), 2), device=device)
        make_state(optimizer)

    def addresses(self) -> Tensor:
        """The table's rows as they are now, on the CPU; a parameter without a gradient has size 0 and is left alone."""
        rows = []
        for parameter in self.parameters:
            shadow = self.shadows.get(parameter)
            found = shadow.grad if shadow is not None and shadow.requires_grad else parameter.grad
            state = self.optimizer.state[parameter]
            moments = [state.get("exp_avg", state.get("momentum_buffer")), state.get("exp_avg_sq"), state.get("step")]
            assert found is parameter.grad or parameter.grad is None, "a weight with a shadow takes no gradient itself"
            for tensor in (found, shadow, *moments[:2]):
                assert tensor is None or same_layout(tensor, parameter), "laid out unlike its parameter"
            assert all(moment is None or moment.dtype == torch.float32 for moment in moments), "moments are float32"
            half = found if found is not None and found.dtype == torch.bfloat16 else None
            for tensor in (parameter, half, shadow, *moments[:2]):
                assert tensor is None or tensor.data_ptr() % 16 == 0, "not aligned"
            rows.append(
                [
                    parameter.data_ptr(),
                    0 if found is None else found.data_ptr(),
                    *(0 if moment is None else moment.data_ptr() for moment in moments),
                    0 if shadow is None else shadow.data_ptr(),
                    0 if found is None else parameter.numel(),
                    int(found is not None and found.dtype == torch.bfloat16),
                ]
            )
        return torch.tensor(rows, dtype=torch.int64)


def same_layout(tensor: Tensor, parameter: Tensor) -> bool:
    """Whether both have their elements in the same order; the stride of a dimension of 1 is no matter."""
    places = [i for i, size in enumerate(parameter.shape) if size > 1]
    return tensor.shape == parameter.shape and all(tensor.stride(i) == parameter.stride(i) for i in places)


class FusedUpdates(Guard):
    """The guard of a captured engine that also clips and steps. AdamW and SGD of one parameter group, clip per unit.

    For interleaved steps alone. With a clip norm, gradients whose squares overflow are not finite: their norm is not.

    Args:
        shadows: whether weights get bfloat16 copies to compute with; blocks have them within a step only.
        guarded: False leaves out what only the guard needs: to measure what it costs.
    """

    def __init__(
        self,
        net: LocalNetwork,
        optimizers: Sequence[Optimizer],
        policy: str = "stop",
        shadows: bool = True,
        guarded: bool = True,
    ) -> None:
        super().__init__(net, optimizers, policy)
        self.places = find_shadows(net) if shadows else []
        self.shadows: dict[Tensor, Tensor] = {
            weight: weight.detach().to(torch.bfloat16) for _, weight, _ in self.places
        }
        self.tables = [UnitTable(optimizer, self.shadows) for optimizer in optimizers]
        self.guarded = guarded
        self.buffers = BufferTable(self.units, self.flags.device)
        self._unsettled: list[tuple[UnitTable, Tensor]] = []

    def __enter__(self) -> "FusedUpdates":
        if self.guarded:
            if self.policy == "stop":
                self._flag[0].copy_(self._flag[-1])
            self.buffers.copy(self.flags, back=False)
        for module, weight, takes in self.places:  # last: an error here is not followed by ``__exit__``
            module.shadow = self.shadows[weight].requires_grad_(takes and weight.requires_grad)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for module, weight, _ in self.places:
            module.shadow = None
            if kind is not None:  # no ``zero_grad`` reaches it
                self.shadows[weight].grad = None
        if kind is None and self.guarded:
            self.buffers.copy(self.flags, back=True)

    def check(self, index: int, losses: Tensor, norm: Tensor | None = None) -> None:
        raise TypeError("fused updates are for interleaved steps")

    def step(self, index: int, optimizer: Optimizer) -> None:
        raise TypeError("fused updates are for interleaved steps")

    @torch.no_grad()
    def finish(
        self,
        index: int,
        unit: nn.Module,
        losses: Tensor,
        optimizer: Optimizer,
        clip_norm: float | None,
        lanes: OneLane,
    ) -> None:
        from bicovg.kernels.update_triton import decide_kernel, examine_kernel, update_kernel

        unit_table = self.tables[index]
        self._fill(unit_table)
        table, runs, group = unit_table.table, unit_table.runs, unit_table.group
        adamw, rows, blocks = isinstance(optimizer, AdamW), len(unit_table.parameters), len(runs)
        beta1, beta2 = group["betas"] if adamw else (group["momentum"], 0.0)
        logs = (math.log(beta1), math.log(beta2)) if adamw else (0.0, 0.0)
        with device_guard(table):
            if self.guarded or clip_norm is not None:
                examine_kernel[(blocks,)](
                    unit_table.part, table, runs.owner, runs.start, CLIP=clip_norm is not None, BLOCK=RUN, num_warps=4
                )
            with lanes.in_order():
                decide_kernel[(1,)](
                    self._flag[index + 1], unit_table.factor, unit_table.corrections, unit_table.part, losses, table,
                    blocks, len(losses), rows, clip_norm or 0.0, *logs, CLIP=clip_norm is not None, COUNTS=adamw,
                    PARTS=1024, EXITS=next_power(len(losses)), ROWS=next_power(rows), num_warps=4,
                )  # fmt: skip
            update_kernel[(blocks,)](
                table, runs.owner, runs.start, self._flag[index + 1], unit_table.factor, unit_table.corrections,
                group["lr"], group["weight_decay"], beta1, beta2, 1.0 - beta1, 1.0 - beta2, group.get("eps", 0.0),
                CLIP=clip_norm is not None, ADAMW=adamw, MOMENTUM=not adamw and bool(group["momentum"]), BLOCK=RUN,
                num_warps=8, maxnreg=80,
            )  # fmt: skip
        optimizer.zero_grad()
        for parameter in unit_table.parameters:
            if parameter in self.shadows:
                self.shadows[parameter].grad = None

    def _fill(self, unit_table: UnitTable) -> None:
        rows = unit_table.addresses()
        if unit_table.table.is_cuda and torch.cuda.is_current_stream_capturing():
            self._unsettled.append((unit_table, rows))
        else:
            unit_table.table.copy_(rows)

    @torch.no_grad()
    def settle(self) -> None:
        """After a capture, and after weights were put back: tell the kernels the addresses, and renew the shadows."""
        for unit_table, rows in self._unsettled:
            unit_table.table.copy_(rows)
        self._unsettled.clear()
        for parameter, shadow in self.shadows.items():
            shadow.copy_(parameter)


class BufferTable:
    """Buffers copied before a step and put back after it where their unit was held, each with one kernel for all."""

    def __init__(self, units: Sequence[nn.Module], device: torch.device) -> None:
        owned = [(buffer, u + 1) for u, unit in enumerate(units) for buffer in unit.buffers()]
        self.copies = [torch.empty_like(buffer) for buffer, _ in owned]
        words = [buffer.nbytes // 4 for buffer, _ in owned]
        assert all(buffer.nbytes % 4 == 0 for buffer, _ in owned), "buffers are copied as words of four bytes"
        rows = [
            [buffer.data_ptr(), copy.data_ptr(), size, flag]
            for (buffer, flag), copy, size in zip(owned, self.copies, words, strict=True)
        ]
        self.table = torch.tensor(rows, dtype=torch.int64, device=device)
        self.runs = Runs.cut(words, device)

    def copy(self, flags: Tensor, back: bool) -> None:
        from bicovg.kernels.update_triton import copy_kernel

        if self.copies:
            with device_guard(flags):
                copy_kernel[(len(self.runs),)](
                    self.table, self.runs.owner, self.runs.start, flags, BACK=back, BLOCK=RUN, num_warps=4
                )


def make_state(optimizer: Optimizer) -> None:
    """The state that torch's optimizer would make in its first step."""
    (group,) = optimizer.param_groups
    for parameter in group["params"]:
        state = optimizer.state[parameter]
        if isinstance(optimizer, AdamW) and not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        elif not isinstance(optimizer, AdamW) and group["momentum"] and state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def find_shadows(net: LocalNetwork) -> list[tuple[Block | BiCovG, Tensor, bool]]:
    """The modules that compute with a shadow, the weight it shadows, and whether it takes the weight's gradient."""
    found: list[tuple[Block | BiCovG, Tensor, bool]] = []
    for block in net.modules():
        if isinstance(block, Block) and block.fusible():
            found.append((block, block.conv.weight, True))
            if isinstance(block.goodness, BiCovG) and block.goodness.weight is not None:
                found.append((block.goodness, block.goodness.weight, False))
    return found


def updates_available(optimizers: Sequence[Optimizer]) -> bool:
    """Whether there is Triton, and its kernels know these optimizers, setting by setting."""
    if importlib.util.find_spec("triton") is None:
        return False
    for optimizer in optimizers:
        if type(optimizer) not in (SGD, AdamW) or len(optimizer.param_groups) != 1:
            return False
        (group,) = optimizer.param_groups
        strange = (group.get("amsgrad"), group.get("maximize"), group.get("nesterov"), group.get("dampening"))
        fits = [p.dtype == torch.float32 and p.data_ptr() % 16 == 0 and p.numel() < 1 << 31 for p in group["params"]]
        if any(strange) or not all(fits):
            return False
        here = isinstance(group["lr"], Tensor) and group["lr"].device == group["params"][0].device
        if not here or 0.0 in group.get("betas", ()):
            return False
    return True
