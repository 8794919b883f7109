"""The way back: what a savepoint gives to Spark's own operators (`docs/operating/importing.md`)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from spark_state_ext.engine.job import BUILD
from spark_state_ext.engine.start_from import Savepoint
from spark_state_ext.errors import UnsupportedPlanError, UsageError
from spark_state_ext.spark.client.tables import TIMEOUT_COLUMN, read_savepoint
from spark_state_ext.spark.client.tasks import in_a_task
from spark_state_ext.spark.compat import SPARK_VERSION

if TYPE_CHECKING:
    from pyspark.sql import GroupedData, SparkSession

__all__ = ["APPLY_IN_PANDAS_WITH_STATE", "TRANSFORM_WITH_STATE", "export_native", "refuse_operator"]

TRANSFORM_WITH_STATE, APPLY_IN_PANDAS_WITH_STATE = "transformWithState", "applyInPandasWithState"


def export_native(
    spark: SparkSession, savepoint: Savepoint | str | os.PathLike[str], *, to: str = TRANSFORM_WITH_STATE
) -> GroupedData:
    """The state of a savepoint, as Spark's own ``transformWithState`` takes it: ``initialState=export_native(…)``.

    Parameters
    ----------
    spark
        A session of PySpark 4.0 or newer.
    savepoint
        The savepoint, or its path; with `Savepoint.operator` where it has several operators.
    to
        Spark's operator: ``"transformWithState"``, which ``transformWithStateInPandas`` is too. There is no way to
        ``"applyInPandasWithState"``: Spark has no public writer of its state, and that operator takes no initial state.

    Returns
    -------
    GroupedData
        The rows of `read_savepoint`, grouped by key. The processor's ``handleInitialState`` gets each key's row, and
        sets its state, and a timer for ``timeout_ms``.

    Raises
    ------
    UnsupportedPlanError
        For ``"applyInPandasWithState"``, and where each stream of a key has a state of its own.
    UsageError
        When an argument cannot work, or on PySpark 3.5.
    PySparkException
        As for `read_savepoint`.
    """
    refuse_operator(to)
    given = savepoint if isinstance(savepoint, Savepoint) else Savepoint(os.fspath(savepoint))
    told = {
        "package_version": BUILD,
        "savepoint": given.path,
        "savepoint_options": dict(given.storage_options),
        "operator": given.operator,
    }
    found = in_a_task(spark, "describe", told)
    if not found["one_state"]:
        raise UnsupportedPlanError(
            f"the savepoint at {given.path} has a state for each stream of a key, and Spark's operator takes one: read "
            "it with read_savepoint, and make one row of a key's"
        )
    keys = [field["name"] for field in found["key_schema"]["fields"]]
    state = [field["name"] for field in found["state_schema"]["fields"]]
    names = [*keys, *state, TIMEOUT_COLUMN]
    if len(set(names)) < len(names):
        raise UsageError(
            f"the savepoint at {given.path} has columns of one name, of key, state and timeout: {', '.join(names)}. "
            "Read it with read_savepoint, rename them with toDF(…), and group by the key yourself"
        )
    return read_savepoint(spark, given).groupBy(*keys)


def refuse_operator(to: str) -> None:
    """Refuse an operator of Spark's that cannot take the state of a savepoint."""
    if to == APPLY_IN_PANDAS_WITH_STATE:
        raise UnsupportedPlanError(
            "the state of a savepoint cannot become that of Spark's own applyInPandasWithState: no release of PySpark "
            "up to 4.3 has a public writer of state, and that operator takes no initial state. Go on with "
            "transformWithStateInPandas, which takes one, or keep the checkpoint of the job that was imported "
            "(docs/operating/importing.md)"
        )
    if to != TRANSFORM_WITH_STATE:
        raise UsageError(f"to must be {TRANSFORM_WITH_STATE!r}, not {to!r}")
    if SPARK_VERSION < (4, 0):
        raise UsageError("PySpark 3.5 has no transformWithState: use PySpark 4.0 or newer")
