"""What built-in operators come to once their columns are selected: function, output, state, and what they sort by.

Decisions over schemas, without a DataFrame: `operators` makes plans of them on Spark, and `testing` runs them without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql.streaming.state import GroupStateTimeout
from pyspark.sql.types import ArrayType, IntegerType, LongType, StructField, StructType, TimestampType

from spark_state_ext.errors import UnsupportedPlanError, UsageError
from spark_state_ext.operators.agg import Aggregate
from spark_state_ext.operators.aggregate import Aggregates, Aggregation, Bound, PartialAggregation
from spark_state_ext.operators.deduplicate import EXPIRES_US, Deduplication
from spark_state_ext.operators.sessionize import END, SESSION_WINDOW, SESSIONS, START, Sessions
from spark_state_ext.operators.top_k import TOP, TopK
from spark_state_ext.spark.client.columns import WATERMARK_KEY, event_time_of
from spark_state_ext.spark.client.operator_columns import (
    functions_of,
    identity,
    plain,
    refuse_doubles,
    refuse_nested,
    result_fields,
    state_type_of,
)
from spark_state_ext.spark.shuffle.combine import Combining

__all__ = [
    "SESSION_END",
    "OperatorPlan",
    "Order",
    "aggregation",
    "check_gap",
    "check_output_mode",
    "check_top",
    "deduplication",
    "ordering",
    "sessions",
    "timed_field",
    "top",
]

# The end of a row's own session.
SESSION_END = "__end"
# A thousand years: with it no time of today comes near to 64 bits of microseconds.
_GAP_MS_MAX = 2**45
_EVENT_TIME, _NO_TIMEOUT = GroupStateTimeout.EventTimeTimeout, GroupStateTimeout.NoTimeout


@dataclass(frozen=True)
class OperatorPlan:
    """An operator whose columns and types are fixed.

    Parameters
    ----------
    name
        What the user called.
    func
        The vectorised function.
    output, state
        Types of what it gives and of what it keeps.
    output_mode, timeout_conf
        Spark's.
    combining
        What makes rows fewer before the shuffle; `func` gets what it gives.
    identity
        As in `OperatorFile`: what must not change while there is state.
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
    """What rows of `top_k` are ordered by.

    Parameters
    ----------
    columns
        Names of the columns.
    downwards
        For each, whether the largest come first.
    text
        For the operator's identity.
    """

    columns: tuple[str, ...]
    downwards: tuple[bool, ...]
    text: str


# -- arguments -----------------------------------------------------------------------------------------------


def check_output_mode(output_mode: Any) -> None:
    """Raise a UsageError for an output mode that `aggregate` does not have."""
    if output_mode not in ("update", "append"):
        raise UsageError(f"output_mode of aggregate must be 'update' or 'append', not {output_mode!r}")


def check_gap(gap_ms: Any) -> None:
    """Raise a UsageError for what is no gap of sessions."""
    if isinstance(gap_ms, bool) or not isinstance(gap_ms, int) or not 1 <= gap_ms <= _GAP_MS_MAX:
        raise UsageError(f"gap_ms of sessionize must be a whole number from 1 to {_GAP_MS_MAX}, not {gap_ms!r}")


