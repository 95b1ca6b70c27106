"""What a reader says when a data set is incomplete, damaged or not what it seems: one sentence, never a smaller set."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from archives import (
    labelled,
    write_cifar_binary,
    write_classes,
    write_parquet,
    write_shard,
    write_tar,
    write_tiny_imagenet,
)

from bicovg.data.sources import open_source
from bicovg.errors import UserError


def _parquet(path: Path) -> Path:
    return write_parquet(path, labelled(6, 3, 8), labelled(3, 3, 8), 3)


def _no_such_path(path: Path) -> None:
    pass


def _empty_folder(path: Path) -> None:
    path.mkdir()


def _missing_shard(path: Path) -> None:
    (_parquet(path) / "train-00000-of-00002.parquet").unlink()


def _missing_last_shard(path: Path) -> None:
    (_parquet(path) / "train-00001-of-00002.parquet").unlink()


def _missing_last_shard_with_hash(path: Path) -> None:
    shards = _parquet(path)
    (shards / "train-00001-of-00002.parquet").unlink()
    (shards / "train-00000-of-00002.parquet").rename(shards / "train-00000-of-00002-0a1b.parquet")


def _no_test_shards(path: Path) -> None:
    (_parquet(path) / "test-00000-of-00001.parquet").unlink()


def _label_above_the_names(path: Path) -> None:
    (_parquet(path) / "label_names.txt").write_text("one\ntwo\n")


def _class_without_images(path: Path) -> None:
    (_parquet(path) / "label_names.txt").write_text("one\ntwo\nthree\nfour\n")


def _wrong_columns(path: Path) -> None:
    write_shard(_parquet(path) / "train-00000-of-00002.parquet", labelled(3, 3, 8), "photo", "label")


def _text_labels(path: Path) -> None:
    rows = [(data, "cat") for data, _ in labelled(3, 3, 8)]
    write_shard(_parquet(path) / "train-00000-of-00002.parquet", rows)


def _not_parquet(path: Path) -> None:
    (_parquet(path) / "train-00000-of-00002.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")


def _unknown_split(path: Path) -> None:
    shards = _parquet(path)
    (shards / "test-00000-of-00001.parquet").rename(shards / "holdout-00000-of-00001.parquet")


def _short_record(path: Path) -> None:
    folder = write_cifar_binary(path, np.zeros((1, 32, 32, 3), np.uint8), np.zeros((1, 32, 32, 3), np.uint8))
    with (folder / "train.bin").open("ab") as stream:
        stream.write(b"x")


def _no_names(path: Path) -> None:
    folder = write_cifar_binary(path, np.zeros((1, 32, 32, 3), np.uint8), np.zeros((1, 32, 32, 3), np.uint8))
    (folder / "fine_label_names.txt").unlink()


def _wrong_annotation(path: Path) -> None:
    (write_tiny_imagenet(path) / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn09\t0\t0\t1\t1\n")


def _annotation_that_leaves(path: Path) -> None:
    (write_tiny_imagenet(path) / "val" / "val_annotations.txt").write_text("../../secret\tn01\t0\t0\t1\t1\n")


def _repeated_class(path: Path) -> None:
    (write_tiny_imagenet(path) / "wnids.txt").write_text("n01\nn02\nn01\n")


def _train_only(path: Path) -> None:
    write_classes(path / "train", ["a", "b"], 2)


def _flat_validation(path: Path) -> None:
    write_classes(path / "train", ["a", "b"], 2)
    (path / "val").mkdir()


def _class_missing_in_train(path: Path) -> None:
    write_classes(path / "train", ["a"], 2)
    write_classes(path / "val", ["a", "b"], 2)


def _class_missing_in_test(path: Path) -> None:
    write_classes(path / "train", ["a", "b"], 2)
    write_classes(path / "val", ["a"], 2)


def _empty_class(path: Path) -> None:
    (write_classes(path, ["a", "b"], 2) / "c").mkdir()


def _lone_image(path: Path) -> None:
    (write_classes(path, ["a", "b"], 3) / "b" / "002.png").unlink()
    (path / "b" / "001.png").unlink()


def _linked_folder(path: Path) -> None:
    (write_classes(path, ["a", "b"], 3) / "b" / "more").symlink_to(path / "a", target_is_directory=True)


def _train_twice(path: Path) -> None:
    for split in ("TRAIN", "Train", "test"):
        write_classes(path / split, ["a", "b"], 2)


def _split_beside_folders_of_folders(path: Path) -> None:
    for name in ("train", "Test", "Dev"):
        write_classes(path / name, ["a", "b"], 2)


def _flat_validation_in_capitals(path: Path) -> None:
    write_classes(path / "train", ["a", "b"], 2)
    (path / "Val").mkdir()


MISTAKES: dict[Callable[[Path], None], str] = {
    _no_such_path: "does not exist: give",
    _empty_folder: "holds nothing that can be read: give",
    _missing_shard: "the shard before train-00001-of-00002.parquet is missing",
    _missing_last_shard: "has 1 of 2 train shards: fetch all",
    _missing_last_shard_with_hash: "has 1 of 2 train shards: fetch all",
    _no_test_shards: "has no test split",
    _label_above_the_names: "label 2 in the train shards of .* is outside 0..1",
    _class_without_images: "class 'four' has no image in the train shards",
    _wrong_columns: "has columns .* but none of .*: rename its column",
    _text_labels: "must hold an integer for every row",
    _not_parquet: "is not a readable parquet file .*: fetch it again",
    _unknown_split: "unknown split 'holdout'",
    _short_record: "not a multiple of 3074: fetch the archive again",
    _no_names: "cannot read fine_label_names.txt of",
    _wrong_annotation: "not a file and a class of wnids.txt: correct it",
    _annotation_that_leaves: "not a file and a class of wnids.txt: correct it",
    _repeated_class: "names a class twice",
    _train_only: "has train images only: add a test or val folder",
    _flat_validation: "holds no class folders: sort its images",
    _class_missing_in_train: "class 'b' of the test split has no folder",
    _class_missing_in_test: "class 'b' has no image in",
    _empty_class: "class 'c' has no image in",
    _lone_image: "class 'b' has one image, and one of every class is held out for testing: add another",
    _linked_folder: "data/b/more is a link to a folder: put the folder itself there",
    _train_twice: "has both TRAIN and Train: keep one",
    _split_beside_folders_of_folders: "data/Test may be a split or a class like those beside it: call a split test",
    _flat_validation_in_capitals: "data/Val holds no class folders: sort its images",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__.strip("_"))
def test_a_mistake_is_named_in_one_sentence(tmp_path: Path, mistake: Callable[[Path], None]) -> None:
    mistake(tmp_path / "data")
    with pytest.raises(UserError, match=MISTAKES[mistake]) as caught:
        open_source(tmp_path / "data")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.name == "nt" or sys.platform == "darwin", reason="names are text there")
def test_a_class_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    odd = os.path.join(os.fsencode(write_classes(tmp_path / "data", ["a", "b"], 3)), b"c\xff")
    os.mkdir(odd)
    with pytest.raises(
        UserError, match=r"the name of the folder 'c\\udcff' in .*data is not UTF-8: rename it"
    ) as caught:
        open_source(tmp_path / "data")
    str(caught.value).encode()
    (tmp_path / "list.txt").write_text("b\na\n")
    assert open_source(tmp_path / "data", class_list=tmp_path / "list.txt").classes == ("b", "a")


def test_wrong_options_are_named(tmp_path: Path) -> None:
    own = write_classes(tmp_path / "own", ["a", "b"], 3)
    shards = _parquet(tmp_path / "shards")
    (tmp_path / "list.txt").write_text("a\nzebra\n")
    (tmp_path / "twice.txt").write_text("a\nb\na\n")
    (tmp_path / "none.txt").write_text("# nothing\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    for options, message in (
        ({"path": own, "format": "zip"}, "unknown format 'zip'"),
        ({"path": own, "test_share": 1.0}, "test share 1.0 must lie between 0 and 1"),
        ({"path": own, "class_list": tmp_path / "list.txt"}, r"1 of the 2 classes .* \(first: zebra\)"),
        ({"path": own, "class_list": tmp_path / "twice.txt"}, "names 1 classes twice"),
        ({"path": own, "class_list": tmp_path / "none.txt"}, "is empty"),
        ({"path": own, "class_list": tmp_path / "binary.txt"}, "as a text file"),
        ({"path": own, "class_list": tmp_path / "absent.txt"}, "as a text file"),
        ({"path": shards, "class_list": tmp_path / "list.txt"}, "a class list cannot be used with format parquet"),
        ({"path": shards / "label_names.txt"}, "is a file of unknown kind: unpack it"),
        ({"path": shards / "test-00000-of-00001.parquet"}, "is one shard: give the folder"),
        ({"path": own, "format": "parquet"}, "has no train split"),
        ({"path": own, "format": "cifar-binary"}, "cannot read fine_label_names.txt"),
        ({"path": own, "format": "tiny-imagenet"}, "cannot read .*wnids.txt"),
    ):
        with pytest.raises(UserError, match=message):
            open_source(**options)
    with pytest.raises(UserError, match="unknown split 'validation'"):
        open_source(own).samples("validation")


def test_an_unreadable_folder_is_an_error_and_never_a_smaller_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_classes(tmp_path / "own", ["a", "b"], 3)
    (path / "b" / "deep").mkdir()
    scandir = os.scandir

    def refuse(folder: object) -> object:
        if str(folder).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(UserError, match=r"cannot read .*deep \(Permission denied\)"):
        open_source(path)


def test_any_damage_inside_a_compressed_archive_is_found_before_packing(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    noise = draw.integers(0, 256, (200, 32, 32, 3), dtype=np.uint8)
    folder = write_cifar_binary(tmp_path / "cifar-100-binary", noise, noise[:100])
    good = write_tar(tmp_path / "good.tar.gz", folder).read_bytes()
    bad = tmp_path / "bad.tar.gz"
    for at in draw.integers(40, len(good), 20):  # behind the gzip header, which holds a time and a name
        bad.write_bytes(good[:at] + bytes([good[at] ^ 0x08]) + good[at + 1 :])
        with pytest.raises(UserError, match="fetch the archive again"):
            open_source(bad)
    bad.write_bytes(good[: len(good) // 2])
    with pytest.raises(UserError, match="fetch the archive again"):
        open_source(bad)


def read_all(path: Path) -> str:
    """What is wrong with the shards, or nothing; any other error fails the test."""
    try:
        list(open_source(path).samples("train"))
    except UserError as error:
        return str(error)
    return ""


def test_a_damaged_shard_gives_samples_or_one_sentence(tmp_path: Path) -> None:
    path = _parquet(tmp_path / "shards")
    shard = path / "train-00001-of-00002.parquet"
    good = shard.read_bytes()
    draw = np.random.default_rng(1)
    refused = 0
    for at in [*range(8), *draw.integers(0, len(good), 150)]:
        shard.write_bytes(good[:at] + bytes([good[at] ^ int(draw.integers(1, 256))]) + good[at + 1 :])
        message = read_all(path)
        assert "\n" not in message
        refused += message != ""
    assert refused > 10
    shard.write_bytes(good[:-20])
    with pytest.raises(UserError, match=r"train-00001-of-00002\.parquet is not a readable parquet file"):
        open_source(path)
