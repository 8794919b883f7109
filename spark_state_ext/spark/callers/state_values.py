"""State columns between Arrow and the Python values that Spark's GroupState holds.

Spark passes state through `StructType.toInternal` and `fromInternal`, so the same methods are used for every type that
they change: dates and times, and structs (`Row`). Flat columns that they leave alone are converted in bulk.
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
from spark_state_ext.functions.missing import is_missing
from spark_state_ext.functions.reasons import conversion_reason
from spark_state_ext.spark.compat import STATE_BINARY

__all__ = ["changeable", "column_to_values", "row_keeper", "text_of", "values_to_column"]

# Columns in which NaN is a value of its own.
_WITH_NAN = (FloatType, DoubleType)
# Types whose values are never missing, but for None.
_PRESENT = {int, bool, str, bytes, bytearray, datetime.date, datetime.datetime, list, tuple, dict, type(None)}
# Types of values that go to a string column as they are.
_TEXTS: set[type] = {str, bytes, type(None)}
# Types of values that go to an integer column as they are.
_WHOLE: set[type] = {int, type(None)}
# And to a column of dates.
_DATES = {datetime.date, datetime.datetime, type(None)}
# Types of elements that need no conversion, by the type of an array's elements.
_PLAIN_ELEMENTS: dict[type[DataType], set[type]] = {StringType: _TEXTS, DoubleType: {int, float, type(None)}}
# Characters of a value in an error.
_SHOWN_MAX = 300
_FLOAT_MAX = float(np.finfo(np.float32).max)
# What can be iterated, and is no list of what it gives then.
_NO_LISTS = (str, bytes, bytearray, memoryview, Mapping)
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
    """A state column as the values `GroupState.get` gives."""
    try:
        return _column_to_values(column, spark_type)
    except UnicodeDecodeError as error:
        raise StateValueError(
            f"a {role} of type {spark_type.simpleString()} has text that is not UTF-8: {error}"
        ) from error
    except (ValueError, OverflowError) as error:
        raise StateValueError(
            f"a {role} of type {spark_type.simpleString()} has a value that Python cannot hold, whose times are from "
            f"year 1 to 9999 in the session's time zone: {error}"
        ) from error


def _column_to_values(column: pa.Array, spark_type: DataType) -> list[Any]:
    as_integer = _INTEGER_TEMPORAL.get(type(spark_type))
    if as_integer is not None:
        from_internal = _local_time if isinstance(spark_type, TimestampType) else spark_type.fromInternal
        return [None if v is None else from_internal(v) for v in column.cast(as_integer).to_pylist()]
    values: list[Any] = column.to_pylist()
    if isinstance(spark_type, BinaryType) and STATE_BINARY is not bytes:
        return [None if v is None else STATE_BINARY(v) for v in values]
    if isinstance(spark_type, (ArrayType, MapType, StructType)):
        convert = _nested_from_arrow(spark_type)
        return [None if v is None else convert(v) for v in values]
    return values


def _local_time(us: int) -> datetime.datetime:
    """A timestamp's microseconds since 1970 as Spark's Python value: in the machine's zone, and without it."""
    try:
        found: datetime.datetime = _TIMESTAMP.fromInternal(us)
    except ValueError:
        # Of the first day of the year 1 Python looks at the day before, which it does not have.
        local = time.localtime(us // 1_000_000)
        found = datetime.datetime(*local[:6], us % 1_000_000)  # noqa: DTZ001
    return found


def values_to_column(
    values: Sequence[Any],
    spark_type: DataType,
    arrow_type: pa.DataType,
    column: str,
    whose: Callable[[int], str] = lambda row: "",
) -> pa.Array:
    """Python values, such as were given to `GroupState.update`, as a column; `column` and `whose` are for the error:
    what the column is called, and whose value one is.
    """
    try:
        return _column_of(values, spark_type, arrow_type)
    except (
        pa.ArrowException,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        decimal.InvalidOperation,
    ) as error:
        culprit = _culprit(values, spark_type, arrow_type, whose)
        why = str(error) if isinstance(error, _UnfitError) else conversion_reason(error)
        raise StateValueError(f"{column} of type {spark_type.simpleString()} cannot hold {culprit}: {why}") from error


def _column_of(values: Sequence[Any], spark_type: DataType, arrow_type: pa.DataType) -> pa.Array:
    """As `values_to_column`, with whatever error comes."""
    # One look at the types tells whether a value is missing, or needs a conversion. Floats go as they are: NaN is one.
    kinds = set() if isinstance(spark_type, _WITH_NAN) else set(map(type, values))
    if isinstance(spark_type, StringType):
        if not kinds <= _TEXTS:
            values = [None if is_missing(v) else text_of(v) for v in values]
        return pa.array(values, arrow_type)
    if not kinds <= _PRESENT:
        values = [None if is_missing(v) else v for v in values]
        kinds = set(map(type, values))
    if isinstance(spark_type, (TimestampType, TimestampNTZType)):
        to_internal = spark_type.toInternal
        numbers = [None if v is None else to_internal(v) for v in values]
        given = [number for number in numbers if number is not None]
        for extreme in (min(given), max(given)) if given else ():
            # What lies beyond Python's years in the session's zone could be stored, and never be read again.
            _local_time(extreme) if isinstance(spark_type, TimestampType) else spark_type.fromInternal(extreme)
        return pa.array(numbers, pa.int64()).cast(arrow_type)
    if isinstance(spark_type, (ArrayType, MapType, StructType, DecimalType)):
        convert = _to_arrow(spark_type)
        return pa.array([None if v is None else convert(v) for v in values], arrow_type)
    if isinstance(spark_type, DateType) and not kinds <= _DATES:
        # PyArrow would take a number for days.
        return pa.array([None if v is None else _date(v) for v in values], arrow_type)
    if isinstance(spark_type, IntegralType) and not kinds <= _WHOLE:
        # PyArrow would cut a float's fraction off.
        return pa.array([None if v is None else _whole(v) for v in values], arrow_type)
    try:
        return _floats(values, arrow_type) if isinstance(spark_type, FloatType) else pa.array(values, arrow_type)
    except (pa.ArrowException, TypeError):
        plain = [None if is_missing(v, or_nan=False) else v for v in values]
        if plain.count(None) == values.count(None):
            raise
        return _column_of(plain, spark_type, arrow_type)


def changeable(spark_type: StructType) -> list[int]:
    """Positions of the columns whose values a function can change after it has given them: lists, dicts, bytearrays."""
    return [at for at, field in enumerate(spark_type.fields) if _keeper(field.dataType) is not _identity]


def row_keeper(spark_type: StructType, columns: str) -> Callable[[Sequence[Any]], tuple[Any, ...]] | None:
    """What copies a row, so that whoever gave it may change its values before they are converted."""
    keepers = [(at, spark_type.fields[at], _keeper(spark_type.fields[at].dataType)) for at in changeable(spark_type)]
    if not keepers:
        return None

    def keep_row(row: Sequence[Any]) -> tuple[Any, ...]:
        values = list(row)
        for at, field, keep in keepers:
            value = values[at]
            if not is_missing(value):
                try:
                    values[at] = keep(value)
                except Exception as error:
                    raise StateValueError(
                        f"{columns} {field.name!r} of type {field.dataType.simpleString()} cannot hold {value!r} "
                        f"({type(value).__name__}): {error}"
                    ) from error
        return tuple(values)

    return keep_row


def _keeper(spark_type: DataType) -> Callable[[Any], Any]:
    """What copies one non-NULL value, to one of which `values_to_column` makes the same; `_identity` where nobody can
    change one."""
    if isinstance(spark_type, BinaryType):
        return lambda v: bytes(v) if isinstance(v, (bytearray, memoryview)) else v
    if isinstance(spark_type, ArrayType):
        element = _part_keeper(spark_type.elementType)
        if element is _identity:
            return lambda v: list(_elements(v))
        return lambda v: [element(x) for x in _elements(v)]
    if isinstance(spark_type, MapType):
        # Keys of a dict are such as cannot be changed.
        item = _part_keeper(spark_type.valueType)
        return lambda v: {a: item(b) for a, b in v.items()}
    if isinstance(spark_type, StructType):
        names = spark_type.names
        fields = [_part_keeper(field.dataType) for field in spark_type.fields]
        return lambda v: tuple([keep(x) for keep, x in zip(fields, _parts(v, names), strict=True)])
    return _identity


def _part_keeper(spark_type: DataType) -> Callable[[Any], Any]:
    keep = _keeper(spark_type)
    return keep if keep is _identity else lambda v: v if is_missing(v) else keep(v)


def _whole(value: Any) -> int:
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, bool) or plain != int(plain):
        raise _UnfitError(f"{plain!r} is no whole number")
    return int(plain)


