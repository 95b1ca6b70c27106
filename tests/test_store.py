"""The packed store: what comes out is what the reader gave, twice the same bytes, and no change goes unseen."""

import json
import os
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

from bicovg.data.decode import decode_image, fit_pixels
from bicovg.data.sources import Sample, open_source
from bicovg.data.store import PackedStore, RejectedImages, pack
from bicovg.data.store_files import verify_files
from bicovg.errors import UserError


def build_parquet(path: Path) -> Path:
    return write_parquet(path, labelled(30, 3, 16, format="JPEG"), labelled(9, 3, 16, first=60), 3, "valid")


def build_cifar_parquet(path: Path) -> Path:
    rows = [(encode(picture(i, 16), "WEBP", lossless=True), i % 4) for i in range(16)]
    return write_cifar_parquet(path, rows, rows[:8], 4)


def build_cifar_binary(path: Path) -> Path:
    images = np.stack([picture(i) for i in range(300)])
    return write_cifar_binary(path, images, images[:100])


def build_cifar_archive(path: Path) -> Path:
    return write_tar(path.with_name("cifar.tar.gz"), build_cifar_binary(path))


def build_image_tree(path: Path) -> Path:
    for first, split in enumerate(("train", "val", "test")):
        write_classes(path / split, ["a", "b", "c"], 7, first=50 * first)
    return path


def build_class_folders(path: Path) -> Path:
    return write_classes(path, ["cat", "dog"], 12)


BUILDERS: list[Callable[[Path], Path]] = [
    build_parquet,
    build_cifar_parquet,
    build_cifar_binary,
    build_cifar_archive,
    write_tiny_imagenet,
    build_image_tree,
    build_class_folders,
]
FITS: list[dict[str, int]] = [{}, {"size": 16}, {"short_side": 12}]


def expected_pixels(sample: Sample, fit: dict[str, int]) -> np.ndarray:
    if isinstance(sample.image, np.ndarray):
        image = fit_pixels(sample.image, **fit)
    else:
        data = sample.image.read_bytes() if isinstance(sample.image, Path) else sample.image
        image = decode_image(data, **fit)
    assert isinstance(image, np.ndarray)
    return image


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("fit", FITS, ids=["own size", "square", "short side"])
@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_every_format_packs_to_what_its_reader_gives_and_a_second_pack_is_bit_identical(
    tmp_path: Path, build: Callable[[Path], Path], fit: dict[str, int]
) -> None:
    path = build(tmp_path / "source")
    source = open_source(path)
    store = pack(source, tmp_path / "one", "set", jobs=3, **fit)
    assert store.classes == source.classes
    assert store.counts == dict(source.counts)
    for split in source.counts:
        samples, packed = list(source.samples(split)), store.split(split)
        assert packed.labels.tolist() == [sample.label for sample in samples]
        for i, sample in enumerate(samples):
            np.testing.assert_array_equal(packed.image(i), expected_pixels(sample, fit))
    pack(open_source(path), tmp_path / "two", "set", jobs=1, **fit)
    assert read_files(tmp_path / "one" / "set") == read_files(tmp_path / "two" / "set")
    assert store.verify() == []


def test_images_of_one_size_are_one_array_and_others_have_an_index(tmp_path: Path) -> None:
    square = pack(open_source(build_parquet(tmp_path / "p")), tmp_path, "square")
    assert (square.kind, square.size, square.split("train").index) == ("fixed", (16, 16), None)
    assert square.split("train").images.shape == (30, 16, 16, 3)
    various = pack(open_source(build_class_folders(tmp_path / "c")), tmp_path, "various")
    assert (various.kind, various.size) == ("variable", None)
    widths = {various.split("train").image(i).shape for i in range(19)}
    assert widths == {(20, 20 + i, 3) for i in range(5)}
    with pytest.raises(UserError, match="differ in size"):
        _ = various.split("train").images
    with pytest.raises(UserError, match="unknown split 'valid'"):
        various.split("valid")


