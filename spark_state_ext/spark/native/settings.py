"""A session's settings while a job is imported: Spark does not find out of itself how state is laid out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pyspark.errors import PySparkException

from spark_state_ext.savepoints.batch_logs import LoggedBatch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["checkpoint_format", "configured", "format_setting"]

_LOGGER = logging.getLogger("spark_state_ext")


def checkpoint_format(logged: LoggedBatch) -> int:
    """Spark's number of the format that a query's last batch has.

    Parameters
    ----------
    logged
        The batch.
    """
    return 2 if logged.state_ids else 1


def format_setting(logged: LoggedBatch) -> dict[str, str]:
    """What reads and writes state as a query's last batch has it.

    Parameters
    ----------
    logged
        The batch.
    """
    return {"spark.sql.streaming.stateStore.checkpointFormatVersion": str(checkpoint_format(logged))}


@contextmanager
def configured(spark: SparkSession, conf: Mapping[str, str]) -> Iterator[None]:
    """The session with other settings, for a while.

    Parameters
    ----------
    spark
        The session.
    conf
        The settings. One that no session may change stays as it is.
    """
    before = {name: spark.conf.get(name, None) for name in conf}
    try:
        for name, value in conf.items():
            try:
                spark.conf.set(name, value)
            except PySparkException as error:
                # One that no session may change; the query then has what this Spark has.
                _LOGGER.info("%s stays as it is: %s", name, error)
        yield
    finally:
        for name, old in before.items():
            try:
                if old is None:
                    spark.conf.unset(name)
                else:
                    spark.conf.set(name, old)
            except PySparkException as error:
                _LOGGER.info("%s stays as it is: %s", name, error)
