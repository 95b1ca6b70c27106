"""Records: made of finished runs alone, nothing invented, nothing contradictory, nothing of the machine's folders."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from record_cases import WEIGHTS, Maker, edit, make_summary

from bicovg.cli import build_parser, main, split_overrides
from bicovg.config import override
from bicovg.errors import UserError
from bicovg.recipes import get_recipe
from bicovg.records import load_records, read_record, reproduce, seed_values, without_folders, write_record


def test_a_record_holds_every_seeds_own_values(make_run: Maker, tmp_path: Path) -> None:
    out = tmp_path / "records" / "digits"
    out.parent.mkdir()
    assert main(["record", str(make_run(2)), str(make_run(0)), "--out", str(out)]) == 0
    record = load_records(tmp_path / "records")["digits"]
    assert record["seeds"] == [0, 2]
    assert seed_values(record, "mean", "top1") == [58.0, 60.0]
    assert seed_values(record, "exits", "top5", 3) == [79.0, 79.0]
    assert seed_values(record, "fusion", "train", "weights") == [WEIGHTS, WEIGHTS]
    assert (record["scope"], record["epochs"], record["recipe_epochs"]) == ("strict", 2, 30)
    run = record["runs"][0]
    assert (run["images_per_second"], run["peak_memory_bytes"], run["wall_seconds"]) == (20.0, 1, 61.5)
    assert (run["gpu"], run["torch"], run["commit"]) == ("NVIDIA H200", "2.11.0", "abc+")


def test_what_a_run_lacks_is_null(make_run: Maker, tmp_path: Path) -> None:
    run = make_run()
    for name in ("env.json", "timing.jsonl"):
        (run / name).unlink()
    edit(run / "summary.json", lambda tree: tree["test"].pop("diagnostics"))
    edit(run / "summary.json", lambda tree: tree.update(fusion={"train": None, "heldout": None}))
    entry = write_record([run], tmp_path / "record")["runs"][0]
    for field in ("gpu", "torch", "commit", "typed", "images_per_second", "peak_memory_bytes", "DA", "TR"):
        assert entry[field] is None, field
    assert entry["fusion"] == {"train": None, "augmented": None, "heldout": None}
    assert seed_values(read_record(tmp_path / "record"), "fusion", "train", "top1") == [None]


def test_runs_that_differ_in_more_than_their_seed_are_refused(make_run: Maker, tmp_path: Path) -> None:
    runs = [make_run(0), make_run(1, **{"optim.lr": 0.5})]
    with pytest.raises(UserError, match=r"differs from .* in optim\.lr"):
        write_record(runs, tmp_path / "record")
    assert not (tmp_path / "record").exists()
    with pytest.raises(UserError, match="name one twice"):
        write_record([make_run(0), make_run(0)], tmp_path / "record")


def test_where_and_how_fast_seeds_ran_may_differ(make_run: Maker, tmp_path: Path) -> None:
    changes = {"data.root": "/mnt/elsewhere", "train.threads": 3, "train.engine": "eager"}
    write_record([make_run(0), make_run(1, **changes)], tmp_path / "record")
    for path in (tmp_path / "record").rglob("*"):
        assert not path.is_file() or "/mnt" not in path.read_text(), path


def test_no_committed_record_names_a_folder_of_a_machine() -> None:
    root = Path(__file__).resolve().parents[1]
    for folder in (root / "records", root / "benchmarks" / "results" / "engines"):
        for path in folder.rglob("*.json*"):
            assert "/root" not in path.read_text(), path


def test_an_unfinished_run_is_refused(make_run: Maker, tmp_path: Path) -> None:
    run = make_run()
    edit(run / "summary.json", lambda tree: tree.update(epochs=1))
    with pytest.raises(UserError, match="finish the run"):
        write_record([run], tmp_path / "record")
    (run / "summary.json").unlink()
    with pytest.raises(UserError, match="unfinished"):
        write_record([run], tmp_path / "record")


def test_metrics_that_stop_early_are_refused_and_nothing_is_left_behind(make_run: Maker, tmp_path: Path) -> None:
    run = make_run()
    (run / "metrics.jsonl").write_text('{"epoch": 0, "lr": 0.1, "loss": [1.0, 1.0, 1.0, 1.0]}\n')
    with pytest.raises(UserError, match="does not end with epoch 1"):
        write_record([run], tmp_path / "record")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


def test_summary_and_env_are_copied_without_folders_of_the_machine(make_run: Maker, tmp_path: Path) -> None:
    run = make_run()
    edit(run / "summary.json", lambda tree: tree.update(note="/mnt/x"))
    edit(run / "env.json", lambda tree: tree.update(platform="Linux", home="/mnt/x"))
    write_record([run], tmp_path / "record")
    copies = tmp_path / "record" / "s0"
    kept = json.loads((run / "summary.json").read_text())
    del kept["note"]
    assert json.loads((copies / "summary.json").read_text()) == kept
    known = {"commit": "abc+", "torch": "2.11.0", "gpu": "NVIDIA H200", "command": "bicovg train --out run7"}
    unknown = dict.fromkeys(("device", "cuda", "python"))
    assert json.loads((copies / "env.json").read_text()) == known | unknown
    (run / "env.json").unlink()
    write_record([run], tmp_path / "record", replace=True)
    assert not (copies / "env.json").exists()


def test_a_record_says_what_was_run_after_training(make_run: Maker, tmp_path: Path) -> None:
    run, out = make_run(), tmp_path / "record"
    assert write_record([run], out)["runs"][0]["afterwards"] == []
    fused = make_summary(get_recipe("digits"))["fusion"]["train"]
    later = {"augmented": fused, "heldout": fused, "heldout_temperatures": fused}
    edit(run / "summary.json", lambda tree: tree["fusion"].update(later))
    curve = {"exit_blocks": [0, 1, 2, 3], "calibrated_on": "train", "measured_on": "test", "rules": {}}
    (run / "early_exit.json").write_text(json.dumps(curve))
    (entry,) = write_record([run], out, replace=True)["runs"]
    words = ["fuse RUN --on augmented", "fuse RUN --on heldout --temperatures", "eval RUN --early-exit"]
    assert entry["afterwards"] == [f"bicovg {command}" for command in words]
    for command in entry["afterwards"]:
        build_parser().parse_args(command.split()[1:])
    edit(out / "record.json", lambda tree: tree["runs"][0]["afterwards"].pop())
    with pytest.raises(UserError, match="afterwards"):
        read_record(out)
    for name in ("afterwards", "heldout_top1"):
        edit(out / "record.json", lambda tree, name=name: tree["runs"][0].pop(name))  # type: ignore[misc]
    assert read_record(out)["seeds"] == [0]  # as older records are


@pytest.mark.parametrize("content", ["", "\x00\xff", "[]", "{}", "7"])
@pytest.mark.parametrize("name", ["early_exit.json", "env.json", "metrics.jsonl", "timing.jsonl", "summary.json"])
def test_a_damaged_file_of_a_run_is_named_and_nothing_is_left_behind(
    name: str, content: str, make_run: Maker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    (run / name).write_text(f"{content}\n" if content else "", encoding="latin-1")
    code = main(["record", str(run), "--out", str(tmp_path / "record")])
    if (name, content) not in (("timing.jsonl", ""), ("env.json", "{}")):  # those say nothing wrong
        assert code == 2
        (sentence,) = capsys.readouterr().err.splitlines()
        assert f"{run}/{name}" in sentence
        assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


def test_a_record_outlives_settings_that_a_later_version_adds(make_run: Maker, tmp_path: Path) -> None:
    write_record([make_run()], tmp_path / "record")
    edit(tmp_path / "record" / "s0" / "config.json", lambda tree: tree["fusion"].clear())
    assert read_record(tmp_path / "record")["seeds"] == [0]


def test_an_existing_record_is_replaced_only_on_request(make_run: Maker, tmp_path: Path) -> None:
    out = tmp_path / "record"
    write_record([make_run(0)], out)
    with pytest.raises(UserError, match="--replace"):
        write_record([make_run(1)], out)
    assert read_record(out)["seeds"] == [0]
    write_record([make_run(1)], out, replace=True)
    assert read_record(out)["seeds"] == [1]
    assert sorted(path.name for path in out.iterdir()) == ["record.json", "s1"]


def test_seeds_that_ran_later_are_added_to_a_record(make_run: Maker, tmp_path: Path) -> None:
    out = tmp_path / "record"
    assert main(["record", str(make_run(1)), "--out", str(out)]) == 0
    kept = read_record(out)["runs"][0]
    edit(out / "s1" / "config.json", lambda tree: tree["fusion"].clear())  # as an older version would have written it
    assert main(["record", str(make_run(2)), str(make_run(0)), "--out", str(out), "--add"]) == 0
    record = read_record(out)
    assert record["seeds"] == [0, 1, 2]
    assert record["runs"][1] == kept
    assert seed_values(record, "mean", "top1") == [58.0, 59.0, 60.0]
    assert sorted(path.name for path in out.iterdir()) == ["record.json", "s0", "s1", "s2"]


def test_what_does_not_belong_to_a_record_is_not_added(make_run: Maker, tmp_path: Path) -> None:
    out = tmp_path / "record"
    with pytest.raises(UserError, match="does not exist"):
        write_record([make_run(0)], out, add=True)
    write_record([make_run(0)], out)
    before = tree_of(out)
    with pytest.raises(UserError, match="has seed 0 already"):
        write_record([make_run(1), make_run(0)], out, add=True)
    with pytest.raises(UserError, match=r"differ from .* in model\.dropout: record them apart"):
        write_record([make_run(1, **{"model.dropout": 0.5})], out, add=True)
    edit(out / "s0" / "config.json", lambda tree: tree["train"].pop("micro_batches"))  # as an older version wrote it
    before = tree_of(out)
    with pytest.raises(UserError, match=r"differ from .* in train\.micro_batches: record them apart"):
        write_record([make_run(1, **{"train.micro_batches": 2})], out, add=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no record\.json"):
        write_record([make_run(1)], tmp_path / "empty", add=True)
    assert tree_of(out) == before


def tree_of(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def test_replace_removes_nothing_but_a_record(make_run: Maker, tmp_path: Path) -> None:
    run, precious = make_run(), tmp_path / "precious"
    (precious / "thesis").mkdir(parents=True)
    (precious / "thesis" / "text").write_text("years")
    (tmp_path / "file").write_text("")
    before = tree_of(tmp_path)
    for out in (precious, tmp_path / "file"):
        with pytest.raises(UserError, match=r"no record\.json"):
            write_record([run], out, replace=True)
    assert tree_of(tmp_path) == before


def test_a_record_is_not_written_over_or_into_or_around_its_run(
    make_run: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    (run / "record.json").write_text("{}")  # even where it looks like a record
    (run.parent / "record.json").write_text("{}")
    (tmp_path / "link").symlink_to(run)
    monkeypatch.chdir(run)
    before = tree_of(tmp_path)
    outs = [run, run / "inside", run.parent, tmp_path, tmp_path / "link", Path(), Path(".."), Path("/")]
    for out in outs:
        with pytest.raises(UserError, match="a folder of its own"):
            write_record([Path()], out, replace=True)
    assert tree_of(tmp_path) == before


def test_a_failed_replacement_leaves_the_old_record(
    make_run: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rename = tmp_path / "record", Path.rename
    write_record([make_run(0)], out)
    runs, before = [make_run(1)], tree_of(out)

    def fail(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise OSError(28, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(UserError, match="No space left"):
        write_record(runs, out, replace=True)
    assert tree_of(out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["record", "runs"]


def test_a_folder_with_a_drafts_name_is_left_alone(make_run: Maker, tmp_path: Path) -> None:
    (tmp_path / ".record.tmp").mkdir()
    (tmp_path / ".record.tmp" / "text").write_text("years")
    write_record([make_run()], tmp_path / "record")
    assert (tmp_path / ".record.tmp" / "text").read_text() == "years"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"seed": 3, "train.epochs": 100, "train.clip_norm": None, "train.precision": "float32"},
        {"model.alignment": True, "model.scales": ((1,),) * 16, "data.holdout": 0.02, "optim.lr": 0.1},
    ],
)
def test_the_recorded_command_gives_the_same_config_again(changes: dict[str, Any]) -> None:
    config = override(get_recipe("tiny-imagenet-bicovg"), changes)
    command = reproduce(override(config, {"data.root": "/mnt/elsewhere", "train.threads": 4}))
    assert command is not None
    args = build_parser().parse_args(command.split()[1:])
    recipe = get_recipe(args.recipe)
    assert override(recipe, split_overrides(args, recipe)) == config


def test_a_recipe_that_is_gone_has_no_command() -> None:
    assert reproduce(replace(get_recipe("digits"), recipe="digits-of-old")) is None


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("bicovg train digits --out runs/a/b", "bicovg train digits --out runs/a/b"),
        ("bicovg train --data.root /mnt/d/sets --seed 1", "bicovg train --data.root sets --seed 1"),
        ("bicovg train --data.root=/mnt/d/sets", "bicovg train --data.root=sets"),
        (None, None),
    ],
)
def test_absolute_folders_are_cut_from_a_typed_command(typed: str | None, kept: str | None) -> None:
    assert without_folders(typed) == kept


def test_a_run_as_the_trainer_leaves_it_fills_every_field_but_those_of_a_gpu(tmp_path: Path) -> None:
    tiny = ["--train.epochs", "1", "--model.width", "0.25", "--data.holdout", "0.1", "--train.threads", "1"]
    assert main(["train", "digits", *tiny, "--fusion.steps", "5", "--out", str(tmp_path / "run")]) == 0
    assert main(["fuse", str(tmp_path / "run"), "--on", "augmented"]) == 0
    entry = write_record([tmp_path / "run"], tmp_path / "record")["runs"][0]
    absent = {"gpu"} if torch.version.cuda else {"gpu", "cuda"}  # a build for CUDA runs without a GPU too
    assert {field for field, value in entry.items() if value is None} - {"commit"} == absent
    assert entry["afterwards"] == ["bicovg fuse RUN --on augmented"]
    assert all(entry["fusion"].values())


def test_the_records_of_the_repository_hold() -> None:
    folder = Path(__file__).resolve().parents[1] / "records"
    if not folder.is_dir():
        pytest.skip("the repository has no records yet")
    assert load_records(folder).keys() == {path.parents[1].name for path in folder.glob("*/s*/config.json")}
