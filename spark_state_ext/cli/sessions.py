"""Spark sessions of commands, and what their tasks raise: as the error that it was, not as Spark's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pyspark.sql import SparkSession

from spark_state_ext import errors
from spark_state_ext.errors import StateError, StorageError
from spark_state_ext.spark.compat import is_of_spark, said_by_spark

__all__ = ["errors_of_tasks", "session_with"]

_OURS = re.compile(r"spark_state_ext\.errors\.(\w+): (.*)")


def session_with(settings: Mapping[str, str]) -> SparkSession:
    """The session of this process, or a new one.

    Parameters
    ----------
    settings
        Spark settings. Those that a running application cannot change are of no effect where there is a session.
    """
    builder: Any = SparkSession.builder
    builder = builder.appName("spark-state-ext")
    for name, value in settings.items():
        builder = builder.config(name, value)
    made: SparkSession = builder.getOrCreate()
    return made


@contextmanager
def errors_of_tasks() -> Iterator[None]:
    """Raise what a task raised, in place of the error that Spark made of it, or that its JVM did.

    Raises
    ------
    StateError
        Of the class that the text names; or `StorageError`, where Spark itself failed.
    """
    try:
        yield
    except Exception as error:
        if not is_of_spark(error):
            raise
        raise _told(str(error)) from error


def _told(text: str) -> StateError:
    found = _OURS.search(text)
    if found is None:
        return StorageError(f"Spark failed: {said_by_spark(text)}")
    kind = getattr(errors, found[1], None)
    # One that is made of more than its text is told as what it is a kind of.
    if not (isinstance(kind, type) and issubclass(kind, StateError)) or "__init__" in vars(kind):
        return StorageError(f"a task failed: {found[1]}: {found[2]}")
    return kind(found[2])
