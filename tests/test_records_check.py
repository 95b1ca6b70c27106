"""A record that contradicts itself, or the files of its runs, is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from record_cases import TOP1, Maker, edit, last_epoch

from bicovg.diagnostics import tail_retention
from bicovg.errors import UserError
from bicovg.records import read_record, write_record


def set_exits(tree: dict[str, Any]) -> None:
    tree["runs"][0]["exits"]["top1"] = [1.0, 2.0, 3.0, 4.0]


CONTRADICTIONS: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("lacks the fields wall_seconds", lambda t: t["runs"][0].pop("wall_seconds")),
    ("unknown fields fudge", lambda t: t.update(fudge=1)),
    ("not a percentage", lambda t: t["runs"][0]["mean"].update(top1=101.0)),
    ("above its top-5", lambda t: t["runs"][0]["mean"].update(top1=99.0)),
    ("last.top1 is 53.0", set_exits),
    ("DA is 0.5", lambda t: t["runs"][0].update(DA=0.5)),
    ("TR is 0.5", lambda t: t["runs"][0].update(TR=0.5)),
    ("best_test_chosen.exit is 2", lambda t: t["runs"][0]["best_test_chosen"].update(exit=2)),
    ("N_eff is 4", lambda t: t["runs"][0]["fusion"]["train"].update(N_eff=4)),
    ("add up to", lambda t: t["runs"][0]["fusion"]["train"].update(weights=[0.5] * 4)),
    ("fusion.train.weights has 1 values, not 4", lambda t: t["runs"][0]["fusion"]["train"].update(weights=[1.0])),
    ("seeds", lambda t: t.update(seeds=[1])),
    ("train.epochs 2, its record 3", lambda t: t.update(epochs=3)),
    ("model.scope 'strict', its record 'hgb'", lambda t: t.update(scope="hgb")),
    ("no runs", lambda t: t.update(runs=[])),
    ("fusion.heldout is missing", lambda t: t["runs"][0]["fusion"].pop("heldout")),
    ("exit_blocks is None", lambda t: t.update(exit_blocks=None)),
    ("exits.top1 is 3, not a list", lambda t: t["runs"][0]["exits"].update(top1=3)),
    ("wall_seconds is 'x'", lambda t: t["runs"][0].update(wall_seconds="x")),
    ("DA is nan", lambda t: t["runs"][0].update(DA=float("nan"))),
    ("best_test_chosen.exit is 4", lambda t: t["runs"][0]["best_test_chosen"].update(exit=4)),
    ("epochs is 'x'", lambda t: t.update(epochs="x")),
    ("afterwards is 'x', not a list", lambda t: t["runs"][0].update(afterwards="x")),
    ("heldout_top1 has 1 values, not 4", lambda t: t["runs"][0].update(heldout_top1=[50.0])),
]


@pytest.mark.parametrize(("message", "change"), CONTRADICTIONS, ids=[message for message, _ in CONTRADICTIONS])
def test_a_record_that_contradicts_itself_or_its_runs_is_refused(
    message: str, change: Callable[[dict[str, Any]], Any], make_run: Maker, tmp_path: Path
) -> None:
    write_record([make_run()], tmp_path / "record")
    edit(tmp_path / "record" / "record.json", change)
    with pytest.raises(UserError, match=message):
        read_record(tmp_path / "record")


def lift_top1(tree: dict[str, Any]) -> None:
    """Exit 0 by 0.3, and with it the one number derived from it."""
    top1 = tree["runs"][0]["exits"]["top1"]
    top1[0] += 0.3
    tree["runs"][0]["TR"] = tail_retention(top1)


def lift_top5(tree: dict[str, Any]) -> None:
    tree["runs"][0]["exits"]["top5"][2] += 0.3


LIFTS: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("top1", lift_top1),
    ("top5", lift_top5),
    ("mean_top1", lambda t: t["runs"][0]["mean"].update(top1=58.3)),
]


@pytest.mark.parametrize(("off", "fine"), [(0.05, True), (0.3, False)])
def test_a_summary_evaluated_in_another_process_may_be_off_by_a_few_images(
    off: float, fine: bool, make_run: Maker, tmp_path: Path
) -> None:
    run, out = make_run(), tmp_path / "record"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    (run / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps({**last, "mean_top1": 58.0 + off})]) + "\n")
    if not fine:
        with pytest.raises(UserError, match="other accuracies"):
            write_record([run], out)
        return
    write_record([run], out)
    (out / "s0" / "summary.json").unlink()  # nothing else vouches for the number then
    with pytest.raises(UserError, match="other accuracies"):
        read_record(out)


@pytest.mark.parametrize(("name", "change"), LIFTS, ids=[name for name, _ in LIFTS])
def test_accuracies_that_are_not_those_of_the_runs_last_epoch_are_refused(
    name: str, change: Callable[[dict[str, Any]], Any], make_run: Maker, tmp_path: Path
) -> None:
    write_record([make_run()], tmp_path / "record")
    (tmp_path / "record" / "s0" / "summary.json").unlink()  # as in records made before it was copied
    read_record(tmp_path / "record")
    edit(tmp_path / "record" / "record.json", change)
    with pytest.raises(UserError, match=rf"other accuracies \({name}\)"):
        read_record(tmp_path / "record")


def test_heldout_accuracies_are_those_of_the_last_epoch_too(make_run: Maker, tmp_path: Path) -> None:
    run = make_run()
    edit(run / "summary.json", lambda tree: tree.update(heldout_top1=[41.0, 50.0, 49.0, 48.0]))
    (run / "metrics.jsonl").write_text(json.dumps(last_epoch([41.0, 50.0, 49.0, 48.0]) | {"split": "heldout"}) + "\n")
    assert write_record([run], tmp_path / "record")["runs"][0]["heldout_top1"][3] == 48.0
    (run / "metrics.jsonl").write_text(json.dumps(last_epoch(TOP1) | {"split": "heldout"}) + "\n")
    with pytest.raises(UserError, match="other accuracies"):
        write_record([run], tmp_path / "other")


SUMMARY_LIES: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("mean", lambda t: t["runs"][0]["mean"].update(top5=84.5)),
    ("fusion", lambda t: t["runs"][0]["fusion"]["train"].update(top1=57.5)),
    ("fusion", lambda t: t["runs"][0]["fusion"].update(augmented=t["runs"][0]["fusion"]["train"])),
    ("DA", lambda t: t["runs"][0].update(DA=None)),
    ("wall_seconds", lambda t: t["runs"][0].update(wall_seconds=60.0)),
    ("engine", lambda t: t["runs"][0].update(engine="eager")),
    ("heldout_top1", lambda t: t["runs"][0].update(heldout_top1=[99.0] * 4)),
    ("parameters", lambda t: t.update(parameters=1233)),
    ("exit_blocks", lambda t: t.update(exit_blocks=[0, 1, 2, 4])),
]


@pytest.mark.parametrize(
    ("field", "change"), SUMMARY_LIES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(SUMMARY_LIES)]
)
def test_a_record_is_compared_with_the_summary_beside_it(
    field: str, change: Callable[[dict[str, Any]], Any], make_run: Maker, tmp_path: Path
) -> None:
    write_record([make_run()], tmp_path / "record")
    edit(tmp_path / "record" / "record.json", change)
    with pytest.raises(UserError, match=rf"s0/summary\.json has another {field} than"):
        read_record(tmp_path / "record")
    (tmp_path / "record" / "s0" / "summary.json").unlink()
    edit(tmp_path / "record" / "record.json", lambda tree: tree["runs"][0].pop("afterwards"))
    assert read_record(tmp_path / "record")["seeds"] == [0]  # as one made before summaries were copied


BESIDE = [("env.json", field, "another") for field in ("commit", "gpu", "torch", "typed")]
BESIDE += [("timing.jsonl", field, 7) for field in ("images_per_second", "peak_memory_bytes")]


@pytest.mark.parametrize(("name", "field", "value"), BESIDE)
def test_a_record_is_compared_with_env_and_timing_beside_it(
    name: str, field: str, value: Any, make_run: Maker, tmp_path: Path
) -> None:
    write_record([make_run()], tmp_path / "record")
    edit(tmp_path / "record" / "record.json", lambda tree: tree["runs"][0].update({field: value}))
    with pytest.raises(UserError, match=rf"s0/{name} has another {field} than"):
        read_record(tmp_path / "record")
    (tmp_path / "record" / "s0" / name).unlink()
    assert read_record(tmp_path / "record")["runs"][0][field] == value
