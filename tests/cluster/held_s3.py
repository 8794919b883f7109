"""moto's S3 server with a cache, so that it returns a part of an object without reading the whole, as real stores do.

``python held_s3.py -H 127.0.0.1 -p PORT``. moto reads the whole object from its file for each request, so that a hundred
ranges of a snapshot would take a hundred times as long as the snapshot. Here the most recently read objects stay in memory,
up to `HELD_BYTES_MAX`, which is several times the size of a query's objects.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import Any

from moto.s3.models import FakeKey
from moto.server import main

HELD_BYTES_MAX = 7 << 30
_VALUE: Any = vars(FakeKey)["value"]


class ValueCache:
    """The values of the most recently read keys; each request has its own thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: OrderedDict[int, tuple[FakeKey, bytes]] = OrderedDict()
        self._bytes = 0

    def get(self, key: FakeKey) -> bytes:
        with self._lock:
            # The cache also keeps the key, so that no other key can get its id.
            if id(key) in self._values:
                self._values.move_to_end(id(key))
                return self._values[id(key)][1]
        value: bytes = _VALUE.fget(key)
        with self._lock:
            self._drop(id(key))
            self._values[id(key)] = key, value
            self._bytes += len(value)
            while self._bytes > HELD_BYTES_MAX:
                self._drop(next(iter(self._values)))
        return value

    def set(self, key: FakeKey, value: bytes) -> None:
        with self._lock:
            self._drop(id(key))
        _VALUE.fset(key, value)

    def _drop(self, key: int) -> None:
        _, value = self._values.pop(key, (None, b""))
        self._bytes -= len(value)


if __name__ == "__main__":
    # moto also keeps the parts of an upload, and those below this size in memory.
    os.environ["MOTO_S3_DEFAULT_KEY_BUFFER_SIZE"] = str(1 << 20)
    cache = ValueCache()
    type.__setattr__(FakeKey, "value", property(cache.get, cache.set))
    main()
