"""Calling a function per key with plain rows, without Spark: Python values as input and output, and errors."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import functools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    Row,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from arrow_schemas import RowSchema, key_fields, state_fields
from spark_state_ext.errors import ResultTypeError, StateError, StateValueError, UserFunctionError
from spark_state_ext.spark.callers import rows as rows_module
from spark_state_ext.spark.callers.groups import CallContext, Groups, Result
from spark_state_ext.spark.callers.rows import RowCaller, make_row_factory
from spark_state_ext.spark.callers.state_values import values_to_column
from spark_state_ext.spark.compat import STATE_BINARY
from spark_state_ext.spark.shuffle.output import unpack
from spark_state_ext.store import Lookup

Function = Callable[[Any, list[Any], GroupState], Any]
KEY = StructType([StructField("k", LongType())])
STATE = StructType([StructField("n", LongType())])
INPUT = StructType([StructField("k", LongType()), StructField("v", LongType())])
OUTPUT = StructType([StructField("k", LongType()), StructField("n", LongType())])
CONTEXT = CallContext(3, 7, 1_000, 500, True, "ProcessingTimeTimeout")


def make_fields(struct: StructType) -> tuple[pa.Field, ...]:
    return state_fields(json.dumps(struct.jsonValue()))


def make_schema(key: StructType = KEY, state: StructType = STATE) -> RowSchema:
    return RowSchema(key_fields(json.dumps(key.jsonValue())), make_fields(state))


def make_groups(table: pa.Table, keys: int = 1, schema: RowSchema | None = None) -> Groups:
    """Group rows by their first columns, all with the same hash, so that only the keys themselves distinguish them."""
    hashes = np.zeros(table.num_rows, dtype=np.uint64)
    return Groups.of(table, hashes, list(range(keys)), table.num_columns, schema or make_schema())


def make_number_groups(*rows: tuple[int | None, int | None]) -> Groups:
    return make_groups(
        pa.table({"c0": pa.array([k for k, _ in rows], pa.int64()), "c1": pa.array([v for _, v in rows], pa.int64())})
    )


def run(
    function: Function,
    groups: Groups,
    output: StructType = OUTPUT,
    lookup: Lookup | None = None,
    inputs: StructType = INPUT,
    key: StructType = KEY,
    state: StructType = STATE,
    context: CallContext = CONTEXT,
) -> tuple[list[tuple[Any, ...]], Result]:
    schema, result = make_schema(key, state), Result()
    row_caller = RowCaller(function, schema, state, inputs, key, output, make_fields(output))
    no_states = Lookup(np.full(groups.count, -1, dtype=np.int64), schema.empty())
    return send(row_caller.call_data(groups, lookup or no_states, schema.empty(), context, result)), result


def send(frames: Iterator[pd.DataFrame]) -> list[tuple[Any, ...]]:
    """Return the rows that Spark's operator emits."""
    payloads = [
        pa.RecordBatch.from_pandas(frame, pa.schema([("payload", pa.binary())]), preserve_index=False)
        for frame in frames
    ]
    return [tuple(row.values()) for batch in unpack(payloads) for row in batch.to_pylist()]


# -- rows and keys --------------------------------------------------------------------------------


def test_each_key_gets_its_rows_as_named_tuples() -> None:
    seen: dict[Any, Any] = {}

    def function(key: Any, rows: list[Any], state: GroupState) -> None:
        assert type(rows) is list
        assert not state.hasTimedOut
        assert state.getCurrentProcessingTimeMs() == 1_000
        assert state.getCurrentWatermarkMs() == 500
        assert key not in seen
        seen[key] = [(row.k, row.v) for row in rows]
        assert key._fields == ("k",)
        assert repr(rows[0]) == f"Row(k={key.k}, v={rows[0].v})"

    run(function, make_number_groups((1, 5), (None, 2**53 + 1), (2, None), (1, 6), (None, None)))
    assert seen == {(1,): [(1, 5), (1, 6)], (None,): [(None, 2**53 + 1), (None, None)], (2,): [(2, None)]}


def test_columns_whose_names_cannot_be_attributes_are_named_by_position() -> None:
    make = make_row_factory("Row", ["k", "class", "a b", "k", "_x", "é"])
    row: Any = make([1, 2, 3, 4, 5, 6])
    assert row._fields == ("k", "_1", "_2", "_3", "_4", "é")
    assert row == (1, 2, 3, 4, 5, 6)
    # Python reads the micro sign in its source as the Greek letter.
    row = make_row_factory("Row", ["delay_\u00b5s", "\u00b5", "\u03bc"])([1, 2, 3])
    assert row._fields == ("delay_\u03bcs", "\u03bc", "_2")


