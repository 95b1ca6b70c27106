"""Writing one split: decode in threads, append in order, hash and count on the way."""

import hashlib
import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bicovg.data.decode import MAX_BYTES, Pixels, decode_image, fit_pixels
from bicovg.data.sources_sample import Sample

_CHUNK_BYTES = 1 << 20  # decoded bytes a task aims at: many small images, or a few large ones
_BLOCK = 3 * 1024
_BLOCK_ROWS = 4096  # 4096 * 255^2 fits uint32


Progress = Callable[[str, int, int], None]  # (split or file, done, total)


@dataclass
class Chunk:
    """The outcome of decoding a few consecutive samples."""

    pixels: bytearray = field(default_factory=bytearray)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    rejected: list[tuple[str, str]] = field(default_factory=list)
    digests: list[tuple[str, str]] = field(default_factory=list)
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
        return 1  # of unknown size, each perhaps as large as the pixel cap


def _read(path: Path, name: str, chunk: Chunk) -> bytes | str:
    """The file's bytes, or why not; its hash is noted for the source's hash either way."""
    try:
        if path.stat().st_size > MAX_BYTES:
            with path.open("rb") as stream:
                chunk.digests.append((name, hashlib.file_digest(stream, "sha256").hexdigest()))
            return f"the file is larger than {MAX_BYTES} bytes"
        data = path.read_bytes()
    except OSError as error:
        chunk.digests.append((name, ""))
        return f"the file cannot be read ({error.strerror})"
    chunk.digests.append((name, hashlib.sha256(data).hexdigest()))
    return data


def _decode(sample: Sample, fit: Fit, chunk: Chunk) -> Pixels | str:
    if isinstance(sample.image, np.ndarray):
        return fit_pixels(sample.image, fit.size, fit.short_side)
    data = _read(sample.image, sample.name, chunk) if isinstance(sample.image, Path) else sample.image
    return data if isinstance(data, str) else decode_image(data, size=fit.size, short_side=fit.short_side)


def decode_chunk(samples: list[Sample], fit: Fit) -> Chunk:
    """Decode ``samples`` in order into one run of bytes."""
    chunk = Chunk(seen=len(samples))
    for sample in samples:
        image = _decode(sample, fit, chunk)
        if isinstance(image, str):
            chunk.rejected.append((sample.name, image))
            continue
        chunk.pixels += np.ascontiguousarray(image).data  # the image's own memory is free for the next one
        chunk.sizes.append((image.shape[0], image.shape[1]))
        chunk.labels.append(sample.label)
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


def decode_in_order(groups: Iterable[list[Sample]], fit: Fit, jobs: int) -> Generator[Chunk, None, None]:
    """Decode groups in ``jobs`` threads and give them back in order; at most jobs + 2 are in memory."""
    pending: deque[Future[Chunk]] = deque()
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="decode")
    try:
        for group in groups:
            pending.append(pool.submit(decode_chunk, group, fit))
            if len(pending) > jobs + 1:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class ChannelSums:
    """Exact per-channel sums of pixels and their squares, as Python integers."""

    def __init__(self) -> None:
        self.count = 0
        self.sums = [0, 0, 0]
        self.squares = [0, 0, 0]

    def add(self, run: bytes | bytearray) -> None:
        """``run`` holds RGB triples; summing whole blocks keeps numpy on its fast path."""
        pixels = np.frombuffer(run, np.uint8)
        self.count += len(pixels) // 3
        for start in range(0, len(pixels), _BLOCK * _BLOCK_ROWS):
            part = pixels[start : start + _BLOCK * _BLOCK_ROWS]
            whole = len(part) // _BLOCK * _BLOCK
            for rows in (part[:whole].reshape(-1, _BLOCK), part[whole:].reshape(1, -1)):
                sums = rows.sum(axis=0, dtype=np.uint32).reshape(-1, 3).sum(axis=0, dtype=np.uint64)
                squared = np.square(rows, dtype=np.uint16).sum(axis=0, dtype=np.uint32)
                squares = squared.reshape(-1, 3).sum(axis=0, dtype=np.uint64)
                self.sums = [a + b for a, b in zip(self.sums, sums.tolist(), strict=True)]
                self.squares = [a + b for a, b in zip(self.squares, squares.tolist(), strict=True)]

    def mean(self) -> list[float]:
        return [total / (255 * self.count) for total in self.sums]

    def std(self) -> list[float]:
        """Of the whole population: the variance is an exact fraction until its root is taken."""
        n = self.count
        pairs = zip(self.sums, self.squares, strict=True)
        return [math.sqrt((n * square - total * total) / (255 * n) ** 2) for total, square in pairs]


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
