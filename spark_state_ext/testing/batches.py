"""The batches of a run: their times and their results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.types import StructType, TimestampNTZType, TimestampType

from arrow_schemas.columns import event_times_us
from arrow_schemas.spark_types import state_fields
from spark_state_ext.engine.job import PANDAS
from spark_state_ext.errors import UnsupportedPlanError, UsageError
from spark_state_ext.spark.executor.key_work import Times
from spark_state_ext.testing.buckets import Buckets
from spark_state_ext.testing.outputs import convert_frames, convert_payloads

__all__ = ["BatchResult", "Clock", "RunResult", "event_time_position", "run_batches"]

# 2024-01-01 UTC: a fixed start, because a batch's result must not depend on when a test runs.
_FIRST_MS, _EVERY_MS = 1_704_067_200_000, 1_000


@dataclass(frozen=True)
class BatchResult:
    """The result of one batch.

    Parameters
    ----------
    output
        The function's output, with the columns of the output schema.
    state
        All state after the batch, in the order of the keys' hashes: the keys, the state columns and ``timeout_ms``
        (milliseconds since 1970; NULL for none). A key with a timeout but without state is included, with NULLs.
    watermark_ms
        The watermark that the batch ran with; None if there is none.
    processing_time_ms
        The time at which the batch ran.
    """

    output: pa.Table
    state: pa.Table
    watermark_ms: int | None
    processing_time_ms: int


@dataclass(frozen=True)
class RunResult:
    """The results of all batches.

    Parameters
    ----------
    batches
        One result for each batch.
    """

    batches: tuple[BatchResult, ...]

    @property
    def outputs(self) -> list[pa.Table]:
        """The output of each batch."""
        return [batch.output for batch in self.batches]

    @property
    def states(self) -> list[pa.Table]:
        """The state after each batch."""
        return [batch.state for batch in self.batches]

    @property
    def output(self) -> pa.Table:
        """The output of all batches."""
        return pa.concat_tables(self.outputs)

    @property
    def state(self) -> pa.Table:
        """The state after the last batch."""
        return self.batches[-1].state


def event_time_position(event_time: str | None, input_type: StructType) -> int:
    """Return the position of the column with the watermark; -1 if there is none."""
    if event_time is None:
        return -1
    if event_time not in input_type.names:
        raise UsageError(
            f"event_time={event_time!r} is not a column of the input, which has {', '.join(input_type.names)}"
        )
    kind = input_type[event_time].dataType
    # A window's time is its end.
    time = kind["end"].dataType if isinstance(kind, StructType) and "end" in kind.names else kind
    if not isinstance(time, (TimestampType, TimestampNTZType)):
        raise UnsupportedPlanError(
            f"event_time={event_time!r} is of type {kind.simpleString()}: a watermark needs a timestamp, or a window"
        )
    return input_type.names.index(event_time)


def run_batches(
    buckets: Buckets,
    tables: Iterable[pa.Table | None],
    clock: Clock,
    restart: bool | Collection[int],
    select_rows: Callable[[pa.Table], pa.Table] | None = None,
) -> RunResult:
    """Run all batches and return their results."""
    results = tuple(_run_each(buckets, tables, clock, restart, select_rows))
    if not results:
        raise UsageError("batches is empty: give at least one batch")
    return RunResult(results)


def _run_each(
    buckets: Buckets,
    tables: Iterable[pa.Table | None],
    clock: Clock,
    restart: bool | Collection[int],
    select_rows: Callable[[pa.Table], pa.Table] | None,
) -> Iterator[BatchResult]:
    job = buckets.job
    fields = state_fields(job.output_schema, "output")
    try:
        for number, table in enumerate(tables):
            if number and (restart if isinstance(restart, bool) else number in restart):
                buckets.restart()
            times = clock.of_batch(number)
            frames = buckets.batch(number, table if table is None or select_rows is None else select_rows(table), times)
            if job.api == PANDAS:
                output = convert_frames(frames, fields, job.timezone)
            else:
                output = convert_payloads(frames, fields)
            clock.note(table)
            watermark_ms = times.watermark_ms if times.watermark_present else None
            yield BatchResult(output, buckets.state(times), watermark_ms, times.processing_ms)
    finally:
        buckets.close()


class Clock:
    """The processing times and watermarks of the batches."""

    def __init__(
        self,
        event_time_position: int,
        delay_ms: int,
        watermarks_ms: Iterable[int] | None,
        processing_times_ms: Iterable[int] | None,
    ) -> None:
        self._event_time_position = event_time_position
        self._delay_ms = delay_ms
        self._watermarks = None if watermarks_ms is None else iter(watermarks_ms)
        times: Iterable[int] = itertools.count(_FIRST_MS, _EVERY_MS)
        self._times = iter(times if processing_times_ms is None else processing_times_ms)
        self.has_watermark = self._watermarks is not None or event_time_position >= 0
        self._watermark_ms = 0

    def of_batch(self, number: int) -> Times:
        """Return the times of a batch."""
        now_ms = _check_time(next(self._times, None), number, "processing_times_ms")
        if self._watermarks is not None:
            watermark_ms = _check_time(next(self._watermarks, None), number, "watermarks_ms")
            if watermark_ms < self._watermark_ms:
                raise UsageError(
                    f"watermarks_ms has {watermark_ms} for batch {number} after {self._watermark_ms}: a watermark "
                    "never goes back"
                )
            self._watermark_ms = watermark_ms
        return Times(now_ms, self._watermark_ms if self.has_watermark else GroupState.NO_TIMESTAMP, self.has_watermark)

    def note(self, table: pa.Table | None) -> None:
        """Move the watermark of the next batch by the rows of a batch that has run."""
        if table is None or self._event_time_position < 0 or self._watermarks is not None:
            return
        latest_us = pc.max(event_times_us(table.column(self._event_time_position))).as_py()
        if latest_us is not None:
            self._watermark_ms = max(self._watermark_ms, latest_us // 1000 - self._delay_ms)


def _check_time(time_ms: Any, number: int, name: str) -> int:
    if time_ms is None:
        raise UsageError(f"{name} has no time for batch {number}: give a time for each batch")
    if isinstance(time_ms, bool) or not isinstance(time_ms, int) or time_ms < 0:
        raise UsageError(f"{name} has {time_ms!r} for batch {number}: give whole milliseconds since 1970")
    return time_ms
