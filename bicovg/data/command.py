"""``bicovg data pack | verify | list``: argparse only; everything heavy is imported when a command runs."""

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bicovg.data.known import IMAGENET100, KNOWN
from bicovg.errors import UserError

if TYPE_CHECKING:
    from bicovg.data.sources import Source
    from bicovg.data.store import PackedStore

_PLAIN_EVERY = 10.0  # seconds between progress lines when the output is not a terminal


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``data`` and its three subcommands."""
    parser = subparsers.add_parser("data", help="pack, verify and list data sets")
    commands = parser.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    pack = commands.add_parser("pack", help="decode a data set once into a packed store")
    pack.add_argument("name", metavar="NAME", help=f"{', '.join(KNOWN)}, or a name of your own")
    pack.add_argument("--from", dest="source", type=Path, required=True, metavar="PATH", help="what to read")
    sizes = pack.add_mutually_exclusive_group()
    sizes.add_argument("--size", type=int, metavar="N", help="store N x N squares")
    sizes.add_argument("--short-side", type=int, metavar="N", help="short side N, whole width kept")
    pack.add_argument("--format", help="parquet, cifar-binary, tiny-imagenet, image-tree or class-folders")
    pack.add_argument("--classes", type=Path, metavar="FILE", help="class folders to use, in label order")
    pack.add_argument("--test-share", type=float, default=0.2, metavar="X", help="for class folders without splits")
    pack.add_argument("--jobs", type=int, metavar="N", help="decoding threads (default: one per core)")
    pack.add_argument("--force", action="store_true", help="replace a store of that name")
    pack.add_argument("--max-rejected", type=float, default=0.001, metavar="X", help="share that may be unusable")
    verify = commands.add_parser("verify", help="read every byte of a store and compare its hashes")
    verify.add_argument("name", metavar="NAME")
    listing = commands.add_parser("list", help="list the packed data sets")
    for command in (pack, verify, listing):
        command.add_argument("--root", metavar="DIR", help="folder of the stores (default: $BICOVG_DATA or ./data)")


def run(args: argparse.Namespace) -> int:
    """Run the chosen subcommand; user mistakes leave as ``UserError``."""
    commands: dict[str, Callable[[argparse.Namespace], int]] = {
        "pack": _run_pack,
        "verify": _run_verify,
        "list": _run_list,
    }
    try:
        return commands[args.data_command](args)
    except KeyboardInterrupt:
        print("interrupted: nothing was stored", file=sys.stderr)
        return 130


def _printable(text: str) -> str:
    """File names may hold bytes no terminal can show."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class PlainProgress:
    """One line every few seconds with rate and remaining time, for logs."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.label = ""
        self.started = self.printed = 0.0

    def __call__(self, label: str, done: int, total: int) -> None:
        now = time.monotonic()
        if label != self.label:
            self.label, self.started, self.printed = label, now, now
        if now - self.printed < _PLAIN_EVERY:
            return
        self.printed = now
        rate = done / (now - self.started)
        left = (total - done) / max(rate, 1e-9)
        print(
            f"{label}: {done:,} of {total:,} {self.unit}, {rate:,.0f} {self.unit}/s, {left:.0f} s left", file=sys.stderr
        )


@contextmanager
def _show_progress(unit: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar with rate and remaining time on a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        yield PlainProgress(unit)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            rate = task.finished_speed or task.speed
            return Text(f"{rate:,.0f} {unit}/s" if rate else f"? {unit}/s")

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        RateColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as bar:

        def update(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=total)
            bar.update(tasks[label], completed=done)

        yield update


def _open_source(args: argparse.Namespace) -> "Source":
    """Detect and open what ``--from`` names; imagenet100 uses the list we ship unless another is given."""
    from bicovg.data.sources import detect_format, open_source
    from bicovg.data.sources_folders import find_splits, list_folders

    format, path, classes = args.format, args.source, args.classes
    if format is None:
        format, path = detect_format(path)
    if args.name == "imagenet100" and classes is None and format in ("image-tree", "class-folders"):
        classes = IMAGENET100
    source = open_source(path, format, classes, args.test_share)
    if format == "image-tree":
        unused = sorted({*list_folders(path)} - {folder.name for folder in find_splits(path).values()})
        if unused:
            print(_printable(f"not used: the folders {', '.join(unused)} of {path}"), file=sys.stderr)
    if len(source.classes) < 2 and classes is not None:
        raise UserError(f"{classes} names one class: a network needs two or more to tell apart")
    if len(source.classes) < 2:
        found = ", ".join(map(repr, source.classes)) or "none"
        raise UserError(f"{path} has {len(source.classes)} classes ({found}): give a folder with two or more of them")
    return source


def _choose_fit(args: argparse.Namespace) -> tuple[int | None, int | None]:
    if args.size is not None or args.short_side is not None:
        return args.size, args.short_side
    known = KNOWN.get(args.name)
    return (known.size, known.short_side) if known else (None, None)


def _run_pack(args: argparse.Namespace) -> int:
    from bicovg.data.store import RejectedImages, data_root, pack
    from bicovg.data.store_files import check_name, list_partial

    if args.jobs is not None and args.jobs < 1:
        raise UserError(f"--jobs {args.jobs} must be at least 1")
    if not 0 <= args.max_rejected <= 1:
        raise UserError(f"--max-rejected {args.max_rejected} must lie between 0 and 1")
    root = data_root(args.root)
    leftovers = list_partial(root, check_name(args.name))
    source = _open_source(args)
    size, short_side = _choose_fit(args)
    options = {"jobs": args.jobs, "force": args.force, "max_rejected": args.max_rejected}
    try:
        with _show_progress("images") as progress:
            store = pack(source, root, args.name, size=size, short_side=short_side, progress=progress, **options)
    except RejectedImages as error:
        _print_rejected(error.rejected)
        raise
    for folder in leftovers:
        print(f"removed {folder.name}, left by an interrupted packing")
    _print_rejected(store.rejected)
    print(_describe(store))
    for split, expected in KNOWN[args.name].counts if args.name in KNOWN else ():
        found = store.counts.get(split, 0)
        if found != expected:
            print(
                f"warning: {args.name} has {expected:,} {split} images, {found:,} were packed",
                file=sys.stderr,
            )
    if args.name not in KNOWN:
        print(f"train on it: {train_command(store, args.root)}")
    return 0


def train_command(store: "PackedStore", root: str | None = None) -> str:
    """A first command for a data set of one's own: the recipe whose images are most like these, told what differs."""
    from bicovg.recipes import get_recipe

    side = min(store.size) if store.size else None
    oblong = store.size is not None and store.size[0] != store.size[1]
    recipe = "imagenet100-bicovg" if side is None else "tiny-imagenet-bicovg" if side >= 48 else "cifar100-bicovg"
    recipe = "digits" if side is not None and side < 32 else recipe
    usual = get_recipe(recipe)
    wanted = {
        "data.image_size": (side or usual.data.image_size, usual.data.image_size),
        "data.image_channels": (3, usual.data.image_channels),
        "data.num_classes": (len(store.classes), usual.data.num_classes),
        "data.augment.crop_pad": (0 if oblong else usual.data.augment.crop_pad, usual.data.augment.crop_pad),
        "data.augment.resized_crop": (side, usual.data.augment.resized_crop if oblong else side),
        "data.resize": (side, usual.data.resize if oblong else side),
        "train.batch_size": (min(usual.train.batch_size, store.counts["train"]), usual.train.batch_size),
    }
    flags = [f"--{path} {value}" for path, (value, default) in wanted.items() if value != default]
    flags += [f"--data.root {shlex.quote(str(root))}"] if root else []
    return " ".join([f"bicovg train {recipe} --data.name {store.name}", *flags])


