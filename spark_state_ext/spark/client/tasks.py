"""Work that a client runs in a single task, because the client itself may not reach the folders."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from spark_state_ext.engine.job import BUILD
from spark_state_ext.engine.options import StateOptions
from spark_state_ext.savepoints.task_rows import ANSWER
from spark_state_ext.spark.client.task_functions import task_entry

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["run_task", "release_hold", "request_for"]

_LOGGER = logging.getLogger("spark_state_ext")


def request_for(options: StateOptions) -> dict[str, Any]:
    """Return the part of a task's request that says where an operator's state is."""
    return {"package_version": BUILD, "options": options.to_plain()}


def run_task(spark: SparkSession, task: str, request: dict[str, Any]) -> Any:
    """Run a task (as `task_entry` names it) once, and return its answer."""
    frame = spark.range(1).coalesce(1).mapInArrow(task_entry(task, request), ANSWER)
    return json.loads(frame.collect()[0].answer)


def release_hold(spark: SparkSession, request: dict[str, Any]) -> None:
    """Release a hold; if that fails, log it and leave the hold to expire."""
    try:
        run_task(spark, "savepoint_tasks.end", request)
    except Exception as error:
        # The hold expires by itself, and the caller's own result or error matters more.
        _LOGGER.warning("could not release the hold of %s, so it stays until it expires: %s", request["holder"], error)
