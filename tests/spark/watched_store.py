"""A store that logs the requests of tasks, and can be made slow, refuse requests or be unreachable.

Executors create it by name.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.slow import ObjectDisk

__all__ = ["STORE", "WatchedStore"]

STORE = "watched_store.WatchedStore"


class WatchedStore(ObjectDisk):
    """A store that logs requests, and fails or waits on demand.

    Parameters
    ----------
    log
        A file that gets a line for each operation in the thread that runs batches.
    put_ms
        The time that each PUT takes longer, milliseconds.
    get_ms
        The time that each read of a checkpoint file takes longer, milliseconds.
    readers
        A file that gets a line for each read of a checkpoint file: the number of the process.
    refuses_reads
        While this file exists, reads of checkpoint files fail.
    away
        While this file exists, every request fails.
    refuses
        While this file exists, writes of checkpoint files fail.
    """

    protocol = ("watched", "memory")

    def __init__(
        self,
        log: str = "",
        put_ms: float = 0.0,
        away: str = "",
        refuses: str = "",
        get_ms: float = 0.0,
        readers: str = "",
        refuses_reads: str = "",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._log = log
        self._put_s = put_ms / 1000
        self._get_s = get_ms / 1000
        self._readers = readers
        self._refuses_reads = refuses_reads
        self._away = away
        self._refuses = refuses

    def _put(self, path: Path, value: bytes) -> None:
        self._note_request("put", str(path))
        time.sleep(self._put_s)
        if self._refuses and path.suffix == ".arrow" and Path(self._refuses).exists():
            raise PermissionError(errno.EACCES, "credentials expired", str(path))
        super()._put(path, value)

    def _note_request(self, request: str, path: str) -> None:
        if self._log and threading.current_thread() is threading.main_thread():
            with open(self._log, "a") as log:
                log.write(f"{request} {path}\n")
        if self._readers and request in ("cat_file", "get_file") and path.endswith(".arrow"):
            with open(self._readers, "a") as readers:
                readers.write(f"{os.getpid()}\n")
            time.sleep(self._get_s)
        if self._refuses_reads and path.endswith(".arrow") and Path(self._refuses_reads).exists():
            raise PermissionError(errno.EACCES, "credentials expired", path)
        if self._away and Path(self._away).exists():
            raise ConnectionError("the store is away")


def _make_watched(name: str) -> Callable[..., Any]:
    original = getattr(ObjectDisk, name)

    def call(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        self._note_request(name, path)
        return original(self, path, *args, **kwargs)

    return call


for _name in ("cat_file", "get_file", "info", "exists", "ls", "rm_file", "rm", "open"):
    setattr(WatchedStore, _name, _make_watched(_name))