@pytest.mark.parametrize("portion", [1, 3, 65_536])
def test_a_key_gets_all_of_its_rows_in_one_call(monkeypatch: pytest.MonkeyPatch, portion: int) -> None:
    """Rows are built a portion at a time, but the rows of a key are always passed together."""
    monkeypatch.setattr(rows_module, "_PORTION_ROWS", portion)
    monkeypatch.setattr(rows_module, "_ROWS_MAX", portion)
    sizes = {0: 1, 1: 7, 2: 3, 3: 1, 4: 1, 5: 4}

    def function(key: Any, rows: list[Any], state: GroupState) -> Iterator[tuple[Any, ...]]:
        assert [row.v for row in rows] == list(range(sizes[key.k]))
        for row in rows:
            yield key.k, row.v

    output, _ = run(
        function, make_number_groups(*[(key, v) for v in range(7) for key, size in sizes.items() if v < size])
    )
    assert sorted(output) == [(key, v) for key, size in sizes.items() for v in range(size)]


POINT = StructType([StructField("x", IntegerType()), StructField("at", TimestampType())])
WHEN = dt.datetime(2013, 3, 10, 2, 30, 1, 123456)  # noqa: DTZ001  # Spark's values are naive, in the machine's zone
TYPES: list[tuple[DataType, list[Any]]] = [
    (ByteType(), [1, -128, None]),
    (ShortType(), [1, -(2**15), None]),
    (IntegerType(), [2**31 - 1, None]),
    (LongType(), [2**53 + 1, None, -(2**63)]),
    (FloatType(), [1.5, None, float("inf")]),
    (DoubleType(), [0.1, None, 5e-324]),
    (DecimalType(38, 18), [decimal.Decimal("12345678901234567890.123456789012345678"), None]),
    (StringType(), ["", "ä\x00\U0001f600", None]),
    (BinaryType(), [b"", b"\x00\xff", None]),
    (BooleanType(), [True, False, None]),
    (DateType(), [dt.date(1, 1, 1), dt.date(9999, 12, 31), None]),
    (TimestampType(), [WHEN, dt.datetime(1905, 2, 3, 4, 5, 6, 7), None]),  # noqa: DTZ001
    (TimestampNTZType(), [WHEN, dt.datetime(1600, 1, 1), None]),  # noqa: DTZ001
    (ArrayType(LongType()), [[1, None, 2**60], [], None]),
    (ArrayType(ArrayType(StringType())), [[["a"], [], None], None]),
    (ArrayType(TimestampType()), [[WHEN, None], None]),
    (MapType(StringType(), DateType()), [{"a": dt.date(2000, 1, 1), "b": None}, {}, None]),
    (MapType(IntegerType(), ArrayType(DoubleType())), [{1: [0.5, None], 2: []}, None]),
    (POINT, [Row(x=1, at=WHEN), Row(x=None, at=None), None]),
    (ArrayType(POINT), [[Row(x=1, at=WHEN), None], [], None]),
]


def make_column(values: list[Any], kind: DataType) -> pa.Array:
    """Return a column as Spark may send it: times in the session's zone, and strings with larger offsets."""
    (field,) = make_fields(StructType([StructField("v", kind)]))
    column = values_to_column(values, kind, field.type, "v")
    if isinstance(kind, TimestampType):
        return column.cast(pa.timestamp("us", "America/New_York"))
    return column.cast(pa.large_string()) if isinstance(kind, StringType) else column


