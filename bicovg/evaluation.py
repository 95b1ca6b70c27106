"""Exit logits of a data split, and the report made of them. Labels never reach the network."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bicovg.config import FusionConfig
from bicovg.data.loader import Batch, Loader
from bicovg.diagnostics import decline_area, effective_layers, tail_retention
from bicovg.distributed import ALONE, Team
from bicovg.fusion import LogisticFusion, first_best, mean_logits, top_k_accuracy
from bicovg.networks import LocalNetwork


@torch.no_grad()
def collect_logits(
    net: LocalNetwork, judge: Callable[[Tensor], Tensor], batches: Iterable[Batch], classes: int = 0
) -> tuple[Float[Tensor, "e n k"], Int[Tensor, " n"]]:
    """Logits (E, N, K) in float32 and labels (N,), on the network's device, in the batches' order.

    ``judge`` makes a batch's logits of its images, an engine's for one. Without any batch, N is 0 and K ``classes``.
    """
    net.eval()
    device = next(net.parameters()).device
    logits = [torch.empty(len(net.exits), 0, classes, device=device)] if classes else []
    labels = [torch.empty(0, dtype=torch.int64, device=device)] if classes else []
    for batch in batches:
        logits.append(judge(batch.images))
        labels.append(batch.labels)
    return torch.cat(logits, dim=1), torch.cat(labels)


def gather_logits(
    logits: Float[Tensor, "e n k"], loader: Loader, team: Team
) -> tuple[Float[Tensor, "e m k"], Int[Tensor, " m"]]:
    """All logits and labels of a loader, in order, from what each process has of every ``world``-th batch."""
    E, _, K = logits.shape
    whole, begin = logits.new_zeros(E, len(loader.source), K), 0
    for step in range(team.rank, len(loader), team.world):
        first, end = loader.share(step)
        whole[:, first:end] = logits[:, begin : begin + end - first]
        begin += end - first
    return team.add(whole), loader.resident_labels


def exit_accuracies(
    logits: Float[Tensor, "e n k"], labels: Int[Tensor, " n"], team: Team = ALONE
) -> dict[str, list[float]]:
    """Top-1 and top-5 of every exit, in percent."""
    return {f"top{k}": [top_k_accuracy(exit_, labels, k, team) for exit_ in logits] for k in (1, 5)}


def both_accuracies(logits: Float[Tensor, "n k"], labels: Int[Tensor, " n"], team: Team = ALONE) -> dict[str, float]:
    return {f"top{k}": top_k_accuracy(logits, labels, k, team) for k in (1, 5)}


def report_exits(
    logits: Float[Tensor, "e n k"], labels: Int[Tensor, " n"], heldout_top1: list[float] | None, team: Team = ALONE
) -> dict[str, Any]:
    """Everything that needs no fitting; the exit chosen on test is labelled so."""
    exits = exit_accuracies(logits, labels, team)
    best = first_best(exits["top1"])
    chosen = None if heldout_top1 is None else first_best(heldout_top1)
    return {
        "exits": exits,
        "last": both_accuracies(logits[-1], labels, team),
        "best_test_chosen": {"exit": best, **both_accuracies(logits[best], labels, team)},
        "best_heldout_chosen": chosen
        if chosen is None
        else {"exit": chosen, **both_accuracies(logits[chosen], labels, team)},
        "mean": both_accuracies(mean_logits(logits), labels, team),
        "diagnostics": {"DA": decline_area(exits["top1"]), "TR": tail_retention(exits["top1"])},
    }


def report_fusion(
    fit_on: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    config: FusionConfig,
    temperatures: bool = False,
    team: Team = ALONE,
) -> tuple[dict[str, Any], LogisticFusion]:
    """Fit Logistic Fusion on one split's (logits, labels), measure it on another's."""
    fusion = LogisticFusion(len(fit_on[0]), temperatures).to(fit_on[0].device)
    fusion.fit(*fit_on, steps=config.steps, lr=config.lr, team=team)
    with torch.no_grad():
        accuracy = both_accuracies(fusion(test[0]), test[1], team)
    weights = fusion.weights.tolist()
    record = {**accuracy, "weights": weights, "N_eff": effective_layers(weights)}
    if fusion.log_temperature is not None:
        record["temperatures"] = fusion.log_temperature.exp().tolist()
    return record, fusion
