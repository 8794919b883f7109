"""Convert Arrow to pandas exactly as Spark's own `applyInPandasWithState` worker does.

A job's function must not notice that its rows were sent as Arrow payloads. So this module produces the
dtypes and Python values that the running release of PySpark would produce for the same rows, including its
oddities. Two things make that difficult:

- Spark converts each key's rows alone. pandas has no integer or boolean with NULLs, so an integer column is
  ``int64`` for one key and ``float64`` for another, and the same happens *inside* arrays, structs and
  maps. Rows of many keys may be converted together only if the keys have the same pattern of NULLs;
  `compute_null_flags` computes the pattern, and `convert_keys` applies it to keys.
- The releases differ; see `_Rules`.

Spark's option ``spark.sql.execution.pythonUDF.pandas.preferIntExtensionDtype`` (4.2 and later, off by default)
would produce the nullable ``Int64`` for top-level integers. This module does not support it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from arrow_schemas.columns import combine_chunks
from spark_state_ext.errors import UnsupportedTypeError
from spark_state_ext.spark.compat import PANDAS_MAJOR

__all__ = [
    "column_to_series",
    "compute_null_flags",
    "convert_keys",
    "dtype_depends_on_nulls",
    "find_beyond_pandas",
    "make_empty_frame",
    "table_to_frame",
]

# Errors of Arrow and pandas for a time beyond 64 bits of nanoseconds.
_BEYOND_PANDAS = (pa.ArrowInvalid, pd.errors.OutOfBoundsDatetime, OverflowError)
Flags = npt.NDArray[np.bool_]
Convert = Callable[[Any], Any]


# -- differences between releases of PySpark and pandas --------------------------------------------------


@dataclass(frozen=True)
class _Rules:
    """Behaviour of Spark's worker for the types on which its releases differ."""

    options: dict[str, bool]
    """Options of `pyarrow.Array.to_pandas` for nested types and intervals (in old releases: for all types)."""
    zoned_by_arrow: bool
    """Arrow converts timestamps to local time and to nanoseconds; otherwise pandas does, after the conversion."""
    interval_dtype: str
    """The dtype of a day-time interval."""


@functools.cache
def _get_rules(version: tuple[int, int]) -> _Rules:
    options = {"date_as_object": True}
    if version >= (4, 0):
        # 3.5 does not set this, so its timestamps keep Arrow's microseconds if pandas and pyarrow can hold them.
        options["coerce_temporal_nanoseconds"] = True
    if version >= (4, 2):
        # Integers next to a NULL within an array, struct or map stay Python ints; before, they became floats.
        options["integer_object_nulls"] = True
    micro = version >= (4, 2) and PANDAS_MAJOR >= 3
    return _Rules(
        options=options,
        zoned_by_arrow=version >= (4, 2),
        interval_dtype="timedelta64[us]" if micro else "timedelta64[ns]",
    )


# -- public ---------------------------------------------------------------------------------------------


def column_to_series(column: pa.Array | pa.ChunkedArray, timezone: str, version: tuple[int, int]) -> pd.Series[Any]:
    """Convert a column of rows that Spark would convert together: one key's rows of one batch."""
    rules = _get_rules(version)
    column = _move_to_session_zone(column, timezone)
    kind = column.type
    if pat.is_nested(kind):
        # As one array: PyArrow chooses the dtypes within structs chunk by chunk.
        series = _convert_nested(combine_chunks(column), timezone, rules)
    elif pat.is_timestamp(kind):
        series = _convert_timestamps(column, timezone, rules)
    elif pat.is_duration(kind):
        series = column.to_pandas(**rules.options).astype(rules.interval_dtype)
    else:
        series = column.to_pandas(date_as_object=True)
    series = series.copy()  # arrays without NULLs are read-only views of Arrow's memory
    series.name = None
    return series


def table_to_frame(table: pa.Table, names: list[str], timezone: str, version: tuple[int, int]) -> pd.DataFrame:
    """Convert one key's rows to the frame that the user's function gets."""
    if len(names) != table.num_columns:
        raise ValueError(f"{len(names)} names for {table.num_columns} columns")
    columns = {i: column_to_series(table.column(i), timezone, version) for i in range(len(names))}
    frame = pd.DataFrame(columns, index=pd.RangeIndex(table.num_rows), copy=False)
    frame.columns = pd.Index(names)
    return frame


def find_beyond_pandas(column: pa.Array | pa.ChunkedArray, timezone: str, version: tuple[int, int]) -> int | None:
    """Return the first row with a time that pandas cannot hold; None if there is no such row."""

    def converts(start: int, stop: int) -> bool:
        try:
            column_to_series(column.slice(start, stop - start), timezone, version)
        except _BEYOND_PANDAS:
            return False
        return True

    start, stop = 0, len(column)
    if converts(start, stop):
        return None
    while stop - start > 1:
        middle = (start + stop) // 2
        start, stop = (middle, stop) if converts(start, middle) else (start, middle)
    return start


def make_empty_frame(names: list[str]) -> pd.DataFrame:
    """Return the frame that the user's function gets on a timeout: no rows, all columns of dtype object."""
    return pd.DataFrame(columns=pd.Index(names))


