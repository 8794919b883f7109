"""Call a vectorised function once for all keys, with Arrow tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from arrow_schemas.columns import combine_chunks
from arrow_schemas.equality import BoolArray, HashArray, IndexArray
from arrow_schemas.row import DEFINED, RowSchema
from spark_state_ext.errors import ResultTypeError, StateError, UserFunctionError
from spark_state_ext.functions.outcome import NO_TIMEOUT, REMOVED, UNCHANGED
from spark_state_ext.functions.state_batch import StateBatch
from spark_state_ext.functions.tables import is_table, normalise_rows
from spark_state_ext.spark.callers.groups import CallContext, Changed, Groups, Result, describe_error, note_place
from spark_state_ext.spark.shuffle.output import Outbox
from spark_state_ext.store import Lookup

__all__ = ["BatchCaller"]


class BatchCaller:
    """Calls ``function(batch)`` with a `StateBatch`."""

    together = True

    def __init__(
        self,
        function: Callable[[StateBatch], Any],
        schema: RowSchema,
        input_fields: Sequence[pa.Field],
        fields: Sequence[pa.Field],
    ) -> None:
        self._function = function
        self._schema = schema
        # All fields are nullable, as in the tables of input rows: these do not carry what Spark knows about NULLs.
        self._input = pa.schema([field.with_nullable(True) for field in input_fields])
        self._fields = tuple(fields)

    def call_data(
        self, groups: Groups, lookup: Lookup, expired: pa.RecordBatch, context: CallContext, result: Result
    ) -> Iterator[pd.DataFrame]:
        """Call once for the keys with rows and the expired keys; see `Caller.call_data`."""
        rows = normalise_rows(groups.rows, self._input.names)
        has_row = lookup.index >= 0
        state = _take_rows(self._schema.state_columns(lookup.rows), lookup.index, has_row)
        defined = np.zeros(groups.count, dtype=np.bool_)
        defined[has_row] = lookup.rows.column(DEFINED).to_numpy(zero_copy_only=False)[lookup.index[has_row]]
        keys = groups.keys
        if expired.num_rows:
            keys = [pa.concat_arrays(pair) for pair in zip(keys, self._schema.key_columns(expired), strict=True)]
            state = [pa.concat_arrays(pair) for pair in zip(state, self._schema.state_columns(expired), strict=True)]
            defined = np.concatenate([defined, _read_defined(expired)])
        batch = self._make_batch(rows, keys, state, defined, groups.starts, context)
        yield from self._call(batch, context)
        hashes = np.concatenate([groups.hashes, expired.column(0).to_numpy()])
        changed = self._collect_changes(batch, hashes, keys)
        if changed is not None:
            timed_out = changed.positions >= groups.count
            result.data = _select_changes(changed, ~timed_out, 0)
            result.timeouts = _select_changes(changed, timed_out, groups.count)

    def call_timeouts(self, expired: pa.RecordBatch, context: CallContext, result: Result) -> Iterator[pd.DataFrame]:
        """Call for keys that timed out, if they are too many for one call; see `Caller.call_timeouts`."""
        keys, state = self._schema.key_columns(expired), self._schema.state_columns(expired)
        no_starts = np.empty(0, dtype=np.int64)
        batch = self._make_batch(self._input.empty_table(), keys, state, _read_defined(expired), no_starts, context)
        yield from self._call(batch, context)
        result.timeouts = self._collect_changes(batch, expired.column(0).to_numpy(), keys)

    # -- inside ------------------------------------------------------------------------------------

    def _make_batch(
        self,
        rows: pa.Table,
        keys: Sequence[pa.Array],
        state: Sequence[pa.Array],
        defined: BoolArray,
        starts: IndexArray,
        context: CallContext,
    ) -> StateBatch:
        return StateBatch(
            rows=rows,
            # Keys that were declared NOT NULL at the first start may be nullable now.
            keys=pa.table(list(keys), schema=pa.schema([field.with_nullable(True) for field in self._schema.keys])),
            state=pa.table(list(state), schema=pa.schema(self._schema.state)),
            exists=pa.array(defined),
            starts=starts,
            watermark_ms=context.watermark_ms if context.watermark_present else None,
            processing_time_ms=context.processing_time_ms,
            timeout_conf=context.timeout_conf,
            bucket=context.bucket,
            batch_id=context.batch,
            scan=context.scan,
        )

    def _call(self, batch: StateBatch, context: CallContext) -> Iterator[pd.DataFrame]:
        outbox = Outbox(self._fields)
        try:
            for table in _iterate_tables(self._function(batch)):
                context.after_key()
                yield from outbox.add(table)
        except StateError as error:
            note_place(error, context)
            raise
        except (Exception, SystemExit) as error:  # `sys.exit` too
            raise UserFunctionError(f"the function failed for {batch!r}: {describe_error(error)}").with_traceback(
                error.__traceback__
            ) from error
        batch.outcome.closed = True
        context.after_key()
        yield from outbox.rest()

    def _collect_changes(self, batch: StateBatch, hashes: HashArray, keys: Sequence[pa.Array]) -> Changed | None:
        outcome = batch.outcome
        if not outcome.touched.any():
            return None
        untouched_state = outcome.touched & (outcome.source == UNCHANGED)
        positions = np.flatnonzero(outcome.touched)
        all_touched = len(positions) == len(batch)
        at = pa.array(positions)
        # Keys that only got a timeout keep their state, which is appended to the updates.
        updates, source = outcome.updates, outcome.source[positions]
        exists: BoolArray = batch.exists.to_numpy(zero_copy_only=False)
        if untouched_state.any():
            kept = np.flatnonzero(untouched_state & exists)
            offset = sum(table.num_rows for table in updates)
            appended = np.full(len(batch), REMOVED, dtype=np.int64)
            appended[kept] = np.arange(offset, offset + len(kept))
            source = np.where(source == UNCHANGED, appended[positions], source)
            updates = [*updates, batch.state.take(pa.array(kept))]
        defined = source >= 0
        timeouts = outcome.timeouts_ms[positions]
        unset = timeouts == NO_TIMEOUT
        rows = pa.RecordBatch.from_arrays(
            [
                pa.array(hashes if all_touched else hashes[positions]),
                *(key if all_touched else key.take(at) for key in keys),
                *self._state_columns(updates, source, defined),
                pa.array(timeouts, mask=unset),
                pa.array(defined),
                pa.array(~defined & unset),
            ],
            schema=self._schema.arrow,
        )
        return Changed(positions, rows)

    def _state_columns(self, updates: list[pa.Table], source: IndexArray, defined: BoolArray) -> list[pa.Array]:
        if not updates:
            return [pa.nulls(len(source), field.type) for field in self._schema.state]
        table = updates[0] if len(updates) == 1 else pa.concat_tables(updates)
        columns = [combine_chunks(column) for column in table.columns]
        if len(source) == table.num_rows and (source == np.arange(len(source))).all():
            return columns
        return _take_rows(columns, source, defined)


def _iterate_tables(result: Any) -> Iterator[Any]:
    """Yield the tables of a function's result."""
    if result is None:
        return
    if is_table(result):
        yield result
        return
    try:
        items = iter(result)
    except TypeError:
        raise ResultTypeError(
            f"the function returned {type(result).__name__}: return a table, an iterable of tables, or None"
        ) from None
    yield from items


def _take_rows(columns: Sequence[pa.Array], index: IndexArray, has_row: BoolArray) -> list[pa.Array]:
    """Take rows of some columns by index; NULL for keys without a row."""
    at = pa.array(index) if has_row.all() else pa.array(index, mask=~has_row)
    return [column.take(at) for column in columns]


def _read_defined(expired: pa.RecordBatch) -> BoolArray:
    defined: BoolArray = expired.column(DEFINED).to_numpy(zero_copy_only=False)
    return defined


def _select_changes(changed: Changed, mask: BoolArray, offset: int) -> Changed | None:
    if not mask.any():
        return None
    if mask.all():
        return Changed(changed.positions - offset, changed.rows)
    return Changed(changed.positions[mask] - offset, changed.rows.filter(pa.array(mask)))
