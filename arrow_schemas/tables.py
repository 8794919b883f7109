"""Tables that come from users' functions: taken in whatever form, and cast to the types that were declared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.errors import StateValueError

__all__ = ["as_table", "cast_column", "conformed"]


def as_table(given: Any, where: str) -> pa.Table:
    """A table of what PyArrow, polars, DuckDB and others call one.

    Parameters
    ----------
    given
        `pyarrow.Table` or `RecordBatch`, a mapping of names to columns, or anything with Arrow's C stream.
    where
        Who gave it, for the error.

    Raises
    ------
    StateValueError
        When it is none of these.
    """
    if isinstance(given, pa.Table):
        return given
    if isinstance(given, pa.RecordBatch):
        return pa.Table.from_batches([given])
    try:
        if isinstance(given, Mapping):
            return pa.table(dict(given))
        if hasattr(given, "__arrow_c_stream__"):
            return pa.table(given)
        if hasattr(given, "to_arrow"):
            found = given.to_arrow()
            return found if isinstance(found, pa.Table) else pa.Table.from_batches(found)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise StateValueError(f"{where} was given something that is no table: {error}") from error
    raise StateValueError(
        f"{where} takes a pyarrow Table or RecordBatch, a mapping of columns, or anything with __arrow_c_stream__ "
        f"(polars, DuckDB), not {type(given).__name__}"
    )


def cast_column(column: Any, field: pa.Field, role: str) -> Any:
    """A column as the type that was declared for it.

    Raises
    ------
    StateValueError
        When a value does not fit, or is NULL where none may be.
    """
    if column.type != field.type:
        try:
            column = column.cast(field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise StateValueError(
                f"{role} {field.name!r} of type {field.type} cannot hold {column.type}: {error}"
            ) from error
    if not field.nullable and column.null_count:
        at = pc.index(pc.is_null(column), True).as_py()
        raise StateValueError(f"{role} {field.name!r} is declared without NULLs and row {at} is NULL")
    return column


def conformed(given: Any, fields: Sequence[pa.Field], where: str) -> pa.Table:
    """A table with exactly these columns, found by name, in this order and of these types.

    Raises
    ------
    StateValueError
        When columns are missing or too many, or values do not fit.
    """
    table = as_table(given, where)
    names = [field.name for field in fields]
    if sorted(table.column_names) != sorted(names):
        raise StateValueError(f"{where} gave the columns {', '.join(table.column_names)}; expected {', '.join(names)}")
    if table.column_names != names and len(set(names)) == len(names):
        table = table.select(names)
    columns = [cast_column(column, field, "output column") for column, field in zip(table.columns, fields, strict=True)]
    return pa.table(columns, schema=pa.schema(fields))
