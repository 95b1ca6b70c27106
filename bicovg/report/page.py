"""The page: one run, or several side by side, as one HTML file that needs nothing else and asks for nothing."""

import base64
import hashlib
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from bicovg import __version__
from bicovg.display import clock, combined_rows
from bicovg.errors import UserError
from bicovg.report.benchmarks import bench_charts
from bicovg.report.charts import Chart
from bicovg.report.collect import Json, RunData, differences, flatten, read_runs
from bicovg.report.comparison import compared_charts, progress_charts
from bicovg.report.markup import Markup, chart_card, details, hashed, key, table, tiles
from bicovg.report.pictures import accuracy_curves, image_charts, loss_curves, run_charts, slug
from bicovg.report.scene import run_ink

CONFUSED_PAIRS = 12
BP_FREE = {"strict": "yes", "grouped": "no, gradients cross blocks inside a group", "hgb": "no, BP inside units"}


@dataclass(frozen=True)
class Section:
    """A heading of the page and what stands under it; without a body it is left out."""

    name: str
    title: str
    body: str


def render_page(runs: Sequence[RunData], live: str | None = None, warning: str = "") -> str:
    """The whole page.

    Args:
        live: the address it asks for updates, None for a page that asks for nothing.
        warning: shown above everything else.
    """
    style, script = _static("page.css"), _static("page.js")
    sections = [section for section in _sections(runs) if section.body]
    links = "".join(f'<a href="#{s.name}">{escape(s.title)}</a>' for s in sections)
    title = _title(runs)
    note = '<span id="live" role="status">live</span>' if live else ""
    follow = f' data-live="{escape(live)}"' if live else ""
    body = "".join(f'<section id="{s.name}"><h2>{escape(s.title)}</h2>{s.body}</section>' for s in sections)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy(live is not None))}">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{style}</style></head>'
        f"<body{follow}>"
        f'<a class="skip" href="#content">Skip to the charts</a>{_header(runs, title)}'
        f'<div class="bar"><nav aria-label="Sections"><span class="links">{links}</span><span class="end">{note}'
        f'<button type="button" id="theme">Theme</button></span></nav></div>'
        f'<main id="content">{_warning(warning)}{body}</main>'
        f"<footer>Made by bicovg {escape(__version__)} from the run folders alone.</footer>"
        f"<script>{script}</script></body></html>\n"
    )


