"""`run_operator`: runs a built-in operator over batches, in this process and without Spark."""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructField, StructType

from spark_state_ext.engine.job import ARROW
from spark_state_ext.errors import UnsupportedPlanError, UsageError
from spark_state_ext.functions.ttl import Ttl
from spark_state_ext.spark.client.columns import WATERMARK_KEY, find_event_time
from spark_state_ext.spark.shuffle.combine import Combiner
from spark_state_ext.testing.batches import Clock, RunResult, event_time_position, run_batches
from spark_state_ext.testing.buckets import Buckets
from spark_state_ext.testing.jobs import check_delay, check_restart, make_job, make_options
from spark_state_ext.testing.operator_columns import OPERATORS, OperatorRun, plan_run
from spark_state_ext.testing.schemas import Rows, struct_json

__all__ = ["run_operator"]


def run_operator(
    operator: Callable[..., Any],
    batches: Iterable[Any],
    *arguments: Any,
    input_schema: StructType | pa.Schema | str | None = None,
    event_time: str | None = None,
    delay_ms: int = 0,
    watermarks_ms: Iterable[int] | None = None,
    processing_times_ms: Iterable[int] | None = None,
    restart: bool | Collection[int] = False,
    buckets: int = 1,
    ttl: Ttl | None = None,
    **named: Any,
) -> RunResult:
    """Run a built-in operator over batches, in this process: no Spark session, no JVM, no cluster.

    The code that plans operators on Spark plans this one; it then runs like a function in `run`.

    Parameters
    ----------
    operator
        `aggregate`, `deduplicate`, `sessionize` or `top_k`.
    batches
        The rows of each micro-batch, as for `run`.
    *arguments, **named
        The operator's own arguments, after the state and the DataFrame. Give columns by name; a key of `aggregate` may
        be a `Window`.
    input_schema
        The input's columns; None: the columns of the first batch that has columns.
    event_time
        The column that has the watermark, as in `withWatermark`.
    delay_ms
        How far the watermark stays behind the latest event time, milliseconds; also the period in which `deduplicate`
        with ``within_watermark=True`` drops duplicates.
    watermarks_ms, processing_times_ms, restart
        The same as for `run`.
    buckets, ttl
        The same as for `ArrowState`.

    Returns
    -------
    RunResult
        Output and state of each batch. ``watermark_ms`` is None if no column that the operator uses has a watermark.

    Raises
    ------
    UsageError, UnsupportedPlanError, UnsupportedTypeError
        If an argument cannot work, as on Spark; also for expressions, which need Spark.
    StateValueError
        If an aggregate overflows its type, or a batch is not a table of the input.

    Examples
    --------
    >>> from spark_state_ext import Agg, aggregate
    >>> batches = [{"user": ["a", "a"]}, {"user": ["a"]}]
    >>> result = run_operator(aggregate, batches, "user", {"n": Agg.count()})
    >>> result.output.to_pylist()
    [{'user': 'a', 'n': 2}, {'user': 'a', 'n': 3}]
    """
    bound = _bind_arguments(operator, arguments, named)
    check_delay(delay_ms)
    check_restart(restart)
    if event_time is None and (delay_ms or watermarks_ms is not None):
        raise UsageError("delay_ms and watermarks_ms set the watermark on event_time: give event_time")
    rows = Rows(None if input_schema is None else struct_json(input_schema, "the input schema"))
    tables = rows.tables(batches)
    input_type = _add_watermark(StructType.fromJson(json.loads(rows.get_schema())), event_time, delay_ms)
    run = plan_run(operator, bound, input_type, has_ttl=ttl is not None)
    # None if the watermark does not reach the operator, as on Spark.
    event_time_field = find_event_time(run.row_type)
    if ttl is not None and ttl.clock == "event" and event_time_field is None:
        raise UnsupportedPlanError("a Ttl with clock='event' needs an input with a watermark: give event_time")
    clock = Clock(
        -1 if event_time_field is None else event_time_position(event_time, input_type),
        delay_ms,
        None if event_time_field is None else watermarks_ms,
        processing_times_ms,
    )
    with tempfile.TemporaryDirectory(prefix="spark_state_ext-run-") as folder:
        operator_buckets = _make_buckets(
            make_options(folder, buckets, ttl, restart=restart),
            run,
            -1 if event_time_field is None else event_time_field[0],
        )
        return run_batches(operator_buckets, tables, clock, restart, run.rows)


def _bind_arguments(operator: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments by name, without the state and the frame."""
    if operator not in OPERATORS:
        names = ", ".join(each.__name__ for each in OPERATORS)
        raise UsageError(f"operator must be one of {names}, not {operator!r}: run functions with run()")
    try:
        bound = inspect.signature(operator).bind(None, None, *arguments, **named)
    except TypeError as error:
        raise UsageError(f"{operator.__name__} does not take these arguments: {error}") from error
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name not in ("state", "df")}


def _add_watermark(input_type: StructType, event_time: str | None, delay_ms: int) -> StructType:
    """Return the input's columns, with the watermark on the event time like `withWatermark` sets it."""
    event_position = event_time_position(event_time, input_type)
    return StructType(
        [
            StructField(
                field.name,
                field.dataType,
                field.nullable,
                {WATERMARK_KEY: delay_ms} if position == event_position else None,
            )
            for position, field in enumerate(input_type.fields)
        ]
    )


def _make_buckets(options: Any, run: OperatorRun, event_position: int) -> Buckets:
    plan, row_type = run.plan, run.row_type
    positions = tuple(row_type.names.index(key) for key in run.keys)
    combiner, input_type = None, row_type
    if plan.combining is not None:
        combiner = Combiner(plan.combining.function, tuple(row_type.names), positions)
        input_type = plan.combining.row_type
        positions = plan.combining.places(row_type, positions)
        event_position = plan.combining.places(row_type, [event_position])[0] if event_position >= 0 else -1
    job = make_job(
        options,
        ARROW,
        input_type,
        positions,
        plan.state,
        plan.output,
        timeout_conf=plan.timeout_conf,
        event_time_position=event_position,
        timezone="UTC",
        function=plan.identity,
    )
    return Buckets(job, plan.func, combiner)
