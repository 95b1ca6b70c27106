"""One benchmark configuration in a process of its own: JSON requests in, one a line, JSON replies out.

Requests: ``describe`` (device and versions), ``build`` (network, engine, first steps, memory), ``time`` (a block of
steps), ``quit``. A request that fails is answered with its reason. Used by ``bicovg.bench``; what the code under
measurement prints goes to standard error, so that replies stay alone on standard output.
"""

import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from itertools import count
from typing import Any

import torch
from torch import Tensor

from bicovg.bench_variants import replace_goodness
from bicovg.captured import GraphEngine
from bicovg.choosing import make_engine
from bicovg.config import Config, from_json, override
from bicovg.data.augment import Augmentation
from bicovg.data.images import TensorImages
from bicovg.data.loader import Loader
from bicovg.engine import EagerEngine, make_plain
from bicovg.networks import LocalNetwork, count_parameters
from bicovg.optim import make_optimizers
from bicovg.preparation import build_on, pick_device, set_up_process
from bicovg.profiling import peak_memory, reset_peak_memory, time_steps, track_saved_bytes

FIRST_STEPS = 2  # library search, compilation and capture happen here
DATA_BYTES = {"cuda": 1 << 28, "cpu": 1 << 22}  # about what the synthetic images may take
EPOCH_STEPS = (8, 390)  # fewest and most batches of an epoch


def synthetic_loader(config: Config, device: torch.device) -> Loader:
    """Random images of the recipe's shape, resident on the device, with the recipe's augmentation."""
    data, batch = config.data, config.train.batch_size
    shape = (data.image_size, data.image_size, data.image_channels)
    size = batch * shape[0] * shape[1] * shape[2]
    images = batch * min(EPOCH_STEPS[1], max(EPOCH_STEPS[0], DATA_BYTES[device.type] // size))
    generator = torch.Generator(device).manual_seed(0)
    pixels = torch.randint(0, 256, (images, *shape), dtype=torch.uint8, device=device, generator=generator)
    labels = torch.randint(0, data.num_classes, (images,), device=device, generator=generator)
    return Loader(
        TensorImages(pixels, labels.cpu()),
        batch,
        seed=config.seed,
        augmentation=Augmentation(**asdict(data.augment)),
        mean=[0.5] * data.image_channels,
        std=[0.25] * data.image_channels,
        device=device,
    )


def build_engine(
    name: str, net: LocalNetwork, optimizers: list[torch.optim.Optimizer], config: Config, loader: Loader
) -> EagerEngine:
    """An engine of ``bicovg.choosing.ENGINES``, or one captured differently.

    ``graph-plain`` compiles nothing, not even the augmentation; ``graph-inductor`` compiles the units from the plain
    functions, without our kernels.
    """
    if name == "graph-plain":
        return GraphEngine(net, optimizers, config, loader, compiled=False)
    if name == "graph-inductor":
        make_plain(net)
        return GraphEngine(net, optimizers, config, loader, compiled=True)
    return make_engine(net, optimizers, override(config, {"train.engine": name}), loader)


class Session:
    """A network under training, stepped on request."""

    def __init__(self, request: dict[str, Any]) -> None:
        config = from_json(json.dumps(request["config"]), "the configuration")
        set_up_process(config)
        self.device = pick_device(config.train.device)
        if request["fraction"] is not None:
            torch.cuda.set_per_process_memory_fraction(request["fraction"])
        self.net = build_on(config, self.device)
        if request["stand_in"]:
            replace_goodness(self.net, request["stand_in"])
        optimizers = make_optimizers(self.net, config.optim, self.device)
        self.loader = synthetic_loader(config, self.device)
        self.engine = build_engine(request["engine"], self.net, optimizers, config, self.loader)
        self.losses = torch.zeros(len(self.net.exits), dtype=torch.float64, device=self.device)
        self.stream = self._stream()

    def _stream(self) -> Iterator[Tensor]:
        for epoch in count():
            yield from self.engine.steps(epoch)

    def run(self, steps: int) -> None:
        """Train as the trainer does, the running sum of the losses included."""
        for _ in range(steps):
            self.losses += next(self.stream)

    def warm_up(self, steps: int) -> dict[str, Any]:
        """The first steps, then ``steps`` more; what they took and what they held."""
        begun = time.perf_counter()
        reset_peak_memory(self.device)
        self.run(FIRST_STEPS)
        on_gpu = self.device.type == "cuda"
        first, reserved = peak_memory(self.device), torch.cuda.max_memory_reserved() if on_gpu else 0
        reset_peak_memory(self.device)
        self.run(steps)
        steady = peak_memory(self.device)
        saved = None
        if not on_gpu:
            with track_saved_bytes(exclude=self.net) as tally:
                self.run(1)
            saved = tally.peak
        return {
            "engine": self.engine.name,
            "parameters": count_parameters(self.net),
            "warmup_seconds": time.perf_counter() - begun,
            "memory": {
                "steady_bytes": steady if on_gpu else None,
                "first_steps_bytes": max(first, steady) if on_gpu else None,
                "reserved_bytes": max(reserved, torch.cuda.max_memory_reserved()) if on_gpu else None,
                "resident_bytes": None if on_gpu else steady,
                "saved_bytes": saved,
                "data_bytes": self.data_bytes(),
            },
        }

    def data_bytes(self) -> int:
        """Of the images and labels that lie on the device."""
        held = (self.loader.resident_images, self.loader.resident_labels)
        return sum(tensor.nbytes for tensor in held if tensor is not None and self.device.type == "cuda")

    def time_blocks(self, steps: int, repeats: int) -> dict[str, Any]:
        """Milliseconds per step of each block of steps, and whether anything was compiled meanwhile."""
        before = compiled_graphs()
        blocks = [time_steps(self.run, steps, self.device) for _ in range(repeats)]
        return {
            "milliseconds": blocks,
            "recompiled": compiled_graphs() - before,
            "finite": bool(self.losses.isfinite().all()),
        }


def compiled_graphs() -> int:
    """Graphs the compiler has made in this process so far."""
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def describe_device(name: str) -> dict[str, Any]:
    device = pick_device(name)
    on_gpu = device.type == "cuda"
    return {
        "device": device.type,
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "gpus": torch.cuda.device_count() if on_gpu else 0,
        "gpu_bytes": torch.cuda.get_device_properties(device).total_memory if on_gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,  # type: ignore[no-untyped-call]
        "triton": find_version("triton"),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def find_version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class Server:
    """Answers requests; whatever fails in the code under measurement is an answer too."""

    session: Session | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if request["do"] == "describe":
                return describe_device(request["device"])
            if request["do"] == "build":
                self.session = Session(request)
                return self.session.warm_up(request["steady_steps"])
            assert self.session is not None, "time before build"
            return self.session.time_blocks(request["steps"], request["repeats"])
        except Exception as error:
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def import_compiler() -> None:
    """Import what the first compilation would, while another worker still measures; if it fails, that will say so."""
    with suppress(ImportError):
        import_module("torch._inductor.compile_fx")


def main() -> None:
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if torch.cuda.is_available():
        import_compiler()
    torch.backends.cudnn.benchmark = True
    server = Server()
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "quit":
            return
        channel.write(json.dumps(server.answer(request)) + "\n")
        channel.flush()


if __name__ == "__main__":
    main()
