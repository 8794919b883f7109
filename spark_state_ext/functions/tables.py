"""Convert what users' functions return to Arrow tables of the declared types."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.columns import format_value
from arrow_schemas.errors import StateValueError
from arrow_schemas.spark_types import normalise_type
from spark_state_ext.functions.conversion_errors import explain_conversion_error
from spark_state_ext.functions.missing_values import to_column

__all__ = [
    "as_table",
    "cast_column",
    "conform_table",
    "is_number",
    "is_table",
    "find_misread_types",
    "normalise_rows",
    "refuse_nulls",
    "refuse_scalars",
    "refuse_uneven",
]

# Long enough for times and decimals.
_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = 60
_TEXTS = frozenset({"string", "large_string", "string_view", "binary", "large_binary", "binary_view"})
# Types that can be iterated over although they are one value.
_VALUES = (str, bytes, bytearray, Mapping, pa.Scalar)


def is_table(value: Any) -> bool:
    """Return whether a value is one table, and neither a column nor several tables."""
    if isinstance(value, (pa.Table, pa.RecordBatch, Mapping)):
        return True
    # Columns of polars, pandas and PyArrow have Arrow's stream too, but they have a dtype.
    if isinstance(value, (pa.Array, pa.ChunkedArray)) or hasattr(type(value), "dtype"):
        return False
    return hasattr(value, "__arrow_c_stream__") or hasattr(value, "to_arrow") or _is_pandas(value)


def _is_pandas(value: Any) -> bool:
    return hasattr(type(value), "iloc") and hasattr(type(value), "columns")


def as_table(value: Any, who: str) -> pa.Table:
    """Convert a table of PyArrow, polars, pandas, DuckDB or others, or a mapping of columns, to a PyArrow table.

    `who` begins the error messages, as in "update() was given".
    """
    if isinstance(value, pa.Table):
        return value
    if isinstance(value, pa.RecordBatch):
        return pa.Table.from_batches([value])
    if isinstance(value, Mapping):
        refuse_scalars(value, who)
    try:
        if isinstance(value, Mapping):
            return pa.table({name: to_column(column) for name, column in value.items()})
        if is_table(value):
            if _is_pandas(value):
                # A frame's index is not a column.
                return pa.Table.from_pandas(value, preserve_index=False)
            if hasattr(value, "to_arrow"):
                # Polars' stream has string views, which older releases of PyArrow cannot cast.
                converted = value.to_arrow()
                return converted if isinstance(converted, pa.Table) else pa.Table.from_batches(converted)
            return pa.table(value)
    except (pa.ArrowException, TypeError, ValueError) as error:
        if isinstance(value, Mapping):
            refuse_uneven(value, who)
        raise StateValueError(f"{who} something that is not a table: {explain_conversion_error(error)}") from error
    raise StateValueError(
        f"{who} a value of type {type(value).__name__}: a table is a pyarrow Table or RecordBatch, a mapping of "
        "columns, or anything with __arrow_c_stream__ (polars, DuckDB)"
    )


def refuse_scalars(columns: Mapping[Any, Any], who: str, otherwise: str = "") -> None:
    """Raise a StateValueError if a value of a mapping is not a column: text would become a column of letters."""
    for name, column in columns.items():
        iterable = hasattr(column, "__iter__") or hasattr(column, "__arrow_c_array__")
        # NumPy's scalars and its arrays without dimensions have `__iter__` too.
        if isinstance(column, _VALUES) or not iterable or getattr(column, "ndim", 1) == 0:
            raise StateValueError(
                f"{who} a dict whose column {name!r} is {reprlib.repr(column)} ({type(column).__name__}): a dict holds "
                f"columns, give a list for each{otherwise}"
            )


def refuse_uneven(columns: Mapping[Any, Any], who: str) -> None:
    """Raise a StateValueError if columns have different lengths."""
    lengths = {name: len(column) for name, column in columns.items() if hasattr(column, "__len__")}
    if len(set(lengths.values())) > 1:
        raise StateValueError(
            f"{who} a dict whose columns have different lengths: "
            f"{', '.join(f'{name!r} has {length}' for name, length in lengths.items())}; give a value for each row"
        )


def cast_column(column: Any, field: pa.Field, role: str) -> Any:
    """Cast a column to the type that its field declares."""
    if column.type != field.type:
        column = _replace_nan(column, field.type)
        _refuse_misread(column, field, role)
        try:
            if isinstance(column, pa.ChunkedArray):
                return pa.chunked_array([_cast(chunk, field.type) for chunk in column.chunks], field.type)
            return _cast(column, field.type)
        except pa.ArrowException as error:
            raise StateValueError(
                f"{role} {field.name!r} of type {field.type} cannot hold {column.type}: {error}"
                f"{_describe_first_misfit(column, field.type)}"
            ) from error
    return column


def _describe_first_misfit(column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> str:
    """Return an error's note on the first value that cannot be cast; empty if no single value is the cause."""
    if not _can_cast(column.slice(0, 0), kind):
        return ""
    start, stop = 0, len(column)
    while stop - start > 1:
        middle = (start + stop) // 2
        if _can_cast(column.slice(start, middle - start), kind):
            start = middle
        else:
            stop = middle
    if _can_cast(column.slice(start, 1), kind):
        return ""
    return f" (the first such value is {_SHORT.repr(format_value(column, start))}, in row {start})"


