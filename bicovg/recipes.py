"""Named recipes: one per row of the paper's main, ablation and efficiency tables, and ours, labelled as ours.

A recipe is a function of nothing that returns a complete Config. No torch here.
"""

from collections.abc import Callable
from dataclasses import replace

from bicovg.backbones import VGG8, VGG16, Backbone
from bicovg.config import AugmentConfig, Config, DataConfig, ModelConfig, OptimConfig, TrainConfig, nearest
from bicovg.errors import UserError

Row = tuple[str, str, dict[str, object]]

RECIPES: dict[str, Callable[[], Config]] = {}


def get_recipe(name: str) -> Config:
    """The complete config of a named recipe."""
    if name not in RECIPES:
        raise UserError(f"unknown recipe {name!r}{nearest(name, list(RECIPES))} (`bicovg recipes` lists them)")
    return RECIPES[name]()


def _register(name: str, about: str, build: Callable[[], Config]) -> None:
    assert name not in RECIPES, name
    RECIPES[name] = lambda: replace(build(), recipe=name, about=about)


def _model(backbone: Backbone, **changes: object) -> ModelConfig:
    base = ModelConfig(channels=backbone.channels, pools=backbone.pools, scales=backbone.scales, groups=backbone.groups)
    return replace(base, **changes)  # type: ignore[arg-type]


def digits(**model: object) -> Config:
    """The built-in default: 8x8 handwritten digits, a four-block net, half a minute on a laptop."""
    return Config(model=replace(ModelConfig(), **model))  # type: ignore[arg-type]


def cifar100(**model: object) -> Config:
    """Appendix table "Training hyperparameters for CIFAR-100", VGG-8."""
    jitter = AugmentConfig(crop_pad=4, flip=True, brightness=0.4, contrast=0.4, saturation=0.4, grayscale=0.2)
    return Config(
        data=DataConfig(name="cifar100", image_size=32, image_channels=3, num_classes=100, augment=jitter),
        model=_model(VGG8, **model),
        optim=OptimConfig(name="adamw", lr=2e-4, lr_min=1e-5, weight_decay=1e-3),
        train=TrainConfig(epochs=400, batch_size=128),
    )


def _sgd(warmup: float) -> OptimConfig:
    return OptimConfig(name="sgd", lr=0.05, lr_min=5e-4, weight_decay=1e-4, warmup_epochs=warmup)


def tiny_imagenet(**model: object) -> Config:
    """Appendix table "Training hyperparameters for Tiny-ImageNet and ImageNet-100", 64 px."""
    jitter = AugmentConfig(crop_pad=8, flip=True, brightness=0.4, contrast=0.4, saturation=0.4)
    return Config(
        data=DataConfig(
            name="tiny-imagenet",
            image_size=64,
            image_channels=3,
            num_classes=200,
            normalise="imagenet",
            augment=jitter,
        ),
        model=_model(VGG16, **model),
        optim=_sgd(5.0 if model.get("scope") == "hgb" else 0.0),
        train=TrainConfig(epochs=90, batch_size=256, clip_norm=1.0, precision="bfloat16"),
    )


def imagenet100(**model: object) -> Config:
    """The same table, 224 px: images pass a 2x2 average pool, so block 0 works at 112."""
    jitter = AugmentConfig(resized_crop=224, flip=True, brightness=0.4, contrast=0.4, saturation=0.4)
    return Config(
        data=DataConfig(
            name="imagenet100",
            image_size=224,
            image_channels=3,
            num_classes=100,
            normalise="imagenet",
            resize=256,
            augment=jitter,
        ),
        model=_model(VGG16, **{"stem": 2, **model}),
        optim=_sgd(5.0 if model.get("scope") == "hgb" else 0.0),
        # overlap would keep every unit's output alive; at this size memory is what the method is for
        train=TrainConfig(epochs=90, batch_size=128, clip_norm=1.0, precision="bfloat16", overlap=False),
    )


HGB2 = {"scope": "hgb", "group_size": 2, "alignment": True}
HGB4 = {"scope": "hgb", "group_size": 4, "alignment": True}
CLASSIC = {"method": "classic", "scope": "end-to-end", "dropout": 0.5, "stem": 1}
ABLATION: dict[str, dict[str, object]] = {
    "per-channel": {"cross_channel": False, "multi_scale": False},
    "cc": {"multi_scale": False},
    "ms": {"cross_channel": False},
}


