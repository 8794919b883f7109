"""The plan of an operator: packing, Spark's shuffle, our function keyed by bucket, unpacking.

It uses only public DataFrame calls; `docs/design` describes it. Errors that can be detected before anything runs are
raised here.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.state import GroupStateTimeout
from pyspark.sql.types import StructType

from arrow_schemas.row import EXPIRES_MS
from arrow_schemas.spark_types import key_fields, state_fields
from spark_state_ext.backends.registry import FSSPEC
from spark_state_ext.engine.job import PANDAS, Job
from spark_state_ext.engine.options import StateOptions
from spark_state_ext.errors import UnsupportedPlanError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.spark.client.columns import (
    WATERMARK_KEY,
    KeyLike,
    find_event_time,
    parse_schema,
    refuse_equal_names,
    resolve_keys,
    select_packed_columns,
    select_partition_columns,
)
from spark_state_ext.spark.client.lease_keeper import LeaseKeeper
from spark_state_ext.spark.client.other_queries import log_other_queries
from spark_state_ext.spark.client.plain import use_spark_state
from spark_state_ext.spark.client.start_capture import capture_rescaling, capture_start
from spark_state_ext.spark.client.start_check import check_start
from spark_state_ext.spark.client.task_functions import bucket_entry, pack_entry, unpack_entry
from spark_state_ext.spark.shuffle.combine import Combiner, Combining
from spark_state_ext.spark.shuffle.output import OUTPUT_SCHEMA
from spark_state_ext.spark.shuffle.payload import NO_ROW_LIMIT, PAYLOAD_SCHEMA
from spark_state_ext.spark.shuffle.progress_numbers import observe_sizes, observe_start
from spark_state_ext.worker.worker import Worker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["TIMEOUT_CONFS", "Request", "check_types", "plan_operator"]

_DRIVER = ("spark.driver.host", "spark.driver.port")
# Does not match local-cluster, where executors are separate processes.
_LOCAL_MASTER = re.compile(r"local(\[|$)")
TIMEOUT_CONFS = (
    GroupStateTimeout.NoTimeout,
    GroupStateTimeout.ProcessingTimeTimeout,
    GroupStateTimeout.EventTimeTimeout,
)


@dataclass(frozen=True)
class Request:
    """A call of a user or a built-in operator that is to be planned.

    Parameters
    ----------
    api
        How `func` is called: `PANDAS`, `ROWS` or `ARROW`.
    df, keys, func, output, state, output_mode, timeout_conf
        As for `ArrowState.apply_in_arrow_with_state`.
    name
        Name of the method or function that the user called, for errors.
    combining
        How rows are combined before the shuffle; `func` gets the combined rows. None: they are not combined.
    function
        Identity of a built-in operator, as in `OperatorFile`: it must not change while there is state.
    partitioned
        Whether `df` ends with the columns of `select_partition_columns`, which `func` does not get.
    """

    api: str
    df: DataFrame
    keys: KeyLike | Sequence[KeyLike]
    func: Callable[..., Any]
    output: StructType | str
    state: StructType | str
    output_mode: str
    timeout_conf: str
    name: str
    combining: Combining | None = None
    function: str | None = None
    partitioned: bool = False


@dataclass(frozen=True)
class _Columns:
    """The columns of a plan.

    Parameters
    ----------
    keys, state, output
        Types of the key columns, of the state and of the function's output.
    row_type
        Type of the rows that the function gets.
    key_positions
        Position of each key among the packed columns.
    event_time
        Position of the packed column with the watermark, and the watermark's delay; None: there is no watermark.
    packed
        The rows to pack, and their hash.
    combiner
        Combines rows while they are packed; None: they are not combined.
    """

    keys: StructType
    state: StructType
    output: StructType
    row_type: StructType
    key_positions: tuple[int, ...]
    event_time: tuple[int, Any] | None
    packed: DataFrame
    combiner: Combiner | None


def plan_operator(options: StateOptions, request: Request) -> DataFrame:
    """Plan an operator, and keep the lease of its queries."""
    if not request.df.isStreaming:
        raise UnsupportedPlanError(
            f"{request.name} is not supported with a batch DataFrame: state lives from micro-batch to "
            "micro-batch. Use readStream for the input."
        )
    if request.timeout_conf not in TIMEOUT_CONFS:
        raise UsageError(f"the timeout must be one of {', '.join(TIMEOUT_CONFS)}, not {request.timeout_conf!r}")
    spark = request.df.sparkSession
    case_sensitive = spark.conf.get("spark.sql.caseSensitive", "false") == "true"
    columns = _resolve_columns(options, request, case_sensitive)
    job, adopted = capture_start(spark, _make_job(options, request, columns, spark, case_sensitive))
    check_start(spark, job)
    job = capture_rescaling(spark, job)
    log_other_queries(options.root, options.storage_options, options.operator)
    result = _connect_stages(job.to_plain(), options.operator, request, columns)
    keeper = Worker.current().own(LeaseKeeper)
    rescales = job.rescaled_from is not None
    keeper.keep(
        spark, _list_lease_folders(options), job.application_id, job.plan_id, options.lease_ms, adopted, rescales
    )
    return result


def _resolve_columns(options: StateOptions, request: Request, case_sensitive: bool) -> _Columns:
    df, input_type = _add_partition_columns(options, request)
    spark = df.sparkSession
    keys: list[Any] = list(request.keys) if isinstance(request.keys, (list, tuple)) else [request.keys]
    state_type = parse_schema(request.state, spark, "the state schema")
    output_type = parse_schema(request.output, spark, "the output schema")
    key_type, positions, extra_keys = resolve_keys(df, input_type, keys)
    key_fields(key_type.json())
    check_types(request.api, state_type, output_type, input_type, case_sensitive)
    event_time = find_event_time(input_type)
    if options.ttl is not None and options.ttl.clock == "event" and event_time is None:
        raise UnsupportedPlanError("a Ttl with clock='event' needs an input with a watermark: call withWatermark")
    packed = select_packed_columns(df, input_type, key_type, positions, extra_keys)
    combiner, row_type = None, input_type
    if request.combining is not None:
        # The combiner's output is packed; its columns begin with the keys.
        assert not extra_keys, "operators select their keys"
        combiner = Combiner(request.combining.function, tuple(input_type.names), positions)
        row_type = request.combining.row_type
        positions = request.combining.places(input_type, positions)
        if event_time is not None:
            event_time = request.combining.places(input_type, [event_time[0]])[0], event_time[1]
    return _Columns(key_type, state_type, output_type, row_type, positions, event_time, packed, combiner)


def _add_partition_columns(options: StateOptions, request: Request) -> tuple[DataFrame, StructType]:
    """Return the input, followed by the columns of a row's source partition if buckets go by it, and the input type."""
    df, source = request.df, options.source_partition
    if source is None:
        return df, df.schema
    if not request.partitioned:
        return df.select("*", *select_partition_columns(df, source)), df.schema
    trailing = 1 if source.stream is None else 2
    return df, StructType(df.schema.fields[:-trailing])


