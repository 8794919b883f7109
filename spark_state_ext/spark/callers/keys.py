"""Calling the user's function once per key, with pandas frames, as Spark does."""

from __future__ import annotations

import bisect
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import GeneratorType
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql.types import BooleanType, NumericType, StringType, StructField, StructType

from arrow_schemas.columns import shown
from arrow_schemas.equality import IndexArray
from arrow_schemas.row import RowSchema
from spark_state_ext.errors import ResultTypeError, StateValueError
from spark_state_ext.functions.tables import refuse_scalars, refuse_uneven
from spark_state_ext.spark.callers.group_state import NO_TIMEOUT, KeyState
from spark_state_ext.spark.callers.groups import CallContext, Groups
from spark_state_ext.spark.callers.output_frames import first_without_text, frame_of_rows, is_converted, plain_frame
from spark_state_ext.spark.callers.pandas_values import (
    empty_frame,
    first_beyond_pandas,
    key_scalars,
    null_flags,
    table_to_frame,
)
from spark_state_ext.spark.callers.per_key import Call, Changes, PerKeyCaller, reraise, shown_key
from spark_state_ext.spark.callers.results import OutputColumns, checked_result, short
from spark_state_ext.spark.callers.state_values import changeable
from spark_state_ext.spark.compat import (
    NUMBERS_JOIN,
    SPARK_VERSION,
    labels_of,
    same_labels,
)

__all__ = ["KeyCaller", "as_frames"]

UserFunction = Callable[[tuple[Any, ...], Iterable[pd.DataFrame], KeyState], Iterable[Any]]

_MAKE_TEXT = ": it is neither text nor a number; make text of it in the function"
# Keys whose frames are made, and joined, together. Spark would join thousands of frames; few are still in the cache.
_PORTION_KEYS = 32
# Rows of one key beyond this come in several frames, as they would from Spark.
_FRAME_BYTES_MAX = 1 << 30
# Frames of so few rows are taken apart, into values of these types.
_SMALL_ROWS_MAX = 8
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
# What nearly all columns in dicts are; others are looked at.
_COLUMNS = frozenset({list, tuple, pd.Series})
# Columns that hold no text, and what they do not hold.
_NO_TEXT = (NumericType, BooleanType)
_NO_VALUES = frozenset({str, bytes, list, tuple, dict, set})
# Rows that go to Spark at once.
_ROWS_MAX = 10_000


