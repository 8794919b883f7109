"""The query folders whose keys a user names, and his keys as the operator has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from arrow_schemas.columns import flat
from arrow_schemas.operator import OperatorFile, parse_operator_file_name
from arrow_schemas.row import RowSchema
from spark_state_ext.errors import StateValueError, UsageError
from spark_state_ext.files.folder import Folder, refuse_relative
from spark_state_ext.files.layout import SPILL_FOLDER, STARTING_FOLDER
from spark_state_ext.files.operator_catalog import newest_operator
from spark_state_ext.functions.key_types import mixed_times, refused_type
from spark_state_ext.functions.missing import column_of
from spark_state_ext.functions.reasons import conversion_reason
from spark_state_ext.functions.tables import as_table, cast_column, is_table
from spark_state_ext.rescale.folders import folders_in_force

__all__ = ["QueryFolder", "keys_as_stored", "query_folders_below"]

# Beside the twenty digits of the largest whole number.
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
        """Its name."""
        return self.files.name

    @property
    def schema(self) -> RowSchema:
        """Row schema of the stored rows."""
        return self.operator.row_schema()


def query_folders_below(
    root: str,
    operator: str,
    query_folder: str | None,
    storage_options: Mapping[str, Any] | None,
    *,
    in_force: bool = True,
) -> list[QueryFolder]:
    """The query folders of an operator."""
    refuse_relative(root, "root")
    top = Folder(root.rstrip("/") or root, storage_options)
    there = [entry.name for entry in top.entries() if entry.folder]
    if operator not in there:
        raise UsageError(
            f"{top.root} has no operator {operator!r}; it has: {', '.join(there[:10]) or 'none'}. Give the root as "
            "ArrowState has it; each step of a chain is an operator of its own"
        )
    below = top.child(operator)
    names = [it.name for it in below.entries() if it.folder and it.name not in (STARTING_FOLDER, SPILL_FOLDER)]
    if query_folder is not None and query_folder not in names:
        raise UsageError(
            f"{below.root} has no query folder {query_folder!r}; it has: {', '.join(names[:10]) or 'none'}"
        )
    listed = {name: below.child(name).names() for name in (names if query_folder is None else [query_folder])}
    wanted = [name for name, inside in listed.items() if any(parse_operator_file_name(it) is not None for it in inside)]
    if in_force and query_folder is None:
        wanted = sorted(folders_in_force({name: listed[name] for name in wanted}))
    files = [(below.child(name), newest_operator(below.child(name), listed[name])) for name in wanted]
    found = [QueryFolder(folder, operator_file) for folder, operator_file in files if operator_file is not None]
    if not found:
        raise UsageError(f"no query has state below {below.root} yet: there is no operator file")
    return found


def keys_as_stored(given: Any, schema: RowSchema, who: str) -> pa.RecordBatch:
    """A user's keys in the form in which they are stored."""
    names = [field.name for field in schema.keys]
    if is_table(given):
        table = as_table(given, f"{who} was given")
    elif len(names) == 1 and isinstance(given, (Sequence, pa.Array, pa.ChunkedArray)) and not isinstance(given, str):
        table = pa.table([_column(given, who)], names=names)
    else:
        raise StateValueError(
            f"{who} was given {type(given).__name__} for keys: give a table, or a dict of lists, with the columns "
            f"{', '.join(names)}{'; or a list of values' if len(names) == 1 else ''}"
        )
    if len(set(names)) == len(names) and sorted(table.column_names) == sorted(names):
        table = table.select(names)
    if table.column_names != names:
        raise StateValueError(
            f"{who} was given keys with the columns {', '.join(table.column_names)}; the operator's key columns are "
            f"{', '.join(names)}: give all of these and no others"
        )
    if not table.num_rows:
        raise UsageError(f"{who} was given no key")
    for at, (column, field) in enumerate(zip(table.columns, schema.keys, strict=True)):
        why = refused_type(column.type, field.type)
        if not why and pa.types.is_temporal(column.type):
            why = mixed_times(_python_values(given, field.name, at))
        if why:
            raise StateValueError(f"{who} was given other values than the key column {field.name!r} has: {why}")
    columns = [
        cast_column(_widened(flat(column), field.type), field, "key column")
        for column, field in zip(table.columns, schema.keys, strict=True)
    ]
    plain = pa.schema([field.with_nullable(True).remove_metadata() for field in schema.keys])
    return pa.RecordBatch.from_arrays(schema.normalise_keys(columns), schema=plain)


def _widened(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Whole numbers as decimals of all digits that a key of type `kind` may get; Arrow refuses to go by the values."""
    whole = pa.types.is_integer(column.type) and pa.types.is_decimal(kind) and kind.scale <= _SCALE_MAX
    return column.cast(pa.decimal128(38, kind.scale)) if whole else column


def _python_values(given: Any, name: str, at: int) -> Iterable[Any]:
    """A column's values, if they were given as Python's own; none if they have a type of their library's."""
    if not is_table(given):
        values = given
    elif isinstance(given, Mapping):
        values = given[name]
    else:
        columns = list(getattr(given, "columns", ()))
        place = columns.index(name) if columns.count(name) == 1 else at
        values = given.iloc[:, place] if hasattr(given, "iloc") else ()
    # In pandas and NumPy a column of Python's values has the type "object".
    return () if str(getattr(values, "dtype", getattr(values, "type", "object"))) != "object" else values


def _column(given: Any, who: str) -> pa.Array:
    if isinstance(given, (pa.Array, pa.ChunkedArray)):
        return flat(given)
    try:
        return flat(column_of(list(given)))
    except (pa.ArrowException, AttributeError, TypeError, ValueError, OverflowError) as error:
        why = conversion_reason(error)
        raise StateValueError(f"{who} was given keys that are of no one type: {why}") from error
