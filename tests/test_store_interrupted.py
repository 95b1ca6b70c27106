"""Packing that is killed, stopped, refused or out of space leaves nothing that looks finished; memory is bounded."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from archives import encode, picture, write_classes, write_shard

from bicovg.data.sources import open_source
from bicovg.data.store import PackedStore, pack
from bicovg.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
FULL = os.environ.get("BICOVG_FULL_COUNTS") == "1"


def run_script(script: str, *arguments: object) -> dict[str, object]:
    """Run a script in a process of its own, which may fork and be measured, and take its JSON."""
    command = [sys.executable, "-W", "error", "-c", script, *map(str, arguments)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    result: dict[str, object] = json.loads(run.stdout.splitlines()[-1])
    return result


KILL_AT_EVERY_STEP = """
import json, os, shutil, signal, sys
from pathlib import Path
from bicovg.data.sources import open_source
from bicovg.data.store import pack
from bicovg.data.store_files import PARTIAL, verify_files

source, root, replace = open_source(Path(sys.argv[1])), Path(sys.argv[2]), sys.argv[3] == "replace"
WATCHED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "fsync"}
fsync = os.fsync

def pack_until(limit):
    steps = 0
    def count(event, arguments):
        nonlocal steps
        if event in WATCHED:
            if steps == limit:
                os.kill(os.getpid(), signal.SIGKILL)
            steps += 1
    os.fsync = lambda handle: (count("fsync", ()), fsync(handle))
    sys.addaudithook(count)
    pack(source, root, "set", size=16, jobs=2, force=replace)

states, limit, status = [], 0, -1
while status != 0:
    shutil.rmtree(root / "set", ignore_errors=True)
    if replace:
        pack(source, root, "set", size=8)
    child = os.fork()
    if child == 0:
        pack_until(limit)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    shown = [path for path in root.iterdir() if PARTIAL not in path.name and path.name[0] != "."]
    assert [path.name for path in shown] in ([], ["set"]), shown
    whole = [verify_files(path) for path in shown] in ([], [[]])
    size = json.loads((shown[0] / "store.json").read_text())["size"][0] if shown else None
    states.append([whole, size])
    limit += 1
print(json.dumps({"states": states, "left": sum(PARTIAL in path.name for path in root.iterdir())}))
"""


@pytest.mark.parametrize("mode", ["new", "replace"])
def test_sigkill_at_every_file_operation_leaves_a_whole_store_or_none(tmp_path: Path, mode: str) -> None:
    source = write_classes(tmp_path / "own", ["a", "b"], 3)
    (tmp_path / "root").mkdir()
    result = run_script(KILL_AT_EVERY_STEP, source, tmp_path / "root", mode)
    states = [tuple(state) for state in result["states"]]
    assert len(states) > 15
    assert all(whole for whole, _ in states)
    assert states[-1] == (True, 16)
    assert {size for _, size in states} == ({None, 16} if mode == "new" else {8, None, 16})
    assert result["left"] == 0


KILL_AT_RANDOM_TIMES = """
import json, os, random, signal, sys, time
from pathlib import Path
from bicovg.data.sources import open_source
from bicovg.data.store import pack
from bicovg.data.store_files import PARTIAL, verify_files

source, root, trials = open_source(Path(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3])
began = time.monotonic()
pack(source, root, "warm", jobs=2)
length = time.monotonic() - began
draw, killed, left = random.Random(0), 0, 0
for trial in range(trials):
    child = os.fork()
    if child == 0:
        pack(source, root, f"set{trial}", jobs=2)
        os._exit(0)
    time.sleep(draw.uniform(0, length))
    os.kill(child, signal.SIGKILL)
    killed += os.waitpid(child, 0)[1] == signal.SIGKILL
    store = root / f"set{trial}"
    assert not store.exists() or verify_files(store) == [], store
    left += any(path.name.startswith(f"set{trial}{PARTIAL}") for path in root.iterdir())
