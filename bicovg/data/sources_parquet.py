"""Parquet shards in the column layout of the public copies of CIFAR-100 and Tiny-ImageNet."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bicovg.data.sources_sample import Sample, Source, name_splits, read_lines
from bicovg.errors import UserError

IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("fine_label", "label")
NAME_FILES = ("fine_label_names.txt", "label_names.txt")
_SHARD = re.compile(r"(?P<split>[a-z]+)-(?:(?P<part>\d+)-of-(?P<parts>\d+)(?:-[0-9a-f]+)?|.*)\.parquet")
_ROWS = 256  # rows read at a time, and
_BUFFER = 1 << 20  # bytes read ahead per column: together they bound the memory whatever the size of a row group


def _import_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("reading parquet shards needs pyarrow: pip install 'bicovg[data]'") from error
    return pyarrow.parquet


def _group_shards(folder: Path) -> dict[str, list[Path]]:
    """Split -> shards in order; an incomplete set of numbered shards is an error, not a smaller data set."""
    groups: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.parquet")):
        match = _SHARD.fullmatch(path.name)
        if match is None:
            raise UserError(f"{path.name} in {folder} is not named SPLIT-*.parquet: rename or remove it")
        groups.setdefault(match["split"], []).append(path)
        shards = groups[match["split"]]
        if match["part"] is not None and int(match["part"]) != len(shards) - 1:
            raise UserError(f"the shard before {path.name} is missing in {folder}: fetch all of them")
    for shards in groups.values():
        match = _SHARD.fullmatch(shards[-1].name)
        if match is not None and match["parts"] is not None and int(match["parts"]) != len(shards):
            raise UserError(f"{folder} has {len(shards)} of {int(match['parts'])} {match['split']} shards: fetch all")
    return {split: groups[name] for name, split in name_splits(groups, folder).items()}


@contextmanager
def _name_damage(path: Path) -> Iterator[None]:
    """Whatever a damaged shard makes pyarrow raise becomes one sentence with the shard's name."""
    from pyarrow import ArrowException

    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, ArrowException) as error:
        text = " ".join(str(error).split())
        raise UserError(f"{path} is not a readable parquet file ({text}): fetch it again") from error


def _open_shard(path: Path) -> tuple[Any, str, str]:
    """The opened file and the names of its image and label columns."""
    parquet = _import_parquet()
    with _name_damage(path):
        shard = parquet.ParquetFile(path, buffer_size=_BUFFER, page_checksum_verification=True)
    schema = shard.schema_arrow
    picked = []
    for wanted in (IMAGE_COLUMNS, LABEL_COLUMNS):
        present = [name for name in wanted if name in schema.names]
        if not present:
            raise UserError(f"{path} has columns {schema.names} but none of {wanted}: rename its column")
        picked.append(present[0])
    image_type = str(schema.field(picked[0]).type)
    if not (image_type.startswith("struct<") and "bytes: " in image_type):
        raise UserError(f"column {picked[0]!r} of {path} is {image_type}: it must be a struct with a field `bytes`")
    return shard, picked[0], picked[1]


def _read_labels(path: Path) -> np.ndarray:
    shard, _, column = _open_shard(path)
    with _name_damage(path):
        values = shard.read(columns=[column], use_threads=False)[column]
    if values.null_count or not str(values.type).startswith(("int", "uint")):
        raise UserError(f"column {column!r} of {path} must hold an integer for every row, not {values.type}")
    return np.asarray(values.to_numpy(), dtype=np.int64)


def _read_samples(shards: list[Path]) -> Iterator[Sample]:
    for path in shards:
        shard, image_column, label_column = _open_shard(path)
        name, row = path.name, 0
        columns = [f"{image_column}.bytes", label_column]
        batches = shard.iter_batches(_ROWS, columns=columns, use_threads=False)
        while True:
            with _name_damage(path):
                batch = next(batches, None)
            if batch is None:
                break
            images = batch.column(image_column).field("bytes").to_pylist()
            for image, label in zip(images, batch.column(label_column).to_pylist(), strict=True):
                yield Sample(f"{name}[{row}]", image or b"", label)
                row += 1


def _name_classes(folder: Path, labels: dict[str, np.ndarray]) -> tuple[tuple[str, ...], dict[str, Path]]:
    """Class names from the text file beside the shards, or the labels themselves as names."""
    name_files = [folder / name for name in NAME_FILES if (folder / name).is_file()]
    highest = int(labels["train"].max(initial=-1))
    if not name_files:
        return tuple(str(label) for label in range(highest + 1)), {}
    return tuple(read_lines(name_files[0])), {name_files[0].name: name_files[0]}


def read_parquet(folder: Path) -> Source:
    """Shards ``{train,test,valid,validation,val}-*.parquet`` of an image struct and a label."""
    shards = _group_shards(folder)
    labels = {split: np.concatenate([_read_labels(path) for path in paths]) for split, paths in shards.items()}
    classes, name_file = _name_classes(folder, labels)
    for split, values in labels.items():
        wrong = values[(values < 0) | (values >= len(classes))]
        if wrong.size:
            raise UserError(
                f"label {wrong[0]} in the {split} shards of {folder} is outside 0..{len(classes) - 1}: "
                f"correct the labels or the list of class names"
            )
        unused = np.flatnonzero(np.bincount(values, minlength=len(classes)) == 0)
        if unused.size:
            raise UserError(
                f"class {classes[unused[0]]!r} has no image in the {split} shards of {folder}: "
                f"add one or correct the list of class names"
            )
    return Source(
        format="parquet",
        classes=classes,
        counts={split: len(values) for split, values in labels.items()},
        open_split=lambda split: _read_samples(shards[split]),
        whole_files=name_file | {path.name: path for paths in shards.values() for path in paths},
    )
