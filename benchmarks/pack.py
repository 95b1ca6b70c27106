"""How fast packing is, against Pillow decoding the same bytes with as many threads in the same run.

    python benchmarks/pack.py --from SHARDS --train-shards 1     (parquet shards as in docs/data.md)
    python benchmarks/pack.py                                    (a synthetic set of JPEGs)

Decoding alone means: open, decode, convert to RGB, from bytes in memory. Packing adds reading the shards, copying
the pixels out of Pillow, per-channel sums, hashing, writing and fsync. Each measurement is a process of its own,
bound to 1 and then to 2 cores; the two alternate, and of ``--attempts`` pairs the ``--repeats`` during which other
processes used the machine least are kept: what they used is in the result. Medians are given.
"""

import argparse
import io
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np
import pyarrow
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bicovg.data.sources import open_source
from bicovg.data.store import pack

ROOT = Path(__file__).resolve().parents[1]


def make_shards(folder: Path, count: int, size: int) -> None:
    """Photo-like JPEGs: smooth noise compresses like a photograph, white noise would not."""
    import pyarrow.parquet as pq

    draw = np.random.default_rng(0)
    for split, rows in (("train", count), ("test", count // 10)):
        images = []
        for _ in range(rows):
            coarse = Image.fromarray(draw.integers(0, 256, (size // 8, size // 8, 3), dtype=np.uint8))
            stream = io.BytesIO()
            coarse.resize((size, size), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=90)
            images.append({"bytes": stream.getvalue(), "path": ""})
        table = pyarrow.table({"image": images, "label": [i % 10 for i in range(rows)]})
        pq.write_table(table, folder / f"{split}-00000-of-00001.parquet")


def link_shards(source: Path, folder: Path, train_shards: int) -> None:
    """A smaller data set of the first train shards and all others."""
    for path in source.iterdir():
        if not path.name.startswith("train-"):
            (folder / path.name).symlink_to(path.resolve())
    chosen = sorted(source.glob("train-*.parquet"))[:train_shards]
    for number, path in enumerate(chosen):
        (folder / f"train-{number:05d}-of-{len(chosen):05d}.parquet").symlink_to(path.resolve())


def decode_all(images: list[bytes]) -> None:
    for data in images:
        Image.open(io.BytesIO(data)).convert("RGB")


def run_pillow(images: list[bytes], threads: int) -> None:
    """Pillow alone, the list shared out over ``threads`` threads."""
    workers = [threading.Thread(target=decode_all, args=(images[i::threads],)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


@dataclass(frozen=True)
class Timing:
    """Seconds by the clock, seconds of processor time over all threads, and cores that other processes kept busy."""

    wall: float
    cpu: float
    others: float


def busy_seconds() -> float:
    """Processor seconds used on this machine since it started, waiting for disks not counted."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def clock(work: Callable[[], object]) -> Timing:
    wall, cpu, busy = time.perf_counter(), time.process_time(), busy_seconds()
    work()
    wall, cpu, busy = time.perf_counter() - wall, time.process_time() - cpu, busy_seconds() - busy
    return Timing(wall, cpu, max(0.0, busy - cpu) / wall)


def run_once(kind: str, folder: Path, scratch: Path, size: int, cores: int) -> Timing:
    """One measurement in this process, bound to ``cores`` cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    source = open_source(folder)
    if kind == "pack":
        return clock(partial(pack, source, scratch, "bench", size=size, jobs=cores, force=True))
    images = [sample.image for split in source.counts for sample in source.samples(split)]
    return clock(partial(run_pillow, [image for image in images if isinstance(image, bytes)], cores))


def run_child(*arguments: object) -> Timing:
    """One measurement in a process of its own, as packing is in use: what ran before leaves no traces in memory."""
    command = [sys.executable, __file__, "--once", *map(str, arguments)]
    return Timing(**json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def measure(folder: Path, scratch: Path, size: int, repeats: int, attempts: int) -> dict[str, object]:
    """Both, one after the other, on one and on two cores."""
    images = sum(open_source(folder).counts.values())
    results: dict[str, object] = {"images": images, "size": size, "attempts": attempts, "repeats": repeats}
    for cores in range(1, 1 + min(2, len(os.sched_getaffinity(0)))):
        where = (folder, scratch, size, cores)
        pairs = [(run_child("pillow", *where), run_child("pack", *where)) for _ in range(attempts)]
        pairs.sort(key=lambda pair: pair[0].others + pair[1].others)
        results[f"cores_{cores}"] = summarise(pairs[:repeats], images)
    return results


def summarise(pairs: list[tuple[Timing, Timing]], images: int) -> dict[str, object]:
    """Medians over the pairs; a ratio is that of neighbouring runs, so that a busy minute weighs on both."""
    summary: dict[str, object] = {}
    for name, runs in zip(("pillow", "pack"), zip(*pairs, strict=True), strict=True):
        rates = [images / run.wall for run in runs]
        summary[f"{name}_images_per_second"] = round(statistics.median(rates))
        summary[f"{name}_all_runs"] = [round(rate) for rate in rates]
        summary[f"{name}_cpu_us_per_image"] = round(1e6 * statistics.median(run.cpu for run in runs) / images, 1)
        summary[f"{name}_cores_used_by_others"] = [round(run.others, 2) for run in runs]
    by_clock = [alone.wall / packed.wall for alone, packed in pairs]
    by_cpu = [alone.cpu / packed.cpu for alone, packed in pairs]
    summary["pack_over_pillow"] = round(statistics.median(by_clock), 3)
    summary["pack_over_pillow_by_cpu_time"] = round(statistics.median(by_cpu), 3)
    return summary


def describe_run() -> dict[str, object]:
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    packages = ("pillow", "pyarrow", "numpy", "torch")
    versions = {"python": platform.python_version()} | {name: metadata.version(name) for name in packages}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or None,
        "command": "python benchmarks/pack.py " + " ".join(Path(word).name for word in sys.argv[1:]),
        "versions": versions,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path, help="folder of parquet shards (default: synthetic)")
    parser.add_argument("--train-shards", type=int, default=1)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--attempts", type=int, default=5, help="pairs to run; raise it on a shared machine")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/pack-cpu<cores>-torch<version>.json")
    parser.add_argument("--once", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        kind, folder, store, size, cores = args.once
        print(json.dumps(asdict(run_once(kind, Path(folder), Path(store), int(size), int(cores)))))
        return
    torch = ".".join(metadata.version("torch").split(".")[:2])
    out = args.out or ROOT / "benchmarks" / "results" / f"pack-cpu{os.cpu_count()}-torch{torch}.json"
    scratch = Path(tempfile.mkdtemp(prefix="bicovg-pack-"))
    try:
        (scratch / "shards").mkdir()
        if args.source is None:
            make_shards(scratch / "shards", 10_000, args.size)
        else:
            link_shards(args.source, scratch / "shards", args.train_shards)
        data = args.source.name if args.source else "synthetic JPEGs"
        result = describe_run() | {"data": data}
        result |= measure(scratch / "shards", scratch, args.size, args.repeats, max(args.attempts, args.repeats))
    finally:
        shutil.rmtree(scratch)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(out.read_text())


if __name__ == "__main__":
    main()
