"""Readers: every format gives its samples in order with the right labels, and nothing found on disk is executed."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from archives import (
    encode,
    labelled,
    picture,
    write_cifar_binary,
    write_cifar_parquet,
    write_classes,
    write_parquet,
    write_tar,
    write_tiny_imagenet,
)

from bicovg.data.decode import decode_image
from bicovg.data.known import IMAGENET100
from bicovg.data.sources import Sample, Source, detect_format, open_source, read_class_list
from bicovg.errors import UserError

LONE = {"shards": "parquet", "lone": "class-folders", "years": "class-folders", "circle": "class-folders"}


def pixels_of(sample: Sample) -> np.ndarray:
    if isinstance(sample.image, np.ndarray):
        return sample.image
    data = sample.image.read_bytes() if isinstance(sample.image, Path) else sample.image
    image = decode_image(data)
    assert isinstance(image, np.ndarray), image
    return image


def read_split(source: Source, split: str) -> tuple[list[np.ndarray], list[int]]:
    samples = list(source.samples(split))
    assert len(samples) == source.counts[split]
    return [pixels_of(sample) for sample in samples], [sample.label for sample in samples]


def assert_split(source: Source, split: str, images: list[np.ndarray], labels: list[int]) -> None:
    found, found_labels = read_split(source, split)
    assert found_labels == labels
    for image, expected in zip(found, images, strict=True):
        np.testing.assert_array_equal(image, expected)


@pytest.mark.parametrize("test_name", ["test", "valid", "val", "validation"])
def test_parquet_shards_are_read_in_order_and_a_lone_validation_split_is_the_test_split(
    tmp_path: Path, test_name: str
) -> None:
    path = write_parquet(tmp_path / "p", labelled(21, 3, 8), labelled(6, 3, 8, first=50), 3, test_name)
    source = open_source(path)
    assert (source.format, dict(source.counts)) == ("parquet", {"train": 21, "test": 6})
    assert source.classes == ("class 0", "class 1", "class 2")
    assert_split(source, "train", [picture(i, 8) for i in range(21)], [i % 3 for i in range(21)])
    assert_split(source, "test", [picture(50 + i, 8) for i in range(6)], [i % 3 for i in range(6)])
    assert [sample.name for sample in source.samples("train")][10:12] == [
        "train-00001-of-00002.parquet[0]",
        "train-00001-of-00002.parquet[1]",
    ]


def test_parquet_with_fine_and_coarse_labels_uses_the_fine_ones(tmp_path: Path) -> None:
    rows = [(encode(picture(i, 8), "WEBP", lossless=True), i % 4) for i in range(8)]
    source = open_source(write_cifar_parquet(tmp_path / "c", rows, rows[:4], 4))
    assert source.classes == ("fine 0", "fine 1", "fine 2", "fine 3")
    assert_split(source, "train", [picture(i, 8) for i in range(8)], [i % 4 for i in range(8)])


def test_parquet_without_a_name_file_uses_the_labels_as_names(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "p", labelled(6, 3, 8), labelled(3, 3, 8), 3)
    (path / "label_names.txt").unlink()
    assert open_source(path).classes == ("0", "1", "2")


@pytest.mark.parametrize("form", ["folder", "parent of folder", "archive.tar.gz", "archive.tgz", "archive.tar"])
def test_cifar_binary_is_read_from_the_archive_and_from_its_folder(tmp_path: Path, form: str) -> None:
    train = np.stack([picture(i) for i in range(300)])  # more than one block of records
    test = np.stack([picture(900 + i) for i in range(100)])
    path = write_cifar_binary(tmp_path / "cifar-100-binary", train, test)
    if form == "parent of folder":
        path = tmp_path
    elif form != "folder":
        path = write_tar(tmp_path / form, path)
    source = open_source(path)
    assert (source.format, dict(source.counts)) == ("cifar-binary", {"train": 300, "test": 100})
    assert source.classes == tuple(f"fine {i}" for i in range(100))
    assert_split(source, "train", list(train), [i % 100 for i in range(300)])
    assert_split(source, "test", list(test), list(range(100)))


def test_tiny_imagenet_follows_the_sorted_classes_and_the_validation_annotations(tmp_path: Path) -> None:
    source = open_source(write_tiny_imagenet(tmp_path / "tiny-imagenet-200"))
    assert source.format == "tiny-imagenet"
    assert source.classes == ("n01\tgoldfish", "n02\tsalamander, newt")
    names = [sample.name for sample in source.samples("train")]
    assert names == [f"train/n0{k}/images/n0{k}_{i}.JPEG" for k in (1, 2) for i in range(3)]
    jpegs = [encode(picture(seed, 64), "JPEG") for seed in (0, 1, 2, 10, 11, 12)]
    assert_split(source, "train", [decode_image(data) for data in jpegs], [0, 0, 0, 1, 1, 1])
    assert [sample.label for sample in source.samples("test")] == [1, 0, 1, 0]


def test_image_tree_has_its_own_splits_and_ignores_unlabelled_test_images(tmp_path: Path) -> None:
    for first, split in enumerate(("train", "val", "test")):
        write_classes(tmp_path / "three" / split, ["b", "a"], 2, first=100 * first)
    three = open_source(tmp_path / "three")
    assert (three.format, three.classes) == ("image-tree", ("a", "b"))
    assert dict(three.counts) == {"train": 4, "valid": 4, "test": 4}
    assert_split(three, "valid", [picture(s, 20, 20 + s % 5) for s in (1100, 1101, 100, 101)], [0, 0, 1, 1])
    for split in ("train", "val"):
        shutil.copytree(tmp_path / "three" / split, tmp_path / "ilsvrc" / split)
    (tmp_path / "ilsvrc" / "test").mkdir()
    (tmp_path / "ilsvrc" / "test" / "ILSVRC2012_test_1.JPEG").write_bytes(b"no label")
    assert dict(open_source(tmp_path / "ilsvrc").counts) == {"train": 4, "test": 4}


@pytest.mark.parametrize("names", [("Train", "Test"), ("TRAINING", "testing"), ("train", "Valid")])
def test_splits_in_other_spellings_are_splits(names: tuple[str, str], tmp_path: Path) -> None:
    for count, name in zip((3, 2), names, strict=True):
        write_classes(tmp_path / name, ["cat", "dog"], count)
    write_classes(tmp_path, ["samples"], 1)
    source = open_source(tmp_path)
    assert (source.format, source.classes, dict(source.counts)) == (
        "image-tree",
        ("cat", "dog"),
        {"train": 6, "test": 4},
    )
    assert next(iter(source.samples("test"))).name == f"{names[1]}/cat/000.png"


def test_a_class_may_be_called_test_where_it_holds_images(tmp_path: Path) -> None:
    write_classes(tmp_path, ["Test", "Training"], 3)
    assert open_source(tmp_path).classes == ("Test", "Training")


def test_folders_beside_a_tree_and_classes_called_like_splits_are_what_they_were(tmp_path: Path) -> None:
    for name in ("train", "val", "training", "Testing"):
        write_classes(tmp_path / "tree" / name, ["cat", "dog"], 2)
    for name in ("own/training/s1", "own/eating", "years/Test/2020", "years/Dev/2020"):
        write_classes((tmp_path / name).parent, [Path(name).name], 3)
    for name in ("Training/s1", "Testing/s1", "Walking/s1"):
        write_classes((tmp_path / "moves" / name).parent, [Path(name).name], 3)
    for name in ("train", "Val"):
        write_classes(tmp_path / "flat" / name, ["cat", "dog"], 2)
    (tmp_path / "flat" / "test").mkdir()  # images without labels
    found = {name: open_source(tmp_path / name) for name in ("tree", "own", "years", "moves", "flat")}
    assert found["moves"].classes == ("Testing", "Training", "Walking")
    assert [sample.name[:4] for sample in found["flat"].samples("test")] == ["Val/"] * 4
    assert dict(found["tree"].counts) == {"train": 4, "test": 4}
    assert [sample.name[:4] for sample in found["tree"].samples("test")] == ["val/"] * 4
    assert found["own"].classes == ("eating", "training")
    assert found["years"].classes == ("Dev", "Test")


def test_what_lies_in_one_folder_more_is_found(tmp_path: Path) -> None:
    """As archives unpack, and as clones of a model hub keep their shards, beside a page."""
    for name in ("train", "test"):
        write_classes(tmp_path / "tree" / "mydata" / name, ["cat", "dog"], 2)
    images = np.zeros((1, 32, 32, 3), np.uint8)
    write_cifar_binary(tmp_path / "cifar" / "more" / "mine", images, images)
    for name in ("hub/data", "shards"):
        write_parquet(tmp_path / name, labelled(6, 3, 8), labelled(3, 3, 8), 3)
    write_classes(tmp_path / "shards" / "extra", ["cat", "dog"], 2)
    (tmp_path / "hub" / "README.md").write_text("about\n")
    write_classes(tmp_path / "lone", ["cat"], 3)
    write_classes(tmp_path / "years" / "cat", ["2020", "2021"], 3)
    (tmp_path / "circle").mkdir()
    (tmp_path / "circle" / "a").symlink_to(tmp_path / "circle", target_is_directory=True)
    found = {name: detect_format(tmp_path / name) for name in ("tree", "hub", "cifar", *LONE)}
    assert found == {
        "tree": ("image-tree", tmp_path / "tree" / "mydata"),
        "hub": ("parquet", tmp_path / "hub" / "data"),
        "cifar": ("cifar-binary", tmp_path / "cifar" / "more" / "mine"),
        **{name: (format, tmp_path / name) for name, format in LONE.items()},
    }


def test_a_class_list_chooses_folders_and_their_order(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_classes(tmp_path / "tree" / split, ["n1", "n2", "n3", "n4"], 2)
    chosen = tmp_path / "list.txt"
    chosen.write_text("# two of four\nn3 third one\nn1\n")
    source = open_source(tmp_path / "tree", class_list=chosen)
    assert source.classes == ("n3\tthird one", "n1")
    assert [(sample.name.split("/")[1], sample.label) for sample in source.samples("test")] == [
        ("n3", 0),
        ("n3", 0),
        ("n1", 1),
        ("n1", 1),
    ]
    assert source.options["classes"] == ["n3", "n1"]


def test_a_class_list_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("b\na\n", encoding="utf-8-sig")
    assert list(read_class_list(path)) == ["b", "a"]


def test_a_class_list_names_folders_with_spaces(tmp_path: Path) -> None:
    folders = ["golden retriever", "golden", "n1", "blue\u00a0tit", "old cat"]
    write_classes(tmp_path / "own", folders, 5)
    chosen = tmp_path / "list.txt"
    chosen.write_text(
        "golden retriever\nold cat\tof the house\nn1 tench, a fish\ngolden  eagle\nblue\u00a0tit\n", encoding="utf-8"
    )
    source = open_source(tmp_path / "own", class_list=chosen)
    assert source.options["classes"] == ["golden retriever", "old cat", "n1", "golden", "blue\u00a0tit"]
    assert source.classes == (
        "golden retriever",
        "old cat\tof the house",
        "n1\ttench, a fish",
        "golden\teagle",
        "blue\u00a0tit",
    )
    chosen.write_text("golden retriever\nblack dog\tmissing\n")
    with pytest.raises(UserError, match=r"1 of the 2 classes .* have no folder in .* .first: black dog."):
        open_source(tmp_path / "own", class_list=chosen)


def test_the_shipped_imagenet100_list_has_a_hundred_different_synsets() -> None:
    classes = read_class_list(IMAGENET100)
    assert len(classes) == 100
    assert all(name[0] == "n" and name[1:].isdecimal() and len(name) == 9 for name in classes)
    assert next(iter(classes)) == "n02869837"


def test_class_folders_give_a_seeded_stratified_test_share(tmp_path: Path) -> None:
    path = write_classes(tmp_path / "own", ["cat", "dog"], 10)
    source = open_source(path, test_share=0.3, seed=5)
    assert (source.format, dict(source.counts)) == ("class-folders", {"train": 14, "test": 6})
    names = {split: [sample.name for sample in source.samples(split)] for split in ("train", "test")}
    assert not set(names["train"]) & set(names["test"])
    assert [name.split("/")[0] for name in names["test"]] == ["cat"] * 3 + ["dog"] * 3
    again = [sample.name for sample in open_source(path, test_share=0.3, seed=5).samples("test")]
    other = [sample.name for sample in open_source(path, test_share=0.3, seed=6).samples("test")]
    assert again == names["test"] != other


def test_hidden_files_are_no_images_and_nested_folders_belong_to_their_class(tmp_path: Path) -> None:
    path = write_classes(tmp_path / "own", ["a", "b"], 5)
    (path / ".git").mkdir()
    (path / "a" / ".DS_Store").write_bytes(b"x")
    (path / "a" / "Thumbs.db").write_bytes(b"x")
    (path / "b" / "more").mkdir()
    shutil.move(path / "b" / "000.png", path / "b" / "more" / "zebra.png")
    source = open_source(path)
    names = [sample.name for split in source.counts for sample in source.samples(split)]
    assert len(names) == 10
    assert "b/more/zebra.png" in names


class Exploit:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (Path.touch, (self.trace,))


@pytest.mark.parametrize("form", ["folder", "parent of folder", "archive", "renamed archive", "cifar-10"])
def test_the_python_version_of_cifar_is_refused_and_not_unpickled(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "set" / "cifar-100-python"
    folder.mkdir(parents=True)
    for name in ("train", "test", "meta", "data_batch_1"):
        (folder / name).write_bytes(pickle.dumps(Exploit(tmp_path / "executed")))
    paths = {"folder": folder, "parent of folder": folder.parent}
    if "archive" in form:
        paths[form] = write_tar(tmp_path / {"archive": "cifar-100-python.tar.gz"}.get(form, "data.tar.gz"), folder)
    if form == "cifar-10":
        (folder / "meta").unlink()
        paths[form] = folder
    with pytest.raises(UserError, match=r"pickle executes code it carries: get the binary version"):
        open_source(paths[form])
    assert not (tmp_path / "executed").exists()


def test_detection_names_the_format_and_the_folder_that_holds_it(tmp_path: Path) -> None:
    inner = write_tiny_imagenet(tmp_path / "downloads" / "tiny-imagenet-200")
    assert detect_format(tmp_path / "downloads") == ("tiny-imagenet", inner)
    assert detect_format(inner) == ("tiny-imagenet", inner)
