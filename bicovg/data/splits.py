"""From a data config to image sources and loaders: what the trainer calls."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bicovg.config import Config, DataConfig
from bicovg.data.augment import Augmentation
from bicovg.data.images import ImageSource, MappedImages, TensorImages, VariableImages
from bicovg.data.loader import Loader
from bicovg.distributed import ALONE, Team
from bicovg.errors import UserError

EVAL_BATCH = 512  # most images of an evaluation's batch
EVAL_PIXELS = 1 << 21  # and at most so many pixels: at 224 px less than a batch of training
SYNTHETIC_BYTES = 1 << 29  # of the training images, which are made from 64-bit integers
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass
class Splits:
    """Train, held-out (None unless asked for) and test images of one data set.

    ``fingerprint`` is that of a packed store; what is built in has none.
    """

    train: ImageSource
    heldout: ImageSource | None
    test: ImageSource
    classes: list[str]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fingerprint: str = ""


def load_splits(config: DataConfig) -> Splits:
    """Open a data set by name and check it against the config, before any training."""
    if config.name == "digits":
        splits = _digits(config)
    elif config.name == "synthetic":
        splits = _synthetic(config)
    else:
        splits = _packed(config)
    check_labels(splits, config)
    if config.normalise == "imagenet":
        splits.mean, splits.std = IMAGENET_MEAN, IMAGENET_STD
    elif config.normalise != "train":
        raise UserError(f"--data.normalise {config.normalise!r} is unknown: choose train or imagenet")
    check_images(splits, config)
    return splits


def check_images(splits: Splits, config: DataConfig) -> None:
    """What reaches the network must have the size and the channels that the config announces."""
    size, crop = config.image_size, config.augment.resized_crop
    if crop and crop != size:
        raise UserError(f"--data.augment.resized_crop {crop} differs from --data.image_size {size}: use one size")
    if config.resize and config.resize < size:
        raise UserError(f"--data.resize {config.resize} is smaller than --data.image_size {size}: use {size} or more")
    for name, source, fitted in (("train", splits.train, crop), ("test", splits.test, config.resize)):
        _, height, width, channels = source.batch_shape(np.arange(1))
        if channels != config.image_channels or len(splits.mean) != channels:
            raise UserError(
                f"the {name} images of {config.name} have {channels} channels, --data.image_channels is "
                f"{config.image_channels} and the normalisation has {len(splits.mean)}: make them agree"
            )
        if source.sizes is None and not fitted and (height, width) != (size, size):
            other = f"use {height}, or " if height == width else ""
            raise UserError(
                f"--data.image_size {size} disagrees with {config.name}, whose {name} images are {height}x{width}: "
                f"{other}pack them again with --size {size}"
            )


def check_labels(splits: Splits, config: DataConfig) -> None:
    """K must be the number of classes, every label below it."""
    K = len(splits.classes)
    if config.num_classes != K:
        raise UserError(
            f"--data.num_classes {config.num_classes} disagrees with {config.name}, which has {K} classes: use {K}"
        )
    for name, source in (("train", splits.train), ("test", splits.test)):
        labels = np.asarray(source.labels)
        if len(labels) == 0:
            raise UserError(f"the {name} split of {config.name} is empty")
        if labels.min() < 0 or labels.max() >= K:
            raise UserError(
                f"the {name} split of {config.name} has labels {labels.min()}..{labels.max()}, expected 0..{K - 1}"
            )
        empty = np.flatnonzero(np.bincount(labels, minlength=K) == 0)
        if len(empty):
            raise UserError(f"class {splits.classes[empty[0]]!r} has no image in the {name} split of {config.name}")


def holdout_indices(labels: NDArray[np.int64], config: DataConfig) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Training and held-out indices, stratified by class, fixed by ``split_seed``."""
    from bicovg.data.store_holdout import stratified_holdout

    if not 0 <= config.holdout < 1:
        raise UserError(f"--data.holdout {config.holdout} must be a share between 0 and 1")
    if config.holdout == 0:
        return np.arange(len(labels)), np.arange(0)
    return stratified_holdout(labels, config.holdout, config.split_seed)


def _digits(config: DataConfig) -> Splits:
    from bicovg.data.digits import SPLIT_SEED, TEST_SHARE, load_digits
    from bicovg.data.store_holdout import stratified_holdout

    images, labels = load_digits()
    train, test = stratified_holdout(labels, TEST_SHARE, SPLIT_SEED)
    return _in_memory(config, images[train], labels[train], images[test], labels[test], [str(d) for d in range(10)])


