"""Data parallel: several processes compute what one computes, agree on everything, and each sample counts once."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from team_cases import fork_all, free_port, own_share, run_team, small_batches, small_net

from bicovg import survivors
from bicovg.config import FusionConfig, TrainConfig
from bicovg.distributed import ALONE, Processes, Team, join_team
from bicovg.draws import DROPOUT, make_keys
from bicovg.errors import NonFiniteError
from bicovg.evaluation import both_accuracies, report_fusion
from bicovg.guard import Guard
from bicovg.reduction import UnitReduction
from bicovg.step import local_step
from bicovg.survivors import NO_STORE, Survivors
from bicovg.synced_norm import sync_batch_norm

WORLDS = (1, 2, 3, 4)
BATCH = 24


def train_share(team: Team, dtype: torch.dtype, steps: int, schedule: str, synced: bool, changes: dict) -> list:
    """Train on this process's share of every batch; all parameters and buffers at the end, and the losses."""
    net = small_net(dtype, **changes)
    optimizers = [torch.optim.SGD(unit.parameters(), 0.005) for unit in net.units]
    reduction = None
    if team.world > 1:
        reduction = UnitReduction(team, statistics=not synced)
        if synced:
            sync_batch_norm(net, team)
    for step, (images, labels, indices) in enumerate(small_batches(steps, BATCH, dtype)):
        own = own_share(team, BATCH)
        keys = make_keys(0, DROPOUT, step, indices[own])
        losses = local_step(
            net, optimizers, images[own], labels[own], schedule, clip_norm=1.0, keys=keys, reduction=reduction
        )
    return [losses, *[tensor.detach() for tensor in (*net.parameters(), *net.buffers())]]


