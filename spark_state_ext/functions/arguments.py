"""Convert what a function passes to its `StateBatch`: masks, times and tables."""

from __future__ import annotations

import contextlib
import reprlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.equality import BoolArray
from spark_state_ext.errors import StateValueError
from spark_state_ext.functions.conversion_errors import explain_conversion_error
from spark_state_ext.functions.tables import is_number, is_table

__all__ = ["copy_table", "to_mask", "to_milliseconds"]


def to_milliseconds(times: Any, event_time: bool) -> Any:
    """Convert times of any supported type to whole milliseconds."""
    try:
        if isinstance(times, (str, bytes, bytearray, memoryview)) or is_table(times):
            raise ValueError(f"not {type(times).__name__}")
        column = times if isinstance(times, (pa.Array, pa.ChunkedArray)) else pa.array(times)
        kind = column.type
        if event_time and pa.types.is_timestamp(kind):
            column = _truncate(column, pa.timestamp("ms", tz=kind.tz))
        elif not event_time and pa.types.is_duration(kind):
            column = _truncate(column, pa.duration("ms"))
        elif not (is_number(kind) or pa.types.is_null(kind)):
            raise ValueError(f"not {kind}")
        return column.cast(pa.int64())
    except (pa.ArrowException, AttributeError, TypeError, ValueError, OverflowError) as error:
        what = "timestamps" if event_time else "durations"
        raise StateValueError(
            f"set_timeout() takes {what} or whole numbers of milliseconds; it was given "
            f"{reprlib.repr(times)}: {explain_conversion_error(error)}"
        ) from error


def copy_table(table: pa.Table) -> pa.Table:
    """Copy a table, because columns made from NumPy or pandas share memory that the function may change."""
    columns = [pa.concat_arrays(column.chunks) if column.num_chunks else column for column in table.columns]
    return pa.table(columns, schema=table.schema)


def _truncate(column: Any, kind: pa.DataType) -> Any:
    """Convert times to another unit: cut off fractions of it, and fail if it cannot hold a value."""
    return column.cast(options=pc.CastOptions(kind, allow_time_truncate=True))


def to_mask(mask_like: Any, length: int) -> BoolArray:
    """Convert a mask over the keys to NumPy; NULL does not select a key, as in SQL and in Arrow's filter."""
    mask = None
    if not isinstance(mask_like, (pa.Array, pa.ChunkedArray)):
        mask = np.asarray(mask_like)
        if mask.dtype == np.object_ and mask.ndim == 1:
            # Booleans and NULLs, as in lists and in columns of polars and pandas.
            with contextlib.suppress(pa.ArrowException):
                mask_like, mask = pa.array(mask, from_pandas=True), None
    if isinstance(mask_like, (pa.Array, pa.ChunkedArray)) and pa.types.is_boolean(mask_like.type):
        mask = pc.fill_null(mask_like, False).to_numpy(zero_copy_only=False)
    if mask is None or mask.dtype != np.bool_ or mask.shape != (length,):
        raise StateValueError(
            f"a mask must be {length} booleans, one for each key of the batch, not {reprlib.repr(mask_like)}"
        )
    is_selected: BoolArray = mask
    return is_selected
