"""Checkpoints: whole or absent, verified byte for byte, walked back from when damaged; two are always kept."""

import errno
import json
import os
import random
import shutil
import threading
import time

import pytest
import torch
from safetensors.torch import load, save

from bicovg import checkpoint as checkpoint_module
from bicovg import local_network, tensorfile
from bicovg.checkpoint import (
    FILES,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    SCHEMA,
    Unusable,
    checkpoint_name,
    find_checkpoint,
    list_checkpoints,
    read_checked,
    verify_checkpoint,
    walk_back,
    write_checkpoint,
)
from bicovg.durable import append_line, read_regular, replace_file
from bicovg.errors import NonFiniteError, StorageError, UserError
from bicovg.saving import Saver
from bicovg.state import Progress, Snapshot, load_state, load_weights
from bicovg.tensorfile import assemble_tensors


def contents(number):
    return {name: f"{name} {number}".encode() for name in FILES}


def write(run, step, **options):
    return write_checkpoint(run, checkpoint_name(step, 0), contents(step), **options)


def make_run(folder):
    """A small network with one optimizer per unit, trained for a step."""
    torch.manual_seed(0)
    net = local_network(3, (8, 8), (), ((1,),) * 2, in_channels=1)
    optimizers = [torch.optim.AdamW(unit.parameters(), 1e-3) for unit in net.units]
    for unit, optimizer in zip(net.units, optimizers, strict=True):
        for parameter in unit.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return net, optimizers, torch.rand(2, 2, dtype=torch.float64)


def snapshot(folder, step=1):
    net, optimizers, losses = make_run(folder)
    taken = Snapshot(net, optimizers, losses, Progress(0, step, step, 1.5), b'{"epoch": 0}\n')
    return net, optimizers, losses, taken


def test_the_newest_two_are_kept_and_the_newest_is_found(tmp_path):
    for step in range(1, 6):
        write(tmp_path, step)
    assert [path.name for path in list_checkpoints(tmp_path)] == [checkpoint_name(4, 0), checkpoint_name(5, 0)]
    assert find_checkpoint(tmp_path) == (tmp_path / "checkpoints" / checkpoint_name(5, 0), [])


def test_more_are_kept_where_asked_and_never_fewer_than_two(tmp_path):
    for step in range(1, 6):
        write(tmp_path, step, keep=4)
    assert len(list_checkpoints(tmp_path)) == 4
    write(tmp_path, 6, keep=1)
    assert len(list_checkpoints(tmp_path)) == 2


def test_a_step_saved_before_and_after_its_epoch_closed_sorts_by_age(tmp_path):
    write_checkpoint(tmp_path, checkpoint_name(10, 1), contents(1))
    write_checkpoint(tmp_path, checkpoint_name(10, 0), contents(0))
    assert find_checkpoint(tmp_path)[0].name == checkpoint_name(10, 1)


def test_damaged_ones_do_not_count_among_the_two_kept(tmp_path):
    write(tmp_path, 1)
    damaged = write(tmp_path, 2)
    (damaged / MODEL).write_bytes(b"")
    write(tmp_path, 3)
    good = [path.name for path in list_checkpoints(tmp_path) if verify_checkpoint(path) is None]
    assert good == [checkpoint_name(1, 0), checkpoint_name(3, 0)]


def test_every_flipped_bit_is_found(tmp_path):
    path, rng = write(tmp_path, 1), random.Random(0)
    for name in (*FILES, MANIFEST):
        whole = (path / name).read_bytes()
        for bit in rng.sample(range(8 * len(whole)), 40):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            (path / name).write_bytes(flipped)
            assert verify_checkpoint(path) is not None, f"bit {bit} of {name}"
        (path / name).write_bytes(whole)
    assert verify_checkpoint(path) is None


def test_an_old_checkpoint_stays_until_the_new_one_verifies(tmp_path, monkeypatch):
    """The disk loses a byte of every weight file after it was written: no older checkpoint may go."""
    for step in (1, 2):
        write(tmp_path, step)
    rename = os.rename

    def rename_and_lose(source, target):
        rename(source, target)
        if target.name == checkpoint_name(3, 0):
            (target / MODEL).write_bytes(b"rubbish")

    monkeypatch.setattr(os, "rename", rename_and_lose)
    with pytest.raises(StorageError, match="was not stored as it was written"):
        write(tmp_path, 3)
    found, skipped = find_checkpoint(tmp_path)
    assert found is not None
    assert found.name == checkpoint_name(2, 0)
    assert len(skipped) == 1
    assert len(list_checkpoints(tmp_path)) == 3


