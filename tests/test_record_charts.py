"""Figures of records: which are drawn together, and what stands in them."""

from pathlib import Path
from typing import Any

import pytest
from report_cases import LIFTS, change_config, make_record, make_run

from bicovg.cli import main
from bicovg.report.cells import read_records
from bicovg.report.charts import PRINT, Rule, Series, line_chart
from bicovg.report.filling import (
    NOT_RUN,
    fill_tables,
    links,
    update_tables,
)
from bicovg.report.record_charts import KINDS, MOST, readable, record_charts
from bicovg.report.scene import Text


def test_figures_are_drawn_of_records_of_one_length_and_old_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, lift in LIFTS.items():
        run = make_run(tmp_path / name, f"cifar100-{name}", epochs=5, lift=lift)
        make_record(tmp_path / "records" / f"cifar100-{name}", run)
    make_record(tmp_path / "records" / "long", make_run(tmp_path / "long", "cifar100-bicovg", epochs=6))
    kinds = "".join(f"<!-- figures: {kind} -->\n<!-- end of figures -->\n" for kind in KINDS)
    (tmp_path / "README.md").write_text(kinds)
    figures = tmp_path / "docs" / "figures"
    figures.mkdir(parents=True)
    (tmp_path / "docs" / "page.md").write_text(kinds)
    (figures / "by-block-cifar100-4.svg").write_text("of a record that is gone")
    (figures / "drawn-by-hand.svg").write_text("of nobody's business")
    monkeypatch.chdir(tmp_path)
    assert main(["report", "--tables"]) == 0
    assert "removed: docs/figures/by-block-cifar100-4.svg" in capsys.readouterr().out
    names = {path.name for path in figures.iterdir()} - {"drawn-by-hand.svg"}
    lengths = ("cifar100-5.svg", "cifar100-6.svg")
    assert names == {f"{kind}-{end}" for kind in ("by-block", "fusion") for end in lengths} | {"gain-cifar100-5.svg"}
    drawn = (figures / "by-block-cifar100-5.svg").read_text()
    assert all(f">{text}</text>" in drawn for text in ("bicovg", "per-channel", "CIFAR-100, VGG-8, 5 epochs (short)"))
    assert "](docs/figures/gain-cifar100-5.svg)" in (tmp_path / "README.md").read_text()
    page = (tmp_path / "docs" / "page.md").read_text()
    assert "](figures/gain-cifar100-5.svg)" in page
    assert "<!-- figures: early-exit -->\n\nnot run\n" in page
    whole = "<!-- figures: by-block-full -->\n<!-- end of figures -->\n"
    assert "not run" in fill_tables(whole, read_records())
    assert "by-block-cifar100-5.svg" in fill_tables(whole.replace("-full", ""), read_records())
    assert update_tables() == []


def test_the_gain_figure_holds_the_difference_of_every_block(tmp_path: Path) -> None:
    for name, lift in LIFTS.items():
        run = make_run(tmp_path / name, f"cifar100-{name}", epochs=5, lift=lift)
        make_record(tmp_path / "records" / name, run)
    records = read_records(tmp_path)
    (chart,) = record_charts("gain", records)
    assert chart.hover["series"][0]["y"] == pytest.approx([4.0] * len(records["bicovg"]["exit_blocks"]))
    records["bicovg"]["precision"] = "bfloat16"
    assert record_charts("gain", records) == []


def test_a_network_with_one_exit_is_a_level_across_the_figure(tmp_path: Path) -> None:
    for name in ("bicovg", "bp"):
        run = make_run(tmp_path / name, f"cifar100-{name}", epochs=5)
        make_record(tmp_path / "records" / name, run)
    records = read_records(tmp_path)
    one = records["bp"]
    one["exit_blocks"], one["runs"][0]["exits"]["top1"] = [7], [61.5]
    (weights,) = record_charts("fusion", records)
    assert [line["name"].split()[0] for line in weights.hover["series"]] == ["bicovg"]
    records["bicovg"]["runs"][0]["fusion"] = {"train": None}
    assert record_charts("fusion", records) == []
    (chart,) = record_charts("by-block", records)
    assert [line["name"] for line in chart.hover["series"]] == [name for name, *_ in chart.legend] == ["bicovg"]
    assert {"bp", "61.50"} <= {mark.text for mark in chart.scene.marks if isinstance(mark, Text)}
    del records["bicovg"]
    assert record_charts("by-block", records) == []


def test_many_records_of_one_length_are_drawn_by_what_they_show(tmp_path: Path) -> None:
    rows = ("per-channel", "cc", "ms", "bicovg", "r4", "r16", "bicovg-fal", "hgb2", "grouped")
    for name in rows:
        run = make_run(tmp_path / name, f"cifar100-{name}", epochs=5)
        change_config(run, "train", "precision", "bfloat16")
        make_record(tmp_path / "records" / name, run)
    charts = {kind: record_charts(kind, read_records(tmp_path)) for kind in KINDS}
    for kind in ("by-block", "fusion"):
        shown = {one.name: [line["name"].split()[0] for line in one.hover["series"]] for one in charts[kind]}
        assert shown == {
            f"{kind}-cifar100-5-goodness": ["bicovg", "cc", "ms", "per-channel"],
            f"{kind}-cifar100-5-readings": ["bicovg", "bicovg-fal", "r16", "r4"],
            f"{kind}-cifar100-5-scopes": ["bicovg", "grouped", "hgb2"],
        }
    assert [chart.name for chart in charts["gain"]] == ["gain-cifar100-5"]
    assert links("by-block-full", read_records(tmp_path), "") == NOT_RUN, "they are short"
    for chart in charts["by-block"] + charts["fusion"]:
        assert len({(ink, tuple(dash)) for _, ink, dash in chart.legend}) == len(chart.legend), "told apart"


def test_many_records_of_the_digits_have_their_own_measure(tmp_path: Path) -> None:
    """It is called "digits" and trains in float32."""
    kinds = {"digits": "strict", "digits-per-channel": "strict", "digits-r4": "strict", "digits-hgb2": "hgb"}
    usual = {"data": "digits", "changes": {}, "holdout": 0.0, "precision": "float32"}
    records: list[Any] = [{**usual, "name": name, "recipe": name, "scope": kinds[name]} for name in kinds]
    records += [{**records[0], "name": f"digits-{n}", "changes": {"optim.lr": n}} for n in range(MOST)]
    names = {end: [record["name"] for record in part] for end, _, part in readable("digits-30", "", records)}
    assert names == {
        "digits-30-goodness": ["digits", "digits-per-channel"],
        "digits-30-readings": ["digits", "digits-r4", *(f"digits-{n}" for n in range(MOST))],
        "digits-30-scopes": ["digits", "digits-hgb2"],
    }


def test_a_levels_long_name_leaves_the_plot_its_room() -> None:
    series = [Series("one", [1.0, 2.0])]
    charts = [
        line_chart("chart", "", [0, 1], series, x_label="", y_label="", width=PRINT, rules=[Rule(name, 1.5)])
        for name in ("n" * 40, "n" * 200)
    ]
    assert charts[0].hover["box"][2] == charts[1].hover["box"][2] > PRINT / 2
    assert [mark.text for mark in charts[1].scene.marks if isinstance(mark, Text) and "nn" in mark.text] == [
        "n" * 37 + "..."
    ]