def _elements(value: Any) -> Iterable[Any]:
    if isinstance(value, _NO_LISTS):
        raise _UnfitError("it is no list")
    elements: Iterable[Any] = value
    return elements


def _date(value: Any) -> Any:
    if isinstance(value, np.datetime64):
        return value.astype("datetime64[D]").item()
    # NaT is a date by its class, and equals nothing.
    if not isinstance(value, datetime.date) or value != value:
        raise _UnfitError("it is no date")
    return value


def _floats(values: Sequence[Any], arrow_type: pa.DataType) -> pa.Array:
    """Values as single floats; PyArrow would make those infinite that are too large."""
    column = pa.array(values, arrow_type)
    for row in np.flatnonzero(np.isinf(column.to_numpy(zero_copy_only=False))):
        _float(values[int(row)])
    return column


def _float(value: Any) -> Any:
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, float) and abs(plain) > _FLOAT_MAX and not math.isinf(plain):
        raise _UnfitError("it is more than a float holds")
    return plain


def text_of(value: Any) -> str | bytes:
    """A value for a string column: text as it is, numbers and booleans as the JVM writes them."""
    plain = value.as_py() if isinstance(value, pa.Scalar) else value
    if isinstance(plain, (str, bytes)):
        return plain
    if isinstance(plain, (bytearray, memoryview)):
        return bytes(plain)
    is_time = isinstance(plain, (np.datetime64, np.timedelta64))  # which NumPy makes whole numbers of
    if isinstance(plain, np.generic) and not is_time:
        plain = plain.item()
    if isinstance(plain, bool):
        return str(plain).lower()
    if isinstance(plain, float):
        return _float_text(plain)
    if isinstance(plain, numbers.Number) and not is_time:
        return str(plain)
    raise _UnfitError("it is neither text nor a number; make text of it in the function")


