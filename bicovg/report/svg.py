"""Scenes as SVG: inline for the page (colours follow its theme) or as a file (colours on white)."""

from collections.abc import Callable, Sequence
from html import escape

from bicovg.report.png import data_uri, encode_png
from bicovg.report.scene import Dot, Ink, Line, Mark, Raster, Rect, Scene, Text, rgb

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
Paint = Callable[[str, Ink], str]


def inline_svg(scene: Scene, label: str) -> str:
    """For the page: every colour is a pair, of which the style sheet picks one."""

    def paint(role: str, ink: Ink) -> str:
        return f' class="{role}" style="--l:{ink.light};--d:{ink.dark}"'

    size = f'viewBox="0 0 {_number(scene.width)} {_number(scene.height)}"'
    return f'<svg {size} role="img" aria-label="{escape(label)}">{_marks(scene, paint)}</svg>'


def svg_file(scene: Scene) -> str:
    """A file of its own, on a white ground."""

    def paint(role: str, ink: Ink) -> str:
        return f' fill="{ink.light}"' if role == "f" else f' fill="none" stroke="{ink.light}"'

    w, h = _number(scene.width), _number(scene.height)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}"'
    ground = f'<rect width="{w}" height="{h}" fill="#ffffff"/>'
    return f'{head} font-family="{escape(FONT)}">{ground}{_marks(scene, paint)}</svg>\n'


def _marks(scene: Scene, paint: Paint) -> str:
    return "".join(_mark(mark, paint) for mark in scene.marks)


def _mark(mark: Mark, paint: Paint) -> str:
    if isinstance(mark, Line):
        dash = f' stroke-dasharray="{" ".join(map(_number, mark.dash))}"' if mark.dash else ""
        start, *rest = (f"{_number(x)} {_number(y)}" for x, y in mark.points)
        path = f"M{start}" + ("L" + " ".join(rest) if rest else "")
        return (
            f'<path d="{path}" stroke-width="{_number(mark.width)}" stroke-linejoin="round"{dash}'
            f"{_series(mark.series)}{paint('s', mark.ink)}/>"
        )
    if isinstance(mark, Rect):
        box = _box(mark.x, mark.y, mark.width, mark.height)
        return f"<rect {box}{_series(mark.series)}{paint('f', mark.ink)}/>"
    if isinstance(mark, Dot):
        place = f'cx="{_number(mark.x)}" cy="{_number(mark.y)}" r="{_number(mark.radius)}"'
        return f"<circle {place}{_series(mark.series)}{paint('f', mark.ink)}/>"
    if isinstance(mark, Text):
        return _text(mark, paint)
    return _raster(mark, paint)


def _text(mark: Text, paint: Paint) -> str:
    x, y = _number(mark.x), _number(mark.y)
    turn = f' transform="rotate(-90 {x} {y})"' if mark.turned else ""
    anchor = f' text-anchor="{mark.anchor}"' if mark.anchor != "start" else ""
    weight = ' font-weight="600"' if mark.bold else ""
    size = f'x="{x}" y="{y}" font-size="{_number(mark.size)}"'
    return f"<text {size}{anchor}{weight}{turn}{paint('f', mark.ink)}>{escape(mark.text)}</text>"


def _raster(mark: Raster, paint: Paint) -> str:
    """Cells as a mask over a rectangle, so that their colour can follow the theme."""
    shape = f'{_box(mark.x, mark.y, mark.width, mark.height)} preserveAspectRatio="none"'
    name = f"m{abs(hash(tuple(map(tuple, mark.cells)))):x}"
    link = data_uri(encode_png(bytes(v for row in mark.cells for v in row), len(mark.cells[0]), len(mark.cells), 1))
    image = f'<image {shape} style="image-rendering:pixelated" href="{link}"/>'
    box = _box(mark.x, mark.y, mark.width, mark.height)
    return (
        f'<mask id="{name}" style="mask-type:luminance">{image}</mask>'
        f'<rect {box} mask="url(#{name})"{paint("f", mark.ink)}/>'
    )


def blend_cells(mark: Raster) -> bytes:
    """RGB bytes of a raster's cells on white, for formats without masks."""
    ink = rgb(mark.ink.light)
    return bytes(255 - (255 - channel) * v // 255 for row in mark.cells for v in row for channel in ink)


def _box(x: float, y: float, width: float, height: float) -> str:
    return f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'


def _series(series: int | None) -> str:
    return "" if series is None else f' data-s="{series}"'


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def swatch(ink: Ink, dash: Sequence[float]) -> str:
    """A legend's sample of a line."""
    return inline_svg(Scene(18, 8, [Line([(0, 4), (18, 4)], ink, 3, dash)]), "").replace(
        'role="img" aria-label=""', 'aria-hidden="true"'
    )
