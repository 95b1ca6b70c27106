"""Goodness, element by element. Legend: B batch, C channels, H W map, s scale, N projections, K classes."""

import torch
from torch import Tensor


def cell_of(position: int, size: int, scale: int) -> int:
    """The cell a row (or column) lies in: the last one that starts at or before it."""
    cell = 0
    for i in range(scale):
        if (i * size) // scale <= position:
            cell = i
    return cell


def mean_cells(x: Tensor, scale: int) -> Tensor:
    """(B, C, H, W) -> (B, C, s, s): every pixel is added to the one cell it lies in."""
    B, C, H, W = x.shape
    values = x.tolist()
    means = torch.zeros(B, C, scale, scale, dtype=torch.float64)
    for b in range(B):
        for c in range(C):
            sums = [[0.0] * scale for _ in range(scale)]
            counts = [[0] * scale for _ in range(scale)]
            for h in range(H):
                for w in range(W):
                    i, j = cell_of(h, H, scale), cell_of(w, W, scale)
                    sums[i][j] += values[b][c][h][w]
                    counts[i][j] += 1
            for i in range(scale):
                for j in range(scale):
                    means[b, c, i, j] = sums[i][j] / counts[i][j]
    return means


def spatial_energy(f: Tensor, scale: int) -> Tensor:
    """pcs: mean of f^2 per channel and cell; order channel, row, column."""
    B, C, H, W = f.shape
    values = f.tolist()
    squares = torch.zeros(B, C, H, W, dtype=torch.float64)
    for b in range(B):
        for c in range(C):
            for h in range(H):
                for w in range(W):
                    squares[b, c, h, w] = values[b][c][h][w] * values[b][c][h][w]
    means = mean_cells(squares, scale).tolist()
    rows = []
    for b in range(B):
        row = []
        for c in range(C):
            for i in range(scale):
                for j in range(scale):
                    row.append(means[b][c][i][j])
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def cross_channel_energy(f: Tensor, weight: Tensor, scale: int) -> Tensor:
    """cc: the energy of p[k] = sum_c weight[k, c] f[c]."""
    B, C, H, W = f.shape
    N = len(weight)
    values, matrix = f.tolist(), weight.tolist()
    projected = torch.zeros(B, N, H, W, dtype=torch.float64)
    for b in range(B):
        for k in range(N):
            for h in range(H):
                for w in range(W):
                    total = 0.0
                    for c in range(C):
                        total += matrix[k][c] * values[b][c][h][w]
                    projected[b, k, h, w] = total
    return spatial_energy(projected, scale)


def bicovg(f: Tensor, weight: Tensor | None, scales: tuple[int, ...]) -> Tensor:
    """``[pcs(s1) | cc(s1) | pcs(s2) | cc(s2)]``, sample by sample."""
    rows = []
    for b in range(len(f)):
        sample = f[b : b + 1]
        row: list[float] = []
        for scale in scales:
            row += spatial_energy(sample, scale)[0].tolist()
            if weight is not None:
                row += cross_channel_energy(sample, weight, scale)[0].tolist()
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def readout(g: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``W g + b``."""
    K, D = weight.shape
    goodness, matrix, offsets = g.tolist(), weight.tolist(), bias.tolist()
    logits = torch.zeros(len(g), K, dtype=torch.float64)
    for b in range(len(g)):
        for k in range(K):
            total = offsets[k]
            for d in range(D):
                total += matrix[k][d] * goodness[b][d]
            logits[b, k] = total
    return logits
