"""What a function hands to its `StateBatch`, in whatever form: masks, times, and tables that stay its own."""

from __future__ import annotations

import contextlib
import reprlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.equality import BoolArray
from spark_state_ext.errors import StateValueError
from spark_state_ext.functions.reasons import conversion_reason
from spark_state_ext.functions.tables import is_number, is_table

__all__ = ["mask_of", "milliseconds", "own"]


def milliseconds(given: Any, event_time: bool) -> Any:
    """Times in whatever form as whole milliseconds."""
    try:
        if isinstance(given, (str, bytes, bytearray, memoryview)) or is_table(given):
            raise ValueError(f"not {type(given).__name__}")
        column = given if isinstance(given, (pa.Array, pa.ChunkedArray)) else pa.array(given)
        kind = column.type
        if event_time and pa.types.is_timestamp(kind):
            column = _whole(column, pa.timestamp("ms", tz=kind.tz))
        elif not event_time and pa.types.is_duration(kind):
            column = _whole(column, pa.duration("ms"))
        elif not (is_number(kind) or pa.types.is_null(kind)):
            raise ValueError(f"not {kind}")
        return column.cast(pa.int64())
    except (pa.ArrowException, AttributeError, TypeError, ValueError, OverflowError) as error:
        what = "timestamps" if event_time else "durations"
        raise StateValueError(
            f"set_timeout() takes {what}, or whole numbers of milliseconds, and was given "
            f"{reprlib.repr(given)}: {conversion_reason(error)}"
        ) from error


def own(table: pa.Table) -> pa.Table:
    """The same in memory of its own: columns made of NumPy's or pandas' share theirs, which the function may change."""
    columns = [pa.concat_arrays(column.chunks) if column.num_chunks else column for column in table.columns]
    return pa.table(columns, schema=table.schema)


def _whole(column: Any, kind: pa.DataType) -> Any:
    """Times in another unit: what is less than one of it is cut off, and what it cannot hold is an error."""
    return column.cast(options=pc.CastOptions(kind, allow_time_truncate=True))


def mask_of(given: Any, length: int) -> BoolArray:
    """A mask over keys in whatever form; NULL chooses none, as in SQL and in Arrow's filter."""
    mask = None
    if not isinstance(given, (pa.Array, pa.ChunkedArray)):
        mask = np.asarray(given)
        if mask.dtype == np.object_ and mask.ndim == 1:
            # Booleans and NULLs, as lists and columns of polars and pandas have them.
            with contextlib.suppress(pa.ArrowException):
                given, mask = pa.array(mask, from_pandas=True), None
    if isinstance(given, (pa.Array, pa.ChunkedArray)) and pa.types.is_boolean(given.type):
        mask = pc.fill_null(given, False).to_numpy(zero_copy_only=False)
    if mask is None or mask.dtype != np.bool_ or mask.shape != (length,):
        raise StateValueError(
            f"a mask must be {length} booleans, one for each key of the batch, not {reprlib.repr(given)}"
        )
    chosen: BoolArray = mask
    return chosen
