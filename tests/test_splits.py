"""Splits are explicit: train, held-out and test never share an image, and the store is checked before training."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from archives import labelled, write_classes, write_parquet

from bicovg.config import AugmentConfig, Config, DataConfig, TrainConfig
from bicovg.data.sources import open_source
from bicovg.data.splits import Splits, eval_batch, load_splits, make_loaders
from bicovg.data.store import pack
from bicovg.data.store_holdout import stratified_holdout
from bicovg.errors import UserError


def every_image(splits: Splits, name: str) -> list[bytes]:
    source = getattr(splits, name)
    return [image.tobytes() for image in source.gather(np.arange(len(source)))]


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    """Ninety train and nine test images of three classes, 16 px."""
    shards = write_parquet(tmp_path / "p", labelled(90, 3, 16), labelled(9, 3, 16, first=500), 3)
    pack(open_source(shards), tmp_path, "set")
    return DataConfig(name="set", root=str(tmp_path), image_size=16, image_channels=3, num_classes=3)


def test_held_out_images_leave_training_and_are_the_same_for_every_run(config: DataConfig) -> None:
    whole = load_splits(config)
    assert whole.heldout is None
    assert (len(whole.train), len(whole.test)) == (90, 9)
    held = load_splits(replace(config, holdout=0.2))
    train, heldout, test = (set(every_image(held, name)) for name in ("train", "heldout", "test"))
    assert (len(train), len(heldout), len(test)) == (72, 18, 9)
    assert not train & heldout
    assert not (train | heldout) & test
    assert train | heldout == set(every_image(whole, "train"))
    assert np.bincount(held.heldout.labels).tolist() == [6, 6, 6]
    assert every_image(load_splits(replace(config, holdout=0.2)), "heldout") == every_image(held, "heldout")
    assert set(every_image(load_splits(replace(config, holdout=0.2, split_seed=1)), "heldout")) != heldout


@pytest.mark.parametrize(("share", "seed"), [(0.02, 0), (0.3, 1), (0.5, 7)])
def test_every_class_gives_its_share_at_least_one_image(share: float, seed: int) -> None:
    labels = np.repeat([0, 1, 2, 5], [100, 10, 3, 51])[np.random.default_rng(seed).permutation(164)]
    kept, held = stratified_holdout(labels, share, seed)
    np.testing.assert_array_equal(np.sort(np.concatenate([kept, held])), np.arange(164))
    for label, count in ((0, 100), (1, 10), (2, 3), (5, 51)):
        assert (labels[held] == label).sum() == max(1, round(share * count))


def test_a_validation_split_of_the_source_is_held_out_unless_a_share_is_asked_for(tmp_path: Path) -> None:
    for first, split in enumerate(("train", "val", "test")):
        write_classes(tmp_path / "tree" / split, ["a", "b"], 10, first=100 * first)
    pack(open_source(tmp_path / "tree"), tmp_path, "set", size=16)
    config = DataConfig(name="set", root=str(tmp_path), image_size=16, image_channels=3, num_classes=2)
    own = load_splits(config)
    assert (len(own.train), len(own.heldout), len(own.test)) == (20, 20, 20)
    assert not set(every_image(own, "heldout")) & set(every_image(own, "train"))
    share = load_splits(replace(config, holdout=0.2))
    assert (len(share.train), len(share.heldout)) == (16, 4)


def test_a_store_changed_since_packing_is_refused(config: DataConfig) -> None:
    path = Path(config.root, "set", "train.labels")
    path.write_bytes(b"\x01" + path.read_bytes()[1:])
    with pytest.raises(UserError, match=r"train\.labels has changed since it was packed: run `bicovg data pack set"):
        load_splits(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_classes": 4}, "num_classes 4 disagrees with set, which has 3 classes"),
        ({"image_size": 32}, "image_size 32 disagrees with set, whose train images are 16x16"),
        ({"image_channels": 1}, "have 3 channels"),
        ({"holdout": 1.0}, "holdout 1.0 must be a share"),
        ({"holdout": 0.99}, "too few to hold out a share of 0.99"),
        ({"normalise": "batch"}, "'batch' is unknown"),
        ({"name": "other"}, "data set 'other' is not packed"),
    ],
)
def test_a_config_that_does_not_fit_the_store_is_refused(
    config: DataConfig, change: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_splits(replace(config, **change))


@pytest.mark.parametrize("normalise", ["train", "imagenet"])
def test_only_training_batches_are_augmented_and_all_are_normalised_as_told(normalise: str, config: DataConfig) -> None:
    data = replace(
        config, holdout=0.2, normalise=normalise, augment=AugmentConfig(crop_pad=4, flip=True, grayscale=1.0)
    )
    splits = load_splits(data)
    loaders = make_loaders(splits, Config(data=data, train=TrainConfig(batch_size=24)), torch.device("cpu"))
    if normalise == "imagenet":
        mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    else:  # the store's statistics are those of all ninety training images
        whole = load_splits(config).train.gather(np.arange(90)) / 255
        mean, std = whole.mean(axis=(0, 1, 2)), whole.std(axis=(0, 1, 2))
    for name, source in (("plain", splits.train), ("heldout", splits.heldout), ("test", splits.test)):
        seen = torch.cat([batch.images for batch in loaders[name].batches(0)]).permute(0, 2, 3, 1).numpy()
        wanted = (source.gather(np.arange(len(source))) / 255 - mean) / std
        np.testing.assert_allclose(seen, wanted, atol=1e-4, err_msg=name)
    for name in ("train", "augmented"):
        seen = torch.cat([batch.images for batch in loaders[name].batches(0)]).permute(0, 2, 3, 1).numpy() * std + mean
        assert np.ptp(seen, axis=3).max() < 1e-5, "every training image was made gray"


@pytest.mark.parametrize(("image_size", "images"), [(8, 512), (32, 512), (64, 512), (224, 41), (2000, 1)])
def test_an_evaluation_batch_holds_few_large_images_and_many_small_ones(image_size: int, images: int) -> None:
    assert eval_batch(image_size) == images
