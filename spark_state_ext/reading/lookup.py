"""Converts a key that a user wrote to key columns and its hash.

Importing pandas takes longer than a lookup, and PyArrow imports it when it converts its first Python or NumPy value
(`pa.array`, `pa.scalar`, `to_numpy`). So values of plain types are converted from their bytes, and keys are compared as
Arrow scalars. PyArrow converts only decimals and nested keys.
"""

from __future__ import annotations

import datetime
import math
import operator
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from arrow_schemas.equality import rows_equal
from arrow_schemas.row import RowSchema
from arrow_schemas.spark_hash import hash_key
from spark_state_ext.errors import UsageError
from spark_state_ext.functions.conversion_errors import explain_conversion_error
from spark_state_ext.functions.key_types import explain_refused_type

__all__ = ["LookupKey"]

_WIDTHS = {
    pa.int8(): "<b",
    pa.int16(): "<h",
    pa.int32(): "<i",
    pa.int64(): "<q",
    pa.float32(): "<f",
    pa.float64(): "<d",
    pa.bool_(): "<?",
}
_DAY = datetime.date(1970, 1, 1)
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_MICROSECOND = datetime.timedelta(microseconds=1)
_NOT_A_VALUE = (pa.ArrowException, AttributeError, OverflowError, TypeError, ValueError, struct.error)


@dataclass(frozen=True)
class LookupKey:
    """The key of a lookup.

    Parameters
    ----------
    columns
        The key columns, normalised, with one row each.
    hash
        The key's hash, as in files.
    """

    columns: tuple[pa.Array, ...]
    hash: int

    @staticmethod
    def of(key: Any, names: Sequence[str], schema: RowSchema) -> LookupKey:
        """Convert a user's key; raise `UsageError` if it does not fit the key columns."""
        columns = []
        for name, value, field in zip(names, _split_values(key, names, schema), schema.keys, strict=True):
            try:
                columns.append(_make_column(value, field))
            except _NOT_A_VALUE as error:
                why = explain_conversion_error(error, value)
                raise UsageError(f"{value!r} is not a value of the key column {name!r}, {field.type}: {why}") from error
        return LookupKey(tuple(columns), hash_key(columns))

    def is_in(self, row: pa.RecordBatch, schema: RowSchema) -> bool:
        """True if a row has this key."""
        key_columns = schema.key_columns(row)
        return all(_is_same(own, other) for own, other in zip(self.columns, key_columns, strict=True))


def _split_values(key: Any, names: Sequence[str], schema: RowSchema) -> Sequence[Any]:
    sole_struct = len(names) == 1 and pa.types.is_struct(schema.keys[0].type)
    if isinstance(key, Mapping) and not (sole_struct and set(key) != set(names)):
        if set(key) != set(names):
            raise UsageError(f"a key has the columns {', '.join(names)}, not {', '.join(map(str, key))}")
        return [key[name] for name in names]
    # A key of one column may itself be a list or a struct.
    if isinstance(key, tuple) and not (len(names) == 1 and len(key) != 1):
        if len(key) != len(names):
            raise UsageError(f"a key has the columns {', '.join(names)}, not {len(key)} values: {key!r}")
        return key
    if len(names) != 1:
        raise UsageError(f"a key has the columns {', '.join(names)}: give a tuple or a mapping, not {key!r}")
    return [key]


def _make_column(value: Any, field: pa.Field) -> pa.Array:
    """Convert a value to a column of one row, as keys are stored."""
    data_type, types = field.type, pa.types
    if value is None:
        return pa.nulls(1, data_type)
    if types.is_string(data_type) or types.is_binary(data_type):
        return _make_bytes_column(_encode(value, data_type), data_type)
    if types.is_boolean(data_type):
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"it is a {type(value).__name__}")
        return _make_fixed_column(bool(value), data_type)
    if types.is_signed_integer(data_type):
        if isinstance(value, (bool, np.bool_)):
            raise TypeError("it is a bool")
        return _make_fixed_column(operator.index(value), data_type)
    if types.is_floating(data_type):
        if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
            raise TypeError(f"it is a {type(value).__name__}")
        return _make_fixed_column(float(value) + 0.0, data_type)
    if types.is_date32(data_type) and type(value) is datetime.date:
        return _make_viewed_column(pa.int32(), (value - _DAY).days, data_type)
    if types.is_timestamp(data_type) and type(value) is datetime.datetime:
        if (value.tzinfo is None) != (data_type.tz is None):
            raise ValueError("use times with a time zone" if data_type.tz else "use times without a time zone")
        if value.tzinfo is None:
            value = value.replace(tzinfo=datetime.timezone.utc)
        return _make_viewed_column(pa.int64(), (value - _EPOCH) // _MICROSECOND, data_type)
    # A whole number for a decimal column may be too large for any integer type.
    is_whole = type(value) is int and types.is_decimal(data_type)
    why = "" if is_whole else explain_refused_type(pa.array([value]).type, data_type)
    if why:
        raise ValueError(why)
    normalised = RowSchema((field,), ()).normalise_keys([pa.array([value], data_type)])
    return normalised[0]


def _encode(value: Any, data_type: pa.DataType) -> bytes:
    if pa.types.is_string(data_type):
        if not isinstance(value, str):
            raise TypeError(f"it is a {type(value).__name__}")
        return value.encode()
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"it is a {type(value).__name__}")
    return bytes(value)


def _make_bytes_column(data: bytes, data_type: pa.DataType) -> pa.Array:
    offsets = struct.pack("<ii", 0, len(data))
    return pa.Array.from_buffers(data_type, 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _make_fixed_column(value: Any, data_type: pa.DataType) -> pa.Array:
    # A boolean is one bit: True sets the lowest.
    return pa.Array.from_buffers(data_type, 1, [None, pa.py_buffer(struct.pack(_WIDTHS[data_type], value))])


def _make_viewed_column(number: pa.DataType, value: int, data_type: pa.DataType) -> pa.Array:
    return _make_fixed_column(value, number).view(data_type)


def _is_same(own: pa.Array, other: pa.Array) -> bool:
    if pa.types.is_nested(own.type):
        return bool(rows_equal([own], [other])[0])
    left, right = own[0], other[0]
    if not (left.is_valid and right.is_valid):
        return bool(left.is_valid == right.is_valid)
    if pa.types.is_floating(own.type) and math.isnan(left.as_py()):
        return bool(math.isnan(right.as_py()))
    return bool(left.equals(right))
