"""Calling a vectorised function without Spark: its arguments, its output and its errors."""

from __future__ import annotations

import datetime as dt
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from arrow_schemas import RowSchema, key_fields, state_fields
from spark_state_ext.errors import ResultTypeError, StateValueError, UsageError, UserFunctionError
from spark_state_ext.functions.state_batch import StateBatch
from spark_state_ext.spark.callers.batches import BatchCaller
from spark_state_ext.spark.callers.groups import CallContext, Changed, Groups, Result
from spark_state_ext.spark.shuffle import output as output_module
from spark_state_ext.spark.shuffle.output import unpack
from spark_state_ext.store import Lookup

KEYS = StructType([StructField("k", LongType()), StructField("x", DoubleType())])
STATE = StructType([StructField("n", LongType()), StructField("tags", ArrayType(StringType()))])
INPUT = StructType(
    [
        StructField("k", LongType(), False),
        StructField("x", DoubleType()),
        StructField("at", TimestampType()),
        StructField("local", TimestampNTZType()),
        StructField("name", StringType()),
    ]
)
OUTPUT = StructType([StructField("k", LongType()), StructField("n", LongType())])
SCHEMA = RowSchema(key_fields(KEYS.json()), state_fields(STATE.json()))
CONTEXT = CallContext(3, 7, 1_000, 500, True, "EventTimeTimeout")
Function = Callable[[StateBatch], Any]
Values = tuple[Any, ...]


def make_fields(struct: StructType) -> tuple[pa.Field, ...]:
    return state_fields(json.dumps(struct.jsonValue()))


def make_caller(function: Function, output: StructType = OUTPUT) -> BatchCaller:
    return BatchCaller(function, SCHEMA, make_fields(INPUT), make_fields(output))


def make_groups(*keys: int, each: int = 1) -> Groups:
    """Return `each` rows of each key as Spark sends them: with times in the session's zone, and large strings."""
    names = [key for _ in range(each) for key in keys]
    n = len(names)
    table = pa.table(
        {
            "c0": pa.array(names, pa.int64()),
            "c1": pa.array([-0.0] * n),
            "c2": pa.array(range(n), pa.int64()).cast(pa.timestamp("us", "Asia/Tokyo")),
            "c3": pa.array(range(n), pa.int64()).cast(pa.timestamp("us")),
            "c4": pa.array([f"row {i}" for i in range(n)], pa.large_string()),
        }
    )
    return Groups.of(table, np.array(names, dtype=np.uint64) * np.uint64(10), [0, 1], 5, SCHEMA)


