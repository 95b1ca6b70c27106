"""Train what a record claims, and make the record: every run of the reproduction by its name.

    python benchmarks/reproduce.py --list
    python benchmarks/reproduce.py tiny-imagenet-end-to-end:1,2 cifar100-short-cc --data-root DATA

One run after the other, each in a process of its own. While one trains, the next imports, compiles and captures, and
the one before fits its fusions; so a GPU trains all the time. Records go to ``--records``, beside the seeds
that are there; those are not trained again, so give another folder to repeat them. A run that was interrupted goes on.
What stands behind ``--`` is added to every command: to try, on a CPU, in half a minute,

    python benchmarks/reproduce.py digits:0,1 --records /tmp/records -- --train.epochs 1
"""

import argparse
import fcntl
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bicovg.recipes import get_recipe

Words = tuple[str, ...]
NO_CHECKPOINTS: Words = ("--train.save_every", "0", "--train.save_seconds", "0")
HOLDOUT: Words = ("--data.holdout", "0.02")
ONE_CLIP: Words = ("--train.clip_scope", "global", "--train.schedule", "summed")
TENTH: Words = ("--data.holdout", "0.1")  # to choose between settings: 5,000 images have a standard error of 0.6 points
GRACE = 60.0  # seconds a run that is stopped has to save itself


@dataclass(frozen=True)
class Plan:
    """What a record's runs are: a recipe, flags, and the seeds that are wanted."""

    recipe: str
    flags: Words = ()
    seeds: tuple[int, ...] = (0,)

    def afterwards(self, run: str) -> list[list[str]]:
        """What is done with a run of several exits before it is recorded; the digits have no augmentation."""
        model = get_recipe(self.recipe).model
        if (model.scope == "end-to-end" and model.exits == "last") or self.recipe.startswith("digits"):
            return []
        held = [["fuse", run, "--on", "heldout", "--temperatures"]] if HOLDOUT[0] in self.flags else []
        early = [] if self.short else [["eval", run, "--early-exit"]]
        return [["fuse", run, "--on", "augmented"], *held, *early]

    @property
    def short(self) -> bool:
        """Whether it has fewer epochs than its recipe."""
        return "--train.epochs" in self.flags


def full(row: str, *flags: str, seeds: tuple[int, ...] = (0,)) -> Plan:
    """A row of the tables at full length."""
    on_cifar = row.startswith("cifar100")
    pace = ("--train.precision", "bfloat16", "--train.eval_every", "4") if on_cifar else ("--train.eval_every", "3")
    return Plan(row, (*pace, *NO_CHECKPOINTS, *flags), seeds)


def short(row: str, *flags: str) -> Plan:
    """The same in a quarter, or a third, of the epochs, with a cosine of its own."""
    return full(row, "--train.epochs", "100" if row.startswith("cifar100") else "30", *flags)


def shorts(data: str) -> dict[str, Plan]:
    """Ablation, reductions and rivals, and the readings of what the paper leaves open, each on one data set."""
    rows = ("per-channel", "cc", "ms", "bicovg", "bicovg-fal", "r4", "r16", "hgb2", "bp", "bp-deep")
    plans = {row: short(f"{data}-{row}") for row in (*rows, "grouped")}
    plans["no-norm"] = short(f"{data}-bicovg", "--model.batch_norm", "false")
    plans["float32"] = short(f"{data}-bicovg", "--train.precision", "float32")
    if data != "cifar100":  # whose recipe has no clip
        plans["clip-global"] = short(f"{data}-bicovg", *ONE_CLIP)
    return {f"{data}-short-{name}": plan for name, plan in plans.items()}


def candidates(recipe: str, settings: dict[str, Words]) -> dict[str, Plan]:
    """Short runs of other settings, to be judged on held-out images; "as-is" has none."""
    return {f"{recipe}-tune-{name}": short(recipe, *TENTH, *flags) for name, flags in settings.items()}


