"""Charts of result files, as SVG and PNG: ``python -m benchmarks.charts`` draws the charts of the committed results.

A chart shows only numbers of one result file. A bar is a median; its whisker goes from the fastest to the slowest
batch.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS

__all__ = ["CHARTS", "Chart", "charts_of", "draw", "main"]

CHARTS = Path(__file__).parent.parent / "docs" / "charts"
_OURS, _OTHERS, _TEXT = "#0b6e99", "#b8b8b8", "#333333"
_BATCH = ": batch"
# A bar that is more than _GIANT times as long as our longest bar is not drawn.
_GIANT = 8
_IN_WORKLOAD = re.compile(r": [\d,]+ events of [\d,]+ keys$")


@dataclass(frozen=True)
class Chart:
    """A bar chart with a bar for each contender.

    Parameters
    ----------
    name
        Name of the chart's files, without the extension.
    title
        The text above the chart.
    bars
        For each bar: its label, its times in seconds, and whether it is ours.
    """

    name: str
    title: str
    bars: tuple[tuple[str, tuple[float, ...], bool], ...]


def charts_of(result: dict[str, Any]) -> list[Chart]:
    """Return the charts of a result file; an empty list if its benchmark has no charts."""
    maker = _MAKERS.get(result["name"])
    return [_drop_giants(chart) for chart in maker(result) if chart.bars] if maker is not None else []


def draw(chart: Chart, folder: Path, note: str) -> list[Path]:
    """Draw a chart with a note below it, and return the paths of the SVG and the PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    # The same result must give the same file.
    mpl.rcParams.update({"svg.hashsalt": chart.name, "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 0.9 + 0.34 * len(chart.bars)))
    labels = [label for label, _, _ in chart.bars]
    medians = [statistics.median(times) for _, times, _ in chart.bars]
    colours = [_OURS if ours else _OTHERS for _, _, ours in chart.bars]
    below = [median - min(times) for median, (_, times, _) in zip(medians, chart.bars, strict=True)]
    above = [max(times) - median for median, (_, times, _) in zip(medians, chart.bars, strict=True)]
    axes.barh(
        labels, medians, color=colours, xerr=[below, above], ecolor=_TEXT, error_kw={"linewidth": 0.8}, height=0.7
    )
    for position, (median, (_, times, _)) in enumerate(zip(medians, chart.bars, strict=True)):
        axes.text(max(times), position, f"  {median:.2f} s", va="center", color=_TEXT)
    axes.set_xlim(0, max(max(times) for _, times, _ in chart.bars) * 1.15)
    axes.invert_yaxis()
    # The title goes over labels and bars, because the axes alone are too narrow for it.
    figure.suptitle(chart.title, x=0.01, ha="left", fontsize=10, color=_TEXT)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("seconds a batch", color=_TEXT)
    figure.text(0.01, 0.005, note, fontsize=6.5, color="#777777")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{chart.name}.svg", folder / f"{chart.name}.png"]
    figure.savefig(paths[0], metadata={"Date": None})
    figure.savefig(paths[1], dpi=144, metadata={"Software": None})
    plt.close(figure)
    return paths


def note_of(result: dict[str, Any]) -> str:
    """Return the machine, versions and day of a measurement, as a chart's note."""
    machine, versions = result["machine"], result["versions"]
    return (
        f"{machine['cores']} cores of {machine['cpu']}, Python {versions['python']}, pyspark {versions['pyspark']}, "
        f"pyarrow {versions['pyarrow']}; {result['started'][:10]}; median, fastest and slowest batch"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the charts of all result files in a folder."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.charts", description="Draw the charts of result files.")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="folder of the result files")
    parser.add_argument("--charts", type=Path, default=CHARTS, metavar="DIR", help="folder for the charts")
    options = parser.parse_args(arguments)
    for path in sorted(options.results.glob("*.json")):
        result = json.loads(path.read_text())
        for chart in charts_of(result):
            for drawn in draw(chart, options.charts, note_of(result)):
                print(drawn)
    return 0


def _by_workload(result: dict[str, Any]) -> list[Chart]:
    """Return a chart for each workload of the keyed count.

    `vectorised` names its timings ``<workload>: <contender>: batch``, and `peers` ``<contender>: <workload>``.
    """
    workloads: dict[str, list[tuple[str, tuple[float, ...], bool]]] = {}
    for name, times in result["timings_s"].items():
        if name.endswith(_BATCH):
            workload, contender = name[: -len(_BATCH)].split(": ", 1)
            workloads.setdefault(workload, []).append((contender, tuple(times), "Spark's own" not in contender))
        elif _IN_WORKLOAD.search(name):
            contender, workload = name.rsplit(": ", 1)
            workload = workload.replace(" events of ", " events, ")
            workloads.setdefault(workload, []).append((contender, tuple(times), "Arrow state" in contender))
    return [
        Chart(f"{result['name']}-{number}", f"Running count and sum: {workload} a batch", tuple(bars))
        for number, (workload, bars) in enumerate(workloads.items(), 1)
    ]


def _drop_giants(chart: Chart) -> Chart:
    """Return the chart without bars so long that ours could not be seen; its title names them instead."""
    ours = [statistics.median(times) for _, times, is_ours in chart.bars if is_ours]
    if not ours:
        return chart
    giants = [bar for bar in chart.bars if statistics.median(bar[1]) > _GIANT * max(ours)]
    omitted = [f"\n(not shown: {label}, {statistics.median(times):.0f} s)" for label, times, _ in giants]
    bars = tuple(bar for bar in chart.bars if bar not in giants)
    return Chart(chart.name, "".join([chart.title, *omitted]), bars)


def _nexmark(result: dict[str, Any]) -> list[Chart]:
    bars = tuple(
        (name[: -len(_BATCH)], tuple(times), "Arrow state" in name)
        for name, times in result["timings_s"].items()
        if name.endswith(_BATCH)
    )
    events = result["parameters"]["events"]
    return [Chart("nexmark", f"Nexmark: {events:,} events a batch", bars)]


def _growth(result: dict[str, Any]) -> list[Chart]:
    bars = tuple(
        (name[: -len(_BATCH)], tuple(times), True) for name, times in result["timings_s"].items() if _BATCH in name
    )
    events = result["parameters"]["events"]
    return [Chart("growth", f"{events:,} keys updated a batch, of ever more", bars)]


def _buckets(result: dict[str, Any]) -> list[Chart]:
    """Return a chart of the smaller state without the batches after a restart, which take too long for one scale."""
    (small, *_) = result["parameters"]["counts by keys"]
    bars = tuple(
        (name[: -len(_BATCH)].removeprefix(f"{small} keys: "), tuple(times), "Spark's own" not in name)
        for name, times in result["timings_s"].items()
        if name.startswith(f"{small} keys: ") and name.endswith(_BATCH)
    )
    events = result["parameters"]["events"]
    return [Chart("buckets", f"{events:,} of {small} keys updated a batch, in ever more buckets", bars)]


_MAKERS: dict[str, Callable[[dict[str, Any]], list[Chart]]] = {
    "vectorised": _by_workload,
    "peers": _by_workload,
    "nexmark": _nexmark,
    "growth": _growth,
    "buckets": _buckets,
}


if __name__ == "__main__":
    sys.exit(main())