def make_rows(states: dict[int, Values | None], timeout_ms: int | None = 400) -> pa.RecordBatch:
    """Return stored rows of keys with their n and tags, or None for a row that has only a timeout."""
    no_values = (None, None)
    columns = [
        pa.array([key * 10 for key in states], pa.uint64()),
        pa.array(list(states), pa.int64()),
        pa.array([0.0] * len(states)),
        pa.array([(values or no_values)[0] for values in states.values()], pa.int64()),
        pa.array([(values or no_values)[1] for values in states.values()], pa.list_(pa.string())),
        pa.array([timeout_ms] * len(states), pa.int64()),
        pa.array([values is not None for values in states.values()], pa.bool_()),
        pa.array([False] * len(states)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow)


def look_up(groups: Groups, states: dict[int, Values | None]) -> Lookup:
    keys = groups.keys[0].to_pylist()
    present = {key: states[key] for key in reversed(keys) if key in states}
    positions = {key: at for at, key in enumerate(present)}
    return Lookup(np.array([positions.get(key, -1) for key in keys], dtype=np.int64), make_rows(present))


def run(
    function: Function,
    groups: Groups,
    states: dict[int, Values | None] | None = None,
    due: dict[int, Values | None] | None = None,
    output: StructType = OUTPUT,
) -> tuple[list[dict[str, Any]], Result]:
    """Call a function with rows and with keys that timed out, and return its output and its changes."""
    result = Result()
    work = make_caller(function, output).call_data(
        groups, look_up(groups, states or {}), make_rows(due or {}), CONTEXT, result
    )
    return send(work), result


def send(frames: Iterator[Any]) -> list[dict[str, Any]]:
    """Return the rows that Spark's operator emits."""
    payloads = [
        pa.RecordBatch.from_pandas(frame, pa.schema([("payload", pa.binary())]), preserve_index=False)
        for frame in frames
    ]
    return [row for batch in unpack(payloads) for row in batch.to_pylist()]


def list_changes(changed: Changed | None) -> list[tuple[int, int, Any, Any, int | None, bool, bool]] | None:
    """Return position, key and columns of each changed row."""
    if changed is None:
        return None
    assert changed.rows.schema.equals(SCHEMA.arrow)
    changed.rows.validate(full=True)
    rows = changed.rows.to_pylist()
    assert [row["key_hash"] for row in rows] == [10 * row["key.k"] for row in rows]
    return [
        (at, row["key.k"], row["state.n"], row["state.tags"], row["timeout_ms"], row["defined"], row["deleted"])
        for at, row in zip(changed.positions.tolist(), rows, strict=True)
    ]


# -- arguments ------------------------------------------------------------------------------------


def test_a_batch_has_rows_as_sent_and_keys_and_state_as_stored() -> None:
    batches: list[StateBatch] = []
    groups = make_groups(5, 2, each=2)
    run(batches.append, groups, {5: (50, ["a"])}, {9: (90, None), 8: None})
    (batch,) = batches
    assert batch.rows.schema == pa.schema(
        [
            ("k", pa.int64()),
            ("x", pa.float64()),
            ("at", pa.timestamp("us", "UTC")),
            ("local", pa.timestamp("us")),
            ("name", pa.string()),
        ]
    )
    assert batch.rows["name"].to_pylist() == ["row 1", "row 3", "row 0", "row 2"]
    assert batch.rows["at"][0].as_py() == dt.datetime(1970, 1, 1, 0, 0, 0, 1, dt.timezone.utc)
    assert str(batch.rows["x"][0].as_py()) == "-0.0", "rows are unchanged"
    assert [str(x) for x in batch.keys["x"].to_pylist()] == ["0.0"] * 4, "keys are as stored"
    assert batch.keys["k"].to_pylist() == [2, 5, 9, 8]
    assert batch.state["n"].to_pylist() == [None, 50, 90, None]
    assert batch.state["tags"].to_pylist() == [None, ["a"], None, None]
    assert batch.exists.to_pylist() == [False, True, True, False]
    assert batch.timed_out.to_pylist() == [False, False, True, True]
    assert batch.offsets.to_pylist() == [0, 2, 4, 4, 4]
    assert (batch.watermark_ms, batch.processing_time_ms, batch.bucket, batch.batch_id) == (500, 1_000, 3, 7)


def test_a_stored_row_with_only_a_timeout_is_not_a_state() -> None:
    batches: list[StateBatch] = []
    run(batches.append, make_groups(1, 2), {1: None, 2: (None, None)})
    assert batches[0].exists.to_pylist() == [False, True]
    assert batches[0].state["n"].null_count == 2


def test_a_call_without_rows_has_the_columns_of_the_input() -> None:
    batches: list[StateBatch] = []
    due = {9: (90, ["b"]), 8: None}
    work = make_caller(batches.append).call_timeouts(make_rows(due), CONTEXT, Result())
    assert list(work) == []
    run(batches.append, make_groups(1))
    without_rows, with_rows = batches
    assert without_rows.rows.num_rows == 0
    assert without_rows.rows.schema == with_rows.rows.schema
    assert without_rows.state["n"].to_pylist() == [90, None]
    assert without_rows.exists.to_pylist() == [True, False]


def test_a_query_without_a_watermark_has_watermark_none() -> None:
    batches: list[StateBatch] = []
    groups = make_groups(1)
    context = CallContext(3, 7, 1_000, -1, False, "NoTimeout")
    list(make_caller(batches.append).call_data(groups, look_up(groups, {}), SCHEMA.empty(), context, Result()))
    assert batches[0].watermark_ms is None
    with pytest.raises(UsageError, match="NoTimeout"):
        batches[0].set_timeout(timestamp_ms=5)


def test_input_columns_may_have_equal_names() -> None:
    struct = StructType([StructField("k", LongType()), StructField("v", LongType()), StructField("v", LongType())])
    batches: list[StateBatch] = []
    table = pa.table([[1, 1], [2, 3], [4, 5]], names=["c0", "c1", "c2"])
    schema = RowSchema(key_fields(StructType(KEYS.fields[:1]).json()), SCHEMA.state)
    groups = Groups.of(table, np.zeros(2, dtype=np.uint64), [0], 3, schema)
    two_value_caller = BatchCaller(batches.append, schema, make_fields(struct), make_fields(OUTPUT))
    list(two_value_caller.call_data(groups, Lookup(np.array([-1]), schema.empty()), schema.empty(), CONTEXT, Result()))
    (batch,) = batches
    assert batch.rows.column_names == ["k", "v", "v"]
    assert batch.rows.column(2).to_pylist() == [4, 5]
    assert batch.aggregate([("k", "sum"), ([], "count_all")]).to_pylist() == [{"k_sum": 2, "count_all": 2}]


# -- changes of state -----------------------------------------------------------------------------


def test_changes_have_the_positions_of_their_own_keys() -> None:
    """Keys with rows and keys that timed out are each counted from 0."""

    def function(batch: StateBatch) -> None:
        assert batch.keys["k"].to_pylist() == [1, 2, 3, 9, 8, 7]
        batch.update({"n": [2, 8], "tags": [["two"], None]}, where=[False, True, False, False, True, False])
        batch.remove([False, False, False, True, False, False])
        batch.set_timeout(timestamp_ms=600, where=[False, False, True, False, True, False])

    _, result = run(
        function, make_groups(3, 2, 1), {3: (30, ["kept"]), 1: (1, None)}, {9: (90, []), 8: (80, []), 7: None}
    )
    assert list_changes(result.data) == [
        (1, 2, 2, ["two"], None, True, False),
        (2, 3, 30, ["kept"], 600, True, False),
    ]
    assert list_changes(result.timeouts) == [
        (0, 9, None, None, None, False, True),
        (1, 8, 8, None, 600, True, False),
    ]


@pytest.mark.parametrize(("touched", "data", "timeouts"), [([0], [0], None), ([2], None, [0]), ([], None, None)])
def test_changes_may_concern_only_keys_with_rows_or_only_timeouts(
    touched: list[int], data: list[int] | None, timeouts: list[int] | None
) -> None:
    def function(batch: StateBatch) -> None:
        batch.remove([at in touched for at in range(len(batch))])

    _, result = run(function, make_groups(1, 2), {}, {9: (90, [])})
    assert (result.data is None or result.data.positions.tolist()) == (data is None or data)
    assert (result.timeouts is None or result.timeouts.positions.tolist()) == (timeouts is None or timeouts)
    if not touched:
        assert result == Result()


def test_a_timeout_without_an_update_keeps_the_state_while_other_keys_are_updated() -> None:
    """Unchanged keys, kept states and rows of several updates are in any order."""

    def function(batch: StateBatch) -> None:
        mask = np.arange(6)
        batch.update({"n": range(6), "tags": [[str(i)] for i in range(6)]}, where=mask % 3 == 0)
        batch.update({"n": [44], "tags": [["later"]]}, where=mask == 4)
        batch.update({"k": [1], "x": [-0.0], "n": [11], "tags": [None]})
        batch.set_timeout(timestamp_ms=[700 + i for i in range(6)], where=mask != 5)

    _, result = run(function, make_groups(0, 1, 2, 3, 4, 5), {2: (20, ["kept"]), 4: (40, ["old"]), 5: (50, [])})
    assert list_changes(result.data) == [
        (0, 0, 0, ["0"], 700, True, False),
        (1, 1, 11, None, 701, True, False),
        (2, 2, 20, ["kept"], 702, True, False),
        (3, 3, 3, ["3"], 703, True, False),
        (4, 4, 44, ["later"], 704, True, False),
    ]


def test_a_timeout_may_be_set_without_a_state_and_be_cleared() -> None:
    def function(batch: StateBatch) -> None:
        batch.set_timeout(timestamp_ms=[600, None, None])

    _, result = run(function, make_groups(1, 2, 3), {2: (20, [])})
    assert list_changes(result.data) == [
        (0, 1, None, None, 600, False, False),
        (1, 2, 20, [], None, True, False),
        (2, 3, None, None, None, False, True),
    ]


def test_an_update_may_be_a_table_of_slices_and_chunks() -> None:
    def function(batch: StateBatch) -> None:
        whole = pa.table(
            {"n": pa.array(range(10), pa.int32()), "tags": pa.array([[str(i)] for i in range(10)])},
        )
        batch.update(pa.concat_tables([whole.slice(7, 1), whole.slice(2, 2)]))

    _, result = run(function, make_groups(1, 2, 3))
    assert [row[2:4] for row in list_changes(result.data) or []] == [(7, ["7"]), (2, ["2"]), (3, ["3"])]


# -- output ---------------------------------------------------------------------------------------

ROWS = [{"k": 1, "n": 2**53 + 1}, {"k": 2, "n": None}]
TABLE = pa.Table.from_pylist(ROWS)
OUTPUT_FORMS: dict[str, Callable[[], Any]] = {
    "a table": lambda: TABLE,
    "a batch": lambda: TABLE.to_batches()[0],
    "columns": lambda: {"n": [2**53 + 1, None], "k": [1, 2]},
    "a reader": TABLE.to_reader,
    "a list of tables": lambda: [TABLE.slice(0, 1), TABLE.slice(1)],
    "a generator": lambda: iter([TABLE.slice(0, 1), {"k": [], "n": []}, TABLE.slice(1)]),
    "narrower numbers": lambda: {"k": pa.array([1, 2], pa.int8()), "n": pa.array([2**53 + 1, None], pa.uint64())},
    "polars": lambda: pytest.importorskip("polars").from_arrow(TABLE),
    "a list of polars": lambda: [pytest.importorskip("polars").from_arrow(TABLE)],
    "duckdb": lambda: pytest.importorskip("duckdb").from_arrow(TABLE),
}


@pytest.mark.parametrize("form", OUTPUT_FORMS)
def test_output_may_have_any_of_these_forms(form: str) -> None:
    rows, _ = run(lambda batch: OUTPUT_FORMS[form](), make_groups(1))
    assert rows == ROWS


@pytest.mark.parametrize(
    "output",
    [None, [], {"k": [], "n": []}, TABLE.slice(0, 0), iter(())],
    ids=["none", "no tables", "a dict of no rows", "a table of no rows", "an empty iterator"],
)
def test_without_output_no_frame_is_sent(output: Any) -> None:
    groups = make_groups(1)
    frames = make_caller(lambda batch: output).call_data(groups, look_up(groups, {}), SCHEMA.empty(), CONTEXT, Result())
    assert list(frames) == []


def test_large_output_is_sent_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_module, "_PAYLOAD_BYTES", 1 << 10)
    monkeypatch.setattr(output_module, "_FRAME_BYTES", 4 << 10)
    monkeypatch.setattr(output_module, "_ROWS_MAX", 100)
    table = pa.table({"k": range(5_000), "n": range(5_000)})
    groups = make_groups(1)
    work = make_caller(lambda batch: [table.slice(0, 4_999), table.slice(4_999)]).call_data(
        groups, look_up(groups, {}), SCHEMA.empty(), CONTEXT, Result()
    )
    frames = list(work)
    assert len(frames) > 10
    assert max(len(payload) for frame in frames for payload in frame["payload"]) < 4 << 10
    assert [row["k"] for row in send(iter(frames))] == list(range(5_000))
    payloads = [
        pa.RecordBatch.from_pandas(frame, pa.schema([("payload", pa.binary())]), preserve_index=False)
        for frame in frames
    ]
    assert max(batch.num_rows for batch in unpack(payloads)) <= 100


