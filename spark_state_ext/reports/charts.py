"""Draw the charts of a report with matplotlib, as SVG inside the page.

A chart contains no text from the user: names are in the page, where they are escaped. Lines also differ in dashes and
markers, so that colour is not needed to distinguish them. Text and axes have the colour of the page's text.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from spark_state_ext.errors import EnvironmentSetupError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["BARS", "LINES", "Chart", "Series", "draw_svg"]

LINES, BARS = "lines", "bars"
# Legible on white and on black. Dashes and hatches make the same distinctions.
_COLOURS = ("#2f7fc1", "#c2701c", "#3f9b5f")
_DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1, 1.5)))
_HATCHES = ("", "////", "....")
# Stands for the page's text colour, which matplotlib does not know.
_INK = "#010203"
_WIDTH_IN, _HEIGHT_IN = 6.4, 2.5
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_STEPS = (1, 2, 5, 10)
# With more points than this, lines have no markers, because these would overlap.
_MARKERS_MAX = 60


@dataclass(frozen=True)
class Series:
    """One line, or one part of the bars, of a chart.

    Parameters
    ----------
    name
        Its name in the legend.
    values
        One value for each position; NaN if there is none.
    """

    name: str
    values: Sequence[float]


@dataclass(frozen=True)
class Chart:
    """The contents of a chart.

    Parameters
    ----------
    title, caption
        The text above it, and what it means.
    across, unit
        What the positions are, and the unit of the values: ``"bytes"``, ``"ms"`` or a word.
    positions
        The numbers of batches or buckets.
    series
        The lines or bars; bars are stacked.
    kind
        `LINES` or `BARS`.
    """

    title: str
    caption: str
    across: str
    unit: str
    positions: Sequence[int]
    series: tuple[Series, ...]
    kind: str = LINES

    @property
    def description(self) -> str:
        """The chart in words, for readers who cannot see it."""
        if not len(self.positions):
            return f"{self.caption} There are no values."
        parts = []
        for series in self.series:
            values = np.asarray(series.values, np.float64)
            present = values[~np.isnan(values)]
            if len(present):
                numbers = (
                    format_with_unit(float(value), self.unit) for value in (present.min(), present.max(), present[-1])
                )
                parts.append("{}: from {} to {}, finally {}".format(series.name, *numbers))
        first, last = self.positions[0], self.positions[-1]
        return f"{self.caption} {self.across} {first} to {last}. {'; '.join(parts)}."


def format_with_unit(value: float, unit: str) -> str:
    """Format a value with its unit for people."""
    if unit == "bytes":
        size, unit_index = value, 0
        while abs(size) >= 1024 and unit_index < len(_BYTES) - 1:
            size, unit_index = size / 1024, unit_index + 1
        return f"{size:.4g} {_BYTES[unit_index]}"
    if unit == "ms" and abs(value) >= 1000:
        return f"{value / 1000:.4g} s"
    return f"{value:,.0f} {unit}" if float(value).is_integer() else f"{value:,.3g} {unit}"


def draw_svg(chart: Chart, name: str) -> str:
    """Draw a chart as SVG."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EnvironmentSetupError(
            'a report needs matplotlib to draw its charts: pip install "spark_state_ext[report]"'
        ) from error
    # The salt makes the output reproducible. Text stays text, which a reader can search and enlarge.
    settings: Any = {"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9, "hatch.linewidth": 0.6}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        (_draw_bars if chart.kind == BARS else _draw_lines)(axes, chart)
        _style_axes(axes, chart)
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _adapt_to_page(svg.getvalue(), chart, name)


def _draw_lines(axes: Axes, chart: Chart) -> None:
    for index, series in enumerate(chart.series):
        axes.plot(
            chart.positions,
            series.values,
            label=series.name,
            color=_COLOURS[index % len(_COLOURS)],
            linestyle=_DASHES[index % len(_DASHES)],
            linewidth=1.6,
            marker="os^"[index % 3] if len(chart.positions) <= _MARKERS_MAX else None,
            markersize=3,
        )


def _draw_bars(axes: Axes, chart: Chart) -> None:
    bottom = np.zeros(len(chart.positions))
    for index, series in enumerate(chart.series):
        values = np.nan_to_num(np.asarray(series.values, np.float64))
        axes.bar(
            chart.positions,
            values,
            bottom=bottom,
            label=series.name,
            color=_COLOURS[index % len(_COLOURS)],
            hatch=_HATCHES[index % len(_HATCHES)],
            edgecolor=_INK,
            linewidth=0.4,
            width=0.8 * _min_step(chart.positions),
        )
        bottom += values


def _min_step(positions: Sequence[int]) -> float:
    """Return the smallest distance of positions; a bar that stands for several batches is wider."""
    return float(np.diff(np.asarray(positions)).min()) if len(positions) > 1 else 1.0


def _style_axes(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    highest = max(
        (float(np.nanmax(series.values)) for series in chart.series if len(series.values) and not _is_all_nan(series)),
        default=0,
    )
    axes.set_ylim(0, axes.get_ylim()[1] if highest > 0 else 1)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=_STEPS))
    divisor, unit = _choose_scale(max(highest, axes.get_ylim()[1]), chart.unit)
    is_count = chart.unit not in ("bytes", "ms")
    axes.yaxis.set_major_locator(_make_locator(axes, divisor, is_count))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / divisor:,.4g}"))
    axes.set_xlabel(chart.across.lower(), color=_INK)
    axes.set_ylabel(unit, color=_INK)
    axes.tick_params(colors=_INK, length=3)
    axes.grid(axis="y", color=_INK, alpha=0.15, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_INK)
    if len(chart.series) > 1:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=len(chart.series),
            frameon=False,
            labelcolor=_INK,
            handlelength=3,
            borderaxespad=0.2,
        )


