"""Missing values in what users' functions give: pandas, NumPy and PyArrow write NULL in ways of their own."""

from __future__ import annotations

import decimal
import sys
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["column_of", "is_missing"]

_VALUES = frozenset({str, int, bool, bytes, list, dict, tuple})
_TIMES = (np.datetime64, np.timedelta64)


def is_missing(value: object) -> bool:
    """Whether a value stands for NULL: None, NaN of any kind of number, and the NA and NaT of pandas and NumPy."""
    if value is None:
        return True
    if type(value) in _VALUES:
        return False
    if isinstance(value, (float, np.floating, *_TIMES)):
        return bool(value != value)  # as NaN and NaT do
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
    try:
        return pa.array(values)
    except (pa.ArrowException, TypeError, ValueError):
        return pa.array(values, from_pandas=True)
