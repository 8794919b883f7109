"""Frames for Spark of what users' functions give: of rows, and of frames with columns that Spark cannot take."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql.types import DataType, StructField, StructType, TimestampType

from arrow_schemas.columns import flat
from arrow_schemas.spark_types import state_fields
from spark_state_ext.functions.missing import is_missing
from spark_state_ext.spark.callers.state_values import text_of
from spark_state_ext.spark.compat import PANDAS_MAJOR

__all__ = ["first_without_text", "frame_of_rows", "is_converted", "plain_frame"]

_DTYPES: dict[type, Any] = {int: np.int64, float: np.float64, bool: np.bool_}
# Types of values that a string column takes, or that Spark judges.
_TEXTS = frozenset({str, int, float, bool, type(None)})


def frame_of_rows(rows: Sequence[Any], names: list[Any], widen: bool) -> pd.DataFrame:
    """Rows as a frame. A column of numbers of one type has that as its dtype, any other holds Python values.

    With `widen`, whole numbers and None beside floats become floats: columns of the frames that the rows came from were
    of the one type or the other, and this is how pandas 2, and so Spark, joins them.
    """
    columns = {}
    for at, values in enumerate(zip(*rows, strict=True)):
        kinds = set(map(type, values))
        if widen and len(kinds) > 1 and _become_floats(values, kinds):
            kinds = {float}
            values = tuple(math.nan if value is None else value for value in values)
        dtype = _DTYPES.get(kinds.pop(), object) if len(kinds) == 1 else object
        try:
            columns[at] = np.fromiter(values, dtype=dtype, count=len(rows))
        except OverflowError:  # a whole number beyond 64 bits
            columns[at] = np.fromiter(values, dtype=object, count=len(rows))
    frame = pd.DataFrame(columns, index=pd.RangeIndex(len(rows)), copy=False)
    frame.columns = pd.Index(names)
    return frame


def is_converted(value: Any, field: StructField) -> bool:
    """Whether Spark's conversion, which is Arrow's with a cast or without, takes a value of a row."""
    (arrow,) = state_fields(StructType([field]).json(), "output")
    for cast in (False, True):
        with contextlib.suppress(pa.ArrowException, TypeError, ValueError, OverflowError):
            _ = pa.array([value]).cast(arrow.type) if cast else pa.array([value], arrow.type)
            return True
    return False


def _become_floats(values: Sequence[Any], kinds: set[type]) -> bool:
    """Whether pandas 2 makes floats of them all. Columns without any value but NaN or None have no say."""
    return (
        kinds <= {int, float, type(None)}
        and any(type(value) is float and not math.isnan(value) for value in values)
        and all(type(value) is not int or -(1 << 63) <= value < 1 << 63 for value in values)
    )


def plain_frame(frame: pd.DataFrame, types: StructType | None, timezone: str) -> pd.DataFrame:
    """A frame with columns of NumPy's types for those that Spark fails to join, or to convert."""
    found = {
        at: column
        for at, dtype in enumerate(frame.dtypes)
        if isinstance(dtype, pd.api.extensions.ExtensionDtype)
        and (column := _plain(frame.iloc[:, at], _type_of(frame.columns[at], types), timezone)) is not None
    }
    if not found:
        return frame
    columns = {at: found[at] if at in found else frame.iloc[:, at] for at in range(len(frame.columns))}
    plain = pd.DataFrame(columns, index=frame.index, copy=False)
    plain.columns = frame.columns
    return plain


def _type_of(label: Any, types: StructType | None) -> DataType | None:
    return types[label].dataType if types is not None and label in types.names else None


def _plain(column: pd.Series[Any], spark_type: DataType | None, timezone: str) -> Any:
    """A column of an extension's type for Spark; None where Spark can take it as it is."""
    dtype = column.dtype
    if isinstance(dtype, pd.ArrowDtype):
        values = flat(pa.array(column.array))
        kind = values.type
        if pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
            # By position: `to_pandas` gives a Series with labels of its own.
            times = pd.Series(values.to_pandas().array, index=column.index)
            if pa.types.is_timestamp(kind) and kind.tz is None and isinstance(spark_type, TimestampType):
                # As Spark does with NumPy's.
                return times.dt.tz_localize(timezone, ambiguous=False)
            return times
        objects = np.empty(len(values), dtype=object)
        with_dicts = _with_dicts(kind)
        for at, value in enumerate(values.to_pylist()):  # lists stay lists
            objects[at] = value if with_dicts is None or value is None else with_dicts(value)
        return pd.Series(objects, index=column.index, dtype=object)
    if isinstance(dtype, pd.CategoricalDtype):
        whole = dtype.categories.dtype.kind in "iu"
        return column.astype(object) if whole and column.isna().any() else None
    if isinstance(dtype, pd.StringDtype) and dtype.storage == "pyarrow" and PANDAS_MAJOR < 3:
        return column.astype(object)
    return None


def _with_dicts(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """What makes dicts of the entries of maps in a value; None if its type has no map. (PyArrow 20 and newer can.)"""
    if pa.types.is_map(kind):
        item = _with_dicts(kind.item_type) or _itself
        return lambda entries: {key: None if value is None else item(value) for key, value in entries}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        of_one = _with_dicts(kind.value_type)
        return None if of_one is None else lambda values: [None if it is None else of_one(it) for it in values]
    if pa.types.is_struct(kind):
        found = {field.name: made for field in kind if (made := _with_dicts(field.type)) is not None}
        return (
            (lambda value: {k: found[k](v) if k in found and v is not None else v for k, v in value.items()})
            if found
            else None
        )
    return None


def _itself(value: Any) -> Any:
    return value


def first_without_text(values: pd.Series[Any] | Sequence[Any]) -> int | None:
    """The first position of a value that no string column takes; None where there is none."""
    if isinstance(values, pd.Series) and (values.dtype.kind in "biuf" or isinstance(values.dtype, pd.StringDtype)):
        return None
    if _TEXTS.issuperset(map(type, values)):
        return None
    return next((at for at, value in enumerate(values) if not _is_text(value)), None)


def _is_text(value: Any) -> bool:
    if is_missing(value):
        return True
    try:
        text = text_of(value)
        return isinstance(text, str) or text.decode() is not None
    except (TypeError, UnicodeDecodeError):
        return False
