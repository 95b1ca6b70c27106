"""Triton kernels that end a unit's part of a step; launched by ``bicovg.updates``, which explains the design.

``table`` is (rows, 8) int64, a row a parameter: the addresses of the parameter, its gradient, its first and second
moment, its step count and its shadow (0 where there is none), its size, and 1 where the gradient is bfloat16. A program
works on one run of BLOCK elements: ``owner`` names its row, ``start`` its first element.
"""
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl


@triton.jit
def load_run(address: tl.tensor, at: tl.tensor, size: tl.tensor, FULL: tl.constexpr) -> tl.tensor:
    """A run in float32; where it is FULL nothing is masked, and threads load several elements at once."""
    if FULL:
        return tl.load(address + at).to(tl.float32)
    else:  # noqa: RET505  (Triton compiles only the branch taken when both are written out)
        return tl.load(address + at, mask=at < size, other=0.0).to(tl.float32)


@triton.jit
def store_run(address: tl.tensor, at: tl.tensor, x: tl.tensor, size: tl.tensor, FULL: tl.constexpr) -> None:
    """A run in the type of ``address``, masked likewise."""
    if FULL:
        tl.store(address + at, x.to(address.dtype.element_ty))
    else:
        tl.store(address + at, x.to(address.dtype.element_ty), mask=at < size)


@triton.jit
def load_gradient(base: tl.tensor, at: tl.tensor, size: tl.tensor, FULL: tl.constexpr) -> tl.tensor:
    """A run of a gradient in float32; only one in bfloat16 is sure to be aligned."""
    address = tl.load(base + 1)
    if tl.load(base + 7) == 1:
        g = load_run(tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), 16), at, size, FULL)
    else:
        g = load_run(address.to(tl.pointer_type(tl.float32)), at, size, FULL)
    return g


@triton.jit
def aligned(address: tl.tensor) -> tl.tensor:
    """A tensor of float32 that has its memory to itself, so that its first element is aligned."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def examine_kernel(
    part: tl.tensor, table: tl.tensor, owner: tl.tensor, start: tl.tensor, CLIP: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Sum of squares of one run of gradients, or without CLIP 0; not a finite number where one of them is not."""
    pid = tl.program_id(0)
    base = table + tl.load(owner + pid) * 8
    first = tl.multiple_of(tl.load(start + pid).to(tl.int32), BLOCK)
    at = first + tl.arange(0, BLOCK)
    size = tl.load(base + 6).to(tl.int32)
    if first + BLOCK <= size:
        g = load_gradient(base, at, size, True)
    else:
        g = load_gradient(base, at, size, False)
    tl.store(part + pid, tl.sum(g * (g if CLIP else 0.0), axis=0))


@triton.jit
def decide_kernel(
    flags: tl.tensor,
    factor: tl.tensor,
    corrections: tl.tensor,
    part: tl.tensor,
    losses: tl.tensor,
    table: tl.tensor,
    blocks: tl.tensor,
    exits: tl.tensor,
    rows: tl.tensor,
    clip: tl.tensor,
    log_beta1: tl.tensor,
    log_beta2: tl.tensor,
    CLIP: tl.constexpr,
    COUNTS: tl.constexpr,
    PARTS: tl.constexpr,
    EXITS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """``flags``: this unit's, behind the one before it. The clip factor; and one step more, where the unit may step.

    ``corrections`` (rows, 2): what AdamW divides the moments by, for the count of each row.
    """
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
        steps = tl.load(count, mask=ok, other=0.0) + (1.0 - held)
        tl.store(count, steps, mask=ok)
        # 1 - beta^steps, from logarithms in float64: in float32 the first steps would lose half their digits
        steps = steps.to(tl.float64)
        tl.store(corrections + 2 * r, (1.0 - tl.exp(steps * log_beta1)).to(tl.float32), mask=ok)
        tl.store(corrections + 2 * r + 1, tl.sqrt(1.0 - tl.exp(steps * log_beta2)).to(tl.float32), mask=ok)


@triton.jit
def update_run(
    base: tl.tensor,
    corrections: tl.tensor,
    at: tl.tensor,
    size: tl.tensor,
    scale: tl.tensor,
    rate: tl.tensor,
    decay: tl.tensor,
    beta1: tl.tensor,
    beta2: tl.tensor,
    rest1: tl.tensor,
    rest2: tl.tensor,
    eps: tl.tensor,
    ADAMW: tl.constexpr,
    MOMENTUM: tl.constexpr,
    FULL: tl.constexpr,
) -> None:
    """One run of a parameter, of its moments and of its shadow; gradients times ``scale``."""
    address = aligned(base)
    p = load_run(address, at, size, FULL)
    g = load_gradient(base, at, size, FULL) * scale
    if ADAMW:
        moment = aligned(base + 2)
        second = aligned(base + 3)
        m = load_run(moment, at, size, FULL)
        m += rest1 * (g - m)
        v = beta2 * load_run(second, at, size, FULL) + rest2 * g * g
        store_run(moment, at, m, size, FULL)
        store_run(second, at, v, size, FULL)
        p -= rate * decay * p
        p -= rate / tl.load(corrections) * m / (tl.sqrt(v) / tl.load(corrections + 1) + eps)
    else:
        g += decay * p
        if MOMENTUM:
            moment = aligned(base + 2)
            g += beta1 * load_run(moment, at, size, FULL)
            store_run(moment, at, g, size, FULL)
        p -= rate * g
    store_run(address, at, p, size, FULL)
    shadow = tl.load(base + 5)
    if shadow != 0:
        store_run(tl.multiple_of(shadow.to(tl.pointer_type(tl.bfloat16)), 16), at, p, size, FULL)


@triton.jit
def update_kernel(
    table: tl.tensor,
    owner: tl.tensor,
    start: tl.tensor,
    flag: tl.tensor,
    factor: tl.tensor,
    corrections: tl.tensor,
    lr: tl.tensor,
    decay: tl.tensor,
    beta1: tl.tensor,
    beta2: tl.tensor,
    rest1: tl.tensor,
    rest2: tl.tensor,
    eps: tl.tensor,
    CLIP: tl.constexpr,
    ADAMW: tl.constexpr,
    MOMENTUM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """AdamW, or SGD with momentum ``beta1``, on one run of a parameter and its shadow; nothing where the flag is set.

    ``rest1`` and ``rest2`` are 1 - beta, rounded once.
    """
    pid = tl.program_id(0)
    row = tl.load(owner + pid)
    base = table + row * 8
    size = tl.load(base + 6).to(tl.int32)
    if (tl.load(flag) == 0.0) & (size > 0):
        first = tl.multiple_of(tl.load(start + pid).to(tl.int32), BLOCK)
        at = first + tl.arange(0, BLOCK)
        scale = tl.load(factor) if CLIP else 1.0
        rate = tl.load(lr)
        own = corrections + 2 * row
        if first + BLOCK <= size:
            update_run(base, own, at, size, scale, rate, decay, beta1, beta2, rest1, rest2, eps, ADAMW, MOMENTUM, True)
        else:
            update_run(base, own, at, size, scale, rate, decay, beta1, beta2, rest1, rest2, eps, ADAMW, MOMENTUM, False)


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
