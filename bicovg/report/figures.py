"""Figures for papers: every chart of the page as a file of its own, with title and legend inside."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bicovg.errors import UserError
from bicovg.report.benchmarks import bench_charts
from bicovg.report.charts import Chart
from bicovg.report.collect import RunData
from bicovg.report.comparison import compared_charts, progress_charts
from bicovg.report.pdf import pdf_file, text_width
from bicovg.report.pictures import image_charts, run_charts
from bicovg.report.raster import png_file
from bicovg.report.scene import Line, Mark, Point, Scene, Text
from bicovg.report.svg import svg_file

FORMATS: dict[str, Callable[[Scene], str | bytes]] = {"svg": svg_file, "pdf": pdf_file, "png": png_file}
TITLE_ROOM, LEGEND_ROW = 26.0, 17.0


def all_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Every chart of the page of these runs, each under a name of its own."""
    own = [chart for run in runs for chart in (*run_charts(run), *image_charts(run))]
    return [*(compared_charts(runs) if len(runs) > 1 else []), *own, *progress_charts(runs), *bench_charts(runs)]


def write_figures(runs: Sequence[RunData], folder: Path, formats: Sequence[str]) -> list[Path]:
    """All charts in all formats; returns the files written."""
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        raise UserError(f"--format {','.join(formats)!r} is unknown: choose from {', '.join(FORMATS)}, comma between")
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for chart in all_charts(runs):
            scene = compose(chart)
            for name in formats:
                made = FORMATS[name](scene)
                path = folder / f"{chart.name}.{name}"
                path.write_bytes(made if isinstance(made, bytes) else made.encode())
                written.append(path)
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {os.strerror(error.errno or 0)}; give another folder") from None
    return written


def compose(chart: Chart) -> Scene:
    """Title above, chart, legend below."""
    scene = Scene(chart.scene.width, chart.scene.height + TITLE_ROOM)
    scene.add(Text(scene.width / 2, 18, chart.title, anchor="middle", size=14, bold=True))
    scene.add(*(shift(mark, TITLE_ROOM) for mark in chart.scene.marks))
    x, y = 12.0, scene.height + 10
    for name, ink, dash in chart.legend:
        length = 24 + text_width(name, 11) * 1.1 + 14
        if x + length > scene.width and x > 12:
            x, y = 12.0, y + LEGEND_ROW
        scene.add(Line([(x, y - 4), (x + 18, y - 4)], ink, 2.5, dash), Text(x + 23, y, name, size=11))
        x += length
    if chart.legend:
        scene.height = y + 8
    return scene


def shift(mark: Mark, down: float) -> Mark:
    """The same mark, lower."""
    if isinstance(mark, Line):
        moved: list[Point] = [(x, y + down) for x, y in mark.points]
        return replace(mark, points=moved)
    return replace(mark, y=mark.y + down)
