"""Damaged and hostile run folders: the damage is found, an older checkpoint is used, nothing runs, nothing escapes."""

import base64
import io
import json
import os
import pickle
import random
import shutil
import zipfile

import pytest
import torch
from conftest import assert_same_state
from safetensors.torch import load, save
from settings import TINY, VARIANTS, count

from bicovg.checkpoint import (
    FILES,
    MANIFEST,
    METRICS,
    MODEL,
    OPTIMIZER,
    PROGRESS,
    find_checkpoint,
    list_checkpoints,
    make_manifest,
    verify_checkpoint,
)
from bicovg.identity import identify
from bicovg.runlog import read_config

VARIANT = "strict-interleaved"


@pytest.fixture
def stopped(nursery, scratch):
    """A run stopped after a few steps, with two good checkpoints."""
    run = scratch / "stopped"
    words = [*TINY, *VARIANTS[VARIANT], "--out", run]
    trial = nursery.run(words, "hash_batches", path=str(scratch / "hashes"), stop_after=6)
    assert trial.code == 143, trial.output
    assert len(list_checkpoints(run)) == 2
    return run


def copy_run(source, target):
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)
    return list_checkpoints(target)


def reseal(checkpoint):
    """Make the manifest agree with whatever the files hold now: damage that checksums cannot see."""
    files = {name: (checkpoint / name).read_bytes() for name in FILES}
    owner = json.loads((checkpoint / MANIFEST).read_text())["owner"]
    (checkpoint / MANIFEST).write_bytes(make_manifest(files, owner))


def assert_walks_back(run, older, newest):
    found, skipped = find_checkpoint(run, identify(read_config(run)))
    assert found == older, f"{newest.name} was taken although it is damaged"
    assert len(skipped) == 1
    assert newest.name in skipped


@pytest.mark.row("truncation of any checkpoint file")
def test_a_truncated_file_is_found_and_walked_back_from(stopped, scratch, row):
    rng, run = random.Random(0), scratch / "run"
    older, newest = copy_run(stopped, run)
    names = [*FILES, MANIFEST]
    for number in range(count(160, 40)):
        path = newest / names[number % len(names)]
        whole = path.read_bytes()
        keep = rng.choice([0, 1, len(whole) - 1, rng.randrange(len(whole))])
        with row.trial(f"{path.name} cut to {keep} of {len(whole)} bytes"):
            path.write_bytes(whole[:keep])
            assert_walks_back(run, older, newest)
        path.write_bytes(whole)
    assert verify_checkpoint(newest) is None


@pytest.mark.row("single-bit flips in any checkpoint file")
def test_a_single_flipped_bit_is_found_and_walked_back_from(stopped, scratch, row):
    rng, run = random.Random(0), scratch / "run"
    older, newest = copy_run(stopped, run)
    sizes = {name: (newest / name).stat().st_size for name in (*FILES, MANIFEST)}
    for number in range(count(1000, 200)):
        # every file in turn, then wherever the bytes are
        name = list(sizes)[number % 5] if number % 2 else rng.choices(list(sizes), sizes.values())[0]
        whole, bit = (newest / name).read_bytes(), rng.randrange(8 * sizes[name])
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        with row.trial(f"bit {bit} of {name}"):
            (newest / name).write_bytes(flipped)
            assert_walks_back(run, older, newest)
        (newest / name).write_bytes(whole)
    assert verify_checkpoint(newest) is None


def damages(newest, older):
    """(label, function) of the row's faults: what is missing, empty, swapped, of another schema or shape."""
    for name in (*FILES, MANIFEST):
        yield f"{name} missing", lambda name=name: (newest / name).unlink()
        yield f"{name} empty", lambda name=name: (newest / name).write_bytes(b"")
        yield f"{name} a folder", lambda name=name: ((newest / name).unlink(), (newest / name).mkdir())
        if name not in (MANIFEST, METRICS):
            yield f"{name} of the older one", lambda name=name: shutil.copy(older / name, newest / name)
    pairs = [(MODEL, OPTIMIZER), (MODEL, PROGRESS), (PROGRESS, METRICS), (OPTIMIZER, METRICS)]
    for one, two in pairs:
        yield f"{one} and {two} swapped", lambda one=one, two=two: swap(newest / one, newest / two)
    for schema in (1, 3, 10**9, "2", None, 2.0):
        yield f"schema {schema!r}", lambda schema=schema: change_manifest(newest, lambda m: m.update(schema=schema))
    yield "manifest lists nothing", lambda: change_manifest(newest, lambda m: m.update(files={}))
    yield "checkpoint empty", lambda: [path.unlink() for path in newest.iterdir()]
    for label, change in reshapes():
        yield label, lambda change=change: change_tensors(newest, change)
    yield "progress of another run", lambda: change_progress(newest, step=10**6)
    yield "progress without end", lambda: change_progress(newest, seconds=float("inf"))
    yield "progress negative", lambda: change_progress(newest, epoch=-1)


