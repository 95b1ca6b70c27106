"""Images held out of a split: seeded, stratified, and the same on every machine."""

import numpy as np
from jaxtyping import Int

from bicovg.errors import UserError


def stratified_holdout(
    labels: Int[np.ndarray, " n"], share: float, seed: int
) -> tuple[Int[np.ndarray, " a"], Int[np.ndarray, " b"]]:
    """Split ``range(len(labels))`` into kept and held-out indices, both sorted.

    Every class gives ``round(share * n)`` of its n images, at least one; which ones is a function of (seed,
    index) alone. A share of 0 holds nothing out.
    """
    import torch

    from bicovg.draws import SPLIT, make_keys

    if not 0 <= share < 1:
        raise UserError(f"held-out share {share} must be at least 0 and below 1, for example 0.02")
    labels = np.asarray(labels)
    everything = np.arange(len(labels), dtype=np.int64)
    if share == 0:
        return everything, everything[:0]
    keys = make_keys(seed, SPLIT, torch.arange(len(labels))).numpy()
    held = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        take = max(1, round(share * len(members)))
        if take >= len(members):
            raise UserError(
                f"class {label} has {len(members)} images, too few to hold out a share of {share}: "
                f"add images or lower the share"
            )
        held[members[np.argsort(keys[members], kind="stable")[:take]]] = True
    return everything[~held], everything[held]
