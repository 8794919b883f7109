"""Work that a client has one task do, as it may not reach the folders itself."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from spark_state_ext.engine.job import BUILD
from spark_state_ext.engine.options import StateOptions
from spark_state_ext.savepoints.rows import ANSWER
from spark_state_ext.spark.client.shim import task_entry

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["in_a_task", "let_go", "place_of"]

_LOGGER = logging.getLogger("spark_state_ext")


def place_of(options: StateOptions) -> dict[str, Any]:
    """Where an operator's state is, for tasks."""
    return {"package_version": BUILD, "options": options.to_plain()}


def in_a_task(spark: SparkSession, what: str, told: dict[str, Any], module: str = "saving") -> Any:
    """Have one task do something of a module in `spark.executor`; gives its answer."""
    frame = spark.range(1).coalesce(1).mapInArrow(task_entry(what, told, module), ANSWER)
    return json.loads(frame.collect()[0].answer)


def let_go(spark: SparkSession, told: dict[str, Any]) -> None:
    """Release a hold; where that fails, it is left to expire."""
    try:
        in_a_task(spark, "end", told)
    except Exception as error:
        # It ends by itself, and what matters is what went on before.
        _LOGGER.warning("the hold of %s is left to expire: %s", told["holder"], error)
