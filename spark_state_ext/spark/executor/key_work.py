"""The work on a bucket's keys in one call: it passes their rows and state to the user's function, and returns the
changes as rows of a run. This module does not know pointers, files or leases.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from arrow_schemas.equality import BoolArray, HashArray, IndexArray
from arrow_schemas.row import KEY_HASH, TIMEOUT_MS, RowSchema
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.engine.erased_rows import ErasedRows
from spark_state_ext.engine.job import Job
from spark_state_ext.errors import StateValueError
from spark_state_ext.functions.ttl import EXPIRES_COLUMN, Expiry
from spark_state_ext.spark.callers.choice import make_caller
from spark_state_ext.spark.callers.group_state import get_watermark
from spark_state_ext.spark.callers.groups import CallContext, Changed, Groups, Result, is_placed, note_place
from spark_state_ext.spark.shuffle.pack import read_event_times
from spark_state_ext.spark.shuffle.payload import HASH_COLUMN
from spark_state_ext.store import Lookup
from spark_state_ext.store.runs import get_hashes, join_batches, merge_newest, sort_by_hash
from spark_state_ext.worker.metrics import CallMetrics, time_block, time_items
from spark_state_ext.worker.spill import SpillBuffer

__all__ = ["KeyWork", "Times"]


@dataclass(frozen=True)
class Times:
    """Clock of the batch, milliseconds since 1970."""

    processing_ms: int
    watermark_ms: int
    watermark_present: bool

    @staticmethod
    def of(state: GroupState) -> Times:
        """Return the clock that Spark passes with a bucket's state."""
        watermark, present = get_watermark(state)
        return Times(state.getCurrentProcessingTimeMs(), watermark, present)


@dataclass(frozen=True)
class _Keys:
    """Keys with rows in a range of hashes.

    Parameters
    ----------
    groups
        Their rows.
    lookup
        Their state, as functions see it.
    written_ms
        Time of a write of each key, milliseconds since 1970.
    """

    groups: Groups
    lookup: Lookup
    written_ms: IndexArray


@dataclass(frozen=True)
class _Due:
    """Keys whose timeout is over.

    Parameters
    ----------
    rows
        Their rows, in run order.
    where
        Position of each key among the keys with rows, or -1.
    written_ms
        See `_Keys`.
    """

    rows: pa.RecordBatch
    where: IndexArray
    written_ms: IndexArray


@dataclass(frozen=True)
class _DataPass:
    """Result of the calls for keys with rows, for the pass over timeouts.

    Parameters
    ----------
    changed
        Rows to store, in run order.
    touched
        Which of the keys have such a row; one more element, always False, for other keys (position -1).
    along
        True if the due keys without rows were called along.
    timed_out
        Changes of these due keys.
    """

    changed: pa.RecordBatch
    touched: BoolArray
    along: bool = False
    timed_out: Changed | None = None