def test_saving_a_step_again_leaves_the_good_one_and_replaces_a_damaged_one(tmp_path):
    path = write(tmp_path, 1)
    before = os.stat(path / MODEL).st_ino
    write(tmp_path, 1)
    assert os.stat(path / MODEL).st_ino == before
    (path / MODEL).write_bytes(b"")
    write(tmp_path, 1)
    assert verify_checkpoint(path) is None
    assert os.listdir(path.parent) == [path.name]


def test_walking_back_says_what_was_skipped_and_why(tmp_path):
    older, newer = write(tmp_path, 1), write(tmp_path, 2)
    (newer / OPTIMIZER).unlink()
    path, _, skipped = walk_back(tmp_path, lambda path: path)
    assert path == older
    assert skipped == [f"skipped {newer.name}: optimizer.safetensors: no such file or directory"]


def test_a_checkpoint_that_cannot_be_loaded_is_walked_back_from_too(tmp_path):
    older, newer = write(tmp_path, 1), write(tmp_path, 2)

    def load_old_only(path):
        if path == newer:
            raise Unusable("of another network")
        return path.name

    assert walk_back(tmp_path, load_old_only) == (older, older.name, [f"skipped {newer.name}: of another network"])


def test_links_and_strange_names_are_no_checkpoints(tmp_path):
    path = write(tmp_path, 1)
    (path.parent / "step-1-epoch-x").mkdir()
    linked = path.with_name(checkpoint_name(9, 0))
    linked.symlink_to(path)
    assert verify_checkpoint(linked) == "it is a symbolic link"
    assert list_checkpoints(tmp_path) == [path, linked]
    assert find_checkpoint(tmp_path)[0] == path


def test_checkpoints_behind_a_link_are_neither_read_nor_written(tmp_path):
    run, real = tmp_path / "run", tmp_path / "real"
    run.mkdir()
    real.mkdir()
    write(real, 1)
    (run / "checkpoints").symlink_to(real / "checkpoints")
    for attempt in (lambda: list_checkpoints(run), lambda: find_checkpoint(run), lambda: write(run, 2)):
        with pytest.raises(StorageError, match="symbolic link: move the checkpoints into their run folder"):
            attempt()


def test_a_file_in_place_of_the_checkpoints_is_not_taken_for_none_yet(tmp_path):
    (tmp_path / "checkpoints").touch()
    for attempt in (lambda: list_checkpoints(tmp_path), lambda: write(tmp_path, 2)):
        with pytest.raises(StorageError, match="is not a folder: move it away"):
            attempt()


