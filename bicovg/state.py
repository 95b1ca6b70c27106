"""What a checkpoint holds: weights, buffers, optimizer state, running losses, progress, metrics so far.

Taking it copies everything to the host, so that training may go on while it is written; from a GPU it only orders the
copy, between two steps, into memory that the GPU can write by itself. Putting it back changes
nothing until all of it has been read, checked against its manifest and found to fit.
"""

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from bicovg.checkpoint import METRICS, MODEL, OPTIMIZER, PROGRESS, Blob, Unusable, checkpoint_name, read_checked
from bicovg.errors import NonFiniteStateError, UserError
from bicovg.networks import LocalNetwork
from bicovg.tensorfile import assemble_tensors

LOSSES = "losses"
_KEYS = {AdamW: {"step", "exp_avg", "exp_avg_sq"}, SGD: {"momentum_buffer"}}


@dataclass
class Progress:
    """Where a run stands; every random draw is a function of it."""

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    seconds: float = 0.0

    @classmethod
    def from_json(cls, blob: bytes) -> "Progress":
        try:
            tree = json.loads(blob)
            values = {field.name: tree[field.name] for field in fields(cls)}
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Unusable(f"{PROGRESS} is malformed") from None
        counts = [values[name] for name in ("epoch", "step_in_epoch", "step")]
        seconds = values["seconds"]
        if any(type(count) is not int or not 0 <= count < 2**53 for count in counts):
            raise Unusable(f"{PROGRESS} holds {counts!r:.80}, which are not counts")
        if type(seconds) is not float or not (math.isfinite(seconds) and seconds >= 0):
            raise Unusable(f"{PROGRESS} holds {seconds!r:.40} seconds")
        return cls(**values)

    def fits(self, epochs: int, steps_per_epoch: int) -> bool:
        """Whether a run of this length can stand there."""
        return (
            self.epoch <= epochs
            and self.step_in_epoch <= (steps_per_epoch if self.epoch < epochs else 0)
            and self.step == self.epoch * steps_per_epoch + self.step_in_epoch
        )


class Snapshot:
    """A run's state at one step, on the host.

    Args:
        losses: running sums since the epoch began.
        metrics: metrics.jsonl so far.
    """

    def __init__(
        self, net: LocalNetwork, optimizers: list[Optimizer], losses: Tensor, progress: Progress, metrics: bytes
    ) -> None:
        self.name = checkpoint_name(progress.step, progress.epoch)
        self.progress, self.metrics = asdict(progress), metrics
        self.model = {name: _to_host(tensor) for name, tensor in net.state_dict().items()}
        self.moments = {LOSSES: _to_host(losses)}
        names: dict[Tensor, str] = {parameter: name for name, parameter in net.named_parameters()}
        for index, optimizer in enumerate(optimizers):
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    if value is not None:
                        self.moments[f"{index}|{names[parameter]}|{key}"] = _to_host(torch.as_tensor(value))
        devices = {parameter.device for parameter in names if parameter.is_cuda}
        self._copied = [torch.cuda.current_stream(device).record_event() for device in devices]

    def wait(self) -> None:
        """Until the copies are complete."""
        for event in self._copied:
            event.synchronize()

    def files(self) -> dict[str, Blob]:
        """The files of a checkpoint, ready to be written; refuses to write a value that is not finite."""
        self.wait()
        for name, tensor in (*self.model.items(), *self.moments.items()):
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise NonFiniteStateError(f"{name} is not finite at step {self.progress['step']} and was not saved")
        return {
            MODEL: assemble_tensors(self.model),
            OPTIMIZER: assemble_tensors(self.moments),
            PROGRESS: (json.dumps(self.progress, indent=2) + "\n").encode(),
            METRICS: self.metrics,
        }


def _to_host(tensor: Tensor) -> Tensor:
    """A copy; of a GPU's tensor not complete before its stream has come so far."""
    if not tensor.is_cuda:
        return tensor.detach().clone()
    try:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError:  # no such memory is left
        return tensor.detach().to("cpu", copy=True)
    return host.copy_(tensor.detach(), non_blocking=True)


def read_tensors(path: Path, name: str, limit: int) -> dict[str, Tensor]:
    """The tensors of one file of a checkpoint; ``Unusable`` if it is damaged or larger than ``limit`` bytes."""
    blob = read_checked(path, name, limit)
    try:
        found = load(blob)
        for key, tensor in found.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise Unusable(f"{key!r:.80} in {name} is not finite")
        return found
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise Unusable(f"{name} is malformed ({type(error).__name__})") from None


