"""Charts show the numbers of result files."""

from __future__ import annotations

import json

import pytest

from benchmarks.charts import charts_of
from benchmarks.report import RESULTS

# Benchmarks and the demo are not part of the package, so the suite leaves their tests to `make soak`.
pytestmark = pytest.mark.soak

_SIZE = "1,000 events of 10 keys"


def make_peers_result(**seconds: float) -> dict[str, object]:
    times = {f"{name.replace('_', ' ')}: {_SIZE}": [median, median * 1.1] for name, median in seconds.items()}
    return {"name": "peers", "timings_s": times}


def test_a_chart_has_a_bar_for_each_program() -> None:
    (chart,) = charts_of(make_peers_result(Arrow_state=1.0, Bytewax=3.0, cp=0.01))
    assert chart.name == "peers-1"
    assert chart.title == "Running count and sum: 1,000 events, 10 keys a batch"
    assert [(label, ours) for label, _, ours in chart.bars] == [
        ("Arrow state", True),
        ("Bytewax", False),
        ("cp", False),
    ]


def test_a_chart_names_a_program_that_is_far_slower_and_does_not_draw_it() -> None:
    (chart,) = charts_of(make_peers_result(Arrow_state=1.0, Bytewax=2.0, Flink=20.0))
    assert [label for label, _, _ in chart.bars] == ["Arrow state", "Bytewax"]
    assert chart.title.endswith("(not shown: Flink, 21 s)")


@pytest.mark.parametrize("name", ["buckets", "growth", "nexmark", "peers", "vectorised"])
def test_committed_results_have_charts(name: str) -> None:
    charts = charts_of(json.loads((RESULTS / f"{name}.json").read_text()))
    assert charts
    assert all(len(chart.bars) > 1 and min(min(times) for _, times, _ in chart.bars) > 0 for chart in charts)
