"""A store, made by name on executors, that tells what tasks ask it, takes its time for PUTs, or cannot be reached."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

__all__ = ["STORE", "WatchedStore"]

STORE = "watched_store.WatchedStore"


class WatchedStore(LocalFileSystem):  # type: ignore[misc] # fsspec has no types
    """A disk under an object store's rules: a PUT is atomic, and there are no folders to make.

    Parameters
    ----------
    log
        A file that gets a line for each operation in the thread that batches are in.
    put_ms
        How much longer each PUT takes, milliseconds.
    away
        While this file is there, nothing can be reached.
    """

    protocol = ("watched", "memory")

    def __init__(self, log: str = "", put_ms: float = 0.0, away: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._log = log
        self._put_s = put_ms / 1000
        self._away = away

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        """One PUT."""
        self._asked("pipe_file", path)
        time.sleep(self._put_s)
        _put(Path(path), value)

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        """One PUT of a file."""
        self._asked("put_file", rpath)
        time.sleep(self._put_s)
        _put(Path(rpath), Path(lpath).read_bytes())

    def _asked(self, what: str, path: str) -> None:
        if self._log and threading.current_thread() is threading.main_thread():
            with open(self._log, "a") as log:
                log.write(f"{what} {path}\n")
        if self._away and Path(self._away).exists():
            raise ConnectionError("the store is away")


def _put(path: Path, value: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.parent / f".tmp-{time.monotonic_ns()}-{path.name}"
    hidden.write_bytes(value)
    hidden.rename(path)


def _watched(name: str) -> Callable[..., Any]:
    real = getattr(LocalFileSystem, name)

    def call(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        self._asked(name, path)
        return real(self, path, *args, **kwargs)

    return call


for _name in ("cat_file", "get_file", "info", "exists", "ls", "rm_file", "rm", "open"):
    setattr(WatchedStore, _name, _watched(_name))
