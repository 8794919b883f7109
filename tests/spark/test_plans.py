"""Plans with other operators before and after ours, restarts, and Spark's own storage of state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from jobs import CLASSIC, CLASSIC_FIRST, COUNTS, SPARK, TIMED, Job, count, ddl, emitted, event_rows, keyed
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState
from streams import collect, finish, read

from spark_state_ext import ArrowState, deduplicate

pytestmark = pytest.mark.spark

PROVIDERS = "org.apache.spark.sql.execution.streaming.state."


@CLASSIC_FIRST
def test_a_union_and_a_static_join_may_precede_the_operator(session: Any, operator: str, tmp_path: Path) -> None:
    cities = session.createDataFrame([("a", "Aachen"), ("A", "Aachen"), ("b", "Berlin")], "key string, city string")

    def count_by_city(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        n = (state.getOption or (0,))[0]
        for pdf in pdfs:
            assert list(pdf.columns) == ["key", "value", "city"]
            n += len(pdf)
        state.update((n,))
        yield pd.DataFrame({"city": [key[0]], "n": [n]})

    def add_upper_case_and_city(df: Any) -> Any:
        # All rows of a batch but the first occur twice, once in capitals; the keys "B", "x" and "X" have no city.
        return df.union(df.filter("value > 0").withColumn("key", F.upper("key"))).join(cities, "key")

    job = Job(
        session,
        operator,
        tmp_path,
        count_by_city,
        "city string, n bigint",
        keys=["city"],
        before=add_upper_case_and_city,
    )
    assert job.run(keyed("a", "b", "x", "a"), keyed("b", "a")) == {
        0: [("Aachen", 3), ("Berlin", 1)],
        1: [("Aachen", 5), ("Berlin", 2)],
    }


@CLASSIC_FIRST
def test_a_static_join_and_an_aggregation_may_follow_the_operator(session: Any, operator: str, tmp_path: Path) -> None:
    lands = session.createDataFrame([("a", "NRW"), ("b", "BE"), ("c", "BE")], "key string, land string")
    job = Job(session, operator, tmp_path, count, COUNTS)
    job.after = lambda df: df.join(lands, "key").groupBy("land").agg(F.sum("n"), F.count("*"))
    job.feed(keyed("a", "b", "a", "x"), keyed("a", "b", "c"))
    # The counts are 2 and 3 for a, 1 and 2 for b, 1 for c. In complete mode the memory sink keeps the last batch only.
    assert sorted(map(tuple, collect(session, job.planned(), "complete"))) == [("BE", 4, 3), ("NRW", 5, 2)]


@CLASSIC
def test_dropping_duplicates_may_precede_the_operator(session: Any, operator: str, tmp_path: Path) -> None:
    """One of Spark's stateful operators runs before ours."""
    job = Job(session, operator, tmp_path, count, COUNTS, schema=TIMED, watermark=("at", "10 seconds"))
    job.before = lambda df: df.dropDuplicates(["key", "value"])
    rows = job.run(event_rows(("a", 1, 1), ("a", 2, 1), ("b", 3, 1)), event_rows(("a", 4, 1), ("a", 5, 2)))
    rows |= job.run(event_rows(("a", 6, 2), ("b", 6, 2)))
    assert rows == {0: [("a", 1), ("b", 1)], 1: [("a", 2)], 2: [("b", 2)]}


