"""Where releases of PySpark and pandas differ. All of it is here, and only public API is used.

PySpark 3.5 names the parameters of its errors `error_class` and `message_parameters`; 4.0 and later `errorClass` and
`messageParameters`. Before pandas 3, joining frames passes over columns of nothing but None where others hold floats,
and names of columns are Python objects, which are compared otherwise than arrays of strings.

A classic session makes a `PySparkException` of most errors of the JVM, and hands others on as py4j's: which ones, is
another matter in each release. Connect has no py4j.
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
    "is_connect",
    "is_of_spark",
    "get_labels",
    "said_by_spark",
    "has_labels",
]

_found = re.match(r"(\d+)\.(\d+)", pyspark.__version__)
if _found is None:
    raise ImportError(f"cannot tell the version of PySpark from {pyspark.__version__!r}")
# (major, minor) of the PySpark in this process.
SPARK_VERSION: tuple[int, int] = (int(_found[1]), int(_found[2]))
# The first PySpark whose reader of Spark's state reads each checkpoint format. That of 4.0 looks for files of format 2
# by names without ids, and so finds none.
FIRST_READERS: dict[int, tuple[int, int]] = {1: (4, 0), 2: (4, 1)}
# What a function finds for a binary value in its state.
STATE_BINARY: type[bytes] | type[bytearray] = bytes if SPARK_VERSION >= (4, 1) else bytearray
# Asked of the package's description: the rows' API does without pandas, and importing it takes a while.
PANDAS_MAJOR: int = int(metadata.version("pandas").split(".")[0])
# Whether whole numbers beside floats become floats when Spark joins frames. It puts one beside them that has no rows,
# and objects for its columns: pandas 2 minds it for other mixtures only, with pandas 3 every value stays what it was.
NUMBERS_JOIN: bool = PANDAS_MAJOR < 3


# Errors of a JVM that failed, and of one that is gone. By name, as py4j is Spark's and not always there.
_OF_THE_JVM = frozenset({("py4j.protocol", "Py4JJavaError"), ("py4j.protocol", "Py4JNetworkError")})
_ERROR_CLASS = re.compile(r"\[[A-Z][A-Z0-9_.]+\][^\n]*")
_JAVA_ERROR = re.compile(r"^: (\S[^\n]*)", re.MULTILINE)
_REASON_MAX = 500


def is_connect(session: Any) -> bool:
    """Whether a session is a client of Spark Connect."""
    return type(session).__module__.startswith("pyspark.sql.connect")


def is_of_spark(error: BaseException) -> bool:
    """Whether an error is Spark's: one of PySpark, or one of the JVM that a classic session hands on as it is."""
    kinds = {(kind.__module__, kind.__name__) for kind in type(error).__mro__}
    return isinstance(error, PySparkException) or not _OF_THE_JVM.isdisjoint(kinds)


def said_by_spark(text: str) -> str:
    """The line of an error of Spark's that says what happened."""
    # With a class of errors; or what Java said, below py4j's own line; or the first line.
    found = _ERROR_CLASS.search(text)
    if found is not None:
        return found[0]
    java = _JAVA_ERROR.search(text)
    lines = [java[1]] if java is not None else [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:_REASON_MAX] if lines else "it does not say why"


def get_labels(columns: Any) -> Any:
    """Labels of a frame's columns (a `pandas.Index`), as what `same_labels` compares fastest."""
    return columns.array if PANDAS_MAJOR >= 3 else columns.tolist()


def has_labels(columns: Any, labels: Any) -> bool:
    """Whether a frame's columns are called so. Asked for each frame that a function gives: `Index.equals` takes five
    times as long with pandas 3, and twelve times with pandas 2."""
    try:
        return bool(columns.array.equals(labels) if PANDAS_MAJOR >= 3 else columns.tolist() == labels)
    except (TypeError, ValueError):  # labels of several levels, or one whose comparison has no answer, such as NA
        return False
