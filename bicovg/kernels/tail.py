"""The block's tail on CUDA in one or two kernels: RMSPool (where asked), keyed dropout, RMSNorm.

``fused_tail(f, ...)`` equals ``rms_norm(keyed_dropout(rms_pool(f), ...))`` of ``bicovg.layers`` without its
intermediate roundings, and with exactly the mask of ``bicovg.draws.keep_mask``. It builds no graph: in strict
scope nothing behind a block's goodness needs a gradient.

A small sample stays in one program's registers: f is read once, h written once. A larger one takes two
kernels, sum of squares first, because no program sees the whole sample.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bicovg.kernels.tiles import device_guard, next_power

WHOLE = 32768  # elements of a sample held in registers; half of it while pooling, which loads four times as many
TILE = 4096  # elements a program otherwise


def launch_tail(
    h: Tensor,
    f: Tensor,
    pool: bool,
    drop: float,
    keys: Tensor | None,
    index: int,
    eps: float,
    stats: Tensor | None = None,
) -> None:
    """Fill h from f, both channels_last; with ``stats`` (see ``norm_triton``) f holds y, from which f is made."""
    from bicovg.kernels.tail_triton import normalise_kernel, square_kernel, whole_kernel

    B, C, H, W = f.shape
    pixels = h.shape[2] * h.shape[3]
    BC = next_power(C)
    dropped = drop > 0.0
    assert keys is not None or not dropped, "dropout needs keys"
    table = f if keys is None else keys
    threshold, gain = round(drop * (1 << 24)), 1.0 / (1.0 - drop)
    shape = {"C": C, "H": H, "W": W, "POOL": pool, "DROP": dropped, "NORM": stats is not None, "BC": BC}
    inputs = (f, f if stats is None else stats, table, index, threshold, gain)
    PB = next_power(pixels)
    with device_guard(f):
        if (WHOLE // 2 if pool else WHOLE) >= PB * BC:
            warps = min(16, max(4, PB * BC // 1024))
            whole_kernel[(B,)](h, *inputs, eps, **shape, PB=PB, num_warps=warps)
            return
        PB = max(1, TILE // BC)
        tiles = math.ceil(pixels / PB)
        part = torch.empty((B, tiles), dtype=torch.float32, device=f.device)
        square_kernel[(B, tiles)](h, part, *inputs, **shape, PB=PB, num_warps=4)
        normalise_kernel[(B, tiles)](
            h, part, *inputs, eps, **shape, PB=PB,
            TILES=tiles, PARTS=next_power(tiles), num_warps=4,
        )  # fmt: skip


def _output(f: Tensor, pool: bool, layout: torch.memory_format) -> Tensor:
    """Uninitialised h."""
    B, C, H, W = f.shape
    size = (B, C, H // 2, W // 2) if pool else (B, C, H, W)
    return torch.empty(size, dtype=f.dtype, device=f.device, memory_format=layout)


def _layout(f: Tensor) -> torch.memory_format:
    """h takes f's memory format."""
    last = f.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


@torch.library.custom_op(
    "bicovg::tail",
    mutates_args=(),
    schema="(Tensor f, Tensor? stats, bool pool, float drop, Tensor? keys, int index, float eps) -> Tensor",
)
def tail_op(
    f: Tensor, stats: Tensor | None, pool: bool, drop: float, keys: Tensor | None, index: int, eps: float
) -> Tensor:
    """h in f's dtype and memory format."""
    h = _output(f, pool, torch.channels_last)
    keys = None if keys is None else keys.contiguous()
    launch_tail(h, f.contiguous(memory_format=torch.channels_last), pool, drop, keys, index, eps, stats)
    if _layout(f) == torch.channels_last:
        return h
    return _output(f, pool, torch.contiguous_format).copy_(h)


@tail_op.register_fake
def _(f: Tensor, stats: Tensor | None, pool: bool, drop: float, keys: Tensor | None, index: int, eps: float) -> Tensor:
    return _output(f, pool, _layout(f))


def fused_tail(
    f: Float[Tensor, "b c h w"],
    pool: bool,
    drop: float,
    keys: Int[Tensor, " b"] | None,
    index: int,
    stats: Float[Tensor, "4 c"] | None = None,
    eps: float = 1e-6,
) -> Float[Tensor, "b c p q"]:
    """``rms_norm(keyed_dropout(rms_pool(f) if pool else f, drop, make_keys(keys, index)), eps)``, without a graph.

    Args:
        f: activations after ReLU; call it where ``fused_available(f)``.
        pool: whether RMSPool 2x2 comes first; an odd map drops its last row / column.
        drop: dropout rate; 0 in evaluation, and then ``keys`` may be None.
        keys: one int64 key a sample.
        index: the block's position, hashed into the keys.
        stats: where given, ``f`` holds y and f is ``relu(batch norm(y))`` by these statistics.
        eps: added to the root mean square.
    """
    h: Tensor = torch.ops.bicovg.tail(f.detach(), stats, pool, drop, keys if drop > 0.0 else None, index, eps)
    return h
