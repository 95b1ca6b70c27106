"""bench as a command: rows that fail, turns taken side by side, and the results file."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import bicovg.bench
from bicovg.bench_cases import make_cases
from bicovg.bench_client import OUT_OF_TIME, Deadline
from bicovg.bench_report import merge_results, results_path
from bicovg.bench_turns import compare_sides
from bicovg.bench_worker import Server
from bicovg.cli import main
from bicovg.errors import UserError
from bicovg.recipes import get_recipe

TINY = ["--batch", "8", "--model.width", "0.25", "--steps", "2", "--repeats", "2", "--train.threads", "1"]


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


class LocalWorker(Server):
    """A worker without a process of its own."""

    alive = 0

    def __init__(self, deadline: Deadline) -> None:
        LocalWorker.alive += 1
        self.open = True

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.open
        return self.answer(request)

    def close(self) -> None:
        LocalWorker.alive -= self.open
        self.open = False

    kill = close

    def __enter__(self) -> "LocalWorker":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@pytest.fixture
def _local_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bicovg.bench, "Worker", LocalWorker)


def test_bench_measures_in_a_process_of_its_own_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "bench.json"
    assert main(["bench", "digits", *TINY, "--only", "strict", "--out", str(out)]) == 0
    found = read(out)
    (row,), (run,) = found["rows"], found["runs"]
    assert (row["name"], row["status"], row["engine"], row["batch_size"]) == ("strict", "ok", "eager", 8)
    assert row["images_per_second"]["min"] <= row["images_per_second"]["median"] <= row["images_per_second"]["max"]
    assert row["images_per_second"]["median"] == pytest.approx(8e3 / row["milliseconds_per_step"])
    assert run["torch"] == torch.__version__
    assert {"date", "commit", "command", "gpu", "python"} <= set(run)
    assert str(out) in capsys.readouterr().out


@pytest.mark.usefixtures("_local_workers")
def test_a_failed_configuration_is_a_row_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    clip = ["--train.clip_norm", "1", "--train.clip_scope", "global", "--train.schedule", "summed"]
    assert main(["bench", "digits", *TINY, *clip, "--only", "strict", "hgb-2-interleaved", "--out", str(out)]) == 0
    good, bad = read(out)["rows"]
    assert (good["status"], good["reason"]) == ("ok", None)
    assert (bad["status"], bad["images_per_second"]["median"]) == ("failed", None)
    assert "cannot be interleaved" in bad["reason"]
    assert "cannot be interleaved" in capsys.readouterr().out


@pytest.mark.usefixtures("_local_workers")
def test_bench_without_time_left_says_so_in_every_row(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    assert main(["bench", "digits", *TINY, "--time-limit", "0", "--out", str(out)]) == 1
    rows = read(out)["rows"]
    assert len(rows) == len(make_cases(get_recipe("digits")))
    assert {row["reason"] for row in rows} == {OUT_OF_TIME}


@pytest.mark.usefixtures("_local_workers")
def test_on_a_cpu_no_worker_starts_beside_the_one_that_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = []
    answer = LocalWorker.answer

    def look(worker: LocalWorker, request: dict[str, Any]) -> dict[str, Any]:
        alive.append(LocalWorker.alive)
        return answer(worker, request)

    monkeypatch.setattr(LocalWorker, "answer", look)
    words = ["--only", "strict", "end-to-end", "--out", str(tmp_path / "bench.json")]
    assert main(["bench", "digits", *TINY, *words]) == 0
    assert set(alive) == {1}


@pytest.mark.usefixtures("_local_workers")
@pytest.mark.parametrize(("words", "most"), [(["--only", "strict", "end-to-end"], 2), (["--ab"], 5)])
def test_on_a_gpu_workers_start_ahead_and_none_is_left(
    words: list[str], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    start, take = bicovg.bench.Bench.start_ahead, bicovg.bench.Bench.take_worker

    def start_as_on_a_gpu(bench: Any, workers: int) -> None:
        with monkeypatch.context() as patch:
            patch.setitem(bench.machine, "device", "cuda")
            start(bench, workers)
        seen.append(LocalWorker.alive)

    def take_one(bench: Any) -> Any:
        before = LocalWorker.alive
        worker = take(bench)
        assert LocalWorker.alive == before or not seen, "a worker was waiting already"
        return worker

    monkeypatch.setattr(bicovg.bench.Bench, "start_ahead", start_as_on_a_gpu)
    monkeypatch.setattr(bicovg.bench.Bench, "take_worker", take_one)
    assert main(["bench", "digits", *TINY, *words, "--out", str(tmp_path / "bench.json")]) == 0
    assert max(seen) == most
    assert LocalWorker.alive == 0


@pytest.mark.parametrize("git", [True, False])
def test_the_commit_that_the_environment_names_is_taken(
    git: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BICOVG_COMMIT", "0123abc")
    if not git:
        monkeypatch.setenv("PATH", "")
    merge_results(tmp_path / "r.json", get_recipe("digits"), {}, rows=[fake_row("strict", 1.0)])
    assert read(tmp_path / "r.json")["runs"][0]["commit"] == "0123abc"


@pytest.mark.usefixtures("_local_workers")
def test_side_by_side_reports_every_sides_speed_and_their_ratio(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    assert main(["bench", "digits", *TINY, "--ab", "--out", str(out)]) == 0
    (table,) = read(out)["side_by_side"]
    strict, whole, aligned, constant, bare = (side["images_per_second"]["blocks"] for side in table["sides"])
    assert [side["tried"].keys() for side in table["sides"]] == [{"eager"}] * 5
    assert {len(blocks) for blocks in (strict, whole, aligned, constant, bare)} == {table["rounds"]} == {2}
    ratios = [a / b for a, b in zip(strict, whole, strict=True)]
    assert table["speed_over_end-to-end"]["strict"]["median"] == pytest.approx(sum(ratios) / 2)
    for key, rest in (("goodness_share", constant), ("goodness_share_at_most", bare)):
        shares = [1 - a / b for a, b in zip(strict, rest, strict=True)]
        assert table[key] == pytest.approx(sum(shares) / 2)
    assert LocalWorker.alive == 0


@pytest.mark.parametrize(("needed", "found"), [(60, 60), (31, 31), (90, None), (10, 25)])
@pytest.mark.parametrize(("unit", "at_once"), [(1, 1), (10**9, 8)])
def test_the_smallest_memory_is_searched_below_all_that_was_held(
    needed: int, found: int | None, unit: int, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1000 units; the row held 80 at first, 50 steadily. 25: half of the steady peak, nearly.

    Where a unit is a byte, not even two processes fit beside each other.
    """
    builds: list[int] = []

    class Limited(LocalWorker):
        def answer(self, request: dict[str, Any]) -> dict[str, Any]:
            if request["do"] == "describe":
                return {"device": "cuda", "gpu": "some", "torch": "2.11.0", "gpu_bytes": 1000 * unit}
            if request["do"] == "build":
                fraction = request["fraction"]
                builds.extend([Limited.alive] * (fraction is not None))
                if fraction is not None and fraction * 1000 < needed:
                    return {"error": "out of memory"}
                memory = {"steady_bytes": 50, "first_steps_bytes": 80, "reserved_bytes": 70}
                memory = {name: value * unit for name, value in memory.items()}
                return {"engine": request["engine"], "memory": memory}
            return {"milliseconds": [1.0] * request["repeats"]}

    monkeypatch.setattr(bicovg.bench, "Worker", Limited)
    out = tmp_path / "bench.json"
    words = ["--only", "strict", "--smallest-memory", "--engine", "graph", "--out", str(out)]
    assert main(["bench", "digits", *TINY, *words]) == 0
    (row,) = read(out)["rows"]
    smallest = row["memory"]["smallest_bytes"]
    assert smallest is None if found is None else found * unit <= smallest <= (found + 1) * unit
    assert set(builds) == {at_once}
    assert len(builds) <= (7 if at_once == 1 else 16)
    assert Limited.alive == 0


