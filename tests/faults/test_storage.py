"""Disks that are full, read-only or forbidden: the run ends with one sentence, its last good checkpoint intact."""

import itertools
import os
import shutil
import subprocess
from contextlib import contextmanager

import pytest
from conftest import assert_same_state
from settings import TINY, VARIANTS, count

from bicovg.checkpoint import FILES, list_checkpoints, verify_checkpoint

VARIANT = "strict-interleaved"
NOBODY = 65534
ROOT = os.geteuid() == 0


def can_mount(folder):
    """Whether this machine lets the tests mount a disk of their own."""
    probe = folder / "probe"
    probe.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", probe], capture_output=True)
    if done.returncode == 0:
        subprocess.run(["umount", probe], check=True)
    return done.returncode == 0


@contextmanager
def mounted(folder, size="4m"):
    """A disk of its own at ``folder``."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "none", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture
def stopped(nursery, scratch):
    run = scratch / "stopped"
    words = [*TINY, *VARIANTS[VARIANT], "--out", run]
    trial = nursery.run(words, "hash_batches", path=str(scratch / "hashes"), stop_after=6)
    assert trial.code == 143, trial.output
    return run


class Faults:
    """Each method spoils the disk under a copy of a stopped run, tries to go on, and undoes the damage."""

    def __init__(self, nursery, stopped, scratch):
        self.nursery, self.stopped, self.scratch = nursery, stopped, scratch
        newest = list_checkpoints(stopped)[-1]
        self.need = sum((newest / name).stat().st_size for name in FILES)
        self.largest = max((newest / name).stat().st_size for name in FILES)

    def resume(self, run, expected, plant=None, user=None, **arguments):
        """Resume; the exit code must be the expected one, and what was good must still be."""
        before = [path.name for path in list_checkpoints(run) if verify_checkpoint(path) is None]
        trial = self.nursery.run(["train", "--resume", run], plant, user, **arguments)
        assert trial.code == expected, f"exit code {trial.code}:\n{trial.output[-1500:]}"
        assert "Traceback" not in trial.output, trial.output[-1500:]
        if expected != 0:
            sentences = [line for line in trial.output.splitlines() if line.startswith("bicovg: ")]
            assert len(sentences) == 1, trial.output
            after = [path.name for path in list_checkpoints(run) if verify_checkpoint(path) is None]
            assert set(before[-1:]) <= set(after), f"{before[-1]} is gone"
        return trial

    def full_disk(self, share):
        """A disk with room for ``share`` of a checkpoint."""
        with mounted(self.scratch / "disk") as disk:
            run, filler = disk / "run", disk / "filler"
            shutil.copytree(self.stopped, run)
            free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
            filler.write_bytes(b"\1" * int(free - share * self.need))
            trial = self.resume(run, 4)
            assert "No space left" in trial.output, trial.output
            filler.unlink()
            self.finish(run)

    def small_file(self, share):
        """A limit on the size of every file, below that of a checkpoint's largest."""
        run = self.copy()
        trial = self.resume(run, 4, "limit_file_size", size=int(share * self.largest))
        assert "File too large" in trial.output, trial.output
        self.finish(run)

    def read_only_disk(self, share):
        with mounted(self.scratch / "disk") as disk:
            shutil.copytree(self.stopped, disk / "run")
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
            trial = self.resume(disk / "run", 4)
            assert "Read-only file system" in trial.output
            subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
            self.finish(disk / "run")

    def forbidden_run(self, share):
        """A run folder of somebody else."""
        run = self.copy()
        for path in (run, *run.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        trial = self.resume(run, 4, user=NOBODY if ROOT else None)
        assert "Permission denied" in trial.output
        self.allow(run)
        self.finish(run)

    def forbidden_checkpoints(self, share):
        """Everything may be written but the folder of checkpoints."""
        run = self.copy()
        self.allow(run)
        (run / "checkpoints").chmod(0o555)
        trial = self.resume(run, 4, user=NOBODY if ROOT else None)
        assert "Permission denied" in trial.output
        self.allow(run)
        self.finish(run)

    def forbidden_file(self, share):
        """The newest weights cannot be read: the older checkpoint is used, and is enough."""
        run = self.copy()
        self.allow(run)
        weights = list_checkpoints(run)[-1] / FILES[0]
        weights.chmod(0o000)
        if ROOT:
            os.chown(weights, 0, 0)
        trial = self.resume(run, 0, user=NOBODY if ROOT else None)
        assert "permission denied" in trial.output
        assert_same_state(run, self.reference)

    def forbidden_start(self, share):
        """A new run where nothing may be created."""
        folder = self.scratch / "closed"
        folder.mkdir(exist_ok=True)
        folder.chmod(0o555)
        trial = self.nursery.run([*TINY, "--out", folder / "run"], user=NOBODY if ROOT else None)
        assert trial.code == 4, trial.output
        assert "choose a writable folder" in trial.output

    def second_device(self, share):
        """Checkpoints on a disk of their own, mounted inside the run folder."""
        run = self.copy()
        with mounted(run / "checkpoints") as disk:
            for path in list_checkpoints(self.stopped):
                shutil.copytree(path, disk / path.name)
            self.finish(run)

    def copy(self):
        run = self.scratch / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(self.stopped, run)
        return run

    def allow(self, run):
        for path in (run, *run.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
            if ROOT:
                os.chown(path, NOBODY, NOBODY)

    def finish(self, run):
        """The disk is well again: the run goes on to the end as if nothing had been."""
        self.resume(run, 0)
        assert_same_state(run, self.reference)


@pytest.mark.row("disk full, read-only, permission, cross-device")
def test_a_bad_disk_ends_the_run_loudly_with_its_checkpoint_intact(nursery, references, stopped, scratch, row):
    faults = Faults(nursery, stopped, scratch)
    faults.reference = references[VARIANT][0]
    kinds = [faults.small_file, faults.forbidden_run, faults.forbidden_checkpoints]
    kinds += [faults.forbidden_file, faults.forbidden_start]
    if ROOT and can_mount(scratch):
        kinds = [faults.full_disk, *kinds, faults.full_disk, faults.read_only_disk, faults.full_disk]
        kinds += [faults.second_device]
    for number, kind in zip(range(count(50, 10)), itertools.cycle(kinds), strict=False):
        share = (0.02, 0.9, 0.3, 0.6, 0.1, 0.75)[number % 6]
        with row.trial(f"{kind.__name__}, {share:.0%}"):
            kind(share)
