"""A run stopped at chosen steps trains on exactly the batches of one that was never stopped, each once."""

import random

import pytest
from conftest import assert_same_state
from settings import EPOCHS, STEPS, TINY, VARIANTS, count

LAST = STEPS * EPOCHS - 1


def stopping_points(rng):
    """Before the first step, at epoch edges, at the last step, several times inside one epoch, anywhere."""
    edges = [epoch * STEPS - 1 for epoch in range(1, EPOCHS)]
    yield [-1]
    yield [0, 1, 2]
    yield [-1, 0]
    yield edges
    yield [edge + 1 for edge in edges]
    yield [LAST - 1, LAST]
    yield [LAST]
    yield list(range(LAST))
    while True:
        yield sorted(rng.sample(range(LAST), rng.randint(1, 4)))


@pytest.mark.row("resume inside one epoch, at step 0, last step, epoch edges")
def test_a_resumed_run_sees_every_batch_once_and_the_same(nursery, references, scratch, row):
    rng, wanted = random.Random(0), count(80, 16)
    hashes = scratch / "uninterrupted"
    plain = nursery.run([*TINY, "--out", scratch / "plain"], "hash_batches", path=str(hashes))
    assert plain.code == 0, plain.output
    assert len(hashes.read_text().splitlines()) == LAST + 1
    for number, points in zip(range(wanted), stopping_points(rng), strict=False):
        variant = list(VARIANTS)[number % len(VARIANTS)]
        run, log = scratch / f"run-{number}", scratch / f"hashes-{number}"
        with row.trial(f"{variant} stopped after {points}"):
            words = [*TINY, *VARIANTS[variant], "--out", run]
            for point in points:
                trial = nursery.run(words, "hash_batches", path=str(log), stop_after=point)
                assert trial.code == 143, f"exit code {trial.code} at {point}:\n{trial.output[-1500:]}"
                words = ["train", "--resume", run]
            trial = nursery.run(words, "hash_batches", path=str(log))
            assert trial.code == 0, trial.output[-1500:]
            assert log.read_text() == hashes.read_text(), "the batches differ"
            assert_same_state(run, references[variant][0])
