"""What batches wait for if a store is slow or cannot be reached for a while."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jobs import COUNTS, Job, count, emitted, keyed
from pyspark.sql import functions as F
from streams import finish
from watched_store import STORE

from spark_state_ext import SourcePartition
from spark_state_ext.store.environment import Environment
from spark_state_ext.store.records import read_all
from spark_state_ext.worker.metrics import read as read_metrics
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.spark

LETTERS = "abcdefghijklmnop"
BUCKETS = 8
PUT_MS = 200
# The number of batches after which every worker process has done everything once.
WARM = 12


def make_job(session: Any, folder: Path, *, partitions: int = 1, buckets: int = BUCKETS, **options: Any) -> Job:
    store = {"implementation": STORE, **options.pop("store", {})}
    options = {"buckets": buckets, "storage_options": store, **options}
    conf = {"spark.sql.shuffle.partitions": str(partitions)}
    return Job(session, "arrow", folder, count, COUNTS, options=options, conf=conf)


def _is_done(job: Job, batches: int) -> bool:
    return len(emitted(job.sink)) >= batches


def count_by_batch(batches: list[list[str]]) -> list[dict[str, int]]:
    total: Counter[str] = Counter()
    counts = []
    for letters in batches:
        total.update(letters)
        counts.append({letter: total[letter] for letter in set(letters)})
    return counts


def count_failed_uploads(job: Job) -> int:
    """Return the number of local stores with a record of a failed upload."""
    folders = {path.parents[1] for path in (job.folder / "local").rglob("data.mdb")}
    records = [Environment.at(folder, 1 << 20).read(read_all) for folder in folders]
    return sum(any(b'"failed"' in value for value in by_name.values()) for by_name in records)


def is_right(job: Job, fed: list[list[str]]) -> bool:
    return [dict(rows) for rows in emitted(job.sink).values()] == count_by_batch(fed)


@pytest.mark.parametrize(
    "bucket_by",
    [
        pytest.param(None, id="hash"),
        pytest.param(SourcePartition("partition", [2, 8]), id="partition", marks=pytest.mark.soak),
    ],
)
def test_a_warm_batch_sends_no_request_to_the_store(
    spark: Any, tmp_path: Path, bucket_by: SourcePartition | None
) -> None:
    """Snapshots, leases, clean-up and confirmations run in other threads."""
    log = tmp_path / "requests"
    job = make_job(spark, tmp_path, buckets=2, lease_ms=30_000, store={"log": str(log)}, bucket_by=bucket_by)
    job.before = lambda df: df.withColumn("partition", F.expr("ascii(key) % 8"))
    fed: list[list[str]] = []
    job.feed()
    with job.running() as query:
        for batch in range(WARM + 14):
            if batch == WARM:
                assert "lease" in log.read_text()
                log.unlink()
            fed.append(list(LETTERS[batch % 3 : 8]))
            job.feed(keyed(*fed[-1]))
            eventually(partial(_is_done, job, len(fed)))
        assert query.exception() is None
    assert not log.exists(), log.read_text()
    assert is_right(job, fed)


def read_waits(job: Job) -> dict[int, list[float]]:
    """Return how long each bucket's call waited, by batch."""
    calls = read_metrics(job.folder / "local").sort_by("batch")
    waits: dict[int, list[float]] = {}
    for row in calls.select(["batch", "wait_ms"]).to_pylist():
        waits.setdefault(row["batch"], []).append(row["wait_ms"])
    return waits


def test_a_task_waits_once_for_the_uploads_of_its_large_deltas(spark: Any, tmp_path: Path) -> None:
    """No delta fits inline and all buckets are in one task, whose last call waits for all PUTs; these run in parallel."""
    job = make_job(spark, tmp_path, store={"put_ms": PUT_MS}, inline_bytes_max=0)
    fed = [list(LETTERS[first:]) for first in range(5)]
    job.run(*(keyed(*letters) for letters in fed))
    assert is_right(job, fed)
    eventually(lambda: read_metrics(job.folder / "local").num_rows >= 5 * BUCKETS)
    first, *later = read_waits(job).values()
    # In the first batch of a run it is not known which call is the last. (A bucket without keys has no delta.)
    assert sum(wait > 0 for wait in first) >= BUCKETS - 1
    for waits in later[1:]:
        assert len(waits) == BUCKETS
        assert sum(wait > 0 for wait in waits) == 1


@pytest.mark.soak
def test_no_row_is_lost_if_foreach_batch_sets_another_number_of_partitions(spark: Any, tmp_path: Path) -> None:
    """Tasks see a number of partitions that is not theirs, so that every call waits for its own upload."""
    job = make_job(spark, tmp_path, partitions=2, store={"put_ms": 20}, inline_bytes_max=0)
    total: Counter[str] = Counter()
    table: dict[str, int] = {}

    def save(df: Any, batch: int) -> None:
        df.sparkSession.conf.set("spark.sql.shuffle.partitions", str(1 + batch % 3))
        table.update({row.key: row.n for row in df.collect()})

    for start in range(2):
        # Each start has an empty disk, so that the state comes from the store.
        job.options["local_dir"] = str(tmp_path / f"local-{start}")
        fed = [list(LETTERS[first:]) * 2 for first in range(4)]
        job.feed(*(keyed(*letters) for letters in fed))
        total.update(letter for letters in fed for letter in letters)
        with job.configured():
            writer = job.planned().writeStream.foreachBatch(save).outputMode("append")
            finish(writer.option("checkpointLocation", str(job.checkpoint)).trigger(availableNow=True).start())
        assert table == total


def test_a_query_waits_for_a_store_that_cannot_be_reached_when_a_worker_begins(spark: Any, tmp_path: Path) -> None:
    """The first requests (for the lease and the operator's file) are retried too."""
    away = tmp_path / "away"
    job = make_job(spark, tmp_path, buckets=2, store={"away": str(away)})
    job.feed()
    with job.running() as query:
        away.touch()
        timer = threading.Timer(2.0, away.unlink)
        timer.start()
        job.feed(keyed("a", "b", "a"))
        eventually(lambda: _is_done(job, 1) or query.exception() is not None)
        timer.join()
        assert query.exception() is None
    assert is_right(job, [["a", "b", "a"]])


@pytest.mark.parametrize("restart", [pytest.param("the same plan", marks=pytest.mark.soak), "another plan"])
def test_a_query_whose_uploads_were_refused_continues_after_one_restart(
    spark: Any, tmp_path: Path, restart: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local stores have a record of each refused upload, but a restart for each bucket is not needed."""
    refuses = tmp_path / "refuses"
    job = make_job(spark, tmp_path, partitions=2, store={"refuses": str(refuses)})
    job.feed()
    if restart == "the same plan":
        output = job.planned()
        monkeypatch.setattr(job, "planned", lambda: output)
    # Each bucket has some of these keys.
    keys = [f"key {n}" for n in range(8 * BUCKETS)]
    fed = [keys, keys]
    job.run(keyed(*fed[0]))
    refuses.touch()
    job.feed(keyed(*fed[1]))
    with job.running() as query:
        eventually(lambda: _is_done(job, 2))
        # No call waits for the uploads of this batch; the next batch sees that they failed.
        eventually(lambda: count_failed_uploads(job) == BUCKETS)
        fed.append(keys)
        job.feed(keyed(*fed[-1]))
        eventually(lambda: query.exception() is not None)
        assert "UploadFailedError" in str(query.exception())
        assert "credentials expired" in str(query.exception())
    refuses.unlink()
    job.run()
    assert is_right(job, fed)