def check_types(
    api: str, state_type: StructType, output_type: StructType, input_type: StructType, case_sensitive: bool
) -> None:
    """Refuse schemas that an operator does not support."""
    state_fields(state_type.json())
    refuse_equal_names(state_type, "state", case_sensitive)
    refuse_equal_names(output_type, "output", case_sensitive=True)
    if api != PANDAS:
        state_fields(output_type.json(), "output")
        state_fields(input_type.json(), "input")
    if not state_type.fields:
        raise UsageError("the state schema has no columns: even state that only marks a key as seen needs one")
    if EXPIRES_MS in state_type.names:
        raise UsageError(f"no state column may be named {EXPIRES_MS!r}: that column holds the time to live")


def _make_job(
    options: StateOptions, request: Request, columns: _Columns, spark: SparkSession, case_sensitive: bool
) -> Job:
    return Job(
        options=options,
        key_schema=columns.keys.json(),
        state_schema=columns.state.json(),
        columns=tuple(columns.row_type.names),
        key_positions=columns.key_positions,
        timeout_conf=request.timeout_conf,
        event_time_position=-1 if columns.event_time is None else columns.event_time[0],
        timezone=spark.conf.get("spark.sql.session.timeZone") or "UTC",
        frame_rows_max=_read_frame_rows_max(spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch", "10000")),
        late_by_previous_watermark=spark.conf.get("spark.sql.streaming.statefulOperator.allowMultiple", "true")
        != "false",
        application_id=_identify_application(spark),
        local_mode=bool(_LOCAL_MASTER.match(spark.conf.get("spark.master", "") or "")),
        plan_id=uuid.uuid4().hex,
        batches_retained=max(1, int(spark.conf.get("spark.sql.streaming.minBatchesToRetain", "100") or "100")),
        api=request.api,
        input_schema=columns.row_type.json(),
        output_schema=columns.output.json(),
        function=request.function,
        case_sensitive=case_sensitive,
    )


def _connect_stages(job: dict[str, Any], operator: str, request: Request, columns: _Columns) -> DataFrame:
    """Connect the stages before and after Spark's shuffle."""
    packed = observe_start(columns.packed.mapInArrow(pack_entry(job, columns.combiner), PAYLOAD_SCHEMA), operator)
    if columns.event_time is not None:
        packed = packed.withMetadata("event_time", {WATERMARK_KEY: columns.event_time[1]})
    result_schema = request.output if request.api == PANDAS else OUTPUT_SCHEMA
    with use_spark_state():
        result = packed.groupBy("bucket").applyInPandasWithState(
            bucket_entry(job, request.func), result_schema, "pointer binary", request.output_mode, request.timeout_conf
        )
    if request.api == PANDAS:
        return result
    return observe_sizes(result, operator).mapInArrow(unpack_entry(), columns.output)


def _list_lease_folders(options: StateOptions) -> list[Folder]:
    """Return the operator's folder in each backend in which a run holds a lease."""
    roots = [(options.root, dict(options.storage_options))]
    roots += [(backend.root, dict(backend.storage_options)) for backend in options.backends if backend.kind == FSSPEC]
    return [Folder(root, storage_options).child(options.operator) for root, storage_options in roots]


def _identify_application(spark: SparkSession) -> str:
    """Return Spark's application id and its driver's address: two drivers may give the same application id."""
    app, host, port = (spark.conf.get(name, "") or "" for name in ("spark.app.id", *_DRIVER))
    return f"{app or uuid.uuid4().hex} {host}:{port}"


def _read_frame_rows_max(text: str | None) -> int:
    rows = int(text or "10000")
    return rows if rows > 0 else NO_ROW_LIMIT
