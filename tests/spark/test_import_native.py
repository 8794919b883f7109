"""Importing a stopped job: whether it was imported or left alone, it gives the same output, and the same timeouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import KEYED, SPARK, ddl, keyed, reads_state
from native_job import FIRST, NEXT, NativeJob, conf_of
from streams import finish, read, write_batches

from spark_state_ext import Savepoint, import_native, read_savepoint
from tests.helpers.soak import whole

pytestmark = [pytest.mark.spark, reads_state]

# Provider, checkpoint format, how many batches before the last one it stopped after, and whether the next was planned.
# The reader of 4.0 reads no format 2, and a JVM of 4.0 that has met one reads no other: there the suite keeps to format 1.
_READ = {("hdfs", 1), ("rocksdb", 1), ("rocksdb", 2)} - ({("rocksdb", 2)} if SPARK < (4, 1) else set())
SUITE = [("hdfs", 1, 1, False), ("rocksdb", 2 if SPARK >= (4, 1) else 1, 2, True)]
MORE = [
    (provider, version, back, planned)
    for provider, version in sorted(_READ)
    for back, planned in [(0, False), (1, False), (1, True), (2, True)]
    if (provider, version, back, planned) not in SUITE
]


def _both(
    spark: Any, folder: Path, provider: str, version: int, back: int, planned: bool
) -> tuple[NativeJob, NativeJob]:
    """The job, stopped, twice."""
    (folder / "alone").mkdir()
    alone = NativeJob(spark, folder / "alone", conf_of(provider, version))
    alone.run(FIRST)
    alone.cut_back(alone.last_batch() - back, planned)
    return alone, alone.copy(folder / "imported")


@pytest.mark.parametrize(("provider", "version", "back", "planned"), whole(SUITE, MORE))
def test_an_imported_job_goes_on_as_one_that_was_left_alone(
    spark: Any, tmp_path: Path, provider: str, version: int, back: int, planned: bool
) -> None:
    alone, job = _both(spark, tmp_path, provider, version, back, planned)
    stopped_at = job.last_batch()

    done = import_native(
        spark, job.checkpoint, tmp_path / "savepoint", job.folder / "new", buckets=3, operator="tested", idle_s=0
    )

    assert (done.batch, done.replays) == (stopped_at, planned)
    assert done.rows == read_savepoint(spark, str(tmp_path / "savepoint")).count() > 3
    assert 0 < done.timeouts <= done.rows
    alone.run(NEXT)
    job.run(NEXT, Savepoint(str(tmp_path / "savepoint")), "new")
    assert job.emitted() == alone.emitted()
    later = [row for batch, rows in job.emitted().items() if batch > stopped_at for row in rows]
    assert any(fired for _, _, fired in later), "some timeouts were carried over"
    assert json.loads((job.folder / "new" / "metadata").read_text())["id"] == done.query_id


def test_timeouts_by_the_clock_fire_without_input(spark: Any, tmp_path: Path) -> None:
    job = NativeJob(spark, tmp_path, conf_of("hdfs", 1))
    write_batches(tmp_path / "in", FIRST[:1])
    job.run_until(3)
    # Spark makes a first batch without input only where one was planned, of an imported query and of any other.
    job.cut_back(0, planned=True)

    done = import_native(
        spark, job.checkpoint, tmp_path / "savepoint", tmp_path / "new", buckets=3, operator="tested", idle_s=0
    )
    assert done.replays
    job.run_until(6, Savepoint(str(tmp_path / "savepoint")), "new")

    assert sorted((row for rows in job.emitted().values() for row in rows), key=repr) == sorted(
        [(key, 1, fired) for key in ("a", "b", None) for fired in (False, True)], key=repr
    )


def test_a_job_whose_keys_are_all_gone_is_imported(spark: Any, tmp_path: Path) -> None:
    def forgetting(key: Any, frames: Any, state: Any) -> Any:
        for _ in frames:
            pass
        return iter(())

    stream = read(spark, write_batches(tmp_path / "in", [keyed("a", "b")]), ddl(KEYED)).groupBy("key")
    out = stream.applyInPandasWithState(forgetting, "key string", "n bigint", "append", "NoTimeout")
    writer = out.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "old"))
    finish(writer.trigger(availableNow=True).start())

    done = import_native(
        spark, tmp_path / "old", tmp_path / "savepoint", tmp_path / "new", buckets=3, operator="tested", idle_s=0
    )

    assert (done.rows, done.checksum) == (0, 0)
    assert read_savepoint(spark, str(tmp_path / "savepoint")).count() == 0


@pytest.mark.connect
def test_a_job_is_imported_and_goes_on_through_connect(connect: Any, tmp_path: Path) -> None:
    provider, version, *_ = SUITE[1]
    job = NativeJob(connect, tmp_path, conf_of(provider, version))
    job.run(FIRST)
    stopped_at, settings = job.last_batch(), connect.sql("SET").collect()

    done = import_native(
        connect, job.checkpoint, tmp_path / "savepoint", tmp_path / "new", buckets=3, operator="tested", idle_s=0
    )
    assert connect.sql("SET").collect() == settings
    job.run(NEXT, Savepoint(str(tmp_path / "savepoint")), "new")

    assert done.batch == stopped_at
    assert 0 < done.timeouts < done.rows
    later = [row for batch, rows in job.emitted().items() if batch > stopped_at for row in rows]
    assert ("d", 2, False) in later, "its state was carried over"
    assert ("c", 1, True) in later, "its timeout was carried over"
