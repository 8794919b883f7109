"""Convert state columns between Arrow and the Python values of Spark's GroupState.

Spark passes state through `StructType.toInternal` and `fromInternal`, so this module uses these methods for every type
that they change: dates and times, and structs (`Row`). Flat columns that they do not change are converted in bulk.
"""

from __future__ import annotations

import datetime
import decimal
import math
import numbers
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegralType,
    MapType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from spark_state_ext.errors import StateValueError
from spark_state_ext.functions.conversion_errors import explain_conversion_error
from spark_state_ext.functions.missing_values import is_missing
from spark_state_ext.spark.compat import STATE_BINARY

__all__ = ["find_mutable_columns", "column_to_values", "make_row_copier", "to_text", "values_to_column"]

# Types of columns in which NaN is a value, and not NULL.
_WITH_NAN = (FloatType, DoubleType)
# Types whose values are never missing, except None.
_NEVER_MISSING = {int, bool, str, bytes, bytearray, datetime.date, datetime.datetime, list, tuple, dict, type(None)}
# Types of values that need no conversion for a string column.
_TEXT_VALUES: set[type] = {str, bytes, type(None)}
# The same for an integer column.
_WHOLE_VALUES: set[type] = {int, type(None)}
# The same for a column of dates.
_DATE_VALUES = {datetime.date, datetime.datetime, type(None)}
# The same for elements of an array, by its element type.
_PLAIN_ELEMENTS: dict[type[DataType], set[type]] = {StringType: _TEXT_VALUES, DoubleType: {int, float, type(None)}}
# Number of characters of a value in an error.
_CHARACTERS_MAX = 300
_FLOAT_MAX = float(np.finfo(np.float32).max)
# Types that can be iterated but do not stand for a list of their elements.
_NOT_LISTS = (str, bytes, bytearray, memoryview, Mapping)
_EPOCH_UTC = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_TIMESTAMP = TimestampType()
_MICROSECOND = datetime.timedelta(microseconds=1)
_INTEGER_TEMPORAL: dict[type[DataType], pa.DataType] = {
    TimestampType: pa.int64(),
    TimestampNTZType: pa.int64(),
    DateType: pa.int32(),
}


class _UnfitError(TypeError):
    """A value does not fit its column; the text is for the user."""


def column_to_values(column: pa.Array, spark_type: DataType, role: str = "state column") -> list[Any]:
    """Convert a state column to the values that `GroupState.get` returns."""
    try:
        return _column_to_values(column, spark_type)
    except UnicodeDecodeError as error:
        raise StateValueError(
            f"a {role} of type {spark_type.simpleString()} has text that is not UTF-8: {error}"
        ) from error
    except (ValueError, OverflowError) as error:
        raise StateValueError(
            f"a {role} of type {spark_type.simpleString()} has a value that Python cannot hold; its times are limited "
            f"to the years 1 to 9999 in the session's time zone: {error}"
        ) from error


def _column_to_values(column: pa.Array, spark_type: DataType) -> list[Any]:
    as_integer = _INTEGER_TEMPORAL.get(type(spark_type))
    if as_integer is not None:
        from_internal = _to_local_time if isinstance(spark_type, TimestampType) else spark_type.fromInternal
        return [None if v is None else from_internal(v) for v in column.cast(as_integer).to_pylist()]
    values: list[Any] = column.to_pylist()
    if isinstance(spark_type, BinaryType) and STATE_BINARY is not bytes:
        return [None if v is None else STATE_BINARY(v) for v in values]
    if isinstance(spark_type, (ArrayType, MapType, StructType)):
        convert = _make_from_arrow(spark_type)
        return [None if v is None else convert(v) for v in values]
    return values


