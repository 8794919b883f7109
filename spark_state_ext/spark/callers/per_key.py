"""The common part of callers that call a function once per key.

Only the loop of a subclass takes time per key; everything around it is vectorised.
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

from arrow_schemas.columns import format_value
from arrow_schemas.equality import HashArray
from arrow_schemas.row import RowSchema
from spark_state_ext.errors import StateError, StateValueError, UserFunctionError
from spark_state_ext.spark.callers.group_state import NO_TIMEOUT, Clock
from spark_state_ext.spark.callers.groups import (
    CallContext,
    Changed,
    Groups,
    Result,
    describe_error,
    mark_placed,
    note_place,
)
from spark_state_ext.spark.callers.state_values import column_to_values, make_row_copier, values_to_column
from spark_state_ext.store import Lookup

__all__ = ["Call", "Changes", "PerKeyCaller", "format_key", "reraise"]

# Position, key, rows (frames or named tuples), state before the call.
Call = tuple[int, tuple[Any, ...], Any, "tuple[Any, ...] | None"]


@dataclass
class Changes:
    """Outcome of calls: the changed keys and their new state. The lists have one element for each changed key."""

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
        self._copy_state = make_row_copier(state_type, "state column")

    def call_data(
        self, groups: Groups, lookup: Lookup, expired: pa.RecordBatch, context: CallContext, result: Result
    ) -> Iterator[pd.DataFrame]:
        """Call for keys with rows; see `Caller.call_data`."""
        changes = Changes()
        values = self._make_state_tuples(lookup)
        before = [None if at < 0 else values[at] for at in lookup.index.tolist()]
        yield from self._run_calls(self._prepare_data_calls(groups, before), False, context, changes)
        result.data = self._collect_changes(changes, groups.hashes, groups.keys, context)

    def call_timeouts(self, expired: pa.RecordBatch, context: CallContext, result: Result) -> Iterator[pd.DataFrame]:
        """Call for keys that timed out; see `Caller.call_timeouts`."""
        changes = Changes()
        values = self._make_state_tuples(Lookup(np.arange(expired.num_rows, dtype=np.int64), expired))
        yield from self._run_calls(self._prepare_timeout_calls(expired, values), True, context, changes)
        keys = self._schema.key_columns(expired)
        result.timeouts = self._collect_changes(changes, expired.column(0).to_numpy(), keys, context)

    # -- for subclasses ----------------------------------------------------------------------------

    @abc.abstractmethod
    def _prepare_data_calls(self, groups: Groups, before: list[tuple[Any, ...] | None]) -> Iterator[Call]:
        """Return the calls for keys with rows, in any order."""

    @abc.abstractmethod
    def _prepare_timeout_calls(self, expired: pa.RecordBatch, before: list[tuple[Any, ...] | None]) -> Iterator[Call]:
        """Return the calls for keys that timed out."""

    @abc.abstractmethod
    def _run_calls(
        self, calls: Iterable[Call], timed_out: bool, context: CallContext, changes: Changes
    ) -> Iterator[pd.DataFrame]:
        """Make the calls; yield output frames for Spark, and record changes."""

    @staticmethod
    def _make_clock(context: CallContext, timed_out: bool, schema: StructType) -> Clock:
        return Clock(
            context.processing_time_ms,
            context.watermark_ms,
            context.timeout_conf,
            timed_out,
            context.watermark_present,
            schema,
        )

    # -- state -------------------------------------------------------------------------------------

    def _make_value_recorder(self, changes: Changes) -> Callable[[tuple[Any, ...] | None], None]:
        """Return the function that records a key's state, as a copy: the function may change its values later."""
        record, copy = changes.values.append, self._copy_state
        if copy is None:
            return record
        return lambda value: record(None if value is None else copy(value))

    def _make_state_tuples(self, lookup: Lookup) -> list[tuple[Any, ...] | None]:
        rows = lookup.rows
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

    def _collect_changes(
        self, changes: Changes, hashes: HashArray, keys: Sequence[pa.Array], context: CallContext
    ) -> Changed | None:
        """Return the changed keys as rows of a run (not yet in run order); None if there are no changes."""
        if not changes.positions:
            return None
        positions = np.asarray(changes.positions, dtype=np.int64)
        at = pa.array(positions)
        defined = np.fromiter((v is not None for v in changes.values), dtype=np.bool_, count=len(changes.values))
        timeouts = np.asarray(changes.timeouts, dtype=np.int64)
        unset = timeouts == NO_TIMEOUT
        fields = self._state_type.fields
        no_state = (None,) * len(fields)
        by_column: Iterable[tuple[Any, ...]] = zip(
            *(v if v is not None else no_state for v in changes.values), strict=True
        )

        named_keys = []

        def describe_owner(row: int) -> str:
            key = tuple(format_value(key, changes.positions[row]) for key in keys)
            named_keys.append(key)
            return f" (key {format_key(key)}, {context})"

        try:
            columns = [
                values_to_column(values, spark.dataType, arrow.type, f"state column {arrow.name!r}", describe_owner)
                for values, spark, arrow in zip(by_column, fields, self._schema.state, strict=True)
            ]
            for place, (column, arrow) in enumerate(zip(columns, self._schema.state, strict=True)):
                missing = defined & column.is_null().to_numpy(zero_copy_only=False)
                if not arrow.nullable and missing.any():
                    first = int(np.argmax(missing))
                    value = (changes.values[first] or no_state)[place]
                    raise StateValueError(
                        f"state column {arrow.name!r} is declared without NULLs and was given {value!r}"
                        f"{describe_owner(first)}"
                    )
        except StateValueError as error:
            if named_keys:
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
    """Raise a user function's error as one of this package, with the key and with its traceback for Spark to show."""
    if isinstance(error, StateValueError):
        note_place(error, f"key {format_key(key)}", context)
    if isinstance(error, StateError):
        raise error
    raise UserFunctionError(
        f"the function failed for key {format_key(key)} ({context}{', timed out' if timed_out else ''}): "
        f"{describe_error(error)}"
    ).with_traceback(error.__traceback__) from error


def format_key(key: tuple[Any, ...]) -> str:
    """Format a key for a message: ``(4,)`` rather than ``(np.int64(4),)``."""
    return repr(tuple(part.item() if isinstance(part, np.generic) else part for part in key))
