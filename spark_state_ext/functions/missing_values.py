"""Recognise missing values in what users' functions return: pandas, NumPy and PyArrow each have their own NULL."""

from __future__ import annotations

import decimal
import sys
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["to_column", "is_missing"]

_VALUES = frozenset({str, int, bool, bytes, list, dict, tuple})


def is_missing(value: object, or_nan: bool = True) -> bool:
    """Return whether a value stands for NULL: None, NA, NaT, a NULL of PyArrow or, with `or_nan`, NaN of a float.

    A decimal NaN is always missing, as Arrow's columns of decimals cannot hold it.
    """
    if value is None:
        return True
    if type(value) in _VALUES:
        return False
    if isinstance(value, (float, np.floating)):
        return or_nan and bool(value != value)
    if isinstance(value, (np.datetime64, np.timedelta64)):
        return bool(np.isnat(value))
    if isinstance(value, decimal.Decimal):
        return value.is_nan()
    if isinstance(value, pa.Scalar):
        return not value.is_valid
    # Without pandas imported, the value cannot come from pandas.
    pandas = sys.modules.get("pandas")
    return pandas is not None and (value is pandas.NA or value is pandas.NaT)


def to_column(values: Any) -> Any:
    """Convert values without a declared type to an Arrow column.

    NaN stays NaN among numbers. Among other values, or next to another missing value such as `pandas.NA`, it is NULL.
    """
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    if not hasattr(values, "__len__"):
        # The values are read twice.
        values = list(values)
    try:
        column = pa.array(values)
        # PyArrow reads NaT as the first day of the year 1, because NaT is an instance of `date`.
        if "date32" not in str(column.type) or _is_typed(values):
            return column
        return pa.array([_replace_nat(value) for value in values])
    except (pa.ArrowException, TypeError, ValueError):
        pass
    # `from_pandas` also finds missing values within lists and other nested values.
    return pa.array([None if is_missing(value) else value for value in values], from_pandas=True)


def _replace_nat(value: Any) -> Any:
    """Replace missing values except NaN by None, at any depth."""
    if is_missing(value, or_nan=False):
        return None
    if isinstance(value, (list, tuple)):
        return [_replace_nat(element) for element in value]
    return {key: _replace_nat(element) for key, element in value.items()} if isinstance(value, dict) else value


def _is_typed(values: Any) -> bool:
    """True if a column declares a type other than Python objects."""
    return getattr(values, "dtype", np.dtype(object)) != np.dtype(object)
