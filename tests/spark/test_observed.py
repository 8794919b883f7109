"""What Spark's plan and a query's progress show of an operator."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from api_jobs import CLASSIC_FIRST, COUNTERS, ApiJob, count_rows
from jobs import CLASSIC, keyed

from spark_state_ext.worker import metrics
from tests.helpers.waiting import WAIT_S

pytestmark = pytest.mark.spark


def run_and_observe(job: Any, *batches: Any) -> list[dict[str, Any]]:
    """Start the job and return the observed metrics of each batch."""
    job.feed(*batches)
    query = job.writer().trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(WAIT_S)
    finally:
        query.stop()
    metrics_by_batch = []
    for progress in query.recentProgress:
        # Connect has other classes, which separate values from names.
        observed = (
            progress["observedMetrics"] if isinstance(progress, dict) else json.loads(progress.json)["observedMetrics"]
        )
        observed = {name: row if isinstance(row, dict) else row.asDict() for name, row in observed.items()}
        metrics_by_batch.append({name: as_dict(row) for name, row in observed.items()})
    return metrics_by_batch


def as_dict(row: dict[str, Any]) -> dict[str, Any]:
    if "schema" not in row:
        return row
    return dict(zip((field["name"] for field in row["schema"]["fields"]), row["values"], strict=True))


@CLASSIC_FIRST
@pytest.mark.parametrize("api", ["arrow", "rows"])
def test_a_querys_progress_shows_the_size_of_the_state(session: Any, api: str, tmp_path: Path) -> None:
    job = ApiJob(session, "arrow", tmp_path, COUNTERS[api], api=api)
    with job.configured():
        observed = run_and_observe(job, keyed("a", "b", "c"), keyed("a", "d"))
    first, second = (metrics_of_batch["spark_state_ext.tested"] for metrics_of_batch in observed[:2])
    assert first["buckets"] == second["buckets"] == 3
    assert first["state_rows"] == first["state_rows_min"] == 3
    assert second["state_rows_min"] <= 4 <= second["state_rows"] <= 5
    assert 0 < first["state_bytes"] < second["state_bytes"]
    assert first["delta_bytes"] > 0

    # The metrics have the same values. The last call of a task writes them, so they exist once the query has ended.
    batches = metrics.by_batch(metrics.read(tmp_path / "local")).to_pylist()[:2]
    for batch, values in zip(batches, (first, second), strict=True):
        assert {name: batch[name] for name in values} == values


@CLASSIC_FIRST
def test_the_progress_of_a_new_query_counts_the_other_queries_with_state_in_its_root(
    session: Any, tmp_path: Path
) -> None:
    """There are others, for example, if Spark's checkpoint was deleted and the root kept."""
    job = ApiJob(session, "arrow", tmp_path, COUNTERS["pandas"], api="pandas")
    with job.configured():
        for other_queries in (0, 1, 2):
            # One batch, one more after a restart, and then the checkpoint is deleted.
            for at in range(2):
                start = [observed["spark_state_ext.tested.start"] for observed in run_and_observe(job, keyed("a"))]
                assert start[0] == {"begun_beside_queries": other_queries if at == 0 else 0}
            shutil.rmtree(job.checkpoint)
            shutil.rmtree(job.sink)


@CLASSIC
def test_the_plan_names_the_operator_and_the_function(
    session: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ApiJob(session, "arrow", tmp_path, count_rows, api="rows")
    job.feed(keyed("a"))
    job.planned().explain(True)
    assert "arrow_state_tested_count_rows(bucket" in capsys.readouterr().out
