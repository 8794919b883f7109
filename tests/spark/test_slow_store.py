"""What batches wait for where a store is slow, or away for a while."""

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
# Batches until every worker process has done everything once.
WARM = 12


def _job(session: Any, folder: Path, *, partitions: int = 1, buckets: int = BUCKETS, **options: Any) -> Job:
    store = {"implementation": STORE, **options.pop("store", {})}
    options = {"buckets": buckets, "storage_options": store, **options}
    conf = {"spark.sql.shuffle.partitions": str(partitions)}
    return Job(session, "arrow", folder, count, COUNTS, options=options, conf=conf)


def _is_done(job: Job, batches: int) -> bool:
    return len(emitted(job.sink)) >= batches


def _counted(batches: list[list[str]]) -> list[dict[str, int]]:
    total: Counter[str] = Counter()
    found = []
    for letters in batches:
        total.update(letters)
        found.append({letter: total[letter] for letter in set(letters)})
    return found


def _failed_notes(job: Job) -> int:
    """In how many local stores it is noted that an upload failed."""
    folders = {path.parents[1] for path in (job.folder / "local").rglob("data.mdb")}
    records = [Environment.at(folder, 1 << 20).read(read_all) for folder in folders]
    return sum(any(b'"failed"' in value for value in found.values()) for found in records)


def _right(job: Job, fed: list[list[str]]) -> bool:
    return [dict(rows) for rows in emitted(job.sink).values()] == _counted(fed)


@pytest.mark.parametrize(
    "bucket_by",
    [
        pytest.param(None, id="hash"),
        pytest.param(SourcePartition("partition", [2, 8]), id="partition", marks=pytest.mark.soak),
    ],
)
def test_a_warm_batch_asks_the_store_for_nothing(spark: Any, tmp_path: Path, bucket_by: SourcePartition | None) -> None:
    """Snapshots, leases, clean-up and confirmations included: all that is beside it."""
    log = tmp_path / "asked"
    job = _job(spark, tmp_path, buckets=2, lease_ms=30_000, store={"log": str(log)}, bucket_by=bucket_by)
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
    assert _right(job, fed)


def _waits(job: Job) -> dict[int, list[float]]:
    """How long each bucket's call waited, by batch."""
    calls = read_metrics(job.folder / "local").sort_by("batch")
    waits: dict[int, list[float]] = {}
    for row in calls.select(["batch", "wait_ms"]).to_pylist():
        waits.setdefault(row["batch"], []).append(row["wait_ms"])
    return waits


def test_large_deltas_are_waited_for_once_a_task(spark: Any, tmp_path: Path) -> None:
    """Nothing fits inline, and all buckets are in one task: its last call waits for all PUTs, which go side by side."""
    job = _job(spark, tmp_path, store={"put_ms": PUT_MS}, inline_bytes_max=0)
    fed = [list(LETTERS[at:]) for at in range(5)]
    job.run(*(keyed(*letters) for letters in fed))
    assert _right(job, fed)
    eventually(lambda: read_metrics(job.folder / "local").num_rows >= 5 * BUCKETS)
    first, *later = _waits(job).values()
    # In the first batch of a run nobody knows yet which call is the last. (A bucket without keys has no delta.)
    assert sum(wait > 0 for wait in first) >= BUCKETS - 1
    for waits in later[1:]:
        assert len(waits) == BUCKETS
        assert sum(wait > 0 for wait in waits) == 1


def test_foreach_batch_that_sets_another_number_of_partitions(spark: Any, tmp_path: Path) -> None:
    """Tasks are told a number that is not theirs: then every call waits for itself, and nothing is lost."""
    job = _job(spark, tmp_path, partitions=2, store={"put_ms": 20}, inline_bytes_max=0)
    total: Counter[str] = Counter()
    found: dict[str, int] = {}

    def save(df: Any, batch: int) -> None:
        df.sparkSession.conf.set("spark.sql.shuffle.partitions", str(1 + batch % 3))
        found.update({row.key: row.n for row in df.collect()})

    for start in range(2):
        # Each on a disk of its own: the state comes from the store.
        job.options["local_dir"] = str(tmp_path / f"local-{start}")
        fed = [list(LETTERS[at:]) * 2 for at in range(4)]
        job.feed(*(keyed(*letters) for letters in fed))
        total.update(letter for letters in fed for letter in letters)
        with job.configured():
            writer = job.planned().writeStream.foreachBatch(save).outputMode("append")
            finish(writer.option("checkpointLocation", str(job.checkpoint)).trigger(availableNow=True).start())
        assert found == total


def test_a_store_that_is_away_when_a_worker_begins(spark: Any, tmp_path: Path) -> None:
    """What is asked first (the lease, the operator's file) is tried again too."""
    away = tmp_path / "away"
    job = _job(spark, tmp_path, buckets=2, store={"away": str(away)})
    job.feed()
    with job.running() as query:
        away.touch()
        back = threading.Timer(2.0, away.unlink)
        back.start()
        job.feed(keyed("a", "b", "a"))
        eventually(lambda: _is_done(job, 1) or query.exception() is not None)
        back.join()
        assert query.exception() is None
    assert _right(job, [["a", "b", "a"]])


@pytest.mark.parametrize("again", [pytest.param("the same plan", marks=pytest.mark.soak), "another plan"])
def test_mend_it_and_start_again_takes_one_start(
    spark: Any, tmp_path: Path, again: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one for each bucket whose upload was refused, as the local stores remember each of them."""
    refuses = tmp_path / "refuses"
    job = _job(spark, tmp_path, partitions=2, store={"refuses": str(refuses)})
    job.feed()
    if again == "the same plan":
        planned = job.planned()
        monkeypatch.setattr(job, "planned", lambda: planned)
    # Some in each bucket.
    keys = [f"key {n}" for n in range(8 * BUCKETS)]
    fed = [keys, keys]
    job.run(keyed(*fed[0]))
    refuses.touch()
    job.feed(keyed(*fed[1]))
    with job.running() as query:
        eventually(lambda: _is_done(job, 2))
        # Nobody waits for the uploads of this batch; the next one is told of them.
        eventually(lambda: _failed_notes(job) == BUCKETS)
        fed.append(keys)
        job.feed(keyed(*fed[-1]))
        eventually(lambda: query.exception() is not None)
        assert "UploadFailedError" in str(query.exception())
        assert "credentials expired" in str(query.exception())
    refuses.unlink()
    job.run()
    assert _right(job, fed)
