"""Files beside the environment that are to become runs, and those whose process died before they did.

A file is copied here under a name of its own, renamed to that of its run, and then named in the manifest. While a
process is at it, it shares a lock, which the system lets go of when it dies, however it does. Who has the lock alone
knows that every file which the manifest does not name is left over, and may be gigabytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from spark_state_ext.store.local_disk import storage_error
from spark_state_ext.worker.removal import remove_file

__all__ = ["Incoming", "remove_abandoned"]

_PATTERNS = ("base-*", "incoming-*")
_LOCK_FILE = "incoming.lock"
# Where nobody can tell by the lock, as somebody is at it, or the disk has no such locks.
_ABANDONED_AFTER_S = 3600.0


class Incoming:
    """Files of this process that are on their way."""

    def __init__(self) -> None:
        self._locks: dict[Path, int | None] = {}

    def begin(self, folder: Path) -> Path:
        """A path for a new one, in an environment's folder; until `end` nobody takes it for left over."""
        path = folder / f"incoming-{uuid.uuid4().hex}"
        try:
            lock = _opened(folder)
        except OSError as error:
            raise storage_error(folder, error) from error
        try:
            # Waits for others only while these remove what is left over.
            fcntl.flock(lock, fcntl.LOCK_SH)
        except OSError:  # the disk has no such locks
            os.close(lock)
            self._locks[path] = None
            return path
        self._locks[path] = lock
        return path

    def end(self, path: Path) -> None:
        """It has become a run, or will not: remove what is left of it."""
        remove_file(path, missing_ok=True)
        lock = self._locks.pop(path, None)
        if lock is not None:
            os.close(lock)


def remove_abandoned(folder: Path, known: Callable[[], Collection[str] | None]) -> None:
    """Remove files of processes that died between beginning one and naming it in the manifest."""
    # Before the manifest is read: what is named meanwhile is found there.
    found = [path for pattern in _PATTERNS for path in folder.glob(pattern)]
    if not found:
        return
    with _alone(folder) as alone:
        names = known()
        if names is None:
            return
        young_s = time.time() - _ABANDONED_AFTER_S
        for path in found:
            with contextlib.suppress(FileNotFoundError):  # another process was first
                if path.name not in names and (alone or path.stat().st_mtime < young_s):
                    remove_file(path)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Whether no live process has a file on its way here; none begins one until this is over."""
    try:
        lock = _opened(folder)
    except OSError:  # the folder is gone
        yield False
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # somebody has, or the disk has no such locks
            yield False
        else:
            yield True
    finally:
        os.close(lock)


def _opened(folder: Path) -> int:
    return os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
