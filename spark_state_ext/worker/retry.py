"""Retries of operations whose errors may be temporary.

Clients of object stores have their own error classes, which this package must not import. So an error is judged by what
all clients have in common: builtin classes, error numbers, and the status of an HTTP response.
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

__all__ = ["iterate_causes", "is_retriable", "call_with_retries", "find_http_status"]

T = TypeVar("T")

_WAIT_S_MIN = 0.1
_WAIT_S_MAX = 10.0
# Statuses after which the server may accept the request later; it will refuse it again after other 4xx statuses.
_RETRIABLE_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
_PERMANENT_ERRORS = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)
# Parts of class names of connection errors that are not builtin: botocore's EndpointConnectionError, aiohttp's
# ServerDisconnectedError and ClientPayloadError, azure-core's ServiceRequestError, Python 3.10's asyncio.TimeoutError.
_CONNECTION_WORDS = ("Connection", "Disconnected", "Timeout", "Incomplete", "Payload", "ServiceRe")
_PERMANENT_NUMBERS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG})


def is_retriable(error: BaseException) -> bool:
    """True if a retry may succeed: after connection errors, timeouts, and errors of servers that are busy or failed."""
    if isinstance(error, StateError):
        if not isinstance(error, StorageError) or isinstance(error, (StoreFullError, MissingError, UnsafeFolderError)):
            return False
        # Our errors wrap an error of a file system. Those without a cause, as for a torn upload, may be temporary.
        return error.__cause__ is None or is_retriable(error.__cause__)
    causes = list(iterate_causes(error))
    for cause in causes:
        status = _status_of(cause)
        if status is not None:
            return status in _RETRIABLE_STATUSES
        if isinstance(cause, _PERMANENT_ERRORS):
            return False
        if isinstance(cause, OSError) and cause.errno in _PERMANENT_NUMBERS:
            return False
        if isinstance(cause, (TimeoutError, ConnectionError)):
            return True
    # Clients wrap connection errors in their own classes, some of which are not an OSError.
    return any(isinstance(cause, OSError) or _is_connection_error(cause) for cause in causes)


def _is_connection_error(error: BaseException) -> bool:
    names = (base.__name__ for base in type(error).__mro__)
    return any(word in name for name in names for word in _CONNECTION_WORDS)


def iterate_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and all errors that it was raised from, each once."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def find_http_status(error: BaseException) -> int | None:
    """Return the HTTP status in a client's error, or in an error that it was raised from; None if there is none."""
    return next((status for cause in iterate_causes(error) if (status := _status_of(cause)) is not None), None)


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status in an error of botocore, azure-core, aiohttp, google-auth or requests, if there is one."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        response = response.get("ResponseMetadata", {})
        status = response.get("HTTPStatusCode")
        return status if isinstance(status, int) else None
    for holder in (error, response):
        for name in ("status_code", "status", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and 100 <= value < 600:
                return value
    return None


def call_with_retries(work: Callable[[], T], timeout_s: float, stop: threading.Event | None = None) -> T:
    """Run `work`; after a retriable error, run it again at random, growing intervals until `timeout_s` is over.

    Once `stop` is set, raise an InterruptedRestoreError instead of running it.
    """

    def once() -> T:
        if stop is not None and stop.is_set():
            raise InterruptedRestoreError("stopped on request")
        return work()

    if timeout_s <= 0:  # the same result, without tenacity's overhead
        return once()
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_retriable),
        wait=tenacity.wait_random_exponential(multiplier=_WAIT_S_MIN, max=_WAIT_S_MAX),
        stop=tenacity.stop_after_delay(timeout_s),
        sleep=tenacity.sleep_using_event(stop) if stop is not None else time.sleep,
        reraise=True,
    )(once)
