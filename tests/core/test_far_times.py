"""Event times of the years 1 and 9999: only frames of pandas do not hold them."""

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


def table(schema: pa.Schema, *rows: tuple[int, dt.datetime | None]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(("k", "at"), row, strict=True)) for row in rows], schema)


def latest_rows(key: Any, rows: list[Any], state: GroupState) -> Iterator[tuple[Any, ...]]:
    """The latest time that a key has had, and when it times out."""
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
def test_rows_and_tables_hold_them(api: Any, function: Any) -> None:
    """In input, state, timeouts and output; a row of the year 1 is late, as any is that lies before 1970."""
    batches = [table(ZONED, (1, NOW), (2, FAR), (3, OLD)), None]
    schema = "k bigint, at timestamp, over boolean"
    done = run(
        function, batches, "k", schema, "at timestamp", api=api, timeout_conf="EventTimeTimeout", event_time="at"
    )
    given = [sorted(tuple(row.values()) for row in output.to_pylist()) for output in done.outputs]
    assert given[0] == [(1, NOW, False), (2, FAR, False)]
    # The watermark is as far now, and what is before it times out.
    assert given[1] == [(1, NOW, True)]
    assert done.batches[1].watermark_ms == int(FAR.timestamp() * 1000)


@pytest.mark.parametrize("api", ["rows", "arrow"])
def test_rows_and_tables_hold_times_of_the_far_past(api: Any) -> None:
    """Without a watermark no row is late."""

    def latest(*given: Any) -> Any:
        if api == "arrow":
            batch = given[0]
            batch.update({"at": batch.aggregate([("at", "min")])["at_min"]})
            return {"k": batch.keys["k"], "at": batch.state["at"]}
        key, rows, state = given
        seen = state.get[0] if state.exists else None
        state.update((min(row.at for row in rows),))
        return [(key.k, seen)]

    batches = [table(ZONED, (1, OLD), (2, FAR))] * 2
    done = run(latest, batches, "k", "k bigint, at timestamp", "at timestamp", api=api)
    assert dict(tuple(row.values()) for row in done.outputs[1].to_pylist()) == {1: OLD, 2: FAR}


def test_operators_hold_them() -> None:
    schema = pa.schema([("k", pa.string()), ("at", pa.timestamp("us", "UTC"))])
    rows = [("a", NOW), ("a", NOW + dt.timedelta(seconds=3)), ("far", FAR), ("old", OLD)]
    batches = [pa.Table.from_pylist([{"k": k, "at": at} for k, at in rows], schema), None]
    timed: dict[str, Any] = {"event_time": "at", "delay_ms": 5_000}
    done = run_operator(deduplicate, batches, ["k"], within_watermark=True, **timed)
    assert sorted(done.output.column("k").to_pylist()) == ["a", "far"]
    window = Window("at", 10_000)
    done = run_operator(aggregate, batches, ["k", window], {"n": Agg.count()}, "append", **timed)
    assert done.outputs[1].select(["k", "n"]).to_pylist() == [{"k": "a", "n": 2}]
    assert [row["window"]["start"] for row in done.states[1].to_pylist()] == [FAR]
    done = run_operator(sessionize, batches, "k", "at", 10_000, {"n": Agg.count()}, **timed)
    assert done.outputs[1].select(["k", "n"]).to_pylist() == [{"k": "a", "n": 2}]
    assert [row["k"] for row in done.states[1].to_pylist()] == ["far"]


SCHEMAS = [NAIVE, ZONED] if SPARK_VERSION >= (4, 0) else [NAIVE]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_frame_that_cannot_hold_one_names_column_key_and_remedy(schema: pa.Schema, rows: int) -> None:
    """Keys of one row and of several, among others; and a key that is such a time itself."""
    zone = schema.field("at").type.tz
    far, now = (time if zone else time.replace(tzinfo=None) for time in (FAR, NOW))
    given = [(key, far if key == 13 and row == rows - 1 else now) for key in range(30) for row in range(rows)]

    def count(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        raise AssertionError("no frame can be made")

    said = r"column 'at' has the value 9999-01-01 .* for key \(13,\), and pandas holds times .* apply_rows_with_state"
    with pytest.raises(StateValueError, match=said):
        run(count, [table(schema, *given)], "k", "k bigint", "n bigint")
    said = r"column 'at' has the value 9999-01-01 .* for key \(datetime\.datetime\(9999, 1, 1, .*\), and pandas"
    with pytest.raises(StateValueError, match=said):
        run(count, [table(schema, *given)], "at", "k bigint", "n bigint")