def reshapes():
    def first(tensors, key="conv.weight"):
        return next(name for name in sorted(tensors) if key in name)

    def flatten(model, _):
        model[first(model)] = model[first(model)].flatten()

    def narrow(model, _):
        model[first(model)] = model[first(model)].half()

    def drop(model, _):
        del model[first(model)]

    def add(model, _):
        model["units.9.stranger"] = torch.zeros(3)

    def lose_moment(_, moments):
        del moments[first(moments, "exp_avg_sq")]

    def bend_moment(_, moments):
        moments[first(moments, "exp_avg")] = torch.zeros(1)

    def widen_moment(_, moments):
        moments[first(moments, "exp_avg")] = moments[first(moments, "exp_avg")].double()

    def strange_owner(_, moments):
        moments["7|nobody|exp_avg"] = torch.zeros(1)

    for change in (flatten, narrow, drop, add, lose_moment, bend_moment, widen_moment, strange_owner):
        yield f"tensors resealed after {change.__name__}", change


def swap(one, two):
    one.rename(one.with_name("aside"))
    two.rename(one)
    one.with_name("aside").rename(two)


def change_manifest(checkpoint, change):
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    change(manifest)
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


def change_tensors(checkpoint, change):
    model, moments = (load((checkpoint / name).read_bytes()) for name in (MODEL, OPTIMIZER))
    change(model, moments)
    for name, tensors in ((MODEL, model), (OPTIMIZER, moments)):
        (checkpoint / name).write_bytes(save(tensors))
    reseal(checkpoint)


def change_progress(checkpoint, **values):
    progress = json.loads((checkpoint / PROGRESS).read_text())
    (checkpoint / PROGRESS).write_text(json.dumps(progress | values))
    reseal(checkpoint)


@pytest.mark.row("missing, empty, swapped, newer-schema, wrong-shape files")
def test_a_checkpoint_that_does_not_fit_is_skipped_by_name(nursery, references, stopped, scratch, row):
    run = scratch / "run"
    labels = [label for label, _ in damages(stopped, stopped)]
    assert len(labels) == 41
    for number, label in enumerate(labels):
        older, newest = copy_run(stopped, run)
        list(damages(newest, older))[number][1]()
        with row.trial(label):
            trial = nursery.run(["train", "--resume", run])
            assert trial.code == 0, trial.output[-1500:]
            assert f"skipped {newest.name}: " in trial.output, trial.output[:500]
            assert f"resuming {run} from {older.name}" in trial.output
            assert_same_state(run, references[VARIANT][0])


def test_when_no_checkpoint_can_be_used_nothing_is_begun_anew(nursery, stopped, scratch):
    for checkpoint in copy_run(stopped, scratch / "run"):
        (checkpoint / MODEL).write_bytes(b"")
    before = (scratch / "run" / "metrics.jsonl").read_bytes()
    trial = nursery.run(["train", "--resume", scratch / "run"])
    assert trial.code == 2
    assert "none of the 2 checkpoints" in trial.output
    assert "Traceback" not in trial.output
    assert (scratch / "run" / "metrics.jsonl").read_bytes() == before


class Payload:
    """Unpickled, it writes a file: the proof that something ran."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def zip_bomb(names):
    """A zip archive, as torch.save writes them, that unpacks to a hundred times its size."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, b"\0" * 10_000_000)
    return buffer.getvalue()


def header_bomb(shape, end):
    """A safetensors file whose header promises far more than the file holds."""
    header = json.dumps({"units.0.x": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}).encode()
    return len(header).to_bytes(8, "little") + header + b"\0" * 64