def _register_rows(family: str, base: Callable[..., Config], rows: list[Row]) -> None:
    for suffix, about, changes in rows:
        _register(f"{family}-{suffix}" if suffix else family, about, lambda changes=changes: base(**changes))  # type: ignore[misc]


ABLATION_ROWS: list[Row] = [
    ("per-channel", "ablation: per-channel goodness", ABLATION["per-channel"]),
    ("cc", "ablation: + cross-channel", ABLATION["cc"]),
    ("ms", "ablation: + multi-scale", ABLATION["ms"]),
    ("r4", "ablation: reduction r = 4", {"reduction": 4}),
    ("r16", "ablation: reduction r = 16", {"reduction": 16}),
]
BASELINE_ROWS: list[Row] = [
    ("grouped", "ours: graph cut at group boundaries only, FAL", {"scope": "grouped", "alignment": True}),
    ("bp-deep", "ours: end-to-end, a loss at every block", {"scope": "end-to-end", "exits": "all"}),
    (
        "bp-checkpointed",
        "ours: end-to-end, one exit, activation checkpointing",
        {"scope": "end-to-end", "checkpointing": True},
    ),
]
DIGITS_ROWS: list[Row] = [
    ("", "built-in default, strict BiCovG", {}),
    ("per-channel", "per-channel goodness, to compare with", ABLATION["per-channel"]),
    ("hgb2", "ours: units of two blocks", HGB2),
    ("bp", "ours: end-to-end backprop, same net, one exit", {"scope": "end-to-end"}),
]
CIFAR100_ROWS: list[Row] = [
    ("bicovg", "main table: BiCovG (no FAL), strict, VGG-8", {}),
    ("bicovg-fal", "main table: BiCovG + FAL, strict, VGG-8", {"alignment": True}),
    ("bp", "main table: BP, one exit, VGG-8", {"scope": "end-to-end"}),
    ("hgb2", "ours: HGB, m = 2", HGB2),
    ("hgb4", "ours: HGB, m = 4", HGB4),
    *BASELINE_ROWS,
    *[(suffix, f"ours: {about}", changes) for suffix, about, changes in ABLATION_ROWS],
]


def vgg16_rows(tables: str) -> list[Row]:
    """The rows of a VGG-16 family; ``tables`` names those that hold BiCovG + FAL, HGB and BP."""
    return [
        ("bicovg", "main, ablation: BiCovG (no FAL), strict, VGG-16", {}),
        ("bicovg-fal", f"{tables}: BiCovG + FAL, strict, VGG-16", {"alignment": True}),
        ("hgb2", f"{tables}: HGB 2x8 (m = 2)", HGB2),
        ("hgb4", f"{tables}: HGB 4x4 (m = 4)", HGB4),
        ("bp", "ours: BP on the same 16-block backbone, one exit", {"scope": "end-to-end"}),
        ("bp-classic", f"{tables}: BP, the standard 13-conv VGG-16", CLASSIC),
        *BASELINE_ROWS,
        *ABLATION_ROWS,
    ]


_register_rows("digits", digits, DIGITS_ROWS)
_register_rows("cifar100", cifar100, CIFAR100_ROWS)
_register_rows("tiny-imagenet", tiny_imagenet, vgg16_rows("main"))
_register_rows("imagenet100", imagenet100, vgg16_rows("main, efficiency"))


def _register_two_gpus(family: str) -> None:
    """The main rows as the paper ran them: two processes, batch norm over each one's half of the batch."""
    for row in ("bicovg", "bicovg-fal", "hgb2", "hgb4", "bp-classic"):
        single = RECIPES[f"{family}-{row}"]()
        about = f"main on 2 GPUs: {single.about.partition(': ')[2]}, {single.train.batch_size // 2} images each"
        pair = replace(single, train=replace(single.train, processes=2))
        _register(f"{family}-{row}-2gpu", about, lambda pair=pair: pair)  # type: ignore[misc]


_register_two_gpus("tiny-imagenet")
_register_two_gpus("imagenet100")
