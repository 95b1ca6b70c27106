"""bench: its configurations, what it changes in a network, and the process that measures one."""

import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from bicovg.bench_cases import make_cases, pick_cases
from bicovg.bench_client import OUT_OF_TIME, Deadline, Worker
from bicovg.bench_report import describe_case
from bicovg.bench_variants import replace_goodness
from bicovg.bench_worker import Server
from bicovg.config import override
from bicovg.errors import UserError
from bicovg.networks import local_network
from bicovg.profiling import graph_workspace, peak_memory, reset_peak_memory, time_steps
from bicovg.recipes import get_recipe
from bicovg.signals import assign_gradients
from bicovg.step import local_step


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
        rates = {"optim.lr": config.optim.lr, "optim.lr_min": config.optim.lr_min} if case.stand_in else {}
        kept = override(case.config, {"train.schedule": config.train.schedule, "train.micro_batches": 1, **rates})
        assert (kept.data, kept.train, kept.optim) == (config.data, config.train, config.optim), case.name


def test_cases_in_parts_have_as_many_as_they_say_and_the_others_one() -> None:
    config = override(get_recipe("imagenet100-bicovg"), {"train.micro_batches": 8})
    found = {case.name: case.config.train.micro_batches for case in make_cases(config).values()}
    divided = {f"{name}-accumulate-{parts}": parts for name in ("strict", "end-to-end") for parts in (2, 4)}
    assert {name: parts for name, parts in found.items() if parts > 1} == divided
    assert describe_case(make_cases(config)["strict-accumulate-4"])["micro_batches"] == 4


def test_the_recipes_own_scope_does_not_leak_into_the_cases() -> None:
    cases, others = (make_cases(get_recipe(f"cifar100-{name}")) for name in ("bp-checkpointed", "hgb2"))
    for name in ("strict", "strict-fal", "end-to-end", "end-to-end-accumulate-2"):
        assert cases[name].config.model == others[name].config.model
    assert (cases["strict"].config.model.scope, cases["strict"].config.model.checkpointing) == ("strict", False)


def test_a_mistyped_configuration_is_named_with_the_nearest_one() -> None:
    with pytest.raises(UserError, match="did you mean strict-fal"):
        pick_cases(make_cases(get_recipe("digits")), ["strict-fall"])


@pytest.mark.parametrize("stand_in", ["constant", "bare"])
def test_goodness_of_inner_exits_can_be_replaced_too(stand_in: str) -> None:
    net = local_network(3, (8, 8), pools=(), scales=((1, 2), (1, 2)), groups=(2,), scope="end-to-end", exits="all")
    replace_goodness(net, stand_in)
    optimizers = [torch.optim.SGD(unit.parameters(), 0.1) for unit in net.units]
    assert local_step(net, optimizers, torch.rand(4, 3, 6, 6), torch.tensor([0, 1, 2, 0])).isfinite().all()


@pytest.mark.parametrize("stand_in", ["constant", "bare"])
def test_without_goodness_the_readout_sees_a_constant_and_the_convolution_still_learns(stand_in: str) -> None:
    net, untouched = (local_network(5, (16, 16), pools=(0,)).train() for _ in range(2))
    net.load_state_dict(untouched.state_dict())
    replace_goodness(net, stand_in)
    x, labels, keys = torch.randn(4, 3, 6, 6), torch.arange(4), torch.arange(4)
    h, (logits,) = net.units[0](x, keys)
    torch.testing.assert_close(logits, logits[:1].expand_as(logits))
    assert torch.equal(h, untouched.units[0](x, keys)[0])  # the next block gets what it always got
    assign_gradients([net.units[0].learn(x, labels, keys)])
    learned = {name for name, p in net.units[0].named_parameters() if p.grad is not None and p.grad.any()}
    expected = {"blocks.0.conv.weight", "blocks.0.readout.weight", "blocks.0.readout.bias"}
    norm = {"blocks.0.norm.weight", "blocks.0.norm.bias"}
    assert learned == expected | (norm if stand_in == "constant" else set())
    assert torch.equal(net.units[0].blocks[0].norm.num_batches_tracked, torch.tensor(2))


@pytest.mark.parametrize(("name", "still"), [("strict", False), ("strict-constant", True), ("strict-bare", True)])
def test_a_step_without_goodness_leaves_the_weights_as_they_are(name: str, still: bool) -> None:
    """Its gradient is none that any training has: moved by it, activations would vanish."""
    server = Server()
    assert "error" not in server.answer(tiny_request(name))
    assert server.session is not None
    before = [p.detach().clone() for p in server.session.engine.net.parameters()]
    server.answer({"do": "time", "steps": 3, "repeats": 1})
    after = list(server.session.engine.net.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) is still


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
