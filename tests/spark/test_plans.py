"""What may stand before and after the operator, restarts, and how Spark keeps its state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from jobs import CLASSIC, CLASSIC_FIRST, COUNTS, EVERYWHERE, SPARK, TIMED, Job, count, ddl, emitted, event_rows, keyed
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState
from streams import collect, finish, read

from spark_state_ext import ArrowState, deduplicate

pytestmark = pytest.mark.spark

PROVIDERS = "org.apache.spark.sql.execution.streaming.state."


@CLASSIC_FIRST
def test_union_and_static_join_before(session: Any, operator: str, tmp_path: Path) -> None:
    cities = session.createDataFrame([("a", "Aachen"), ("A", "Aachen"), ("b", "Berlin")], "key string, city string")

    def city_count(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        n = (state.getOption or (0,))[0]
        for pdf in pdfs:
            assert list(pdf.columns) == ["key", "value", "city"]
            n += len(pdf)
        state.update((n,))
        yield pd.DataFrame({"city": [key[0]], "n": [n]})

    def widened(df: Any) -> Any:
        # Of each batch, all rows but the first are there twice, once in capitals; "B" and "x" have no city.
        return df.union(df.filter("value > 0").withColumn("key", F.upper("key"))).join(cities, "key")

    job = Job(session, operator, tmp_path, city_count, "city string, n bigint", keys=["city"], before=widened)
    assert job.run(keyed("a", "b", "x", "a"), keyed("b", "a")) == {
        0: [("Aachen", 3), ("Berlin", 1)],
        1: [("Aachen", 5), ("Berlin", 2)],
    }


@CLASSIC_FIRST
def test_static_join_and_aggregation_after(session: Any, operator: str, tmp_path: Path) -> None:
    lands = session.createDataFrame([("a", "NRW"), ("b", "BE"), ("c", "BE")], "key string, land string")
    job = Job(session, operator, tmp_path, count, COUNTS)
    job.after = lambda df: df.join(lands, "key").groupBy("land").agg(F.sum("n"), F.count("*"))
    job.feed(keyed("a", "b", "a", "x"), keyed("a", "b", "c"))
    # n of a is 2 and then 3, of b 1 and 2, of c 1. Complete mode emits all of it in every batch; the last one stays.
    assert sorted(map(tuple, collect(session, job.planned(), "complete"))) == [("BE", 4, 3), ("NRW", 5, 2)]


@CLASSIC
def test_duplicates_dropped_before(session: Any, operator: str, tmp_path: Path) -> None:
    """A stateful operator of Spark's before ours."""
    job = Job(session, operator, tmp_path, count, COUNTS, schema=TIMED, watermark=("at", "10 seconds"))
    job.before = lambda df: df.dropDuplicates(["key", "value"])
    rows = job.run(event_rows(("a", 1, 1), ("a", 2, 1), ("b", 3, 1)), event_rows(("a", 4, 1), ("a", 5, 2)))
    rows |= job.run(event_rows(("a", 6, 2), ("b", 6, 2)))
    assert rows == {0: [("a", 1), ("b", 1)], 1: [("a", 2)], 2: [("b", 2)]}


@EVERYWHERE
def test_two_actions_in_foreach_batch(session: Any, operator: str, tmp_path: Path) -> None:
    """Both see the same, though each runs the operator again; over a restart."""
    target = str(tmp_path / "rows")

    def twice(batch: Any, number: int) -> None:
        batch.write.mode("overwrite").parquet(f"{target}/first/{number}")
        batch.write.mode("overwrite").parquet(f"{target}/second/{number}")

    job = Job(session, operator, tmp_path, count, COUNTS, mode="update")
    for batches in ([keyed("a", "b"), keyed("a")], [keyed("b", "c", "a")]):
        job.feed(*batches)
        writer = job.planned().writeStream.foreachBatch(twice).outputMode("update")
        finish(writer.option("checkpointLocation", str(job.checkpoint)).trigger(availableNow=True).start())
    for which in ("first", "second"):
        found = [pd.read_parquet(f"{target}/{which}/{number}") for number in range(3)]
        assert [sorted(map(tuple, rows.to_numpy().tolist())) for rows in found] == [
            [("a", 1), ("b", 1)],
            [("a", 2)],
            [("a", 3), ("b", 2), ("c", 1)],
        ]


@CLASSIC
def test_a_live_query_takes_data_as_it_comes(session: Any, operator: str, tmp_path: Path) -> None:
    job = Job(session, operator, tmp_path, count, COUNTS, mode="update")
    job.feed(keyed("a"))
    name = f"live_{operator}"
    query = job.planned().writeStream.format("memory").queryName(name).outputMode("update").start()
    try:
        query.processAllAvailable()
        job.feed(keyed("a", "b"))
        query.processAllAvailable()
        assert query.exception() is None
    finally:
        query.stop()
    assert sorted(map(tuple, session.table(name).collect())) == [("a", 1), ("a", 2), ("b", 1)]


