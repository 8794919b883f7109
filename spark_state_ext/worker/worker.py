"""The one object of a worker process: it owns every registry and bounded cache that calls share.

A registry is an ordinary object of the room that it belongs to. Nothing keeps one in a module or a class: whoever needs
one is handed it, and what stands at the edge (a Spark task's entry) asks `Worker.current` once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, cast

__all__ = ["Worker"]

T = TypeVar("T")


class Worker:
    """What a worker process has once.

    Examples
    --------
    >>> worker = Worker()
    >>> worker.own(list) is worker.own(list)
    True
    """

    _current: ClassVar[Worker | None] = None
    _current_lock = threading.Lock()

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._made: dict[type, Any] = {}
        # Making one may take making another one.
        self._making = threading.RLock()

    @classmethod
    def current(cls) -> Worker:
        """The one of this process. A forked child has one of its own, as threads do not survive a fork."""
        with cls._current_lock:
            if cls._current is None or cls._current._pid != os.getpid():
                cls._current = cls()
            return cls._current

    def own(self, kind: type[T], make: Callable[[], T] | None = None) -> T:
        """The worker's object of a class, made when it is first asked for.

        Parameters
        ----------
        kind
            The class.
        make
            Makes it; the class itself where not given.
        """
        with self._making:
            if kind not in self._made:
                self._made[kind] = (make or kind)()
            return cast(T, self._made[kind])
