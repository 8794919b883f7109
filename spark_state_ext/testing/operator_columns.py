"""Selects the columns of built-in operators from tables without Spark, like Spark's plan does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.types import StructField, StructType

from arrow_schemas.columns import combine_chunks, event_times_us
from arrow_schemas.equality import IndexArray
from spark_state_ext.errors import UnsupportedPlanError, UsageError
from spark_state_ext.operators.agg import Aggregate
from spark_state_ext.spark.client.columns import WATERMARK_KEY, find_event_time, unquote
from spark_state_ext.spark.client.operator_columns import (
    bind_aggregates,
    check_aggregates,
    describe_order,
    name_aggregated_columns,
    parse_orders,
    refuse_duplicate_names,
    to_list,
)
from spark_state_ext.spark.client.operator_plans import (
    SESSION_END,
    OperatorPlan,
    Order,
    check_gap,
    check_output_mode,
    check_time_field,
    check_top,
    name_order_columns,
    plan_aggregate,
    plan_deduplicate,
    plan_sessionize,
    plan_top_k,
)
from spark_state_ext.spark.client.operators import aggregate, deduplicate, sessionize, top_k

__all__ = ["OPERATORS", "OperatorRun", "Window", "plan_run"]

OPERATORS = (aggregate, deduplicate, sessionize, top_k)


@dataclass(frozen=True)
class Window:
    """A key of `aggregate`: the fixed-length window that a row's time is in, like ``F.window(time, …)``.

    Parameters
    ----------
    time
        Name of a timestamp column. Rows without a time are in no window, and are left out.
    duration_ms
        Length of a window, milliseconds; windows begin at multiples of it since 1970.
    name
        Name of the output column.

    Raises
    ------
    UsageError
        If the length is not a whole number of at least 1.

    Examples
    --------
    >>> Window("at", 3_600_000).name
    'window'
    """

    time: str
    duration_ms: int
    name: str = "window"

    def __post_init__(self) -> None:
        duration = self.duration_ms
        if isinstance(duration, bool) or not isinstance(duration, int) or duration < 1:
            raise UsageError(f"duration_ms of a Window must be a whole number from 1 on, not {duration!r}")


@dataclass(frozen=True)
class _InputColumn:
    """A column that an operator uses.

    Parameters
    ----------
    field
        Its name and type; an event time has the watermark's delay in its metadata.
    source
        The input column that it comes from.
    compute
        Computes it from the input column; None: it is the input column.
    """

    field: StructField
    source: str
    compute: Callable[[pa.ChunkedArray], pa.Array] | None = None


@dataclass(frozen=True)
class OperatorRun:
    """An operator, planned for the columns of an input.

    Parameters
    ----------
    plan
        The operator's plan.
    columns
        The columns that it uses.
    keys
        Names of the key columns.
    """

    plan: OperatorPlan
    columns: tuple[_InputColumn, ...]
    keys: tuple[str, ...]

    @property
    def row_type(self) -> StructType:
        """The type of the rows that it uses."""
        return _struct(self.columns)

    def rows(self, table: pa.Table) -> pa.Table:
        """Return the rows that the operator uses, from a table of the input."""
        for column in self.columns:
            # A row without a time is in no window and in no session.
            if column.compute is not None and table.column(column.source).null_count:
                table = table.filter(table.column(column.source).is_valid())
        columns = [
            table.column(column.source) if column.compute is None else column.compute(table.column(column.source))
            for column in self.columns
        ]
        return pa.table(columns, names=[column.field.name for column in self.columns])


def plan_run(
    operator: Callable[..., Any], arguments: Mapping[str, Any], input_type: StructType, has_ttl: bool
) -> OperatorRun:
    """Plan an operator for the columns of an input."""
    by_name = dict(arguments)
    columns = _Columns(input_type, operator.__name__)
    if operator is aggregate:
        return _plan_aggregate(columns, has_ttl=has_ttl, **by_name)
    if operator is deduplicate:
        return _plan_deduplicate(columns, **by_name)
    if operator is sessionize:
        return _plan_sessions(columns, **by_name)
    assert operator is top_k, operator
    return _plan_top(columns, has_ttl=has_ttl, **by_name)


# -- inside --------------------------------------------------------------------------------------------------


class _Columns:
    """The input's columns, by the names in an operator's arguments."""

    def __init__(self, input_type: StructType, operator: str) -> None:
        self.type = input_type
        self._operator = operator

    def column(self, column_name: Any, new_name: str | None = None) -> _InputColumn:
        """Return a column by its name, renamed to `new_name` if given; raise a UsageError for anything but a name."""
        if not isinstance(column_name, str):
            raise UsageError(
                f"{self._operator} has {column_name!r}, but run_operator() takes names of columns only: give an "
                "expression as a column of the batches, or test the query with Spark"
            )
        source = unquote(column_name)
        if source not in self.type.names:
            raise UsageError(
                f"{self._operator} names the column {column_name!r}, which the input does not have; it has "
                f"{', '.join(self.type.names)}"
            )
        field = self.type[source]
        # A column that an aggregate or an order uses has no watermark.
        renamed = field if new_name is None else StructField(new_name, field.dataType, field.nullable)
        return _InputColumn(renamed, source)

    def keys(self, arguments: Any) -> list[_InputColumn]:
        """Return the columns and windows of keys."""
        return [self._window(key) if isinstance(key, Window) else self.column(key) for key in to_list(arguments)]

    def _window(self, window: Window) -> _InputColumn:
        time = self.column(window.time)
        _refuse_no_time(time.field)
        bounds = StructType([StructField(name, time.field.dataType) for name in ("start", "end")])
        field = StructField(window.name, bounds, False, time.field.metadata)
        duration_us = 1000 * window.duration_ms

        def compute(column: pa.ChunkedArray) -> pa.Array:
            times = _times_us(column)
            starts = times - np.mod(times, duration_us)
            ends = [pa.array(bound).cast(column.type) for bound in (starts, starts + duration_us)]
            return pa.StructArray.from_arrays(ends, names=["start", "end"])

        return _InputColumn(field, time.source, compute)

    def values(self, specs: Mapping[str, Aggregate]) -> list[_InputColumn]:
        """Return the columns to aggregate."""
        return [self.column(column, name) for name, column in name_aggregated_columns(specs).values()]

    def all(self) -> list[_InputColumn]:
        return [_InputColumn(field, field.name) for field in self.type.fields]


def _refuse_no_time(field: StructField) -> None:
    """Raise an UnsupportedPlanError if a column is not a timestamp."""
    if not field.dataType.typeName().startswith("timestamp"):
        raise UnsupportedPlanError(
            f"a Window needs a timestamp, but {field.name!r} is of type {field.dataType.simpleString()}"
        )


def _struct(columns: Iterable[_InputColumn]) -> StructType:
    return StructType([column.field for column in columns])


def _times_us(column: pa.ChunkedArray) -> IndexArray:
    times: IndexArray = combine_chunks(event_times_us(column)).to_numpy()
    return times


def _plan_aggregate(
    columns: _Columns, *, has_ttl: bool, keys: Any, aggregates: Mapping[str, Aggregate], output_mode: str
) -> OperatorRun:
    check_output_mode(output_mode)
    specs = check_aggregates(aggregates, "aggregate")
    key_columns = columns.keys(keys)
    ttl_time = None
    if has_ttl and find_event_time(_struct(key_columns)) is None:
        ttl_time = find_event_time(columns.type)
    ttl_columns = []
    if ttl_time is not None:
        # The time column is needed for the time to live, which may use it as its clock for each row.
        time_field = columns.type[ttl_time[0]]
        ttl_columns = [
            _InputColumn(
                StructField("__at", time_field.dataType, time_field.nullable, time_field.metadata), time_field.name
            )
        ]
    selected = [*key_columns, *ttl_columns, *columns.values(specs)]
    row_type = _struct(selected)
    bound = bind_aggregates(specs, row_type)
    plan = plan_aggregate(row_type, len(key_columns), specs, bound, output_mode, combine=ttl_time is None)
    return OperatorRun(plan, tuple(selected), _names(key_columns))


def _plan_deduplicate(columns: _Columns, *, keys: Any, within_watermark: bool) -> OperatorRun:
    refuse_duplicate_names(columns.type.names, "columns of the input of deduplicate")
    key_columns = columns.all() if keys is None else _refuse_windows(columns.keys(keys), "deduplicate")
    event_times = [column.field.name for column in key_columns if WATERMARK_KEY in (column.field.metadata or {})]
    plan = plan_deduplicate(columns.type, event_times[0] if event_times else None, within_watermark)
    return OperatorRun(plan, tuple(columns.all()), _names(key_columns))


def _plan_sessions(
    columns: _Columns, *, keys: Any, time: Any, gap_ms: int, aggregates: Mapping[str, Aggregate]
) -> OperatorRun:
    check_gap(gap_ms)
    specs = check_aggregates(aggregates, "sessionize")
    key_columns = _refuse_windows(columns.keys(keys), "sessionize")
    time_column = columns.column(time)
    field = check_time_field(time_column.field)

    def compute_end(column: pa.ChunkedArray) -> pa.Array:
        return pa.array(_times_us(column) + 1000 * gap_ms).cast(column.type)

    end = _InputColumn(StructField(SESSION_END, field.dataType, True, field.metadata), time_column.source, compute_end)
    selected = [*key_columns, end, *columns.values(specs)]
    row_type = _struct(selected)
    plan = plan_sessionize(row_type, len(key_columns), specs, bind_aggregates(specs, row_type), gap_ms)
    return OperatorRun(plan, tuple(selected), _names(key_columns))


def _plan_top(
    columns: _Columns, *, has_ttl: bool, keys: Any, order_by: Any, k: int, descending: Any, emit: str, rank: str
) -> OperatorRun:
    check_top(k, emit, rank)
    inputs = columns.type.names
    orders, downwards = parse_orders(order_by, descending, inputs)
    key_names = _names(_refuse_windows(columns.keys(keys), "top_k"))
    refuse_duplicate_names(key_names, "keys of top_k")
    refuse_duplicate_names([*inputs, rank], "output columns of top_k")
    sources = [columns.column(order).source for order in orders]
    ordered = name_order_columns(sources, key_names)
    hidden = [
        columns.column(argument, name)
        for argument, name, source in zip(orders, ordered, sources, strict=True)
        if name != source
    ]
    selected = [*columns.all(), *hidden]
    order = Order(ordered, tuple(downwards), describe_order(orders, sources, downwards))
    plan = plan_top_k(_struct(selected), key_names, inputs, order, k, emit, rank, combine=not has_ttl)
    return OperatorRun(plan, tuple(selected), key_names)


def _refuse_windows(keys: list[_InputColumn], operator: str) -> list[_InputColumn]:
    if any(key.compute is not None for key in keys):
        raise UsageError(f"a Window is a key of aggregate only, but {operator} has one")
    return keys


def _names(keys: Sequence[_InputColumn]) -> tuple[str, ...]:
    return tuple(key.field.name for key in keys)
