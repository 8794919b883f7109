"""State as DataFrames: the data source made known to a session, and a function for every release of PySpark."""

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
    """Make ``spark.read.format("arrow_state")`` known to a session, classic or Connect.

    Executors and the driver need this package. Options of the source are the arguments of `read_state`; lists are
    names with commas between them, and ``storage_options`` is JSON.

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
        raise UsageError("PySpark 3.5 has no data sources in Python: read_state(spark, path, …) gives the same tables")
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
    """State of an operator as a DataFrame, read by tasks: one for each bucket, as many at once as Spark has cores.

    It is planned when this is called: each use of the frame reads the same batch, while its files are there. A hold
    keeps them for ten minutes after the last task that read.

    Parameters
    ----------
    spark
        A session, classic or Connect, of any release.
    path
        A root, a query folder, or a savepoint, that executors reach.
    columns
        Names of columns; by default keys, state and ``timeout_ms``. There are also ``defined``, ``bucket``, and, where
        the state has a time to live, ``__expires_ms``.
    buckets
        Numbers of buckets; by default all.
    checkpoint_location
        The query's Spark checkpoint location (PySpark 4.0 or newer): the state is read exactly as of a committed
        batch, by default the last one, as `open_committed` does. By default it is the last one that files prove.
    storage_options
        Options for the path's fsspec file system.
    **options
        ``operator``, ``batch``, ``query_folder``, ``unproven`` and ``hold``, as for `open_state`; ``table``:
        ``"state"``, ``"timeouts"``, or ``"metadata"``, a row for each checkpoint file; ``from_batch``, and ``to_batch``
        if it is not to be the newest: what became of keys in between, with the column ``_change``, ``"insert"``,
        ``"update"`` or ``"delete"``.

    Returns
    -------
    DataFrame
        The table.

    Raises
    ------
    UsageError
        When an argument cannot work.
    PySparkException
        What tasks find comes as Spark's own error, with ours in its text.

    Examples
    --------
    >>> read_state(spark, "/state", operator="clicks").where("clicks > 10")  # doctest: +SKIP
    """
    from spark_state_ext.spark.source.options import SourceOptions

    told = {name: str(value) for name, value in options.items()}
    told["path"] = os.fspath(path)
    if columns is not None:
        told["columns"] = json.dumps(list(columns))
    if buckets is not None:
        told["buckets"] = ",".join(map(str, buckets))
    if storage_options:
        told["storage_options"] = json.dumps(dict(storage_options))
    asked = SourceOptions.of(told)
    if checkpoint_location is None:
        found = spark.range(1).coalesce(1).mapInArrow(_planner(told), _PLAN).collect()[0]
    else:
        found = _planned_exactly(spark, told, asked, checkpoint_location)
    schema = StructType.fromJson(json.loads(found.schema))
    parts = list(found.parts)
    if not parts:
        return spark.createDataFrame([], schema)
    # One bucket a task, whatever the session's settings for shuffles are.
    rows = spark.createDataFrame([(at, part) for at, part in enumerate(parts)], "at int, part string")
    return rows.repartitionByRange(len(parts), "at").mapInArrow(_reader(dict(storage_options or {})), schema)


def _planned_exactly(
    spark: SparkSession, told: dict[str, str], asked: SourceOptions, checkpoint_location: str | os.PathLike[str]
) -> Any:
    """The plan of a read of committed batches. A task makes it, as a client of Spark Connect may not reach the root."""
    from spark_state_ext.spark.client.state_reader import with_batch
    from spark_state_ext.spark.source.exact import exact_batch, reader_of, store_of, told_of

    if asked.unproven:
        raise UsageError("unproven does not go with checkpoint_location, by which all that is read is committed")
    reader = reader_of(spark, checkpoint_location)
    store = store_of(reader, asked.operator)
    if asked.query_folder not in (None, store.query_folder):
        raise UsageError(
            f"the query at {reader.location} has the folder {store.query_folder}, not {asked.query_folder!r}: leave "
            "query_folder out, or give the checkpointLocation of that query"
        )

    def plan(committed: CommittedBatch) -> Any:
        batches = [committed] if asked.from_batch is None else [reader.batch(asked.from_batch), committed]
        exact = [exact_batch(reader, store, it) for it in batches]
        rows = [(at, it.encode()) for at, one in enumerate(exact) for it in one.pointers.values()]
        ranges = [(it.batch, it.oldest, it.newest) for it in exact]
        frame = spark.createDataFrame(rows, "at int, pointer binary").coalesce(1)
        by_spark = asdict(told_of(reader, store, asked.batch if asked.from_batch is None else None))
        found = frame.mapInArrow(_planner(told, by_spark, ranges), _PLAN).collect()[0]
        # The hold is there now. What Spark retains still, no clean-up has touched before.
        reader.batch(batches[0].batch)
        return found

    return with_batch(reader, asked.to_batch if asked.from_batch is not None else asked.batch, plan)


def _planner(
    told: dict[str, str], by_spark: dict[str, str] | None = None, ranges: Sequence[tuple[int, int, int]] = ()
) -> Any:
    # Nested, so that Spark takes it along by value.
    def plan_state(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from spark_state_ext.spark.source.options import SourceOptions
        from spark_state_ext.spark.source.parts import exact_of, planned

        rows = [row for batch in batches for row in batch.to_pylist()]
        exact = None if by_spark is None else exact_of(by_spark, ranges, rows)
        found = planned(SourceOptions.of(told), exact=exact)
        yield pa.RecordBatch.from_pydict({"schema": [found.schema], "parts": [list(found.parts)]})

    return plan_state


def _reader(storage_options: dict[str, Any]) -> Any:
    def read_parts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from spark_state_ext.spark.source.parts import read_part

        for batch in batches:
            for part in batch.column(1).to_pylist():
                yield from read_part(part, storage_options)

    return read_parts
