"""From image bytes to RGB pixels, safely: an image, or the reason why there is none.

Only JPEG, PNG, WEBP and BMP are decoded. The size is read from the header by our own few lines before Pillow
sees the file, so that a file that claims to be huge costs nothing. EXIF orientation is ignored, as the usual
training pipelines do; of an animated file the first frame is used; transparent pixels are laid over white.
"""

import io
import re
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from bicovg.errors import UserError

try:
    from PIL import Image, UnidentifiedImageError
    from PIL import __version__ as pillow_version
except ImportError as error:
    raise UserError("decoding images needs Pillow: pip install 'bicovg[data]'") from error

__all__ = [
    "FORMATS",
    "MAX_BYTES",
    "MAX_PIXELS",
    "Header",
    "Pixels",
    "decode_image",
    "decode_to_rgb",
    "fit_pixels",
    "pillow_version",
    "read_header",
]

FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
MAX_PIXELS = 50_000_000
MAX_BYTES = 256 << 20  # an uncompressed image of MAX_PIXELS fits; nothing larger is read into memory

Pixels = UInt8[np.ndarray, "h w 3"]

_REFUSED = (
    (b"GIF8", "GIF"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"%PDF", "PDF"),
    (b"<", "HTML or XML"),
)
_FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_BARE_MARKERS = frozenset([0x00, 0x01, *range(0xD0, 0xDA)])  # no length follows these


class Header(NamedTuple):
    """What the first bytes of a file say; ``mode`` is Pillow's mode of a JPEG that libjpeg can be given directly."""

    format: str
    width: int
    height: int
    mode: str | None = None


def _find_frame(data: bytes) -> int:
    """Where a JPEG's frame header begins, walking its markers as libjpeg does; -1 if it has none."""
    at = 2
    while (at := data.find(b"\xff", at)) >= 0 and at + 10 <= len(data):
        marker = data[at + 1]
        if marker in _FRAME_HEADERS:
            return at
        if marker == 0xDA:  # the scan begins: no frame header came before it
            return -1
        if marker == 0xFF:
            at += 1
        elif marker in _BARE_MARKERS:
            at += 2
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4])
    return -1


def _jpeg_header(data: bytes) -> Header | None:
    """Gray and three-component JPEGs of 8 bits have a mode here; other kinds are left to Pillow's own parser."""
    at = _find_frame(data)
    if at < 0:
        return None
    height, width = int.from_bytes(data[at + 5 : at + 7]), int.from_bytes(data[at + 7 : at + 9])
    return Header("JPEG", width, height, {1: "L", 3: "RGB"}.get(data[at + 9]) if data[at + 4] == 8 else None)


def _png_header(data: bytes) -> Header | None:
    if data[12:16] != b"IHDR" or len(data) < 24:
        return None
    return Header("PNG", int.from_bytes(data[16:20]), int.from_bytes(data[20:24]))


def _webp_header(data: bytes) -> Header | None:
    if len(data) < 30:
        return None
    if data[12:16] == b"VP8X":  # canvas size less one
        width, height = int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    elif data[12:16] == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    else:
        bits = int.from_bytes(data[26:30], "little")
        width, height = bits & 0x3FFF, bits >> 16 & 0x3FFF
    return Header("WEBP", width, height)


def _bmp_header(data: bytes) -> Header | None:
    if len(data) < 26:
        return None
    if int.from_bytes(data[14:18], "little") == 12:  # the old header with 16-bit sizes
        return Header("BMP", int.from_bytes(data[18:20], "little"), int.from_bytes(data[20:22], "little"))
    width = int.from_bytes(data[18:22], "little", signed=True)
    return Header("BMP", width, abs(int.from_bytes(data[22:26], "little", signed=True)))


def read_header(data: bytes) -> Header | str:
    """Format and size from the first bytes, or the reason why it is no allowed image."""
    if data[:3] == b"\xff\xd8\xff":
        name, header = "JPEG", _jpeg_header(data)
    elif data[:8] == b"\x89PNG\r\n\x1a\n":
        name, header = "PNG", _png_header(data)
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        name, header = "WEBP", _webp_header(data)
    elif data[:2] == b"BM":
        name, header = "BMP", _bmp_header(data)
    elif not data:
        return "the file is empty"
    elif not any(data[:64]):
        return "the file begins with zero bytes"
    else:
        kind = next((kind for magic, kind in _REFUSED if data.lstrip().startswith(magic)), "of unknown format")
        return f"the file is {kind}, not one of {', '.join(FORMATS)}"
    if header is None or header.width < 1 or header.height < 1:
        return f"the {name} header is damaged"
    return header


