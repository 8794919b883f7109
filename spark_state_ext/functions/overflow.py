"""Whether Arrow's grouped sums, products and means are right: it wraps in silence where a result is beyond its type."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.columns import aggregated, flat
from arrow_schemas.equality import BoolArray, IndexArray

__all__ = ["first_overflow"]

_DIGITS = 38
_HALF = 0xFFFFFFFF
_PRODUCT, _SUMS = "product", frozenset({"sum", "mean"})


def first_overflow(column: pa.ChunkedArray, sizes: IndexArray, function: str, found: pa.ChunkedArray) -> int | None:
    """The first group for which a sum, product or mean of Arrow's is beyond its type."""
    kind, function = column.type, function.removeprefix("hash_")
    integer = bool(pa.types.is_signed_integer(kind))
    # Arrow means integers in doubles.
    wanted = function == _PRODUCT or (function in _SUMS if pa.types.is_decimal(kind) else function == "sum")
    if not wanted or not (integer or pa.types.is_decimal(kind)) or not len(sizes):
        return None
    largest, most = _largest(column), int(sizes.max())
    if function == _PRODUCT:
        # Of so few factors none is too large.
        if integer and most * np.log2(max(largest, 1)) < 62:
            return None
        over = _products_over(flat(column), sizes, flat(found))
    elif integer:
        if largest * most < 2**63:
            return None
        over = _integer_sums_over(flat(column), sizes)
    else:
        if largest * most < Decimal(10) ** (_DIGITS - kind.scale):
            return None
        over = _decimal_sums_over(flat(column), sizes)
    # Asked not to skip NULLs, Arrow gives NULL for a group with one.
    over &= found.is_valid().to_numpy()
    return int(np.argmax(over)) if over.any() else None


def _largest(column: pa.ChunkedArray) -> Any:
    """The largest absolute value, an `int` or a `Decimal`; 0 where there is none."""
    ends = pc.min_max(column).as_py()
    return max(-(ends["min"] or 0), ends["max"] or 0, 0)


def _starts(sizes: IndexArray) -> IndexArray:
    starts: IndexArray = np.append(0, np.cumsum(sizes)[:-1])
    return starts


def _integer_sums_over(column: pa.Array, sizes: IndexArray) -> BoolArray:
    """Summed in two halves, of which neither is ever beyond 64 bits."""
    values = pc.fill_null(column, 0).to_numpy(zero_copy_only=False).astype(np.int64)
    starts = _starts(sizes)
    high, low = np.add.reduceat(values >> 32, starts), np.add.reduceat(values & _HALF, starts)
    high += low >> 32
    over: BoolArray = (high > 2**31 - 1) | (high < -(2**31))
    return over


def _decimal_sums_over(column: pa.Array, sizes: IndexArray) -> BoolArray:
    """Summed twice as wide."""
    kind = pa.decimal256(76, column.type.scale)
    ids = pa.array(np.repeat(np.arange(len(sizes)), sizes))
    table = pa.table([ids, column.cast(kind)], names=["id", "value"])
    sums = flat(aggregated(table, "id", [("value", "sum")]).column("value_sum")).cast(kind)
    bound = pa.scalar(Decimal(10) ** (_DIGITS - kind.scale), kind)
    over: BoolArray = pc.fill_null(pc.greater_equal(pc.abs(sums), bound), False).to_numpy(zero_copy_only=False)
    return over


def _products_over(column: pa.Array, sizes: IndexArray, found: pa.Array) -> BoolArray:
    """Compared with the products of doubles, which are not exact, and never wrong by as much as what wraps."""
    factors, given = _doubles(pc.fill_null(column, 1)), _doubles(pc.fill_null(found, 0))
    starts = _starts(sizes)
    with np.errstate(over="ignore", invalid="ignore"):
        products = np.multiply.reduceat(factors, starts)
        zero = np.logical_or.reduceat(factors == 0, starts)
        # What wraps is wrong by multiples of 2 ** 64, or 2 ** 128.
        wrong_by = 2.0**62 if pa.types.is_integer(found.type) else float(10**_DIGITS) * 10.0**-found.type.scale
        over: BoolArray = ~zero & ~(np.abs(products - given) < wrong_by)
    return over


def _doubles(column: pa.Array) -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return values
