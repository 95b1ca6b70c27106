"""A PNG encoder of a few lines, so that the page's pictures need no image library."""

import base64
import struct
import zlib


def encode_png(pixels: bytes, width: int, height: int, channels: int) -> bytes:
    """8-bit gray (1 channel) or RGB (3), row by row from the top."""
    stride = width * channels
    if channels not in (1, 3) or len(pixels) != height * stride:
        raise ValueError(f"{len(pixels)} bytes are no {width}x{height} image of {channels} channels")
    rows = b"".join(b"\0" + pixels[i : i + stride] for i in range(0, len(pixels), stride))
    header = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2}[channels], 0, 0, 0)
    body = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows, 9)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