def test_a_search_that_runs_out_of_time_claims_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(LocalWorker):
        trials = 0

        def answer(self, request: dict[str, Any]) -> dict[str, Any]:
            if request["do"] == "describe":
                return {"device": "cuda", "gpu": "some", "torch": "2.11.0", "gpu_bytes": 1000}
            if request["do"] == "build":
                Late.trials += request["fraction"] is not None
                memory = {"steady_bytes": 50, "first_steps_bytes": 80, "reserved_bytes": 70}
                return {"error": OUT_OF_TIME} if Late.trials > 2 else {"engine": "graph", "memory": memory}
            return {"milliseconds": [1.0] * request["repeats"]}

    monkeypatch.setattr(bicovg.bench, "Worker", Late)
    out = tmp_path / "bench.json"
    assert main(["bench", "digits", *TINY, "--only", "strict", "--smallest-memory", "--out", str(out)]) == 0
    assert read(out)["rows"][0]["memory"]["smallest_bytes"] is None


def test_each_side_runs_in_the_fastest_engine_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds are made up here; an engine without any fails."""
    made_up = {("strict", "a"): 4.0, ("strict", "b"): 2.0, ("end-to-end", "a"): 3.0}

    class Timed(LocalWorker):
        def answer(self, request: dict[str, Any]) -> dict[str, Any]:
            if request["do"] == "describe":
                return {"device": "cpu", "gpu": None, "torch": "2.11.0"}
            if request["do"] == "build":
                self.milliseconds = made_up.get((request["config"]["model"]["scope"], request["engine"]))
                return {"engine": request["engine"]} if self.milliseconds else {"error": "no such engine"}
            return {"milliseconds": [self.milliseconds] * request["repeats"]}

    monkeypatch.setattr(bicovg.bench, "Worker", Timed)
    monkeypatch.setattr(bicovg.bench.Bench, "candidates", lambda self, case: ("a", "b"))
    out = tmp_path / "bench.json"
    assert main(["bench", "digits", *TINY, "--ab", "strict", "end-to-end", "--out", str(out)]) == 0
    (table,) = read(out)["side_by_side"]
    strict, whole = table["sides"]
    assert (strict["engine"], strict["tried"]) == ("b", {"a": 2000.0, "b": 4000.0})
    assert (whole["engine"], whole["tried"]) == ("a", {"a": pytest.approx(8000 / 3), "b": "no such engine"})
    assert table["speed_over_end-to-end"]["strict"]["median"] == pytest.approx(1.5)
    assert Timed.alive == 0


def test_ratios_pair_the_sides_round_by_round() -> None:
    rounds = [
        {"strict": 1.0, "end-to-end": 2.0, "strict-constant": 0.9},
        {"strict": 10.0, "end-to-end": 30.0, "strict-constant": 8.0},
        {"strict": 5.0},
        {"strict": 2.0, "end-to-end": 2.0, "strict-constant": 1.0},
    ]
    compared = compare_sides(rounds)
    assert compared["speed_over_end-to-end"] == {"strict": {"median": 2.0, "min": 1.0, "max": 3.0}}
    assert compared["goodness_share"] == pytest.approx(0.2)
    assert compare_sides([])["goodness_share"] is None


def fake_row(name: str, speed: float, batch: int = 8) -> dict[str, Any]:
    fixed = {"engine_asked": "auto", "width": 1.0, "image_size": 8, "precision": "float32"}
    return {"name": name, "batch_size": batch, "speed": speed, **fixed}


def test_a_second_run_replaces_its_own_rows_and_keeps_the_others(tmp_path: Path) -> None:
    path, config = tmp_path / "r.json", get_recipe("digits")
    merge_results(path, config, {}, rows=[fake_row("strict", 1.0), fake_row("end-to-end", 2.0)])
    merge_results(path, config, {}, rows=[fake_row("strict", 3.0), fake_row("strict", 4.0, batch=16)])
    found = read(path)
    assert [(row["name"], row["speed"], row["run"]) for row in found["rows"]] == [
        ("end-to-end", 2.0, 0),
        ("strict", 3.0, 1),
        ("strict", 4.0, 1),
    ]
    merge_results(path, config, {}, rows=[fake_row("end-to-end", 5.0)])
    assert [run["id"] for run in read(path)["runs"]] == [1, 2]  # nothing names run 0 any more


@pytest.mark.usefixtures("_local_workers")
def test_untimed_renews_memory_and_keeps_speeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "bench.json"
    words = ["bench", "digits", *TINY, "--out", str(out), "--only", "strict"]
    assert main([*words, "end-to-end"]) == 0
    before = read(out)
    before["rows"][0]["memory"] = before["rows"][1]["memory"] = {"saved_bytes": 1}
    out.write_text(json.dumps(before))
    answer = LocalWorker.answer

    def untimed(worker: LocalWorker, request: dict[str, Any]) -> dict[str, Any]:
        assert request["do"] != "time"
        return answer(worker, request)

    monkeypatch.setattr(LocalWorker, "answer", untimed)
    assert main([*words, "--untimed"]) == 0
    found = read(out)
    strict, whole = found["rows"]
    assert strict["memory"]["saved_bytes"] > 1
    assert strict["images_per_second"] == before["rows"][0]["images_per_second"]
    assert (strict["run"], strict["memory_run"]) == (0, 1)
    assert whole == before["rows"][1]
    assert [run["id"] for run in found["runs"]] == [0, 1]
    found["rows"][0]["memory"]["smallest_bytes"] = 7  # which is not searched now
    out.write_text(json.dumps(found))
    assert main([*words, "--untimed"]) == 0
    assert [run["id"] for run in read(out)["runs"]] == [0, 2]
    assert read(out)["rows"][0]["memory"]["smallest_bytes"] == 7


@pytest.mark.usefixtures("_local_workers")
@pytest.mark.parametrize("other", [{"engine": "graph"}, {"gpu": "NVIDIA H200"}])
def test_memory_of_another_engine_or_device_is_not_put_beside_a_speed(
    other: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.json"
    words = ["bench", "digits", *TINY, "--out", str(out), "--only"]
    for name in ("strict", "end-to-end"):
        assert main([*words, name]) == 0
    found = read(out)
    found["rows"][0].update({name: value for name, value in other.items() if name == "engine"})
    found["runs"][0].update({name: value for name, value in other.items() if name == "gpu"})
    out.write_text(json.dumps(found))
    assert main([*words, "strict", "end-to-end", "--untimed"]) == 2
    assert "and ran now with eager on a CPU: measure it without --untimed" in capsys.readouterr().err
    strict, whole = read(out)["rows"]
    assert strict == found["rows"][0]
    assert whole["memory_run"] == 2, "what can be used is kept"


@pytest.mark.usefixtures("_local_workers")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "strict", "end-to-end"], "has no speed of end-to-end in this engine"),
        (["--only", "strict", "--engine", "eager"], "has no speed of strict in this engine"),
        (["--only", "strict", "--engine", "fastest"], "--untimed measures memory alone"),
        (["--ab"], "--untimed measures memory alone"),
        (["--stages", "2"], "--untimed measures memory alone"),
        (["--train.micro_batches", "4"], "--train.micro_batches 4 is not for bench"),
    ],
)
def test_untimed_measures_nothing_that_has_no_speed_yet(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.json"
    assert main(["bench", "digits", *TINY, "--out", str(out), "--only", "strict"]) == 0
    before = out.read_bytes()
    monkeypatch.setattr(bicovg.bench.Bench, "measure_in", lambda *_: pytest.fail("measured"))
    assert main(["bench", "digits", *TINY, "--out", str(out), *words, "--untimed"]) == 2
    assert said in capsys.readouterr().err
    assert out.read_bytes() == before


def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    for text in ("[]", "not json", '{"recipe": "cifar100-bp", "runs": [], "rows": [], "side_by_side": []}'):
        path.write_text(text)
        with pytest.raises(UserError, match="is not a benchmark file of digits"):
            merge_results(path, get_recipe("digits"), {}, rows=[fake_row("strict", 1.0)])
        assert path.read_text() == text


def test_results_are_named_by_gpu_version_and_recipe() -> None:
    gpu = {"gpu": "NVIDIA H200", "torch": "2.11.0+cu130"}
    expected = os.path.join("benchmarks", "results", "nvidia-h200-torch2.11.0-cifar100-bicovg.json")
    assert str(results_path(None, gpu, "cifar100-bicovg")) == expected
    assert results_path(None, {"gpu": None, "torch": "2.13.0"}, "digits").name == "cpu-torch2.13.0-digits.json"
