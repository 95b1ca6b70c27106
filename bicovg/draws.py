"""Random draws that are functions of where they are used, never of generator state.

Every draw (data order, augmentation, dropout) is a hash of a key such as (seed, epoch, sample index) or
(seed, step, block, sample index). A resumed run, another prefetch depth, another schedule or another number of
processes therefore sees the same draws. All functions are plain integer tensor arithmetic: they run on any device,
inside ``torch.compile`` and inside a captured CUDA graph, and give the same integers everywhere.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Separate streams, so that no two uses of one (seed, epoch, index) share their draws.
ORDER, AUGMENT, DROPOUT, SPLIT, INIT = 1, 2, 3, 4, 5


def _signed(value: int) -> int:
    """The int64 with the same 64 bits as the unsigned ``value``."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's ``>>`` copies the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """The splitmix64 finaliser: int64 in, well-mixed int64 out; products wrap modulo 2^64."""
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def _mix_int(x: int) -> int:
    """``mix`` of one Python integer, so that constant parts of a key cost no kernel."""
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return _signed(x ^ (x >> 31))


def make_keys(*parts: int | Tensor) -> Int[Tensor, "..."]:
    """Hash any mix of integers and int64 tensors (broadcast together) into int64 keys."""
    return extend_keys(0, *parts)


def extend_keys(start: int | Tensor, *parts: int | Tensor) -> Int[Tensor, "..."]:
    """``make_keys(*some, *parts)`` from ``start``, which is ``make_keys(*some)``; from 0, ``make_keys(*parts)``."""
    key = start
    for part in parts:
        assert isinstance(part, int) or part.dtype == torch.int64, "a key part must be an int or an int64 tensor"
        joined = key ^ part
        key = _mix_int(joined & ((1 << 64) - 1)) if isinstance(joined, int) else mix(joined)
    return torch.tensor(key) if isinstance(key, int) else key


def draw_uniforms(keys: Int[Tensor, "*shape"], count: int) -> Float[Tensor, "*shape n"]:
    """``count`` float32 uniforms in [0, 1) for every key, the i-th from the bits of ``make_keys(keys, i + 1)``."""
    # The keys come first: inductor holds what derives from arange alone in 32 bits, and refuses mix's constants there.
    bits = mix(keys.unsqueeze(-1) ^ torch.arange(1, count + 1, dtype=torch.int64, device=keys.device))
    return _shift(bits, 40).to(torch.float32) * (1.0 / (1 << 24))


def draw_permutation(size: int, *parts: int) -> Int[Tensor, " n"]:
    """A permutation of ``range(size)`` fixed by ``parts``, on the CPU."""
    return torch.argsort(make_keys(*parts, torch.arange(size)), stable=True)


def keep_mask(keys: Int[Tensor, " b"], shape: Sequence[int], drop: float, channels_last: bool = False) -> Tensor:
    """Boolean (B, *shape): each element of a sample is dropped with probability ``drop``, resolved to 2^-16.

    This runs once per activation, so the hash is 32-bit ("lowbias32") and serves two elements, those at (2 i, ...) and
    (2 i + 1, ...) of ``shape``: neighbouring channels. The first takes its high half, the second its low half.
    ``channels_last`` is the order in which the mask lies in memory, and changes no element of it.
    """
    rows, inner = shape[0], math.prod(shape[1:])
    pairs = (rows + 1) // 2
    places = torch.arange(pairs * inner, dtype=torch.int32, device=keys.device)
    if channels_last:
        places = places.view(pairs, inner).t().flatten()
    # The key is added before anything is multiplied, for the reason given in draw_uniforms.
    x = (keys & 0xFFFFFFFF).to(torch.int32).unsqueeze(-1) + places
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -2073254261  # 0x846CA68B
    x = x ^ ((x >> 16) & 0xFFFF)
    limit = round(drop * (1 << 16))
    if channels_last:
        halves = torch.stack([(x >> 16) & 0xFFFF, x & 0xFFFF], dim=2).view(-1, inner, 2 * pairs)[:, :, :rows]
        return (halves >= limit).transpose(1, 2).view(-1, *shape)
    x = x.view(-1, pairs, 1, inner)
    halves = torch.cat([(x >> 16) & 0xFFFF, x & 0xFFFF], dim=2).flatten(1, 2)[:, :rows]
    return (halves >= limit).view(-1, *shape)
