"""A session with the settings that a checkpoint needs: Spark's reader of state does not detect the format by itself.

The settings of the user's session are not changed, because a query that another thread starts meanwhile would take them
over. (A running query has its own copy of the settings.)
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

__all__ = ["make_format_setting", "refuse_unread_format", "open_session_with"]

_LOGGER = logging.getLogger("spark_state_ext")
_FORMAT = "spark.sql.streaming.stateStore.checkpointFormatVersion"
# The value that Spark uses if a setting was never set.
_DEFAULTS: Mapping[str, str] = {_FORMAT: "1"}


def make_format_setting(checkpoint_format: int) -> dict[str, str]:
    """Return the setting with which Spark reads and writes state of a format."""
    return {_FORMAT: str(checkpoint_format)}


def refuse_unread_format(location: str, checkpoint_format: int, version: tuple[int, int] = SPARK_VERSION) -> None:
    """Raise if this PySpark cannot read the state of a checkpoint of this format, even if it can write it."""
    first = FIRST_READERS[checkpoint_format]
    if version < first:
        current, needed = (".".join(map(str, numbers)) for numbers in (version, first))
        raise UsageError(
            f"PySpark {current} cannot read the state of {location}: its checkpoint format is {checkpoint_format}, "
            f"which Spark's reader of state reads from {needed} on. Read or import it with PySpark {needed} or newer; "
            f"the job itself can go on with {current} (docs/operating/importing.md)"
        )


@contextmanager
def open_session_with(spark: SparkSession, conf: Mapping[str, str]) -> Iterator[SparkSession]:
    """Yield a session with some settings; its other settings are those of the user's session, which is not changed."""
    if all(spark.conf.get(name, _DEFAULTS.get(name)) == value for name, value in conf.items()):
        yield spark
        return
    connect = is_connect(spark)
    if connect and not hasattr(spark, "cloneSession"):
        with _change_temporarily(spark, conf):
            yield spark
        return
    copy: Any = _clone_session(spark) if connect else _copy_session(spark)
    try:
        _set_all(copy, conf)
        yield copy
    finally:
        if connect:
            _release_session(copy)


def _copy_session(spark: SparkSession) -> SparkSession:
    """Return a new classic session with the settings of another one."""
    copy = spark.newSession()
    copied = copy.conf.getAll
    _set_all(copy, {name: value for name, value in spark.conf.getAll.items() if copied.get(name) != value})
    return copy


def _clone_session(spark: Any) -> Any:
    # PySpark 4.1 and newer. The clone has the files and modules that were sent to the server.
    return spark.cloneSession()


def _release_session(copy: Any) -> None:
    """Make the Connect server forget a session. (`stop` would also stop a server that runs in this process.)"""
    try:
        copy.client.release_session()
    except PySparkException as error:
        _LOGGER.info("could not release a session of Spark Connect, so it stays until it expires: %s", error)
    copy.client.close()


@contextmanager
def _change_temporarily(spark: SparkSession, conf: Mapping[str, str]) -> Iterator[None]:
    """Change the settings of the session itself within the block: Connect of PySpark 4.0 cannot copy a session."""
    before = {name: spark.conf.get(name, None) for name in conf}
    try:
        _set_all(spark, conf)
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                _set_all(spark, {name: old})


def _set_all(spark: SparkSession, conf: Mapping[str, str]) -> None:
    for name, value in conf.items():
        try:
            spark.conf.set(name, value)
        except PySparkException as error:
            # No session may change this setting; the query runs with its present value.
            _LOGGER.info("%s stays unchanged: %s", name, error)
