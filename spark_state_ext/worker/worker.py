"""The root object of a worker process: it owns the registries and caches that calls share (`engine.process_state`).

A registry is an ordinary object of the package that defines it. Code gets the registries it needs as parameters; only
entry points (a Spark task's entry, the factory of a backend, a plan) use `Worker.current`. Two things are kept
elsewhere: open LMDB environments in their module, and what a client has enabled in its session.
"""

from __future__ import annotations

import os
import threading
from typing import Any, ClassVar, TypeVar, cast

__all__ = ["Worker"]

T = TypeVar("T")


class Worker:
    """Owner of the objects that a worker process has once."""

    _current: ClassVar[Worker | None] = None
    _current_lock = threading.Lock()
    # Workers of the processes that this one was forked from: their objects belong to the parent, and must not be
    # collected here.
    _inherited: ClassVar[list[Worker]] = []

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._objects: dict[type, Any] = {}
        # Reentrant, because creating an object may create another one.
        self._lock = threading.RLock()

    @classmethod
    def current(cls) -> Worker:
        """Return the worker of this process. A forked child gets a new one, because threads do not survive a fork."""
        with cls._current_lock:
            if cls._current is not None and cls._current._pid != os.getpid():
                cls._inherited.append(cls._current)
                cls._current = None
            if cls._current is None:
                cls._current = cls()
            return cls._current

    def own(self, kind: type[T]) -> T:
        """Return the worker's object of a class, created on first use."""
        with self._lock:
            if kind not in self._objects:
                self._objects[kind] = kind()
            return cast(T, self._objects[kind])
