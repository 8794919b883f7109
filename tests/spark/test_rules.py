"""Properties of the plan that a query's output does not show: heartbeats, labels, spill files, versions, triggers."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.streaming.state import GroupState
from streams import collect, finish, read, write_batches

from arrow_schemas import RowSchema
from arrow_schemas.labels import bucket_label
from spark_state_ext import ArrowState
from spark_state_ext.errors import VersionSkewError
from spark_state_ext.spark.executor.call import run_bucket
from spark_state_ext.spark.task import current_task
from spark_state_ext.store import LocalStore
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.spark

SCHEMA = RowSchema((pa.field("k", pa.int64()),), (pa.field("n", pa.int64()),))


def count(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    n = (state.getOption or (0,))[0] + sum(len(pdf) for pdf in pdfs)
    state.update((n,))
    yield pd.DataFrame({"k": [key[0]], "n": [n]})


def run_count(
    spark: Any, folder: Path, batch: pa.Table, schema: str = "k long", **options: Any
) -> tuple[Any, list[Any]]:
    """Start a count with one more file; return the progress of the last batch and the emitted rows."""
    state = ArrowState(str(folder / "root"), "ruled", **{"local_dir": str(folder / "local"), **options})
    events = read(spark, write_batches(folder / "in", [batch]), schema)
    out = state.apply_in_pandas_with_state(events, "k", count, "k long, n long", "n long", "update", "NoTimeout")
    rows: list[Any] = []
    query = (
        out.writeStream.outputMode("update")
        .foreachBatch(lambda df, _: rows.extend(df.collect()))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    finish(query)
    return query.lastProgress, sorted((r.k, r.n) for r in rows)


def test_every_bucket_is_called_and_restored_in_every_batch(spark: Any, tmp_path: Path) -> None:
    """Rule 1: a bucket without rows gets a new pointer too, and its state is restored on the host that runs it."""
    buckets = 8
    first, _ = run_count(spark, tmp_path, pa.table({"k": pa.array(range(100), pa.int64())}), buckets=buckets)
    assert first["stateOperators"][0]["numRowsTotal"] == buckets
    # Another local folder is like another executor: all stores in it were restored in this start.
    other_local_dir = tmp_path / "elsewhere"
    one_row = pa.table({"k": pa.array([5], pa.int64())})
    second, rows = run_count(spark, tmp_path, one_row, buckets=buckets, local_dir=str(other_local_dir))
    assert rows == [(5, 2)]
    assert second["stateOperators"][0]["numRowsUpdated"] == buckets
    stores = [LocalStore.at(path.parent.parent, SCHEMA) for path in other_local_dir.rglob("data.mdb")]
    assert len(stores) == buckets
    assert all(any(run.newest.version == 1 for run in store.runs()) for store in stores)
    # The only delta is uploaded in the background.
    eventually(lambda: list((tmp_path / "root").rglob("2_*.arrow")) != [])
    new_files = [path.name for path in (tmp_path / "root").rglob("2_*.arrow")]
    assert len(new_files) == 1, "heartbeats write no file"


# Counts the pairs of a number of partitions and a number of buckets for which the buckets are not spread as evenly as possible.
# A partition without a bucket forms no group, so that the sums show it. Evenly means: as many partitions as the remainder of
# the division have one bucket more than the others.
_UNEVEN = """
WITH spread AS (
    SELECT p.id AS partitions, n.id AS buckets, pmod(hash(label), p.id) AS partition, count(*) AS has
    FROM range(1, 65) AS p CROSS JOIN range(1, 513) AS n JOIN labels ON bucket < n.id
    GROUP BY ALL
),
pairs AS (
    SELECT partitions, buckets, sum(has) AS placed,
        count_if(has = floor(buckets / partitions)) AS with_fewer, count_if(has = ceil(buckets / partitions)) AS with_more
    FROM spread GROUP BY ALL
)
SELECT count(*) AS pairs, count_if(NOT (placed = buckets AND CASE
    WHEN buckets % partitions = 0 THEN with_more = partitions
    WHEN buckets < partitions THEN with_more = buckets AND with_fewer = 0
    ELSE with_more = buckets % partitions AND with_more + with_fewer = partitions END)) AS uneven
