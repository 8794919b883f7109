"""Whether two tables have the same rows, in whatever order: Spark counts them, and adds up a hash of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType, MapType, StringType, StructType

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["TableSum", "table_sum"]


@dataclass(frozen=True)
class TableSum:
    """What a table has.

    Parameters
    ----------
    rows, timeouts, states
        Rows, and how many of them have a timeout and a state.
    checksum
        The sum of all rows' hashes.
    """

    rows: int
    timeouts: int
    states: int
    checksum: int


def table_sum(table: DataFrame) -> TableSum:
    """Sum up a table of state: the last two columns are the timeout, and whether there is a state.

    Parameters
    ----------
    table
        The table, with columns of different names.
    """
    timeout, defined = table.columns[-2:]
    # A hash passes over NULL, so that each column's is told beside it.
    values = [
        part
        for field in table.schema.fields
        for part in (_comparable(F.col(field.name), field.dataType), F.col(field.name).isNull())
    ]
    hashed = F.xxhash64(*values).cast("decimal(38,0)")
    row = table.agg(
        F.count(F.lit(1)), F.count(timeout), F.count(F.when(F.col(defined), 1)), F.coalesce(F.sum(hashed), F.lit(0))
    ).collect()[0]
    return TableSum(int(row[0]), int(row[1]), int(row[2]), int(row[3]))


def _comparable(column: Column, kind: DataType) -> Column:
    """A column such that equal values hash alike, of a type that Spark hashes."""
    if isinstance(kind, MapType):
        entry = StructType().add("key", kind.keyType).add("value", kind.valueType)
        return F.transform(F.map_entries(column), lambda it: _comparable(it, entry))
    if isinstance(kind, ArrayType):
        return F.transform(column, lambda it: _comparable(it, kind.elementType))
    if isinstance(kind, StructType):
        parts = [
            part.alias(f"p{at}")
            for at, field in enumerate(kind.fields)
            for part in (
                _comparable(column.getField(field.name), field.dataType),
                column.getField(field.name).isNull().alias(f"n{at}"),
            )
        ]
        return F.when(column.isNotNull(), F.struct(*parts))
    if isinstance(kind, (FloatType, DoubleType)):
        zero = F.lit(0.0).cast(kind)
        return F.when(column == zero, zero).otherwise(column)
    # Another collation has other hashes, and is not kept.
    return column.cast("string") if isinstance(kind, StringType) else column
