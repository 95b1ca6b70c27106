"""The whole step as one captured CUDA graph.

It holds everything: gather by index, augmentation draws, all units, clipping, optimizers. Between two replays the host
only copies the next indices and a few numbers into static buffers.
"""

import gc
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from bicovg.aside import Aside
from bicovg.blocks import Block
from bicovg.config import Config
from bicovg.data.loader import Loader
from bicovg.draws import DROPOUT, extend_keys, make_keys
from bicovg.engine import EagerEngine, TrainingState, compile_units
from bicovg.lanes import SMALL, Lanes, first_small_unit
from bicovg.networks import LocalNetwork
from bicovg.optim import set_learning_rate
from bicovg.profiling import graph_workspace
from bicovg.replayed import ReplayedForward
from bicovg.roofline import trace_layers
from bicovg.step import PRECISIONS
from bicovg.updates import FusedUpdates, updates_available

WARMUP_STEPS = 3
LANES = 4
FUSED_UPDATES = True  # bicovg.updates instead of torch's clip, check and optimizer


class GraphEngine(EagerEngine):
    """The whole step captured once and replayed; needs a GPU and a data set that lives on it.

    Args:
        compiled: whether inductor compiles the units. By default where a block does more behind its convolution than
            the fused kernels know: compiling what is left around them takes longer than it saves.
    """

    name = "graph"

    def __init__(
        self,
        net: LocalNetwork,
        optimizers: list[Optimizer],
        config: Config,
        loader: Loader,
        compiled: bool | None = None,
    ) -> None:
        super().__init__(net, optimizers, config, loader)
        compiled_units = compiled or (compiled is None and not fusible(net))
        if FUSED_UPDATES and config.train.schedule == "interleaved" and updates_available(optimizers):
            self.guard = self.make_updates(shadows=config.train.precision == "bfloat16" and not compiled_units)
        first = 0 if config.train.overlap else first_small_unit(config)
        if config.train.schedule == "interleaved" and first + 1 < len(net.units):
            self.lanes = Lanes(LANES if config.train.overlap else 2, first)
            if not compiled_units:
                hand_over_early(net, self.lanes)
        elif len(net.units) == 1 and isinstance(self.guard, FusedUpdates) and self.guard.shadows:
            self.lanes = move_aside(net, config)
        if compiled_units:
            compile_units(net)
        self.indices = torch.arange(loader.batch_size // loader.world, device=loader.device)
        self.images = self._make_images()
        self.root = make_keys(config.seed, DROPOUT).to(loader.device)
        self.epoch, self.step = (torch.zeros((), dtype=torch.int64, device=loader.device) for _ in range(2))
        self.prepare = self._prepare if compiled is False else torch.compile(self._prepare, dynamic=False)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.losses: Tensor | None = None
        self.replays = not compiled_units  # else an evaluation's first batches may still be compiling
        self.replayed: ReplayedForward | None = None

    def make_updates(self, shadows: bool, guarded: bool = True) -> FusedUpdates:
        """The guard that also clips and steps; ``guarded`` as there."""
        return FusedUpdates(self.net, self.optimizers, self.config.train.nonfinite, shadows, guarded)

    def _make_images(self) -> Tensor:
        """Where the first unit's input is put, in the type and layout it computes in.

        A place of its own: left where the preparation happens to make it, it would split memory that activations need.
        """
        data = self.config.data
        images = torch.empty((1, data.image_channels, data.image_size, data.image_size), device="meta")
        shape = (len(self.indices), *self.net.prepare(images).shape[1:])
        kind = PRECISIONS[self.config.train.precision] or torch.float32
        return torch.empty(shape, dtype=kind, device=self.loader.device, memory_format=torch.channels_last)

    def _prepare(self, indices: Tensor, epoch: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Fill ``images``; labels and dropout keys."""
        batch = self.loader.assemble(indices, epoch)
        self.images.copy_(self.net.prepare(batch.images))
        return batch.labels, extend_keys(self.root, step, batch.indices)

    def _body(self) -> Tensor:
        return self.train_prepared(self.images, *self.prepare(self.indices, self.epoch, self.step))

    def capture(self) -> None:
        """Warm up (compile, library search, optimizer state), undo what the warm-up learned, then record."""
        with TrainingState(self.net, self.optimizers):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARMUP_STEPS):
                    self._body()
            torch.cuda.current_stream().wait_stream(side)
            torch._C._cuda_clearCublasWorkspaces()  # those of the warm-up; the graph gets its own, in its own memory
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            gc.collect()  # another engine that goes in the middle of a capture would free memory there
            try:
                with torch.cuda.graph(graph):
                    self.losses = self._body()
            finally:
                torch.cuda.set_stream(stream)  # which a capture that cannot be ended leaves otherwise
        self.graph, self.workspace = graph, graph_workspace(self.loader.device)
        if self.guard is not None:
            if isinstance(self.guard, FusedUpdates):
                self.guard.settle()
            self.guard.reset()

    def warm_up(self) -> None:
        if self.graph is None:
            self.capture()

    def judge(self, images: Tensor) -> Tensor:
        """Replayed, in the memory the step works in as far as that goes, once there is a captured step."""
        if self.graph is None or not self.replays:
            return super().judge(images)
        assert not self.net.training, "a graph of training would be taken for one of evaluation from then on"
        assert not torch.is_grad_enabled()
        if self.replayed is None:
            self.replayed = ReplayedForward(super().judge, self.graph.pool())
        return self.replayed(images)

    def steps(self, epoch: int, start: int = 0) -> Iterator[Tensor]:
        self.warm_up()
        assert self.graph is not None
        assert self.losses is not None
        order = self.loader.order(epoch).to(self.loader.device)
        self.epoch.fill_(epoch)
        for offset in range(start, len(self.loader)):
            step = epoch * len(self.loader) + offset
            set_learning_rate(self.optimizers, self.learning_rate(step))
            self.step.fill_(step)
            self.indices.copy_(order[slice(*self.loader.share(offset))])
            self.graph.replay()
            self.record(step)
            yield self.losses


def fusible(net: LocalNetwork) -> bool:
    """Whether every block runs on the fused kernels; the classic VGG-16, which has no blocks, does not."""
    blocks = [block for block in net.modules() if isinstance(block, Block)]
    return bool(blocks) and all(block.fusible() for block in blocks)


def move_aside(net: LocalNetwork, config: Config) -> Aside:
    """Let weight gradients run beside the rest of the backward pass: all, or those of small blocks alone."""
    aside, features = Aside(), [layer.features for layer in trace_layers(config)]
    for block in net.modules():
        if isinstance(block, Block) and (config.train.overlap or features[block.index] <= SMALL * max(features)):
            block.aside = aside
    return aside


def hand_over_early(net: LocalNetwork, lanes: Lanes) -> None:
    """Let each unit say itself when its output is written: before its goodness, not after its loss."""
    for unit in net.units:
        last = unit.blocks[-1]  # type: ignore[index]
        if isinstance(last, Block):
            last.emitted = lanes.hand_over
