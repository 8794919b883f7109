"""Files next to the environment that will become runs, and removal of such files whose process died.

A file is first copied under a temporary name, then renamed to the name of its run, and then named in the manifest.
Meanwhile its process holds a shared file lock, which the system releases if the process dies in any way. So a process
that gets the lock exclusively knows that every file which the manifest does not name is abandoned (and may take
gigabytes).
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
# Without the exclusive lock (it is held by others, or the disk has no locks), a file counts as abandoned at this age.
_ABANDONED_AFTER_S = 3600.0


class Incoming:
    """Files that this process is writing."""

    def __init__(self) -> None:
        self._locks: dict[Path, int | None] = {}

    def begin(self, folder: Path) -> Path:
        """Return a path for a new file in an environment's folder; until `end`, no process removes it as abandoned."""
        path = folder / f"incoming-{uuid.uuid4().hex}"
        try:
            lock = _open_lock_file(folder)
        except OSError as error:
            raise storage_error(folder, error) from error
        try:
            # Waits only for processes that are removing abandoned files.
            fcntl.flock(lock, fcntl.LOCK_SH)
        except OSError:  # the disk has no such locks
            os.close(lock)
            self._locks[path] = None
            return path
        self._locks[path] = lock
        return path

    def end(self, path: Path) -> None:
        """Release a path from `begin`, and remove the file if it has not become a run."""
        remove_file(path, missing_ok=True)
        lock = self._locks.pop(path, None)
        if lock is not None:
            os.close(lock)


def remove_abandoned(folder: Path, read_known_names: Callable[[], Collection[str] | None]) -> None:
    """Remove the files of processes that died before naming them in the manifest.

    `read_known_names` returns the names of files in the manifest, or None if nothing may be removed.
    """
    # List the files before reading the manifest, so that a file named in between is found there.
    files = [path for pattern in _PATTERNS for path in folder.glob(pattern)]
    if not files:
        return
    with _lock_exclusively(folder) as locked:
        names = read_known_names()
        if names is None:
            return
        young_s = time.time() - _ABANDONED_AFTER_S
        for path in files:
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                if path.name not in names and (locked or path.stat().st_mtime < young_s):
                    remove_file(path)


@contextlib.contextmanager
def _lock_exclusively(folder: Path) -> Iterator[bool]:
    """Yield True if no live process is writing a file here; until the block ends, no process can begin one."""
    try:
        lock = _open_lock_file(folder)
    except OSError:  # the folder is gone
        yield False
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another process is writing a file, or the disk has no such locks
            yield False
        else:
            yield True
    finally:
        os.close(lock)


def _open_lock_file(folder: Path) -> int:
    return os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
