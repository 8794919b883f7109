"""State as DataFrames: the data source made known to a session, and a function for every release of PySpark."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.types import StructType

from spark_state_ext.errors import UsageError
from spark_state_ext.spark.compat import SPARK_VERSION

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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
    SourceOptions.of(told)
    found = spark.range(1).coalesce(1).mapInArrow(_planner(told), _PLAN).collect()[0]
    schema = StructType.fromJson(json.loads(found.schema))
    parts = list(found.parts)
    if not parts:
        return spark.createDataFrame([], schema)
    # One bucket a task, whatever the session's settings for shuffles are.
    rows = spark.createDataFrame([(at, part) for at, part in enumerate(parts)], "at int, part string")
    return rows.repartitionByRange(len(parts), "at").mapInArrow(_reader(dict(storage_options or {})), schema)


def _planner(told: dict[str, str]) -> Any:
    # Nested, so that Spark takes it along by value.
    def plan_state(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from spark_state_ext.spark.source.options import SourceOptions
        from spark_state_ext.spark.source.parts import planned

        for _ in batches:
            pass
        found = planned(SourceOptions.of(told))
        yield pa.RecordBatch.from_pydict({"schema": [found.schema], "parts": [list(found.parts)]})

    return plan_state


def _reader(storage_options: dict[str, Any]) -> Any:
    def read_parts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from spark_state_ext.spark.source.parts import read_part

        for batch in batches:
            for part in batch.column(1).to_pylist():
                yield from read_part(part, storage_options)

    return read_parts
