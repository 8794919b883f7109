"""Free space on local disks: remove stores of buckets that moved to other executors, and files of killed workers.

A local store is a cache: if one is removed and needed again, it costs only a restore. Each task that uses a store
records the time in a file in the store's folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from spark_state_ext.worker.boot import boot_id
from spark_state_ext.worker.removal import is_link, real_folders, remove_empty, remove_file, remove_tree

__all__ = ["record_use", "remove_unused"]

_LOGGER = logging.getLogger("spark_state_ext")
_USED = "used"
_RENAMED = "gone-"
# Temporary files are kept at least this long, because one may be waiting for its upload without being written to.
_SCRATCH_KEPT_S_MIN = 86_400.0


def record_use(bucket_folder: Path) -> bool:
    """Record that a bucket's store is used now; return False if the store does not exist."""
    used = bucket_folder / boot_id() / _USED
    try:
        os.utime(used)
    except FileNotFoundError:
        if not used.parent.is_dir():
            return False
        with contextlib.suppress(FileNotFoundError):
            os.close(os.open(used, os.O_CREAT | os.O_WRONLY, 0o600))
    return True


def remove_unused(stores: Path, scratch: Path, keep_s: float, now_s: float | None = None) -> list[Path]:
    """Remove stores that were not used for `keep_s` seconds, and old temporary files; return the removed paths."""
    now_s = time.time() if now_s is None else now_s
    removed: list[Path] = []
    if not _warn_if_link(stores):
        removed += _reclaim_stores(stores, scratch, keep_s, now_s)
    if not _warn_if_link(scratch):
        removed += _reclaim_scratch(scratch, keep_s, now_s)
    return removed


def _warn_if_link(folder: Path) -> bool:
    is_linked = is_link(folder)
    if is_linked:
        _LOGGER.warning("%s is a symbolic link: nothing is removed there", folder)
    return is_linked


def _reclaim_stores(stores: Path, scratch: Path, keep_s: float, now_s: float) -> list[Path]:
    removed: list[Path] = []
    operators = [folder for folder in real_folders(stores) if folder != scratch]
    query_folders = [folder for operator in operators for folder in real_folders(operator)]
    schemas = [schema for folder in query_folders for schema in real_folders(folder) if schema.name.startswith("s")]
    for schema in schemas:
        for bucket in real_folders(schema):
            if bucket.name.startswith(_RENAMED):
                # Its process died while removing it.
                remove_tree(bucket, ignore_errors=True)
            elif _last_use_s(bucket) + keep_s < now_s:
                renamed = bucket.with_name(f"{_RENAMED}{uuid.uuid4().hex}")
                # Renamed first, so that no process opens a partly removed store; it creates a new one instead.
                with _log_errors(bucket):
                    bucket.rename(renamed)
                    remove_tree(renamed, ignore_errors=True)
                    removed.append(bucket)
                    _LOGGER.info("removed the local store %s, which was not used for %d s", bucket, keep_s)
        for file in schema.glob("*"):  # files about the buckets
            with _log_errors(file):
                status = file.lstat()
                if not stat.S_ISDIR(status.st_mode) and status.st_mtime + keep_s < now_s:
                    remove_file(file)
    for folder in (*schemas, *query_folders, *operators):
        with contextlib.suppress(OSError):  # not empty
            remove_empty(folder)
    return removed


def _reclaim_scratch(scratch: Path, keep_s: float, now_s: float) -> list[Path]:
    removed = []
    for path in scratch.glob("*"):
        with _log_errors(path):
            if path.lstat().st_mtime + max(keep_s, _SCRATCH_KEPT_S_MIN) < now_s:
                remove_tree(path)
                removed.append(path)
    return removed


@contextlib.contextmanager
def _log_errors(path: Path) -> Iterator[None]:
    """Log an error of removing `path` instead of raising it, so that the other paths are removed."""
    try:
        yield
    except FileNotFoundError:  # another process was faster
        pass
    except OSError as error:
        _LOGGER.warning("%s was not used for a long time, but cannot be removed: %s", path, error)


def _last_use_s(bucket: Path) -> float:
    """Return when a bucket's store was last used: the latest recorded time or time of its files."""
    times: list[float] = []
    for path in (bucket, *bucket.glob(f"*/{_USED}"), *bucket.glob("*/data.mdb")):
        with contextlib.suppress(FileNotFoundError):  # another process removes it
            times.append(path.stat().st_mtime)
    # The folder's own time, which comes first, counts only if there is no other: it is when the folder was created.
    return max(times[1:] or times, default=float("inf"))
