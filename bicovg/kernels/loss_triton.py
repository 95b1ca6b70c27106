"""Triton kernel of the cross-entropy; launched by ``bicovg.kernels.loss``."""
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl


@triton.jit
def cross_entropy_kernel(
    loss: tl.tensor,
    grad: tl.tensor,
    logits: tl.tensor,
    labels: tl.tensor,
    rows: tl.tensor,
    classes: tl.tensor,
    BR: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    """Mean of -log softmax at the labels, and its gradient (rows, classes). One program for all rows."""
    k = tl.arange(0, BK)
    total = tl.zeros([BR], dtype=tl.float32)
    for first in range(0, rows, BR):
        r = first + tl.arange(0, BR)
        ok = r < rows
        mask = ok[:, None] & (k < classes)[None, :]
        at = r[:, None] * classes + k[None, :]
        x = tl.load(logits + at, mask=mask, other=float("-inf"))
        x -= tl.where(ok, tl.max(x, axis=1), 0.0)[:, None]
        e = tl.exp(x)
        size = tl.where(ok, tl.sum(e, axis=1), 1.0)
        hit = k[None, :] == tl.load(labels + r, mask=ok, other=0)[:, None]
        total += tl.where(ok, tl.log(size) - tl.sum(tl.where(hit, x, 0.0), axis=1), 0.0)
        slope = (e / size[:, None] - tl.where(hit, 1.0, 0.0)) / rows
        tl.store(grad + at, slope, mask=mask)
    tl.store(loss, tl.sum(total, axis=0) / rows)
