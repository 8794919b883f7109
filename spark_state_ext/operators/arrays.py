"""Conversion between Arrow columns and NumPy, segments of adjacent rows, and sorting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.columns import aggregate_groups, combine_chunks
from arrow_schemas.equality import BoolArray, IndexArray

__all__ = [
    "KeyedRows",
    "NumberArray",
    "Segments",
    "sorts_before",
    "to_bools",
    "to_integers",
    "take_interleaved",
    "to_nullable",
    "to_numbers",
    "order_within",
    "sort_codes",
    "find_valid",
]

NumberArray = npt.NDArray[Any]


def to_bools(column: pa.Array) -> BoolArray:
    """Return booleans without NULLs as a NumPy array."""
    values: BoolArray = column.to_numpy(zero_copy_only=False)
    return values


def find_valid(column: pa.Array) -> BoolArray | None:
    """Return a mask of the values that are not NULL; None if all are valid."""
    return to_bools(column.is_valid()) if column.null_count else None


def to_numbers(column: pa.Array, fill: Any = 0) -> NumberArray:
    """Return numbers as a NumPy array of the same width, with `fill` for NULLs."""
    if column.null_count:
        column = column.fill_null(fill)
    values: NumberArray = column.to_numpy(zero_copy_only=False)
    return values


def to_integers(column: pa.Array) -> pa.Array:
    """Return booleans, dates, timestamps and integers as integers with the same order and NULLs."""
    types = pa.types
    if types.is_boolean(column.type):
        return column.cast(pa.int8())
    if types.is_date32(column.type):
        return column.view(pa.int32())
    return column.view(pa.int64()) if types.is_timestamp(column.type) else column


def to_nullable(values: NumberArray, valid: BoolArray | None) -> pa.Array:
    """Return numbers as an Arrow array with NULLs at positions that are not valid; None: all are valid."""
    return pa.array(values) if valid is None or valid.all() else pa.array(values, mask=~valid)


def take_interleaved(first: Sequence[pa.Array], second: Sequence[pa.Array], index: IndexArray) -> list[pa.Array]:
    """Concatenate two sets of columns and return the rows at positions `index`."""
    positions = pa.array(index)
    return [pa.concat_arrays(pair).take(positions) for pair in zip(first, second, strict=True)]


@dataclass(frozen=True)
class KeyedRows:
    """Rows grouped by key, in order of arrival within a key. Rows are copied only when they are requested.

    Parameters
    ----------
    table
        The rows in order of arrival.
    order
        Positions of the rows in order of keys, int64 (number of rows,). None: the rows arrived in order of keys.
    starts
        Where each key begins in that order, int64 (number of keys,).
    """

    table: pa.Table
    order: IndexArray | None
    starts: IndexArray

    @property
    def single(self) -> bool:
        """True if every key has one row."""
        return bool(len(self.starts) == self.table.num_rows)

    @property
    def by_key(self) -> pa.Table:
        """All rows, in order of keys."""
        return self.table if self.order is None else self.table.take(pa.array(self.order))

    def take(self, positions: IndexArray) -> pa.Table:
        """Return the rows at positions in order of keys."""
        return self.table.take(self._to_arrival(positions))

    def column(self, name: str, positions: IndexArray) -> pa.Array:
        """Return a column's values at positions in order of keys."""
        return combine_chunks(self.table.column(name)).take(self._to_arrival(positions))

    def _to_arrival(self, positions: IndexArray) -> pa.Array:
        return pa.array(positions if self.order is None else self.order[positions])


