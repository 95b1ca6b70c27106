"""The tiny runs of the fault suite, and how often each fault is tried."""

import os

FULL = os.environ.get("BICOVG_FULL_COUNTS") == "1"

TINY = [
    *("train", "digits", "--data.name", "synthetic", "--data.num_classes", "4", "--data.image_size", "4"),
    *("--model.channels", "8,8,8,8", "--model.pools", "1", "--model.scales", "[[1,2],[1,2],[1,2],[1,2]]"),
    *("--model.groups", "2,2", "--train.batch_size", "128", "--train.epochs", "3", "--train.threads", "1"),
    *("--train.device", "cpu", "--train.save_seconds", "0.01", "--fusion.steps", "3"),
]
STEPS, EPOCHS = 4, 3  # per epoch, in all

VARIANTS = {
    f"{scope}-{schedule}": [
        *("--model.scope", scope, "--model.group_size", "2", "--train.schedule", schedule),
        *("--optim.name", optimizer, "--train.clip_norm", clip, "--model.alignment", alignment),
    ]
    for scope, schedule, optimizer, clip, alignment in (
        ("strict", "interleaved", "adamw", "none", "false"),
        ("strict", "summed", "sgd", "1.0", "true"),
        ("hgb", "interleaved", "sgd", "1.0", "false"),
        ("hgb", "summed", "adamw", "none", "true"),
        ("grouped", "interleaved", "adamw", "1.0", "true"),
        ("end-to-end", "summed", "sgd", "none", "false"),
        ("grouped", "summed", "sgd", "none", "true"),
        ("end-to-end", "interleaved", "adamw", "1.0", "false"),
    )
}
VARIANTS["hgb-summed-global"] = [*VARIANTS["hgb-summed"], "--train.clip_norm", "1.0", "--train.clip_scope", "global"]


def count(full, in_ci):
    """How many trials: ``make faults`` runs the full number, ``make test`` a share of it."""
    return full if FULL else in_ci
