"""Scenes as PDF: one page the size of the drawing, paths and text kept as such, in the standard Helvetica."""

import zlib
from collections.abc import Sequence

from bicovg.report.scene import Dot, Ink, Line, Mark, Raster, Rect, Scene, Text, rgb
from bicovg.report.svg import blend_cells

# Widths of Helvetica's characters 32..126 in thousandths of the font size, from its font metrics.
_WIDTHS = (
    "278 278 355 556 556 889 667 191 333 333 389 584 278 333 278 278 556 556 556 556 556 556 556 556 556 556 278 278 "
    "584 584 584 556 1015 667 667 722 722 667 611 778 722 278 500 667 556 833 722 778 667 778 722 667 611 722 667 944 "
    "667 667 611 278 278 278 469 556 333 556 556 500 556 556 278 556 556 222 222 500 222 833 556 556 556 556 333 500 "
    "278 556 500 722 500 500 500 334 260 334 584"
)
WIDTHS = dict(zip(range(32, 127), map(int, _WIDTHS.split()), strict=True))
KAPPA = 0.5523  # control points of a circle's four curves


def pdf_file(scene: Scene) -> bytes:
    """A PDF of one page; one unit is one point."""
    images: list[Raster] = []
    steps = [f"1 0 0 -1 0 {scene.height:.2f} cm"]  # y down, as in the scene
    for mark in scene.marks:
        steps.append(_mark(mark, images))
    body = zlib.compress("\n".join(steps).encode("latin-1"))
    xobjects = " ".join(f"/I{i} {7 + i} 0 R" for i in range(len(images)))
    fonts = "<< /F0 5 0 R /F1 6 0 R >>"
    page = f"/MediaBox [0 0 {scene.width:.2f} {scene.height:.2f}] /Contents 4 0 R"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        f"<< /Type /Page /Parent 2 0 R {page} /Resources << /Font {fonts} /XObject << {xobjects} >> >> >>".encode(),
        _stream("/Filter /FlateDecode", body),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica-Bold /Encoding /WinAnsiEncoding >>",
        *(_image(image) for image in images),
    ]
    return _assemble(objects)


def _assemble(objects: Sequence[bytes]) -> bytes:
    """Header, numbered objects, their table of offsets, trailer."""
    out, offsets = bytearray(b"%PDF-1.4\n"), []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n".encode() + body + b"\nendobj\n"
    start = len(out)
    out += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    out += "".join(f"{offset:010d} 00000 n \n" for offset in offsets).encode()
    out += f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{start}\n%%EOF\n".encode()
    return bytes(out)


def _stream(entries: str, body: bytes) -> bytes:
    return f"<< {entries} /Length {len(body)} >>\nstream\n".encode() + body + b"\nendstream"


def _image(mark: Raster) -> bytes:
    size = f"/Width {len(mark.cells[0])} /Height {len(mark.cells)}"
    entries = f"/Type /XObject /Subtype /Image {size} /ColorSpace /DeviceRGB /BitsPerComponent 8 /Filter /FlateDecode"
    return _stream(entries, zlib.compress(blend_cells(mark)))


def _mark(mark: Mark, images: list[Raster]) -> str:
    if isinstance(mark, Text):
        return _text(mark)
    if isinstance(mark, Raster):
        images.append(mark)
        # an image fills the unit square from its bottom up: turn it over into its place
        matrix = f"{mark.width:.2f} 0 0 {-mark.height:.2f} {mark.x:.2f} {mark.y + mark.height:.2f}"
        return f"q {matrix} cm /I{len(images) - 1} Do Q"
    if isinstance(mark, Line):
        start, *rest = mark.points
        path = f"{start[0]:.2f} {start[1]:.2f} m " + " ".join(f"{x:.2f} {y:.2f} l" for x, y in rest)
        dash = " ".join(f"{length:g}" for length in mark.dash)
        return f"{_colour(mark.ink, 'RG')} {mark.width:.2f} w 1 j [{dash}] 0 d {path} S"
    if isinstance(mark, Rect):
        return f"{_colour(mark.ink, 'rg')} {mark.x:.2f} {mark.y:.2f} {mark.width:.2f} {mark.height:.2f} re f"
    return _circle(mark)


def _circle(mark: Dot) -> str:
    x, y, r, c = mark.x, mark.y, mark.radius, mark.radius * KAPPA
    curves = (
        (x + r, y + c, x + c, y + r, x, y + r),
        (x - c, y + r, x - r, y + c, x - r, y),
        (x - r, y - c, x - c, y - r, x, y - r),
        (x + c, y - r, x + r, y - c, x + r, y),
    )
    path = " ".join(" ".join(f"{v:.2f}" for v in curve) + " c" for curve in curves)
    return f"{_colour(mark.ink, 'rg')} {x + r:.2f} {y:.2f} m {path} f"


def text_width(text: str, size: float) -> float:
    """Width in Helvetica; characters outside ASCII count as an average one."""
    return sum(WIDTHS.get(ord(letter), 556) for letter in text) * size / 1000


def _text(mark: Text) -> str:
    shift = {"start": 0.0, "middle": 0.5, "end": 1.0}[mark.anchor] * text_width(mark.text, mark.size)
    x, y = (mark.x, mark.y + shift) if mark.turned else (mark.x - shift, mark.y)
    turn = "0 -1 -1 0" if mark.turned else "1 0 0 -1"
    words = mark.text.encode("cp1252", "replace").decode("latin-1")
    for letter in "\\()":
        words = words.replace(letter, "\\" + letter)
    font = f"/F{int(mark.bold)} {mark.size:.2f} Tf"
    return f"BT {font} {_colour(mark.ink, 'rg')} {turn} {x:.2f} {y:.2f} Tm ({words}) Tj ET"


def _colour(ink: Ink, operator: str) -> str:
    return " ".join(f"{value / 255:.3f}" for value in rgb(ink.light)) + f" {operator}"
