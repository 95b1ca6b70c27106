"""Tables from the benchmark files: speed and memory (``bicovg bench``), how engines agree (``benchmarks/agree.py``)."""

import json
from collections.abc import Sequence
from typing import Any

from bicovg.bench_cases import BASELINE, FAL, STRICT
from bicovg.bench_report import FOLDER
from bicovg.config import Config
from bicovg.recipes import get_recipe
from bicovg.report.benchmarks import read_bench
from bicovg.report.paper import EFFICIENCY

NOT_RUN = "not run"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def bench_files() -> list[dict[str, Any]]:
    """Every benchmark file, by name."""
    found = [read_bench(path) for path in sorted(FOLDER.glob("*.json"))]
    return [result for result in found if result is not None]


def speed_table() -> str:
    """Strict against end-to-end on a GPU, measured in turns: speed, memory, and what goodness takes of the step."""
    header = ["backbone of", "batch", "px", "precision", "strict, img/s", "end-to-end, img/s", "ratio, rounds from-to"]
    header += ["strict + FAL, img/s", "ratio", "strict, GB", "end-to-end, GB", "memory ratio", "goodness share"]
    header.append("measured on")
    rows = []
    for result in bench_files():
        machines = {entry["id"]: entry for entry in result["runs"]}
        for table in result.get("side_by_side", []):
            sides = {side["name"]: side for side in table["sides"] if side["status"] == "ok"}
            machine = machines[table["run"]]
            if machine["gpu"] and {STRICT, BASELINE} <= sides.keys():
                rows.append([result["recipe"], *speed_cells(table, sides), describe_machine(machine)])
    return markdown(header, rows or [[NOT_RUN, *[""] * (len(header) - 1)]])


def speed_cells(table: dict[str, Any], sides: dict[str, Any]) -> list[str]:
    mine, other = sides[STRICT], sides[BASELINE]
    ratios = table[f"speed_over_{BASELINE}"]
    ratio, aligned = ratios[STRICT], sides.get(FAL)
    return [
        str(mine["batch_size"]),
        str(mine["image_size"]),
        mine["precision"],
        *[speed_of(side) for side in (mine, other)],
        f"{ratio['median']:.3f} ({ratio['min']:.3f}-{ratio['max']:.3f})",
        *(["-", "-"] if aligned is None else [speed_of(aligned), f"{ratios[FAL]['median']:.3f}"]),
        *[f"{peak_bytes(side) / 1e9:.2f}" for side in (mine, other)],
        f"{peak_bytes(mine) / peak_bytes(other):.2f}",
        goodness_share(table),
    ]


def goodness_share(table: dict[str, Any]) -> str:
    """Of the step; the upper bound also counts batch norm's backward pass."""
    share, most = table["goodness_share"], table.get("goodness_share_at_most")
    if share is None:
        return "-"
    return f"{share:.1%}" if most is None else f"{share:.1%} (at most {most:.1%})"


def speed_of(row: dict[str, Any]) -> str:
    return f"{row['images_per_second']['median']:,.0f}"


def speed_spread(row: dict[str, Any]) -> str:
    """The slowest and the fastest of its timed blocks."""
    return f"{row['images_per_second']['min']:,.0f}-{row['images_per_second']['max']:,.0f}"


def describe_machine(machine: dict[str, Any]) -> str:
    return f"{machine['gpu']}, torch {machine['torch'].split('+')[0]}, {shorten(machine['commit'])}"


def shorten(commit: str | None) -> str:
    """Seven digits of a commit; ``+`` stays where the tree had changes."""
    return "unknown commit" if commit is None else commit.rstrip("+")[:7] + "+" * commit.endswith("+")


OTHER_MEMORY = {"first_steps_bytes": "first steps", "reserved_bytes": "reserved", "smallest_bytes": "smallest"}


