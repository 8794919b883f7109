"""Spark's own cases for this API, on Spark's operator and on ours, classic and Connect, with the same assertions."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from jobs import CLASSIC_FIRST
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from streams import collect, read, using, write_batches

pytestmark = [pytest.mark.spark, CLASSIC_FIRST]

COUNTS = "key string, n long, rows long"


def make_batch(*keys: str | None) -> pa.Table:
    return pa.table({"key": pa.array(keys, pa.string()), "value": pa.array(range(len(keys)), pa.int64())})


def running_count(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    rows = sum(len(pdf) for pdf in pdfs)
    n = (state.getOption or (0,))[0] + rows
    state.update((n,))
    yield pd.DataFrame({"key": [key[0]], "n": [n], "rows": [rows]})


def run_job(
    session: Any, operator: str, tmp_path: Path, batches: list[pa.Table], function: Any, **options: Any
) -> list[Any]:
    """Run a job over some batches and return all rows that it emits."""
    schema = options.get("schema", "key string, value long")
    events = read(session, write_batches(tmp_path / "in", batches), schema)
    if "watermark" in options:
        events = events.withWatermark(*options["watermark"])
    with using(session, operator, tmp_path):
        out = events.groupBy(*options.get("keys", ["key"])).applyInPandasWithState(
            function,
            options.get("output", COUNTS),
            options.get("state", "n long"),
            options.get("mode", "update"),
            options.get("timeout", GroupStateTimeout.NoTimeout),
        )
        return collect(session, out, options.get("mode", "update"), rows=options.get("rows"))


def test_counts_continue_over_batches_also_for_null_keys(session: Any, operator: str, tmp_path: Path) -> None:
    batches = [make_batch("a", "b", "a", None), make_batch("b", None), make_batch("c", "a", "a")]
    rows = run_job(session, operator, tmp_path, batches, running_count)
    assert sorted(map(tuple, rows), key=str) == sorted(
        [("a", 2, 2), ("b", 1, 1), (None, 1, 1), ("b", 2, 1), (None, 2, 1), ("c", 1, 1), ("a", 4, 2)], key=str
    )


@pytest.mark.soak
def test_a_function_may_keep_no_state_and_emit_no_rows(session: Any, operator: str, tmp_path: Path) -> None:
    def emit_no_rows(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        assert not state.exists
        assert state.getOption is None
        if key[0] == "a":
            yield pd.DataFrame()
        elif key[0] == "b":
            yield pd.DataFrame({"key": [], "n": [], "rows": []})
        else:
            return

    assert run_job(session, operator, tmp_path, [make_batch("a", "b", "c"), make_batch("a", "c")], emit_no_rows) == []


@pytest.mark.soak
def test_a_function_may_emit_many_rows_for_one_key_and_none_for_another(
    session: Any, operator: str, tmp_path: Path
) -> None:
    def emit_many_rows(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        if key[0] == "a":
            for i in range(3):
                yield pd.DataFrame({"key": ["a"] * 5, "n": range(i * 5, i * 5 + 5), "rows": [0] * 5})
        state.update((len(list(pdfs)),))

    rows = run_job(session, operator, tmp_path, [make_batch("a", "b", "c", "d")], emit_many_rows)
    assert sorted((r.key, r.n) for r in rows) == [("a", i) for i in range(15)]


def test_large_integers_stay_exact_if_another_key_has_only_nulls(session: Any, operator: str, tmp_path: Path) -> None:
    """The frame of a key with only NULL has floats; combining it with another key's frame must not round integers."""
    large = 1_790_000_000_000_000_001

    def find_maximum(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        for pdf in pdfs:
            yield pd.DataFrame({"key": [key[0]], "n": [pdf["value"].max()], "rows": [len(pdf)]})

    table = make_batch("a", "b", "c").set_column(1, "value", pa.array([large, None, large + 2]))
    rows = run_job(session, operator, tmp_path, [table], find_maximum)
    assert sorted(map(tuple, rows)) == [("a", large, 1), ("b", None, 1), ("c", large + 2, 1)]


def test_a_removed_state_begins_again_from_nothing(session: Any, operator: str, tmp_path: Path) -> None:
    def count_to_two(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        rows = sum(len(pdf) for pdf in pdfs)
        n = (state.getOption or (0,))[0] + rows
        if n >= 2:
            state.remove()
            assert not state.exists
        else:
            state.update((n,))
        yield pd.DataFrame({"key": [key[0]], "n": [n], "rows": [rows]})

    rows = run_job(session, operator, tmp_path, [make_batch("a"), make_batch("a"), make_batch("a", "b")], count_to_two)
    assert sorted((r.key, r.n) for r in rows) == [("a", 1), ("a", 1), ("a", 2), ("b", 1)]


def test_numpy_values_in_state_are_read_back_as_python_values(session: Any, operator: str, tmp_path: Path) -> None:
    def keep_numpy_values(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        text = "none" if state.getOption is None else ",".join(f"{type(v).__name__}={v}" for v in state.get)
        when = pd.Timestamp("2013-01-01 05:00:00.000001")
        state.update((np.int64(5), np.float64(1.5), np.bool_(True), when, pd.Timestamp("2013-01-02").date()))
        yield pd.DataFrame({"key": [key[0]], "text": [text]})

    state = "a long, b double, c boolean, d timestamp, e date"
    rows = run_job(
        session,
        operator,
        tmp_path,
        [make_batch("a"), make_batch("a")],
        keep_numpy_values,
        output="key string, text string",
        state=state,
    )
    assert sorted(r.text for r in rows) == [
        "int=5,float=1.5,bool=True,datetime=2013-01-01 05:00:00.000001,date=2013-01-02",
        "none",
    ]


def test_rows_arrive_in_chunks_that_a_function_need_not_read_to_the_end(
    session: Any, operator: str, tmp_path: Path
) -> None:
    def check_chunks(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        assert not isinstance(pdfs, list)
        if key[0] == "left":
            first = next(iter(pdfs))
            yield pd.DataFrame({"key": ["left"], "n": [1], "rows": [min(len(first), 1)]})
        else:
            sizes = [len(pdf) for pdf in pdfs]
            assert max(sizes) <= 3
            yield pd.DataFrame({"key": [key[0]], "n": [int(len(sizes) > 1)], "rows": [sum(sizes)]})

    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = session.conf.get(name)
    session.conf.set(name, "3")
    try:
        rows = run_job(session, operator, tmp_path, [make_batch(*["many"] * 10, *["left"] * 10, "one")], check_chunks)
    finally:
        session.conf.set(name, before)
    assert sorted(map(tuple, rows)) == [("left", 1, 1), ("many", 1, 10), ("one", 0, 1)]


@pytest.mark.parametrize("limit", ["0", pytest.param("-1", marks=pytest.mark.soak)])
def test_rows_of_a_key_are_counted_without_a_limit_of_rows_in_a_frame(
    session: Any, operator: str, tmp_path: Path, limit: str
) -> None:
    def count_rows(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        n = (state.getOption or (0,))[0] + sum(len(pdf) for pdf in pdfs)
        state.update((n,))
        yield pd.DataFrame({"key": [key[0]], "n": [n], "rows": [n]})

    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = session.conf.get(name)
    session.conf.set(name, limit)
    try:
        rows = run_job(session, operator, tmp_path, [make_batch(*["a"] * 500, *["b"] * 3), make_batch("a")], count_rows)
    finally:
        session.conf.set(name, before)
    assert sorted(map(tuple, rows)) == [("a", 500, 500), ("a", 501, 501), ("b", 3, 3)]


@pytest.mark.soak
def test_keys_of_several_columns_have_the_order_of_group_by(session: Any, operator: str, tmp_path: Path) -> None:
    def show(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        (pdf,) = pdfs
        state.update((len(pdf),))
        yield pd.DataFrame({"text": [f"{[str(k) for k in key]} {list(pdf.columns)} {sorted(pdf['more'])}"]})

    table = pa.table({"key": ["a", "a", "b"], "value": pa.array([1, 12, 1], pa.int64()), "more": [1.0, 2.0, 3.0]})
    schema, keys = "key string, value long, more double", ["value", "key"]
    rows = run_job(session, operator, tmp_path, [table], show, schema=schema, keys=keys, output="text string")
    assert sorted(r.text for r in rows) == [
        "['1', 'a'] ['key', 'value', 'more'] [1.0]",
        "['1', 'b'] ['key', 'value', 'more'] [3.0]",
        "['12', 'a'] ['key', 'value', 'more'] [2.0]",
    ]


@pytest.mark.soak
def test_processing_time_timeouts_call_the_function_with_a_list_of_one_empty_frame(
    session: Any, operator: str, tmp_path: Path
) -> None:
    def time_out(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        if state.hasTimedOut:
            assert isinstance(pdfs, list)
            (pdf,) = pdfs
            assert len(pdf) == 0
            text = f"timeout {type(key[0]).__name__} {type(key[1]).__name__} {list(pdf.columns)} {state.get}"
            state.remove()
        else:
            text = f"data {sum(map(len, pdfs))}"
            state.update((7,))
            if key[1] == "short":
                state.setTimeoutDuration(1)
        yield pd.DataFrame({"text": [f"{key[0]} {key[1]} {text}"]})

    batches = [
        pa.table({"name": ["short", "long"], "id": pa.array([1, 2], pa.int64())}),
        pa.table({"name": ["long"], "id": pa.array([2], pa.int64())}),
    ]
    rows = run_job(
        session,
        operator,
        tmp_path,
        batches,
        time_out,
        schema="name string, id long",
        keys=["id", "name"],
        output="text string",
        timeout=GroupStateTimeout.ProcessingTimeTimeout,
        rows=4,
    )
    assert sorted(r.text for r in rows) == [
        "1 short data 1",
        "1 short timeout int64 str ['name', 'id'] (7,)",
        "2 long data 1",
        "2 long data 1",
    ]


@pytest.mark.soak
@pytest.mark.parametrize("argument", ["int", "datetime"])
def test_event_time_timeouts_fire_at_the_watermark_and_late_rows_are_dropped(
    session: Any, operator: str, argument: str, tmp_path: Path
) -> None:
    def count_until_timeout(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        if state.hasTimedOut:
            text = f"{key[0]} timeout {state.get[0]}"
            state.remove()
        else:
            values = sorted(int(v) for pdf in pdfs for v in pdf["value"])
            n = (state.getOption or (0,))[0] + len(values)
            state.update((n,))
            deadline_s = state.getCurrentWatermarkMs() // 1000 + 15
            if argument == "int":
                state.setTimeoutTimestamp(deadline_s * 1000)
            else:
                # Naive and in the time zone of the process, like all of Spark's Python timestamps.
                state.setTimeoutTimestamp(dt.datetime.fromtimestamp(deadline_s))  # type: ignore[arg-type]  # noqa: DTZ006
            text = f"{key[0]} data {values}"
        yield pd.DataFrame({"text": [text]})

    def make_timed_batch(*rows: tuple[str, int | None, int]) -> pa.Table:
        keys, seconds, values = zip(*rows, strict=True)
        at = pa.array([None if s is None else s * 1_000_000 for s in seconds], pa.int64()).cast(
            pa.timestamp("us", "UTC")
        )
        return pa.table({"key": list(keys), "at": at, "value": pa.array(values, pa.int64())})

    batches = [
        make_timed_batch(("a", 10, 1), ("b", 12, 2)),
        make_timed_batch(("b", 25, 3)),  # the watermark is 7 s
        make_timed_batch(
            ("a", 1, 4), ("b", None, 5), ("b", 45, 6)
        ),  # the watermark becomes 20 s; rows before the previous one, 7 s, are late
        make_timed_batch(("c", 21, 7), ("c", 50, 8)),  # the watermark becomes 40 s
    ]
    rows = run_job(
        session,
        operator,
        tmp_path,
        batches,
        count_until_timeout,
        schema="key string, at timestamp, value long",
        watermark=("at", "5 seconds"),
        output="text string",
        mode="append",
        timeout=GroupStateTimeout.EventTimeTimeout,
    )
    assert sorted(r.text for r in rows) == [
        "a data [1]",
        "a timeout 1",
        "b data [2]",
        "b data [3]",
        "b data [5, 6]",
        "b timeout 4",
        "c data [7, 8]",
    ]


@pytest.mark.parametrize("wrong", ["frame", "none", "columns", "raises"])
def test_a_wrong_result_of_the_function_fails_the_query_with_its_reason(
    session: Any, operator: str, wrong: str, tmp_path: Path
) -> None:
    def return_wrong_result(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Any:
        if wrong == "frame":
            return pd.DataFrame({"key": ["x"], "n": [1], "rows": [1]})
        if wrong == "none":
            return None
        if wrong == "columns":
            return iter([pd.DataFrame({"key": ["x"]})])
        raise KeyError("no such aircraft")

    expected = {
        # Spark's text comes first, then ours.
        "frame": ("iterable of pandas.DataFrame", "the function returned a DataFrame: yield it"),
        "none": ("iterable", "the function returned None: yield rows or frames"),
        "columns": ("RESULT_COLUMN_SCHEMA_MISMATCH", "RESULT_LENGTH_MISMATCH", "do not match", "doesn't match"),
        "raises": ("no such aircraft",),
    }[wrong]
    with pytest.raises(Exception) as raised:  # its class differs between classic and Connect
        run_job(session, operator, tmp_path, [make_batch("a")], return_wrong_result)
    text = str(raised.value)
    assert any(part in text for part in expected)
    if operator == "arrow" and wrong == "raises":
        assert "UserFunctionError" in text
        assert "key ('a',)" in text
        assert "batch 0" in text or "bucket" in text