def write_page(runs: Sequence[Path], out: Path) -> Path:
    """The page of one run or several, as one file."""
    page = render_page(read_runs(runs))
    if out.is_dir():
        raise UserError(f"{out} is a folder: give a file with --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        draft = out.with_name(f".{out.name}.tmp")
        draft.write_text(page)
        draft.replace(out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {os.strerror(error.errno or 0)}; give another place with --out") from None
    return out


def policy(live: bool) -> str:
    """What the page may load: nothing. The one script is named by its hash, so no other can run."""
    digest = base64.b64encode(hashlib.sha256(_static("page.js").encode()).digest()).decode()
    rules = ["default-src 'none'", "img-src data:", "style-src 'unsafe-inline'", f"script-src 'sha256-{digest}'"]
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'", *(["connect-src 'self'"] if live else [])])


def _warning(text: str) -> str:
    return hashed("div", "warning", "warning", f'<p role="alert">{escape(text)}</p>') if text else ""


def _static(name: str) -> str:
    return resources.files("bicovg.report").joinpath("static", name).read_text()


def _title(runs: Sequence[RunData]) -> str:
    if len(runs) == 1:
        return f"{runs[0].config.get('recipe', runs[0].path.name)}, seed {runs[0].config.get('seed')}"
    return f"{len(runs)} runs compared"


def _header(runs: Sequence[RunData], title: str) -> str:
    if len(runs) > 1:
        names = ", ".join(run.label for run in runs)
        return f'<header><h1>{escape(title)}</h1><p class="sub">{escape(names)}</p></header>'
    run = runs[0]
    data = run.config["data"]
    about = run.config.get("about") or ""
    line = f"{data['name']}, {data['image_size']} px, {data['num_classes']} classes; scope {run.scope}. {about}"
    return f'<header><h1>{escape(title)}</h1><p class="sub">{escape(line)}</p>{tiles(_tiles(run))}</header>'


def _tiles(run: RunData) -> list[tuple[str, str]]:
    """The numbers of one run that people look for first."""
    done = len(run.metrics)
    state = f"{done} / {run.epochs}"
    found = [(state, "epochs" if run.summary else "epochs so far")]
    if run.summary:
        found += [(f"{record['top1']:.2f} %", f"top-1, {label}") for label, record in combined_rows(run.summary)]
        if run.summary.get("parameters") is not None:
            found.append((f"{run.summary['parameters']:,}", "parameters"))
        if run.summary.get("wall_seconds") is not None:
            found.append((clock(run.summary["wall_seconds"]), "wall time"))
    elif run.evaluated:
        last = run.evaluated[-1]
        found.append((f"{last['mean_top1']:.2f} %", f"{run.split} top-1 now, mean of blocks"))
        found.append((f"{last['top1'][-1]:.2f} %", f"{run.split} top-1 now, last block"))
    if run.timing:
        found.append((f"{statistics.median(_speeds(run)):,.0f}", "images / s, median epoch"))
        found.append((f"{max(t['peak_memory_bytes'] for t in run.timing) / 1e9:.2f} GB", "peak memory"))
    found.append((BP_FREE.get(run.scope, "no, end to end").partition(",")[0], f"BP-free (scope {run.scope})"))
    return found


def _speeds(run: RunData) -> list[float]:
    return [record["images_per_second"] for record in run.timing]


def _sections(runs: Sequence[RunData]) -> list[Section]:
    several = len(runs) > 1
    return [
        Section("overview", "Overview", _overview(runs) if several else ""),
        Section("compared", "Compared", _grid(compared_charts(runs) if several else [])),
        Section("blocks", "Blocks", _side_by_side(runs) if several else _grid(run_charts(runs[0]))),
        Section("images", "Images", "".join(_images(run, opened=not several) for run in runs)),
        Section("progress", "Speed and schedule", _grid([*progress_charts(runs), *bench_charts(runs)])),
        Section("settings", "Settings", _settings(runs)),
    ]


def _grid(charts: Sequence[Chart]) -> str:
    return f'<div class="grid">{"".join(map(chart_card, charts))}</div>' if charts else ""


def _side_by_side(runs: Sequence[RunData]) -> str:
    """The same chart of every run, on one scale, one beside the other."""
    charts = [(run, make(run, runs)) for make in (accuracy_curves, loss_curves) for run in runs]
    cards = [chart_card(chart, f"{chart.title}: {run.label}") for run, chart in charts if chart is not None]
    return f'<div class="grid">{"".join(cards)}</div>' if cards else ""


def _overview(runs: Sequence[RunData]) -> str:
    """One row per run, and one per group of seeds."""
    names = ["last", "best (test-chosen)", "mean", "fused on train", "fused on held-out"]
    header = ["run", "scope", "BP-free", "epochs", *names, "parameters", "images / s", "peak GB"]
    rows: list[list[Any]] = []
    for index, run in enumerate(runs):
        free = BP_FREE.get(run.scope, "no").partition(",")[0]
        rows.append(
            [
                key(run_ink(index), run.label),
                run.scope,
                free,
                f"{len(run.metrics)} / {run.epochs}",
                *["-" if v is None else f"{v:.2f}" for v in _results(run)],
                f"{run.summary['parameters']:,}" if run.summary and run.summary.get("parameters") is not None else "-",
                f"{statistics.median(_speeds(run)):,.0f}" if run.timing else "-",
                f"{max(t['peak_memory_bytes'] for t in run.timing) / 1e9:.2f}" if run.timing else "-",
            ]
        )
    note = "<p class='note'>Accuracies are top-1 on test images, in %.</p>"
    return hashed("section", "card-overview", "card", table(header, [*rows, *_seed_rows(runs)], True, "Runs") + note)


def _results(run: RunData) -> list[float | None]:
    if run.summary is None:
        return [None] * 5
    test, fusion = run.summary["test"], run.summary["fusion"]
    found = [test["last"], test["best_test_chosen"], test["mean"], fusion.get("train"), fusion.get("heldout")]
    return [record["top1"] if record else None for record in found]


def _seed_rows(runs: Sequence[RunData]) -> list[list[Any]]:
    """Mean and sample standard deviation over the runs that differ in nothing but their seed."""
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        if run.summary:
            groups.setdefault(repr(sorted({**flatten(run.config), "seed": 0}.items())), []).append(run)
    rows: list[list[Any]] = []
    for group in (group for group in groups.values() if len(group) > 1):
        cells = []
        for column in zip(*(_results(run) for run in group), strict=True):
            values = [value for value in column if value is not None]
            whole = len(values) == len(group)
            cells.append(f"{statistics.fmean(values):.2f} +- {statistics.stdev(values):.2f}" if whole else "-")
        name = f"{group[0].config.get('recipe')}, {len(group)} seeds"
        rows.append([Markup(f"<b>{escape(name)}</b>"), group[0].scope, "", "", *cells, "", "", ""])
    return rows


def _images(run: RunData, opened: bool) -> str:
    if run.analysis is None:
        return ""
    cards = [chart_card(chart) for chart in image_charts(run)]
    cards += [_confused_pairs(run, run.analysis), _mistakes(run, run.analysis)]
    body = f'<div class="subgrid">{"".join(cards)}</div>'
    return body if opened else details(run.label, body)


def _confused_pairs(run: RunData, analysis: Json) -> str:
    """The pairs of classes taken for one another most often."""
    classes, confusion = analysis["classes"], analysis["confusion"]
    pairs = [(n, i, j) for i, row in enumerate(confusion) for j, n in enumerate(row) if i != j and n]
    pairs.sort(key=lambda pair: (-pair[0], pair[1], pair[2]))
    rows = [[classes[i], classes[j], n, f"{100 * n / sum(confusion[i]):.1f}"] for n, i, j in pairs[:CONFUSED_PAIRS]]
    body = "<div class='head'><div><h3>Most frequent confusions</h3></div></div>"
    body += table(["true", "predicted", "times", "% of class"], rows, label="Confusions") if rows else "<p>None.</p>"
    return hashed("section", f"card-pairs-{slug(run.label)}", "card", body)


def _mistakes(run: RunData, analysis: Json) -> str:
    """The most confident mistakes, with their pictures."""
    classes, shown = analysis["classes"], []
    for mistake in analysis["mistakes"]:
        true, said = classes[mistake["true"]], classes[mistake["predicted"]]
        alt = f"test image {mistake['index']}: {true} taken for {said}"
        shown.append(
            f'<figure><img loading="lazy" alt="{escape(alt)}" src="{escape(mistake["picture"])}">'
            f"<figcaption><b>{escape(said)}</b> {100 * mistake['confidence']:.0f} %<br>"
            f"is {escape(true)} {100 * mistake['true_confidence']:.0f} %</figcaption></figure>"
        )
    body = (
        f"<div class='head'><div><h3>Most confident mistakes</h3><p class='note'>Prediction: "
        f"{escape(analysis['head'])}. First what it said, then what it is.</p></div></div>"
    )
    body += f'<div class="mistakes">{"".join(shown)}</div>' if shown else "<p>No mistakes on the test images.</p>"
    return hashed("section", f"card-wrong-{slug(run.label)}", "card wide", body)


def _settings(runs: Sequence[RunData]) -> str:
    """Differences first, then everything."""
    labels = [run.label for run in runs]
    parts = []
    if len(runs) > 1:
        rows = [[name, *values] for name, values in differences([run.config for run in runs]).items()]
        body = table(["setting", *labels], rows, label="Differences") if rows else "<p>No setting differs.</p>"
        parts.append(details("What differs between the runs", body, opened=True))
    for title, trees in (("Configuration", [r.config for r in runs]), ("Environment", [r.env for r in runs])):
        flats = [flatten(tree) for tree in trees]
        names = list(dict.fromkeys(name for flat in flats for name in flat))
        rows = [[name, *[flat.get(name) for flat in flats]] for name in names]
        parts.append(details(title, table([title.lower(), *labels], rows, label=title)))
    return "".join(parts)
