"""What is to be seen of an operator in Spark's plan and in a query's progress."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from api_jobs import COUNTERS, EVERYWHERE, ApiJob, count_rows
from jobs import CLASSIC, keyed

from spark_state_ext.worker import metrics
from tests.helpers.waiting import WAIT_S

pytestmark = pytest.mark.spark


def progress(job: Any, *batches: Any) -> list[dict[str, Any]]:
    """What each batch with data of a start observed."""
    job.feed(*batches)
    query = job.writer().trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(WAIT_S)
    finally:
        query.stop()
    found = []
    for one in query.recentProgress:
        # Connect has classes of its own, with values apart from their names.
        seen = one["observedMetrics"] if isinstance(one, dict) else json.loads(one.json)["observedMetrics"]
        seen = {name: row if isinstance(row, dict) else row.asDict() for name, row in seen.items()}
        found.append({name: _values(row) for name, row in seen.items()})
    return found


def _values(row: dict[str, Any]) -> dict[str, Any]:
    if "schema" not in row:
        return row
    return dict(zip((field["name"] for field in row["schema"]["fields"]), row["values"], strict=True))


@EVERYWHERE
@pytest.mark.parametrize("api", ["arrow", "rows"])
def test_sizes_of_state_are_in_the_progress(session: Any, api: str, tmp_path: Path) -> None:
    job = ApiJob(session, "arrow", tmp_path, COUNTERS[api], api=api)
    with job.configured():
        seen = progress(job, keyed("a", "b", "c"), keyed("a", "d"))
    first, second = (one["spark_state_ext.tested"] for one in seen[:2])
    assert first["buckets"] == second["buckets"] == 3
    assert first["state_rows"] == first["state_rows_min"] == 3
    assert second["state_rows_min"] <= 4 <= second["state_rows"] <= 5
    assert 0 < first["state_bytes"] < second["state_bytes"]
    assert first["delta_bytes"] > 0

    # They are those of the metrics. The last call of a task writes them, so they are there when the query has ended.
    batches = metrics.by_batch(metrics.read(tmp_path / "local")).to_pylist()[:2]
    for batch, found in zip(batches, (first, second), strict=True):
        assert {name: batch[name] for name in found} == found


@EVERYWHERE
def test_a_query_that_begins_beside_the_state_of_others_says_so_in_its_progress(session: Any, tmp_path: Path) -> None:
    """As when Spark's checkpoint was deleted and the root kept."""
    job = ApiJob(session, "arrow", tmp_path, COUNTERS["pandas"], api="pandas")
    with job.configured():
        for begun_beside in (0, 1, 2):
            # One batch, another after a restart, and then without the checkpoint.
            for at in range(2):
                start = [one["spark_state_ext.tested.start"] for one in progress(job, keyed("a"))]
                assert start[0] == {"begun_beside_queries": begun_beside if at == 0 else 0}
            shutil.rmtree(job.checkpoint)
            shutil.rmtree(job.sink)


@CLASSIC
def test_the_plan_says_which_operator_it_is(session: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = ApiJob(session, "arrow", tmp_path, count_rows, api="rows")
    job.feed(keyed("a"))
    job.planned().explain(True)
    assert "arrow_state_tested_count_rows(bucket" in capsys.readouterr().out