def test_checkpoints_of_another_run_neither_count_nor_stand_in_for_ones_own(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        folder.mkdir()
    write(run, 12, owner="ours")
    for step in (16, 17):
        shutil.copytree(write(other, step, owner="theirs"), run / "checkpoints" / checkpoint_name(step, 0))
    write(run, 13, owner="ours")
    assert find_checkpoint(run, "ours")[0].name == checkpoint_name(13, 0)
    assert verify_checkpoint(run / "checkpoints" / checkpoint_name(12, 0), "ours") is None
    reason = verify_checkpoint(run / "checkpoints" / checkpoint_name(17, 0), "ours")
    assert reason == "it belongs to a run of other settings than config.json has"
    assert verify_checkpoint(write(run, 17, owner="ours"), "ours") is None
    assert find_checkpoint(run, "ours")[0].name == checkpoint_name(17, 0)


def test_checkpoints_that_a_run_could_not_take_do_not_count_either(tmp_path):
    for step in (1, 8, 9):
        write(tmp_path, step, keep=3)
    unfit = {checkpoint_name(step, 0) for step in (8, 9)}
    write(tmp_path, 2, unfit=unfit)
    assert [path.name for path in list_checkpoints(tmp_path)] == [checkpoint_name(s, 0) for s in (1, 2, 8, 9)]
    write_checkpoint(tmp_path, checkpoint_name(8, 0), contents(80), unfit=unfit)
    assert read_checked(tmp_path / "checkpoints" / checkpoint_name(8, 0), MODEL) == contents(80)[MODEL]


def test_a_file_of_the_wrong_size_is_not_read(tmp_path):
    path = write(tmp_path, 1)
    os.truncate(path / MODEL, 15 << 30)
    begun = time.monotonic()
    assert verify_checkpoint(path) == f"{MODEL} has {15 << 30} bytes, the manifest says 19"
    assert time.monotonic() - begun < 1


def test_one_that_is_retired_while_it_is_read_is_as_if_never_listed(tmp_path, monkeypatch):
    for step in (1, 2):
        write(tmp_path, step)
    plain = checkpoint_module.verify_checkpoint

    def verify_late(path, owner=None):
        if path.name == checkpoint_name(2, 0):  # meanwhile the trainer goes on, twice
            monkeypatch.setattr(checkpoint_module, "verify_checkpoint", plain)
            for step in (3, 4):
                write(tmp_path, step)
        return plain(path, owner)

    monkeypatch.setattr(checkpoint_module, "verify_checkpoint", verify_late)
    assert find_checkpoint(tmp_path) == (tmp_path / "checkpoints" / checkpoint_name(4, 0), [])


def test_a_line_is_added_whole_or_not_at_all(tmp_path, monkeypatch):
    path, plain, room = tmp_path / "metrics.jsonl", os.write, [9]
    append_line(path, '{"epoch": 0}')

    def write_some(descriptor, blob):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = plain(descriptor, bytes(blob[: room[0]]))
        room[0] -= done
        return done

    monkeypatch.setattr(os, "write", write_some)
    with pytest.raises(OSError, match="No space left"):
        append_line(path, '{"epoch": 1}')
    assert path.read_text() == '{"epoch": 0}\n'
    room[0] = 9
    monkeypatch.setattr(os, "write", lambda descriptor, blob: plain(descriptor, bytes(blob[:5])))
    append_line(path, '{"epoch": 1}')
    assert path.read_text() == '{"epoch": 0}\n{"epoch": 1}\n'


@pytest.mark.parametrize("place", [MODEL, OPTIMIZER])
def test_a_checkpoint_with_a_value_that_is_not_finite_is_not_taken(place, tmp_path):
    net, optimizers, losses, taken = snapshot(tmp_path)
    files = dict(taken.files())
    tensors = load(bytes(files[place]))
    name = next(key for key, tensor in tensors.items() if tensor.is_floating_point() and tensor.dim() > 1)
    tensors[name].view(-1)[0] = torch.inf
    files[place] = assemble_tensors(tensors)
    path = write_checkpoint(tmp_path, taken.name, files)
    assert verify_checkpoint(path) is None
    with pytest.raises(Unusable, match="is not finite"):
        load_state(path, net, optimizers, losses, 3, 4)


def test_state_comes_back_bit_for_bit(tmp_path):
    net, optimizers, losses, taken = snapshot(tmp_path)
    path = write_checkpoint(tmp_path, taken.name, taken.files())
    fresh, fresh_optimizers, fresh_losses = make_run(tmp_path)
    for parameter in fresh.parameters():
        torch.nn.init.zeros_(parameter)
    progress = load_state(path, fresh, fresh_optimizers, fresh_losses.zero_(), 2, 8)
    assert progress == Progress(0, 1, 1, 1.5)
    assert torch.equal(losses, fresh_losses)
    for a, b in zip(net.state_dict().values(), fresh.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for one, two in zip(optimizers, fresh_optimizers, strict=True):
        for a, b in zip(one.state.values(), two.state.values(), strict=True):
            assert all(torch.equal(a[key], b[key]) for key in a)
            assert a.keys() == b.keys()


def test_a_snapshot_is_a_copy_that_training_cannot_change(tmp_path):
    net, _, _, taken = snapshot(tmp_path)
    before = taken.files()
    for parameter in net.parameters():
        torch.nn.init.zeros_(parameter)
    assert taken.files() == before


def test_a_file_of_tensors_has_the_bytes_the_library_would_write():
    generator = torch.Generator().manual_seed(0)
    tensors = {f"w{size}": torch.randn(size, 3, 2, 2, generator=generator) for size in (1, 4, 0)}
    tensors["last"] = torch.randn(2, 4, 3, 3, generator=generator).contiguous(memory_format=torch.channels_last)
    tensors |= {f'"{kind} é|x': torch.randint(0, 2, (5,), generator=generator).to(kind) for kind in tensorfile._TYPES}
    tensors["count"] = torch.tensor(7)
    wanted = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    assert assemble_tensors(tensors) == wanted
    assert assemble_tensors({}) == save({})


def test_a_large_file_is_put_together_without_stopping_other_threads():
    tensors = {f"w{number}": torch.zeros(1 << 21) for number in range(24)}  # 200 MB: the library needs 100 ms and more

    def longest_stop(task):
        worker, longest, last = threading.Thread(target=task, args=(tensors,)), 0.0, time.perf_counter()
        worker.start()
        while worker.is_alive():
            time.sleep(0.0005)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        return longest

    # the best of several: other processes take the core, too
    ours, theirs = (min(longest_stop(task) for _ in range(5)) for task in (assemble_tensors, save))
    assert ours < theirs / 3


def test_a_snapshot_waits_for_its_copies_before_it_is_read(tmp_path):
    """As from a GPU, whose copies are only ordered when the snapshot is taken."""
    _, _, _, taken = snapshot(tmp_path)
    name = next(name for name in taken.model if name.endswith("conv.weight"))

    class Arrival:
        def synchronize(self):
            taken.model[name].fill_(7.0)

    taken._copied.append(Arrival())
    assert (load(bytes(taken.files()[MODEL]))[name] == 7.0).all()


def test_a_value_that_is_not_finite_is_not_saved(tmp_path):
    net, optimizers, losses = make_run(tmp_path)
    next(iter(optimizers[1].state.values()))["exp_avg_sq"].view(-1)[0] = torch.inf
    taken = Snapshot(net, optimizers, losses, Progress(), b"")
    with pytest.raises(NonFiniteError, match=r"exp_avg_sq is not finite at step 0"):
        taken.files()


@pytest.mark.parametrize("progress", [Progress(0, 9, 9), Progress(3, 0, 24), Progress(1, 0, 9), Progress(2, 1, 17)])
def test_progress_outside_the_run_is_refused_and_changes_nothing(tmp_path, progress):
    net, optimizers, losses = make_run(tmp_path)
    taken = Snapshot(net, optimizers, losses, progress, b"")
    path = write_checkpoint(tmp_path, taken.name, taken.files())
    other = local_network(3, (8, 8), (), ((1,),) * 2, in_channels=1)
    before = [parameter.clone() for parameter in other.parameters()]
    made = [torch.optim.AdamW(unit.parameters(), 1e-3) for unit in other.units]
    with pytest.raises(Unusable, match="is not a place in this run"):
        load_state(path, other, made, losses, 2, 8)
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    assert not any(optimizer.state for optimizer in made)


def test_weights_of_another_network_are_refused_by_name(tmp_path):
    _, _, _, taken = snapshot(tmp_path)
    path = write_checkpoint(tmp_path, taken.name, taken.files())
    wider = local_network(3, (16, 8), (), ((1,),) * 2, in_channels=1)
    with pytest.raises(UserError, match=r"do not fit config.json: units.0.* is torch.float32 \(8, "):
        load_weights(path, wider)


def test_a_checkpoint_holds_plain_tensors_and_json_alone(tmp_path):
    _, _, _, taken = snapshot(tmp_path)
    path = write_checkpoint(tmp_path, taken.name, taken.files())
    assert sorted(os.listdir(path)) == sorted([*FILES, MANIFEST])
    assert all(isinstance(key, str) for name in (MODEL, OPTIMIZER) for key in load(read_checked(path, name)))
    assert json.loads((path / MANIFEST).read_text())["schema"] == SCHEMA


def test_the_saver_reports_a_failed_write_and_keeps_the_last_good_one(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    saver = Saver(run, keep=2, seconds=0)
    _, _, _, taken = snapshot(run)
    saver.save(taken)
    saver.wait()
    _, _, _, later = snapshot(run, step=2)
    run.rename(tmp_path / "aside")
    saver.save(later)
    with pytest.raises(StorageError, match=r"cannot save step-000000002.*go on with `bicovg train --resume"):
        saver.wait()
    (tmp_path / "aside").rename(run)
    (run / "checkpoints").rename(run / "aside")
    (run / "checkpoints").write_text("in the way")
    saver.save(later)
    with pytest.raises(StorageError, match="is not a folder: move it away"):
        saver.close()
    assert verify_checkpoint(run / "aside" / taken.name) is None


def test_the_saver_is_due_by_time_and_never_when_told_so(tmp_path):
    assert Saver(tmp_path, 2, 1e-9).due()
    assert not Saver(tmp_path, 2, 1000).due()
    assert not Saver(tmp_path, 2, 0).due()


def test_a_replaced_file_is_the_old_or_the_new_and_no_link_is_written_through(tmp_path):
    path, outside = tmp_path / "file", tmp_path / "outside"
    outside.write_text("mine")
    replace_file(path, b"one")
    (tmp_path / ".file.tmp").symlink_to(outside)
    replace_file(path, b"two")
    assert path.read_bytes() == b"two"
    path.unlink()
    path.symlink_to(outside)
    replace_file(path, b"three")
    assert not path.is_symlink()
    linked = tmp_path / "lines"
    linked.symlink_to(outside)
    with pytest.raises(OSError, match="symbolic links"):
        append_line(linked, "yours")
    assert outside.read_text() == "mine"


def test_only_plain_files_of_a_bounded_size_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"0123456789")
    for name, message in (("pipe", "not a plain file"), ("large", "10 bytes, more than the 9"), ("none", "No such")):
        with pytest.raises(OSError, match=message):
            read_regular(tmp_path / name, 9)
    assert read_regular(tmp_path / "large", 10) == b"0123456789"
