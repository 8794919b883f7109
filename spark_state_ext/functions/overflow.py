"""Detect overflow in Arrow's grouped sums, products and means: Arrow silently wraps a result beyond its type."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.columns import aggregate_groups, combine_chunks
from arrow_schemas.equality import BoolArray, IndexArray

__all__ = ["find_overflow"]

_DIGITS = 38
_HALF = 0xFFFFFFFF
_PRODUCT, _SUMS = "product", frozenset({"sum", "mean"})


def find_overflow(column: pa.ChunkedArray, sizes: IndexArray, function: str, results: pa.ChunkedArray) -> int | None:
    """Return the first group whose sum, product or mean is beyond its type; None if there is no such group."""
    kind, function = column.type, function.removeprefix("hash_")
    integer = bool(pa.types.is_signed_integer(kind))
    # Arrow computes means of integers in doubles.
    can_overflow = function == _PRODUCT or (function in _SUMS if pa.types.is_decimal(kind) else function == "sum")
    if not can_overflow or not (integer or pa.types.is_decimal(kind)) or not len(sizes):
        return None
    largest, largest_size = _largest_absolute(column), int(sizes.max())
    if function == _PRODUCT:
        # Too few factors to overflow.
        if integer and largest_size * np.log2(max(largest, 1)) < 62:
            return None
        over = _find_overflowing_products(combine_chunks(column), sizes, combine_chunks(results))
    elif integer:
        if largest * largest_size < 2**63:
            return None
        over = _find_overflowing_integer_sums(combine_chunks(column), sizes)
    else:
        if largest * largest_size < Decimal(10) ** (_DIGITS - kind.scale):
            return None
        over = _find_overflowing_decimal_sums(combine_chunks(column), sizes)
    # If Arrow was asked not to skip NULLs, a group with one has the result NULL.
    over &= results.is_valid().to_numpy()
    return int(np.argmax(over)) if over.any() else None


def _largest_absolute(column: pa.ChunkedArray) -> Any:
    """Return the largest absolute value, an `int` or a `Decimal`; 0 if there are no values."""
    ends = pc.min_max(column).as_py()
    return max(-(ends["min"] or 0), ends["max"] or 0, 0)


def _compute_starts(sizes: IndexArray) -> IndexArray:
    starts: IndexArray = np.append(0, np.cumsum(sizes)[:-1])
    return starts


def _find_overflowing_integer_sums(column: pa.Array, sizes: IndexArray) -> BoolArray:
    """Return which sums overflow, from sums of the upper and lower 32 bits, which stay within 64 bits."""
    values = pc.fill_null(column, 0).to_numpy(zero_copy_only=False).astype(np.int64)
    starts = _compute_starts(sizes)
    high, low = np.add.reduceat(values >> 32, starts), np.add.reduceat(values & _HALF, starts)
    high += low >> 32
    over: BoolArray = (high > 2**31 - 1) | (high < -(2**31))
    return over


def _find_overflowing_decimal_sums(column: pa.Array, sizes: IndexArray) -> BoolArray:
    """Return which sums overflow, from sums of twice the width."""
    kind = pa.decimal256(76, column.type.scale)
    ids = pa.array(np.repeat(np.arange(len(sizes)), sizes))
    table = pa.table([ids, column.cast(kind)], names=["id", "value"])
    sums = combine_chunks(aggregate_groups(table, "id", [("value", "sum")]).column("value_sum")).cast(kind)
    bound = pa.scalar(Decimal(10) ** (_DIGITS - kind.scale), kind)
    over: BoolArray = pc.fill_null(pc.greater_equal(pc.abs(sums), bound), False).to_numpy(zero_copy_only=False)
    return over


def _find_overflowing_products(column: pa.Array, sizes: IndexArray, results: pa.Array) -> BoolArray:
    """Return which products overflow: a wrapped product differs from one of doubles by more than rounding does."""
    factors, wrapped_products = _to_doubles(pc.fill_null(column, 1)), _to_doubles(pc.fill_null(results, 0))
    starts = _compute_starts(sizes)
    with np.errstate(over="ignore", invalid="ignore"):
        products = np.multiply.reduceat(factors, starts)
        zero = np.logical_or.reduceat(factors == 0, starts)
        # A wrapped product is off by multiples of 2 ** 64, or 2 ** 128.
        wrong_by = 2.0**62 if pa.types.is_integer(results.type) else float(10**_DIGITS) * 10.0**-results.type.scale
        over: BoolArray = ~zero & ~(np.abs(products - wrapped_products) < wrong_by)
    return over


def _to_doubles(column: pa.Array) -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return values