def _to_local_time(us: int) -> datetime.datetime:
    """Return microseconds since 1970 as Spark's Python value: a naive time in the machine's zone."""
    try:
        local_time: datetime.datetime = _TIMESTAMP.fromInternal(us)
    except ValueError:
        # For the first day of the year 1 Python computes with the day before, which it cannot represent.
        local = time.localtime(us // 1_000_000)
        local_time = datetime.datetime(*local[:6], us % 1_000_000)  # noqa: DTZ001
    return local_time


def values_to_column(
    values: Sequence[Any],
    spark_type: DataType,
    arrow_type: pa.DataType,
    column: str,
    describe_owner: Callable[[int], str] = lambda row: "",
) -> pa.Array:
    """Convert Python values, such as arguments of `GroupState.update`, to an Arrow column.

    `column` and `describe_owner` are for the error's text: the column, and the owner of a row's value.
    """
    try:
        return _make_column(values, spark_type, arrow_type)
    except (
        pa.ArrowException,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        decimal.InvalidOperation,
    ) as error:
        culprit = _describe_culprit(values, spark_type, arrow_type, describe_owner)
        why = str(error) if isinstance(error, _UnfitError) else explain_conversion_error(error)
        raise StateValueError(f"{column} of type {spark_type.simpleString()} cannot hold {culprit}: {why}") from error


def _make_column(values: Sequence[Any], spark_type: DataType, arrow_type: pa.DataType) -> pa.Array:
    """Convert values as `values_to_column` does, but raise the original error."""
    # The set of types shows whether a value is missing or needs a conversion. Float columns skip this: NaN is a float.
    kinds = set() if isinstance(spark_type, _WITH_NAN) else set(map(type, values))
    if isinstance(spark_type, StringType):
        if not kinds <= _TEXT_VALUES:
            values = [None if is_missing(v) else to_text(v) for v in values]
        return pa.array(values, arrow_type)
    if not kinds <= _NEVER_MISSING:
        values = [None if is_missing(v) else v for v in values]
        kinds = set(map(type, values))
    if isinstance(spark_type, (TimestampType, TimestampNTZType)):
        to_internal = spark_type.toInternal
        numbers = [None if v is None else to_internal(v) for v in values]
        present = [number for number in numbers if number is not None]
        for extreme in (min(present), max(present)) if present else ():
            # A time beyond Python's years in the session's zone could be stored, but never be read again.
            _to_local_time(extreme) if isinstance(spark_type, TimestampType) else spark_type.fromInternal(extreme)
        return pa.array(numbers, pa.int64()).cast(arrow_type)
    if isinstance(spark_type, (ArrayType, MapType, StructType, DecimalType)):
        convert = _make_to_arrow(spark_type)
        return pa.array([None if v is None else convert(v) for v in values], arrow_type)
    if isinstance(spark_type, DateType) and not kinds <= _DATE_VALUES:
        # PyArrow would read a number as days.
        return pa.array([None if v is None else _to_date(v) for v in values], arrow_type)
    if isinstance(spark_type, IntegralType) and not kinds <= _WHOLE_VALUES:
        # PyArrow would cut off a float's fraction.
        return pa.array([None if v is None else _to_whole(v) for v in values], arrow_type)
    try:
        return _to_floats(values, arrow_type) if isinstance(spark_type, FloatType) else pa.array(values, arrow_type)
    except (pa.ArrowException, TypeError):
        plain = [None if is_missing(v, or_nan=False) else v for v in values]
        if plain.count(None) == values.count(None):
            raise
        return _make_column(plain, spark_type, arrow_type)


def find_mutable_columns(spark_type: StructType) -> list[int]:
    """Return the positions of columns whose values the function can change later: lists, dicts, bytearrays."""
    return [at for at, field in enumerate(spark_type.fields) if _make_copier(field.dataType) is not _identity]


def make_row_copier(spark_type: StructType, columns: str) -> Callable[[Sequence[Any]], tuple[Any, ...]] | None:
    """Return a function that copies rows, because the user's function may change them before their conversion.

    None if no column has values that can change.
    """
    copiers = [
        (at, spark_type.fields[at], _make_copier(spark_type.fields[at].dataType))
        for at in find_mutable_columns(spark_type)
    ]
    if not copiers:
        return None

    def copy_row(row: Sequence[Any]) -> tuple[Any, ...]:
        values = list(row)
        for at, field, copy in copiers:
            value = values[at]
            if not is_missing(value):
                try:
                    values[at] = copy(value)
                except Exception as error:
                    raise StateValueError(
                        f"{columns} {field.name!r} of type {field.dataType.simpleString()} cannot hold {value!r} "
                        f"({type(value).__name__}): {error}"
                    ) from error
        return tuple(values)

    return copy_row


def _make_copier(spark_type: DataType) -> Callable[[Any], Any]:
    """Return a function that copies one non-NULL value; `_identity` if values of this type cannot change.

    `values_to_column` converts the copy to the same value.
    """
    if isinstance(spark_type, BinaryType):
        return lambda v: bytes(v) if isinstance(v, (bytearray, memoryview)) else v
    if isinstance(spark_type, ArrayType):
        element = _make_part_copier(spark_type.elementType)
        if element is _identity:
            return lambda v: list(_check_elements(v))
        return lambda v: [element(x) for x in _check_elements(v)]
    if isinstance(spark_type, MapType):
        # Keys of a dict cannot change.
        item = _make_part_copier(spark_type.valueType)
        return lambda v: {a: item(b) for a, b in v.items()}
    if isinstance(spark_type, StructType):
        names = spark_type.names
        fields = [_make_part_copier(field.dataType) for field in spark_type.fields]
        return lambda v: tuple([copy(x) for copy, x in zip(fields, _struct_parts(v, names), strict=True)])
    return _identity


def _make_part_copier(spark_type: DataType) -> Callable[[Any], Any]:
    copy = _make_copier(spark_type)
    return copy if copy is _identity else lambda v: v if is_missing(v) else copy(v)


def _to_whole(value: Any) -> int:
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, bool) or plain != int(plain):
        raise _UnfitError(f"{plain!r} is not a whole number")
    return int(plain)


