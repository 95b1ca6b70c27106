"""Writing one split: decode in threads, append in order, hash and count on the way."""

import hashlib
import math
import os
import stat
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bicovg.data.decode import MAX_BYTES, decode_to_rgb, fit_pixels, read_header
from bicovg.data.sources_sample import Sample

_CHUNK_BYTES = 1 << 21  # decoded bytes a task aims at: many small images, or a few large ones
_ROW = 3 * 1024
_ROWS = 64  # 64 * 255 fits 16 bits, and 64 rows fit the cache
_PART = _ROW << 16  # 2^16 * 255^2 fits 32 bits


def _sum_pixels(rows: np.ndarray) -> tuple[list[int], list[int]]:
    """Sums of values and of squares per channel. 16 bits without a cast inside a sum are numpy's fast path."""
    columns = np.zeros((2, rows.shape[1]), np.uint32)
    for start in range(0, len(rows), _ROWS):
        values = rows[start : start + _ROWS].astype(np.uint16)
        columns[0] += values.sum(axis=0, dtype=np.uint16)
        values *= values
        columns[1] += (values >> 8).sum(axis=0, dtype=np.uint16).astype(np.uint32) << 8
        values &= 255
        columns[1] += values.sum(axis=0, dtype=np.uint16)
    totals = [columns[:, channel::3].sum(axis=1, dtype=np.uint64).tolist() for channel in range(3)]
    return [total[0] for total in totals], [total[1] for total in totals]


