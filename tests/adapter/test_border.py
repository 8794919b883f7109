"""The text of errors that leave this package: the sentence, then the user's own line, then the whole traceback."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from arrow_schemas.lineage import CheckpointRef
from spark_state_ext import errors
from spark_state_ext.errors import (
    MissingRunError,
    StateError,
    StateValueError,
    StorageError,
    UploadFailedError,
    UserFunctionError,
)
from spark_state_ext.spark.callers.group_state import Clock, KeyState
from spark_state_ext.spark.callers.keys import as_frames
from spark_state_ext.spark.compat import SPARK_VERSION
from spark_state_ext.spark.executor.error_border import rewrite_error
from spark_state_ext.worker.retry import call_with_retries
from tests.helpers.waiting import WAIT_S

CLOCK = Clock(0, 0, "NoTimeout", False, False, StructType([StructField("n", LongType())]))


def catch_error(work: Callable[[], Any]) -> Exception:
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def print_error(error: Exception) -> list[str]:
    """Return the lines that Spark's worker prints for an error."""
    return "".join(traceback.format_exception_only(type(error), error)).rstrip("\n").split("\n")


def helper(table: dict[str, int]) -> int:
    return table["missing"]


def function(*_: Any) -> int:
    return helper({})


def raise_wrapped() -> None:
    try:
        function()
    except Exception as error:
        raise UserFunctionError("the function failed for key ('a',)").with_traceback(error.__traceback__) from error


def test_an_error_begins_with_its_sentence_and_the_users_own_line() -> None:
    lines = print_error(rewrite_error(catch_error(raise_wrapped), function))
    assert lines[0] == "spark_state_ext.errors.UserFunctionError: the function failed for key ('a',)"
    assert lines[1].startswith(f'  File "{__file__}", line ')
    assert lines[1].endswith("in helper")
    assert lines[2] == '    return table["missing"]'
    assert lines[3:6] == ["", "Where it was raised:", "Traceback (most recent call last):"]
    assert "KeyError: 'missing'" in lines
    assert any(line.endswith("in function") for line in lines)


def test_an_error_raised_in_a_retry_and_a_thread_pool_begins_with_its_sentence() -> None:
    """The frames of tenacity and of the pool used to come first."""

    def raise_refused() -> None:
        raise StorageError("writing x: credentials expired") from PermissionError("credentials expired")

    def upload() -> None:
        with ThreadPoolExecutor(1) as pool:
            try:
                pool.submit(call_with_retries, raise_refused, 5.0).result()
            except StateError as error:
                raise UploadFailedError("the upload of x to the backend root failed") from error

    lines = print_error(rewrite_error(catch_error(upload), len))
    assert lines[0] == "spark_state_ext.errors.UploadFailedError: the upload of x to the backend root failed"
    # These lines count as the user's because this test is not in a library.
    assert lines[3:5] == ["", "Where it was raised:"]
    assert any("tenacity" in line for line in lines[5:]), "the whole traceback follows"


def test_the_error_of_a_value_refused_after_the_call_names_the_function() -> None:
    """The traceback has no frame of the function by then."""
    update: Callable[[Any], None] = KeyState((1,), CLOCK).update
    error = catch_error(partial(update, 5))
    assert "in catch_error" in print_error(rewrite_error(error, function))[1], "a frame of the caller is preferred"
    lines = print_error(rewrite_error(StateValueError("state column 'n' cannot hold 'many'"), partial(function, 1)))
    assert lines[0].endswith("cannot hold 'many'")
    assert lines[1] == f'  File "{__file__}", line {function.__code__.co_firstlineno}, in function'
    assert lines[2] == "    def function(*_: Any) -> int:"
    assert print_error(rewrite_error(StateValueError("a sum is too large"), as_frames))[1] == "", (
        "code of this package is never the user's own line"
    )


class OddError(Exception):
    """An error that cannot be made from a text alone."""

    def __init__(self, code: int, *, reason: str) -> None:
        self.code, self.reason = code, reason

    def __str__(self) -> str:
        return f"code {self.code}\n  {self.reason}"


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _raise(error: Exception) -> None:
    raise error