# -- errors ---------------------------------------------------------------------------------------

WHERE = r"\(bucket 3, batch 7\)"
WRONG_OUTPUT: list[tuple[str, Any, type[Exception], str]] = [
    ("a missing column", {"k": [1]}, StateValueError, f"the function gave the columns k; expected k, n {WHERE}"),
    ("an extra column", {"k": [1], "n": [1], "m": [1]}, StateValueError, "gave the columns k, n, m; expected k, n"),
    ("another type", {"k": [1], "n": ["many"]}, StateValueError, f"output column 'n' of type int64 cannot hold string.*many.*{WHERE}"),
    ("a dict of one row's values", {"k": "ab", "n": 1}, StateValueError, rf"the function gave a dict whose column 'k' is 'ab' \(str\): .*{WHERE}"),
    ("columns of several lengths", {"k": [1], "n": [1, 2]}, StateValueError, f"the function gave a dict whose columns have different lengths: 'k' has 1, 'n' has 2; .*{WHERE}"),
    ("a number", 5, ResultTypeError, f"the function returned int: return a table, an iterable of tables, or None {WHERE}"),
    ("text", "kn", StateValueError, f"the function gave a value of type str: a table is .*{WHERE}"),
    ("a list of rows", [(1, 2)], StateValueError, "the function gave a value of type tuple: a table is"),
    ("an array", pa.array([1]), StateValueError, "the function gave a value of type Int64Scalar"),
    ("None in a list", [TABLE, None], StateValueError, "the function gave a value of type NoneType"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("output", "kind", "text"), [case[1:] for case in WRONG_OUTPUT], ids=[case[0] for case in WRONG_OUTPUT]
)
def test_wrong_output_is_refused(output: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        run(lambda batch: output, make_groups(1))


def test_output_columns_declared_without_nulls_refuse_null() -> None:
    strict = StructType([StructField("k", LongType(), False), StructField("n", LongType(), False)])
    with pytest.raises(
        StateValueError, match=rf"output column 'n' is declared without NULLs and row 1 is NULL {WHERE}"
    ):
        run(lambda batch: TABLE, make_groups(1), output=strict)
    rows, _ = run(lambda batch: TABLE.slice(0, 1), make_groups(1), output=strict)
    assert rows == ROWS[:1]


@pytest.mark.parametrize("late", [False, True])
def test_an_exception_names_the_batch_and_has_the_users_frames(late: bool) -> None:
    def function(batch: StateBatch) -> Any:
        raise KeyError("missing")

    def generating(batch: StateBatch) -> Iterator[Any]:
        yield TABLE
        function(batch)

    text = r"the function failed for StateBatch\(2 rows of 2 keys, 1 keys timed out, bucket 3, batch 7\): KeyError: 'missing'"
    with pytest.raises(UserFunctionError, match=text) as raised:
        run(generating if late else function, make_groups(1, 2), {}, {9: None})
    assert isinstance(raised.value.__cause__, KeyError)
    assert "function" in [entry.name for entry in raised.traceback], (
        "Spark does not show causes, so the error's own traceback needs the frame"
    )


def test_an_exit_is_reported_as_an_error_of_the_function() -> None:
    def function(batch: StateBatch) -> Any:
        sys.exit(3)

    with pytest.raises(UserFunctionError, match=r"the function failed for StateBatch\(.*: SystemExit: 3"):
        run(function, make_groups(1, 2), {}, {9: None})


def test_an_error_of_the_batch_names_the_bucket_and_has_the_users_frames() -> None:
    def function(batch: StateBatch) -> None:
        batch.update({"n": [1]})

    with pytest.raises(StateValueError, match=rf"update\(\) was given the columns n; .*{WHERE}") as raised:
        run(function, make_groups(1))
    assert "function" in [entry.name for entry in raised.traceback]


def test_a_failed_call_changes_nothing() -> None:
    def function(batch: StateBatch) -> Any:
        batch.remove()
        return 5

    result = Result()
    groups = make_groups(1)
    with pytest.raises(ResultTypeError):
        list(make_caller(function).call_data(groups, look_up(groups, {}), SCHEMA.empty(), CONTEXT, result))
    assert result == Result()


def test_a_change_after_the_function_returned_is_refused() -> None:
    batches: list[StateBatch] = []
    run(batches.append, make_groups(1))
    with pytest.raises(UsageError, match="after its function had returned"):
        batches[0].remove()
    with pytest.raises(UsageError, match="after its function had returned"):
        batches[0].update({"n": [1], "tags": [[]]})
