"""How many images per second the loader gives with the recipes' augmentations.

    python benchmarks/loader.py                    on the CPU
    python benchmarks/loader.py --device cuda      also captured in a CUDA graph, and compiled

Images are synthetic bytes: augmentation costs the same whatever they show. Modes:
``resident``  the data set lives on the device, the loader's own batches;
``streamed``  read from a memory map by the loader's thread (ImageNet-100: images of several sizes);
``graph``     the resident batch as one captured CUDA graph, as the trainer runs it;
``compiled``  the resident batch compiled by inductor; ``compiled graph`` both.
Rates are medians of ``--repeats`` windows of ``--seconds``; every window is in the result. On a GPU the kernels of
one resident batch are counted and their time summed.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bicovg.data.augment import Augmentation
from bicovg.data.images import ImageSource, MappedImages, VariableImages
from bicovg.data.loader import Loader
from bicovg.recipes import get_recipe
from bicovg.runlog import find_commit

ROOT = Path(__file__).resolve().parents[1]
COUNTS = {"cifar100-bicovg": 50_000, "tiny-imagenet-bicovg": 20_000, "imagenet100-bicovg": 2_000}
MEAN = STD = (0.5, 0.5, 0.5)


class Pictures:
    """Images of a common height and several widths in one memory map, as a packed ImageNet-100 has them."""

    def __init__(self, path: Path, count: int, height: int) -> None:
        widths = np.random.default_rng(0).integers(height, height * 3 // 2, count)
        ends = np.cumsum(3 * height * widths)
        self.index = np.stack([ends - 3 * height * widths, np.full(count, height), widths], axis=1)
        write_bytes(path, int(ends[-1]))
        self.flat = np.memmap(path, np.uint8, "r")

    def image(self, i: int) -> np.ndarray:
        start, height, width = self.index[i].tolist()
        return self.flat[start : start + 3 * height * width].reshape(height, width, 3)


def write_bytes(path: Path, size: int) -> None:
    """Random bytes, a megabyte over and over."""
    block = np.random.default_rng(0).bytes(1 << 20)
    with path.open("wb") as file:
        for begin in range(0, size, len(block)):
            file.write(block[: size - begin])


def make_source(folder: Path, recipe: str) -> ImageSource:
    data, count = get_recipe(recipe).data, COUNTS[recipe]
    labels = np.zeros(count)
    path = folder / f"{recipe}.bytes"
    if data.resize:
        return VariableImages(Pictures(path, count, data.resize), labels)
    shape = (count, data.image_size, data.image_size, data.image_channels)
    write_bytes(path, int(np.prod(shape)))
    return MappedImages(np.memmap(path, np.uint8, "r", shape=shape), labels)


def make_loader(source: ImageSource, recipe: str, device: str, resident: bool) -> Loader:
    config = get_recipe(recipe)
    return Loader(
        source,
        config.train.batch_size,
        seed=0,
        augmentation=Augmentation(**asdict(config.data.augment)),
        mean=MEAN,
        std=STD,
        device=device,
        prefetch=config.data.prefetch,
        resident=resident,
    )


def forever(loader: Loader) -> Iterator[Any]:
    epoch = 0
    while True:
        yield from loader.batches(epoch)
        epoch += 1


def capture(body: Callable[[], Any]) -> Callable[[], Any]:
    """``body`` as a CUDA graph, warmed up on a side stream first."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph.replay


def finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def rates(body: Callable[[], Any], batch: int, device: str, seconds: float, repeats: int) -> list[float]:
    """Images per second in each of ``repeats`` windows, after a warm-up of one."""
    result = []
    for _ in range(repeats + 1):
        finish(device)
        began, steps = time.perf_counter(), 0
        while steps < 3 or time.perf_counter() - began < seconds:
            body()
            steps += 1
            if steps % 100 == 0:  # a GPU's queue must not run far ahead of the clock
                finish(device)
        finish(device)
        result.append(steps * batch / (time.perf_counter() - began))
    return result[1:]


def count_kernels(body: Callable[[], Any]) -> dict[str, float]:
    """Kernels of one call, copies and fills included, and the sum of their times."""
    from torch.profiler import ProfilerActivity, profile

    body()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(10):
            body()
        torch.cuda.synchronize()
    events = [event for event in seen.key_averages() if event.self_device_time_total > 0]
    return {
        "kernels": sum(event.count for event in events) / 10,
        "kernel_microseconds": sum(event.self_device_time_total for event in events) / 10,
    }


def modes(source: ImageSource, recipe: str, device: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and one-batch body of everything to time."""
    streamed = forever(make_loader(source, recipe, device, resident=False))
    yield "streamed", lambda: next(streamed)
    streamed.close()
    if source.sizes is not None:
        return
    loader = make_loader(source, recipe, device, resident=True)
    batches = forever(loader)
    yield "resident", lambda: next(batches)
    if device != "cuda":
        return
    indices = loader.order(0)[: loader.batch_size].to(device)
    epoch = torch.zeros((), dtype=torch.int64, device=device)
    yield "graph", capture(lambda: loader.assemble(indices, epoch))
    compiled = torch.compile(loader.assemble, dynamic=False, fullgraph=True)
    yield "compiled", lambda: compiled(indices, epoch)
    yield "compiled graph", capture(lambda: compiled(indices, epoch))


def measure(recipe: str, device: str, seconds: float, repeats: int) -> list[dict[str, Any]]:
    config, rows = get_recipe(recipe), []
    with tempfile.TemporaryDirectory(prefix="bicovg-loader-") as folder:
        for mode, body in modes(make_source(Path(folder), recipe), recipe, device):
            windows = rates(body, config.train.batch_size, device, seconds, repeats)
            row: dict[str, Any] = {
                "recipe": recipe,
                "mode": mode,
                "batch": config.train.batch_size,
                "size": config.data.image_size,
                "images_per_second": statistics.median(windows),
                "all_windows": windows,
            }
            if device == "cuda" and mode != "streamed":
                row.update(count_kernels(body))
            extra = f"  {row['kernels']:.0f} kernels, {row['kernel_microseconds']:.0f} us" if "kernels" in row else ""
            print(f"{recipe:22} {mode:15} {row['images_per_second']:12.0f} img/s{extra}", flush=True)
            rows.append(row)
    return rows


def describe(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": find_commit(),
        "command": "python benchmarks/loader.py " + " ".join(Path(word).name for word in sys.argv[1:]),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "device": name,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average_before": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--recipes", nargs="+", choices=tuple(COUNTS), default=list(COUNTS))
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/loader-DEVICE-torchVERSION.json")
    args = parser.parse_args()
    report = describe(args.device)
    report["results"] = [row for name in args.recipes for row in measure(name, args.device, args.seconds, args.repeats)]
    report["load_average_after"] = os.getloadavg()[0]
    device = report["device"].lower().replace(" ", "-")
    version = torch.__version__.split("+")[0]
    out = args.out or ROOT / "benchmarks" / "results" / f"loader-{device}-torch{version}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
