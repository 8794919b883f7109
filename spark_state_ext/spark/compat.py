"""Differences between releases of PySpark and pandas. All of them are here, and only public API is used.

PySpark 3.5 names the parameters of its errors `error_class` and `message_parameters`; 4.0 and later `errorClass` and
`messageParameters`. Before pandas 3, joining frames ignores columns that hold only None if others hold floats, and
column names are Python objects, which are not compared like arrays of strings.

A classic session converts most errors of the JVM to a `PySparkException`, and raises others as py4j's errors; which
errors depends on the release. Connect has no py4j.
"""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any

import pyspark
from pyspark.errors import PySparkException

__all__ = [
    "FIRST_READERS",
    "NUMBERS_JOIN",
    "PANDAS_MAJOR",
    "SPARK_VERSION",
    "STATE_BINARY",
    "get_labels",
    "has_labels",
    "is_connect",
    "is_spark_error",
    "extract_spark_message",
]

_version = re.match(r"(\d+)\.(\d+)", pyspark.__version__)
if _version is None:
    raise ImportError(f"cannot read the version of PySpark from {pyspark.__version__!r}")
# (major, minor) of the PySpark in this process.
SPARK_VERSION: tuple[int, int] = (int(_version[1]), int(_version[2]))
# The first PySpark whose state reader can read each checkpoint format. The reader of 4.0 searches files of format 2 by
# names without ids, so it does not find them.
FIRST_READERS: dict[int, tuple[int, int]] = {1: (4, 0), 2: (4, 1)}
# Type of binary values in a function's state.
STATE_BINARY: type[bytes] | type[bytearray] = bytes if SPARK_VERSION >= (4, 1) else bytearray
# From the package's metadata: the API for rows does not need pandas, and importing it takes a while.
PANDAS_MAJOR: int = int(metadata.version("pandas").split(".")[0])
# Whether whole numbers next to floats become floats when Spark joins frames. Spark adds a frame without rows that has
# object columns: with pandas 2 this keeps the types of other mixtures only, with pandas 3 it keeps every value's type.
NUMBERS_JOIN: bool = PANDAS_MAJOR < 3


# Errors in the JVM, and of a lost connection to it. By name, because py4j is not always installed.
_OF_THE_JVM = frozenset({("py4j.protocol", "Py4JJavaError"), ("py4j.protocol", "Py4JNetworkError")})
_ERROR_CLASS = re.compile(r"\[[A-Z][A-Z0-9_.]+\][^\n]*")
_JAVA_ERROR = re.compile(r"^: (\S[^\n]*)", re.MULTILINE)
_REASON_MAX = 500


def is_connect(session: Any) -> bool:
    """Return whether a session is a client of Spark Connect."""
    return type(session).__module__.startswith("pyspark.sql.connect")


def is_spark_error(error: BaseException) -> bool:
    """Return whether an error is Spark's: a PySpark error, or a JVM error that a classic session does not convert."""
    kinds = {(kind.__module__, kind.__name__) for kind in type(error).__mro__}
    return isinstance(error, PySparkException) or not _OF_THE_JVM.isdisjoint(kinds)


def extract_spark_message(text: str) -> str:
    """Return the line of a Spark error's text that says what happened."""
    # The line with an error class; or Java's message, below py4j's own line; or the first line.
    error_class = _ERROR_CLASS.search(text)
    if error_class is not None:
        return error_class[0]
    java = _JAVA_ERROR.search(text)
    lines = [java[1]] if java is not None else [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:_REASON_MAX] if lines else "it has no message"


def get_labels(columns: Any) -> Any:
    """Return the labels of a frame's columns (a `pandas.Index`) in the form that `has_labels` compares fastest."""
    return columns.array if PANDAS_MAJOR >= 3 else columns.tolist()


def has_labels(columns: Any, labels: Any) -> bool:
    """Return whether a frame's columns have these labels.

    This runs for each output frame. `Index.equals` would take five times as long with pandas 3, and twelve times with
    pandas 2.
    """
    try:
        return bool(columns.array.equals(labels) if PANDAS_MAJOR >= 3 else columns.tolist() == labels)
    except (TypeError, ValueError):  # labels of several levels, or a label whose comparison has no result, such as NA
        return False
