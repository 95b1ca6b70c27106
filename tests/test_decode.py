"""Decoding: pixels are right for every kind of image, and nothing a file holds can crash it or fill the memory."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from archives import CORRUPT, bombs, encode, flat_png, picture
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from bicovg.data.decode import decode_image, fit_pixels, read_header

ROOT = Path(__file__).resolve().parents[1]
FULL = os.environ.get("BICOVG_FULL_COUNTS") == "1"


def decoded(data: bytes, **options: int) -> np.ndarray:
    result = decode_image(data, **options)
    assert isinstance(result, np.ndarray), result
    return result


@pytest.mark.parametrize("format", ["PNG", "BMP", "WEBP"])
def test_lossless_formats_give_the_exact_pixels(format: str) -> None:
    pixels = picture(1, 21, 34)
    options = {"lossless": True} if format == "WEBP" else {}
    np.testing.assert_array_equal(decoded(encode(pixels, format, **options)), pixels)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0, "quality": 30}, {"dpi": (72, 72)}])
def test_jpeg_pixels_equal_those_of_pillows_own_reader(mode: str, options: dict[str, object]) -> None:
    data = encode(picture(2, 37, 50), "JPEG", mode, **options)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(decoded(data), expected)


def test_exif_orientation_is_ignored() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    data = encode(picture(3, 10, 20), "JPEG", exif=exif)
    assert decoded(data).shape == (10, 20, 3)


def test_palette_and_gray_become_rgb() -> None:
    pixels = picture(4, 9)
    gray = np.asarray(Image.fromarray(pixels).convert("L"))
    np.testing.assert_array_equal(decoded(encode(pixels, "PNG", "L")), np.stack([gray] * 3, axis=2))
    palette = np.asarray(Image.fromarray(pixels).convert("P").convert("RGB"))
    np.testing.assert_array_equal(decoded(encode(pixels, "PNG", "P")), palette)


def test_sixteen_bit_gray_keeps_its_high_byte() -> None:
    wide = (np.arange(64, dtype=np.uint16) * 1024).reshape(8, 8)
    stream = io.BytesIO()
    Image.fromarray(wide).save(stream, "PNG")
    expected = np.stack([(wide >> 8).astype(np.uint8)] * 3, axis=2)
    np.testing.assert_array_equal(decoded(stream.getvalue()), expected)


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_transparent_pixels_are_laid_over_white(format: str) -> None:
    pixels = np.dstack([picture(5, 8), np.full((8, 8), 255, np.uint8)])
    pixels[:4, :, 3] = 0
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format, **({"lossless": True, "exact": True} if format == "WEBP" else {}))
    image = decoded(stream.getvalue())
    assert (image[:4] == 255).all()
    np.testing.assert_array_equal(image[4:], pixels[4:, :, :3])


def test_size_leaves_a_fitting_image_alone_and_centre_crops_others() -> None:
    pixels = picture(6, 32)
    np.testing.assert_array_equal(decoded(encode(pixels), size=32), pixels)
    stripes = np.zeros((16, 48, 3), np.uint8)
    stripes[:, 16:32] = 200  # only the centre square is bright
    np.testing.assert_array_equal(decoded(encode(stripes), size=16), np.full((16, 16, 3), 200))
    assert decoded(encode(stripes), size=8).shape == (8, 8, 3)


@pytest.mark.parametrize(("height", "width", "shape"), [(10, 25, (20, 50)), (60, 41, (29, 20)), (20, 33, (20, 33))])
def test_short_side_keeps_the_whole_width(height: int, width: int, shape: tuple[int, int]) -> None:
    image = decoded(encode(picture(7, height, width)), short_side=20)
    assert image.shape == (*shape, 3)
    raw = fit_pixels(picture(7, height, width), short_side=20)
    np.testing.assert_array_equal(image, raw)


def test_resizing_averages_instead_of_picking_pixels() -> None:
    checks = np.indices((64, 64)).sum(axis=0) % 2 * np.uint8(255)
    image = decoded(encode(np.dstack([checks] * 3).astype(np.uint8)), size=8)
    assert 100 < image.min() <= image.max() < 155


def test_a_strip_that_would_grow_beyond_the_cap_is_refused() -> None:
    reason = decode_image(encode(np.zeros((1, 60_000, 3), np.uint8)), short_side=256)
    assert isinstance(reason, str)
    assert "15360000x256" in reason


def test_the_cap_counts_pixels_of_the_header() -> None:
    data = flat_png(100, 100)
    assert isinstance(decode_image(data, max_pixels=10_000), np.ndarray)
    assert isinstance(decode_image(data, max_pixels=9_999), str)


@pytest.mark.parametrize("format", ["PNG", "BMP", "WEBP", "JPEG"])
def test_header_gives_the_size_pillow_gives(format: str) -> None:
    header = read_header(encode(picture(8, 30, 70), format))
    assert header[:3] == (format, 70, 30)


@given(
    st.binary(max_size=200), st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF0000WEBPVP8X", b"BM"])
)
def test_any_bytes_give_pixels_or_a_reason(tail: bytes, head: bytes) -> None:
    result = decode_image(head + tail, max_pixels=1 << 20)
    assert isinstance(result, np.ndarray) or (isinstance(result, str) and result)


@given(st.integers(0, 1 << 30), st.sampled_from(["JPEG", "PNG", "WEBP", "BMP"]))
def test_damaged_bytes_never_raise(seed: int, format: str) -> None:
    draw = np.random.default_rng(seed)
    data = bytearray(encode(picture(seed % 7), format))
    for at in draw.integers(0, min(len(data), 400), 5):
        data[at] = draw.integers(0, 256)
    result = decode_image(bytes(data), max_pixels=1 << 20)
    assert isinstance(result, str) or result.shape[2] == 3


@pytest.mark.parametrize("kind", CORRUPT)
def test_every_kind_of_corrupt_image_is_refused_with_a_stable_reason(kind: str) -> None:
    for seed in range(100 if FULL else 10):
        data = CORRUPT[kind](seed)
        reason = decode_image(data)
        assert isinstance(reason, str), (kind, seed)
        assert reason == decode_image(data)
        assert " at 0x" not in reason


PACK_AND_MEASURE = """
import json, re, sys
from pathlib import Path
from bicovg.data.sources import open_source
from bicovg.data.store import pack

