"""`run`: a stateful function over batches, in this process and without Spark, by the code that executors run."""

from __future__ import annotations

import itertools
import json
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.types import StructField, StructType, TimestampNTZType, TimestampType

from arrow_schemas.columns import event_times_us
from arrow_schemas.spark_types import key_fields, state_fields
from spark_state_ext.engine.job import ARROW, PANDAS, ROWS, Job
from spark_state_ext.errors import UnsupportedPlanError, UsageError
from spark_state_ext.functions.ttl import Ttl
from spark_state_ext.spark.client.planner import TIMEOUT_CONFS, check_types
from spark_state_ext.spark.client.state import ArrowState
from spark_state_ext.spark.executor.key_work import Times
from spark_state_ext.testing.buckets import Buckets
from spark_state_ext.testing.outputs import table_of_frames, table_of_payloads
from spark_state_ext.testing.schemas import Rows, struct_json

__all__ = ["BatchResult", "RunResult", "run"]

# 2024-01-01 UTC: what a batch does must not depend on when a test runs.
_FIRST_MS, _EVERY_MS = 1_704_067_200_000, 1_000
_ROWS_MAX = 10_000


@dataclass(frozen=True)
class BatchResult:
    """What came of one batch.

    Parameters
    ----------
    output
        What the function gave, with the columns of the output schema.
    state
        All state after the batch, in the order of the keys' hashes: the keys, the state columns and ``timeout_ms``
        (milliseconds since 1970; NULL for none). A key that has a timeout and no state is there, with NULLs.
    watermark_ms
        The watermark that the batch ran with; None where there is none.
    processing_time_ms
        The time that the batch ran at.
    """

    output: pa.Table
    state: pa.Table
    watermark_ms: int | None
    processing_time_ms: int


