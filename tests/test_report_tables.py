"""Tables of README and docs: made from records, and equal to what is printed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from report_cases import LIFTS, append_epoch, change_config, make_record, make_run

from bicovg.cli import main
from bicovg.errors import UserError
from bicovg.records import write_record
from bicovg.report.cells import read_records
from bicovg.report.filling import (
    FIGURES,
    MARKED,
    WHOLE,
    draw_figures,
    fill_file,
    fill_tables,
    update_tables,
)
from bicovg.report.record_charts import KINDS, record_charts
from bicovg.report.tables import TABLES

ROOT = Path(__file__).parent.parent


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
        "| cifar100-bicovg | strict | 1 | 50.25 | - | 52.00 | 68.21 (not said how) | 1.75 | - |",
        "| tiny-imagenet-hgb4 | hgb | 1 | 50.25 | 52.42 +- 0.28 | 52.00 | 54.48 +- 0.08 | 1.75 | 2.06 |",
    ]
    assert TABLES["top5"](records).splitlines()[2:] == [
        "| cifar100-bicovg | strict | 400 | 1 | 70.00 | 76.50 | 77.12 |",
        "| tiny-imagenet-bp | end-to-end | 90 | 1 | 70.00 | - | - |",
        "| tiny-imagenet-hgb4 | hgb | 90 | 1 | 70.00 | 76.50 | 77.12 |",
    ]


def test_the_early_exit_table_is_that_of_the_curve_beside_the_record(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "cifar100-bicovg", epochs=400)
    points: list[dict[str, Any]] = [{"speedup": 1.5, "compute": 0.625, "top1": 70.25, "points_lost": 0.75}]
    rule = {"temperatures": [1.0] * 8, "points": points, "full": {"top1": 71.0}, "curve": []}
    rule |= {"ece_before": [1.0] * 7 + [12.5], "ece_after": [1.0] * 7 + [12.5]}
    found = {"calibrated_on": "held-out", "measured_on": "test", "exit_blocks": list(range(8)), "rules": {"mean": rule}}
    (run / "early_exit.json").write_text(json.dumps(found))
    make_record(tmp_path / "records" / "mine", run)
    table = TABLES["early-exit"](read_records(tmp_path))
    row = "| mine | strict | mean of blocks so far | 71.00 | 1.60x | - | 70.25 | 0.75 | not calibrated | 12.5 -> 12.5 |"
    assert row in table
    assert len(record_charts("early-exit", read_records(tmp_path))) == 1
    records = read_records(tmp_path)
    records["mine"]["epochs"] = 100  # a short run's is no claim
    assert "not run" in TABLES["early-exit"](records)
    assert record_charts("early-exit", records) == []
    points[0]["exits"] = [0.5, 0, 0, 0.25, 0, 0, 0, 0.25]
    rule |= {"temperatures": [1.0] * 7 + [1.5], "ece_after": [1.0] * 7 + [1.6]}
    (run / "early_exit.json").write_text(json.dumps(found))
    write_record([run], tmp_path / "records" / "mine", replace=True)
    table = TABLES["early-exit"](read_records(tmp_path))
    assert "| 1.60x | 3.50 of 8 | 70.25 | 0.75 | held-out | 12.5 -> 1.6 |" in table
    points[0]["exits"] = [0.5] * 8
    (run / "early_exit.json").write_text(json.dumps(found))
    with pytest.raises(UserError, match="add up to 1"):
        write_record([run], tmp_path / "records" / "mine", replace=True)


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
