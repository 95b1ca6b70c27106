"""The numbers that the paper prints, each beside the recipe of its row; in percent unless a unit is named."""

# main results table: (Best Pred, Logistic Fusion); CIFAR-100 rows print a single number, BP rows have one exit
MAIN = {
    "cifar100-bicovg": ("", "68.21"),
    "cifar100-bicovg-fal": ("", "70.80"),
    "cifar100-bp": ("70.22", ""),
    "tiny-imagenet-bicovg": ("48.20", "50.38"),
    "tiny-imagenet-bicovg-fal": ("48.41", "50.30"),
    "tiny-imagenet-hgb2": ("48.89", "50.20"),
    "tiny-imagenet-hgb4": ("52.42", "54.48"),
    "tiny-imagenet-bp-classic": ("54.17", ""),
    "imagenet100-bicovg": ("70.83", "71.60"),
    "imagenet100-bicovg-fal": ("72.88", "73.01"),
    "imagenet100-hgb2": ("77.95", "78.22"),
    "imagenet100-hgb4": ("83.79", "83.98"),
    "imagenet100-bp-classic": ("87.61", ""),
}

# ablation table (Logistic Fusion); the paper has no reductions other than 8
ABLATION = {
    data: {
        "per-channel": ("per-channel", paper[0]),
        "cc": ("+ cross-channel", paper[1]),
        "ms": ("+ multi-scale", paper[2]),
        "bicovg": ("BiCovG, r = 8", paper[3]),
        "r4": ("BiCovG, r = 4", ""),
        "r16": ("BiCovG, r = 16", ""),
    }
    for data, paper in (
        ("cifar100", ("", "", "", "68.21")),
        ("tiny-imagenet", ("43.25", "46.12", "47.91", "50.38")),
    )
}

# diagnostics table: data set, (from, to), "SG, DG, DA, TR, N_eff"
DIAGNOSTICS = (
    ("cifar100", ("per-channel", "bicovg"), ""),
    ("cifar100", ("bicovg", "bicovg-fal"), ""),
    ("tiny-imagenet", ("per-channel", "bicovg"), "+2.2, +4.4, -8.7, +0.050, +0.30"),
    ("tiny-imagenet", ("bicovg", "bicovg-fal"), "+0.74, +1.49, +3.9, +0.005, -0.02"),
)

# efficiency table at 224 px, batch 128, by configuration of ``bicovg bench``: peak GB on one GPU, per GPU on two
EFFICIENCY = {
    "strict": ("", ""),
    "strict-fal": ("10.18", "5.41"),
    "hgb-2-interleaved": ("8.94", "4.87"),
    "hgb-4-interleaved": ("8.74", "4.74"),
    "end-to-end": ("", ""),
    "end-to-end-checkpointed": ("", ""),
    "classic": ("16.75", "10.11"),
}
