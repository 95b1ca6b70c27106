"""Tables of speed and memory, from the files that ``bicovg bench`` writes."""

from collections.abc import Sequence
from typing import Any

from bicovg.bench_cases import BASELINE, FAL, STRICT
from bicovg.bench_report import FOLDER
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
    ratios, share = table[f"speed_over_{BASELINE}"], table["goodness_share"]
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
        "-" if share is None else f"{share:.1%}",
    ]


def speed_of(row: dict[str, Any]) -> str:
    return f"{row['images_per_second']['median']:,.0f}"


def describe_machine(machine: dict[str, Any]) -> str:
    return f"{machine['gpu']}, torch {machine['torch'].split('+')[0]}, {machine['commit']}"


def efficiency_table() -> str:
    """Memory and speed at 224 px from ``bicovg bench``, beside the paper's."""
    header = ["configuration", "parameters", "images/s", "peak GB", "peak / end-to-end", "paper: GB, one GPU"]
    header.append("paper: GB per GPU, two GPUs")
    measured = bench_rows(get_recipe("imagenet100-bicovg").data.image_size)
    baseline = measured.get("end-to-end")
    rows = []
    for name, (one, two) in EFFICIENCY.items():
        row = measured.get(name)
        if row is None:
            rows.append([name, "", NOT_RUN, "", "", one, f"{two} (ours: not run)" if two else ""])
            continue
        peak = peak_bytes(row)
        share = f"{peak / peak_bytes(baseline):.2f}" if baseline else "-"
        speed = f"{row['images_per_second']['median']:.0f}"
        known = [f"{row['parameters']:,}", speed, f"{peak / 1e9:.2f}", share]
        rows.append([name, *known, one, f"{two} (ours: not run)" if two else ""])
    return markdown(header, rows)


def bench_rows(image_size: int) -> dict[str, Any]:
    """Rows of the benchmark files at one image size, by configuration; those of turns where there are no others."""
    found = {}
    for result in bench_files():
        sides = [side for table in result.get("side_by_side", []) for side in table["sides"]]
        for row in (*sides, *result["rows"]):
            on_gpu = row["memory"]["steady_bytes"] is not None
            if row["image_size"] == image_size and row["status"] == "ok" and on_gpu:
                found[row["name"]] = row
    return found


def peak_bytes(row: dict[str, Any]) -> float:
    """Steady peak without the data set."""
    return float(row["memory"]["steady_bytes"] - (row["memory"]["data_bytes"] or 0))
