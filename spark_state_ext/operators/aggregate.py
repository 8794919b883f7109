"""Aggregation by key, batch after batch: what Spark's ``groupBy(…).agg(…)`` does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import pyarrow as pa

from arrow_schemas.columns import flat, shown_row
from arrow_schemas.equality import BoolArray, IndexArray
from spark_state_ext.errors import StateValueError
from spark_state_ext.functions.state_batch import StateBatch
from spark_state_ext.operators.arrays import KeyedRows, Segments, bools, interleaved
from spark_state_ext.operators.deadlines import due_ms, key_times_us, passed
from spark_state_ext.operators.functions import Buffers, Kernel, OverflowAt

__all__ = ["Aggregates", "Aggregation", "Bound", "KeyAt", "PartialAggregation", "nth_key"]

# Names the key at a position, for an error.
KeyAt = Callable[[int], object]


@dataclass(frozen=True)
class Bound:
    """An aggregate function whose column and types are fixed.

    Parameters
    ----------
    name
        Of the output column.
    kernel
        The function.
    column
        Name of the input column; None for none.
    """

    name: str
    kernel: Kernel
    column: str | None

    @property
    def state_names(self) -> list[str]:
        """Names of its columns in the state."""
        return [f"{self.name}__{part}" if part else self.name for part, _ in self.kernel.buffers]

    @property
    def state_types(self) -> list[pa.DataType]:
        """Their types."""
        return [data_type for _, data_type in self.kernel.buffers]


@dataclass(frozen=True)
class Aggregates:
    """Several functions at once; their buffers lie side by side."""

    bound: tuple[Bound, ...]

    @cached_property
    def state_names(self) -> list[str]:
        """Names of all buffers' columns."""
        return [name for bound in self.bound for name in bound.state_names]

    @property
    def buffer_names(self) -> list[str]:
        """Names of the columns in which buffers come to the shuffle; no key is called so."""
        return [f"__buffer{at}" for at in range(len(self.state_names))]

    @property
    def names(self) -> list[str]:
        """Names of the results."""
        return [bound.name for bound in self.bound]

    def reduce(self, rows: pa.Table, segments: Segments, key_at: KeyAt) -> Buffers:
        """Buffers of segments of adjacent rows."""
        found: Buffers = []
        for bound in self.bound:
            values = None if bound.column is None else flat(rows.column(bound.column))
            with _naming(bound, key_at):
                found += bound.kernel.reduce(values, segments)
        return found

    def merge(self, left: Buffers, right: Buffers, key_at: KeyAt) -> Buffers:
        """Pair by pair, two sets of buffers as one."""
        merged: Buffers = []
        for bound, at in self._slices():
            with _naming(bound, key_at):
                merged += bound.kernel.merge(left[at], right[at])
        return merged

    def combine(self, buffers: Buffers, segments: Segments, key_at: KeyAt) -> Buffers:
        """Buffers of segments of adjacent buffers, merged from left to right by pairs, and these by pairs, …"""
        owners = segments.ids
        while not segments.single:
            places = np.arange(segments.rows) - segments.starts[segments.ids]
            left = np.flatnonzero((places % 2 == 0) & (places + 1 < segments.sizes[segments.ids]))
            at, behind = pa.array(left), pa.array(left + 1)
            merged = self.merge(
                [column.take(at) for column in buffers],
                [column.take(behind) for column in buffers],
                partial(_key_of, key_at, owners[left]),
            )
            # Every other row stays, merged where another was behind it.
            index = np.flatnonzero(places % 2 == 0)
            source = index.copy()
            source[np.searchsorted(index, left)] = segments.rows + np.arange(len(left))
            buffers = interleaved(buffers, merged, source)
            owners = owners[index]
            sizes = (segments.sizes + 1) // 2
            segments = Segments(np.cumsum(sizes) - sizes, len(index))
        return buffers

    def finish(self, buffers: Buffers, key_at: KeyAt) -> list[pa.Array]:
        """Results, in the order of `names`."""
        found = []
        for bound, at in self._slices():
            with _naming(bound, key_at):
                found.append(bound.kernel.finish(buffers[at]))
        return found

    def _slices(self) -> list[tuple[Bound, slice]]:
        found, start = [], 0
        for bound in self.bound:
            stop = start + len(bound.kernel.buffers)
            found.append((bound, slice(start, stop)))
            start = stop
        return found


