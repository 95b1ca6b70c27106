"""``bicovg report``, ``watch`` and ``export``: their flags, and what each does. No torch until it is needed."""

import argparse
from pathlib import Path
from typing import Any

from bicovg.errors import UserError


def add_parsers(commands: Any) -> None:
    report = _add(commands, "report", "make a page, figures or tables of runs")
    report.add_argument("runs", metavar="RUN", nargs="*")
    report.add_argument("--out", metavar="FILE", help="the page (default RUN/report.html; of several, report.html)")
    report.add_argument("--figures", metavar="DIR", help="write every plot as a file of its own, and no page")
    report.add_argument("--format", default="svg,pdf,png", help="formats of the figures (default svg,pdf,png)")
    report.add_argument("--no-images", action="store_true", help="leave out what needs the test images")
    report.add_argument("--tables", action="store_true", help="make the tables and figures of README and docs anew")
    report.add_argument("--tensorboard", metavar="DIR", help="write event files for TensorBoard, and no page")
    report.add_argument("--data-root", help="folder of packed data sets")
    report.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where to compute")
    watch = _add(commands, "watch", "show a run while it goes on, in the browser and on the terminal")
    watch.add_argument("run", metavar="RUN")
    watch.add_argument("--port", type=int, help="port on 127.0.0.1 (default 8765, or any free one)")
    watch.add_argument("--tensorboard", metavar="DIR", help="write event files for TensorBoard as well")
    export = _add(commands, "export", "write a run as a model folder, torch.export and ONNX")
    export.add_argument("run", metavar="RUN")
    export.add_argument(
        "--head", default="mean", help="mean, fused, fused-NAME, best (held-out-chosen), last, or a block"
    )
    export.add_argument("--out", metavar="DIR", help="folder to make (default RUN/export-HEAD)")
    export.add_argument("--format", default="hub,torch,onnx", help="what to write (default hub,torch,onnx)")


def _add(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    return parser


def report(args: argparse.Namespace) -> int:
    """The page of finished runs, or their figures."""
    from bicovg.report.collect import read_runs
    from bicovg.report.figures import write_figures
    from bicovg.report.page import write_page
    from bicovg.runlog import expand_runs

    if args.tables:
        return write_tables(args)
    if not args.runs:
        raise UserError("report needs a run folder: bicovg report RUN...")
    paths = expand_runs(args.runs)
    for run in read_runs(paths):
        if run.summary is None:
            raise UserError(
                f"{run.path} is unfinished ({len(run.metrics)} of {run.epochs} epochs): look at it with "
                f"`bicovg watch {run.path}`, or finish it with `bicovg train --resume {run.path}`"
            )
        if run.analysis is None and not run.recorded and not args.no_images:
            analyse_run(run.path, args)
    if args.tensorboard:
        return write_events(paths, Path(args.tensorboard))
    if args.figures:
        written = write_figures(read_runs(paths), Path(args.figures), args.format.split(","))
        print(f"written: {len(written)} files in {args.figures}")
        return 0
    default = paths[0] / "report.html" if len(paths) == 1 else Path("report.html")
    print(f"written: {write_page(paths, Path(args.out) if args.out else default)}")
    return 0


def write_tables(args: argparse.Namespace) -> int:
    """Tables of the checkout in the current folder."""
    from bicovg.report.filling import marked_files, update_tables

    if args.runs:
        raise UserError(f"--tables reads records/, not {args.runs[0]}: make a record of it with `bicovg record`")
    if not marked_files():
        raise UserError("no README.md or docs/*.md with a table is here: run it in the checkout")
    changed = update_tables()
    lines = [f"{'changed' if path.exists() else 'removed'}: {path}" for path in changed]
    print("\n".join(lines) or "every table is as its records say")
    return 0


def write_events(paths: list[Path], folder: Path) -> int:
    """Event files of every run, each in a folder of its own."""
    from bicovg.report.collect import read_runs
    from bicovg.report.pictures import slug
    from bicovg.tensorboard import EventWriter

    runs = read_runs(paths)
    for run in runs:
        events = EventWriter(folder / slug(run.label) if len(runs) > 1 else folder)
        events.record(run)
        events.close()
    print(f"written: {folder} (look with `tensorboard --logdir {folder}`)")
    return 0


def watch(args: argparse.Namespace) -> int:
    from bicovg.watch import watch as serve

    events = None
    if args.tensorboard:
        from bicovg.tensorboard import EventWriter

        events = EventWriter(Path(args.tensorboard))
    return serve(Path(args.run), args.port, events)


def export(args: argparse.Namespace) -> int:
    from bicovg.export import export_run

    out = Path(args.out) if args.out else Path(args.run) / f"export-{args.head}"
    checks = export_run(Path(args.run), args.head, out, args.format.split(","))
    for name, gap in checks["largest_difference"].items():
        print(f"{name}: largest difference to PyTorch {gap:.1e} in a logit, on {checks['images']} images")
    print(f"written: {out}")
    return 0


def analyse_run(path: Path, args: argparse.Namespace) -> None:
    """Make a run's analysis.json from its weights and test images."""
    from bicovg.commands import open_run

    args.run = str(path)
    try:
        trainer = open_run(args)
    except UserError as error:
        raise UserError(f"{error} (or leave out what needs the test images: --no-images)") from None
    store_analysis(trainer)


def store_analysis(trainer: Any) -> None:
    from bicovg.report.analysis import analyse
    from bicovg.runlog import write_json

    logits, labels = trainer.logits("test")
    found = analyse(logits, labels, trainer.splits.test, trainer.splits.classes)
    write_json(trainer.run / "analysis.json", found)


def finish_run(trainer: Any) -> Path:
    """What ``train`` leaves behind for looking at: analysis and page."""
    from bicovg.report.page import write_page

    store_analysis(trainer)
    return write_page([trainer.run], trainer.run / "report.html")
