"""The work on a bucket's keys in one call: their rows and state go to the user's function, and what it changed comes
back as rows of a run. Nothing here knows of pointers, files or leases.
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
from spark_state_ext.engine.erasing import ErasedRows
from spark_state_ext.engine.job import Job
from spark_state_ext.errors import StateValueError
from spark_state_ext.functions.ttl import EXPIRES_COLUMN, Expiry
from spark_state_ext.spark.callers.choice import make_caller
from spark_state_ext.spark.callers.group_state import watermark_of
from spark_state_ext.spark.callers.groups import CallContext, Changed, Groups, Result, is_placed, note_place
from spark_state_ext.spark.shuffle.pack import event_times
from spark_state_ext.spark.shuffle.payload import HASH_COLUMN
from spark_state_ext.store import Lookup
from spark_state_ext.store.runs import hashes_of, joined, newest_wins, sorted_run
from spark_state_ext.worker.metrics import CallMetrics, timed, timing
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
        """As Spark tells it with a bucket's state."""
        watermark, present = watermark_of(state)
        return Times(state.getCurrentProcessingTimeMs(), watermark, present)


@dataclass(frozen=True)
class _Keys:
    """A range's keys with rows.

    Parameters
    ----------
    groups
        Their rows.
    found
        Their state, as functions see it.
    written_ms
        When each is written, if it is: milliseconds since 1970.
    """

    groups: Groups
    found: Lookup
    written_ms: IndexArray


@dataclass(frozen=True)
class _Due:
    """Keys whose time is up.

    Parameters
    ----------
    rows
        Their rows, in run order.
    where
        Where each is among the keys with rows, or -1.
    written_ms
        As for `_Keys`.
    """

    rows: pa.RecordBatch
    where: IndexArray
    written_ms: IndexArray


