"""Charts of a report, drawn by matplotlib as SVG that stands in a page.

A chart has no text of the user's: names stand in the page, where they are escaped. Lines differ in dashes and markers,
and carry their names, so that nothing depends on colour. Text and axes have the colour of the page's text.
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
# Read on white and on black; what is told apart by them is told apart by dashes and hatches too.
_COLOURS = ("#2f7fc1", "#c2701c", "#3f9b5f")
_DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1, 1.5)))
_HATCHES = ("", "////", "....")
# In place of the page's own colour, which matplotlib does not know.
_INK = "#010203"
_WIDTH_IN, _HEIGHT_IN = 6.4, 2.5
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_STEPS = (1, 2, 5, 10)
# Markers that would run into each other are left out.
_MARKED_MAX = 60


@dataclass(frozen=True)
class Series:
    """Values of a chart.

    Parameters
    ----------
    name
        What they are.
    values
        One for each position; NaN where there is none.
    """

    name: str
    values: Sequence[float]


@dataclass(frozen=True)
class Chart:
    """What a chart shows.

    Parameters
    ----------
    title, says
        What stands above it, and what it means.
    across, unit
        What the positions are, and what the values: ``"bytes"``, ``"ms"`` or a word.
    positions
        Batches or buckets.
    series
        What is drawn; bars stand upon each other.
    kind
        `LINES` or `BARS`.
    """

    title: str
    says: str
    across: str
    unit: str
    positions: Sequence[int]
    series: tuple[Series, ...]
    kind: str = LINES

    @property
    def description(self) -> str:
        """The chart in words, for those who do not see it."""
        if not len(self.positions):
            return f"{self.says} There are no values."
        told = []
        for it in self.series:
            values = np.asarray(it.values, np.float64)
            known = values[~np.isnan(values)]
            if len(known):
                numbers = (format_with_unit(float(it), self.unit) for it in (known.min(), known.max(), known[-1]))
                told.append("{}: from {} to {}, in the end {}".format(it.name, *numbers))
        first, last = self.positions[0], self.positions[-1]
        return f"{self.says} {self.across} {first} to {last}. {'; '.join(told)}."


def format_with_unit(value: float, unit: str) -> str:
    """A value as people read it."""
    if unit == "bytes":
        size, at = value, 0
        while abs(size) >= 1024 and at < len(_BYTES) - 1:
            size, at = size / 1024, at + 1
        return f"{size:.4g} {_BYTES[at]}"
    if unit == "ms" and abs(value) >= 1000:
        return f"{value / 1000:.4g} s"
    return f"{value:,.0f} {unit}" if float(value).is_integer() else f"{value:,.3g} {unit}"


def draw_svg(chart: Chart, name: str) -> str:
    """Draw a chart."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EnvironmentSetupError(
            'a report needs matplotlib to draw its charts: pip install "spark_state_ext[report]"'
        ) from error
    # The same values give the same page. Text stays text, which a reader can search and enlarge.
    settings: Any = {"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9, "hatch.linewidth": 0.6}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        (_draw_bars if chart.kind == BARS else _draw_lines)(axes, chart)
        _dress(axes, chart)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _for_a_page(drawn.getvalue(), chart, name)


def _draw_lines(axes: Axes, chart: Chart) -> None:
    for at, it in enumerate(chart.series):
        axes.plot(
            chart.positions,
            it.values,
            label=it.name,
            color=_COLOURS[at % len(_COLOURS)],
            linestyle=_DASHES[at % len(_DASHES)],
            linewidth=1.6,
            marker="os^"[at % 3] if len(chart.positions) <= _MARKED_MAX else None,
            markersize=3,
        )


def _draw_bars(axes: Axes, chart: Chart) -> None:
    below = np.zeros(len(chart.positions))
    for at, it in enumerate(chart.series):
        values = np.nan_to_num(np.asarray(it.values, np.float64))
        axes.bar(
            chart.positions,
            values,
            bottom=below,
            label=it.name,
            color=_COLOURS[at % len(_COLOURS)],
            hatch=_HATCHES[at % len(_HATCHES)],
            edgecolor=_INK,
            linewidth=0.4,
            width=0.8 * _step(chart.positions),
        )
        below += values


def _step(positions: Sequence[int]) -> float:
    """How far positions are apart; what stands for several batches is broader."""
    return float(np.diff(np.asarray(positions)).min()) if len(positions) > 1 else 1.0


def _dress(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    highest = max(
        (float(np.nanmax(it.values)) for it in chart.series if len(it.values) and not _all_nan(it)), default=0
    )
    axes.set_ylim(0, axes.get_ylim()[1] if highest > 0 else 1)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=_STEPS))
    divisor, unit = _scale(max(highest, axes.get_ylim()[1]), chart.unit)
    whole = chart.unit not in ("bytes", "ms")
    axes.yaxis.set_major_locator(_locator(axes, divisor, whole))
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


def _all_nan(series: Series) -> bool:
    return bool(np.isnan(np.asarray(series.values, np.float64)).all())


def _scale(highest: float, unit: str) -> tuple[float, str]:
    """By what values are divided on the axis, and what they are then."""
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


def _locator(axes: Axes, divisor: float, whole: bool) -> Any:
    """Ticks at round numbers of what the axis shows."""
    from matplotlib.ticker import FixedLocator, MaxNLocator

    low, high = axes.get_ylim()
    ticks = MaxNLocator(5, integer=whole and divisor == 1, min_n_ticks=2, steps=_STEPS).tick_values(
        low / divisor, high / divisor
    )
    return FixedLocator([tick * divisor for tick in ticks if low <= tick * divisor <= high])


_XML = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>", re.DOTALL)


def _for_a_page(svg: str, chart: Chart, name: str) -> str:
    """The SVG without what a page has itself; its identifiers are its own, and its ink is the page's."""
    svg = _XML.sub("", svg).strip()
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(xlink:href="|url\()#', rf"\1#{name}-", svg)
    svg = svg.replace(_INK, "currentColor")
    told = f'role="img" aria-labelledby="{name}-title {name}-desc"'
    head = f'<title id="{name}-title">{escape(chart.title)}</title>\n'
    head += f'<desc id="{name}-desc">{escape(chart.description)}</desc>'
    # How large it is, the page says.
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*"([^>]*)>', r"<svg \1\2>", svg, count=1)
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*"([^>]*)>', r"<svg \1\2>", svg, count=1)
    return re.sub(r"<svg ([^>]*)>", lambda match: f"<svg {told} {match[1]}>\n{head}", svg, count=1)
