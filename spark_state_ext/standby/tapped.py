"""Deltas that tasks have sent: kept for a while, in memory, until the store shows them.

They only take the place of a read. Which files there are, and which of them count, is told by the store alone.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection

from arrow_schemas.standby import BucketKey

__all__ = ["Tapped"]

_BYTES_MAX = 64 << 20
_KEPT_S = 60.0


class Tapped:
    """Those of one root; several threads may use it."""

    def __init__(self, bytes_max: int = _BYTES_MAX, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._bytes_max = bytes_max
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[BucketKey, str], tuple[float, bytes]] = OrderedDict()
        self._bytes = 0

    def put(self, key: BucketKey, name: str, data: bytes) -> None:
        """Keep a file."""
        with self._lock:
            self._drop((key, name))
            self._kept[key, name] = (self._clock_s(), data)
            self._bytes += len(data)
            self._trim()

    def of(self, key: BucketKey) -> dict[str, bytes]:
        """What there is of a bucket, by name."""
        with self._lock:
            self._trim()
            return {name: data for (its, name), (_, data) in self._kept.items() if its == key}

    def drop(self, key: BucketKey, names: Collection[str]) -> None:
        """These are needed no more."""
        with self._lock:
            for name in names:
                self._drop((key, name))

    def _trim(self) -> None:
        old_s = self._clock_s() - _KEPT_S
        while self._kept:
            first, (since_s, _) = next(iter(self._kept.items()))
            if self._bytes <= self._bytes_max and since_s > old_s:
                return
            self._drop(first)

    def _drop(self, which: tuple[BucketKey, str]) -> None:
        gone = self._kept.pop(which, None)
        if gone is not None:
            self._bytes -= len(gone[1])