def _print_rejected(rejected: list[dict[str, str]]) -> None:
    for entry in rejected:
        print(_printable(f"rejected {entry['path']}: {entry['reason']}"), file=sys.stderr)


def _describe(store: "PackedStore") -> str:
    size = f"{store.size[0]}x{store.size[1]}" if store.size else "variable size"
    splits = ", ".join(f"{split} {count:,}" for split, count in store.counts.items())
    total = sum(file.stat().st_size for file in store.folder.iterdir())
    return f"{store.name}: {splits} images, {len(store.classes)} classes, {size}, {total / 1e6:,.1f} MB"


def _run_verify(args: argparse.Namespace) -> int:
    from bicovg.data.store import PackedStore, data_root, verify_files
    from bicovg.data.store_files import check_name

    root = data_root(args.root)
    folder = root / check_name(args.name)
    if not folder.is_dir():
        PackedStore.open(root, args.name)  # says how to pack it
    with _show_progress("bytes") as progress:
        problems = verify_files(folder, progress)
    for problem in problems:
        print(f"{args.name}: {problem}")
    if not problems:
        print(f"{args.name}: every byte is as packed")
    return 1 if problems else 0


def _run_list(args: argparse.Namespace) -> int:
    """Stores, and what an interrupted packing left; other folders in the root are nobody's business."""
    from bicovg.data.store import PackedStore, data_root
    from bicovg.data.store_files import PARTIAL, is_store

    root = data_root(args.root)
    folders = sorted(root.iterdir()) if root.is_dir() else []
    lines = []
    for folder in folders:
        if PARTIAL in folder.name:
            lines.append(f"{folder.name}: left by an interrupted packing, or one still running")
        elif is_store(folder):
            try:
                lines.append(_describe(PackedStore.open(root, folder.name)))
            except UserError as error:
                lines.append(str(error))
    print("\n".join(lines) or f"no data sets in {root}: run `bicovg data pack NAME --from PATH`")
    return 0
