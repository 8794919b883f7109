"""Incremental aggregation by key, as Spark's ``groupBy(…).agg(…)``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import pyarrow as pa

from arrow_schemas.columns import combine_chunks, format_row
from arrow_schemas.equality import BoolArray, IndexArray
from spark_state_ext.errors import StateValueError
from spark_state_ext.functions.state_batch import StateBatch
from spark_state_ext.operators.arrays import KeyedRows, Segments, take_interleaved, to_bools
from spark_state_ext.operators.deadlines import compute_timeouts_ms, find_passed, read_key_times_us
from spark_state_ext.operators.functions import Buffers, Kernel, OverflowAtError

__all__ = ["Aggregates", "Aggregation", "BoundAggregate", "KeyAt", "PartialAggregation", "describe_key"]

# Function that returns the key at a position, for error messages.
KeyAt = Callable[[int], object]


@dataclass(frozen=True)
class BoundAggregate:
    """An aggregate function with a known column and known types.

    Parameters
    ----------
    name
        Name of the output column.
    kernel
        The kernel that computes the function.
    column
        Name of the input column; None if it has none.
    """

    name: str
    kernel: Kernel
    column: str | None

    @property
    def state_names(self) -> list[str]:
        """Names of the function's state columns."""
        return [f"{self.name}__{part}" if part else self.name for part, _ in self.kernel.buffers]

    @property
    def state_types(self) -> list[pa.DataType]:
        """Types of the function's state columns."""
        return [data_type for _, data_type in self.kernel.buffers]


@dataclass(frozen=True)
class Aggregates:
    """Several aggregate functions; their buffers are adjacent columns."""

    bound: tuple[BoundAggregate, ...]

    @cached_property
    def state_names(self) -> list[str]:
        """Names of all state columns."""
        return [name for bound in self.bound for name in bound.state_names]

    @property
    def buffer_names(self) -> list[str]:
        """Names of the buffer columns during the shuffle; key columns must not have such names."""
        return [f"__buffer{number}" for number in range(len(self.state_names))]

    @property
    def names(self) -> list[str]:
        """Names of the result columns."""
        return [bound.name for bound in self.bound]

    def reduce(self, rows: pa.Table, segments: Segments, key_at: KeyAt) -> Buffers:
        """Return the buffers of segments of adjacent rows."""
        buffers: Buffers = []
        for bound in self.bound:
            values = None if bound.column is None else combine_chunks(rows.column(bound.column))
            with _name_key_in_errors(bound, key_at):
                buffers += bound.kernel.reduce(values, segments)
        return buffers

    def merge(self, left: Buffers, right: Buffers, key_at: KeyAt) -> Buffers:
        """Merge two sets of buffers pair by pair."""
        merged: Buffers = []
        for bound, buffer_slice in self._buffer_slices():
            with _name_key_in_errors(bound, key_at):
                merged += bound.kernel.merge(left[buffer_slice], right[buffer_slice])
        return merged

    def combine(self, buffers: Buffers, segments: Segments, key_at: KeyAt) -> Buffers:
        """Merge each segment of adjacent buffers into one: neighbours in pairs, from left to right, repeatedly."""
        owners = segments.ids
        while not segments.single:
            places = np.arange(segments.rows) - segments.starts[segments.ids]
            left = np.flatnonzero((places % 2 == 0) & (places + 1 < segments.sizes[segments.ids]))
            left_index, right_index = pa.array(left), pa.array(left + 1)
            merged = self.merge(
                [column.take(left_index) for column in buffers],
                [column.take(right_index) for column in buffers],
                partial(_find_key, key_at, owners[left]),
            )
            # Every other row remains; it is replaced by the merged one if it had a right neighbour.
            index = np.flatnonzero(places % 2 == 0)
            source = index.copy()
            source[np.searchsorted(index, left)] = segments.rows + np.arange(len(left))
            buffers = take_interleaved(buffers, merged, source)
            owners = owners[index]
            sizes = (segments.sizes + 1) // 2
            segments = Segments(np.cumsum(sizes) - sizes, len(index))
        return buffers

    def finish(self, buffers: Buffers, key_at: KeyAt) -> list[pa.Array]:
        """Return the result columns, in the order of `names`."""
        columns = []
        for bound, buffer_slice in self._buffer_slices():
            with _name_key_in_errors(bound, key_at):
                columns.append(bound.kernel.finish(buffers[buffer_slice]))
        return columns

    def _buffer_slices(self) -> list[tuple[BoundAggregate, slice]]:
        slices, start = [], 0
        for bound in self.bound:
            stop = start + len(bound.kernel.buffers)
            slices.append((bound, slice(start, stop)))
            start = stop
        return slices


