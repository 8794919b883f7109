"""Sessions by key: what Spark's ``groupBy(…, session_window(time, gap)).agg(…)`` does.

A row is a session from its event time on for the length of the gap. Sessions of a key that touch are one: as in Spark,
also where one begins at the very end of the other. A session is given, and forgotten, when the watermark has reached
its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.columns import child_of, flat
from arrow_schemas.equality import BoolArray, IndexArray
from spark_state_ext.functions.state_batch import StateBatch
from spark_state_ext.operators.aggregate import Aggregates, KeyAt, nth_key
from spark_state_ext.operators.arrays import Segments, bools, interleaved, numbers, order_within
from spark_state_ext.operators.deadlines import due_ms, passed
from spark_state_ext.operators.functions import Buffers

__all__ = ["END", "SESSIONS", "SESSION_WINDOW", "START", "Sessions"]

# The only state column: a list of the open sessions, by time; and the names of their bounds there.
SESSIONS, START, END = "sessions", "session_start", "session_end"
# The output's column, as Spark names it.
SESSION_WINDOW = "session_window"
_BEFORE_ALL = -(2**63)


@dataclass(frozen=True)
class Sessions:
    """The vectorised function of sessions.

    Parameters
    ----------
    aggregates
        The functions.
    end
        Column with the end of each row's own session: its event time and the gap. Never NULL.
    gap_us
        The gap, microseconds.
    """

    aggregates: Aggregates
    end: str
    gap_us: int

    def __call__(self, batch: StateBatch) -> pa.Table | None:
        """The sessions that the watermark has reached the end of."""
        merged = self._merged(batch)
        over = passed(pa.array(merged.ends), batch.watermark_ms)
        self._update(batch, merged, ~over)
        return self._given(batch, merged, over) if over.any() else None

    # -- inside ------------------------------------------------------------------------------------

    def _merged(self, batch: StateBatch) -> _Merged:
        """All sessions of the batch's keys, stored ones and rows together."""
        lists = flat(batch.state.column(SESSIONS))
        stored = lists.flatten()
        sizes = numbers(pc.list_value_length(lists)).astype(np.int64)
        row_ends = numbers(flat(batch.rows.column(self.end)).view(pa.int64()))
        keys = np.concatenate([np.repeat(np.arange(len(batch)), sizes), numbers(batch.group_ids)])
        starts = np.concatenate([_field(stored, START), row_ends - self.gap_us])
        ends = np.concatenate([_field(stored, END), row_ends])
        # Of sessions that begin together the stored one comes first.
        order = order_within(keys, [starts])
        keys, starts, ends = keys[order], starts[order], ends[order]
        is_row = order >= len(stored)
        new, reach = _sessions(keys, starts, ends, is_row)
        first = np.flatnonzero(new)
        last = np.append(first[1:], len(new))[: len(first)] - 1
        buffers = self._buffers(batch, stored, order, is_row, new, keys)
        return _Merged(keys[first], starts[first], reach[last], buffers)

    def _buffers(
        self,
        batch: StateBatch,
        stored: pa.StructArray,
        order: IndexArray,
        is_row: BoolArray,
        new: BoolArray,
        keys: IndexArray,
    ) -> Buffers:
        """The buffers of each session."""
        # Pieces, in the order of their begin: a stored session, or rows with none between them.
        begins = new | ~is_row
        begins[1:] |= ~is_row[:-1]
        pieces = np.flatnonzero(begins)
        of_rows = is_row[pieces]
        piece_keys, sessions = keys[pieces], np.cumsum(new)[pieces] - 1

        def key_at(of: IndexArray) -> KeyAt:
            return lambda position: nth_key(batch.keys, int(of[position]))

        row_order = order[is_row] - len(stored)
        rows = batch.rows
        if len(row_order) and (row_order[1:] < row_order[:-1]).any():
            rows = rows.take(pa.array(row_order))
        segments = Segments((np.cumsum(is_row) - 1)[pieces[of_rows]], len(row_order))
        buffers = self.aggregates.reduce(rows, segments, key_at(piece_keys[of_rows]))
        if not len(stored):
            return buffers
        known = stored.take(pa.array(order[~is_row]))
        places = np.empty(len(pieces), dtype=np.int64)
        places[of_rows] = np.arange(len(segments))
        places[~of_rows] = len(segments) + np.arange(len(known))
        held = [child_of(known, name) for name in self.aggregates.state_names]
        return self._folded(interleaved(buffers, held, places), sessions, piece_keys, key_at)

    def _folded(
        self, buffers: Buffers, sessions: IndexArray, keys: IndexArray, key_at: Callable[[IndexArray], KeyAt]
    ) -> Buffers:
        """One buffer a session: neighbours are merged in pairs until none is left."""
        while (sessions[1:] == sessions[:-1]).any():
            places = np.arange(len(sessions))
            first = np.append(True, sessions[1:] != sessions[:-1])
            even = (places - np.maximum.accumulate(np.where(first, places, 0))) % 2 == 0
            left = np.flatnonzero(even[:-1] & (sessions[1:] == sessions[:-1]))
            a, b = pa.array(left), pa.array(left + 1)
            of = keys[left]
            merged = self.aggregates.merge(
                [column.take(a) for column in buffers],
                [column.take(b) for column in buffers],
                key_at(of),
            )
            places[left] = len(places) + np.arange(len(left))
            buffers = interleaved(buffers, merged, places[even])
            sessions, keys = sessions[even], keys[even]
        return buffers

    def _update(self, batch: StateBatch, merged: _Merged, live: BoolArray) -> None:
        """Keep the sessions that are open, and have a key called when the first of them ends."""
        kept = merged.where(live)
        sizes = np.bincount(kept.keys, minlength=len(batch))
        open_ = sizes > 0
        exists = bools(batch.exists) | bools(batch.timed_out)
        batch.remove(~open_ & exists)
        if not open_.any():
            return
        kind = batch.state.schema.field(SESSIONS).type
        fields = list(kind.value_type)
        bounds = [
            pa.array(times).view(field.type) for times, field in zip((kept.starts, kept.ends), fields, strict=False)
        ]
        offsets = pa.array(np.concatenate([[0], np.cumsum(sizes[open_])]).astype(np.int32))
        lists = pa.ListArray.from_arrays(
            offsets, pa.StructArray.from_arrays([*bounds, *kept.buffers], fields=fields), type=kind
        )
        batch.update({SESSIONS: lists}, where=open_, by_key=False)
        firsts = offsets.to_numpy()[:-1]
        batch.set_timeout(timestamp_ms=due_ms(pa.array(kept.ends[firsts])), where=open_)

    def _given(self, batch: StateBatch, merged: _Merged, over: BoolArray) -> pa.Table:
        ended = merged.where(over)
        kind = batch.state.schema.field(SESSIONS).type.value_type.field(START).type
        bounds = [pa.array(times).view(kind) for times in (ended.starts, ended.ends)]
        keys = batch.keys.take(pa.array(ended.keys))
        window = pa.StructArray.from_arrays(bounds, names=["start", "end"])
        columns = [*keys.columns, window, *self.aggregates.finish(ended.buffers, partial(nth_key, keys))]
        return pa.table(columns, names=[*keys.column_names, SESSION_WINDOW, *self.aggregates.names])