print(json.dumps({"killed": killed, "left": left}))
"""


def test_sigkill_at_random_times_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    source = write_classes(tmp_path / "own", ["a", "b"], 150)
    (tmp_path / "root").mkdir()
    result = run_script(KILL_AT_RANDOM_TIMES, source, tmp_path / "root", 120 if FULL else 24)
    assert result["killed"] > 5
    assert result["left"] > 0  # kills did land while images were being written


@contextmanager
def packing(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The command at work on thousands of images, stopped in the middle by SIGSTOP."""
    (tmp_path / "shards").mkdir()
    row = encode(picture(0, 64), "JPEG")
    for split in ("train", "test"):
        write_shard(tmp_path / "shards" / f"{split}-0.parquet", [(row, i % 2) for i in range(20_000)])
    command = [sys.executable, "-m", "bicovg", "data", "pack", "set", "--from", "shards", "--root", "root"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes)  # type: ignore[call-overload]
    try:
        deadline = time.monotonic() + 60
        while not list((tmp_path / "root").glob("set.partial-*/train.images")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGSTOP)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_packing_with_its_exit_code_and_cleans_up(tmp_path: Path, number: int, code: int) -> None:
    with packing(tmp_path) as process:
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == code
        assert "Traceback" not in errors
    assert [path.name for path in (tmp_path / "root").iterdir()] == [".set.lock"]


def test_a_second_packing_of_the_same_name_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    source = open_source(write_classes(tmp_path / "own", ["a", "b"], 3))
    with packing(tmp_path) as process:
        with pytest.raises(UserError, match=r"another process is packing set into .*: wait for it"):
            pack(source, tmp_path / "root", "set")
        assert len(list((tmp_path / "root").glob("set.partial-*"))) == 1
        pack(source, tmp_path / "root", "other")
        process.kill()
        process.wait()
        with pytest.raises(UserError, match="data set 'set' is not packed"):
            PackedStore.open(tmp_path / "root", "set")
        assert pack(source, tmp_path / "root", "set").verify() == []
        assert list((tmp_path / "root").glob("*.partial-*")) == []


def test_an_error_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    source = open_source(write_classes(tmp_path / "own", ["a", "b"], 3))

    def fail(split: str, done: int, total: int) -> None:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        pack(source, tmp_path / "root", "set", progress=fail)
    assert [path.name for path in (tmp_path / "root").iterdir()] == [".set.lock"]


OUT_OF_SPACE = """
import json, resource, sys
from pathlib import Path
from bicovg.data.sources import open_source
from bicovg.data.store import pack
from bicovg.errors import UserError

resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
try:
    pack(open_source(Path(sys.argv[1])), Path(sys.argv[2]), "set")
except UserError as error:
    print(json.dumps({"error": str(error), "left": [path.name for path in Path(sys.argv[2]).iterdir()]}))
"""


def test_a_disk_that_takes_no_more_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    source = write_classes(tmp_path / "own", ["a", "b"], 10)
    result = run_script(OUT_OF_SPACE, source, tmp_path / "root")
    assert result["error"] == "packing set stopped ([Errno 27] File too large): correct that and pack again"
    assert result["left"] == [".set.lock"]


PACK_AND_MEASURE = """
import json, re, sys
from pathlib import Path
from bicovg.data.sources import open_source
from bicovg.data.store import pack

def peak_memory():  # of this process alone: getrusage would begin with the peak of the one that started it
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

peaks = []
for number, folder in enumerate(sys.argv[2:]):
    pack(open_source(Path(folder)), Path(sys.argv[1]), f"set{number}", short_side=256, jobs=2)
    peaks.append(peak_memory())
print(json.dumps({"peaks": peaks}))
"""


def test_memory_does_not_grow_with_the_number_of_images(tmp_path: Path) -> None:
    images = [encode(picture(i, 500, 660 + 20 * i), "JPEG") for i in range(4)]
    for name, count in (("few", 16), ("many", 240)):
        for folder in ("train/a", "test/a"):
            (tmp_path / name / folder).mkdir(parents=True)
            for i in range(count if folder == "train/a" else 2):
                (tmp_path / name / folder / f"{i}.jpg").write_bytes(images[i % 4])
    few, many = run_script(PACK_AND_MEASURE, tmp_path, tmp_path / "few", tmp_path / "many")["peaks"]
    stored = (tmp_path / "set1" / "train.images").stat().st_size / 2**20
    assert stored > 55
    assert many - few < 12
