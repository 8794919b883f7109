"""Finds an operator's query folders, and converts a user's keys to stored keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from arrow_schemas.columns import combine_chunks
from arrow_schemas.operator import OperatorFile, parse_operator_file_name
from arrow_schemas.row import RowSchema
from spark_state_ext.errors import StateValueError, UsageError
from spark_state_ext.files.folder import Folder, refuse_relative
from spark_state_ext.files.layout import SPILL_FOLDER, STARTING_FOLDER
from spark_state_ext.files.operator_catalog import newest_operator
from spark_state_ext.functions.conversion_errors import explain_conversion_error
from spark_state_ext.functions.key_types import explain_mixed_times, explain_refused_type
from spark_state_ext.functions.missing_values import to_column
from spark_state_ext.functions.tables import as_table, cast_column, is_table
from spark_state_ext.rescale.folders import folders_in_force

__all__ = ["QueryFolder", "convert_keys", "find_query_folders"]

# The largest whole number has twenty digits, which leaves this many of a decimal's 38.
_SCALE_MAX = 18


@dataclass(frozen=True)
class QueryFolder:
    """A query folder with state.

    Parameters
    ----------
    files
        The folder.
    operator
        The operator file in force.
    """

    files: Folder
    operator: OperatorFile

    @property
    def name(self) -> str:
        """Name of the query folder."""
        return self.files.name

    @property
    def schema(self) -> RowSchema:
        """Schema of the stored rows."""
        return self.operator.row_schema()


def find_query_folders(
    root: str,
    operator: str,
    query_folder: str | None,
    storage_options: Mapping[str, Any] | None,
    *,
    in_force: bool = True,
) -> list[QueryFolder]:
    """Return the query folders of an operator that have state; by default only those in force."""
    refuse_relative(root, "root")
    top = Folder(root.rstrip("/") or root, storage_options)
    operators = [entry.name for entry in top.entries() if entry.folder]
    if operator not in operators:
        raise UsageError(
            f"{top.root} has no operator {operator!r}; it has: {', '.join(operators[:10]) or 'none'}. Give the root "
            "that ArrowState was given; each step of a chain is a separate operator"
        )
    below = top.child(operator)
    names = [
        entry.name for entry in below.entries() if entry.folder and entry.name not in (STARTING_FOLDER, SPILL_FOLDER)
    ]
    if query_folder is not None and query_folder not in names:
        raise UsageError(
            f"{below.root} has no query folder {query_folder!r}; it has: {', '.join(names[:10]) or 'none'}"
        )
    listed = {name: below.child(name).names() for name in (names if query_folder is None else [query_folder])}
    with_state = [
        name for name, files in listed.items() if any(parse_operator_file_name(file) is not None for file in files)
    ]
    if in_force and query_folder is None:
        with_state = sorted(folders_in_force({name: listed[name] for name in with_state}))
    operator_files = [(below.child(name), newest_operator(below.child(name), listed[name])) for name in with_state]
    query_folders = [
        QueryFolder(folder, operator_file) for folder, operator_file in operator_files if operator_file is not None
    ]
    if not query_folders:
        raise UsageError(f"no query has state below {below.root} yet: there is no operator file")
    return query_folders


def convert_keys(keys: Any, schema: RowSchema, who: str) -> pa.RecordBatch:
    """Convert a user's keys to the form in which they are stored; `who` names the caller in errors."""
    names = [field.name for field in schema.keys]
    if is_table(keys):
        table = as_table(keys, f"{who} was given")
    elif len(names) == 1 and isinstance(keys, (Sequence, pa.Array, pa.ChunkedArray)) and not isinstance(keys, str):
        table = pa.table([_make_column(keys, who)], names=names)
    else:
        raise StateValueError(
            f"{who} was given keys of type {type(keys).__name__}: pass a table, or a dict of lists, with the columns "
            f"{', '.join(names)}{'; or a list of values' if len(names) == 1 else ''}"
        )
    if len(set(names)) == len(names) and sorted(table.column_names) == sorted(names):
        table = table.select(names)
    if table.column_names != names:
        raise StateValueError(
            f"{who} was given keys with the columns {', '.join(table.column_names)}, but the operator's key columns "
            f"are {', '.join(names)}: pass exactly these"
        )
    if not table.num_rows:
        raise UsageError(f"{who} was given no keys")
    for index, (column, field) in enumerate(zip(table.columns, schema.keys, strict=True)):
        why = explain_refused_type(column.type, field.type)
        if not why and pa.types.is_temporal(column.type):
            why = explain_mixed_times(_python_values(keys, field.name, index))
        if why:
            raise StateValueError(f"{who} was given values that do not fit the key column {field.name!r}: {why}")
    columns = [
        cast_column(_widen_integers(combine_chunks(column), field.type), field, "key column")
        for column, field in zip(table.columns, schema.keys, strict=True)
    ]
    plain = pa.schema([field.with_nullable(True).remove_metadata() for field in schema.keys])
    return pa.RecordBatch.from_arrays(schema.normalise_keys(columns), schema=plain)


def _widen_integers(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast integers for a decimal key to 38 digits, because Arrow refuses a smaller type even if the values fit."""
    needs_cast = pa.types.is_integer(column.type) and pa.types.is_decimal(kind) and kind.scale <= _SCALE_MAX
    return column.cast(pa.decimal128(38, kind.scale)) if needs_cast else column


def _python_values(keys: Any, name: str, index: int) -> Iterable[Any]:
    """Return a column's values if they are Python objects; empty if they have a type of their library."""
    if not is_table(keys):
        values = keys
    elif isinstance(keys, Mapping):
        values = keys[name]
    else:
        columns = list(getattr(keys, "columns", ()))
        position = columns.index(name) if columns.count(name) == 1 else index
        values = keys.iloc[:, position] if hasattr(keys, "iloc") else ()
    # In pandas and NumPy, a column of Python objects has the type "object".
    return () if str(getattr(values, "dtype", getattr(values, "type", "object"))) != "object" else values


def _make_column(values: Any, who: str) -> pa.Array:
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return combine_chunks(values)
    try:
        return combine_chunks(to_column(list(values)))
    except (pa.ArrowException, AttributeError, TypeError, ValueError, OverflowError) as error:
        why = explain_conversion_error(error)
        raise StateValueError(f"{who} was given keys of several types: {why}") from error
