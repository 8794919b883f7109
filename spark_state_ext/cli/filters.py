"""Filters as somebody writes them, such as ``count > 10 and name in ('ann', 'bob')``, as expressions of Arrow.

The language is a small part of Python's: nothing is called or looked up but columns, so a filter cannot do anything.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spark_state_ext.cli.values import parsed
from spark_state_ext.errors import UsageError

__all__ = ["filter_of"]

_COMPARES: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_HOW = "write it as in: count > 10 and name in ('ann', 'bob') and not (note is None)"


def filter_of(text: str, schema: pa.Schema) -> pc.Expression:
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
            return parsed(value, field)
        fits = (
            (isinstance(value, bool) and pa.types.is_boolean(field.type))
            or (isinstance(value, int) and number and pa.types.is_integer(field.type))
            or (number and pa.types.is_floating(field.type))
            or (number and pa.types.is_decimal(field.type))
        )
        if not fits:
            raise UsageError(f"{value!r} in the filter is no value of the column {field.name!r}, {field.type}")
        return parsed(str(value), field) if pa.types.is_decimal(field.type) else value

    def _wrong(self, node: ast.expr) -> UsageError:
        return UsageError(f"the filter cannot have {ast.unparse(node)!r}: {_HOW}")
