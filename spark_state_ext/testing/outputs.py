"""What a function gave, as a table: what Spark makes of the frames that leave its stateful operator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from spark_state_ext.errors import ResultTypeError, StateValueError
from spark_state_ext.functions.reasons import conversion_reason
from spark_state_ext.functions.tables import misread_types
from spark_state_ext.spark.shuffle.output import unpack

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["table_of_frames", "table_of_payloads"]


def table_of_payloads(frames: Iterable[pd.DataFrame], fields: Sequence[pa.Field]) -> pa.Table:
    """The rows in the payloads that functions over Arrow tables and over rows give."""
    payloads = [pa.record_batch([pa.array(frame.iloc[:, 0], pa.binary())], ["payload"]) for frame in frames]
    schema = pa.schema(fields)
    return pa.Table.from_batches([batch.cast(schema) for batch in unpack(payloads)], schema)


def table_of_frames(frames: Iterable[pd.DataFrame], fields: Sequence[pa.Field], timezone: str) -> pa.Table:
    """The rows of frames, each column as its type."""
    schema = pa.schema([field.with_nullable(True) for field in fields])
    tables = [_table(frame, schema, timezone) for frame in frames if len(frame) or len(frame.columns)]
    return pa.concat_tables([schema.empty_table(), *tables]).combine_chunks()


def _table(frame: pd.DataFrame, schema: pa.Schema, timezone: str) -> pa.Table:
    if len(frame.columns) != len(schema):
        raise ResultTypeError(
            f"the function gave a frame with {len(frame.columns)} columns, {', '.join(map(str, frame.columns))}; the "
            f"output schema has {', '.join(schema.names)}"
        )
    # By name, and a column that is not there is NULL: Spark joins a frame with the output's columns to it.
    columns = [
        _column(frame[field.name], field, timezone) if field.name in frame.columns else pa.nulls(len(frame), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _column(values: Any, field: pa.Field, timezone: str) -> pa.Array:
    if pa.types.is_timestamp(field.type) and field.type.tz and getattr(values.dtype, "kind", "") == "M":
        if getattr(values.dtype, "tz", None) is None:
            values = values.dt.tz_localize(timezone, ambiguous=False)
        values = values.dt.tz_convert("UTC")
    try:
        return _as_type(values, field.type)
    except (pa.ArrowException, AttributeError, TypeError, ValueError, OverflowError) as error:
        raise StateValueError(
            f"the function gave a frame whose column {field.name!r} of type {field.type} cannot hold "
            f"{values.dtype}: {conversion_reason(error)}"
        ) from error


def _as_type(values: Any, kind: pa.DataType) -> pa.Array:
    """As Spark converts by default: by Arrow, which may cut off digits, and with a cast where that takes one."""
    mask = None if hasattr(values.array, "__arrow_array__") else values.isna()
    try:
        return pa.Array.from_pandas(values, type=kind, safe=False, mask=mask)
    except (pa.ArrowException, TypeError):
        found = pa.Array.from_pandas(values, mask=mask)
        misread = misread_types(found.type, kind)
        if misread is not None and pa.types.is_string(misread[1]):
            raise ValueError(f"{misread[0]} is not made text by itself") from None
        return found.cast(kind, safe=False)