def largest_gap(found: list, expected: list) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def assert_ranks_agree(results: list) -> None:
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("schedule", ["interleaved", "summed"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_two_processes_equal_one_with_the_doubled_batch(dtype: torch.dtype, bound: float, schedule: str) -> None:
    one = train_share(ALONE, dtype, 50, schedule, False, {})
    two = run_team(train_share, 2, dtype, 50, schedule, False, {})
    assert_ranks_agree(two)
    assert largest_gap(two[0], small_start(dtype, one)) > 0
    assert largest_gap(two[0], one) <= bound


def small_start(dtype: torch.dtype, like: list) -> list:
    """The parameters before training, to show that it moved them."""
    return [like[0], *[p.detach() for p in small_net(dtype).parameters()]]


@pytest.mark.parametrize("world", WORLDS)
def test_dropout_masks_belong_to_samples_whatever_the_number_of_processes(world: int) -> None:
    changes = {"dropout": 0.5, "alignment": True}
    one = train_share(ALONE, torch.float64, 5, "interleaved", False, changes)
    assert largest_gap(run_team(train_share, world, torch.float64, 5, "interleaved", False, changes)[0], one) <= 1e-12
    assert largest_gap(train_share(ALONE, torch.float64, 5, "interleaved", False, {"alignment": True}), one) > 1e-6


@pytest.mark.parametrize("world", WORLDS)
def test_synced_batch_norm_equals_one_process(world: int) -> None:
    changes = {"batch_norm": True, "dropout": 0.1}
    one = train_share(ALONE, torch.float64, 5, "interleaved", False, changes)
    found = run_team(train_share, world, torch.float64, 5, "interleaved", True, changes)
    assert_ranks_agree(found)
    assert largest_gap(found[0], one) <= 1e-12


def test_local_batch_norm_differs_from_one_process_and_ranks_still_agree() -> None:
    changes = {"batch_norm": True}
    one = train_share(ALONE, torch.float64, 5, "interleaved", False, changes)
    found = run_team(train_share, 3, torch.float64, 5, "interleaved", False, changes)
    assert_ranks_agree(found)
    assert largest_gap(found[0], one) > 1e-6


def trace_step(team: Team) -> list[str]:
    """The order of events of one interleaved step."""
    net, events = small_net(), []
    optimizers = [torch.optim.SGD(unit.parameters(), 0.005) for unit in net.units]

    class Traced(UnitReduction):
        def launch(self, index: int, *rest: object) -> None:
            events.append(f"launch {index}")
            super().launch(index, *rest)
            assert len(self._under_way) <= 2

        def collect(self, index: int) -> None:
            super().collect(index)
            events.append(f"collect {index}")

    for index, (unit, optimizer) in enumerate(zip(net.units, optimizers, strict=True)):
        unit.register_forward_pre_hook(lambda *_, index=index: events.append(f"forward {index}"))
        optimizer.register_step_pre_hook(lambda *_, index=index: events.append(f"step {index}"))
    images, labels, keys = small_batches(1, 4)[0]
    local_step(net, optimizers, images, labels, keys=keys, reduction=Traced(team, True))
    return events


def test_a_unit_is_sent_after_its_backward_pass_and_waited_for_after_the_next_ones() -> None:
    events = run_team(trace_step, 2)[0]
    assert events[:6] == ["forward 0", "launch 0", "forward 1", "launch 1", "collect 0", "step 0"]
    assert events[-4:] == ["collect 2", "step 2", "collect 3", "step 3"]


def judge_share(team: Team) -> tuple:
    """Accuracies and fusion of logits spread unevenly over the processes."""
    generator = torch.Generator().manual_seed(3)
    logits, labels = torch.randn(3, 37, 4, generator=generator), torch.randint(0, 4, (37,), generator=generator)
    cuts = [round(37 * (rank / team.world) ** 2) for rank in range(team.world + 1)]
    own = slice(cuts[team.rank], cuts[team.rank + 1])
    part = logits[:, own], labels[own]
    record, _ = report_fusion(part, part, FusionConfig(steps=50, lr=0.05), team=team)
    return both_accuracies(logits[0, own], labels[own], team), record["weights"], record["top1"]


@pytest.mark.parametrize("world", WORLDS)
def test_sharded_accuracy_is_exact_and_sharded_fusion_fits_the_same_weights(world: int) -> None:
    accuracy, weights, top1 = judge_share(ALONE)
    for found in run_team(judge_share, world):
        assert found[0] == accuracy
        assert found[1] == pytest.approx(weights, abs=1e-5)
        assert found[2] == top1


def plant_nan(team: Team) -> tuple[str, list]:
    net = small_net(batch_norm=True)
    optimizers = [torch.optim.SGD(unit.parameters(), 0.005) for unit in net.units]
    guard = Guard(net, optimizers)
    images, labels, keys = small_batches(1, 8)[0]
    if team.rank == 1:
        images[0, 0, 0, 0] = torch.nan
    local_step(net, optimizers, images, labels, keys=keys, guard=guard, reduction=UnitReduction(team, True))
    with pytest.raises(NonFiniteError) as error:
        guard.record(7)
    return str(error.value), [tensor.detach() for tensor in (*net.parameters(), *net.buffers())]


def test_a_nan_on_one_process_holds_back_all_of_them() -> None:
    start = small_net(batch_norm=True)
    for message, tensors in run_team(plant_nan, 2):
        assert "block 0 was not finite at step 7" in message
        expected = (*start.parameters(), *start.buffers())
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


def consult_often(team: Team) -> list[tuple[int, bool]]:
    return [team.consult(143 if (team.rank, call) == (1, 5) else 0, due=call >= 2) for call in range(12)]


@pytest.mark.parametrize("delay", [1, 4])
def test_wishes_reach_every_process_at_the_same_call_and_a_checkpoint_is_asked_for_once(delay: int) -> None:
    answers = run_team(consult_often, 3, delay=delay)
    assert answers[0] == answers[1] == answers[2]
    assert [call for call, (wish, _) in enumerate(answers[0]) if wish] == [5 + delay]
    dues = [call for call, (_, due) in enumerate(answers[0]) if due]
    assert dues == list(range(2 + delay, 12, delay + 1))


def hear(team: Team) -> list[str]:
    return [team.tell(text if team.leads else "unheard") for text in ("runs/a b", "", "\u00e9")]


def test_every_process_hears_the_leaders_words() -> None:
    assert run_team(hear, 3) == [["runs/a b", "", "\u00e9"]] * 3


def threads_after_leaving(rank: int, port: int) -> tuple[list[str], list[str]]:
    """Names of this process's threads among others, a message still expected, and after it has left them."""
    announced = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in announced.items()})
    with join_team(TrainConfig(device="cpu")) as team:
        import torch._dynamo  # as optimizers do; it binds torch.distributed's group in default arguments

        work = dist.irecv(torch.zeros(1), 1 - rank)
        team.consult(0, False)
        team.meet()
        among = thread_names()
    del work
    return among, thread_names()


def thread_names() -> list[str]:
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


def test_a_process_that_leaves_takes_its_connections_threads_down() -> None:
    """One that was alive while Python ended has aborted a process whose work was done (std::terminate, status -6)."""
    port = free_port()
    for among, after in fork_all([lambda rank=rank: threads_after_leaving(rank, port) for rank in range(2)]):
        assert any("gloo" in name for name in among)
        assert not any("gloo" in name for name in after), after


