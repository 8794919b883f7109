"""A key as somebody writes it: as key columns, with its hash and its bucket.

A lookup takes less time than importing pandas, and PyArrow imports that with the first Python or NumPy value that it
converts (`pa.array`, `pa.scalar`, `to_numpy`). So values of plain types become columns by their bytes, and keys are
compared as Arrow's scalars. Decimals and nested keys go by PyArrow.
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
from arrow_schemas.spark_hash import key_hash
from spark_state_ext.errors import UsageError
from spark_state_ext.functions.key_types import refused_type
from spark_state_ext.functions.reasons import conversion_reason

__all__ = ["WantedKey"]

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
class WantedKey:
    """One key.

    Parameters
    ----------
    columns
        Its columns, normalised, of one row each.
    hash
        Its hash, as files have it.
    """

    columns: tuple[pa.Array, ...]
    hash: int

    @staticmethod
    def of(key: Any, names: Sequence[str], schema: RowSchema) -> WantedKey:
        """A key as the user gave it."""
        columns = []
        for name, value, field in zip(names, _values(key, names, schema), schema.keys, strict=True):
            try:
                columns.append(_column(value, field))
            except _NOT_A_VALUE as error:
                why = conversion_reason(error, value)
                raise UsageError(f"{value!r} is no value of the key column {name!r}, {field.type}: {why}") from error
        return WantedKey(tuple(columns), key_hash(columns))

    def is_in(self, row: pa.RecordBatch, schema: RowSchema) -> bool:
        """Whether a row is that of this key."""
        found = schema.key_columns(row)
        return all(_same(mine, its) for mine, its in zip(self.columns, found, strict=True))


def _values(key: Any, names: Sequence[str], schema: RowSchema) -> Sequence[Any]:
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


def _column(value: Any, field: pa.Field) -> pa.Array:
    """A value as a column of one row, in the form in which keys are stored."""
    data_type, types = field.type, pa.types
    if value is None:
        return pa.nulls(1, data_type)
    if types.is_string(data_type) or types.is_binary(data_type):
        return _bytes_column(_encoded(value, data_type), data_type)
    if types.is_boolean(data_type):
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"it is a {type(value).__name__}")
        return _fixed_column(bool(value), data_type)
    if types.is_signed_integer(data_type):
        if isinstance(value, (bool, np.bool_)):
            raise TypeError("it is a bool")
        return _fixed_column(operator.index(value), data_type)
    if types.is_floating(data_type):
        if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
            raise TypeError(f"it is a {type(value).__name__}")
        return _fixed_column(float(value) + 0.0, data_type)
    if types.is_date32(data_type) and type(value) is datetime.date:
        return _stored_as(pa.int32(), (value - _DAY).days, data_type)
    if types.is_timestamp(data_type) and type(value) is datetime.datetime:
        if (value.tzinfo is None) != (data_type.tz is None):
            raise ValueError("give times with a time zone" if data_type.tz else "give times without a time zone")
        if value.tzinfo is None:
            value = value.replace(tzinfo=datetime.timezone.utc)
        return _stored_as(pa.int64(), (value - _EPOCH) // _MICROSECOND, data_type)
    # A decimal may have a whole number that no type of its own holds.
    is_whole = type(value) is int and types.is_decimal(data_type)
    why = "" if is_whole else refused_type(pa.array([value]).type, data_type)
    if why:
        raise ValueError(why)
    normal = RowSchema((field,), ()).normalise_keys([pa.array([value], data_type)])
    return normal[0]


def _encoded(value: Any, data_type: pa.DataType) -> bytes:
    if pa.types.is_string(data_type):
        if not isinstance(value, str):
            raise TypeError(f"it is a {type(value).__name__}")
        return value.encode()
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"it is a {type(value).__name__}")
    return bytes(value)


def _bytes_column(data: bytes, data_type: pa.DataType) -> pa.Array:
    offsets = struct.pack("<ii", 0, len(data))
    return pa.Array.from_buffers(data_type, 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _fixed_column(value: Any, data_type: pa.DataType) -> pa.Array:
    # A boolean is a bit, and True the lowest one.
    return pa.Array.from_buffers(data_type, 1, [None, pa.py_buffer(struct.pack(_WIDTHS[data_type], value))])


def _stored_as(number: pa.DataType, value: int, data_type: pa.DataType) -> pa.Array:
    return _fixed_column(value, number).view(data_type)


def _same(mine: pa.Array, its: pa.Array) -> bool:
    if pa.types.is_nested(mine.type):
        return bool(rows_equal([mine], [its])[0])
    left, right = mine[0], its[0]
    if not (left.is_valid and right.is_valid):
        return bool(left.is_valid == right.is_valid)
    if pa.types.is_floating(mine.type) and math.isnan(left.as_py()):
        return bool(math.isnan(right.as_py()))
    return bool(left.equals(right))
