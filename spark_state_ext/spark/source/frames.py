"""State as DataFrames: registering the data source, and a function for every release of PySpark."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.types import StructType

from spark_state_ext.errors import UsageError
from spark_state_ext.spark.compat import SPARK_VERSION

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from spark_state_ext.spark.client.state_reader import CommittedBatch
    from spark_state_ext.spark.source.options import SourceOptions

__all__ = ["read_state", "register"]

_PLAN = "schema string, parts array<string>"


def register(spark: SparkSession) -> None:
    """Register ``spark.read.format("arrow_state")`` in a session, classic or Connect.

    Executors and the driver need this package. The source's options are the arguments of `read_state`: lists are names
    separated by commas, and ``storage_options`` is JSON.

    Parameters
    ----------
    spark
        The session.

    Raises
    ------
    UsageError
        On PySpark 3.5, which has no data sources in Python.

    Examples
    --------
    >>> register(spark)  # doctest: +SKIP
    >>> spark.read.format("arrow_state").option("operator", "clicks").load("/state")  # doctest: +SKIP
    """
    if SPARK_VERSION < (4, 0):
        raise UsageError("PySpark 3.5 has no Python data sources: read_state(spark, path, …) returns the same tables")
    from spark_state_ext.spark.source.datasource import ArrowStateSource

    spark.dataSource.register(ArrowStateSource)


def read_state(
    spark: SparkSession,
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    buckets: Sequence[int] | None = None,
    checkpoint_location: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: str | int | bool,
) -> DataFrame:
    """Read the state of an operator as a DataFrame, in one task for each bucket.

    This call plans the read: each use of the frame reads the same batch, as long as its files exist. A hold keeps the
    files until ten minutes after the last task that read.

    Parameters
    ----------
    spark
        A session, classic or Connect, of any release.
    path
        A root, a query folder or a savepoint that executors can reach.
    columns
        Names of columns; by default keys, state and ``timeout_ms``. Other columns are ``defined``, ``bucket``, and,
        if the state has a time to live, ``__expires_ms``.
    buckets
        Numbers of buckets; by default all.
    checkpoint_location
        The query's Spark checkpoint location (PySpark 4.0 or newer): the state is read exactly as of a committed batch,
        by default the last one, as by `open_committed`. Without it the last batch that files prove is read.
    storage_options
        Options for the path's fsspec file system.
    **options
        ``operator``, ``batch``, ``query_folder``, ``unproven`` and ``hold``, as for `open_state`. ``table``:
        ``"state"``, ``"timeouts"`` or ``"metadata"``, which has a row for each checkpoint file. ``from_batch`` and
        ``to_batch``, by default the newest batch: read the keys that changed in between, with a column ``_change``,
        ``"insert"``, ``"update"`` or ``"delete"``.

    Returns
    -------
    DataFrame
        The table.

    Raises
    ------
    UsageError
        When an argument cannot work.
    PySparkException
        Errors in tasks arrive as Spark's own error, with ours in its text.

    Examples
    --------
    >>> read_state(spark, "/state", operator="clicks").where("clicks > 10")  # doctest: +SKIP
    """
    from spark_state_ext.spark.source.options import SourceOptions

    texts = {name: str(value) for name, value in options.items()}
    texts["path"] = os.fspath(path)
    if columns is not None:
        texts["columns"] = json.dumps(list(columns))
    if buckets is not None:
        texts["buckets"] = ",".join(map(str, buckets))
    if storage_options:
        texts["storage_options"] = json.dumps(dict(storage_options))
    source_options = SourceOptions.of(texts)
    if checkpoint_location is None:
        plan = spark.range(1).coalesce(1).mapInArrow(_make_planner(texts), _PLAN).collect()[0]
    else:
        plan = _plan_exactly(spark, texts, source_options, checkpoint_location)
    schema = StructType.fromJson(json.loads(plan.schema))
    parts = list(plan.parts)
    if not parts:
        return spark.createDataFrame([], schema)
    # One task per bucket, whatever the session's shuffle settings are.
    rows = spark.createDataFrame([(position, part) for position, part in enumerate(parts)], "at int, part string")
    return rows.repartitionByRange(len(parts), "at").mapInArrow(_make_reader(dict(storage_options or {})), schema)


def _plan_exactly(
    spark: SparkSession,
    texts: dict[str, str],
    source_options: SourceOptions,
    checkpoint_location: str | os.PathLike[str],
) -> Any:
    """Plan a read of committed batches in a task, because a client of Spark Connect may not reach the root."""
    from spark_state_ext.spark.client.state_reader import use_batch
    from spark_state_ext.spark.source.committed_state import choose_store, identify_query, make_reader, read_exact_batch

    if source_options.unproven:
        raise UsageError("unproven cannot be used with checkpoint_location, which only reads committed state")
    reader = make_reader(spark, checkpoint_location)
    store = choose_store(reader, source_options.operator)
    if source_options.query_folder not in (None, store.query_folder):
        raise UsageError(
            f"the query at {reader.location} has the folder {store.query_folder}, not {source_options.query_folder!r}: "
            "leave query_folder out, or give the checkpointLocation of that query"
        )

    def plan(committed: CommittedBatch) -> Any:
        batches = (
            [committed] if source_options.from_batch is None else [reader.batch(source_options.from_batch), committed]
        )
        exact = [read_exact_batch(reader, store, batch) for batch in batches]
        rows = [
            (position, pointer.encode())
            for position, exact_batch in enumerate(exact)
            for pointer in exact_batch.pointers.values()
        ]
        ranges = [(exact_batch.batch, exact_batch.oldest, exact_batch.newest) for exact_batch in exact]
        frame = spark.createDataFrame(rows, "at int, pointer binary").coalesce(1)
        origin = asdict(
            identify_query(reader, store, source_options.batch if source_options.from_batch is None else None)
        )
        planned_read = frame.mapInArrow(_make_planner(texts, origin, ranges), _PLAN).collect()[0]
        # The hold is in place. If Spark still retains the batch, clean-up has not deleted its files before.
        reader.batch(batches[0].batch)
        return planned_read

    return use_batch(
        reader, source_options.to_batch if source_options.from_batch is not None else source_options.batch, plan
    )


def _make_planner(
    texts: dict[str, str], origin: dict[str, str] | None = None, ranges: Sequence[tuple[int, int, int]] = ()
) -> Any:
    # Nested, so that Spark pickles it by value.
    def plan_state(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from spark_state_ext.spark.source.options import SourceOptions
        from spark_state_ext.spark.source.read_plan import decode_exact, plan_read

        rows = [row for batch in batches for row in batch.to_pylist()]
        exact = None if origin is None else decode_exact(origin, ranges, rows)
        plan = plan_read(SourceOptions.of(texts), exact=exact)
        yield pa.RecordBatch.from_pydict({"schema": [plan.schema], "parts": [list(plan.parts)]})

    return plan_state


def _make_reader(storage_options: dict[str, Any]) -> Any:
    def read_parts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from spark_state_ext.spark.source.read_plan import read_part

        for batch in batches:
            for part in batch.column(1).to_pylist():
                yield from read_part(part, storage_options)

    return read_parts