def dtype_depends_on_nulls(kind: pa.DataType) -> bool:
    """Return whether a row's conversion changes if another row is NULL or has a NULL within it.

    True for integers and booleans and for nested types that contain them at any depth. In a nested type the
    NULLs of these integers and booleans matter, not only the column's own: see `compute_null_flags`.
    """
    if pat.is_integer(kind) or pat.is_boolean(kind):
        return True
    return any(dtype_depends_on_nulls(child) for child in _list_child_types(kind))


def compute_null_flags(column: pa.Array | pa.ChunkedArray) -> list[Flags]:
    """Return what determines dtypes: for each integer or boolean in the type, the rows with a NULL there.

    Two sets of rows may be converted together if each of these arrays has a True in both sets or in neither.
    """
    return _compute_flags(combine_chunks(column))


def convert_keys(column: pa.Array | pa.ChunkedArray, timezone: str, version: tuple[int, int]) -> list[object]:
    """Convert each row separately to the object that Spark puts into the key tuple of its group."""
    array = combine_chunks(column)
    classes = list(_split_into_classes(_compute_flags(array), len(array)))
    if len(classes) == 1:
        return _convert_scalars(column_to_series(array, timezone, version))
    keys: list[object] = [None] * len(array)
    for rows in classes:
        scalars = _convert_scalars(column_to_series(array.take(pa.array(rows)), timezone, version))
        for row, scalar in zip(rows.tolist(), scalars, strict=True):
            keys[row] = scalar
    return keys


# -- flat types -----------------------------------------------------------------------------------------


def _convert_timestamps(column: pa.Array | pa.ChunkedArray, timezone: str, rules: _Rules) -> pd.Series[Any]:
    zone = column.type.tz
    series: pd.Series[Any]
    if rules.zoned_by_arrow:
        # This differs from pandas, which may have other zone rules for the far past and future.
        if zone is not None:
            column = pc.local_timestamp(column)
        series = column.cast(pa.timestamp("ns")).to_pandas()
    elif zone is not None:
        series = column.to_pandas(**rules.options).dt.tz_convert(timezone).dt.tz_localize(None)
    else:
        series = column.to_pandas(**rules.options).astype("datetime64[ns]")
    return series


def _convert_scalars(series: pd.Series[Any]) -> list[object]:
    """Return the elements as `series[i]` does; iterating over a series of numbers returns other types."""
    dtype = series.dtype
    if isinstance(dtype, pd.StringDtype) or (isinstance(dtype, np.dtype) and dtype.kind in "biuf"):
        return list(series.to_numpy())
    return list(series)


# -- nested types ---------------------------------------------------------------------------------------


def _convert_nested(array: pa.Array, timezone: str, rules: _Rules) -> pd.Series[Any]:
    if _has_map(array.type):
        # For a slice of a map column pyarrow looks at all rows of the column; so copy the slice.
        array = array.take(pa.array(np.arange(len(array))))
    series: pd.Series[Any] = array.to_pandas(**rules.options)
    convert = _make_value_converter(array.type, timezone)
    if convert is None:
        return series
    values = np.empty(len(series), dtype=object)
    for i, value in enumerate(series):  # not `values[:] = list`, which would unpack arrays of one length
        values[i] = None if value is None else convert(value)
    return pd.Series(values, dtype=object)


def _make_value_converter(kind: pa.DataType, timezone: str) -> Convert | None:
    """Return a converter for the elements of `to_pandas`, or None if they need no conversion.

    The converters do not handle NULLs at their own level (the caller does). Like Spark, they accept odd shapes of
    numpy, such as the two-dimensional array for an array of equally long arrays of timestamps.
    """
    if pat.is_map(kind):
        return _make_map_converter(kind, timezone)
    if pat.is_list(kind) or pat.is_large_list(kind):
        element = _make_value_converter(kind.value_type, timezone)
        if element is None:
            return None
        return lambda value: np.array([None if v is None else element(v) for v in value])
    if pat.is_struct(kind):
        return _make_struct_converter(kind, timezone)
    if pat.is_timestamp(kind):
        if kind.tz is None:
            return pd.Timestamp
        return lambda value: _local_timestamp(value, timezone)
    return None


def _local_timestamp(value: Any, timezone: str) -> Any:
    stamp = pd.Timestamp(value)
    if stamp.tzinfo is None:  # Arrow returns naive UTC within arrays, and aware datetimes within structs and maps
        stamp = stamp.tz_localize("UTC")
    return stamp.tz_convert(timezone).tz_localize(None)


