"""Triton kernel of the cross-entropy; launched by ``bicovg.kernels.loss``."""
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl


@triton.jit
def cross_entropy_kernel(
    losses: tl.tensor,
    grad: tl.tensor,
    logits: tl.tensor,
    labels: tl.tensor,
    rows: tl.tensor,
    classes: tl.tensor,
    BR: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    """-log softmax at the labels of BR rows, divided by all rows, and its gradient (rows, classes)."""
    k = tl.arange(0, BK)
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    ok = r < rows
    mask = ok[:, None] & (k < classes)[None, :]
    at = r[:, None] * classes + k[None, :]
    x = tl.load(logits + at, mask=mask, other=float("-inf"))
    x -= tl.where(ok, tl.max(x, axis=1), 0.0)[:, None]
    e = tl.exp(x)
    size = tl.where(ok, tl.sum(e, axis=1), 1.0)
    hit = k[None, :] == tl.load(labels + r, mask=ok, other=0)[:, None]
    tl.store(losses + r, (tl.log(size) - tl.sum(tl.where(hit, x, 0.0), axis=1)) / rows, mask=ok)
    slope = (e / size[:, None] - tl.where(hit, 1.0, 0.0)) / rows
    tl.store(grad + at, slope, mask=mask)