def check_top(k: Any, emit: Any, rank: Any) -> None:
    """Raise a UsageError for what `top_k` cannot work with."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise UsageError(f"k of top_k must be a whole number from 1 on, not {k!r}")
    if emit not in ("all", "changed"):
        raise UsageError(f"emit of top_k must be 'all' or 'changed', not {emit!r}")
    if not isinstance(rank, str) or not rank:
        raise UsageError(f"rank of top_k is the name of a column, not {rank!r}")


def timed_field(field: StructField) -> StructField:
    """The column that sessions go by."""
    if WATERMARK_KEY not in (field.metadata or {}) or not isinstance(field.dataType, TimestampType):
        raise UnsupportedPlanError(
            f"sessionize gives a session when the watermark has reached its end, and {field.name!r} is no timestamp "
            "with a watermark: call withWatermark"
        )
    return field


def ordering(names: Sequence[str | None], keys: Sequence[str]) -> tuple[str, ...]:
    """Names of the columns that `top_k` orders by."""
    return tuple(
        name if name is not None and name not in keys else f"__order{place}" for place, name in enumerate(names)
    )


# -- plans ---------------------------------------------------------------------------------------------------


def aggregation(
    narrow: StructType,
    keys: int,
    specs: Mapping[str, Aggregate],
    bound: Sequence[Bound],
    output_mode: str,
    combine: bool,
) -> OperatorPlan:
    """The plan of `aggregate`."""
    key_fields = narrow.fields[:keys]
    names = [field.name for field in key_fields]
    state = state_type_of(bound, narrow)
    refuse_doubles([*names, *specs], "output columns of aggregate")
    found = event_time_of(StructType(key_fields))
    if found is None and output_mode == "append":
        raise UnsupportedPlanError(
            "aggregate in append mode gives a group when the watermark has passed it, and no key has a watermark: call "
            "withWatermark, and group by that column or a window of it, or use output_mode='update'"
        )
    aggregates = Aggregates(tuple(bound))
    refuse_doubles([*names, *aggregates.buffer_names], "columns of aggregate, its own among them,")
    combining = None
    if combine:
        # The columns of a task's rows, aggregated before the shuffle, are keys and buffers.
        buffers = [
            StructField(name, field.dataType) for name, field in zip(aggregates.buffer_names, state.fields, strict=True)
        ]
        combining = Combining(PartialAggregation(aggregates, tuple(names)), StructType([*key_fields, *buffers]))
    return OperatorPlan(
        "aggregate",
        Aggregation(aggregates, names[found[0]] if found else None, output_mode == "append", combine),
        StructType([*map(plain, key_fields), *result_fields(bound, narrow)]),
        state,
        output_mode,
        _EVENT_TIME if found else _NO_TIMEOUT,
        combining,
        identity("aggregate", functions_of(specs, bound, narrow)),
    )


def deduplication(schema: StructType, timed_key: str | None, within_watermark: bool) -> OperatorPlan:
    """The plan of `deduplicate`."""
    event_time = event_time_of(schema)
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
        StructType([plain(field) for field in schema.fields]),
        StructType([StructField(EXPIRES_US, LongType())]),
        "append",
        # Spark's operators drop late rows under an event-time timeout, whether or not there is one.
        _NO_TIMEOUT if event_time is None else _EVENT_TIME,
    )


def sessions(
    narrow: StructType, keys: int, specs: Mapping[str, Aggregate], bound: Sequence[Bound], gap_ms: int
) -> OperatorPlan:
    """The plan of `sessionize`."""
    key_fields = narrow.fields[:keys]
    names = [field.name for field in key_fields]
    kept = state_type_of(bound, narrow)
    refuse_doubles([*names, SESSION_WINDOW, *specs], "output columns of sessionize")
    refuse_doubles([START, END, *kept.names], "state columns of sessionize")
    session = StructType([StructField(START, TimestampType()), StructField(END, TimestampType()), *kept.fields])
    window = StructType([StructField("start", TimestampType()), StructField("end", TimestampType())])
    return OperatorPlan(
        "sessionize",
        Sessions(Aggregates(tuple(bound)), SESSION_END, 1000 * gap_ms),
        StructType([*map(plain, key_fields), StructField(SESSION_WINDOW, window), *result_fields(bound, narrow)]),
        StructType([StructField(SESSIONS, ArrayType(session))]),
        "append",
        _EVENT_TIME,
        identity=identity("sessionize", functions_of(specs, bound, narrow)),
    )


def top(
    wide: StructType,
    keys: Sequence[str],
    given: Sequence[str],
    order: Order,
    k: int,
    emit: str,
    rank: str,
    combine: bool,
) -> OperatorPlan:
    """The plan of `top_k`."""
    refuse_doubles(wide.names, "columns of top_k, its own among them,")
    for name in order.columns:
        refuse_nested(wide[name], "order column")
    kept = [field for field in wide.fields if field.name not in keys]
    output = [plain(field) for field in wide.fields if field.name in given]
    function = TopK(
        k,
        tuple(zip(order.columns, order.downwards, strict=True)),
        tuple(field.name for field in kept),
        tuple(field.name for field in output),
        rank,
        emit == "changed",
    )
    rows = StructType([StructField(field.name, field.dataType) for field in kept])
    return OperatorPlan(
        "top_k",
        function,
        StructType([*output, StructField(rank, IntegerType())]),
        StructType([StructField(TOP, ArrayType(rows))]),
        "update",
        _NO_TIMEOUT,
        Combining(function.thin, wide) if combine else None,
        identity("top_k", {"k": k, "order_by": order.text}),
    )
