"""What calling a function once per key has in common, whatever the function is given.

All that costs time per key is in the loop of a subclass; everything around it is vectorised.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql.types import StructType

from arrow_schemas.columns import shown
from arrow_schemas.equality import HashArray
from arrow_schemas.row import RowSchema
from spark_state_ext.errors import StateError, StateValueError, UserFunctionError
from spark_state_ext.spark.callers.group_state import NO_TIMEOUT, Clock
from spark_state_ext.spark.callers.groups import CallContext, Changed, Groups, Result, mark_placed, note_place, said
from spark_state_ext.spark.callers.state_values import column_to_values, row_keeper, values_to_column
from spark_state_ext.store import Lookup

__all__ = ["Call", "Changes", "PerKeyCaller", "reraise", "shown_key"]

# Position, key, rows in whatever form, state before.
Call = tuple[int, tuple[Any, ...], Any, "tuple[Any, ...] | None"]


@dataclass
class Changes:
    """Outcome of calls: which keys changed, and to what. Lists of one length, a place a changed key."""

    positions: list[int] = field(default_factory=list)
    values: list[tuple[Any, ...] | None] = field(default_factory=list)
    timeouts: list[int] = field(default_factory=list)


class PerKeyCaller(abc.ABC):
    """Calls a function for one key after the other."""

    together = False

    def __init__(self, function: Callable[..., Any], schema: RowSchema, state_type: StructType) -> None:
        self._function = function
        self._schema = schema
        self._state_type = state_type
        self._keep_state = row_keeper(state_type, "state column")

    def data(
        self, groups: Groups, found: Lookup, expired: pa.RecordBatch, context: CallContext, result: Result
    ) -> Iterator[pd.DataFrame]:
        """Call for keys with rows; as `Caller.data`."""
        changes = Changes()
        values = self._state_tuples(found)
        before = [None if at < 0 else values[at] for at in found.index.tolist()]
        yield from self._call(self._data_calls(groups, before), False, context, changes)
        result.data = self._changed(changes, groups.hashes, groups.keys, context)

    def timeouts(self, expired: pa.RecordBatch, context: CallContext, result: Result) -> Iterator[pd.DataFrame]:
        """Call for keys whose time is up; as `Caller.timeouts`."""
        changes = Changes()
        values = self._state_tuples(Lookup(np.arange(expired.num_rows, dtype=np.int64), expired))
        yield from self._call(self._timeout_calls(expired, values), True, context, changes)
        keys = self._schema.key_columns(expired)
        result.timeouts = self._changed(changes, expired.column(0).to_numpy(), keys, context)

    # -- for subclasses ----------------------------------------------------------------------------

    @abc.abstractmethod
    def _data_calls(self, groups: Groups, before: list[tuple[Any, ...] | None]) -> Iterator[Call]:
        """The calls to make for keys with rows, in any order."""

    @abc.abstractmethod
    def _timeout_calls(self, expired: pa.RecordBatch, before: list[tuple[Any, ...] | None]) -> Iterator[Call]:
        """The calls to make for keys that timed out."""

    @abc.abstractmethod
    def _call(
        self, calls: Iterable[Call], timed_out: bool, context: CallContext, changes: Changes
    ) -> Iterator[pd.DataFrame]:
        """Make them; yields what goes to Spark, and notes changes."""

    @staticmethod
    def _clock(context: CallContext, timed_out: bool, schema: StructType) -> Clock:
        return Clock(
            context.processing_time_ms,
            context.watermark_ms,
            context.timeout_conf,
            timed_out,
            context.watermark_present,
            schema,
        )

    # -- state -------------------------------------------------------------------------------------

    def _value_noter(self, changes: Changes) -> Callable[[tuple[Any, ...] | None], None]:
        """What notes a key's state as it is when its call is over: what the function holds on to, it may change."""
        note, keep = changes.values.append, self._keep_state
        if keep is None:
            return note
        return lambda value: note(None if value is None else keep(value))

    def _state_tuples(self, found: Lookup) -> list[tuple[Any, ...] | None]:
        rows = found.rows
        columns = [
            column_to_values(column, spark.dataType, f"state column {spark.name!r}")
            for column, spark in zip(self._schema.state_columns(rows), self._state_type.fields, strict=True)
        ]
        tuples: list[tuple[Any, ...] | None] = list(zip(*columns, strict=True))
        defined = rows.column("defined")
        if defined.true_count != rows.num_rows:
            return [
                value if is_defined else None for value, is_defined in zip(tuples, defined.to_pylist(), strict=True)
            ]
        return tuples

    def _changed(
        self, changes: Changes, hashes: HashArray, keys: Sequence[pa.Array], context: CallContext
    ) -> Changed | None:
        """The changed keys as rows of a run (not yet in run order); None when there are none."""
        if not changes.positions:
            return None
        positions = np.asarray(changes.positions, dtype=np.int64)
        at = pa.array(positions)
        defined = np.fromiter((v is not None for v in changes.values), dtype=np.bool_, count=len(changes.values))
        timeouts = np.asarray(changes.timeouts, dtype=np.int64)
        unset = timeouts == NO_TIMEOUT
        fields = self._state_type.fields
        nothing = (None,) * len(fields)
        by_column: Iterable[tuple[Any, ...]] = zip(
            *(v if v is not None else nothing for v in changes.values), strict=True
        )

        told = []

        def whose(row: int) -> str:
            key = tuple(shown(key, changes.positions[row]) for key in keys)
            told.append(key)
            return f" (key {shown_key(key)}, {context})"

        try:
            columns = [
                values_to_column(values, spark.dataType, arrow.type, f"state column {arrow.name!r}", whose)
                for values, spark, arrow in zip(by_column, fields, self._schema.state, strict=True)
            ]
            for place, (column, arrow) in enumerate(zip(columns, self._schema.state, strict=True)):
                missing = defined & column.is_null().to_numpy(zero_copy_only=False)
                if not arrow.nullable and missing.any():
                    first = int(np.argmax(missing))
                    given = (changes.values[first] or nothing)[place]
                    raise StateValueError(
                        f"state column {arrow.name!r} is declared without NULLs and was given {given!r}{whose(first)}"
                    )
        except StateValueError as error:
            if told:
                mark_placed(error)
            raise
        rows = pa.RecordBatch.from_arrays(
            [
                pa.array(hashes).take(at),
                *(key.take(at) for key in keys),
                *columns,
                pa.array(timeouts, mask=unset),
                pa.array(defined),
                pa.array(~defined & unset),
            ],
            schema=self._schema.arrow,
        )
        return Changed(positions, rows)


def reraise(error: Exception | SystemExit, key: tuple[Any, ...], context: CallContext, timed_out: bool) -> NoReturn:
    """Raise what a user's function raised as one of our errors: with the key, and its traceback for Spark to show."""
    if isinstance(error, StateValueError):
        note_place(error, f"key {shown_key(key)}", context)
    if isinstance(error, StateError):
        raise error
    raise UserFunctionError(
        f"the function failed for key {shown_key(key)} ({context}{', timed out' if timed_out else ''}): {said(error)}"
    ).with_traceback(error.__traceback__) from error


def shown_key(key: tuple[Any, ...]) -> str:
    """A key in a message: ``(4,)`` rather than ``(np.int64(4),)``."""
    return repr(tuple(part.item() if isinstance(part, np.generic) else part for part in key))
