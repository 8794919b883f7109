"""Kernels of aggregate functions, with Spark's semantics: rows become buffers, which are merged and become results.

A buffer is one or more columns. If all of them are NULL, the buffer is empty; so a key without state, and a column that
is new in the state, need no special case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.columns import combine_chunks
from arrow_schemas.equality import BoolArray, IndexArray
from spark_state_ext.operators.arrays import (
    NumberArray,
    Segments,
    find_valid,
    take_interleaved,
    to_bools,
    to_integers,
    to_nullable,
    to_numbers,
)

__all__ = [
    "Buffers",
    "Count",
    "DecimalMean",
    "DecimalSum",
    "Extreme",
    "FloatSum",
    "IntegerSum",
    "Kernel",
    "Mean",
    "OverflowAtError",
    "Pick",
    "Variance",
]

Buffers = list[pa.Array]
# Decimals with at most so many digits fit into 64 bits.
_WORD_DIGITS = 18
_HALF = 0xFFFFFFFF


class OverflowAtError(Exception):
    """A sum or a mean exceeds its type; callers raise `StateValueError` with the key at the position."""

    def __init__(self, position: int, data_type: pa.DataType) -> None:
        super().__init__(position, data_type)
        self.position = position
        self.data_type = data_type


class Kernel(Protocol):
    """An aggregate function of one column."""

    @property
    def buffers(self) -> Sequence[tuple[str, pa.DataType]]:
        """Name and type of each buffer column; the name of a single column is empty."""

    @property
    def result(self) -> pa.DataType:
        """Type of the result."""

    def reduce(self, values: pa.Array | None, segments: Segments) -> Buffers:
        """Return the buffers of segments of adjacent rows; `values` is None for a function without a column."""

    def merge(self, left: Buffers, right: Buffers) -> Buffers:
        """Merge pairs of buffers; the rows of `right` come after the rows of `left`."""

    def finish(self, buffers: Buffers) -> pa.Array:
        """Return the results."""


@dataclass(frozen=True)
class Count:
    """``count(*)``, or ``count(column)``, which skips NULLs."""

    buffers = (("", pa.int64()),)
    result = pa.int64()

    def reduce(self, values: pa.Array | None, segments: Segments) -> Buffers:
        return [pa.array(segments.count_valid(None if values is None else find_valid(values)))]

    def merge(self, left: Buffers, right: Buffers) -> Buffers:
        return [pa.array(to_numbers(left[0]) + to_numbers(right[0]))]

    def finish(self, buffers: Buffers) -> pa.Array:
        return buffers[0].fill_null(0)


@dataclass(frozen=True)
class IntegerSum:
    """``sum`` of integers: a long, and an error on overflow."""

    buffers = (("", pa.int64()),)
    result = pa.int64()

    def reduce(self, values: pa.Array | None, segments: Segments) -> Buffers:
        assert values is not None
        valid = find_valid(values)
        sums = _sum_integers(to_numbers(values).astype(np.int64, copy=False), segments)
        return [to_nullable(sums, _find_any_valid(valid, segments))]

    def merge(self, left: Buffers, right: Buffers) -> Buffers:
        a, b = to_numbers(left[0]), to_numbers(right[0])
        total = a + b
        # Overflow: both values have one sign and the sum has the other.
        overflows = ((a ^ total) & (b ^ total)) < 0
        if overflows.any():
            raise OverflowAtError(int(np.argmax(overflows)), pa.int64())
        return [to_nullable(total, _find_either_valid(left[0], right[0]))]

    def finish(self, buffers: Buffers) -> pa.Array:
        return buffers[0]


@dataclass(frozen=True)
class FloatSum:
    """``sum`` of floats: a double."""

    buffers = (("", pa.float64()),)
    result = pa.float64()

    def reduce(self, values: pa.Array | None, segments: Segments) -> Buffers:
        assert values is not None
        valid = find_valid(values)
        return [to_nullable(segments.reduce(np.add, _to_doubles(values)), _find_any_valid(valid, segments))]

    def merge(self, left: Buffers, right: Buffers) -> Buffers:
        return [
            to_nullable(to_numbers(left[0], 0.0) + to_numbers(right[0], 0.0), _find_either_valid(left[0], right[0]))
        ]

    def finish(self, buffers: Buffers) -> pa.Array:
        return buffers[0]


@dataclass(frozen=True)
class DecimalSum:
    """``sum`` of ``decimal(precision, scale)``: ten more digits, and an error on overflow."""

    precision: int
    scale: int

    @property
    def result(self) -> pa.DataType:
        return pa.decimal128(min(38, self.precision + 10), self.scale)

    @property
    def buffers(self) -> Sequence[tuple[str, pa.DataType]]:
        return (("", self.result),)

    def reduce(self, values: pa.Array | None, segments: Segments) -> Buffers:
        assert values is not None
        if self.precision <= _WORD_DIGITS:
            return [_sum_short_decimals(values, segments, self.result)]
        # Twice as wide, because older releases of Arrow do not detect sums with more than 38 digits.
        return [_narrow(segments.aggregate(values.cast(self._wide), "sum"), self.result)]

    def merge(self, left: Buffers, right: Buffers) -> Buffers:
        a, b = _fill_with_zeros(left[0]), _fill_with_zeros(right[0])
        if self.result.precision == 38:
            a, b = a.cast(self._wide), b.cast(self._wide)
        total = pc.add(a, b)
        valid = _find_either_valid(left[0], right[0])
        if valid is not None:
            total = pc.if_else(pa.array(valid), total, pa.scalar(None, total.type))
        return [_narrow(total, self.result)]

    def finish(self, buffers: Buffers) -> pa.Array:
        return buffers[0]

    @property
    def _wide(self) -> pa.DataType:
        return pa.decimal256(75, self.scale)


@dataclass(frozen=True)
class Mean:
    """``avg`` of integers and floats: a double."""

    buffers = (("sum", pa.float64()), ("count", pa.int64()))
    result = pa.float64()

    def reduce(self, values: pa.Array | None, segments: Segments) -> Buffers:
        assert values is not None
        sums = segments.reduce(np.add, _to_doubles(values))
        return [pa.array(sums), pa.array(segments.count_valid(find_valid(values)))]

    def merge(self, left: Buffers, right: Buffers) -> Buffers:
        return [
            pa.array(to_numbers(left[0], 0.0) + to_numbers(right[0], 0.0)),
            pa.array(to_numbers(left[1]) + to_numbers(right[1])),
        ]

    def finish(self, buffers: Buffers) -> pa.Array:
        count = to_numbers(buffers[1])
        return to_nullable(to_numbers(buffers[0], 0.0) / np.maximum(count, 1), count > 0)


@dataclass(frozen=True)
class DecimalMean:
    """``avg`` of ``decimal(precision, scale)``: four more digits, rounded half up."""

    precision: int
    scale: int

    @property
    def result(self) -> pa.DataType:
        return pa.decimal128(min(38, self.precision + 4), min(38, self.scale + 4))

    @property
    def buffers(self) -> Sequence[tuple[str, pa.DataType]]:
        return ("sum", self._sum.result), ("count", pa.int64())

    def reduce(self, values: pa.Array | None, segments: Segments) -> Buffers:
        assert values is not None
        return [*self._sum.reduce(values, segments), pa.array(segments.count_valid(find_valid(values)))]

    def merge(self, left: Buffers, right: Buffers) -> Buffers:
        return [*self._sum.merge(left[:1], right[:1]), pa.array(to_numbers(left[1]) + to_numbers(right[1]))]

    def finish(self, buffers: Buffers) -> pa.Array:
        # A quotient has 20 digits more than its dividend, and the rest is cut off. That does not change how the value
        # is rounded.
        dividend = buffers[0].cast(pa.decimal256(38, self.scale))
        divisor = pa.array(np.maximum(to_numbers(buffers[1]), 1)).cast(pa.decimal256(19, 0))
        quotient = pc.divide(dividend, divisor)
        rounded = pc.round(quotient, self.result.scale, "half_towards_infinity")
        return _narrow(rounded, self.result)

    @property
    def _sum(self) -> DecimalSum:
        return DecimalSum(self.precision, self.scale)


@dataclass(frozen=True)
class Variance:
    """``var_samp``: sample variance, NULL for fewer than two values.

    The buffer has the number of values, their mean and the sum of squared differences from it. Buffers are merged by
    the method of Chan, Golub and LeVeque, which keeps the precision of large means with small differences. The result
    is infinite if the squares exceed a double, and NaN if a value is NaN or infinite, however rows are divided into
    batches.
    """

    buffers = (("count", pa.int64()), ("mean", pa.float64()), ("squares", pa.float64()))
    result = pa.float64()

    def reduce(self, values: pa.Array | None, segments: Segments) -> Buffers:
        assert values is not None
        valid = find_valid(values)
        count = segments.count_valid(valid)
        doubles = _to_doubles(values)
        first = np.where(count > 0, doubles[_find_first_valid(valid, segments)], 0.0)
        # Sum shares of the differences: sums of values or differences may exceed a double although the mean does not.
        shares = (doubles - segments.spread(first)) / segments.spread(np.maximum(count, 1))
        if valid is not None:
            shares[~valid] = 0.0
        mean = first + segments.reduce(np.add, shares)
        differences = doubles - segments.spread(mean)
        squares = differences * differences
        if valid is not None:
            squares[~valid] = 0.0
        return [pa.array(count), pa.array(mean), pa.array(segments.reduce(np.add, squares))]

    def merge(self, left: Buffers, right: Buffers) -> Buffers:
        left_count, right_count = to_numbers(left[0]), to_numbers(right[0])
        left_mean, right_mean = to_numbers(left[1], 0.0), to_numbers(right[1], 0.0)
        count = left_count + right_count
        delta = right_mean - left_mean
        step = delta / np.maximum(count, 1)
        # If one side is empty, use the other side's mean, because delta may be infinite.
        both = (left_count > 0) & (right_count > 0)
        merged = np.where(both, left_mean + step * right_count, np.where(left_count > 0, left_mean, right_mean))
        squares = to_numbers(left[2], 0.0) + to_numbers(right[2], 0.0)
        # Infinite squares stay infinite: they may come from finite values, although delta is NaN then.
        squares = np.where(both & ~np.isinf(squares), squares + delta * step * left_count * right_count, squares)
        return [pa.array(count), pa.array(merged), pa.array(squares)]

    def finish(self, buffers: Buffers) -> pa.Array:
        count = to_numbers(buffers[0])
        return to_nullable(to_numbers(buffers[2], 0.0) / np.maximum(count - 1, 1), count > 1)


@dataclass(frozen=True)
class Extreme:
    """``min`` or ``max`` of any type that is not nested. NaN is larger than any number; -0.0 equals 0.0."""

    data_type: pa.DataType
    largest: bool

    @property
    def result(self) -> pa.DataType:
        return self.data_type

    @property
    def buffers(self) -> Sequence[tuple[str, pa.DataType]]:
        return (("", self.data_type),)

    def reduce(self, values: pa.Array | None, segments: Segments) -> Buffers:
        assert values is not None
        if not self._numeric:
            return [values if segments.single else segments.aggregate(values, "max" if self.largest else "min")]
        extremes = segments.reduce(self._function, self._fill_nulls(values))
        return [self._to_type(extremes, _find_any_valid(find_valid(values), segments))]

    def merge(self, left: Buffers, right: Buffers) -> Buffers:
        if not self._numeric:
            function = pc.max_element_wise if self.largest else pc.min_element_wise
            return [function(left[0], right[0], skip_nulls=True)]
        extremes = self._function(self._fill_nulls(left[0]), self._fill_nulls(right[0]))
        return [self._to_type(extremes, _find_either_valid(left[0], right[0]))]

    def finish(self, buffers: Buffers) -> pa.Array:
        return buffers[0]

    @property
    def _numeric(self) -> bool:
        types, data_type = pa.types, self.data_type
        plain = types.is_integer(data_type) or types.is_floating(data_type) or types.is_boolean(data_type)
        return bool(plain or types.is_date32(data_type) or types.is_timestamp(data_type))

    @property
    def _function(self) -> np.ufunc:
        # np.maximum returns NaN if a value is NaN, np.fmin only if all values are NaN.
        return np.maximum if self.largest else np.fmin

    def _fill_nulls(self, values: pa.Array) -> NumberArray:
        """Return values as a NumPy array, with a neutral value for NULL."""
        plain = to_integers(values)
        if pa.types.is_floating(plain.type):
            filled: NumberArray = to_numbers(plain, float("-inf" if self.largest else "nan")) + 0.0
            return filled.astype(plain.type.to_pandas_dtype(), copy=False)
        bounds = np.iinfo(plain.type.to_pandas_dtype())
        return to_numbers(plain, int(bounds.min if self.largest else bounds.max))

    def _to_type(self, values: NumberArray, valid: BoolArray | None) -> pa.Array:
        column = to_nullable(values, valid)
        if pa.types.is_boolean(self.data_type):
            return column.cast(self.data_type)
        return column if column.type == self.data_type else column.view(self.data_type)


@dataclass(frozen=True)
class Pick:
    """``first`` or ``last`` value of any type, in the order of the rows."""

    data_type: pa.DataType
    last: bool
    ignore_nulls: bool

    @property
    def result(self) -> pa.DataType:
        return self.data_type

    @property
    def buffers(self) -> Sequence[tuple[str, pa.DataType]]:
        if self.ignore_nulls:
            return (("", self.data_type),)
        # The picked value may be NULL.
        return ("", self.data_type), ("seen", pa.bool_())

    def reduce(self, values: pa.Array | None, segments: Segments) -> Buffers:
        assert values is not None
        index = segments.ends - 1 if self.last else segments.starts
        valid = find_valid(values) if self.ignore_nulls else None
        if valid is None:
            picked = values.take(pa.array(index))
            return [picked] if self.ignore_nulls else [picked, pa.array(np.ones(len(segments), dtype=np.bool_))]
        places = np.append(np.flatnonzero(valid), segments.rows)
        if self.last:
            # -1 wraps around to the position after the last row, which is in no segment.
            positions = places[np.searchsorted(places, segments.ends) - 1]
        else:
            positions = places[np.searchsorted(places, segments.starts)]
        outside = (positions < segments.starts) | (positions >= segments.ends)
        return [values.take(pa.array(positions, mask=outside))]

    def merge(self, left: Buffers, right: Buffers) -> Buffers:
        winner, other = (right, left) if self.last else (left, right)
        has_value = to_bools(winner[-1].is_valid())
        if has_value.all():
            return winner
        places = np.arange(len(has_value))
        return take_interleaved(winner, other, np.where(has_value, places, places + len(has_value)))

    def finish(self, buffers: Buffers) -> pa.Array:
        return buffers[0]


# -- inside --------------------------------------------------------------------------------------------------


def _to_doubles(values: pa.Array) -> NumberArray:
    """Return values as doubles, with 0.0 for NULL."""
    if pa.types.is_decimal(values.type):
        values = values.cast(pa.float64())
    doubles: NumberArray = to_numbers(values, 0).astype(np.float64, copy=False)
    return doubles


def _find_first_valid(valid: BoolArray | None, segments: Segments) -> IndexArray:
    """Return the position of the first valid value of each segment; any row if the segment has no valid value."""
    if valid is None:
        return segments.starts
    places = np.append(np.flatnonzero(valid), segments.rows - 1)
    first_places: IndexArray = places[np.searchsorted(places[:-1], segments.starts)]
    return first_places


def _find_any_valid(valid: BoolArray | None, segments: Segments) -> BoolArray | None:
    """Return a mask of the segments with a valid value; None if all have one."""
    return None if valid is None else segments.count_valid(valid) > 0


def _find_either_valid(left: pa.Array, right: pa.Array) -> BoolArray | None:
    """Return a mask of the pairs with at least one value that is not NULL; None if all pairs have one."""
    a, b = find_valid(left), find_valid(right)
    return None if a is None or b is None else a | b


def _sum_integers(values: IndexArray, segments: Segments) -> IndexArray:
    """Return the sums of segments; raise if one exceeds 64 bits."""
    if segments.single:
        return values
    largest = max(-int(values.min()), int(values.max()), 0) if len(values) else 0
    if largest * int(segments.sizes.max(initial=0)) < 2**63:
        return segments.reduce(np.add, values)
    high, low = _sum_in_halves(values, segments)
    overflows = (high > 2**31 - 1) | (high < -(2**31))
    if overflows.any():
        raise OverflowAtError(int(np.argmax(overflows)), pa.int64())
    return (high << 32) | low


def _sum_in_halves(values: IndexArray, segments: Segments) -> tuple[IndexArray, IndexArray]:
    """Return the sums of segments as multiples of 2**32 and remainders, neither of which can exceed 64 bits."""
    high = segments.reduce(np.add, values >> 32)
    low = segments.reduce(np.add, values & _HALF)
    return high + (low >> 32), low & _HALF


def _sum_short_decimals(values: pa.Array, segments: Segments, data_type: pa.DataType) -> pa.Array:
    """Return the sums of decimals whose values fit into the lower 64 of Arrow's 128 bits."""
    words = np.frombuffer(values.buffers()[1] or b"", dtype="<i8")[2 * values.offset :][: 2 * len(values) : 2]
    valid = find_valid(values)
    # The bytes of a NULL can be anything.
    high, low = _sum_in_halves(words if valid is None else np.where(valid, words, 0), segments)
    sums = np.empty((len(segments), 2), dtype="<i8")
    sums[:, 0] = (high << 32) | low
    sums[:, 1] = high >> 32
    any_valid = _find_any_valid(valid, segments)
    bitmap = None if any_valid is None else pa.array(any_valid).buffers()[1]
    return pa.Array.from_buffers(data_type, len(segments), [bitmap, pa.py_buffer(sums)])


def _fill_with_zeros(column: pa.Array) -> pa.Array:
    return column.fill_null(pa.scalar(Decimal(0), column.type)) if column.null_count else column


def _narrow(values: Any, data_type: pa.DataType) -> pa.Array:
    """Return decimals as a narrower type; raise for the first one that does not fit."""
    column = combine_chunks(values)
    try:
        return column.cast(data_type)
    except pa.ArrowInvalid:
        bound = pa.scalar(Decimal(10) ** (data_type.precision - data_type.scale), column.type)
        overflows = pc.fill_null(pc.greater_equal(pc.abs(column), bound), False)
        raise OverflowAtError(max(0, pc.index(overflows, True).as_py()), data_type) from None
