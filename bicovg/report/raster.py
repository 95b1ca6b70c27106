"""Scenes as PNG, drawn with Pillow at twice the size and shrunk, so that edges are smooth."""

from collections.abc import Sequence
from io import BytesIO
from itertools import pairwise
from typing import Any

from bicovg.errors import UserError
from bicovg.report.scene import Dot, Line, Point, Raster, Rect, Scene, Text, rgb
from bicovg.report.svg import blend_cells

SMOOTH = 2


def png_file(scene: Scene, scale: float = 3.0) -> bytes:
    """The scene on white, ``scale`` pixels a unit."""
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise UserError("PNG figures need Pillow: pip install 'bicovg[report]', or use --format svg,pdf") from None
    size = (round(scene.width * scale), round(scene.height * scale))
    canvas = Image.new("RGB", (size[0] * SMOOTH, size[1] * SMOOTH), "white")
    draw = ImageDraw.Draw(canvas)
    for mark in scene.marks:
        _draw(canvas, draw, mark, scale * SMOOTH)
    out = BytesIO()
    canvas.resize(size, Image.Resampling.BOX).save(out, "PNG", optimize=True)
    return out.getvalue()


def _draw(canvas: Any, draw: Any, mark: Any, k: float) -> None:
    if isinstance(mark, Text):
        _text(canvas, mark, k)
    elif isinstance(mark, Raster):
        from PIL import Image

        cells = Image.frombytes("RGB", (len(mark.cells[0]), len(mark.cells)), blend_cells(mark))
        size = (round(mark.width * k), round(mark.height * k))
        canvas.paste(cells.resize(size, Image.Resampling.NEAREST), (round(mark.x * k), round(mark.y * k)))
    elif isinstance(mark, Line):
        width = max(1, round(mark.width * k))
        for part in dash_line(mark.points, mark.dash):
            draw.line([(x * k, y * k) for x, y in part], fill=rgb(mark.ink.light), width=width, joint="curve")
    elif isinstance(mark, Rect):
        box = (mark.x * k, mark.y * k, (mark.x + mark.width) * k, (mark.y + max(mark.height, 0.2)) * k)
        draw.rectangle(box, fill=rgb(mark.ink.light))
    elif isinstance(mark, Dot):
        r = mark.radius
        draw.ellipse(((mark.x - r) * k, (mark.y - r) * k, (mark.x + r) * k, (mark.y + r) * k), fill=rgb(mark.ink.light))


def _text(canvas: Any, mark: Text, k: float) -> None:
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(mark.size * k)
    anchor = {"start": "ls", "middle": "ms", "end": "rs"}[mark.anchor]
    thick = round(mark.size * k / 40) if mark.bold else 0
    if not mark.turned:
        place = (mark.x * k, mark.y * k)
        ink = rgb(mark.ink.light)
        ImageDraw.Draw(canvas).text(place, mark.text, fill=ink, font=font, anchor=anchor, stroke_width=thick)
        return
    length = int(font.getlength(mark.text)) + 4
    stencil = Image.new("L", (length, int(2 * mark.size * k)))
    ImageDraw.Draw(stencil).text((2, 1.5 * mark.size * k), mark.text, fill=255, font=font, anchor="ls")
    turned = stencil.rotate(90, expand=True)
    shift = {"start": 1.0, "middle": 0.5, "end": 0.0}[mark.anchor]
    place = (round((mark.x - 1.5 * mark.size) * k), round(mark.y * k - length * shift))
    canvas.paste(Image.new("RGB", turned.size, rgb(mark.ink.light)), place, turned)


def dash_line(points: Sequence[Point], dash: Sequence[float]) -> list[list[Point]]:
    """A path cut into the drawn parts of its dashes; whole without any. Pillow knows no dashes."""
    if not dash or len(points) < 2:
        return [list(points)]
    pattern = list(dash) * (2 if len(dash) % 2 else 1)
    parts: list[list[Point]] = [[points[0]]]
    phase, left = 0, pattern[0]
    for (ax, ay), (bx, by) in pairwise(points):
        length, done = ((bx - ax) ** 2 + (by - ay) ** 2) ** 0.5, 0.0
        while length - done > 1e-9:
            step = min(left, length - done)
            done, left = done + step, left - step
            here = (ax + (bx - ax) * done / length, ay + (by - ay) * done / length)
            if phase % 2 == 0:
                parts[-1].append(here)
            if left <= 1e-9:
                phase = (phase + 1) % len(pattern)
                left = pattern[phase]
                if phase % 2 == 0:
                    parts.append([here])
    return [part for part in parts if len(part) > 1]