def test_an_error_of_any_class_keeps_its_name_and_text() -> None:
    name = f"{__name__}.OddError"
    lines = print_error(rewrite_error(catch_error(partial(_raise, OddError(7, reason="no such aircraft")))))
    assert lines[0] == f"{name}: code 7"
    assert lines[2] == "    raise error"
    assert lines[3] == "  no such aircraft"
    assert f"{name}: code 7" in lines[5:]
    lines = print_error(rewrite_error(catch_error(partial(_raise, SilentError()))))
    assert lines[0] == f"{__name__}.SilentError: (its message cannot be made: RuntimeError)"
    for error, first in (
        (KeyError("x"), "KeyError: 'x'"),
        (AssertionError(), "AssertionError: (no message)"),
        (ValueError("\ud800"), "ValueError: \\ud800"),
        (SyntaxError("odd", ("f.py", 1, 2, "x = =")), "SyntaxError: odd (f.py, line 1)"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff"),
        (OSError(2, "gone", "f"), "FileNotFoundError: [Errno 2] gone: 'f'"),
    ):
        assert print_error(rewrite_error(catch_error(partial(_raise, error))))[0].startswith(first)


@pytest.mark.parametrize("name", errors.__all__)
def test_an_error_of_this_package_keeps_its_class(name: str) -> None:
    kind = getattr(errors, name)
    error = kind("what", CheckpointRef(1, "0" * 32)) if kind is MissingRunError else kind("what")
    rewritten = rewrite_error(error)
    assert type(rewritten) is kind
    assert print_error(rewritten)[0] == f"spark_state_ext.errors.{name}: what"


def test_the_users_own_line_is_never_in_a_library(tmp_path: Path) -> None:
    """If the function itself is installed among the libraries, its own file still counts as the user's."""

    def in_a_library() -> None:
        os.path.join(5)  # type: ignore[call-overload]  # raises in Python's own library

    lines = print_error(rewrite_error(catch_error(in_a_library), function))
    assert "in in_a_library" in lines[1]
    # pandas is compiled, and its frames name files that do not exist here.
    lines = print_error(rewrite_error(catch_error(lambda: pd.DataFrame({"value": [1]})["vlaue"]), function))
    assert 'pd.DataFrame({"value": [1]})["vlaue"]' in lines[2]
    names: dict[str, Any] = {}
    site = Path(pytest.__file__).parent.parent / "installed" / "job.py"
    exec(compile("def far():\n    raise KeyError('far')\n", str(site), "exec"), names)
    assert "in test_the_users_own_line" not in print_error(rewrite_error(catch_error(names["far"]), names["far"]))[1]
    assert print_error(rewrite_error(catch_error(names["far"]), names["far"]))[1] == f'  File "{site}", line 2, in far'


@pytest.mark.skipif(SPARK_VERSION < (4, 0), reason="a worker of PySpark 3.5 has no function that reports its error")
def test_sparks_worker_prints_an_error_without_its_own_frames(tmp_path: Path) -> None:
    """Run in a process of its own because the change is meant for a worker that ends.

    Check the text of a worker of Spark 4 and of one of Spark 3.5."""
    job = tmp_path / "job.py"
    job.write_text(
        textwrap.dedent(
            """
            import io, os, traceback
            from pyspark.util import handle_worker_exception
            from spark_state_ext.errors import StorageError
            from spark_state_ext.spark.executor.error_border import run_and_rewrite_errors

            def work():
                yield 1
                raise StorageError("the disk failed")

            try:
                list(run_and_rewrite_errors(None, work))
            except BaseException as error:
                # Print as Spark 4 does, then as Spark 3.5 does, which only knows simplified tracebacks, then without either.
                for setting in ("SPARK_HIDE_TRACEBACK", "SPARK_SIMPLIFIED_TRACEBACK"):
                    out = io.BytesIO()
                    handle_worker_exception(error, out)
                    print(out.getvalue()[8:].decode())
                    print("=====")
                    del os.environ[setting]
                    os.environ["SPARK_SIMPLIFIED_TRACEBACK"] = "1"
                print(traceback.format_exc())
            """
        )
    )
    done = subprocess.run([sys.executable, str(job)], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    texts = done.stdout.split("=====\n")
    assert len(texts) == 3
    first = "spark_state_ext.errors.StorageError: the disk failed"
    for text in texts:
        assert text.split(first)[0] in ("", "Traceback (most recent call last):\n"), (
            "some releases print that line first"
        )


def _numbers() -> Iterator[int]:
    yield from (1, 2)


def test_output_without_an_error_is_unchanged() -> None:
    from spark_state_ext.spark.executor.error_border import run_and_rewrite_errors

    assert list(run_and_rewrite_errors(None, _numbers)) == [1, 2]
