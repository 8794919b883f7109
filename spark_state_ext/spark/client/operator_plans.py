"""Plans of the built-in operators after their columns are selected: function, output, state and sort columns.

They need only schemas and no DataFrame: `operators` runs them on Spark, and `testing` runs them without Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql.streaming.state import GroupStateTimeout
from pyspark.sql.types import ArrayType, IntegerType, LongType, StructField, StructType, TimestampType

from spark_state_ext.errors import UnsupportedPlanError, UsageError
from spark_state_ext.operators.agg import Aggregate
from spark_state_ext.operators.aggregate import Aggregates, Aggregation, BoundAggregate, PartialAggregation
from spark_state_ext.operators.deduplicate import EXPIRES_US, Deduplication
from spark_state_ext.operators.sessionize import END, SESSION_WINDOW, SESSIONS, START, Sessions
from spark_state_ext.operators.top_k import TOP, TopK
from spark_state_ext.spark.client.columns import WATERMARK_KEY, find_event_time
from spark_state_ext.spark.client.operator_columns import (
    describe_functions,
    encode_identity,
    make_result_fields,
    make_state_type,
    refuse_duplicate_names,
    refuse_nested,
    remove_watermark,
)
from spark_state_ext.spark.shuffle.combine import Combining

__all__ = [
    "SESSION_END",
    "OperatorPlan",
    "Order",
    "plan_aggregate",
    "check_gap",
    "check_output_mode",
    "check_top",
    "plan_deduplicate",
    "name_order_columns",
    "plan_sessionize",
    "check_time_field",
    "plan_top_k",
]

# The end of a row's own session.
SESSION_END = "__end"
# A thousand years, so that event times of today stay far within 64 bits of microseconds.
_GAP_MS_MAX = 2**45
_EVENT_TIME, _NO_TIMEOUT = GroupStateTimeout.EventTimeTimeout, GroupStateTimeout.NoTimeout


@dataclass(frozen=True)
class OperatorPlan:
    """An operator with its function, columns and types.

    Parameters
    ----------
    name
        Name of the function that the user called.
    func
        The vectorised function.
    output, state
        Types of its output and of its state.
    output_mode, timeout_conf
        As in Spark.
    combining
        How rows are combined before the shuffle; `func` gets the combined rows. None: they are not combined.
    identity
        As in `OperatorFile`: it must not change while there is state.
    """

    name: str
    func: Callable[..., Any]
    output: StructType
    state: StructType
    output_mode: str
    timeout_conf: str
    combining: Combining | None = None
    identity: str | None = None


@dataclass(frozen=True)
class Order:
    """How `top_k` sorts rows.

    Parameters
    ----------
    columns
        Names of the sort columns.
    descending
        For each column, whether the largest come first.
    text
        The order as text, for the operator's identity.
    """

    columns: tuple[str, ...]
    descending: tuple[bool, ...]
    text: str


# -- arguments -----------------------------------------------------------------------------------------------


def check_output_mode(output_mode: Any) -> None:
    """Raise a UsageError if `aggregate` does not support the output mode."""
    if output_mode not in ("update", "append"):
        raise UsageError(f"output_mode of aggregate must be 'update' or 'append', not {output_mode!r}")


def check_gap(gap_ms: Any) -> None:
    """Raise a UsageError if this is not a valid gap of sessions."""
    if isinstance(gap_ms, bool) or not isinstance(gap_ms, int) or not 1 <= gap_ms <= _GAP_MS_MAX:
        raise UsageError(f"gap_ms of sessionize must be a whole number from 1 to {_GAP_MS_MAX}, not {gap_ms!r}")


def check_top(k: Any, emit: Any, rank: Any) -> None:
    """Raise a UsageError for arguments that `top_k` does not support."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise UsageError(f"k of top_k must be a whole number of at least 1, not {k!r}")
    if emit not in ("all", "changed"):
        raise UsageError(f"emit of top_k must be 'all' or 'changed', not {emit!r}")
    if not isinstance(rank, str) or not rank:
        raise UsageError(f"rank of top_k must be the name of a column, not {rank!r}")


def check_time_field(field: StructField) -> StructField:
    """Return the time column of sessions; raise if it is not a timestamp with a watermark."""
    if WATERMARK_KEY not in (field.metadata or {}) or not isinstance(field.dataType, TimestampType):
        raise UnsupportedPlanError(
            f"sessionize returns a session when the watermark has reached its end, but {field.name!r} is not a "
            "timestamp with a watermark: call withWatermark"
        )
    return field


