"""A drawing as a list of marks, and the colours they name: drawn as SVG, PDF or PNG by the files beside this one.

A colour is an ``Ink``: what it looks like on white and on black. The page switches between the two, figures use the
first. Coordinates are in pixels from the top left corner.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Point = tuple[float, float]
Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True)
class Ink:
    """A colour on a light and on a dark background, each ``#rrggbb``."""

    light: str
    dark: str


TEXT = Ink("#1c2128", "#e6e8eb")
MUTED = Ink("#57606a", "#a1a9b3")
GRID = Ink("#dde1e6", "#353b44")
AXIS = Ink("#8b949e", "#6e7681")
BARS = Ink("#3b6fd4", "#7aa2f7")
STRONG = Ink("#b4232a", "#ff8f88")

# Distinct for the common kinds of colour blindness, and in grey by their order of lightness.
RUNS = (
    Ink("#1f5fc4", "#79a8ff"),
    Ink("#c2570c", "#ffa657"),
    Ink("#0f7b62", "#4fd1ae"),
    Ink("#9a2f8f", "#ec9be3"),
    Ink("#7d6a00", "#e3c84a"),
    Ink("#4b5563", "#c3cad4"),
    Ink("#a01f2d", "#ff8f9a"),
    Ink("#3d7a1f", "#9fdc7c"),
)
DASHES: tuple[Sequence[float], ...] = ((), (6, 3), (2, 3), (8, 3, 2, 3))

_RAMP_LIGHT = ("#8a2f9e", "#3b5bd0", "#0f86a0", "#2c8a3d", "#a3790a", "#c2410c")
_RAMP_DARK = ("#d99aec", "#8ea9ff", "#56c8e0", "#7fd38a", "#f0c75a", "#ff9a66")


def run_ink(index: int) -> Ink:
    """The colour of the index-th run; they repeat after eight, with another dash."""
    return RUNS[index % len(RUNS)]


def run_dash(index: int) -> Sequence[float]:
    return DASHES[index // len(RUNS) % len(DASHES)]


def depth_ink(position: int, count: int) -> Ink:
    """The colour of exit ``position`` of ``count``: violet where shallow, orange where deep."""
    share = position / (count - 1) if count > 1 else 1.0
    return Ink(_blend(_RAMP_LIGHT, share), _blend(_RAMP_DARK, share))


def rgb(colour: str) -> tuple[int, int, int]:
    """``#rrggbb`` as three numbers."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _blend(stops: Sequence[str], share: float) -> str:
    place = share * (len(stops) - 1)
    low = min(int(place), len(stops) - 2)
    part = place - low
    mixed = (round(a + (b - a) * part) for a, b in zip(rgb(stops[low]), rgb(stops[low + 1]), strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


@dataclass(frozen=True)
class Line:
    """An open path. ``series`` ties it to a legend entry, so that the page can hide it."""

    points: Sequence[Point]
    ink: Ink
    width: float = 1.0
    dash: Sequence[float] = ()
    series: int | None = None


@dataclass(frozen=True)
class Rect:
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    ink: Ink
    series: int | None = None


@dataclass(frozen=True)
class Dot:
    """A filled circle."""

    x: float
    y: float
    radius: float
    ink: Ink
    series: int | None = None


@dataclass(frozen=True)
class Text:
    """One line of text; ``y`` is its baseline. ``turned`` runs it upwards."""

    x: float
    y: float
    text: str
    ink: Ink = TEXT
    anchor: Anchor = "start"
    size: float = 12.0
    turned: bool = False
    bold: bool = False


@dataclass(frozen=True)
class Raster:
    """A grid of cells in one colour, each as opaque as its share in 0..255; rows from the top."""

    x: float
    y: float
    width: float
    height: float
    cells: Sequence[Sequence[int]]
    ink: Ink


Mark = Line | Rect | Dot | Text | Raster


@dataclass
class Scene:
    """Marks in the order they are drawn."""

    width: float
    height: float
    marks: list[Mark] = field(default_factory=list)

    def add(self, *marks: Mark) -> None:
        self.marks += marks
