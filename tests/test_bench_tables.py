"""Tables and charts of the benchmark files."""

import json
from pathlib import Path

import pytest
from report_cases import make_record, make_run

from bicovg.bench_cases import BARE, CONSTANT, make_cases
from bicovg.bench_report import FOLDER
from bicovg.recipes import get_recipe
from bicovg.records import load_records
from bicovg.report.bench_tables import shorten
from bicovg.report.benchmarks import SHORT, bench_charts
from bicovg.report.collect import read_runs
from bicovg.report.figures import compose
from bicovg.report.paper import EFFICIENCY
from bicovg.report.svg import svg_file
from bicovg.report.tables import TABLES

ROOT = Path(__file__).parent.parent
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