@pytest.mark.parametrize(("kind", "values"), TYPES, ids=[kind.simpleString() for kind, _ in TYPES])
def test_values_of_every_type_are_unchanged_in_rows_state_and_output(kind: DataType, values: list[Any]) -> None:
    """The function sees Python's values, and the output and the stored state have the same values."""
    struct = StructType([StructField("id", LongType()), StructField("v", kind)])
    key, state = StructType(struct.fields[:1]), StructType([StructField("v", kind)])
    table = pa.table({"c0": pa.array(range(len(values)), pa.int64()), "c1": make_column(values, kind)})
    schema = make_schema(key, state)
    seen: dict[int, Any] = {}

    def function(one: Any, rows: list[Any], group: GroupState) -> list[Any]:
        (row,) = rows
        seen[row.id] = row.v
        expected = STATE_BINARY if isinstance(row.v, (bytes, bytearray)) else type(values[row.id])
        assert type(row.v) is expected
        if group.exists:
            assert group.get == (values[row.id],)
        group.update((row.v,))
        return [(row.id, row.v)]

    # The rows are a slice, like the rows of a bucket.
    groups = make_groups(pa.concat_tables([table, table]).combine_chunks().slice(len(values)), 1, schema)
    output, result = run(function, groups, struct, None, struct, key, state)
    assert seen == dict(enumerate(values))
    assert result.data is not None
    lookup = Lookup(np.argsort(result.data.positions), result.data.rows)
    second_output, second_result = run(function, groups, struct, lookup, struct, key, state)
    assert second_output == output
    assert second_result.data is not None
    assert second_result.data.rows.column("state.v").equals(result.data.rows.column("state.v"))
    (field,) = make_fields(StructType([StructField("v", kind)]))
    assert [v for _, v in sorted(output)] == values_to_column(values, kind, field.type, "v").to_pylist()


@pytest.mark.parametrize(
    ("kind", "values"),
    [case for case in TYPES if "map" not in case[0].simpleString()],
    ids=lambda value: value.simpleString() if isinstance(value, DataType) else "",
)
def test_keys_of_every_type_equal_the_values_in_their_rows(kind: DataType, values: list[Any]) -> None:
    key = StructType([StructField("v", kind), StructField("id", LongType())])
    table = pa.table({"c0": make_column(values, kind), "c1": pa.array(range(len(values)), pa.int64())})
    schema, seen = make_schema(key), dict[int, Any]()

    def function(one: Any, rows: list[Any], state: GroupState) -> None:
        assert one.v == rows[0].v
        seen[one.id] = one.v

    run(function, make_groups(table, 2, schema), OUTPUT, None, key, key)
    assert seen == dict(enumerate(values))


def test_a_key_has_its_stored_value_and_rows_are_unchanged() -> None:
    key = StructType([StructField("x", DoubleType())])
    seen: list[tuple[str, list[str]]] = []

    def function(one: Any, rows: list[Any], state: GroupState) -> None:
        seen.append((str(one.x), [str(row.x) for row in rows]))

    schema = make_schema(key)
    groups = make_groups(pa.table({"c0": [-0.0, 0.0, float("nan")]}), 1, schema)
    run(function, groups, OUTPUT, None, key, key)
    assert sorted(seen) == [("0.0", ["-0.0", "0.0"]), ("nan", ["nan"])]


# -- state and timeouts ---------------------------------------------------------------------------


def test_changed_keys_become_rows_of_a_run() -> None:
    def function(key: Any, rows: list[Any], state: GroupState) -> None:
        if key.k == 1:
            state.update((10,))
            state.setTimeoutDuration(5)
        elif key.k == 2:
            state.remove()

    groups = make_number_groups((1, 0), (2, 0), (3, 0))
    _, result = run(function, groups)
    assert result.data is not None
    rows = result.data.rows.to_pylist()
    assert [groups.keys[0][at].as_py() for at in result.data.positions.tolist()] == [row["key.k"] for row in rows]
    assert {r["key.k"]: (r["state.n"], r["defined"], r["deleted"], r["timeout_ms"]) for r in rows} == {
        1: (10, True, False, 1_005),
        2: (None, False, True, None),
    }


@pytest.mark.parametrize(
    ("duration_ms", "stored"), [(2**63 - 1_001, 2**63 - 1), (2**63 - 1_000, None), (2**63 - 1, None)]
)
def test_set_timeout_duration_refuses_a_timeout_beyond_a_long(duration_ms: int, stored: int | None) -> None:
    """The batch's processing time is 1000 ms after 1970."""

    def function(key: Any, rows: list[Any], state: GroupState) -> None:
        state.setTimeoutDuration(duration_ms)

    if stored is not None:
        result = run(function, make_number_groups((1, 0)))[1].data
        assert result is not None
        assert result.rows.column("timeout_ms").to_pylist() == [stored]
        return
    with pytest.raises(
        StateValueError, match=rf"setTimeoutDuration\(\) was given {duration_ms}, .*\(key \(1,\), bucket 3, batch 7\)"
    ) as raised:
        run(function, make_number_groups((1, 0)))
    assert "function" in [entry.name for entry in raised.traceback]


