"""A strict network in training, one pixel at a time through every block. Legend: B batch, C D channels, H W map."""

import math

import torch
from torch import Tensor

from reference.goodness import bicovg, readout
from reference.layers import dropout, feature_alignment, rms_norm, rms_pool


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """3x3, one pixel of zeros around the map, no bias."""
    B, C, H, W = x.shape
    values, kernel = x.tolist(), weight.tolist()
    y = torch.zeros(B, len(kernel), H, W, dtype=torch.float64)
    for b in range(B):
        for d in range(len(kernel)):
            for h in range(H):
                for w in range(W):
                    total = 0.0
                    for c in range(C):
                        for i in range(3):
                            for j in range(3):
                                row, column = h + i - 1, w + j - 1
                                if 0 <= row < H and 0 <= column < W:
                                    total += values[b][c][row][column] * kernel[d][c][i][j]
                    y[b, d, h, w] = total
    return y


def batch_norm(y: Tensor, gamma: Tensor, beta: Tensor, eps: float = 1e-5) -> Tensor:
    """Each channel by the mean and the (biased) variance of the batch."""
    out = torch.zeros_like(y)
    for c in range(y.shape[1]):
        values = y[:, c].flatten().tolist()
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / len(values)
        scale = float(gamma[c]) / math.sqrt(variance + eps)
        normal = [scale * (value - mean) + float(beta[c]) for value in values]
        out[:, c] = torch.tensor(normal, dtype=torch.float64).view(y[:, c].shape)
    return out


def relu(z: Tensor) -> Tensor:
    return torch.tensor([max(value, 0.0) for value in z.flatten().tolist()], dtype=torch.float64).view(z.shape)


def block(
    x: Tensor, parts: dict[str, Tensor], pool: bool, keep: Tensor, drop: float, scales: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """h and the logits: FAL (where there is one), convolution, batch norm, ReLU give f; then readout and tail of it."""
    if "w1" in parts:
        x = feature_alignment(x, parts["w1"], parts["w2"])
    f = relu(batch_norm(convolve(x, parts["conv"]), parts["gamma"], parts["beta"]))
    logits = readout(bicovg(f, parts["mixing"], scales), parts["readout"], parts["bias"])
    h = rms_pool(f) if pool else f
    return rms_norm(dropout(h, keep.view(h.shape), drop)), logits
