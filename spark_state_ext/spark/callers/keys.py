"""Call the user's function once per key, with pandas frames, as Spark does."""

from __future__ import annotations

import bisect
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import GeneratorType
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql.types import BooleanType, NumericType, StringType, StructField, StructType

from arrow_schemas.columns import format_value
from arrow_schemas.equality import IndexArray
from arrow_schemas.row import RowSchema
from spark_state_ext.errors import ResultTypeError, StateValueError
from spark_state_ext.functions.tables import refuse_scalars, refuse_uneven
from spark_state_ext.spark.callers.group_state import NO_TIMEOUT, KeyState
from spark_state_ext.spark.callers.groups import CallContext, Groups
from spark_state_ext.spark.callers.output_frames import (
    find_non_text,
    is_convertible,
    make_frame,
    replace_extension_columns,
)
from spark_state_ext.spark.callers.pandas_values import (
    compute_null_flags,
    convert_keys,
    find_beyond_pandas,
    make_empty_frame,
    table_to_frame,
)
from spark_state_ext.spark.callers.per_key import Call, Changes, PerKeyCaller, format_key, reraise
from spark_state_ext.spark.callers.results import OutputColumns, check_result, shorten
from spark_state_ext.spark.callers.state_values import find_mutable_columns
from spark_state_ext.spark.compat import (
    NUMBERS_JOIN,
    SPARK_VERSION,
    get_labels,
    has_labels,
)

__all__ = ["KeyCaller", "as_frames"]

UserFunction = Callable[[tuple[Any, ...], Iterable[pd.DataFrame], KeyState], Iterable[Any]]

_CONVERT_TO_TEXT = ": it is neither text nor a number; convert it to text in the function"
# Number of keys whose frames are made and joined together. Spark would join thousands, which leave the CPU cache.
_PORTION_KEYS = 32
# A larger group of one key comes in several frames, as from Spark.
_FRAME_BYTES_MAX = 1 << 30
# Frames of at most this many rows are split into rows, if all values have these types.
_SMALL_ROWS_MAX = 8
_PLAIN_TYPES = frozenset({int, float, bool, str, bytes, type(None)})
# Types of nearly all columns in dicts; others are checked.
_COLUMN_TYPES = frozenset({list, tuple, pd.Series})
# Types of columns that do not hold text, and types of values that these columns do not hold.
_TEXTLESS_COLUMNS = (NumericType, BooleanType)
_TEXTLESS_REFUSES = frozenset({str, bytes, list, tuple, dict, set})
# Number of rows that go to Spark at once.
_ROWS_MAX = 10_000


