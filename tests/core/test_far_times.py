"""Event times of the years 1 and 9999: only pandas frames cannot hold them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql.streaming.state import GroupState

from spark_state_ext import Agg, StateBatch, aggregate, deduplicate, sessionize
from spark_state_ext.errors import StateValueError
from spark_state_ext.spark.compat import SPARK_VERSION
from spark_state_ext.testing import Window, run, run_operator

UTC = dt.timezone.utc
OLD, NOW, FAR = (dt.datetime(year, 1, 1, tzinfo=UTC) for year in (1, 2024, 9999))
ZONED = pa.schema([("k", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
NAIVE = pa.schema([("k", pa.int64()), ("at", pa.timestamp("us"))])


def make_table(schema: pa.Schema, *rows: tuple[int, dt.datetime | None]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(("k", "at"), row, strict=True)) for row in rows], schema)


def latest_rows(key: Any, rows: list[Any], state: GroupState) -> Iterator[tuple[Any, ...]]:
    """Yield the latest time of a key, and whether the key has timed out."""
    times = [row.at for row in rows] + [state.get[0] if state.exists else dt.datetime.min]  # noqa: DTZ901
    if rows:
        state.update((max(times),))
        state.setTimeoutTimestamp(max(times))
    yield key.k, max(times), state.hasTimedOut


def latest_tables(batch: StateBatch) -> dict[str, Any]:
    fresh = batch.timed_out.false_count
    if not fresh:
        return {"k": batch.keys["k"], "at": batch.state["at"], "over": batch.timed_out}
    latest = batch.aggregate([("at", "max")])["at_max"]
    batch.update({"at": latest})
    batch.set_timeout(timestamp_ms=latest)
    return {"k": batch.keys["k"], "at": latest, "over": batch.timed_out}


@pytest.mark.parametrize(("api", "function"), [("rows", latest_rows), ("arrow", latest_tables)])
def test_rows_and_tables_hold_times_of_the_year_9999(api: Any, function: Any) -> None:
    """The times are in input, state, timeouts and output. The row of the year 1 is late, like each row before 1970."""
    batches = [make_table(ZONED, (1, NOW), (2, FAR), (3, OLD)), None]
    schema = "k bigint, at timestamp, over boolean"
    result = run(
        function, batches, "k", schema, "at timestamp", api=api, timeout_conf="EventTimeTimeout", event_time="at"
    )
    rows = [sorted(tuple(row.values()) for row in output.to_pylist()) for output in result.outputs]
    assert rows[0] == [(1, NOW, False), (2, FAR, False)]
    # The watermark is in the year 9999 now, so timeouts before it expire.
    assert rows[1] == [(1, NOW, True)]
    assert result.batches[1].watermark_ms == int(FAR.timestamp() * 1000)


@pytest.mark.parametrize("api", ["rows", "arrow"])
def test_rows_and_tables_hold_times_of_the_year_1(api: Any) -> None:
    """Without a watermark, no row is late."""

    def return_latest(*args: Any) -> Any:
        if api == "arrow":
            batch = args[0]
            batch.update({"at": batch.aggregate([("at", "min")])["at_min"]})
            return {"k": batch.keys["k"], "at": batch.state["at"]}
        key, rows, state = args
        latest = state.get[0] if state.exists else None
        state.update((min(row.at for row in rows),))
        return [(key.k, latest)]

    batches = [make_table(ZONED, (1, OLD), (2, FAR))] * 2
    result = run(return_latest, batches, "k", "k bigint, at timestamp", "at timestamp", api=api)
    assert dict(tuple(row.values()) for row in result.outputs[1].to_pylist()) == {1: OLD, 2: FAR}


def test_operators_hold_times_of_the_year_9999() -> None:
    schema = pa.schema([("k", pa.string()), ("at", pa.timestamp("us", "UTC"))])
    rows = [("a", NOW), ("a", NOW + dt.timedelta(seconds=3)), ("far", FAR), ("old", OLD)]
    batches = [pa.Table.from_pylist([{"k": k, "at": at} for k, at in rows], schema), None]
    timed: dict[str, Any] = {"event_time": "at", "delay_ms": 5_000}
    result = run_operator(deduplicate, batches, ["k"], within_watermark=True, **timed)
    assert sorted(result.output.column("k").to_pylist()) == ["a", "far"]
    window = Window("at", 10_000)
    result = run_operator(aggregate, batches, ["k", window], {"n": Agg.count()}, "append", **timed)
    assert result.outputs[1].select(["k", "n"]).to_pylist() == [{"k": "a", "n": 2}]
    assert [row["window"]["start"] for row in result.states[1].to_pylist()] == [FAR]
    result = run_operator(sessionize, batches, "k", "at", 10_000, {"n": Agg.count()}, **timed)
    assert result.outputs[1].select(["k", "n"]).to_pylist() == [{"k": "a", "n": 2}]
    assert [row["k"] for row in result.states[1].to_pylist()] == ["far"]


SCHEMAS = [NAIVE, ZONED] if SPARK_VERSION >= (4, 0) else [NAIVE]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_time_that_pandas_cannot_hold_raises_an_error_with_column_key_and_remedy(
    schema: pa.Schema, rows: int
) -> None:
    """The time is in one of 30 keys, each of which has one row or several; or the key itself is such a time."""
    zone = schema.field("at").type.tz
    far, now = (time if zone else time.replace(tzinfo=None) for time in (FAR, NOW))
    pairs = [(key, far if key == 13 and row == rows - 1 else now) for key in range(30) for row in range(rows)]

    def count(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        raise AssertionError("no frame can be made")

    message = (
        r"column 'at' has the value 9999-01-01 .* for key \(13,\), and pandas holds times .* apply_rows_with_state"
    )
    with pytest.raises(StateValueError, match=message):
        run(count, [make_table(schema, *pairs)], "k", "k bigint", "n bigint")
    message = r"column 'at' has the value 9999-01-01 .* for key \(datetime\.datetime\(9999, 1, 1, .*\), and pandas"
    with pytest.raises(StateValueError, match=message):
        run(count, [make_table(schema, *pairs)], "at", "k bigint", "n bigint")
