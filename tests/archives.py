"""Builds small archives of every format the readers know, damaged images of ten kinds, and decompression bombs."""

import io
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image

Labelled = list[tuple[bytes, int]]


def picture(seed: int, height: int = 32, width: int | None = None) -> np.ndarray:
    """A smooth random RGB image: different for every seed, and JPEG hardly changes it."""
    draw = np.random.default_rng(seed)
    coarse = Image.fromarray(draw.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    return np.array(coarse.resize((width or height, height), Image.Resampling.BICUBIC))


def encode(pixels: np.ndarray, format: str = "PNG", mode: str = "RGB", **options: object) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, format, **options)
    return stream.getvalue()


def labelled(count: int, classes: int, size: int = 32, first: int = 0, format: str = "PNG") -> Labelled:
    """``count`` encoded pictures; labels go round the classes."""
    return [(encode(picture(first + i, size), format), i % classes) for i in range(count)]


def write_shard(path: Path, rows: Labelled, image: str = "image", label: str = "label", **more: list[int]) -> None:
    structs = [{"bytes": data, "path": f"{i}.png"} for i, (data, _) in enumerate(rows)]
    table = pyarrow.table({image: structs, label: [value for _, value in rows], **more})
    pyarrow.parquet.write_table(table, path, row_group_size=7)


def write_parquet(folder: Path, train: Labelled, test: Labelled, classes: int, test_name: str = "test") -> Path:
    """Two train shards, one test shard and the names, as the public copies of Tiny-ImageNet have them."""
    folder.mkdir(parents=True)
    half = len(train) // 2
    write_shard(folder / "train-00000-of-00002.parquet", train[:half])
    write_shard(folder / "train-00001-of-00002.parquet", train[half:])
    write_shard(folder / f"{test_name}-00000-of-00001.parquet", test)
    (folder / "label_names.txt").write_text("".join(f"class {i}\n" for i in range(classes)))
    return folder


def write_cifar_parquet(folder: Path, train: Labelled, test: Labelled, classes: int) -> Path:
    """The column names of the public copies of CIFAR-100, coarse labels beside the fine ones."""
    folder.mkdir(parents=True)
    for split, rows in (("train", train), ("test", test)):
        path = folder / f"{split}-00000-of-00001.parquet"
        write_shard(path, rows, "img", "fine_label", coarse_label=[99] * len(rows))
    (folder / "fine_label_names.txt").write_text("".join(f"fine {i}\n" for i in range(classes)))
    (folder / "coarse_label_names.txt").write_text("coarse\n")
    return folder


def write_cifar_binary(folder: Path, train: np.ndarray, test: np.ndarray) -> Path:
    """Images (N, 32, 32, 3); the fine label of image i is i modulo 100, its coarse label 7."""
    folder.mkdir(parents=True)
    for name, images in (("train", train), ("test", test)):
        planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
        labels = np.stack([np.full(len(images), 7), np.arange(len(images)) % 100], axis=1).astype(np.uint8)
        (folder / f"{name}.bin").write_bytes(np.concatenate([labels, planes], axis=1).tobytes())
    (folder / "fine_label_names.txt").write_text("".join(f"fine {i}\n" for i in range(100)))
    return folder


def write_tar(path: Path, folder: Path) -> Path:
    """Compressed unless the name ends in .tar."""
    with tarfile.open(path, "w" if path.suffix == ".tar" else "w:gz") as archive:
        archive.add(folder, folder.name)
    return path


def write_tiny_imagenet(root: Path, per_class: int = 3) -> Path:
    """Two classes, listed in wnids.txt in the wrong order, as the official file does."""
    for number, wnid in enumerate(["n01", "n02"]):
        images = root / "train" / wnid / "images"
        images.mkdir(parents=True)
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text("not an image\n")
        for i in range(per_class):
            (images / f"{wnid}_{i}.JPEG").write_bytes(encode(picture(10 * number + i, 64), "JPEG"))
    (root / "val" / "images").mkdir(parents=True)
    for i in range(4):
        (root / "val" / "images" / f"val_{i}.JPEG").write_bytes(encode(picture(100 + i, 64), "JPEG"))
    lines = [f"val_{i}.JPEG\tn0{2 - i % 2}\t0\t0\t63\t63\n" for i in range(4)]
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    (root / "wnids.txt").write_text("n02\nn01\n")
    (root / "words.txt").write_text("n01\tgoldfish\nn02\tsalamander, newt\nn03\tnot used\n")
    return root