def read_progress(path: Path) -> Progress:
    return Progress.from_json(read_checked(path, PROGRESS, 1 << 16))


def read_weights(path: Path, net: LocalNetwork) -> dict[str, Tensor]:
    """Weights and buffers of a checkpoint, if they fit ``net``."""
    wanted = net.state_dict()
    size = sum(tensor.nbytes for tensor in wanted.values())
    found = read_tensors(path, MODEL, 2 * size + (1 << 20))
    for name in sorted(set(wanted) ^ set(found)):
        raise Unusable(f"its weights do not fit config.json: {name} is in only one of them")
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape or found[name].dtype != tensor.dtype:
            raise Unusable(
                f"its weights do not fit config.json: {name} is {found[name].dtype} {tuple(found[name].shape)}, "
                f"not {tensor.dtype} {tuple(tensor.shape)}"
            )
    return found


def load_weights(path: Path, net: LocalNetwork) -> None:
    """Weights and buffers of a checkpoint, in place."""
    try:
        net.load_state_dict(read_weights(path, net))
    except Unusable as reason:
        raise UserError(f"{path} cannot be used: {reason}") from None


def load_state(
    path: Path, net: LocalNetwork, optimizers: list[Optimizer], losses: Tensor, epochs: int, steps_per_epoch: int
) -> Progress:
    """Everything of a checkpoint, in place, or ``Unusable`` with nothing changed.

    Call before a step is captured in a CUDA graph: the optimizer state tensors are new.
    """
    weights = read_weights(path, net)
    size = sum(tensor.nbytes for tensor in weights.values())
    moments = read_tensors(path, OPTIMIZER, 4 * size + (1 << 20))
    sums = moments.pop(LOSSES, None)
    if sums is None or sums.shape != losses.shape or sums.dtype != losses.dtype:
        raise Unusable(f"{OPTIMIZER} holds no running losses of {len(net.exits)} exits")
    planned = plan_moments(moments, net, optimizers)
    progress = read_progress(path)
    if not progress.fits(epochs, steps_per_epoch):
        raise Unusable(f"step {progress.step} of epoch {progress.epoch} is not a place in this run")
    net.load_state_dict(weights)
    losses.copy_(sums)
    for index, parameter, key, value in planned:
        optimizers[index].state[parameter][key] = value
    return progress


def plan_moments(
    moments: dict[str, Tensor], net: LocalNetwork, optimizers: list[Optimizer]
) -> list[tuple[int, Tensor, str, Tensor]]:
    """(optimizer, parameter, key, value on its device) for each stored tensor, or ``Unusable``."""
    owners = {
        p: i for i, optimizer in enumerate(optimizers) for group in optimizer.param_groups for p in group["params"]
    }
    parameters = dict(net.named_parameters())
    planned: list[tuple[int, Tensor, str, Tensor]] = []
    for name, value in moments.items():
        index, _, rest = name.partition("|")
        parameter_name, _, key = rest.rpartition("|")
        parameter = parameters.get(parameter_name)
        if parameter is None or str(owners[parameter]) != index:
            raise Unusable(f"its optimizer state does not fit config.json: {name!r:.80} is unknown")
        optimizer = optimizers[int(index)]
        shape, dtype = (torch.Size(), torch.float32) if key == "step" else (parameter.shape, parameter.dtype)
        if key not in _KEYS.get(type(optimizer), {key}) or value.shape != shape or value.dtype != dtype:
            kind = f"{value.dtype} {tuple(value.shape)}"
            raise Unusable(f"its optimizer state does not fit config.json: {name!r:.80} is {kind}")
        planned.append((int(index), parameter, key, _place(value, parameter, key, optimizer)))
    for owner, count in Counter(parameter for _, parameter, _, _ in planned).items():
        if count != len(_KEYS.get(type(optimizers[owners[owner]]), range(count))):
            raise Unusable("its optimizer state is incomplete")
    return planned


def _place(value: Tensor, parameter: Tensor, key: str, optimizer: Optimizer) -> Tensor:
    """On the device and in the memory format the optimizer would have made it."""
    defaults: dict[str, Any] = optimizer.defaults
    if key == "step" and not defaults.get("capturable") and not defaults.get("fused"):
        return value
    moved = value.to(parameter.device)
    if moved.shape == parameter.shape and parameter.dim() == 4 and not parameter.is_contiguous():
        return moved.contiguous(memory_format=torch.channels_last)
    return moved
