"""`ArrowState`: plans a stateful operator with nothing but public DataFrame calls.

What the plan does is in `docs/design`; whatever can be refused is refused here, before anything runs.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Union

from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupStateTimeout
from pyspark.sql.types import DoubleType, FloatType, StructField, StructType

from arrow_schemas.pointer import BOTH, V1, V2
from arrow_schemas.spark_types import key_fields, state_fields
from spark_state_ext.backends.registry import CHANGELOG, FSSPEC, Backend, configured
from spark_state_ext.commit import CommitOptions
from spark_state_ext.errors import UnsupportedPlanError, UsageError
from spark_state_ext.folder import Folder
from spark_state_ext.spark.job import Job
from spark_state_ext.spark.payload import HASH_COLUMN, PAYLOAD_SCHEMA
from spark_state_ext.spark.session import unpatched
from spark_state_ext.spark.shim import bucket_entry, pack_entry

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["ArrowState"]

KeyLike = Union[str, "Column"]

_OPERATOR_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
BUCKETS_MAX = 1 << 15
MEMORY_BYTES_MIN = 1 << 20
# Arrow cannot copy more than 2 GiB of a column at once.
MEMORY_BYTES_MAX = 1 << 30
_WATERMARK_KEY = "spark.watermarkDelayMs"
_TIMEOUT_CONFS = (
    GroupStateTimeout.NoTimeout,
    GroupStateTimeout.ProcessingTimeTimeout,
    GroupStateTimeout.EventTimeTimeout,
)


class ArrowState:
    """Arrow state under `applyInPandasWithState`.

    Parameters
    ----------
    root
        Folder of the checkpoint files: any fsspec URL, or an absolute path, that all executors reach.
    operator
        Name of the operator, letters, digits, ``.``, ``_`` and ``-``. Its files lie under
        ``<root>/<operator>/<query id>``.
    buckets
        Number of buckets, 1 to 32768: the unit of parallelism. A few a core; it cannot change over a checkpoint's life.
    local_dir
        Local folder of executors for the LMDB stores, a cache. Default: the first of ``SPARK_LOCAL_DIRS``, or the
        temporary folder.
    storage_options
        Options for the root's fsspec file system.
    strict
        Refuse to begin without state when other queries have state under the same operator name.
    lease_ms
        How long a run's claim to its state lasts without renewal, milliseconds; at least 100.
    memory_bytes_max
        About how many bytes of a batch's rows one bucket holds in memory before it spills to the local disk;
        from 1 MiB to 1 GiB.
    local_keep_s
        How long an executor keeps the local store of a bucket that runs elsewhere now, seconds.
    backends
        Where state is kept: ``"changelog"`` (deltas stay in Spark's own state until every other backend has confirmed
        them, so no batch waits for an upload), ``"fsspec"`` (the root) and any `Backend`. Without ``"changelog"``
        commits are synchronous.
    restore_from
        Name of the backend that state is restored from when there is a choice; by default the first that has it.
    commit_delay_ms_max
        How long an upload may be under way while batches go on, milliseconds. After that the next commit waits for it.
    commit_timeout_ms
        How long it may be under way at all; then the task fails with `CommitTimeoutError`.
    inline_bytes_max, task_inline_bytes_max
        Most bytes that a bucket, and a task, keep in Spark's own state. Larger deltas upload while the task's other
        buckets are worked on, and are waited for before it ends.
    pointer_write, pointer_read
        ``"v2"``: pointers of the present format. ``pointer_write="v1"`` writes the first format, and ``"both"`` both
        side by side; commits are synchronous then. ``pointer_read="v1"`` reads the first only. (Checkpoint files have
        formats of their own, which this does not change.)
    clean_up
        Whether files that nothing needs any more are deleted.

    Raises
    ------
    UsageError
        When an argument cannot work.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        operator: str = "state",
        *,
        buckets: int = 16,
        local_dir: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        strict: bool = False,
        lease_ms: int = 10_000,
        memory_bytes_max: int = 256 << 20,
        local_keep_s: float = 86_400.0,
        backends: Sequence[str | Backend] = (CHANGELOG, FSSPEC),
        restore_from: str | None = None,
        commit_delay_ms_max: int = 60_000,
        commit_timeout_ms: int = 600_000,
        inline_bytes_max: int = 256 << 10,
        task_inline_bytes_max: int = 4 << 20,
        pointer_write: str = V2,
        pointer_read: str = V2,
        clean_up: bool = True,
    ) -> None:
        root = os.fspath(root)
        local_dir = None if local_dir is None else os.fspath(local_dir)
        if not _OPERATOR_NAME.fullmatch(operator):
            raise UsageError(f"operator must be a name of letters, digits, '.', '_' and '-', not {operator!r}")
        if not isinstance(buckets, int) or not 1 <= buckets <= BUCKETS_MAX:
            raise UsageError(f"buckets must be a whole number from 1 to {BUCKETS_MAX}, not {buckets!r}")
        if "://" not in root and not root.startswith("/"):
            raise UsageError(
                f"root must be a URL or an absolute path, as executors have other working folders: {root!r}"
            )
        if local_dir is not None and not local_dir.startswith("/"):
            raise UsageError(f"local_dir must be an absolute path, not {local_dir!r}")
        if lease_ms < 100:
            raise UsageError(f"lease_ms must be at least 100, not {lease_ms}")
        if not MEMORY_BYTES_MIN <= memory_bytes_max <= MEMORY_BYTES_MAX:
            raise UsageError(
                f"memory_bytes_max must be from {MEMORY_BYTES_MIN} to {MEMORY_BYTES_MAX}, not {memory_bytes_max}"
            )
        if not local_keep_s >= 0:
            raise UsageError(f"local_keep_s must not be negative: {local_keep_s}")
        if not 0 <= commit_delay_ms_max <= commit_timeout_ms or commit_timeout_ms < 1:
            raise UsageError(
                "commit_delay_ms_max must be from 0 to commit_timeout_ms, and that at least 1, not "
                f"{commit_delay_ms_max} and {commit_timeout_ms}"
            )
        if inline_bytes_max < 0 or task_inline_bytes_max < 0:
            raise UsageError("inline_bytes_max and task_inline_bytes_max must not be negative")
        if pointer_write not in (V1, V2, BOTH) or pointer_read not in (V1, V2):
            raise UsageError(
                "pointer_write must be 'v1', 'v2' or 'both' and pointer_read 'v1' or 'v2', not "
                f"{pointer_write!r} and {pointer_read!r}"
            )
        if pointer_read == V1 and pointer_write == V2:
            raise UsageError("pointer_read='v1' cannot read what pointer_write='v2' writes: write 'v1' or 'both'")
        journal, self.backends = configured(backends, root, storage_options or {}, restore_from)
        if pointer_write != V2 and [backend.name for backend in self.backends] != [Backend(root).name]:
            raise UsageError(
                "the first pointer format knows one place only, the root: with pointer_write='v1' or 'both' backends "
                "may be 'changelog' and 'fsspec'"
            )
        Folder(root, storage_options)  # an unknown protocol is refused now
        for backend in self.backends:
            if backend.kind == FSSPEC:
                Folder(backend.root, backend.storage_options)
        self.root = root
        self.operator = operator
        self.buckets = buckets
        self.local_dir = local_dir
        self.storage_options = dict(storage_options or {})
        self.strict = strict
        self.lease_ms = lease_ms
        self.memory_bytes_max = memory_bytes_max
        self.local_keep_s = local_keep_s
        self.restore_from = Backend(root).name if restore_from == FSSPEC else restore_from
        self.commit = CommitOptions(
            journal, commit_delay_ms_max, commit_timeout_ms, inline_bytes_max, task_inline_bytes_max, pointer_write
        )
        self.pointer_read = pointer_read
        self.clean_up = clean_up

    def __repr__(self) -> str:
        return f"ArrowState({self.root!r}, operator={self.operator!r}, buckets={self.buckets})"

    def apply_in_pandas_with_state(
        self,
        df: DataFrame,
        keys: KeyLike | Sequence[KeyLike],
        func: Callable[..., Iterable[Any]],
        outputStructType: StructType | str,
        stateStructType: StructType | str,
        outputMode: str,
        timeoutConf: str,
    ) -> DataFrame:
        """What ``df.groupBy(*keys).applyInPandasWithState(func, …)`` does, on Arrow state.

        Parameters
        ----------
        df
            A streaming DataFrame.
        keys
            Grouping columns, as for `DataFrame.groupBy`.
        func, outputStructType, stateStructType, outputMode, timeoutConf
            As for `GroupedData.applyInPandasWithState`.

        Raises
        ------
        UnsupportedTypeError
            When a key or state column has a type that cannot be stored.
        UnsupportedPlanError
            When `df` is not streaming, or has several event-time columns.
        UsageError
            When an argument cannot work.
        """
        if not df.isStreaming:
            raise UnsupportedPlanError(
                "applyInPandasWithState is not supported with a batch DataFrame: state lives from micro-batch to "
                "micro-batch. Use readStream for the input."
            )
        if timeoutConf not in _TIMEOUT_CONFS:
            raise UsageError(f"timeoutConf must be one of {', '.join(_TIMEOUT_CONFS)}, not {timeoutConf!r}")
        spark = df.sparkSession
        key_list: list[Any] = list(keys) if isinstance(keys, (list, tuple)) else [keys]
        state_type = _struct(stateStructType, spark, "stateStructType")
        input_type = df.schema
        key_type, positions, extra_keys = _resolve_keys(df, input_type, key_list)
        key_fields(key_type.json())
        state_fields(state_type.json())
        event_time = _event_time(input_type)
        job = Job(
            operator=self.operator,
            root=self.root,
            buckets=self.buckets,
            key_schema=key_type.json(),
            state_schema=state_type.json(),
            columns=tuple(input_type.names),
            key_positions=positions,
            timeout_conf=timeoutConf,
            event_time_position=-1 if event_time is None else event_time[0],
            event_time_is_window=event_time is not None and isinstance(input_type[event_time[0]].dataType, StructType),
            timezone=spark.conf.get("spark.sql.session.timeZone") or "UTC",
            frame_rows_max=_frame_rows_max(spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch", "10000")),
            late_by_previous_watermark=spark.conf.get("spark.sql.streaming.statefulOperator.allowMultiple", "true")
            != "false",
            application_id=spark.conf.get("spark.app.id", "") or "",
            plan_id=uuid.uuid4().hex,
            local_dir=self.local_dir,
            strict=self.strict,
            lease_ms=self.lease_ms,
            memory_bytes_max=self.memory_bytes_max,
            batches_retained=max(1, int(spark.conf.get("spark.sql.streaming.minBatchesToRetain", "100") or "100")),
            local_keep_s=self.local_keep_s,
            backends=tuple(self.backends),
            commit=self.commit,
            restore_from=self.restore_from,
            pointer_read=self.pointer_read,
            clean_up=self.clean_up,
            storage_options=self.storage_options,
        ).to_plain()
        packed = _packable(df, input_type, key_type, positions, extra_keys).mapInArrow(pack_entry(job), PAYLOAD_SCHEMA)
        if event_time is not None:
            packed = packed.withMetadata("event_time", {_WATERMARK_KEY: event_time[1]})
        with unpatched():
            return packed.groupBy("bucket").applyInPandasWithState(
                bucket_entry(job, func), outputStructType, "pointer binary", outputMode, timeoutConf
            )


def _struct(given: StructType | str, spark: Any, name: str) -> StructType:
    if isinstance(given, StructType):
        return given
    # A DDL string means what this session's parser makes of it; an empty frame of that schema tells.
    parsed = spark.createDataFrame([], given).schema
    if not isinstance(parsed, StructType):
        raise UsageError(f"{name} must be a struct of named columns, not {given!r}")
    return parsed


def _resolve_keys(
    df: DataFrame, input_type: StructType, keys: list[KeyLike]
) -> tuple[StructType, tuple[int, ...], list[KeyLike]]:
    """The key columns' type, their places among the packed columns, and those that are not input columns."""
    selected = df.select(*keys).schema
    positions: list[int] = []
    extra: list[KeyLike] = []
    for key, resolved in zip(keys, selected.fields, strict=True):
        # An expression may be named like a column, so only a bare name is taken for that column.
        bare = key if isinstance(key, str) else _bare_name(key)
        if bare == resolved.name and input_type.names.count(bare) == 1:
            positions.append(input_type.names.index(bare))
        else:
            positions.append(len(input_type) + len(extra))
            extra.append(key)
    fields = [StructField(f.name, f.dataType, f.nullable, _without_watermark(f.metadata)) for f in selected.fields]
    return StructType(fields), tuple(positions), extra


def _bare_name(column: Column) -> str | None:
    """The name of a column that is nothing but a name; None for any other expression."""
    match = re.fullmatch(r"Column<'(\w+)'>", str(column))
    return match[1] if match else None


def _without_watermark(metadata: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in (metadata or {}).items() if name != _WATERMARK_KEY}


def _event_time(input_type: StructType) -> tuple[int, int] | None:
    """Place and delay in milliseconds of the column that has the watermark."""
    found = [
        (at, int(field.metadata[_WATERMARK_KEY]))
        for at, field in enumerate(input_type.fields)
        if _WATERMARK_KEY in (field.metadata or {})
    ]
    if len(found) > 1:
        raise UnsupportedPlanError(
            "more than one event-time column reaches the stateful operator: "
            f"{', '.join(input_type.names[at] for at, _ in found)}. Drop all but one (Spark refuses this too)."
        )
    return found[0] if found else None


def _frame_rows_max(text: str | None) -> int:
    rows = int(text or "10000")
    return rows if rows > 0 else 2**31 - 1


def _packable(
    df: DataFrame,
    input_type: StructType,
    key_type: StructType,
    positions: tuple[int, ...],
    extra: list[KeyLike],
) -> DataFrame:
    """Input columns, keys that are none of them, and the hash, under names that cannot clash."""
    extra_columns = [F.col(key) if isinstance(key, str) else key for key in extra]
    widened = df.select("*", *(column.alias(f"__key{i}") for i, column in enumerate(extra_columns)))
    names = [f"c{i}" for i in range(len(input_type) + len(extra))]
    named = widened.toDF(*names)
    hashed = F.xxhash64(*(_hashable(names[at], field) for at, field in zip(positions, key_type.fields, strict=True)))
    return named.select(*names, hashed.alias(HASH_COLUMN))


def _hashable(name: str, field: StructField) -> Column:
    """A key column such that equal keys hash alike: -0.0 as 0.0, each NaN as the same NaN."""
    column = F.col(name)
    if isinstance(field.dataType, (FloatType, DoubleType)):
        zero = F.lit(0.0).cast(field.dataType)
        return (
            F.when(column == zero, zero)
            .when(F.isnan(column), F.lit(float("nan")).cast(field.dataType))
            .otherwise(column)
        )
    return column