class ChannelSums:
    """Exact per-channel sums of pixels and their squares, as Python integers."""

    def __init__(self) -> None:
        self.count = 0
        self.sums = [0, 0, 0]
        self.squares = [0, 0, 0]

    def add_pixels(self, run: bytes | bytearray) -> None:
        """``run`` holds RGB triples."""
        pixels = np.frombuffer(run, np.uint8)
        for start in range(0, len(pixels), _PART):
            part = pixels[start : start + _PART]
            whole = len(part) // _ROW * _ROW
            for rows in (part[:whole].reshape(-1, _ROW), part[whole:].reshape(1, -1)):
                if rows.size:
                    self._add(rows.size // 3, *_sum_pixels(rows))

    def add(self, other: "ChannelSums") -> None:
        self._add(other.count, other.sums, other.squares)

    def _add(self, count: int, sums: list[int], squares: list[int]) -> None:
        self.count += count
        self.sums = [a + b for a, b in zip(self.sums, sums, strict=True)]
        self.squares = [a + b for a, b in zip(self.squares, squares, strict=True)]

    def mean(self) -> list[float]:
        return [total / (255 * self.count) for total in self.sums]

    def std(self) -> list[float]:
        """Of the whole population: the variance is an exact fraction until its root is taken."""
        n = self.count
        pairs = zip(self.sums, self.squares, strict=True)
        return [math.sqrt((n * square - total * total) / (255 * n) ** 2) for total, square in pairs]


@dataclass
class Chunk:
    """The outcome of decoding a few consecutive samples."""

    pixels: bytearray = field(default_factory=bytearray)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    rejected: list[tuple[str, str]] = field(default_factory=list)
    digests: list[tuple[str, str]] = field(default_factory=list)
    sums: ChannelSums = field(default_factory=ChannelSums)
    seen: int = 0


@dataclass(frozen=True)
class Fit:
    """What size images are stored at: a square, a short side, or (both None) their own."""

    size: int | None = None
    short_side: int | None = None

    def chunk_length(self, sample: Sample) -> int:
        """How many samples a task takes, so that its decoded images stay near ``_CHUNK_BYTES``."""
        if self.size is not None:
            return max(1, min(256, _CHUNK_BYTES // (3 * self.size**2)))
        if self.short_side is not None:
            return max(1, min(256, _CHUNK_BYTES // (4 * self.short_side**2)))
        if isinstance(sample.image, np.ndarray):
            return max(1, min(256, _CHUNK_BYTES // sample.image.size))
        header = "" if isinstance(sample.image, Path) else read_header(sample.image)
        if isinstance(header, str):
            return 1  # of unknown size, perhaps as large as the pixel cap
        return max(1, min(256, _CHUNK_BYTES // (3 * header.width * header.height)))


def _read(path: Path, name: str, chunk: Chunk) -> bytes | str:
    """The file's bytes, or why not; its hash is noted for the source's hash either way."""
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):  # a pipe or a device might never end
            chunk.digests.append((name, ""))
            return "it is not a regular file"
        if facts.st_size > MAX_BYTES:
            with path.open("rb") as stream:
                chunk.digests.append((name, hashlib.file_digest(stream, "sha256").hexdigest()))
            return f"the file is larger than {MAX_BYTES} bytes"
        data = path.read_bytes()
    except OSError as error:
        chunk.digests.append((name, ""))
        return f"the file cannot be read ({error.strerror})"
    chunk.digests.append((name, hashlib.sha256(data).hexdigest()))
    return data


def _append_image(sample: Sample, fit: Fit, chunk: Chunk) -> str | None:
    """Decode one image to the end of the chunk's pixels; the reason if it cannot be used."""
    if isinstance(sample.image, np.ndarray):
        pixels = fit_pixels(sample.image, fit.size, fit.short_side)
        if isinstance(pixels, str):
            return pixels
        chunk.pixels += np.ascontiguousarray(pixels).data
        chunk.sizes.append((pixels.shape[0], pixels.shape[1]))
        return None
    data = _read(sample.image, sample.name, chunk) if isinstance(sample.image, Path) else sample.image
    image = data if isinstance(data, str) else decode_to_rgb(data, fit.size, fit.short_side)
    if isinstance(image, str):
        return image
    chunk.pixels += image.tobytes()
    chunk.sizes.append((image.height, image.width))
    return None


def decode_chunk(samples: list[Sample], fit: Fit) -> Chunk:
    """Decode ``samples`` in order into one run of bytes."""
    chunk = Chunk(seen=len(samples))
    for sample in samples:
        reason = _append_image(sample, fit, chunk)
        if reason is not None:
            chunk.rejected.append((sample.name, reason))
            continue
        chunk.labels.append(sample.label)
    chunk.sums.add_pixels(chunk.pixels)
    return chunk


def group_samples(samples: Iterable[Sample], fit: Fit) -> Iterator[list[Sample]]:
    """Consecutive samples in lists of the length one task takes."""
    group: list[Sample] = []
    for sample in samples:
        group.append(sample)
        if len(group) >= fit.chunk_length(sample):
            yield group
            group = []
    if group:
        yield group


def _help(pending: deque[tuple[list[Sample], Future[Chunk]]], fit: Fit) -> None:
    """Decode the first group that no thread has begun; if all are begun, wait for the first."""
    for at, (group, future) in enumerate(pending):
        if future.cancel():
            finished: Future[Chunk] = Future()
            finished.set_result(decode_chunk(group, fit))
            pending[at] = group, finished
            return
    pending[0][1].result()


def decode_in_order(groups: Iterable[list[Sample]], fit: Fit, jobs: int) -> Generator[Chunk, None, None]:
    """Decode groups in ``jobs`` threads and give them back in order; at most jobs + 2 are in memory.

    The calling thread is one of the ``jobs``: it decodes whenever the next group is not ready. A thread more than
    that would only fight for the interpreter, and pixels decoded here are still in this core's cache when they
    are hashed and written.
    """
    if jobs == 1:
        for group in groups:
            yield decode_chunk(group, fit)
        return
    groups = iter(groups)
    pending: deque[tuple[list[Sample], Future[Chunk]]] = deque()
    pool = ThreadPoolExecutor(jobs - 1, thread_name_prefix="decode")
    try:
        while True:
            for group in islice(groups, jobs + 2 - len(pending)):
                pending.append((group, pool.submit(decode_chunk, group, fit)))
            if not pending:
                return
            if pending[0][1].done():
                yield pending.popleft()[1].result()
            else:
                _help(pending, fit)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class SplitWriter:
    """Appends chunks to the files of one split, hashing what it writes."""

    def __init__(self, folder: Path, split: str) -> None:
        self.names = {kind: f"{split}.{kind}" for kind in ("images", "labels", "index")}
        self.folder = folder
        self.streams = {kind: (folder / name).open("wb") for kind, name in self.names.items()}
        self.hashes = {kind: hashlib.sha256() for kind in self.names}
        self.written = dict.fromkeys(self.names, 0)
        self.sizes: set[tuple[int, int]] = set()

    def _append(self, kind: str, content: bytes | bytearray) -> None:
        self.streams[kind].write(content)
        self.hashes[kind].update(content)
        self.written[kind] += len(content)

    def append(self, chunk: Chunk) -> None:
        if not chunk.labels:
            return
        shapes = np.array(chunk.sizes, dtype="<i8")
        lengths = 3 * shapes[:, 0] * shapes[:, 1]
        offsets = self.written["images"] + np.cumsum(lengths) - lengths
        self._append("images", chunk.pixels)
        self._append("labels", np.array(chunk.labels, dtype="<i4").tobytes())
        self._append("index", np.column_stack([offsets, shapes]).astype("<i8").tobytes())
        self.sizes.update(chunk.sizes)

    def close(self, sync: bool) -> None:
        for stream in self.streams.values():
            if sync:
                stream.flush()
                os.fsync(stream.fileno())
            stream.close()

    def describe(self, keep_index: bool) -> dict[str, Any]:
        """Size and hash of the files; images of one size need no index, so it is deleted."""
        if not keep_index:
            (self.folder / self.names.pop("index")).unlink()
        return {
            name: {"bytes": self.written[kind], "sha256": self.hashes[kind].hexdigest()}
            for kind, name in self.names.items()
        }