def test_set_timeout_timestamp_refuses_a_timeout_beyond_a_long() -> None:
    def function(key: Any, rows: list[Any], state: GroupState) -> None:
        state.setTimeoutTimestamp(2**63 - 2 + rows[0].v)

    event_time = dataclasses.replace(CONTEXT, timeout_conf="EventTimeTimeout")
    result = run(function, make_number_groups((1, 1)), context=event_time)[1].data
    assert result is not None
    assert result.rows.column("timeout_ms").to_pylist() == [2**63 - 1]
    with pytest.raises(
        StateValueError, match=r"setTimeoutTimestamp\(\) was given 9223372036854775808, .*\(key \(7,\), buc"
    ):
        run(function, make_number_groups((1, 1), (7, 2)), context=event_time)


def test_a_key_that_timed_out_has_no_rows() -> None:
    def function(key: Any, rows: list[Any], state: GroupState) -> Iterator[tuple[Any, ...]]:
        assert state.hasTimedOut
        assert rows == []
        yield key.k, state.getOption and state.get[0]
        state.remove()

    schema = make_schema()
    expired = pa.record_batch(
        [
            pa.array([0, 0], pa.uint64()),
            pa.array([4, None], pa.int64()),
            pa.array([7, None], pa.int64()),
            pa.array([1, 1], pa.int64()),
            pa.array([True, False]),
            pa.array([False, False]),
        ],
        schema=schema.arrow,
    )
    result = Result()
    row_caller = RowCaller(function, schema, STATE, INPUT, KEY, OUTPUT, make_fields(OUTPUT))
    assert send(row_caller.call_timeouts(expired, CONTEXT, result)) == [(4, 7), (None, None)]
    assert result.data is None
    assert result.timeouts is not None
    assert result.timeouts.rows.column("deleted").to_pylist() == [True, True]


# -- output ---------------------------------------------------------------------------------------

ROWS = [(1, 2), (1, None)]
OUTPUT_FORMS: dict[str, Callable[[], Any]] = {
    "a list": lambda: ROWS,
    "a generator": lambda: iter(ROWS),
    "a tuple of rows": lambda: tuple(ROWS),
    "lists": lambda: [list(row) for row in ROWS],
    "Spark's rows": lambda: [Row(k=k, n=n) for k, n in ROWS],
    "named tuples": lambda: list(map(make_row_factory("Out", ["k", "n"]), ROWS)),
    "NumPy's numbers": lambda: [(np.int64(k), None if n is None else np.int32(n)) for k, n in ROWS],
    "whole floats": lambda: [(float(k), n) for k, n in ROWS],
}


@pytest.mark.parametrize("form", OUTPUT_FORMS)
def test_output_may_have_any_of_these_forms(form: str) -> None:
    output, _ = run(lambda key, rows, state: OUTPUT_FORMS[form](), make_number_groups((1, 0)))
    assert output == ROWS


def test_without_output_no_frame_is_sent() -> None:
    outputs: list[Any] = [None, [], (), iter(())]
    groups = make_number_groups(*[(at, 0) for at in range(4)])
    schema = make_schema()
    row_caller = RowCaller(
        lambda key, rows, state: outputs[key.k], schema, STATE, INPUT, KEY, OUTPUT, make_fields(OUTPUT)
    )
    no_states = Lookup(np.full(4, -1, dtype=np.int64), schema.empty())
    assert list(row_caller.call_data(groups, no_states, schema.empty(), CONTEXT, Result())) == []


