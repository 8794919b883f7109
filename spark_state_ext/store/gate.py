"""A lock that many users share, or one takes exclusively."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["Gate"]


class Gate:
    """A shared/exclusive lock: transactions share it, resizing the map takes it exclusively."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._users = 0
        self._closed = False

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: not self._closed)
            self._users += 1
        try:
            yield
        finally:
            with self._condition:
                self._users -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: not self._closed)
            self._closed = True
            self._condition.wait_for(lambda: self._users == 0)
        try:
            yield
        finally:
            self._open_again()

    @contextlib.contextmanager
    def exclusive_if_free(self) -> Iterator[bool]:
        """Like `exclusive`, but without waiting: yields False, without the lock, if the gate is in use."""
        with self._condition:
            free = not self._closed and self._users == 0
            self._closed = self._closed or free
        try:
            yield free
        finally:
            if free:
                self._open_again()

    def _open_again(self) -> None:
        with self._condition:
            self._closed = False
            self._condition.notify_all()
