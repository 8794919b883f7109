"""Aggregate functions: rows become buffers, buffers are merged, and become results. With Spark's semantics.

A buffer is one or more columns. Where all of them are NULL there is nothing yet, so that a key without state, and a
column that is new in the state, need no case of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.columns import flat
from arrow_schemas.equality import BoolArray, IndexArray
from spark_state_ext.operators.arrays import (
    NumberArray,
    Segments,
    bools,
    integers,
    interleaved,
    nullable,
    numbers,
    valid_of,
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
    "OverflowAt",
    "Pick",
    "Variance",
]

Buffers = list[pa.Array]
# Decimals of so many digits fit into 64 bits.
_WORD_DIGITS = 18
_HALF = 0xFFFFFFFF


class OverflowAt(Exception):  # noqa: N818  # made a StateValueError by whoever knows the key
    """A sum or a mean is beyond its type."""

    def __init__(self, position: int, data_type: pa.DataType) -> None:
        super().__init__(position, data_type)
        self.position = position
        self.data_type = data_type


class Kernel(Protocol):
    """One aggregate function of one column."""

    @property
    def buffers(self) -> Sequence[tuple[str, pa.DataType]]:
        """Name and type of each column of the buffer; the name of an only one is empty."""

    @property
    def result(self) -> pa.DataType:
        """Type of the result."""

    def reduce(self, values: pa.Array | None, segments: Segments) -> Buffers:
        """Buffers of segments of adjacent rows; `values` is None for a function of no column."""

    def merge(self, left: Buffers, right: Buffers) -> Buffers:
        """Pair by pair, buffers of rows on the left and, behind them, on the right."""

    def finish(self, buffers: Buffers) -> pa.Array:
        """Results."""


@dataclass(frozen=True)
class Count:
    """``count(*)``, or ``count(column)``, which leaves out NULLs."""

    buffers = (("", pa.int64()),)
    result = pa.int64()

    def reduce(self, values: pa.Array | None, segments: Segments) -> Buffers:
        return [pa.array(segments.counts(None if values is None else valid_of(values)))]

    def merge(self, left: Buffers, right: Buffers) -> Buffers:
        return [pa.array(numbers(left[0]) + numbers(right[0]))]

    def finish(self, buffers: Buffers) -> pa.Array:
        return buffers[0].fill_null(0)


@dataclass(frozen=True)
class IntegerSum:
    """``sum`` of integers: a long, and an error beyond."""

    buffers = (("", pa.int64()),)
    result = pa.int64()

    def reduce(self, values: pa.Array | None, segments: Segments) -> Buffers:
        assert values is not None
        valid = valid_of(values)
        found = _integer_sums(numbers(values).astype(np.int64, copy=False), segments)
        return [nullable(found, _any(valid, segments))]

    def merge(self, left: Buffers, right: Buffers) -> Buffers:
        a, b = numbers(left[0]), numbers(right[0])
        total = a + b
        # Both have one sign, and the sum the other.
        over = ((a ^ total) & (b ^ total)) < 0
        if over.any():
            raise OverflowAt(int(np.argmax(over)), pa.int64())
        return [nullable(total, _either(left[0], right[0]))]

    def finish(self, buffers: Buffers) -> pa.Array:
        return buffers[0]


@dataclass(frozen=True)
class FloatSum:
    """``sum`` of floats: a double."""

    buffers = (("", pa.float64()),)
    result = pa.float64()

    def reduce(self, values: pa.Array | None, segments: Segments) -> Buffers:
        assert values is not None
        valid = valid_of(values)
        return [nullable(segments.reduced(np.add, _doubles(values)), _any(valid, segments))]

    def merge(self, left: Buffers, right: Buffers) -> Buffers:
        return [nullable(numbers(left[0], 0.0) + numbers(right[0], 0.0), _either(left[0], right[0]))]

    def finish(self, buffers: Buffers) -> pa.Array:
        return buffers[0]


@dataclass(frozen=True)
class DecimalSum:
    """``sum`` of ``decimal(precision, scale)``: ten more digits, and an error beyond."""

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
            return [_short_decimal_sums(values, segments, self.result)]
        # Twice as wide: older releases of Arrow do not notice sums beyond 38 digits.
        return [_narrowed(segments.grouped(values.cast(self._wide), "sum"), self.result)]

    def merge(self, left: Buffers, right: Buffers) -> Buffers:
        a, b = _zeros_for_null(left[0]), _zeros_for_null(right[0])
        if self.result.precision == 38:
            a, b = a.cast(self._wide), b.cast(self._wide)
        total = pc.add(a, b)
        valid = _either(left[0], right[0])
        if valid is not None:
            total = pc.if_else(pa.array(valid), total, pa.scalar(None, total.type))
        return [_narrowed(total, self.result)]

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
        found = segments.reduced(np.add, _doubles(values))
        return [pa.array(found), pa.array(segments.counts(valid_of(values)))]

    def merge(self, left: Buffers, right: Buffers) -> Buffers:
        return [
            pa.array(numbers(left[0], 0.0) + numbers(right[0], 0.0)),
            pa.array(numbers(left[1]) + numbers(right[1])),
        ]

    def finish(self, buffers: Buffers) -> pa.Array:
        count = numbers(buffers[1])
        return nullable(numbers(buffers[0], 0.0) / np.maximum(count, 1), count > 0)


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
        return [*self._sum.reduce(values, segments), pa.array(segments.counts(valid_of(values)))]

    def merge(self, left: Buffers, right: Buffers) -> Buffers:
        return [*self._sum.merge(left[:1], right[:1]), pa.array(numbers(left[1]) + numbers(right[1]))]

    def finish(self, buffers: Buffers) -> pa.Array:
        # A quotient has 20 digits more than its dividend, cut off. That leaves what is half, and what is above, as it
        # is.
        dividend = buffers[0].cast(pa.decimal256(38, self.scale))
        divisor = pa.array(np.maximum(numbers(buffers[1]), 1)).cast(pa.decimal256(19, 0))
        quotient = pc.divide(dividend, divisor)
        rounded = pc.round(quotient, self.result.scale, "half_towards_infinity")
        return _narrowed(rounded, self.result)

    @property
    def _sum(self) -> DecimalSum:
        return DecimalSum(self.precision, self.scale)


@dataclass(frozen=True)
class Variance:
    """``var_samp``: of the sample, NULL for fewer than two values.

    Kept as number, mean and sum of squared differences from it, and merged as Chan, Golub and LeVeque do: large means
    with small differences lose nothing. It is infinite where the squares are beyond a double, and NaN where a value is
    NaN or infinite, however the rows come in batches.
    """

    buffers = (("count", pa.int64()), ("mean", pa.float64()), ("squares", pa.float64()))
    result = pa.float64()

    def reduce(self, values: pa.Array | None, segments: Segments) -> Buffers:
        assert values is not None
        valid = valid_of(values)
        count = segments.counts(valid)
        doubles = _doubles(values)
        first = np.where(count > 0, doubles[_first_places(valid, segments)], 0.0)
        # Shares of a difference: sums of values, or of differences, may be beyond a double where the mean is not.
        shares = (doubles - segments.spread(first)) / segments.spread(np.maximum(count, 1))
        if valid is not None:
            shares[~valid] = 0.0
        mean = first + segments.reduced(np.add, shares)
        off = doubles - segments.spread(mean)
        squares = off * off
        if valid is not None:
            squares[~valid] = 0.0
        return [pa.array(count), pa.array(mean), pa.array(segments.reduced(np.add, squares))]

    def merge(self, left: Buffers, right: Buffers) -> Buffers:
        n, m = numbers(left[0]), numbers(right[0])
        mean, other = numbers(left[1], 0.0), numbers(right[1], 0.0)
        count = n + m
        delta = other - mean
        step = delta / np.maximum(count, 1)
        # Where one side has nothing, the other is taken as it is: delta may be infinite.
        both = (n > 0) & (m > 0)
        merged = np.where(both, mean + step * m, np.where(n > 0, mean, other))
        squares = numbers(left[2], 0.0) + numbers(right[2], 0.0)
        # Squares of finite values only are infinite, and stay so: their mean may be none, and delta NaN.
        squares = np.where(both & ~np.isinf(squares), squares + delta * step * n * m, squares)
        return [pa.array(count), pa.array(merged), pa.array(squares)]

    def finish(self, buffers: Buffers) -> pa.Array:
        count = numbers(buffers[0])
        return nullable(numbers(buffers[2], 0.0) / np.maximum(count - 1, 1), count > 1)


@dataclass(frozen=True)
class Extreme:
    """``min`` or ``max`` of any type that is not nested. NaN is larger than any number; -0.0 is 0.0."""

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
            return [values if segments.single else segments.grouped(values, "max" if self.largest else "min")]
        found = segments.reduced(self._function, self._filled(values))
        return [self._typed(found, _any(valid_of(values), segments))]

    def merge(self, left: Buffers, right: Buffers) -> Buffers:
        if not self._numeric:
            function = pc.max_element_wise if self.largest else pc.min_element_wise
            return [function(left[0], right[0], skip_nulls=True)]
        found = self._function(self._filled(left[0]), self._filled(right[0]))
        return [self._typed(found, _either(left[0], right[0]))]

    def finish(self, buffers: Buffers) -> pa.Array:
        return buffers[0]

    @property
    def _numeric(self) -> bool:
        types, kind = pa.types, self.data_type
        plain = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
        return bool(plain or types.is_date32(kind) or types.is_timestamp(kind))

    @property
    def _function(self) -> np.ufunc:
        # np.maximum gives NaN where there is one, np.fmin where there is nothing else.
        return np.maximum if self.largest else np.fmin

    def _filled(self, values: pa.Array) -> NumberArray:
        """In NumPy; what changes nothing in the place of NULL."""
        plain = integers(values)
        if pa.types.is_floating(plain.type):
            found: NumberArray = numbers(plain, float("-inf" if self.largest else "nan")) + 0.0
            return found.astype(plain.type.to_pandas_dtype(), copy=False)
        bounds = np.iinfo(plain.type.to_pandas_dtype())
        return numbers(plain, int(bounds.min if self.largest else bounds.max))

    def _typed(self, values: NumberArray, valid: BoolArray | None) -> pa.Array:
        found = nullable(values, valid)
        if pa.types.is_boolean(self.data_type):
            return found.cast(self.data_type)
        return found if found.type == self.data_type else found.view(self.data_type)


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
        at = segments.ends - 1 if self.last else segments.starts
        valid = valid_of(values) if self.ignore_nulls else None
        if valid is None:
            picked = values.take(pa.array(at))
            return [picked] if self.ignore_nulls else [picked, pa.array(np.ones(len(segments), dtype=np.bool_))]
        places = np.append(np.flatnonzero(valid), segments.rows)
        if self.last:
            # -1 wraps to one behind the last row, which is in no segment.
            found = places[np.searchsorted(places, segments.ends) - 1]
        else:
            found = places[np.searchsorted(places, segments.starts)]
        outside = (found < segments.starts) | (found >= segments.ends)
        return [values.take(pa.array(found, mask=outside))]

    def merge(self, left: Buffers, right: Buffers) -> Buffers:
        winner, other = (right, left) if self.last else (left, right)
        mine = bools(winner[-1].is_valid())
        if mine.all():
            return winner
        places = np.arange(len(mine))
        return interleaved(winner, other, np.where(mine, places, places + len(mine)))

    def finish(self, buffers: Buffers) -> pa.Array:
        return buffers[0]


# -- inside --------------------------------------------------------------------------------------------------


def _doubles(values: pa.Array) -> NumberArray:
    """As doubles, 0.0 for NULL."""
    if pa.types.is_decimal(values.type):
        values = values.cast(pa.float64())
    found: NumberArray = numbers(values, 0).astype(np.float64, copy=False)
    return found


def _first_places(valid: BoolArray | None, segments: Segments) -> IndexArray:
    """Where the first valid value of each segment is; of one without any, some row."""
    if valid is None:
        return segments.starts
    places = np.append(np.flatnonzero(valid), segments.rows - 1)
    found: IndexArray = places[np.searchsorted(places[:-1], segments.starts)]
    return found


def _any(valid: BoolArray | None, segments: Segments) -> BoolArray | None:
    """Which segments have a valid value; None for all."""
    return None if valid is None else segments.counts(valid) > 0


def _either(left: pa.Array, right: pa.Array) -> BoolArray | None:
    """Where one of two is not NULL; None for everywhere."""
    a, b = valid_of(left), valid_of(right)
    return None if a is None or b is None else a | b


def _integer_sums(values: IndexArray, segments: Segments) -> IndexArray:
    """Sums of segments; raises where one is beyond 64 bits."""
    if segments.single:
        return values
    largest = max(-int(values.min()), int(values.max()), 0) if len(values) else 0
    if largest * int(segments.sizes.max(initial=0)) < 2**63:
        return segments.reduced(np.add, values)
    high, low = _sums_in_halves(values, segments)
    over = (high > 2**31 - 1) | (high < -(2**31))
    if over.any():
        raise OverflowAt(int(np.argmax(over)), pa.int64())
    return (high << 32) | low


def _sums_in_halves(values: IndexArray, segments: Segments) -> tuple[IndexArray, IndexArray]:
    """Sums of segments as multiples of 2**32, and the rest; these are never beyond 64 bits."""
    high = segments.reduced(np.add, values >> 32)
    low = segments.reduced(np.add, values & _HALF)
    return high + (low >> 32), low & _HALF


def _short_decimal_sums(values: pa.Array, segments: Segments, data_type: pa.DataType) -> pa.Array:
    """Sums of decimals that are 64-bit integers in Arrow's 128 bits."""
    words = np.frombuffer(values.buffers()[1] or b"", dtype="<i8")[2 * values.offset :][: 2 * len(values) : 2]
    valid = valid_of(values)
    # What is under NULL can be anything.
    high, low = _sums_in_halves(words if valid is None else np.where(valid, words, 0), segments)
    sums = np.empty((len(segments), 2), dtype="<i8")
    sums[:, 0] = (high << 32) | low
    sums[:, 1] = high >> 32
    known = _any(valid, segments)
    bitmap = None if known is None else pa.array(known).buffers()[1]
    return pa.Array.from_buffers(data_type, len(segments), [bitmap, pa.py_buffer(sums)])


def _zeros_for_null(column: pa.Array) -> pa.Array:
    return column.fill_null(pa.scalar(Decimal(0), column.type)) if column.null_count else column


def _narrowed(wide: Any, data_type: pa.DataType) -> pa.Array:
    """Decimals as a narrower type; raises for the first that does not fit."""
    column = flat(wide)
    try:
        return column.cast(data_type)
    except pa.ArrowInvalid:
        bound = pa.scalar(Decimal(10) ** (data_type.precision - data_type.scale), column.type)
        over = pc.fill_null(pc.greater_equal(pc.abs(column), bound), False)
        raise OverflowAt(max(0, pc.index(over, True).as_py()), data_type) from None