def _to_rgb(image: Image.Image) -> Image.Image:
    """RGB from whatever the file held: 16-bit gray keeps its high byte, transparency is laid over white."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):
        wide = np.asarray(image).astype(np.int64)
        return Image.fromarray(np.clip(wide >> 8, 0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")


def _fit(image: Image.Image, size: int | None, short_side: int | None, max_pixels: int) -> Image.Image | str:
    """The centre square at ``size``, or the whole image at ``short_side``; bilinear, antialiased."""
    width, height = image.size
    short = min(width, height)
    if size is not None and (width, height) != (size, size):
        left, top = (width - short) / 2, (height - short) / 2
        box = (left, top, left + short, top + short)
        return image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    if short_side is not None and short != short_side:
        width, height = width * short_side // short, height * short_side // short
        if width * height > max_pixels:
            return f"it would be {width}x{height} with a short side of {short_side}, above {max_pixels} pixels"
        return image.resize((width, height), Image.Resampling.BILINEAR)
    return image


def _to_pixels(image: Image.Image | str) -> Pixels | str:
    if isinstance(image, str):
        return image
    return np.frombuffer(image.tobytes(), np.uint8).reshape(image.height, image.width, 3)


def _decode_jpeg(data: bytes, mode: str, width: int, height: int) -> Image.Image:
    """Hand the file to libjpeg directly: same pixels as ``Image.open``, a third less time for small images.

    What is saved is Pillow's parser, which is Python, holds the interpreter lock and finds nothing we need.
    libjpeg reads the size itself, and Pillow refuses a file whose size is not the one given here.
    """
    try:
        image = Image.frombytes(mode, (width, height), data, "jpeg", (mode, ""))
    except ValueError as error:
        raise ValueError("the JPEG data end early or cannot be decoded") from error
    return image if mode == "RGB" else image.convert("RGB")


def fit_pixels(pixels: Pixels, size: int | None = None, short_side: int | None = None) -> Pixels | str:
    """Raw pixels resized as ``decode_image`` resizes decoded ones; unchanged when they fit already."""
    short = min(pixels.shape[:2])
    if size in (None, short) and short_side in (None, short) and (size is None or pixels.shape[0] == pixels.shape[1]):
        return pixels
    return _to_pixels(_fit(Image.fromarray(np.ascontiguousarray(pixels)), size, short_side, MAX_PIXELS))


def _explain(error: Exception) -> str:
    """A reason that is the same in every run: no object addresses."""
    if isinstance(error, UnidentifiedImageError):
        return "the file is damaged: Pillow cannot read its header"
    text = re.sub(r"<[^>]*>|0x[0-9a-fA-F]+", "...", str(error)).strip()
    return f"the file is damaged: {text or type(error).__name__}"


def decode_image(
    data: bytes, *, size: int | None = None, short_side: int | None = None, max_pixels: int = MAX_PIXELS
) -> Pixels | str:
    """Decode to RGB pixels (H, W, 3), or say in a few words why not. Raises nothing, whatever ``data`` is.

    Args:
        size: make the result square: short side resized to this, centre cropped; nothing if it is so already.
        short_side: resize so that the short side is this and keep the whole width.
        max_pixels: larger images are refused from their header.
    """
    return _to_pixels(decode_to_rgb(data, size, short_side, max_pixels))


def decode_to_rgb(
    data: bytes, size: int | None = None, short_side: int | None = None, max_pixels: int = MAX_PIXELS
) -> Image.Image | str:
    """``decode_image`` before its last copy: an RGB image of Pillow, or why there is none."""
    header = read_header(data)
    if isinstance(header, str):
        return header
    name, width, height, mode = header
    if width * height > max_pixels:
        return f"the image is {width}x{height}, above the limit of {max_pixels} pixels"
    try:
        if mode is not None:
            return _fit(_decode_jpeg(data, mode, width, height), size, short_side, max_pixels)
        if name == "PNG":  # Pillow's loader skips the checksums of the image data
            with Image.open(io.BytesIO(data), formats=(name,)) as image:
                image.verify()
        with Image.open(io.BytesIO(data), formats=(name,)) as image:
            if image.width * image.height > max_pixels:
                return f"the image is {image.width}x{image.height}, above the limit of {max_pixels} pixels"
            image.load()
            return _fit(_to_rgb(image), size, short_side, max_pixels)
    except Exception as error:  # damaged files raise nearly every type inside Pillow's parsers
        return _explain(error)
