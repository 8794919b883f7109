"""Explain in error messages why a value was not converted: Python's own texts name attributes and parsers."""

from __future__ import annotations

import decimal
import re
import struct
from typing import Any

import pyarrow as pa

__all__ = ["explain_conversion_error"]

_UNKNOWN = object()
_CLASS = re.compile(r"<class '(?:[\w.]*\.)?(\w+)'>")
# Python's messages for text that is not a number, and not a date or time.
_NO_NUMBER = re.compile(r"invalid literal for int|could not convert string to float")
_TOO_PRECISE = re.compile(r"precision|rescal", re.IGNORECASE)
_NO_TIME = re.compile(r"isoformat|does not match format")


def explain_conversion_error(error: BaseException, value: Any = _UNKNOWN) -> str:
    """Return why a value was not converted, without terms of the code that tried."""
    text = str(error)
    if isinstance(error, decimal.InvalidOperation):
        return "it is not a decimal number that fits"
    if isinstance(error, (OverflowError, struct.error)):
        return "it is out of range"
    internal = isinstance(error, (AttributeError, IndexError, KeyError, TypeError))
    if not text or (internal and not isinstance(error, pa.ArrowException)):
        return "it is of another type" if value is _UNKNOWN else f"it is of type {type(value).__name__}"
    if isinstance(error, pa.ArrowException) and _TOO_PRECISE.search(text):
        return "it has more digits than the column"
    if _NO_NUMBER.search(text):
        return "it is not a number"
    if _NO_TIME.search(text):
        return "it is not a date or time, such as 2026-01-31 or 2026-01-31T12:00:00"
    return _CLASS.sub(r"\1", text.splitlines()[0])
