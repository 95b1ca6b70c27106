"""Benchmark results: the tables on the terminal and the JSON file, in which every number names the run it came from."""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from bicovg.bench_cases import BASELINE, Case
from bicovg.config import Config
from bicovg.errors import UserError
from bicovg.runlog import find_commit, write_json

FOLDER = Path("benchmarks") / "results"
SHOWN_MEMORY = (("steady_bytes", "steady"), ("first_steps_bytes", "first steps"), ("reserved_bytes", "reserved"))
Row = dict[str, Any]


def describe_case(case: Case) -> Row:
    """What a configuration is, in plain values."""
    model, train, data = case.config.model, case.config.train, case.config.data
    return {
        "name": case.name,
        "method": model.method,
        "scope": model.scope,
        "blocks_per_unit": {"strict": 1, "hgb": model.group_size}.get(model.scope),
        "alignment": model.alignment,
        "schedule": train.schedule,
        "checkpointing": model.checkpointing,
        "micro_batches": train.micro_batches,
        "goodness_stand_in": case.stand_in,
        "width": model.width,
        "batch_size": train.batch_size,
        "image_size": data.image_size,
        "precision": train.precision,
        "clip_norm": train.clip_norm,
        "learning_rate": case.config.optim.lr,
    }


def results_path(out: str | None, machine: dict[str, Any], recipe: str) -> Path:
    """``benchmarks/results/<gpu>-torch<version>-<recipe>.json`` unless a path is given."""
    if out is not None:
        return Path(out)
    device = re.sub(r"[^a-z0-9]+", "-", (machine["gpu"] or "cpu").lower()).strip("-")
    return FOLDER / f"{device}-torch{machine['torch'].split('+')[0]}-{recipe}.json"


def row_key(row: Row) -> str:
    """Rows of one key replace each other when a benchmark is run again."""
    sides = row.get("sides")
    if sides is not None:
        return json.dumps([row_key(side) for side in sides])
    parts = ("name", "engine_asked", "width", "batch_size", "image_size", "precision")
    return json.dumps([row[part] for part in parts])


def merge_results(path: Path, config: Config, machine: dict[str, Any], **sections: list[Row]) -> None:
    """Write new entries into the file, in place of older ones of the same configuration."""
    found = read_results(path, config.recipe)
    known = [entry["id"] for entry in found["runs"]]
    this = {"id": max(known, default=-1) + 1, **describe_run(machine)}
    for name, rows in sections.items():
        new = {row_key(row) for row in rows}
        kept = [row for row in found[name] if row_key(row) not in new]
        found[name] = kept + [{**row, "run": this["id"]} for row in rows]
    write_results(path, found, this)


def find_timed(path: Path, recipe: str, rows: list[Row]) -> tuple[dict[str, Any], dict[str, Row]]:
    """A results file, and its rows by their keys, among them one of every configuration in ``rows``."""
    found = read_results(path, recipe)
    timed = {row_key(row): row for row in found["rows"] if row["status"] == "ok"}
    missing = [row["name"] for row in rows if row_key(row) not in timed]
    if missing:
        raise UserError(f"{path} has no speed of {', '.join(missing)} in this engine: measure without --untimed first")
    return found, timed


def merge_memory(path: Path, config: Config, machine: dict[str, Any], rows: list[Row]) -> None:
    """Put the memory of new rows in the place of that of older ones of the same configuration, whose speeds stay.

    What failed or ran in another engine or on another device changes nothing, and what was not measured now (the
    smallest memory, if not asked for) stays. ``memory_run`` of a row is the run its memory came from, where that is
    another.
    """
    found, timed = find_timed(path, config.recipe, rows)
    gpus = {entry["id"]: entry["gpu"] for entry in found["runs"]}
    this, strange = {"id": max(gpus) + 1, **describe_run(machine)}, []
    for row in (row for row in rows if row["status"] == "ok"):
        old = timed[row_key(row)]
        if (old["engine"], gpus[old["run"]]) != (row["engine"], machine["gpu"]):
            before = f"was timed with engine {old['engine']} on {gpus[old['run']] or 'a CPU'}"
            now = f"ran now with {row['engine']} on {machine['gpu'] or 'a CPU'}"
            strange.append(f"{row['name']} {before} and {now}: measure it without --untimed")
            continue
        memory = {name: value for name, value in row["memory"].items() if value is not None}
        old.update(memory={**old["memory"], **memory}, memory_run=this["id"])
    write_results(path, found, this)
    if strange:  # after what can be used is safe
        raise UserError("; ".join(strange))


