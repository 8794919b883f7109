"""`StateBatch`, the argument of a vectorised function: Arrow tables in, Arrow tables out, no Spark and no pandas.

A function may return anything with Arrow's C stream (PyArrow, polars, a DuckDB result), and such libraries read the
tables here without a copy.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.columns import aggregate_groups, combine_chunks, format_row
from arrow_schemas.equality import BoolArray, IndexArray
from arrow_schemas.row import normalise_array
from spark_state_ext.errors import StateValueError, UsageError
from spark_state_ext.functions.arguments import copy_table, to_mask, to_milliseconds
from spark_state_ext.functions.key_match import find_keys, hold_floats, nan_is_null, positions_without_nan
from spark_state_ext.functions.outcome import NO_TIMEOUT, Outcome
from spark_state_ext.functions.overflow import find_overflow
from spark_state_ext.functions.tables import as_table, cast_column, is_table, refuse_nulls, refuse_scalars

__all__ = ["StateBatch"]

# Aggregates that are 0, and not NULL, without rows.
_COUNTS = frozenset({"count", "count_all", "count_distinct"})
_TIME_MS_MAX = 2**63 - 1


class StateBatch:
    """The rows of a bucket in a micro-batch, by key, and the state of these keys.

    A function gets one for each bucket that has rows, or keys that time out. It gets several for a bucket, with
    different keys, if one would take too much memory. You can make one yourself to test a function; its arguments are
    not checked.

    Parameters
    ----------
    rows, keys, state, exists, watermark_ms, processing_time_ms, bucket, batch_id
        As the attributes below. `rows` must be grouped by key, in the order of `keys`.
    starts : numpy.ndarray
        Where the rows of each key with rows begin in `rows`: int64, one for each such key, ascending, the first one 0.
        The remaining keys time out.
    timeout_conf : str
        ``"NoTimeout"``, ``"ProcessingTimeTimeout"`` or ``"EventTimeTimeout"``: which argument `set_timeout` takes.
    scan : callable
        A function without arguments that returns the tables of `scan()` as an iterator. Default: no tables.

    Attributes
    ----------
    rows : pyarrow.Table
        The input rows, all columns. Rows of a key are adjacent, in the order in which they arrived at the bucket.
        Timestamps are microseconds, with zone UTC or without zone.
    keys : pyarrow.Table
        The distinct keys, one row each: first keys with rows, in the order of `rows`, then keys that time out. Keys
        have their stored form: ``-0.0`` is ``0.0``.
    state : pyarrow.Table
        The state columns, one row for each key; NULL for keys without state.
    exists : pyarrow.BooleanArray
        Which keys have state. (State may consist of NULLs.)
    timed_out : pyarrow.BooleanArray
        Which keys are here because their timeout is over; they have no rows.
    group_ids : pyarrow.Int64Array
        Position in `keys` of each row's key; ascending.
    offsets : pyarrow.Int32Array
        Where each key's rows begin, followed by the number of rows, as in an Arrow list:
        ``pa.ListArray.from_arrays(batch.offsets, column)`` has one list of values for each key.
    watermark_ms : int or None
        The batch's watermark, milliseconds since 1970; None for a query without one.
    processing_time_ms : int
        The batch's processing time, milliseconds since 1970; the same when the batch is run again.
    bucket, batch_id : int
        Which bucket this is, and Spark's number of the batch.
    """

    def __init__(
        self,
        *,
        rows: pa.Table,
        keys: pa.Table,
        state: pa.Table,
        exists: pa.BooleanArray,
        starts: IndexArray,
        watermark_ms: int | None,
        processing_time_ms: int,
        timeout_conf: str = "NoTimeout",
        bucket: int = 0,
        batch_id: int = 0,
        scan: Callable[[], Iterator[pa.Table]] = lambda: iter(()),
    ) -> None:
        self.rows = rows
        self.keys = keys
        # A key without state has NULL in every column, even in columns declared NOT NULL.
        self.state = pa.table(state.columns, schema=pa.schema([field.with_nullable(True) for field in state.schema]))
        self.exists = exists if not exists.null_count else pc.fill_null(exists, False)
        self.watermark_ms = watermark_ms
        self.processing_time_ms = processing_time_ms
        self.bucket = bucket
        self.batch_id = batch_id
        self._fields = list(state.schema)
        self._timeout_conf = timeout_conf
        self._scan = scan
        self._with_rows = len(starts)
        ends = np.append(starts, rows.num_rows)
        self._sizes: IndexArray = np.zeros(keys.num_rows, dtype=np.int64)
        self._sizes[: len(starts)] = np.diff(ends)
        self.offsets = pa.array(
            np.concatenate([ends, np.full(keys.num_rows - len(starts), rows.num_rows)]).astype(np.int32)
        )
        self.timed_out = pa.array(np.arange(keys.num_rows) >= len(starts))
        self.outcome = Outcome(keys.num_rows)
        self._ids: pa.Array | None = None

    def __repr__(self) -> str:
        return (
            f"StateBatch({self.rows.num_rows} rows of {self._with_rows} keys, "
            f"{self.keys.num_rows - self._with_rows} keys timed out, bucket {self.bucket}, batch {self.batch_id})"
        )

    def __len__(self) -> int:
        return int(self.keys.num_rows)

    # -- reading -----------------------------------------------------------------------------------

    @property
    def group_ids(self) -> pa.Int64Array:
        """Position in `keys` of each row's key."""
        if self._ids is None:
            self._ids = pa.array(np.repeat(np.arange(len(self._sizes)), self._sizes))
        return self._ids

    @property
    def counts(self) -> pa.Int64Array:
        """Number of rows of each key; 0 for keys that timed out."""
        return pa.array(self._sizes)

    def aggregate(self, aggregations: Sequence[Any]) -> pa.Table:
        """Aggregate the rows of each key.

        Parameters
        ----------
        aggregations
            As for `pyarrow.TableGroupBy.aggregate`: ``[("value", "sum"), ("value", "max"), ([], "count_all")]``.

        Returns
        -------
        pyarrow.Table
            One row for each key, in the order of `keys`; columns are named as PyArrow names them (``value_sum``). Keys
            that timed out have the result of zero rows: NULL, and 0 for counts.

        Raises
        ------
        StateValueError
            If `rows` has no column of that name, two of them, or one whose name begins with a dot; if PyArrow does not
            have the function, or not for a column of that type; and if a sum, product or mean of integers or decimals
            is beyond its type (PyArrow would wrap).
        """
        requests, group = list(aggregations), "__group"
        for columns, *_ in requests:
            self._refuse_unknown([columns] if isinstance(columns, str) else columns, "aggregate()")
        while group in self.rows.column_names:
            group += "_"
        table = self.rows.append_column(group, self.group_ids)
        try:
            results = aggregate_groups(table, group, requests).drop_columns([group])
        except (pa.ArrowInvalid, pa.ArrowKeyError, pa.ArrowNotImplementedError) as error:
            # Only errors of the request; not memory that ran out.
            raise StateValueError(f"aggregate() was given what PyArrow cannot do: {error}") from error
        for (columns, function, *_), column in zip(requests, results.columns, strict=True):
            self._refuse_overflow(columns, function, column)
        timed_out = self.keys.num_rows - self._with_rows
        if not timed_out:
            return results
        empty_columns = [
            pa.array(np.zeros(timed_out), column.type)
            if aggregation[1].removeprefix("hash_") in _COUNTS
            else pa.nulls(timed_out, column.type)
            for aggregation, column in zip(requests, results.columns, strict=True)
        ]
        return pa.concat_tables([results, pa.table(empty_columns, schema=results.schema)])

    def lists(self, column: str) -> pa.ListArray:
        """Return the values of a column as one list for each key, without a copy.

        Parameters
        ----------
        column
            Name of a column of `rows`.

        Returns
        -------
        pyarrow.ListArray
            One list for each key, in the order of `keys`; empty for keys that timed out.

        Raises
        ------
        StateValueError
            If `rows` has no column of that name, or two.
        UnsupportedTypeError
            If text, bytes or lists have more than 2 GiB.
        """
        self._refuse_unknown([column], "lists()")
        return pa.ListArray.from_arrays(self.offsets, combine_chunks(self.rows.column(column)))

    def with_state(self, columns: Mapping[str, Any] | None = None) -> pa.Table:
        """Return one table of the keys, their state, and more columns if given.

        If keys and state have a column of the same name, the table has the keys' column; `state` has the other one.

        Parameters
        ----------
        columns
            More columns, or replacements for state columns, as in polars' ``with_columns``: one value for each key.

        Returns
        -------
        pyarrow.Table
            One row for each key, in the order of `keys`: the key columns, the state columns, and then the new columns.

        Raises
        ------
        StateValueError
            If they are not columns of one value for each key, or have a key column's name.
        """
        columns = columns or {}
        refuse_scalars(columns, "with_state() was given")
        names = self.keys.column_names
        if not columns.keys().isdisjoint(names):
            raise StateValueError(
                f"with_state() was given a column {min(columns.keys() & set(names))!r}, which is a key column: give it "
                "another name"
            )
        state = self.state.select([name for name in self.state.column_names if name not in names])
        table = pa.table([*self.keys.columns, *state.columns], names=[*names, *state.column_names])
        more = as_table(columns, "with_state() was given")
        if columns and more.num_rows != len(self):
            raise StateValueError(
                f"with_state() was given columns of {more.num_rows} values, for {len(self)} keys: give one for each"
            )
        for name, column in zip(more.column_names, more.columns, strict=True):
            at = table.schema.get_field_index(name)
            table = table.append_column(name, column) if at < 0 else table.set_column(at, name, column)
        return table

    def scan(self) -> Iterator[pa.Table]:
        """Read the whole bucket as it was before this batch, table by table, during the iteration.

        Memory stays bounded, however large the bucket is.

        Returns
        -------
        iterator of pyarrow.Table
            Each has the key columns and then the state columns, one row for each key with state.
        """
        return self._scan()

    # -- changing ----------------------------------------------------------------------------------

    def update(self, states: Any, where: Any = None, *, by_key: bool = True) -> None:
        """Set the state of keys. As with Spark's `GroupState`, this clears a timeout that is not set again.

        Parameters
        ----------
        states
            A table, record batch, mapping of columns, polars DataFrame or anything else with Arrow's C stream, in one
            of three forms: one row for each key of the batch, in their order; with `where`, one row for each key or
            one for each selected key; or, with all key columns and the state columns, one row for any of the batch's
            keys, in any order. A column that has the name of a key column and of a state column is both.
            NaN in a frame of pandas is NULL, as Arrow reads it. As a key it matches NaN or NULL, whichever the batch
            has; if the batch has both, the call is refused.
        where
            Mask over the keys: which keys to update. Default: all.
        by_key
            False: the rows are in the order of the keys and have the state columns only. For state with columns that
            have the names of all key columns, but hold something else.

        Raises
        ------
        StateValueError
            If columns are missing or too many, a value does not fit its column, or a key is not in this batch; or if
            `where` is not one boolean for each key.
        UsageError
            If the function has returned already.
        """
        table = as_table(states, "update() was given")
        names = self.state.column_names
        columns_given, key_names = set(table.column_names), set(self.keys.column_names)
        # Also if state columns have the keys' names: rows by key, read in the keys' order, would go to other keys.
        by_key = by_key and columns_given >= key_names
        if columns_given != {*names, *(key_names if by_key else ())} or len(columns_given) < table.num_columns:
            raise StateValueError(
                f"update() was given the columns {', '.join(table.column_names) or '(none)'}; it takes the state "
                f"columns ({', '.join(names)}), or these and the key columns ({', '.join(self.keys.column_names)})"
            )
        hint = " (by_key=False takes rows in the order of the keys)" if key_names <= set(names) else ""
        positions = self._find_positions(table, states, "update()", hint) if by_key else None
        columns = [cast_column(table.column(field.name), field, "state column") for field in self._fields]
        new = pa.table(columns, schema=self.state.schema)
        if positions is None:
            selected = None if where is None else self._select_positions(where)
            positions, new = self._align_rows(new, selected)
        elif where is not None:
            keep = to_mask(where, len(self))[positions]
            positions, new = positions[keep], new.filter(pa.array(keep))
        for column, field in zip(new.columns, self._fields, strict=True):
            refuse_nulls(column, field, "state column")
        self.outcome.put(positions, copy_table(new))

    def remove(self, which: Any = True) -> None:
        """Remove the state of keys.

        Parameters
        ----------
        which
            Mask over the keys, or a table of keys; True: all keys of the batch.

        Raises
        ------
        StateValueError
            If a mask is not one boolean for each key, or if a table is missing key columns, has a key twice or has one
            that is not in this batch.
        UsageError
            If the function has returned already.
        """
        if which is True:
            self.outcome.drop(np.arange(len(self)))
        elif is_table(which):
            self.outcome.drop(self._find_positions(as_table(which, "remove() was given"), which, "remove()"))
        else:
            self.outcome.drop(np.flatnonzero(to_mask(which, len(self))))

    def set_timeout(self, *, timestamp_ms: Any = None, duration_ms: Any = None, where: Any = None) -> None:
        """Set when keys time out, unless their state changes before; then they are in a batch with `timed_out` set.

        Give one time, or an array of one for each key or for each selected key; NULL for no timeout. Instead of
        milliseconds, give timestamps (UTC if they have no zone), durations or a `timedelta`.

        Parameters
        ----------
        timestamp_ms
            Under EventTimeTimeout: the key times out when the watermark is past this, milliseconds since 1970. A time
            before the watermark counts as the watermark, so the key times out at its next advance: rows that are on
            time can lead to such a time if the watermark has moved far in between.
        duration_ms
            Under ProcessingTimeTimeout: the key times out this many milliseconds from now.
        where
            Mask over the keys: which keys to set. Default: all.

        Raises
        ------
        UsageError
            If the query has another kind of timeout, or the function has returned already.
        StateValueError
            If a timestamp or duration is not positive, or ends past what 64 bits hold; the error names the key. Also if
            values are not times, or not one for each key, and if `where` is not one boolean for each key.
        """
        event_time = self._timeout_conf == "EventTimeTimeout"
        times_given, other = (timestamp_ms, duration_ms) if event_time else (duration_ms, timestamp_ms)
        if self._timeout_conf == "NoTimeout" or times_given is None or other is not None:
            raise UsageError(
                f"set_timeout() under {self._timeout_conf} takes "
                + {"EventTimeTimeout": "timestamp_ms", "ProcessingTimeTimeout": "duration_ms"}.get(
                    self._timeout_conf, "nothing: give timeout_conf='EventTimeTimeout' or 'ProcessingTimeTimeout'"
                )
            )
        positions = np.arange(len(self)) if where is None else self._select_positions(where)
        times, is_set = self._read_times(times_given, event_time, positions)
        what = "timestamp" if event_time else "duration"
        self._refuse_times(is_set & (times < 1), times, positions, f"a {what} must be positive")
        if not event_time:
            too_long = is_set & (times > _TIME_MS_MAX - self.processing_time_ms)
            why = (
                f"that long after {self.processing_time_ms}, the batch's processing time, is past the last millisecond "
                "that 64 bits hold; give a shorter duration, or NULL for no timeout"
            )
            self._refuse_times(too_long, times, positions, why)
        times = np.maximum(times, self.watermark_ms or 0) if event_time else times + self.processing_time_ms
        self.outcome.time_out(positions, np.where(is_set, times, NO_TIMEOUT))

    # -- inside ------------------------------------------------------------------------------------

    def _refuse_unknown(self, names: Sequence[str], call: str) -> None:
        names_of_rows = self.rows.column_names
        for name in names:
            if name not in names_of_rows:
                raise StateValueError(f"{call} was given the column {name!r}; the rows have {', '.join(names_of_rows)}")
            if names_of_rows.count(name) > 1:
                raise StateValueError(f"{call} was given the column {name!r}; the rows have two of that name")

    def _refuse_overflow(self, columns: Any, function: str, results: pa.ChunkedArray) -> None:
        column = columns if isinstance(columns, str) else next(iter(columns), None)
        if column is None:
            return
        at = find_overflow(self.rows.column(column), self._sizes[: self._with_rows], function, results)
        if at is not None:
            key = format_row(self.keys.column_names, self.keys.columns, at)
            raise StateValueError(
                f"aggregate() was asked for the {function} of {column!r}; for key {key} it does not fit "
                f"{results.type}: cast the column to a wider decimal or to double in the query"
            )

    def _select_positions(self, where: Any) -> IndexArray:
        return np.flatnonzero(to_mask(where, len(self)))

    def _align_rows(self, new: pa.Table, selected: IndexArray | None) -> tuple[IndexArray | None, pa.Table]:
        """Return the positions to update (None: all) and the rows for them."""
        if selected is None or len(selected) == len(self):
            if new.num_rows != len(self):
                raise StateValueError(f"update() was given {new.num_rows} rows and the batch has {len(self)} keys")
            return None, new
        if new.num_rows == len(self):
            return selected, new.take(pa.array(selected))
        if new.num_rows != len(selected):
            raise StateValueError(
                f"update() was given {new.num_rows} rows; the batch has {len(self)} keys, and `where` selects "
                f"{len(selected)}"
            )
        return selected, new

    def _find_positions(self, table: pa.Table, source: Any, call: str, hint: str = "") -> IndexArray:
        names = self.keys.column_names
        if not set(names) <= set(table.column_names):
            raise StateValueError(
                f"{call} needs the key columns {', '.join(names)}, not {', '.join(table.column_names)}"
            )
        doubled = [name for name in names if names.count(name) > 1 or table.column_names.count(name) > 1]
        if doubled:
            raise StateValueError(
                f"{call} cannot find rows by key, because two key columns are called {doubled[0]!r}: give rows in the "
                f"order of the keys, and select with a mask{hint}"
            )
        own_keys = [combine_chunks(column) for column in self.keys.columns]
        searched = []
        for field in self.keys.schema:
            column = cast_column(table.column(field.name), field, "key column")
            refuse_nulls(column, field, "key column")
            searched.append(normalise_array(combine_chunks(column), field.type))
        if len(searched[0]) == len(own_keys[0]) and all(a.equals(b) for a, b in zip(own_keys, searched, strict=True)):
            return np.arange(len(self))
        positions = find_keys(own_keys, searched)
        if hold_floats(own_keys):
            positions = self._add_pandas_matches(positions, own_keys, searched, nan_is_null(source), call)
        missing = np.flatnonzero(positions < 0)
        if len(missing):
            key = format_row(names, searched, int(missing[0]))
            raise StateValueError(f"{call} was given the key {key}, which is not in this batch{hint}")
        if len(np.unique(positions)) < len(positions):
            raise StateValueError(f"{call} was given {len(positions)} rows in which a key occurs more than once")
        return positions

    def _add_pandas_matches(
        self,
        positions: IndexArray,
        own_keys: Sequence[pa.Array],
        searched: Sequence[pa.Array],
        is_pandas: bool,
        call: str,
    ) -> IndexArray:
        """Also find keys that went through pandas, which does not distinguish NaN and NULL."""
        if not is_pandas and (positions >= 0).all():
            return positions
        without_nan, is_ambiguous = positions_without_nan(own_keys, searched)
        is_unsure = is_ambiguous & (is_pandas | (positions < 0))
        if is_unsure.any():
            key = format_row(self.keys.column_names, searched, int(np.argmax(is_unsure)))
            raise StateValueError(
                f"{call} was given the key {key}; this batch has it with NaN and with NULL, which pandas does not "
                "distinguish: give a table of Arrow or polars, or rows in the order of the keys, or select with a mask"
            )
        return np.where(positions < 0, without_nan, positions)

    def _refuse_times(self, wrong: BoolArray, times: IndexArray, positions: IndexArray, why: str) -> None:
        if wrong.any():
            first = int(np.argmax(wrong))
            key = format_row(self.keys.column_names, self.keys.columns, int(positions[first]))
            raise StateValueError(f"set_timeout() was given {times[first]} for key {key}: {why}")

    def _read_times(self, times: Any, event_time: bool, positions: IndexArray) -> tuple[IndexArray, BoolArray]:
        """Return the times of the selected keys in milliseconds, and which of these are set."""
        is_scalar = isinstance(times, (int, float, np.generic, pa.Scalar, datetime.datetime, datetime.timedelta))
        column = to_milliseconds([times] if is_scalar else times, event_time)
        if is_scalar:
            column = pa.chunked_array([column]).take(pa.array(np.zeros(len(positions), dtype=np.int64)))
        column = combine_chunks(column)
        if len(column) == len(self) != len(positions):
            column = column.take(pa.array(positions))
        if len(column) != len(positions):
            raise StateValueError(f"set_timeout() was given {len(column)} times for {len(positions)} keys")
        is_set: BoolArray = column.is_valid().to_numpy(zero_copy_only=False)
        return pc.fill_null(column, 0).to_numpy(zero_copy_only=False), is_set
