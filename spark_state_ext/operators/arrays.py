"""Between Arrow's columns and NumPy: values under NULLs, segments of adjacent rows, and codes to sort by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.columns import aggregated, flat
from arrow_schemas.equality import BoolArray, IndexArray

__all__ = [
    "KeyedRows",
    "NumberArray",
    "Segments",
    "before",
    "bools",
    "integers",
    "interleaved",
    "nullable",
    "numbers",
    "order_within",
    "sort_codes",
    "valid_of",
]

NumberArray = npt.NDArray[Any]


def bools(column: pa.Array) -> BoolArray:
    """Booleans without NULLs in NumPy."""
    found: BoolArray = column.to_numpy(zero_copy_only=False)
    return found


def valid_of(column: pa.Array) -> BoolArray | None:
    """Which values are not NULL; None for all."""
    return bools(column.is_valid()) if column.null_count else None


def numbers(column: pa.Array, fill: Any = 0) -> NumberArray:
    """Numbers in NumPy, of the same width; NULLs are `fill`."""
    if column.null_count:
        column = column.fill_null(fill)
    found: NumberArray = column.to_numpy(zero_copy_only=False)
    return found


def integers(column: pa.Array) -> pa.Array:
    """Booleans, dates, timestamps and integers as integers of the same order, where NULLs are."""
    types = pa.types
    if types.is_boolean(column.type):
        return column.cast(pa.int8())
    if types.is_date32(column.type):
        return column.view(pa.int32())
    return column.view(pa.int64()) if types.is_timestamp(column.type) else column


def nullable(values: NumberArray, valid: BoolArray | None) -> pa.Array:
    """Numbers in Arrow, NULL where not valid (None: nowhere)."""
    return pa.array(values) if valid is None or valid.all() else pa.array(values, mask=~valid)


def interleaved(first: Sequence[pa.Array], second: Sequence[pa.Array], index: IndexArray) -> list[pa.Array]:
    """Rows of two sets of columns, one behind the other, by their positions in both."""
    at = pa.array(index)
    return [pa.concat_arrays(pair).take(at) for pair in zip(first, second, strict=True)]


@dataclass(frozen=True)
class KeyedRows:
    """Rows by key, in the order in which they came within each. None is copied before it is asked for.

    Parameters
    ----------
    table
        The rows as they came.
    order
        Their positions by key, int64 (number of rows,). None: they came by key.
    starts
        Where each key begins in that order, int64 (number of keys,).
    """

    table: pa.Table
    order: IndexArray | None
    starts: IndexArray

    @property
    def single(self) -> bool:
        """Whether each row is a key's only one."""
        return bool(len(self.starts) == self.table.num_rows)

    @property
    def by_key(self) -> pa.Table:
        """All rows."""
        return self.table if self.order is None else self.table.take(pa.array(self.order))

    def take(self, at: IndexArray) -> pa.Table:
        """The rows at some positions by key."""
        return self.table.take(self._came(at))

    def column(self, name: str, at: IndexArray) -> pa.Array:
        """A column's values there."""
        return flat(self.table.column(name)).take(self._came(at))

    def _came(self, at: IndexArray) -> pa.Array:
        return pa.array(at if self.order is None else self.order[at])


@dataclass(frozen=True)
class Segments:
    """Groups of adjacent rows, none of them empty.

    Parameters
    ----------
    starts
        Where each begins, ascending from 0, int64 (number of segments,).
    rows
        Number of rows.
    """

    starts: IndexArray
    rows: int

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def ends(self) -> IndexArray:
        """Behind each segment's last row."""
        return np.append(self.starts[1:], self.rows) if len(self) else self.starts

    @cached_property
    def sizes(self) -> IndexArray:
        """Number of rows of each."""
        return self.ends - self.starts

    @cached_property
    def ids(self) -> IndexArray:
        """Segment of each row."""
        return np.repeat(np.arange(len(self)), self.sizes)

    @property
    def single(self) -> bool:
        """Whether each has one row."""
        return len(self) == self.rows

    def spread(self, values: NumberArray) -> NumberArray:
        """For each row the value of its segment."""
        return values if self.single else np.repeat(values, self.sizes)

    def counts(self, valid: BoolArray | None) -> IndexArray:
        """Number of rows of each that are valid (None: all)."""
        if valid is None:
            return self.sizes
        found: IndexArray = self.reduced(np.add, valid.astype(np.int64))
        return found

    def reduced(self, function: np.ufunc, values: NumberArray) -> NumberArray:
        """What a binary function makes of the values of each."""
        if self.single:
            return values
        found: NumberArray = function.reduceat(values, self.starts)
        return found

    def grouped(self, column: pa.Array, function: str) -> pa.Array:
        """What one of Arrow's grouped aggregations makes of each: for types that NumPy does not have."""
        table = pa.table([pa.array(self.ids), column], names=["id", "value"])
        return flat(aggregated(table, "id", [("value", function)]).column(f"value_{function}"))


# -- order ---------------------------------------------------------------------------------------------------


def sort_codes(column: pa.Array, descending: bool) -> list[IndexArray]:
    """Integers that are ordered as Spark orders the values: NULL is the smallest, NaN the largest, -0.0 is 0.0."""
    codes = [_value_codes(column)]
    if column.null_count:
        valid = bools(column.is_valid()).astype(np.int64)
        codes = [valid, codes[0] * valid]
    return [~code for code in codes] if descending else codes


def before(codes: Sequence[IndexArray], left: IndexArray, right: IndexArray) -> BoolArray:
    """Pair by pair, whether the value at `left` comes before that at `right`."""
    found: BoolArray = np.zeros(len(left), dtype=np.bool_)
    tied: BoolArray = np.ones(len(left), dtype=np.bool_)
    for code in codes:
        a, b = code[left], code[right]
        found |= tied & (a < b)
        tied &= a == b
    return found


def order_within(keys: IndexArray, codes: Sequence[IndexArray]) -> IndexArray:
    """The order by key and then by codes; of equal rows those that are first stay first."""
    # One number a row, so that one stable sort does. It is fast where rows already come by key, as they do here.
    combined = keys
    for code in codes if len(keys) else ():
        low, span = int(code.min()), int(code.max()) - int(code.min()) + 1
        if (int(combined.max()) + 1) * span >= 2**63:
            combined, code = _dense(combined), _dense(code)
            low, span = 0, int(code.max()) + 1
        combined = combined * span + (code - low)
    return np.argsort(combined, kind="stable").astype(np.int64, copy=False)


def _dense(codes: IndexArray) -> IndexArray:
    """The same order in numbers from 0 on, below the number of codes."""
    found: IndexArray = np.unique(codes, return_inverse=True)[1].reshape(-1).astype(np.int64, copy=False)
    return found


def _value_codes(column: pa.Array) -> IndexArray:
    types = pa.types
    if types.is_floating(column.type):
        values = numbers(column, 0.0).astype(np.float64) + 0.0
        values[np.isnan(values)] = np.nan
        bits: IndexArray = values.view(np.int64)
        # Of negative floats the larger bits are the smaller number.
        return bits ^ ((bits >> 63) & np.int64(2**63 - 1))
    plain = integers(column)
    if types.is_integer(plain.type):
        return numbers(plain).astype(np.int64, copy=False)
    encoded = column.dictionary_encode()
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = np.arange(len(order))
    indices = numbers(encoded.indices)
    return ranks[indices] if len(ranks) else np.zeros(len(column), dtype=np.int64)
