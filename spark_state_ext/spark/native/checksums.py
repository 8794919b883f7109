"""Comparing the rows of two tables in any order: Spark counts the rows and adds up a hash of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import Observation
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType, MapType, StringType, StructType

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["TableSum", "observe_sum", "sum_table"]


@dataclass(frozen=True)
class TableSum:
    """Counts and checksum of a table of state.

    Parameters
    ----------
    rows, timeouts, states
        Number of rows, and how many of them have a timeout and a state.
    checksum
        The sum of all rows' hashes.
    """

    rows: int
    timeouts: int
    states: int
    checksum: int


def sum_table(table: DataFrame) -> TableSum:
    """Sum up a table of state whose last two columns are the timeout, and whether there is a state."""
    return _to_table_sum(table.agg(*_make_sums(table)).collect()[0].asDict())


def observe_sum(table: DataFrame) -> tuple[DataFrame, Callable[[], TableSum]]:
    """Return the same table, and a function that returns its sum after the table was used, without a second pass.

    If Spark runs a task twice it may count the task's rows twice. So a sum that is as expected proves that the table is
    right, but another sum does not prove that it is wrong.
    """
    observation = Observation()
    return table.observe(observation, *_make_sums(table)), lambda: _to_table_sum(observation.get)


def _make_sums(table: DataFrame) -> list[Column]:
    timeout, defined = table.columns[-2:]
    # A hash ignores NULL, so whether a column is NULL is hashed too.
    values = [
        part
        for field in table.schema.fields
        for part in (_make_comparable(F.col(field.name), field.dataType), F.col(field.name).isNull())
    ]
    hashed = F.xxhash64(*values).cast("decimal(38,0)")
    return [
        F.count(F.lit(1)).alias("rows"),
        F.count(timeout).alias("timeouts"),
        F.count(F.when(F.col(defined), 1)).alias("states"),
        F.coalesce(F.sum(hashed), F.lit(0)).alias("checksum"),
    ]


def _to_table_sum(row: Mapping[str, Any]) -> TableSum:
    return TableSum(*(int(row[name]) for name in ("rows", "timeouts", "states", "checksum")))


def _make_comparable(column: Column, data_type: DataType) -> Column:
    """Return a column of a type that Spark hashes, such that equal values have equal hashes."""
    if isinstance(data_type, MapType):
        entry = StructType().add("key", data_type.keyType).add("value", data_type.valueType)
        return F.transform(F.map_entries(column), lambda item: _make_comparable(item, entry))
    if isinstance(data_type, ArrayType):
        return F.transform(column, lambda item: _make_comparable(item, data_type.elementType))
    if isinstance(data_type, StructType):
        parts = [
            part.alias(f"p{position}")
            for position, field in enumerate(data_type.fields)
            for part in (
                _make_comparable(column.getField(field.name), field.dataType),
                column.getField(field.name).isNull().alias(f"n{position}"),
            )
        ]
        return F.when(column.isNotNull(), F.struct(*parts))
    if isinstance(data_type, (FloatType, DoubleType)):
        zero = F.lit(0.0).cast(data_type)
        return F.when(column == zero, zero).otherwise(column)
    # Strings of another collation would have other hashes; the collation is not kept.
    return column.cast("string") if isinstance(data_type, StringType) else column
