"""Tables that come from users' functions: taken in whatever form, and cast to the types that were declared."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.columns import shown
from arrow_schemas.errors import StateValueError
from arrow_schemas.spark_types import normal_type
from spark_state_ext.functions.missing import column_of
from spark_state_ext.functions.reasons import conversion_reason

__all__ = [
    "as_table",
    "cast_column",
    "conformed",
    "is_number",
    "is_table",
    "misread_types",
    "normal_rows",
    "refuse_nulls",
    "refuse_scalars",
    "refuse_uneven",
]

# Long enough for times and decimals.
_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = 60
_TEXTS = frozenset({"string", "large_string", "string_view", "binary", "large_binary", "binary_view"})
# What can be iterated over and is one value nevertheless.
_VALUES = (str, bytes, bytearray, Mapping, pa.Scalar)


def is_table(given: Any) -> bool:
    """Whether something is one table, and neither a column nor several tables."""
    if isinstance(given, (pa.Table, pa.RecordBatch, Mapping)):
        return True
    # Columns of polars, pandas and PyArrow have the stream too, and a type.
    if isinstance(given, (pa.Array, pa.ChunkedArray)) or hasattr(type(given), "dtype"):
        return False
    return hasattr(given, "__arrow_c_stream__") or hasattr(given, "to_arrow") or _is_pandas(given)


def _is_pandas(given: Any) -> bool:
    return hasattr(type(given), "iloc") and hasattr(type(given), "columns")


def as_table(given: Any, who: str) -> pa.Table:
    """A table of what PyArrow, polars, DuckDB and others call one."""
    if isinstance(given, pa.Table):
        return given
    if isinstance(given, pa.RecordBatch):
        return pa.Table.from_batches([given])
    if isinstance(given, Mapping):
        refuse_scalars(given, who)
    try:
        if isinstance(given, Mapping):
            return pa.table({name: column_of(column) for name, column in given.items()})
        if is_table(given):
            if _is_pandas(given):
                # A frame's index is no column.
                return pa.Table.from_pandas(given, preserve_index=False)
            if hasattr(given, "to_arrow"):
                # Polars' stream has views of strings, which older releases of PyArrow cannot cast.
                found = given.to_arrow()
                return found if isinstance(found, pa.Table) else pa.Table.from_batches(found)
            return pa.table(given)
    except (pa.ArrowException, TypeError, ValueError) as error:
        if isinstance(given, Mapping):
            refuse_uneven(given, who)
        raise StateValueError(f"{who} something that is no table: {conversion_reason(error)}") from error
    raise StateValueError(
        f"{who} a value of type {type(given).__name__}: a table is a pyarrow Table or RecordBatch, a mapping of "
        "columns, or anything with __arrow_c_stream__ (polars, DuckDB)"
    )


def refuse_scalars(columns: Mapping[Any, Any], who: str, otherwise: str = "") -> None:
    """Raise a StateValueError for a mapping with a value that is no column: text would be taken letter by letter."""
    for name, column in columns.items():
        iterable = hasattr(column, "__iter__") or hasattr(column, "__arrow_c_array__")
        # NumPy's scalars, and its arrays of no dimension, which have `__iter__` too.
        if isinstance(column, _VALUES) or not iterable or getattr(column, "ndim", 1) == 0:
            raise StateValueError(
                f"{who} a dict whose column {name!r} is {reprlib.repr(column)} ({type(column).__name__}): a dict holds "
                f"columns, give a list for each{otherwise}"
            )


def refuse_uneven(columns: Mapping[Any, Any], who: str) -> None:
    """Raise a StateValueError where columns have different lengths."""
    lengths = {name: len(column) for name, column in columns.items() if hasattr(column, "__len__")}
    if len(set(lengths.values())) > 1:
        raise StateValueError(
            f"{who} a dict whose columns have different lengths: "
            f"{', '.join(f'{name!r} has {length}' for name, length in lengths.items())}; give a value for each row"
        )


def cast_column(column: Any, field: pa.Field, role: str) -> Any:
    """A column as the type that was declared for it."""
    if column.type != field.type:
        column = _nan_as_null(column, field.type)
        _refuse_reading(column, field, role)
        try:
            if isinstance(column, pa.ChunkedArray):
                return pa.chunked_array([_cast(chunk, field.type) for chunk in column.chunks], field.type)
            return _cast(column, field.type)
        except pa.ArrowException as error:
            raise StateValueError(
                f"{role} {field.name!r} of type {field.type} cannot hold {column.type}: {error}"
                f"{_first_refused(column, field.type)}"
            ) from error
    return column


def _first_refused(column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> str:
    """The first value that cannot be cast, for an error; nothing where it is the type that cannot, or all together."""
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
    return f" (the first such value is {_SHORT.repr(shown(column, start))}, in row {start})"


def _nan_as_null(column: Any, kind: pa.DataType) -> Any:
    """A column for a type that has no NaN, of which Arrow would make the text "nan", or an error."""
    types = pa.types
    if not types.is_floating(column.type) or types.is_floating(kind):
        return column
    return pc.if_else(pc.is_nan(column.cast(pa.float64())), pa.scalar(None, column.type), column)


def _can_cast(column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> bool:
    try:
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            _cast(chunk, kind)
    except pa.ArrowException:
        return False
    return True


def _refuse_reading(column: Any, field: pa.Field, role: str) -> None:
    """Raise a StateValueError where Arrow would read values as something that they are not."""
    found = misread_types(column.type, field.type)
    # A column of nothing but NULLs has whatever type its library gives those.
    if found is not None and column.null_count < len(column):
        given, kind = found
        what = given if pa.types.is_nested(column.type) else f"{_first_value(column)} ({given})"
        raise StateValueError(
            f"{role} {field.name!r} of type {field.type} cannot hold {column.type}: {what} is not made {kind} "
            "by itself, cast it in the function"
        )


def _first_value(column: Any) -> str:
    value = shown(column, pc.index(column.is_valid(), True).as_py())
    return reprlib.repr(value) if isinstance(value, (str, bytes)) else str(value)


def misread_types(given: pa.DataType, kind: pa.DataType) -> tuple[pa.DataType, pa.DataType] | None:
    """The first two types, at any depth, of which Arrow would read the one as the other."""
    types = pa.types
    if types.is_dictionary(given):
        given = given.value_type
    pairs: list[tuple[pa.DataType, pa.DataType]] = []
    if types.is_struct(given) and types.is_struct(kind):
        pairs = [(field.type, kind.field(field.name).type) for field in given if kind.get_field_index(field.name) >= 0]
    elif types.is_map(given) and types.is_map(kind):
        pairs = [(given.key_type, kind.key_type), (given.item_type, kind.item_type)]
    elif hasattr(given, "value_type") and hasattr(kind, "value_type"):
        pairs = [(given.value_type, kind.value_type)]
    elif _is_read_as(given, kind):
        return given, kind
    return next(filter(None, (misread_types(*pair) for pair in pairs)), None)


def _is_read_as(given: pa.DataType, kind: pa.DataType) -> bool:
    """Whether Arrow finds numbers or times in text, makes text of times, counts booleans, finds numbers true, or takes
    a number for a time in whatever unit that has. Functions over rows may give none of these; they may give booleans
    for floats."""
    types = pa.types
    if _is_text(given):
        return not _is_text(kind)
    if types.is_boolean(given):
        return bool(types.is_integer(kind))
    if is_number(given):
        return bool(types.is_boolean(kind) or types.is_temporal(kind))
    return bool(types.is_temporal(given) and (is_number(kind) or _is_text(kind)))


def is_number(kind: pa.DataType) -> bool:
    """Whether a type is one of integers, floats or decimals."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _is_text(kind: pa.DataType) -> bool:
    # By name, as older releases of PyArrow lack some of these types.
    return str(kind) in _TEXTS or bool(pa.types.is_fixed_size_binary(kind))


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """As Arrow casts; but fields of structs are neither left out nor made up, and may come in any order."""
    types = pa.types
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_struct(kind) and types.is_struct(column.type):
        names, wanted = [field.name for field in column.type], [field.name for field in kind]
        if sorted(names) != sorted(wanted) or len(set(names)) < len(names):
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
    column = _nan_as_null(column, kind)
    if types.is_map(column.type) and types.is_list(kind):
        column = _entries(column)
    lists = types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type)
    views = types.is_list_view(column.type) or types.is_large_list_view(column.type)
    # Not left to Arrow, which has other rules than these within lists, casts also what is in none of them (so refuses a
    # slice for values outside of it), and casts views wrongly (26 leaves an offset out, 16 mixes rows up).
    if types.is_list(kind) and (lists or views):
        values = _cast(pc.list_flatten(column), kind.value_type)
        return pa.ListArray.from_arrays(_offsets(column), values, type=kind, mask=column.is_null())
    return column if column.type == kind else column.cast(kind)


