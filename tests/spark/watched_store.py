"""A store, made by name on executors, that tells what tasks ask it, takes its time for PUTs, or cannot be reached."""

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
    """A store that tells what it is asked.

    Parameters
    ----------
    log
        A file that gets a line for each operation in the thread that batches are in.
    put_ms
        How much longer each PUT takes, milliseconds.
    get_ms
        How much longer each read of a checkpoint file takes.
    readers
        A file that gets a line for each of these: the number of the process.
    refuses_reads
        While this file is there, no checkpoint file may be read.
    away
        While this file is there, nothing can be reached.
    refuses
        While this file is there, no checkpoint file may be written.
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
        self._asked("put", str(path))
        time.sleep(self._put_s)
        if self._refuses and path.suffix == ".arrow" and Path(self._refuses).exists():
            raise PermissionError(errno.EACCES, "credentials expired", str(path))
        super()._put(path, value)

    def _asked(self, what: str, path: str) -> None:
        if self._log and threading.current_thread() is threading.main_thread():
            with open(self._log, "a") as log:
                log.write(f"{what} {path}\n")
        if self._readers and what in ("cat_file", "get_file") and path.endswith(".arrow"):
            with open(self._readers, "a") as readers:
                readers.write(f"{os.getpid()}\n")
            time.sleep(self._get_s)
        if self._refuses_reads and path.endswith(".arrow") and Path(self._refuses_reads).exists():
            raise PermissionError(errno.EACCES, "credentials expired", path)
        if self._away and Path(self._away).exists():
            raise ConnectionError("the store is away")


def _watched(name: str) -> Callable[..., Any]:
    real = getattr(ObjectDisk, name)

    def call(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        self._asked(name, path)
        return real(self, path, *args, **kwargs)

    return call


for _name in ("cat_file", "get_file", "info", "exists", "ls", "rm_file", "rm", "open"):
    setattr(WatchedStore, _name, _watched(_name))
