"""Recipes: every row of the paper's tables is there, builds at full width, and trains two steps at its own shape."""

import math

import pytest
import torch

from bicovg.config import Config, override
from bicovg.methods import build_network
from bicovg.networks import count_parameters, dry_run
from bicovg.optim import make_optimizers
from bicovg.recipes import RECIPES, get_recipe
from bicovg.step import local_step

MAIN = {
    "cifar100": ["bicovg", "bicovg-fal", "bp"],
    "tiny-imagenet": ["bicovg", "bicovg-fal", "hgb2", "hgb4", "bp-classic"],
    "imagenet100": ["bicovg", "bicovg-fal", "hgb2", "hgb4", "bp-classic"],
}
ABLATION = ["per-channel", "cc", "ms", "r4", "r16"]


def shrink(config: Config) -> Config:
    """An eighth of the width (or half of the small digits net), so that two steps take a moment."""
    return override(config, {"model.width": 0.5 if config.data.name == "digits" else 0.125})


def build(config: Config) -> torch.nn.Module:
    return build_network(config.model, config.data.num_classes, config.data.image_channels)


@pytest.mark.parametrize("name", [name for name in RECIPES if not name.endswith("-2gpu")])  # the same nets again
def test_recipe_trains_two_steps_on_images_of_its_own_shape(name: str) -> None:
    config = shrink(get_recipe(name))
    data, train = config.data, config.train
    net = build(config)
    before = [p.detach().clone() for p in net.parameters()]
    optimizers = make_optimizers(net, config.optim, torch.device("cpu"))
    images = torch.randn(2, data.image_channels, data.image_size, data.image_size)
    for step in range(2):
        losses = local_step(
            net,
            optimizers,
            images,
            torch.tensor([0, data.num_classes - 1]),
            schedule=train.schedule,
            clip_norm=train.clip_norm,
            clip_scope=train.clip_scope,
            precision=train.precision,
            keys=torch.arange(2) + 10 * step,
        )
        assert losses.shape == (len(net.exits),)
        assert losses.isfinite().all()
    moved = [not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)]
    assert all(moved)  # two steps also reach FAL's W1, whose first gradient is 0


@pytest.mark.parametrize(
    "name", [name for name in RECIPES if not name.startswith("tiny") and not name.endswith("-2gpu")]
)  # the others are again these nets
def test_recipe_passes_the_dry_run_at_full_width(name: str) -> None:
    config = get_recipe(name)
    side = config.data.image_size
    dry_run(lambda: build(config), (config.data.image_channels, side, side))


def test_every_row_of_the_papers_tables_has_a_recipe_and_other_rows_say_ours() -> None:
    for family, rows in MAIN.items():
        for row in rows:
            assert get_recipe(f"{family}-{row}").about.startswith("main"), row
        for row in ABLATION:
            about = get_recipe(f"{family}-{row}").about
            assert about.startswith("ours: ablation" if family == "cifar100" else "ablation"), about
    for row in ("hgb2", "hgb4", "grouped"):
        assert get_recipe(f"cifar100-{row}").about.startswith("ours")
    for name in RECIPES:
        family = next((f for f in MAIN if name.startswith(f)), None)
        if family and name.removeprefix(f"{family}-").removesuffix("-2gpu") not in [*MAIN[family], *ABLATION]:
            assert get_recipe(name).about.startswith("ours"), name


@pytest.mark.parametrize(("family", "each"), [("tiny-imagenet", 128), ("imagenet100", 64)])
def test_the_papers_two_gpus_are_recipes_that_differ_in_the_number_of_processes_alone(family: str, each: int) -> None:
    for row in MAIN[family]:
        pair, single = get_recipe(f"{family}-{row}-2gpu"), get_recipe(f"{family}-{row}")
        assert pair.train.batch_size == 2 * each
        assert f"{each} images each" in pair.about
        assert override(single, {"train.processes": 2, "recipe": pair.recipe, "about": pair.about}) == pair


def test_a_recipe_knows_its_own_name() -> None:
    for name in RECIPES:
        assert get_recipe(name).recipe == name


