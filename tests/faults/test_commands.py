"""Every command on a damaged run folder: one sentence and an exit code, never a traceback, never a hang."""

import itertools
import os
import random
import shutil

import pytest
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


def commands(run, good, picture):
    return {
        "resume": ["train", "--resume", run],
        "eval": ["eval", run],
        "fuse": ["fuse", run],
        "predict": ["predict", run, picture],
        "predict fused": ["predict", run, picture, "--head", "fused"],
        "compare": ["compare", run, good],
        "report": ["report", run, "--out", run.with_name("page.html")],
        "checkpoint verify": ["checkpoint", "verify", run],
        "checkpoint list": ["checkpoint", "list", run],
    }


@pytest.mark.row("every command on a run folder with one damaged file")
def test_a_damaged_run_folder_is_one_sentence_in_every_command(nursery, scratch, row):
    good, run, picture = scratch / "good", scratch / "run", scratch / "picture.png"
    trial = nursery.run([*TINY, "--out", good])
    assert trial.code == 0, trial.output
    Image.new("L", (4, 4), 128).save(picture)
    files = sorted(name for name in os.listdir(good) if (good / name).is_file())
    everything = list(itertools.product(commands(run, good, picture).items(), files, DAMAGES.items()))
    random.Random(0).shuffle(everything)
    for (command, words), name, (label, damage) in everything[: count(len(everything), 40)]:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(good, run)
        damage(run / name)
        with row.trial(f"{command} with {name} {label}"):
            trial = nursery.run(words)
            assert "Traceback" not in trial.output, trial.output[-1500:]
            assert trial.code in (0, 2, 4), f"exit code {trial.code}:\n{trial.output[-1500:]}"
            if trial.code:
                assert sum(line.startswith("bicovg: ") for line in trial.output.splitlines()) == 1, trial.output
