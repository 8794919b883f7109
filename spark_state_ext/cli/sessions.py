"""Spark sessions of commands: what is checked before Spark starts, what it prints and raises, and its state."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pyspark import __version__
from pyspark.sql import SparkSession

from arrow_schemas.pointer import Pointer
from spark_state_ext import errors
from spark_state_ext.cli.spark_checkpoint import METADATA
from spark_state_ext.errors import EnvironmentSetupError, StateError, StorageError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.spark.client.state_reader import StateReader
from spark_state_ext.spark.compat import SPARK_VERSION, is_of_spark, said_by_spark

__all__ = [
    "unwrap_task_errors",
    "find_local_path",
    "read_pointers",
    "read_query_folders",
    "refuse_no_checkpoint",
    "refuse_occupied",
    "get_session",
    "get_session_with",
]

_OURS = re.compile(r"spark_state_ext\.errors\.(\w+): (.*)")
# Names the file for what Spark prints; by default nothing keeps it.
_LOG = "SPARK_STATE_EXT_SPARK_LOG"
# One of these may say that a path without a scheme is not on this machine.
_OF_HADOOP = ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_CONF_DIR", "SPARK_HOME", "PYSPARK_SUBMIT_ARGS")
_REMOTE = "SPARK_REMOTE"
# Standard output and standard error.
_PRINTED_TO = (1, 2)
_REASON = re.compile(r"(?:Exception in thread \"[^\"]*\"|Caused by:|Error:)\s*(.*)")


def get_session_with(settings: Mapping[str, str]) -> SparkSession:
    """The session of this process, or a new one without a progress bar, whose JVM prints nothing to this terminal."""
    _refuse_no_java()
    _quiet_errors()
    builder: Any = SparkSession.builder
    builder = builder.appName("spark-state-ext").config("spark.ui.showConsoleProgress", "false")
    for name, value in settings.items():
        builder = builder.config(name, value)
    with _output_elsewhere() as printed:
        try:
            made: SparkSession = builder.getOrCreate()
        except Exception as error:
            if not is_of_spark(error):
                raise
            reasons = _REASON.findall(printed())
            why = f" ({reasons[-1]})" if reasons else ""
            raise StorageError(
                f"Spark does not start: {said_by_spark(str(error))}{why}. What it printed: set {_LOG}=FILE to keep it"
            ) from error
    return made


def _quiet_errors() -> None:
    """Keep PySpark 4 from printing errors as JSON with their traces: commands print each as a line."""
    if SPARK_VERSION < (4, 0):
        return
    from pyspark.logger import PySparkLogger

    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 1)


def _refuse_no_java() -> None:
    """Refuse to start Spark without Java; a Connect client needs none, and a running session has one."""
    if _REMOTE in os.environ or SparkSession.getActiveSession() is not None:
        return
    try:
        version("pyspark")
    except PackageNotFoundError:
        return
    java_home = os.environ.get("JAVA_HOME")
    if shutil.which("java" if not java_home else str(Path(java_home) / "bin" / "java")) is None:
        where = f"JAVA_HOME is {java_home}, without bin/java" if java_home else "no JAVA_HOME, and no java on PATH"
        raise EnvironmentSetupError(f"Spark needs Java: {where}. Install it, or set JAVA_HOME to where it is")


@contextmanager
def _output_elsewhere() -> Iterator[Callable[[], str]]:
    """Send what this process and those that it starts print meanwhile, Spark's JVM among them, to a file.

    The JVM and its Python workers print there for as long as they live. What is yielded reads the file.
    """
    kept = os.environ.get(_LOG)
    sys.stdout.flush()
    sys.stderr.flush()
    with open(kept, "a+b") if kept else tempfile.TemporaryFile() as file:
        terminal = [os.dup(descriptor) for descriptor in _PRINTED_TO]
        try:
            for descriptor in _PRINTED_TO:
                os.dup2(file.fileno(), descriptor)

            def printed() -> str:
                file.seek(0)
                return file.read().decode(errors="replace")

            yield printed
            sys.stderr.flush()
        finally:
            for descriptor, copy in zip(_PRINTED_TO, terminal, strict=True):
                os.dup2(copy, descriptor)
                os.close(copy)


def find_local_path(location: str) -> Path | None:
    """Return where a location of Spark's is on this machine; None if it is elsewhere, or only Spark can tell."""
    if location.startswith("file:"):
        return Path("/" + location.removeprefix("file:").lstrip("/"))
    if re.match(r"\w[\w+.-]*:", location) or any(name in os.environ for name in (*_OF_HADOOP, _REMOTE)):
        return None
    return Path(location)


def refuse_no_checkpoint(location: str) -> None:
    """Refuse a location that is no Spark checkpoint, if this machine can tell: before Spark is started for it."""
    path = find_local_path(location)
    if path is not None and not (path / METADATA).is_file():
        raise UsageError(
            f"{location} is no Spark checkpoint location: it has no file 'metadata'. Give the location as in the "
            "option checkpointLocation."
        )


def refuse_occupied(path: str, storage_options: Mapping[str, Any], what: str) -> None:
    """Refuse a place that must be free, and has something: before Spark is started."""
    if _REMOTE in os.environ:
        # Another machine may see another folder of that name.
        return
    if Folder(path, storage_options).names():
        raise UsageError(f"{path} has something already: give a folder for {what} that does not exist yet")


@contextmanager
def unwrap_task_errors() -> Iterator[None]:
    """Raise what a task raised, in place of the error that Spark made of it, or that its JVM did."""
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


def get_session(*checkpoints: str) -> SparkSession:
    """A session of this process, or a new one; what can be checked before Spark starts is checked first."""
    if int(__version__.partition(".")[0]) < 4:
        raise UsageError(
            f"Spark {__version__} cannot read the state of a checkpoint: use Spark 4, or leave out what asks for Spark"
        )
    for location in checkpoints:
        refuse_no_checkpoint(location)
    with unwrap_task_errors():
        return get_session_with({})
    raise AssertionError("unreachable: unwrap_task_errors raises what it catches")


def read_pointers(spark: SparkSession, location: str, operator: str, query_folder: str) -> dict[int, Pointer]:
    """The pointers of a query's last committed batch, by bucket."""
    reader = StateReader(spark, location)
    stores = [it for it in reader.stores() if (it.operator, it.query_folder) == (operator, query_folder)]
    if not stores:
        raise UsageError(
            f"{location} is no checkpoint of the query with the folder {query_folder} of operator {operator!r}: give "
            "the checkpointLocation of that query"
        )
    return reader.by_bucket(stores[0], reader.batch().batch)


def read_query_folders(spark: SparkSession, location: str) -> frozenset[str]:
    """The query folders in the pointers of a checkpoint; none where it has no operator of ours."""
    try:
        return StateReader(spark, location).query_folders()
    except StorageError as error:
        raise StorageError(f"{error}. Leave --spark out.") from error
