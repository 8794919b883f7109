"""Values, keys and filters as somebody writes them on a command line."""

from __future__ import annotations

import ast
import base64
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, timezone
from decimal import Decimal, InvalidOperation
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spark_state_ext.errors import UsageError
from spark_state_ext.functions.reasons import conversion_reason

__all__ = ["parse_filter", "parse_key", "parse_value"]

_TRUTH = {"true": True, "false": False}
# Python before 3.11 does not know it.
_ZULU = re.compile(r"Z$")


def parse_key(words: Sequence[str], text: str | None, schema: pa.Schema) -> dict[str, Any]:
    """A key as it was written: words in the order of the key columns, or a JSON object."""
    columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
    if (text is None) != bool(words):
        raise UsageError(f"give the key as words or as --json, one of both; its columns are {columns}")
    if text is None:
        if len(words) != len(schema):
            raise UsageError(f"a key has the columns {columns}, and {len(words)} words were given")
        for word, field in zip(words, schema, strict=True):
            _refuse_date(word, field)
        return {field.name: parse_value(word, field) for word, field in zip(words, schema, strict=True)}
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


def parse_value(word: str, field: pa.Field) -> Any:
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


_COMPARES: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_HOW = "write it as in: count > 10 and name in ('ann', 'bob') and not (note is None)"


def parse_filter(text: str, schema: pa.Schema) -> pc.Expression:
    """A filter."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"the filter {text!r} cannot be read: {error}; {_HOW}") from error
    try:
        return _Reader(text, schema).condition(tree.body)
    except RecursionError as error:
        raise UsageError("the filter is nested too deeply") from error


class _Reader:
    def __init__(self, text: str, schema: pa.Schema) -> None:
        self._text = text
        self._schema = schema

    def condition(self, node: ast.expr) -> pc.Expression:
        if isinstance(node, ast.BoolOp):
            parts = [self.condition(it) for it in node.values]
            combine = operator.and_ if isinstance(node.op, ast.And) else operator.or_
            found = parts[0]
            for part in parts[1:]:
                found = combine(found, part)
            return found
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ~self.condition(node.operand)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._compared(node.left, node.ops[0], node.comparators[0])
        field = self._column(node)
        if field is not None and pa.types.is_boolean(field.type):
            return pc.field(field.name)
        raise self._wrong(node)

    def _compared(self, left: ast.expr, how: ast.cmpop, right: ast.expr) -> pc.Expression:
        field = self._column(left)
        if field is None:
            other = self._column(right)
            turned = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}
            if other is None or type(how) not in _COMPARES:
                raise self._wrong(left)
            return self._compared(right, turned.get(type(how), type(how))(), left)
        column = pc.field(field.name)
        if isinstance(how, (ast.Is, ast.IsNot)):
            if not (isinstance(right, ast.Constant) and right.value is None):
                raise self._wrong(right)
            return column.is_null() if isinstance(how, ast.Is) else ~column.is_null()
        if isinstance(how, (ast.In, ast.NotIn)):
            if not isinstance(right, (ast.Tuple, ast.List)):
                raise self._wrong(right)
            values = pa.array([self._value(it, field) for it in right.elts], field.type)
            return column.isin(values) if isinstance(how, ast.In) else ~column.isin(values)
        if pa.types.is_nested(field.type):
            raise UsageError(
                f"column {field.name!r} is {field.type}, which has no order: compare others, or filter later"
            )
        other = self._column(right)
        if other is not None:
            return _COMPARES[type(how)](column, pc.field(other.name))
        return _COMPARES[type(how)](column, pa.scalar(self._value(right, field), field.type))

    def _column(self, node: ast.expr) -> pa.Field | None:
        """The column that a node names; None where it is no name."""
        name = node.id if isinstance(node, ast.Name) else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "col":
            given = [it.value for it in node.args if isinstance(it, ast.Constant)]
            if len(node.args) != 1 or node.keywords or len(given) != 1 or not isinstance(given[0], str):
                raise self._wrong(node)
            name = given[0]
        if name is None:
            return None
        if name not in self._schema.names:
            raise UsageError(f"the filter names a column {name!r}; there are {', '.join(self._schema.names)}")
        return self._schema.field(name)

    def _value(self, node: ast.expr, field: pa.Field) -> Any:
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError) as error:
            raise self._wrong(node) from error
        text = isinstance(value, str)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is None:
            raise UsageError(f"nothing equals NULL: write {field.name} is None")
        if text:
            return parse_value(value, field)
        fits = (
            (isinstance(value, bool) and pa.types.is_boolean(field.type))
            or (isinstance(value, int) and number and pa.types.is_integer(field.type))
            or (number and pa.types.is_floating(field.type))
            or (number and pa.types.is_decimal(field.type))
        )
        if not fits:
            raise UsageError(f"{value!r} in the filter is no value of the column {field.name!r}, {field.type}")
        return parse_value(str(value), field) if pa.types.is_decimal(field.type) else value

    def _wrong(self, node: ast.expr) -> UsageError:
        return UsageError(f"the filter cannot have {ast.unparse(node)!r}: {_HOW}")