@pytest.mark.parametrize("row", ["bicovg", "bicovg-fal", "bp"])
def test_cifar100_rows_use_the_papers_hyperparameters(row: str) -> None:
    config = get_recipe(f"cifar100-{row}")
    optim, train, augment = config.optim, config.train, config.data.augment
    assert (optim.name, optim.lr, optim.lr_min, optim.weight_decay) == ("adamw", 2e-4, 1e-5, 1e-3)
    assert (train.epochs, train.batch_size, train.clip_norm, train.precision) == (400, 128, None, "float32")
    assert (augment.crop_pad, augment.flip, augment.grayscale) == (4, True, 0.2)
    assert (augment.brightness, augment.contrast, augment.saturation, augment.hue) == (0.4, 0.4, 0.4, 0.0)
    assert (config.data.holdout, config.data.normalise, config.model.dropout) == (0.0, "train", 0.1)


@pytest.mark.parametrize(("family", "batch"), [("tiny-imagenet", 256), ("imagenet100", 128)])
@pytest.mark.parametrize(("row", "warmup"), [("bicovg", 0), ("bicovg-fal", 0), ("hgb2", 5), ("hgb4", 5), ("bp", 0)])
def test_vgg16_rows_use_the_papers_hyperparameters(family: str, batch: int, row: str, warmup: int) -> None:
    config = get_recipe(f"{family}-{row}")
    optim, train = config.optim, config.train
    assert (optim.name, optim.lr, optim.lr_min, optim.momentum) == ("sgd", 0.05, 5e-4, 0.9)
    assert (optim.weight_decay, optim.warmup_epochs) == (1e-4, warmup)
    assert (train.epochs, train.batch_size, train.clip_norm, train.clip_scope) == (90, batch, 1.0, "unit")
    assert (train.precision, config.data.normalise, config.data.holdout) == ("bfloat16", "imagenet", 0.0)


def test_image_sizes_and_transforms_follow_the_data_set() -> None:
    tiny, large = get_recipe("tiny-imagenet-bicovg").data, get_recipe("imagenet100-bicovg").data
    assert (tiny.image_size, tiny.num_classes, tiny.augment.crop_pad, tiny.resize) == (64, 200, 8, 0)
    assert (large.image_size, large.num_classes, large.augment.resized_crop, large.resize) == (224, 100, 224, 256)
    assert get_recipe("imagenet100-bicovg").model.stem == 2
    assert get_recipe("tiny-imagenet-bicovg").model.stem == 1
    assert get_recipe("imagenet100-bp-classic").model.stem == 1


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("imagenet100-bicovg", 32_916_672),
        ("imagenet100-bicovg-fal", 34_358_464),
        ("imagenet100-hgb2", 33_563_680),
        ("imagenet100-hgb4", 30_606_992),
        ("imagenet100-bp-classic", 134_670_244),
    ],
)
def test_efficiency_rows_have_the_stated_parameters(name: str, parameters: int) -> None:
    with torch.device("meta"):
        assert count_parameters(build(get_recipe(name))) == parameters


@pytest.mark.parametrize("family", ["cifar100", "tiny-imagenet"])
def test_ablation_rows_differ_from_the_full_method_in_their_switch_alone(family: str) -> None:
    full = get_recipe(f"{family}-bicovg")
    switches = {
        "per-channel": {"model.cross_channel": False, "model.multi_scale": False},
        "cc": {"model.multi_scale": False},
        "ms": {"model.cross_channel": False},
        "r4": {"model.reduction": 4},
        "r16": {"model.reduction": 16},
    }
    for row, changes in switches.items():
        config = get_recipe(f"{family}-{row}")
        assert override(full, {**changes, "recipe": config.recipe, "about": config.about}) == config


def test_untrained_losses_are_near_chance() -> None:
    config = shrink(get_recipe("cifar100-bicovg"))
    net = build(config)
    optimizers = make_optimizers(net, config.optim, torch.device("cpu"))
    losses = local_step(net, optimizers, torch.randn(8, 3, 32, 32), torch.arange(8))
    assert losses.tolist() == pytest.approx([math.log(100)] * 8, rel=0.2)
