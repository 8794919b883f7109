"""`ArrowState`: plans a stateful operator with nothing but public DataFrame calls.

What the plan does is in `docs/design`; whatever can be refused is refused here, before anything runs.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.types import StructType

from arrow_schemas.pointer import BOTH, V1, V2
from arrow_schemas.row import EXPIRES_MS
from arrow_schemas.spark_types import key_fields, state_fields
from spark_state_ext.backends.registry import CHANGELOG, FSSPEC, Backend, configured, refuse_unusable
from spark_state_ext.commit.decisions import CommitOptions
from spark_state_ext.engine.job import ARROW, PANDAS, ROWS, Job
from spark_state_ext.errors import UnsupportedPlanError, UsageError
from spark_state_ext.files.folder import Folder, refuse_relative
from spark_state_ext.functions.state_batch import StateBatch
from spark_state_ext.functions.ttl import Ttl
from spark_state_ext.spark.client.columns import (
    WATERMARK_KEY,
    KeyLike,
    event_time_of,
    packable,
    refuse_equal_names,
    resolve_keys,
    struct_of,
)
from spark_state_ext.spark.client.lease_keeper import LeaseKeeper
from spark_state_ext.spark.client.limits import check_flags, check_sizes, check_times, erase_window_ms
from spark_state_ext.spark.client.neighbours import tell_of_others
from spark_state_ext.spark.client.plain import unpatched
from spark_state_ext.spark.client.shim import bucket_entry, pack_entry, unpack_entry
from spark_state_ext.spark.shuffle.combine import Combiner, Combining
from spark_state_ext.spark.shuffle.observed import with_sizes, with_start
from spark_state_ext.spark.shuffle.output import OUTPUT_SCHEMA
from spark_state_ext.spark.shuffle.payload import NO_ROW_LIMIT, PAYLOAD_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["ArrowState"]

_DRIVER = ("spark.driver.host", "spark.driver.port")
# Not local-cluster, whose executors are processes of their own.
_LOCAL_MASTER = re.compile(r"local(\[|$)")
_OPERATOR_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TIMEOUT_CONFS = (
    GroupStateTimeout.NoTimeout,
    GroupStateTimeout.ProcessingTimeTimeout,
    GroupStateTimeout.EventTimeTimeout,
)


class ArrowState:
    """Arrow state for streaming queries: under `applyInPandasWithState`, and for functions over Arrow tables or rows.

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
    strict_output
        Refuse a frame of the function that has a column which the output schema does not name. False: it is passed
        over, and what the schema names in its place is NULL, as in Spark.
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
    erase_within_s
        Within how many seconds the bytes of a removed key are gone from the checkpoint files; at least an hour. The
        query can go back to batches of a sixth of that time only, nothing goes inline, and each bucket that changes
        gets a full snapshot every sixth. None: they go after a number of batches (``docs/operating.md``, Erasing).
    ttl
        How long state lives that nobody writes; None: for ever. It may be set, changed and dropped from one start of a
        query to the next.

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
        strict_output: bool = True,
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
        erase_within_s: int | None = None,
        ttl: Ttl | None = None,
    ) -> None:
        root = _path("root", root)
        local_dir = None if local_dir is None else _path("local_dir", local_dir)
        if not isinstance(operator, str) or not _OPERATOR_NAME.fullmatch(operator):
            raise UsageError(
                "operator must be a name of at most 100 letters, digits, '.', '_' and '-', the first a letter or "
                f"digit, not {operator!r}"
            )
        if not isinstance(storage_options, (Mapping, type(None))):
            raise UsageError(f"storage_options must be a mapping, such as a dict, not {storage_options!r}")
        check_flags(strict=strict, strict_output=strict_output, clean_up=clean_up)
        check_sizes(buckets, memory_bytes_max, inline_bytes_max, task_inline_bytes_max)
        check_times(lease_ms, local_keep_s, commit_delay_ms_max, commit_timeout_ms)
        refuse_relative(root, "root")
        if local_dir is not None and not local_dir.startswith("/"):
            raise UsageError(f"local_dir must be an absolute path, not {local_dir!r}")
        if ttl is not None and not isinstance(ttl, Ttl):
            raise UsageError(f"ttl must be a Ttl, such as Ttl(duration_ms=86_400_000), not {ttl!r}")
        if pointer_write not in (V1, V2, BOTH) or pointer_read not in (V1, V2):
            raise UsageError(
                "pointer_write must be 'v1', 'v2' or 'both' and pointer_read 'v1' or 'v2', not "
                f"{pointer_write!r} and {pointer_read!r}"
            )
        if pointer_read == V1 and pointer_write == V2:
            raise UsageError("pointer_read='v1' cannot read what pointer_write='v2' writes: write 'v1' or 'both'")
        window_ms = erase_window_ms(erase_within_s, pointer_write, V2, clean_up)
        journal, self.backends = configured(backends, root, storage_options or {}, restore_from)
        if pointer_write != V2 and [backend.name for backend in self.backends] != [Backend(root).name]:
            raise UsageError(
                "the first pointer format knows one place only, the root: with pointer_write='v1' or 'both' backends "
                "may be 'changelog' and 'fsspec'"
            )
        refuse_unusable(root, storage_options or {}, self.backends)
        self.root = root
        self.operator = operator
        self.buckets = buckets
        self.local_dir = local_dir
        self.storage_options = dict(storage_options or {})
        self.strict = strict
        self.strict_output = strict_output
        self.lease_ms = lease_ms
        self.memory_bytes_max = memory_bytes_max
        self.local_keep_s = local_keep_s
        self.restore_from = Backend(root).name if restore_from == FSSPEC else restore_from
        self.commit = CommitOptions(
            *(journal, commit_delay_ms_max, commit_timeout_ms, inline_bytes_max, task_inline_bytes_max, pointer_write),
            window_ms,
        )
        self.pointer_read = pointer_read
        self.clean_up = clean_up
        self.ttl = ttl

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

        Returns
        -------
        DataFrame
            What `func` gives, a streaming DataFrame with the columns of `outputStructType`.

        Raises
        ------
        UnsupportedTypeError
            When a key or state column has a type that cannot be stored.
        UnsupportedPlanError
            When `df` is not streaming, or has several event-time columns.
        UsageError
            When an argument cannot work.
        """
        return self.planned(
            PANDAS, df, keys, func, outputStructType, stateStructType, outputMode, timeoutConf, "applyInPandasWithState"
        )

    def apply_in_arrow_with_state(
        self,
        df: DataFrame,
        keys: KeyLike | Sequence[KeyLike],
        func: Callable[[StateBatch], Any],
        output_schema: StructType | str,
        state_schema: StructType | str,
        output_mode: str = "update",
        timeout_conf: str = GroupStateTimeout.NoTimeout,
    ) -> DataFrame:
        """Call a function over Arrow tables, once for a bucket's keys in a batch, with their state as a table.

        Parameters
        ----------
        df
            A streaming DataFrame.
        keys
            Grouping columns, as for `DataFrame.groupBy`.
        func
            ``func(batch)`` with a `StateBatch`. It returns a table, an iterable of tables, or None; a table is
            PyArrow's, a mapping of columns, or anything with Arrow's C stream, such as a polars DataFrame or a DuckDB
            relation.
        output_schema
            What it returns; columns are found by name.
        state_schema
            The state columns.
        output_mode
            ``"update"`` or ``"append"``, as for `GroupedData.applyInPandasWithState`.
        timeout_conf
            ``"NoTimeout"``, ``"ProcessingTimeTimeout"`` or ``"EventTimeTimeout"``.

        Returns
        -------
        DataFrame
            What `func` gives, a streaming DataFrame with the columns of `output_schema`.

        Raises
        ------
        UnsupportedTypeError
            When a column of keys, state, input or output has a type without a stable Arrow form.
        UnsupportedPlanError
            When `df` is not streaming, or has several event-time columns.
        UsageError
            When an argument cannot work.
        """
        return self.planned(
            ARROW, df, keys, func, output_schema, state_schema, output_mode, timeout_conf, "apply_in_arrow_with_state"
        )

    def apply_rows_with_state(
        self,
        df: DataFrame,
        keys: KeyLike | Sequence[KeyLike],
        func: Callable[[Any, list[Any], GroupState], Iterable[tuple[Any, ...]] | None],
        output_schema: StructType | str,
        state_schema: StructType | str,
        output_mode: str = "update",
        timeout_conf: str = GroupStateTimeout.NoTimeout,
    ) -> DataFrame:
        """Call a function once per key with plain Python rows: for logic that cannot be vectorised.

        Parameters
        ----------
        df, keys, output_schema, state_schema, output_mode, timeout_conf
            As for `apply_in_arrow_with_state`.
        func
            ``func(key, rows, state)``: `key` is a named tuple of the grouping columns, `rows` a list of named tuples of
            the input's columns (empty when the key timed out), `state` a `GroupState` as Spark's. It returns, or
            yields, one tuple for each output row, or returns None. Values are Python's: None for NULL, `int`,
            `datetime`, `Decimal`, ….

        Returns
        -------
        DataFrame
            What `func` gives, a streaming DataFrame with the columns of `output_schema`.

        Raises
        ------
        UnsupportedTypeError, UnsupportedPlanError, UsageError
            As for `apply_in_arrow_with_state`.
        """
        return self.planned(
            ROWS, df, keys, func, output_schema, state_schema, output_mode, timeout_conf, "apply_rows_with_state"
        )

    def planned(
        self,
        api: str,
        df: DataFrame,
        keys: KeyLike | Sequence[KeyLike],
        func: Callable[..., Any],
        output: StructType | str,
        state: StructType | str,
        output_mode: str,
        timeout_conf: str,
        name: str,
        combining: Combining | None = None,
        function: str | None = None,
    ) -> DataFrame:
        """Plan an operator: for the methods above, and for the operators built on them.

        Parameters
        ----------
        api
            How `func` is called: `PANDAS`, `ROWS` or `ARROW`.
        df, keys, func, output, state, output_mode, timeout_conf
            As for `apply_in_arrow_with_state`.
        name
            What the user called, for errors.
        combining
            What makes rows fewer before the shuffle; `func` gets what it gives.
        function
            Of a built-in operator, as in `OperatorFile`: what must not change while there is state.

        Returns
        -------
        DataFrame
            What `func` gives, a streaming DataFrame with the columns of `output`.

        Raises
        ------
        UnsupportedTypeError, UnsupportedPlanError, UsageError
            As for `apply_in_arrow_with_state`.
        """
        if not df.isStreaming:
            raise UnsupportedPlanError(
                f"{name} is not supported with a batch DataFrame: state lives from micro-batch to "
                "micro-batch. Use readStream for the input."
            )
        if timeout_conf not in _TIMEOUT_CONFS:
            raise UsageError(f"the timeout must be one of {', '.join(_TIMEOUT_CONFS)}, not {timeout_conf!r}")
        spark = df.sparkSession
        key_list: list[Any] = list(keys) if isinstance(keys, (list, tuple)) else [keys]
        state_type, output_type = (
            struct_of(state, spark, "the state schema"),
            struct_of(output, spark, "the output schema"),
        )
        input_type = df.schema
        key_type, positions, extra_keys = resolve_keys(df, input_type, key_list)
        key_fields(key_type.json())
        state_fields(state_type.json())
        case_sensitive = spark.conf.get("spark.sql.caseSensitive", "false") == "true"
        refuse_equal_names(state_type, "state", case_sensitive)
        refuse_equal_names(output_type, "output", case_sensitive=True)
        if api != PANDAS:
            state_fields(output_type.json(), "output")
            state_fields(input_type.json(), "input")
        if not state_type.fields:
            raise UsageError("the state schema has no columns; state that only says that a key was seen has one too")
        if EXPIRES_MS in state_type.names:
            raise UsageError(f"no state column may be called {EXPIRES_MS!r}: that is where a time to live is kept")
        event_time = event_time_of(input_type)
        if self.ttl is not None and self.ttl.clock == "event" and event_time is None:
            raise UnsupportedPlanError("a Ttl with clock='event' needs an input with a watermark: call withWatermark")
        hashed = packable(df, input_type, key_type, positions, extra_keys)
        combiner, given_type = None, input_type
        if combining is not None:
            # What is packed is what the combiner makes of the rows; its columns begin with the keys.
            assert not extra_keys, "operators select their keys"
            combiner = Combiner(combining.function, tuple(input_type.names), positions)
            given_type = combining.row_type
            names = [input_type.names[at] for at in positions]
            positions = tuple(given_type.names.index(name) for name in names)
            if event_time is not None:
                event_time = given_type.names.index(input_type.names[event_time[0]]), event_time[1]
        application, plan = _application_of(spark), uuid.uuid4().hex
        job = Job(
            operator=self.operator,
            root=self.root,
            buckets=self.buckets,
            key_schema=key_type.json(),
            state_schema=state_type.json(),
            columns=tuple(given_type.names),
            key_positions=positions,
            timeout_conf=timeout_conf,
            event_time_position=-1 if event_time is None else event_time[0],
            timezone=spark.conf.get("spark.sql.session.timeZone") or "UTC",
            frame_rows_max=_frame_rows_max(spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch", "10000")),
            late_by_previous_watermark=spark.conf.get("spark.sql.streaming.statefulOperator.allowMultiple", "true")
            != "false",
            application_id=application,
            local_mode=bool(_LOCAL_MASTER.match(spark.conf.get("spark.master", "") or "")),
            plan_id=plan,
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
            api=api,
            input_schema=given_type.json(),
            output_schema=output_type.json(),
            ttl=self.ttl,
            function=function,
            strict_output=self.strict_output,
            case_sensitive=case_sensitive,
            storage_options=self.storage_options,
        ).to_plain()
        tell_of_others(self.root, self.storage_options, self.operator)
        packed = with_start(hashed.mapInArrow(pack_entry(job, combiner), PAYLOAD_SCHEMA), self.operator)
        if event_time is not None:
            packed = packed.withMetadata("event_time", {WATERMARK_KEY: event_time[1]})
        given = output if api == PANDAS else OUTPUT_SCHEMA
        with unpatched():
            result = packed.groupBy("bucket").applyInPandasWithState(
                bucket_entry(job, func), given, "pointer binary", output_mode, timeout_conf
            )
        LeaseKeeper.shared().keep(spark, self._lease_folders(), application, plan, self.lease_ms)
        return result if api == PANDAS else with_sizes(result, self.operator).mapInArrow(unpack_entry(), output_type)

    def _lease_folders(self) -> list[Folder]:
        """The operator's folder in each place where a run holds a lease."""
        places = [(self.root, self.storage_options)]
        places += [(it.root, dict(it.storage_options)) for it in self.backends if it.kind == FSSPEC]
        return [Folder(root, options).child(self.operator) for root, options in places]


def _application_of(spark: SparkSession) -> str:
    """Spark's application and its driver's address: ids of applications of two drivers may be equal."""
    app, host, port = (spark.conf.get(name, "") or "" for name in ("spark.app.id", *_DRIVER))
    return f"{app or uuid.uuid4().hex} {host}:{port}"


def _frame_rows_max(text: str | None) -> int:
    rows = int(text or "10000")
    return rows if rows > 0 else NO_ROW_LIMIT


def _path(name: str, value: str | os.PathLike[str]) -> str:
    try:
        path = os.fspath(value)
    except TypeError:
        path = None
    if not isinstance(path, str):
        raise UsageError(f"{name} must be a path or a URL as str or os.PathLike, not {value!r}")
    return path
