"""Shared by the kernel benchmarks: the recipes' block shapes, random inputs, timing, parallel compilation."""

import math
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
import bicovg.kernels.goodness
import bicovg.kernels.tail  # noqa: F401  (both register their operators)
from bicovg.config import Config
from bicovg.recipes import RECIPES
from bicovg.roofline import trace_layers

PEAK = 4.3e12  # bytes a second: a large copy, measured on an H200
LAST = torch.channels_last
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU only to try the code, in the interpreter


class Block(NamedTuple):
    recipe: str
    batch: int
    channels: int
    size: int
    scales: tuple[int, ...]
    pool: bool
    projections: int

    def __str__(self) -> str:
        return f"{self.recipe:9} B{self.batch} C{self.channels} {self.size}x{self.size}"


BLOCKS = [  # to be timed
    *(Block("vgg8", 128, c, h, s, p, c // 8) for c, h, s, p in (
        (128, 32, (2, 4), False), (256, 32, (1, 2), True), (256, 16, (1, 2), False), (512, 16, (1, 2), True),
        (512, 8, (1, 2), True), (512, 4, (1, 2), True), (512, 2, (1, 2), False))),
    *(Block("vgg16-64", 256, c, h, s, p, c // 8) for c, h, s, p in (
        (128, 64, (2, 4), True), (256, 32, (1, 2), True), (512, 16, (1, 2), False), (512, 8, (1, 2), True),
        (512, 4, (1, 2), False))),
    *(Block("vgg16-224", 128, c, h, s, p, c // 8) for c, h, s, p in (
        (128, 112, (2, 4), True), (256, 56, (1, 2), True), (512, 28, (1, 2), True), (512, 14, (1, 2), False),
        (512, 7, (1, 2), False))),
]  # fmt: skip


def recipes() -> Iterator[tuple[str, Config]]:
    """Those that train on these kernels; half a batch on each of two GPUs is the same kernel on fewer images."""
    for name, make in RECIPES.items():
        config = make()
        if config.model.method == "bicovg" and not name.endswith("-2gpu"):
            yield name, config


def recipe_blocks() -> list[Block]:
    """The exits of every recipe: each shape of goodness (C, H, scales, projections) and of tail (C, H, pool) once."""
    found: list[Block] = []
    goodness, tails = set(), set()
    for name, config in recipes():
        for layer in trace_layers(config):
            scales = tuple(config.model.scales[layer.index]) if config.model.multi_scale else (1,)
            pool = layer.side_after < layer.side
            shape, tail = (layer.channels, layer.side, scales, layer.projections), (layer.channels, layer.side, pool)
            if layer.goodness and not (shape in goodness and tail in tails):
                batch = config.train.batch_size
                found.append(Block(name, batch, layer.channels, layer.side, scales, pool, layer.projections))
                goodness.add(shape)
                tails.add(tail)
    return found


def small_blocks() -> list[Block]:
    """Each channels, projections, scales and pool of the recipes once, as one image whose cells have a few pixels."""
    found = {(b.channels, b.projections, b.scales, b.pool): b for b in recipe_blocks()}
    return [b._replace(batch=1, size=max(4, 2 * max(b.scales))) for b in found.values()]


def draw(block: Block, dtype: torch.dtype, last: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fresh f, W (which may have no row), dg and dropout keys."""
    _, B, C, H, scales, _, N = block
    f = torch.randn(B, C, H, H, device=DEVICE, dtype=dtype).relu_()
    w = torch.randn(N, C, device=DEVICE) / math.sqrt(C)
    grad = torch.randn(B, sum((C + N) * s * s for s in scales), device=DEVICE)
    keys = torch.randint(-(1 << 62), 1 << 62, (B,), device=DEVICE)
    return f.contiguous(memory_format=LAST) if last else f, w, grad, keys


def cast(f: Tensor, w: Tensor) -> Tensor:
    return w.to(f.dtype)


def forward(block: Block, f: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = torch.ops.bicovg.goodness(f, w, cast(f, w), list(block.scales), True, True)
    return out


def microseconds(call: Callable[[int], Any], sets: int, budget: float = 0.06) -> float:
    """Median time of ``call(i)``, i running over the input sets inside one captured graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(min(sets, 3)):
            call(i)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(sets):
            call(i)
    times: list[float] = []
    while len(times) < 5 or (sum(times) < budget * 1e3 and len(times) < 50):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[1:]) * 1e3 / sets


def input_sets(block: Block) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Enough bfloat16 inputs that one round leaves the cache, where few enough suffice."""
    size = 2 * block.batch * block.channels * block.size**2
    return [draw(block, torch.bfloat16) for _ in range(min(32, 1 + int(2e8) // size))]


def run_all(worker: Callable[[Any], Any], tasks: list[Any], processes: int = 12) -> list[Any]:
    """Run ``worker`` over the tasks in parallel processes; exceptions come back as results."""
    results: list[Any] = []
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for handle in [pool.apply_async(worker, (task,)) for task in tasks]:
            try:
                results.append(handle.get(timeout=120))
            except Exception as error:
                results.append(error)
    return results
