"""Savepoints made of tables, and tables made of savepoints: `write_savepoint` and `read_savepoint`."""

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

from arrow_schemas.evolution import state_change
from arrow_schemas.operator import OperatorFile
from arrow_schemas.row import DEFINED
from arrow_schemas.savepoint import CANONICAL
from arrow_schemas.spark_types import key_fields, state_fields
from spark_state_ext.engine.job import BUILD
from spark_state_ext.engine.limits import check_sizes
from spark_state_ext.engine.options import StateOptions
from spark_state_ext.engine.start_from import Savepoint
from spark_state_ext.errors import SchemaChangedError, UnsupportedPlanError, UsageError
from spark_state_ext.savepoints.rows import SAVED
from spark_state_ext.spark.client.columns import packable, refuse_equal_names, struct_of
from spark_state_ext.spark.client.savepoints import TakenSavepoint, finished
from spark_state_ext.spark.client.shim import task_entry
from spark_state_ext.spark.client.tasks import in_a_task

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["TIMEOUT_COLUMN", "TableSavepoint", "read_savepoint", "save_table", "saved_table", "write_savepoint"]

# A column of the table that says when a key times out, milliseconds since 1970.
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
    """Make a savepoint of a table, for queries to start from: the initial state `applyInPandasWithState` never had.

    Parameters
    ----------
    df
        A batch DataFrame with a row for each key: the key columns, of the types that the query has them in, the state
        columns, and perhaps ``timeout_ms``, when the key times out, milliseconds since 1970. It has no others.
    path
        The savepoint's folder, which does not exist yet: any fsspec URL, or an absolute path, that all executors reach.
    keys
        Names of the key columns, in the order in which the query groups by them.
    state_schema
        The state columns, as the query declares them. They are found in `df` by name, and are of the same type or of a
        narrower one.
    buckets
        Number of buckets of the query.
    operator
        Name of the query's operator.
    watermark_ms
        Rows of the query up to this event time are late, milliseconds since 1970; None: none is.
    storage_options
        Options for the path's fsspec file system.

    Returns
    -------
    TakenSavepoint
        What is in it.

    Raises
    ------
    UsageError
        When an argument cannot work, a column is of another type than is declared, or the table has a column that is
        none of these.
    UnsupportedTypeError
        When a key or state column has a type that cannot be stored.
    PySparkException
        What tasks find comes as Spark's own error, with ours in its text: ``UsageError`` when there is something at the
        path, ``StateValueError`` when a key is there twice, or a column that may not be NULL is, ``StorageError`` when
        a store fails. What was written then is no savepoint.

    Examples
    --------
    >>> write_savepoint(  # doctest: +SKIP
    ...     spark.read.parquet("/totals"), "/savepoints/first", keys=["user"], state_schema="n long", buckets=16
    ... )
    """
    if df.isStreaming:
        raise UnsupportedPlanError("a savepoint is made of a batch DataFrame, and this one is streaming")
    file = _operator_file(df, keys, state_schema, buckets, operator)
    savepoint = os.fspath(path).rstrip("/")
    # Refuses what no executor could use.
    Savepoint(savepoint, storage_options=storage_options or {})
    state = StructType.fromJson(json.loads(file.state_schema))
    has_timeout = TIMEOUT_COLUMN in df.columns and TIMEOUT_COLUMN not in [*keys, *state.names]
    columns = [F.col(_quoted(name)) for name in keys]
    # Spark casts, by its own rules, what is declared wider.
    columns += [F.col(_quoted(field.name)).cast(field.dataType).alias(field.name) for field in state.fields]
    columns += [F.col(TIMEOUT_COLUMN).cast("long").alias(TIMEOUT_COLUMN)] if has_timeout else []
    chosen = df.select(*columns)
    return save_table(
        chosen, TableSavepoint(file, savepoint, dict(storage_options or {}), has_timeout, watermark_ms=watermark_ms)
    )


