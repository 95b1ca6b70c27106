"""The public parquet copies of CIFAR-100 and Tiny-ImageNet, where they are at hand: in ``$BICOVG_SHARDS``, or in a
folder ``shared/data`` beside the repository.
"""

import io
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

from bicovg.data.sources import Source, open_source
from bicovg.data.store import pack

SHARDS = Path(os.environ.get("BICOVG_SHARDS") or Path(__file__).resolve().parents[2] / "shared" / "data")
SETS = {
    "cifar100": (100, {"train": (500, "train"), "test": (100, "test")}, ("img", "fine_label")),
    "tiny-imagenet": (200, {"train": (500, "train"), "test": (50, "valid")}, ("image", "label")),
}


@pytest.fixture(params=SETS)
def name(request: pytest.FixtureRequest) -> str:
    if not list((SHARDS / request.param).glob("*.parquet")):
        pytest.skip(f"no shards of {request.param} (set BICOVG_SHARDS to the folder that holds {request.param}/)")
    return str(request.param)


def shorten_training(folder: Path, path: Path, label: str) -> Source:
    """A quick data set: the test shard as it is, and of the first train shard one image per class."""
    path.mkdir()
    [shard] = [file for file in folder.glob("*.parquet") if not file.name.startswith("train-")]
    (path / "test-00000-of-00001.parquet").symlink_to(shard)
    train = pyarrow.parquet.read_table(min(folder.glob("train-*.parquet")))
    _, first = np.unique(train[label].to_numpy(), return_index=True)
    pyarrow.parquet.write_table(train.take(first), path / "train-00000-of-00001.parquet")
    for file in folder.glob("*names.txt"):
        (path / file.name).symlink_to(file)
    return open_source(path)


def test_counts_and_classes_are_those_of_the_benchmark(name: str) -> None:
    classes, splits, (_, label) = SETS[name]
    source = open_source(SHARDS / name)
    assert len(set(source.classes)) == classes
    assert dict(source.counts) == {split: classes * per_class for split, (per_class, _) in splits.items()}
    for per_class, prefix in splits.values():
        files = sorted((SHARDS / name).glob(f"{prefix}-*.parquet"))
        labels = np.concatenate([pyarrow.parquet.read_table(file, columns=[label])[label].to_numpy() for file in files])
        np.testing.assert_array_equal(np.bincount(labels), np.full(classes, per_class))


def test_the_test_shard_packs_to_pillows_pixels_and_twice_to_the_same_bytes(name: str, tmp_path: Path) -> None:
    classes, splits, (image, label) = SETS[name]
    source = shorten_training(SHARDS / name, tmp_path / "shards", label)
    store = pack(source, tmp_path / "one", name)
    packed = store.split("test")
    assert store.rejected == []
    assert store.size == {"cifar100": (32, 32), "tiny-imagenet": (64, 64)}[name]
    np.testing.assert_array_equal(np.bincount(packed.labels), np.full(classes, splits["test"][0]))
    table = pyarrow.parquet.read_table(tmp_path / "shards" / "test-00000-of-00001.parquet")
    for row in range(0, 10_000, 97):
        data = table[image][row]["bytes"].as_py()
        np.testing.assert_array_equal(packed.image(row), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
        assert packed.labels[row] == table[label][row].as_py()
    again = pack(source, tmp_path / "two", name)
    for file in store.folder.iterdir():
        assert file.read_bytes() == (again.folder / file.name).read_bytes(), file.name
    assert store.verify() == []


def test_test_images_that_are_training_images_are_as_many_as_docs_data_says(name: str, tmp_path: Path) -> None:
    store = pack(open_source(SHARDS / name), tmp_path, name)
    train, test = store.split("train"), store.split("test")
    labels: dict[int, set[int]] = {}
    for i in range(len(train)):
        labels.setdefault(hash(train.image(i).tobytes()), set()).add(int(train.labels[i]))
    known = [labels.get(hash(test.image(i).tobytes()), set()) for i in range(len(test))]
    shared = sum(map(bool, known))
    same = sum(int(label) in among for label, among in zip(test.labels, known, strict=True))
    assert (shared, same) == {"cifar100": (10, 4), "tiny-imagenet": (7, 0)}[name]
