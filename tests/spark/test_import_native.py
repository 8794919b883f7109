"""A stopped job that is imported continues with the same output and timeouts as on Spark's operator."""

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

# Provider, checkpoint format, number of batches between the stop and the last batch, and whether the next one was planned.
# The reader of 4.0 cannot read format 2, and a JVM of 4.0 that has met it cannot read format 1: with 4.0 all use format 1.
READABLE = {("hdfs", 1), ("rocksdb", 1), ("rocksdb", 2)} - ({("rocksdb", 2)} if SPARK < (4, 1) else set())
SUITE = [("rocksdb", 2 if SPARK >= (4, 1) else 1, 2, True)]
MORE = [
    (provider, version, back, planned)
    for provider, version in sorted(READABLE)
    for back, planned in [(0, False), (1, False), (1, True), (2, True)]
    if (provider, version, back, planned) not in SUITE
]


def make_two_jobs(
    spark: Any, folder: Path, provider: str, version: int, back: int, planned: bool
) -> tuple[NativeJob, NativeJob]:
    """Return a stopped job, and a copy of it to import."""
    (folder / "native").mkdir()
    native = NativeJob(spark, folder / "native", conf_of(provider, version))
    native.run(FIRST)
    native.cut_back(native.last_batch() - back, planned)
    return native, native.copy(folder / "imported")


@pytest.mark.parametrize(("provider", "version", "back", "planned"), whole(SUITE, MORE))
def test_an_imported_job_continues_with_the_output_of_the_native_job(
    spark: Any, tmp_path: Path, provider: str, version: int, back: int, planned: bool
) -> None:
    native, job = make_two_jobs(spark, tmp_path, provider, version, back, planned)
    stopped_at = job.last_batch()

    result = import_native(
        spark, job.checkpoint, tmp_path / "savepoint", job.folder / "new", buckets=3, operator="tested", idle_s=0
    )

    assert (result.batch, result.replays) == (stopped_at, planned)
    assert result.rows == read_savepoint(spark, str(tmp_path / "savepoint")).count() > 3
    assert 0 < result.timeouts <= result.rows
    native.run(NEXT)
    job.run(NEXT, Savepoint(str(tmp_path / "savepoint")), "new")
    assert job.emitted() == native.emitted()
    later = [row for batch, rows in job.emitted().items() if batch > stopped_at for row in rows]
    assert any(fired for _, _, fired in later), "some imported timeouts fired"
    assert json.loads((job.folder / "new" / "metadata").read_text())["id"] == result.query_id


@pytest.mark.soak
def test_imported_processing_time_timeouts_fire_without_input(spark: Any, tmp_path: Path) -> None:
    job = NativeJob(spark, tmp_path, conf_of("hdfs", 1))
    write_batches(tmp_path / "in", FIRST[:1])
    job.run_until(3)
    # Spark runs a first batch without input only if it was planned, in an imported query and in every other.
    job.cut_back(0, planned=True)

    result = import_native(
        spark, job.checkpoint, tmp_path / "savepoint", tmp_path / "new", buckets=3, operator="tested", idle_s=0
    )
    assert result.replays
    job.run_until(6, Savepoint(str(tmp_path / "savepoint")), "new")

    assert sorted((row for rows in job.emitted().values() for row in rows), key=repr) == sorted(
        [(key, 1, fired) for key in ("a", "b", None) for fired in (False, True)], key=repr
    )


def test_a_job_without_keys_can_be_imported(spark: Any, tmp_path: Path) -> None:
    def keep_nothing(key: Any, frames: Any, state: Any) -> Any:
        for _ in frames:
            pass
        return iter(())

    stream = read(spark, write_batches(tmp_path / "in", [keyed("a", "b")]), ddl(KEYED)).groupBy("key")
    out = stream.applyInPandasWithState(keep_nothing, "key string", "n bigint", "append", "NoTimeout")
    writer = out.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "old"))
    finish(writer.trigger(availableNow=True).start())

    result = import_native(
        spark, tmp_path / "old", tmp_path / "savepoint", tmp_path / "new", buckets=3, operator="tested", idle_s=0
    )

    assert (result.rows, result.checksum) == (0, 0)
    assert read_savepoint(spark, str(tmp_path / "savepoint")).count() == 0


@pytest.mark.connect
def test_connect_imports_a_job_and_continues_it(connect: Any, tmp_path: Path) -> None:
    provider, version, *_ = SUITE[0]
    job = NativeJob(connect, tmp_path, conf_of(provider, version))
    job.run(FIRST)
    stopped_at, settings = job.last_batch(), connect.sql("SET").collect()

    result = import_native(
        connect, job.checkpoint, tmp_path / "savepoint", tmp_path / "new", buckets=3, operator="tested", idle_s=0
    )
    assert connect.sql("SET").collect() == settings
    job.run(NEXT, Savepoint(str(tmp_path / "savepoint")), "new")

    assert result.batch == stopped_at
    assert 0 < result.timeouts < result.rows
    later = [row for batch, rows in job.emitted().items() if batch > stopped_at for row in rows]
    assert ("d", 2, False) in later, "the state was imported"
    assert ("c", 1, True) in later, "the timeout was imported"
