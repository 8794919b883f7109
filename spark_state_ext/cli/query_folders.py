"""The folders that the pointers in a Spark checkpoint name, read with Spark's own reader of state (Spark 4)."""

from __future__ import annotations

from typing import Any

from pyspark import __version__
from pyspark.sql import SparkSession

from spark_state_ext.errors import StorageError, UsageError
from spark_state_ext.spark.client.state_reader import StateReader

__all__ = ["query_folders_of", "session"]


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
    try:
        return StateReader(spark, location).query_folders()
    except StorageError as error:
        raise StorageError(f"{error}. Leave --spark out.") from error