class KeyCaller(PerKeyCaller):
    """Calls a user's function for many keys."""

    def __init__(
        self,
        function: UserFunction,
        schema: RowSchema,
        state_type: StructType,
        columns: Sequence[str],
        output: OutputColumns,
        timezone: str,
        frame_rows_max: int,
    ) -> None:
        super().__init__(function, schema, state_type)
        self._columns = list(columns)
        self._output = output
        self._timezone = timezone
        self._rows_max = frame_rows_max
        # Of the calls that are being made, by position.
        self._keys: list[tuple[Any, ...]] = []
        self._copied = frozenset(() if output.type is None else changeable(output.type))

    # -- calling -----------------------------------------------------------------------------------

    def _data_calls(self, groups: Groups, before: list[tuple[Any, ...] | None]) -> Iterator[Call]:
        keys = self._keys = self._key_tuples(groups.raw_keys)
        return ((at, keys[at], pdfs, before[at]) for at, pdfs in self._frames(groups))

    def _timeout_calls(self, expired: pa.RecordBatch, before: list[tuple[Any, ...] | None]) -> Iterator[Call]:
        keys = self._keys = self._key_tuples(self._schema.key_columns(expired))
        return ((at, keys[at], [empty_frame(self._columns)], before[at]) for at in range(expired.num_rows))

    def _call(
        self, calls: Iterable[Call], timed_out: bool, context: CallContext, changes: Changes
    ) -> Iterator[pd.DataFrame]:
        function, output = self._function, self._output
        outputs = _Outputs(output, self._copied, self._timezone, lambda at: self._keys[at])
        clock, after_key = self._clock(context, timed_out, self._state_type), context.after_key
        note_position, note_value = changes.positions.append, self._value_noter(changes)
        note_timeout = changes.timeouts.append
        waiting, keep, keep_owner = outputs.waiting, outputs.waiting.append, outputs.waiting_owners.append
        for position, key, pdfs, before in _in_portions(calls):
            state = KeyState(before, clock)
            try:
                result = function(key, pdfs, state)
                # A generator it is nearly always, and need not be looked at.
                for item in result if type(result) is GeneratorType else checked_result(result):
                    if type(item) is pd.DataFrame and len(item):
                        keep(item)
                        keep_owner(position)
                        if len(waiting) >= _PORTION_KEYS:
                            yield from outputs.take_apart()
                    elif not isinstance(item, pd.DataFrame):
                        yield from outputs.add_rows(item, position)
                    elif len(item) or len(item.columns):
                        # Odd, at least: Spark shall judge it, and raise its own error.
                        outputs.check(item, position)
                        yield item
                if state.touched or state.timeout_ms != NO_TIMEOUT:
                    note_position(position)
                    note_value(state.value)
                    note_timeout(state.timeout_ms)
            except (Exception, SystemExit) as error:  # `sys.exit` too
                reraise(error, outputs.wrong_key or key, context, timed_out)
            after_key()
        try:
            yield from outputs.rest()
        except StateValueError as error:
            if outputs.wrong_key is None:
                raise
            reraise(error, outputs.wrong_key, context, timed_out)

    # -- frames ------------------------------------------------------------------------------------

    def _key_tuples(self, keys: Sequence[pa.Array]) -> list[tuple[Any, ...]]:
        try:
            return list(zip(*(key_scalars(key, self._timezone, SPARK_VERSION) for key in keys), strict=True))
        except (pa.ArrowException, ValueError, OverflowError):
            names = [field.name for field in self._schema.keys]
            self._refuse_times(names, keys, lambda row: tuple(shown(key, row) for key in keys))
            raise

    def _frame(self, rows: pa.Table, key_of: Callable[[int], tuple[Any, ...]]) -> pd.DataFrame:
        """Rows as a frame; `key_of` gives the key of a row, for an error."""
        try:
            return table_to_frame(rows, self._columns, self._timezone, SPARK_VERSION)
        except (pa.ArrowException, ValueError, OverflowError):
            self._refuse_times(self._columns, rows.columns, key_of)
            raise

    def _refuse_times(
        self, names: Sequence[str], columns: Sequence[Any], key_of: Callable[[int], tuple[Any, ...]]
    ) -> None:
        """Raise a StateValueError if a column has a time that frames do not hold."""
        for name, column in zip(names, columns, strict=True):
            at = first_beyond_pandas(column, self._timezone, SPARK_VERSION)
            if at is not None:
                raise StateValueError(
                    f"column {name!r} has the value {shown(column, at)} for key {shown_key(key_of(at))}, and pandas "
                    "holds times of the years 1678 to 2261 only: drop or cap such times before withWatermark, or use "
                    "apply_rows_with_state or apply_in_arrow_with_state, which take them"
                )

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
            yield at, self._pieces(groups.rows.slice(int(starts[at]), int(sizes[at])), self._keys[at])
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
            yield from zip(members.tolist(), self._split(rows, sizes[members], members), strict=True)

    def _split(self, rows: pa.Table, sizes: IndexArray, members: IndexArray) -> Iterator[Iterable[pd.DataFrame]]:
        ends = np.cumsum(sizes)
        whole = self._frame(rows, lambda row: self._keys[members[np.searchsorted(ends, row, side="right")]])
        if len(self._columns):
            # Makes pandas note where the columns lie, which the pieces inherit; else each piece finds out anew.
            whole.iloc[:, 0]
        indexes = {n: pd.RangeIndex(n) for n in np.unique(sizes).tolist()}
        # groupby cuts a frame several times faster than slicing it does.
        labels = np.repeat(np.arange(len(sizes)), sizes)
        for n, (_, frame) in zip(sizes.tolist(), whole.groupby(labels, sort=False), strict=True):
            # Its own: what a function does to it, such as naming it, must not show at other keys.
            frame.index = indexes[n].view()
            yield (f for f in (frame,))

    def _pieces(self, rows: pa.Table, key: tuple[Any, ...]) -> Iterator[pd.DataFrame]:
        step = min(self._rows_max, max(1, rows.num_rows * _FRAME_BYTES_MAX // max(1, rows.nbytes)))
        for offset in range(0, rows.num_rows, step):
            piece = rows.slice(offset, step)
            yield self._frame(piece, lambda row: key)


def _in_portions(calls: Iterable[Call]) -> Iterator[Call]:
    """The calls, prepared a portion at a time: making frames, calling and joining each go faster in a row."""
    calls = iter(calls)
    while portion := list(islice(calls, _PORTION_KEYS)):
        yield from portion


class _Outputs:
    """Frames and rows waiting to be joined.

    A small frame is taken apart at once, while it is in the processor's cache: joining many of them later would take
    longer than all else around the function. It goes with others whose columns are the same.
    """

    def __init__(
        self,
        output: OutputColumns,
        copied: frozenset[int],
        timezone: str = "UTC",
        key_of: Callable[[int], tuple[Any, ...]] = lambda at: (),
    ) -> None:
        self._key_of = key_of
        self._names = list(output.names)
        self._types = output.type
        self._copied = copied
        self._strict = output.strict
        self._timezone = timezone
        fields = [] if output.type is None else output.type.fields
        self._texts = {field.name: field for field in fields if isinstance(field.dataType, StringType)}
        self.waiting: list[pd.DataFrame] = []
        """Frames to be taken apart, whenever there are some; each has rows."""
        self.waiting_owners: list[int] = []
        """Which calls gave them."""
        self.wrong_key: tuple[Any, ...] | None = None
        """Whose frame was refused."""
        self._labels: Any = None
        self._columns: list[Any] = []
        self._rows: list[Any] = []
        # Which calls gave them, and where the rows of each begin, for errors. (As numbers: thousands of keys that are
        # held on to would cost the garbage collector more than the calls.)
        self._row_owners: list[int] = []
        self._row_starts: list[int] = []
        self._frames: list[pd.DataFrame] = []
        self._width = 0
        self._frame_rows = 0

    def take_apart(self) -> Iterator[pd.DataFrame]:
        """The frames that wait become rows, as far as they are small and plain; yields what is due."""
        frames, owners = self.waiting.copy(), self.waiting_owners.copy()
        self.waiting.clear()
        self.waiting_owners.clear()
        for at, frame in enumerate(frames):
            if len(frame) <= _SMALL_ROWS_MAX:
                if self._labels is None or not same_labels(frame.columns, self._labels):
                    self.check(frame, owners[at])
                    columns = list(frame.columns)
                    if not all(type(label) is str for label in columns):
                        yield from self._add_whole(frame, owners[at])
                        continue
                    yield from self._joined()
                    self._labels, self._columns = labels_of(frame.columns), columns
                rows = frame.to_numpy(dtype=object).tolist()
                for row in rows:
                    if not _PLAIN.issuperset(map(type, row)):
                        # What a column's type is made of, such as a unit of time, would be lost.
                        break
                else:
                    if self._frames:
                        yield from self._joined()
                    self._row_owners.append(owners[at])
                    self._row_starts.append(len(self._rows))
                    self._rows += rows
                    continue
            else:
                self.check(frame, owners[at])
            yield from self._add_whole(frame, owners[at])
        if len(self._rows) >= _ROWS_MAX:
            yield from self._joined()

    def check(self, frame: pd.DataFrame, owner: int) -> None:
        """Refuse a column that the output does not have, or that has no name. Spark would pass over it, and store NULL
        for the one that was meant: it joins a frame with the output's columns to it, and so never goes by places."""
        wrong = [label for label in frame.columns if label not in self._names] if self._strict else []
        if wrong:
            self.wrong_key = self._key_of(owner)
            raise StateValueError(
                f"the function gave a frame with the columns {', '.join(map(str, frame.columns))}; the output schema "
                f"has {', '.join(self._names)} and no {wrong[0]!r}: name it as there, or set strict_output=False for "
                "Spark's way, which is NULL"
            )

    def add_rows(self, item: Any, position: int) -> Iterator[pd.DataFrame]:
        """Take a row as tuple, several as a list of tuples, or a dict of columns; yields what is due. `position` says
        which call gave it."""
        # Frames that wait come first, as they were given first.
        if self.waiting or self._columns is not self._names:
            yield from self.rest()
            self._labels, self._columns = None, self._names
        self._row_owners.append(position)
        self._row_starts.append(len(self._rows))
        if isinstance(item, tuple):
            self._rows.append(self._row(item))
        elif isinstance(item, list):
            self._rows += [self._row(row) for row in item]
        elif not isinstance(item, Mapping):
            raise ResultTypeError(
                f"the function gave {short(item)} ({type(item).__name__}) for a row: return, or yield, one "
                f"tuple of {', '.join(self._names)} for each output row (one row alone as [row]), lists of such "
                "tuples, dicts of columns, or pandas.DataFrames"
            )
        else:
            if sorted(item) != sorted(self._names):
                raise ResultTypeError(
                    f"the function gave the columns {', '.join(map(str, item))}; expected {', '.join(self._names)}"
                )
            columns = [item[name] for name in self._names]
            if not _COLUMNS.issuperset(map(type, columns)):
                refuse_scalars(item, "the function gave", ", or a tuple for one row")
                columns = [column if hasattr(column, "__len__") else list(column) for column in columns]
            try:
                rows = zip(*columns, strict=True)
                self._rows += map(self._copy, rows) if self._copied else rows
            except ValueError:
                refuse_uneven(dict(zip(self._names, columns, strict=True)), "the function gave")
                raise
        if len(self._rows) >= _ROWS_MAX:
            yield from self.rest()

    def rest(self) -> Iterator[pd.DataFrame]:
        """All that waits."""
        yield from self.take_apart()
        yield from self._joined()

    def _joined(self) -> Iterator[pd.DataFrame]:
        """What has been taken apart, or was kept whole.

        Frames that were kept whole are each alone where their columns differ, as Spark judges each alone.
        """
        frames, self._frames, self._frame_rows = self._frames, [], 0
        if len(frames) > 1:
            # As Spark does; else whole numbers beside a NaN would be rounded, and times brought to one unit.
            objects = pd.DataFrame(columns=frames[0].columns, index=[])
            together = pd.concat([*frames, objects], ignore_index=True)
            frames = [together] if len(together.columns) == self._width else frames
        yield from frames
        if self._rows:
            rows, self._rows = self._rows, []
            if self._labels is None:
                self._refuse_values(rows)
            self._refuse_objects_as_text(rows)
            self._row_owners.clear()
            self._row_starts.clear()
            yield frame_of_rows(rows, self._columns, widen=NUMBERS_JOIN and self._labels is not None)

    def _refuse_values(self, rows: Sequence[Any]) -> None:
        """Refuse rows that were given as such for a value that Spark would fail to convert, without a word of the key.
        (What is in a frame goes to Spark as it is.)"""
        if self._types is None:
            return
        for values, field in zip(zip(*rows, strict=True), self._types.fields, strict=True):
            if isinstance(field.dataType, _NO_TEXT) and not _NO_VALUES.isdisjoint(map(type, values)):
                for at, value in enumerate(values):
                    if type(value) in _NO_VALUES and not is_converted(value, field):
                        self._refuse(field, value, self._owner_of(at), f", in the row {short(rows[at])}")

    def _refuse_objects_as_text(self, rows: Sequence[Any]) -> None:
        """Refuse rows with a value in a string column that is neither text nor a number."""
        for place, label in enumerate(self._columns):
            field = self._texts.get(label)
            if field is not None:
                at = first_without_text([row[place] for row in rows])
                if at is not None:
                    self._refuse(field, rows[at][place], self._owner_of(at), f", in the row {short(rows[at])}")

    def _owner_of(self, row: int) -> int:
        """Which call gave a row that waits."""
        return self._row_owners[bisect.bisect_right(self._row_starts, row) - 1]

    def _refuse(self, field: StructField, value: Any, owner: int, where: str = "") -> NoReturn:
        self.wrong_key = self._key_of(owner)
        raise ResultTypeError(
            f"output column {field.name!r} of type {field.dataType.simpleString()} cannot hold "
            f"{short(value)} ({type(value).__name__}){where}"
        )

    def _add_whole(self, frame: pd.DataFrame, owner: int) -> Iterator[pd.DataFrame]:
        frame = plain_frame(frame, self._types, self._timezone)
        for label in self._texts.keys() & set(frame.columns):
            values = frame[label]
            at = first_without_text(values) if isinstance(values, pd.Series) else None
            if at is not None:
                self._refuse(self._texts[label], values.iloc[at], owner, _MAKE_TEXT)
        if self._rows or (self._frames and len(frame.columns) != self._width):
            yield from self._joined()
        self._width = len(frame.columns)
        self._frames.append(frame)
        self._frame_rows += len(frame)
        if len(self._frames) >= _PORTION_KEYS or self._frame_rows >= _ROWS_MAX:
            yield from self._joined()

    def _row(self, row: Any) -> tuple[Any, ...]:
        if not isinstance(row, tuple) or len(row) != len(self._names):
            raise ResultTypeError(
                f"the function gave {short(row)} for a row; expected a tuple of {', '.join(self._names)}"
            )
        return self._copy(row) if self._copied else row

    def _copy(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """A row of its own, as rows wait for others. (Frames stay as they are, with Spark too.)"""
        return tuple([copy.deepcopy(value) if at in self._copied else value for at, value in enumerate(row)])


def as_frames(result: Any, output_type: StructType) -> Iterator[pd.DataFrame]:
    """What a user's function returned, all of it as frames; rows that come one after the other are in one."""
    outputs = _Outputs(OutputColumns(tuple(output_type.names)), frozenset(changeable(output_type)))
    for item in checked_result(result):
        if isinstance(item, pd.DataFrame):
            yield from outputs.rest()
            yield item
        else:
            yield from outputs.add_rows(item, 0)
    yield from outputs.rest()


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