def _offsets(lists: pa.Array) -> pa.Array:
    """Offsets of the lists' elements, end to end; those of NULL are left out."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    ends = np.cumsum(lengths, dtype=np.int64)
    # By way of NumPy: what Arrow's functions give has a validity bitmap at times, which no offsets may have.
    return pa.array(np.append(0, ends), pa.int32())


def _entries(column: pa.MapArray) -> pa.ListArray:
    """A map column as lists of keys and values, which is how it lies in memory; for Arrow's functions, which take no
    maps."""
    entries = column.values
    return pa.Array.from_buffers(
        pa.list_(entries.type), len(column), column.buffers()[:2], column.null_count, column.offset, [entries]
    )


def _cast_map(column: pa.MapArray, kind: pa.MapType) -> pa.MapArray:
    lists = _entries(column)
    keys, items = pc.list_flatten(lists).flatten()
    keys, items = _cast(keys, kind.key_type), _cast(items, kind.item_type)
    # Older releases of PyArrow end the process where nobody has counted them.
    if keys.null_count:
        raise pa.ArrowInvalid("a key is NULL")
    entries = pa.StructArray.from_arrays([keys, items], fields=[kind.key_field, kind.item_field])
    found = pa.ListArray.from_arrays(_offsets(lists), entries, mask=column.is_null())
    return pa.Array.from_buffers(kind, len(found), found.buffers()[:2], found.null_count, found.offset, [entries])


def _cast_to_date(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """As Arrow casts, but a time of day, which Arrow cuts off, is an error."""
    local = pc.local_timestamp(column) if column.type.tz else column
    found = column.cast(kind)
    if pc.any(pc.not_equal(found.cast(local.type), local)).as_py():
        raise pa.ArrowInvalid("it has times of day, which a date would lose")
    return found


def _cast_floats(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """As Arrow casts, but numbers that only a wider float holds, which Arrow makes infinite, are an error."""
    found = column.cast(kind)
    if kind.bit_width < column.type.bit_width:
        lost = pc.and_(pc.is_inf(found), pc.is_finite(column))
        if pc.any(lost).as_py():
            raise pa.ArrowInvalid(f"{column.filter(lost)[0].as_py()} is more than it holds")
    return found


def refuse_nulls(column: Any, field: pa.Field, role: str) -> None:
    """Raise a StateValueError when a column has NULLs where it was declared without, in nested types too."""
    if not field.nullable and column.null_count:
        at = pc.index(pc.is_null(column), True).as_py()
        raise StateValueError(f"{role} {field.name!r} is declared without NULLs and row {at} is NULL")
    if not _forbids_nulls(field.type):
        return
    if pa.types.is_list(field.type):
        refuse_nulls(pc.list_flatten(column), field.type.value_field, f"{role} {field.name!r}: its")
    elif pa.types.is_map(field.type):
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            keys, items = pc.list_flatten(_entries(chunk)).flatten()
            refuse_nulls(keys, field.type.key_field, f"{role} {field.name!r}: its")
            refuse_nulls(items, field.type.item_field, f"{role} {field.name!r}: its")
    else:
        there = column.filter(pc.is_valid(column))
        for at, child in enumerate(field.type):
            refuse_nulls(pc.struct_field(there, [at]), child, f"{role} {field.name!r}: its")


def _forbids_nulls(kind: pa.DataType) -> bool:
    """Whether some element, value or field of a type is declared without NULLs. (A map's keys always are.)"""
    if pa.types.is_list(kind):
        return not kind.value_field.nullable or _forbids_nulls(kind.value_type)
    if pa.types.is_map(kind):
        return not kind.item_field.nullable or _forbids_nulls(kind.item_type) or _forbids_nulls(kind.key_type)
    return pa.types.is_struct(kind) and any(not field.nullable or _forbids_nulls(field.type) for field in kind)


def conformed(given: Any, fields: Sequence[pa.Field], who: str) -> pa.Table:
    """A table with exactly these columns, found by name, in this order and of these types."""
    table = as_table(given, who)
    names = [field.name for field in fields]
    if sorted(table.column_names) != sorted(names):
        raise StateValueError(
            f"{who} the columns {', '.join(table.column_names) or '(none)'}; expected {', '.join(names)}"
        )
    if table.column_names != names:
        if len(set(names)) < len(names):
            raise StateValueError(
                f"{who} the columns {', '.join(table.column_names)}; expected {', '.join(names)}, in this order, as "
                "some have one name"
            )
        table = table.select(names)
    columns = [cast_column(column, field, "output column") for column, field in zip(table.columns, fields, strict=True)]
    for column, field in zip(columns, fields, strict=True):
        refuse_nulls(column, field, "output column")
    return pa.table(columns, schema=pa.schema(fields))


def normal_rows(rows: pa.Table, names: Sequence[str]) -> pa.Table:
    """Input rows under the user's names and in stored types, which only relabels the zone of timestamps."""
    columns = []
    for column in rows.columns:
        kind = normal_type(column.type)
        columns.append(column if kind == column.type else column.cast(kind))
    return pa.table(columns, names=list(names))