@dataclass(frozen=True)
class Segments:
    """Groups of adjacent rows, without empty groups.

    Parameters
    ----------
    starts
        Where each segment begins, ascending from 0, int64 (number of segments,).
    rows
        Number of rows.
    """

    starts: IndexArray
    rows: int

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def ends(self) -> IndexArray:
        """Position after the last row of each segment."""
        return np.append(self.starts[1:], self.rows) if len(self) else self.starts

    @cached_property
    def sizes(self) -> IndexArray:
        """Number of rows of each segment."""
        return self.ends - self.starts

    @cached_property
    def ids(self) -> IndexArray:
        """Segment number of each row."""
        return np.repeat(np.arange(len(self)), self.sizes)

    @property
    def single(self) -> bool:
        """True if every segment has one row."""
        return len(self) == self.rows

    def spread(self, values: NumberArray) -> NumberArray:
        """Return the value of its segment for each row."""
        return values if self.single else np.repeat(values, self.sizes)

    def count_valid(self, valid: BoolArray | None) -> IndexArray:
        """Return the number of valid rows of each segment; None: all rows are valid."""
        if valid is None:
            return self.sizes
        count_valid: IndexArray = self.reduce(np.add, valid.astype(np.int64))
        return count_valid

    def reduce(self, function: np.ufunc, values: NumberArray) -> NumberArray:
        """Reduce the values of each segment with a binary function."""
        if self.single:
            return values
        results: NumberArray = function.reduceat(values, self.starts)
        return results

    def aggregate(self, column: pa.Array, function: str) -> pa.Array:
        """Aggregate each segment with an Arrow function, for types that NumPy does not support."""
        table = pa.table([pa.array(self.ids), column], names=["id", "value"])
        return combine_chunks(aggregate_groups(table, "id", [("value", function)]).column(f"value_{function}"))


# -- order ---------------------------------------------------------------------------------------------------


def sort_codes(column: pa.Array, descending: bool) -> list[IndexArray]:
    """Return integers with Spark's order of the values: NULL is the smallest, NaN the largest, -0.0 equals 0.0."""
    codes = [_encode_values(column)]
    if column.null_count:
        valid = to_bools(column.is_valid()).astype(np.int64)
        codes = [valid, codes[0] * valid]
    return [~code for code in codes] if descending else codes


def sorts_before(codes: Sequence[IndexArray], left: IndexArray, right: IndexArray) -> BoolArray:
    """Return a mask of the pairs whose value at `left` sorts before the value at `right`."""
    mask: BoolArray = np.zeros(len(left), dtype=np.bool_)
    tied: BoolArray = np.ones(len(left), dtype=np.bool_)
    for code in codes:
        left_codes, right_codes = code[left], code[right]
        mask |= tied & (left_codes < right_codes)
        tied &= left_codes == right_codes
    return mask


def order_within(keys: IndexArray, codes: Sequence[IndexArray]) -> IndexArray:
    """Return positions sorted by key and then by codes; the sort is stable."""
    # One number per row, so that one stable sort is enough. It is fast because rows are already grouped by key.
    combined = keys
    for code in codes if len(keys) else ():
        low, span = int(code.min()), int(code.max()) - int(code.min()) + 1
        if (int(combined.max()) + 1) * span >= 2**63:
            combined, code = _densify(combined), _densify(code)
            low, span = 0, int(code.max()) + 1
        combined = combined * span + (code - low)
    return np.argsort(combined, kind="stable").astype(np.int64, copy=False)


def _densify(codes: IndexArray) -> IndexArray:
    """Return codes with the same order, from 0 to less than the number of codes."""
    dense_codes: IndexArray = np.unique(codes, return_inverse=True)[1].reshape(-1).astype(np.int64, copy=False)
    return dense_codes


def _encode_values(column: pa.Array) -> IndexArray:
    types = pa.types
    if types.is_floating(column.type):
        values = to_numbers(column, 0.0).astype(np.float64) + 0.0
        values[np.isnan(values)] = np.nan
        bits: IndexArray = values.view(np.int64)
        # For negative floats, larger bits mean a smaller number.
        return bits ^ ((bits >> 63) & np.int64(2**63 - 1))
    plain = to_integers(column)
    if types.is_integer(plain.type):
        return to_numbers(plain).astype(np.int64, copy=False)
    encoded = column.dictionary_encode()
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = np.arange(len(order))
    indices = to_numbers(encoded.indices)
    return ranks[indices] if len(ranks) else np.zeros(len(column), dtype=np.int64)