def name_order_columns(names: Sequence[str | None], keys: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the columns by which `top_k` sorts rows."""
    return tuple(
        name if name is not None and name not in keys else f"__order{position}" for position, name in enumerate(names)
    )


# -- plans ---------------------------------------------------------------------------------------------------


def plan_aggregate(
    row_type: StructType,
    keys: int,
    specs: Mapping[str, Aggregate],
    bound: Sequence[BoundAggregate],
    output_mode: str,
    combine: bool,
) -> OperatorPlan:
    """Return the plan of `aggregate`."""
    key_fields = row_type.fields[:keys]
    names = [field.name for field in key_fields]
    state = make_state_type(bound, row_type)
    refuse_duplicate_names([*names, *specs], "output columns of aggregate")
    event_time = find_event_time(StructType(key_fields))
    if event_time is None and output_mode == "append":
        raise UnsupportedPlanError(
            "aggregate in append mode returns a group when the watermark has passed it, but no key has a watermark: "
            "call withWatermark, and group by that column or a window of it, or use output_mode='update'"
        )
    aggregates = Aggregates(tuple(bound))
    refuse_duplicate_names([*names, *aggregates.buffer_names], "columns of aggregate, its own among them,")
    combining = None
    if combine:
        # A task's rows are aggregated before the shuffle; the result has keys and buffers as columns.
        buffers = [
            StructField(name, field.dataType) for name, field in zip(aggregates.buffer_names, state.fields, strict=True)
        ]
        combining = Combining(PartialAggregation(aggregates, tuple(names)), StructType([*key_fields, *buffers]))
    return OperatorPlan(
        "aggregate",
        Aggregation(aggregates, names[event_time[0]] if event_time else None, output_mode == "append", combine),
        StructType([*map(remove_watermark, key_fields), *make_result_fields(bound, row_type)]),
        state,
        output_mode,
        _EVENT_TIME if event_time else _NO_TIMEOUT,
        combining,
        encode_identity("aggregate", describe_functions(specs, bound, row_type)),
    )


def plan_deduplicate(schema: StructType, timed_key: str | None, within_watermark: bool) -> OperatorPlan:
    """Return the plan of `deduplicate`."""
    event_time = find_event_time(schema)
    function = Deduplication(key_time=timed_key)
    if within_watermark:
        if event_time is None or not isinstance(schema[event_time[0]].dataType, TimestampType):
            raise UnsupportedPlanError(
                "deduplicate with within_watermark=True needs a watermark on a timestamp column: call withWatermark"
            )
        function = Deduplication(row_time=schema.names[event_time[0]], delay_us=1000 * event_time[1])
    return OperatorPlan(
        "deduplicate",
        function,
        StructType([remove_watermark(field) for field in schema.fields]),
        StructType([StructField(EXPIRES_US, LongType())]),
        "append",
        # With an event-time timeout Spark's operators drop late rows, even if no timeout is ever set.
        _NO_TIMEOUT if event_time is None else _EVENT_TIME,
    )


def plan_sessionize(
    row_type: StructType, keys: int, specs: Mapping[str, Aggregate], bound: Sequence[BoundAggregate], gap_ms: int
) -> OperatorPlan:
    """Return the plan of `sessionize`."""
    key_fields = row_type.fields[:keys]
    names = [field.name for field in key_fields]
    buffers = make_state_type(bound, row_type)
    refuse_duplicate_names([*names, SESSION_WINDOW, *specs], "output columns of sessionize")
    refuse_duplicate_names([START, END, *buffers.names], "state columns of sessionize")
    session = StructType([StructField(START, TimestampType()), StructField(END, TimestampType()), *buffers.fields])
    window = StructType([StructField("start", TimestampType()), StructField("end", TimestampType())])
    return OperatorPlan(
        "sessionize",
        Sessions(Aggregates(tuple(bound)), SESSION_END, 1000 * gap_ms),
        StructType(
            [
                *map(remove_watermark, key_fields),
                StructField(SESSION_WINDOW, window),
                *make_result_fields(bound, row_type),
            ]
        ),
        StructType([StructField(SESSIONS, ArrayType(session))]),
        "append",
        _EVENT_TIME,
        identity=encode_identity("sessionize", describe_functions(specs, bound, row_type)),
    )


def plan_top_k(
    row_type: StructType,
    keys: Sequence[str],
    output_names: Sequence[str],
    order: Order,
    k: int,
    emit: str,
    rank: str,
    combine: bool,
) -> OperatorPlan:
    """Return the plan of `top_k`."""
    refuse_duplicate_names(row_type.names, "columns of top_k, its own among them,")
    for name in order.columns:
        refuse_nested(row_type[name], "order column")
    stored = [field for field in row_type.fields if field.name not in keys]
    output = [remove_watermark(field) for field in row_type.fields if field.name in output_names]
    function = TopK(
        k,
        tuple(zip(order.columns, order.descending, strict=True)),
        tuple(field.name for field in stored),
        tuple(field.name for field in output),
        rank,
        emit == "changed",
    )
    rows = StructType([StructField(field.name, field.dataType) for field in stored])
    return OperatorPlan(
        "top_k",
        function,
        StructType([*output, StructField(rank, IntegerType())]),
        StructType([StructField(TOP, ArrayType(rows))]),
        "update",
        _NO_TIMEOUT,
        Combining(function.thin, row_type) if combine else None,
        encode_identity("top_k", {"k": k, "order_by": order.text}),
    )
