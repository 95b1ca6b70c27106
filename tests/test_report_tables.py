"""Tables of README and docs: made from records, and equal to what is printed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from report_cases import append_epoch, make_run

from bicovg.bench_cases import BARE, CONSTANT, make_cases
from bicovg.bench_report import FOLDER
from bicovg.cli import main
from bicovg.diagnostics import decline_area, tail_retention
from bicovg.errors import UserError
from bicovg.recipes import get_recipe
from bicovg.records import load_records, write_record
from bicovg.report.bench_tables import shorten
from bicovg.report.benchmarks import SHORT, bench_charts
from bicovg.report.cells import read_records
from bicovg.report.charts import PRINT, Rule, Series, line_chart
from bicovg.report.collect import read_runs
from bicovg.report.figures import compose
from bicovg.report.filling import (
    FIGURES,
    MARKED,
    NOT_RUN,
    WHOLE,
    draw_figures,
    fill_file,
    fill_tables,
    links,
    update_tables,
)
from bicovg.report.paper import EFFICIENCY
from bicovg.report.record_charts import KINDS, MOST, readable, record_charts
from bicovg.report.scene import Text
from bicovg.report.svg import svg_file
from bicovg.report.tables import TABLES

ROOT = Path(__file__).parent.parent
LIFTS = {"per-channel": -4.0, "bicovg": 0.0}


def make_record(folder: Path, run: Path) -> Path:
    summary = json.loads((run / "summary.json").read_text())
    top1 = summary["test"]["exits"]["top1"]
    summary["test"]["diagnostics"] = {"DA": decline_area(top1), "TR": tail_retention(top1)}
    (run / "summary.json").write_text(json.dumps(summary))
    write_record([run], folder)
    return folder


def test_every_table_works_without_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, make in TABLES.items():
        lines = make({}).splitlines()
        assert len({line.count("|") for line in lines}) == 1, name
        assert "not run" in make({})


def test_tables_show_the_numbers_of_their_records(tmp_path: Path) -> None:
    runs = {name: make_run(tmp_path / name, f"cifar100-{name}", epochs=5, lift=lift) for name, lift in LIFTS.items()}
    for name, run in runs.items():
        make_record(tmp_path / "records" / f"c-{name}", run)
    records = read_records(tmp_path)
    results = TABLES["results"](records)
    (row,) = (line for line in results.splitlines() if line.startswith("| c-bicovg |"))
    mean = records["c-bicovg"]["runs"][0]["mean"]["top1"]
    assert f"| {mean:.2f} |" in row
    assert "5 of 400, short" in row
    assert row.endswith("|  | 68.21 (not said how) |")
    assert "| c-per-channel |" in results
    (change,) = (
        line for line in TABLES["diagnostics"](records).splitlines() if "per-channel to bicovg | cifar100" in line
    )
    assert "| +4.00 |" in change
    ablation = TABLES["ablation"](records)
    assert f"BiCovG, r = 8 | cifar100 | 5 of 400, short | float32 | 1 | {mean:.2f} |" in ablation
    assert "| BiCovG, r = 16 | imagenet100 | - | - | - | not run |  | 1.1 below r = 8 |" in ablation
    fused = records["c-bicovg"]["runs"][0]["fusion"]["train"]["top1"]
    assert f"| c-bicovg | strict | 1 | {mean:.2f} | {fused:.2f} | - | - | - |\n" in TABLES["fusion"](records)


def change_config(run: Path, section: str, name: str, value: object) -> None:
    config = json.loads((run / "config.json").read_text())
    config[section][name] = value
    (run / "config.json").write_text(json.dumps(config))


def test_a_record_that_changed_its_recipe_is_no_row_of_the_ablation_and_says_what_changed(tmp_path: Path) -> None:
    runs = {name: make_run(tmp_path / name, "cifar100-bicovg", epochs=5) for name in ("plain", "other", "exact")}
    change_config(runs["other"], "model", "batch_norm", False)
    change_config(runs["other"], "train", "eval_every", 3)  # how it went, not what it computed
    change_config(runs["plain"], "train", "precision", "bfloat16")
    change_config(runs["other"], "train", "precision", "bfloat16")
    for name, run in runs.items():
        make_record(tmp_path / "records" / name, run)
    records = read_records(tmp_path)
    assert [records[name]["changes"] for name in runs] == [{}, {"model.batch_norm": False}, {}]
    assert TABLES["ablation"](records).count("BiCovG, r = 8 | cifar100 | 5 of 400") == 2
    rows = TABLES["readings"](records).splitlines()[2:]
    assert [row.split(" | ")[4] for row in rows] == ["float32", "model.batch_norm false", "nothing"]
    (row,) = (line for line in TABLES["results"](records).splitlines() if line.startswith("| other |"))
    assert "| bfloat16 | model.batch_norm false | 1 |" in row
    (row,) = (line for line in TABLES["results"](records).splitlines() if line.startswith("| exact |"))
    assert "| float32 |  | 1 |" in row
    del records["other"], records["exact"]
    assert "not run" in TABLES["readings"](records)


def test_a_tuning_candidate_shows_its_heldout_accuracy_and_none_on_test(tmp_path: Path) -> None:
    lrs = {"usual": None, "low": 1e-4, "high": 4e-4}
    runs = {name: make_run(tmp_path / name, "cifar100-bicovg", epochs=5) for name in (*lrs, "long")}
    change_config(runs["long"], "train", "epochs", 6)
    append_epoch(runs["long"], 5, 6, list(range(8)))
    for index, (name, run) in enumerate(runs.items()):
        change_config(run, "data", "holdout", 0.02)
        change_config(run, "train", "precision", "bfloat16")
        if lrs.get(name):
            change_config(run, "optim", "lr", lrs[name])
        summary = json.loads((run / "summary.json").read_text())
        summary |= {"heldout_top1": [20.0] * 7 + [60.25 + index], "epochs": 6 if name == "long" else 5}
        chosen = {"exit": 0, **{key: summary["test"]["exits"][key][0] for key in ("top1", "top5")}}
        summary["test"]["best_heldout_chosen"] = chosen
        (run / "summary.json").write_text(json.dumps(summary))
        *before, last = (run / "metrics.jsonl").read_text().splitlines()
        curve = {"split": "heldout", "top1": summary["heldout_top1"], "mean_top1": 70.5 + index}
        (run / "metrics.jsonl").write_text("\n".join([*before, json.dumps(json.loads(last) | curve)]) + "\n")
        make_record(tmp_path / "records" / name, run)
    records = read_records(tmp_path)
    known, longer = (f"cifar100-bicovg | {epochs} of 400, short, 2% held out" for epochs in (5, 6))
    assert TABLES["tuning"](records).splitlines()[2:] == [
        f"| {longer} | nothing | 1 | 63.25 | 73.50 |",
        f"| {known} | nothing | 1 | 60.25 | 70.50 |",
        f"| {known} | optim.lr 0.0001 | 1 | 61.25 | 71.50 |",
        f"| {known} | optim.lr 0.0004 | 1 | 62.25 | 72.50 |",
    ]
    shown = [TABLES[name](records) for name in ("results", "fusion", "readings", "ablation")]
    first_cells = {line.split(" | ")[0][2:] for table in shown for line in table.splitlines()}
    assert not {*lrs, "long"} & first_cells
    assert "2% held out" not in "".join(shown)
    assert record_charts("by-block", records) == []
    # as long as the recipe says and with nothing changed, it is a result, and what the others are compared with
    records = {name: record | {"recipe_epochs": 5} for name, record in records.items() if name != "long"}
    first = records["usual"]["runs"][0]["exits"]["top1"][0]
    cells = next(line for line in TABLES["results"](records).splitlines() if line.startswith("| usual |")).split(" | ")
    assert cells[8] == f"{first:.2f}"
    assert "| BiCovG, r = 8 | cifar100 | 5, 2% held out |" in TABLES["ablation"](records)
    for name in ("results", "fusion", "readings"):
        assert not {"low", "high"} & {line.split(" | ")[0][2:] for line in TABLES[name](records).splitlines()}, name
    (chart,) = (chart for chart in record_charts("by-block", records) if chart.name.endswith("-5"))
    assert [line["name"] for line in chart.hover["series"]] == ["usual"]
    assert [line.split(" | ")[2] for line in TABLES["tuning"](records).splitlines()[2:]] == [
        "nothing",
        "optim.lr 0.0001",
        "optim.lr 0.0004",
    ]
    del records["low"], records["high"]
    assert "not run" in TABLES["tuning"](records)


def test_recipes_that_belong_together_are_read_side_by_side(tmp_path: Path) -> None:
    lengths = {"bicovg-fal": 5, "grouped": 5, "bp": 5, "bp-deep": 5, "bicovg": 5, "hgb2": 5}
    for name, epochs in lengths.items():
        run = make_run(tmp_path / name, f"cifar100-{name}", epochs=epochs)
        make_record(tmp_path / "records" / name, run)
    records = read_records(tmp_path)
    records["bp"]["exit_blocks"] = [7]
    rows = [row.strip("| ").split(" | ") for row in TABLES["readings"](records).splitlines()[2:]]
    assert [row[0] for row in rows] == ["bicovg-fal", "grouped", "bp", "bp-deep"]
    assert [row[7:] == ["-", "-"] for row in rows] == [False, False, True, False]
    records["grouped"]["epochs"], records["bp-deep"]["holdout"] = 6, 0.02
    assert "not run" in TABLES["readings"](records)


def test_the_headline_holds_full_runs_by_data_set_beside_the_papers_numbers(tmp_path: Path) -> None:
    lengths = {"tiny-imagenet-bp": 90, "cifar100-hgb2": 400, "tiny-imagenet-grouped": 90, "cifar100-bicovg": 400}
    for recipe, epochs in {**lengths, "cifar100-hgb4": 5}.items():
        run = make_run(tmp_path / recipe, recipe, epochs=epochs)
        change_config(run, "train", "precision", "bfloat16")
        make_record(tmp_path / "records" / recipe, run)
    rows = [row.strip("| ").split(" | ") for row in TABLES["headline"](read_records(tmp_path)).splitlines()[2:]]
    assert [(row[0], row[1].removeprefix(f"{row[0]}-"), row[-1]) for row in rows] == [
        ("cifar100", "bicovg", "68.21 (not said how)"),
        ("cifar100", "hgb2", "-"),
        ("tiny-imagenet", "bp", "54.17 +- 0.37 (classic net)"),
        ("tiny-imagenet", "grouped", "-"),
    ]


def test_what_fusion_gains_over_the_best_block_is_that_of_full_runs_beside_the_papers(tmp_path: Path) -> None:
    lengths = {"tiny-imagenet-hgb4": 90, "tiny-imagenet-bicovg-fal": 5, "tiny-imagenet-bp": 90, "cifar100-bicovg": 400}
    for recipe, epochs in lengths.items():
        make_record(tmp_path / "records" / recipe, make_run(tmp_path / recipe, recipe, epochs=epochs))
    records = read_records(tmp_path)
    for name, record in records.items():
        record["runs"][0]["best_test_chosen"] = {"top1": 50.25, "top5": 75.0}
        record["runs"][0]["fusion"]["train"] = {"top1": 52.0, "top5": 77.125}
        record["runs"][0]["mean"] = {"top1": 51.0, "top5": 76.5}
        record["runs"][0]["last"] = {"top1": 49.0, "top5": 70.0}
        record["exit_blocks"] = [7] if name.endswith("-bp") else record["exit_blocks"]
    assert TABLES["fusion-gain"](records).splitlines()[2:] == [
        "| cifar100-bicovg | 1 | 50.25 | - | 52.00 | 68.21 (not said how) | 1.75 | - |",
        "| tiny-imagenet-hgb4 | 1 | 50.25 | 52.42 +- 0.28 | 52.00 | 54.48 +- 0.08 | 1.75 | 2.06 |",
    ]
    assert TABLES["top5"](records).splitlines()[2:] == [
        "| cifar100-bicovg | strict | 400 | 1 | 70.00 | 76.50 | 77.12 |",
        "| tiny-imagenet-bp | end-to-end | 90 | 1 | 70.00 | - | - |",
        "| tiny-imagenet-hgb4 | hgb | 90 | 1 | 70.00 | 76.50 | 77.12 |",
    ]


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


def test_the_early_exit_table_is_that_of_the_curve_beside_the_record(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "cifar100-bicovg", epochs=400)
    points: list[dict[str, Any]] = [{"speedup": 1.5, "compute": 0.625, "top1": 70.25, "points_lost": 0.75}]
    rule = {"temperatures": [1.0] * 8, "points": points, "full": {"top1": 71.0}, "curve": []}
    found = {"calibrated_on": "held-out", "measured_on": "test", "exit_blocks": list(range(8)), "rules": {"mean": rule}}
    (run / "early_exit.json").write_text(json.dumps(found))
    make_record(tmp_path / "records" / "mine", run)
    table = TABLES["early-exit"](read_records(tmp_path))
    assert "| mine | strict | mean of blocks so far | 71.00 | 1.60x | - | 70.25 | 0.75 | held-out |" in table
    assert len(record_charts("early-exit", read_records(tmp_path))) == 1
    records = read_records(tmp_path)
    records["mine"]["epochs"] = 100  # a short run's is no claim
    assert "not run" in TABLES["early-exit"](records)
    assert record_charts("early-exit", records) == []
    points[0]["exits"] = [0.5, 0, 0, 0.25, 0, 0, 0, 0.25]
    (run / "early_exit.json").write_text(json.dumps(found))
    write_record([run], tmp_path / "records" / "mine", replace=True)
    assert "| 1.60x | 3.50 of 8 | 70.25 |" in TABLES["early-exit"](read_records(tmp_path))
    points[0]["exits"] = [0.5] * 8
    (run / "early_exit.json").write_text(json.dumps(found))
    with pytest.raises(UserError, match="add up to 1"):
        write_record([run], tmp_path / "records" / "mine", replace=True)


RATIOS = {"strict": 1.2344, "strict-fal": 1.1}


def test_the_tables_of_engines_show_their_records_and_their_distances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "not run" in TABLES["engines"]({})
    assert "not run" in TABLES["agreement"]({})
    results = tmp_path / "benchmarks" / "results"
    make_record(results / "engines" / "eager", make_run(tmp_path / "run", "cifar100-bicovg", epochs=5))
    (record,) = load_records(results / "engines").values()
    mean = record["runs"][0]["mean"]["top1"]
    cells = TABLES["engines"]({}).splitlines()[2].strip("| ").split(" | ")
    assert cells[:4] == [record["runs"][0]["engine"], "cifar100-bicovg", "5", "1"]
    assert cells[-1] == f"{mean:.2f}"
    far = {"largest_difference_first_steps": 0.00123, "largest_difference_of_means": 0.5, "recompiled": 2}
    near = {"largest_difference_first_steps": 0.0, "largest_difference_of_means": 4e-7, "recompiled": 0}
    limits = {"limits": [0.02, 0.01]}
    row = {"recipe": "digits", "precision": "float32", "compiled": far | limits, "graph": near | limits}
    (results / "agree-some.json").write_text(json.dumps({"rows": [row]}))
    assert TABLES["agreement"]({}).splitlines()[2:] == [
        "| digits | float32 | compiled | 1.2e-03 | 2e-02 | 5.0e-01 | 1e-02 | 2 |",
        "| digits | float32 | graph | 0.0e+00 | 2e-02 | 4.0e-07 | 1e-02 | 0 |",
    ]


def test_the_table_of_times_holds_full_runs_alone(tmp_path: Path) -> None:
    for name, epochs in (("whole", 400), ("short", 100)):
        make_record(tmp_path / "records" / name, make_run(tmp_path / name, "cifar100-bicovg", epochs=epochs))
    records = read_records(tmp_path)
    entry = records["whole"]["runs"][0]
    entry |= {"wall_seconds": 301.4, "images_per_second": 77036.2, "peak_memory_bytes": 1_090_000_000}
    entry |= {"gpu": "GPU", "torch": "2.0+x"}
    records["whole"]["seeds"] = [0, 1]
    records["whole"]["runs"].append({**entry, "seed": 1, "wall_seconds": 454.6, "peak_memory_bytes": None})
    rows = TABLES["times"](records).splitlines()[2:]
    assert rows == ["| whole | 400 | 0, 1 | 301, 455 | 77036, 77036 | 1.09, - | GPU, torch 2.0 |"]


def test_the_speed_table_shows_what_was_measured_in_turns_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "benchmarks" / "results" / "some.json"
    path.parent.mkdir(parents=True)

    def side(name: str, speed: float, peak: int) -> dict[str, object]:
        memory = {"steady_bytes": peak + 7_000_000, "data_bytes": 7_000_000}
        known: dict[str, object] = {"batch_size": 128, "image_size": 224, "precision": "bfloat16", "parameters": 5}
        known |= {"images_per_second": {"median": speed, "min": speed - 34, "max": speed + 1}}
        known["roofline"] = {"share": speed / 2000 if name == "strict" else None}
        return {"name": name, "status": "ok", "memory": memory, **known}

    sides = [side("strict", 1234.4, 1_500_000_000), side("end-to-end", 1000.0, 3_000_000_000)]
    ratio = {name: {"median": median, "min": 1.2, "max": 1.25} for name, median in RATIOS.items()}
    turns = {"run": 0, "sides": sides, "speed_over_end-to-end": ratio, "goodness_share": 0.1234}
    run = {"id": 0, "gpu": "GPU", "torch": "2.0+x", "commit": "abc"}
    found = {"recipe": "imagenet100-bicovg", "runs": [run], "rows": [], "side_by_side": [turns]}
    path.write_text(json.dumps(found))
    known = "| imagenet100-bicovg | 128 | 224 | bfloat16 | 1,234 | 1,000 | 1.234 (1.200-1.250) "
    rest = "| 1.50 | 3.00 | 0.50 | 12.3% | GPU, torch 2.0, abc |"
    assert TABLES["speed"]({}).splitlines()[2] == f"{known}| - | - {rest}"
    with_fal = {**turns, "sides": [*sides, side("strict-fal", 1100.0, 1_600_000_000)]}
    path.write_text(json.dumps({**found, "side_by_side": [with_fal]}))
    assert TABLES["speed"]({}).splitlines()[2] == f"{known}| 1,100 | 1.100 {rest}"
    bounded = {**turns, "goodness_share_at_most": 0.2}
    path.write_text(json.dumps({**found, "side_by_side": [bounded]}))
    assert "| 12.3% (at most 20.0%) |" in TABLES["speed"]({})
    path.write_text(json.dumps({**found, "side_by_side": [{**turns, "goodness_share_at_most": None}]}))
    assert "| 12.3% |" in TABLES["speed"]({})
    path.write_text(json.dumps(found))
    shown = "| strict | 5 | 1,234 (1,200-1,235) | 62% | 1.50 | 0.50 | - |  |  |  |  |  |  |  | GPU, torch 2.0, abc |"
    assert shown in TABLES["efficiency"]({})
    assert "| end-to-end | 5 | 1,000 (966-1,001) | - | 3.00 | 1.00 | - |" in TABLES["efficiency"]({})
    classic = {**side("classic", 900.0, 6_000_000_000), "run": 0}
    path.write_text(json.dumps({**found, "rows": [classic]}))
    assert "| 62% | 1.50 | 0.50 | -75.0% |" in TABLES["efficiency"]({})
    shown = "| 6.00 | 2.00 | +0.0% |  |  |  | 134.7 M | 16.75 | 10.11 (ours: not run) | 559 |"
    assert shown in TABLES["efficiency"]({})
    later = {"id": 1, "gpu": "GPU", "torch": "2.0+x", "commit": "0123456789abcdef+"}
    row = side("strict", 999.0, 2_000_000_000) | {"run": 1}
    row["memory"] |= {"reserved_bytes": 2_407_000_000, "smallest_bytes": 2_347_000_000}  # type: ignore[operator]
    path.write_text(json.dumps({**found, "runs": [run, later], "rows": [row]}))
    shown = "| 50% | 2.00 | 0.67 | - |  | 2.40 | 2.34 |  |  |  |  | GPU, torch 2.0, 0123456+ |"
    assert f"| strict | 5 | 999 (965-1,000) {shown}" in TABLES["efficiency"]({})
    path.write_text(json.dumps({**found, "runs": [run, later], "rows": [row | {"run": 0, "memory_run": 1}]}))
    assert " GPU, torch 2.0, abc (memory: 0123456+) |" in TABLES["efficiency"]({})
    for other in ({"batch_size": 64}, {"precision": "float32"}, {"image_size": 64}):
        path.write_text(json.dumps({**found, "runs": [run, later], "rows": [row | other]}))
        assert "| strict | 5 | 1,234 (" in TABLES["efficiency"]({}), other
    memory = {"steady_bytes": None, "data_bytes": None}  # as on a CPU
    for one in sides:
        one["memory"] = memory
    path.write_text(json.dumps({**found, "runs": [{**run, "gpu": None}]}))
    assert "not run" in TABLES["speed"]({})
    assert "| strict |  | not run |" in TABLES["efficiency"]({})
    paper = "| 29.5 M | 8.74 (-47.8%) | 4.74 (-53.1%) (ours: not run) | 551 |  |"
    assert f"| hgb-4-summed |  | not run |  |  |  |  |  |  |  {paper}" in TABLES["efficiency"]({})


def test_a_commit_is_shown_short() -> None:
    assert [shorten(commit) for commit in ("0123456789ab", "0123456789ab+", "abc+", None)] == [
        *("0123456", "0123456+", "abc+", "unknown commit")
    ]


def test_the_efficiency_table_knows_every_configuration_it_names() -> None:
    stand_ins = {CONSTANT, BARE}
    assert EFFICIENCY.keys() == make_cases(get_recipe("imagenet100-bicovg")).keys() - stand_ins


def test_the_bench_charts_have_room_for_the_name_of_every_bar(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "run", "imagenet100-bicovg")])
    charts = bench_charts(runs, ROOT / FOLDER)
    assert charts
    for chart in charts:
        drawn, labels = svg_file(compose(chart)), chart.hover["x"]
        assert {SHORT[f"end-to-end-accumulate-{parts}"] for parts in (2, 4)} <= set(labels)
        assert all(f">{label}</text>" in drawn for label in labels), chart.name


def test_tables_in_a_checkout_follow_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_record(tmp_path / "records" / "mine", make_run(tmp_path / "run", "cifar100-bicovg", epochs=5))
    text = "# A\n<!-- table: results -->\nold\n<!-- end of table -->\nafter\n"
    (tmp_path / "README.md").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["report", "--tables"]) == 0
    fresh = (tmp_path / "README.md").read_text()
    assert "| mine |" in fresh
    assert "old" not in fresh
    assert fresh.endswith("<!-- end of table -->\nafter\n")
    assert update_tables() == []


def test_an_unknown_table_is_named() -> None:
    with pytest.raises(UserError, match="'nothing'"):
        fill_tables("<!-- table: nothing -->\n<!-- end of table -->", {})


def test_every_table_and_every_kind_of_figure_is_printed_somewhere() -> None:
    texts = [path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
    for text in texts:
        for what in ("table", "figures"):
            starts = re.findall(rf"<!-- {what}: [a-z0-9-]+ -->", text)
            assert len(starts) == text.count(f"<!-- end of {what} -->"), starts
    printed = {match.group(2, 3) for text in texts for match in MARKED.finditer(text)}
    assert TABLES.keys() == {name for what, name in printed if what == "table"}
    assert KINDS.keys() == {name.removesuffix(WHOLE) for what, name in printed if what == "figures"}


def test_printed_tables_are_those_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a number in README or docs is not the one its record holds."""
    monkeypatch.chdir(ROOT)
    records = read_records(ROOT)
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        assert fill_file(path, records, ROOT) == path.read_text(), f"{path.name}: bicovg report --tables"
    drawn = {path.name: path.read_text() for path in (ROOT / FIGURES).iterdir()}
    assert drawn == draw_figures(records), "bicovg report --tables"