class KeyWork:
    """One call's work on its bucket's keys."""

    def __init__(
        self,
        job: Job,
        function: Callable[..., Any],
        bucket: Bucket,
        schema: RowSchema,
        times: Times,
        batch: int,
        metrics: CallMetrics,
        hold: Callable[[], None],
    ) -> None:
        self._job = job
        self._bucket = bucket
        self._schema = schema
        self._times = times
        self._metrics = metrics
        self._sweep = 0, 0
        self._hold = hold
        self._erased = ErasedRows(schema)
        self._expiry = Expiry(schema, job.options.ttl, self._get_clock_ms())
        self._caller = make_caller(job, function, self._expiry.shown)
        self._context = CallContext(
            bucket=bucket.pointer.bucket,
            batch=batch,
            processing_time_ms=times.processing_ms,
            watermark_ms=times.watermark_ms,
            watermark_present=times.watermark_present,
            timeout_conf=job.timeout_conf,
            after_key=hold,
            scan=self._scan,
        )

    def erase(self, keys: Sequence[pa.Array]) -> int:
        """Erase keys before the function runs, with state and timeouts; return how many rows are erased."""
        before = len(self._erased)
        self._erased = self._erased.with_those(
            ErasedRows.found(self._hold_during(self._bucket.scan()), keys, self._schema)
        )
        return len(self._erased) - before

    def _hold_during(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield batches of a scan and renew the lease meanwhile, because a bucket may be large."""
        for batch in batches:
            self._hold()
            yield batch

    def run(self, ranges: Iterable[tuple[int, pa.Table | None]], rows: SpillBuffer) -> Iterator[pd.DataFrame]:
        """Call the function for all keys that have rows or time out."""
        borders = self._find_borders()
        self._sweep = self._choose_sweep_range()
        after = -1
        try:
            for upper, table in ranges:
                yield from self._run_range(table, after, upper, borders, rows)
                after = upper
        except StateValueError as error:
            if not is_placed(error):
                note_place(error, self._context)
            raise

    def _run_range(
        self, table: pa.Table | None, after: int, upper: int, borders: list[int], rows: SpillBuffer
    ) -> Iterator[pd.DataFrame]:
        """Call the function for keys with a hash in (after, upper]: first keys with rows, then timeouts in pieces."""
        keys = self._group_rows(table)
        passed = _DataPass(self._schema.empty(), np.zeros(keys.groups.count + 1, dtype=np.bool_))
        for at, upto in enumerate([*(border for border in borders if after < border < upper), upper]):
            due = self._find_due(keys, after, upto)
            if at == 0 and keys.groups.count:
                passed = yield from self._run_data_pass(keys, due)
            in_range, later = _split_at(passed.changed, upto)
            pieces = yield from self._run_timeout_pass(due, replace(passed, changed=in_range))
            self._append_range(rows, pieces, after, upto)
            passed, after = _DataPass(later, passed.touched), upto
            self._context.after_key()

    def _run_data_pass(self, keys: _Keys, due: _Due) -> Generator[pd.DataFrame, None, _DataPass]:
        """Call for the keys with rows, together with the due keys if the function takes both."""
        caller, result = self._caller, Result()
        along = due.rows.filter(pa.array(due.where < 0)) if caller.together else due.rows.slice(0, 0)
        work = caller.call_data(keys.groups, keys.lookup, self._expiry.due(along), self._context, result)
        yield from time_items(work, self._metrics, "user_ms")
        changed, touched = self._collect_data_rows(keys, result.data)
        return _DataPass(changed, touched, caller.together, result.timeouts)

    def _run_timeout_pass(self, due: _Due, passed: _DataPass) -> Generator[pd.DataFrame, None, list[pa.RecordBatch]]:
        """Call for the due keys that were not called along; return the rows to write, newest first."""
        # As in Spark, a due timeout fires even for a key with rows if the call for these rows changed nothing.
        done = (due.where >= 0) & passed.touched[due.where]
        fires = ~done
        # Newest first: a key may be due although its row is written again because it was read.
        pieces = [passed.changed]
        if passed.along:
            self._record_timeout_changes(passed.timed_out, due.where < 0, due.written_ms, pieces, done)
            fires &= due.where >= 0
        if fires.any():
            result = Result()
            expired = self._expiry.due(due.rows.filter(pa.array(fires)))
            yield from time_items(self._caller.call_timeouts(expired, self._context, result), self._metrics, "user_ms")
            self._record_timeout_changes(result.timeouts, fires, due.written_ms, pieces, done)
        # Rows that stay due are written again, so that `expired` needs to search recent runs only.
        pieces.append(due.rows.filter(pa.array(~done)))
        return pieces

    def _find_due(self, keys: _Keys, after: int, upto: int) -> _Due:
        """Return the due keys with a hash in (after, upto]."""
        rows = self._fetch_expired(after, upto)
        where = keys.groups.find_keys(get_hashes(rows), self._schema.key_columns(rows))
        # A write by the timeout call of a key with rows has the same time as a write by the call for its rows.
        return _Due(rows, where, np.append(keys.written_ms, self._get_clock_ms())[where])

    def _record_timeout_changes(
        self,
        changed: Changed | None,
        called: BoolArray,
        written_ms: IndexArray,
        pieces: list[pa.RecordBatch],
        done: BoolArray,
    ) -> None:
        """Add the changes of timeout calls to `pieces`, and mark the changed keys in `done`.

        `called` selects the due keys that were called; `written_ms` are the times of their writes.
        """
        self._metrics.timeouts += int(called.sum())
        if changed is not None:
            at = np.flatnonzero(called)[changed.positions]
            pieces.insert(0, self._expiry.add_expiry(changed.rows, written_ms[at]))
            done[at] = True

    def _group_rows(self, table: pa.Table | None) -> _Keys:
        """Group rows by key, and look up the state of these keys."""
        job, schema = self._job, self._schema
        if table is None:
            no_positions: IndexArray = np.empty(0, dtype=np.int64)
            keys = [pa.array([], field.type) for field in schema.keys]
            no_hashes = np.empty(0, dtype=np.uint64)
            groups = Groups(pa.table({}), no_positions, no_hashes, keys, keys)
            return _Keys(groups, Lookup(no_positions, self._expiry.shown.empty()), no_positions)
        hashes = table.column(HASH_COLUMN).to_numpy().view(np.uint64)
        groups = Groups.of(table, hashes, job.key_positions, len(job.columns), schema)
        with time_block(self._metrics, "lookup_ms"):
            lookup: Lookup = self._bucket.read(lambda view: view.lookup(groups.hashes, groups.keys))
        is_erased = self._erased.among(groups.hashes, groups.keys)
        if is_erased.any():
            lookup = Lookup(np.where(is_erased, -1, lookup.index), lookup.rows)
        self._metrics.keys += groups.count
        # Rows of a key are adjacent, and all of them are in this range, as they have the same hash.
        rows_max = int(np.diff(np.append(groups.starts, table.num_rows)).max(initial=0))
        self._metrics.key_rows_max = max(self._metrics.key_rows_max, rows_max)
        written_ms = np.full(groups.count, self._get_clock_ms(), dtype=np.int64)
        if job.options.ttl is not None and job.options.ttl.clock == "event":
            times = read_event_times(job, groups.rows)
            assert times is not None, "checked when the plan was made"
            latest_ms = np.maximum.reduceat(times.fill_null(0).to_numpy(), groups.starts) // 1000
            written_ms = np.maximum(written_ms, latest_ms)
        return _Keys(groups, self._expiry.show_lookup(lookup), written_ms)

    def _collect_data_rows(self, keys: _Keys, changed: Changed | None) -> tuple[pa.RecordBatch, BoolArray]:
        """Return the rows to store for keys with rows, in run order, and which of the keys have such a row."""
        # One more element, always False, for other keys: they have the position -1.
        touched = np.zeros(keys.groups.count + 1, dtype=np.bool_)
        pieces = [self._schema.empty()]
        if changed is not None:
            touched[changed.positions] = True
            pieces = [self._expiry.add_expiry(changed.rows, keys.written_ms[changed.positions])]
        untouched = np.flatnonzero(~touched[:-1])
        extended = self._expiry.extend_life(keys.lookup, untouched, keys.written_ms)
        if extended is not None:
            pieces.append(extended)
        return sort_by_hash(join_batches(pieces)), touched

    def _append_range(self, rows: SpillBuffer, pieces: list[pa.RecordBatch], after: int, upto: int) -> None:
        """Append the changed rows of a range of hashes to `rows`, with removals of erased and of expired keys.

        `pieces` are ordered, newest first. Expired state is only searched in the part of the range whose turn it is.
        """
        together = [sort_by_hash(piece) for piece in pieces if piece.num_rows]
        erased = self._erased.between(after, upto)
        if erased.num_rows:
            # After the writes of this batch, which win, and before the expired rows.
            together.append(erased)
        sweep_after, sweep_upto = self._sweep
        if max(after, sweep_after) < min(upto, sweep_upto):
            low, high = max(after, sweep_after), min(upto, sweep_upto)
            now_ms = self._expiry.now_ms
            stale: pa.RecordBatch = self._bucket.read(lambda view: view.stale(EXPIRES_COLUMN, now_ms, low, high))
            if stale.num_rows:
                # After the writes of this batch, which win.
                together.append(sort_by_hash(self._expiry.make_removals(stale)))
        if together:
            rows.append(merge_newest(together, self._schema, drop_tombstones=False))

    def _choose_sweep_range(self) -> tuple[int, int]:
        """Return the hashes (after, upto] in which this call removes expired state: each call takes the next range."""
        if self._job.options.ttl is None:
            return 0, 0
        ranges: list[tuple[int, int]] = self._bucket.read(lambda view: list(view.ranges()))
        return ranges[self._bucket.pointer.calls % len(ranges)] if ranges else (0, 0)

    @property
    def expires_by_ms(self) -> int | None:
        """Time up to which state has expired, by the clock of the time to live; None without a time to live."""
        return None if self._job.options.ttl is None else self._get_clock_ms()

    def _get_clock_ms(self) -> int:
        """Return the time by the clock of the time to live, milliseconds since 1970."""
        event_time = self._job.options.ttl is not None and self._job.options.ttl.clock == "event"
        return max(self._times.watermark_ms, 0) if event_time else self._times.processing_ms

    def _scan(self) -> Iterator[pa.Table]:
        """Yield the committed state as functions see it: the key columns and then the state columns."""
        names = [field.name for field in (*self._expiry.shown.keys, *self._expiry.shown.state)]
        for batch in self._bucket.scan():
            live = self._expiry.show_live(self._erased.without(batch))
            if live.num_rows:
                yield pa.table(list(live.columns[1 : 1 + len(names)]), names=names)

    # -- timeouts ----------------------------------------------------------------------------------

    def _find_borders(self) -> list[int]:
        """Return hashes at which fetches of due rows stop so that these fit into memory; empty if all rows fit."""
        threshold_ms = self.get_threshold_ms()
        if threshold_ms is None:
            return []
        floor = self._bucket.pointer.timer_low_watermark_ms, self._bucket.pointer.timer_low_watermark_version
        bytes_max: int = self._bucket.read(lambda view: view.expired_bytes_max(threshold_ms, *floor))
        if bytes_max <= self._job.options.memory_bytes_max // 4:
            return []
        borders: list[int] = self._bucket.read(lambda view: [upto for _, upto in view.ranges()])
        return borders

    def _fetch_expired(self, after: int, upto: int) -> pa.RecordBatch:
        """Return rows with a hash in (after, upto] whose timeout is over, in run order."""
        threshold_ms = self.get_threshold_ms()
        if threshold_ms is None:
            return self._schema.empty()
        floor = self._bucket.pointer.timer_low_watermark_ms, self._bucket.pointer.timer_low_watermark_version
        due: pa.RecordBatch = self._bucket.read(lambda view: view.expired(threshold_ms, *floor, after, upto))
        return self._erased.without(sort_by_hash(due))

    def get_threshold_ms(self) -> int | None:
        """Return the time before which timeouts are over; None without timeouts."""
        if self._job.timeout_conf == GroupStateTimeout.ProcessingTimeTimeout:
            return self._times.processing_ms
        if self._job.timeout_conf == GroupStateTimeout.EventTimeTimeout:
            return self._times.watermark_ms
        return None

    def find_earliest_timeout(self, rows: SpillBuffer) -> int | None:
        """Return a lower bound of the earliest timeout in the bucket, after this call's changes; None without one."""
        bounds = [self._bucket.read(lambda view: view.earliest_timeout(self._times.processing_ms))]
        for batch in rows:
            set_ones = batch.column(TIMEOUT_MS).drop_null()
            if len(set_ones):
                bounds.append(int(set_ones.to_numpy().min()))
        present_bounds = [bound for bound in bounds if bound is not None]
        return min(present_bounds) if present_bounds else None


def _split_at(batch: pa.RecordBatch, upper: int) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Split a batch, which ascends by hash, into rows with a hash up to `upper` and the others."""
    hashes: HashArray = batch.column(KEY_HASH).to_numpy()
    at = int(np.searchsorted(hashes, np.uint64(upper), side="right"))
    return batch.slice(0, at), batch.slice(at)