def peak_memory():  # of this process alone: getrusage would begin with the peak of the one that started it
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

good, bad, root = map(Path, sys.argv[1:])
peaks = []
for name, folder in (("good", good), ("bad", bad)):
    store = pack(open_source(folder), root, name, size=32, jobs=2, max_rejected=1.0)
    peaks.append(peak_memory())
print(json.dumps({"peaks": peaks, "rejected": {entry["path"]: entry["reason"] for entry in store.rejected}}))
"""


def test_corrupt_images_and_bombs_are_all_named_while_memory_stays_flat(tmp_path: Path) -> None:
    for split in ("good/train", "good/test", "bad/train", "bad/test"):
        (tmp_path / split / "a").mkdir(parents=True)
        for i in range(30):
            (tmp_path / split / "a" / f"{i}.png").write_bytes(encode(picture(i)))
    planted = {f"c{i}-{j}.jpg": make(j) for i, make in enumerate(CORRUPT.values()) for j in range(100 if FULL else 10)}
    planted |= {f"b{i}.png": data for i, data in enumerate(bombs().values())}
    for name, data in planted.items():
        (tmp_path / "bad" / "train" / "a" / name).write_bytes(data)
    command = [sys.executable, "-W", "error", "-c", PACK_AND_MEASURE]
    folders = [str(tmp_path / name) for name in ("good", "bad", "stores")]
    run = subprocess.run([*command, *folders], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert sorted(result["rejected"]) == sorted(f"train/a/{name}" for name in planted)
    assert all(result["rejected"].values())
    # one decoded bomb would be 50 at least
    assert result["peaks"][1] - result["peaks"][0] < 20
