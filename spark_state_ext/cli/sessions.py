"""Start Spark for commands: check arguments first, hide what Spark prints, translate its errors, read its state."""

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
from spark_state_ext.spark.compat import SPARK_VERSION, extract_spark_message, is_spark_error

__all__ = [
    "find_local_path",
    "get_session",
    "get_session_with",
    "read_pointers",
    "read_query_folders",
    "refuse_no_checkpoint",
    "refuse_occupied",
    "unwrap_task_errors",
]

_ERROR_OF_TASK = re.compile(r"spark_state_ext\.errors\.(\w+): (.*)")
# Environment variable with the file that gets Spark's output; without it the output is discarded.
_LOG_VARIABLE = "SPARK_STATE_EXT_SPARK_LOG"
# If one of these is set, a path without a scheme may not be on this machine.
_HADOOP_VARIABLES = ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_CONF_DIR", "SPARK_HOME", "PYSPARK_SUBMIT_ARGS")
_REMOTE_VARIABLE = "SPARK_REMOTE"
# Standard output and standard error.
_OUTPUT_DESCRIPTORS = (1, 2)
_REASON = re.compile(r"(?:Exception in thread \"[^\"]*\"|Caused by:|Error:)\s*(.*)")


def get_session_with(settings: Mapping[str, str]) -> SparkSession:
    """Return this process's session, or start one without a progress bar and without JVM output on this terminal."""
    _refuse_no_java()
    _silence_error_logs()
    builder: Any = SparkSession.builder
    builder = builder.appName("spark-state-ext").config("spark.ui.showConsoleProgress", "false")
    for name, value in settings.items():
        builder = builder.config(name, value)
    with _redirect_output() as read_output:
        try:
            session: SparkSession = builder.getOrCreate()
        except Exception as error:
            if not is_spark_error(error):
                raise
            reasons = _REASON.findall(read_output())
            why = f" ({reasons[-1]})" if reasons else ""
            raise StorageError(
                f"Spark does not start: {extract_spark_message(str(error))}{why}. "
                f"Set {_LOG_VARIABLE}=FILE to see its output"
            ) from error
    return session


def _silence_error_logs() -> None:
    """Stop PySpark 4 from printing errors as JSON with stack traces: commands print each error as one line."""
    if SPARK_VERSION < (4, 0):
        return
    from pyspark.logger import PySparkLogger

    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 1)


def _refuse_no_java() -> None:
    """Refuse to start Spark without Java. A Connect client does not need Java, and a running session has it."""
    if _REMOTE_VARIABLE in os.environ or SparkSession.getActiveSession() is not None:
        return
    try:
        version("pyspark")
    except PackageNotFoundError:
        return
    java_home = os.environ.get("JAVA_HOME")
    if shutil.which("java" if not java_home else str(Path(java_home) / "bin" / "java")) is None:
        where = f"JAVA_HOME is {java_home}, without bin/java" if java_home else "no JAVA_HOME, and no java on PATH"
        raise EnvironmentSetupError(f"Spark needs Java: {where}. Install it, or set JAVA_HOME to its folder")


@contextmanager
def _redirect_output() -> Iterator[Callable[[], str]]:
    """Redirect the output of this process, and of processes that it starts meanwhile, such as the JVM, to a file.

    The JVM and its Python workers print there as long as they live. The yielded function reads the file.
    """
    log_path = os.environ.get(_LOG_VARIABLE)
    sys.stdout.flush()
    sys.stderr.flush()
    with open(log_path, "a+b") if log_path else tempfile.TemporaryFile() as file:
        terminal = [os.dup(descriptor) for descriptor in _OUTPUT_DESCRIPTORS]
        try:
            for descriptor in _OUTPUT_DESCRIPTORS:
                os.dup2(file.fileno(), descriptor)

            def read_output() -> str:
                file.seek(0)
                return file.read().decode(errors="replace")

            yield read_output
            sys.stderr.flush()
        finally:
            for descriptor, copy in zip(_OUTPUT_DESCRIPTORS, terminal, strict=True):
                os.dup2(copy, descriptor)
                os.close(copy)


def find_local_path(location: str) -> Path | None:
    """Return the local path of a Spark location; None if it is elsewhere, or only Spark knows where."""
    if location.startswith("file:"):
        return Path("/" + location.removeprefix("file:").lstrip("/"))
    if re.match(r"\w[\w+.-]*:", location) or any(name in os.environ for name in (*_HADOOP_VARIABLES, _REMOTE_VARIABLE)):
        return None
    return Path(location)


def refuse_no_checkpoint(location: str) -> None:
    """Refuse a local location that is not a Spark checkpoint, before Spark is started for it."""
    path = find_local_path(location)
    if path is not None and not (path / METADATA).is_file():
        raise UsageError(
            f"{location} is not a Spark checkpoint location: it has no file 'metadata'. Give the location as in the "
            "option checkpointLocation."
        )


def refuse_occupied(path: str, storage_options: Mapping[str, Any], what: str) -> None:
    """Refuse a target folder that is not empty, before Spark is started."""
    if _REMOTE_VARIABLE in os.environ:
        # The server may be another machine, which has another folder of that name.
        return
    if Folder(path, storage_options).names():
        raise UsageError(f"{path} is not empty: give a folder for {what} that does not exist yet")


@contextmanager
def unwrap_task_errors() -> Iterator[None]:
    """Raise a task's own error instead of the error in which Spark or its JVM wrapped it."""
    try:
        yield
    except Exception as error:
        if not is_spark_error(error):
            raise
        raise _to_state_error(str(error)) from error


def _to_state_error(text: str) -> StateError:
    match = _ERROR_OF_TASK.search(text)
    if match is None:
        return StorageError(f"Spark failed: {extract_spark_message(text)}")
    error_class = getattr(errors, match[1], None)
    # A class with its own __init__ needs more than the text, so a StorageError with its name stands in for it.
    if not (isinstance(error_class, type) and issubclass(error_class, StateError)) or "__init__" in vars(error_class):
        return StorageError(f"a task failed: {match[1]}: {match[2]}")
    return error_class(match[2])


def get_session(*checkpoints: str) -> SparkSession:
    """Return this process's session, or start one; check Spark's release and the checkpoints first."""
    if int(__version__.partition(".")[0]) < 4:
        raise UsageError(
            f"Spark {__version__} cannot read the state of a checkpoint: use Spark 4, or leave out options that need "
            "Spark"
        )
    for location in checkpoints:
        refuse_no_checkpoint(location)
    with unwrap_task_errors():
        return get_session_with({})
    raise AssertionError("unreachable: unwrap_task_errors raises what it catches")


def read_pointers(spark: SparkSession, location: str, operator: str, query_folder: str) -> dict[int, Pointer]:
    """Read the pointers of a query's last committed batch, by bucket."""
    reader = StateReader(spark, location)
    stores = [store for store in reader.stores() if (store.operator, store.query_folder) == (operator, query_folder)]
    if not stores:
        raise UsageError(
            f"{location} is not the checkpoint of the query with the folder {query_folder} of operator {operator!r}: "
            "give the checkpointLocation of that query"
        )
    return reader.by_bucket(stores[0], reader.batch().batch)


def read_query_folders(spark: SparkSession, location: str) -> frozenset[str]:
    """Read the query folders in the pointers of a checkpoint; empty if it has no operator of this package."""
    try:
        return StateReader(spark, location).query_folders()
    except StorageError as error:
        raise StorageError(f"{error}. Leave --spark out.") from error
