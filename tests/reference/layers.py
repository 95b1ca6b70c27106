"""The layers, one element at a time. Legend: B batch, C channels, H W map, d hidden width of FAL."""

import math

import torch
from torch import Tensor


def rms_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / (sqrt(mean of squares of the sample) + eps)``."""
    rows = x.reshape(len(x), -1).tolist()
    for row in rows:
        total = 0.0
        for value in row:
            total += value * value
        scale = math.sqrt(total / len(row)) + eps
        for i in range(len(row)):
            row[i] = row[i] / scale
    return torch.tensor(rows, dtype=torch.float64).reshape(x.shape)


def rms_pool(x: Tensor, size: int = 2) -> Tensor:
    """Root mean square of each full window; rows and columns that fill none are dropped."""
    B, C, H, W = x.shape
    values = x.tolist()
    pooled = torch.zeros(B, C, H // size, W // size, dtype=torch.float64)
    for b in range(B):
        for c in range(C):
            for p in range(H // size):
                for q in range(W // size):
                    total = 0.0
                    for h in range(p * size, (p + 1) * size):
                        for w in range(q * size, (q + 1) * size):
                            total += values[b][c][h][w] ** 2
                    pooled[b, c, p, q] = math.sqrt(total / (size * size))
    return pooled


def dropout(x: Tensor, keep: Tensor, drop: float) -> Tensor:
    """Elements whose mask is true grow by 1 / (1 - drop), the others become 0."""
    values, kept = x.flatten().tolist(), keep.flatten().tolist()
    out = []
    for value, stays in zip(values, kept, strict=True):
        out.append(value / (1.0 - drop) if stays else 0.0)
    return torch.tensor(out, dtype=torch.float64).reshape(x.shape)


def feature_alignment(h: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """``h + W2 relu(W1 GAP(h))``."""
    B, C, H, W = h.shape
    values, first, second = h.tolist(), w1.tolist(), w2.tolist()
    out = torch.zeros(B, C, H, W, dtype=torch.float64)
    for b in range(B):
        pooled = []
        for c in range(C):
            total = 0.0
            for row in values[b][c]:
                for value in row:
                    total += value
            pooled.append(total / (H * W))
        hidden = []
        for weights in first:
            total = 0.0
            for c in range(C):
                total += weights[c] * pooled[c]
            hidden.append(max(0.0, total))
        for c in range(C):
            offset = 0.0
            for d in range(len(hidden)):
                offset += second[c][d] * hidden[d]
            for i in range(H):
                for j in range(W):
                    out[b, c, i, j] = values[b][c][i][j] + offset
    return out