def write_classes(folder: Path, names: list[str], per_class: int, first: int = 0, height: int = 20) -> Path:
    """One folder of PNGs per class; widths differ from image to image."""
    for number, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for i in range(per_class):
            seed = first + 1000 * number + i
            (folder / name / f"{i:03d}.png").write_bytes(encode(picture(seed, height, height + i % 5)))
    return folder


def _png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def flat_png(width: int, height: int, palette: bool = False, extra: bytes = b"", data: bytes | None = None) -> bytes:
    """A valid one-bit PNG of any size, all zeros: a few kilobytes for hundreds of megapixels."""
    packer = zlib.compressobj(9)
    row = bytes(1 + (width + 7) // 8)
    if data is None:
        data = b"".join([*(packer.compress(row) for _ in range(height)), packer.flush()])
    header = struct.pack(">IIBBBBB", width, height, 1, 3 if palette else 0, 0, 0, 0)
    colours = _png_chunk(b"PLTE", b"\x00\x00\x00\xff\xff\xff") if palette else b""
    chunks = [_png_chunk(b"IHDR", header), colours, extra, _png_chunk(b"IDAT", data), _png_chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _break_crc(seed: int) -> bytes:
    data = bytearray(encode(picture(seed)))
    at = data.index(b"IDAT")
    length = int.from_bytes(data[at - 4 : at])
    data[at + 4 + length] ^= 0x10
    return bytes(data)


def _cut(data: bytes, seed: int) -> bytes:
    """Keep 40 to 90 percent of the file."""
    return data[: len(data) * (40 + seed % 51) // 100]


CORRUPT: dict[str, Callable[[int], bytes]] = {
    "truncated JPEG": lambda seed: _cut(encode(picture(seed, 48), "JPEG"), seed),
    "truncated WEBP": lambda seed: _cut(encode(picture(seed, 48), "WEBP", lossless=True), seed),
    "zero bytes": lambda seed: bytes(100 + seed),
    "random bytes": lambda seed: b"R" + np.random.default_rng(seed).bytes(300 + seed),
    "text under an image's name": lambda seed: f"not an image, number {seed}\n".encode(),
    "PNG with a wrong checksum": _break_crc,
    "HTML error page": lambda seed: f"<!DOCTYPE html><title>{404 + seed}</title>".encode(),
    "empty file": lambda seed: b"",
    "format not allowed": lambda seed: encode(picture(seed), ("GIF", "TIFF")[seed % 2]),
    "header that claims a huge size": lambda seed: flat_png(60_000 + seed, 60_000, data=zlib.compress(bytes(64))),
}


def _patched_jpeg(width: int, height: int) -> bytes:
    data = bytearray(encode(picture(0), "JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def _webp(kind: bytes, body: bytes) -> bytes:
    chunk = kind + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def _run_length_bmp(width: int, height: int) -> bytes:
    """A few bytes of run-length code for a picture of any size."""
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, 0, 0, 0, 256, 0)
    start = 14 + len(header) + 1024
    body = bytes([255, 0]) * 100 + bytes([0, 1])
    return b"BM" + struct.pack("<IHHI", start + len(body), 0, 0, start) + header + bytes(1024) + body


def bombs() -> dict[str, bytes]:
    """Twenty small files that stand for enormous images or enormous text."""
    text = _png_chunk(b"zTXt", b"note\x00\x00" + zlib.compress(bytes(80 << 20), 9))
    profile = _png_chunk(b"iCCP", b"icc\x00\x00" + zlib.compress(bytes(80 << 20), 9))
    found = {f"png {edge}": flat_png(edge, edge) for edge in (7_100, 9_000, 12_000, 14_000)}
    found |= {f"palette {edge}": flat_png(edge, edge, palette=True) for edge in (7_200, 9_500, 13_000, 16_000)}
    found |= {f"jpeg {width}": _patched_jpeg(width, 65_500) for width in (800, 1_500, 3_000, 65_500)}
    found |= {f"bmp {edge}": _run_length_bmp(edge, -edge if edge % 2 else edge) for edge in (7_500, 10_001, 46_000)}
    canvas = struct.pack("<I", 2) + (16_382).to_bytes(3, "little") * 2
    found["webp canvas"] = _webp(b"VP8X", canvas)
    found["webp lossless"] = _webp(b"VP8L", b"\x2f" + ((16_382 << 14) | 16_382).to_bytes(4, "little") + bytes(16))
    found["webp lossy"] = _webp(b"VP8 ", b"\x00\x00\x00\x9d\x01\x2a" + struct.pack("<HH", 16_383, 16_383) + bytes(16))
    found["png text"] = flat_png(8, 8, extra=text)
    found["png profile"] = flat_png(8, 8, extra=profile)
    assert len(found) == 20
    return found
