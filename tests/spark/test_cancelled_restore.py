"""A query can be stopped while a task restores its state, and a failed restore can be repeated."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from jobs import COUNTS, Job, count, emitted, keyed
from watched_store import STORE

from tests.helpers.waiting import eventually, is_running

pytestmark = pytest.mark.spark

# Duration of each read of the restore.
GET_S = 3_600.0


def make_job(session: Any, folder: Path, start: int, **store: Any) -> Job:
    options = {
        "buckets": 2,
        "storage_options": {"implementation": STORE, **store},
        "inline_bytes_max": 0,
        # Each start has an empty disk.
        "local_dir": str(folder / f"local-{start}"),
    }
    return Job(session, "arrow", folder, count, COUNTS, options=options, conf={"spark.sql.shuffle.partitions": "1"})


def test_stopping_a_query_does_not_wait_for_a_long_restore(spark: Any, tmp_path: Path) -> None:
    """Spark kills the worker two seconds after `spark.python.task.killTimeout`; our code must not delay that."""
    readers = tmp_path / "readers"
    make_job(spark, tmp_path, 0).run(*(keyed("a", "b", "c") for _ in range(4)))
    job = make_job(spark, tmp_path, 1, get_ms=1000 * GET_S, readers=str(readers))
    job.feed(keyed("a"))
    with job.running() as query:
        eventually(lambda: readers.exists() or query.exception() is not None)
        assert query.exception() is None
        stopped_s = time.monotonic()
        query.stop()
    assert time.monotonic() - stopped_s < GET_S / 2
    pids = {int(pid) for pid in readers.read_text().split()}
    eventually(lambda: not any(map(is_running, pids)))


def test_the_next_start_restores_after_a_failed_restore(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start has the same plan and perhaps the same worker, which must not use what the failure closed."""
    refuses = tmp_path / "refuses-reads"
    make_job(spark, tmp_path, 0).run(*(keyed("a", "b", "c") for _ in range(3)))
    job = make_job(spark, tmp_path, 1, refuses_reads=str(refuses))
    planned = job.planned()
    monkeypatch.setattr(job, "planned", lambda: planned)
    refuses.touch()
    job.feed(keyed("a", "b", "c"))
    with job.running() as query:
        eventually(lambda: query.exception() is not None)
        assert "credentials expired" in str(query.exception())
    refuses.unlink()
    job.run()
    assert dict(emitted(job.sink)[3]) == {"a": 4, "b": 4, "c": 4}
