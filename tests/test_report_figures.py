"""Drawing: axes, the encoders of PNG and PDF, and the figures as files."""

import itertools
import json
import math
import re
import xml.etree.ElementTree as ElementTree
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image
from report_cases import make_run

from bicovg.data.images import TensorImages
from bicovg.report.analysis import PICTURE_SIDE, analyse, shrink
from bicovg.report.axes import Axis, fit_axis, percent_axis, short_number
from bicovg.report.benchmarks import bench_charts
from bicovg.report.charts import Series, bar_chart, grid_chart, line_chart
from bicovg.report.collect import read_runs
from bicovg.report.figures import all_charts, compose, write_figures
from bicovg.report.pdf import pdf_file, text_width
from bicovg.report.png import encode_png
from bicovg.report.raster import dash_line, png_file
from bicovg.report.scene import BARS, Line, Raster, Rect, Scene, Text, depth_ink, rgb
from bicovg.report.svg import svg_file

NUMBERS = st.floats(-1e6, 1e6)


@given(st.lists(NUMBERS, min_size=1, max_size=8), st.integers(2, 9))
def test_ticks_are_round_even_and_inside_the_axis(values: list[float], wanted: int) -> None:
    axis = fit_axis(values, 0, 100)
    ticks = axis.ticks(wanted)
    assert 1 <= len(ticks) <= 2 * wanted + 2
    assert all(axis.low - 1e-9 <= tick <= axis.high + 1e-9 for tick in ticks)
    steps = [b - a for a, b in itertools.pairwise(ticks)]
    assert all(step == pytest.approx(steps[0]) for step in steps)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8))
def test_a_logarithmic_axis_keeps_the_order_and_holds_its_ticks(values: list[float]) -> None:
    axis = fit_axis(values, 200, 0, log=True)
    places = [axis.place(value) for value in sorted(values)]
    assert places == sorted(places, reverse=True)
    assert all(0 <= place <= 200 for place in places)
    assert all(axis.low * (1 - 1e-9) <= tick <= axis.high * (1 + 1e-9) for tick in axis.ticks())
    assert axis.ticks()


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_percent_axes_stay_between_0_and_100(values: list[float]) -> None:
    axis = percent_axis(values, 0, 1)
    assert 0 <= axis.low < axis.high <= 100
    assert all(axis.low <= value <= axis.high for value in values)


def test_axes_of_nothing_and_of_one_value_can_be_drawn() -> None:
    assert fit_axis([], 0, 1).place(0.5) == 0.5
    assert fit_axis([math.nan, math.inf], 0, 1) == Axis(0.0, 1.0, 0, 1)
    assert 0 < fit_axis([7.0], 0, 1).place(7.0) < 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12000, "12k"), (2.5e6, "2.5M"), (0.001, "0.001"), (2e-5, "2e-5"), (7.5e-4, "7.5e-4"), (99.5, "99.5")],
)
def test_short_numbers(value: float, text: str) -> None:
    assert short_number(value) == text


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_png_encoder_keeps_every_pixel(channels: int, mode: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels), dtype=np.uint8)
    image = Image.open(BytesIO(encode_png(pixels.tobytes(), 7, 5, channels)))
    assert image.mode == mode
    assert np.array_equal(np.asarray(image).reshape(pixels.shape), pixels)


def sample_scene() -> Scene:
    scene = Scene(120, 80)
    scene.add(Rect(10, 10, 40, 20, BARS), Raster(60, 10, 40, 40, [[0, 255], [255, 0]], BARS))
    scene.add(Line([(10, 60), (110, 60)], BARS, 4), Text(60, 75, "a(b)\\ %", anchor="middle"))
    scene.add(Text(8, 40, "up", anchor="middle", turned=True))
    return scene


def test_png_figures_have_each_mark_where_it_belongs() -> None:
    image = Image.open(BytesIO(png_file(sample_scene(), scale=2))).convert("RGB")
    ink, white = rgb(BARS.light), (255, 255, 255)
    assert image.size == (240, 160)
    assert image.getpixel((60, 40)) == ink  # the rectangle
    assert image.getpixel((140, 40)) == white  # the raster's clear cell
    assert image.getpixel((180, 40)) == ink  # its full one
    assert image.getpixel((120, 120)) == ink  # the line
    assert image.getpixel((230, 10)) == white


