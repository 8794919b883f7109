"""Schemas in the forms that tests use, and tables with these schemas."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from arrow_schemas.spark_types import flat_name, state_fields
from spark_state_ext.errors import StateValueError, UnsupportedTypeError, UsageError
from spark_state_ext.functions.conversion_errors import explain_conversion_error
from spark_state_ext.functions.missing_values import is_missing
from spark_state_ext.functions.tables import as_table, cast_column, is_table, refuse_nulls
from spark_state_ext.testing.ddl import ddl_struct

__all__ = ["Rows", "struct_json"]


def struct_json(schema: Any, what: str) -> str:
    """Return a schema in any form as `StructType.json` writes it."""
    if isinstance(schema, str):
        return json.dumps(ddl_struct(schema, what))
    if isinstance(schema, pa.Schema):
        return json.dumps({"type": "struct", "fields": [_field_json(field, what) for field in schema]})
    if callable(getattr(schema, "json", None)) and hasattr(schema, "fields"):
        return str(schema.json())
    raise UsageError(
        f"{what} must be a StructType, Spark's DDL such as 'n bigint', or a pyarrow.Schema, not {schema!r}"
    )


def _field_json(field: pa.Field, what: str) -> dict[str, Any]:
    return {
        "name": field.name,
        "type": _type_json(field.type, field.name, what),
        "nullable": field.nullable,
        "metadata": {},
    }


def _type_json(kind: pa.DataType, path: str, what: str) -> Any:
    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    name = flat_name(kind)
    if name is not None:
        return name
    # Some releases of PyArrow do not have these types.
    if str(kind) in ("string_view", "binary_view"):
        return str(kind).removesuffix("_view")
    if types.is_decimal128(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if types.is_list(kind) or types.is_large_list(kind):
        element = _type_json(kind.value_type, f"{path}.element", what)
        return {"type": "array", "elementType": element, "containsNull": kind.value_field.nullable}
    if types.is_struct(kind):
        return {"type": "struct", "fields": [_field_json(child, what) for child in kind]}
    if types.is_map(kind):
        key = _type_json(kind.key_type, f"{path}.key", what)
        value = _type_json(kind.item_type, f"{path}.value", what)
        return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": kind.item_field.nullable}
    raise UnsupportedTypeError(
        f"{what}: column {path!r} is {kind}, which Spark does not have; give the schema, or cast the column"
    )


class Rows:
    """Batches of input, as tables of one schema."""

    def __init__(self, schema: str | None) -> None:
        self.json = schema

    def table(self, batch: Any) -> pa.Table | None:
        """Return a batch's rows; None if it has no rows."""
        if batch is None:
            return None
        table = as_table(batch, "batches has") if is_table(batch) else self._read_rows(batch)
        if table is None or not table.num_columns:
            return None
        if self.json is None:
            self.json = struct_json(table.schema, "the schema of the first batch")
        return self._conform(table) if table.num_rows else None

    def tables(self, batches: Iterable[Any]) -> Iterator[pa.Table | None]:
        """Return the rows of all batches. Batches up to the first with columns are read now, the others one by one."""
        source = iter(batches)
        first: list[pa.Table | None] = []
        while self.json is None and (batch := next(source, self)) is not self:
            first.append(self.table(batch))
        return itertools.chain(first, map(self.table, source))

    def get_schema(self) -> str:
        """Return the schema; raise a UsageError if no batch has shown it."""
        if self.json is None:
            raise UsageError("no batch has columns, so the input's schema is unknown: give input_schema")
        return self.json

    def _fields(self) -> tuple[pa.Field, ...]:
        return state_fields(self.get_schema(), "input")

    def _conform(self, table: pa.Table) -> pa.Table:
        fields = self._fields()
        names = [field.name for field in fields]
        if sorted(table.column_names) != sorted(names):
            raise StateValueError(
                f"batches has a table with the columns {', '.join(table.column_names)}; the input has "
                f"{', '.join(names)}"
            )
        ordered = table if table.column_names == names else table.select(names)
        role = "the input's column"
        columns = [cast_column(column, field, role) for column, field in zip(ordered.columns, fields, strict=True)]
        for column, field in zip(columns, fields, strict=True):
            refuse_nulls(column, field, role)
        # As Spark's rows arrive: without the knowledge of which columns have no NULLs.
        return pa.table(columns, schema=pa.schema([field.with_nullable(True) for field in fields]))

    def _read_rows(self, batch: Any) -> pa.Table | None:
        if isinstance(batch, (str, bytes)) or not isinstance(batch, Iterable):
            raise StateValueError(
                f"batches has {batch!r} ({type(batch).__name__}): a batch is a table, a list of dicts, or None"
            )
        rows: Sequence[Any] = list(batch)
        wrong_row = next((row for row in rows if not isinstance(row, Mapping)), None)
        if wrong_row is not None:
            raise StateValueError(
                f"batches has a list with {wrong_row!r} ({type(wrong_row).__name__}): a batch is a table, a list of "
                "dicts, or None"
            )
        if not rows:
            return None
        schema = None if self.json is None else pa.schema(self._fields())
        self._refuse_other_columns(rows, schema)
        try:
            return pa.Table.from_pylist([_replace_missing(row) for row in rows], schema)
        except (pa.ArrowException, AttributeError, TypeError, ValueError, OverflowError) as error:
            raise StateValueError(
                f"batches has rows that cannot become a table: {explain_conversion_error(error)}"
            ) from error

    @staticmethod
    def _refuse_other_columns(rows: Sequence[Mapping[str, Any]], schema: pa.Schema | None) -> None:
        # Arrow would take a missing value for NULL, and ignore a column that the schema does not have.
        names = set(rows[0]) if schema is None else set(schema.names)
        for row in rows:
            if set(row) != names:
                raise StateValueError(
                    f"batches has a row with the columns {', '.join(map(str, row))}; the input has "
                    f"{', '.join(map(str, names))}: give each row all of them, None for NULL"
                )


def _replace_missing(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with None for `pandas.NaT`, which PyArrow takes for a date, and for missing values except NaN."""
    return {name: None if is_missing(value, or_nan=False) else value for name, value in row.items()}
