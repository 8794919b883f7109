"""A store, made by name on executors, that tells what tasks ask it, takes its time for PUTs, or cannot be reached."""

from __future__ import annotations

import errno
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
    away
        While this file is there, nothing can be reached.
    refuses
        While this file is there, no checkpoint file may be written.
    """

    protocol = ("watched", "memory")

    def __init__(self, log: str = "", put_ms: float = 0.0, away: str = "", refuses: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._log = log
        self._put_s = put_ms / 1000
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