def _is_all_nan(series: Series) -> bool:
    return bool(np.isnan(np.asarray(series.values, np.float64)).all())


def _choose_scale(highest: float, unit: str) -> tuple[float, str]:
    """Return the divisor for values on the axis, and their unit after the division."""
    if unit == "bytes":
        power = min(int(math.log(max(highest, 1), 1024)), len(_BYTES) - 1)
        return 1024.0**power, _BYTES[power]
    if unit == "ms" and highest >= 2000:
        return 1000.0, "seconds"
    if unit == "ms":
        return 1.0, "milliseconds"
    for divisor, name in ((1e9, "billion"), (1e6, "million"), (1e4, "thousand")):
        if highest >= divisor:
            return (1e3 if divisor == 1e4 else divisor), f"{name} {unit}"
    return 1.0, unit


def _make_locator(axes: Axes, divisor: float, is_count: bool) -> Any:
    """Return a locator with ticks at round numbers in the unit of the axis."""
    from matplotlib.ticker import FixedLocator, MaxNLocator

    low, high = axes.get_ylim()
    ticks = MaxNLocator(5, integer=is_count and divisor == 1, min_n_ticks=2, steps=_STEPS).tick_values(
        low / divisor, high / divisor
    )
    return FixedLocator([tick * divisor for tick in ticks if low <= tick * divisor <= high])


_XML = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>", re.DOTALL)


def _adapt_to_page(svg: str, chart: Chart, name: str) -> str:
    """Adapt an SVG to a page: remove its prolog and size, make its identifiers unique, use the page's text colour."""
    svg = _XML.sub("", svg).strip()
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(xlink:href="|url\()#', rf"\1#{name}-", svg)
    svg = svg.replace(_INK, "currentColor")
    attributes = f'role="img" aria-labelledby="{name}-title {name}-desc"'
    head = f'<title id="{name}-title">{escape(chart.title)}</title>\n'
    head += f'<desc id="{name}-desc">{escape(chart.description)}</desc>'
    # The page's style sets the size.
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*"([^>]*)>', r"<svg \1\2>", svg, count=1)
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*"([^>]*)>', r"<svg \1\2>", svg, count=1)
    return re.sub(r"<svg ([^>]*)>", lambda match: f"<svg {attributes} {match[1]}>\n{head}", svg, count=1)
