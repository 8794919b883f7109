"""`Agg`: the aggregate functions, and the types that they support."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

import pyarrow as pa

from spark_state_ext.errors import UnsupportedTypeError, UsageError
from spark_state_ext.operators.functions import (
    Count,
    DecimalMean,
    DecimalSum,
    Extreme,
    FloatSum,
    IntegerSum,
    Kernel,
    Mean,
    Pick,
    Variance,
)
from spark_state_ext.operators.sketches import LG_K_MAX, LG_K_MIN, DistinctSketch

if TYPE_CHECKING:
    from pyspark.sql import Column

__all__ = ["Agg", "Aggregate", "find_kernel"]

ColumnLike = Union[str, "Column"]


@dataclass(frozen=True)
class Aggregate:
    """An aggregate function and its column, made by `Agg`.

    Parameters
    ----------
    function
        Name of the function.
    column
        Name of a column or an expression; None for ``count()``.
    ignore_nulls
        For ``first`` and ``last``: True to skip NULLs.
    lg_k
        For ``approx_count_distinct``: size of the sketch.
    """

    function: str
    column: Any = None
    ignore_nulls: bool = False
    lg_k: int = 12


class Agg:
    """Aggregate functions with Spark's semantics, such as ``Agg.sum("value")``.

    A column is a name or an expression. All functions skip NULLs, except ``count()``, which counts rows, and ``first``
    and ``last`` without ``ignore_nulls``. Without any value, the result is NULL, or 0 for counts.
    """

    @staticmethod
    def count(column: ColumnLike | None = None) -> Aggregate:
        """Count rows, or values that are not NULL: a long.

        Parameters
        ----------
        column
            Name of a column, or an expression, to count its values that are not NULL; None or ``"*"`` to count rows.

        Returns
        -------
        Aggregate
            For `aggregate` and `sessionize`.
        """
        return Aggregate("count", None if isinstance(column, str) and column == "*" else column)

    @staticmethod
    def sum(column: ColumnLike) -> Aggregate:
        """Return the sum: a long for integers, a double for floats, a decimal with ten more digits for decimals.

        A sum that exceeds its type fails the query with `StateValueError`, as in Spark's ANSI mode.

        Parameters
        ----------
        column
            Name of a column, or an expression: integers, floats or decimals.

        Returns
        -------
        Aggregate
            For `aggregate` and `sessionize`.
        """
        return Aggregate("sum", column)

    @staticmethod
    def mean(column: ColumnLike) -> Aggregate:
        """Return the mean: a double; for decimals a decimal with four more digits, as Spark's ``avg``.

        If a mean of decimals or its sum exceeds its type, the query fails with `StateValueError`, as in Spark's ANSI
        mode. The mean of a ``decimal(38, 2)`` is a ``decimal(38, 6)``, which has four digits fewer before the point.

        Parameters
        ----------
        column
            Name of a column, or an expression: integers, floats or decimals.

        Returns
        -------
        Aggregate
            For `aggregate` and `sessionize`.
        """
        return Aggregate("mean", column)

    @staticmethod
    def variance(column: ColumnLike) -> Aggregate:
        """Return the sample variance, a double; NULL for fewer than two values, as Spark's ``var_samp``.

        Parameters
        ----------
        column
            Name of a column, or an expression: integers, floats or decimals.

        Returns
        -------
        Aggregate
            For `aggregate` and `sessionize`.
        """
        return Aggregate("variance", column)

    @staticmethod
    def min(column: ColumnLike) -> Aggregate:
        """Return the least value, of the column's type. NaN is larger than any number.

        Parameters
        ----------
        column
            Name of a column, or an expression, of a type that is not nested.

        Returns
        -------
        Aggregate
            For `aggregate` and `sessionize`.
        """
        return Aggregate("min", column)

    @staticmethod
    def max(column: ColumnLike) -> Aggregate:
        """Return the greatest value, of the column's type. NaN is larger than any number.

        Parameters
        ----------
        column
            Name of a column, or an expression, of a type that is not nested.

        Returns
        -------
        Aggregate
            For `aggregate` and `sessionize`.
        """
        return Aggregate("max", column)

    @staticmethod
    def first(column: ColumnLike, ignore_nulls: bool = False) -> Aggregate:
        """Return the first value, in order of arrival at the bucket.

        For sessions, the order within a batch is by event time, and a session in the state counts with its start, as in
        Spark.

        Parameters
        ----------
        column
            Name of a column, or an expression.
        ignore_nulls
            True to skip NULLs.

        Returns
        -------
        Aggregate
            For `aggregate` and `sessionize`.
        """
        return Aggregate("first", column, ignore_nulls=ignore_nulls)

    @staticmethod
    def last(column: ColumnLike, ignore_nulls: bool = False) -> Aggregate:
        """Return the last value, in order of arrival at the bucket.

        For sessions, the order within a batch is by event time, and a session in the state counts with its start, as in
        Spark. So rows of a later batch come after a whole session that began before them.

        Parameters
        ----------
        column
            Name of a column, or an expression.
        ignore_nulls
            True to skip NULLs.

        Returns
        -------
        Aggregate
            For `aggregate` and `sessionize`.
        """
        return Aggregate("last", column, ignore_nulls=ignore_nulls)

    @staticmethod
    def approx_count_distinct(column: ColumnLike, lg_k: int = 12) -> Aggregate:
        """Return the approximate number of distinct values, a long; needs the package ``datasketches`` on executors.

        Parameters
        ----------
        column
            Name of a column, or an expression, of a type that is not nested.
        lg_k
            Binary logarithm of the number of registers of the HLL sketch, 7 to 21. A key's sketch has up to
            ``2 ** lg_k`` bytes and a relative standard error of about ``1.04 / sqrt(2 ** lg_k)``: 1.6 % for 12.

        Returns
        -------
        Aggregate
            For `aggregate` and `sessionize`.

        Raises
        ------
        UsageError
            If `lg_k` is not an integer in this range.
        """
        if isinstance(lg_k, bool) or not isinstance(lg_k, int) or not LG_K_MIN <= lg_k <= LG_K_MAX:
            raise UsageError(f"lg_k must be a whole number from {LG_K_MIN} to {LG_K_MAX}, not {lg_k!r}")
        return Aggregate("approx_count_distinct", column, lg_k=lg_k)


def find_kernel(aggregate: Aggregate, data_type: pa.DataType | None, name: str) -> Kernel:
    """Return the kernel that computes an aggregate function for a type.

    Parameters
    ----------
    aggregate
        The aggregate function.
    data_type
        Type of its column; None for a function without a column.
    name
        Name of the output column, for the error.

    Raises
    ------
    UnsupportedTypeError
        If the function does not support the type.
    """
    function = aggregate.function
    if function == "count":
        return Count()
    if data_type is None:
        raise UsageError(f"{function} of the aggregate {name!r} needs a column")
    types = pa.types
    if function in ("first", "last"):
        return Pick(data_type, function == "last", aggregate.ignore_nulls)
    nested = types.is_nested(data_type)
    if function in ("min", "max") and not nested:
        return Extreme(data_type, function == "max")
    if function == "approx_count_distinct" and not nested:
        return DistinctSketch(aggregate.lg_k)
    decimal, floating = types.is_decimal(data_type), types.is_floating(data_type)
    if decimal or floating or types.is_integer(data_type):
        if function == "sum":
            if decimal:
                return DecimalSum(data_type.precision, data_type.scale)
            return FloatSum() if floating else IntegerSum()
        if function == "mean":
            return DecimalMean(data_type.precision, data_type.scale) if decimal else Mean()
        if function == "variance":
            return Variance()
    raise UnsupportedTypeError(f"the aggregate {name!r} is a {function} of {data_type}, which is not supported")
