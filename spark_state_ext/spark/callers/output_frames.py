"""Make frames for Spark from users' results: from rows, and from frames with columns that Spark cannot take."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql.types import DataType, StructField, StructType, TimestampType

from arrow_schemas.columns import combine_chunks
from arrow_schemas.spark_types import state_fields
from spark_state_ext.functions.missing_values import is_missing
from spark_state_ext.spark.callers.state_values import to_text
from spark_state_ext.spark.compat import PANDAS_MAJOR

__all__ = ["find_non_text", "is_convertible", "make_frame", "replace_extension_columns"]

_DTYPES: dict[type, Any] = {int: np.int64, float: np.float64, bool: np.bool_}
# Types of values that a string column takes, or that Spark checks itself.
_TEXTS = frozenset({str, int, float, bool, type(None)})


def make_frame(rows: Sequence[Any], names: list[Any], widen: bool) -> pd.DataFrame:
    """Return rows as a frame. A column of numbers of one type has that dtype, any other column holds Python values.

    With `widen`, whole numbers and None next to floats become floats: the rows came from frames whose columns had
    different types, and this is how pandas 2, and so Spark, joins such frames.
    """
    columns = {}
    for at, values in enumerate(zip(*rows, strict=True)):
        kinds = set(map(type, values))
        if widen and len(kinds) > 1 and _would_become_floats(values, kinds):
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


def is_convertible(value: Any, field: StructField) -> bool:
    """Return whether Spark can convert a value of a row; it uses Arrow, with or without a cast."""
    (arrow,) = state_fields(StructType([field]).json(), "output")
    for cast in (False, True):
        with contextlib.suppress(pa.ArrowException, TypeError, ValueError, OverflowError):
            _ = pa.array([value]).cast(arrow.type) if cast else pa.array([value], arrow.type)
            return True
    return False


def _would_become_floats(values: Sequence[Any], kinds: set[type]) -> bool:
    """Return whether pandas 2 would convert all values to floats; this needs a float other than NaN."""
    return (
        kinds <= {int, float, type(None)}
        and any(type(value) is float and not math.isnan(value) for value in values)
        and all(type(value) is not int or -(1 << 63) <= value < 1 << 63 for value in values)
    )


def replace_extension_columns(frame: pd.DataFrame, types: StructType | None, timezone: str) -> pd.DataFrame:
    """Return a frame with NumPy columns in place of columns that Spark cannot join or convert."""
    replaced = {
        at: column
        for at, dtype in enumerate(frame.dtypes)
        if isinstance(dtype, pd.api.extensions.ExtensionDtype)
        and (column := _replace_column(frame.iloc[:, at], _find_type(frame.columns[at], types), timezone)) is not None
    }
    if not replaced:
        return frame
    columns = {at: replaced[at] if at in replaced else frame.iloc[:, at] for at in range(len(frame.columns))}
    plain = pd.DataFrame(columns, index=frame.index, copy=False)
    plain.columns = frame.columns
    return plain


def _find_type(label: Any, types: StructType | None) -> DataType | None:
    return types[label].dataType if types is not None and label in types.names else None


def _replace_column(column: pd.Series[Any], spark_type: DataType | None, timezone: str) -> Any:
    """Return a column of an extension type as a NumPy column for Spark; None if Spark can take it unchanged."""
    dtype = column.dtype
    if isinstance(dtype, pd.ArrowDtype):
        values = combine_chunks(pa.array(column.array))
        kind = values.type
        if pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
            # By position: `to_pandas` returns a Series with other labels.
            times = pd.Series(values.to_pandas().array, index=column.index)
            if pa.types.is_timestamp(kind) and kind.tz is None and isinstance(spark_type, TimestampType):
                # As Spark does with NumPy's timestamps.
                return times.dt.tz_localize(timezone, ambiguous=False)
            return times
        objects = np.empty(len(values), dtype=object)
        with_dicts = _make_dict_converter(kind)
        for at, value in enumerate(values.to_pylist()):  # lists stay lists
            objects[at] = value if with_dicts is None or value is None else with_dicts(value)
        return pd.Series(objects, index=column.index, dtype=object)
    if isinstance(dtype, pd.CategoricalDtype):
        whole = dtype.categories.dtype.kind in "iu"
        return column.astype(object) if whole and column.isna().any() else None
    if isinstance(dtype, pd.StringDtype) and dtype.storage == "pyarrow" and PANDAS_MAJOR < 3:
        return column.astype(object)
    return None


def _make_dict_converter(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """Return a converter of map entries in a value to dicts; None if its type has no map. (PyArrow 20 can do it.)"""
    if pa.types.is_map(kind):
        item = _make_dict_converter(kind.item_type) or _identity
        return lambda entries: {key: None if value is None else item(value) for key, value in entries}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        convert = _make_dict_converter(kind.value_type)
        return (
            None if convert is None else lambda values: [None if value is None else convert(value) for value in values]
        )
    if pa.types.is_struct(kind):
        converters = {
            field.name: converter for field in kind if (converter := _make_dict_converter(field.type)) is not None
        }
        return (
            (lambda value: {k: converters[k](v) if k in converters and v is not None else v for k, v in value.items()})
            if converters
            else None
        )
    return None


def _identity(value: Any) -> Any:
    return value


def find_non_text(values: pd.Series[Any] | Sequence[Any]) -> int | None:
    """Return the first position of a value that a string column does not take; None if there is no such value."""
    if isinstance(values, pd.Series) and (values.dtype.kind in "biuf" or isinstance(values.dtype, pd.StringDtype)):
        return None
    if _TEXTS.issuperset(map(type, values)):
        return None
    return next((at for at, value in enumerate(values) if not _is_text(value)), None)


def _is_text(value: Any) -> bool:
    if is_missing(value):
        return True
    try:
        text = to_text(value)
        return isinstance(text, str) or text.decode() is not None
    except (TypeError, UnicodeDecodeError):
        return False
