"""Calling a vectorised function, without Spark: what it gets, what becomes of what it gives, and what errors say."""

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


def fields(struct: StructType) -> tuple[pa.Field, ...]:
    return state_fields(json.dumps(struct.jsonValue()))


def caller(function: Function, output: StructType = OUTPUT) -> BatchCaller:
    return BatchCaller(function, SCHEMA, fields(INPUT), fields(output))


def grouped(*keys: int, each: int = 1) -> Groups:
    """So many rows of each key, as Spark sends them: times in the session's zone, and large strings."""
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


def stored(states: dict[int, Values | None], timeout_ms: int | None = 400) -> pa.RecordBatch:
    """Rows of keys: n and tags, or None for a row with a timeout only."""
    nothing = (None, None)
    columns = [
        pa.array([key * 10 for key in states], pa.uint64()),
        pa.array(list(states), pa.int64()),
        pa.array([0.0] * len(states)),
        pa.array([(it or nothing)[0] for it in states.values()], pa.int64()),
        pa.array([(it or nothing)[1] for it in states.values()], pa.list_(pa.string())),
        pa.array([timeout_ms] * len(states), pa.int64()),
        pa.array([it is not None for it in states.values()], pa.bool_()),
        pa.array([False] * len(states)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow)


def looked_up(groups: Groups, states: dict[int, Values | None]) -> Lookup:
    keys = groups.keys[0].to_pylist()
    mine = {key: states[key] for key in reversed(keys) if key in states}
    places = {key: at for at, key in enumerate(mine)}
    return Lookup(np.array([places.get(key, -1) for key in keys], dtype=np.int64), stored(mine))


def run(
    function: Function,
    groups: Groups,
    states: dict[int, Values | None] | None = None,
    due: dict[int, Values | None] | None = None,
    output: StructType = OUTPUT,
) -> tuple[list[dict[str, Any]], Result]:
    """Call with rows and with keys that timed out; the output, and what changed."""
    result = Result()
    work = caller(function, output).call_data(
        groups, looked_up(groups, states or {}), stored(due or {}), CONTEXT, result
    )
    return sent(work), result


def sent(frames: Iterator[Any]) -> list[dict[str, Any]]:
    """What comes out behind Spark's operator."""
    payloads = [
        pa.RecordBatch.from_pandas(frame, pa.schema([("payload", pa.binary())]), preserve_index=False)
        for frame in frames
    ]
    return [row for batch in unpack(payloads) for row in batch.to_pylist()]


def told(changed: Changed | None) -> list[tuple[int, int, Any, Any, int | None, bool, bool]] | None:
    """Position, key and columns of each changed row."""
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


# -- what a function gets -------------------------------------------------------------------------


def test_rows_keys_and_state_as_they_are_stored() -> None:
    batches: list[StateBatch] = []
    groups = grouped(5, 2, each=2)
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
    assert str(batch.rows["x"][0].as_py()) == "-0.0", "rows are as they came"
    assert [str(x) for x in batch.keys["x"].to_pylist()] == ["0.0"] * 4, "keys as they are stored"
    assert batch.keys["k"].to_pylist() == [2, 5, 9, 8]
    assert batch.state["n"].to_pylist() == [None, 50, 90, None]
    assert batch.state["tags"].to_pylist() == [None, ["a"], None, None]
    assert batch.exists.to_pylist() == [False, True, True, False]
    assert batch.timed_out.to_pylist() == [False, False, True, True]
    assert batch.offsets.to_pylist() == [0, 2, 4, 4, 4]
    assert (batch.watermark_ms, batch.processing_time_ms, batch.bucket, batch.batch_id) == (500, 1_000, 3, 7)


def test_a_row_that_has_a_timeout_only_is_no_state() -> None:
    batches: list[StateBatch] = []
    run(batches.append, grouped(1, 2), {1: None, 2: (None, None)})
    assert batches[0].exists.to_pylist() == [False, True]
    assert batches[0].state["n"].null_count == 2


def test_a_call_without_rows_has_their_columns() -> None:
    batches: list[StateBatch] = []
    due = {9: (90, ["b"]), 8: None}
    work = caller(batches.append).call_timeouts(stored(due), CONTEXT, Result())
    assert list(work) == []
    run(batches.append, grouped(1))
    alone, beside = batches
    assert alone.rows.num_rows == 0
    assert alone.rows.schema == beside.rows.schema
    assert alone.state["n"].to_pylist() == [90, None]
    assert alone.exists.to_pylist() == [True, False]


def test_a_query_without_a_watermark_has_none() -> None:
    batches: list[StateBatch] = []
    groups = grouped(1)
    context = CallContext(3, 7, 1_000, -1, False, "NoTimeout")
    list(caller(batches.append).call_data(groups, looked_up(groups, {}), SCHEMA.empty(), context, Result()))
    assert batches[0].watermark_ms is None
    with pytest.raises(UsageError, match="NoTimeout"):
        batches[0].set_timeout(timestamp_ms=5)


def test_input_columns_of_one_name() -> None:
    twice = StructType([StructField("k", LongType()), StructField("v", LongType()), StructField("v", LongType())])
    batches: list[StateBatch] = []
    table = pa.table([[1, 1], [2, 3], [4, 5]], names=["c0", "c1", "c2"])
    schema = RowSchema(key_fields(StructType(KEYS.fields[:1]).json()), SCHEMA.state)
    groups = Groups.of(table, np.zeros(2, dtype=np.uint64), [0], 3, schema)
    made = BatchCaller(batches.append, schema, fields(twice), fields(OUTPUT))
    list(made.call_data(groups, Lookup(np.array([-1]), schema.empty()), schema.empty(), CONTEXT, Result()))
    (batch,) = batches
    assert batch.rows.column_names == ["k", "v", "v"]
    assert batch.rows.column(2).to_pylist() == [4, 5]
    assert batch.aggregate([("k", "sum"), ([], "count_all")]).to_pylist() == [{"k_sum": 2, "count_all": 2}]


# -- what it changes ------------------------------------------------------------------------------


def test_changes_have_the_positions_of_their_own_keys() -> None:
    """Of keys with rows and of keys that timed out, each counted from 0."""

    def function(batch: StateBatch) -> None:
        assert batch.keys["k"].to_pylist() == [1, 2, 3, 9, 8, 7]
        batch.update({"n": [2, 8], "tags": [["two"], None]}, where=[False, True, False, False, True, False])
        batch.remove([False, False, False, True, False, False])
        batch.set_timeout(timestamp_ms=600, where=[False, False, True, False, True, False])

    _, result = run(function, grouped(3, 2, 1), {3: (30, ["kept"]), 1: (1, None)}, {9: (90, []), 8: (80, []), 7: None})
    assert told(result.data) == [
        (1, 2, 2, ["two"], None, True, False),
        (2, 3, 30, ["kept"], 600, True, False),
    ]
    assert told(result.timeouts) == [
        (0, 9, None, None, None, False, True),
        (1, 8, 8, None, 600, True, False),
    ]


@pytest.mark.parametrize(("touched", "data", "timeouts"), [([0], [0], None), ([2], None, [0]), ([], None, None)])
def test_changes_of_one_kind_only(touched: list[int], data: list[int] | None, timeouts: list[int] | None) -> None:
    def function(batch: StateBatch) -> None:
        batch.remove([at in touched for at in range(len(batch))])

    _, result = run(function, grouped(1, 2), {}, {9: (90, [])})
    assert (result.data is None or result.data.positions.tolist()) == (data is None or data)
    assert (result.timeouts is None or result.timeouts.positions.tolist()) == (timeouts is None or timeouts)
    if not touched:
        assert result == Result()


def test_a_timeout_alone_keeps_state_beside_updates_of_others() -> None:
    """Kept rows, rows of several updates and none at all, in any order."""

    def function(batch: StateBatch) -> None:
        mask = np.arange(6)
        batch.update({"n": range(6), "tags": [[str(i)] for i in range(6)]}, where=mask % 3 == 0)
        batch.update({"n": [44], "tags": [["later"]]}, where=mask == 4)
        batch.update({"k": [1], "x": [-0.0], "n": [11], "tags": [None]})
        batch.set_timeout(timestamp_ms=[700 + i for i in range(6)], where=mask != 5)

    _, result = run(function, grouped(0, 1, 2, 3, 4, 5), {2: (20, ["kept"]), 4: (40, ["old"]), 5: (50, [])})
    assert told(result.data) == [
        (0, 0, 0, ["0"], 700, True, False),
        (1, 1, 11, None, 701, True, False),
        (2, 2, 20, ["kept"], 702, True, False),
        (3, 3, 3, ["3"], 703, True, False),
        (4, 4, 44, ["later"], 704, True, False),
    ]


def test_a_timeout_without_state_and_none_at_all() -> None:
    def function(batch: StateBatch) -> None:
        batch.set_timeout(timestamp_ms=[600, None, None])

    _, result = run(function, grouped(1, 2, 3), {2: (20, [])})
    assert told(result.data) == [
        (0, 1, None, None, 600, False, False),
        (1, 2, 20, [], None, True, False),
        (2, 3, None, None, None, False, True),
    ]


def test_updates_by_slices_and_chunks() -> None:
    def function(batch: StateBatch) -> None:
        whole = pa.table(
            {"n": pa.array(range(10), pa.int32()), "tags": pa.array([[str(i)] for i in range(10)])},
        )
        batch.update(pa.concat_tables([whole.slice(7, 1), whole.slice(2, 2)]))

    _, result = run(function, grouped(1, 2, 3))
    assert [row[2:4] for row in told(result.data) or []] == [(7, ["7"]), (2, ["2"]), (3, ["3"])]


# -- what it gives --------------------------------------------------------------------------------

ROWS = [{"k": 1, "n": 2**53 + 1}, {"k": 2, "n": None}]
TABLE = pa.Table.from_pylist(ROWS)
GIVEN: dict[str, Callable[[], Any]] = {
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


@pytest.mark.parametrize("form", GIVEN)
def test_the_forms_of_output(form: str) -> None:
    rows, _ = run(lambda batch: GIVEN[form](), grouped(1))
    assert rows == ROWS


@pytest.mark.parametrize(
    "given",
    [None, [], {"k": [], "n": []}, TABLE.slice(0, 0), iter(())],
    ids=["none", "no tables", "a dict of no rows", "a table of no rows", "an empty iterator"],
)
def test_no_output_is_no_frame(given: Any) -> None:
    groups = grouped(1)
    frames = caller(lambda batch: given).call_data(groups, looked_up(groups, {}), SCHEMA.empty(), CONTEXT, Result())
    assert list(frames) == []


def test_much_output_leaves_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_module, "_PAYLOAD_BYTES", 1 << 10)
    monkeypatch.setattr(output_module, "_FRAME_BYTES", 4 << 10)
    monkeypatch.setattr(output_module, "_ROWS_MAX", 100)
    table = pa.table({"k": range(5_000), "n": range(5_000)})
    groups = grouped(1)
    work = caller(lambda batch: [table.slice(0, 4_999), table.slice(4_999)]).call_data(
        groups, looked_up(groups, {}), SCHEMA.empty(), CONTEXT, Result()
    )
    frames = list(work)
    assert len(frames) > 10
    assert max(len(payload) for frame in frames for payload in frame["payload"]) < 4 << 10
    assert [row["k"] for row in sent(iter(frames))] == list(range(5_000))
    payloads = [
        pa.RecordBatch.from_pandas(frame, pa.schema([("payload", pa.binary())]), preserve_index=False)
        for frame in frames
    ]
    assert max(batch.num_rows for batch in unpack(payloads)) <= 100


# -- what goes wrong ------------------------------------------------------------------------------

WHERE = r"\(bucket 3, batch 7\)"
WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("a missing column", {"k": [1]}, StateValueError, f"the function gave the columns k; expected k, n {WHERE}"),
    ("a column too many", {"k": [1], "n": [1], "m": [1]}, StateValueError, "gave the columns k, n, m; expected k, n"),
    ("another type", {"k": [1], "n": ["many"]}, StateValueError, f"output column 'n' of type int64 cannot hold string.*many.*{WHERE}"),
    ("a dict of one row's values", {"k": "ab", "n": 1}, StateValueError, rf"the function gave a dict whose column 'k' is 'ab' \(str\): .*{WHERE}"),
    ("columns of several lengths", {"k": [1], "n": [1, 2]}, StateValueError, f"the function gave a dict whose columns have different lengths: 'k' has 1, 'n' has 2; .*{WHERE}"),
    ("a number", 5, ResultTypeError, f"the function returned int: return a table, an iterable of tables, or None {WHERE}"),
    ("text", "kn", StateValueError, f"the function gave a value of type str: a table is .*{WHERE}"),
    ("a list of rows", [(1, 2)], StateValueError, "the function gave a value of type tuple: a table is"),
    ("an array", pa.array([1]), StateValueError, "the function gave a value of type Int64Scalar"),
    ("None in a list", [TABLE, None], StateValueError, "the function gave a value of type NoneType"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "kind", "text"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_output_that_is_refused(given: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        run(lambda batch: given, grouped(1))


def test_output_columns_without_null() -> None:
    strict = StructType([StructField("k", LongType(), False), StructField("n", LongType(), False)])
    with pytest.raises(
        StateValueError, match=rf"output column 'n' is declared without NULLs and row 1 is NULL {WHERE}"
    ):
        run(lambda batch: TABLE, grouped(1), output=strict)
    rows, _ = run(lambda batch: TABLE.slice(0, 1), grouped(1), output=strict)
    assert rows == ROWS[:1]


@pytest.mark.parametrize("late", [False, True])
def test_an_exception_names_what_was_called(late: bool) -> None:
    def function(batch: StateBatch) -> Any:
        raise KeyError("missing")

    def generating(batch: StateBatch) -> Iterator[Any]:
        yield TABLE
        function(batch)

    text = r"the function failed for StateBatch\(2 rows of 2 keys, 1 keys timed out, bucket 3, batch 7\): KeyError: 'missing'"
    with pytest.raises(UserFunctionError, match=text) as raised:
        run(generating if late else function, grouped(1, 2), {}, {9: None})
    assert isinstance(raised.value.__cause__, KeyError)
    assert "function" in [entry.name for entry in raised.traceback], "Spark shows no cause"


def test_an_exit_is_an_error_of_the_function() -> None:
    def function(batch: StateBatch) -> Any:
        sys.exit(3)

    with pytest.raises(UserFunctionError, match=r"the function failed for StateBatch\(.*: SystemExit: 3"):
        run(function, grouped(1, 2), {}, {9: None})


def test_an_error_of_the_batch_is_told_with_bucket_and_line() -> None:
    def function(batch: StateBatch) -> None:
        batch.update({"n": [1]})

    with pytest.raises(StateValueError, match=rf"update\(\) was given the columns n; .*{WHERE}") as raised:
        run(function, grouped(1))
    assert "function" in [entry.name for entry in raised.traceback]


def test_a_failed_call_changes_nothing() -> None:
    def function(batch: StateBatch) -> Any:
        batch.remove()
        return 5

    result = Result()
    groups = grouped(1)
    with pytest.raises(ResultTypeError):
        list(caller(function).call_data(groups, looked_up(groups, {}), SCHEMA.empty(), CONTEXT, result))
    assert result == Result()


def test_a_batch_that_is_changed_too_late_says_so() -> None:
    kept: list[StateBatch] = []
    run(kept.append, grouped(1))
    with pytest.raises(UsageError, match="after its function had returned"):
        kept[0].remove()
    with pytest.raises(UsageError, match="after its function had returned"):
        kept[0].update({"n": [1], "tags": [[]]})
