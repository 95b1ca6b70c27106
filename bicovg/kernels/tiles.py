"""Launch shapes of the fused kernels, and how a batch of maps is cut into tiles.

The rules below are starting points; ``benchmarks/kernels.py --sweep`` measures candidates for the tables, which win
over the rules. A tile that makes Hopper's asynchronous matrix instruction (a product of 64 or more rows on a multiple
of 4 warps) must wait for it before it goes on, if it is pipelined: Triton 3.6 else reuses its operands' shared memory
for our reductions before it has read them, and a few rows of the result come out wrong. The forward pass waits by using
the product at once; the backward passes, which need it at once, do so by themselves.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MOST_DIRECT_CELLS = 32  # the direct path unrolls over cells


@dataclass(frozen=True)
class Tile:
    """Launch shape of a kernel.

    Attributes:
        pixels: rows of a tile, a power of two >= 16.
        channels: columns of a tile, a power of two >= 16.
        warps: warps a program.
        stages: depth of the load pipeline; 1 turns it off.
        per_sm: programs a multiprocessor, where the grid is bounded: backward, and forward atom by atom.
        registers: cap a thread, to fit more programs on a multiprocessor.
    """

    pixels: int
    channels: int
    warps: int = 4
    stages: int = 3
    per_sm: int = 2
    registers: int | None = None

    @property
    def asynchronous(self) -> bool:
        """Whether a pipelined product of this shape would go on while it is computed."""
        return self.stages > 1 and self.pixels >= 64 and self.warps % 4 == 0


RECOMPUTE_CHANNELS = 128  # up to here the backward pass recomputes p in bfloat16
# Measured bests in bfloat16 by (C, H); all else takes the rules in forward_tile and backward_tile.
FORWARD: dict[tuple[int, int], Tile] = {
    (128, 32): Tile(32, 64, 1, 3, 2),
    (256, 32): Tile(16, 256, 2, 3, 5),
    (256, 16): Tile(32, 64, 1, 3, 2),
    (512, 16): Tile(64, 64, 2, 3, 2),
    (512, 8): Tile(16, 64, 1, 3, 2),
    (512, 4): Tile(16, 128, 4, 3, 2),
    (512, 2): Tile(16, 128, 4, 3, 2),
    (128, 64): Tile(32, 128, 2, 3, 5),
    (128, 112): Tile(16, 128, 2, 3, 8),
    (256, 56): Tile(16, 256, 2, 3, 5),
    (512, 28): Tile(32, 64, 1, 3, 2),
    (512, 14): Tile(64, 64, 2, 3, 2),
    (512, 7): Tile(16, 64, 1, 3, 2),
}
BACKWARD: dict[tuple[int, int], Tile] = {}
PRODUCTS: dict[tuple[int, int], Tile] = {
    (128, 32): Tile(64, 64, 4, 4, 3, 168),
    (256, 32): Tile(128, 64, 4, 3, 2),
    (256, 16): Tile(64, 64, 4, 3, 2),
    (512, 16): Tile(64, 64, 4, 3, 2),
    (512, 8): Tile(64, 64, 4, 3, 2),
    (512, 4): Tile(128, 64, 4, 1, 2),
    (512, 2): Tile(64, 64, 4, 1, 3),
    (128, 64): Tile(128, 64, 4, 3, 2),
    (128, 112): Tile(128, 64, 4, 3, 3),
    (256, 56): Tile(128, 128, 8, 3, 1),
    (512, 28): Tile(64, 64, 4, 3, 2),
    (512, 14): Tile(64, 64, 4, 3, 2),
    (512, 7): Tile(64, 64, 4, 3, 2),
}
GRADIENT: dict[tuple[int, int], Tile] = {
    (128, 32): Tile(64, 64, 4, 3, 3),
    (256, 32): Tile(64, 64, 4, 3, 3),
    (256, 16): Tile(64, 64, 4, 3, 4),
    (512, 16): Tile(64, 64, 4, 3, 3),
    (512, 8): Tile(32, 64, 4, 3, 4),
    (512, 4): Tile(64, 64, 4, 1, 6),
    (512, 2): Tile(64, 64, 4, 1, 6),
    (128, 64): Tile(64, 64, 4, 3, 3),
    (128, 112): Tile(128, 64, 4, 3, 2),
    (256, 56): Tile(64, 64, 4, 3, 3),
    (512, 28): Tile(64, 64, 4, 3, 3),
    (512, 14): Tile(64, 64, 4, 3, 3),
    (512, 7): Tile(64, 64, 4, 3, 3),
}


def next_power(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << (n - 1).bit_length()


def atom_slots(H: int, W: int, L: int) -> int:
    """Pixel slots that hold the largest atom of the L x L grid; its rows and all of it rounded up to powers of two."""
    return next_power(math.ceil(H / L) * next_power(math.ceil(W / L)))


def stores_projection(channels: int, dtype: torch.dtype) -> bool:
    """Whether the forward pass keeps p for the backward pass (see the module's header)."""
    return dtype != torch.bfloat16 or channels > RECOMPUTE_CHANNELS


def forward_tile(C: int, N: int, H: int, W: int, scales: Sequence[int], dtype: torch.dtype) -> Tile:
    """Launch shape of the forward kernel: whole samples for small maps, else large tiles that reuse W."""
    if dtype != torch.bfloat16:
        return Tile(16 if N > 64 else 32, 32, stages=2, per_sm=8)
    if (C, H) in FORWARD:
        return FORWARD[C, H]
    L = math.lcm(*scales)
    sample = next_power(L * L) * atom_slots(H, W, L)
    if sample <= 32:
        return Tile(max(16, sample), 128 if N <= 64 else 64)
    if sample <= 64:
        return Tile(64, 64, stages=1)
    return Tile(64, 64, 2, 3, per_sm=8)


def backward_tile(C: int, N: int, H: int, W: int, scales: Sequence[int], dtype: torch.dtype) -> Tile:
    """Launch shape of the backward kernel; one block of channels must cover C where p is recomputed."""
    if dtype != torch.bfloat16:
        return Tile(32, 32, stages=2)
    if (C, H) in BACKWARD:
        return BACKWARD[C, H]
    # Small atoms: every row has its own slopes, too many bytes to pipeline, and few tiles to pipeline over.
    stages = 1 if atom_slots(H, W, math.lcm(*scales)) <= 8 else 3
    if not stores_projection(C, dtype):
        return Tile(32, max(16, next_power(C)), 4, 1)
    return Tile(32, 64, 4, 1 if N > 32 else stages, per_sm=3)


def sums_tile(C: int, dtype: torch.dtype) -> Tile:
    """Launch shape of the fused block's first backward pass where it sums A f and A f y."""
    if dtype != torch.bfloat16:
        return Tile(32, 32, stages=2)
    return Tile(32, 64, 4, 1, per_sm=4) if C <= 128 else Tile(64, 64, 4, 1, per_sm=3)


def products_tile(C: int, N: int, H: int, dtype: torch.dtype) -> Tile:
    """Launch shape of the fused block's first backward pass where it is matrix products; as many as fit at once."""
    if dtype != torch.bfloat16:
        return Tile(32, 32, stages=2)
    return PRODUCTS.get((C, H), Tile(64, 64, 4, 2, per_sm=4 if N <= 32 else 3))


def gradient_tile(C: int, N: int, H: int, dtype: torch.dtype) -> Tile:
    """Launch shape of the fused block's second backward pass."""
    if dtype != torch.bfloat16:
        return Tile(32, 32, stages=2)
    return GRADIENT.get((C, H), Tile(32, 64, 2, 2, per_sm=8) if N < 64 else Tile(32, 64, 4, 3, per_sm=4))


@dataclass(frozen=True)
class Grid:
    """How a batch of maps is cut into tiles; field names as in ``goodness_triton``."""

    L: int
    AP: int
    T: int
    G: int
    Q: int
    tiles: int
    direct: bool


def cut_batch(B: int, H: int, W: int, scales: Sequence[int], rows: int, whole: bool) -> Grid:
    """Cut B maps into tiles of ``rows`` pixel slots; ``whole`` asks for whole samples where they fit."""
    L = math.lcm(*scales)
    largest = math.ceil(H / L) * next_power(math.ceil(W / L))
    Q = min(atom_slots(H, W, L), rows)
    T = math.ceil(largest / Q)
    cells = sum(s * s for s in scales)
    direct = whole and T == 1 and next_power(L * L) * Q <= rows and cells <= MOST_DIRECT_CELLS
    AP = next_power(L * L) if direct else L * L
    G = rows // Q
    return Grid(L, AP, T, G, Q, math.ceil(B * AP / G) * T, direct)


def fills_tiles(f: Tensor, cut: Grid, pixels: int, N: int, BC: int, NP: int) -> bool:
    """Whether every row and column of every tile of maps f exists, so that none needs a mask."""
    B, C, H, W = f.shape
    return cut.tiles * pixels == B * H * W and C % BC == 0 and N in (0, NP)


def count_sms(f: Tensor) -> int:
    """Multiprocessors of f's device; 2 in the interpreter, so that programs have several tiles there, too."""
    return torch.cuda.get_device_properties(f.device).multi_processor_count if f.is_cuda else 2


def device_guard(f: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it f's."""
    return torch.cuda.device(f.device) if f.is_cuda else nullcontext()
