"""Calling the user's function once per key, over rows and state that are handled in bulk.

All that costs time per key is in one loop here; everything around it is vectorised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql.types import StructType

from arrow_schemas.equality import BoolArray, HashArray, IndexArray, group_by_key
from arrow_schemas.row import RowSchema
from spark_state_ext.errors import StateError, StateValueError, StorageError, UserFunctionError
from spark_state_ext.spark.compat import SPARK_VERSION, udf_return_type_error
from spark_state_ext.spark.group_state import NO_TIMEOUT, KeyState
from spark_state_ext.spark.pandas_values import (
    empty_frame,
    key_scalars,
    null_flags,
    table_to_frame,
)
from spark_state_ext.spark.state_values import column_to_values, values_to_column
from spark_state_ext.store import Lookup

__all__ = ["CallContext", "Changes", "Groups", "KeyCaller"]

UserFunction = Callable[[tuple[Any, ...], Iterable[pd.DataFrame], KeyState], Iterable[pd.DataFrame]]
# Position, key, frames, state before.
_Call = tuple[int, tuple[Any, ...], Iterable[pd.DataFrame], tuple[Any, ...] | None]

# Keys whose frames are made, and joined, together. Spark would join thousands of frames; few are still in the cache.
_PORTION_KEYS = 32
# Rows of one key beyond this come in several frames, as they would from Spark.
_FRAME_BYTES_MAX = 1 << 30


@dataclass(frozen=True)
class CallContext:
    """What is the same for all keys of a bucket in a batch; `after_key` is called after each of them."""

    bucket: int
    batch: int
    processing_time_ms: int
    watermark_ms: int
    watermark_present: bool
    timeout_conf: str
    after_key: Callable[[], None] = lambda: None


@dataclass
class Changes:
    """Outcome of calls: which keys changed, and to what. Lists of one length, a place a changed key."""

    positions: list[int] = field(default_factory=list)
    values: list[tuple[Any, ...] | None] = field(default_factory=list)
    timeouts: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Groups:
    """Rows of a hash range, by key.

    Parameters
    ----------
    rows
        Input columns, rows of a key adjacent, ascending by hash.
    starts
        Where each key's rows begin, int64 (number of keys,).
    hashes
        Each key's hash, uint64 (number of keys,).
    raw_keys
        Key columns as they came, one row a key.
    keys
        The same normalised.
    """

    rows: pa.Table
    starts: IndexArray
    hashes: HashArray
    raw_keys: list[pa.Array]
    keys: list[pa.Array]

    @staticmethod
    def of(table: pa.Table, hashes: HashArray, key_positions: Sequence[int], columns: int, schema: RowSchema) -> Groups:
        """Group the rows of a table; its first `columns` columns are the input's."""
        raw = [_flat(table.column(position)) for position in key_positions]
        normal = schema.normalise_keys(raw)
        order, starts = group_by_key(hashes, normal)
        firsts = pa.array(order[starts])
        rows = table.select(list(range(columns)))
        if len(starts) > 1:  # else they are in order, and may be more than Arrow can copy at once
            try:
                rows = rows.take(pa.array(order))
            except pa.ArrowInvalid as error:
                raise StorageError(
                    "the rows of a batch that are handled together have more than 2 GiB in one column: set a smaller "
                    "memory_bytes_max, or let the source give smaller batches"
                ) from error
        return Groups(
            rows,
            starts,
            hashes[order[starts]],
            [k.take(firsts) for k in raw],
            [k.take(firsts) for k in normal],
        )

    @property
    def count(self) -> int:
        """Number of keys."""
        return len(self.starts)

    def without(self, other_hashes: HashArray, other_keys: list[pa.Array], positions: Sequence[int]) -> BoolArray:
        """Which of some other keys (each given once) are not the keys at these positions; bool (number of others,)."""
        keep: BoolArray = np.ones(len(other_hashes), dtype=np.bool_)
        if len(positions) and len(other_hashes):
            at = np.asarray(positions, dtype=np.int64)
            both = np.concatenate([self.hashes[at], other_hashes])
            mine = [key.take(pa.array(at)) for key in self.keys]
            keys = [pa.concat_arrays([a, b]) for a, b in zip(mine, other_keys, strict=True)]
            order, starts = group_by_key(both, keys)
            sizes = np.diff(np.append(starts, len(order)))
            # Stable order: of two rows of one key the second is the other's.
            keep[order[starts[sizes > 1] + 1] - len(at)] = False
        return keep


