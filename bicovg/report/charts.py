"""Three kinds of chart (lines, bars, grid of cells), each a scene with a legend and the values behind it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bicovg.report.axes import Axis, fit_axis, percent_axis, short_number
from bicovg.report.scene import AXIS, BARS, GRID, MUTED, TEXT, Dot, Ink, Line, Point, Raster, Rect, Scene, Text

WIDTH, PRINT, WIDE, HEIGHT = 420.0, 760.0, 1240.0, 262.0  # PRINT: across a page of text
LEFT, RIGHT, TOP, BOTTOM = 52.0, 12.0, 12.0, 44.0
NAMES, NAME = 120.0, 6.4  # room for the names of rules, right of the plot: the least, and for each character
LONGEST = 40  # characters of such a name
TICK, LABEL = 12.5, 13.0  # font sizes
CHARACTER = 7.4  # about the width of one in a tick's label
MOST_POINTS = 1000  # of one line; longer ones are thinned, the last point kept

Values = Sequence[float | None]


@dataclass(frozen=True)
class Series:
    """One line or one set of bars; None where there is no value."""

    name: str
    values: Values
    ink: Ink = BARS
    dash: Sequence[float] = ()
    width: float = 1.6


@dataclass(frozen=True)
class Rule:
    """A horizontal line across a chart, with its name."""

    name: str
    value: float
    ink: Ink = TEXT
    dash: Sequence[float] = (5, 3)


@dataclass
class Chart:
    """A drawn chart.

    Attributes:
        name: identifier, used as file name and in the page.
        legend: (name, ink, dash) of every series that can be told apart.
        hover: what the page shows under the pointer, plain JSON.
    """

    name: str
    title: str
    note: str
    scene: Scene
    legend: list[tuple[str, Ink, Sequence[float]]] = field(default_factory=list)
    hover: dict[str, Any] = field(default_factory=dict)

    @property
    def wide(self) -> bool:
        return self.scene.width > WIDTH


def line_chart(
    name: str,
    title: str,
    x: Sequence[float],
    series: Sequence[Series],
    *,
    x_label: str = "epoch",
    y_label: str = "",
    note: str = "",
    percent: bool = False,
    log: bool = False,
    zero: bool = False,
    markers: bool = False,
    width: float = WIDTH,
    span: Sequence[float] = (),
    rules: Sequence[Rule] = (),
) -> Chart:
    """Lines over numbers; with ``markers`` every x gets a tick of its own and every value a dot.

    Args:
        span: further values the vertical axis must hold, so that charts beside each other can share it.
    """
    keep = _thin(len(x))
    x = [x[i] for i in keep]
    series = [_only(line, keep) for line in series]
    scene = Scene(width, HEIGHT)
    right = width - _beside(rules)
    numbers = [v for line in series for v in line.values if v is not None] + [v for v in span if math.isfinite(v)]
    numbers += [rule.value for rule in rules]
    bottom, top = scene.height - BOTTOM, TOP
    vertical = percent_axis(numbers, bottom, top) if percent else fit_axis(numbers, bottom, top, log=log, zero=zero)
    margin = 0.04 if markers else 0.0
    horizontal = fit_axis(x, LEFT, right, margin=margin)
    ticks = list(x) if markers and len(x) <= 20 else horizontal.ticks(8 if width > WIDTH else 5, whole=True)
    _frame(scene, vertical, right, y_label, x_label)
    _x_ticks(scene, [(horizontal.place(t), short_number(t)) for t in ticks], crowded=True)
    for index, line in enumerate(series):
        for part in _pieces(x, line.values, horizontal, vertical):
            scene.add(Line(part, line.ink, line.width, line.dash, index))
            if markers or len(part) == 1:
                scene.add(*(Dot(px, py, 2.6, line.ink, index) for px, py in part))
    _rules(scene, rules, vertical, right)
    return Chart(
        name,
        title,
        note,
        scene,
        [(line.name, line.ink, line.dash) for line in series] if len(series) + len(rules) > 1 else [],
        _hover(scene, right, [short_number(v) for v in x], [horizontal.place(v) for v in x], series, x_label, percent),
    )


def bar_chart(
    name: str,
    title: str,
    labels: Sequence[str],
    series: Sequence[Series],
    *,
    x_label: str = "block",
    y_label: str = "",
    note: str = "",
    percent: bool = False,
    width: float = WIDTH,
    rules: Sequence[Rule] = (),
    inks: Sequence[Ink] | None = None,
) -> Chart:
    """Groups of bars, one group per label; ``inks`` colours the bars of a single series one by one.

    Bars begin at 0, unless ``percent`` values lie so close together that their differences would not show.
    """
    scene = Scene(width, HEIGHT)
    right = width - _beside(rules)
    numbers = [v for line in series for v in line.values if v is not None] + [rule.value for rule in rules]
    bottom, top = scene.height - BOTTOM, TOP
    close = percent and numbers and min(numbers) > 0.6 * max(numbers)
    vertical = percent_axis(numbers, bottom, top) if close else fit_axis(numbers, bottom, top, zero=True)
    if close:
        vertical = Axis(max(0.0, 2 * vertical.low - vertical.high), vertical.high, bottom, top)
    base = vertical.place(max(0.0, vertical.low))
    _frame(scene, vertical, right, y_label, x_label)
    slot = (right - LEFT) / max(1, len(labels))
    centres = [LEFT + slot * (i + 0.5) for i in range(len(labels))]
    _x_ticks(scene, list(zip(centres, labels, strict=True)), crowded=_crowded(labels, slot))
    thick = min(slot * 0.78 / max(1, len(series)), 90.0 if width > WIDTH else 46.0)
    for index, line in enumerate(series):
        for place, value in enumerate(line.values):
            if value is None or not math.isfinite(value):
                continue
            left = centres[place] + (index - len(series) / 2) * thick
            y = vertical.place(value)
            ink = inks[place] if inks else line.ink
            scene.add(Rect(left, min(y, base), max(thick - 1.0, 1.0), abs(y - base), ink, index))
    if base < bottom:
        scene.add(Line([(LEFT, base), (right, base)], AXIS))
    _rules(scene, rules, vertical, right)
    legend = [(line.name, line.ink, line.dash) for line in series] if len(series) > 1 else []
    return Chart(
        name, title, note, scene, legend, _hover(scene, right, list(labels), centres, series, x_label, percent)
    )


def grid_chart(
    name: str,
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float]],
    *,
    row_label: str,
    column_label: str,
    note: str = "",
    low: float = 0.0,
    full: float = 100.0,
    unit: str = "%",
    square: bool = False,
    ink: Ink = BARS,
) -> Chart:
    """Cells from clear at ``low`` to opaque at ``full``; row names are written where there is room for them.

    A ``square`` grid is a confusion matrix: its shade grows with the square root, so that small cells show.
    """
    named = len(rows) <= 24
    left = 16.0 + min(120.0, CHARACTER * max((len(row) for row in rows), default=1)) if named else 34.0
    across = WIDTH - left - RIGHT
    tall = across if square else min(max(HEIGHT - BOTTOM - TOP, 14.0 * len(rows)), 420.0)
    scene = Scene(WIDTH, TOP + tall + BOTTOM)
    power = 0.5 if square else 1.0
    cells = [[round(255 * min(max((v - low) / (full - low), 0.0), 1.0) ** power) for v in row] for row in values]
    scene.add(Raster(left, TOP, across, tall, cells, ink))
    height, slot = tall / len(rows), across / len(columns)
    if named:
        for index, row in enumerate(rows):
            short = row if len(row) <= 16 else row[:15] + "..."
            y = TOP + height * (index + 0.5) + 4
            scene.add(Text(left - 5, y, short, MUTED, "end", TICK))
    else:
        scene.add(Text(14, TOP + tall / 2, row_label, MUTED, "middle", LABEL, turned=True))
    if len(columns) <= 24:
        names = [c if len(c) <= 5 else c[:4] + "." for c in columns]
        _x_ticks(scene, [(left + slot * (i + 0.5), c) for i, c in enumerate(names)], crowded=_crowded(names, slot))
    scene.add(Text(left + across / 2, scene.height - 4, column_label, MUTED, "middle", LABEL))
    x, y, edge = left, TOP, left + across
    scene.add(Line([(x, y), (edge, y), (edge, y + tall), (x, y + tall), (x, y)], AXIS))
    hover = {
        "kind": "grid",
        "rows": list(rows),
        "columns": None if list(rows) == list(columns) else list(columns),
        "values": [[round(v, 2) for v in row] for row in values],
        "box": [left, TOP, across, tall],
        "labels": [row_label, column_label],
        "unit": unit,
    }
    return Chart(name, title, note, scene, [], hover)


def _thin(count: int) -> list[int]:
    step = max(1, math.ceil(count / MOST_POINTS))
    kept = list(range(0, count, step))
    return kept if not kept or kept[-1] == count - 1 else [*kept, count - 1]


def _only(line: Series, keep: Iterable[int]) -> Series:
    return Series(line.name, [line.values[i] for i in keep], line.ink, line.dash, line.width)


def _pieces(x: Sequence[float], values: Values, horizontal: Axis, vertical: Axis) -> list[list[Point]]:
    """Runs of finite points: a missing value is bridged, one that is not finite tears the line."""
    pieces: list[list[Point]] = [[]]
    for place, value in zip(x, values, strict=True):
        if value is None:
            continue
        if math.isfinite(value):
            pieces[-1].append((horizontal.place(place), vertical.place(value)))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _crowded(labels: Sequence[str], slot: float) -> bool:
    return any((len(label) + 0.7) * CHARACTER > slot for label in labels)


def _frame(scene: Scene, vertical: Axis, right: float, y_label: str, x_label: str) -> None:
    for tick in vertical.ticks():
        y = vertical.place(tick)
        scene.add(Line([(LEFT, y), (right, y)], GRID), Text(LEFT - 6, y + 4, short_number(tick), MUTED, "end", TICK))
    scene.add(Line([(LEFT, scene.height - BOTTOM), (right, scene.height - BOTTOM)], AXIS))
    middle = (TOP + scene.height - BOTTOM) / 2
    scene.add(Text(12, middle, y_label, MUTED, "middle", LABEL, turned=True))
    scene.add(Text((LEFT + right) / 2, scene.height - 5, x_label, MUTED, "middle", LABEL))


def _x_ticks(scene: Scene, ticks: Sequence[tuple[float, str]], crowded: bool = False) -> None:
    """Labels under the axis; where they are too long for their slots, every so many are left out."""
    skip = 1 if not crowded else max(1, math.ceil((max(len(t) for _, t in ticks) + 0.7) * CHARACTER / _gap(ticks)))
    for place, label in ticks[::skip]:
        scene.add(Text(place, scene.height - BOTTOM + 15, label, MUTED, "middle", TICK))


def _gap(ticks: Sequence[tuple[float, str]]) -> float:
    return ticks[1][0] - ticks[0][0] if len(ticks) > 1 else 100.0


def _beside(rules: Sequence[Rule]) -> float:
    """Room right of the plot: a margin, or what the names of rules take."""
    return max([NAMES, *(8 + NAME * len(_named(rule)) for rule in rules)]) if rules else RIGHT


def _named(rule: Rule) -> str:
    """Its name, cut where it would leave the plot no room."""
    return rule.name if len(rule.name) <= LONGEST else f"{rule.name[: LONGEST - 3]}..."


def _rules(scene: Scene, rules: Sequence[Rule], vertical: Axis, right: float) -> None:
    """Lines with their names right of the plot, moved apart where they would meet."""
    step, half = 2.3 * TICK, TICK / 2
    ordered = sorted(rules, key=lambda rule: -rule.value)
    places: list[float] = []
    for rule in ordered:
        places.append(max(vertical.place(rule.value), places[-1] + step if places else TOP + half))
    overflow = places[-1] + TICK - (scene.height - BOTTOM) if places else 0.0
    for rule, place in zip(ordered, places, strict=True):
        y, at = vertical.place(rule.value), place - max(0.0, overflow)
        scene.add(Line([(LEFT, y), (right, y), (right + 5, at)], rule.ink, 1.4, rule.dash))
        scene.add(Text(right + 8, at + half - 5, _named(rule), rule.ink, size=11))
        scene.add(Text(right + 8, at + half + 7, f"{rule.value:.2f}", rule.ink, size=11, bold=True))


def _hover(
    scene: Scene,
    right: float,
    labels: Sequence[str],
    places: Sequence[float],
    series: Sequence[Series],
    x_label: str,
    percent: bool,
) -> dict[str, Any]:
    return {
        "kind": "x",
        "x": list(labels),
        "at": [round(p, 1) for p in places],
        "series": [{"name": line.name, "y": [_round(v) for v in line.values]} for line in series],
        "box": [LEFT, TOP, right - LEFT, scene.height - BOTTOM - TOP],
        "labels": [x_label],
        "unit": "%" if percent else "",
    }


def _round(value: float | None) -> float | str | None:
    """Five digits; what JSON cannot say becomes a word."""
    if value is None:
        return None
    return float(f"{value:.5g}") if math.isfinite(value) else str(value)