def _float_text(value: float) -> str:
    """As Java's `Double.toString`."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return repr(value)
    sign, digits, exponent = decimal.Decimal(repr(value)).normalize().as_tuple()
    rest = "".join(map(str, digits[1:])) or "0"
    return f"{'-' * sign}{digits[0]}.{rest}E{len(digits) - 1 + int(exponent)}"


def _decimal(value: Any) -> decimal.Decimal:
    if isinstance(value, (str, bool)):
        raise _UnfitError("it is no number")
    return decimal.Decimal(value)


def _culprit(values: Sequence[Any], spark_type: DataType, arrow_type: pa.DataType, whose: Callable[[int], str]) -> str:
    """The first value that cannot be converted alone, for the error's text."""
    for row, value in enumerate(values):
        try:
            _column_of([value], spark_type, arrow_type)
        except Exception:  # whatever it is, this is the value to show
            return f"{_shown(value)} ({type(value).__name__}){whose(row)}"
    return "these values together"


def _shown(value: Any) -> str:
    """A value in one line of an error."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"


def _identity(value: Any) -> Any:
    return value


def _nested_from_arrow(spark_type: DataType, as_key: bool = False) -> Callable[[Any], Any]:
    """Converter of one non-NULL value that `to_pylist` gave, in a nested type or below one.

    With `as_key` to what can be a key of a dict, which neither a list nor a bytearray can.
    """
    if isinstance(spark_type, TimestampType):
        return lambda v: _local_time((v - _EPOCH_UTC) // _MICROSECOND)
    if isinstance(spark_type, TimestampNTZType):
        return _identity
    if isinstance(spark_type, BinaryType) and STATE_BINARY is not bytes and not as_key:
        return STATE_BINARY
    if isinstance(spark_type, ArrayType):
        element = _optional(_nested_from_arrow(spark_type.elementType, as_key))
        if as_key:
            return lambda v: tuple([element(x) for x in v])
        return lambda v: [element(x) for x in v]
    if isinstance(spark_type, MapType):
        key = _nested_from_arrow(spark_type.keyType, as_key=True)
        item = _optional(_nested_from_arrow(spark_type.valueType))
        return lambda v: {key(a): item(b) for a, b in v}
    if isinstance(spark_type, StructType):
        fields = [(f.name, _optional(_nested_from_arrow(f.dataType, as_key))) for f in spark_type.fields]
        # fromInternal makes the Row; its own conversions have been done here, on types without any.
        names = _names_only(spark_type)
        return lambda v: names.fromInternal(tuple(convert(v[name]) for name, convert in fields))
    return _identity


def _names_only(spark_type: StructType) -> StructType:
    made = StructType()
    for name in spark_type.names:
        made = made.add(name, StringType())
    return made


def _to_arrow(spark_type: DataType) -> Callable[[Any], Any]:
    """Converter of one non-NULL value to what `pa.array` wants for the type."""
    if isinstance(spark_type, IntegralType):
        return _whole
    if isinstance(spark_type, (TimestampType, TimestampNTZType)):
        return spark_type.toInternal
    if isinstance(spark_type, DecimalType):
        quantum = decimal.Decimal(1).scaleb(-spark_type.scale)
        context = decimal.Context(prec=76, rounding=decimal.ROUND_HALF_UP)
        return lambda v: (v if type(v) is decimal.Decimal else _decimal(v)).quantize(quantum, context=context)
    if isinstance(spark_type, ArrayType):
        return _array_to_arrow(spark_type)
    if isinstance(spark_type, MapType):
        return _map_to_arrow(spark_type)
    if isinstance(spark_type, StructType):
        return _struct_to_arrow(spark_type)
    return _PLAIN_TO_ARROW.get(type(spark_type), _identity)


_PLAIN_TO_ARROW: dict[type[DataType], Callable[[Any], Any]] = {DateType: _date, FloatType: _float, StringType: text_of}


def _nested_to_arrow(spark_type: DataType) -> Callable[[Any], Any]:
    if isinstance(spark_type, TimestampType):
        to_internal = spark_type.toInternal
        return lambda v: _EPOCH_UTC + to_internal(v) * _MICROSECOND
    if isinstance(spark_type, TimestampNTZType):
        to_ntz = spark_type.toInternal
        return lambda v: (_EPOCH_UTC + to_ntz(v) * _MICROSECOND).replace(tzinfo=None)
    if isinstance(spark_type, (ArrayType, MapType, StructType, DecimalType, IntegralType, *_PLAIN_TO_ARROW)):
        return _to_arrow(spark_type)
    return lambda v: v.item() if hasattr(v, "item") else v


def _part_to_arrow(spark_type: DataType) -> Callable[[Any], Any]:
    """Converter of a value within another one, which may be missing."""
    convert = _nested_to_arrow(spark_type)
    if isinstance(spark_type, _WITH_NAN):
        return lambda v: None if is_missing(v, or_nan=False) else convert(v)
    return lambda v: None if is_missing(v) else convert(v)


def _array_to_arrow(spark_type: ArrayType) -> Callable[[Any], list[Any]]:
    kind = spark_type.elementType
    element = _part_to_arrow(kind)
    as_they_are = _WHOLE if isinstance(kind, IntegralType) else _PLAIN_ELEMENTS.get(type(kind), set())

    def convert(value: Any) -> list[Any]:
        given = list(_elements(value))
        return given if as_they_are.issuperset(map(type, given)) else [element(x) for x in given]

    return convert


def _map_to_arrow(spark_type: MapType) -> Callable[[Any], list[tuple[Any, Any]]]:
    key, item = _part_to_arrow(spark_type.keyType), _part_to_arrow(spark_type.valueType)
    nested = isinstance(spark_type.keyType, (ArrayType, StructType))

    def convert(value: Any) -> list[tuple[Any, Any]]:
        items = [(key(a), item(b)) for a, b in value.items()]
        if any(a is None for a, _ in items):
            raise ValueError("a key is NULL")
        # Such as 1.001 and 1.002 as decimals of two places.
        if not nested and len(dict(items)) < len(items):
            raise ValueError(f"two of its keys are one as {spark_type.keyType.simpleString()}")
        return items

    return convert


def _struct_to_arrow(spark_type: StructType) -> Callable[[Any], dict[str, Any]]:
    names = spark_type.names
    converters = [_part_to_arrow(field.dataType) for field in spark_type.fields]
    return lambda v: {name: c(x) for name, c, x in zip(names, converters, _parts(v, names), strict=True)}


def _parts(value: Any, names: Sequence[str]) -> Sequence[Any]:
    """The fields' values of something that stands for a struct."""
    if isinstance(value, dict):
        return [value.get(name) for name in names]
    if isinstance(value, (tuple, list)):
        if len(value) != len(names):
            raise ValueError(f"a struct of {len(names)} fields cannot hold {len(value)} values")
        return value
    return [getattr(value, name) for name in names]


def _optional(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    if convert is _identity:
        return _identity
    return lambda v: None if v is None else convert(v)