def _replace_nan(column: Any, kind: pa.DataType) -> Any:
    """Replace NaN by NULL in a column for a type without NaN: Arrow would write the text "nan", or fail."""
    types = pa.types
    if not types.is_floating(column.type) or types.is_floating(kind):
        return column
    if types.is_float16(column.type):
        # Some releases of Arrow have no `if_else` for this type. As doubles its values have the same text.
        column = column.cast(pa.float64())
    return pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)


def _can_cast(column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> bool:
    try:
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            _cast(chunk, kind)
    except pa.ArrowException:
        return False
    return True


def _refuse_misread(column: Any, field: pa.Field, role: str) -> None:
    """Raise a StateValueError if Arrow would reinterpret values, such as numbers as times."""
    misread = find_misread_types(column.type, field.type)
    # The type of a column of NULLs only depends on its library.
    if misread is not None and column.null_count < len(column):
        source, kind = misread
        example = source if pa.types.is_nested(column.type) else f"{_show_first_value(column)} ({source})"
        raise StateValueError(
            f"{role} {field.name!r} of type {field.type} cannot hold {column.type}: {example} is not converted to "
            f"{kind} automatically; cast it in the function"
        )


def _show_first_value(column: Any) -> str:
    value = format_value(column, pc.index(column.is_valid(), True).as_py())
    return reprlib.repr(value) if isinstance(value, (str, bytes)) else str(value)


def find_misread_types(source: pa.DataType, kind: pa.DataType) -> tuple[pa.DataType, pa.DataType] | None:
    """Return the first pair of types, at any depth, of which Arrow would reinterpret one as the other."""
    types = pa.types
    if types.is_dictionary(source):
        source = source.value_type
    pairs: list[tuple[pa.DataType, pa.DataType]] = []
    if types.is_struct(source) and types.is_struct(kind):
        pairs = [(field.type, kind.field(field.name).type) for field in source if kind.get_field_index(field.name) >= 0]
    elif types.is_map(source) and types.is_map(kind):
        pairs = [(source.key_type, kind.key_type), (source.item_type, kind.item_type)]
    elif hasattr(source, "value_type") and hasattr(kind, "value_type"):
        pairs = [(source.value_type, kind.value_type)]
    elif _is_misread(source, kind):
        return source, kind
    return next(filter(None, (find_misread_types(*pair) for pair in pairs)), None)


def _is_misread(source: pa.DataType, kind: pa.DataType) -> bool:
    """Return whether Arrow would parse text, format times as text, or mix up numbers with booleans or times.

    Functions over rows may not return such values either; they may return booleans for floats.
    """
    types = pa.types
    if _is_text(source):
        return not _is_text(kind)
    if types.is_boolean(source):
        return bool(types.is_integer(kind))
    if is_number(source):
        return bool(types.is_boolean(kind) or types.is_temporal(kind))
    return bool(types.is_temporal(source) and (is_number(kind) or _is_text(kind)))


def is_number(kind: pa.DataType) -> bool:
    """Return whether a type is an integer, a float or a decimal."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _is_text(kind: pa.DataType) -> bool:
    # By name, because older releases of PyArrow do not have some of these types.
    return str(kind) in _TEXTS or bool(pa.types.is_fixed_size_binary(kind))


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast as Arrow does, but a struct must have exactly the fields of the type, in any order."""
    types = pa.types
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_struct(kind) and types.is_struct(column.type):
        names, declared = [field.name for field in column.type], [field.name for field in kind]
        if sorted(names) != sorted(declared) or len(set(names)) < len(names):
            raise pa.ArrowInvalid(f"its fields are {', '.join(names)}")
        parts = dict(zip(names, column.flatten(), strict=True))
        children = [_cast(parts[field.name], field.type) for field in kind]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=column.is_null())
    if types.is_map(column.type) and types.is_map(kind):
        return _cast_map(column, kind)
    if types.is_timestamp(column.type) and types.is_date(kind):
        return _cast_to_date(column, kind)
    if types.is_floating(column.type) and types.is_floating(kind):
        return _cast_floats(column, kind)
    column = _replace_nan(column, kind)
    if types.is_map(column.type) and types.is_list(kind):
        column = _map_entries(column)
    lists = types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type)
    views = types.is_list_view(column.type) or types.is_large_list_view(column.type)
    # Arrow's cast of lists is not used: it has other rules within them, also casts values outside of every list (so it
    # refuses a slice for values outside of it), and casts views wrongly (PyArrow 26 omits an offset, 16 mixes up rows).
    if types.is_list(kind) and (lists or views):
        values = _cast(pc.list_flatten(column), kind.value_type)
        return pa.ListArray.from_arrays(_list_offsets(column), values, type=kind, mask=column.is_null())
    return column if column.type == kind else column.cast(kind)