@dataclass(frozen=True)
class _Merged:
    """Sessions by key and time.

    Parameters
    ----------
    keys
        Position of each one's key, int64 (number of sessions,).
    starts, ends
        Microseconds since 1970, int64 (number of sessions,).
    buffers
        Of the aggregates.
    """

    keys: IndexArray
    starts: IndexArray
    ends: IndexArray
    buffers: Buffers

    def where(self, mask: BoolArray) -> _Merged:
        """Some of them."""
        if mask.all():
            return self
        chosen = pa.array(mask)
        buffers = [column.filter(chosen) for column in self.buffers]
        return _Merged(self.keys[mask], self.starts[mask], self.ends[mask], buffers)


def _field(stored: pa.StructArray, name: str) -> IndexArray:
    return numbers(child_of(stored, name).view(pa.int64()))


def _sessions(
    keys: IndexArray, starts: IndexArray, ends: IndexArray, is_row: BoolArray
) -> tuple[BoolArray, IndexArray]:
    """Where sessions begin, and how far each one reaches up to a place; all by key and start."""
    count = len(keys)
    places = np.arange(count)
    first: BoolArray = np.append(True, keys[1:] != keys[:-1])[:count]
    key_start = np.maximum.accumulate(np.where(first, places, 0))
    reach: Sequence[IndexArray] = [
        # Ends of a key's rows ascend with their starts, and so do those of its stored sessions. So the furthest of
        # either kind is the last one.
        _last_of(kind, places, key_start, ends)
        for kind in (is_row, ~is_row)
    ]
    furthest = np.maximum(*reach)
    new = first.copy()
    new[1:] |= starts[1:] > furthest[:-1]
    return new, furthest


def _last_of(kind: BoolArray, places: IndexArray, key_start: IndexArray, ends: IndexArray) -> IndexArray:
    """For each place the end of the last session of a kind up to there, among those of the same key."""
    last = np.maximum.accumulate(np.where(kind, places, -1))
    found: IndexArray = np.where(last >= key_start, ends[last], _BEFORE_ALL)
    return found
