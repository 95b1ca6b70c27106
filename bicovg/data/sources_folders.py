"""Image files in folders: the official Tiny-ImageNet, ImageFolder trees (ILSVRC), and plain class folders.

Every file that is not hidden is taken for an image: what cannot be decoded is named, not silently skipped.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from bicovg.data.sources_sample import Sample, Source, name_splits, read_class_list, read_lines
from bicovg.data.store_holdout import stratified_holdout
from bicovg.errors import UserError

_JUNK = {"Thumbs.db", "desktop.ini"}  # left in image folders by desktop systems
SPLIT_FOLDERS = ("train", "test", "val", "valid", "validation")
SPELLINGS = {**{name: name for name in SPLIT_FOLDERS}, "training": "train", "testing": "test"}

Listing = list[tuple[str, int]]  # (path relative to the source's root, label)


def list_folders(folder: Path) -> list[str]:
    """Names of the sub-folders that are not hidden, sorted."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def find_splits(root: Path) -> dict[str, Path]:
    """Folders of splits by their usual names.

    Other spellings (Train, TESTING) count only where they hold folders, no folder beside them but splits does, and they
    make up what is missing to train and test: else they may be classes.
    """
    names = list_folders(root)
    usual = {name: root / name for name in names if name in SPLIT_FOLDERS}
    labelled = {name for name, folder in usual.items() if name == "train" or list_folders(folder)}
    beside = [name for name in names if name.lower() not in SPELLINGS]
    if ("train" in labelled and len(labelled) > 1) or any(list_folders(root / name) for name in beside):
        return usual
    others: dict[str, Path] = {}
    for name in names:
        split = SPELLINGS.get(name.lower())
        if split is not None and name not in usual and split not in labelled and list_folders(root / name):
            if split in others:
                raise UserError(f"{root} has both {others[split].name} and {name}: keep one of them")
            others[split] = root / name
    found = usual | others
    return found if "train" in found and len(found) > 1 else usual


def _stop(error: OSError) -> None:
    raise error


def _list_images(root: Path, folder: Path) -> list[str]:
    """Files below ``folder``, sorted, relative to ``root``; a link to a folder inside it could lead in a circle."""
    found = []
    for parent, folders, files in os.walk(folder, onerror=_stop):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            if os.path.islink(os.path.join(parent, name)):
                place = Path(parent, name)
                raise UserError(f"{place} is a link to a folder: put the folder itself there, or remove the link")
        below = os.path.relpath(parent, root).replace(os.sep, "/")
        found += [f"{below}/{name}" for name in files if not name.startswith(".") and name not in _JUNK]
    return sorted(found)


def _list_classes(root: Path, folder: Path, names: list[str], suffix: str = "") -> Listing:
    listing: Listing = []
    for label, name in enumerate(names):
        place = folder / name / suffix
        images = _list_images(root, place) if place.is_dir() else []
        if not images:
            raise UserError(f"class {name!r} has no image in {place}: add images or remove the class")
        listing += [(image, label) for image in images]
    return listing


def _make_source(
    format: str,
    root: Path,
    classes: tuple[str, ...],
    splits: Mapping[str, Listing],
    whole_files: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
) -> Source:
    def open_split(split: str) -> Iterator[Sample]:
        return (Sample(name, root / name, label) for name, label in splits[split])

    counts = {split: len(listing) for split, listing in splits.items()}
    return Source(format, classes, counts, open_split, {name: root / name for name in whole_files}, options or {})


