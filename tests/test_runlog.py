"""The run folder: written whole, restored to a checkpoint's moment, and refused in one sentence when damaged."""

import json
import os

import pytest

from bicovg.config import Config, to_json
from bicovg.errors import StorageError, UserError
from bicovg.launching import find_begun, refuse_taken
from bicovg.runlog import RunLog, new_run_folder, read_config, read_data, read_lines, read_summary, write_json
from bicovg.stopping import RunLock

SUMMARY = {
    "recipe": "digits",
    "seed": 0,
    "scope": "strict",
    "exit_blocks": [0, 1],
    "test": {
        "exits": {"top1": [1.0, 2.0], "top5": [3.0, 4.0]},
        "last": {"top1": 2.0, "top5": 4.0},
        "best_test_chosen": {"exit": 1, "top1": 2.0, "top5": 4.0},
        "best_heldout_chosen": None,
        "mean": {"top1": 2.0, "top5": 4.0},
    },
    "fusion": {"train": None, "heldout": None},
}


def make_run(folder):
    (folder / "config.json").write_text(to_json(Config()))
    return folder


def test_restoring_cuts_every_line_file_to_the_checkpoint(tmp_path):
    log = RunLog(tmp_path)
    for epoch in range(3):
        log.append("metrics.jsonl", {"epoch": epoch})
        log.append("timing.jsonl", {"epoch": epoch, "seconds": 1.0})
        log.append("events.jsonl", {"step": 10 * epoch})
    kept = log.metrics()
    log.append("metrics.jsonl", {"epoch": 3})
    log.append("timing.jsonl", {"epoch": 3})
    log.append("events.jsonl", {"step": 30})
    log.restore(kept, epoch=3, step=30)
    assert log.metrics() == kept
    assert [record["epoch"] for record in read_lines(tmp_path, "timing.jsonl")] == [0, 1, 2]
    assert [record["step"] for record in read_lines(tmp_path, "events.jsonl")] == [0, 10, 20]


def test_restoring_mends_a_torn_or_shortened_metrics_file(tmp_path):
    log = RunLog(tmp_path)
    whole = b'{"epoch": 0}\n{"epoch": 1}\n'
    for damaged in (b"", b'{"epoch": 0}\n{"epo', b'{"epoch": 0}\n\0\0\0\0'):
        (tmp_path / "metrics.jsonl").write_bytes(damaged)
        log.restore(whole, epoch=2, step=8)
        assert log.metrics() == whole


def test_restoring_drops_timing_lines_that_nobody_can_read(tmp_path):
    (tmp_path / "timing.jsonl").write_bytes(b'rubbish\n{"epoch": 0}\n[]\n{"epoch": "x"}\n{"epoch": 5}\n{"epo')
    RunLog(tmp_path).restore(b"", epoch=5, step=8)
    assert read_lines(tmp_path, "timing.jsonl") == [{"epoch": 0}]


def test_a_torn_last_line_is_left_out_and_a_bad_one_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 0}\n{"epo')
    assert read_lines(tmp_path, "metrics.jsonl") == [{"epoch": 0}]
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 0}\nrubbish\n{"epoch": 2}\n')
    with pytest.raises(UserError, match=r"line 2 of .*metrics.jsonl"):
        read_lines(tmp_path, "metrics.jsonl")
    assert read_lines(tmp_path, "none.jsonl") == []


def test_a_run_folder_is_new_and_complete_from_the_start(tmp_path):
    run, _ = new_run_folder(Config(seed=3), str(tmp_path / "a" / "b"))
    assert read_config(run) == Config(seed=3)
    with pytest.raises(UserError, match=r"exists: choose another folder, or continue it with --resume"):
        new_run_folder(Config(), str(run))


def test_an_empty_folder_that_a_crash_left_behind_is_taken(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match=r"is an empty folder: begin a run in it with `bicovg train RECIPE --out"):
        read_config(tmp_path / "run")
    (tmp_path / "run" / ".config.json.tmp").write_text("{")  # killed before it was renamed
    with pytest.raises(UserError, match="is an empty folder"):
        read_config(tmp_path / "run")
    refuse_taken(tmp_path / "run")
    assert not find_begun(Config(seed=3), tmp_path / "run")
    lock = RunLock(tmp_path / "run")  # another process is about to write its own
    with pytest.raises(UserError, match="is in use by process"):
        new_run_folder(Config(seed=3), str(tmp_path / "run"))
    lock.release()
    run, lock = new_run_folder(Config(seed=3), str(tmp_path / "run"))
    lock.release()
    assert read_config(run) == Config(seed=3)
    assert {path.name for path in run.iterdir()} == {"config.json", "lock"}