def test_mean_and_std_are_those_of_the_train_pixels(tmp_path: Path) -> None:
    store = pack(open_source(build_class_folders(tmp_path / "c")), tmp_path, "set")
    split = store.split("train")
    pixels = np.concatenate([split.image(i).reshape(-1, 3) for i in range(len(split))]) / 255
    np.testing.assert_allclose(store.mean, pixels.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(store.std, pixels.std(axis=0), rtol=1e-12)


def test_the_source_hash_changes_with_any_source_file_and_not_with_where_it_lies(tmp_path: Path) -> None:
    def source_hash(path: Path) -> str:
        return pack(open_source(path), tmp_path, "set", force=True).source_hash

    folders, shards = build_class_folders(tmp_path / "f"), build_parquet(tmp_path / "p")
    moved = shutil.copytree(folders, tmp_path / "elsewhere")
    assert source_hash(folders) == source_hash(moved)
    (moved / "cat" / "003.png").write_bytes(encode(picture(77)))
    assert source_hash(folders) != source_hash(moved)
    before = source_hash(shards)
    (shards / "label_names.txt").write_text("uno\ndos\ntres\n")
    assert source_hash(shards) != before


@pytest.mark.parametrize("build", [build_parquet, build_class_folders], ids=["fixed", "variable"])
def test_verify_finds_a_change_of_any_single_byte(tmp_path: Path, build: Callable[[Path], Path]) -> None:
    folder = pack(open_source(build(tmp_path / "source")), tmp_path, "set").folder
    draw = np.random.default_rng(0)
    for name, content in read_files(folder).items():
        every = range(len(content)) if len(content) <= 300 else draw.choice(len(content), 200, replace=False)
        for at in [0, len(content) - 1, *every]:
            changed = bytearray(content)
            changed[at] ^= int(draw.integers(1, 256))
            (folder / name).write_bytes(changed)
            assert verify_files(folder), (name, at)
        (folder / name).write_bytes(content)
    assert verify_files(folder) == []


def test_verify_names_missing_short_long_strange_and_unreadable_files(tmp_path: Path) -> None:
    folder = pack(open_source(build_parquet(tmp_path / "source")), tmp_path, "set").folder
    for name, content in read_files(folder).items():
        for changed in (None, b"", content[:-1], content + b"\0"):
            (folder / name).unlink()
            if changed is not None:
                (folder / name).write_bytes(changed)
            problems = verify_files(folder)
            assert any(name in problem for problem in problems), (name, problems)
            with pytest.raises(UserError, match=r"is damaged, .*: run `bicovg data pack set --from PATH .*--force"):
                PackedStore.open(tmp_path, "set").check_content()
            (folder / name).write_bytes(content)
    (folder / "stray").write_text("x")
    assert verify_files(folder) == ["stray is not part of the store"]
    assert verify_files(tmp_path / "nowhere") == ["store.json cannot be read (No such file or directory)"]


def test_a_changed_label_or_pixel_stops_training_before_it_starts(tmp_path: Path) -> None:
    store = pack(open_source(build_parquet(tmp_path / "source")), tmp_path, "set")
    store.check_content()
    for name in ("train.labels", "test.images"):
        content = (store.folder / name).read_bytes()
        (store.folder / name).write_bytes(b"\x01" + content[1:])
        with pytest.raises(UserError, match=f"{name} has changed since it was packed"):
            store.check_content()
        (store.folder / name).write_bytes(content)


def test_a_store_of_a_newer_schema_is_refused(tmp_path: Path) -> None:
    import hashlib

    folder = pack(open_source(build_parquet(tmp_path / "source")), tmp_path, "set").folder
    manifest = json.loads((folder / "store.json").read_text())
    content = json.dumps(manifest | {"schema": 2}).encode()
    (folder / "store.json").write_bytes(content)
    (folder / "store.sha256").write_text(hashlib.sha256(content).hexdigest() + "\n")
    with pytest.raises(UserError, match="its schema is 2, this version reads 1"):
        PackedStore.open(tmp_path, "set")


def plant(folder: Path, good: int, bad: int) -> Path:
    """Class folders of which ``bad`` files hold no image."""
    image = encode(picture(0, 8))
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for i in range(good // 2):
            (folder / name / f"{i:04d}.png").write_bytes(image)
    for i in range(bad):
        (folder / "a" / f"bad{i}.png").write_bytes(b"not an image")
    return folder


def test_one_bad_image_in_a_thousand_is_listed_and_two_stop_the_packing(tmp_path: Path) -> None:
    store = pack(open_source(plant(tmp_path / "one", 1000, 1)), tmp_path / "stores", "one")
    [entry] = store.rejected
    assert (entry["path"], entry["reason"][:11]) == ("a/bad0.png", "the file is")
    assert sum(store.counts.values()) == 1000
    assert sum(len(store.split(split)) for split in store.counts) == 1000
    with pytest.raises(
        RejectedImages, match=r"2 of 1002 images cannot be used, above the allowed share of 0\.001"
    ) as caught:
        pack(open_source(plant(tmp_path / "two", 1000, 2)), tmp_path / "stores", "two")
    assert {entry["path"] for entry in caught.value.rejected} == {"a/bad0.png", "a/bad1.png"}
    assert all(entry["reason"] for entry in caught.value.rejected)
    assert sorted(path.name for path in (tmp_path / "stores").iterdir()) == [".one.lock", ".two.lock", "one"]


def test_strange_files_are_rejected_by_name_and_nothing_waits_for_them(tmp_path: Path) -> None:
    path = plant(tmp_path / "own", 20, 0)
    os.mkfifo(path / "a" / "pipe.png")
    (path / "a" / "zeros.png").symlink_to("/dev/zero")
    (path / "a" / "gone.png").symlink_to(path / "nowhere")
    odd = os.fsdecode(b"\xff\xfe.png")
    (path / "a" / odd).write_bytes(b"text")
    store = pack(open_source(path), tmp_path, "set", max_rejected=0.5)
    reasons = {entry["path"]: entry["reason"] for entry in store.rejected}
    assert reasons["a/pipe.png"] == reasons["a/zeros.png"] == "it is not a regular file"
    assert "No such file" in reasons["a/gone.png"]
    assert f"a/{odd}" in reasons
    assert store.verify() == []


def test_a_class_whose_images_are_all_bad_is_an_error(tmp_path: Path) -> None:
    path = write_classes(tmp_path / "own", ["a", "b"], 5)
    for file in (path / "b").iterdir():
        file.write_bytes(b"not an image")
    with pytest.raises(UserError, match="class 'b' has no usable image in the train split"):
        pack(open_source(path), tmp_path, "set", max_rejected=1.0)


def test_labels_beyond_the_class_names_are_an_error(tmp_path: Path) -> None:
    path = build_cifar_binary(tmp_path / "c")
    (path / "fine_label_names.txt").write_text("only\nthese\n")
    with pytest.raises(UserError, match=r"label 2 in the train split is outside 0\.\.1"):
        pack(open_source(path), tmp_path, "set")


def test_requests_that_cannot_work_are_refused_before_decoding(tmp_path: Path) -> None:
    source = open_source(build_parquet(tmp_path / "p"))
    pack(source, tmp_path, "set")
    for options, message in (
        ({"name": "set"}, "exists already: add --force"),
        ({"name": "../set"}, "is not usable"),
        ({"name": "set.partial-1"}, "is not usable"),
        ({"name": "new", "size": 0}, "size 0 must lie between 1 and 4096"),
        ({"name": "new", "short_side": 5000}, "short side 5000 must lie between"),
        ({"name": "new", "size": 8, "short_side": 8}, "give one of them"),
    ):
        with pytest.raises(UserError, match=message):
            pack(source, tmp_path, **options)
    with pytest.raises(UserError, match="exists and is not a packed store: choose another name"):
        pack(source, tmp_path, "p", force=True)  # the source itself
    assert len(list((tmp_path / "p").iterdir())) == 4
    with pytest.raises(UserError, match="is not a packed store: give another root or name"):
        PackedStore.open(tmp_path, "p")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="packing new stopped"):
        pack(source, tmp_path / "file", "new")
    with pytest.raises(UserError, match="data set 'none' is not packed"):
        PackedStore.open(tmp_path, "none")
