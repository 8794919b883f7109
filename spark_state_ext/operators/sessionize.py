"""Sessions by key, as Spark's ``groupBy(…, session_window(time, gap)).agg(…)``.

A row is a session that begins at its event time and lasts for the gap. Sessions of a key that touch are merged, as in
Spark even if one begins exactly at the end of the other. A session is output and removed from the state when the
watermark has reached its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.columns import combine_chunks, get_field
from arrow_schemas.equality import BoolArray, IndexArray
from spark_state_ext.functions.state_batch import StateBatch
from spark_state_ext.operators.aggregate import Aggregates, KeyAt, describe_key
from spark_state_ext.operators.arrays import Segments, order_within, take_interleaved, to_bools, to_numbers
from spark_state_ext.operators.deadlines import compute_timeouts_ms, find_passed
from spark_state_ext.operators.functions import Buffers

__all__ = ["END", "SESSIONS", "SESSION_WINDOW", "START", "Sessions"]

# The only state column, a list of the open sessions ordered by time, and the names of its fields with their bounds.
SESSIONS, START, END = "sessions", "session_start", "session_end"
# The output column, with Spark's name.
SESSION_WINDOW = "session_window"
_BEFORE_ALL = -(2**63)


@dataclass(frozen=True)
class Sessions:
    """The vectorised function of sessions.

    Parameters
    ----------
    aggregates
        The aggregate functions.
    end
        Column with the end of each row's own session, which is its event time plus the gap. Never NULL.
    gap_us
        The gap, microseconds.
    """

    aggregates: Aggregates
    end: str
    gap_us: int

    def __call__(self, batch: StateBatch) -> pa.Table | None:
        """Return the sessions whose end the watermark has reached."""
        merged = self._merge_sessions(batch)
        has_ended = find_passed(pa.array(merged.ends), batch.watermark_ms)
        self._update(batch, merged, ~has_ended)
        return self._build_output(batch, merged, has_ended) if has_ended.any() else None

    # -- inside ------------------------------------------------------------------------------------

    def _merge_sessions(self, batch: StateBatch) -> _MergedSessions:
        """Return all sessions of the batch's keys, merged from stored sessions and rows."""
        lists = combine_chunks(batch.state.column(SESSIONS))
        stored = lists.flatten()
        sizes = to_numbers(pc.list_value_length(lists)).astype(np.int64)
        row_ends = to_numbers(combine_chunks(batch.rows.column(self.end)).view(pa.int64()))
        keys = np.concatenate([np.repeat(np.arange(len(batch)), sizes), to_numbers(batch.group_ids)])
        starts = np.concatenate([_read_times(stored, START), row_ends - self.gap_us])
        ends = np.concatenate([_read_times(stored, END), row_ends])
        # If sessions begin at the same time, the stored one comes first.
        order = order_within(keys, [starts])
        keys, starts, ends = keys[order], starts[order], ends[order]
        is_row = order >= len(stored)
        is_start, reach = _find_sessions(keys, starts, ends, is_row)
        first = np.flatnonzero(is_start)
        last = np.append(first[1:], len(is_start))[: len(first)] - 1
        buffers = self._build_buffers(batch, stored, order, is_row, is_start, keys)
        return _MergedSessions(keys[first], starts[first], reach[last], buffers)

    def _build_buffers(
        self,
        batch: StateBatch,
        stored: pa.StructArray,
        order: IndexArray,
        is_row: BoolArray,
        is_start: BoolArray,
        keys: IndexArray,
    ) -> Buffers:
        """Return the buffers of each session."""
        # Pieces ordered by their begin: a stored session, or consecutive rows without a stored session in between.
        begins = is_start | ~is_row
        begins[1:] |= ~is_row[:-1]
        pieces = np.flatnonzero(begins)
        of_rows = is_row[pieces]
        piece_keys, sessions = keys[pieces], np.cumsum(is_start)[pieces] - 1

        def key_at(owners: IndexArray) -> KeyAt:
            return lambda position: describe_key(batch.keys, int(owners[position]))

        row_order = order[is_row] - len(stored)
        rows = batch.rows
        if len(row_order) and (row_order[1:] < row_order[:-1]).any():
            rows = rows.take(pa.array(row_order))
        segments = Segments((np.cumsum(is_row) - 1)[pieces[of_rows]], len(row_order))
        buffers = self.aggregates.reduce(rows, segments, key_at(piece_keys[of_rows]))
        if not len(stored):
            return buffers
        stored_pieces = stored.take(pa.array(order[~is_row]))
        places = np.empty(len(pieces), dtype=np.int64)
        places[of_rows] = np.arange(len(segments))
        places[~of_rows] = len(segments) + np.arange(len(stored_pieces))
        stored_buffers = [get_field(stored_pieces, name) for name in self.aggregates.state_names]
        return self._fold_buffers(take_interleaved(buffers, stored_buffers, places), sessions, piece_keys, key_at)

    def _fold_buffers(
        self, buffers: Buffers, sessions: IndexArray, keys: IndexArray, key_at: Callable[[IndexArray], KeyAt]
    ) -> Buffers:
        """Merge the buffers of each session into one: neighbours in pairs, repeatedly."""
        while (sessions[1:] == sessions[:-1]).any():
            places = np.arange(len(sessions))
            first = np.append(True, sessions[1:] != sessions[:-1])
            even = (places - np.maximum.accumulate(np.where(first, places, 0))) % 2 == 0
            left = np.flatnonzero(even[:-1] & (sessions[1:] == sessions[:-1]))
            left_index, right_index = pa.array(left), pa.array(left + 1)
            left_keys = keys[left]
            merged = self.aggregates.merge(
                [column.take(left_index) for column in buffers],
                [column.take(right_index) for column in buffers],
                key_at(left_keys),
            )
            places[left] = len(places) + np.arange(len(left))
            buffers = take_interleaved(buffers, merged, places[even])
            sessions, keys = sessions[even], keys[even]
        return buffers

    def _update(self, batch: StateBatch, merged: _MergedSessions, is_open: BoolArray) -> None:
        """Store the open sessions, and set a timeout for the first end of each key."""
        open_sessions = merged.select(is_open)
        sizes = np.bincount(open_sessions.keys, minlength=len(batch))
        has_open = sizes > 0
        exists = to_bools(batch.exists) | to_bools(batch.timed_out)
        batch.remove(~has_open & exists)
        if not has_open.any():
            return
        list_type = batch.state.schema.field(SESSIONS).type
        fields = list(list_type.value_type)
        bounds = [
            pa.array(times).view(field.type)
            for times, field in zip((open_sessions.starts, open_sessions.ends), fields, strict=False)
        ]
        offsets = pa.array(np.concatenate([[0], np.cumsum(sizes[has_open])]).astype(np.int32))
        lists = pa.ListArray.from_arrays(
            offsets, pa.StructArray.from_arrays([*bounds, *open_sessions.buffers], fields=fields), type=list_type
        )
        batch.update({SESSIONS: lists}, where=has_open, by_key=False)
        firsts = offsets.to_numpy()[:-1]
        batch.set_timeout(timestamp_ms=compute_timeouts_ms(pa.array(open_sessions.ends[firsts])), where=has_open)

    def _build_output(self, batch: StateBatch, merged: _MergedSessions, has_ended: BoolArray) -> pa.Table:
        ended = merged.select(has_ended)
        time_type = batch.state.schema.field(SESSIONS).type.value_type.field(START).type
        bounds = [pa.array(times).view(time_type) for times in (ended.starts, ended.ends)]
        keys = batch.keys.take(pa.array(ended.keys))
        window = pa.StructArray.from_arrays(bounds, names=["start", "end"])
        columns = [*keys.columns, window, *self.aggregates.finish(ended.buffers, partial(describe_key, keys))]
        return pa.table(columns, names=[*keys.column_names, SESSION_WINDOW, *self.aggregates.names])