def test_pdf_offsets_point_at_their_objects() -> None:
    pdf = pdf_file(sample_scene())
    start = int(re.search(rb"startxref\n(\d+)\n%%EOF", pdf)[1])  # type: ignore[index]
    assert pdf[start:].startswith(b"xref")
    offsets = [int(line[:10]) for line in pdf[start:].split(b"\n")[3:] if line.endswith(b" n ")]
    assert len(offsets) == 7
    for number, offset in enumerate(offsets, 1):
        assert pdf[offset:].startswith(f"{number} 0 obj".encode())
    content = zlib.decompress(re.search(rb"4 0 obj.*?stream\n(.*?)\nendstream", pdf, re.DOTALL)[1])  # type: ignore[index]
    assert rb"(a\(b\)\\ %) Tj" in content
    assert b"/I0 Do" in content


def test_helvetica_widths_are_those_of_its_metrics() -> None:
    assert text_width("iiii", 1000) == 4 * 222
    assert text_width("W", 1000) == 944
    assert text_width("~", 1000) == 584


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50)), min_size=2, max_size=5))
def test_dashes_cover_their_share_of_a_line(points: list[tuple[float, float]]) -> None:
    def length(path: list[tuple[float, float]]) -> float:
        return sum(math.dist(a, b) for a, b in itertools.pairwise(path))

    whole = length(points)
    assume(whole > 20)
    drawn = sum(length(part) for part in dash_line(points, (3, 2)))
    assert whole * 3 / 5 - 3 <= drawn <= whole * 3 / 5 + 3
    assert dash_line(points, ()) == [points]


def test_depth_colours_go_from_the_first_to_the_last_of_the_ramp() -> None:
    inks = [depth_ink(i, 16) for i in range(16)]
    assert len({ink.light for ink in inks}) == 16
    assert depth_ink(0, 1) == inks[-1]


def test_hidden_values_do_not_reach_a_chart() -> None:
    lines = [Series("a", [1.0, None, math.inf, 2.0]), Series("b", [None, None, None, None])]
    chart = line_chart("n", "t", [1, 2, 3, 4], lines)
    drawn = [mark for mark in chart.scene.marks if isinstance(mark, Line) and mark.series == 0]
    assert [len(mark.points) for mark in drawn] == [1, 1]  # torn where it is not finite
    assert chart.hover["series"][0]["y"] == [1.0, None, "inf", 2.0]
    bars = bar_chart("n", "t", ["x", "y"], [Series("a", [None, -3.0])])
    assert len([mark for mark in bars.scene.marks if isinstance(mark, Rect)]) == 1


def test_bars_below_zero_hang_from_the_zero_line() -> None:
    chart = bar_chart("n", "t", ["x", "y"], [Series("a", [-2.0, 4.0])])
    below, above = (mark for mark in chart.scene.marks if isinstance(mark, Rect))
    assert below.y == pytest.approx(above.y + above.height)
    assert above.height == pytest.approx(2 * below.height)


def test_a_grid_shades_its_cells_between_low_and_full() -> None:
    chart = grid_chart("n", "t", ["a", "b"], ["c"], [[50.0], [100.0]], row_label="r", column_label="c", low=50.0)
    (raster,) = (mark for mark in chart.scene.marks if isinstance(mark, Raster))
    assert raster.cells == [[0], [255]]


