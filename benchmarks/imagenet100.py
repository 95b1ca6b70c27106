"""ImageNet-100's recipes from image files to a prediction, at full size, on made-up photographs.

    python benchmarks/imagenet100.py                                  every row of the paper's main table
    python benchmarks/imagenet100.py imagenet100-bicovg --each 2 -- --model.width 0.125 --train.batch_size 16

The images themselves cannot be shipped. What can be shown without them is that all of it runs at its own size: ILSVRC's
folders with the hundred synsets, JPEGs of several sizes, packing at short side 256, resized crops of 224 with jitter,
the net at full width, batches of 128, evaluation on centre crops, fusion, early exit, prediction of image files.
Accuracies on such images say nothing, so none is kept; losses are, which must be finite and, on the mean of the exits,
fall. (Those of the classic net need not: it has no norm, and a few steps do not get it going.) What stands behind
``--`` is added to training.
"""

import argparse
import io
import json
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bicovg.data.known import IMAGENET100
from bicovg.data.sources_sample import read_class_list
from bicovg.runlog import describe_environment

ROOT = Path(__file__).resolve().parents[1]
ROWS = [f"imagenet100-{row}" for row in ("bicovg", "bicovg-fal", "hgb2", "hgb4", "bp-classic")]
SIDES = ((375, 500), (500, 333), (256, 300), (224, 800))  # heights and widths, one after the other


def make_photograph(draw: np.random.Generator, colour: np.ndarray, height: int, width: int) -> bytes:
    """Smooth noise around a colour, which a JPEG keeps about as a photograph."""
    noise = draw.integers(-60, 60, (height // 32, width // 32, 3))
    coarse = Image.fromarray((colour + noise).clip(0, 255).astype(np.uint8))
    stream = io.BytesIO()
    coarse.resize((width, height), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=90)
    return stream.getvalue()


def make_folders(folder: Path, each: int) -> None:
    """``train/<synset>/`` with ``each`` images, ``val/<synset>/`` with one."""
    draw = np.random.default_rng(0)
    for number, synset in enumerate(read_class_list(IMAGENET100)):
        colour = draw.integers(0, 256, 3)
        for split, count in (("train", each), ("val", 1)):
            (folder / split / synset).mkdir(parents=True)
            for image in range(count):
                sides = SIDES[(number + image) % len(SIDES)]
                (folder / split / synset / f"{synset}_{image}.JPEG").write_bytes(make_photograph(draw, colour, *sides))


def run(*words: object) -> float:
    """Seconds that a command of ours takes; what goes wrong in it goes wrong here."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "bicovg", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(f"bicovg {' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}")
    return round(time.monotonic() - begun, 1)


def exercise(recipe: str, source: Path, scratch: Path, epochs: int, more: list[str]) -> dict[str, Any]:
    """Train, fuse, evaluate and predict; what the run's own files say of it."""
    out, place = scratch / recipe, ("--data-root", scratch / "data")
    words = ("--train.epochs", epochs, "--train.save_every", 0, *more)
    seconds = {"train": run("train", recipe, *words, "--data.root", scratch / "data", "--out", out)}
    summary = json.loads((out / "summary.json").read_text())
    config = json.loads((out / "config.json").read_text())
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timing = [json.loads(line) for line in (out / "timing.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in metrics]
    assert np.isfinite(losses).all(), losses
    assert recipe.endswith("classic") or np.mean(losses[-1]) < np.mean(losses[0]), losses
    if len(losses[0]) > 1:
        seconds["fuse"] = run("fuse", out, "--on", "augmented", *place)
        seconds["early_exit"] = run("eval", out, "--early-exit", *place)
    seconds["predict"] = run("predict", out, *sorted(source.glob("val/*/*.JPEG"))[:3])
    return {
        "recipe": recipe,
        "parameters": summary["parameters"],
        "batch": config["train"]["batch_size"],
        "precision": config["train"]["precision"],
        "exits": len(losses[0]),
        "epochs": epochs,
        "loss_first_epoch": [round(loss, 4) for loss in losses[0]],
        "loss_last_epoch": [round(loss, 4) for loss in losses[-1]],
        "images_per_second": round(timing[-1]["images_per_second"], 2),
        "seconds": seconds,
    }


def main() -> None:
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="default: the rows of the paper's main table")
    parser.add_argument("--each", type=int, default=2, help="training images of each of the hundred classes")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/imagenet100-<device>-torch<version>.json")
    args = parser.parse_args(words[:cut])
    if args.epochs < 2:
        parser.error(f"--epochs {args.epochs}: give at least 2, as losses are to fall between the first and the last")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that scratch folders are removed

    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    environment = describe_environment(device, torch.get_num_threads())
    environment["command"] = " ".join(["python benchmarks/imagenet100.py", *words])
    scratch, rows = Path(tempfile.mkdtemp(prefix="bicovg-imagenet100-")), []
    try:
        make_folders(scratch / "ilsvrc", args.each)
        packing = run("data", "pack", "imagenet100", "--from", scratch / "ilsvrc", "--root", scratch / "data")
        for recipe in args.recipes or ROWS:
            rows.append(exercise(recipe, scratch / "ilsvrc", scratch, args.epochs, words[cut + 1 :]))
            print(json.dumps(rows[-1]), flush=True)
    finally:
        shutil.rmtree(scratch)
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **environment,
        "training_images": 100 * args.each,
        "packing_seconds": packing,
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "rows": rows,
    }
    version = torch.__version__.split("+")[0]
    out = args.out or ROOT / "benchmarks" / "results" / f"imagenet100-{device}-torch{version}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {out}")


if __name__ == "__main__":
    main()
