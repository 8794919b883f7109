"""Parse values, keys and filters from a command line."""

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
from spark_state_ext.functions.conversion_errors import explain_conversion_error

__all__ = ["parse_filter", "parse_key", "parse_value"]

_BOOLEANS = {"true": True, "false": False}
# Python before 3.11 cannot parse a trailing Z.
_ZULU = re.compile(r"Z$")


def parse_key(words: Sequence[str], text: str | None, schema: pa.Schema) -> dict[str, Any]:
    """Parse a key: words in the order of the key columns, or a JSON object."""
    columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
    if (text is None) != bool(words):
        raise UsageError(f"give the key either as words or with --json; its columns are {columns}")
    if text is None:
        if len(words) != len(schema):
            raise UsageError(f"a key has the columns {columns}, one word each, but {len(words)} words were given")
        for word, field in zip(words, schema, strict=True):
            _refuse_date(word, field)
        return {field.name: parse_value(word, field) for word, field in zip(words, schema, strict=True)}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"the key is not JSON: {error}; its columns are {columns}") from error
    if not isinstance(value, dict) or set(value) != set(schema.names):
        raise UsageError(f"the key must be a JSON object with the columns {columns}: {text}")
    for field in schema:
        _refuse_date(value[field.name], field)
    return {field.name: _parse_json(value[field.name], field) for field in schema}


def _refuse_date(value: Any, field: pa.Field) -> None:
    """Refuse a date for a timestamp column of a key; a filter reads such a date as midnight."""
    if pa.types.is_timestamp(field.type) and isinstance(value, str) and len(value) <= len("2024-02-01"):
        raise _value_error(value, field, "give the time of day too")


def parse_value(word: str, field: pa.Field) -> Any:
    """Parse a word as a value of a column; it is written as `-o json` prints it, but text without quotes."""
    kind = field.type
    if pa.types.is_string(kind):
        return word
    if pa.types.is_nested(kind):
        try:
            return _parse_json(json.loads(word), field)
        except ValueError as error:
            raise _value_error(word, field, error) from error
    try:
        if pa.types.is_boolean(kind):
            return _BOOLEANS[word.lower()]
        if pa.types.is_integer(kind):
            return int(word)
        if pa.types.is_floating(kind):
            return float(word)
        return _parse_text(word, kind)
    except (ArithmeticError, KeyError, ValueError) as error:
        why = "write true or false" if pa.types.is_boolean(kind) else explain_conversion_error(error)
        raise _value_error(word, field, why) from error


def _parse_text(text: str, kind: pa.DataType) -> Any:
    """Parse a value that JSON writes as text."""
    if pa.types.is_decimal(kind):
        return Decimal(text)
    if pa.types.is_binary(kind):
        return base64.b64decode(text, validate=True)
    if pa.types.is_date(kind):
        return date.fromisoformat(text)
    if pa.types.is_timestamp(kind):
        moment = datetime.fromisoformat(_ZULU.sub("+00:00", text))
        if (moment.tzinfo is None) != (kind.tz is None):
            raise ValueError(
                "it needs a time zone, such as Z" if kind.tz else "it has a time zone, but the column has none"
            )
        return moment if kind.tz is None else moment.astimezone(timezone.utc)
    return text


def _parse_json(value: Any, field: pa.Field) -> Any:
    kind = field.type
    if value is None:
        return None
    if pa.types.is_struct(kind):
        if not isinstance(value, Mapping) or set(value) != {child.name for child in kind}:
            raise _value_error(value, field, f"its fields must be {', '.join(child.name for child in kind)}")
        return {child.name: _parse_json(value[child.name], child) for child in kind}
    if pa.types.is_list(kind):
        if not isinstance(value, list):
            raise _value_error(value, field, "it is not a list")
        return [_parse_json(child, kind.value_field) for child in value]
    if pa.types.is_floating(kind) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    is_native = (pa.types.is_integer(kind) and type(value) is int) or (
        pa.types.is_boolean(kind) and type(value) is bool
    )
    is_native |= pa.types.is_floating(kind) and type(value) in (int, float)
    if is_native:
        return float(value) if pa.types.is_floating(kind) else value
    is_number = any(test(kind) for test in (pa.types.is_integer, pa.types.is_boolean, pa.types.is_floating))
    if is_number or not isinstance(value, str):
        raise _value_error(value, field, "it has another type")
    try:
        return value if pa.types.is_string(kind) else _parse_text(value, kind)
    except (ValueError, InvalidOperation) as error:
        raise _value_error(value, field, explain_conversion_error(error)) from error


