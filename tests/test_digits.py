"""The built-in digits: what they are, how they are split, and that the default recipe learns them."""

from pathlib import Path

import torch

from bicovg.config import override
from bicovg.data.digits import load_digits
from bicovg.data.splits import load_splits
from bicovg.recipes import get_recipe
from bicovg.trainer import Trainer


def test_digits_are_1797_gray_images_of_ten_classes() -> None:
    images, labels = load_digits()
    assert images.shape == (1797, 8, 8, 1)
    assert (images.min(), images.max()) == (0, 255)
    assert sorted(set(labels.tolist())) == list(range(10))
    folder = Path(load_digits.__code__.co_filename).parent
    assert (folder / "digits.npz").stat().st_size < 100_000
    assert "CC BY 4.0" in (folder / "digits.txt").read_text()


def test_test_split_is_a_fixed_stratified_fifth() -> None:
    config = get_recipe("digits")
    splits = load_splits(config.data)
    assert (len(splits.train), len(splits.test)) == (1438, 359)
    for seed in (1, 2):
        again = load_splits(override(config, {"seed": seed, "data.split_seed": seed}).data)
        assert torch.equal(again.test.labels, splits.test.labels)
    whole = torch.bincount(torch.cat([splits.train.labels, splits.test.labels]))
    share = torch.bincount(splits.test.labels) / whole
    assert ((share - 0.2).abs() < 0.01).all()


def test_no_test_image_is_trained_on() -> None:
    splits = load_splits(override(get_recipe("digits"), {"data.holdout": 0.1}).data)
    assert splits.heldout is not None
    images = [{image.tobytes() for image in source.array} for source in (splits.train, splits.heldout, splits.test)]  # type: ignore[attr-defined]
    assert all(not a & b for a, b in ((images[0], images[1]), (images[0], images[2]), (images[1], images[2])))


def test_a_short_default_run_already_learns_and_beats_per_channel_goodness_at_block_0(tmp_path: Path) -> None:
    """The whole recipe takes half a minute (`make demo`); its schedule cut to four epochs must reach 96 %."""
    summaries = {}
    for name in ("digits", "digits-per-channel"):
        trainer = Trainer.start(override(get_recipe(name), {"train.epochs": 4}), str(tmp_path / name))
        summaries[name] = trainer.train()
    full, plain = summaries["digits"], summaries["digits-per-channel"]
    assert full is not None
    assert plain is not None
    assert full["fusion"]["train"]["top1"] >= 96.0
    assert full["test"]["mean"]["top1"] >= 96.0
    assert full["test"]["exits"]["top1"][0] > plain["test"]["exits"]["top1"][0] + 5