LR, DECAY = "--optim.lr", "--optim.weight_decay"
THREE = (0, 1, 2)
# the recipe's AdamW decays weights by 1.6 % in a whole run, which is nothing; the last is Tiny-ImageNet's SGD, with
# the decay that is usual for VGGs
CIFAR100: dict[str, Words] = {
    "as-is": (),
    "lr1e-3-wd0.05": (LR, "1e-3", DECAY, "0.05"),
    "lr1e-3-wd0.5": (LR, "1e-3", DECAY, "0.5"),
    "sgd-lr0.05-wd5e-4": ("--optim.name", "sgd", LR, "0.05", DECAY, "5e-4", "--train.clip_norm", "1.0"),
}
CHOSEN = "lr1e-3-wd0.5"  # of these, end to end's best on held-out images after 100 epochs
PLANS: dict[str, Plan] = {
    "digits": Plan("digits", seeds=(0, 1, 2, 3, 4)),
    "digits-per-channel": Plan("digits-per-channel", seeds=(0, 1, 2, 3, 4)),
    "tiny-imagenet-strict": full("tiny-imagenet-bicovg", seeds=THREE),
    "tiny-imagenet-end-to-end": full("tiny-imagenet-bp", seeds=THREE),
    "tiny-imagenet-hgb4": full("tiny-imagenet-hgb4"),
    "tiny-imagenet-hgb2": full("tiny-imagenet-hgb2"),
    "tiny-imagenet-classic": full("tiny-imagenet-bp-classic"),
    "tiny-imagenet-strict-fal": full("tiny-imagenet-bicovg-fal"),
    "tiny-imagenet-strict-holdout": full("tiny-imagenet-bicovg", *HOLDOUT),
    "tiny-imagenet-strict-clip-global": full("tiny-imagenet-bicovg", *ONE_CLIP),
    "cifar100-strict-fal": full("cifar100-bicovg-fal", seeds=THREE),
    "cifar100-end-to-end": full("cifar100-bp", seeds=THREE),
    "cifar100-strict": full("cifar100-bicovg", seeds=(0, 1)),
    "cifar100-hgb4": full("cifar100-hgb4"),
    "cifar100-grouped": full("cifar100-grouped"),
    "cifar100-end-to-end-deep": full("cifar100-bp-deep", seeds=THREE),
    "tiny-imagenet-end-to-end-deep": full("tiny-imagenet-bp-deep", seeds=THREE),
    "cifar100-end-to-end-tuned": full("cifar100-bp", *CIFAR100[CHOSEN]),
    "cifar100-strict-holdout": full("cifar100-bicovg", *HOLDOUT),
    **shorts("cifar100"),
    **shorts("tiny-imagenet"),
    **candidates("cifar100-bp", CIFAR100),
    **candidates("cifar100-bicovg", CIFAR100),  # the same choice for strict: end to end is not to be the only one tuned
    # of these the one that is best on held-out images, and no other
    **{f"cifar100-strict-tuned-{name}": full("cifar100-bicovg", *flags) for name, flags in CIFAR100.items() if flags},
    **candidates("tiny-imagenet-bp", {"as-is": (), "wd5e-4": (DECAY, "5e-4"), "wd1e-3": (DECAY, "1e-3")}),
}


@dataclass
class Job:
    """One run: a plan under one seed."""

    name: str
    seed: int
    args: argparse.Namespace

    @property
    def run(self) -> str:
        return str(Path(self.args.runs) / self.name / f"s{self.seed}")

    def train_words(self) -> list[str]:
        plan, root = PLANS[self.name], self.args.data_root
        place = ["--data.root", root] if root else []
        seed = ["--seed", str(self.seed)] if self.seed else []
        return ["train", plan.recipe, *plan.flags, *self.args.more, *seed, *place, "--out", self.run]

    def later_words(self) -> list[list[str]]:
        place = ["--data-root", self.args.data_root] if self.args.data_root else []
        return [[*words, *place] for words in PLANS[self.name].afterwards(self.run)]

    @property
    def record(self) -> Path:
        return Path(self.args.records) / self.name

    def recorded(self) -> bool:
        """Whether the record has this seed already."""
        path = self.record / "record.json"
        return path.exists() and self.seed in json.loads(path.read_text())["seeds"]


def run_command(words: list[str]) -> int:
    from bicovg.cli import main

    sys.argv = ["bicovg", *words]  # what env.json calls the command
    return main(words)