def read_tiny_imagenet(root: Path) -> Source:
    """train/<wnid>/images/*, val/images with val/val_annotations.txt; unlabelled test images are not used.

    Labels follow the sorted wnids, as in the public parquet copies and in ImageFolder, not wnids.txt's order.
    """
    wnids = sorted(read_lines(root / "wnids.txt"))
    if len(set(wnids)) < len(wnids):
        raise UserError(f"{root / 'wnids.txt'} names a class twice: remove the repetition")
    words = {}
    if (root / "words.txt").is_file():
        words = dict(line.split("\t", 1) for line in read_lines(root / "words.txt") if "\t" in line)
    labels = {wnid: label for label, wnid in enumerate(wnids)}
    annotations = root / "val" / "val_annotations.txt"
    test: Listing = []
    for line in read_lines(annotations):
        name, wnid, *_ = [*line.split("\t"), ""]
        if wnid not in labels or "/" in name:
            raise UserError(f"{annotations} has the line {line!r}, not a file and a class of wnids.txt: correct it")
        test.append((f"val/images/{name}", labels[wnid]))
    splits = {"train": _list_classes(root, root / "train", wnids, "images"), "test": test}
    classes = tuple(f"{wnid}\t{words[wnid]}" if wnid in words else wnid for wnid in wnids)
    whole = ["wnids.txt", "val/val_annotations.txt", *(["words.txt"] if words else [])]
    return _make_source("tiny-imagenet", root, classes, splits, whole_files=whole)


def _choose_classes(folder: Path, class_list: Path | None) -> tuple[list[str], tuple[str, ...], dict[str, object]]:
    """Folder names in label order, their class names, and the option to record."""
    present = list_folders(folder)
    if class_list is None:
        for name in present:
            try:
                name.encode()
            except UnicodeEncodeError:
                raise UserError(f"the name of the folder {name!r} in {folder} is not UTF-8: rename it") from None
        return present, tuple(present), {}
    chosen = read_class_list(class_list, set(present))
    missing = [name for name in chosen if name not in set(present)]
    if missing:
        raise UserError(
            f"{len(missing)} of the {len(chosen)} classes in {class_list} have no folder in {folder} "
            f"(first: {missing[0]}): give a list of folders that exist with --classes FILE"
        )
    return list(chosen), tuple(chosen.values()), {"classes": list(chosen)}


def read_image_tree(root: Path, class_list: Path | None = None) -> Source:
    """train/<class>/* and val|valid|validation|test/<class>/*; labels follow the sorted folders of train."""
    splits = {}
    for name, folder in find_splits(root).items():
        if list_folders(folder):
            splits[name] = folder
        elif name != "test":  # ILSVRC's test images have no labels: not used
            raise UserError(f"{folder} holds no class folders: sort its images into one folder per class")
    if set(splits) == {"train"}:
        for name in list_folders(root):
            split = SPELLINGS.get(name.lower(), "train")
            if name in SPLIT_FOLDERS or split == "train":
                continue
            if list_folders(root / name):
                raise UserError(f"{root / name} may be a split or a class like those beside it: call a split {split}")
            raise UserError(f"{root / name} holds no class folders: sort its images into one folder per class")
        raise UserError(
            f"{root} has train images only: add a test or val folder, "
            f"or give {splits['train']} to have a test split taken from it"
        )
    named = {split: splits[name] for name, split in name_splits(splits, root).items()}
    folders, classes, options = _choose_classes(named["train"], class_list)
    for split, folder in named.items():
        unknown = sorted(set(list_folders(folder)) - set(list_folders(named["train"])))
        if unknown:
            raise UserError(f"class {unknown[0]!r} of the {split} split has no folder in {named['train']}: add it")
    listings = {split: _list_classes(root, folder, folders) for split, folder in named.items()}
    return _make_source("image-tree", root, classes, listings, options=options)


def read_class_folders(root: Path, class_list: Path | None, test_share: float, seed: int) -> Source:
    """<class>/* without splits: a stratified, seeded share of every class becomes the test split."""
    if not 0 < test_share < 1:
        raise UserError(f"test share {test_share} must lie between 0 and 1, for example 0.2")
    folders, classes, options = _choose_classes(root, class_list)
    listing = _list_classes(root, root, folders)
    counts = np.bincount([label for _, label in listing], minlength=len(folders))
    if (counts == 1).any():
        name = folders[int(counts.argmin())]
        raise UserError(f"class {name!r} has one image, and one of every class is held out for testing: add another")
    train, test = stratified_holdout(np.array([label for _, label in listing]), test_share, seed)
    splits = {"train": [listing[i] for i in train], "test": [listing[i] for i in test]}
    options = options | {"test_share": test_share, "seed": seed}
    return _make_source("class-folders", root, classes, splits, options=options)
