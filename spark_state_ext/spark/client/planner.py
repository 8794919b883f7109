"""The plan of an operator: packing, Spark's shuffle, our function keyed by bucket, unpacking.

Public DataFrame calls only. What the plan does is in `docs/design`; whatever can be refused is refused here, before
anything runs.
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
from spark_state_ext.spark.client.capturing import captured, with_rescaling
from spark_state_ext.spark.client.columns import (
    WATERMARK_KEY,
    KeyLike,
    event_time_of,
    packable,
    partition_columns,
    refuse_equal_names,
    resolve_keys,
    struct_of,
)
from spark_state_ext.spark.client.lease_keeper import LeaseKeeper
from spark_state_ext.spark.client.neighbours import tell_of_others
from spark_state_ext.spark.client.plain import unpatched
from spark_state_ext.spark.client.shim import bucket_entry, pack_entry, unpack_entry
from spark_state_ext.spark.client.start_check import check_start
from spark_state_ext.spark.shuffle.combine import Combiner, Combining
from spark_state_ext.spark.shuffle.observed import with_sizes, with_start
from spark_state_ext.spark.shuffle.output import OUTPUT_SCHEMA
from spark_state_ext.spark.shuffle.payload import NO_ROW_LIMIT, PAYLOAD_SCHEMA
from spark_state_ext.worker.worker import Worker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["TIMEOUT_CONFS", "Request", "check_types", "planned"]

_DRIVER = ("spark.driver.host", "spark.driver.port")
# Not local-cluster, whose executors are processes of their own.
_LOCAL_MASTER = re.compile(r"local(\[|$)")
TIMEOUT_CONFS = (
    GroupStateTimeout.NoTimeout,
    GroupStateTimeout.ProcessingTimeTimeout,
    GroupStateTimeout.EventTimeTimeout,
)


@dataclass(frozen=True)
class Request:
    """What a user, or an operator that is built on this, asks for.

    Parameters
    ----------
    api
        How `func` is called: `PANDAS`, `ROWS` or `ARROW`.
    df, keys, func, output, state, output_mode, timeout_conf
        As for `ArrowState.apply_in_arrow_with_state`.
    name
        What the user called, for errors.
    combining
        What makes rows fewer before the shuffle; `func` gets what it gives.
    function
        Of a built-in operator, as in `OperatorFile`: what must not change while there is state.
    partitioned
        The last columns of `df` are those of `partition_columns`, and no input of the function's.
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
        Types of the grouping, of the state and of what the function gives.
    given
        Type of the rows that the function gets.
    key_positions
        Where each key is among the packed columns.
    event_time
        Packed column that has the watermark, and its delay; None: none has.
    packed
        Rows to pack, and their hash.
    combiner
        What makes them fewer.
    """

    keys: StructType
    state: StructType
    output: StructType
    given: StructType
    key_positions: tuple[int, ...]
    event_time: tuple[int, Any] | None
    packed: DataFrame
    combiner: Combiner | None


def planned(options: StateOptions, asked: Request) -> DataFrame:
    """Plan an operator."""
    if not asked.df.isStreaming:
        raise UnsupportedPlanError(
            f"{asked.name} is not supported with a batch DataFrame: state lives from micro-batch to "
            "micro-batch. Use readStream for the input."
        )
    if asked.timeout_conf not in TIMEOUT_CONFS:
        raise UsageError(f"the timeout must be one of {', '.join(TIMEOUT_CONFS)}, not {asked.timeout_conf!r}")
    spark = asked.df.sparkSession
    case_sensitive = spark.conf.get("spark.sql.caseSensitive", "false") == "true"
    columns = _columns(options, asked, case_sensitive)
    job, adopted = captured(spark, _job(options, asked, columns, spark, case_sensitive))
    check_start(spark, job)
    job = with_rescaling(spark, job)
    tell_of_others(options.root, options.storage_options, options.operator)
    result = _wired(job.to_plain(), options.operator, asked, columns)
    keeper = Worker.current().own(LeaseKeeper)
    rescales = job.rescaled_from is not None
    keeper.keep(spark, _lease_folders(options), job.application_id, job.plan_id, options.lease_ms, adopted, rescales)
    return result


def _columns(options: StateOptions, asked: Request, case_sensitive: bool) -> _Columns:
    df, input_type = _with_partition(options, asked)
    spark = df.sparkSession
    keys: list[Any] = list(asked.keys) if isinstance(asked.keys, (list, tuple)) else [asked.keys]
    state_type = struct_of(asked.state, spark, "the state schema")
    output_type = struct_of(asked.output, spark, "the output schema")
    key_type, positions, extra_keys = resolve_keys(df, input_type, keys)
    key_fields(key_type.json())
    check_types(asked.api, state_type, output_type, input_type, case_sensitive)
    event_time = event_time_of(input_type)
    if options.ttl is not None and options.ttl.clock == "event" and event_time is None:
        raise UnsupportedPlanError("a Ttl with clock='event' needs an input with a watermark: call withWatermark")
    packed = packable(df, input_type, key_type, positions, extra_keys)
    combiner, given_type = None, input_type
    if asked.combining is not None:
        # What is packed is what the combiner makes of the rows; its columns begin with the keys.
        assert not extra_keys, "operators select their keys"
        combiner = Combiner(asked.combining.function, tuple(input_type.names), positions)
        given_type = asked.combining.row_type
        positions = asked.combining.places(input_type, positions)
        if event_time is not None:
            event_time = asked.combining.places(input_type, [event_time[0]])[0], event_time[1]
    return _Columns(key_type, state_type, output_type, given_type, positions, event_time, packed, combiner)


def _with_partition(options: StateOptions, asked: Request) -> tuple[DataFrame, StructType]:
    """The input, with what tells a row's partition behind its columns where that tells its bucket; and its columns."""
    df, source = asked.df, options.source_partition
    if source is None:
        return df, df.schema
    if not asked.partitioned:
        return df.select("*", *partition_columns(df, source)), df.schema
    behind = 1 if source.stream is None else 2
    return df, StructType(df.schema.fields[:-behind])