def efficiency_table() -> str:
    """Memory and speed at 224 px from ``bicovg bench``, beside the paper's."""
    header = ["configuration", "parameters", "images/s", "of the roofline", "peak GB", "/ end-to-end", "vs classic"]
    header += [f"{name} GB" for name in OTHER_MEMORY.values()]
    header += ["paper: parameters", "paper: GB, one GPU (vs classic)", "paper: GB per GPU, two GPUs"]
    header += ["paper: images/s", "measured on"]
    measured = bench_rows(get_recipe("imagenet100-bicovg"))
    rows = []
    for name, (parameters, one, two, fast) in EFFICIENCY.items():
        paper = [parameters, one, f"{two} (ours: not run)" if two else "", fast]
        if name not in measured:
            rows.append([name, "", NOT_RUN, *[""] * (4 + len(OTHER_MEMORY)), *paper, ""])
            continue
        row, machine = measured[name]
        peak, limit = peak_bytes(row), row["roofline"]["share"]
        known = [f"{row['parameters']:,}", f"{speed_of(row)} ({speed_spread(row)})"]
        known += ["-" if limit is None else f"{limit:.0%}", f"{peak / 1e9:.2f}"]
        rivals = [measured.get(rival) for rival in (BASELINE, "classic")]
        whole, classic = [None if found is None else peak / peak_bytes(found[0]) for found in rivals]
        known += ["-" if whole is None else f"{whole:.2f}", "-" if classic is None else f"{classic - 1:+.1%}"]
        known += [f"{peak_bytes(row, field) / 1e9:.2f}" if row["memory"].get(field) else "" for field in OTHER_MEMORY]
        rows.append([name, *known, *paper, describe_machine(machine) + machine["memory_by"]])
    return markdown(header, rows)


def bench_rows(config: Config) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """(row, machine) by configuration, at a recipe's image size, batch and precision.

    ``memory_by`` of a machine names the commit that a row's memory was measured at, where that is another run's.
    Rows measured in turns are taken where there are no others.
    """
    wanted = (config.data.image_size, config.train.batch_size, config.train.precision)
    found = {}
    for result in bench_files():
        machines = {entry["id"]: entry for entry in result["runs"]}
        sides = [(side, table["run"]) for table in result.get("side_by_side", []) for side in table["sides"]]
        for row, run in (*sides, *((row, row["run"]) for row in result["rows"])):
            on_gpu = row["memory"]["steady_bytes"] is not None
            same = (row["image_size"], row["batch_size"], row["precision"]) == wanted
            if same and row["status"] == "ok" and on_gpu:
                other = machines.get(row.get("memory_run"))
                by = "" if other is None else f" (memory: {shorten(other['commit'])})"
                found[row["name"]] = row, {**machines[run], "memory_by": by}
    return found


def peak_bytes(row: dict[str, Any], field: str = "steady_bytes") -> float:
    """Steady peak, or another memory number, without the data set."""
    return float(row["memory"][field] - (row["memory"]["data_bytes"] or 0))


def agreement_table() -> str:
    """How far 200 steps of the other engines are from the eager ones, from ``benchmarks/agree.py``."""
    header = ["recipe", "precision", "engine", "first 5 losses", "allowed", "means of 20 losses", "allowed"]
    header.append("compiled after the third step")
    rows = []
    for path in sorted(FOLDER.glob("agree-*.json")):
        for row in json.loads(path.read_text())["rows"]:
            for engine in (name for name in ("plain", "compiled", "graph") if name in row):
                found = row[engine]
                first, later = found["largest_difference_first_steps"], found["largest_difference_of_means"]
                limits = [f"{limit:.0e}" for limit in found["limits"]]
                cells = [f"{first:.1e}", limits[0], f"{later:.1e}", limits[1], str(found["recompiled"])]
                rows.append([row["recipe"], row["precision"], engine, *cells])
    return markdown(header, rows or [[NOT_RUN, *[""] * (len(header) - 1)]])
