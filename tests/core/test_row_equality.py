"""Rows have the same key exactly if Spark's rule, written out row by row, says so."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arrow_schemas import RowSchema, group_by_key, rows_equal
from arrow_schemas.equality import HashArray
from spark_state_ext.testing.model import canonicalise

_FLOATS = st.sampled_from([0.0, -0.0, 1.0, float("nan"), -float("nan"), float("inf")])
# Text is bytes, and dates and times are numbers: Spark's text may not be UTF-8, nor its years within 1 to 9999.
_TEXT = st.sampled_from([b"", b"a", b"ab", b"\xff", b"\xfe", b"a\xff"])
_INT64 = st.sampled_from([0, 1, -1, 2**53, 2**53 + 1, 2**63 - 1, -(2**63)])
_INT32 = st.sampled_from([0, 1, -1, 2**31 - 1, -(2**31)])


def make_structs(**parts: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for structs with these fields in this order."""
    return st.tuples(*parts.values()).map(lambda drawn: dict(zip(parts, drawn, strict=True)))


_STRUCT = pa.struct([pa.field("f", pa.float32()), pa.field("s", pa.string())])
# Types, each with a strategy for a few values, so that equal values are common.
_TYPES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), _INT64),
    (pa.float64(), _FLOATS),
    (pa.float32(), _FLOATS),
    (pa.string(), _TEXT),
    (pa.binary(), st.sampled_from([b"", b"\0", b"a"])),
    (pa.bool_(), st.booleans()),
    (pa.decimal128(5, 2), st.decimals(0, 1, places=2)),
    (pa.timestamp("us", tz="UTC"), _INT64),
    (pa.timestamp("us"), _INT64),
    (pa.date32(), _INT32),
    (_STRUCT, make_structs(f=st.none() | _FLOATS, s=st.none() | _TEXT)),
    (pa.list_(pa.float64()), st.lists(st.none() | _FLOATS, max_size=3)),
    (pa.list_(pa.date32()), st.lists(st.none() | _INT32, max_size=3)),
    (pa.list_(pa.list_(pa.string())), st.lists(st.none() | st.lists(_TEXT, max_size=2), max_size=2)),
    (
        pa.list_(_STRUCT),
        st.lists(st.none() | make_structs(f=_FLOATS, s=st.none() | _TEXT), max_size=2),
    ),
    (
        pa.struct([pa.field("l", pa.list_(pa.float64()))]),
        make_structs(l=st.none() | st.lists(_FLOATS, max_size=2)),
    ),
]


def make_array(values: list[Any], data_type: pa.DataType) -> pa.Array:
    """Return an array of values, including those that Python's text, dates and times cannot represent."""
    types = pa.types
    if types.is_struct(data_type):
        children = [make_array([v and v[field.name] for v in values], field.type) for field in data_type]
        return pa.StructArray.from_arrays(
            children, fields=list(data_type), mask=pa.array([v is None for v in values], pa.bool_())
        )
    if types.is_list(data_type):
        starts = np.cumsum([0, *(len(v or ()) for v in values)]).tolist()
        offsets = [None if v is None else start for v, start in zip(values, starts[:-1], strict=True)]
        elements = make_array([e for v in values for e in v or ()], data_type.value_type)
        return pa.ListArray.from_arrays(pa.array([*offsets, starts[-1]], pa.int32()), elements, type=data_type)
    if types.is_string(data_type):
        return pa.array(values, pa.binary()).view(data_type)
    if types.is_temporal(data_type):
        return pa.array(values, pa.int32() if types.is_date32(data_type) else pa.int64()).view(data_type)
    return pa.array(values, data_type)


def make_slice(values: list[Any], data_type: pa.DataType, offset: int) -> pa.Array:
    """Return an array that is a slice of a larger one, as arrays from a shuffle often are."""
    return make_array([*values[:offset], *values], data_type).slice(min(offset, len(values)))


@st.composite
def draw_columns(draw: st.DrawFn) -> tuple[list[tuple[Any, ...]], list[pa.Array]]:
    picked = draw(st.lists(st.sampled_from(_TYPES), min_size=1, max_size=3))
    count = draw(st.integers(0, 20))
    offset = draw(st.integers(0, 2))
    values = [draw(st.lists(st.none() | strategy, min_size=count, max_size=count)) for _, strategy in picked]
    arrays = [make_slice(column, t, offset) for column, (t, _) in zip(values, picked, strict=True)]
    return list(zip(*values, strict=True)), arrays


