"""Tables and figures of README and docs, made anew from ``records/`` and the benchmark files.

A table stands in a Markdown file between ``<!-- table: NAME -->`` and ``<!-- end of table -->``, figures between
``<!-- figures: KIND -->`` and ``<!-- end of figures -->``. No number is typed by hand.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from bicovg.errors import UserError
from bicovg.report.bench_tables import NOT_RUN
from bicovg.report.cells import Records, read_records
from bicovg.report.figures import compose
from bicovg.report.record_charts import DATA, KINDS, SHORT, record_charts
from bicovg.report.svg import svg_file
from bicovg.report.tables import TABLES

MARKED = re.compile(r"(<!-- (table|figures): ([a-z0-9-]+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)
FIGURES = Path("docs") / "figures"
WHOLE = "-full"


def fill_tables(text: str, records: Records, origin: str = "the text", figures: str = FIGURES.name) -> str:
    """A Markdown text with all its tables and links to figures made anew.

    Args:
        figures: the figures' folder, as seen from the text.
    """

    def fill(match: re.Match[str]) -> str:
        start, what, name, end = match.groups()
        known: Sequence[str] = list(TABLES) if what == "table" else [*KINDS, *(f"{kind}{WHOLE}" for kind in KINDS)]
        if name not in known:
            raise UserError(f"{origin} asks for the {what} {name!r}: choose one of {', '.join(known)}")
        made = TABLES[name](records) if what == "table" else links(name, records, figures)
        return f"{start}\n{made}\n{end}"

    return MARKED.sub(fill, text)


def links(kind: str, records: Records, figures: str) -> str:
    """``kind``, or, with ``-full``, without short runs' figures."""
    charts = record_charts(kind.removesuffix(WHOLE), records)
    if kind.endswith(WHOLE):
        charts = [chart for chart in charts if SHORT not in chart.title]
    return (
        "\n\n".join(f"![{chart.title}]({figures}/{chart.name}.svg)" for chart in charts) + "\n" if charts else NOT_RUN
    )


def draw_figures(records: Records) -> dict[str, str]:
    """Every figure's file by name."""
    charts = [chart for kind in KINDS for chart in record_charts(kind, records)]
    return {f"{chart.name}.svg": svg_file(compose(chart)) for chart in charts}


def marked_files(root: Path = Path()) -> list[Path]:
    """README and docs with a table in them."""
    return [path for path in (root / "README.md", *sorted(root.glob("docs/*.md"))) if has_table(path)]


def has_table(path: Path) -> bool:
    return path.is_file() and MARKED.search(path.read_text()) is not None


def fill_file(path: Path, records: Records, root: Path = Path()) -> str:
    """What should stand in a file of a checkout."""
    folder = Path(os.path.relpath(root / FIGURES, path.parent)).as_posix()
    return fill_tables(path.read_text(), records, str(path), folder)


def update_tables(root: Path = Path()) -> list[Path]:
    """Rewrite the files whose tables are not those of the records, and the figures; returns what changed."""
    records, files = read_records(root), marked_files(root)
    fresh = {path: fill_file(path, records, root) for path in files}
    drawn = any("<!-- figures: " in text for text in fresh.values())
    if drawn:
        fresh |= {root / FIGURES / name: text for name, text in draw_figures(records).items()}
    changed = [path for path, text in fresh.items() if not path.is_file() or path.read_text() != text]
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(fresh[path])
    ours = [path for kind in KINDS for data in DATA for path in sorted((root / FIGURES).glob(f"{kind}-{data}-*.svg"))]
    stale = [path for path in ours if drawn and path not in fresh]
    for path in stale:
        path.unlink()
    return changed + stale