@dataclass(frozen=True)
class PartialAggregation:
    """What an aggregation does before the shuffle: rows become buffers, one for each key of a task's rows.

    Parameters
    ----------
    aggregates
        The functions.
    keys
        Names of the key columns.
    """

    aggregates: Aggregates
    keys: tuple[str, ...]

    def __call__(self, given: KeyedRows) -> tuple[pa.Table, IndexArray]:
        """Keys and buffers, a row a key."""
        rows, starts = given.by_key, given.starts
        keys = rows.select(list(self.keys))

        def key_at(position: int) -> object:
            return nth_key(keys, int(starts[position]))

        buffers = self.aggregates.reduce(rows, Segments(starts, rows.num_rows), key_at)
        firsts = keys if given.single else keys.take(pa.array(starts))
        names = [*self.keys, *self.aggregates.buffer_names]
        return pa.table([*firsts.columns, *buffers], names=names), np.arange(len(starts))


@dataclass(frozen=True)
class Aggregation:
    """The vectorised function of an aggregation.

    Parameters
    ----------
    aggregates
        The functions. Their buffers are the state.
    event_time
        Key column with the event time: a timestamp, or a window, which counts by its end. Groups are removed when the
        watermark has passed them. None: there is none, and nothing is removed.
    append
        Whether a group is given when it is removed, and not with every batch that has rows for it.
    partial
        Whether the rows are what a `PartialAggregation` made of the input's.
    """

    aggregates: Aggregates
    event_time: str | None = None
    append: bool = False
    partial: bool = False

    def __call__(self, batch: StateBatch) -> pa.Table | None:
        """New totals of the keys with rows, or final ones."""
        fresh = batch.timed_out.false_count
        states = self._merged(batch, fresh)
        if self.event_time is None:
            batch.update(self._table(states), by_key=False)
            return self._results(batch.keys, states)
        times_us = key_times_us(batch.keys, self.event_time)
        over = passed(times_us, batch.watermark_ms)
        exists = bools(batch.exists)
        with_rows = np.arange(len(batch)) < fresh
        # What is over may have nothing any more but its timeout, where state has expired.
        batch.remove((over & exists) | (~with_rows & ~exists))
        live = ~over & (with_rows | exists)
        batch.update(self._table(_rows(states, live[:fresh])), where=live & with_rows, by_key=False)
        batch.set_timeout(timestamp_ms=due_ms(times_us), where=live)
        if not self.append:
            return self._results(batch.keys.slice(0, fresh), states)
        final = over & (with_rows | exists)
        if not final.any():
            return None
        waited = _rows([column.slice(fresh) for column in self._state(batch)], final[fresh:])
        mine = _rows(states, final[:fresh])
        states = [pa.concat_arrays(pair) for pair in zip(mine, waited, strict=True)]
        return self._results(batch.keys.filter(pa.array(final)), states)

    # -- inside ------------------------------------------------------------------------------------

    def _merged(self, batch: StateBatch, fresh: int) -> Buffers:
        """Buffers of the keys with rows: state and rows together."""
        segments = Segments(_starts(batch, fresh), batch.rows.num_rows)
        key_at = partial(nth_key, batch.keys)
        if self.partial:
            buffers = [flat(batch.rows.column(name)) for name in self.aggregates.buffer_names]
            found = self.aggregates.combine(buffers, segments, key_at)
        else:
            found = self.aggregates.reduce(batch.rows, segments, key_at)
        if not batch.exists.true_count:
            return found
        return self.aggregates.merge([column.slice(0, fresh) for column in self._state(batch)], found, key_at)

    def _state(self, batch: StateBatch) -> Buffers:
        return [flat(batch.state.column(name)) for name in self.aggregates.state_names]

    def _table(self, states: Buffers) -> pa.Table:
        return pa.table(states, names=self.aggregates.state_names)

    def _results(self, keys: pa.Table, states: Buffers) -> pa.Table:
        columns = [*keys.columns, *self.aggregates.finish(states, partial(nth_key, keys))]
        return pa.table(columns, names=[*keys.column_names, *self.aggregates.names])


def nth_key(keys: pa.Table, position: int) -> object:
    """The key at a position, for an error."""
    return shown_row(keys.column_names, keys.columns, position)


def _starts(batch: StateBatch, fresh: int) -> IndexArray:
    starts: IndexArray = batch.offsets.to_numpy()[:fresh].astype(np.int64)
    return starts


def _rows(columns: Sequence[pa.Array], mask: BoolArray) -> Buffers:
    if mask.all():
        return list(columns)
    chosen = pa.array(mask)
    return [column.filter(chosen) for column in columns]


def _key_of(key_at: KeyAt, owners: IndexArray, position: int) -> object:
    """The key of what is merged at a position."""
    return key_at(int(owners[position]))


@contextlib.contextmanager
def _naming(bound: Bound, key_at: KeyAt) -> Iterator[None]:
    """Run a kernel, and say of which key a value is too large."""
    try:
        with np.errstate(all="ignore"):
            yield
    except OverflowAt as error:
        raise StateValueError(
            f"the aggregate {bound.name!r} of the key {key_at(error.position)} is beyond {error.data_type}"
        ) from error