@dataclass(frozen=True)
class TableSavepoint:
    """A savepoint that is to be made of a table.

    Parameters
    ----------
    operator_file
        Its one operator.
    path, storage_options
        Its folder.
    has_timeout, has_defined
        Whether the table's columns, after keys and state, are when a key times out, and whether it has a state.
    watermark_ms, query_id, batch, offsets
        As the manifest has them.
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

    def told(self) -> dict[str, Any]:
        """For tasks."""
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


def save_table(chosen: DataFrame, wanted: TableSavepoint) -> TakenSavepoint:
    """Make a savepoint of a table whose columns go by position: keys, state, and what `wanted` says."""
    spark, told, file = chosen.sparkSession, wanted.told(), wanted.operator_file
    in_a_task(spark, "refuse", told)
    keys = len(file.row_schema().keys)
    fields = StructType([chosen.schema[at] for at in range(keys)])
    hashed = packable(chosen, chosen.schema, fields, tuple(range(keys)), [])
    packed = hashed.mapInArrow(task_entry("pack_rows", told, "tables"), "label int, payload binary")
    spread = packed.repartition(min(file.buckets, _partitions(spark)), "label")
    return finished(spark, told, spread.mapInArrow(task_entry("write_buckets", told, "tables"), SAVED).collect())


def read_savepoint(spark: SparkSession, savepoint: Savepoint | str | os.PathLike[str]) -> DataFrame:
    """The rows of a savepoint as a table: key columns, state columns, and ``timeout_ms``.

    Parameters
    ----------
    spark
        A session.
    savepoint
        The savepoint, or its path; with `Savepoint.operator` where it has several operators.

    Returns
    -------
    DataFrame
        A row for each key that has a state or a timeout; it is read when the table is used. A name that a key and a
        state column share becomes ``key.<name>`` and ``state.<name>``.

    Raises
    ------
    PySparkException
        What tasks find comes as Spark's own error, with ours in its text: ``UsageError`` when the savepoint has several
        operators, and none is named, ``MissingCheckpointError``, ``CorruptFileError`` or ``VersionSkewError`` when
        there is none that can be read.
    """
    given = savepoint if isinstance(savepoint, Savepoint) else Savepoint(os.fspath(savepoint))
    return saved_table(spark, given)


def saved_table(spark: SparkSession, given: Savepoint, with_defined: bool = False) -> DataFrame:
    """The same table."""
    told: dict[str, Any] = {
        "package_version": BUILD,
        "savepoint": given.path,
        "savepoint_options": dict(given.storage_options),
        "operator": given.operator,
        "with_defined": with_defined,
    }
    found = in_a_task(spark, "describe", told)
    told["operator"] = found["operator"]
    columns = StructType.fromJson(found["key_schema"]).fields + StructType.fromJson(found["state_schema"]).fields
    nullable = [StructField(name, it.dataType, True) for name, it in zip(found["names"], columns, strict=True)]
    numbers = spark.range(found["buckets"]).repartition(min(found["buckets"], _partitions(spark)), "id")
    shown = StructType([*nullable, StructField(TIMEOUT_COLUMN, LongType())])
    if with_defined:
        fields = [*shown.fields, StructField(DEFINED, BooleanType())]
        shown = StructType([StructField(f"c{at}", field.dataType) for at, field in enumerate(fields)])
    return numbers.mapInArrow(task_entry("read_rows", told, "tables"), shown)


def _operator_file(
    df: DataFrame, keys: Sequence[str], state_schema: StructType | str, buckets: int, operator: str
) -> OperatorFile:
    if isinstance(keys, str) or not keys:
        raise UsageError(f"keys must be a list of column names, not {keys!r}")
    state = struct_of(state_schema, df.sparkSession, "the state schema")
    if not state.fields:
        raise UsageError("the state schema has no columns")
    refuse_equal_names(state, "state", case_sensitive=True)
    missing = [name for name in [*keys, *state.names] if name not in df.columns]
    if missing:
        raise UsageError(f"the table has no column {missing[0]!r}; it has {', '.join(df.columns)}")
    unknown = [name for name in df.columns if name not in [*keys, *state.names, TIMEOUT_COLUMN]]
    if unknown:
        raise UsageError(
            f"the column {unknown[0]!r} of the table is no key, no state column, and not {TIMEOUT_COLUMN!r}, which "
            "says when a key times out: drop it, or rename it"
        )
    key = StructType([df.schema[name] for name in keys])
    key_fields(key.json())
    state_fields(state.json())
    # Names of operators are refused as an ArrowState refuses them.
    options = StateOptions(root="/", operator=operator)
    check_sizes(buckets, options.memory_bytes_max, 0, 0)
    _refuse_other_types(df, state, operator)
    return OperatorFile(operator, "", buckets, key.json(), state.json())


def _refuse_other_types(df: DataFrame, state: StructType, operator: str) -> None:
    """Values are stored as they are, or in a wider type: nothing is guessed of them."""
    for field in state.fields:
        given = df.schema[field.name]
        told = [state_fields(StructType([it]).json()) for it in (StructField(field.name, given.dataType), field)]
        try:
            state_change(operator, told[0], (told[1][0].with_nullable(True),))
        except SchemaChangedError as error:
            raise UsageError(
                f"column {field.name!r} of the table is {given.dataType.simpleString()}, and the state schema declares "
                f"{field.dataType.simpleString()}: cast the column to that, so that it is you who says how"
            ) from error
    if TIMEOUT_COLUMN in df.columns and TIMEOUT_COLUMN not in state.names:
        given = df.schema[TIMEOUT_COLUMN]
        if not isinstance(given.dataType, IntegralType):
            raise UsageError(
                f"column {TIMEOUT_COLUMN!r} of the table is {given.dataType.simpleString()}, and says when a key times "
                "out in milliseconds since 1970: give a whole number, of a timestamp unix_millis(column)"
            )


def _partitions(spark: SparkSession) -> int:
    return max(1, int(spark.conf.get("spark.sql.shuffle.partitions", "200") or "200"))


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"
