"""Local disks: stores of buckets that moved to another executor, and what killed workers left, are removed.

A local store is a cache, so removing one that is wanted again costs a restore and nothing else. Each task that uses a
store records the time in a file beside it.
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

__all__ = ["note_use", "reclaim"]

_LOGGER = logging.getLogger("spark_state_ext")
_USED = "used"
_GONE = "gone-"
# A file that waits for its upload is older than any that is written to, and nobody can tell whether it does.
_SCRATCH_KEPT_S_MIN = 86_400.0


def note_use(bucket_folder: Path) -> bool:
    """Note that a bucket's store is used now; False when the store is not there."""
    used = bucket_folder / boot_id() / _USED
    try:
        os.utime(used)
    except FileNotFoundError:
        if not used.parent.is_dir():
            return False
        # Private, as all that lies here.
        with contextlib.suppress(FileNotFoundError):
            os.close(os.open(used, os.O_CREAT | os.O_WRONLY, 0o600))
    return True


def reclaim(stores: Path, scratch: Path, keep_s: float, now_s: float | None = None) -> list[Path]:
    """Remove stores that were not used for a while, and old temporary files; returns what was removed."""
    now_s = time.time() if now_s is None else now_s
    removed: list[Path] = []
    if not _is_linked(stores):
        removed += _reclaim_stores(stores, scratch, keep_s, now_s)
    if not _is_linked(scratch):
        removed += _reclaim_scratch(scratch, keep_s, now_s)
    return removed


def _is_linked(folder: Path) -> bool:
    linked = is_link(folder)
    if linked:
        _LOGGER.warning("%s is a symbolic link: nothing is removed there", folder)
    return linked


def _reclaim_stores(stores: Path, scratch: Path, keep_s: float, now_s: float) -> list[Path]:
    removed: list[Path] = []
    operators = [it for it in real_folders(stores) if it != scratch]
    query_folders = [it for operator in operators for it in real_folders(operator)]
    schemas = [it for folder in query_folders for it in real_folders(folder) if it.name.startswith("s")]
    for schema in schemas:
        for bucket in real_folders(schema):
            if bucket.name.startswith(_GONE):
                # Somebody died while removing it.
                remove_tree(bucket, ignore_errors=True)
            elif _last_use_s(bucket) + keep_s < now_s:
                gone = bucket.with_name(f"{_GONE}{uuid.uuid4().hex}")
                # Renamed first: whoever opens it now makes a new one, and none sees half of it.
                with _going_on(bucket):
                    bucket.rename(gone)
                    remove_tree(gone, ignore_errors=True)
                    removed.append(bucket)
                    _LOGGER.info("the local store %s was not used for %d s and is removed", bucket, keep_s)
        for file in schema.glob("*"):  # about the buckets beside it
            with _going_on(file):
                found = file.lstat()
                if not stat.S_ISDIR(found.st_mode) and found.st_mtime + keep_s < now_s:
                    remove_file(file)
    for folder in (*schemas, *query_folders, *operators):
        with contextlib.suppress(OSError):  # only empty ones go
            remove_empty(folder)
    return removed


def _reclaim_scratch(scratch: Path, keep_s: float, now_s: float) -> list[Path]:
    removed = []
    for left in scratch.glob("*"):
        with _going_on(left):
            if left.lstat().st_mtime + max(keep_s, _SCRATCH_KEPT_S_MIN) < now_s:
                remove_tree(left)
                removed.append(left)
    return removed


@contextlib.contextmanager
def _going_on(path: Path) -> Iterator[None]:
    """One that cannot be removed does not keep the others."""
    try:
        yield
    except FileNotFoundError:  # somebody else was first
        pass
    except OSError as error:
        _LOGGER.warning("%s was not used for long, and cannot be removed: %s", path, error)


def _last_use_s(bucket: Path) -> float:
    """When a bucket's store was used last: what is noted, else what the files tell."""
    times: list[float] = []
    for path in (bucket, *bucket.glob(f"*/{_USED}"), *bucket.glob("*/data.mdb")):
        with contextlib.suppress(FileNotFoundError):  # somebody else removes it
            times.append(path.stat().st_mtime)
    # The folder's own time is that of its making.
    return max(times[1:] or times, default=float("inf"))
