"""Whether two tables have the same rows, in whatever order: Spark counts them, and adds up a hash of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import Observation
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType, MapType, StringType, StructType

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["TableSum", "observed", "table_sum"]


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
    """Sum up a table of state: the last two columns are the timeout, and whether there is a state."""
    return _sum_of(table.agg(*_sums(table)).collect()[0].asDict())


def observed(table: DataFrame) -> tuple[DataFrame, Callable[[], TableSum]]:
    """The same table, and what gives its sum once it was used: no second pass goes over it.

    Spark may count a task's rows twice that it ran twice. So a sum that is what it should be says that all is well, and
    another one says nothing.
    """
    observation = Observation()
    return table.observe(observation, *_sums(table)), lambda: _sum_of(observation.get)


def _sums(table: DataFrame) -> list[Column]:
    timeout, defined = table.columns[-2:]
    # A hash passes over NULL, so that each column's is told beside it.
    values = [
        part
        for field in table.schema.fields
        for part in (_comparable(F.col(field.name), field.dataType), F.col(field.name).isNull())
    ]
    hashed = F.xxhash64(*values).cast("decimal(38,0)")
    return [
        F.count(F.lit(1)).alias("rows"),
        F.count(timeout).alias("timeouts"),
        F.count(F.when(F.col(defined), 1)).alias("states"),
        F.coalesce(F.sum(hashed), F.lit(0)).alias("checksum"),
    ]


def _sum_of(found: Mapping[str, Any]) -> TableSum:
    return TableSum(*(int(found[name]) for name in ("rows", "timeouts", "states", "checksum")))


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
