"""NaN and Inf planted in a real run: it stops, names the block and the step, and has saved nothing bad."""

import itertools
import json

import pytest
from conftest import assert_same_state
from safetensors.torch import load
from settings import TINY, VARIANTS, count

from bicovg.checkpoint import MODEL, OPTIMIZER, list_checkpoints, verify_checkpoint

SITES = ("pixel", "activation", "loss", "gradient", "weight", "optimizer state")
RUNS = ("strict-interleaved", "hgb-summed-global", "grouped-interleaved", "end-to-end-summed")
AT = 5


def faults():
    """All 192, ordered so that the first 24 hold every site at every block, each in another kind of run."""
    for shift in range(8):
        for number, (site, block) in enumerate(itertools.product(SITES, range(4))):
            choice = (number + number // 4 + shift) % 8
            yield site, block, ("nan", "inf")[choice // 4], RUNS[choice % 4]


def assert_stored_values_are_finite(run):
    for checkpoint in list_checkpoints(run):
        assert verify_checkpoint(checkpoint) is None
        for name in (MODEL, OPTIMIZER):
            for key, tensor in load((checkpoint / name).read_bytes()).items():
                assert tensor.isfinite().all(), f"{key} of {checkpoint.name} is not finite"


def assert_named(run, variant, block, output):
    """The event and the sentence name the block (the unit's blocks, where it has several) and the step."""
    size = {"strict": 1, "end": 4}.get(variant.split("-")[0], 2)
    first = block // size * size
    name = f"block {block}" if size == 1 else f"blocks {first}-{first + size - 1}"
    event = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
    assert (event["step"], event["blocks"]) == (AT, name), event
    assert f"{name} was not finite at step {AT}" in output, output[-800:]


@pytest.mark.row("NaN or Inf planted at six places of every block")
def test_a_planted_value_stops_the_run_before_anything_is_lost(nursery, references, scratch, row):
    chosen = list(itertools.islice(faults(), count(192, 24)))
    assert len(set(chosen)) == len(chosen)
    for number, (site, block, value, variant) in enumerate(chosen):
        run = scratch / f"run-{number}"
        with row.trial(f"{value} in the {site} of block {block}, {variant}"):
            words = [*TINY, *VARIANTS[variant], "--out", run]
            trial = nursery.run(words, "plant_value", site=site, block=block, value=value, at=AT)
            assert trial.code == 3, f"exit code {trial.code}:\n{trial.output[-1500:]}"
            assert "Traceback" not in trial.output
            assert_stored_values_are_finite(run)
            if site != "optimizer state":  # that one shows in the loss of the next step, or when it is to be saved
                assert_named(run, variant, block, trial.output)
            trial = nursery.run(["train", "--resume", run])
            assert trial.code == 0, trial.output[-1500:]
            assert_same_state(run, references[variant][0])


def test_skip_goes_on_and_lists_what_it_skipped(nursery, scratch):
    words = [*TINY, "--train.nonfinite", "skip", "--out", scratch / "run"]
    trial = nursery.run(words, "plant_value", site="loss", block=1, value="nan", at=AT)
    assert trial.code == 0, trial.output
    (event,) = map(json.loads, (scratch / "run" / "events.jsonl").read_text().splitlines())
    assert (event["step"], event["unit"], event["blocks"]) == (AT, 1, "block 1")
    for line in (scratch / "run" / "metrics.jsonl").read_text().splitlines():
        assert "NaN" not in line