@pytest.mark.parametrize(
    ("body", "code", "printed"),
    [
        ("return 5", 5, "said\n"),
        ("raise ZeroDivisionError('planted')", 1, "said\n"),
        ("bicovg.distributed.has_met = False; return 4", 4, "said\nwound up\n"),
    ],
)
def test_a_process_of_a_team_ends_at_once_with_its_own_exit_code(body: str, code: int, printed: str) -> None:
    """What would abort Python while it winds up is not given the time."""
    text = f"""
import atexit
import bicovg.__main__ as entry, bicovg.distributed
bicovg.distributed.has_met = True
atexit.register(print, "wound up")
def main():
    print("said")
    {body}
entry.main = main
entry.run()
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, printed), done.stderr
    assert ("planted" in done.stderr) == ("planted" in body)


@pytest.fixture
def _short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survivors, "SILENCE", 2.0)
    monkeypatch.setattr(survivors, "LISTENING", 0.2)


def die_alone(team: Team, lost: int) -> str:
    team.meet()
    if team.rank == lost:
        os._exit(9)
    try:
        for _ in range(3):
            team.meet()
    except RuntimeError:
        raise
    except ValueError as error:
        return str(error)
    return "nothing happened"


def die_in_a_chain(team: Team, lost: int) -> str:
    """Every rank waits for a word from the one before it, so that most wait for a survivor."""
    team.meet()
    if team.rank == lost:
        os._exit(9)
    assert isinstance(team, Processes)
    begun, word = time.monotonic(), torch.zeros(1)
    try:
        with team.talking():
            dist.recv(word, (team.rank - 1) % team.world)
    except ValueError as error:
        return f"{error} after {time.monotonic() - begun:.1f} s"
    return "nothing happened"


@pytest.mark.usefixtures("_short_silence")
@pytest.mark.parametrize(("work", "world", "lost"), [(die_alone, 3, 1), (die_alone, 4, 2), (die_in_a_chain, 4, 0)])
def test_survivors_name_the_process_that_died_and_no_other(work: Callable[..., str], world: int, lost: int) -> None:
    found = run_team(work, world, lost)
    assert found.pop(lost) == 9
    assert all(message.startswith(f"rank {lost} was lost") for message in found), found


def hang_alone(team: Team, lost: int) -> str:
    """One rank lives, but never comes."""
    team.meet()
    if team.rank == lost:
        time.sleep(3 * survivors.SILENCE)
        return "slept"
    assert isinstance(team, Processes)
    try:
        with team.talking():
            time.sleep(1.0)  # the others are here by now
            raise RuntimeError("timed out")
    except ValueError as error:
        return str(error)


@pytest.mark.usefixtures("_short_silence")
def test_who_lives_but_does_not_come_is_named() -> None:
    found = run_team(hang_alone, 3, 1)
    assert found.pop(1) == "slept"
    assert all(message.startswith("rank 1 was missing (alive, but not at the exchange)") for message in found), found


def leave_with_a_reason(team: Team, rank: int) -> str:
    team.meet()
    assert isinstance(team, Processes)
    if team.rank == rank:
        team.survivors.say_farewell("a loss was not finite")
        os._exit(3)
    try:
        team.meet()
    except ValueError as error:
        return str(error)
    return "nothing happened"


@pytest.mark.usefixtures("_short_silence")
def test_who_leaves_for_a_reason_of_its_own_is_quoted() -> None:
    found = run_team(leave_with_a_reason, 3, 0)
    assert found.pop(0) == 3
    assert all(message.startswith("rank 0 has left (a loss was not finite)") for message in found), found


def notice_through_rank_0s_store(rank: int, port: int) -> str:
    """As without torchrun: the store lives in rank 0, which leaves after its verdict; rank 1 notices a second later."""
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, wait_for_workers=True)
    listed = Survivors(store, rank, 3)  # rank 2 never was
    if rank:
        time.sleep(survivors.SILENCE + 3.0)
    return listed.name_lost()


@pytest.mark.usefixtures("_short_silence")
def test_the_verdict_outlives_rank_0_and_its_store() -> None:
    port = free_port()
    found = fork_all([lambda rank=rank: notice_through_rank_0s_store(rank, port) for rank in range(2)])
    assert found == ["rank 2 was lost (dead, or without an answer)"] * 2


class SilentStore:
    """A store whose machine has stopped: it takes questions and never answers."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: time.sleep(1000)


def test_a_store_that_has_fallen_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bicovg.survivors.SILENCE", 0.2)
    assert Survivors(SilentStore(), 1, 2).name_lost() == NO_STORE


@pytest.mark.usefixtures("_short_silence")
def test_who_notices_late_does_not_wait_again() -> None:
    found = run_team(die_in_a_chain, 4, 0)
    waited = [float(message.split()[-2]) for message in found[1:]]
    assert waited == sorted(waited)
    assert waited[2] < waited[0] + survivors.SILENCE / 2, found
