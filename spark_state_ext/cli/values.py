"""Values that somebody writes on a command line, as the types of columns have them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timezone
from decimal import Decimal, InvalidOperation
from typing import Any

import pyarrow as pa

from spark_state_ext.errors import UsageError
from spark_state_ext.functions.reasons import conversion_reason

__all__ = ["key_of", "parsed"]

_TRUTH = {"true": True, "false": False}
# Python before 3.11 does not know it.
_ZULU = re.compile(r"Z$")


def key_of(words: Sequence[str], text: str | None, schema: pa.Schema) -> dict[str, Any]:
    """A key as it was written: words in the order of the key columns, or a JSON object."""
    columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
    if (text is None) != bool(words):
        raise UsageError(f"give the key as words or as --json, one of both; its columns are {columns}")
    if text is None:
        if len(words) != len(schema):
            raise UsageError(f"a key has the columns {columns}, and {len(words)} words were given")
        for word, field in zip(words, schema, strict=True):
            _refuse_date(word, field)
        return {field.name: parsed(word, field) for word, field in zip(words, schema, strict=True)}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"the key is no JSON: {error}; its columns are {columns}") from error
    if not isinstance(found, dict) or set(found) != set(schema.names):
        raise UsageError(f"the key must be a JSON object with the columns {columns}: {text}")
    for field in schema:
        _refuse_date(found[field.name], field)
    return {field.name: _of_json(found[field.name], field) for field in schema}


def _refuse_date(value: Any, field: pa.Field) -> None:
    """Refuse a date for a key that is a time, as all who are given keys do; a filter takes it for midnight."""
    if pa.types.is_timestamp(field.type) and isinstance(value, str) and len(value) <= len("2024-02-01"):
        raise _wrong(value, field, "give the time of day too")


def parsed(word: str, field: pa.Field) -> Any:
    """A word as a value of a column: as `-o json` would print it, without the quotes of text."""
    kind = field.type
    if pa.types.is_string(kind):
        return word
    if pa.types.is_nested(kind):
        try:
            return _of_json(json.loads(word), field)
        except ValueError as error:
            raise _wrong(word, field, error) from error
    try:
        if pa.types.is_boolean(kind):
            return _TRUTH[word.lower()]
        if pa.types.is_integer(kind):
            return int(word)
        if pa.types.is_floating(kind):
            return float(word)
        return _of_text(word, kind)
    except (ArithmeticError, KeyError, ValueError) as error:
        why = "write true or false" if pa.types.is_boolean(kind) else conversion_reason(error)
        raise _wrong(word, field, why) from error


def _of_text(text: str, kind: pa.DataType) -> Any:
    """What JSON has as text."""
    if pa.types.is_decimal(kind):
        return Decimal(text)
    if pa.types.is_binary(kind):
        return base64.b64decode(text, validate=True)
    if pa.types.is_date(kind):
        return date.fromisoformat(text)
    if pa.types.is_timestamp(kind):
        found = datetime.fromisoformat(_ZULU.sub("+00:00", text))
        if (found.tzinfo is None) != (kind.tz is None):
            raise ValueError(
                "it lacks a time zone, such as Z" if kind.tz else "it has a time zone, and the column none"
            )
        return found if kind.tz is None else found.astimezone(timezone.utc)
    return text


def _of_json(value: Any, field: pa.Field) -> Any:
    kind = field.type
    if value is None:
        return None
    if pa.types.is_struct(kind):
        if not isinstance(value, Mapping) or set(value) != {it.name for it in kind}:
            raise _wrong(value, field, f"it has no fields {', '.join(it.name for it in kind)}")
        return {it.name: _of_json(value[it.name], it) for it in kind}
    if pa.types.is_list(kind):
        if not isinstance(value, list):
            raise _wrong(value, field, "it is no list")
        return [_of_json(it, kind.value_field) for it in value]
    if pa.types.is_floating(kind) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    as_json = (pa.types.is_integer(kind) and type(value) is int) or (pa.types.is_boolean(kind) and type(value) is bool)
    as_json |= pa.types.is_floating(kind) and type(value) in (int, float)
    if as_json:
        return float(value) if pa.types.is_floating(kind) else value
    number = any(test(kind) for test in (pa.types.is_integer, pa.types.is_boolean, pa.types.is_floating))
    if number or not isinstance(value, str):
        raise _wrong(value, field, "it is of another type")
    try:
        return value if pa.types.is_string(kind) else _of_text(value, kind)
    except (ValueError, InvalidOperation) as error:
        raise _wrong(value, field, conversion_reason(error)) from error


def _wrong(value: Any, field: pa.Field, why: object) -> UsageError:
    return UsageError(f"{value!r} is no value of the column {field.name!r}, {field.type}: {why}")
