"""Functions that take Arrow tables and plain rows, on real Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from api_jobs import (
    CLASSIC_FIRST,
    COUNTERS,
    DATA_ONLY,
    EVENT_TIME,
    HOUR_MS,
    PROCESSING_TIME,
    ApiJob,
    count_arrow,
    random_batches,
)
from jobs import CLASSIC, COUNTS, KEYED, TIMED, ddl, event_rows, keyed, table
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState
from streams import finish, read

from spark_state_ext import ArrowState, StateBatch, Ttl
from spark_state_ext.errors import UnsupportedPlanError, UnsupportedTypeError, UsageError

pytestmark = pytest.mark.spark


@CLASSIC
def test_functions_over_arrow_rows_and_pandas_give_the_same_counts(session: Any, tmp_path: Path) -> None:
    """The query restarts once, and one key is NULL."""
    batches, counts = random_batches(3), {}
    for api, function in COUNTERS.items():
        (tmp_path / api).mkdir()
        job = ApiJob(session, "arrow", tmp_path / api, function, api=api)
        counts[api] = job.run(*batches[:2]) | job.run(*batches[2:])
    expected: dict[Any, int] = {}
    for at, batch in enumerate(batches):
        for key in batch.column(0).to_pylist():
            expected[key] = expected.get(key, 0) + 1
        rows = sorted(((key, expected[key]) for key in set(batch.column(0).to_pylist())), key=repr)
        assert [counts[api][at] for api in COUNTERS] == [rows] * 3


@pytest.mark.connect
def test_functions_over_arrow_and_rows_run_on_connect(connect: Any, tmp_path: Path) -> None:
    for api in ("arrow", "rows"):
        (tmp_path / api).mkdir()
        job = ApiJob(connect, "arrow", tmp_path / api, COUNTERS[api], api=api)
        assert job.run(keyed("a", "b"), keyed("b")) == {0: [("a", 1), ("b", 1)], 1: [("b", 2)]}


# -- order of rows --------------------------------------------------------------------------------


def count_descents(values: list[int]) -> int:
    """Return how often a value is less than the one before."""
    return sum(after < before for before, after in pairwise(values))


def count_descents_arrow(batch: StateBatch) -> Any:
    return batch.keys.append_column(
        "n", pa.array([count_descents(key_values) for key_values in batch.lists("value").to_pylist()], pa.int64())
    )


def count_descents_rows(key: Any, rows: list[Any], state: GroupState) -> list[tuple[Any, ...]]:
    return [(key.key, count_descents([row.value for row in rows]))]


def count_descents_pandas(key: Any, pdfs: Any, state: GroupState) -> list[tuple[Any, ...]]:
    return [(key[0], count_descents(pd.concat(list(pdfs))["value"].tolist()))]


def sort_arrow(batch: StateBatch) -> Any:
    rows = batch.rows.append_column("group", batch.group_ids)
    rows = rows.take(pc.sort_indices(rows, [("group", "ascending"), ("value", "ascending")]))
    ends = batch.offsets.to_pylist()
    values = [rows["value"][start:end].to_pylist() for start, end in pairwise(ends)]
    return batch.keys.append_column("n", pa.array([count_descents(key_values) for key_values in values], pa.int64()))


def sort_rows(key: Any, rows: list[Any], state: GroupState) -> list[tuple[Any, ...]]:
    return [(key.key, count_descents([row.value for row in sorted(rows, key=lambda row: row.value)]))]


def sort_pandas(key: Any, pdfs: Any, state: GroupState) -> list[tuple[Any, ...]]:
    return [(key[0], count_descents(pd.concat(list(pdfs)).sort_values("value")["value"].tolist()))]


@CLASSIC
@pytest.mark.parametrize(
    ("api", "in_order", "sorting"),
    [
        ("arrow", count_descents_arrow, sort_arrow),
        pytest.param("rows", count_descents_rows, sort_rows, marks=pytest.mark.soak),
        pytest.param("pandas", count_descents_pandas, sort_pandas, marks=pytest.mark.soak),
    ],
)
def test_a_partitions_rows_keep_their_order_and_a_function_can_sort_rows_of_several(
    session: Any, tmp_path: Path, api: str, in_order: Any, sorting: Any
) -> None:
    """docs/vectorised.md promises this order of rows."""
    batch = keyed(*["a", "b", "c", "d"] * 500)
    expected = [(key, 0) for key in "abcd"]
    for name, function, partitions in (("one", in_order, 1), ("several", sorting, 3)):
        (tmp_path / name).mkdir()
        job = ApiJob(session, "arrow", tmp_path / name, function, api=api)
        job.before = partial(DataFrame.repartition, numPartitions=partitions) if partitions > 1 else job.before
        assert sorted(job.run(batch)[0]) == expected


# -- timeouts -------------------------------------------------------------------------------------


def describe(batch: StateBatch) -> Any:
    """Return a text for each key: its values or a timeout, its state, and the watermark."""
    values = [sorted(key_values) for key_values in batch.lists("value").to_pylist()]
    keys = zip(
        batch.keys["key"].to_pylist(), values, batch.state["n"].to_pylist(), batch.timed_out.to_pylist(), strict=True
    )
    return {
        "text": pa.array(
            [
                f"{key} {'timed out' if timed_out else key_values} {n} {batch.watermark_ms}"
                for key, key_values, n, timed_out in keys
            ],
            pa.string(),
        )
    }


@CLASSIC
def test_a_call_has_the_new_rows_and_the_keys_whose_event_time_timeout_is_due(session: Any, tmp_path: Path) -> None:
    """`timed_out` is true for the keys that timed out, and false for the keys with rows."""

    def function(batch: StateBatch) -> Any:
        fresh = pc.invert(batch.timed_out)
        batch.update({"n": batch.counts}, where=pc.and_(fresh, pc.not_equal(batch.keys["key"], "driver")))
        if batch.watermark_ms == 0:
            batch.set_timeout(timestamp_ms=20_000, where=pc.starts_with(batch.keys["key"], "leaves"))
        batch.remove(pc.and_(batch.timed_out, pc.equal(batch.keys["key"], "leaves")))
        return describe(batch)

    job = ApiJob(session, "arrow", tmp_path, function, output="text string", timeout=EVENT_TIME)
    job.schema, job.watermark, job.options = TIMED, ("at", "5 seconds"), {"buckets": 1}
    rows = job.run(
        event_rows(("leaves", 10, 1), ("leaves", 10, 2), ("leaves not", 10, 1), ("stays", 10, 1)),
        event_rows(("driver", 26, 0)),
        event_rows(("driver", 40, 0), ("stays", 30, 5)),
    )
    rows |= job.run(event_rows(("leaves not", 50, 3), ("driver", 50, 0)), event_rows(("leaves", 60, 4)))
    assert {at: texts for at, texts in rows.items() if texts} == {
        0: [("leaves [1, 2] None 0",), ("leaves not [1] None 0",), ("stays [1] None 0",)],
        1: [("driver [0] None 5000",)],
        2: [
            ("driver [0] None 21000",),
            ("leaves not timed out 1 21000",),
            ("leaves timed out 2 21000",),
            ("stays [5] 1 21000",),
        ],
        # The function neither removed "leaves not" nor set its timeout, so the key stays due until it has rows.
        3: [("leaves not timed out 1 35000",)],
        4: [("driver [0] None 35000",), ("leaves not [3] 1 35000",)],
        5: [("leaves [4] None 45000",)],
    }


@CLASSIC
@pytest.mark.parametrize("api", ["arrow", pytest.param("rows", marks=pytest.mark.soak)])
def test_processing_time_timeouts_fire_in_a_later_batch_and_after_a_restart(
    session: Any, api: str, tmp_path: Path
) -> None:
    def vectorised(batch: StateBatch) -> Any:
        patient = pc.equal(batch.keys["key"], "patient")
        batch.update({"n": pc.add(pc.fill_null(batch.state["n"], 0), batch.counts)}, where=pc.invert(batch.timed_out))
        batch.set_timeout(duration_ms=pc.if_else(patient, HOUR_MS, 1), where=pc.invert(batch.timed_out))
        batch.remove(batch.timed_out)
        return describe(batch)

    def plain(key: Any, rows: list[Any], state: GroupState) -> Iterator[tuple[str]]:
        n = state.get[0] if state.exists else None
        yield (f"{key.key} {'timed out' if state.hasTimedOut else sorted(row.value for row in rows)} {n} None",)
        if state.hasTimedOut:
            assert rows == []
            state.remove()
        else:
            state.update(((n or 0) + len(rows),))
            state.setTimeoutDuration(HOUR_MS if key.key == "patient" else 1)

    functions: dict[str, Callable[..., Any]] = {"arrow": vectorised, "rows": plain}
    function = functions[api]
    job = ApiJob(session, "arrow", tmp_path, function, output="text string", timeout=PROCESSING_TIME, api=api)
    job.conf = DATA_ONLY
    rows = job.run(keyed("a", "a", "b", "patient"), keyed("b"), keyed("c"))
    rows |= job.run(keyed("a", "patient"))
    assert rows == {
        0: [("a [0, 1] None None",), ("b [2] None None",), ("patient [3] None None",)],
        1: [("a timed out 2 None",), ("b [0] 1 None",)],
        2: [("b timed out 2 None",), ("c [0] None None",)],
        3: [("a [0] None None",), ("c timed out 1 None",), ("patient [1] 1 None",)],
    }


@pytest.mark.soak
@CLASSIC
def test_late_rows_are_dropped_by_the_watermark_of_the_batch_before(session: Any, tmp_path: Path) -> None:
    """test_timeouts.py shows the same for a function over pandas frames."""
    job = ApiJob(session, "arrow", tmp_path, describe, output="text string", timeout=EVENT_TIME, conf=DATA_ONLY)
    job.schema, job.watermark = TIMED, ("at", "5 seconds")
    rows = job.run(
        event_rows(("a", 10, 1), ("b", 15, 2), ("a", 0, 22), ("e", 0, 23)),
        event_rows(("a", 1, 3), ("b", 25, 4)),
        event_rows(("a", 9, 5), ("a", 10, 6), ("a", 11, 7), ("a", None, 8), ("c", 20, 9)),
    )
    assert rows == {
        0: [("a [1] None 0",), ("b [2] None 0",)],
        1: [("a [3] None 10000",), ("b [4] None 10000",)],
        2: [("a [7, 8] None 20000",), ("c [9] None 20000",)],
    }


# -- other engines --------------------------------------------------------------------------------


@CLASSIC
@pytest.mark.parametrize("engine", ["polars", pytest.param("duckdb", marks=pytest.mark.soak)])
def test_a_function_can_compute_the_state_with_polars_or_duckdb(session: Any, engine: str, tmp_path: Path) -> None:
    """`update` matches the new state to the keys by value, whatever the order of its rows."""
    pytest.importorskip(engine)

    def in_polars(batch: StateBatch) -> Any:
        import polars as pl

        rows, known = pl.from_arrow(batch.rows), pl.from_arrow(batch.with_state())
        assert isinstance(rows, pl.DataFrame)
        assert isinstance(known, pl.DataFrame)
        sums = rows.group_by("key").agg(pl.len().alias("new"), pl.col("value").max().alias("max"))
        out = known.join(sums, on="key", nulls_equal=True).select(
            "key", (pl.col("n").fill_null(0) + pl.col("new")).alias("n")
        )
        batch.update(out)
        return out

    def in_duckdb(batch: StateBatch) -> Any:
        import duckdb

        rows, known = batch.rows, batch.with_state()
        assert rows.num_rows
        assert known.num_rows
        out: Any = duckdb.sql(
            "SELECT known.key, coalesce(any_value(known.n), 0) + count(*) AS n FROM known "
            "JOIN rows ON known.key IS NOT DISTINCT FROM rows.key GROUP BY ALL ORDER BY random()"
        )
        out = out.to_arrow_table()
        batch.update(out)
        return out

    function = {"polars": in_polars, "duckdb": in_duckdb}[engine]
    job = ApiJob(session, "arrow", tmp_path, function)
    rows = job.run(keyed("a", None, "b", "a"), keyed("b", "c", None))
    assert rows == {0: [("a", 2), ("b", 1), (None, 1)], 1: [("b", 2), ("c", 1), (None, 2)]}


# -- plans and output -----------------------------------------------------------------------------


@CLASSIC_FIRST
def test_scan_gives_the_whole_state_of_a_bucket_to_foreach_batch(session: Any, tmp_path: Path) -> None:
    """In each batch, each bucket with rows returns its state of the batch before, in update mode."""
    target = str(tmp_path / "rows")

    def save(batch: Any, number: int) -> None:
        batch.write.mode("overwrite").parquet(f"{target}/{number}")

    def scan_and_count(batch: StateBatch) -> Iterator[Any]:
        yield from batch.scan()
        count_arrow(batch)

    job = ApiJob(session, "arrow", tmp_path, scan_and_count, mode="update", options={"buckets": 2})
    job.feed(keyed("a", "b", "c"), keyed("a", "b", "c", "d"))
    query = job.planned().writeStream.foreachBatch(save).outputMode("update").trigger(availableNow=True)
    finish(query.option("checkpointLocation", str(tmp_path / "checkpoint")).start())
    assert session.read.schema(COUNTS).parquet(f"{target}/0").collect() == []
    assert sorted(map(tuple, session.read.parquet(f"{target}/1").collect())) == [("a", 1), ("b", 1), ("c", 1)]


@CLASSIC
def test_key_expressions_duplicate_column_names_and_large_output_work_together(session: Any, tmp_path: Path) -> None:
    def function(batch: StateBatch) -> Any:
        assert batch.keys.column_names == ["digit", "key", "key"]
        assert batch.rows.column_names == ["key", "value", "value"]
        assert batch.rows.column(2).equals(batch.rows.column(1))
        n = pc.add(pc.fill_null(batch.state["n"], 0), batch.counts)
        batch.update({"n": n})
        # Far more rows than Spark reads from the worker at once.
        at = np.repeat(np.arange(len(batch)), 9_000)
        key = pc.binary_join_element_wise(
            pc.cast(batch.keys.column(0), pa.string()), batch.keys.column(1), batch.keys.column(2), "-"
        )
        yield pa.table({"n": n, "key": key}).take(pa.array(at))
        yield {"key": [], "n": []}

    keys = [(F.col("value") % 10).alias("digit"), "key", F.upper("key").alias("key")]
    job = ApiJob(session, "arrow", tmp_path, function, keys=keys, options={"buckets": 1})
    job.before = lambda df: df.select("key", "value", "value")
    # This aggregation starts in the operator's stage.
    job.after = lambda df: df.groupBy("key", "n").count()
    job.feed(table(KEYED, [("a", 1), ("a", 11), ("b", 2)]), table(KEYED, [("a", 21)]))
    writer = job.planned().writeStream.format("memory").queryName("much_output").outputMode("complete")
    finish(writer.trigger(availableNow=True).start())
    rows = session.table("much_output").collect()
    session.sql("DROP VIEW IF EXISTS much_output")
    assert sorted(map(tuple, rows)) == [("1-a-A", 2, 9_000), ("1-a-A", 3, 9_000), ("2-b-B", 1, 9_000)]


@CLASSIC
def test_unsupported_plans_and_wrong_arguments_are_refused(session: Any, tmp_path: Path) -> None:
    state = ArrowState(str(tmp_path / "root"), "tested")
    job = ApiJob(session, "arrow", tmp_path, count_arrow, schema=TIMED)
    job.feed(event_rows(("a", 1, 1)))
    events = read(session, str(tmp_path / "in"), ddl(TIMED))
    for name in ("apply_in_arrow_with_state", "apply_rows_with_state"):
        apply = getattr(state, name)
        with pytest.raises(UnsupportedPlanError, match=f"{name} is not supported with a batch DataFrame"):
            apply(session.createDataFrame([("a", 1)], "key string, value long"), "key", count_arrow, COUNTS, "n long")
        with pytest.raises(UnsupportedTypeError, match=r"input column 'span' has the type 'interval day to second'"):
            apply(events.selectExpr("*", "make_dt_interval(1) AS span"), "key", count_arrow, COUNTS, "n long")
        with pytest.raises(UnsupportedTypeError, match=r"output column 'span' has the type 'interval day to second'"):
            apply(events, "key", count_arrow, "span interval day to second", "n long")
        with pytest.raises(UsageError, match="LunchTimeout"):
            apply(events, "key", count_arrow, COUNTS, "n long", "append", "LunchTimeout")
        with pytest.raises(UsageError, match="__expires_ms"):
            apply(events, "key", count_arrow, COUNTS, "n long, __expires_ms long")
    for output, state_columns, text in (
        (COUNTS, "n long, n long", "two state columns have the same name, 'n'"),
        (COUNTS, "n long, N long", "two state columns have the same name, 'n'.*spark.sql.caseSensitive"),
        ("k string, k long", "n long", "two output columns have the same name, 'k'"),
    ):
        with pytest.raises(UsageError, match=text):
            state.apply_in_pandas_with_state(events, "key", count_arrow, output, state_columns, "update", "NoTimeout")
    expiring = ArrowState(str(tmp_path / "root"), "tested", ttl=Ttl(1, clock="event"))
    with pytest.raises(UnsupportedPlanError, match="needs an input with a watermark"):
        expiring.apply_in_arrow_with_state(events, "key", count_arrow, COUNTS, "n long")
    with pytest.raises(UsageError, match=r"ttl must be a Ttl.*not 5"):
        ArrowState(str(tmp_path / "root"), "tested", ttl=5)  # type: ignore[arg-type]


# -- errors ---------------------------------------------------------------------------------------


def update_wrongly(batch: StateBatch) -> None:
    batch.update({"n": ["many"] * len(batch)})


def fail(batch: StateBatch) -> None:
    raise KeyError("no such aircraft")


FAILURES: dict[str, tuple[str, Callable[..., Any], list[str]]] = {
    "columns": ("arrow", lambda batch: {"key": ["a"]}, ["StateValueError", "the function gave the columns key; expected key, n", "batch 0"]),
    "state": ("arrow", update_wrongly, ["StateValueError", "state column 'n' of type int64 cannot hold string", "in update_wrongly"]),
    "exception": ("arrow", fail, ["UserFunctionError", "1 rows of 1 keys", "no such aircraft", "in fail"]),
    "rows": ("rows", lambda key, rows, state: [(1, 2, 3)], ["ResultTypeError", "the function gave (1, 2, 3) for a row; expected a tuple of key, n"]),
}  # fmt: skip


@CLASSIC
def test_errors_of_a_function_reach_the_user_with_their_message(session: Any, tmp_path: Path) -> None:
    for name, (api, function, texts) in FAILURES.items():
        (tmp_path / name).mkdir()
        with pytest.raises(StreamingQueryException) as raised:
            ApiJob(session, "arrow", tmp_path / name, function, api=api).run(keyed("a"))
        for text in texts:
            assert text in str(raised.value), name


@pytest.mark.connect
def test_errors_of_a_function_reach_a_connect_user_with_their_message(connect: Any, tmp_path: Path) -> None:
    api, function, texts = FAILURES["state"]
    with pytest.raises(StreamingQueryException) as raised:
        ApiJob(connect, "arrow", tmp_path, function, api=api).run(keyed("a"))
    for text in texts:
        assert text in str(raised.value)
