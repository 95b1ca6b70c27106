"""bench: its configurations, the process that measures one, turns taken side by side, and the results file."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import bicovg.bench
from bicovg.bench_cases import make_cases, pick_cases
from bicovg.bench_client import OUT_OF_TIME, Deadline, Worker
from bicovg.bench_report import merge_results, results_path
from bicovg.bench_turns import compare_sides
from bicovg.bench_worker import Server, accumulate_gradients, feed_constants
from bicovg.cli import main
from bicovg.config import override
from bicovg.errors import UserError
from bicovg.networks import LocalNetwork, local_network
from bicovg.profiling import graph_workspace, peak_memory, reset_peak_memory, time_steps
from bicovg.recipes import get_recipe
from bicovg.signals import assign_gradients

TINY = ["--batch", "8", "--model.width", "0.25", "--steps", "2", "--repeats", "2", "--train.threads", "1"]


def tiny_request(name: str, **changes: Any) -> dict[str, Any]:
    config = override(get_recipe("digits"), {"model.width": 0.25, "train.batch_size": 8, "data.name": "synthetic"})
    case = make_cases(config)[name].as_json()
    return {"do": "build", **case, "engine": "eager", "fraction": None, "steady_steps": 1, **changes}


def ask_in_process(*requests: dict[str, Any]) -> list[dict[str, Any]]:
    server = Server()
    return [server.answer(request) for request in requests]


def test_the_command_line_can_describe_bench_without_torch() -> None:
    code = "import sys, bicovg.bench, bicovg.cli as c; c.build_parser(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_units_of_m_blocks_appear_where_m_divides_the_depth() -> None:
    def sizes(recipe: str) -> set[str]:
        return {name for name in make_cases(get_recipe(recipe)) if name.startswith("hgb")}

    both = ("interleaved", "summed")
    assert sizes("cifar100-bicovg") == {f"hgb-{m}-{schedule}" for m in (1, 2, 4, 8) for schedule in both}
    assert sizes("tiny-imagenet-hgb4") == {f"hgb-{m}-{schedule}" for m in (1, 2, 4, 8, 16) for schedule in both}


def test_the_classic_network_stands_beside_a_vgg16_alone() -> None:
    assert make_cases(get_recipe("imagenet100-bicovg"))["classic"].config.model.method == "classic"
    assert make_cases(get_recipe("imagenet100-bicovg"))["classic"].config.model.stem == 1
    assert "classic" not in make_cases(get_recipe("cifar100-bicovg"))


def test_every_case_keeps_the_recipes_data_batch_precision_and_clip() -> None:
    config = get_recipe("imagenet100-bicovg-fal")
    for case in make_cases(config).values():
        kept = override(case.config, {"train.schedule": config.train.schedule})
        assert (kept.data, kept.train, kept.optim) == (config.data, config.train, config.optim), case.name


def test_the_recipes_own_scope_does_not_leak_into_the_cases() -> None:
    cases, others = (make_cases(get_recipe(f"cifar100-{name}")) for name in ("bp-checkpointed", "hgb2"))
    for name in ("strict", "strict-fal", "end-to-end", "end-to-end-accumulate-2"):
        assert cases[name].config.model == others[name].config.model
    assert (cases["strict"].config.model.scope, cases["strict"].config.model.checkpointing) == ("strict", False)


def test_a_mistyped_configuration_is_named_with_the_nearest_one() -> None:
    with pytest.raises(UserError, match="did you mean strict-fal"):
        pick_cases(make_cases(get_recipe("digits")), ["strict-fall"])


def end_to_end_net(batch_norm: bool) -> LocalNetwork:
    torch.manual_seed(0)
    return local_network(5, (16, 16), scope="end-to-end", batch_norm=batch_norm).double().train()


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulated_gradients_are_those_of_the_whole_batch(parts: int) -> None:
    """Without batch norm, which alone mixes the samples of a batch."""
    x, labels, keys = torch.randn(8, 3, 6, 6).double(), torch.arange(8) % 5, torch.arange(8)
    losses, grads = [], []
    for divided in (False, True):
        net = end_to_end_net(batch_norm=False)
        if divided:
            accumulate_gradients(net.units[0], parts)
        credit = net.units[0].learn(x, labels, keys, False)
        assign_gradients([credit])
        losses.append(credit.losses)
        grads.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(grads[1], grads[0])


def test_accumulation_goes_through_the_unit_in_micro_batches() -> None:
    net, seen = end_to_end_net(batch_norm=True), []
    net.units[0].blocks[0].conv.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    accumulate_gradients(net.units[0], 4)
    net.units[0].learn(torch.randn(8, 3, 6, 6).double(), torch.arange(8) % 5, torch.arange(8), False)
    assert seen == [2, 2, 2, 2]


def test_a_constant_readout_still_trains_the_convolution() -> None:
    net = local_network(5, (16, 16)).train()
    feed_constants(net)
    unit = net.units[0]
    _, (logits,) = unit(torch.randn(4, 3, 6, 6), torch.arange(4))
    torch.testing.assert_close(logits, logits[:1].expand_as(logits))
    credit = unit.learn(torch.randn(4, 3, 6, 6), torch.arange(4), torch.arange(4))
    assign_gradients([credit])
    block = unit.blocks[0]
    for parameter in (block.conv.weight, block.norm.weight, block.norm.bias, block.readout.weight):
        assert parameter.grad.abs().sum() > 0


def test_a_worker_answers_with_speed_and_memory() -> None:
    built, timed = ask_in_process(tiny_request("strict"), {"do": "time", "steps": 2, "repeats": 3})
    assert built["engine"] == "eager"
    assert built["memory"]["saved_bytes"] > 0
    assert built["memory"]["steady_bytes"] is None  # no GPU
    assert len(timed["milliseconds"]) == 3
    assert min(timed["milliseconds"]) > 0
    assert timed["finite"]


def test_interleaved_units_save_less_for_backward_than_summed_ones_and_end_to_end() -> None:
    names = ("hgb-1-interleaved", "hgb-1-summed", "end-to-end")
    interleaved, summed, whole = (ask_in_process(tiny_request(n))[0]["memory"]["saved_bytes"] for n in names)
    assert interleaved < summed
    assert interleaved < whole


def test_a_request_that_fails_is_answered_with_its_reason_and_the_next_one_served() -> None:
    broken = tiny_request("strict")
    broken["config"]["model"]["reduction"] = 7
    replies = ask_in_process(broken, {"do": "describe", "device": "cpu"})
    assert "cannot be divided by reduction 7" in replies[0]["error"]
    assert replies[1]["torch"] == torch.__version__


def test_a_worker_that_dies_is_an_answer_with_its_exit_code() -> None:
    with Worker(Deadline(None)) as worker:
        worker.process.kill()
        assert "code -9" in worker.ask({"do": "describe", "device": "cpu"})["error"]
        assert "code -9" in worker.ask({"do": "describe", "device": "cpu"})["error"]


def test_a_worker_past_the_deadline_is_ended() -> None:
    with Worker(Deadline(0.0)) as worker:
        assert worker.ask({"do": "describe", "device": "cpu"}) == {"error": OUT_OF_TIME}
        assert worker.process.wait(timeout=20) == -9


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_bench_writes_every_row_the_failed_ones_with_their_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BICOVG_COMMIT", "0123abc")
    out = tmp_path / "new" / "bench.json"
    clip = ["--train.clip_norm", "1", "--train.clip_scope", "global", "--train.schedule", "summed"]
    names = ["strict", "hgb-2-interleaved"]
    assert main(["bench", "digits", *TINY, *clip, "--only", *names, "--out", str(out)]) == 0
    found = read(out)
    good, bad = found["rows"]
    assert (good["name"], good["status"], good["engine"], good["batch_size"]) == ("strict", "ok", "eager", 8)
    assert good["images_per_second"]["min"] <= good["images_per_second"]["median"] <= good["images_per_second"]["max"]
    assert (bad["status"], bad["images_per_second"]["median"]) == ("failed", None)
    assert "cannot be interleaved" in bad["reason"]
    (run,) = found["runs"]
    assert run["torch"] == torch.__version__
    assert {"date", "commit", "command", "gpu", "python"} <= set(run)
    shown = capsys.readouterr().out
    assert "cannot be interleaved" in shown
    assert str(out) in shown


def test_bench_without_time_left_says_so_in_every_row(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    assert main(["bench", "digits", *TINY, "--time-limit", "0", "--out", str(out)]) == 1
    rows = read(out)["rows"]
    assert len(rows) == len(make_cases(get_recipe("digits")))
    assert {row["reason"] for row in rows} == {OUT_OF_TIME}


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

    def __enter__(self) -> "LocalWorker":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def test_side_by_side_reports_every_sides_speed_and_their_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bicovg.bench, "Worker", LocalWorker)
    out = tmp_path / "bench.json"
    assert main(["bench", "digits", *TINY, "--ab", "--out", str(out)]) == 0
    (table,) = read(out)["side_by_side"]
    strict, whole, constant = (side["images_per_second"]["blocks"] for side in table["sides"])
    assert [side["tried"].keys() for side in table["sides"]] == [{"eager"}] * 3
    assert table["rounds"] == len(strict) == len(whole) == len(constant) == 2
    ratios = [a / b for a, b in zip(strict, whole, strict=True)]
    assert table["speed_over_end-to-end"]["strict"]["median"] == pytest.approx(sum(ratios) / 2)
    shares = [1 - a / b for a, b in zip(strict, constant, strict=True)]
    assert table["goodness_share"] == pytest.approx(sum(shares) / 2)
    assert LocalWorker.alive == 0


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
    monkeypatch.setitem(bicovg.bench.CANDIDATES, "cpu", ("a", "b"))
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


def test_time_per_step_leaves_the_lead_in_out() -> None:
    def run(steps: int) -> None:
        time.sleep(0.2 if steps == 1 else 0.01 * steps)

    assert 9 < time_steps(run, 5, torch.device("cpu"), lead_in=1) < 100


def test_memory_of_captured_graphs_is_what_their_pools_hold_beyond_their_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def segment(device: int, pool: tuple[int, int], total: int, allocated: int) -> dict[str, Any]:
        return {"device": device, "segment_pool_id": pool, "total_size": total, "allocated_size": allocated}

    segments = [segment(0, (0, 0), 100, 10), segment(0, (0, 1), 50, 20), segment(1, (0, 1), 7, 0)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert graph_workspace(torch.device("cuda", 0)) == 30


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_memory_of_a_replayed_graph_covers_what_it_works_in() -> None:
    device = torch.device("cuda", 0)
    x = torch.ones(1 << 22, device=device)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        (x * 2).sum()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = (x * 2).sum()
    reset_peak_memory(device)
    graph.replay()
    assert peak_memory(device) >= torch.cuda.memory_allocated() + x.nbytes
    assert total.item() == 2 * x.numel()
