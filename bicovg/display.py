"""What a person sees while a run goes on: a live per-block table on a terminal, one plain line per epoch otherwise."""

from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from bicovg.config import Config


def wide_console() -> Console:
    """Tables keep their columns when output is redirected."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def clock(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


class Display:
    """Context manager around a training loop."""

    def __init__(self, config: Config, exits: list[int], engine: str, console: Console | None = None) -> None:
        self.config, self.exits = config, exits
        self.console = console or Console()
        self.title = f"{config.recipe}, seed {config.seed}, scope {config.model.scope}, engine {engine}"
        self.live: Live | None = None
        self.bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
        self.task = self.bar.add_task("", total=None)

    def __enter__(self) -> "Display":
        if self.console.is_terminal:
            self.live = Live(Group(Text(self.title), self.bar), console=self.console, refresh_per_second=4)
            self.live.start()
        else:
            print(self.title, flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def step(self, epoch: int, done: int, total: int) -> None:
        """Move the bar; nothing where there is none."""
        if self.live is not None:
            description = f"epoch {epoch + 1}/{self.config.train.epochs}"
            self.bar.update(self.task, description=description, completed=done, total=total)

    def update(self, metrics: dict[str, Any], timing: dict[str, Any], eta: float) -> None:
        """Show a finished epoch."""
        if self.live is not None:
            # the table comes last: where the terminal is too short, its end is cut and not the status
            status = Text(self.status(metrics, timing, eta))
            self.live.update(Group(Text(self.title), status, self.bar, self.table(metrics)), refresh=True)
        else:
            print(self.line(metrics, timing, eta), flush=True)

    def note(self, text: str) -> None:
        """A sentence between the epochs."""
        self.console.print(Text(text), soft_wrap=True)

    def status(self, metrics: dict[str, Any], timing: dict[str, Any], eta: float) -> str:
        waiting = timing["loader_wait_share"]
        slow = f"  LOADER IS THE BOTTLENECK ({waiting:.0%} waiting)" if waiting > 0.2 else ""
        return (
            f"epoch {metrics['epoch'] + 1}/{self.config.train.epochs}  lr {metrics['lr']:.2e}  "
            f"{timing['images_per_second']:.0f} img/s  peak {gigabytes(timing['peak_memory_bytes'])}  "
            f"ETA {clock(eta)}{slow}"
        )

    def line(self, metrics: dict[str, Any], timing: dict[str, Any], eta: float) -> str:
        text = self.status(metrics, timing, eta) + f"  loss {sum(metrics['loss']) / len(metrics['loss']):.3f}"
        if "top1" in metrics:
            top1 = " ".join(f"{value:.1f}" for value in metrics["top1"])
            text += f"  {metrics['split']} top-1 by block {top1}  mean {metrics['mean_top1']:.2f}"
        return text

    def table(self, metrics: dict[str, Any]) -> Table:
        table = Table()
        split = metrics.get("split", "")
        for column in ("block", "train loss", f"{split} top-1 %", f"{split} top-5 %"):
            table.add_column(column, justify="right")
        for row, block in enumerate(self.exits):
            accuracies = [f"{metrics[key][row]:.2f}" if key in metrics else "-" for key in ("top1", "top5")]
            table.add_row(str(block), f"{metrics['loss'][row]:.4f}", *accuracies)
        if "mean_top1" in metrics and len(self.exits) > 1:
            table.add_section()
            table.add_row("mean", "", f"{metrics['mean_top1']:.2f}", "")
        return table


def summary_table(summary: dict[str, Any]) -> Table:
    """The end of a run: every exit, then every way to combine them, by name."""
    test, weights = summary["test"], (summary["fusion"]["train"] or {}).get("weights")
    title = f"{summary['recipe']}, seed {summary['seed']}, scope {summary['scope']}: test accuracy, %"
    table = Table(title=escape(title))
    for column in ("prediction", "top-1", "top-5", "fusion weight"):
        table.add_column(column, justify="left" if column == "prediction" else "right")
    for row, block in enumerate(summary["exit_blocks"]):
        weight = f"{weights[row]:.3f}" if weights else ""
        table.add_row(
            f"block {block}", f"{test['exits']['top1'][row]:.2f}", f"{test['exits']['top5'][row]:.2f}", weight
        )
    table.add_section()
    for label, record in combined_rows(summary):
        table.add_row(escape(label), f"{record['top1']:.2f}", f"{record['top5']:.2f}")
    return table


def combined_rows(summary: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(label, accuracies) of every single-number prediction a summary holds."""
    test, fusion = summary["test"], summary["fusion"]
    rows = [("last block", test["last"]), ("best block (test-chosen)", test["best_test_chosen"])]
    if test.get("best_heldout_chosen"):
        rows.append(("best block (held-out-chosen)", test["best_heldout_chosen"]))
    if len(summary["exit_blocks"]) > 1:
        rows.append(("mean of blocks", test["mean"]))
    rows += [(f"fused (fitted on {name})", record) for name, record in fusion.items() if record]
    return rows
