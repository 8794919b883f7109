"""The border between this package and Spark's worker: what leaves it as an error is told with its sentence first.

Spark's worker prints a traceback, of which the last line says what happened. So a user reads it behind the frames of
Spark, of this package, of thread pools and of whatever tries again. Here an error is told anew before Spark sees it:
the sentence, then the user's own line of code, then all the rest as text.
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

__all__ = ["bordered", "told"]

P = ParamSpec("P")
T = TypeVar("T")

# Read by the worker (`pyspark.util.handle_worker_exception`) when it tells the driver, since 4.0. The process ends
# then, so that no other function's errors are told that way.
_HIDE = "SPARK_HIDE_TRACEBACK"
# Frames of compiled libraries, such as pandas, name files that are nowhere.
_COMPILED = (".pyx", ".pxi", ".pxd")
# Raised when no line of the function is left, or before the first, as for a function of too few parameters.
_OVER = (StateValueError, UserFunctionError)
_RAISED = "Where it was raised:"


def bordered(
    function: Callable[..., Any] | None, work: Callable[P, Iterator[T]], *args: P.args, **kwargs: P.kwargs
) -> Iterator[T]:
    """Do a stage's work, and tell its errors anew."""
    try:
        yield from work(*args, **kwargs)
    except Exception as error:
        anew = told(error, function)
        _hide_frames()
        raise anew from None


def _hide_frames() -> None:
    """Have the worker tell the driver an error without the frames that it passed; they are in its text."""
    os.environ[_HIDE] = "1"
    # What is left where the variable is not known: a single line, "Traceback (most recent call last):".
    sys.tracebacklimit = 0


def told(error: BaseException, function: Callable[..., Any] | None = None) -> Exception:
    """An error of the same name whose text begins with what happened."""
    sentence, *more = _message_of(error).split("\n")
    own = _own_line(error, function) or (_first_line(function) if isinstance(error, _OVER) else [])
    lines = [sentence, *own, *more, "", _RAISED]
    # What cannot be sent would end the worker without a word.
    text = "\n".join([*lines, *_traceback(error)]).encode("utf-8", "backslashreplace").decode()
    kind = type(error)
    if getattr(errors, kind.__name__, None) is kind:
        # Not by its constructor, which may want other arguments.
        same: Exception = kind.__new__(kind)
        same.args = (text,)
        return same
    # Classes of others may be made of anything, and say anything. What the worker prints is the name.
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    other: Exception = type(kind.__name__, (Exception,), names)(text)
    return other


def _message_of(error: BaseException) -> str:
    """What an exception says; never empty, also where its class cannot tell."""
    try:
        return str(error).strip("\n") or "(no message)"
    except Exception as failed:  # texts of errors are made by whoever wrote their classes
        return f"(its message cannot be made: {type(failed).__name__})"


def _own_line(error: BaseException, function: Callable[..., Any] | None) -> list[str]:
    """The innermost line of the user's code that an error, or what it was raised from, passed; empty where none is."""
    home = _home_of(function)
    seen: set[int] = set()
    found: list[str] = []
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        for frame in traceback.extract_tb(current.__traceback__):
            if _is_own(frame.filename, home):
                found = _shown(frame.filename, frame.lineno, frame.name)
        # What it was raised from lies nearer to the mistake.
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return found


def _first_line(function: Callable[..., Any] | None) -> list[str]:
    """Where a function begins: what it gave is refused when it is over, and then no frame of it is left."""
    code = _code_of(function)
    if code is None or not _is_own(code.co_filename, ""):
        return []
    return _shown(code.co_filename, code.co_firstlineno, code.co_name)


def _shown(filename: str, number: int | None, name: str) -> list[str]:
    """A line of code as Python shows it; without its source where there is no such file, as on another machine."""
    source = linecache.getline(filename, number or 0).strip()
    return [f'  File "{filename}", line {number}, in {name}', *([f"    {source}"] if source else [])]


def _code_of(function: Callable[..., Any] | None) -> CodeType | None:
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None) or getattr(vars(type(function)).get("__call__"), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _is_own(filename: str, home: str) -> bool:
    """Whether a file is of the user's code: of no library, but the one that the function is of."""
    if filename.startswith((*_folders()[0], "<frozen ")) or filename.endswith(_COMPILED):
        return False
    if home and filename.startswith(home):
        return True
    return not filename.startswith(_folders()[1])


def _home_of(function: Callable[..., Any] | None) -> str:
    """The folder of a function's file: it may be installed as a library is. Empty where none is known."""
    code = _code_of(function)
    filename = "" if code is None else code.co_filename
    home = os.path.join(os.path.dirname(filename), "")
    # A module that lies among those of others is alone its home.
    return "" if not os.path.isabs(filename) else filename if home in _folders()[1] else home


@cache
def _folders() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Folders of this package and of Spark, and folders of libraries."""
    ours = [os.path.dirname(str(module.__file__)) for module in (spark_state_ext, arrow_schemas, pyspark)]
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(os.path.join(path, "") for path in ours), tuple(os.path.join(path, "") for path in libraries)


def _traceback(error: BaseException) -> list[str]:
    """An error's traceback, line by line; what little there is where it cannot be made."""
    try:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip("\n").split("\n")
    except Exception as failed:  # texts of errors are made by whoever wrote their classes
        frames = "".join(traceback.format_tb(error.__traceback__)).rstrip("\n").split("\n")
        return [*frames, f"({type(error).__name__}, whose text cannot be made: {type(failed).__name__})"]
