"""Call the user's function once per key with plain Python rows: without pandas in input or output."""

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

from arrow_schemas.columns import combine_chunks
from arrow_schemas.row import RowSchema
from arrow_schemas.spark_types import normalise_type
from spark_state_ext.errors import ResultTypeError, StateError, StateValueError
from spark_state_ext.functions.tables import conform_table
from spark_state_ext.spark.callers.group_state import NO_TIMEOUT, KeyState
from spark_state_ext.spark.callers.groups import CallContext, Groups, note_place
from spark_state_ext.spark.callers.per_key import Call, Changes, PerKeyCaller, format_key, reraise
from spark_state_ext.spark.callers.results import shorten
from spark_state_ext.spark.callers.state_values import column_to_values, make_row_copier, values_to_column
from spark_state_ext.spark.shuffle.output import Outbox

__all__ = ["RowCaller", "make_row_factory"]

# Number of output rows that become one table.
_ROWS_MAX = 65_536
# Number of input rows that are Python objects at the same time.
_PORTION_ROWS = 65_536
# Types of nearly all results; others are checked.
_ITERABLES = frozenset({GeneratorType, list, tuple})


def make_row_factory(name: str, columns: Sequence[str]) -> Callable[[Iterable[Any]], Any]:
    """Return a function that makes named tuples of rows.

    A column whose name cannot be an attribute is called ``_0``, ``_1``, … by its position.
    """
    # As Python normalises attributes: in ``row.µs`` it reads another letter than the one on most keyboards.
    names = [unicodedata.normalize("NFKC", column) for column in columns]
    # Users cannot import this class; its name only shows in its `repr`.
    row_type = namedtuple(re.sub(r"\W", "_", name), names, rename=True)  # type: ignore[misc]  # names known at run time only
    make: Callable[[Iterable[Any]], Any] = row_type._make
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
        # Keys of the current calls, by position.
        self._keys: list[tuple[Any, ...]] = []
        self._copy_output = make_row_copier(output_type, "output column")
        self._make_row = make_row_factory("Row", input_type.names)
        self._make_key = make_row_factory("Key", key_type.names)

    def _prepare_data_calls(self, groups: Groups, before: list[tuple[Any, ...] | None]) -> Iterator[Call]:
        keys = self._keys = self._make_tuples(groups.keys, self._key_type)
        make_key, make_row = self._make_key, self._make_row
        bounds = [*groups.starts.tolist(), groups.rows.num_rows]
        at = 0
        while at < groups.count:
            # As many keys as fit into a portion of rows, and at least one.
            start, until = bounds[at], at + 1
            while until < groups.count and bounds[until + 1] - start <= _PORTION_ROWS:
                until += 1
            piece = groups.rows.slice(start, bounds[until] - start)
            rows = list(map(make_row, self._make_tuples(list(map(combine_chunks, piece.columns)), self._input_type)))
            for position in range(at, until):
                key_rows = rows[bounds[position] - start : bounds[position + 1] - start]
                yield position, make_key(keys[position]), key_rows, before[position]
            at = until

    def _prepare_timeout_calls(self, expired: pa.RecordBatch, before: list[tuple[Any, ...] | None]) -> Iterator[Call]:
        keys = self._keys = self._make_tuples(self._schema.key_columns(expired), self._key_type)
        return ((at, self._make_key(key), [], before[at]) for at, key in enumerate(keys))

    @staticmethod
    def _make_tuples(columns: Sequence[pa.Array], types: StructType) -> list[tuple[Any, ...]]:
        values = [
            column_to_values(column.cast(normalise_type(column.type)), spark.dataType, f"column {spark.name!r}")
            for column, spark in zip(columns, types.fields, strict=True)
        ]
        return list(zip(*values, strict=True))

    def _run_calls(
        self, calls: Iterable[Call], timed_out: bool, context: CallContext, changes: Changes
    ) -> Iterator[pd.DataFrame]:
        function, after_key = self._function, context.after_key
        clock, outbox = self._make_clock(context, timed_out, self._state_type), Outbox(self._fields)
        record_position, record_value = changes.positions.append, self._make_value_recorder(changes)
        record_timeout = changes.timeouts.append
        output: list[tuple[Any, ...]] = []
        # Positions of the keys that returned rows, and where the rows of each key end. For errors only.
        owners: list[int] = []
        ends: list[int] = []
        record_owner, record_end = owners.append, ends.append
        add, copy_row = output.append, self._copy_row
        unchanging = tuple if self._copy_output is None else None
        for position, key, rows, before in calls:
            state = KeyState(before, clock)
            try:
                result = function(key, rows, state)
                if result is not None:
                    for row in result if type(result) in _ITERABLES else _check_iterable(result):
                        # A copy: the function may change the row, and yield it again.
                        add(row if type(row) is unchanging else copy_row(row))
                    record_owner(position)
                    record_end(len(output))
                if state.touched or state.timeout_ms != NO_TIMEOUT:
                    record_position(position)
                    record_value(state.value)
                    record_timeout(state.timeout_ms)
            except (Exception, SystemExit) as error:  # `sys.exit` too
                reraise(error, tuple(key), context, timed_out)
            if len(output) >= _ROWS_MAX:
                yield from outbox.add(self._make_table(output, owners, ends, context))
                output.clear()
                owners.clear()
                ends.clear()
            after_key()
        if output:
            yield from outbox.add(self._make_table(output, owners, ends, context))
        yield from outbox.rest()

    def _copy_row(self, row: Any) -> Any:
        """Return a copy of a row. Other values, and rows of a wrong width, are refused later, with the table."""
        if not isinstance(row, (tuple, list)) or len(row) != len(self._fields):
            return row
        return tuple(row) if self._copy_output is None else self._copy_output(row)

    def _make_table(
        self, rows: list[tuple[Any, ...]], owners: list[int], ends: list[int], context: CallContext
    ) -> pa.Table:
        wrong: list[int] = []

        def describe_owner(row: int) -> str:
            wrong.append(row)
            return f" (in {rows[row]!r})"

        try:
            return conform_table(self._make_columns(rows, describe_owner), self._fields, "the function gave")
        except StateError as error:
            place: list[object] = [context]
            if wrong:
                # The first call whose rows end after this row. A call that is not over is not recorded yet, but none of
                # its rows are here.
                place.insert(0, f"key {format_key(self._keys[owners[bisect.bisect_right(ends, wrong[0])]])}")
            note_place(error, *place)
            raise

    def _make_columns(self, rows: list[Any], describe_owner: Callable[[int], str]) -> pa.Table:
        fields = self._fields
        names = ", ".join(field.name for field in fields)
        for row_type in set(map(type, rows)):
            if not issubclass(row_type, (tuple, list)):
                at = next(at for at, row in enumerate(rows) if type(row) is row_type)
                describe_owner(at)
                raise ResultTypeError(
                    f"the function gave {shorten(rows[at])} ({row_type.__name__}) for a row: return, or yield, one "
                    "tuple for each output row"
                )
        try:
            by_column = list(zip(*rows, strict=True))
        except ValueError:
            by_column = []
        if len(by_column) != len(fields):
            at = next(at for at, row in enumerate(rows) if len(row) != len(fields))
            describe_owner(at)
            raise ResultTypeError(f"the function gave {shorten(rows[at])} for a row; expected a tuple of {names}")
        columns = [
            values_to_column(values, spark.dataType, field.type, f"output column {field.name!r}", describe_owner)
            for values, spark, field in zip(by_column, self._output_type.fields, fields, strict=True)
        ]
        for column, field in zip(columns, fields, strict=True):
            if not field.nullable and column.null_count:
                at = pc.index(column.is_null(), True).as_py()
                describe_owner(at)
                raise StateValueError(f"output column {field.name!r} is declared without NULLs and row {at} is NULL")
        return pa.table(columns, names=[field.name for field in fields])


def _check_iterable(result: Any) -> Iterable[Any]:
    """Return a function's result if it can be iterated."""
    if not hasattr(result, "__iter__"):
        raise ResultTypeError(
            f"the function gave {shorten(result)} ({type(result).__name__}): return, or yield, one tuple for each "
            "output row, or return None"
        )
    rows: Iterable[Any] = result
    return rows
