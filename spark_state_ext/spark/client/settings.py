"""A session with the settings that a checkpoint needs: Spark does not find out by itself in which format state is.

Settings of the user's session are never changed: a query that another thread starts meanwhile would take them. (A
running query has a copy of them from its start.)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException

from spark_state_ext.errors import UsageError
from spark_state_ext.spark.compat import FIRST_READERS, SPARK_VERSION, is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["format_setting", "refuse_unread_format", "session_with"]

_LOGGER = logging.getLogger("spark_state_ext")
_FORMAT = "spark.sql.streaming.stateStore.checkpointFormatVersion"
# What Spark takes for a setting that nothing sets.
_DEFAULTS: Mapping[str, str] = {_FORMAT: "1"}


def format_setting(checkpoint_format: int) -> dict[str, str]:
    """Give the setting with which Spark reads and writes state of a format."""
    return {_FORMAT: str(checkpoint_format)}


def refuse_unread_format(location: str, checkpoint_format: int, version: tuple[int, int] = SPARK_VERSION) -> None:
    """Refuse a checkpoint whose format this PySpark writes, and its reader of state does not read."""
    first = FIRST_READERS[checkpoint_format]
    if version < first:
        this, needed = (".".join(map(str, it)) for it in (version, first))
        raise UsageError(
            f"PySpark {this} cannot read the state of {location}: its checkpoint format is {checkpoint_format}, which "
            f"Spark's reader of state reads from {needed} on. Read or import it with PySpark {needed} or newer; the "
            f"job itself can go on with {this} (docs/operating/importing.md)"
        )


@contextmanager
def session_with(spark: SparkSession, conf: Mapping[str, str]) -> Iterator[SparkSession]:
    """Give a session with some settings; the others are those of the user's session, which stays as it is."""
    if all(spark.conf.get(name, _DEFAULTS.get(name)) == value for name, value in conf.items()):
        yield spark
        return
    connect = is_connect(spark)
    if connect and not hasattr(spark, "cloneSession"):
        with _changed(spark, conf):
            yield spark
        return
    copy: Any = _cloned(spark) if connect else _new(spark)
    try:
        _set(copy, conf)
        yield copy
    finally:
        if connect:
            _release(copy)


def _new(spark: SparkSession) -> SparkSession:
    """A classic session with the settings of another one."""
    copy = spark.newSession()
    there = copy.conf.getAll
    _set(copy, {name: value for name, value in spark.conf.getAll.items() if there.get(name) != value})
    return copy


def _cloned(spark: Any) -> Any:
    # PySpark 4.1 and newer. Files and modules that were sent to the server go along.
    return spark.cloneSession()


def _release(copy: Any) -> None:
    """Have the Connect server forget a session. (`stop` would also end a server that runs in this process.)"""
    try:
        copy.client.release_session()
    except PySparkException as error:
        _LOGGER.info("a session of Spark Connect is left to expire: %s", error)
    copy.client.close()


@contextmanager
def _changed(spark: SparkSession, conf: Mapping[str, str]) -> Iterator[None]:
    """The session itself with other settings for a while: Connect of PySpark 4.0 cannot copy one."""
    before = {name: spark.conf.get(name, None) for name in conf}
    try:
        _set(spark, conf)
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                _set(spark, {name: old})


def _set(spark: SparkSession, conf: Mapping[str, str]) -> None:
    for name, value in conf.items():
        try:
            spark.conf.set(name, value)
        except PySparkException as error:
            # One that no session may change; the query then has what this Spark has.
            _LOGGER.info("%s stays as it is: %s", name, error)