def _make_map_converter(kind: pa.MapType, timezone: str) -> Convert:
    of_key = _make_value_converter(kind.key_type, timezone)
    of_value = _make_value_converter(kind.item_type, timezone)
    if of_key is None and of_value is None:
        return dict

    def convert(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        return {
            (k if of_key is None or k is None else of_key(k)): (v if of_value is None or v is None else of_value(v))
            for k, v in pairs
        }

    return convert


def _make_struct_converter(kind: pa.StructType, timezone: str) -> Convert:
    spark_value = _make_spark_converter(kind)
    if spark_value is not None:
        return spark_value
    fields = [kind.field(i) for i in range(kind.num_fields)]
    names = [field.name for field in fields]
    if len(set(names)) != len(names):
        raise UnsupportedTypeError(f"a struct has several fields of the same name: {names}; rename them")
    converters = [_make_value_converter(field.type, timezone) for field in fields]
    if all(converter is None for converter in converters):
        return dict

    def convert(value: dict[str, Any]) -> dict[str, Any]:
        return {
            name: v if converter is None or v is None else converter(v)
            for (name, v), converter in zip(value.items(), converters, strict=True)
        }

    return convert


def _make_spark_converter(kind: pa.StructType) -> Convert | None:
    """Return the converter of a struct that stands for another Spark type, recognised by its metadata as in Spark."""
    marks = {
        (field.name, mark)
        for field in (kind.field(i) for i in range(kind.num_fields))
        for mark, on in (field.metadata or {}).items()
        if on == b"true"
    }
    names = {kind.field(i).name for i in range(kind.num_fields)}
    if ("metadata", b"variant") in marks and "value" in names:
        from pyspark.sql.types import VariantVal

        return lambda value: VariantVal(value["value"], value["metadata"])
    if ("wkb", b"geometry") in marks and "srid" in names:
        from pyspark.sql.types import Geometry

        return lambda value: Geometry.fromWKB(value["wkb"], value["srid"])
    if ("wkb", b"geography") in marks and "srid" in names:
        from pyspark.sql.types import Geography

        return lambda value: Geography.fromWKB(value["wkb"], value["srid"])
    return None


# -- Arrow ----------------------------------------------------------------------------------------------


def _list_child_types(kind: pa.DataType) -> list[pa.DataType]:
    if pat.is_map(kind):
        return [kind.key_type, kind.item_type]
    if pat.is_list(kind) or pat.is_large_list(kind):
        return [kind.value_type]
    if pat.is_struct(kind):
        return [kind.field(i).type for i in range(kind.num_fields)]
    return []


def _has_map(kind: pa.DataType) -> bool:
    return pat.is_map(kind) or any(_has_map(child) for child in _list_child_types(kind))


def _move_to_session_zone(column: pa.Array | pa.ChunkedArray, timezone: str) -> pa.Array | pa.ChunkedArray:
    """Label timestamps with the session's zone, as Spark does; the instants do not change."""
    kind = _type_in_session_zone(column.type, timezone)
    return column if kind == column.type else column.cast(kind)


def _type_in_session_zone(kind: pa.DataType, timezone: str) -> pa.DataType:
    if pat.is_timestamp(kind):
        return kind if kind.tz is None else pa.timestamp(kind.unit, tz=timezone)

    def field(old: pa.Field) -> pa.Field:
        return old.with_type(_type_in_session_zone(old.type, timezone))

    if pat.is_map(kind):
        return pa.map_(field(kind.key_field), field(kind.item_field), keys_sorted=kind.keys_sorted)
    if pat.is_list(kind):
        return pa.list_(field(kind.value_field))
    if pat.is_large_list(kind):
        return pa.large_list(field(kind.value_field))
    if pat.is_struct(kind):
        return pa.struct([field(kind.field(i)) for i in range(kind.num_fields)])
    return kind


# -- classes of rows that convert alike -------------------------------------------------------------------


def _compute_flags(array: pa.Array) -> list[Flags]:
    kind = array.type
    if not dtype_depends_on_nulls(kind):
        return []
    if pat.is_struct(kind):
        # `field`, not `flatten`: pyarrow uses the fields' own NULLs, whether or not the struct is NULL.
        return [flags for i in range(kind.num_fields) for flags in _compute_flags(array.field(i))]
    if pat.is_map(kind):
        inner = _compute_flags(array.keys) + _compute_flags(array.items)
        return [_any_within(flags, array.offsets) for flags in inner]
    if pat.is_list(kind) or pat.is_large_list(kind):
        return [_any_within(flags, array.offsets) for flags in _compute_flags(array.values)]
    flags: Flags = array.is_null().to_numpy(zero_copy_only=False)
    return [flags]


def _any_within(flags: Flags, offsets: pa.Array) -> Flags:
    """Reduce flags of a list's values to flags of its rows."""
    before = np.concatenate([[0], np.cumsum(flags)])
    bounds = offsets.to_numpy()
    result: Flags = before[bounds[1:]] > before[bounds[:-1]]
    return result


def _split_into_classes(flags: list[Flags], rows: int) -> Iterator[npt.NDArray[np.intp]]:
    """Split rows into classes of equal flags."""
    codes = np.zeros(rows, dtype=np.intp)
    count = 1
    for column_flags in flags:
        codes = codes * 2 + column_flags
        used = np.flatnonzero(np.bincount(codes, minlength=2 * count))
        numbers = np.zeros(2 * count, dtype=np.intp)
        count = len(used)
        numbers[used] = np.arange(count)
        codes = numbers[codes]
    if count <= 1:
        yield np.arange(rows)
        return
    for code in range(count):
        yield np.flatnonzero(codes == code)
