"""Trying again, only where that can help.

Clients of object stores have classes of errors of their own, which this package must not import. So an error is judged
by what they have in common: builtin classes, error numbers, and the status that an HTTP server answered with.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import tenacity

from spark_state_ext.errors import (
    InterruptedRestoreError,
    MissingError,
    StateError,
    StorageError,
    StoreFullError,
    UnsafeFolderError,
)

__all__ = ["causes_of", "is_retriable", "retried", "status_of"]

T = TypeVar("T")

_WAIT_S_MIN = 0.1
_WAIT_S_MAX = 10.0
# Requests that the server may take another time; everything else from 400 to 499 it will refuse again.
_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_HOPELESS = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)
# Clients name by them what has no class of Python's own: botocore's EndpointConnectionError, aiohttp's
# ServerDisconnectedError and ClientPayloadError, azure-core's ServiceRequestError, Python 3.10's asyncio.TimeoutError.
_CONNECTION_WORDS = ("Connection", "Disconnected", "Timeout", "Incomplete", "Payload", "ServiceRe")
_HOPELESS_NUMBERS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG})


def is_retriable(error: BaseException) -> bool:
    """Whether doing the same once more may go well: connections, timeouts, and servers that are busy or failed."""
    if isinstance(error, StateError):
        if not isinstance(error, StorageError) or isinstance(error, (StoreFullError, MissingError, UnsafeFolderError)):
            return False
        # Ours wrap what a file system raised. One of our own making, as of a torn upload, may go well another time.
        return error.__cause__ is None or is_retriable(error.__cause__)
    causes = list(causes_of(error))
    for cause in causes:
        status = _status_of(cause)
        if status is not None:
            return status in _STATUS
        if isinstance(cause, _HOPELESS):
            return False
        if isinstance(cause, OSError) and cause.errno in _HOPELESS_NUMBERS:
            return False
        if isinstance(cause, (TimeoutError, ConnectionError)):
            return True
    # What went wrong with a connection, clients wrap in errors of their own, some of which are no OSError.
    return any(isinstance(cause, OSError) or _is_connections(cause) for cause in causes)


def _is_connections(error: BaseException) -> bool:
    names = (made.__name__ for made in type(error).__mro__)
    return any(word in name for name in names for word in _CONNECTION_WORDS)


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it was raised from, each once."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def status_of(error: BaseException) -> int | None:
    """The HTTP status that a client's error, or one that it was raised from, came of; None where there is none."""
    return next((status for cause in causes_of(error) if (status := _status_of(cause)) is not None), None)


def _status_of(error: BaseException) -> int | None:
    """The HTTP status in an error of botocore, azure-core, aiohttp, google-auth or requests."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        response = response.get("ResponseMetadata", {})
        found = response.get("HTTPStatusCode")
        return found if isinstance(found, int) else None
    for holder in (error, response):
        for name in ("status_code", "status", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and 100 <= value < 600:
                return value
    return None


def retried(work: Callable[[], T], timeout_s: float, stop: threading.Event | None = None) -> T:
    """Run `work`, again after an error that is retriable, at random intervals that grow."""

    def once() -> T:
        if stop is not None and stop.is_set():
            raise InterruptedRestoreError("told to stop")
        return work()

    if timeout_s <= 0:  # the same, without what tenacity keeps account of
        return once()
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_retriable),
        wait=tenacity.wait_random_exponential(multiplier=_WAIT_S_MIN, max=_WAIT_S_MAX),
        stop=tenacity.stop_after_delay(timeout_s),
        sleep=tenacity.sleep_using_event(stop) if stop is not None else time.sleep,
        reraise=True,
    )(once)
