"""Make the functions of operators without Spark, and buckets that run them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from memory_bucket import MemoryBucket

from spark_state_ext.operators.agg import Aggregate, find_kernel
from spark_state_ext.operators.aggregate import Aggregates, Aggregation, BoundAggregate, PartialAggregation
from spark_state_ext.operators.deduplicate import EXPIRES_US, Deduplication
from spark_state_ext.operators.sessionize import END, SESSIONS, START, Sessions
from spark_state_ext.operators.top_k import TOP, TopK

__all__ = ["TIME", "at", "make_aggregation", "make_deduplication", "make_sessions", "make_top", "seconds"]

TIME = pa.timestamp("us", "UTC")
_FIRST = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)


def at(second: float | None) -> dt.datetime | None:
    """Return the time that many seconds after 1970 began."""
    return None if second is None else _FIRST + dt.timedelta(seconds=second)


def seconds(time: dt.datetime) -> float:
    """Return the seconds of a time after 1970 began."""
    return (time - _FIRST).total_seconds()


def bind_aggregates(schema: Any, aggregates: Mapping[str, Aggregate]) -> Aggregates:
    """Bind aggregates to the columns of an input."""
    bound = []
    for name, spec in aggregates.items():
        kind = None if spec.column is None else schema.field(spec.column).type
        bound.append(BoundAggregate(name, find_kernel(spec, kind, name), spec.column))
    return Aggregates(tuple(bound))


def make_state_fields(aggregates: Aggregates) -> list[Any]:
    """Return the state fields of aggregates."""
    return [
        pa.field(name, kind)
        for bound in aggregates.bound
        for name, kind in zip(bound.state_names, bound.state_types, strict=True)
    ]


def make_aggregation(
    schema: Any,
    keys: Sequence[str],
    aggregates: Mapping[str, Aggregate],
    event_time: str | None = None,
    append: bool = False,
    tasks: int = 0,
) -> MemoryBucket:
    """Return a bucket of an aggregation; with `tasks`, that many tasks aggregate their rows before the shuffle."""
    bound = bind_aggregates(schema, aggregates)
    key_fields = [schema.field(key) for key in keys]
    function = Aggregation(bound, event_time, append, partial=tasks > 0)
    combine = (PartialAggregation(bound, tuple(keys)), tasks) if tasks else None
    return MemoryBucket(function, key_fields, make_state_fields(bound), event_time, combine)


def make_deduplication(
    schema: Any, keys: Sequence[str], event_time: str | None = None, delay_s: float | None = None
) -> MemoryBucket:
    """Return a bucket of a deduplication; with a delay, it is within the watermark."""
    if delay_s is not None:
        function = Deduplication(row_time=event_time, delay_us=round(delay_s * 1_000_000))
    else:
        function = Deduplication(key_time=event_time if event_time in keys else None)
    return MemoryBucket(function, [schema.field(key) for key in keys], [pa.field(EXPIRES_US, pa.int64())], event_time)


def make_sessions(
    schema: Any, keys: Sequence[str], end: str, gap_s: float, aggregates: Mapping[str, Aggregate]
) -> MemoryBucket:
    """Return a bucket of sessions; the input has the end of each row's own session."""
    bound = bind_aggregates(schema, aggregates)
    kind = pa.list_(pa.struct([pa.field(START, TIME), pa.field(END, TIME), *make_state_fields(bound)]))
    function = Sessions(bound, end, round(gap_s * 1_000_000))
    return MemoryBucket(function, [schema.field(key) for key in keys], [pa.field(SESSIONS, kind)], end)


def make_top(
    schema: Any, keys: Sequence[str], k: int, order: Sequence[tuple[str, bool]], changed_only: bool, tasks: int = 0
) -> MemoryBucket:
    """Return a bucket of a top k; with `tasks`, that many tasks drop rows before the shuffle."""
    value_names = [name for name in schema.names if name not in keys]
    function = TopK(k, tuple(order), tuple(value_names), tuple(schema.names), "rank", changed_only)
    kind = pa.list_(pa.struct([schema.field(name) for name in value_names]))
    return MemoryBucket(
        function,
        [schema.field(key) for key in keys],
        [pa.field(TOP, kind)],
        None,
        (function.thin, tasks) if tasks else None,
    )