def _check_elements(value: Any) -> Iterable[Any]:
    if isinstance(value, _NOT_LISTS):
        raise _UnfitError("it is not a list")
    elements: Iterable[Any] = value
    return elements


def _to_date(value: Any) -> Any:
    if isinstance(value, np.datetime64):
        return value.astype("datetime64[D]").item()
    # NaT is an instance of `date`, and is not equal to itself.
    if not isinstance(value, datetime.date) or value != value:
        raise _UnfitError("it is not a date")
    return value


def _to_floats(values: Sequence[Any], arrow_type: pa.DataType) -> pa.Array:
    """Convert values to single floats; refuse values that are too large, which PyArrow would make infinite."""
    column = pa.array(values, arrow_type)
    for row in np.flatnonzero(np.isinf(column.to_numpy(zero_copy_only=False))):
        _check_float(values[int(row)])
    return column


def _check_float(value: Any) -> Any:
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, float) and abs(plain) > _FLOAT_MAX and not math.isinf(plain):
        raise _UnfitError("it is more than a float holds")
    return plain


def to_text(value: Any) -> str | bytes:
    """Convert a value for a string column: text stays, numbers and booleans are written as by the JVM."""
    plain = value.as_py() if isinstance(value, pa.Scalar) else value
    if isinstance(plain, (str, bytes)):
        return plain
    if isinstance(plain, (bytearray, memoryview)):
        return bytes(plain)
    is_time = isinstance(plain, (np.datetime64, np.timedelta64))  # NumPy would convert it to a whole number
    if isinstance(plain, np.generic) and not is_time:
        plain = plain.item()
    if isinstance(plain, bool):
        return str(plain).lower()
    if isinstance(plain, float):
        return _format_float(plain)
    if isinstance(plain, numbers.Number) and not is_time:
        return str(plain)
    raise _UnfitError("it is neither text nor a number; convert it to text in the function")


def _format_float(value: float) -> str:
    """Format a float as Java's `Double.toString` does."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return repr(value)
    sign, digits, exponent = decimal.Decimal(repr(value)).normalize().as_tuple()
    rest = "".join(map(str, digits[1:])) or "0"
    return f"{'-' * sign}{digits[0]}.{rest}E{len(digits) - 1 + int(exponent)}"


def _to_decimal(value: Any) -> decimal.Decimal:
    if isinstance(value, (str, bool)):
        raise _UnfitError("it is not a number")
    return decimal.Decimal(value)


def _describe_culprit(
    values: Sequence[Any], spark_type: DataType, arrow_type: pa.DataType, describe_owner: Callable[[int], str]
) -> str:
    """Describe the first value that cannot be converted alone, for the error's text."""
    for row, value in enumerate(values):
        try:
            _make_column([value], spark_type, arrow_type)
        except Exception:  # for any error, this is the value to show
            return f"{_format_value(value)} ({type(value).__name__}){describe_owner(row)}"
    return "these values together"


