"""From exit logits (E, B, K) to one prediction: best block, last block, uniform mean, Logistic Fusion.

Paper: section 3.5. Logistic Fusion fitted on training images (the paper's way) over-weights the deep exits, which are
over-confident there. The plain mean has done better in every full run so far, and held-out images mend the fit only
with a temperature per exit (docs/reproduction.md); all are reported by name.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from bicovg.distributed import ALONE, Team
from bicovg.goodness import widen


@contextmanager
def whole_float32() -> Iterator[None]:
    """No TF32, which training in bfloat16 turns on: it would round logits into ties, and a tie counts as wrong."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def weigh_exits(weights: Float[Tensor, " e"], logits: Float[Tensor, "e b k"]) -> Float[Tensor, "b k"]:
    """``weights . logits``."""
    with whole_float32():
        return torch.einsum("e,ebk->bk", weights, logits)


def mean_logits(logits: Float[Tensor, "e b k"]) -> Float[Tensor, "b k"]:
    """Uniform weights over the exits."""
    return widen(logits).mean(dim=0)


class LogisticFusion(nn.Module):
    """``softmax(alpha) . logits``: one scalar per exit, alpha from zeros (so it starts as the uniform mean).

    With ``temperatures`` (ours, not the paper's) each exit's logits are divided by a fitted temperature first, which
    starts at 1: the weights then need not tell an over-confident exit from a useless one.
    """

    def __init__(self, exits: int, temperatures: bool = False) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(exits))
        self.log_temperature = nn.Parameter(torch.zeros(exits)) if temperatures else None

    @property
    def weights(self) -> Float[Tensor, " e"]:
        return self.alpha.softmax(dim=0)

    def forward(self, logits: Float[Tensor, "e b k"]) -> Float[Tensor, "b k"]:
        scale = self.weights
        if self.log_temperature is not None:
            scale = scale * torch.exp(-self.log_temperature)
        return weigh_exits(scale, widen(logits).to(self.alpha.dtype))

    def fit(
        self,
        logits: Float[Tensor, "e b k"],
        labels: Int[Tensor, " b"],
        steps: int = 500,
        lr: float = 0.01,
        team: Team = ALONE,
    ) -> "LogisticFusion":
        """Full-batch Adam on cross-entropy over cached logits: this process's part of a team's."""
        logits = widen(logits).detach()
        optimizer = torch.optim.Adam(self.parameters(), lr=lr)
        count = int(team.add(torch.tensor([len(labels)])))
        for _ in range(steps):
            optimizer.zero_grad()
            reduction = "mean" if team.world == 1 else "sum"
            with torch.enable_grad(), whole_float32():
                loss = F.cross_entropy(self(logits), labels, reduction=reduction)
                torch.autograd.backward(loss if team.world == 1 else loss / count)
            for parameter in self.parameters():
                assert parameter.grad is not None
                team.add(parameter.grad)
            optimizer.step()
        return self


def top_k_accuracy(logits: Float[Tensor, "b k"], labels: Int[Tensor, " b"], k: int = 1, team: Team = ALONE) -> float:
    """Share of samples whose label is among the k largest logits, in percent. Ties count against the label.

    The samples of all the team's processes count, each once.
    """
    true = logits.gather(1, labels[:, None])
    # a rival with an equal logit counts as larger: a constant predictor scores 0, not 100
    larger = (logits >= true).sum(dim=1) - 1
    hits = (larger >= 0) & (larger < k)  # a NaN logit compares false: larger is -1
    counted: list[int] = team.add(torch.tensor([int(hits.sum()), len(labels)])).tolist()
    return 100.0 * (counted[0] / counted[1])


def first_best(accuracies: list[float]) -> int:
    """Index of the first maximum."""
    return max(range(len(accuracies)), key=lambda i: (accuracies[i], -i))