def attacks(run, newest, outside, witness):
    """(label, function, files resealed) of the row's 25 attacks."""
    evil = pickle.dumps(Payload(witness))
    stream = io.BytesIO()
    torch.save(Payload(witness), stream)
    for name in FILES:
        yield f"pickle as {name}", lambda name=name: (newest / name).write_bytes(evil)
    yield "torch archive as weights", lambda: (newest / MODEL).write_bytes(stream.getvalue())
    yield "torch archive as optimizer state", lambda: (newest / OPTIMIZER).write_bytes(stream.getvalue())
    encoded = json.dumps({"__reduce__": base64.b64encode(evil).decode()}).encode()
    yield "pickle inside JSON", lambda: (newest / PROGRESS).write_bytes(encoded)
    yield "zip bomb as weights", lambda: (newest / MODEL).write_bytes(zip_bomb(["archive/data.pkl", "archive/data/0"]))
    yield "zip with a path upwards", lambda: (newest / MODEL).write_bytes(zip_bomb(["../../outside/escaped"]))
    for label, shape, end in (
        ("more than the file", [10**6, 10**6], 4 * 10**12),
        ("beyond 64 bits", [2**62, 2**62], 2**63 - 1),
        ("no bytes for many values", [10**9], 64),
    ):
        yield f"header promises {label}", lambda s=shape, e=end: (newest / MODEL).write_bytes(header_bomb(s, e))
    huge = (2**40).to_bytes(8, "little") + b"{}"
    yield "header longer than the file", lambda: (newest / OPTIMIZER).write_bytes(huge)
    yield "nested JSON", lambda: (newest / PROGRESS).write_bytes(b"[" * 60_000)
    yield "manifest of 100 MB", lambda: os.truncate(newest / MANIFEST, 10**8)
    yield "weights a sparse terabyte", lambda: os.truncate(newest / MODEL, 10**12)
    climb = {"../../outside/escaped": {"bytes": 1, "sha256": "0" * 64}}
    yield "manifest names a path upwards", lambda: change_manifest(newest, lambda m: m["files"].update(climb))
    yield "tensor name with a path", lambda: change_tensors(newest, lambda m, o: m.update({"../../x": torch.zeros(1)}))
    yield "weights a link", lambda: replace_by_link(newest / MODEL, outside / "precious")
    yield "weights a pipe", lambda: ((newest / MODEL).unlink(), os.mkfifo(newest / MODEL))
    yield "checkpoint a link", lambda: (shutil.rmtree(newest), newest.symlink_to(outside))
    yield "metrics a link", lambda: replace_by_link(run / "metrics.jsonl", outside / "precious")
    yield "timing a link", lambda: replace_by_link(run / "timing.jsonl", outside / "precious")
    yield "temporary file a link", lambda: (run / ".env.json.tmp").symlink_to(outside / "precious")
    trap = newest.parent / ".partial-trap"
    yield "partial folder a link", lambda: trap.symlink_to(outside)


def replace_by_link(path, target):
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.row("malicious pickles, zip bombs, path traversal, symlinks")
def test_a_hostile_run_folder_runs_nothing_and_writes_nothing_outside(nursery, stopped, scratch, row):
    run, outside, witness = scratch / "run", scratch / "outside", scratch / "witness"
    labels = [label for label, _ in attacks(stopped, stopped, outside, witness)]
    assert len(labels) == 25
    for number, label in enumerate(labels):
        _, newest = copy_run(stopped, run)
        shutil.rmtree(outside, ignore_errors=True)
        outside.mkdir()
        (outside / "precious").write_text("untouched")
        list(attacks(run, newest, outside, witness))[number][1]()
        if "as " in label or "header" in label or "JSON" in label:
            reseal(newest)  # or the checksum would stop it before the parser sees it
        with row.trial(label):
            for words in (["train", "--resume", run], ["eval", run], ["checkpoint", "verify", run]):
                trial = nursery.run(words)
                assert trial.code in (0, 1, 2), f"{words[0]}: exit code {trial.code}:\n{trial.output[-1500:]}"
                assert "Traceback" not in trial.output, trial.output[-1500:]
            assert not witness.exists(), "something was executed"
            assert sorted(os.listdir(outside)) == ["precious"], "something was written outside"
            assert (outside / "precious").read_text() == "untouched"