@dataclass(frozen=True)
class PartialAggregation:
    """The step of an aggregation before the shuffle: a task's rows become one buffer per key.

    Parameters
    ----------
    aggregates
        The aggregate functions.
    keys
        Names of the key columns.
    """

    aggregates: Aggregates
    keys: tuple[str, ...]

    def __call__(self, keyed_rows: KeyedRows) -> tuple[pa.Table, IndexArray]:
        """Return a table of keys and buffers, one row per key, and the keys' positions."""
        rows, starts = keyed_rows.by_key, keyed_rows.starts
        keys = rows.select(list(self.keys))

        def key_at(position: int) -> object:
            return describe_key(keys, int(starts[position]))

        buffers = self.aggregates.reduce(rows, Segments(starts, rows.num_rows), key_at)
        firsts = keys if keyed_rows.single else keys.take(pa.array(starts))
        names = [*self.keys, *self.aggregates.buffer_names]
        return pa.table([*firsts.columns, *buffers], names=names), np.arange(len(starts))


@dataclass(frozen=True)
class Aggregation:
    """The vectorised function of an aggregation.

    Parameters
    ----------
    aggregates
        The aggregate functions. Their buffers are the state.
    event_time
        Key column with the event time: a timestamp, or a window, whose end counts. Groups are removed when the
        watermark has passed them. None: groups are never removed.
    append
        True: a group is output when it is removed. False: it is output with every batch that has rows for it.
    partial
        True if the rows are the output of a `PartialAggregation`.
    """

    aggregates: Aggregates
    event_time: str | None = None
    append: bool = False
    partial: bool = False

    def __call__(self, batch: StateBatch) -> pa.Table | None:
        """Return new totals of the keys with rows, or final totals with `append`."""
        fresh = batch.timed_out.false_count
        states = self._merge_buffers(batch, fresh)
        if self.event_time is None:
            batch.update(self._build_state(states), by_key=False)
            return self._build_results(batch.keys, states)
        times_us = read_key_times_us(batch.keys, self.event_time)
        is_passed = find_passed(times_us, batch.watermark_ms)
        exists = to_bools(batch.exists)
        with_rows = np.arange(len(batch)) < fresh
        # A key whose state has expired may have only its timeout left.
        batch.remove((is_passed & exists) | (~with_rows & ~exists))
        is_live = ~is_passed & (with_rows | exists)
        batch.update(
            self._build_state(_filter_columns(states, is_live[:fresh])), where=is_live & with_rows, by_key=False
        )
        batch.set_timeout(timestamp_ms=compute_timeouts_ms(times_us), where=is_live)
        if not self.append:
            return self._build_results(batch.keys.slice(0, fresh), states)
        is_final = is_passed & (with_rows | exists)
        if not is_final.any():
            return None
        stored_final = _filter_columns([column.slice(fresh) for column in self._read_buffers(batch)], is_final[fresh:])
        new_final = _filter_columns(states, is_final[:fresh])
        states = [pa.concat_arrays(pair) for pair in zip(new_final, stored_final, strict=True)]
        return self._build_results(batch.keys.filter(pa.array(is_final)), states)

    # -- inside ------------------------------------------------------------------------------------

    def _merge_buffers(self, batch: StateBatch, fresh: int) -> Buffers:
        """Return the buffers of the keys with rows, merged from state and rows."""
        segments = Segments(_find_starts(batch, fresh), batch.rows.num_rows)
        key_at = partial(describe_key, batch.keys)
        if self.partial:
            buffers = [combine_chunks(batch.rows.column(name)) for name in self.aggregates.buffer_names]
            new_buffers = self.aggregates.combine(buffers, segments, key_at)
        else:
            new_buffers = self.aggregates.reduce(batch.rows, segments, key_at)
        if not batch.exists.true_count:
            return new_buffers
        return self.aggregates.merge(
            [column.slice(0, fresh) for column in self._read_buffers(batch)], new_buffers, key_at
        )

    def _read_buffers(self, batch: StateBatch) -> Buffers:
        return [combine_chunks(batch.state.column(name)) for name in self.aggregates.state_names]

    def _build_state(self, states: Buffers) -> pa.Table:
        return pa.table(states, names=self.aggregates.state_names)

    def _build_results(self, keys: pa.Table, states: Buffers) -> pa.Table:
        columns = [*keys.columns, *self.aggregates.finish(states, partial(describe_key, keys))]
        return pa.table(columns, names=[*keys.column_names, *self.aggregates.names])


def describe_key(keys: pa.Table, position: int) -> object:
    """Return the key at a position, for error messages."""
    return format_row(keys.column_names, keys.columns, position)


def _find_starts(batch: StateBatch, fresh: int) -> IndexArray:
    starts: IndexArray = batch.offsets.to_numpy()[:fresh].astype(np.int64)
    return starts


def _filter_columns(columns: Sequence[pa.Array], mask: BoolArray) -> Buffers:
    if mask.all():
        return list(columns)
    chosen = pa.array(mask)
    return [column.filter(chosen) for column in columns]


def _find_key(key_at: KeyAt, owners: IndexArray, position: int) -> object:
    """Return the key of the merged buffer at a position."""
    return key_at(int(owners[position]))


@contextlib.contextmanager
def _name_key_in_errors(bound: BoundAggregate, key_at: KeyAt) -> Iterator[None]:
    """Run a kernel; name the function and the key if a value overflows."""
    try:
        with np.errstate(all="ignore"):
            yield
    except OverflowAtError as error:
        raise StateValueError(
            f"the aggregate {bound.name!r} of the key {key_at(error.position)} exceeds the range of {error.data_type}"
        ) from error