def write_results(path: Path, found: dict[str, Any], this: dict[str, Any]) -> None:
    """Write the file with the runs, this one among them, that its rows name."""
    rows = [row for name in ("rows", "side_by_side") for row in found[name]]
    used = {row["run"] for row in rows} | {row["memory_run"] for row in rows if "memory_run" in row}
    found["runs"] = [entry for entry in [*found["runs"], this] if entry["id"] in used]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another place with --out") from None


def describe_run(machine: dict[str, Any]) -> dict[str, Any]:
    """When, of which code, by which command and where something was measured."""
    date = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"date": date, "commit": find_commit(), "command": command_line(sys.argv[1:]), **machine}


def command_line(words: list[str]) -> str:
    """The command without the place its results went to, which is no part of what was measured."""
    kept = [word for word, before in zip(words, ["", *words], strict=False) if "--out" not in (word, before)]
    return " ".join(["bicovg", *[word for word in kept if not word.startswith("--out=")]])


def read_results(path: Path, recipe: str) -> dict[str, Any]:
    """An earlier file of the same recipe, or an empty one."""
    if not path.exists():
        return {"recipe": recipe, "runs": [], "rows": [], "side_by_side": []}
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        fits = isinstance(found, dict) and found.get("recipe") == recipe
        if fits and all(isinstance(found.get(name), list) for name in ("runs", "rows", "side_by_side")):
            return found
    except (ValueError, OSError):
        pass
    raise UserError(f"{path} is not a benchmark file of {recipe}: name another with --out, or move it away")


def gigabytes(row: Row, field: str) -> str:
    """Memory without the data set."""
    value = row["memory"][field]
    return "-" if value is None else f"{(value - (row['memory']['data_bytes'] or 0)) / 1e9:.3f}"


def speed_cells(row: Row) -> list[str]:
    speed = row["images_per_second"]
    if speed["median"] is None:
        return ["-", "-"]
    return [f"{speed['median']:.0f}", f"{speed['min']:.0f}-{speed['max']:.0f}"]


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def make_table(title: str, columns: list[str]) -> Any:
    from rich.table import Table

    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def show(table: Any) -> None:
    """Tables keep their columns when output is redirected."""
    from rich.console import Console

    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)


def heading(config: Config) -> str:
    train, data = config.train, config.data
    return f"{config.recipe}, batch {train.batch_size}, {data.image_size} px, {train.precision}"


def print_rows(rows: list[Row], config: Config) -> None:
    """One line per configuration; memory in GB without the data set."""
    on_gpu = any(row["memory"]["steady_bytes"] is not None for row in rows)
    memory = [*SHOWN_MEMORY, ("smallest_bytes", "smallest")] if on_gpu else [("saved_bytes", "saved for backward")]
    columns = ["configuration", "engine", "img/s", "min-max", *[f"{text} GB" for _, text in memory]]
    table = make_table(heading(config), [*columns, "GMAC", "% of roofline"])
    failures = []
    for row in rows:
        if row["status"] != "ok":
            failures.append(f"{row['name']}: {row['reason']}")
        table.add_row(
            row["name"],
            row["engine"] or "failed",
            *speed_cells(row),
            *[gigabytes(row, field) for field, _ in memory],
            f"{row['roofline']['gmac_per_image']:.2f}",
            percent(row["roofline"]["share"]),
        )
    show(table)
    print("\n".join(failures), end="\n" if failures else "")


def print_side_by_side(table: dict[str, Any], config: Config) -> None:
    """Speeds measured in turn, and what each is of the baseline's."""
    columns = ["configuration", "engine", "img/s", "min-max", f"/ {BASELINE}", "min-max", "steady GB", "% of roofline"]
    shown = make_table(f"{heading(config)}: side by side, {table['rounds']} rounds", columns)
    for row in table["sides"]:
        ratio = table[f"speed_over_{BASELINE}"].get(row["name"])
        shown.add_row(
            row["name"],
            row["engine_asked"] if row["engine"] else f"failed: {row['reason']}",
            *speed_cells(row),
            *([f"{ratio['median']:.3f}", f"{ratio['min']:.3f}-{ratio['max']:.3f}"] if ratio else ["-", "-"]),
            gigabytes(row, "steady_bytes"),
            percent(row["roofline"]["share"]),
        )
    show(shown)
    for key, text in (("goodness_share", ""), ("goodness_share_at_most", " at most, with batch norm's backward pass")):
        if table[key] is not None:
            print(f"goodness share of the strict step: {percent(table[key])} %{text}")
