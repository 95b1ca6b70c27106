"""The command line. Imports no torch until a command needs it, so that ``--help`` answers in a blink."""

import argparse
import difflib
import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from bicovg.config import Config, nearest, override, parse_value, walk_settings
from bicovg.errors import StorageError, UserError, storage_sentence
from bicovg.gpu_memory import spare_memory
from bicovg.recipes import RECIPES, get_recipe

DESCRIPTION = "Train convolutional networks without backpropagation through the net (BiCovG, Forward-Forward)."

HANDLERS = {
    "train": "bicovg.commands:train",
    "resume": "bicovg.commands:resume",
    "eval": "bicovg.commands:evaluate",
    "fuse": "bicovg.commands:fuse",
    "predict": "bicovg.commands:predict",
    "compare": "bicovg.comparing:compare",
    "checkpoint": "bicovg.commands:checkpoint",
    "report": "bicovg.report.command:report",
    "watch": "bicovg.report.command:watch",
    "export": "bicovg.report.command:export",
    "bench": "bicovg.bench:run",
    "record": "bicovg.records:run",
    "data": "bicovg.data.command:run",
}


class Parser(argparse.ArgumentParser):
    """argparse that speaks one sentence, suggests the nearest flag, and exits with 2."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            raise UserError(f"unknown argument {unknown[0]!r}")
        return found


def build_parser() -> Parser:
    from bicovg.bench import add_parser as add_bench_parser
    from bicovg.data.command import add_parser as add_data_parser
    from bicovg.records import add_parser as add_record_parser
    from bicovg.report.command import add_parsers as add_report_parsers

    parser = Parser(prog="bicovg", description=DESCRIPTION, allow_abbrev=False)
    commands: Any = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    commands.add_parser("recipes", help="list the named recipes")
    train = commands.add_parser(
        "train",
        help="train a recipe (default: the built-in digits)",
        description="Train a recipe. Every setting is a flag, for example --optim.lr 0.1 --model.channels 32,64.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_train_arguments(train)
    add_run_parsers(commands)
    add_predict_parser(commands)
    add_bench_parser(commands)
    add_record_parser(commands)
    add_report_parsers(commands)
    add_data_parser(commands)
    return parser


def add_run_parsers(commands: Any) -> None:
    """What is done with finished runs."""
    evaluate, fuse = (
        commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        for name, text in (
            ("eval", "evaluate a run on its test images"),
            ("fuse", "fit Logistic Fusion on a run's exits"),
        )
    )
    for command in (evaluate, fuse):
        command.add_argument("run", metavar="RUN")
        command.add_argument("--data-root", help="folder of packed data sets")
        add_device_argument(command)
    text = "measure accuracy against compute when stopping early"
    evaluate.add_argument("--early-exit", action="store_true", help=text)
    images = ("train", "augmented", "heldout")
    fuse.add_argument("--on", default="train", choices=images, help="images whose logits are fitted")
    fuse.add_argument("--temperatures", action="store_true", help="fit a temperature of every exit beside its weight")
    compare = commands.add_parser("compare", help="compare finished runs, seeds pooled", allow_abbrev=False)
    compare.add_argument("runs", metavar="RUN", nargs="+")
    checkpoint = commands.add_parser("checkpoint", help="list or verify a run's checkpoints", allow_abbrev=False)
    checkpoint.add_argument("action", choices=("list", "verify"))
    checkpoint.add_argument("run", metavar="RUN")


def add_device_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where to compute")


def add_predict_parser(commands: Any) -> None:
    predict = commands.add_parser("predict", help="classify image files with a run", allow_abbrev=False)
    predict.add_argument("run", metavar="RUN")
    predict.add_argument("images", metavar="IMAGE", nargs="+", help="image files, or folders of them")
    predict.add_argument(
        "--head", default="mean", help="mean, fused, fused-NAME, best (held-out-chosen), last, or a block"
    )
    predict.add_argument("--top", type=int, default=5, help="classes to print per image")
    predict.add_argument("--format", default="table", choices=("table", "json", "csv"), help="how to print them")
    predict.add_argument(
        "--early-exit", type=float, metavar="CONFIDENCE", help="stop at the first block this sure, for example 0.9"
    )
    add_device_argument(predict)


def seed_number(text: str) -> int:
    """One value of --seeds."""
    if text.isdecimal() and len(text) < 19:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at most 18 digits")


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a name from `bicovg recipes`")
    parser.add_argument("--resume", metavar="RUN", help="continue this run folder")
    parser.add_argument("--out", metavar="DIR", help="run folder (default runs/<recipe>-s<seed>-<time>)")
    parser.add_argument(
        "--seeds", type=seed_number, nargs="+", metavar="SEED", help="one run per seed, mean and std at the end"
    )
    parser.add_argument("--max-seconds", type=float, metavar="N", help="stop cleanly after N seconds, resumable")
    parser.add_argument("--engine", dest="train.engine", default=argparse.SUPPRESS, help="short for --train.engine")
    for setting in walk_settings(Config()):
        parser.add_argument(
            f"--{setting.path}", dest=setting.path, metavar="X", default=argparse.SUPPRESS, help=setting.help
        )


def split_overrides(args: argparse.Namespace, config: Config) -> dict[str, Any]:
    """The config flags among the parsed arguments, as typed values by path."""
    kinds = {setting.path: setting.kind for setting in walk_settings(config)}
    return {path: parse_value(value, kinds[path], path) for path, value in vars(args).items() if path in kinds}


def known_flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: the exit code; user mistakes are one sentence on stderr and 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return dispatch(words)
    except UserError as error:
        rank = os.environ.get("RANK", "0") if os.environ.get("WORLD_SIZE", "1") != "1" else None
        print(f"bicovg: {error}" if rank is None else f"bicovg: rank {rank}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("bicovg: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            print(f"bicovg: {error.filename!s:.60}... is too long for a file's name: shorten it", file=sys.stderr)
            return UserError.exit_code
        sentence = storage_sentence(error)
        if sentence is None:
            raise
        print(f"bicovg: {sentence}", file=sys.stderr)
        return StorageError.exit_code
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        begins = words[:1] == ["train"] and not any(word.startswith("--resume") for word in words)
        sizes = "choose a smaller --train.batch_size, --model.width or --model.channels"
        repair = sizes if begins else "free some, or take another machine"
        print(f"bicovg: there is not enough memory: {repair}", file=sys.stderr)
        return UserError.exit_code


def out_of_memory(error: BaseException) -> bool:
    """Whether Python, or torch on a CPU or GPU, could not get the memory it asked for."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"MemoryError", "OutOfMemoryError"}) or "allocate memory" in str(error)


