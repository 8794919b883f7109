"""Which rows hold the same key, against Spark's rule spelled out row by row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from core_support import canonical
from hypothesis import given, settings
from hypothesis import strategies as st

from arrow_schemas import RowSchema, group_by_key, rows_equal

_FLOATS = st.sampled_from([0.0, -0.0, 1.0, float("nan"), -float("nan"), float("inf")])
_TEXT = st.sampled_from(["", "a", "ab"])
_STRUCT = pa.struct([pa.field("f", pa.float32()), pa.field("s", pa.string())])
# Each type with a strategy of its values; few values, so that equal ones are common.
_TYPES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.sampled_from([0, 1, 2**53, 2**53 + 1])),
    (pa.float64(), _FLOATS),
    (pa.float32(), _FLOATS),
    (pa.string(), _TEXT),
    (pa.binary(), st.sampled_from([b"", b"\0", b"a"])),
    (pa.bool_(), st.booleans()),
    (pa.decimal128(5, 2), st.decimals(0, 1, places=2)),
    (pa.timestamp("us", tz="UTC"), st.sampled_from([0, 1, -1])),
    (_STRUCT, st.fixed_dictionaries({"f": st.none() | _FLOATS, "s": st.none() | _TEXT})),
    (pa.list_(pa.float64()), st.lists(st.none() | _FLOATS, max_size=3)),
    (pa.list_(pa.list_(pa.string())), st.lists(st.none() | st.lists(_TEXT, max_size=2), max_size=2)),
    (
        pa.list_(_STRUCT),
        st.lists(st.none() | st.fixed_dictionaries({"f": _FLOATS, "s": st.none() | _TEXT}), max_size=2),
    ),
    (
        pa.struct([pa.field("l", pa.list_(pa.float64()))]),
        st.fixed_dictionaries({"l": st.none() | st.lists(_FLOATS, max_size=2)}),
    ),
]


def _array(values: list[Any], data_type: pa.DataType, offset: int) -> pa.Array:
    """An array that is a slice of a larger one, as arrays from a shuffle often are."""
    return pa.array([*values[:offset], *values], data_type).slice(min(offset, len(values)))


@st.composite
def _columns(draw: st.DrawFn) -> tuple[list[tuple[Any, ...]], list[pa.Array]]:
    picked = draw(st.lists(st.sampled_from(_TYPES), min_size=1, max_size=2))
    count = draw(st.integers(0, 12))
    offset = draw(st.integers(0, 2))
    values = [draw(st.lists(st.none() | one, min_size=count, max_size=count)) for _, one in picked]
    arrays = [_array(column, t, offset) for column, (t, _) in zip(values, picked, strict=True)]
    # The rows as Arrow holds them, so that float32 is rounded.
    return list(zip(*(a.to_pylist() for a in arrays), strict=True)), arrays


@given(data=_columns(), seed=st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_rows_equal_is_sparks_equality(data: tuple[list[tuple[Any, ...]], list[pa.Array]], seed: int) -> None:
    rows, arrays = data
    order = np.random.default_rng(seed).permutation(len(rows))
    other = [array.take(pa.array(order)) for array in arrays]
    expected = [canonical(rows[i]) == canonical(rows[int(j)]) for i, j in enumerate(order)]
    assert rows_equal(arrays, other).tolist() == expected


@given(data=_columns(), buckets=st.sampled_from([1, 2, 3, 2**64]))
@settings(max_examples=150, deadline=None)
def test_group_by_key_with_hashes_that_collide(
    data: tuple[list[tuple[Any, ...]], list[pa.Array]], buckets: int
) -> None:
    rows, arrays = data
    hashes = np.array([(hash(canonical(row)) % 2**64) % buckets for row in rows], dtype=np.uint64)
    order, starts = group_by_key(hashes, arrays)
    groups = [part.tolist() for part in np.split(order, starts)[1:]]
    expected: dict[Any, list[int]] = {}
    for position, row in enumerate(rows):
        expected.setdefault(canonical(row), []).append(position)
    # Rows of a key are together and in their input order; groups ascend by hash.
    assert sorted(groups) == sorted(expected.values())
    assert (np.diff(hashes[order].astype(object)) >= 0).all()


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
    # As Spark sends it: in slices and chunks.
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
    given_columns = [
        pa.array([1_000, None], pa.timestamp("ns", tz="Europe/Berlin")),
        pa.array(["a", None], pa.large_string()),
        pa.array([["x"], None], pa.large_list(pa.large_string())),
    ]
    normal = schema.normalise_keys(given_columns)
    assert [c.type for c in normal] == [f.type for f in schema.keys]
    assert normal[0].cast(pa.int64()).to_pylist() == [1, None]
    assert [c.to_pylist() for c in normal[1:]] == [["a", None], [["x"], None]]
