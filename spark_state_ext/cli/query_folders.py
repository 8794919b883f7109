"""The folders that the pointers in a Spark checkpoint name, read with Spark's own reader of state (Spark 4)."""

from __future__ import annotations

from typing import Any

from pyspark import __version__
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from arrow_schemas.pointer import Pointer
from spark_state_ext.errors import StorageError, UsageError

__all__ = ["query_folders_of", "session"]

_POINTER = "value.groupState.pointer"


def session() -> SparkSession:
    """A session of this process, with few threads where there is none yet.

    Raises
    ------
    UsageError
        On Spark 3.5, which has no reader of state.
    """
    if int(__version__.partition(".")[0]) < 4:
        raise UsageError(
            f"Spark {__version__} cannot read the state of a checkpoint: use Spark 4, or leave --spark out"
        )
    builder: Any = SparkSession.builder
    made: SparkSession = builder.appName("spark_state_ext abandoned").getOrCreate()
    return made


def query_folders_of(spark: SparkSession, location: str) -> frozenset[str]:
    """The query folders in the pointers of a checkpoint; none where it has no operator of ours.

    Parameters
    ----------
    spark
        A session.
    location
        The checkpoint location, as Spark knows it.

    Raises
    ------
    StorageError
        When Spark cannot read its state.
    CorruptPointerError, VersionSkewError
        When what looks like a pointer cannot be read.
    """
    query_folders: set[str] = set()
    try:
        operators = spark.read.format("state-metadata").load(location).select("operatorId", "stateStoreName").collect()
        for operator, store in sorted({(row.operatorId, row.stateStoreName) for row in operators}):
            reader = spark.read.format("statestore").option("operatorId", operator)
            state = reader.option("storeName", store).load(location)
            if "groupState.pointer" not in _fields(state.schema["value"].dataType):
                continue  # another operator of the query, which is none of ours
            pointers = state.select(_POINTER).where(f"{_POINTER} IS NOT NULL")
            query_folders.update(Pointer.decode(bytes(row.pointer)).query_folder for row in pointers.toLocalIterator())
    except PySparkException as error:
        raise StorageError(f"Spark cannot read the state of {location}: {error}. Leave --spark out.") from error
    return frozenset(query_folders)


def _fields(value: Any) -> set[str]:
    """Names of the fields of a state's value, and of fields in these."""
    return {f"{field.name}.{part.name}" for field in value for part in getattr(field.dataType, "fields", [])}
