"""Checking, when an operator is planned, the snapshot from which its query may start.

The plan cannot see whether the query already has state. If it has, it does not need the snapshot, which may be gone
or have other buckets. So only what is wrong for every query raises an error here; the rest is logged as a warning.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from spark_state_ext import errors
from spark_state_ext.beginning.starts import refuse_unfit_start
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.start_from import CLAIM, RetainedCheckpoint
from spark_state_ext.errors import ChangedJobError, OperatorChangedError, StateError, UsageError
from spark_state_ext.spark.client.tasks import run_task
from spark_state_ext.spark.compat import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["check_start"]

_LOGGER = logging.getLogger("spark_state_ext")


def check_start(spark: SparkSession, job: Job) -> None:
    """Raise if the snapshot does not have the operator to start from; log what else would stop a new query."""
    start = job.options.start_from
    if start is None or (isinstance(start, RetainedCheckpoint) and job.captured is None):
        return
    try:
        if is_connect(spark):
            # The client may not reach the folder.
            _raise_answer(run_task(spark, "savepoint_tasks.check_start", {"job": job.to_plain()}))
        else:
            refuse_unfit_start(job)
    except OperatorChangedError:
        raise
    except (ChangedJobError, UsageError) as error:
        _LOGGER.warning(
            "operator %r cannot start from %s: %s. A query with state of its own continues; a query without state "
            "fails in its first batch with data",
            job.operator,
            start,
            error,
        )
    except StateError as error:
        # A claimed savepoint is removed as soon as the query does not need it.
        level = logging.INFO if start.mode == CLAIM else logging.WARNING
        _LOGGER.log(
            level,
            "%s, which operator %r may start from, could not be read when the query was planned: %s. A query with "
            "state of its own does not need it",
            start,
            job.operator,
            error,
        )


def _raise_answer(answer: dict[str, str] | None) -> None:
    """Raise the error in a task's answer, if there is one."""
    if answer is not None:
        raise getattr(errors, answer["error"])(answer["text"])