# What a provider and checkpoint format name the first version's file of a partition's state.
@CLASSIC
@pytest.mark.parametrize(
    ("provider", "version", "file"),
    [
        ("HDFSBackedStateStoreProvider", 1, "1.delta"),
        ("RocksDBStateStoreProvider", 1, "1.changelog"),
        ("RocksDBStateStoreProvider", 2, "1_*.changelog"),
    ],
    ids=["hdfs", "rocksdb-1", "rocksdb-2"],
)
def test_restart_with_each_state_store_and_other_partitions(
    session: Any, operator: str, provider: str, version: int, file: str, tmp_path: Path
) -> None:
    """Spark keeps the number of partitions that a checkpoint began with, so asking for another has no effect."""
    prefix = "spark.sql.streaming.stateStore."
    conf = {f"{prefix}providerClass": PROVIDERS + provider, f"{prefix}rocksdb.changelogCheckpointing.enabled": "true"}
    if SPARK >= (4, 0):
        conf[f"{prefix}checkpointFormatVersion"] = str(version)
    elif version == 2:
        pytest.skip("checkpoint format 2 of the state store came with Spark 4.0")
    job = Job(session, operator, tmp_path, count, COUNTS, conf=conf)
    keys = [f"key {i}" for i in range(8)]
    assert job.run(keyed(*keys, *keys[:2])) == {0: [(key, 2 if i < 2 else 1) for i, key in enumerate(keys)]}
    assert list((job.checkpoint / "state" / "0" / "1").rglob(file))
    job.conf = {**conf, "spark.sql.shuffle.partitions": "5"}
    assert job.run(keyed(*keys[:4], "new"), keyed(keys[0])) == {
        1: [(key, 3 if i < 2 else 2) for i, key in enumerate(keys[:4])] + [("new", 1)],
        2: [(keys[0], 4)],
    }
    partitions = {path.name for path in (job.checkpoint / "state" / "0").iterdir() if path.name.isdigit()}
    assert partitions == {"0", "1"}
    metadata = json.loads((job.checkpoint / "offsets" / "2").read_text().splitlines()[1])
    assert metadata["conf"]["spark.sql.shuffle.partitions"] == "2"


@CLASSIC
def test_more_partitions_than_keys_and_adaptive_execution(session: Any, operator: str, tmp_path: Path) -> None:
    conf = {"spark.sql.shuffle.partitions": "7", "spark.sql.adaptive.enabled": "true"}
    job = Job(session, operator, tmp_path, count, COUNTS, conf=conf)
    assert job.run(keyed("a", "b"), keyed("b")) == {0: [("a", 1), ("b", 1)], 1: [("b", 2)]}


@CLASSIC
def test_two_queries_of_one_dataframe_have_states_of_their_own(session: Any, operator: str, tmp_path: Path) -> None:
    job = Job(session, operator, tmp_path, count, COUNTS)
    job.feed(keyed("a", "b"), keyed("a"))
    planned = job.planned()
    for _ in range(2):
        rows = collect(session, planned, "append")
        assert sorted(map(tuple, rows)) == [("a", 1), ("a", 2), ("b", 1)]


def test_explicit_call_and_enabled_session_plan_alike(session: Any, tmp_path: Path) -> None:
    """`apply_in_pandas_with_state` continues what an enabled session began."""
    job = Job(session, "arrow", tmp_path, count, COUNTS)
    assert job.run(keyed("a")) == {0: [("a", 1)]}
    job.feed(keyed("a"))
    state = ArrowState(str(tmp_path / "root"), "tested", buckets=3, lease_ms=1000, local_dir=str(tmp_path / "local"))
    events = session.readStream.schema("key string, value bigint").parquet(str(tmp_path / "in"))
    out = state.apply_in_pandas_with_state(events, "key", count, COUNTS, "n bigint", "append", "NoTimeout")
    writer = out.writeStream.format("parquet").option("path", str(job.sink)).outputMode("append")
    finish(writer.option("checkpointLocation", str(job.checkpoint)).trigger(availableNow=True).start())
    assert emitted(job.sink) == {0: [("a", 1)], 1: [("a", 2)]}


@CLASSIC
def test_duplicates_dropped_after(session: Any, operator: str, tmp_path: Path) -> None:
    """Spark's own operator gives rows that Spark cannot shuffle as they are, and so does ours with the same API.

    What computes a column in between makes rows of them that it can, and so do functions over Arrow and rows.
    """
    job = Job(session, operator, tmp_path, count, COUNTS, schema=TIMED, watermark=("at", "10 seconds"))
    job.feed(event_rows(("a", 1, 1), ("b", 2, 1), ("a", 3, 1)), event_rows(("b", 4, 1), ("c", 5, 1), ("a", 5, 1)))
    job.after = lambda df: df.select(F.concat("key", F.lit("!")).alias("key"), "n").dropDuplicates()
    assert sorted(map(tuple, collect(session, job.planned(), "append"))) == [
        *[("a!", 2), ("a!", 3), ("b!", 1), ("b!", 2), ("c!", 1)]
    ]
    if operator == "spark":
        return
    state = ArrowState(tmp_path / "root", "over_rows", buckets=2, local_dir=tmp_path / "local")
    events = read(session, str(tmp_path / "in"), ddl(TIMED)).withWatermark("at", "10 seconds")
    first = deduplicate(state, events.drop("value"), ["key"])
    out = state.apply_rows_with_state(
        events, ["key"], lambda key, rows, _: [(key.key,) for _ in rows], "key string", "n long", "append"
    )
    for df in (first.select("key"), out):
        assert sorted(map(tuple, collect(session, df.dropDuplicates(), "append"))) == [("a",), ("b",), ("c",)]
    counted = out.groupBy("key").count()
    assert sorted(map(tuple, collect(session, counted, "complete"))) == [("a", 3), ("b", 2), ("c", 1)]