FROM pairs
"""


@pytest.mark.parametrize("labelled", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_labels_spread_buckets_over_partitions_as_evenly_as_possible(spark: Any, labelled: bool) -> None:
    """Rule 5, for 1 to 512 buckets over 1 to 64 partitions, by one Spark query; without labels they are spread unevenly."""
    labels = [bucket_label(bucket) if labelled else bucket for bucket in range(512)]
    frame = pd.DataFrame({"bucket": range(512), "label": np.array(labels, dtype=np.int32)})
    spark.createDataFrame(frame, "bucket int, label int").createOrReplaceTempView("labels")
    try:
        (result,) = spark.sql(_UNEVEN).collect()
    finally:
        spark.catalog.dropTempView("labels")
    assert result.pairs == 64 * 512
    assert result.uneven == 0 if labelled else result.uneven > result.pairs / 2


@pytest.mark.parametrize("partitions", [1, 3, 7, 8, 64])
def test_a_bucket_is_shuffled_to_the_partition_of_its_number_modulo_the_partitions(spark: Any, partitions: int) -> None:
    """Rule 5: the shuffle partitions by the same hash as the query above."""
    labels = pd.DataFrame(
        {"bucket": range(96), "label": np.array([bucket_label(bucket) for bucket in range(96)], np.int32)}
    )
    frame = spark.createDataFrame(labels, "bucket int, label int").repartition(partitions, "label")
    rows = frame.selectExpr(
        "bucket", f"pmod(hash(label), {partitions}) AS by_hash", "spark_partition_id() AS at"
    ).collect()
    assert sorted((row.bucket, row.by_hash, row.at) for row in rows) == [
        (bucket, bucket % partitions, bucket % partitions) for bucket in range(96)
    ]


def test_rows_beyond_the_limit_of_the_shuffle_go_through_spill_files(spark: Any, tmp_path: Path) -> None:
    """Rule 6: rows beyond a bucket's share travel through files below the root, which the next batch deletes."""
    rng = np.random.default_rng(1)
    rows = 9_000
    values = pa.array([rng.bytes(16 << 10) for _ in range(rows)], pa.binary())
    large = pa.table({"k": pa.array([row % 5 for row in range(rows)], pa.int64()), "v": values})
    first, emitted = run_count(spark, tmp_path, large, "k long, v binary", buckets=1, strict=True)
    assert emitted == [(key, rows // 5) for key in range(5)]
    spill_files = list((tmp_path / "root").rglob("spill/0-*/*.payloads"))
    assert spill_files
    query_folders = {path.name for path in (tmp_path / "root" / "ruled").iterdir()} - {"starting", "spill"}
    assert query_folders == {first["id"]}, "state and spill files are in the same query folder"
    small = pa.table({"k": pa.array([0], pa.int64()), "v": pa.array([b"x"], pa.binary())})
    _, emitted = run_count(spark, tmp_path, small, "k long, v binary", buckets=1)
    assert emitted == [(0, rows // 5 + 1)]
    # The worker deletes them in the background.
    eventually(lambda: list((tmp_path / "root").rglob("*.payloads")) == [])


def test_an_executor_refuses_a_plan_of_another_version_of_the_package() -> None:
    """Rule 9: the version is checked before anything else that an older or newer client sent."""
    with pytest.raises(VersionSkewError, match=r"planned with spark_state_ext 0\.0\.9 .*same version"):
        # The other arguments are invalid: they must not be used before the version is checked.
        next(run_bucket({"package_version": "0.0.9"}, count, (0,), iter(()), None))  # type: ignore[arg-type]


@pytest.mark.parametrize("trigger", [{"continuous": "1 second"}, {"realTime": "5 seconds"}])
def test_triggers_without_micro_batches_are_refused(spark: Any, tmp_path: Path, trigger: dict[str, str]) -> None:
    """Rule 9: we commit in micro-batches, so these queries must not start; Spark refuses them, as with its own operator."""
    if next(iter(trigger)) not in inspect.signature(DataStreamWriter.trigger).parameters:
        pytest.skip("this release of Spark has no real-time trigger")
    state = ArrowState(str(tmp_path / "root"), "ruled", buckets=1, local_dir=str(tmp_path / "local"))
    events = spark.readStream.format("rate").load().selectExpr("value AS k")
    out = state.apply_in_pandas_with_state(events, "k", count, "k long, n long", "n long", "update", "NoTimeout")
    writer = out.writeStream.outputMode("update").format("console").option("checkpointLocation", str(tmp_path / "c"))
    with pytest.raises(Exception, match=r"(?i)not support|unsupported|real_?time"):
        query = writer.trigger(**trigger).start()
        try:
            query.processAllAvailable()
        finally:
            query.stop()
    assert not (tmp_path / "root").exists()


def emit_batches_to_retain(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    planned = SimpleNamespace(plan_id="plan", batches_retained=3)
    yield pd.DataFrame({"k": [key[0]], "n": [current_task(planned).batches_retained]})  # type: ignore[arg-type] # a part of a job


@pytest.mark.parametrize("fixture", ["spark", pytest.param("connect", marks=pytest.mark.connect)])
def test_the_number_of_batches_to_retain_is_read_when_the_query_starts_not_when_planned(
    request: pytest.FixtureRequest, fixture: str, tmp_path: Path
) -> None:
    """Clean-up must never retain fewer batches than Spark does."""
    session = request.getfixturevalue(fixture)
    state = ArrowState(str(tmp_path / "root"), "ruled", local_dir=str(tmp_path / "local"), buckets=1)
    setting = "spark.sql.streaming.minBatchesToRetain"
    for value, expected in (("7", 7), (None, 100)):
        folder = write_batches(tmp_path / f"in-{value}", [pa.table({"k": pa.array([1], pa.int64())})])
        # The value differs between planning and starting the query.
        session.conf.set(setting, "5")
        out = state.apply_in_pandas_with_state(
            read(session, folder, "k long"),
            "k",
            emit_batches_to_retain,
            "k long, n long",
            "n long",
            "update",
            "NoTimeout",
        )
        try:
            if value is None:
                session.conf.unset(setting)
            else:
                session.conf.set(setting, value)
            assert [row.n for row in collect(session, out, "update")] == [expected]
        finally:
            session.conf.unset(setting)
