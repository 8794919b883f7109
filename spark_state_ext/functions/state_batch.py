"""`StateBatch`: what a vectorised function gets. Arrow tables in, Arrow tables out, no Spark and no pandas.

Anything that speaks Arrow's C stream (PyArrow, polars, a DuckDB result) may be handed back, and takes what is here
without a copy.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.columns import aggregated, flat, shown_row
from arrow_schemas.equality import BoolArray, IndexArray
from arrow_schemas.row import normal_array
from spark_state_ext.errors import StateValueError, UsageError
from spark_state_ext.functions.arguments import mask_of, milliseconds, own
from spark_state_ext.functions.key_match import hold_floats, key_positions, nan_is_null, positions_without_nan
from spark_state_ext.functions.outcome import NO_TIMEOUT, Outcome
from spark_state_ext.functions.overflow import first_overflow
from spark_state_ext.functions.tables import as_table, cast_column, is_table, refuse_nulls, refuse_scalars

__all__ = ["StateBatch"]

# What is 0, and not NULL, where there are no rows.
_COUNTS = frozenset({"count", "count_all", "count_distinct"})
_TIME_MS_MAX = 2**63 - 1


class StateBatch:
    """The rows of a bucket in a micro-batch, by key, and the state of these keys.

    A function gets one for each bucket that has rows, or keys that time out. It may get several for a bucket, of
    different keys, where one would take too much memory. To test a function, make one; nothing is checked then.

    Parameters
    ----------
    rows, keys, state, exists, watermark_ms, processing_time_ms, bucket, batch_id
        As below. `rows` must be by key, in the order of `keys`.
    starts : numpy.ndarray
        For each key with rows where these begin in `rows`, int64 (number of keys with rows,), ascending, the first one
        0. Keys beyond them time out.
    timeout_conf : str
        ``"NoTimeout"``, ``"ProcessingTimeTimeout"`` or ``"EventTimeTimeout"``: which of its forms `set_timeout` takes.
    scan : callable
        What `scan` gives: a function without arguments that returns an iterator of tables. By default there are none.

    Attributes
    ----------
    rows : pyarrow.Table
        The input rows, all columns. Rows of a key are adjacent, in the order in which they arrived at the bucket.
        Timestamps are microseconds, with zone UTC or without zone.
    keys : pyarrow.Table
        The distinct keys, one row each: first those with rows, in the order of `rows`, then those that time out. Keys
        are as they are stored: ``-0.0`` is ``0.0``.
    state : pyarrow.Table
        The state columns, one row a key; NULL where there is no state.
    exists : pyarrow.BooleanArray
        Which keys have state. (State may consist of NULLs.)
    timed_out : pyarrow.BooleanArray
        Which keys are here because their timeout is over; they have no rows.
    group_ids : pyarrow.Int64Array
        For each row its key's position in `keys`; ascending.
    offsets : pyarrow.Int32Array
        For each key where its rows begin, and the number of rows at the end, as in an Arrow list:
        ``pa.ListArray.from_arrays(batch.offsets, column)`` has a key's values in a list.
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
        # A key without state has NULL in every column, also where state may not be NULL.
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

    # -- looking -----------------------------------------------------------------------------------

    @property
    def group_ids(self) -> pa.Int64Array:
        """For each row its key's position."""
        if self._ids is None:
            self._ids = pa.array(np.repeat(np.arange(len(self._sizes)), self._sizes))
        return self._ids

    @property
    def counts(self) -> pa.Int64Array:
        """Number of rows of each key; 0 for those that timed out."""
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
            One row a key, in the order of `keys`; columns are named as PyArrow names them (``value_sum``). Keys that
            timed out have what no rows give: NULL, and 0 for counts.

        Raises
        ------
        StateValueError
            When `rows` has no such column, or two, or one whose name begins with a dot; when PyArrow has no such
            function, or not for a column of that type; and when a sum, product or mean of integers or decimals is
            beyond its type (PyArrow would wrap).
        """
        asked, group = list(aggregations), "__group"
        for columns, *_ in asked:
            self._refuse_unknown([columns] if isinstance(columns, str) else columns, "aggregate()")
        while group in self.rows.column_names:
            group += "_"
        table = self.rows.append_column(group, self.group_ids)
        try:
            found = aggregated(table, group, asked).drop_columns([group])
        except (pa.ArrowInvalid, pa.ArrowKeyError, pa.ArrowNotImplementedError) as error:
            # What was asked for; not memory that ran out.
            raise StateValueError(f"aggregate() was given what PyArrow cannot do: {error}") from error
        for (columns, function, *_), results in zip(asked, found.columns, strict=True):
            self._refuse_overflow(columns, function, results)
        missing = self.keys.num_rows - self._with_rows
        if not missing:
            return found
        nothing = [
            pa.array(np.zeros(missing), column.type)
            if aggregation[1].removeprefix("hash_") in _COUNTS
            else pa.nulls(missing, column.type)
            for aggregation, column in zip(asked, found.columns, strict=True)
        ]
        return pa.concat_tables([found, pa.table(nothing, schema=found.schema)])

    def lists(self, column: str) -> pa.ListArray:
        """The values of a column as one list a key, without a copy.

        Parameters
        ----------
        column
            Name of a column of `rows`.

        Returns
        -------
        pyarrow.ListArray
            One list a key, in the order of `keys`; empty for keys that timed out.

        Raises
        ------
        StateValueError
            When `rows` has no such column, or two.
        UnsupportedTypeError
            For text, bytes or lists of more than 2 GiB.
        """
        self._refuse_unknown([column], "lists()")
        return pa.ListArray.from_arrays(self.offsets, flat(self.rows.column(column)))

    def with_state(self, columns: Mapping[str, Any] | None = None) -> pa.Table:
        """The keys, their state, and more columns if wanted, side by side.

        A column that both have is the keys'; what the state has in it is in `state`.

        Parameters
        ----------
        columns
            More columns, or others in place of the state's, as in polars' ``with_columns``: one value for each key.

        Returns
        -------
        pyarrow.Table
            One row a key, in the order of `keys`: the keys' columns, the state's, and then those that neither has.

        Raises
        ------
        StateValueError
            When they are no columns of one value for each key, or have a key column's name.
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
        """The whole bucket as it was before this batch, table after table; read while it is iterated.

        Memory stays bounded however large the bucket is.

        Returns
        -------
        iterator of pyarrow.Table
            Each has the key columns and then the state columns, one row a key; keys that have no state are left out.
        """
        return self._scan()

    # -- changing ----------------------------------------------------------------------------------

    def update(self, states: Any, where: Any = None, *, by_key: bool = True) -> None:
        """Set the state of keys. As with Spark's `GroupState`, a timeout is cleared unless it is set anew.

        Parameters
        ----------
        states
            A table, record batch, mapping of columns, polars DataFrame or anything else with Arrow's C stream, in one
            of three forms: one row for each key of the batch, in their order; with `where`, one row for each key or
            one for each that is chosen; or, with all key columns beside the state columns, one row for any of the
            batch's keys, in any order. A column that has a key's name and a state column's is both.
            NaN in a frame of pandas is NULL, as Arrow reads it. As a key it finds NaN or NULL, whichever the batch has;
            where it has both, the call is refused.
        where
            Mask over the keys: which of them to update. Default: all.
        by_key
            False: rows are in the order of the keys, and columns are the state's alone. For state that has columns of
            all the keys' names, and something else than the keys in them.

        Raises
        ------
        StateValueError
            When columns are missing or too many, a value does not fit its column, or a key is not of this batch; or
            when `where` is not one boolean for each key.
        UsageError
            When the function has returned already.
        """
        table = as_table(states, "update() was given")
        names = self.state.column_names
        given, key_names = set(table.column_names), set(self.keys.column_names)
        # Also where the state has columns of the keys' names: rows by key, taken by place, would go to other keys.
        by_key = by_key and given >= key_names
        if given != {*names, *(key_names if by_key else ())} or len(given) < table.num_columns:
            raise StateValueError(
                f"update() was given the columns {', '.join(table.column_names) or '(none)'}; it takes the state's "
                f"({', '.join(names)}), or these and the keys' ({', '.join(self.keys.column_names)})"
            )
        hint = " (by_key=False takes rows in the order of the keys)" if key_names <= set(names) else ""
        positions = self._positions_of(table, states, "update()", hint) if by_key else None
        columns = [cast_column(table.column(field.name), field, "state column") for field in self._fields]
        new = pa.table(columns, schema=self.state.schema)
        if positions is None:
            chosen = None if where is None else self._chosen(where)
            positions, new = self._aligned(new, chosen)
        elif where is not None:
            keep = mask_of(where, len(self))[positions]
            positions, new = positions[keep], new.filter(pa.array(keep))
        for column, field in zip(new.columns, self._fields, strict=True):
            refuse_nulls(column, field, "state column")
        self.outcome.put(positions, own(new))

    def remove(self, which: Any = True) -> None:
        """Remove the state of keys.

        Parameters
        ----------
        which
            Mask over the keys, or a table of keys; True: all keys of the batch.

        Raises
        ------
        StateValueError
            When a mask is not one boolean for each key, or a table lacks key columns, has a key twice or one that is
            not of this batch.
        UsageError
            When the function has returned already.
        """
        if which is True:
            self.outcome.drop(np.arange(len(self)))
        elif is_table(which):
            self.outcome.drop(self._positions_of(as_table(which, "remove() was given"), which, "remove()"))
        else:
            self.outcome.drop(np.flatnonzero(mask_of(which, len(self))))

    def set_timeout(self, *, timestamp_ms: Any = None, duration_ms: Any = None, where: Any = None) -> None:
        """Have keys time out, unless they are touched before; then they are in a batch with `timed_out` set.

        The times are one, or an array of one for each key, or for each that `where` chooses; NULL for none. In place of
        milliseconds they may be timestamps (without a zone: of UTC), and durations or a `timedelta`.

        Parameters
        ----------
        timestamp_ms
            Under EventTimeTimeout: when the watermark is past this, milliseconds since 1970. A time before the
            watermark counts as the watermark, and so is over at its next advance: rows may be on time and yet lead to
            one, where the watermark has moved far in between.
        duration_ms
            Under ProcessingTimeTimeout: so many milliseconds from now.
        where
            Mask over the keys: for which. Default: all.

        Raises
        ------
        UsageError
            When the query has another kind of timeout, or the function has returned already.
        StateValueError
            For a timestamp or duration that is not positive, or ends past what 64 bits hold; names the key. Also for
            times that are none or too many, and when `where` is not one boolean for each key.
        """
        event_time = self._timeout_conf == "EventTimeTimeout"
        given, other = (timestamp_ms, duration_ms) if event_time else (duration_ms, timestamp_ms)
        if self._timeout_conf == "NoTimeout" or given is None or other is not None:
            raise UsageError(
                f"set_timeout() under {self._timeout_conf} takes "
                + {"EventTimeTimeout": "timestamp_ms", "ProcessingTimeTimeout": "duration_ms"}.get(
                    self._timeout_conf, "nothing: give timeout_conf='EventTimeTimeout' or 'ProcessingTimeTimeout'"
                )
            )
        positions = np.arange(len(self)) if where is None else self._chosen(where)
        times, is_set = self._times(given, event_time, positions)
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
        there = self.rows.column_names
        for name in names:
            if name not in there:
                raise StateValueError(f"{call} was given the column {name!r}; the rows have {', '.join(there)}")
            if there.count(name) > 1:
                raise StateValueError(f"{call} was given the column {name!r}; the rows have two of that name")

    def _refuse_overflow(self, columns: Any, function: str, results: pa.ChunkedArray) -> None:
        column = columns if isinstance(columns, str) else next(iter(columns), None)
        if column is None:
            return
        at = first_overflow(self.rows.column(column), self._sizes[: self._with_rows], function, results)
        if at is not None:
            key = shown_row(self.keys.column_names, self.keys.columns, at)
            raise StateValueError(
                f"aggregate() was asked for the {function} of {column!r}, and for key {key} it is beyond "
                f"{results.type}: cast the column to a wider decimal or to double in the query"
            )

    def _chosen(self, where: Any) -> IndexArray:
        return np.flatnonzero(mask_of(where, len(self)))

    def _aligned(self, new: pa.Table, chosen: IndexArray | None) -> tuple[IndexArray | None, pa.Table]:
        """Positions (None: all) and the rows for them."""
        if chosen is None or len(chosen) == len(self):
            if new.num_rows != len(self):
                raise StateValueError(f"update() was given {new.num_rows} rows and the batch has {len(self)} keys")
            return None, new
        if new.num_rows == len(self):
            return chosen, new.take(pa.array(chosen))
        if new.num_rows != len(chosen):
            raise StateValueError(
                f"update() was given {new.num_rows} rows; the batch has {len(self)} keys, and `where` chooses "
                f"{len(chosen)}"
            )
        return chosen, new

    def _positions_of(self, table: pa.Table, came: Any, call: str, hint: str = "") -> IndexArray:
        names = self.keys.column_names
        if not set(names) <= set(table.column_names):
            raise StateValueError(
                f"{call} needs the key columns {', '.join(names)}, not {', '.join(table.column_names)}"
            )
        twice = [name for name in names if names.count(name) > 1 or table.column_names.count(name) > 1]
        if twice:
            raise StateValueError(
                f"{call} cannot go by key columns of which two are called {twice[0]!r}: give rows in the order of the "
                f"keys, and choose with a mask{hint}"
            )
        own = [flat(column) for column in self.keys.columns]
        given = []
        for field in self.keys.schema:
            column = cast_column(table.column(field.name), field, "key column")
            refuse_nulls(column, field, "key column")
            given.append(normal_array(flat(column), field.type))
        if len(given[0]) == len(own[0]) and all(a.equals(b) for a, b in zip(own, given, strict=True)):
            return np.arange(len(self))
        positions = key_positions(own, given)
        if hold_floats(own):
            positions = self._with_pandas_nan(positions, own, given, nan_is_null(came), call)
        missing = np.flatnonzero(positions < 0)
        if len(missing):
            key = shown_row(names, given, int(missing[0]))
            raise StateValueError(f"{call} was given the key {key}, which is not in this batch{hint}")
        if len(np.unique(positions)) < len(positions):
            raise StateValueError(f"{call} was given {len(positions)} rows in which a key is there more than once")
        return positions

    def _with_pandas_nan(
        self, positions: IndexArray, own: Sequence[pa.Array], given: Sequence[pa.Array], pandas: bool, call: str
    ) -> IndexArray:
        """Positions also of keys that went through pandas, where NaN and NULL become one."""
        if not pandas and (positions >= 0).all():
            return positions
        loose, several = positions_without_nan(own, given)
        unsure = several & (pandas | (positions < 0))
        if unsure.any():
            key = shown_row(self.keys.column_names, given, int(np.argmax(unsure)))
            raise StateValueError(
                f"{call} was given the key {key}; this batch has it with NaN and with NULL, which are one in pandas: "
                "give a table of Arrow or polars, or rows in the order of the keys, or choose with a mask"
            )
        return np.where(positions < 0, loose, positions)

    def _refuse_times(self, wrong: BoolArray, times: IndexArray, positions: IndexArray, why: str) -> None:
        if wrong.any():
            first = int(np.argmax(wrong))
            key = shown_row(self.keys.column_names, self.keys.columns, int(positions[first]))
            raise StateValueError(f"set_timeout() was given {times[first]} for key {key}: {why}")

    def _times(self, given: Any, event_time: bool, positions: IndexArray) -> tuple[IndexArray, BoolArray]:
        """Times of the chosen keys in milliseconds, and which of these are set."""
        alone = isinstance(given, (int, float, np.generic, pa.Scalar, datetime.datetime, datetime.timedelta))
        column = milliseconds([given] if alone else given, event_time)
        if alone:
            column = pa.chunked_array([column]).take(pa.array(np.zeros(len(positions), dtype=np.int64)))
        column = flat(column)
        if len(column) == len(self) != len(positions):
            column = column.take(pa.array(positions))
        if len(column) != len(positions):
            raise StateValueError(f"set_timeout() was given {len(column)} times for {len(positions)} keys")
        is_set: BoolArray = column.is_valid().to_numpy(zero_copy_only=False)
        return pc.fill_null(column, 0).to_numpy(zero_copy_only=False), is_set