@dataclass(frozen=True)
class RunResult:
    """What came of all batches.

    Parameters
    ----------
    batches
        One for each.
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


def run(
    func: Callable[..., Any],
    batches: Iterable[Any],
    keys: str | Sequence[str],
    output_schema: StructType | pa.Schema | str,
    state_schema: StructType | pa.Schema | str,
    *,
    api: Literal["pandas", "arrow", "rows"] = "pandas",
    input_schema: StructType | pa.Schema | str | None = None,
    timeout_conf: str = GroupStateTimeout.NoTimeout,
    event_time: str | None = None,
    delay_ms: int = 0,
    watermarks_ms: Iterable[int] | None = None,
    processing_times_ms: Iterable[int] | None = None,
    restart: bool | Collection[int] = False,
    buckets: int = 1,
    ttl: Ttl | None = None,
    strict_output: bool = True,
    timezone: str = "UTC",
) -> RunResult:
    """Run a stateful function over batches, in this process: no Spark session, no JVM, no cluster.

    What runs is what executors run in a task: rows are packed into buckets, each bucket is called with its pointer, its
    state lies in a local store and in checkpoint files, below a temporary folder.

    Parameters
    ----------
    func
        The function, as it is given to Spark or to `ArrowState`.
    batches
        The rows of each micro-batch: a table in any form (PyArrow, pandas, polars, a dict of columns), a list of dicts,
        or None for a batch without rows. Such a batch calls keys whose time is up, as Spark's batches without data do.
    keys
        Names of the grouping columns.
    output_schema, state_schema
        A `StructType`, Spark's DDL, or a `pyarrow.Schema`.
    api
        How `func` is called: ``"pandas"`` (`applyInPandasWithState`), ``"arrow"`` (`apply_in_arrow_with_state`) or
        ``"rows"`` (`apply_rows_with_state`).
    input_schema
        The input's columns; None: those of the first batch that has some.
    timeout_conf
        ``"NoTimeout"``, ``"ProcessingTimeTimeout"`` or ``"EventTimeTimeout"``.
    event_time
        The column that has the watermark, as in `withWatermark`. Under the event-time timeout late rows are dropped.
    delay_ms
        How far the watermark stays behind the latest event time, milliseconds.
    watermarks_ms
        The watermark of each batch, milliseconds since 1970; None: it is computed from `event_time`, as Spark does: a
        batch runs with the watermark of the batches before it, and the first one with 0.
    processing_times_ms
        The time of each batch, milliseconds since 1970; None: 2024-01-01 UTC and a second more for each.
    restart
        Numbers of the batches before which the job starts again elsewhere: its local store is gone, and state is
        loaded from checkpoint files. True: before each.
    buckets
        Number of buckets.
    ttl, strict_output
        As for `ArrowState`.
    timezone
        The session's time zone: pandas frames have times in it.

    Returns
    -------
    RunResult
        Output and state of each batch.

    Raises
    ------
    UsageError, UnsupportedPlanError, UnsupportedTypeError
        When an argument cannot work, as on Spark.
    UserFunctionError
        When the function raises; the cause is attached.
    StateValueError, ResultTypeError
        When the function gives what its schemas cannot hold, or a batch is no table of the input.

    Examples
    --------
    >>> def count(batch):
    ...     n = batch.counts.to_numpy() + batch.state["n"].fill_null(0).to_numpy()
    ...     batch.update({"n": n})
    ...     return {"user": batch.keys["user"], "n": n}
    >>> batches = [{"user": ["a", "a"]}, {"user": ["a"]}]
    >>> result = run(count, batches, "user", "user string, n long", "n long", api="arrow")
    >>> result.output.to_pylist()
    [{'user': 'a', 'n': 2}, {'user': 'a', 'n': 3}]
    """
    _check(func, api, timeout_conf, event_time, delay_ms, watermarks_ms, restart)
    rows = Rows(None if input_schema is None else struct_json(input_schema, "the input schema"))
    # The first batches may have no columns that tell the input's.
    source = iter(batches)
    first: list[pa.Table | None] = []
    while rows.json is None and (given := next(source, rows)) is not rows:
        first.append(rows.table(given))
    tables = itertools.chain(first, map(rows.table, source))
    columns = [keys] if isinstance(keys, str) else list(keys)
    input_type = StructType.fromJson(json.loads(rows.known()))
    event_at = _event_time_position(event_time, input_type)
    clock = _Clock(event_at, delay_ms, watermarks_ms, processing_times_ms)
    with tempfile.TemporaryDirectory(prefix="spark_state_ext-run-") as folder:
        state = ArrowState(
            Path(folder) / "root",
            "run",
            buckets=buckets,
            local_dir=Path(folder) / "local",
            # Restarts load from checkpoint files alone, so that nothing may be left in pointers.
            backends=("changelog", "fsspec") if restart is False else ("fsspec",),
            ttl=ttl,
            strict_output=strict_output,
        )
        job = _job(
            state,
            api,
            input_type,
            _key_positions(columns, input_type),
            struct_json(state_schema, "the state schema"),
            struct_json(output_schema, "the output schema"),
            timeout_conf=timeout_conf,
            event_time_position=event_at,
            timezone=timezone,
        )
        if ttl is not None and ttl.clock == "event" and not clock.has_watermark:
            raise UnsupportedPlanError("a Ttl with clock='event' needs a watermark: give event_time, or watermarks_ms")
        found = tuple(_results(Buckets(job, func), job, tables, clock, restart))
    if not found:
        raise UsageError("batches has none: give at least one")
    return RunResult(found)


def _check(
    func: Any, api: str, timeout_conf: str, event_time: str | None, delay_ms: Any, watermarks: Any, restart: Any
) -> None:
    if not callable(func):
        raise UsageError(f"func must be a function, not {func!r}")
    if api not in (PANDAS, ARROW, ROWS):
        raise UsageError(f"api must be {PANDAS!r}, {ARROW!r} or {ROWS!r}, not {api!r}")
    if timeout_conf not in TIMEOUT_CONFS:
        raise UsageError(f"the timeout must be one of {', '.join(TIMEOUT_CONFS)}, not {timeout_conf!r}")
    if isinstance(delay_ms, bool) or not isinstance(delay_ms, int) or delay_ms < 0:
        raise UsageError(f"delay_ms must be a whole number from 0 on, not {delay_ms!r}")
    if delay_ms and (event_time is None or watermarks is not None):
        raise UsageError(
            "delay_ms is how far the watermark stays behind event_time: give event_time, and no watermarks_ms"
        )
    if timeout_conf == GroupStateTimeout.EventTimeTimeout and event_time is None and watermarks is None:
        raise UnsupportedPlanError(
            "EventTimeTimeout needs a watermark, as on Spark: give event_time (and delay_ms), or watermarks_ms"
        )
    if not isinstance(restart, (bool, Collection)) or isinstance(restart, str):
        raise UsageError(f"restart must be True, False, or numbers of batches, not {restart!r}")


def _key_positions(keys: Sequence[str], input_type: StructType) -> tuple[int, ...]:
    for key in keys:
        if key not in input_type.names:
            raise UsageError(
                f"the key {key!r} is no column of the input, which has {', '.join(input_type.names)}: run() takes "
                "names of columns; give an expression that the job groups by as a column"
            )
    return tuple(input_type.names.index(key) for key in keys)


def _event_time_position(event_time: str | None, input_type: StructType) -> int:
    if event_time is None:
        return -1
    if event_time not in input_type.names:
        raise UsageError(
            f"event_time={event_time!r} is no column of the input, which has {', '.join(input_type.names)}"
        )
    kind = input_type[event_time].dataType
    # Or of a window, which counts by its end.
    time = kind["end"].dataType if isinstance(kind, StructType) and "end" in kind.names else kind
    if not isinstance(time, (TimestampType, TimestampNTZType)):
        raise UnsupportedPlanError(
            f"event_time={event_time!r} is of type {kind.simpleString()}: a watermark needs a timestamp, or a window"
        )
    return input_type.names.index(event_time)


def _job(
    state: ArrowState,
    api: str,
    input_type: StructType,
    key_positions: tuple[int, ...],
    state_json: str,
    output_json: str,
    **others: Any,
) -> Job:
    """What a plan would send to executors; refuses what a plan refuses."""
    fields = [input_type.fields[at] for at in key_positions]
    key_type = StructType([StructField(field.name, field.dataType, field.nullable) for field in fields])
    key_fields(key_type.json())
    state_type, output_type = (StructType.fromJson(json.loads(text)) for text in (state_json, output_json))
    check_types(api, state_type, output_type, input_type, case_sensitive=False)
    return Job(
        options=state.options,
        key_schema=key_type.json(),
        state_schema=state_json,
        columns=tuple(input_type.names),
        key_positions=key_positions,
        frame_rows_max=_ROWS_MAX,
        late_by_previous_watermark=True,
        application_id="run",
        local_mode=True,
        plan_id=uuid.uuid4().hex,
        batches_retained=100,
        api=api,
        input_schema=input_type.json(),
        output_schema=output_json,
        **others,
    )


def _results(
    buckets: Buckets, job: Job, tables: Iterable[pa.Table | None], clock: _Clock, restart: bool | Collection[int]
) -> Iterator[BatchResult]:
    fields = state_fields(job.output_schema, "output")
    try:
        for number, table in enumerate(tables):
            if number and (restart if isinstance(restart, bool) else number in restart):
                buckets.restart()
            times = clock.of_batch(number)
            frames = buckets.batch(number, table, times)
            if job.api == PANDAS:
                output = table_of_frames(frames, fields, job.timezone)
            else:
                output = table_of_payloads(frames, fields)
            clock.note(table)
            watermark_ms = times.watermark_ms if times.watermark_present else None
            yield BatchResult(output, buckets.state(times), watermark_ms, times.processing_ms)
    finally:
        buckets.close()


class _Clock:
    """The times that batches run at.

    Parameters
    ----------
    event_time_position
        Column that has the watermark, or -1.
    delay_ms
        How far the watermark stays behind it.
    watermarks_ms, processing_times_ms
        As they are given; None: they are made.
    """

    def __init__(
        self,
        event_time_position: int,
        delay_ms: int,
        watermarks_ms: Iterable[int] | None,
        processing_times_ms: Iterable[int] | None,
    ) -> None:
        self._at = event_time_position
        self._delay_ms = delay_ms
        self._given = None if watermarks_ms is None else iter(watermarks_ms)
        times: Iterable[int] = itertools.count(_FIRST_MS, _EVERY_MS)
        self._times = iter(times if processing_times_ms is None else processing_times_ms)
        self.has_watermark = self._given is not None or event_time_position >= 0
        self._watermark_ms = 0

    def of_batch(self, number: int) -> Times:
        """The clock of a batch.

        Raises
        ------
        UsageError
            When a time was not given, or is none, or the watermark goes back.
        """
        now_ms = _time(next(self._times, None), number, "processing_times_ms")
        if self._given is not None:
            watermark_ms = _time(next(self._given, None), number, "watermarks_ms")
            if watermark_ms < self._watermark_ms:
                raise UsageError(
                    f"watermarks_ms has {watermark_ms} for batch {number} behind {self._watermark_ms}: a watermark "
                    "never goes back"
                )
            self._watermark_ms = watermark_ms
        return Times(now_ms, self._watermark_ms if self.has_watermark else GroupState.NO_TIMESTAMP, self.has_watermark)

    def note(self, table: pa.Table | None) -> None:
        """A batch has run: its rows move the watermark of the next one."""
        if table is None or self._at < 0 or self._given is not None:
            return
        latest_us = pc.max(event_times_us(table.column(self._at))).as_py()
        if latest_us is not None:
            self._watermark_ms = max(self._watermark_ms, latest_us // 1000 - self._delay_ms)


def _time(given: Any, number: int, name: str) -> int:
    if given is None:
        raise UsageError(f"{name} has no time for batch {number}: give one for each batch")
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise UsageError(f"{name} has {given!r} for batch {number}: give whole milliseconds since 1970")
    return given
