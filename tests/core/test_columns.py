"""Columns of several chunks, event times of every type, and aggregates in the order of their groups."""

from __future__ import annotations

import datetime as dt
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from arrow_schemas.columns import aggregate_groups, combine_chunks, event_times_us, format_value
from spark_state_ext.errors import UnsupportedTypeError

MOMENT = dt.datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=dt.timezone.utc)
MOMENT_US = int(MOMENT.timestamp() * 1000) * 1000


@pytest.mark.parametrize(
    "kind", [pa.int64(), pa.string(), pa.list_(pa.int32()), pa.struct([("x", pa.int8())])], ids=str
)
@pytest.mark.parametrize("chunks", [0, 1, 2, 5])
def test_a_chunked_column_becomes_one_array(kind: pa.DataType, chunks: int) -> None:
    column = pa.chunked_array([pa.nulls(n + 1, kind) for n in range(chunks)], kind)
    array = combine_chunks(column)
    assert isinstance(array, pa.Array)
    assert array.type == kind
    assert array.to_pylist() == column.to_pylist()


def test_a_single_array_is_not_copied() -> None:
    array = pa.array([1, 2])
    assert combine_chunks(array) is array
    assert combine_chunks(pa.chunked_array([array])).buffers()[1].address == array.buffers()[1].address


@pytest.mark.slow
def test_a_column_of_more_than_two_gibibytes_is_refused() -> None:
    # The same piece is repeated, so that only the attempt to join the pieces takes memory.
    piece = pa.array(["x" * (1 << 27)])
    with pytest.raises(UnsupportedTypeError, match="more than 2 GiB of text or bytes in 17 rows"):
        combine_chunks(pa.chunked_array([piece] * 17))


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Tokyo"])
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_event_times_of_every_type_become_microseconds(
    unit: str, zone: str | None, window: bool, chunked: bool
) -> None:
    values = [MOMENT if zone else MOMENT.replace(tzinfo=None), None]
    column: Any = pa.array(values, pa.timestamp(unit, zone))
    if window:
        starts = pa.nulls(2, column.type)
        column = pa.StructArray.from_arrays([starts, column], names=["start", "end"])
    if chunked:
        column = pa.chunked_array([column.slice(0, 1), column.slice(1)])
    times = event_times_us(column)
    assert times.type == pa.int64()
    assert times.to_pylist() == [MOMENT_US, None]


def test_a_null_window_has_a_null_event_time() -> None:
    kind = pa.struct([("start", pa.timestamp("us")), ("end", pa.timestamp("us"))])
    assert event_times_us(pa.nulls(1, kind)).to_pylist() == [None]


@pytest.mark.parametrize("groups", [0, 1, 50_000])
def test_aggregates_are_in_the_order_of_the_groups(groups: int) -> None:
    # 50,000 groups are more than Arrow's hash table holds without collisions.
    ids = np.repeat(np.arange(groups), 2)
    table = pa.table({"id": ids, "value": np.arange(len(ids))})
    aggregates = aggregate_groups(table, "id", [("value", "sum"), ([], "count_all")])
    assert aggregates.column("id").to_pylist() == list(range(groups))
    assert aggregates.column("value_sum").to_pylist() == [4 * n + 1 for n in range(groups)]
    assert aggregates.column("count_all").to_pylist() == [2] * groups


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (pa.array(["a", None]), "a"),
        (pa.array([b"a\xff"]).view(pa.binary()), "b'a\\xff'"),
        (pa.Array.from_buffers(pa.string(), 1, pa.array([b"a\xff"]).buffers()), "b'a\\xff' (string)"),
        (pa.array([2**62], pa.timestamp("us")), "4611686018427387904 (timestamp[us])"),
        (pa.array([2**62], pa.timestamp("us", "UTC")), "4611686018427387904 (timestamp[us, tz=UTC])"),
        (pa.array([2**30], pa.int32()).view(pa.date32()), "1073741824 (date32[day])"),
        (
            pa.array([[2**30]], pa.list_(pa.int32())).cast(pa.list_(pa.date32())),
            "a list<item: date32[day]> that Python cannot hold",
        ),
        (
            pa.Array.from_buffers(pa.string(), 1, pa.array([b"a\xff"]).buffers()).dictionary_encode(),
            "a dictionary<values=string, indices=int32, ordered=0> that Python cannot hold",
        ),
    ],
    ids=[
        "text",
        "bytes",
        "text that is not UTF-8",
        "a time",
        "a time with a zone",
        "a date",
        "a list of dates",
        "a dictionary",
    ],
)
def test_any_value_can_be_formatted(column: pa.Array, text: str) -> None:
    assert str(format_value(column, 0)) == text
    assert str(format_value(pa.chunked_array([column]), 0)) == text