@dataclass(frozen=True)
class _DataPass:
    """What the calls for keys with rows came to, which the pass over timeouts goes by.

    Parameters
    ----------
    changed
        Rows to store, in run order.
    touched
        Which of the keys have one; one more, always False, for keys that are not among them (position -1).
    along
        The keys that were due, and have no rows, were called with them.
    timed_out
        What these changed.
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
        self._expiry = Expiry(schema, job.options.ttl, self._clock_ms())
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
        """Take keys' rows away before the function runs: it finds neither state nor timeouts of them."""
        before = len(self._erased)
        self._erased = self._erased.with_those(ErasedRows.found(self._held(self._bucket.scan()), keys, self._schema))
        return len(self._erased) - before

    def _held(self, live: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same, while the lease stays renewed: a bucket may be large."""
        for batch in live:
            self._hold()
            yield batch

    def run(self, ranges: Iterable[tuple[int, pa.Table | None]], rows: SpillBuffer) -> Iterator[pd.DataFrame]:
        """Call the function for all keys that have rows or time out."""
        borders = self._expired_borders()
        self._sweep = self._sweep_range()
        after = -1
        try:
            for upper, table in ranges:
                yield from self._range(table, after, upper, borders, rows)
                after = upper
        except StateValueError as error:
            if not is_placed(error):
                note_place(error, self._context)
            raise

    def _range(
        self, table: pa.Table | None, after: int, upper: int, borders: list[int], rows: SpillBuffer
    ) -> Iterator[pd.DataFrame]:
        """Call the function for the keys with a hash in (after, upper], data first, then timeouts, these piecemeal."""
        keys = self._grouped(table)
        passed = _DataPass(self._schema.empty(), np.zeros(keys.groups.count + 1, dtype=np.bool_))
        for at, upto in enumerate([*(border for border in borders if after < border < upper), upper]):
            due = self._due(keys, after, upto)
            if at == 0 and keys.groups.count:
                passed = yield from self._data_pass(keys, due)
            mine, later = _split_at(passed.changed, upto)
            pieces = yield from self._timeout_pass(due, replace(passed, changed=mine))
            self._append(rows, pieces, after, upto)
            passed, after = _DataPass(later, passed.touched), upto
            self._context.after_key()

    def _data_pass(self, keys: _Keys, due: _Due) -> Generator[pd.DataFrame, None, _DataPass]:
        """Call for the keys with rows, and along with them, where the function takes both, for those that are due."""
        caller, result = self._caller, Result()
        along = due.rows.filter(pa.array(due.where < 0)) if caller.together else due.rows.slice(0, 0)
        work = caller.call_data(keys.groups, keys.found, self._expiry.due(along), self._context, result)
        yield from timed(work, self._metrics, "user_ms")
        changed, touched = self._data_rows(keys, result.data)
        return _DataPass(changed, touched, caller.together, result.timeouts)

    def _timeout_pass(self, due: _Due, passed: _DataPass) -> Generator[pd.DataFrame, None, list[pa.RecordBatch]]:
        """Call for the keys that are due and were not called along; returns what is written, the newest first."""
        # As in Spark, a due timeout fires even for a key with rows, where the call for these changed nothing.
        done = (due.where >= 0) & passed.touched[due.where]
        fires = ~done
        # Newest first: a key whose row is written again only because it was read may be due as well.
        pieces = [passed.changed]
        if passed.along:
            self._settle(passed.timed_out, due.where < 0, due.written_ms, pieces, done)
            fires &= due.where >= 0
        if fires.any():
            result = Result()
            expired = self._expiry.due(due.rows.filter(pa.array(fires)))
            yield from timed(self._caller.call_timeouts(expired, self._context, result), self._metrics, "user_ms")
            self._settle(result.timeouts, fires, due.written_ms, pieces, done)
        # What stays due is written anew, so that `expired` need look for it only in recent runs.
        pieces.append(due.rows.filter(pa.array(~done)))
        return pieces

    def _due(self, keys: _Keys, after: int, upto: int) -> _Due:
        """What is due among the keys with a hash in (after, upto]."""
        rows = self._expired(after, upto)
        where = keys.groups.find_keys(hashes_of(rows), self._schema.key_columns(rows))
        # Also what the call for its timeout writes of a key with rows is as new as these.
        return _Due(rows, where, np.append(keys.written_ms, self._clock_ms())[where])

    def _settle(
        self,
        changed: Changed | None,
        called: BoolArray,
        written_ms: IndexArray,
        pieces: list[pa.RecordBatch],
        done: BoolArray,
    ) -> None:
        """Note what calls for timeouts changed: `called` says of which due keys, `written_ms` when each is written, if
        it is, and `done` which of them changed."""
        self._metrics.timeouts += int(called.sum())
        if changed is not None:
            at = np.flatnonzero(called)[changed.positions]
            pieces.insert(0, self._expiry.add_expiry(changed.rows, written_ms[at]))
            done[at] = True

    def _grouped(self, table: pa.Table | None) -> _Keys:
        """Rows by key, with the state of these keys."""
        job, schema = self._job, self._schema
        if table is None:
            nothing: IndexArray = np.empty(0, dtype=np.int64)
            keys = [pa.array([], field.type) for field in schema.keys]
            none = np.empty(0, dtype=np.uint64)
            groups = Groups(pa.table({}), nothing, none, keys, keys)
            return _Keys(groups, Lookup(nothing, self._expiry.shown.empty()), nothing)
        hashes = table.column(HASH_COLUMN).to_numpy().view(np.uint64)
        groups = Groups.of(table, hashes, job.key_positions, len(job.columns), schema)
        with timing(self._metrics, "lookup_ms"):
            found: Lookup = self._bucket.read(lambda view: view.lookup(groups.hashes, groups.keys))
        gone = self._erased.among(groups.hashes, groups.keys)
        if gone.any():
            found = Lookup(np.where(gone, -1, found.index), found.rows)
        self._metrics.keys += groups.count
        # Rows of a key are adjacent, and in one range: its hash is.
        most = int(np.diff(np.append(groups.starts, table.num_rows)).max(initial=0))
        self._metrics.key_rows_max = max(self._metrics.key_rows_max, most)
        written_ms = np.full(groups.count, self._clock_ms(), dtype=np.int64)
        if job.options.ttl is not None and job.options.ttl.clock == "event":
            times = event_times(job, groups.rows)
            assert times is not None, "checked when the plan was made"
            latest_ms = np.maximum.reduceat(times.fill_null(0).to_numpy(), groups.starts) // 1000
            written_ms = np.maximum(written_ms, latest_ms)
        return _Keys(groups, self._expiry.show_lookup(found), written_ms)

    def _data_rows(self, keys: _Keys, changed: Changed | None) -> tuple[pa.RecordBatch, BoolArray]:
        """Rows to store for keys with rows, in run order, and which of the keys have one."""
        # One more, always False, for keys that are not among them: these have the position -1.
        touched = np.zeros(keys.groups.count + 1, dtype=np.bool_)
        pieces = [self._schema.empty()]
        if changed is not None:
            touched[changed.positions] = True
            pieces = [self._expiry.add_expiry(changed.rows, keys.written_ms[changed.positions])]
        untouched = np.flatnonzero(~touched[:-1])
        again = self._expiry.extend_life(keys.found, untouched, keys.written_ms)
        if again is not None:
            pieces.append(again)
        return sorted_run(joined(pieces)), touched

    def _append(self, rows: SpillBuffer, pieces: list[pa.RecordBatch], after: int, upto: int) -> None:
        """Add the rows of a range of hashes, newest first, to those that change, and what has expired there, if it is
        its turn."""
        together = [sorted_run(piece) for piece in pieces if piece.num_rows]
        erased = self._erased.between(after, upto)
        if erased.num_rows:
            # Behind what was written in this batch, and before what has expired.
            together.append(erased)
        sweep_after, sweep_upto = self._sweep
        if max(after, sweep_after) < min(upto, sweep_upto):
            low, high = max(after, sweep_after), min(upto, sweep_upto)
            now_ms = self._expiry.now_ms
            stale: pa.RecordBatch = self._bucket.read(lambda view: view.stale(EXPIRES_COLUMN, now_ms, low, high))
            if stale.num_rows:
                # Behind what was written in this batch, which wins.
                together.append(sorted_run(self._expiry.make_removals(stale)))
        if together:
            rows.append(newest_wins(together, self._schema, drop_tombstones=False))

    def _sweep_range(self) -> tuple[int, int]:
        """Hashes (after, upto] in which this call removes what has expired: each call another range, in turn."""
        if self._job.options.ttl is None:
            return 0, 0
        ranges: list[tuple[int, int]] = self._bucket.read(lambda view: list(view.ranges()))
        return ranges[self._bucket.pointer.calls % len(ranges)] if ranges else (0, 0)

    @property
    def expires_by_ms(self) -> int | None:
        """By which time state has expired, by the clock of the time to live; None: there is none."""
        return None if self._job.options.ttl is None else self._clock_ms()

    def _clock_ms(self) -> int:
        """The time by the clock of the time to live."""
        event_time = self._job.options.ttl is not None and self._job.options.ttl.clock == "event"
        return max(self._times.watermark_ms, 0) if event_time else self._times.processing_ms

    def _scan(self) -> Iterator[pa.Table]:
        """The committed state as functions see it: keys and then state."""
        names = [field.name for field in (*self._expiry.shown.keys, *self._expiry.shown.state)]
        for batch in self._bucket.scan():
            live = self._expiry.show_live(self._erased.without(batch))
            if live.num_rows:
                yield pa.table(list(live.columns[1 : 1 + len(names)]), names=names)

    # -- timeouts ----------------------------------------------------------------------------------

    def _expired_borders(self) -> list[int]:
        """Hashes to stop at when due rows are fetched, so that these fit into memory; empty when all do at once."""
        threshold_ms = self.threshold_ms()
        if threshold_ms is None:
            return []
        floor = self._bucket.pointer.timer_low_watermark_ms, self._bucket.pointer.timer_low_watermark_version
        bytes_max: int = self._bucket.read(lambda view: view.expired_bytes_max(threshold_ms, *floor))
        if bytes_max <= self._job.options.memory_bytes_max // 4:
            return []
        borders: list[int] = self._bucket.read(lambda view: [upto for _, upto in view.ranges()])
        return borders

    def _expired(self, after: int, upto: int) -> pa.RecordBatch:
        """Rows with a hash in (after, upto] whose time is up, in run order."""
        threshold_ms = self.threshold_ms()
        if threshold_ms is None:
            return self._schema.empty()
        floor = self._bucket.pointer.timer_low_watermark_ms, self._bucket.pointer.timer_low_watermark_version
        found: pa.RecordBatch = self._bucket.read(lambda view: view.expired(threshold_ms, *floor, after, upto))
        return self._erased.without(sorted_run(found))

    def threshold_ms(self) -> int | None:
        """Keys whose timeout is before this are called; None without timeouts."""
        if self._job.timeout_conf == GroupStateTimeout.ProcessingTimeTimeout:
            return self._times.processing_ms
        if self._job.timeout_conf == GroupStateTimeout.EventTimeTimeout:
            return self._times.watermark_ms
        return None

    def earliest_timeout(self, rows: SpillBuffer) -> int | None:
        """Lower bound of the earliest timeout in the bucket, after this call's changes."""
        bounds = [self._bucket.read(lambda view: view.earliest_timeout(self._times.processing_ms))]
        for batch in rows:
            set_ones = batch.column(TIMEOUT_MS).drop_null()
            if len(set_ones):
                bounds.append(int(set_ones.to_numpy().min()))
        known = [bound for bound in bounds if bound is not None]
        return min(known) if known else None


def _split_at(batch: pa.RecordBatch, upper: int) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Rows with a hash up to `upper`, and the others; the batch ascends by hash."""
    hashes: HashArray = batch.column(KEY_HASH).to_numpy()
    at = int(np.searchsorted(hashes, np.uint64(upper), side="right"))
    return batch.slice(0, at), batch.slice(at)
