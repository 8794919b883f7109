"""Calling the user's function once per key, with pandas frames, as Spark does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql.types import StructType

from arrow_schemas.equality import IndexArray
from arrow_schemas.row import RowSchema
from spark_state_ext.errors import StateValueError
from spark_state_ext.spark.compat import SPARK_VERSION, udf_return_type_error
from spark_state_ext.spark.group_state import NO_TIMEOUT, KeyState
from spark_state_ext.spark.groups import CallContext, Groups
from spark_state_ext.spark.pandas_values import (
    empty_frame,
    key_scalars,
    null_flags,
    table_to_frame,
)
from spark_state_ext.spark.per_key import Call, Changes, PerKeyCaller, failure

__all__ = ["KeyCaller"]

UserFunction = Callable[[tuple[Any, ...], Iterable[pd.DataFrame], KeyState], Iterable[Any]]

# Keys whose frames are made, and joined, together. Spark would join thousands of frames; few are still in the cache.
_PORTION_KEYS = 32
# Rows of one key beyond this come in several frames, as they would from Spark.
_FRAME_BYTES_MAX = 1 << 30
# Rows of a frame made of tuples.
_TUPLES_MAX = 10_000


class KeyCaller(PerKeyCaller):
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
    outputs
        Names of the output's columns.
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
        outputs: Sequence[str],
        timezone: str,
        frame_rows_max: int,
    ) -> None:
        super().__init__(function, schema, state_type)
        self._columns = list(columns)
        self._outputs = list(outputs)
        self._timezone = timezone
        self._rows_max = frame_rows_max

    # -- calling -----------------------------------------------------------------------------------

    def _data_calls(self, groups: Groups, before: list[tuple[Any, ...] | None]) -> Iterator[Call]:
        keys = self._key_tuples(groups.raw_keys)
        return ((at, keys[at], pdfs, before[at]) for at, pdfs in self._frames(groups))

    def _timeout_calls(self, expired: pa.RecordBatch, before: list[tuple[Any, ...] | None]) -> Iterator[Call]:
        keys = self._key_tuples(self._schema.key_columns(expired))
        return ((at, keys[at], [empty_frame(self._columns)], before[at]) for at in range(expired.num_rows))

    def _call(
        self, calls: Iterable[Call], timed_out: bool, context: CallContext, changes: Changes
    ) -> Iterator[pd.DataFrame]:
        function, outputs = self._function, _Outputs(self._outputs)
        clock, after_key = self._clock(context, timed_out, self._state_type), context.after_key
        note_position, note_value = changes.positions.append, changes.values.append
        note_timeout = changes.timeouts.append
        for position, key, pdfs, before in _in_portions(calls):
            state = KeyState(before, clock)
            try:
                for item in _checked(function(key, pdfs, state)):
                    if type(item) is pd.DataFrame and len(item):
                        if outputs.frames and len(item.columns) != outputs.width:
                            yield from outputs.joined()
                        if outputs.add(item):
                            yield from outputs.joined()
                    elif isinstance(item, (tuple, list, Mapping)):
                        if outputs.add_rows(item):
                            yield from outputs.joined()
                    elif not (isinstance(item, pd.DataFrame) and not len(item)) or len(item.columns):
                        # Not what Spark wants, or at least odd: Spark shall judge it, and raise its own error.
                        yield item
            except Exception as error:
                raise failure(error, key, context, timed_out) from error
            after_key()
            if state.touched or state.timeout_ms != NO_TIMEOUT:
                note_position(position)
                note_value(state.value)
                note_timeout(state.timeout_ms)
        yield from outputs.joined()

    # -- frames ------------------------------------------------------------------------------------

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


def _in_portions(calls: Iterable[Call]) -> Iterator[Call]:
    """The calls, prepared a portion at a time: making frames, calling and joining each go faster in a row."""
    calls = iter(calls)
    while portion := list(islice(calls, _PORTION_KEYS)):
        yield from portion


class _Outputs:
    """Frames and rows waiting to be joined.

    Parameters
    ----------
    names
        The output's columns.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self.frames: list[pd.DataFrame] = []
        self.width = 0
        self._rows = 0
        self._tuples: list[tuple[Any, ...]] = []

    def add(self, frame: pd.DataFrame) -> bool:
        """Take a frame with as many columns as those that wait; True when it is time for `joined`."""
        if not self.frames:
            self.width = len(frame.columns)
        self.frames.append(frame)
        self._rows += len(frame)
        return len(self.frames) >= _PORTION_KEYS or self._rows >= 10_000

    def add_rows(self, item: tuple[Any, ...] | list[Any] | Mapping[str, Any]) -> bool:
        """Take a row as tuple, several as a list of tuples, or a dict of columns; True when it is time for `joined`."""
        if isinstance(item, tuple):
            self._tuples.append(self._row(item))
        elif isinstance(item, list):
            self._tuples += [self._row(row) for row in item]
        else:
            if sorted(item) != sorted(self._names):
                raise StateValueError(
                    f"the function gave the columns {', '.join(map(str, item))}; expected {', '.join(self._names)}"
                )
            self._tuples += zip(*(item[name] for name in self._names), strict=True)
        return len(self._tuples) >= _TUPLES_MAX

    def joined(self) -> list[pd.DataFrame]:
        """The frames that wait as one; each alone where their columns differ, as Spark judges each alone."""
        frames, self.frames, self._rows = self.frames, [], 0
        if len(frames) > 1:
            together = pd.concat(frames, ignore_index=True)
            frames = [together] if len(together.columns) == self.width else frames
        if self._tuples:
            tuples, self._tuples = self._tuples, []
            frames.append(_frame_of(tuples, self._names))
        return frames

    def _row(self, row: Any) -> tuple[Any, ...]:
        if not isinstance(row, tuple) or len(row) != len(self._names):
            raise StateValueError(f"the function gave {row!r} for a row; expected a tuple of {', '.join(self._names)}")
        return row


def _frame_of(tuples: list[tuple[Any, ...]], names: list[str]) -> pd.DataFrame:
    """Rows as a frame of Python values: Spark converts these by its own rules, and makes objects of numbers anyway."""
    columns = {
        at: np.fromiter(values, dtype=object, count=len(tuples)) for at, values in enumerate(zip(*tuples, strict=True))
    }
    frame = pd.DataFrame(columns, index=pd.RangeIndex(len(tuples)), copy=False)
    frame.columns = pd.Index(names)
    return frame


def _checked(result: Any) -> Iterable[Any]:
    """What the user's function returned, if Spark would take it; and, which Spark would not, a dict of columns."""
    items: Iterable[Any]
    if isinstance(result, pd.DataFrame):
        raise udf_return_type_error(result, "iterable of pandas.DataFrame")
    if isinstance(result, Mapping):
        return (result,)
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
