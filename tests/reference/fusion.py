"""Logistic Fusion and accuracies with one loop per index, the gradient and Adam written out by hand."""

import math

Logits = list[list[list[float]]]  # exit, sample, class


def softmax(values: list[float]) -> list[float]:
    top = max(values)
    powers = [math.exp(value - top) for value in values]
    return [power / sum(powers) for power in powers]


def fuse(weights: list[float], logits: Logits) -> list[list[float]]:
    fused = []
    for sample in range(len(logits[0])):
        row = []
        for k in range(len(logits[0][0])):
            total = 0.0
            for exit_ in range(len(logits)):
                total += weights[exit_] * logits[exit_][sample][k]
            row.append(total)
        fused.append(row)
    return fused


def gradient(alpha: list[float], logits: Logits, labels: list[int]) -> list[float]:
    """d (mean cross-entropy of the fused logits) / d alpha, through the softmax by the chain rule."""
    weights = softmax(alpha)
    slope = [0.0] * len(alpha)  # d loss / d weight
    for sample, row in enumerate(fuse(weights, logits)):
        for k, probability in enumerate(softmax(row)):
            error = (probability - (k == labels[sample])) / len(labels)
            for exit_ in range(len(alpha)):
                slope[exit_] += error * logits[exit_][sample][k]
    middle = sum(weight * s for weight, s in zip(weights, slope, strict=True))
    return [weight * (s - middle) for weight, s in zip(weights, slope, strict=True)]


def fit(logits: Logits, labels: list[int], steps: int, lr: float) -> list[float]:
    """Fusion weights after ``steps`` of Adam (0.9, 0.999, 1e-8) from alpha = 0."""
    alpha = [0.0] * len(logits)
    first, second = [0.0] * len(logits), [0.0] * len(logits)
    for t in range(1, steps + 1):
        for exit_, g in enumerate(gradient(alpha, logits, labels)):
            first[exit_] = 0.9 * first[exit_] + 0.1 * g
            second[exit_] = 0.999 * second[exit_] + 0.001 * g * g
            m, v = first[exit_] / (1 - 0.9**t), second[exit_] / (1 - 0.999**t)
            alpha[exit_] -= lr * m / (math.sqrt(v) + 1e-8)
    return softmax(alpha)


def top_k(logits: list[list[float]], labels: list[int], k: int) -> float:
    """Percent of samples with fewer than k rivals that reach the label's logit."""
    hits = 0
    for row, label in zip(logits, labels, strict=True):
        rivals = 0
        for other, value in enumerate(row):
            if other != label and value >= row[label]:
                rivals += 1
        hits += rivals < k
    return 100 * hits / len(labels)
