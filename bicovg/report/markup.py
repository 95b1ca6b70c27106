"""Pieces of the page as HTML. Every text that comes from a run folder passes ``escape`` here or in ``svg``."""

import hashlib
import json
from collections.abc import Sequence
from html import escape
from typing import Any

from bicovg.report.charts import Chart
from bicovg.report.scene import Ink
from bicovg.report.svg import inline_svg, swatch


def hashed(tag: str, name: str, classes: str, body: str) -> str:
    """A part of the page that a live update replaces when its content has changed."""
    digest = hashlib.sha256(body.encode()).hexdigest()[:16]
    return f'<{tag} class="{classes}" id="{escape(name)}" data-hash="{digest}">{body}</{tag}>'


def chart_card(chart: Chart, title: str | None = None) -> str:
    """A chart with its title, note, legend and a button for its numbers."""
    title = title or chart.title
    hover = escape(json.dumps(chart.hover, separators=(",", ":"), allow_nan=False))
    how = "arrow keys read the values"
    body = (
        f'<div class="head"><div><h3>{escape(title)}</h3><p class="note">{escape(chart.note)}</p></div>'
        f'<button type="button" class="csv" aria-label="{escape(title)}: save the values as CSV">CSV</button></div>'
        f'<div class="plot" tabindex="0" role="group" aria-label="{escape(title)}, {how}" data-hover="{hover}">'
        f"{inline_svg(chart.scene, f'{title}. {chart.note}')}</div>{_legend(chart)}"
    )
    return hashed("section", f"card-{chart.name}", "card wide" if chart.wide else "card", body)


def _legend(chart: Chart) -> str:
    """A button per series; where blocks are the series, the word stands once and the buttons bear the numbers."""
    if not chart.legend:
        return ""
    blocks = sum(name.startswith("block ") for name, _, _ in chart.legend) > 1
    buttons = []
    for i, (name, ink, dash) in enumerate(chart.legend):
        text = name.removeprefix("block ") if blocks else name
        label = f'data-legend="{i}" aria-label="{escape(name)}"'
        buttons.append(f'<button type="button" aria-pressed="true" {label}>{swatch(ink, dash)}{escape(text)}</button>')
    word = "<span>block</span>" if blocks else ""
    return f'<div class="legend" role="group" aria-label="Show or hide lines">{word}{"".join(buttons)}</div>'


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], numbers: bool = False, label: str = "") -> str:
    """A table whose first column names the row; ``numbers`` aligns the others right."""
    side = ' class="n"' if numbers else ""
    heads = "".join(f"<th{side if i else ''} scope='col'>{escape(str(name))}</th>" for i, name in enumerate(header))
    lines = []
    for first, *rest in rows:
        name = first if isinstance(first, Markup) else escape(str(first))
        cells = "".join(f"<td{side}>{escape(show(value))}</td>" for value in rest)
        lines.append(f"<tr><th scope='row'>{name}</th>{cells}</tr>")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label or "table")}">'
        f"<table{' class=numbers' if numbers else ''}><thead><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def key(ink: Ink, text: str) -> Markup:
    """A coloured square and a name."""
    return Markup(f'<span class="key" style="--l:{ink.light};--d:{ink.dark}"></span>{escape(text)}')


def show(value: Any) -> str:
    """A value as a person writes it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    return json.dumps(value)


def tiles(values: Sequence[tuple[str, str]]) -> str:
    """(value, label) pairs as a row of boxes."""
    boxes = "".join(f'<div class="tile"><b>{escape(v)}</b><span>{escape(name)}</span></div>' for v, name in values)
    return hashed("div", "tiles", "tiles", boxes)


def details(title: str, body: str, opened: bool = False) -> str:
    return f"<details{' open' if opened else ''}><summary>{escape(title)}</summary>{body}</details>"