class KeyCaller:
    """Calls a user's function for many keys.

    Parameters
    ----------
    function
        The user's function.
    schema
        Row schema of the state.
    state_type
        Spark's type of the state.
    columns
        Names of the input's columns.
    timezone
        The session's time zone.
    frame_rows_max
        Most rows of one frame.
    """

    def __init__(
        self,
        function: UserFunction,
        schema: RowSchema,
        state_type: StructType,
        columns: Sequence[str],
        timezone: str,
        frame_rows_max: int,
    ) -> None:
        self._function = function
        self._schema = schema
        self._state_type = state_type
        self._columns = list(columns)
        self._timezone = timezone
        self._rows_max = frame_rows_max

    def data(self, groups: Groups, found: Lookup, context: CallContext, changes: Changes) -> Iterator[pd.DataFrame]:
        """Call for keys with rows; yields their output, notes changes by position in `groups`."""
        values = self._state_tuples(found)
        before = [None if at < 0 else values[at] for at in found.index.tolist()]
        keys = self._key_tuples(groups.raw_keys)
        frames = self._frames(groups)
        return self._call(((at, keys[at], pdfs, before[at]) for at, pdfs in frames), False, context, changes)

    def timeouts(self, expired: pa.RecordBatch, context: CallContext, changes: Changes) -> Iterator[pd.DataFrame]:
        """Call for keys whose time is up; yields their output, notes changes by row of `expired`."""
        index = np.arange(expired.num_rows, dtype=np.int64)
        values = self._state_tuples(Lookup(index, expired))
        keys = self._key_tuples(self._schema.key_columns(expired))
        calls = ((at, keys[at], [empty_frame(self._columns)], values[at]) for at in range(expired.num_rows))
        return self._call(calls, True, context, changes)

    def changed_rows(self, changes: Changes, hashes: HashArray, keys: list[pa.Array]) -> pa.RecordBatch:
        """The changed keys as rows of a run (not yet in run order).

        Raises
        ------
        StateValueError
            When a value does not fit the state schema.
        """
        if not changes.positions:
            return self._schema.empty()
        at = pa.array(np.asarray(changes.positions, dtype=np.int64))
        defined = np.fromiter((v is not None for v in changes.values), dtype=np.bool_, count=len(changes.values))
        timeouts = np.asarray(changes.timeouts, dtype=np.int64)
        unset = timeouts == NO_TIMEOUT
        fields = self._state_type.fields
        nothing = (None,) * len(fields)
        by_column: Iterable[tuple[Any, ...]] = zip(
            *(v if v is not None else nothing for v in changes.values), strict=True
        )

        def whose(row: int) -> str:
            return f" (key {_shown(tuple(key[changes.positions[row]].as_py() for key in keys))})"

        columns = [
            values_to_column(values, spark.dataType, arrow.type, arrow.name, whose)
            for values, spark, arrow in zip(by_column, fields, self._schema.state, strict=True)
        ]
        return pa.RecordBatch.from_arrays(
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

    # -- inside ------------------------------------------------------------------------------------

    def _call(
        self,
        calls: Iterable[_Call],
        timed_out: bool,
        context: CallContext,
        changes: Changes,
    ) -> Iterator[pd.DataFrame]:
        function, outputs = self._function, _Outputs()
        now_ms, watermark_ms = context.processing_time_ms, context.watermark_ms
        conf, present, state_type = context.timeout_conf, context.watermark_present, self._state_type
        note_position, note_value = changes.positions.append, changes.values.append
        note_timeout = changes.timeouts.append
        for position, key, pdfs, before in _in_portions(calls):
            state = KeyState(before, now_ms, watermark_ms, conf, timed_out, present, state_type)
            try:
                for frame in _checked(function(key, pdfs, state)):
                    if type(frame) is pd.DataFrame and len(frame):
                        if outputs.frames and len(frame.columns) != outputs.width:
                            yield from outputs.joined()
                        if outputs.add(frame):
                            yield from outputs.joined()
                    elif not (isinstance(frame, pd.DataFrame) and not len(frame)) or len(frame.columns):
                        # Not what Spark wants, or at least odd: Spark shall judge it, and raise its own error.
                        yield frame
            except StateValueError as error:
                raise StateValueError(
                    f"{error} (key {_shown(key)}, bucket {context.bucket}, batch {context.batch})"
                ).with_traceback(error.__traceback__) from error
            except StateError:
                raise
            except Exception as error:
                # With its traceback: Spark shows that of the last exception only, and the mistake is to be found.
                raise UserFunctionError(
                    f"the function failed for key {_shown(key)} (bucket {context.bucket}, batch {context.batch}"
                    f"{', timed out' if timed_out else ''}): {type(error).__name__}: {error}"
                ).with_traceback(error.__traceback__) from error
            context.after_key()
            if state.touched or state.timeout_ms != NO_TIMEOUT:
                note_position(position)
                note_value(state.value)
                note_timeout(state.timeout_ms)
        if outputs.frames:
            yield from outputs.joined()

    def _state_tuples(self, found: Lookup) -> list[tuple[Any, ...] | None]:
        rows = found.rows
        columns = [
            column_to_values(column, spark.dataType)
            for column, spark in zip(self._schema.state_columns(rows), self._state_type.fields, strict=True)
        ]
        tuples: list[tuple[Any, ...] | None] = list(zip(*columns, strict=True))
        defined = rows.column("defined")
        if defined.true_count != rows.num_rows:
            return [
                value if is_defined else None for value, is_defined in zip(tuples, defined.to_pylist(), strict=True)
            ]
        return tuples

    def _key_tuples(self, keys: Sequence[pa.Array]) -> list[tuple[Any, ...]]:
        return list(zip(*(key_scalars(key, self._timezone, SPARK_VERSION) for key in keys), strict=True))

    def _frames(self, groups: Groups) -> Iterator[tuple[int, Iterable[pd.DataFrame]]]:
        """For each key its frames. dtypes are those of the key alone: keys are converted together only when the columns
        whose dtype depends on NULLs have the same pattern of them."""
        starts, total = groups.starts, groups.rows.num_rows
        ends = np.append(starts[1:], total)
        sizes = ends - starts
        large = sizes > self._rows_max
        if groups.count == 1 and groups.rows.nbytes > _FRAME_BYTES_MAX:
            large[:] = True
        for at in np.flatnonzero(large).tolist():
            yield at, self._pieces(groups.rows.slice(int(starts[at]), int(sizes[at])))
        if large.all():
            return
        patterns = _null_patterns(groups.rows, starts)
        for pattern in np.unique(patterns[~large]).tolist():
            members = np.flatnonzero((patterns == pattern) & ~large)
            if len(members) == groups.count:
                rows = groups.rows
            else:
                chosen = np.zeros(groups.count, dtype=np.bool_)
                chosen[members] = True
                rows = groups.rows.filter(pa.array(np.repeat(chosen, sizes)))
            yield from zip(members.tolist(), self._split(rows, sizes[members]), strict=True)

    def _split(self, rows: pa.Table, sizes: IndexArray) -> Iterator[Iterable[pd.DataFrame]]:
        whole = table_to_frame(rows, self._columns, self._timezone, SPARK_VERSION)
        if len(self._columns):
            # Makes pandas note where the columns lie, which the pieces inherit; else each piece finds out anew.
            whole.iloc[:, 0]
        indexes: dict[int, pd.Index] = {}
        # groupby cuts a frame several times faster than slicing it does.
        labels = np.repeat(np.arange(len(sizes)), sizes)
        for _, frame in whole.groupby(labels, sort=False):
            n = len(frame)
            if n not in indexes:
                indexes[n] = pd.RangeIndex(n)
            # Its own: what a function does to it, such as naming it, must not show at other keys.
            frame.index = indexes[n].view()
            yield (f for f in (frame,))

    def _pieces(self, rows: pa.Table) -> Iterator[pd.DataFrame]:
        step = min(self._rows_max, max(1, rows.num_rows * _FRAME_BYTES_MAX // max(1, rows.nbytes)))
        for offset in range(0, rows.num_rows, step):
            piece = rows.slice(offset, step)
            yield table_to_frame(piece, self._columns, self._timezone, SPARK_VERSION)


def _in_portions(calls: Iterable[_Call]) -> Iterator[_Call]:
    """The calls, prepared a portion at a time: making frames, calling and joining each go faster in a row."""
    calls = iter(calls)
    while portion := list(islice(calls, _PORTION_KEYS)):
        yield from portion


class _Outputs:
    """Frames waiting to be joined."""

    def __init__(self) -> None:
        self.frames: list[pd.DataFrame] = []
        self.width = 0
        self._rows = 0

    def add(self, frame: pd.DataFrame) -> bool:
        """Take a frame with as many columns as those that wait; True when it is time for `joined`."""
        if not self.frames:
            self.width = len(frame.columns)
        self.frames.append(frame)
        self._rows += len(frame)
        return len(self.frames) >= _PORTION_KEYS or self._rows >= 10_000

    def joined(self) -> list[pd.DataFrame]:
        """The frames that wait as one; each alone where their columns differ, as Spark judges each alone."""
        frames, self.frames, self._rows = self.frames, [], 0
        if len(frames) == 1:
            return frames
        together = pd.concat(frames, ignore_index=True)
        return [together] if len(together.columns) == self.width else frames


def _shown(key: tuple[Any, ...]) -> str:
    """A key in a message: ``(4,)`` rather than ``(np.int64(4),)``."""
    return repr(tuple(part.item() if isinstance(part, np.generic) else part for part in key))


def _checked(result: Any) -> Iterable[Any]:
    """What the user's function returned, if Spark would take it."""
    items: Iterable[Any]
    if isinstance(result, pd.DataFrame):
        raise udf_return_type_error(result, "iterable of pandas.DataFrame")
    try:
        items = iter(result)
    except TypeError:
        raise udf_return_type_error(result, "iterable") from None
    return items


def _null_patterns(rows: pa.Table, starts: IndexArray) -> IndexArray:
    """A number a key: equal where the key's columns get the same dtypes."""
    patterns: IndexArray = np.zeros(len(starts), dtype=np.int64)
    if not len(starts):
        return patterns
    for column in rows.columns:
        for flags in null_flags(column):
            if flags.any():
                bits = np.logical_or.reduceat(flags, starts)
                # Renumbered at each column, so that any number of columns fits.
                patterns = np.unique(patterns * 2 + bits, return_inverse=True)[1].astype(np.int64)
    return patterns


def _flat(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
