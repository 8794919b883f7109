"""`ArrowState`: where and how the state of a session's streaming queries is kept, and the ways to use it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.types import StructType

from arrow_schemas.bucket_map import BucketMap
from arrow_schemas.pointer import V2
from spark_state_ext.backends.registry import CHANGELOG, FSSPEC, Backend
from spark_state_ext.engine.job import ARROW, PANDAS, ROWS
from spark_state_ext.engine.options import StateOptions
from spark_state_ext.engine.source_partition import SourcePartition
from spark_state_ext.engine.start_from import StartFrom
from spark_state_ext.functions.state_batch import StateBatch
from spark_state_ext.functions.ttl import Ttl
from spark_state_ext.spark.client.columns import KeyLike
from spark_state_ext.spark.client.planner import Request, planned

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["ArrowState"]


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
        Number of buckets, 1 to 32768: the unit of parallelism. A few a core. To change it, see `rescale`.
    bucket_by
        A `BucketMap`, where buckets are not ranges of the keys' hash of equal size: ``BucketMap.split(16, {3: 4})`` has
        range 3 of 16 in four buckets. Or a `SourcePartition`, where they are the partitions of the source
        (``docs/operating/source-partitions.md``). It tells the number of buckets, and `buckets` is not looked at.
    rescale
        The query's own checkpointLocation: where its state has another number of buckets, or another `bucket_by`, it is
        rescaled in its first batch with data. It may stay in the program (``docs/operating/growing.md``).
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
        side by side; commits are synchronous then, and snapshots and leases are of the first format too, so that a
        job can go back to a release that knows no other. ``pointer_read="v1"`` reads the first only.
    clean_up
        Whether files that nothing needs any more are deleted.
    erase_within_s
        Within how many seconds the bytes of a removed key are gone from the checkpoint files; at least an hour. The
        query can go back to batches of a sixth of that time only, nothing goes inline, and each bucket that changes
        gets a full snapshot every sixth. None: they go after a number of batches (``docs/operating/erasing.md``).
    erase_requests
        Whether the query looks for requests to erase keys (`erase_keys`). It costs each worker process a listing of a
        folder in every batch.
    ttl
        How long state lives that nobody writes; None: for ever. It may be set, changed and dropped from one start of a
        query to the next.
    start_from
        A `Savepoint` or `RetainedCheckpoint` with whose state a query begins that has none. It may stay in the program:
        a query that has state goes on with its own, whatever became of the snapshot (``docs/operating/savepoints.md``).

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
        erase_requests: bool = False,
        ttl: Ttl | None = None,
        start_from: StartFrom | None = None,
        bucket_by: BucketMap | SourcePartition | None = None,
        rescale: str | os.PathLike[str] | None = None,
    ) -> None:
        self.options = StateOptions.given(
            root,
            operator=operator,
            buckets=buckets,
            local_dir=local_dir,
            storage_options=storage_options,
            strict=strict,
            strict_output=strict_output,
            lease_ms=lease_ms,
            memory_bytes_max=memory_bytes_max,
            local_keep_s=local_keep_s,
            backends=backends,
            restore_from=restore_from,
            commit={
                "commit_delay_ms_max": commit_delay_ms_max,
                "commit_timeout_ms": commit_timeout_ms,
                "inline_bytes_max": inline_bytes_max,
                "task_inline_bytes_max": task_inline_bytes_max,
                "pointer_write": pointer_write,
            },
            pointer_read=pointer_read,
            clean_up=clean_up,
            erase_within_s=erase_within_s,
            erase_requests=erase_requests,
            ttl=ttl,
            start_from=start_from,
            bucket_by=bucket_by,
            rescale=rescale,
        )

    def __repr__(self) -> str:
        options = self.options
        return f"ArrowState({options.root!r}, operator={options.operator!r}, buckets={options.buckets})"

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
        OperatorChangedError
            When what `start_from` names does not have the operator.
        """
        return planned(
            self.options,
            Request(
                PANDAS,
                df,
                keys,
                func,
                outputStructType,
                stateStructType,
                outputMode,
                timeoutConf,
                "applyInPandasWithState",
            ),
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
        OperatorChangedError
            When what `start_from` names does not have the operator.
        """
        return planned(
            self.options,
            Request(
                ARROW,
                df,
                keys,
                func,
                output_schema,
                state_schema,
                output_mode,
                timeout_conf,
                "apply_in_arrow_with_state",
            ),
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
        UnsupportedTypeError, UnsupportedPlanError, UsageError, OperatorChangedError
            As for `apply_in_arrow_with_state`.
        """
        return planned(
            self.options,
            Request(
                ROWS, df, keys, func, output_schema, state_schema, output_mode, timeout_conf, "apply_rows_with_state"
            ),
        )
