"""Reading the state of a query on Spark's own operator, with Spark's own state reader (Spark 4.0 and newer)."""

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
from spark_state_ext.spark.compat import FIRST_READERS, SPARK_VERSION, extract_spark_message, is_spark_error

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = ["SparkState", "read_state", "refuse_old_spark", "translate_errors"]

_OPERATOR = "applyInPandasWithState"
_GROUP_STATE, _TIMEOUT = "groupState", "timeoutTimestamp"
_POINTER = "pointer"
_OTHER_MARK = re.compile(r"RocksDB checkpoint metadata\. Expected v\d+, but found v\d+")


@dataclass(frozen=True)
class SparkState:
    """The state after a batch.

    Parameters
    ----------
    rows
        Columns by position: the keys, the state, when the key times out (milliseconds, or NULL), and whether the key
        has a state. Their names are ``c0``, ``c1`` and so on.
    keys, state
        Types of the keys and of the state, with their own names.
    has_timeout
        Whether the operator has timeouts.
    """

    rows: DataFrame
    keys: StructType
    state: StructType
    has_timeout: bool


def refuse_old_spark(version: tuple[int, int] = SPARK_VERSION) -> None:
    """Raise on PySpark 3.5, which cannot read Spark's state."""
    if version < FIRST_READERS[1]:
        raise UsageError(
            "PySpark 3.5 has no reader of Spark's state, which is needed to import a job. Stop the job, and import it "
            "with PySpark 4.0 or newer, which reads the checkpoint that 3.5 wrote."
        )


def read_state(spark: SparkSession, location: str, batch: int) -> SparkState:
    """Return the state of a query whose only stateful operator is `applyInPandasWithState`; it is read when used."""
    with translate_errors(location):
        operator_id = _find_operator(spark, location)
        reader = spark.read.format("statestore").option("operatorId", operator_id).option("batchId", batch)
        table = reader.load(location)
        keys, value = table.schema["key"].dataType, table.schema["value"].dataType
    state = value[_GROUP_STATE].dataType if isinstance(value, StructType) and _GROUP_STATE in value.names else None
    if not isinstance(keys, StructType) or not isinstance(value, StructType) or not isinstance(state, StructType):
        raise UnsupportedPlanError(
            f"the state at {location} is not the state of {_OPERATOR}: its value is {value.simpleString()[:200]}. Only "
            "jobs on that operator can be imported"
        )
    if state.names == [_POINTER]:
        raise UsageError(
            f"the state at {location} is already this package's own: start a query from it with take_savepoint, or "
            "with start_from=RetainedCheckpoint(…)"
        )
    has_timeout = _TIMEOUT in value.names
    group_state, timeout = F.col("value").getField(_GROUP_STATE), F.lit(None).cast("long")
    if has_timeout:
        # Spark stores -1 for a key without a timeout.
        due = F.col("value").getField(_TIMEOUT)
        timeout = F.when(due >= 0, due).cast("long")
    plain = table.select("key.*", *_select_fields(group_state, state), timeout, group_state.isNotNull())
    names = [f"c{position}" for position in range(len(keys) + len(state) + 2)]
    return SparkState(plain.toDF(*names), keys, state, has_timeout)


def _select_fields(group: Column, state: StructType) -> list[Column]:
    return [group.getField(name) for name in state.names]


def _find_operator(spark: SparkSession, location: str) -> int:
    operators = {
        int(row.operatorId): str(row.operatorName)
        for row in spark.read.format("state-metadata").load(location).collect()
    }
    if len(operators) > 1:
        raise UnsupportedPlanError(
            f"the query at {location} has several stateful operators, {', '.join(operators.values())}: only a query "
            f"whose single stateful operator is {_OPERATOR} can be imported, as the others' state would be lost"
        )
    for operator_id, name in operators.items():
        if name != _OPERATOR:
            raise UnsupportedPlanError(
                f"the stateful operator of the query at {location} is {name}: only {_OPERATOR} can be imported"
            )
        return operator_id
    # Spark 3.5 recorded no operator names; the state's value shows which operator it is.
    return 0


@contextmanager
def translate_errors(location: str, version: tuple[int, int] = SPARK_VERSION) -> Iterator[None]:
    """Raise Spark's errors as ours, except errors of Python tasks, which are ours already."""
    try:
        yield
    except Exception as error:
        # An error of our own task is passed on unchanged.
        ours = isinstance(error, PythonException) or "api.python.PythonException" in str(error)
        if ours or not is_spark_error(error):
            raise
        raise StorageError(
            f"Spark cannot read the state of {location}: {extract_spark_message(str(error))}"
            f"{_find_advice(str(error), version)}"
        ) from error


def _find_advice(text: str, version: tuple[int, int]) -> str:
    """Return advice if Spark 4.0 marked a RocksDB snapshot differently from other releases; "" for other errors."""
    if _OTHER_MARK.search(text) is None:
        return ""
    if version < FIRST_READERS[2]:
        # Spark 4.0 keeps the first format it met in a static field of its JVM, and expects it in all snapshots.
        return (
            " A JVM of Spark 4.0 reads RocksDB snapshots of one checkpoint format only, the first that it met: import "
            "the job in a separate application, or with PySpark 4.1 or newer"
        )
    return (
        " PySpark 4.0 marks snapshots of checkpoint format 2 as v2, which newer Spark cannot read: "
        "docs/operating/importing.md explains what to do"
    )