WHERE = r"\(key \(1,\), bucket 3, batch 7\)"
WRONG_OUTPUT: list[tuple[str, Any, type[Exception], str]] = [
    ("one tuple", (1, 2), ResultTypeError, "the function gave 1 .int. for a row: return, or yield, one tuple for each output row"),
    ("a dict", {"k": 1, "n": 2}, ResultTypeError, "the function gave 'k' .str. for a row"),
    ("dicts", [{"k": 1, "n": 2}], ResultTypeError, r"the function gave \{'k': 1, 'n': 2\} .dict. for a row"),
    ("text", "kn", ResultTypeError, "the function gave 'k' .str. for a row"),
    ("a frame", pd.DataFrame({"k": [1], "n": [2]}), ResultTypeError, "the function gave 'k' .str. for a row"),
    ("an array", np.array([[1, 2], [3, 4]]), ResultTypeError, r"the function gave array\(\[1, 2\]\) .ndarray. for a row"),
    ("too few", [(1, 2), (1,)], ResultTypeError, r"the function gave \(1,\) for a row; expected a tuple of k, n"),
    ("too many", [(1, 2, 3)], ResultTypeError, r"the function gave \(1, 2, 3\) for a row; expected a tuple of k, n"),
    ("another type", [(1, 2), (1, "many")], StateValueError, r"output column 'n' of type bigint cannot hold 'many' \(str\) \(in \(1, 'many'\)\)"),
    ("a fraction", [(1, 1.5)], StateValueError, r"output column 'n' of type bigint cannot hold 1\.5 \(float\)"),
    ("too large", [(1, 2**63)], StateValueError, "output column 'n' of type bigint cannot hold 9223372036854775808"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("output", "kind", "text"), [case[1:] for case in WRONG_OUTPUT], ids=[case[0] for case in WRONG_OUTPUT]
)
def test_wrong_output_is_refused(output: Any, kind: type[StateError], text: str) -> None:
    with pytest.raises(kind, match=text) as raised:
        run(lambda key, rows, state: output, make_number_groups((1, 0)))
    assert raised.match(WHERE)


def test_the_error_of_wrong_output_names_its_key() -> None:
    """Rows are converted together, after many keys were called."""

    def function(key: Any, rows: list[Any], state: Any) -> Any:
        if key.k == 4:
            return None
        return [(key.k, row.v if key.k != 6 else "many") for row in rows] * 3

    with pytest.raises(
        StateValueError, match=r"'n' of type bigint cannot hold 'many' .*\(key \(6,\), bucket 3, batch 7\)"
    ):
        run(function, make_number_groups(*((k, k) for k in range(9))))


def test_a_fraction_in_a_list_of_integers_is_refused() -> None:
    lists = StructType([StructField("k", LongType()), StructField("all", ArrayType(LongType()))])
    with pytest.raises(
        StateValueError, match=r"'all' of type array<bigint> cannot hold \[1, 2\.5\] \(list\) .*2\.5 is not a whole"
    ) as raised:
        run(lambda key, rows, state: [(1, [1, 2.5])], make_number_groups((1, 0)), lists)
    assert raised.match(WHERE)


def test_a_number_as_output_is_refused() -> None:
    with pytest.raises(ResultTypeError, match=rf"the function gave 5 \(int\): return, or yield, one tuple .* {WHERE}"):
        run(lambda key, rows, state: 5, make_number_groups((1, 0)))


def test_output_columns_declared_without_nulls_refuse_null() -> None:
    strict = StructType([StructField("k", LongType(), False), StructField("n", LongType(), False)])
    with pytest.raises(
        StateValueError, match=r"output column 'n' is declared without NULLs and row 1 is NULL"
    ) as raised:
        run(lambda key, rows, state: ROWS, make_number_groups((1, 0)), strict)
    assert raised.match(WHERE)


# -- values that a function changes after it has given them --------------------------------------


class Point:
    """A user's own class for a struct."""

    def __init__(self) -> None:
        self.x, self.tags = 0, [""]


def fill(buffer: Any, n: int) -> Any:
    """Change the contents of an object, and return the same object."""
    if isinstance(buffer, (list, bytearray)):
        buffer[0] = fill(buffer[0], n) if isinstance(buffer[0], (list, bytearray)) else n
    elif isinstance(buffer, dict):
        for name, value in buffer.items():
            buffer[name] = fill(value, n) if isinstance(value, (list, dict)) else n
    elif isinstance(buffer, tuple):
        fill(buffer[1], n)
    elif isinstance(buffer, np.ndarray):
        buffer[0] = n
    else:
        buffer.x, buffer.tags[0] = n, str(n)
    return buffer


NESTED = StructType([StructField("x", LongType()), StructField("tags", ArrayType(StringType()))])
PAIR = StructType([StructField("x", LongType()), StructField("all", ArrayType(LongType()))])
CHANGING: list[tuple[str, DataType, Callable[[], Any], Callable[[int], Any]]] = [
    ("a list", ArrayType(LongType()), lambda: [0, 5], lambda n: [n, 5]),
    ("an array", ArrayType(LongType()), lambda: np.array([0, 5]), lambda n: [n, 5]),
    ("a list of lists", ArrayType(ArrayType(LongType())), lambda: [[0]], lambda n: [[n]]),
    ("a dict", MapType(StringType(), LongType()), lambda: {"a": 0}, lambda n: [("a", n)]),
    ("a dict of lists", MapType(StringType(), ArrayType(LongType())), lambda: {"a": [0]}, lambda n: [("a", [n])]),
    ("a dict for a struct", PAIR, lambda: {"x": 0, "all": [0]}, lambda n: {"x": n, "all": [n]}),
    ("a list for a struct", StructType(PAIR.fields[:1]), lambda: [0], lambda n: {"x": n}),
    ("a row with a list", PAIR, lambda: Row(x=7, all=[0]), lambda n: {"x": 7, "all": [n]}),
    ("an object", NESTED, Point, lambda n: {"x": n, "tags": [str(n)]}),
    ("a list of structs", ArrayType(StructType(PAIR.fields[:1])), lambda: [[0]], lambda n: [{"x": n}]),
    ("a bytearray", BinaryType(), lambda: bytearray(b"\0"), lambda n: bytes([n])),
    ("bytearrays", ArrayType(BinaryType()), lambda: [bytearray(b"\0")], lambda n: [bytes([n])]),
]


@pytest.mark.parametrize(
    ("kind", "make", "expected"), [case[1:] for case in CHANGING], ids=[case[0] for case in CHANGING]
)
def test_a_state_has_its_value_from_the_end_of_the_keys_call(
    kind: DataType, make: Callable[[], Any], expected: Callable[[int], Any]
) -> None:
    """All keys share one object, which may change until the function returns, as in Spark, and after that."""
    buffer = make()

    def function(key: Any, rows: list[Any], state: GroupState) -> Any:
        fill(buffer, 9)
        state.update((key.k, buffer))
        fill(buffer, key.k)

    state = StructType([StructField("k", LongType()), StructField("v", kind)])
    result = run(function, make_number_groups((1, 0), (2, 0), (3, 0)), state=state)[1].data
    assert result is not None
    rows = result.rows.select(["state.k", "state.v"]).to_pylist()
    assert [row["state.v"] for row in rows] == [expected(row["state.k"]) for row in rows]


@pytest.mark.parametrize("form", ["a generator", "a list", "lists"])
@pytest.mark.parametrize(
    ("kind", "make", "expected"), [case[1:] for case in CHANGING], ids=[case[0] for case in CHANGING]
)
def test_output_has_its_value_from_when_it_was_yielded(
    kind: DataType, make: Callable[[], Any], expected: Callable[[int], Any], form: str
) -> None:
    buffer = make()

    def generate(key: Any, rows: list[Any], state: GroupState) -> Iterator[Any]:
        for n in (key.k, key.k + 10):
            yield n, fill(buffer, n)

    def function(key: Any, rows: list[Any], state: GroupState) -> Any:
        if form == "a generator":
            return generate(key, rows, state)
        return [[key.k, fill(buffer, key.k)] if form == "lists" else (key.k, fill(buffer, key.k))]

    output = StructType([StructField("k", LongType()), StructField("v", kind)])
    output_rows, _ = run(function, make_number_groups((1, 0), (2, 0), (3, 0)), output)
    assert len(output_rows) == (6 if form == "a generator" else 3)
    assert output_rows == [(n, expected(n)) for n, _ in output_rows]


def test_a_list_may_be_changed_and_yielded_again() -> None:
    shared = [0, 0]

    def generate(key: Any, rows: list[Any], state: GroupState) -> Iterator[Any]:
        for n in range(3):
            shared[:] = key.k, n
            yield shared

    def return_list(key: Any, rows: list[Any], state: GroupState) -> Any:
        shared[:] = key.k, 5
        return [shared]

    groups = make_number_groups((1, 0), (2, 0))
    assert sorted(run(generate, groups)[0]) == [(k, n) for k in (1, 2) for n in range(3)]
    assert sorted(run(return_list, groups)[0]) == [(1, 5), (2, 5)]


def test_a_state_changed_in_place_is_stored_only_if_a_timeout_is_set() -> None:
    """Spark too stores the state of a key only if it was updated or a timeout was set."""
    state = StructType([StructField("all", ArrayType(LongType()))])
    schema = make_schema(KEY, state)
    columns = [[0, 0], [1, 2], [[1], [2]], [None, None], [True, True], [False, False]]
    before = pa.record_batch(
        [pa.array(c, f.type) for c, f in zip(columns, schema.arrow, strict=True)], schema=schema.arrow
    )
    groups = make_number_groups((1, 0), (2, 0))
    at = [groups.keys[0].to_pylist().index(k) for k in (1, 2)]

    def function(key: Any, rows: list[Any], group: GroupState) -> None:
        group.get[0].append(5)
        if key.k == 2:
            group.setTimeoutDuration(1)

    result = run(function, groups, lookup=Lookup(np.argsort(at), before), state=state)[1].data
    assert result is not None
    assert [(row["key.k"], row["state.all"]) for row in result.rows.to_pylist()] == [(2, [2, 5])]


def test_the_error_of_a_value_of_a_wrong_type_names_the_key() -> None:
    lists = StructType([StructField("k", LongType()), StructField("all", ArrayType(ArrayType(LongType())))])

    def update(value: Any, key: Any, rows: Any, state: Any) -> None:
        state.update((1, value))

    def give_output(value: Any, key: Any, rows: Any, state: Any) -> list[tuple[Any, ...]]:
        return [(1, value)]

    # An iterator that was read in part must not be accepted for the rest of it.
    for value in (5, [[1], 5], iter([[1], 5])):
        with pytest.raises(
            StateValueError,
            match=r"^state column 'all' of type array<array<bigint>> cannot hold .*\(key \(4,\), bucket 3",
        ):
            run(functools.partial(update, value), make_number_groups((4, 0)), state=lists)
    for value in (5, [[1], 5], iter([[1], 5])):
        with pytest.raises(
            StateValueError,
            match=r"^output column 'all' of type array<array<bigint>> cannot hold .*\(key \(4,\), bucket 3",
        ):
            run(functools.partial(give_output, value), make_number_groups((4, 0)), lists)


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_an_exception_names_key_bucket_and_batch(late: bool) -> None:
    def function(key: Any, rows: list[Any], state: GroupState) -> Any:
        raise KeyError("missing")

    def generate(key: Any, rows: list[Any], state: GroupState) -> Iterator[tuple[Any, ...]]:
        yield 1, 2
        function(key, rows, state)

    with pytest.raises(UserFunctionError, match=r"key \(41,\) \(bucket 3, batch 7\): KeyError: 'missing'") as raised:
        run(generate if late else function, make_number_groups((41, 0)))
    assert isinstance(raised.value.__cause__, KeyError)
    assert "function" in [entry.name for entry in raised.traceback]


def test_an_exit_is_reported_as_an_error_of_the_function_with_its_key() -> None:
    """It would end Spark's worker, with a traceback that does not name the key."""

    def function(key: Any, rows: Any, state: Any) -> Any:
        sys.exit(3)

    with pytest.raises(UserFunctionError, match=r"key \(41,\) \(bucket 3, batch 7\): SystemExit: 3"):
        run(function, make_number_groups((41, 0)))


def test_the_error_of_a_null_in_a_column_without_nulls_names_its_key() -> None:
    """Spark's operator would store 0."""
    whole = StructType([StructField("n", LongType(), False)])

    def function(key: Any, rows: list[Any], state: GroupState) -> None:
        if key.k == 2:
            state.remove()
        else:
            state.update((None if key.k == 3 else 7,))

    run(function, make_number_groups((1, 0), (2, 0)), state=whole)
    with pytest.raises(
        StateValueError, match=r"'n' is declared without NULLs and was given None \(key \(3,\), bucket 3, batch 7\)"
    ):
        run(function, make_number_groups((1, 0), (2, 0), (3, 0)), state=whole)


def test_the_error_of_a_state_that_does_not_fit_names_its_key() -> None:
    def function(key: Any, rows: list[Any], state: GroupState) -> None:
        state.update((7 if key.k == 1 else "many",))

    with pytest.raises(
        StateValueError, match=r"'n' of type bigint cannot hold 'many' \(str\) \(key \(3,\), bucket 3, batch 7\)"
    ):
        run(function, make_number_groups((1, 0), (3, 0)))
    with pytest.raises(StateValueError, match=r"columns n: .*\(key \(1,\), bucket 3, batch 7\)"):
        run(lambda key, rows, state: state.update((1, 2)), make_number_groups((1, 0)))