def test_figures_are_written_whole_in_every_format(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b", "digits-per-channel")])
    written = write_figures(runs, tmp_path / "figures", ["svg", "pdf", "png"])
    assert len(written) == 3 * len(all_charts(runs)) == len(set(written))
    for path in written:
        content = path.read_bytes()
        if path.suffix == ".svg":
            ElementTree.fromstring(content.decode())
        elif path.suffix == ".png":
            assert len(set(Image.open(path).convert("RGB").resize((60, 40)).get_flattened_data())) > 3  # not blank
        else:
            assert content.startswith(b"%PDF-")


def test_a_figure_carries_its_title_and_legend(tmp_path: Path) -> None:
    chart = next(c for c in all_charts(read_runs([make_run(tmp_path / "run")])) if c.name.startswith("accuracy"))
    svg = svg_file(compose(chart))
    for text in ("Accuracy per block", ">block 0<", ">block 3<", ">mean<"):
        assert text in svg


def bench_file(folder: Path, gpu: bool) -> None:
    """A benchmark of the digits' backbone, as ``bicovg bench`` writes it."""
    rows = []
    for name, scope, speed in (("strict", "strict", 300.0), ("end-to-end", "end-to-end", 250.0)):
        memory = {"steady_bytes": 3e9 if gpu else None, "data_bytes": 1e9, "saved_bytes": None if gpu else 2e6}
        place = {"precision": "float32", "image_size": 8, "batch_size": 64, "run": 0}
        rows.append(
            {
                "name": name,
                "scope": scope,
                "status": "ok",
                "images_per_second": {"median": speed},
                "memory": memory,
                **place,
            }
        )
    machine = {"id": 0, "gpu": "a GPU" if gpu else None, "torch": "2.13.0"}
    folder.mkdir(parents=True)
    (folder / "bench.json").write_text(json.dumps({"recipe": "digits", "runs": [machine], "rows": rows}))
    (folder / "other.json").write_text("[1]")


@pytest.mark.parametrize(("gpu", "values"), [(True, [2.0, 2.0]), (False, [2.0, 2.0])])
def test_benchmarks_of_the_same_backbone_are_shown(gpu: bool, values: list[float], tmp_path: Path) -> None:
    bench_file(tmp_path / "results", gpu)
    runs = read_runs([make_run(tmp_path / "run", "digits-hgb2")])
    speed, memory = bench_charts(runs, tmp_path / "results")
    assert speed.hover["series"][0]["y"] == [300.0, 250.0]
    assert memory.hover["series"][0]["y"] == values
    assert memory.hover["series"][0]["name"] == ("GB" if gpu else "MB")
    other = read_runs([make_run(tmp_path / "other", "cifar100-bicovg")])
    assert bench_charts(other, tmp_path / "results") == []
    assert bench_charts(runs, tmp_path / "nowhere") == []


def test_analysis_counts_what_a_slow_loop_counts() -> None:
    E, N, K = 3, 60, 4
    logits, labels = torch.randn(E, N, K), torch.randint(K, (N,))
    images = TensorImages(torch.randint(256, (N, 5, 6, 3), dtype=torch.uint8), labels)
    found = analyse(logits, labels, images, list("abcd"))
    said = logits.mean(dim=0).argmax(dim=1)
    for i in range(K):
        for j in range(K):
            assert found["confusion"][i][j] == sum(int(labels[n] == i and said[n] == j) for n in range(N))
    for e in range(E):
        for k in range(K):
            mine = [n for n in range(N) if labels[n] == k]
            right = sum(int(logits[e, n].argmax() == k) for n in mine)
            assert found["class_top1"][e][k] == pytest.approx(100 * right / len(mine))
    confidences = [mistake["confidence"] for mistake in found["mistakes"]]
    assert confidences == sorted(confidences, reverse=True)
    assert len(confidences) == min(24, N - sum(found["confusion"][k][k] for k in range(K)))


def test_pictures_of_mistakes_are_the_images_themselves() -> None:
    logits, labels = torch.zeros(1, 2, 2), torch.tensor([1, 0])
    logits[0, :, 0] = 1.0  # image 0 is wrong
    images = torch.randint(256, (2, 5, 6, 3), dtype=torch.uint8)
    (mistake,) = analyse(logits, labels, TensorImages(images, labels), ["a", "b"])["mistakes"]
    assert mistake["index"] == 0
    import base64

    png = base64.b64decode(mistake["picture"].partition(",")[2])
    assert np.array_equal(np.asarray(Image.open(BytesIO(png))), images[0].numpy())


def test_large_pictures_shrink_to_means() -> None:
    pixels = np.zeros((400, 200, 3), dtype=np.uint8)
    pixels[::2] = 100
    small = shrink(pixels)
    assert max(small.shape) <= PICTURE_SIDE + 4
    assert shrink(np.zeros((1000, 3, 1), np.uint8)).size > 0
