"""Check the types of values by which a user names a key: to erase it, to look it up, or to read its state.

A value of another type is refused and not converted. It might become another key than the one that the user means, and
an erasure would report "done" although the key still exists. Row functions read a time without a zone in the time zone
of Spark's session. There is no session here, so such a time is refused if the column has instants.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

__all__ = ["explain_mixed_times", "explain_refused_type"]

_TEXTS = frozenset({"string", "large_string", "string_view"})
_BYTES = frozenset({"binary", "large_binary", "binary_view"})


def explain_refused_type(source: pa.DataType, kind: pa.DataType) -> str:
    """Return why values of a type cannot name keys in a column of another type; empty if they can."""
    types = pa.types
    if types.is_dictionary(source):
        source = source.value_type
    if source == kind or types.is_null(source):
        return ""
    if types.is_struct(source) and types.is_struct(kind):
        pairs = [(field.type, kind.field(field.name).type) for field in source if kind.get_field_index(field.name) >= 0]
    elif hasattr(source, "value_type") and hasattr(kind, "value_type"):
        pairs = [(source.value_type, kind.value_type)]
    else:
        return _check_flat_type(source, kind)
    return next(filter(None, (explain_refused_type(*pair) for pair in pairs)), "")


def _check_flat_type(source: pa.DataType, kind: pa.DataType) -> str:
    types, whole = pa.types, pa.types.is_integer(source)
    expected, fits = "", source.id == kind.id
    if str(kind) in _TEXTS:
        expected, fits = "text", str(source) in _TEXTS
    elif str(kind) in _BYTES:
        expected, fits = "bytes", str(source) in _BYTES or bool(types.is_fixed_size_binary(source))
    elif types.is_integer(kind):
        expected, fits = "whole numbers (int)", bool(whole)
    elif types.is_floating(kind):
        expected, fits = "numbers (float or int)", bool(whole or types.is_floating(source))
    elif types.is_decimal(kind):
        expected, fits = "decimals (decimal.Decimal or int)", bool(whole or types.is_decimal(source))
    elif types.is_date(kind):
        expected, fits = "dates without a time of day", bool(types.is_date(source))
    elif types.is_timestamp(kind) and kind.tz is None:
        expected, fits = "times without a time zone", bool(types.is_timestamp(source)) and source.tz is None
    elif types.is_timestamp(kind):
        expected, fits = (
            "times with a time zone, such as UTC",
            bool(types.is_timestamp(source)) and source.tz is not None,
        )
    return "" if fits else f"values of type {source} are not converted to {kind}: give {expected or kind}"


def explain_mixed_times(values: Iterable[Any]) -> str:
    """Return an error text if dates, times with a zone and times without a zone are mixed; empty if they are not.

    PyArrow uses the kind of the first value: after a date it cuts off times of day, and next to a time with a zone it
    reads a time without a zone as UTC.
    """
    kinds = {
        "dates"
        if not isinstance(value, datetime.datetime)
        else f"times with{'' if value.tzinfo else 'out'} a time zone"
        for value in values
        if isinstance(value, datetime.date) and value == value
    }
    return f"{' and '.join(sorted(kinds))} are mixed: give one kind" if len(kinds) > 1 else ""
