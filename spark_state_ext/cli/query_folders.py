"""The folders that the pointers in a Spark checkpoint name, read with Spark's own reader of state (Spark 4)."""

from __future__ import annotations

from pyspark import __version__
from pyspark.sql import SparkSession

from arrow_schemas.pointer import Pointer
from spark_state_ext.cli.sessions import errors_of_tasks, refuse_no_checkpoint, session_with
from spark_state_ext.errors import StorageError, UsageError
from spark_state_ext.spark.client.state_reader import StateReader

__all__ = ["pointers_of", "query_folders_of", "session"]


def session(*checkpoints: str) -> SparkSession:
    """A session of this process, or a new one; what can be checked before Spark starts is checked first."""
    if int(__version__.partition(".")[0]) < 4:
        raise UsageError(
            f"Spark {__version__} cannot read the state of a checkpoint: use Spark 4, or leave out what asks for Spark"
        )
    for location in checkpoints:
        refuse_no_checkpoint(location)
    with errors_of_tasks():
        return session_with({})
    raise AssertionError("unreachable: errors_of_tasks raises what it catches")


def pointers_of(spark: SparkSession, location: str, operator: str, query_folder: str) -> dict[int, Pointer]:
    """The pointers of a query's last committed batch, by bucket."""
    reader = StateReader(spark, location)
    stores = [it for it in reader.stores() if (it.operator, it.query_folder) == (operator, query_folder)]
    if not stores:
        raise UsageError(
            f"{location} is no checkpoint of the query with the folder {query_folder} of operator {operator!r}: give "
            "the checkpointLocation of that query"
        )
    return reader.by_bucket(stores[0], reader.batch().batch)


def query_folders_of(spark: SparkSession, location: str) -> frozenset[str]:
    """The query folders in the pointers of a checkpoint; none where it has no operator of ours."""
    try:
        return StateReader(spark, location).query_folders()
    except StorageError as error:
        raise StorageError(f"{error}. Leave --spark out.") from error