def check_types(
    api: str, state_type: StructType, output_type: StructType, input_type: StructType, case_sensitive: bool
) -> None:
    """Refuse schemas that an operator cannot have."""
    state_fields(state_type.json())
    refuse_equal_names(state_type, "state", case_sensitive)
    refuse_equal_names(output_type, "output", case_sensitive=True)
    if api != PANDAS:
        state_fields(output_type.json(), "output")
        state_fields(input_type.json(), "input")
    if not state_type.fields:
        raise UsageError("the state schema has no columns; state that only says that a key was seen has one too")
    if EXPIRES_MS in state_type.names:
        raise UsageError(f"no state column may be called {EXPIRES_MS!r}: that is where a time to live is kept")


def _job(options: StateOptions, asked: Request, columns: _Columns, spark: SparkSession, case_sensitive: bool) -> Job:
    return Job(
        options=options,
        key_schema=columns.keys.json(),
        state_schema=columns.state.json(),
        columns=tuple(columns.given.names),
        key_positions=columns.key_positions,
        timeout_conf=asked.timeout_conf,
        event_time_position=-1 if columns.event_time is None else columns.event_time[0],
        timezone=spark.conf.get("spark.sql.session.timeZone") or "UTC",
        frame_rows_max=_frame_rows_max(spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch", "10000")),
        late_by_previous_watermark=spark.conf.get("spark.sql.streaming.statefulOperator.allowMultiple", "true")
        != "false",
        application_id=_application_of(spark),
        local_mode=bool(_LOCAL_MASTER.match(spark.conf.get("spark.master", "") or "")),
        plan_id=uuid.uuid4().hex,
        batches_retained=max(1, int(spark.conf.get("spark.sql.streaming.minBatchesToRetain", "100") or "100")),
        api=asked.api,
        input_schema=columns.given.json(),
        output_schema=columns.output.json(),
        function=asked.function,
        case_sensitive=case_sensitive,
    )


def _wired(job: dict[str, Any], operator: str, asked: Request, columns: _Columns) -> DataFrame:
    """The stages around Spark's shuffle."""
    packed = with_start(columns.packed.mapInArrow(pack_entry(job, columns.combiner), PAYLOAD_SCHEMA), operator)
    if columns.event_time is not None:
        packed = packed.withMetadata("event_time", {WATERMARK_KEY: columns.event_time[1]})
    given = asked.output if asked.api == PANDAS else OUTPUT_SCHEMA
    with unpatched():
        result = packed.groupBy("bucket").applyInPandasWithState(
            bucket_entry(job, asked.func), given, "pointer binary", asked.output_mode, asked.timeout_conf
        )
    if asked.api == PANDAS:
        return result
    return with_sizes(result, operator).mapInArrow(unpack_entry(), columns.output)


def _lease_folders(options: StateOptions) -> list[Folder]:
    """The operator's folder in each backend where a run holds a lease."""
    found = [(options.root, dict(options.storage_options))]
    found += [(it.root, dict(it.storage_options)) for it in options.backends if it.kind == FSSPEC]
    return [Folder(root, storage_options).child(options.operator) for root, storage_options in found]


def _application_of(spark: SparkSession) -> str:
    """Spark's application and its driver's address: ids of applications of two drivers may be equal."""
    app, host, port = (spark.conf.get(name, "") or "" for name in ("spark.app.id", *_DRIVER))
    return f"{app or uuid.uuid4().hex} {host}:{port}"


def _frame_rows_max(text: str | None) -> int:
    rows = int(text or "10000")
    return rows if rows > 0 else NO_ROW_LIMIT
