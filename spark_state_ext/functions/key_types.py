"""Which values name a key, wherever a user names one: to erase it, to look for it, or to read its state.

A value of another type is refused and not converted. It might become another key than the one that is meant, and an
erasure would say "done" while the key is still there. Row functions take a time without a zone as one in the time zone
of Spark's session. No session is at hand here, so such a time is refused where the column has instants.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

__all__ = ["mixed_times", "refused_type"]

_TEXTS = frozenset({"string", "large_string", "string_view"})
_BYTES = frozenset({"binary", "large_binary", "binary_view"})


def refused_type(given: pa.DataType, kind: pa.DataType) -> str:
    """Why values of a type name no key in a column of another type; empty if they do."""
    types = pa.types
    if types.is_dictionary(given):
        given = given.value_type
    if given == kind or types.is_null(given):
        return ""
    if types.is_struct(given) and types.is_struct(kind):
        pairs = [(field.type, kind.field(field.name).type) for field in given if kind.get_field_index(field.name) >= 0]
    elif hasattr(given, "value_type") and hasattr(kind, "value_type"):
        pairs = [(given.value_type, kind.value_type)]
    else:
        return _refused(given, kind)
    return next(filter(None, (refused_type(*pair) for pair in pairs)), "")


def _refused(given: pa.DataType, kind: pa.DataType) -> str:
    types, whole = pa.types, pa.types.is_integer(given)
    wanted, fits = "", given.id == kind.id
    if str(kind) in _TEXTS:
        wanted, fits = "text", str(given) in _TEXTS
    elif str(kind) in _BYTES:
        wanted, fits = "bytes", str(given) in _BYTES or bool(types.is_fixed_size_binary(given))
    elif types.is_integer(kind):
        wanted, fits = "whole numbers (int)", bool(whole)
    elif types.is_floating(kind):
        wanted, fits = "numbers (float or int)", bool(whole or types.is_floating(given))
    elif types.is_decimal(kind):
        wanted, fits = "decimals (decimal.Decimal or int)", bool(whole or types.is_decimal(given))
    elif types.is_date(kind):
        wanted, fits = "dates without a time of day", bool(types.is_date(given))
    elif types.is_timestamp(kind) and kind.tz is None:
        wanted, fits = "times without a time zone", bool(types.is_timestamp(given)) and given.tz is None
    elif types.is_timestamp(kind):
        wanted, fits = "times with a time zone, such as UTC", bool(types.is_timestamp(given)) and given.tz is not None
    return "" if fits else f"values of type {given} are not converted to {kind}: give {wanted or kind}"


def mixed_times(values: Iterable[Any]) -> str:
    """Why values that PyArrow makes one column of times are of several kinds; empty if they are of one kind.

    PyArrow takes the kind of the first value: it cuts times off after a date, and takes a time without a zone for UTC
    beside one with a zone.
    """
    kinds = {
        "dates" if not isinstance(it, datetime.datetime) else f"times with{'' if it.tzinfo else 'out'} a time zone"
        for it in values
        if isinstance(it, datetime.date) and it == it
    }
    return f"{' and '.join(sorted(kinds))} are mixed: give one kind" if len(kinds) > 1 else ""
