"""Render the page of a report: one HTML file without scripts and external resources. All text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape as escape_html

from spark_state_ext.files.printable import printable
from spark_state_ext.reports.charts import Chart, draw_svg, format_with_unit
from spark_state_ext.version import __version__

__all__ = ["PageTable", "Section", "format_time", "render_page"]

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; padding: 0 1rem; max-width: 76rem; }
h1, h2, h3 { line-height: 1.25; overflow-wrap: anywhere; }
h2 { margin-top: 3rem; border-top: 1px solid; padding-top: 1rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: 2rem; }
figure { margin: 0; display: flex; flex-direction: column; }
figcaption { flex: 1; }
figure svg { width: 100%; height: auto; }
figure svg text { font-family: system-ui, sans-serif !important; }
figcaption { font-size: 0.9rem; }
figcaption b { font-size: 1rem; }
.scroll { overflow-x: auto; margin-bottom: 1.5rem; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: bold; padding: 0.5rem 0; }
th, td { text-align: right; padding: 0.25rem 0.75rem; }
th, td { border-bottom: 1px solid color-mix(in srgb, currentColor 25%, transparent); }
th:first-child { text-align: left; overflow-wrap: anywhere; min-width: 6rem; padding-left: 0; }
td { white-space: nowrap; }
th { vertical-align: bottom; }
details { margin: 0.25rem 0; font-size: 0.9rem; }
.note { border-left: 0.3rem solid; padding: 0.25rem 0.75rem; }
@media print { details { display: none; } figure { break-inside: avoid; } }
""".strip()
# The most rows of the table below a chart.
_ROWS_MAX = 200


@dataclass(frozen=True)
class PageTable:
    """A table of a page; its cells are text.

    Parameters
    ----------
    caption
        The text above it.
    head, rows
        The cells of the heading and of each row.
    """

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Parameters
    ----------
    title, text
        The heading, and the text below it.
    tables, charts
        The tables and charts of the section.
    notes
        Highlighted remarks.
    """

    title: str
    text: str = ""
    tables: tuple[PageTable, ...] = ()
    charts: tuple[Chart, ...] = ()
    notes: tuple[str, ...] = ()


def escape(text: str) -> str:
    """Escape text for HTML, and unprintable characters as in Python's string literals."""
    return escape_html(printable(text))


def format_time(time_s: float | None) -> str:
    """Format a time in UTC for people."""
    if time_s is None:
        return "unknown"
    return datetime.fromtimestamp(time_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def render_page(title: str, made_s: float, sources: Sequence[str], sections: Sequence[Section]) -> str:
    """Render the whole page."""
    parts = [_render_section(section, f"s{index}") for index, section in enumerate(sections)]
    source_items = "".join(f"<li>{escape(source)}</li>" for source in sources)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>
{_STYLE}
</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p>Made {escape(format_time(made_s))} (all times are UTC) by spark_state_ext {escape(__version__)} from:</p>
<ul>{source_items}</ul>
</header>
<main>
{"".join(parts)}</main>
</body>
</html>
"""


def _render_section(section: Section, name: str) -> str:
    text = f"<p>{escape(section.text)}</p>\n" if section.text else ""
    notes = "".join(f'<p class="note">{escape(note)}</p>\n' for note in section.notes)
    tables = "".join(_render_table(table) for table in section.tables)
    charts = "".join(_render_figure(chart, f"{name}c{index}") for index, chart in enumerate(section.charts))
    chart_grid = f'<div class="charts">\n{charts}</div>\n' if charts else ""
    return f"<section>\n<h2>{escape(section.title)}</h2>\n{text}{notes}{tables}{chart_grid}</section>\n"


def _render_figure(chart: Chart, name: str) -> str:
    return (
        f"<figure>\n<figcaption><b>{escape(chart.title)}</b><br>{escape(chart.caption)}</figcaption>\n"
        f"{draw_svg(chart, name)}\n{_render_values(chart)}</figure>\n"
    )


def _render_values(chart: Chart) -> str:
    """Render the values of a chart as a table, which a screen reader can read."""
    step = -(-len(chart.positions) // _ROWS_MAX) if len(chart.positions) else 1
    rows = [
        (
            f"{position:,}",
            *(
                "–"
                if series.values[index] != series.values[index]
                else format_with_unit(series.values[index], chart.unit)
                for series in chart.series
            ),
        )
        for index, position in list(enumerate(chart.positions))[::step]
    ]
    sampled = f", one in {step}" if step > 1 else ""
    table = PageTable(f"{chart.title}{sampled}", (chart.across, *(series.name for series in chart.series)), rows)
    return f"<details><summary>Values</summary>\n{_render_table(table)}</details>\n"


def _render_table(table: PageTable) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.head)
    rows = "".join(_render_row(row) for row in table.rows)
    return (
        f'<div class="scroll"><table>\n<caption>{escape(table.caption)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table></div>\n"
    )


def _render_row(cells: Iterable[str]) -> str:
    first, *others = cells
    return f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in others)}</tr>\n'
