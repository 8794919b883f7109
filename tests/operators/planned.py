"""Operators and the buckets they run in, planned without Spark."""

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

__all__ = ["TIME", "aggregates_of", "aggregation", "at", "deduplication", "seconds", "sessions", "state_of", "top"]

TIME = pa.timestamp("us", "UTC")
_FIRST = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)


def at(second: float | None) -> dt.datetime | None:
    """A time, so many seconds from 1970 on."""
    return None if second is None else _FIRST + dt.timedelta(seconds=second)


def seconds(time: dt.datetime) -> float:
    """Inverse of `at`."""
    return (time - _FIRST).total_seconds()


def aggregates_of(schema: Any, aggregates: Mapping[str, Aggregate]) -> Aggregates:
    """Functions of the columns of an input."""
    bound = []
    for name, spec in aggregates.items():
        kind = None if spec.column is None else schema.field(spec.column).type
        bound.append(BoundAggregate(name, find_kernel(spec, kind, name), spec.column))
    return Aggregates(tuple(bound))


def state_of(aggregates: Aggregates) -> list[Any]:
    """Fields of their buffers."""
    return [
        pa.field(name, kind)
        for bound in aggregates.bound
        for name, kind in zip(bound.state_names, bound.state_types, strict=True)
    ]


def aggregation(
    schema: Any,
    keys: Sequence[str],
    aggregates: Mapping[str, Aggregate],
    event_time: str | None = None,
    append: bool = False,
    tasks: int = 0,
) -> MemoryBucket:
    """A bucket of an aggregation, with so many tasks that aggregate their rows first, if any."""
    found = aggregates_of(schema, aggregates)
    key_fields = [schema.field(key) for key in keys]
    function = Aggregation(found, event_time, append, partial=tasks > 0)
    combine = (PartialAggregation(found, tuple(keys)), tasks) if tasks else None
    return MemoryBucket(function, key_fields, state_of(found), event_time, combine)


def deduplication(
    schema: Any, keys: Sequence[str], event_time: str | None = None, delay_s: float | None = None
) -> MemoryBucket:
    """A bucket of a deduplication; with a delay, within the watermark."""
    if delay_s is not None:
        function = Deduplication(row_time=event_time, delay_us=round(delay_s * 1_000_000))
    else:
        function = Deduplication(key_time=event_time if event_time in keys else None)
    return MemoryBucket(function, [schema.field(key) for key in keys], [pa.field(EXPIRES_US, pa.int64())], event_time)


def sessions(
    schema: Any, keys: Sequence[str], end: str, gap_s: float, aggregates: Mapping[str, Aggregate]
) -> MemoryBucket:
    """A bucket of sessions; the input has the ends of the rows' own sessions."""
    found = aggregates_of(schema, aggregates)
    kind = pa.list_(pa.struct([pa.field(START, TIME), pa.field(END, TIME), *state_of(found)]))
    function = Sessions(found, end, round(gap_s * 1_000_000))
    return MemoryBucket(function, [schema.field(key) for key in keys], [pa.field(SESSIONS, kind)], end)


def top(
    schema: Any, keys: Sequence[str], k: int, order: Sequence[tuple[str, bool]], changed_only: bool, tasks: int = 0
) -> MemoryBucket:
    """A bucket of a top k, with so many tasks that leave out rows first, if any."""
    kept = [name for name in schema.names if name not in keys]
    function = TopK(k, tuple(order), tuple(kept), tuple(schema.names), "rank", changed_only)
    kind = pa.list_(pa.struct([schema.field(name) for name in kept]))
    return MemoryBucket(
        function,
        [schema.field(key) for key in keys],
        [pa.field(TOP, kind)],
        None,
        (function.thin, tasks) if tasks else None,
    )