def add_record(job: Job) -> int:
    """Make the record, or add to it: one process at a time, as another seed may be doing the same."""
    job.record.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(job.record.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return run_command(["record", job.run, "--out", str(job.record), *["--add"] * job.record.exists()])
    finally:
        os.close(lock)


def work(job: Job, log: str, talk: Connection) -> None:
    """In a process of its own: says "ready" when all is compiled, waits for a word, says "trained"."""
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "1"  # as under torchrun: this very run, if it has begun, goes on
    from bicovg.trainer import Trainer

    warm_up, summarise = Trainer._warm_up, Trainer.summarise

    def wait_for_turn(trainer: Trainer) -> None:
        warm_up(trainer)
        begun = time.monotonic()
        talk.send("ready")
        while not talk.poll(0.2) and not trainer.stopper.exit_code:  # a signal alone would not end the waiting
            pass
        if not trainer.stopper.exit_code:
            talk.recv()
        trainer._begun += time.monotonic() - begun  # the run's own time, without the waiting

    def give_turn(trainer: Trainer) -> dict[str, Any]:
        talk.send("trained")
        return summarise(trainer)

    Trainer._warm_up, Trainer.summarise = wait_for_turn, give_turn  # type: ignore[method-assign]
    code = run_command(job.train_words())
    for words in job.later_words():
        code = code or run_command(words)
    sys.exit(code or add_record(job))


def parse_jobs(text: str, args: argparse.Namespace) -> list[Job]:
    name, _, seeds = text.partition(":")
    if name not in PLANS:
        raise SystemExit(f"{name!r} is not planned: --list names all that are")
    if seeds and not all(seed.isdecimal() for seed in seeds.split(",")):
        raise SystemExit(f"{text!r}: seeds are whole numbers with commas between them, as in {name}:0,1")
    chosen = map(int, seeds.split(",")) if seeds else PLANS[name].seeds
    return [Job(name, seed, args) for seed in chosen]


def heard(talk: Connection) -> bool:
    """Whether the process said something, and did not end."""
    try:
        talk.recv()
        return True
    except (EOFError, OSError):
        return False


def tell(talk: Connection) -> bool:
    """Say "go"; whether somebody was there to hear it."""
    try:
        talk.send("go")
        return True
    except OSError:
        return False


def run_all(jobs: list[Job]) -> int:
    """Every job in turn; the number of those that failed."""
    processes: list[BaseProcess] = []
    begun = time.monotonic()

    def say(words: str) -> None:
        print(f"{time.monotonic() - begun:6.0f} s  {words}", flush=True)

    try:
        previous: Connection | None = None
        for job in jobs:
            process, talk = start(job)
            processes.append(process)
            if not heard(talk):
                say(f"FAILED before it could train {job.run}")
                continue
            if previous is not None:
                heard(previous)
            say(f"training {job.run}" if tell(talk) else f"FAILED before it could train {job.run}")
            previous = talk
        for job, process in zip(jobs, processes, strict=True):
            process.join()
            done = process.exitcode == 0
            say(f"done {job.run}" if done else f"FAILED ({process.exitcode}), see {job.run}.log: {job.run}")
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(GRACE)
            process.kill()
    return sum(process.exitcode != 0 for process in processes)


def start(job: Job) -> tuple[BaseProcess, Connection]:
    """A process for a job, and the line to it."""
    context = get_context("spawn")
    Path(job.run).parent.mkdir(parents=True, exist_ok=True)
    here, there = context.Pipe()
    process = context.Process(target=work, args=(job, f"{job.run}.log", there))
    process.start()
    there.close()  # so that its end is heard here
    return process, here


def main() -> int:
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME[:SEED,...]")
    parser.add_argument("--list", action="store_true", help="what there is, what of it has no record, the commands")
    parser.add_argument("--data-root", help="folder of packed data sets")
    parser.add_argument("--runs", default="runs/reproduced", help="where runs are put")
    parser.add_argument("--records", default="records", help="where records are put")
    args = parser.parse_args(words[:cut], argparse.Namespace(more=words[cut + 1 :]))
    if args.list:
        for name, plan in PLANS.items():
            command = " ".join(["bicovg train", plan.recipe, *plan.flags])
            missing = [str(seed) for seed in plan.seeds if not Job(name, seed, args).recorded()]
            state = f"missing {','.join(missing)}" if missing else ""
            print(f"{name:36} seeds {','.join(map(str, plan.seeds)):9} {state:13} {command}")
        return 0
    if not args.names:
        parser.error("name what to train, or ask for the --list")
    jobs = list({job.run: job for name in args.names for job in parse_jobs(name, args)}.values())
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that nobody is left behind
    for job in (job for job in jobs if job.recorded()):
        print(f"{job.record} has seed {job.seed} already: give another folder as --records to train it again")
    return run_all([job for job in jobs if not job.recorded()])


if __name__ == "__main__":
    sys.exit(main())