def _list_offsets(lists: pa.Array) -> pa.Array:
    """Return offsets of the lists' elements, laid end to end without the elements of NULL lists."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    ends = np.cumsum(lengths, dtype=np.int64)
    # Through NumPy: results of Arrow's functions sometimes have a validity bitmap, which offsets must not have.
    return pa.array(np.append(0, ends), pa.int32())


def _map_entries(column: pa.MapArray) -> pa.ListArray:
    """Return a map column as lists of key-value structs, without a copy, because Arrow's functions do not take maps."""
    entries = column.values
    return pa.Array.from_buffers(
        pa.list_(entries.type), len(column), column.buffers()[:2], column.null_count, column.offset, [entries]
    )


def _cast_map(column: pa.MapArray, kind: pa.MapType) -> pa.MapArray:
    lists = _map_entries(column)
    keys, items = pc.list_flatten(lists).flatten()
    keys, items = _cast(keys, kind.key_type), _cast(items, kind.item_type)
    # Older releases of PyArrow crash if the NULLs have not been counted.
    if keys.null_count:
        raise pa.ArrowInvalid("a key is NULL")
    entries = pa.StructArray.from_arrays([keys, items], fields=[kind.key_field, kind.item_field])
    cast_lists = pa.ListArray.from_arrays(_list_offsets(lists), entries, mask=column.is_null())
    return pa.Array.from_buffers(
        kind, len(cast_lists), cast_lists.buffers()[:2], cast_lists.null_count, cast_lists.offset, [entries]
    )


def _cast_to_date(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast times to dates; a time of day, which Arrow would cut off, is an error."""
    local = pc.local_timestamp(column) if column.type.tz else column
    dates = column.cast(kind)
    if pc.any(pc.not_equal(dates.cast(local.type), local)).as_py():
        raise pa.ArrowInvalid("it has times of day, which a date would lose")
    return dates


def _cast_floats(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast floats to a narrower type; numbers beyond its range, which Arrow would make infinite, are an error."""
    narrow = column.cast(kind)
    if kind.bit_width < column.type.bit_width:
        lost = pc.and_(pc.is_inf(narrow), pc.is_finite(column))
        if pc.any(lost).as_py():
            raise pa.ArrowInvalid(f"{column.filter(lost)[0].as_py()} is more than it holds")
    return narrow


def refuse_nulls(column: Any, field: pa.Field, role: str) -> None:
    """Raise a StateValueError if a column declared without NULLs has one, in nested types too."""
    if not field.nullable and column.null_count:
        at = pc.index(pc.is_null(column), True).as_py()
        raise StateValueError(f"{role} {field.name!r} is declared without NULLs and row {at} is NULL")
    if not _forbids_nulls(field.type):
        return
    if pa.types.is_list(field.type):
        refuse_nulls(pc.list_flatten(column), field.type.value_field, f"{role} {field.name!r}: its")
    elif pa.types.is_map(field.type):
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            keys, items = pc.list_flatten(_map_entries(chunk)).flatten()
            refuse_nulls(keys, field.type.key_field, f"{role} {field.name!r}: its")
            refuse_nulls(items, field.type.item_field, f"{role} {field.name!r}: its")
    else:
        present = column.filter(pc.is_valid(column))
        for at, child in enumerate(field.type):
            refuse_nulls(pc.struct_field(present, [at]), child, f"{role} {field.name!r}: its")


def _forbids_nulls(kind: pa.DataType) -> bool:
    """Return whether any element, value or field of a type is declared without NULLs. (A map's keys always are.)"""
    if pa.types.is_list(kind):
        return not kind.value_field.nullable or _forbids_nulls(kind.value_type)
    if pa.types.is_map(kind):
        return not kind.item_field.nullable or _forbids_nulls(kind.item_type) or _forbids_nulls(kind.key_type)
    return pa.types.is_struct(kind) and any(not field.nullable or _forbids_nulls(field.type) for field in kind)


def conform_table(value: Any, fields: Sequence[pa.Field], who: str) -> pa.Table:
    """Return a table with exactly these columns, matched by name, in this order and of these types."""
    table = as_table(value, who)
    names = [field.name for field in fields]
    if sorted(table.column_names) != sorted(names):
        raise StateValueError(
            f"{who} the columns {', '.join(table.column_names) or '(none)'}; expected {', '.join(names)}"
        )
    if table.column_names != names:
        if len(set(names)) < len(names):
            raise StateValueError(
                f"{who} the columns {', '.join(table.column_names)}; expected {', '.join(names)}, in this order, as "
                "some have the same name"
            )
        table = table.select(names)
    columns = [cast_column(column, field, "output column") for column, field in zip(table.columns, fields, strict=True)]
    for column, field in zip(columns, fields, strict=True):
        refuse_nulls(column, field, "output column")
    return pa.table(columns, schema=pa.schema(fields))


def normalise_rows(rows: pa.Table, names: Sequence[str]) -> pa.Table:
    """Return input rows with the user's column names and the stored types; only the zone of timestamps changes."""
    columns = []
    for column in rows.columns:
        kind = normalise_type(column.type)
        columns.append(column if kind == column.type else column.cast(kind))
    return pa.table(columns, names=list(names))
