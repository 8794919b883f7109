"""`Agg`: names of aggregate functions, and which of them a type has."""

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

__all__ = ["Agg", "Aggregate", "kernel_of"]

ColumnLike = Union[str, "Column"]


@dataclass(frozen=True)
class Aggregate:
    """An aggregate function and its column, made by `Agg`.

    Parameters
    ----------
    function
        Its name.
    column
        Name of a column or an expression; None for ``count()``.
    ignore_nulls
        For ``first`` and ``last``: whether NULLs are passed over.
    lg_k
        For ``approx_count_distinct``: size of the sketch.
    """

    function: str
    column: Any = None
    ignore_nulls: bool = False
    lg_k: int = 12


class Agg:
    """Aggregate functions, as Spark has them: ``Agg.sum("value")``.

    A column is a name or an expression. NULLs are left out by all but ``count()``, and by ``first`` and ``last`` where
    they are asked to. What no value gives is NULL, and 0 for counts.
    """

    @staticmethod
    def count(column: ColumnLike | None = None) -> Aggregate:
        """Number of rows, or of values that are not NULL: a long.

        Parameters
        ----------
        column
            Name of a column, or an expression: its values that are not NULL; None or ``"*"``: rows.

        Returns
        -------
        Aggregate
            For `aggregate` and `sessionize`.
        """
        return Aggregate("count", None if isinstance(column, str) and column == "*" else column)

    @staticmethod
    def sum(column: ColumnLike) -> Aggregate:
        """Sum: a long for integers, a double for floats, ten more digits for decimals.

        A sum beyond its type fails the query with `StateValueError`, as in Spark's ANSI mode.

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
        """Mean: a double; for decimals a decimal with four more digits, as Spark's ``avg``.

        Where a mean of decimals, or the sum that it is made of, is beyond its type, the query fails with
        `StateValueError`, as in Spark's ANSI mode. The mean of a ``decimal(38, 2)`` is a ``decimal(38, 6)``, which has
        four digits less before the point.

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
        """Variance of the sample, a double; NULL for fewer than two values, as Spark's ``var_samp``.

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
        """Least value, of the column's type. NaN is larger than any number.

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
        """Greatest value, of the column's type. NaN is larger than any number.

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
        """The value that came first: in the order of arrival at the bucket.

        Of sessions by event time within a batch; a session in the state counts by its start, as Spark has it.

        Parameters
        ----------
        column
            Name of a column, or an expression.
        ignore_nulls
            Whether values that are NULL are passed over.

        Returns
        -------
        Aggregate
            For `aggregate` and `sessionize`.
        """
        return Aggregate("first", column, ignore_nulls=ignore_nulls)

    @staticmethod
    def last(column: ColumnLike, ignore_nulls: bool = False) -> Aggregate:
        """The value that came last: in the order of arrival at the bucket.

        Of sessions by event time within a batch; a session in the state counts by its start, as Spark has it. So rows
        that come in a later batch are behind all of a session that began before them.

        Parameters
        ----------
        column
            Name of a column, or an expression.
        ignore_nulls
            Whether values that are NULL are passed over.

        Returns
        -------
        Aggregate
            For `aggregate` and `sessionize`.
        """
        return Aggregate("last", column, ignore_nulls=ignore_nulls)

    @staticmethod
    def approx_count_distinct(column: ColumnLike, lg_k: int = 12) -> Aggregate:
        """About how many different values there are, a long; needs the package ``datasketches`` on executors.

        Parameters
        ----------
        column
            Name of a column, or an expression, of a type that is not nested.
        lg_k
            Logarithm of the number of registers of the HLL sketch, 7 to 21. A key's sketch has up to ``2 ** lg_k``
            bytes and a relative standard error of about ``1.04 / sqrt(2 ** lg_k)``: 1.6 % for 12.

        Returns
        -------
        Aggregate
            For `aggregate` and `sessionize`.

        Raises
        ------
        UsageError
            When `lg_k` is none of these.
        """
        if isinstance(lg_k, bool) or not isinstance(lg_k, int) or not LG_K_MIN <= lg_k <= LG_K_MAX:
            raise UsageError(f"lg_k must be a whole number from {LG_K_MIN} to {LG_K_MAX}, not {lg_k!r}")
        return Aggregate("approx_count_distinct", column, lg_k=lg_k)


def kernel_of(aggregate: Aggregate, data_type: pa.DataType | None, name: str) -> Kernel:
    """What works the function out for a type.

    Parameters
    ----------
    aggregate
        The function.
    data_type
        Of its column; None for a function of no column.
    name
        Name of the output column, for the error.

    Raises
    ------
    UnsupportedTypeError
        When the type does not have the function.
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
