"""Calling the user's function once per key with plain Python rows: no pandas, neither on the way in nor out."""

from __future__ import annotations

import bisect
import re
import unicodedata
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import GeneratorType
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from arrow_schemas.columns import flat
from arrow_schemas.row import RowSchema
from arrow_schemas.spark_types import normal_type
from spark_state_ext.errors import ResultTypeError, StateError, StateValueError
from spark_state_ext.functions.tables import conformed
from spark_state_ext.spark.callers.group_state import NO_TIMEOUT, KeyState
from spark_state_ext.spark.callers.groups import CallContext, Groups, note_place
from spark_state_ext.spark.callers.per_key import Call, Changes, PerKeyCaller, reraise, shown_key
from spark_state_ext.spark.callers.results import short
from spark_state_ext.spark.callers.state_values import column_to_values, row_keeper, values_to_column
from spark_state_ext.spark.shuffle.output import Outbox

__all__ = ["RowCaller", "row_class"]

# Output rows that become a table at once.
_ROWS_MAX = 65_536
# Input rows that are Python objects at once.
_PORTION_ROWS = 65_536
# What nearly all functions return; others are looked at.
_ITERABLES = frozenset({GeneratorType, list, tuple})


def row_class(name: str, columns: Sequence[str]) -> Callable[[Iterable[Any]], Any]:
    """What makes named tuples of rows. A column whose name no attribute can have is ``_0``, ``_1``, … by its place."""
    # As Python reads attributes: ``row.µs`` asks for another letter than the one that is typed on most keyboards.
    names = [unicodedata.normalize("NFKC", column) for column in columns]
    # Not a class that a user could look up; the name is what its `repr` shows.
    made = namedtuple(re.sub(r"\W", "_", name), names, rename=True)  # type: ignore[misc]  # names known at run time only
    make: Callable[[Iterable[Any]], Any] = made._make
    return make


class RowCaller(PerKeyCaller):
    """Calls ``function(key, rows, state)``, in which `key` and each of `rows` is a named tuple."""

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
        # Of the calls that are being made, by position.
        self._keys: list[tuple[Any, ...]] = []
        self._keep_output = row_keeper(output_type, "output column")
        self._make_row = row_class("Row", input_type.names)
        self._make_key = row_class("Key", key_type.names)

    def _data_calls(self, groups: Groups, before: list[tuple[Any, ...] | None]) -> Iterator[Call]:
        keys = self._keys = self._tuples(groups.keys, self._key_type)
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
        keys = self._keys = self._tuples(self._schema.key_columns(expired), self._key_type)
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
        # Whose rows they are: positions of keys, and where the rows of each end. For errors only.
        owners: list[int] = []
        ends: list[int] = []
        note_owner, note_end = owners.append, ends.append
        put, taken = output.append, self._taken
        unchanging = tuple if self._keep_output is None else None
        for position, key, rows, before in calls:
            state = KeyState(before, clock)
            try:
                given = function(key, rows, state)
                if given is not None:
                    for row in given if type(given) in _ITERABLES else _iterable(given):
                        # As it is now: the function may change it, and yield it again.
                        put(row if type(row) is unchanging else taken(row))
                    note_owner(position)
                    note_end(len(output))
                if state.touched or state.timeout_ms != NO_TIMEOUT:
                    note_position(position)
                    note_value(state.value)
                    note_timeout(state.timeout_ms)
            except (Exception, SystemExit) as error:  # `sys.exit` too
                reraise(error, tuple(key), context, timed_out)
            if len(output) >= _ROWS_MAX:
                yield from outbox.add(self._table(output, owners, ends, context))
                output.clear()
                owners.clear()
                ends.clear()
            after_key()
        if output:
            yield from outbox.add(self._table(output, owners, ends, context))
        yield from outbox.rest()

    def _taken(self, row: Any) -> Any:
        """A row that stays as it is. What is no row, or not of the right width, is refused with the others."""
        if not isinstance(row, (tuple, list)) or len(row) != len(self._fields):
            return row
        return tuple(row) if self._keep_output is None else self._keep_output(row)

    def _table(self, rows: list[tuple[Any, ...]], owners: list[int], ends: list[int], context: CallContext) -> pa.Table:
        wrong: list[int] = []

        def whose(row: int) -> str:
            wrong.append(row)
            return f" (in {rows[row]!r})"

        try:
            return conformed(self._columns(rows, whose), self._fields, "the function gave")
        except StateError as error:
            place: list[object] = [context]
            if wrong:
                # The first call whose rows end behind it. Calls that are not over yet have noted nothing, and none of
                # theirs is here.
                place.insert(0, f"key {shown_key(self._keys[owners[bisect.bisect_right(ends, wrong[0])]])}")
            note_place(error, *place)
            raise

    def _columns(self, rows: list[Any], whose: Callable[[int], str]) -> pa.Table:
        fields = self._fields
        names = ", ".join(field.name for field in fields)
        for kind in set(map(type, rows)):
            if not issubclass(kind, (tuple, list)):
                at = next(at for at, row in enumerate(rows) if type(row) is kind)
                whose(at)
                raise ResultTypeError(
                    f"the function gave {short(rows[at])} ({kind.__name__}) for a row: return, or yield, one tuple "
                    "for each output row"
                )
        try:
            by_column = list(zip(*rows, strict=True))
        except ValueError:
            by_column = []
        if len(by_column) != len(fields):
            at = next(at for at, row in enumerate(rows) if len(row) != len(fields))
            whose(at)
            raise ResultTypeError(f"the function gave {short(rows[at])} for a row; expected a tuple of {names}")
        columns = [
            values_to_column(values, spark.dataType, field.type, f"output column {field.name!r}", whose)
            for values, spark, field in zip(by_column, self._output_type.fields, fields, strict=True)
        ]
        for column, field in zip(columns, fields, strict=True):
            if not field.nullable and column.null_count:
                at = pc.index(column.is_null(), True).as_py()
                whose(at)
                raise StateValueError(f"output column {field.name!r} is declared without NULLs and row {at} is NULL")
        return pa.table(columns, names=[field.name for field in fields])


def _iterable(given: Any) -> Iterable[Any]:
    """What the function returned, if it holds rows."""
    if not hasattr(given, "__iter__"):
        raise ResultTypeError(
            f"the function gave {short(given)} ({type(given).__name__}): return, or yield, one tuple for each "
            "output row, or return None"
        )
    rows: Iterable[Any] = given
    return rows
