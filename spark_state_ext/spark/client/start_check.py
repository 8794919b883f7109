"""What the plan of an operator finds wrong with the snapshot that its query may start from.

The plan does not know whether the query has state of its own, which then needs nothing of the snapshot: it may be gone,
or have other buckets. So only what is wrong for every query is refused here; of the rest the log warns.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from spark_state_ext import errors
from spark_state_ext.beginning.starts import refuse_unfit_start
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.start_from import CLAIM, RetainedCheckpoint
from spark_state_ext.errors import ChangedJobError, OperatorChangedError, StateError, UsageError
from spark_state_ext.spark.client.tasks import in_a_task
from spark_state_ext.spark.compat import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["check_start"]

_LOGGER = logging.getLogger("spark_state_ext")


def check_start(spark: SparkSession, job: Job) -> None:
    """Refuse a start from an operator that the snapshot lacks, and log what else keeps a new query from starting."""
    start = job.options.start_from
    if start is None or (isinstance(start, RetainedCheckpoint) and job.captured is None):
        return
    try:
        if is_connect(spark):
            # A client may not reach the folder.
            _refuse_as_told(in_a_task(spark, "check_start", {"job": job.to_plain()}))
        else:
            refuse_unfit_start(job)
    except OperatorChangedError:
        raise
    except (ChangedJobError, UsageError) as error:
        _LOGGER.warning(
            "operator %r cannot start from %s: %s. A query that has state of its own goes on; one that has none fails "
            "in its first batch with data",
            job.operator,
            start,
            error,
        )
    except StateError as error:
        # A savepoint that was claimed is gone once the query does not need it.
        level = logging.INFO if start.mode == CLAIM else logging.WARNING
        _LOGGER.log(
            level,
            "%s, which operator %r may start from, was not read when the query was planned: %s. A query that has state "
            "of its own does not need it",
            start,
            job.operator,
            error,
        )


def _refuse_as_told(told: dict[str, str] | None) -> None:
    """Raise the error that a task has answered with."""
    if told is not None:
        raise getattr(errors, told["error"])(told["text"])
