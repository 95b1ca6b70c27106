"""How fast packing is, against Pillow decoding the same bytes with as many threads in the same run.

    python benchmarks/pack.py --from SHARDS --train-shards 1     (parquet shards as in docs/data.md)
    python benchmarks/pack.py                                    (a synthetic set of JPEGs)

Decoding alone means: open, decode, convert to RGB. Packing adds reading the shards, copying the pixels
out of Pillow, per-channel sums, hashing, writing and fsync. Runs alternate; medians of ``--repeats`` are given.
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
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import PIL
import pyarrow
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bicovg.data.sources import Source, open_source  # noqa: E402
from bicovg.data.store import pack  # noqa: E402


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


def time_pillow(images: list[bytes], threads: int) -> float:
    """Images per second of Pillow alone, the list shared out over ``threads`` threads."""
    workers = [threading.Thread(target=decode_all, args=(images[i::threads],)) for i in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return len(images) / (time.perf_counter() - start)


def time_pack(source: Source, root: Path, size: int, jobs: int) -> float:
    """Images per second of a complete pack, from reading the first shard to the rename."""
    start = time.perf_counter()
    pack(source, root, "bench", size=size, jobs=jobs, force=True)
    return sum(source.counts.values()) / (time.perf_counter() - start)


def describe_run() -> dict[str, object]:
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    versions = {
        "python": platform.python_version(),
        "pillow": PIL.__version__,
        "pyarrow": pyarrow.__version__,
    }
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or None,
        "command": "python benchmarks/pack.py " + " ".join(Path(word).name for word in sys.argv[1:]),
        "versions": versions | {"numpy": np.__version__},
        "cores": os.cpu_count(),
        "machine": platform.machine(),
    }


def measure(folder: Path, scratch: Path, size: int, repeats: int) -> dict[str, object]:
    source = open_source(folder)
    images = [sample.image for split in source.counts for sample in source.samples(split)]
    encoded = [image for image in images if isinstance(image, bytes)]
    rates: dict[str, list[float]] = {}
    for _ in range(repeats):
        for jobs in (1, 2):
            rates.setdefault(f"pillow_{jobs}", []).append(time_pillow(encoded, jobs))
            rates.setdefault(f"pack_{jobs}", []).append(time_pack(source, scratch, size, jobs))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    shares = {f"pack_over_pillow_{jobs}": medians[f"pack_{jobs}"] / medians[f"pillow_{jobs}"] for jobs in (1, 2)}
    return {"images": len(encoded), "size": size, "images_per_second": medians, "all_runs": rates, **shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path, help="folder of parquet shards (default: synthetic)")
    parser.add_argument("--train-shards", type=int, default=1)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "pack.json")
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="bicovg-pack-"))
    try:
        (scratch / "shards").mkdir()
        if args.source is None:
            make_shards(scratch / "shards", 10_000, args.size)
        else:
            link_shards(args.source, scratch / "shards", args.train_shards)
        data = args.source.name if args.source else "synthetic JPEGs"
        result = describe_run() | {"data": data} | measure(scratch / "shards", scratch, args.size, args.repeats)
    finally:
        shutil.rmtree(scratch)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["images_per_second"], indent=1))


if __name__ == "__main__":
    main()