def test_a_checkpoint_gets_the_metrics_as_they_were_written_whatever_became_of_the_file(tmp_path):
    log = RunLog(tmp_path)
    log.restore(b'{"epoch": 0}\n', epoch=1, step=4)
    (tmp_path / "metrics.jsonl").unlink()
    log.append("metrics.jsonl", {"epoch": 1})
    assert log.metrics() == b'{"epoch": 0}\n{"epoch": 1}\n'


def test_timing_that_is_no_text_does_not_stop_a_run_from_going_on(tmp_path):
    (tmp_path / "timing.jsonl").write_bytes(b'{"epoch": 0}\n\xff\xfe\n')
    RunLog(tmp_path).restore(b"", epoch=1, step=4)
    assert read_lines(tmp_path, "timing.jsonl") == [{"epoch": 0}]


def test_a_file_where_the_run_folder_should_be_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="choose a writable folder"):
        new_run_folder(Config(), str(tmp_path / "file" / "run"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is an empty folder"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not text"),
        (b"[]", "must be an object"),
        (b"{}", "field recipe is missing"),
    ],
)
def test_a_damaged_config_is_one_sentence(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_config(tmp_path)


def test_a_config_that_is_a_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UserError, match="not a plain file"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s.pop("fusion"), "the field fusion is missing"),
        (lambda s: s.pop("scope"), "the field scope is missing"),
        (lambda s: s["test"]["last"].pop("top5"), r"the field test\.last\.top5 is missing"),
        (lambda s: s.update(exit_blocks=None), "exit_blocks is None, not a list"),
        (lambda s: s.update(exit_blocks=[1, 0]), r"exit_blocks is \[1, 0\], not a list of blocks in order"),
        (lambda s: s.update(test=[]), r"test is \[\], not an object"),
        (lambda s: s["test"]["exits"].update(top1=[1.0]), r"test\.exits\.top1 has 1 values, not 2"),
        (lambda s: s["test"]["exits"].update(top1=[1.0, None]), r"top1\[1\] is None, not a percentage"),
        (lambda s: s["test"]["mean"].update(top1=float("nan")), "mean.top1 is nan, not a percentage"),
        (lambda s: s["test"]["mean"].update(top1=True), "mean.top1 is True, not a percentage"),
        (lambda s: s["test"]["mean"].update(top1=10**400), r"mean.top1 is 1000.*000, not a percentage"),
        (lambda s: s["test"]["best_test_chosen"].update(exit=2), "exit is 2, not a whole number from 0 to 1"),
        (lambda s: s["fusion"].update(train=[]), r"fusion\.train is \[\], not an object"),
        (lambda s: s["fusion"].update(augmented=3), r"fusion\.augmented is 3, not an object"),
        (lambda s: s.update(wall_seconds="1"), "wall_seconds is '1', not a finite number"),
        (lambda s: s.update(recipe="\ud800"), "holds half a character"),
    ],
)
def test_a_summary_that_does_not_fit_says_where_and_how_to_make_it_anew(tmp_path, change, reason):
    summary = json.loads(json.dumps(SUMMARY))
    write_json(make_run(tmp_path) / "summary.json", summary)
    assert read_summary(tmp_path) == summary
    change(summary)
    write_json(tmp_path / "summary.json", summary)
    with pytest.raises(UserError, match=rf"summary\.json.*{reason}.* make it anew with `bicovg eval"):
        read_summary(tmp_path)


def test_an_unfinished_run_says_how_to_finish_it(tmp_path):
    with pytest.raises(UserError, match="continue it with train --resume"):
        read_summary(make_run(tmp_path))
    (tmp_path / "summary.json").write_text("[1, 2")
    with pytest.raises(UserError, match="is not valid JSON"):
        read_summary(tmp_path)


def test_data_that_does_not_fit_the_config_is_refused(tmp_path):
    good = {"classes": [str(k) for k in range(10)], "mean": [0.5], "std": [0.2]}
    write_json(tmp_path / "data.json", good)
    assert read_data(tmp_path, Config()) == (good["classes"], [0.5], [0.2])
    for change in ({"classes": ["a"]}, {"mean": "x"}, {"std": [0.0]}, {"std": [0.1] * 3}, {"mean": [float("inf")]}):
        write_json(tmp_path / "data.json", good | change)
        with pytest.raises(UserError, match=rf"data\.json: {next(iter(change))}.* --resume"):
            read_data(tmp_path, Config())
