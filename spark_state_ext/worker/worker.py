"""The one object of a worker process: it owns the registries and bounded caches that calls share (`engine.shared`).

A registry is an ordinary object of the room that it belongs to. Whoever needs one is handed it, and what stands at the
edge (a Spark task's entry, the factory of a backend, a plan) asks `Worker.current`. Open LMDB environments are kept
where they are used, and what a client has enabled by its session.
"""

from __future__ import annotations

import os
import threading
from typing import Any, ClassVar, TypeVar, cast

__all__ = ["Worker"]

T = TypeVar("T")


class Worker:
    """What a worker process has once."""

    _current: ClassVar[Worker | None] = None
    _current_lock = threading.Lock()
    # Those of processes that this one was forked from: what they own is the parent's, and must not be collected here.
    _inherited: ClassVar[list[Worker]] = []

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._made: dict[type, Any] = {}
        # Making one may take making another one.
        self._making = threading.RLock()

    @classmethod
    def current(cls) -> Worker:
        """The one of this process. A forked child has one of its own, as threads do not survive a fork."""
        with cls._current_lock:
            if cls._current is not None and cls._current._pid != os.getpid():
                cls._inherited.append(cls._current)
                cls._current = None
            if cls._current is None:
                cls._current = cls()
            return cls._current

    def own(self, kind: type[T]) -> T:
        """The worker's object of a class, made when it is first asked for."""
        with self._making:
            if kind not in self._made:
                self._made[kind] = kind()
            return cast(T, self._made[kind])