@given(data=draw_columns(), seed=st.integers(0, 5))
@settings(max_examples=150)
def test_rows_equal_follows_sparks_equality(data: tuple[list[tuple[Any, ...]], list[pa.Array]], seed: int) -> None:
    rows, arrays = data
    order = np.random.default_rng(seed).permutation(len(rows))
    other = [array.take(pa.array(order)) for array in arrays]
    expected = [canonicalise(rows[i]) == canonicalise(rows[int(j)]) for i, j in enumerate(order)]
    assert rows_equal(arrays, other).tolist() == expected


@given(data=draw_columns(), buckets=st.sampled_from([1, 2, 3, 2**64]))
@settings(max_examples=150)
def test_group_by_key_separates_keys_whose_hashes_collide(
    data: tuple[list[tuple[Any, ...]], list[pa.Array]], buckets: int
) -> None:
    rows, arrays = data
    hashes = np.array([(hash(canonicalise(row)) % 2**64) % buckets for row in rows], dtype=np.uint64)
    order, starts = group_by_key(hashes, arrays)
    # Rows of a key are adjacent and in input order, and groups ascend by hash.
    assert sorted(list_groups(order, starts)) == group_by_dict(rows)
    assert (np.diff(hashes[order].astype(object)) >= 0).all()


def list_groups(order: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> list[list[int]]:
    return [part.tolist() for part in np.split(order, starts)[1:]]


def group_by_dict(rows: list[tuple[Any, ...]]) -> list[list[int]]:
    """Return the positions of the rows of each key, grouped with a dict."""
    positions: dict[Any, list[int]] = {}
    for position, row in enumerate(rows):
        positions.setdefault(canonicalise(row), []).append(position)
    return sorted(positions.values())


_LAST_US, _LAST_DAY = 253_402_300_799_999_999, 2_932_896  # the end of the year 9999
_FIRST_US, _FIRST_DAY = -62_135_596_800_000_000, -719_162  # the beginning of the year 1
_POINT = pa.struct([pa.field("x", pa.float64()), pa.field("tags", pa.list_(pa.string()))])
# Values of each type that are different keys.
_DIFFERENT: dict[str, tuple[pa.DataType, list[Any]]] = {
    "text that is not UTF-8": (pa.string(), [b"\xff", b"\xfe", b"\xff\xff", b"\xc3", b"", b"a", None]),
    "dates": (pa.date32(), [_LAST_DAY, _LAST_DAY + 1, 2**31 - 1, _FIRST_DAY, _FIRST_DAY - 1, -(2**31), None]),
    "timestamps": (
        pa.timestamp("us", tz="UTC"),
        [_LAST_US, _LAST_US + 1, 2**63 - 1, _FIRST_US, _FIRST_US - 1, -(2**63), None],
    ),
    "timestamps without zone": (pa.timestamp("us"), [_LAST_US + 1, 2**63 - 1, _FIRST_US - 1, -(2**63), None]),
    "lists of text": (pa.list_(pa.string()), [[b"\xff"], [b"\xfe"], [b"\xff", None], [None, b"\xff"], [None], [], None]),
    "lists of lists": (pa.list_(pa.list_(pa.int64())), [[[1], [2]], [[1, 2]], [[1, 2], []], [[], [1, 2]], [None], []]),
    "structs": (
        _POINT,
        [
            {"x": 1.0, "tags": [b"\xff"]},
            {"x": 1.0, "tags": [b"\xff", b"\xff"]},
            {"x": 1.0, "tags": []},
            {"x": 1.0, "tags": None},
            {"x": None, "tags": None},
            None,
        ],
    ),
    "lists of structs": (
        pa.list_(_POINT),
        [[{"x": 1.0, "tags": None}], [{"x": None, "tags": None}], [{"x": 1.0, "tags": []}], [None], [None, None], []],
    ),
    "structs of nothing": (pa.struct([]), [{}, None]),
}  # fmt: skip


@pytest.mark.parametrize("which", _DIFFERENT)
def test_different_keys_with_the_same_hash_are_separate_groups(which: str) -> None:
    data_type, values = _DIFFERENT[which]
    column_values = [*values, *reversed(values), *values[::2]]
    column = make_slice(column_values, data_type, 1)
    order, starts = group_by_key(np.full(len(column), 7, dtype=np.uint64), [column])
    assert sorted(list_groups(order, starts)) == group_by_dict([(v,) for v in column_values])
    assert len(starts) == len(values)


@pytest.mark.parametrize("which", _DIFFERENT)
def test_nulls_in_different_columns_are_different_keys(which: str) -> None:
    """Spark's hash ignores NULLs, so both keys have the same hash."""
    data_type, values = _DIFFERENT[which]
    pairs = [(a, b) for value in values for a, b in [(value, None), (None, value), (value, value)]] * 2
    hashes = np.array([hash(repr(a or b)) % 2**64 for a, b in pairs], dtype=np.uint64)
    columns = [make_slice([pair[at] for pair in pairs], data_type, 2) for at in range(2)]
    order, starts = group_by_key(hashes, columns)
    assert sorted(list_groups(order, starts)) == group_by_dict(pairs)
    assert (np.diff(hashes[order].astype(object)) >= 0).all()


def test_different_bits_of_equal_floats_are_one_key() -> None:
    odd = np.array([0x7FF8_0000_0000_0000, 0xFFF8_0000_0000_0123, 0x7FF0_0000_0000_0001], dtype=np.uint64)
    floats = np.concatenate([odd.view(np.float64), [0.0, -0.0, 1.0]])
    elements = pa.array(floats)
    each = pa.array(range(7), pa.int32())
    columns = [
        elements,
        pa.array(np.array([0x7FC0_0000, 0xFFC0_0123, 0x7F80_0001, 0, 1 << 31, 1], dtype=np.uint32).view(np.float32)),
        pa.ListArray.from_arrays(each, elements),
        pa.StructArray.from_arrays([elements], names=["x"]),
    ]
    for column in columns:
        order, starts = group_by_key(np.zeros(6, dtype=np.uint64), [column])
        assert sorted(list_groups(order, starts)) == [[0, 1, 2], [3, 4], [5]]


@pytest.mark.parametrize(
    "hashed", [lambda x: x, lambda x: x % 3, lambda x: x * 0], ids=["two keys each", "three hashes", "one hash"]
)
def test_many_hash_collisions_take_little_time(hashed: Callable[[HashArray], HashArray]) -> None:
    """All keys of a call may collide in such pairs."""
    count = 100_000
    numbers = np.concatenate([np.arange(count, dtype=np.uint64)] * 2)
    second = np.arange(2 * count) >= count
    times = pa.array(numbers.astype(np.int64)).view(pa.timestamp("us"))
    lists = pa.ListArray.from_arrays(pa.array(np.arange(2 * count + 1, dtype=np.int32)), times)
    columns = [
        pc.if_else(pa.array(second), None, times),
        pc.if_else(pa.array(second), times, None),
        pc.if_else(pa.array(second), None, lists),
    ]
    before_s = time.process_time()
    order, starts = group_by_key(hashed(numbers), columns)
    elapsed_s = time.process_time() - before_s
    assert len(starts) == 2 * count
    assert len(np.unique(order)) == 2 * count
    # The actual time is a tenth of this; a comparison row by row would exceed it.
    assert elapsed_s < 3


@pytest.mark.parametrize(
    "data_type",
    [pa.float32(), pa.float64(), pa.list_(pa.float64()), pa.struct([("f", pa.float32())]),
     pa.list_(pa.struct([("f", pa.list_(pa.float64()))]))],
    ids=str,
)  # fmt: skip
def test_normalised_keys_have_no_negative_zero(data_type: pa.DataType) -> None:
    def nested(t: pa.DataType, value: float) -> Any:
        if pa.types.is_list(t):
            return [nested(t.value_type, value), nested(t.value_type, value)]
        if pa.types.is_struct(t):
            return {t.field(0).name: nested(t.field(0).type, value)}
        return value

    def floats(value: Any) -> list[float]:
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list):
            return [f for v in value for f in floats(v)]
        return [] if value is None else [value]

    schema = RowSchema((pa.field("k", data_type),), ())
    column = pa.array([nested(data_type, 9.0), nested(data_type, -0.0), None, nested(data_type, 1.5)], data_type)
    # In slices and chunks, as Spark sends it.
    (normal,) = schema.normalise_keys([pa.chunked_array([column.slice(1, 2), column.slice(3)])])
    assert normal.type == data_type
    assert normal.to_pylist() == column.slice(1).to_pylist()
    assert all(math.copysign(1, f) > 0 for value in normal.to_pylist() for f in floats(value))


def test_normalised_keys_take_the_stored_types() -> None:
    schema = RowSchema(
        (
            pa.field("t", pa.timestamp("us", tz="UTC")),
            pa.field("s", pa.string()),
            pa.field("l", pa.list_(pa.field("element", pa.string()))),
        ),
        (),
    )
    columns = [
        pa.array([1_000, None], pa.timestamp("ns", tz="Europe/Berlin")),
        pa.array(["a", None], pa.large_string()),
        pa.array([["x"], None], pa.large_list(pa.large_string())),
    ]
    normal = schema.normalise_keys(columns)
    assert [c.type for c in normal] == [f.type for f in schema.keys]
    assert normal[0].cast(pa.int64()).to_pylist() == [1, None]
    assert [c.to_pylist() for c in normal[1:]] == [["a", None], [["x"], None]]
