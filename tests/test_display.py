"""What a person sees: a live table with a bar on a terminal, one plain line per epoch when redirected."""

import io

import pytest
from rich.console import Console

from bicovg.config import Config
from bicovg.display import Display, clock, combined_rows, summary_table

METRICS = {
    "epoch": 1,
    "step": 44,
    "lr": 1e-3,
    "loss": [0.5, 0.25],
    "split": "heldout",
    "top1": [90.0, 95.5],
    "top5": [99.0, 100.0],
    "mean_top1": 96.25,
}
TIMING = {"images_per_second": 1234.0, "loader_wait_share": 0.0, "peak_memory_bytes": 2_500_000_000}
SUMMARY = {
    "recipe": "digits",
    "seed": 3,
    "scope": "strict",
    "exit_blocks": [1, 3],
    "test": {
        "exits": {"top1": [90.0, 95.0], "top5": [99.0, 100.0]},
        "last": {"top1": 95.0, "top5": 100.0},
        "best_test_chosen": {"exit": 1, "top1": 95.0, "top5": 100.0},
        "best_heldout_chosen": None,
        "mean": {"top1": 96.0, "top5": 100.0},
    },
    "fusion": {"train": {"top1": 97.0, "top5": 100.0, "weights": [0.25, 0.75], "N_eff": 1.6}, "heldout": None},
}


def show(terminal: bool) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=100, height=40)
    with Display(Config(), [1, 3], "eager", console) as display:
        display.step(1, 17, 22)
        display.update(METRICS, TIMING, 61.0)
    return stream.getvalue()


def test_a_terminal_shows_every_block_the_bar_and_the_status() -> None:
    text = show(terminal=True)
    for needle in ("heldout top-1 %", "heldout top-5 %", "0.2500", "95.50", "96.25", "17/22", "ETA 1:01", "2.50 GB"):
        assert needle in text, needle
    assert text.count("strict") >= 1


def test_redirected_output_is_one_plain_line_per_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(terminal=False) == ""
    title, line = capsys.readouterr().out.splitlines()
    assert title == "digits, seed 0, scope strict, engine eager"
    assert line.startswith("epoch 2/30  lr 1.00e-03  1234 img/s  peak 2.50 GB  ETA 1:01  loss 0.375")
    assert line.endswith("heldout top-1 by block 90.0 95.5  mean 96.25")
    assert "\x1b" not in title + line


def test_a_slow_loader_is_named() -> None:
    display = Display(Config(), [1, 3], "eager")
    assert "LOADER" in display.line(METRICS, {**TIMING, "loader_wait_share": 0.5}, 0.0)
    assert "LOADER" not in display.line(METRICS, TIMING, 0.0)


def test_an_epoch_without_evaluation_shows_its_loss_alone() -> None:
    bare = {key: METRICS[key] for key in ("epoch", "step", "lr", "loss")}
    display = Display(Config(), [1, 3], "eager")
    assert display.line(bare, TIMING, 0.0).endswith("loss 0.375")
    stream = io.StringIO()
    Console(file=stream, width=100).print(display.table(bare))
    assert "0.5000" in stream.getvalue()


def test_summary_names_every_way_to_combine_the_exits() -> None:
    stream = io.StringIO()
    Console(file=stream, width=100).print(summary_table(SUMMARY))
    text = stream.getvalue()
    for needle in (
        "block 1",
        "block 3",
        "0.750",
        "best block (test-chosen)",
        "mean of blocks",
        "fused (fitted on train)",
    ):
        assert needle in text, needle
    assert "held-out" not in text


def test_a_recipe_named_in_brackets_is_printed_as_it_is() -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(summary_table({**SUMMARY, "recipe": "[/x]"}))
    assert "[/x], seed 3" in out.getvalue()
    terminal = Console(file=io.StringIO(), width=120, force_terminal=True)
    with Display(Config(recipe="[/x]"), [1, 3], "eager", terminal) as display:
        display.update(METRICS, TIMING, 1.0)
    assert "[/x], seed 0" in terminal.file.getvalue()  # type: ignore[attr-defined]


def test_a_single_exit_has_no_mean_of_blocks() -> None:
    single = {**SUMMARY, "exit_blocks": [3], "fusion": {"train": None, "heldout": None}}
    assert [label for label, _ in combined_rows(single)] == ["last block", "best block (test-chosen)"]


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (61.4, "1:01"), (3723, "1:02:03")])
def test_clock_shows_hours_only_where_there_are_any(seconds: float, text: str) -> None:
    assert clock(seconds) == text
