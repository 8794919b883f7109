"""Missing values in what users' functions give: pandas, NumPy and PyArrow write NULL in ways of their own."""

from __future__ import annotations

import decimal
import sys
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["column_of", "is_missing"]

_VALUES = frozenset({str, int, bool, bytes, list, dict, tuple})


def is_missing(value: object, or_nan: bool = True) -> bool:
    """Whether a value stands for NULL: None, the NA and NaT of pandas and NumPy, and, with `or_nan`, NaN of a float.

    A decimal NaN is missing in any case, as no column of decimals has one.
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
    # Where nothing has imported pandas, no value can be one of its.
    pandas = sys.modules.get("pandas")
    return pandas is not None and (value is pandas.NA or value is pandas.NaT)


def column_of(values: Any) -> Any:
    """Values whose type nothing declares, as an Arrow column.

    NaN stays NaN among numbers. Among other values, or beside another missing value such as `pandas.NA`, it is NULL.
    """
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    if not hasattr(values, "__len__"):
        # They are gone through twice.
        values = list(values)
    try:
        found = pa.array(values)
        # PyArrow takes NaT for the first day of the year 1, as a class of NaT's is that of dates.
        if "date32" not in str(found.type) or _is_typed(values):
            return found
        return pa.array([_without_nat(value) for value in values])
    except (pa.ArrowException, TypeError, ValueError):
        pass
    # `from_pandas` finds missing values within lists and others.
    return pa.array([None if is_missing(value) else value for value in values], from_pandas=True)


def _without_nat(value: Any) -> Any:
    """A value with None for what is missing at any depth, but for NaN."""
    if is_missing(value, or_nan=False):
        return None
    if isinstance(value, (list, tuple)):
        return [_without_nat(it) for it in value]
    return {key: _without_nat(it) for key, it in value.items()} if isinstance(value, dict) else value


def _is_typed(values: Any) -> bool:
    """Whether a column has a type of its own, and so holds no Python objects."""
    return getattr(values, "dtype", np.dtype(object)) != np.dtype(object)
