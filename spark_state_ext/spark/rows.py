"""Calling the user's function once per key with plain Python rows: no pandas, neither on the way in nor out."""

from __future__ import annotations

import re
import unicodedata
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql.types import StructType

from arrow_schemas.columns import flat
from arrow_schemas.row import RowSchema
from arrow_schemas.spark_types import normal_type
from arrow_schemas.tables import conformed
from spark_state_ext.errors import StateError, StateValueError, UserFunctionError
from spark_state_ext.spark.group_state import NO_TIMEOUT, KeyState
from spark_state_ext.spark.groups import CallContext, Groups, note_place
from spark_state_ext.spark.output import Outbox
from spark_state_ext.spark.per_key import Call, Changes, PerKeyCaller, reraise
from spark_state_ext.spark.state_values import column_to_values, row_keeper, values_to_column

__all__ = ["RowCaller", "row_class"]

# Output rows that become a table at once.
_ROWS_MAX = 65_536
# Input rows that are Python objects at once.
_PORTION_ROWS = 65_536


def row_class(name: str, columns: Sequence[str]) -> Callable[[Iterable[Any]], Any]:
    """What makes named tuples of rows. A column whose name no attribute can have is ``_0``, ``_1``, … by its place."""
    # As Python reads attributes: ``row.µs`` asks for another letter than the one that is typed on most keyboards.
    names = [unicodedata.normalize("NFKC", column) for column in columns]
    # Not a class that a user could look up; the name is what its `repr` shows.
    made = namedtuple(re.sub(r"\W", "_", name), names, rename=True)  # type: ignore[misc]  # names known at run time only
    make: Callable[[Iterable[Any]], Any] = made._make
    return make


class RowCaller(PerKeyCaller):
    """Calls ``function(key, rows, state)``, in which `key` and each of `rows` is a named tuple.

    Parameters
    ----------
    function
        The user's function. It returns, or yields, tuples, or returns None.
    schema
        Row schema of the state.
    state_type, input_type, key_type, output_type
        Spark's types of the state, the input's columns, the keys and the output.
    fields
        The output's columns in Arrow.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        schema: RowSchema,
        state_type: StructType,
        input_type: StructType,
        key_type: StructType,
        output_type: StructType,
        fields: Sequence[pa.Field],
    ) -> None:
        super().__init__(function, schema, state_type)
        self._input_type = input_type
        self._key_type = key_type
        self._output_type = output_type
        self._fields = tuple(fields)
        self._keep_output = row_keeper(output_type, "output column")
        self._make_row = row_class("Row", input_type.names)
        self._make_key = row_class("Key", key_type.names)

    def _data_calls(self, groups: Groups, before: list[tuple[Any, ...] | None]) -> Iterator[Call]:
        keys = self._tuples(groups.keys, self._key_type)
        make_key, make_row = self._make_key, self._make_row
        bounds = [*groups.starts.tolist(), groups.rows.num_rows]
        at = 0
        while at < groups.count:
            # So many keys as have the rows of a portion, and at least one.
            start, until = bounds[at], at + 1
            while until < groups.count and bounds[until + 1] - start <= _PORTION_ROWS:
                until += 1
            piece = groups.rows.slice(start, bounds[until] - start)
            rows = list(map(make_row, self._tuples(list(map(flat, piece.columns)), self._input_type)))
            for position in range(at, until):
                mine = rows[bounds[position] - start : bounds[position + 1] - start]
                yield position, make_key(keys[position]), mine, before[position]
            at = until

    def _timeout_calls(self, expired: pa.RecordBatch, before: list[tuple[Any, ...] | None]) -> Iterator[Call]:
        keys = self._tuples(self._schema.key_columns(expired), self._key_type)
        return ((at, self._make_key(key), [], before[at]) for at, key in enumerate(keys))

    @staticmethod
    def _tuples(columns: Sequence[pa.Array], types: StructType) -> list[tuple[Any, ...]]:
        values = [
            column_to_values(column.cast(normal_type(column.type)), spark.dataType, f"column {spark.name!r}")
            for column, spark in zip(columns, types.fields, strict=True)
        ]
        return list(zip(*values, strict=True))

    def _call(
        self, calls: Iterable[Call], timed_out: bool, context: CallContext, changes: Changes
    ) -> Iterator[pd.DataFrame]:
        function, after_key = self._function, context.after_key
        clock, outbox = self._clock(context, timed_out, self._state_type), Outbox(self._fields)
        note_position, note_value = changes.positions.append, self._value_noter(changes)
        note_timeout = changes.timeouts.append
        output: list[tuple[Any, ...]] = []
        put, taken = output.append, self._taken
        unchanging = tuple if self._keep_output is None else None
        for position, key, rows, before in calls:
            state = KeyState(before, clock)
            try:
                given = function(key, rows, state)
                if given is not None:
                    for row in given:
                        # As it is now: the function may change it, and yield it again.
                        put(row if type(row) is unchanging else taken(row))
                if state.touched or state.timeout_ms != NO_TIMEOUT:
                    note_position(position)
                    note_value(state.value)
                    note_timeout(state.timeout_ms)
            except Exception as error:
                reraise(error, tuple(key), context, timed_out)
            if len(output) >= _ROWS_MAX:
                yield from outbox.add(self._table(output, context))
                output.clear()
            after_key()
        if output:
            yield from outbox.add(self._table(output, context))
        yield from outbox.rest()

    def _taken(self, row: Any) -> Any:
        """A row that stays as it is. What is no row, or not of the right width, is refused with the others."""
        if not isinstance(row, (tuple, list)) or len(row) != len(self._fields):
            return row
        return tuple(row) if self._keep_output is None else self._keep_output(row)

    def _table(self, rows: list[tuple[Any, ...]], context: CallContext) -> pa.Table:
        try:
            return conformed(self._columns(rows), self._fields, "the function gave")
        except StateError as error:
            note_place(error, context)
            raise

    def _columns(self, rows: list[tuple[Any, ...]]) -> pa.Table:
        fields = self._fields
        try:
            by_column = list(zip(*self._checked(rows), strict=True))
        except ValueError:
            by_column = []
        if len(by_column) != len(fields):
            wrong = next(row for row in rows if len(row) != len(fields))
            raise StateValueError(
                f"the function gave {wrong!r} for a row; expected a tuple of {', '.join(f.name for f in fields)}"
            )
        columns = [
            values_to_column(
                values,
                spark.dataType,
                field.type,
                f"output column {field.name!r}",
                lambda row: f" (in {rows[row]!r})",
            )
            for values, spark, field in zip(by_column, self._output_type.fields, fields, strict=True)
        ]
        return pa.table(columns, names=[field.name for field in fields])

    @staticmethod
    def _checked(rows: list[Any]) -> list[tuple[Any, ...]]:
        for kind in set(map(type, rows)):
            if not issubclass(kind, (tuple, list)):
                raise UserFunctionError(
                    f"the function gave {next(row for row in rows if type(row) is kind)!r} ({kind.__name__}) for a "
                    "row: return, or yield, one tuple for each output row"
                )
        return rows
