"""The border between this package and Spark's worker: it rewrites errors so that their text starts with the cause.

Spark's worker prints a traceback, whose last line says what happened. So a user finds it only after the frames of
Spark, of this package, of thread pools and of retries. Before Spark sees an error, this module replaces it by one whose
text is the message, then the user's own line of code, then the whole traceback.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import CodeType
from typing import Any, ParamSpec, TypeVar

import pyspark

import arrow_schemas
import spark_state_ext
from spark_state_ext import errors
from spark_state_ext.errors import StateValueError, UserFunctionError

__all__ = ["run_and_rewrite_errors", "rewrite_error"]

P = ParamSpec("P")
T = TypeVar("T")

# The worker reads this variable when it reports an error to the driver (`pyspark.util.handle_worker_exception`), since
# 4.0. The process ends then, so this does not affect errors of other functions.
_HIDE_VARIABLE = "SPARK_HIDE_TRACEBACK"
# Frames of compiled libraries, such as pandas, name files that are not installed.
_COMPILED = (".pyx", ".pxi", ".pxd")
# Errors that may have no frame of the function: raised after it ended, or before it began (too few parameters).
_MAYBE_FRAMELESS = (StateValueError, UserFunctionError)
_RAISED = "Where it was raised:"


def run_and_rewrite_errors(
    function: Callable[..., Any] | None, work: Callable[P, Iterator[T]], *args: P.args, **kwargs: P.kwargs
) -> Iterator[T]:
    """Run a stage's work, and raise its errors with rewritten texts."""
    try:
        yield from work(*args, **kwargs)
    except Exception as error:
        rewritten = rewrite_error(error, function)
        _hide_frames()
        raise rewritten from None


def _hide_frames() -> None:
    """Make the worker report an error to the driver without its frames, which its text contains already."""
    os.environ[_HIDE_VARIABLE] = "1"
    # For releases without the variable: only the line "Traceback (most recent call last):" remains.
    sys.tracebacklimit = 0


def rewrite_error(error: BaseException, function: Callable[..., Any] | None = None) -> Exception:
    """Return an error of the same class name whose text begins with its message."""
    sentence, *more = _read_message(error).split("\n")
    own = _find_own_line(error, function) or (_find_first_line(function) if isinstance(error, _MAYBE_FRAMELESS) else [])
    lines = [sentence, *own, *more, "", _RAISED]
    # Text that cannot be encoded would end the worker without a message.
    text = "\n".join([*lines, *_format_traceback(error)]).encode("utf-8", "backslashreplace").decode()
    kind = type(error)
    if getattr(errors, kind.__name__, None) is kind:
        # Without the constructor, which may take other arguments.
        same: Exception = kind.__new__(kind)
        same.args = (text,)
        return same
    # Other classes may have any constructor and any `__str__`. The worker prints the class name, so copy that.
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    other: Exception = type(kind.__name__, (Exception,), names)(text)
    return other


def _read_message(error: BaseException) -> str:
    """Return an exception's message; never empty, even if `str` fails on it."""
    try:
        return str(error).strip("\n") or "(no message)"
    except Exception as failed:  # `__str__` of a user's class may raise anything
        return f"(its message cannot be made: {type(failed).__name__})"


def _find_own_line(error: BaseException, function: Callable[..., Any] | None) -> list[str]:
    """Return the innermost line of the user's code in the tracebacks of an error and its causes; empty without one."""
    home = _find_home(function)
    seen: set[int] = set()
    line: list[str] = []
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        for frame in traceback.extract_tb(current.__traceback__):
            if _is_own(frame.filename, home):
                line = _format_line(frame.filename, frame.lineno, frame.name)
        # The cause is nearer to the mistake.
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return line


def _find_first_line(function: Callable[..., Any] | None) -> list[str]:
    """Return the line where a function begins, for an error after the function has ended: it has no frame then."""
    code = _get_code(function)
    if code is None or not _is_own(code.co_filename, ""):
        return []
    return _format_line(code.co_filename, code.co_firstlineno, code.co_name)


def _format_line(filename: str, number: int | None, name: str) -> list[str]:
    """Format a line of code as Python does; without its source if the file does not exist, as on another machine."""
    source = linecache.getline(filename, number or 0).strip()
    return [f'  File "{filename}", line {number}, in {name}', *([f"    {source}"] if source else [])]


def _get_code(function: Callable[..., Any] | None) -> CodeType | None:
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None) or getattr(vars(type(function)).get("__call__"), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _is_own(filename: str, home: str) -> bool:
    """Return whether a file is the user's code: not in a library, unless the function itself is in that library."""
    if filename.startswith((*_list_folders()[0], "<frozen ")) or filename.endswith(_COMPILED):
        return False
    if home and filename.startswith(home):
        return True
    return not filename.startswith(_list_folders()[1])


def _find_home(function: Callable[..., Any] | None) -> str:
    """Return the folder of a function's file, which may be an installed library; empty if it is not known."""
    code = _get_code(function)
    filename = "" if code is None else code.co_filename
    home = os.path.join(os.path.dirname(filename), "")
    # If the file lies directly in a library folder, next to other libraries: the file itself.
    return "" if not os.path.isabs(filename) else filename if home in _list_folders()[1] else home


@cache
def _list_folders() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the folders of this package and of Spark, and the folders of libraries."""
    ours = [os.path.dirname(str(module.__file__)) for module in (spark_state_ext, arrow_schemas, pyspark)]
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(os.path.join(path, "") for path in ours), tuple(os.path.join(path, "") for path in libraries)


def _format_traceback(error: BaseException) -> list[str]:
    """Return the lines of an error's traceback; only its frames if formatting fails."""
    try:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip("\n").split("\n")
    except Exception as failed:  # `__str__` of a user's class may raise anything
        frames = "".join(traceback.format_tb(error.__traceback__)).rstrip("\n").split("\n")
        return [*frames, f"({type(error).__name__}, whose message cannot be made: {type(failed).__name__})"]