@dataclass(frozen=True)
class _MergedSessions:
    """Sessions ordered by key and time.

    Parameters
    ----------
    keys
        Position of each session's key, int64 (number of sessions,).
    starts, ends
        Bounds of the sessions, microseconds since 1970, int64 (number of sessions,).
    buffers
        Buffers of the aggregate functions.
    """

    keys: IndexArray
    starts: IndexArray
    ends: IndexArray
    buffers: Buffers

    def select(self, mask: BoolArray) -> _MergedSessions:
        """Return the sessions that a mask selects."""
        if mask.all():
            return self
        chosen = pa.array(mask)
        buffers = [column.filter(chosen) for column in self.buffers]
        return _MergedSessions(self.keys[mask], self.starts[mask], self.ends[mask], buffers)


def _read_times(stored: pa.StructArray, name: str) -> IndexArray:
    return to_numbers(get_field(stored, name).view(pa.int64()))


def _find_sessions(
    keys: IndexArray, starts: IndexArray, ends: IndexArray, is_row: BoolArray
) -> tuple[BoolArray, IndexArray]:
    """Return a mask of the places where sessions begin, and how far each reaches up to a place; by key and start."""
    count = len(keys)
    places = np.arange(count)
    first: BoolArray = np.append(True, keys[1:] != keys[:-1])[:count]
    key_start = np.maximum.accumulate(np.where(first, places, 0))
    reach: Sequence[IndexArray] = [
        # For rows of a key, ends ascend with starts, and likewise for its stored sessions. So the last one of either
        # kind reaches furthest.
        _find_last_ends(mask, places, key_start, ends)
        for mask in (is_row, ~is_row)
    ]
    furthest = np.maximum(*reach)
    is_start = first.copy()
    is_start[1:] |= starts[1:] > furthest[:-1]
    return is_start, furthest


def _find_last_ends(mask: BoolArray, places: IndexArray, key_start: IndexArray, ends: IndexArray) -> IndexArray:
    """Return for each place the end of the last session of a kind with the same key up to there."""
    last = np.maximum.accumulate(np.where(mask, places, -1))
    last_ends: IndexArray = np.where(last >= key_start, ends[last], _BEFORE_ALL)
    return last_ends
