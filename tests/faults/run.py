"""``make faults``: the whole suite at full counts, two rows at a time, and a dated table of it in records/faults."""

import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path("tests/faults")
WORKERS = 2


@dataclass
class Job:
    """One pytest process. ``rows``: (name in the table, trials asked for); None where the code says how many."""

    test: str
    rows: list[tuple[str, int | None]]
    only: str = ""
    found: dict[str, dict[str, float]] = field(default_factory=dict)
    passed: bool = False
    seconds: float = 0.0


IMAGES = [("corrupt images of ten kinds", 1000), ("decompression bombs", 20)]
# the longest first, so that both workers end at about the same time
JOBS = [
    Job(
        f"{HERE}/test_commands.py",
        [
            ("every command on a run folder with one damaged file", None),
            ("every command on a run folder with one wrong value", 6000),
        ],
    ),
    Job(f"{HERE}/test_kills.py", [("SIGKILL at random times", 300)], "random_times"),
    Job(f"{HERE}/test_soak.py", [("10,000-step soak", 3)]),
    Job(
        f"{HERE}/test_save_path.py",
        [
            ("simulated power loss during a real run, then resumed", None),
            ("simulated power loss after every operation of the save path", None),
        ],
        "power",
    ),
    Job(f"{HERE}/test_kills.py", [("SIGTERM, SIGINT, SIGUSR1 at random times", 180)], "signal"),
    Job(f"{HERE}/test_save_path.py", [("SIGKILL at named points of the save path", 120)], "kill_at"),
    Job(f"{HERE}/test_torchrun.py", [("one of two processes killed under torchrun", 40)]),
    Job(f"{HERE}/test_planted.py", [("NaN or Inf planted at six places of every block", 96)]),
    Job(f"{HERE}/test_resume.py", [("resume inside one epoch, at step 0, last step, epoch edges", 80)]),
    Job(
        f"{HERE}/test_damage.py",
        [
            ("truncation of any checkpoint file", 160),
            ("single-bit flips in any checkpoint file", 1000),
            ("missing, empty, swapped, newer-schema, wrong-shape files", 40),
            ("malicious pickles, zip bombs, path traversal, symlinks", 25),
        ],
    ),
    Job(f"{HERE}/test_mutations.py", [("mutation check: the save path broken on purpose is noticed", 6)]),
    Job(f"{HERE}/test_storage.py", [("disk full, read-only, permission, cross-device", 50)]),
    Job(f"{HERE}/test_schedules.py", [("interleaved against summed, 100 steps", 20)]),
    Job(f"{HERE}/test_fuzz.py", [("fuzzed checkpoint headers, manifests and configs", 10_000)]),
    Job("tests/test_decode.py", IMAGES, "corrupt or bomb"),
]


def run_job(job, folder):
    """Run it at full counts; what its rows counted is read back from a file."""
    counted = folder / f"rows-{JOBS.index(job)}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", job.test]
    command += ["-k", job.only] if job.only else []
    settings = {"BICOVG_FULL_COUNTS": "1", "BICOVG_FAULT_ROWS": str(counted), "OMP_NUM_THREADS": "1"}
    begun = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True)
    job.seconds, job.passed = time.monotonic() - begun, done.returncode == 0
    for line in counted.read_text().splitlines() if counted.exists() else ():
        entry = json.loads(line)
        job.found[entry["row"]] = entry
    if job.rows is IMAGES and job.passed:  # one test per kind and one for all bombs: what passed is what was asked
        job.found = {name: {"trials": asked, "failures": 0, "seconds": job.seconds} for name, asked in IMAGES}
    print(f"{'ok  ' if job.passed else 'FAIL'} {job.seconds:6.0f} s  {job.test} {job.only}", flush=True)
    if not job.passed:
        print(done.stdout[-6000:], done.stderr[-2000:], sep="\n", flush=True)
    return job


def table_lines(jobs):
    """The table, and whether every row has its count and no failure."""
    lines = ["| fault | trials | asked for | failures | seconds |", "|---|---:|---:|---:|---:|"]
    good = True
    for job in jobs:
        for name, asked in job.rows:
            entry = job.found.get(name)
            trials, failures = (int(entry["trials"]), int(entry["failures"])) if entry else (0, None)
            whole = job.passed and failures == 0 and trials >= (asked or 1)
            good = good and whole
            state = "did not finish" if failures is None else f"{failures}"
            seconds = entry["seconds"] if entry else job.seconds
            lines.append(f"| {name} | {trials:,} | {f'{asked:,}' if asked else 'all'} | {state} | {seconds:.0f} |")
    return lines, good


def describe(commit, seconds):
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [
        f"* date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        f"* commit: {commit}",
        f"* machine: {os.cpu_count()} CPU cores, {memory:.0f} GiB memory, {platform.system()}, no GPU",
        f"* Python {platform.python_version()}, torch {torch.__version__}",
        f"* command: `make faults`, {WORKERS} rows at a time, one thread each",
        f"* duration: {seconds / 60:.1f} minutes",
    ]


def main():
    sys.path.insert(0, str(ROOT))
    from bicovg.runlog import find_commit

    begun, commit = time.monotonic(), find_commit() or "unknown"
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(WORKERS) as pool:
        jobs = list(pool.map(lambda job: run_job(job, Path(folder)), JOBS))
    lines, good = table_lines(jobs)
    text = ["# Fault suite at full counts", "", *describe(commit, time.monotonic() - begun), "", *lines, ""]
    path = ROOT / "records" / "faults" / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-{commit[:7]}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(text))
    print("\n".join(lines), f"\nwritten to {path.relative_to(ROOT)}", sep="\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
