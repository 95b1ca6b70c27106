"""Every fused kernel compiled for an H200, on a machine without one: what does not compile there shows up here.

    python benchmarks/compile_kernels.py                     every shape that `make kernels` times, both types: minutes
    python benchmarks/compile_kernels.py --blocks 2 --types bfloat16

The wrappers are called as they are, on a CPU, with Triton told of a card that is not there and every launch stopped
when the kernel is compiled. What comes out is machine code and what it takes of the card: registers, bytes spilled from
them, shared memory. It says nothing of what a kernel computes, nor how fast.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import triton
from kernel_blocks import BLOCKS, Block
from kernel_checks import finished, fused, make_norm
from kernel_edges import BORDERS, Edge, recipe_edges
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bicovg.config import OptimConfig
from bicovg.kernels.borders import border_sums_op
from bicovg.kernels.goodness import fused_bicovg
from bicovg.kernels.image import image_conv_op, image_conv_weight_op
from bicovg.kernels.loss import cross_entropy_op
from bicovg.lanes import OneLane
from bicovg.networks import local_network
from bicovg.optim import make_optimizers
from bicovg.updates import FusedUpdates

TARGET, SMS, MOST = GPUTarget("cuda", 90, 32), 132, 1 << 24  # elements of a map: its batch is cut to that
TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
OPTIMIZERS = (OptimConfig(name="adamw", lr=1e-3), OptimConfig(name="sgd", lr=0.1, momentum=0.9))


class NoCard:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def only_compile() -> dict[str, Any]:
    """From here on launches compile, and do no more, in this process; what they made, by name and hash."""
    found: dict[str, Any] = {}

    def launch(self: JITFunction, grid: Any) -> Callable[..., None]:
        def compile_it(*args: Any, **options: Any) -> None:
            kernel = self.run(*args, grid=grid, warmup=True, **options)
            found[f"{self.fn.__name__} {kernel.hash}"] = kernel

        return compile_it

    JITFunction.__getitem__ = launch
    for module in [module for name, module in sys.modules.items() if name.startswith("bicovg.")]:
        for name, stand_in in (("fused_available", lambda f: True), ("count_sms", lambda f: SMS)):
            if hasattr(module, name):
                setattr(module, name, stand_in)
    driver.set_active(NoCard())
    return found


def compile_block(block: Block, dtype: torch.dtype) -> None:
    """Forward and backward, inside a unit and at its end."""
    C, H, N = block.channels, block.size, block.projections
    B = max(1, min(block.batch, MOST // (C * H * H)))
    y = torch.zeros(B, C, H, H, dtype=dtype).contiguous(memory_format=torch.channels_last)
    side = H // 2 if block.pool else H
    grads = [torch.zeros(B, (C + N) * sum(s * s for s in block.scales)), torch.zeros(B, C, side, side)]
    for way in (fused, finished):
        way(block, y.clone(), torch.zeros(N, C), make_norm(C), grads, torch.arange(B))


def compile_edge(edge: Edge, dtype: torch.dtype) -> None:
    """The image's convolution, which on a GPU is for bfloat16 alone, or FAL's sums."""
    B = max(1, min(edge.batch, MOST // (edge.channels * edge.size**2)))
    dy = torch.zeros(B, edge.channels, edge.size, edge.size, dtype=dtype).contiguous(memory_format=torch.channels_last)
    if edge.kind == BORDERS:
        border_sums_op(dy)
    if edge.kind == BORDERS or dtype != torch.bfloat16:
        return
    x = torch.zeros(B, edge.before, edge.size, edge.size, dtype=dtype)
    image_conv_op(x, torch.zeros(edge.channels, edge.before, 3, 3, dtype=dtype))
    image_conv_weight_op(dy, x)


def compile_alone(dtype: torch.dtype) -> None:
    """Goodness of maps that no block made, and a block without projections."""
    compile_block(BLOCKS[0]._replace(projections=0), dtype)
    for projections in (0, 16):
        f = torch.zeros(8, 128, 32, 32, dtype=dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
        weight = torch.zeros(projections, 128, requires_grad=True) if projections else None
        fused_bicovg(f, weight, (2, 4)).sum().backward()


def compile_rest() -> None:
    """Cross-entropy, and the updates of both optimizers, clipped and not."""
    cross_entropy_op(torch.zeros(128, 100), torch.zeros(128, dtype=torch.int64))
    for optim in OPTIMIZERS:
        net = local_network(3, (16, 16), pools=(1,), scales=((1, 2), (1, 2)))
        optimizers = make_optimizers(net, optim, torch.device("cpu"))
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = torch.tensor(0.1)
        for clip_norm in (None, 1.0):
            updates = FusedUpdates(net, optimizers)
            with updates:
                for parameter in net.units[0].parameters():
                    parameter.grad = torch.zeros_like(parameter)
                for weight, shadow in updates.shadows.items():
                    weight.grad, shadow.grad = None, torch.zeros_like(shadow) if shadow.requires_grad else None
                updates.finish(0, net.units[0], torch.zeros(1), optimizers[0], clip_norm, OneLane())


def resources(kernel: Any) -> str:
    """What the assembler says a kernel takes."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        command = [get_ptxas(TARGET.arch).path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = (re.search(what, said)[1] for what in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    return f"{registers:>4} registers {spilled:>5} bytes spilled {kernel.metadata.shared:>7} bytes shared"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=len(BLOCKS), help="how many of them, the first")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    args = parser.parse_args()
    found = only_compile()
    for dtype in (TYPES[name] for name in args.types):
        for block in BLOCKS[: args.blocks]:
            compile_block(block, dtype)
        for edge in recipe_edges() if args.blocks == len(BLOCKS) else recipe_edges()[:1]:
            compile_edge(edge, dtype)
        compile_alone(dtype)
    compile_rest()
    for name in sorted(found):
        print(f"{name.split()[0]:24}{resources(found[name])}")
    print(f"{len(found)} kernels compiled for compute capability 9.0 by Triton {triton.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
