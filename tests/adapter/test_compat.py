"""Which errors are Spark's, and their messages."""

from __future__ import annotations

import pytest
from pyspark.errors import AnalysisException, PySparkValueError

from spark_state_ext.errors import StorageError
from spark_state_ext.spark.compat import extract_spark_message, is_spark_error

JAVA = """An error occurred while calling o91.parquet.
: org.apache.hadoop.fs.UnsupportedFileSystemException: No FileSystem for scheme "nosuch"
\tat org.apache.hadoop.fs.FileSystem.getFileSystemClass(FileSystem.java:3585)
"""


def test_is_spark_error_is_true_for_errors_of_spark_only() -> None:
    # Clients of Connect may not have py4j.
    py4j = pytest.importorskip("py4j.protocol")
    assert is_spark_error(AnalysisException("no such column"))
    assert is_spark_error(PySparkValueError("no"))
    # A network error means that the JVM has ended. A missing method is a mistake of this package.
    assert is_spark_error(py4j.Py4JNetworkError("Answer from Java side is empty"))
    assert not is_spark_error(py4j.Py4JError("o91.nosuch does not exist in the JVM"))
    assert not is_spark_error(StorageError("no"))
    assert not is_spark_error(KeyError("no"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (JAVA, 'org.apache.hadoop.fs.UnsupportedFileSystemException: No FileSystem for scheme "nosuch"'),
        (
            "Job aborted:\n[PATH_NOT_FOUND] Path does not exist: /a. SQLSTATE: 42K03\n  at …",
            "[PATH_NOT_FOUND] Path does not exist: /a. SQLSTATE: 42K03",
        ),
        ("[UDF_ERROR.CODE_2] it failed", "[UDF_ERROR.CODE_2] it failed"),
        ("\n  Connection refused\nmore", "Connection refused"),
        ("x" * 900, "x" * 500),
        (" \n", "it has no message"),
    ],
)
def test_extract_spark_message_returns_the_line_that_says_what_happened(text: str, expected: str) -> None:
    assert extract_spark_message(text) == expected
