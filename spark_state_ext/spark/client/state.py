"""`ArrowState`: where and how streaming queries keep their state, and the methods that run functions on it."""

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
from spark_state_ext.spark.client.planner import Request, plan_operator

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["ArrowState"]


class ArrowState:
    """Arrow state for streaming queries: for `applyInPandasWithState`, and for functions over Arrow tables or rows.

    Parameters
    ----------
    root
        Folder of the checkpoint files: an fsspec URL or an absolute path that all executors can reach.
    operator
        Name of the operator: letters, digits, ``.``, ``_`` and ``-``. Its files are under
        ``<root>/<operator>/<query id>``.
    buckets
        Number of buckets, 1 to 32768. Buckets are the unit of parallelism: use a few per core. To change it, see
        `rescale`.
    bucket_by
        How keys are assigned to buckets, if not by equal ranges of their hash. A `BucketMap`:
        ``BucketMap.split(16, {3: 4})`` splits range 3 of 16 into four buckets. Or a `SourcePartition`: the source's
        partitions are the buckets (``docs/operating/source-partitions.md``). It determines the number of buckets, and
        `buckets` is ignored.
    rescale
        The query's own checkpointLocation. If the query's state has another number of buckets or another `bucket_by`,
        it is rescaled in the first batch with data. The argument may stay in the program
        (``docs/operating/growing.md``).
    local_dir
        Local folder on executors for the LMDB stores, which are a cache. Default: the first of ``SPARK_LOCAL_DIRS``, or
        the temporary folder.
    storage_options
        Options for the root's fsspec file system.
    strict
        Refuse to begin without state if other queries have state under the same operator name.
    strict_output
        Refuse a frame of the function that has a column which is not in the output schema. False: such a column is
        ignored, and missing columns of the schema are NULL, as in Spark.
    lease_ms
        How long a run's lease on its state lasts without renewal, milliseconds; at least 100.
    memory_bytes_max
        About how many bytes of a batch's rows one bucket holds in memory before it spills to the local disk;
        from 1 MiB to 1 GiB.
    local_keep_s
        How long an executor keeps the local store of a bucket that has moved to another executor, seconds.
    backends
        Where state is kept: ``"changelog"`` (deltas stay in Spark's own state until every other backend has confirmed
        them, so no batch waits for an upload), ``"fsspec"`` (the root) and any `Backend`. Without ``"changelog"``
        commits are synchronous.
    restore_from
        Name of the backend from which state is restored if several have it; by default the first one.
    commit_delay_ms_max
        How long batches go on while an upload is running, milliseconds. After that the next commit waits for it.
    commit_timeout_ms
        After this time an upload that is still running makes the task fail with `CommitTimeoutError`, milliseconds.
    inline_bytes_max, task_inline_bytes_max
        The most bytes that a bucket, and a task, keep in Spark's own state. Larger deltas are uploaded while the task
        works on its other buckets, and the task waits for them before it ends.
    pointer_write, pointer_read
        ``"v2"``: pointers of the present format. ``pointer_write="v1"`` writes the first format, and ``"both"`` writes
        both. Commits are synchronous then, and snapshots and leases have the first format too, so that a job can go
        back to a release that only knows the first format. ``pointer_read="v1"`` reads only the first format.
    clean_up
        Whether files that are no longer needed are deleted.
    erase_within_s
        The bytes of a removed key are gone from the checkpoint files within this many seconds; at least an hour. The
        query can then go back only to batches of the last sixth of that time, deltas are never inline, and each bucket
        that changes gets a full snapshot every sixth. None: they go after a number of batches
        (``docs/operating/erasing.md``).
    erase_requests
        Whether the query looks for requests to erase keys (`erase_keys`). It costs each worker process a listing of a
        folder in every batch.
    ttl
        How long state lives without being written; None: forever. It may be set, changed and dropped when the query is
        restarted.
    start_from
        A `Savepoint` or `RetainedCheckpoint` with whose state a query begins if it has no state of its own. The
        argument may stay in the program: a query with state ignores it, even if the snapshot no longer exists
        (``docs/operating/savepoints.md``).

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
        """Run ``df.groupBy(*keys).applyInPandasWithState(func, …)`` on Arrow state.

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
            The output of `func`: a streaming DataFrame with the columns of `outputStructType`.

        Raises
        ------
        UnsupportedTypeError
            When a key or state column has a type that cannot be stored.
        UnsupportedPlanError
            When `df` is not streaming, or has several event-time columns.
        UsageError
            When an argument cannot work.
        OperatorChangedError
            When the snapshot in `start_from` does not have the operator.
        """
        return plan_operator(
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
        """Call a function over Arrow tables: the rows of a bucket's keys in a batch, and the keys' state as a table.

        A bucket gets several calls in a batch, with different keys, if one would take too much memory.

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
            The output of `func`; columns are found by name.
        state_schema
            The state columns.
        output_mode
            ``"update"`` or ``"append"``, as for `GroupedData.applyInPandasWithState`.
        timeout_conf
            ``"NoTimeout"``, ``"ProcessingTimeTimeout"`` or ``"EventTimeTimeout"``.

        Returns
        -------
        DataFrame
            The output of `func`: a streaming DataFrame with the columns of `output_schema`.

        Raises
        ------
        UnsupportedTypeError
            When a column of keys, state, input or output has a type without a stable Arrow form.
        UnsupportedPlanError
            When `df` is not streaming, or has several event-time columns.
        UsageError
            When an argument cannot work.
        OperatorChangedError
            When the snapshot in `start_from` does not have the operator.
        """
        return plan_operator(
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
        """Call a function once per key with plain Python rows, for logic that cannot be vectorised.

        Parameters
        ----------
        df, keys, output_schema, state_schema, output_mode, timeout_conf
            As for `apply_in_arrow_with_state`.
        func
            ``func(key, rows, state)``: `key` is a named tuple of the grouping columns, `rows` a list of named tuples of
            the input's columns (empty if the key timed out), and `state` a `GroupState` as in Spark. It returns or
            yields one tuple for each output row, or returns None. Values are Python objects: None for NULL, `int`,
            `datetime`, `Decimal`, ….

        Returns
        -------
        DataFrame
            The output of `func`: a streaming DataFrame with the columns of `output_schema`.

        Raises
        ------
        UnsupportedTypeError, UnsupportedPlanError, UsageError, OperatorChangedError
            As for `apply_in_arrow_with_state`.
        """
        return plan_operator(
            self.options,
            Request(
                ROWS, df, keys, func, output_schema, state_schema, output_mode, timeout_conf, "apply_rows_with_state"
            ),
        )