@CLASSIC_FIRST
def test_two_actions_in_foreach_batch_see_the_same_rows(session: Any, operator: str, tmp_path: Path) -> None:
    """Each action runs the operator again; this also holds after a restart."""
    target = str(tmp_path / "rows")

    def write_twice(batch: Any, number: int) -> None:
        batch.write.mode("overwrite").parquet(f"{target}/first/{number}")
        batch.write.mode("overwrite").parquet(f"{target}/second/{number}")

    job = Job(session, operator, tmp_path, count, COUNTS, mode="update")
    for batches in ([keyed("a", "b"), keyed("a")], [keyed("b", "c", "a")]):
        job.feed(*batches)
        writer = job.planned().writeStream.foreachBatch(write_twice).outputMode("update")
        finish(writer.option("checkpointLocation", str(job.checkpoint)).trigger(availableNow=True).start())
    for action in ("first", "second"):
        frames = [pd.read_parquet(f"{target}/{action}/{number}") for number in range(3)]
        assert [sorted(map(tuple, rows.to_numpy().tolist())) for rows in frames] == [
            [("a", 1), ("b", 1)],
            [("a", 2)],
            [("a", 3), ("b", 2), ("c", 1)],
        ]


@CLASSIC
def test_a_running_query_processes_data_as_it_arrives(session: Any, operator: str, tmp_path: Path) -> None:
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


# `file` is the name that each provider and checkpoint format give to the first version of a partition's state.
@CLASSIC
@pytest.mark.parametrize(
    ("provider", "version", "file"),
    [
        pytest.param("HDFSBackedStateStoreProvider", 1, "1.delta", id="hdfs", marks=pytest.mark.soak),
        pytest.param("RocksDBStateStoreProvider", 1, "1.changelog", id="rocksdb-1", marks=pytest.mark.soak),
        pytest.param("RocksDBStateStoreProvider", 2, "1_*.changelog", id="rocksdb-2"),
    ],
)
def test_a_restart_keeps_the_state_for_each_state_store_and_another_number_of_partitions(
    session: Any, operator: str, provider: str, version: int, file: str, tmp_path: Path
) -> None:
    """Spark keeps the number of partitions of the first start, so that setting another number has no effect."""
    prefix = "spark.sql.streaming.stateStore."
    conf = {
        "spark.sql.shuffle.partitions": "2",
        f"{prefix}providerClass": PROVIDERS + provider,
        f"{prefix}rocksdb.changelogCheckpointing.enabled": "true",
    }
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
def test_counts_are_right_with_more_partitions_than_keys_and_adaptive_execution(
    session: Any, operator: str, tmp_path: Path
) -> None:
    conf = {"spark.sql.shuffle.partitions": "7", "spark.sql.adaptive.enabled": "true"}
    job = Job(session, operator, tmp_path, count, COUNTS, conf=conf)
    assert job.run(keyed("a", "b"), keyed("b")) == {0: [("a", 1), ("b", 1)], 1: [("b", 2)]}


@CLASSIC
def test_two_queries_of_one_dataframe_have_separate_state(session: Any, operator: str, tmp_path: Path) -> None:
    job = Job(session, operator, tmp_path, count, COUNTS)
    job.feed(keyed("a", "b"), keyed("a"))
    output = job.planned()
    for _ in range(2):
        rows = collect(session, output, "append")
        assert sorted(map(tuple, rows)) == [("a", 1), ("a", 2), ("b", 1)]


def test_an_explicit_call_continues_the_query_of_an_enabled_session(session: Any, tmp_path: Path) -> None:
    """`apply_in_pandas_with_state` and an enabled session plan the same operator."""
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
def test_dropping_duplicates_may_follow_the_operator(session: Any, operator: str, tmp_path: Path) -> None:
    """A computed column must come between, because Spark cannot shuffle the rows of its own operator or of ours unchanged.

    The functions over Arrow and rows need no such column.
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
    deduplicated = deduplicate(state, events.drop("value"), ["key"])
    row_output = state.apply_rows_with_state(
        events, ["key"], lambda key, rows, _: [(key.key,) for _ in rows], "key string", "n long", "append"
    )
    for df in (deduplicated.select("key"), row_output):
        assert sorted(map(tuple, collect(session, df.dropDuplicates(), "append"))) == [("a",), ("b",), ("c",)]
    counts = row_output.groupBy("key").count()
    assert sorted(map(tuple, collect(session, counts, "complete"))) == [("a", 3), ("b", 2), ("c", 1)]
