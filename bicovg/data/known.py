"""The benchmarks of the paper: what they are packed at, how many images they have, and what to pack them from."""

from dataclasses import dataclass
from pathlib import Path

BUILT_IN = ("digits", "synthetic")  # opened by these names without a store
IMAGENET100 = Path(__file__).with_name("imagenet100.txt")


@dataclass(frozen=True)
class Known:
    """What is fixed about a benchmark.

    Attributes:
        source: what to give to ``--from``, in words.
        counts: images per split of the complete set.
    """

    source: str
    size: int | None = None
    short_side: int | None = None
    counts: tuple[tuple[str, int], ...] = ()


KNOWN = {
    "cifar100": Known(
        source="the folder of its parquet shards or cifar-100-binary.tar.gz",
        size=32,
        counts=(("train", 50_000), ("test", 10_000)),
    ),
    "tiny-imagenet": Known(
        source="the folder of its parquet shards or the unpacked tiny-imagenet-200",
        size=64,
        counts=(("train", 100_000), ("test", 10_000)),
    ),
    "imagenet100": Known(
        source="an ILSVRC folder with train/ and val/, one folder per synset in each",
        short_side=256,
    ),
}