def _value_error(value: Any, field: pa.Field, why: object) -> UsageError:
    return UsageError(f"{value!r} is not a value of the column {field.name!r} ({field.type}): {why}")


_COMPARISONS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_EXAMPLE = "write it like this: count > 10 and name in ('ann', 'bob') and not (note is None)"


def parse_filter(text: str, schema: pa.Schema) -> pc.Expression:
    """Parse a filter."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"the filter {text!r} cannot be read: {error}; {_EXAMPLE}") from error
    try:
        return _FilterParser(text, schema).build_condition(tree.body)
    except RecursionError as error:
        raise UsageError("the filter is nested too deeply") from error


class _FilterParser:
    def __init__(self, text: str, schema: pa.Schema) -> None:
        self._text = text
        self._schema = schema

    def build_condition(self, node: ast.expr) -> pc.Expression:
        if isinstance(node, ast.BoolOp):
            parts = [self.build_condition(operand) for operand in node.values]
            combine = operator.and_ if isinstance(node.op, ast.And) else operator.or_
            combined = parts[0]
            for part in parts[1:]:
                combined = combine(combined, part)
            return combined
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ~self.build_condition(node.operand)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._build_comparison(node.left, node.ops[0], node.comparators[0])
        field = self._find_column(node)
        if field is not None and pa.types.is_boolean(field.type):
            return pc.field(field.name)
        raise self._syntax_error(node)

    def _build_comparison(self, left: ast.expr, comparison: ast.cmpop, right: ast.expr) -> pc.Expression:
        field = self._find_column(left)
        if field is None:
            other_field = self._find_column(right)
            mirrored = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}
            if other_field is None or type(comparison) not in _COMPARISONS:
                raise self._syntax_error(left)
            return self._build_comparison(right, mirrored.get(type(comparison), type(comparison))(), left)
        column = pc.field(field.name)
        if isinstance(comparison, (ast.Is, ast.IsNot)):
            if not (isinstance(right, ast.Constant) and right.value is None):
                raise self._syntax_error(right)
            return column.is_null() if isinstance(comparison, ast.Is) else ~column.is_null()
        if isinstance(comparison, (ast.In, ast.NotIn)):
            if not isinstance(right, (ast.Tuple, ast.List)):
                raise self._syntax_error(right)
            values = pa.array([self._parse_operand(element, field) for element in right.elts], field.type)
            return column.isin(values) if isinstance(comparison, ast.In) else ~column.isin(values)
        if pa.types.is_nested(field.type):
            raise UsageError(
                f"column {field.name!r} is {field.type}, which cannot be compared: use other columns, or filter later"
            )
        other_field = self._find_column(right)
        if other_field is not None:
            return _COMPARISONS[type(comparison)](column, pc.field(other_field.name))
        return _COMPARISONS[type(comparison)](column, pa.scalar(self._parse_operand(right, field), field.type))

    def _find_column(self, node: ast.expr) -> pa.Field | None:
        """Return the column that a node names; None if it is not a name."""
        name = node.id if isinstance(node, ast.Name) else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "col":
            constants = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            if len(node.args) != 1 or node.keywords or len(constants) != 1 or not isinstance(constants[0], str):
                raise self._syntax_error(node)
            name = constants[0]
        if name is None:
            return None
        if name not in self._schema.names:
            raise UsageError(f"there is no column {name!r} for the filter; there are {', '.join(self._schema.names)}")
        return self._schema.field(name)

    def _parse_operand(self, node: ast.expr, field: pa.Field) -> Any:
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError) as error:
            raise self._syntax_error(node) from error
        is_text = isinstance(value, str)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is None:
            raise UsageError(f"no value equals NULL: write {field.name} is None")
        if is_text:
            return parse_value(value, field)
        fits = (
            (isinstance(value, bool) and pa.types.is_boolean(field.type))
            or (isinstance(value, int) and is_number and pa.types.is_integer(field.type))
            or (is_number and pa.types.is_floating(field.type))
            or (is_number and pa.types.is_decimal(field.type))
        )
        if not fits:
            raise UsageError(f"{value!r} in the filter is not a value of the column {field.name!r} ({field.type})")
        return parse_value(str(value), field) if pa.types.is_decimal(field.type) else value

    def _syntax_error(self, node: ast.expr) -> UsageError:
        return UsageError(f"the filter cannot contain {ast.unparse(node)!r}: {_EXAMPLE}")