def _format_value(value: Any) -> str:
    """Format a value for one line of an error."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _CHARACTERS_MAX else f"{text[:_CHARACTERS_MAX]}…"


def _identity(value: Any) -> Any:
    return value


def _make_from_arrow(spark_type: DataType, as_key: bool = False) -> Callable[[Any], Any]:
    """Return a converter of one non-NULL value from `to_pylist`, for a nested type or a part of one.

    With `as_key` it returns values that can be keys of a dict, which lists and bytearrays cannot be.
    """
    if isinstance(spark_type, TimestampType):
        return lambda v: _to_local_time((v - _EPOCH_UTC) // _MICROSECOND)
    if isinstance(spark_type, TimestampNTZType):
        return _identity
    if isinstance(spark_type, BinaryType) and STATE_BINARY is not bytes and not as_key:
        return STATE_BINARY
    if isinstance(spark_type, ArrayType):
        element = _make_optional(_make_from_arrow(spark_type.elementType, as_key))
        if as_key:
            return lambda v: tuple([element(x) for x in v])
        return lambda v: [element(x) for x in v]
    if isinstance(spark_type, MapType):
        key = _make_from_arrow(spark_type.keyType, as_key=True)
        item = _make_optional(_make_from_arrow(spark_type.valueType))
        return lambda v: {key(a): item(b) for a, b in v}
    if isinstance(spark_type, StructType):
        fields = [(f.name, _make_optional(_make_from_arrow(f.dataType, as_key))) for f in spark_type.fields]
        # fromInternal makes the Row. Its conversions are done above, so it gets types that it does not convert.
        names = _make_names_only(spark_type)
        return lambda v: names.fromInternal(tuple(convert(v[name]) for name, convert in fields))
    return _identity


def _make_names_only(spark_type: StructType) -> StructType:
    names_only = StructType()
    for name in spark_type.names:
        names_only = names_only.add(name, StringType())
    return names_only


def _make_to_arrow(spark_type: DataType) -> Callable[[Any], Any]:
    """Return a converter of one non-NULL value to what `pa.array` accepts for the type."""
    if isinstance(spark_type, IntegralType):
        return _to_whole
    if isinstance(spark_type, (TimestampType, TimestampNTZType)):
        return spark_type.toInternal
    if isinstance(spark_type, DecimalType):
        quantum = decimal.Decimal(1).scaleb(-spark_type.scale)
        context = decimal.Context(prec=76, rounding=decimal.ROUND_HALF_UP)
        return lambda v: (v if type(v) is decimal.Decimal else _to_decimal(v)).quantize(quantum, context=context)
    if isinstance(spark_type, ArrayType):
        return _make_array_to_arrow(spark_type)
    if isinstance(spark_type, MapType):
        return _make_map_to_arrow(spark_type)
    if isinstance(spark_type, StructType):
        return _make_struct_to_arrow(spark_type)
    return _PLAIN_TO_ARROW.get(type(spark_type), _identity)


_PLAIN_TO_ARROW: dict[type[DataType], Callable[[Any], Any]] = {
    DateType: _to_date,
    FloatType: _check_float,
    StringType: to_text,
}


def _make_nested_to_arrow(spark_type: DataType) -> Callable[[Any], Any]:
    if isinstance(spark_type, TimestampType):
        to_internal = spark_type.toInternal
        return lambda v: _EPOCH_UTC + to_internal(v) * _MICROSECOND
    if isinstance(spark_type, TimestampNTZType):
        to_ntz = spark_type.toInternal
        return lambda v: (_EPOCH_UTC + to_ntz(v) * _MICROSECOND).replace(tzinfo=None)
    if isinstance(spark_type, (ArrayType, MapType, StructType, DecimalType, IntegralType, *_PLAIN_TO_ARROW)):
        return _make_to_arrow(spark_type)
    return lambda v: v.item() if hasattr(v, "item") else v


def _make_part_to_arrow(spark_type: DataType) -> Callable[[Any], Any]:
    """Return a converter of a value within another value; it may be missing."""
    convert = _make_nested_to_arrow(spark_type)
    if isinstance(spark_type, _WITH_NAN):
        return lambda v: None if is_missing(v, or_nan=False) else convert(v)
    return lambda v: None if is_missing(v) else convert(v)


def _make_array_to_arrow(spark_type: ArrayType) -> Callable[[Any], list[Any]]:
    kind = spark_type.elementType
    element = _make_part_to_arrow(kind)
    unconverted = _WHOLE_VALUES if isinstance(kind, IntegralType) else _PLAIN_ELEMENTS.get(type(kind), set())

    def convert(value: Any) -> list[Any]:
        elements = list(_check_elements(value))
        return elements if unconverted.issuperset(map(type, elements)) else [element(x) for x in elements]

    return convert


def _make_map_to_arrow(spark_type: MapType) -> Callable[[Any], list[tuple[Any, Any]]]:
    key, item = _make_part_to_arrow(spark_type.keyType), _make_part_to_arrow(spark_type.valueType)
    nested = isinstance(spark_type.keyType, (ArrayType, StructType))

    def convert(value: Any) -> list[tuple[Any, Any]]:
        items = [(key(a), item(b)) for a, b in value.items()]
        if any(a is None for a, _ in items):
            raise ValueError("a key is NULL")
        # For example 1.001 and 1.002 as decimals of two places.
        if not nested and len(dict(items)) < len(items):
            raise ValueError(f"two of its keys are the same as {spark_type.keyType.simpleString()}")
        return items

    return convert


def _make_struct_to_arrow(spark_type: StructType) -> Callable[[Any], dict[str, Any]]:
    names = spark_type.names
    converters = [_make_part_to_arrow(field.dataType) for field in spark_type.fields]
    return lambda v: {name: c(x) for name, c, x in zip(names, converters, _struct_parts(v, names), strict=True)}


def _struct_parts(value: Any, names: Sequence[str]) -> Sequence[Any]:
    """Return the fields' values of a dict, tuple, list or object that stands for a struct."""
    if isinstance(value, dict):
        return [value.get(name) for name in names]
    if isinstance(value, (tuple, list)):
        if len(value) != len(names):
            raise ValueError(f"a struct of {len(names)} fields cannot hold {len(value)} values")
        return value
    return [getattr(value, name) for name in names]


def _make_optional(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    if convert is _identity:
        return _identity
    return lambda v: None if v is None else convert(v)
