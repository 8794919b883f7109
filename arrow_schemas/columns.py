"""What is asked of columns in many places: one array of many chunks, event times, aggregates by group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.errors import StateValueError, UnsupportedTypeError

__all__ = ["aggregated", "child_of", "event_times_us", "flat", "shown", "shown_row"]


def flat(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """A column as one array; a copy only where it has several chunks."""
    if isinstance(column, pa.Array):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    try:
        joined = column.combine_chunks()
    except pa.ArrowInvalid as error:
        raise _too_much(column) from error
    # Depending on the release of PyArrow this is an array, or chunks: one, none, or as many as it takes.
    if isinstance(joined, pa.ChunkedArray):
        if joined.num_chunks > 1:
            raise _too_much(column)
        return joined.chunk(0) if joined.num_chunks else pa.array([], column.type)
    return joined


def _too_much(column: pa.ChunkedArray) -> UnsupportedTypeError:
    return UnsupportedTypeError(
        f"a column of type {column.type} has more than 2 GiB of text or bytes in {len(column)} rows that are handled "
        "together"
    )


def event_times_us(column: pa.Array | pa.ChunkedArray) -> Any:
    """Timestamps, or the ends of windows, as microseconds since 1970."""
    if pa.types.is_struct(column.type):
        column = pc.struct_field(column, "end")
    if pa.types.is_timestamp(column.type) and column.type.unit != "us":
        column = column.cast(pa.timestamp("us", tz=column.type.tz))
    return column.cast(pa.int64())


def aggregated(table: pa.Table, group: str, aggregations: Sequence[Any]) -> pa.Table:
    """Arrow's grouped aggregation, a row a group, ascending by group."""
    # PyArrow takes a name that begins with a dot for a path, and has no other way to name a column here.
    for columns, *_ in aggregations:
        for name in [columns] if isinstance(columns, str) else columns:
            if name.startswith("."):
                raise StateValueError(
                    f"column {name!r}: PyArrow aggregates none whose name begins with a dot; rename it"
                )
    found = pa.TableGroupBy(table, group, use_threads=False).aggregate(list(aggregations))
    # Arrow gives groups in the order in which it meets them, mostly: the hashes of some may clash.
    ids = flat(found.column(group)).to_numpy()
    return found if (ids[1:] > ids[:-1]).all() else found.take(pa.array(np.argsort(ids)))


def child_of(column: Any, name: str) -> Any:
    """A field of a struct column. By its place, as PyArrow takes a name that begins with a dot for a path."""
    return pc.struct_field(column, [column.type.get_field_index(name)])


def shown(column: pa.Array | pa.ChunkedArray, at: int) -> object:
    """A value for a message: also one that Python cannot hold, such as text that is not UTF-8 or the year 10000."""
    value = column[at]
    try:
        return value.as_py()
    except (UnicodeDecodeError, OverflowError, ValueError):
        pass
    kind = column.type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if not text and not pa.types.is_temporal(kind):
        return f"a {kind} that Python cannot hold"
    if pa.types.is_date32(kind):
        value = value.cast(pa.int32())
    return f"{value.cast(pa.binary() if text else pa.int64()).as_py()!r} ({kind})"


def shown_row(names: Sequence[str], columns: Sequence[Any], at: int) -> dict[str, object]:
    """A row for a message."""
    return {name: shown(column, at) for name, column in zip(names, columns, strict=True)}
