"""Helpers for Arrow columns: one array from many chunks, event times, aggregates by group, values for messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.errors import StateValueError, UnsupportedTypeError

__all__ = ["aggregate_groups", "get_field", "event_times_us", "combine_chunks", "format_value", "format_row"]


def combine_chunks(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one array; it is copied only if it has several chunks."""
    if isinstance(column, pa.Array):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    try:
        joined = column.combine_chunks()
    except pa.ArrowInvalid as error:
        raise _make_size_error(column) from error
    # Depending on PyArrow's release this is an array or a chunked array with zero, one or more chunks.
    if isinstance(joined, pa.ChunkedArray):
        if joined.num_chunks > 1:
            raise _make_size_error(column)
        return joined.chunk(0) if joined.num_chunks else pa.array([], column.type)
    return joined


def _make_size_error(column: pa.ChunkedArray) -> UnsupportedTypeError:
    return UnsupportedTypeError(
        f"a column of type {column.type} has more than 2 GiB of text or bytes in {len(column)} rows that must be "
        "handled together"
    )


def event_times_us(column: pa.Array | pa.ChunkedArray) -> Any:
    """Return timestamps, or the ends of windows, as microseconds since 1970."""
    if pa.types.is_struct(column.type):
        column = pc.struct_field(column, "end")
    if pa.types.is_timestamp(column.type) and column.type.unit != "us":
        column = column.cast(pa.timestamp("us", tz=column.type.tz))
    return column.cast(pa.int64())


def aggregate_groups(table: pa.Table, group: str, aggregations: Sequence[Any]) -> pa.Table:
    """Aggregate a table by group with Arrow; return one row a group, ascending by group."""
    # PyArrow reads a name that starts with a dot as a path, and offers no other way to name a column here.
    for columns, *_ in aggregations:
        for name in [columns] if isinstance(columns, str) else columns:
            if name.startswith("."):
                raise StateValueError(
                    f"column {name!r}: PyArrow cannot aggregate a column whose name starts with a dot; rename it"
                )
    groups = pa.TableGroupBy(table, group, use_threads=False).aggregate(list(aggregations))
    # Arrow mostly returns groups in the order of their first rows, but not if hashes of groups collide.
    ids = combine_chunks(groups.column(group)).to_numpy()
    return groups if (ids[1:] > ids[:-1]).all() else groups.take(pa.array(np.argsort(ids)))


def get_field(column: Any, name: str) -> Any:
    """Return a field of a struct column, by position: PyArrow reads a name that starts with a dot as a path."""
    return pc.struct_field(column, [column.type.get_field_index(name)])


def format_value(column: pa.Array | pa.ChunkedArray, at: int) -> object:
    """Return a value for a message, even one that Python cannot hold, such as non-UTF-8 text or the year 10000."""
    value = column[at]
    try:
        return value.as_py()
    except (UnicodeDecodeError, OverflowError, ValueError):
        pass
    kind = column.type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if not is_text and not pa.types.is_temporal(kind):
        return f"a {kind} that Python cannot hold"
    if pa.types.is_date32(kind):
        value = value.cast(pa.int32())
    return f"{value.cast(pa.binary() if is_text else pa.int64()).as_py()!r} ({kind})"


def format_row(names: Sequence[str], columns: Sequence[Any], at: int) -> dict[str, object]:
    """Return a row for a message."""
    return {name: format_value(column, at) for name, column in zip(names, columns, strict=True)}
