"""Checkpoints: whole or absent, verified byte for byte, walked back from when damaged; two are always kept."""

import os
import random
import shutil
import time

import pytest

from bicovg import checkpoint as checkpoint_module
from bicovg.checkpoint import (
    FILES,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    Unusable,
    checkpoint_name,
    find_checkpoint,
    list_checkpoints,
    read_checked,
    verify_checkpoint,
    walk_back,
    write_checkpoint,
)
from bicovg.errors import StorageError


def contents(number):
    return {name: f"{name} {number}".encode() for name in FILES}


def write(run, step, **options):
    return write_checkpoint(run, checkpoint_name(step, 0), contents(step), **options)


def test_the_newest_two_are_kept_and_the_newest_is_found(tmp_path):
    for step in range(1, 6):
        write(tmp_path, step)
    assert [path.name for path in list_checkpoints(tmp_path)] == [checkpoint_name(4, 0), checkpoint_name(5, 0)]
    assert find_checkpoint(tmp_path) == (tmp_path / "checkpoints" / checkpoint_name(5, 0), {})


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
    assert skipped == {newer.name: "optimizer.safetensors: no such file or directory"}


def test_a_checkpoint_that_cannot_be_loaded_is_walked_back_from_too(tmp_path):
    older, newer = write(tmp_path, 1), write(tmp_path, 2)

    def load_old_only(path):
        if path == newer:
            raise Unusable("of another network")
        return path.name

    assert walk_back(tmp_path, load_old_only) == (older, older.name, {newer.name: "of another network"})


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
    assert find_checkpoint(tmp_path) == (tmp_path / "checkpoints" / checkpoint_name(4, 0), {})
