"""Exporting the state of a savepoint to Spark's own operators (`docs/operating/importing.md`)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from spark_state_ext.engine.job import BUILD
from spark_state_ext.engine.start_from import Savepoint
from spark_state_ext.errors import UnsupportedPlanError, UsageError
from spark_state_ext.spark.client.tables import TIMEOUT_COLUMN, read_savepoint
from spark_state_ext.spark.client.tasks import run_task
from spark_state_ext.spark.compat import SPARK_VERSION

if TYPE_CHECKING:
    from pyspark.sql import GroupedData, SparkSession

__all__ = ["APPLY_IN_PANDAS_WITH_STATE", "TRANSFORM_WITH_STATE", "export_native", "refuse_operator"]

TRANSFORM_WITH_STATE, APPLY_IN_PANDAS_WITH_STATE = "transformWithState", "applyInPandasWithState"


def export_native(
    spark: SparkSession, savepoint: Savepoint | str | os.PathLike[str], *, to: str = TRANSFORM_WITH_STATE
) -> GroupedData:
    """Return the state of a savepoint as the ``initialState`` of Spark's own ``transformWithState``.

    Parameters
    ----------
    spark
        A session of PySpark 4.0 or newer.
    savepoint
        The savepoint, or its path. A savepoint of several operators must be a `Savepoint` with `operator`.
    to
        Spark's operator: ``"transformWithState"``, which includes ``transformWithStateInPandas``. An export to
        ``"applyInPandasWithState"`` is impossible: Spark has no public writer of its state, and the operator takes no
        initial state.

    Returns
    -------
    GroupedData
        The rows of `read_savepoint`, grouped by key. The processor's ``handleInitialState`` gets each key's row: it has
        to set the key's state, and a timer for ``timeout_ms``.

    Raises
    ------
    UnsupportedPlanError
        For ``"applyInPandasWithState"``, or if each stream of a key has a state of its own.
    UsageError
        When an argument cannot work, or on PySpark 3.5.
    PySparkException
        See `read_savepoint`.
    """
    refuse_operator(to)
    source = savepoint if isinstance(savepoint, Savepoint) else Savepoint(os.fspath(savepoint))
    request = {
        "package_version": BUILD,
        "savepoint": source.path,
        "savepoint_options": dict(source.storage_options),
        "operator": source.operator,
    }
    description = run_task(spark, "savepoint_tasks.describe", request)
    if not description["one_state"]:
        raise UnsupportedPlanError(
            f"the savepoint at {source.path} has a state for each stream of a key, but Spark's operator takes one per "
            "key: read it with read_savepoint, and make one row of a key's rows"
        )
    keys = [field["name"] for field in description["key_schema"]["fields"]]
    state = [field["name"] for field in description["state_schema"]["fields"]]
    names = [*keys, *state, TIMEOUT_COLUMN]
    if len(set(names)) < len(names):
        raise UsageError(
            f"the savepoint at {source.path} has several columns of the same name among key, state and timeout: "
            f"{', '.join(names)}. Read it with read_savepoint, rename them with toDF(…), and group by the key yourself"
        )
    return read_savepoint(spark, source).groupBy(*keys)


def refuse_operator(to: str) -> None:
    """Raise for an operator of Spark that cannot take the state of a savepoint."""
    if to == APPLY_IN_PANDAS_WITH_STATE:
        raise UnsupportedPlanError(
            "the state of a savepoint cannot be exported to Spark's own applyInPandasWithState: no release of PySpark "
            "up to 4.3 has a public writer of state, and that operator takes no initial state. Use "
            "transformWithStateInPandas, which takes one, or keep the checkpoint of the job that was imported "
            "(docs/operating/importing.md)"
        )
    if to != TRANSFORM_WITH_STATE:
        raise UsageError(f"to must be {TRANSFORM_WITH_STATE!r}, not {to!r}")
    if SPARK_VERSION < (4, 0):
        raise UsageError("PySpark 3.5 has no transformWithState: use PySpark 4.0 or newer")
