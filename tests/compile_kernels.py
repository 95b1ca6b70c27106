"""Compiles the kernels for an H100 or H200 without one; prints a JSON line: kernel names, and what is wrong with which.

Every launch of ``bicovg.kernels`` goes through ``JITFunction.run``: here it stops after the compiler. Maps are as large
as the recipes', batches small, which the compiler does not see. With ``racy`` one kernel gets a launch shape that is
known to compute wrong values.
"""

import json
import re
import sys
from collections import Counter
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from bicovg.config import OptimConfig
from bicovg.kernels import block, block_backward, borders, image, loss, tail, tiles
from bicovg.kernels.block_backward import differentiate_into, launch_gradient, launch_slopes, launch_sums
from bicovg.kernels.goodness import forward_outputs, launch_backward, launch_forward
from bicovg.lanes import OneLane
from bicovg.networks import local_network
from bicovg.optim import make_optimizers
from bicovg.updates import FusedUpdates

BLOCKS = ((128, 32, (2, 4), False), (256, 32, (1, 2), True), (512, 16, (1, 2), True), (512, 7, (1, 2), False))
SHARED = 227 * 1024  # bytes a program may have


class Driver:
    """A GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def watch_compiler() -> tuple[Counter[str], list[str]]:
    """Names of what is compiled from here on, and complaints; nothing is launched."""
    plain, seen, complaints = JITFunction.run, Counter[str](), list[str]()
    known: set[str] = set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        kernel = plain(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in known:
            known.add(kernel.hash)
            seen[self.__name__] += 1
            if kernel.metadata.shared > SHARED:
                complaints.append(f"{self.__name__} needs {kernel.metadata.shared} bytes of shared memory")
            if re.search(r"pendings = [1-9]", kernel.asm["ttgir"]):
                complaints.append(f"{self.__name__} goes on while a matrix product is in flight: {options}")
        return kernel

    JITFunction.run = run
    return seen, complaints


def compile_block(dtype: torch.dtype, C: int, H: int, scales: tuple[int, int], pool: bool) -> None:
    y = torch.zeros(16, C, H, H, dtype=dtype).contiguous(memory_format=torch.channels_last)
    norm, weight = torch.nn.BatchNorm2d(C), torch.zeros(C // 8, C)
    with torch.no_grad():
        stats = block.block_statistics(y[:1], norm)
        stats = block.block_statistics(y, norm)
    g, p = forward_outputs(y, weight, scales, True, always=True)
    launch_forward(g, p, y, weight.to(dtype), scales, stats)
    launch_sums(*launch_slopes(p, p, torch.zeros_like(g), None, y, scales), y, None, p, stats, scales)
    launch_backward(torch.empty_like(y), torch.zeros_like(g), y, weight.to(dtype), p, scales, True)
    borders.border_sums_op(y)
    differentiate_into(y, p, torch.zeros_like(g), g, y, stats, weight.to(dtype), p, scales)
    h, rms = tail._output(y, pool, torch.channels_last)
    tail.launch_tail(h, rms, y, pool, 0.1, torch.zeros(16, dtype=torch.int64), 3, 1e-6, stats)
    tail.launch_tail_backward(torch.zeros_like(h), h, y, stats, rms, pool, 0.1, 1e-6)


def compile_waiting_forwards() -> None:
    """Every measured launch shape that must wait for its products, and two that may not have been measured."""
    tiles.FORWARD[512, 16] = tiles.Tile(64, 64, 4, 3)
    tiles.FORWARD[128, 64] = tiles.Tile(64, 128, 4, 3)
    for (C, H), tile in tiles.FORWARD.items():
        if tile.asynchronous:
            scales = (2, 4) if C == 128 else (1, 2)
            y = torch.zeros(16, C, H, H, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
            g, p = forward_outputs(y, torch.zeros(C // 8, C), scales, True, always=True)
            launch_forward(g, p, y, torch.zeros(C // 8, C, dtype=y.dtype), scales, torch.zeros(4, C))


def compile_measured_backwards() -> None:
    """Every launch shape of the tables, which may be pipelined, and one of the second pass that must wait."""
    tiles.GRADIENT[512, 16] = tiles.Tile(64, 64, 4, 3)
    for table in (tiles.PRODUCTS, tiles.GRADIENT):
        for C, H in {(C, tile): (C, H) for (C, H), tile in table.items()}.values():
            y = torch.zeros(16, C, H, H, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
            q, cast = torch.zeros(16 * H * H, C // 8, dtype=y.dtype), torch.zeros(C // 8, C, dtype=y.dtype)
            slopes, stats, scales = torch.zeros(16, 16, C), torch.zeros(4, C), (2, 4) if C == 128 else (1, 2)
            if table is tiles.PRODUCTS:
                launch_sums(slopes, torch.zeros(4, C), y, cast, q, stats, scales)
            else:
                launch_gradient(y, slopes, torch.zeros(C // 8 + 2, C), y, cast, q, stats, scales)


def compile_updates(optim: OptimConfig) -> None:
    net = local_network(3, (24,), pools=(), scales=((1, 2),), groups=(1,)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    (optimizer,) = make_optimizers(net, optim, torch.device("cpu"))
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    updates = FusedUpdates(net, [optimizer], shadows=True)
    for clip in (None, 1.0):
        with updates:
            for parameter in net.parameters():
                shadow = updates.shadows.get(parameter)
                takes = shadow is not None and shadow.requires_grad
                (shadow if takes else parameter).grad = torch.zeros_like(shadow if takes else parameter)  # type: ignore[union-attr,arg-type]
            updates.finish(0, net.units[0], torch.zeros(1), optimizer, clip, OneLane())


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    seen, complaints = watch_compiler()
    if "racy" in sys.argv:
        tiles.FORWARD[512, 16] = tiles.Tile(64, 64, 4, 3)
        tiles.Tile.asynchronous = property(lambda tile: False)  # so that nothing waits
        compile_block(torch.bfloat16, 512, 16, (1, 2), True)
        print(json.dumps({"seen": seen, "complaints": complaints}))
        return
    for dtype, shapes in ((torch.bfloat16, BLOCKS), (torch.float32, BLOCKS[:1])):
        for shape in shapes:
            compile_block(dtype, *shape)
    compile_measured_backwards()
    compile_waiting_forwards()
    block_backward.packs_pairs = lambda y: False  # as on a GPU older than these
    compile_block(torch.bfloat16, *BLOCKS[0])
    x = torch.zeros(2, 3, 32, 32, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    image.image_conv_weight_op(image.image_conv_op(x, torch.zeros(128, 3, 3, 3, dtype=torch.bfloat16)), x)
    loss.cross_entropy_op(torch.zeros(128, 100), torch.zeros(128, dtype=torch.int64))
    for optim in (OptimConfig(name="adamw"), OptimConfig(name="sgd", momentum=0.9)):
        compile_updates(optim)
    print(json.dumps({"seen": seen, "complaints": complaints}))


if __name__ == "__main__":
    main()
