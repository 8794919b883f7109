"""The state of a query on Spark's own operator, read with Spark's own reader of state (Spark 4.0 and newer)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.errors import PythonException
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from spark_state_ext.errors import StorageError, UnsupportedPlanError, UsageError
from spark_state_ext.spark.compat import FIRST_READERS, SPARK_VERSION, is_of_spark, said_by_spark

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = ["SparkState", "read_state", "refuse_old_spark", "translated"]

_OPERATOR = "applyInPandasWithState"
_GROUP_STATE, _TIMEOUT = "groupState", "timeoutTimestamp"
_POINTER = "pointer"
_OTHER_MARK = re.compile(r"RocksDB checkpoint metadata\. Expected v\d+, but found v\d+")


@dataclass(frozen=True)
class SparkState:
    """The state that a batch has left.

    Parameters
    ----------
    rows
        Columns by position: the keys, the state, when the key times out (milliseconds, or NULL), and whether it has a
        state. They are called ``c0``, ``c1`` and so on.
    keys, state
        Types of the grouping and of the state, under their own names.
    has_timeout
        Whether the operator has timeouts.
    """

    rows: DataFrame
    keys: StructType
    state: StructType
    has_timeout: bool


def refuse_old_spark(version: tuple[int, int] = SPARK_VERSION) -> None:
    """Refuse PySpark 3.5."""
    if version < FIRST_READERS[1]:
        raise UsageError(
            "PySpark 3.5 has no reader of Spark's state, which a job is imported with. Stop the job, and import it "
            "with PySpark 4.0 or newer: that reads the checkpoint that 3.5 wrote."
        )


def read_state(spark: SparkSession, location: str, batch: int) -> SparkState:
    """The state of a query with one `applyInPandasWithState` and no other stateful operator; read when it is used."""
    with translated(location):
        operator_id = _only_operator(spark, location)
        reader = spark.read.format("statestore").option("operatorId", operator_id).option("batchId", batch)
        table = reader.load(location)
        keys, value = table.schema["key"].dataType, table.schema["value"].dataType
    state = value[_GROUP_STATE].dataType if isinstance(value, StructType) and _GROUP_STATE in value.names else None
    if not isinstance(keys, StructType) or not isinstance(value, StructType) or not isinstance(state, StructType):
        raise UnsupportedPlanError(
            f"the state at {location} is not that of {_OPERATOR}: its value is {value.simpleString()[:200]}. Only jobs "
            "on that operator can be imported"
        )
    if state.names == [_POINTER]:
        raise UsageError(
            f"the state at {location} is this package's own: start a query from it with take_savepoint, or with "
            "start_from=RetainedCheckpoint(…)"
        )
    has_timeout = _TIMEOUT in value.names
    group, timeout = F.col("value").getField(_GROUP_STATE), F.lit(None).cast("long")
    if has_timeout:
        # Spark keeps -1 where a key has no timeout.
        due = F.col("value").getField(_TIMEOUT)
        timeout = F.when(due >= 0, due).cast("long")
    plain = table.select("key.*", *_fields(group, state), timeout, group.isNotNull())
    names = [f"c{at}" for at in range(len(keys) + len(state) + 2)]
    return SparkState(plain.toDF(*names), keys, state, has_timeout)


def _fields(group: Column, state: StructType) -> list[Column]:
    return [group.getField(name) for name in state.names]


def _only_operator(spark: SparkSession, location: str) -> int:
    operators = {
        int(row.operatorId): str(row.operatorName)
        for row in spark.read.format("state-metadata").load(location).collect()
    }
    if len(operators) > 1:
        raise UnsupportedPlanError(
            f"the query at {location} has several stateful operators, {', '.join(operators.values())}: only a query "
            f"whose one stateful operator is {_OPERATOR} can be imported, as the state of the others would be lost"
        )
    for operator_id, name in operators.items():
        if name != _OPERATOR:
            raise UnsupportedPlanError(
                f"the stateful operator of the query at {location} is {name}: only {_OPERATOR} can be imported"
            )
        return operator_id
    # Spark 3.5 wrote no names of operators; what it is, its value tells.
    return 0


@contextmanager
def translated(location: str, version: tuple[int, int] = SPARK_VERSION) -> Iterator[None]:
    """Spark's errors as ours, but for those of tasks in Python, which are ours already."""
    try:
        yield
    except Exception as error:
        # What a task of ours raised is told as it is.
        ours = isinstance(error, PythonException) or "api.python.PythonException" in str(error)
        if ours or not is_of_spark(error):
            raise
        raise StorageError(
            f"Spark cannot read the state of {location}: {said_by_spark(str(error))}{_advice(str(error), version)}"
        ) from error


def _advice(text: str, version: tuple[int, int]) -> str:
    """What to do where Spark 4.0 marked a snapshot of RocksDB by the checkpoint format, which others do not."""
    if _OTHER_MARK.search(text) is None:
        return ""
    if version < FIRST_READERS[2]:
        # Spark 4.0 keeps the first format in a static field of its JVM, and takes it for the mark of all snapshots.
        return (
            " A JVM of Spark 4.0 reads the RocksDB snapshots of one checkpoint format only, the first that it met: "
            "import the job in an application of its own, or with PySpark 4.1 or newer"
        )
    return (
        " PySpark 4.0 marks snapshots of checkpoint format 2 as v2, which no newer Spark reads: "
        "docs/operating/importing.md says what to do"
    )
