"""`run`: runs a stateful function over batches in this process and without Spark, with the code that executors run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

import pyarrow as pa
from pyspark.sql.streaming.state import GroupStateTimeout
from pyspark.sql.types import StructType

from spark_state_ext.engine.job import ARROW, PANDAS, ROWS
from spark_state_ext.errors import UnsupportedPlanError, UsageError
from spark_state_ext.functions.ttl import Ttl
from spark_state_ext.spark.client.planner import TIMEOUT_CONFS
from spark_state_ext.testing.batches import Clock, RunResult, event_time_position, run_batches
from spark_state_ext.testing.buckets import Buckets
from spark_state_ext.testing.jobs import check_delay, check_restart, make_job, make_options
from spark_state_ext.testing.operator_columns import OPERATORS
from spark_state_ext.testing.schemas import Rows, struct_json

__all__ = ["run"]


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

    This runs what executors run in a task: rows are packed into buckets, each bucket is called with its pointer, and
    its state is in a local store and in checkpoint files, below a temporary folder.

    Parameters
    ----------
    func
        The function that you would give to Spark or to `ArrowState`.
    batches
        The rows of each micro-batch: a table in any form (PyArrow, pandas, polars, a dict of columns), a list of dicts,
        or None for a batch without rows. Such a batch calls keys that have timed out, like Spark's no-data batches.
    keys
        Names of the grouping columns.
    output_schema, state_schema
        A `StructType`, Spark's DDL, or a `pyarrow.Schema`.
    api
        How `func` is called: ``"pandas"`` (`applyInPandasWithState`), ``"arrow"`` (`apply_in_arrow_with_state`) or
        ``"rows"`` (`apply_rows_with_state`).
    input_schema
        The input's columns; None: the columns of the first batch that has columns.
    timeout_conf
        ``"NoTimeout"``, ``"ProcessingTimeTimeout"`` or ``"EventTimeTimeout"``.
    event_time
        The column that has the watermark, as in `withWatermark`. Under the event-time timeout late rows are dropped.
    delay_ms
        How far the watermark stays behind the latest event time, milliseconds.
    watermarks_ms
        The watermark of each batch, milliseconds since 1970; None: computed from `event_time`, like Spark does: a batch
        runs with the watermark of the batches before it, and the first one with 0.
    processing_times_ms
        The time of each batch, milliseconds since 1970; None: 2024-01-01 UTC for the first, one second more for each.
    restart
        Numbers of the batches before which the job restarts on another machine: its local store is gone, and state
        is loaded from checkpoint files. True: before each batch.
    buckets
        Number of buckets.
    ttl, strict_output
        The same as for `ArrowState`.
    timezone
        The session's time zone, in which pandas frames have their times.

    Returns
    -------
    RunResult
        Output and state of each batch.

    Raises
    ------
    UsageError, UnsupportedPlanError, UnsupportedTypeError
        If an argument cannot work, as on Spark.
    UserFunctionError
        If the function raises; the cause is attached.
    StateValueError, ResultTypeError
        If the function returns what its schemas cannot hold, or a batch is not a table of the input.

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
    _check(func, api, timeout_conf, event_time, delay_ms, watermarks_ms)
    check_restart(restart)
    rows = Rows(None if input_schema is None else struct_json(input_schema, "the input schema"))
    tables = rows.tables(batches)
    columns = [keys] if isinstance(keys, str) else list(keys)
    input_type = StructType.fromJson(json.loads(rows.get_schema()))
    event_position = event_time_position(event_time, input_type)
    clock = Clock(event_position, delay_ms, watermarks_ms, processing_times_ms)
    if ttl is not None and ttl.clock == "event" and not clock.has_watermark:
        raise UnsupportedPlanError("a Ttl with clock='event' needs a watermark: give event_time, or watermarks_ms")
    with tempfile.TemporaryDirectory(prefix="spark_state_ext-run-") as folder:
        job = make_job(
            make_options(folder, buckets, ttl, restart=restart, strict_output=strict_output),
            api,
            input_type,
            _key_positions(columns, input_type),
            _parse_struct(state_schema, "the state schema"),
            _parse_struct(output_schema, "the output schema"),
            timeout_conf=timeout_conf,
            event_time_position=event_position,
            timezone=timezone,
        )
        return run_batches(Buckets(job, func), tables, clock, restart)


def _parse_struct(schema: StructType | pa.Schema | str, what: str) -> StructType:
    return StructType.fromJson(json.loads(struct_json(schema, what)))


def _check(func: Any, api: str, timeout_conf: str, event_time: str | None, delay_ms: Any, watermarks: Any) -> None:
    if not callable(func):
        raise UsageError(f"func must be a function, not {func!r}")
    if func in OPERATORS:
        raise UsageError(f"{func.__name__} is a built-in operator: run it with run_operator()")
    if api not in (PANDAS, ARROW, ROWS):
        raise UsageError(f"api must be {PANDAS!r}, {ARROW!r} or {ROWS!r}, not {api!r}")
    if timeout_conf not in TIMEOUT_CONFS:
        raise UsageError(f"the timeout must be one of {', '.join(TIMEOUT_CONFS)}, not {timeout_conf!r}")
    check_delay(delay_ms)
    if delay_ms and (event_time is None or watermarks is not None):
        raise UsageError(
            "delay_ms is how far the watermark stays behind event_time: give event_time, and no watermarks_ms"
        )
    if timeout_conf == GroupStateTimeout.EventTimeTimeout and event_time is None and watermarks is None:
        raise UnsupportedPlanError(
            "EventTimeTimeout needs a watermark, as on Spark: give event_time (and delay_ms), or watermarks_ms"
        )


def _key_positions(keys: Sequence[str], input_type: StructType) -> tuple[int, ...]:
    for key in keys:
        if key not in input_type.names:
            raise UsageError(
                f"the key {key!r} is not a column of the input, which has {', '.join(input_type.names)}: run() takes "
                "names of columns; if the job groups by an expression, give it as a column"
            )
    return tuple(input_type.names.index(key) for key in keys)
