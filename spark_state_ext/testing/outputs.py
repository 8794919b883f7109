"""Converts a function's output to a table, like Spark does with the frames that leave its stateful operator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from spark_state_ext.errors import ResultTypeError, StateValueError
from spark_state_ext.functions.conversion_errors import explain_conversion_error
from spark_state_ext.functions.tables import find_misread_types
from spark_state_ext.spark.shuffle.output import unpack

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["convert_frames", "convert_payloads"]


def convert_payloads(frames: Iterable[pd.DataFrame], fields: Sequence[pa.Field]) -> pa.Table:
    """Return the rows in the payloads of functions over Arrow tables or over rows."""
    payloads = [pa.record_batch([pa.array(frame.iloc[:, 0], pa.binary())], ["payload"]) for frame in frames]
    schema = pa.schema(fields)
    return pa.Table.from_batches([batch.cast(schema) for batch in unpack(payloads)], schema)


def convert_frames(frames: Iterable[pd.DataFrame], fields: Sequence[pa.Field], timezone: str) -> pa.Table:
    """Return the rows of frames, each column with its type."""
    schema = pa.schema([field.with_nullable(True) for field in fields])
    tables = [_convert_frame(frame, schema, timezone) for frame in frames if len(frame) or len(frame.columns)]
    return pa.concat_tables([schema.empty_table(), *tables]).combine_chunks()


def _convert_frame(frame: pd.DataFrame, schema: pa.Schema, timezone: str) -> pa.Table:
    if len(frame.columns) != len(schema):
        raise ResultTypeError(
            f"the function returned a frame with {len(frame.columns)} columns, {', '.join(map(str, frame.columns))}; "
            f"the output schema has {', '.join(schema.names)}"
        )
    # Columns are matched by name, and a missing column is NULL: Spark joins the output's columns to a frame.
    columns = [
        _convert_column(frame[field.name], field, timezone)
        if field.name in frame.columns
        else pa.nulls(len(frame), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _convert_column(values: Any, field: pa.Field, timezone: str) -> pa.Array:
    if pa.types.is_timestamp(field.type) and field.type.tz and getattr(values.dtype, "kind", "") == "M":
        if getattr(values.dtype, "tz", None) is None:
            values = values.dt.tz_localize(timezone, ambiguous=False)
        values = values.dt.tz_convert("UTC")
    try:
        return _convert_values(values, field.type)
    except (pa.ArrowException, AttributeError, TypeError, ValueError, OverflowError) as error:
        raise StateValueError(
            f"the function returned a frame whose column {field.name!r} of type {field.type} cannot hold "
            f"{values.dtype}: {explain_conversion_error(error)}"
        ) from error


def _convert_values(values: Any, kind: pa.DataType) -> pa.Array:
    """Convert like Spark by default: with Arrow, which may cut off digits, or with a cast if Arrow refuses."""
    mask = None if hasattr(values.array, "__arrow_array__") else values.isna()
    try:
        return pa.Array.from_pandas(values, type=kind, safe=False, mask=mask)
    except (pa.ArrowException, TypeError):
        array = pa.Array.from_pandas(values, mask=mask)
        misread = find_misread_types(array.type, kind)
        if misread is not None and pa.types.is_string(misread[1]):
            raise ValueError(f"{misread[0]} is not converted to text automatically") from None
        return array.cast(kind, safe=False)
