"""Triton kernels that end a unit's part of a step; launched by ``bicovg.updates``, which explains the design.

``table`` is (rows, 8) int64, a row a parameter: the addresses of the parameter, its gradient, its first and second
moment, its step count and its shadow (0 where there is none), its size, and 1 where the gradient is bfloat16. A program
works on one run of BLOCK elements: ``owner`` names its row, ``start`` its first element.
"""
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl


@triton.jit
def load_gradient(base: tl.tensor, at: tl.tensor, ok: tl.tensor) -> tl.tensor:
    """A run of a gradient in float32."""
    address = tl.load(base + 1)
    if tl.load(base + 7) == 1:
        g = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + at, mask=ok, other=0.0).to(tl.float32)
    else:
        g = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask=ok, other=0.0)
    return g


@triton.jit
def examine_kernel(
    part: tl.tensor, table: tl.tensor, owner: tl.tensor, start: tl.tensor, CLIP: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Sum of squares of one run of gradients, or without CLIP 0; not a finite number where one of them is not."""
    pid = tl.program_id(0)
    base = table + tl.load(owner + pid) * 8
    at = tl.load(start + pid) + tl.arange(0, BLOCK)
    g = load_gradient(base, at, at < tl.load(base + 6))
    tl.store(part + pid, tl.sum(g * (g if CLIP else 0.0), axis=0))


@triton.jit
def decide_kernel(
    flags: tl.tensor,
    factor: tl.tensor,
    part: tl.tensor,
    losses: tl.tensor,
    table: tl.tensor,
    blocks: tl.tensor,
    exits: tl.tensor,
    rows: tl.tensor,
    clip: tl.tensor,
    CLIP: tl.constexpr,
    COUNTS: tl.constexpr,
    PARTS: tl.constexpr,
    EXITS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """``flags``: this unit's, behind the one before it. The clip factor; and one step more, where the unit may step."""
    i = tl.arange(0, PARTS)
    total = tl.zeros([PARTS], dtype=tl.float32)
    for first in range(0, blocks, PARTS):
        total += tl.load(part + first + i, mask=first + i < blocks, other=0.0)
    square = tl.sum(total, axis=0)
    e = tl.arange(0, EXITS)
    seen = square + tl.sum(tl.abs(tl.load(losses + e, mask=e < exits, other=0.0)), axis=0)
    held = tl.load(flags - 1)
    held = tl.where(seen < float("inf"), held, 1.0)  # NaN is not below infinity either
    tl.store(flags, held)
    if CLIP:
        tl.store(factor, tl.minimum(clip / (tl.sqrt(square) + 1e-6), 1.0))
    if COUNTS:
        r = tl.arange(0, ROWS)
        ok = (r < rows) & (tl.load(table + r * 8 + 6, mask=r < rows, other=0) > 0)  # those with a gradient
        count = tl.load(table + r * 8 + 4, mask=ok, other=0).to(tl.pointer_type(tl.float32))
        tl.store(count, tl.load(count, mask=ok, other=0.0) + (1.0 - held), mask=ok)


@triton.jit
def update_kernel(
    table: tl.tensor,
    owner: tl.tensor,
    start: tl.tensor,
    flag: tl.tensor,
    factor: tl.tensor,
    lr: tl.tensor,
    decay: tl.tensor,
    beta1: tl.tensor,
    beta2: tl.tensor,
    rest1: tl.tensor,
    rest2: tl.tensor,
    eps: tl.tensor,
    log_beta1: tl.tensor,
    log_beta2: tl.tensor,
    CLIP: tl.constexpr,
    ADAMW: tl.constexpr,
    MOMENTUM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """AdamW, or SGD with momentum ``beta1``, on one run of a parameter and its shadow; nothing where the flag is set.

    ``rest1`` and ``rest2`` are 1 - beta, rounded once.
    """
    pid = tl.program_id(0)
    base = table + tl.load(owner + pid) * 8
    size = tl.load(base + 6)
    if (tl.load(flag) == 0.0) & (size > 0):
        at = tl.load(start + pid) + tl.arange(0, BLOCK)
        ok = at < size
        address = tl.load(base).to(tl.pointer_type(tl.float32)) + at
        p = tl.load(address, mask=ok, other=0.0)
        g = load_gradient(base, at, ok)
        if CLIP:
            g *= tl.load(factor)
        rate = tl.load(lr)
        if ADAMW:
            moment = tl.load(base + 2).to(tl.pointer_type(tl.float32)) + at
            second = tl.load(base + 3).to(tl.pointer_type(tl.float32)) + at
            count = tl.load(tl.load(base + 4).to(tl.pointer_type(tl.float32))).to(tl.float64)
            m = tl.load(moment, mask=ok, other=0.0)
            m += rest1 * (g - m)
            v = beta2 * tl.load(second, mask=ok, other=0.0) + rest2 * g * g
            tl.store(moment, m, mask=ok)
            tl.store(second, v, mask=ok)
            # 1 - beta^count, from logarithms in float64: in float32 the first steps would lose half their digits
            correction1 = (1.0 - tl.exp(count * log_beta1)).to(tl.float32)
            correction2 = tl.sqrt(1.0 - tl.exp(count * log_beta2)).to(tl.float32)
            p -= rate * decay * p
            p -= rate / correction1 * m / (tl.sqrt(v) / correction2 + eps)
        else:
            g += decay * p
            if MOMENTUM:
                moment = tl.load(base + 2).to(tl.pointer_type(tl.float32)) + at
                g += beta1 * tl.load(moment, mask=ok, other=0.0)
                tl.store(moment, g, mask=ok)
            p -= rate * g
        tl.store(address, p, mask=ok)
        shadow = tl.load(base + 5)
        if shadow != 0:
            tl.store(shadow.to(tl.pointer_type(tl.bfloat16)) + at, p.to(tl.bfloat16), mask=ok)


@triton.jit
def copy_kernel(
    table: tl.tensor, owner: tl.tensor, start: tl.tensor, flags: tl.tensor, BACK: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Four-byte words of buffers to their copies, or ``BACK`` where the flag of their unit is set.

    A row of the table: address of the buffer, address of the copy, words, index of the flag.
    """
    pid = tl.program_id(0)
    base = table + tl.load(owner + pid) * 4
    at = tl.load(start + pid) + tl.arange(0, BLOCK)
    ok = at < tl.load(base + 2)
    buffer = tl.load(base).to(tl.pointer_type(tl.int32)) + at
    copy = tl.load(base + 1).to(tl.pointer_type(tl.int32)) + at
    if BACK:
        if tl.load(flags + tl.load(base + 3)) != 0.0:
            tl.store(buffer, tl.load(copy, mask=ok, other=0), mask=ok)
    else:
        tl.store(copy, tl.load(buffer, mask=ok, other=0), mask=ok)
