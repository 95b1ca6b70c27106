"""The save path: killed at each of its operations, and cut off by a power loss after each of them."""

import os
import pickle
import random
import shutil

import pytest
from conftest import assert_same_state
from disk import CRASHES, Disk, Recorder, number_operations
from settings import TINY, VARIANTS, count

from bicovg.checkpoint import FILES, checkpoint_name, find_checkpoint, list_checkpoints, verify_checkpoint
from bicovg.checkpoint import write_checkpoint as write
from bicovg.durable import sync_folder

SHARES = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


def operations_of_save(operations, number):
    """The recorded operations of one save, from the making of its folder to the next."""
    begins = [i for i, (kind, name, *_) in enumerate(operations) if kind == "mkdir" and ".partial-" in name]
    ends = [*begins[1:], len(operations)]
    inside = operations[begins[number - 1] : ends[number - 1]]
    return [operation for operation in inside if "checkpoints" in operation[1]]


def kill_points(operations):
    """(save, operation, when, share, label) for every operation of a save with retention, and of the first one."""
    for save in (3, 1):
        own = operations_of_save(operations, save)
        for position, (kind, name, *_) in zip(number_operations(own), own, strict=True):
            label = f"{kind} {os.path.basename(name)} of save {save}"
            if kind == "write":
                for share in SHARES:
                    yield save, position, "inside", share, f"{share:.0%} of {label}"
            yield save, position, "before", 0.0, f"before {label}"
            yield save, position, "after", 0.0, f"after {label}"


def assert_all_whole(run):
    """A checkpoint is whole or absent: whatever carries the name of one verifies."""
    for path in list_checkpoints(run):
        reason = verify_checkpoint(path)
        assert reason is None, f"{path.name} is torn: {reason}"


@pytest.mark.row("SIGKILL at named points of the save path")
def test_a_kill_at_any_operation_of_a_save_loses_nothing(nursery, references, scratch, row):
    log = scratch / "operations"
    plain = nursery.run([*TINY, "--out", scratch / "plain"], "record_operations", root=str(scratch), path=str(log))
    assert plain.code == 0, plain.output
    points = list(kill_points(pickle.loads(log.read_bytes())))
    wanted = count(120, 24)
    assert len(points) >= 120
    chosen = [points[i * len(points) // wanted] for i in range(wanted)]
    for number, (save, position, when, share, label) in enumerate(chosen):
        variant, run = list(VARIANTS)[number % len(VARIANTS)], scratch / f"run-{number}"
        with row.trial(label):
            words = [*TINY, *VARIANTS[variant], "--out", run]
            fault = {"save": save, "operation": position, "when": when, "share": share}
            trial = nursery.run(words, "kill_in_save", root=str(scratch), **fault)
            assert trial.code == -9, f"never reached it, exit code {trial.code}:\n{trial.output[-1500:]}"
            assert_all_whole(run)
            trial = nursery.run(["train", "--resume", run])
            assert trial.code == 0, trial.output[-1500:]
            assert_same_state(run, references[variant][0])
            assert not list((run / "checkpoints").glob(".*")), "leftovers were not swept"
        shutil.rmtree(run)


def contents(number):
    return {name: f"{name} of save {number}".encode() * number for name in FILES}


def crashes():
    yield from ((kind, 0) for kind in CRASHES[:3])
    yield from (("mixed", seed) for seed in range(3))


def record_saves(run):
    """Five saves, keeping two; the second finds a partial folder of a killed process, the fourth saves step 3 again."""
    recorder, returned = Recorder(run.parent), {}
    with recorder.recording():
        os.mkdir(run)
        sync_folder(run.parent)
        for number, step in enumerate((1, 2, 3, 3, 4, 5)):
            if number == 1:
                os.mkdir(run / "checkpoints" / ".partial-of-the-dead")
            write(run, checkpoint_name(step, 0), contents(step))
            returned[len(recorder.operations)] = step
    return recorder.operations, returned


@pytest.mark.row("simulated power loss after every operation of the save path")
def test_a_power_loss_after_any_operation_leaves_the_last_saved_checkpoint(scratch, row):
    (scratch / "disk").mkdir()
    operations, returned = record_saves(scratch / "disk" / "run")
    disk = Disk()
    saved = []
    for position, operation in enumerate(operations, start=1):
        disk.replay(operation)
        saved += [returned[position]] if position in returned else []
        for kind, seed in crashes():
            with row.trial(f"{kind} crash after operation {position}, {operation[:2]}"):
                left = scratch / "left"
                disk.crash(kind, left, seed)
                check_survivors(left / "run", saved)
                shutil.rmtree(left)


def check_survivors(run, saved):
    """Nothing torn is visible, the last save that returned is there with its content, and saving goes on."""
    assert_all_whole(run)
    found = [int(path.name.split("-")[1]) for path in list_checkpoints(run)]
    if saved:
        assert max(found, default=0) >= saved[-1], f"save {saved[-1]} had returned, the newest is {found}"
        assert len(found) >= min(2, len(set(saved))), f"only {found} are left of {saved}"
    for path, step in zip(list_checkpoints(run), found, strict=True):
        assert {name: (path / name).read_bytes() for name in FILES} == contents(step)
    if not run.exists():
        return
    write(run, checkpoint_name(9, 0), contents(9))
    assert find_checkpoint(run)[0].name == checkpoint_name(9, 0)
    assert_all_whole(run)
    assert not list((run / "checkpoints").glob(".*"))


def test_the_recorder_misses_no_operation(scratch):
    """Replayed whole, the record gives exactly the folder that the saves made."""
    (scratch / "disk").mkdir()
    operations, _ = record_saves(scratch / "disk" / "run")
    disk = Disk()
    for operation in operations:
        disk.replay(operation)
    disk.crash("all", scratch / "left")

    def tree(root):
        return {p.relative_to(root): p.read_bytes() if p.is_file() else None for p in root.rglob("*")}

    assert tree(scratch / "left") == tree(scratch / "disk")


@pytest.mark.row("simulated power loss during a real run, then resumed")
def test_a_run_that_lost_power_anywhere_resumes_bit_equal(nursery, references, scratch, row):
    log, variant = scratch / "operations", "strict-interleaved"
    (scratch / "disk").mkdir()
    words = [*TINY, *VARIANTS[variant], "--out", scratch / "disk" / "run"]
    trial = nursery.run(words, "record_operations", root=str(scratch / "disk"), path=str(log))
    assert trial.code == 0, trial.output
    operations = pickle.loads(log.read_bytes())
    rng, disk, best = random.Random(0), Disk(), ""
    resumed = set(rng.sample(range(10, len(operations)), count(40, 6)))
    for position, operation in enumerate(operations):
        disk.replay(operation)
        if position % count(1, 5) and position not in resumed:
            continue
        for kind, seed in crashes():
            left = scratch / "left"
            with row.trial(f"{kind} crash after operation {position}, {operation[:2]}"):
                disk.crash(kind, left, seed)
                assert_all_whole(left / "run")
                newest, _ = find_checkpoint(left / "run")
                if kind == "strict":
                    name = newest.name if newest else ""
                    assert name >= best, f"{best} was safe and is gone"
                    best = name
                if position in resumed and kind in ("strict", "mixed") and (left / "run" / "config.json").exists():
                    trial = nursery.run(["train", "--resume", left / "run"])
                    assert trial.code == 0, trial.output[-1500:]
                    assert_same_state(left / "run", references[variant][0])
            shutil.rmtree(left)
    assert best, "no checkpoint was ever safe"