def _synthetic(config: DataConfig) -> Splits:
    """Noise around a fixed picture per class: any shape, for tests and benchmarks. Deterministic."""
    K, S, C = config.num_classes, config.image_size, config.image_channels
    size = max(4 * K, 512) * S * S * C
    if size > SYNTHETIC_BYTES:
        raise UserError(
            f"synthetic images of {K} classes and {S}x{S} pixels would be {size:,} bytes, above {SYNTHETIC_BYTES:,}: "
            "use a smaller --data.num_classes or --data.image_size"
        )
    generator = np.random.Generator(np.random.Philox(0))
    pictures = generator.integers(0, 256, (K, S, S, C))

    def draw(count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        labels = np.arange(count) % K
        noise = generator.integers(-64, 65, (count, S, S, C))
        return np.clip(pictures[labels] + noise, 0, 255).astype(np.uint8), labels.astype(np.int64)

    return _in_memory(config, *draw(max(4 * K, 512)), *draw(2 * K), [f"class {k}" for k in range(K)])


def _in_memory(
    config: DataConfig,
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
    test_images: NDArray[np.uint8],
    test_labels: NDArray[np.int64],
    classes: list[str],
) -> Splits:
    keep, held = holdout_indices(labels, config)
    pixels = images[keep].astype(np.float64) / 255
    return Splits(
        TensorImages(torch.from_numpy(images[keep]), torch.from_numpy(labels[keep])),
        TensorImages(torch.from_numpy(images[held]), torch.from_numpy(labels[held])) if len(held) else None,
        TensorImages(torch.from_numpy(test_images), torch.from_numpy(test_labels)),
        classes,
        tuple(pixels.mean(axis=(0, 1, 2)).tolist()),
        tuple(pixels.std(axis=(0, 1, 2)).tolist()),
    )


def _packed(config: DataConfig) -> Splits:
    """Held-out images come from the train split if asked for, else from the set's own valid split if it has one."""
    from bicovg.data.known import KNOWN
    from bicovg.data.store import PackedStore, data_root

    fit = f" --short-side {config.resize}" if config.resize else f" --size {config.image_size}"
    store = PackedStore.open(data_root(config.root), config.name, "" if config.name in KNOWN else fit)
    store.check_content()
    train, test = store.split("train"), store.split("test")
    keep, held = holdout_indices(train.labels, config)
    wrap = VariableImages if store.kind == "variable" else MappedImages
    heldout = wrap(train, train.labels, held) if len(held) else None
    if heldout is None and "valid" in store.counts:
        valid = store.split("valid")
        heldout = wrap(valid, valid.labels)
    return Splits(
        wrap(train, train.labels, keep) if len(held) else wrap(train, train.labels),
        heldout,
        wrap(test, test.labels),
        list(store.classes),
        tuple(store.mean),
        tuple(store.std),
        store.fingerprint,
    )


def eval_batch(image_size: int) -> int:
    return min(EVAL_BATCH, max(1, EVAL_PIXELS // image_size**2))


def make_loaders(splits: Splits, config: Config, device: torch.device, team: Team = ALONE) -> dict[str, Loader]:
    """Loaders by name; that of ``train`` loads this process's share of every batch, the others whole batches.

    ``train`` is shuffled and augmented; ``plain`` and ``augmented`` are the training images in their own order,
    as they are or freshly augmented, for fusion; ``test`` and, where images are held out, ``heldout``.
    """
    data, size = config.data, config.data.image_size
    training = Augmentation(**asdict(data.augment))
    testing = Augmentation(short_side=data.resize, centre_crop=size) if data.resize else None

    def make(source: ImageSource, augmentation: Augmentation | None, ordered: bool, resident: Any = "auto") -> Loader:
        return Loader(
            source,
            config.train.batch_size if not ordered else min(eval_batch(size), len(source)),
            seed=config.seed,
            augmentation=augmentation,
            mean=splits.mean,
            std=splits.std,
            device=device,
            shuffle=not ordered,
            drop_last=not ordered,
            prefetch=data.prefetch,
            resident=resident,
            rank=0 if ordered else team.share,
            world=1 if ordered else team.data,
        )

    train = make(splits.train, training, ordered=False)
    shared = "auto" if train.resident_images is None else train.resident_images
    loaders = {
        "train": train,
        "plain": make(splits.train, testing, ordered=True, resident=shared),
        "augmented": make(splits.train, training, ordered=True, resident=shared),
        "test": make(splits.test, testing, ordered=True),
    }
    if splits.heldout is not None:
        loaders["heldout"] = make(splits.heldout, testing, ordered=True)
    return loaders
