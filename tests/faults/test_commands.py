"""Every command on a damaged run folder: one sentence and an exit code, never a traceback, never a hang."""

import copy
import io
import itertools
import json
import os
import random
import shutil
import traceback
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import pytest
from fuzz import places
from PIL import Image
from settings import TINY, count

DAMAGES = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "noise": lambda path: path.write_bytes(random.Random(path.name).randbytes(300)),
    "a list": lambda path: path.write_text("[]\n"),
    "an object": lambda path: path.write_text("{}\n"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}
LARGE = 10**400
VALUES = [None, True, -1, 0, 7, 0.5, 101.0, 10**30, LARGE, 1e308, 5e-324, float("nan"), float("inf"), "", "x", "[/x]"]
VALUES += ["\ud800", "A" * 3000, [], {}, [None], [[1]], [1] * 300, {"a": 1}]
CHECKED = ["summary.json", "analysis.json", "metrics.jsonl", "timing.jsonl", "early_exit.json", "env.json"]
CHECKED += ["config.json", "data.json"]


def commands(run, good, picture):
    made = run.parent / "made"
    return {
        "resume": ["train", "--resume", run],
        "eval": ["eval", run],
        "eval early exit": ["eval", run, "--early-exit"],
        "fuse": ["fuse", run],
        "predict": ["predict", run, picture],
        "predict fused": ["predict", run, picture, "--head", "fused"],
        "predict best": ["predict", run, picture, "--head", "best"],
        "predict early exit": ["predict", run, picture, "--early-exit", "0.5"],
        "compare": ["compare", run, good],
        "report": ["report", run, "--out", made / "page.html"],
        "report figures": ["report", run, "--figures", made / "figures", "--format", "svg"],
        "report tensorboard": ["report", run, "--tensorboard", made / "events"],
        "watch": ["watch", run, "--port", "0"],
        "export": ["export", run, "--head", "fused", "--format", "hub", "--out", made / "export"],
        "record": ["record", run, "--out", made / "record"],
        "checkpoint verify": ["checkpoint", "verify", run],
        "checkpoint list": ["checkpoint", "list", run],
    }


@pytest.fixture
def whole(nursery, scratch):
    """A finished run with every file a run folder can have, and an image to classify."""
    good, picture = scratch / "good", scratch / "picture.png"
    for words in ([*TINY, "--data.holdout", "0.1", "--out", good], ["eval", good, "--early-exit"]):
        trial = nursery.run(words)
        assert trial.code == 0, trial.output
    Image.new("L", (4, 4), 128).save(picture)
    return good, picture


@pytest.mark.row("every command on a run folder with one damaged file")
def test_a_damaged_run_folder_is_one_sentence_in_every_command(nursery, scratch, whole, row):
    good, picture = whole
    run = scratch / "run"
    files = sorted(name for name in os.listdir(good) if (good / name).is_file())
    everything = list(itertools.product(commands(run, good, picture).items(), files, DAMAGES.items()))
    random.Random(0).shuffle(everything)
    for (command, words), name, (label, damage) in everything[: count(len(everything), 100)]:
        for old in (run, scratch / "made"):
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(good, run)
        damage(run / name)
        with row.trial(f"{command} with {name} {label}"):
            trial = nursery.run(words, "look_once" if command == "watch" else None)
            assert "Traceback" not in trial.output, trial.output[-1500:]
            assert trial.code in (0, 2, 4), f"exit code {trial.code}:\n{trial.output[-1500:]}"
            if trial.code:
                assert sum(line.startswith("bicovg: ") for line in trial.output.splitlines()) == 1, trial.output


def spoil(text, is_lines, rng):
    """One value of a JSON file, or of one line of a line file, deleted or replaced; returns the text and what was done.

    Entries of lists count as one field, so that a large table is not drawn more often than a single number.
    """
    lines = text.splitlines() if is_lines else [text]
    at = rng.randrange(len(lines))
    tree = json.loads(lines[at])
    kinds = {}
    for path in places(tree):
        if path:
            kinds.setdefault(tuple("#" if isinstance(key, int) else key for key in path), []).append(path)
    *parents, key = rng.choice(kinds[rng.choice(sorted(kinds))])
    node = tree
    for parent in parents:
        node = node[parent]
    if rng.random() < 0.15:
        del node[key]
        done = "deleted"
    else:
        node[key] = copy.deepcopy(rng.choice(VALUES))
        done = f"= {node[key]!r:.40}"
    lines[at] = json.dumps(tree)
    return "".join(f"{line}\n" for line in lines), f"{'.'.join(map(str, [*parents, key]))} {done}"


def run_here(words):
    """A command in this process: its exit code, and what it wrote to stderr or how it fell."""
    from bicovg.cli import main

    errors = io.StringIO()
    with redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")), redirect_stderr(errors):
        try:
            return main([str(word) for word in words]), errors.getvalue()
        except Exception:
            return None, traceback.format_exc()


@pytest.mark.row("every command on a run folder with one wrong value")
def test_a_wrong_value_in_a_run_folder_is_one_sentence_in_every_command(scratch, whole, row, monkeypatch):
    def end(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("bicovg.watch.time", SimpleNamespace(sleep=end))
    good, picture = whole
    run, rng, texts = scratch / "run", random.Random(1), {name: (good / name).read_text() for name in CHECKED}
    shutil.copytree(good, run)
    words = commands(run, good, picture)
    for slow in ("resume", "eval early exit", "checkpoint verify", "checkpoint list"):  # they read config.json alone
        del words[slow]
    for _ in range(count(6000, 320)):
        name, command = rng.choice(CHECKED), rng.choice(sorted(words))
        text, done = spoil(texts[name], name.endswith(".jsonl"), rng)
        (run / name).write_text(text)
        shutil.rmtree(scratch / "made", ignore_errors=True)
        with row.trial(f"{command} with {name} {done}"):
            code, errors = run_here(words[command])
            assert code in (0, 2), f"exit code {code}:\n{errors[-1500:]}"
            assert code == 0 or errors.startswith("bicovg: "), errors
            assert code == 0 or errors.count("\n") == 1, errors
        for file, whole_text in texts.items():
            (run / file).write_text(whole_text)
