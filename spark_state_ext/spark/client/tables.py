"""Making savepoints of tables, and tables of savepoints: `write_savepoint` and `read_savepoint`."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, IntegralType, LongType, StructField, StructType

from arrow_schemas.evolution import check_state_change
from arrow_schemas.operator import OperatorFile
from arrow_schemas.row import DEFINED
from arrow_schemas.savepoint import CANONICAL
from arrow_schemas.spark_types import key_fields, state_fields
from spark_state_ext.engine.job import BUILD
from spark_state_ext.engine.limits import check_sizes
from spark_state_ext.engine.options import StateOptions
from spark_state_ext.engine.start_from import Savepoint
from spark_state_ext.errors import SchemaChangedError, UnsupportedPlanError, UsageError
from spark_state_ext.savepoints.task_rows import SAVED
from spark_state_ext.spark.client.columns import parse_schema, refuse_equal_names, select_packed_columns
from spark_state_ext.spark.client.savepoints import TakenSavepoint, finish_savepoint
from spark_state_ext.spark.client.task_functions import task_entry
from spark_state_ext.spark.client.tasks import run_task

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["TIMEOUT_COLUMN", "TableSavepoint", "read_savepoint", "save_table", "read_saved_table", "write_savepoint"]

# Column of a table of state: when the key times out, milliseconds since 1970.
TIMEOUT_COLUMN = "timeout_ms"
_MEMORY_BYTES_MAX = 256 << 20


def write_savepoint(
    df: DataFrame,
    path: str | os.PathLike[str],
    *,
    keys: Sequence[str],
    state_schema: StructType | str,
    buckets: int = 16,
    operator: str = "state",
    watermark_ms: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> TakenSavepoint:
    """Make a savepoint of a table, as initial state for queries, which `applyInPandasWithState` itself does not take.

    Parameters
    ----------
    df
        A batch DataFrame with a row for each key: the key columns, of the same types as in the query, the state
        columns, and optionally ``timeout_ms``, when the key times out, milliseconds since 1970. No other columns.
    path
        The savepoint's folder, which does not exist yet: any fsspec URL, or an absolute path, that all executors reach.
    keys
        Names of the key columns, in the order in which the query groups by them.
    state_schema
        The state columns, as the query declares them. `df` has them under the same names, with the same or narrower
        types.
    buckets
        The query's number of buckets.
    operator
        Name of the query's operator.
    watermark_ms
        Rows of the query up to this event time are late, milliseconds since 1970; None: no row is late.
    storage_options
        Options for the path's fsspec file system.

    Returns
    -------
    TakenSavepoint
        The savepoint that was made.

    Raises
    ------
    UsageError
        When an argument cannot work, a column has another type than declared, or the table has a column that is neither
        key, state nor timeout.
    UnsupportedTypeError
        When a key or state column has a type that cannot be stored.
    PySparkException
        Errors in tasks arrive as Spark's own error, with ours in its text: ``UsageError`` when the path is not empty,
        ``StateValueError`` when a key is there twice, or a column that must not be NULL is NULL, ``StorageError`` when
        a store fails. Files that were written before the error are not a savepoint.

    Examples
    --------
    >>> write_savepoint(  # doctest: +SKIP
    ...     spark.read.parquet("/totals"), "/savepoints/first", keys=["user"], state_schema="n long", buckets=16
    ... )
    """
    if df.isStreaming:
        raise UnsupportedPlanError("a savepoint can only be made of a batch DataFrame, and this one is streaming")
    file = _make_operator_file(df, keys, state_schema, buckets, operator)
    savepoint = os.fspath(path).rstrip("/")
    # Raises for a path or options that no executor could use.
    Savepoint(savepoint, storage_options=storage_options or {})
    state = StructType.fromJson(json.loads(file.state_schema))
    has_timeout = TIMEOUT_COLUMN in df.columns and TIMEOUT_COLUMN not in [*keys, *state.names]
    columns = [F.col(_quote_name(name)) for name in keys]
    # Spark widens, by its own rules, columns that are declared with a wider type.
    columns += [F.col(_quote_name(field.name)).cast(field.dataType).alias(field.name) for field in state.fields]
    columns += [F.col(TIMEOUT_COLUMN).cast("long").alias(TIMEOUT_COLUMN)] if has_timeout else []
    table = df.select(*columns)
    return save_table(
        table, TableSavepoint(file, savepoint, dict(storage_options or {}), has_timeout, watermark_ms=watermark_ms)
    )


@dataclass(frozen=True)
class TableSavepoint:
    """A savepoint to be made of a table.

    Parameters
    ----------
    operator_file
        The savepoint's only operator.
    path, storage_options
        The savepoint's folder.
    has_timeout, has_defined
        Whether the table has, after keys and state, a column for a key's timeout, and one for whether it has state.
    watermark_ms, query_id, batch, offsets
        As in the manifest.
    """

    operator_file: OperatorFile
    path: str
    storage_options: Mapping[str, Any]
    has_timeout: bool = False
    has_defined: bool = False
    watermark_ms: int | None = None
    query_id: str = ""
    batch: int = -1
    offsets: str | None = None

    def to_request(self) -> dict[str, Any]:
        """Return the request for tasks."""
        return {
            "package_version": BUILD,
            "operator_file": self.operator_file.encode().decode(),
            "savepoint": self.path,
            "savepoint_options": dict(self.storage_options),
            "form": CANONICAL,
            "id": uuid.uuid4().hex,
            "made_ms": int(time.time() * 1000),
            "has_timeout": self.has_timeout,
            "has_defined": self.has_defined,
            "watermark_ms": self.watermark_ms,
            "memory_bytes_max": _MEMORY_BYTES_MAX,
            "query_id": self.query_id,
            "batch": self.batch,
            "offsets": self.offsets,
            "parts": [],
        }


def save_table(table: DataFrame, target: TableSavepoint) -> TakenSavepoint:
    """Make a savepoint of a table whose columns go by position: keys, state, and the further ones of `target`."""
    spark, request, file = table.sparkSession, target.to_request(), target.operator_file
    run_task(spark, "savepoint_tasks.refuse", request)
    keys = len(file.row_schema().keys)
    fields = StructType([table.schema[position] for position in range(keys)])
    hashed = select_packed_columns(table, table.schema, fields, tuple(range(keys)), [])
    packed = hashed.mapInArrow(task_entry("table_tasks.pack_rows", request), "label int, payload binary")
    spread = packed.repartition(min(file.buckets, _count_partitions(spark)), "label")
    return finish_savepoint(
        spark, request, spread.mapInArrow(task_entry("table_tasks.write_buckets", request), SAVED).collect()
    )


def read_savepoint(spark: SparkSession, savepoint: Savepoint | str | os.PathLike[str]) -> DataFrame:
    """Return the rows of a savepoint as a table: key columns, state columns, and ``timeout_ms``.

    Parameters
    ----------
    spark
        A session.
    savepoint
        The savepoint, or its path. A savepoint of several operators must be a `Savepoint` with `operator`.

    Returns
    -------
    DataFrame
        A row for each key that has state or a timeout, read when the table is used. If a key and a state column have
        the same name, they become ``key.<name>`` and ``state.<name>``.

    Raises
    ------
    PySparkException
        Errors in tasks arrive as Spark's own error, with ours in its text: ``UsageError`` when the savepoint has
        several operators and `operator` is not given; ``MissingCheckpointError``, ``CorruptFileError`` or
        ``VersionSkewError`` when it cannot be read.
    """
    source = savepoint if isinstance(savepoint, Savepoint) else Savepoint(os.fspath(savepoint))
    return read_saved_table(spark, source)


def read_saved_table(spark: SparkSession, savepoint: Savepoint, with_defined: bool = False) -> DataFrame:
    """Return the table of `read_savepoint`. `with_defined` adds whether a key has state, and names columns c0, c1, …"""
    request: dict[str, Any] = {
        "package_version": BUILD,
        "savepoint": savepoint.path,
        "savepoint_options": dict(savepoint.storage_options),
        "operator": savepoint.operator,
        "with_defined": with_defined,
    }
    description = run_task(spark, "savepoint_tasks.describe", request)
    request["operator"] = description["operator"]
    columns = (
        StructType.fromJson(description["key_schema"]).fields + StructType.fromJson(description["state_schema"]).fields
    )
    nullable = [
        StructField(name, field.dataType, True) for name, field in zip(description["names"], columns, strict=True)
    ]
    numbers = spark.range(description["buckets"]).repartition(
        min(description["buckets"], _count_partitions(spark)), "id"
    )
    table_type = StructType([*nullable, StructField(TIMEOUT_COLUMN, LongType())])
    if with_defined:
        fields = [*table_type.fields, StructField(DEFINED, BooleanType())]
        table_type = StructType([StructField(f"c{position}", field.dataType) for position, field in enumerate(fields)])
    return numbers.mapInArrow(task_entry("table_tasks.read_rows", request), table_type)


def _make_operator_file(
    df: DataFrame, keys: Sequence[str], state_schema: StructType | str, buckets: int, operator: str
) -> OperatorFile:
    if isinstance(keys, str) or not keys:
        raise UsageError(f"keys must be a list of column names, not {keys!r}")
    state = parse_schema(state_schema, df.sparkSession, "the state schema")
    if not state.fields:
        raise UsageError("the state schema must have at least one column")
    refuse_equal_names(state, "state", case_sensitive=True)
    missing = [name for name in [*keys, *state.names] if name not in df.columns]
    if missing:
        raise UsageError(f"the table has no column {missing[0]!r}; it has {', '.join(df.columns)}")
    unknown = [name for name in df.columns if name not in [*keys, *state.names, TIMEOUT_COLUMN]]
    if unknown:
        raise UsageError(
            f"the table has the column {unknown[0]!r}, which is neither a key nor a state column, nor "
            f"{TIMEOUT_COLUMN!r} for when a key times out: drop or rename it"
        )
    key = StructType([df.schema[name] for name in keys])
    key_fields(key.json())
    state_fields(state.json())
    # Check the operator's name as ArrowState does.
    options = StateOptions(root="/", operator=operator)
    check_sizes(buckets, options.memory_bytes_max, 0, 0)
    _refuse_other_types(df, state, operator)
    return OperatorFile(operator, "", buckets, key.json(), state.json())


def _refuse_other_types(df: DataFrame, state: StructType, operator: str) -> None:
    """Raise unless each column has the declared type or a narrower one: no other conversion is made implicitly."""
    for field in state.fields:
        column = df.schema[field.name]
        fields = [
            state_fields(StructType([struct_field]).json())
            for struct_field in (StructField(field.name, column.dataType), field)
        ]
        try:
            check_state_change(operator, fields[0], (fields[1][0].with_nullable(True),))
        except SchemaChangedError as error:
            raise UsageError(
                f"column {field.name!r} of the table is {column.dataType.simpleString()}, but the state schema "
                f"declares {field.dataType.simpleString()}: cast the column to that type explicitly"
            ) from error
    if TIMEOUT_COLUMN in df.columns and TIMEOUT_COLUMN not in state.names:
        column = df.schema[TIMEOUT_COLUMN]
        if not isinstance(column.dataType, IntegralType):
            raise UsageError(
                f"column {TIMEOUT_COLUMN!r} of the table is {column.dataType.simpleString()}, but must be a whole "
                "number: when a key times out, milliseconds since 1970. For a timestamp use unix_millis(column)"
            )


def _count_partitions(spark: SparkSession) -> int:
    return max(1, int(spark.conf.get("spark.sql.shuffle.partitions", "200") or "200"))


def _quote_name(name: str) -> str:
    return f"`{name.replace('`', '``')}`"
