"""A store in memory that is as slow as a remote one, counts what is read, and fails on request."""

from __future__ import annotations

import threading
import time
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from spark_state_ext.files.folder import Folder

__all__ = ["Throttled"]


class Throttled(Folder):
    """A folder in memory whose reads are slow and counted.

    Parameters
    ----------
    root
        A URL of fsspec's `memory` file system.
    latency_s, bytes_per_s
        Delay of each request, and bytes per second of all requests together; 0 means no delay, or no limit.
    """

    def __init__(self, root: str, latency_s: float = 0.0, bytes_per_s: float = 0.0) -> None:
        super().__init__(root)
        assert isinstance(self._fs, MemoryFileSystem)
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0
        self.requests = 0
        self.fetched_bytes = 0
        # After this many more requests, every request raises `failure`.
        self.fails_after: int | None = None
        self.failure: Exception = OSError("the store fails")

    def size(self, name: str) -> int:
        self._asked(0)
        return super().size(name)

    def get(self, name: str) -> bytes:
        data = super().get(name)
        self._asked(len(data))
        return data

    def get_range(self, name: str, start: int, end: int) -> bytes:
        data = super().get_range(name, start, end)
        self._asked(len(data))
        return data

    def get_file(self, name: str, local_path: Any) -> None:
        self._asked(super().size(name))
        super().get_file(name, local_path)

    def _asked(self, size_bytes: int) -> None:
        with self._lock:
            self.requests += 1
            if self.fails_after is not None:
                self.fails_after -= 1
                if self.fails_after < 0:
                    raise self.failure
            self.fetched_bytes += size_bytes
            now_s = time.monotonic()
            until_s = max(self._free_s, now_s + self._latency_s)
            if self._bytes_per_s:
                until_s += size_bytes / self._bytes_per_s
                self._free_s = max(self._free_s, now_s) + size_bytes / self._bytes_per_s
        if self._latency_s or self._bytes_per_s:
            time.sleep(max(0.0, until_s - time.monotonic()))