class KeyCaller(PerKeyCaller):
    """Calls a user's function once for each of many keys, with pandas frames."""

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
        # Keys of the current calls, by position.
        self._keys: list[tuple[Any, ...]] = []
        self._mutable_columns = frozenset(() if output.type is None else find_mutable_columns(output.type))

    # -- calling -----------------------------------------------------------------------------------

    def _prepare_data_calls(self, groups: Groups, before: list[tuple[Any, ...] | None]) -> Iterator[Call]:
        keys = self._keys = self._make_key_tuples(groups.raw_keys)
        return ((at, keys[at], pdfs, before[at]) for at, pdfs in self._make_frames(groups))

    def _prepare_timeout_calls(self, expired: pa.RecordBatch, before: list[tuple[Any, ...] | None]) -> Iterator[Call]:
        keys = self._keys = self._make_key_tuples(self._schema.key_columns(expired))
        return ((at, keys[at], [make_empty_frame(self._columns)], before[at]) for at in range(expired.num_rows))

    def _run_calls(
        self, calls: Iterable[Call], timed_out: bool, context: CallContext, changes: Changes
    ) -> Iterator[pd.DataFrame]:
        function, output = self._function, self._output
        outputs = _Outputs(output, self._mutable_columns, self._timezone, lambda at: self._keys[at])
        clock, after_key = self._make_clock(context, timed_out, self._state_type), context.after_key
        record_position, record_value = changes.positions.append, self._make_value_recorder(changes)
        record_timeout = changes.timeouts.append
        waiting, add_waiting, add_owner = outputs.waiting, outputs.waiting.append, outputs.waiting_owners.append
        for position, key, pdfs, before in _prepare_in_portions(calls):
            state = KeyState(before, clock)
            try:
                result = function(key, pdfs, state)
                # It is nearly always a generator, which needs no check.
                for item in result if type(result) is GeneratorType else check_result(result):
                    if type(item) is pd.DataFrame and len(item):
                        add_waiting(item)
                        add_owner(position)
                        if len(waiting) >= _PORTION_KEYS:
                            yield from outputs.split_waiting()
                    elif not isinstance(item, pd.DataFrame):
                        yield from outputs.add_rows(item, position)
                    elif len(item) or len(item.columns):
                        # An unusual frame: Spark checks it, and raises its own error.
                        outputs.check(item, position)
                        yield item
                if state.touched or state.timeout_ms != NO_TIMEOUT:
                    record_position(position)
                    record_value(state.value)
                    record_timeout(state.timeout_ms)
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

    def _make_key_tuples(self, keys: Sequence[pa.Array]) -> list[tuple[Any, ...]]:
        try:
            return list(zip(*(convert_keys(key, self._timezone, SPARK_VERSION) for key in keys), strict=True))
        except (pa.ArrowException, ValueError, OverflowError):
            names = [field.name for field in self._schema.keys]
            self._refuse_far_times(names, keys, lambda row: tuple(format_value(key, row) for key in keys))
            raise

    def _make_frame(self, rows: pa.Table, key_of: Callable[[int], tuple[Any, ...]]) -> pd.DataFrame:
        """Return rows as a frame; `key_of` returns the key of a row, for an error."""
        try:
            return table_to_frame(rows, self._columns, self._timezone, SPARK_VERSION)
        except (pa.ArrowException, ValueError, OverflowError):
            self._refuse_far_times(self._columns, rows.columns, key_of)
            raise

    def _refuse_far_times(
        self, names: Sequence[str], columns: Sequence[Any], key_of: Callable[[int], tuple[Any, ...]]
    ) -> None:
        """Raise a StateValueError if a column has a time that pandas cannot hold."""
        for name, column in zip(names, columns, strict=True):
            at = find_beyond_pandas(column, self._timezone, SPARK_VERSION)
            if at is not None:
                raise StateValueError(
                    f"column {name!r} has the value {format_value(column, at)} for key {format_key(key_of(at))}, and "
                    "pandas holds times of the years 1678 to 2261 only: drop or cap such times before withWatermark, "
                    "or use apply_rows_with_state or apply_in_arrow_with_state, which take them"
                )

    def _make_frames(self, groups: Groups) -> Iterator[tuple[int, Iterable[pd.DataFrame]]]:
        """Yield each key's position and frames, with the dtypes that the key's rows have alone.

        Keys are converted together only if all columns whose dtype depends on NULLs have the same pattern of NULLs.
        """
        starts, total = groups.starts, groups.rows.num_rows
        ends = np.append(starts[1:], total)
        sizes = ends - starts
        large = sizes > self._rows_max
        if groups.count == 1 and groups.rows.nbytes > _FRAME_BYTES_MAX:
            large[:] = True
        for at in np.flatnonzero(large).tolist():
            yield at, self._make_pieces(groups.rows.slice(int(starts[at]), int(sizes[at])), self._keys[at])
        if large.all():
            return
        patterns = _compute_null_patterns(groups.rows, starts)
        for pattern in np.unique(patterns[~large]).tolist():
            positions = np.flatnonzero((patterns == pattern) & ~large)
            if len(positions) == groups.count:
                rows = groups.rows
            else:
                selected = np.zeros(groups.count, dtype=np.bool_)
                selected[positions] = True
                rows = groups.rows.filter(pa.array(np.repeat(selected, sizes)))
            yield from zip(positions.tolist(), self._split_frame(rows, sizes[positions], positions), strict=True)

    def _split_frame(
        self, rows: pa.Table, sizes: IndexArray, positions: IndexArray
    ) -> Iterator[Iterable[pd.DataFrame]]:
        ends = np.cumsum(sizes)
        whole = self._make_frame(rows, lambda row: self._keys[positions[np.searchsorted(ends, row, side="right")]])
        if len(self._columns):
            # This makes pandas cache column positions, which the pieces inherit; else each piece computes them again.
            whole.iloc[:, 0]
        indexes = {n: pd.RangeIndex(n) for n in np.unique(sizes).tolist()}
        # groupby splits a frame several times faster than slicing.
        labels = np.repeat(np.arange(len(sizes)), sizes)
        for n, (_, frame) in zip(sizes.tolist(), whole.groupby(labels, sort=False), strict=True):
            # A separate index: a change by the function, such as naming it, must not affect other keys.
            frame.index = indexes[n].view()
            yield (f for f in (frame,))

    def _make_pieces(self, rows: pa.Table, key: tuple[Any, ...]) -> Iterator[pd.DataFrame]:
        step = min(self._rows_max, max(1, rows.num_rows * _FRAME_BYTES_MAX // max(1, rows.nbytes)))
        for offset in range(0, rows.num_rows, step):
            piece = rows.slice(offset, step)
            yield self._make_frame(piece, lambda row: key)


def _prepare_in_portions(calls: Iterable[Call]) -> Iterator[Call]:
    """Yield the calls, prepared in portions: making frames, calling and joining are each faster in a batch."""
    calls = iter(calls)
    while portion := list(islice(calls, _PORTION_KEYS)):
        yield from portion


class _Outputs:
    """Output frames and rows that wait to be joined.

    A small frame is split into rows at once, while it is in the CPU cache: joining many small frames later would take
    longer than everything else around the function. Rows of frames with the same columns are joined.
    """

    def __init__(
        self,
        output: OutputColumns,
        mutable_columns: frozenset[int],
        timezone: str = "UTC",
        key_of: Callable[[int], tuple[Any, ...]] = lambda at: (),
    ) -> None:
        self._key_of = key_of
        self._names = list(output.names)
        self._types = output.type
        self._mutable_columns = mutable_columns
        self._strict = output.strict
        self._timezone = timezone
        fields = [] if output.type is None else output.type.fields
        self._texts = {field.name: field for field in fields if isinstance(field.dataType, StringType)}
        self.waiting: list[pd.DataFrame] = []
        """Non-empty frames that `split_waiting` has yet to split into rows."""
        self.waiting_owners: list[int] = []
        """Position of the call that returned each of these frames."""
        self.wrong_key: tuple[Any, ...] | None = None
        """Key whose output was refused."""
        self._labels: Any = None
        self._columns: list[Any] = []
        self._rows: list[Any] = []
        # Which calls returned the rows, and where the rows of each call begin, for errors. (As numbers: the garbage
        # collector would take longer for thousands of keys than the calls take.)
        self._row_owners: list[int] = []
        self._row_starts: list[int] = []
        self._frames: list[pd.DataFrame] = []
        self._width = 0
        self._frame_rows = 0

    def split_waiting(self) -> Iterator[pd.DataFrame]:
        """Split the waiting frames into rows if they are small and plain; yield the frames that are due."""
        frames, owners = self.waiting.copy(), self.waiting_owners.copy()
        self.waiting.clear()
        self.waiting_owners.clear()
        for at, frame in enumerate(frames):
            if len(frame) <= _SMALL_ROWS_MAX:
                if self._labels is None or not has_labels(frame.columns, self._labels):
                    self.check(frame, owners[at])
                    columns = list(frame.columns)
                    if not all(type(label) is str for label in columns):
                        yield from self._add_whole(frame, owners[at])
                        continue
                    yield from self._join_waiting()
                    self._labels, self._columns = get_labels(frame.columns), columns
                rows = frame.to_numpy(dtype=object).tolist()
                for row in rows:
                    if not _PLAIN_TYPES.issuperset(map(type, row)):
                        # The column's dtype, such as the unit of its times, would be lost.
                        break
                else:
                    if self._frames:
                        yield from self._join_waiting()
                    self._row_owners.append(owners[at])
                    self._row_starts.append(len(self._rows))
                    self._rows += rows
                    continue
            else:
                self.check(frame, owners[at])
            yield from self._add_whole(frame, owners[at])
        if len(self._rows) >= _ROWS_MAX:
            yield from self._join_waiting()

    def check(self, frame: pd.DataFrame, owner: int) -> None:
        """Refuse a column that the output does not have, or that has no name.

        Spark would ignore it and store NULL in the intended column: it joins frames with a frame that has the output's
        columns, and so always matches columns by name.
        """
        wrong = [label for label in frame.columns if label not in self._names] if self._strict else []
        if wrong:
            self.wrong_key = self._key_of(owner)
            raise StateValueError(
                f"the function gave a frame with the columns {', '.join(map(str, frame.columns))}; the output schema "
                f"has {', '.join(self._names)} and no {wrong[0]!r}: rename it, or set strict_output=False to get NULL, "
                "as Spark does"
            )

    def add_rows(self, item: Any, position: int) -> Iterator[pd.DataFrame]:
        """Add a row (a tuple), several (a list of tuples) or a dict of columns; yield the frames that are due.

        `position` is the position of the call that returned the item.
        """
        # Waiting frames go first, because they were returned first.
        if self.waiting or self._columns is not self._names:
            yield from self.rest()
            self._labels, self._columns = None, self._names
        self._row_owners.append(position)
        self._row_starts.append(len(self._rows))
        if isinstance(item, tuple):
            self._rows.append(self._check_row(item))
        elif isinstance(item, list):
            self._rows += [self._check_row(row) for row in item]
        elif not isinstance(item, Mapping):
            raise ResultTypeError(
                f"the function gave {shorten(item)} ({type(item).__name__}) for a row: return, or yield, one "
                f"tuple of {', '.join(self._names)} for each output row (one row alone as [row]), lists of such "
                "tuples, dicts of columns, or pandas.DataFrames"
            )
        else:
            if sorted(item) != sorted(self._names):
                raise ResultTypeError(
                    f"the function gave the columns {', '.join(map(str, item))}; expected {', '.join(self._names)}"
                )
            columns = [item[name] for name in self._names]
            if not _COLUMN_TYPES.issuperset(map(type, columns)):
                refuse_scalars(item, "the function gave", ", or a tuple for one row")
                columns = [column if hasattr(column, "__len__") else list(column) for column in columns]
            try:
                rows = zip(*columns, strict=True)
                self._rows += map(self._copy, rows) if self._mutable_columns else rows
            except ValueError:
                refuse_uneven(dict(zip(self._names, columns, strict=True)), "the function gave")
                raise
        if len(self._rows) >= _ROWS_MAX:
            yield from self.rest()

    def rest(self) -> Iterator[pd.DataFrame]:
        """Yield everything that waits."""
        yield from self.split_waiting()
        yield from self._join_waiting()

    def _join_waiting(self) -> Iterator[pd.DataFrame]:
        """Yield the whole frames, joined if their columns are the same, and then the split rows.

        Frames with different columns stay separate, because Spark checks each frame alone.
        """
        frames, self._frames, self._frame_rows = self._frames, [], 0
        if len(frames) > 1:
            # As Spark does; else whole numbers next to a NaN would be rounded, and times converted to one unit.
            objects = pd.DataFrame(columns=frames[0].columns, index=[])
            with warnings.catch_warnings():
                # Of pandas 2, about columns without values; Spark's worker does the same.
                warnings.simplefilter("ignore", FutureWarning)
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
            yield make_frame(rows, self._columns, widen=NUMBERS_JOIN and self._labels is not None)

    def _refuse_values(self, rows: Sequence[Any]) -> None:
        """Refuse tuples with a value that Spark would fail to convert: Spark's error would not name the key.

        (Frames go to Spark unchecked.)
        """
        if self._types is None:
            return
        for values, field in zip(zip(*rows, strict=True), self._types.fields, strict=True):
            if isinstance(field.dataType, _TEXTLESS_COLUMNS) and not _TEXTLESS_REFUSES.isdisjoint(map(type, values)):
                for at, value in enumerate(values):
                    if type(value) in _TEXTLESS_REFUSES and not is_convertible(value, field):
                        self._raise_misfit(field, value, self._find_owner(at), f", in the row {shorten(rows[at])}")

    def _refuse_objects_as_text(self, rows: Sequence[Any]) -> None:
        """Refuse rows that have a value in a string column that is neither text nor a number."""
        for place, label in enumerate(self._columns):
            field = self._texts.get(label)
            if field is not None:
                at = find_non_text([row[place] for row in rows])
                if at is not None:
                    self._raise_misfit(
                        field, rows[at][place], self._find_owner(at), f", in the row {shorten(rows[at])}"
                    )

    def _find_owner(self, row: int) -> int:
        """Return the position of the call that returned a waiting row."""
        return self._row_owners[bisect.bisect_right(self._row_starts, row) - 1]

    def _raise_misfit(self, field: StructField, value: Any, owner: int, where: str = "") -> NoReturn:
        self.wrong_key = self._key_of(owner)
        raise ResultTypeError(
            f"output column {field.name!r} of type {field.dataType.simpleString()} cannot hold "
            f"{shorten(value)} ({type(value).__name__}){where}"
        )

    def _add_whole(self, frame: pd.DataFrame, owner: int) -> Iterator[pd.DataFrame]:
        frame = replace_extension_columns(frame, self._types, self._timezone)
        for label in self._texts.keys() & set(frame.columns):
            values = frame[label]
            at = find_non_text(values) if isinstance(values, pd.Series) else None
            if at is not None:
                self._raise_misfit(self._texts[label], values.iloc[at], owner, _CONVERT_TO_TEXT)
        if self._rows or (self._frames and len(frame.columns) != self._width):
            yield from self._join_waiting()
        self._width = len(frame.columns)
        self._frames.append(frame)
        self._frame_rows += len(frame)
        if len(self._frames) >= _PORTION_KEYS or self._frame_rows >= _ROWS_MAX:
            yield from self._join_waiting()

    def _check_row(self, row: Any) -> tuple[Any, ...]:
        if not isinstance(row, tuple) or len(row) != len(self._names):
            raise ResultTypeError(
                f"the function gave {shorten(row)} for a row; expected a tuple of {', '.join(self._names)}"
            )
        return self._copy(row) if self._mutable_columns else row

    def _copy(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """Copy a row, because the function may change it while it waits. (Frames are not copied, as in Spark.)"""
        return tuple([copy.deepcopy(value) if at in self._mutable_columns else value for at, value in enumerate(row)])


def as_frames(result: Any, output_type: StructType) -> Iterator[pd.DataFrame]:
    """Return a user function's result as frames; consecutive rows are in one frame."""
    outputs = _Outputs(OutputColumns(tuple(output_type.names)), frozenset(find_mutable_columns(output_type)))
    for item in check_result(result):
        if isinstance(item, pd.DataFrame):
            yield from outputs.rest()
            yield item
        else:
            yield from outputs.add_rows(item, 0)
    yield from outputs.rest()


def _compute_null_patterns(rows: pa.Table, starts: IndexArray) -> IndexArray:
    """Return one number for each key: equal for keys whose columns get the same dtypes."""
    patterns: IndexArray = np.zeros(len(starts), dtype=np.int64)
    if not len(starts):
        return patterns
    for column in rows.columns:
        for flags in compute_null_flags(column):
            if flags.any():
                bits = np.logical_or.reduceat(flags, starts)
                # Renumbered after each column, so that any number of columns fits.
                patterns = np.unique(patterns * 2 + bits, return_inverse=True)[1].astype(np.int64)
    return patterns