def dispatch(words: list[str]) -> int:
    parser = build_parser()
    suggest_flags(parser, words)
    args = parser.parse_args(words)
    if args.command is None:
        parser.print_help()
        return 0
    if args.command == "recipes":
        return list_recipes()
    if args.command == "train":
        return dispatch_train(args)
    if args.command == "bench":
        config = get_recipe(args.recipe)
        return int(load_handler("bench")(override(config, split_overrides(args, config)), args))
    return int(load_handler(args.command)(args))


def dispatch_train(args: argparse.Namespace) -> int:
    resumes = args.resume is not None
    if resumes and not args.resume:
        raise UserError("--resume was given no run folder: name one, as in --resume runs/mine")
    config = Config() if resumes else get_recipe(args.recipe or "digits")
    changes = split_overrides(args, config)
    if resumes:
        return int(load_handler("resume")(args, changes))
    return int(load_handler("train")(override(config, changes), args))


def load_handler(command: str) -> Callable[..., int]:
    """The function behind a command; what it imports (torch, mostly) is imported here and not before."""
    spare_memory()
    module, _, name = HANDLERS[command].partition(":")
    handler: Callable[..., int] = getattr(importlib.import_module(module), name)
    return handler


def suggest_flags(parser: argparse.ArgumentParser, words: list[str], spoken: str = "bicovg") -> None:
    """Name the nearest flag or command for the first unknown one."""
    choices: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            choices = dict(action.choices)
    if choices:
        if words and not words[0].startswith("-"):
            if words[0] not in choices:
                hint = nearest(words[0], list(choices))
                raise UserError(f"unknown command {words[0]!r}{hint} (`{spoken} --help` lists them)")
            suggest_flags(choices[words[0]], words[1:], f"{spoken} {words[0]}")
        return
    flags = known_flags(parser)
    for word in words:
        flag = word.split("=")[0]
        if flag.startswith("--") and flag != "--" and flag not in flags:
            close = difflib.get_close_matches(flag, flags, n=1, cutoff=0.4)
            hint = f"; did you mean {close[0]}?" if close else f" (`{spoken} --help` lists them)"
            raise UserError(f"unknown field or flag {flag}{hint}")


def list_recipes() -> int:
    width = max(map(len, RECIPES))
    for name, build in RECIPES.items():
        config = build()
        print(f"{name:{width}}  {config.model.scope:10}  {config.train.epochs:3d} epochs  {config.about}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
