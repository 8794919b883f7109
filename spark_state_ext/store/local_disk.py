"""The local disk that a store lies on: its folder is made and removed, and what the system says becomes our errors."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import lmdb

from spark_state_ext.errors import CorruptStoreError, StateError, StorageError, StoreFullError
from spark_state_ext.store.damage import is_damage
from spark_state_ext.worker import descriptors
from spark_state_ext.worker.removal import remove_tree

__all__ = ["DATA_FILE", "make_private", "refuse_full", "set_aside", "storage_error", "translated"]

DATA_FILE, LOCK_FILE = "data.mdb", "lock.mdb"
# With less than this a disk counts as full.
_FREE_BYTES_MIN = 1 << 20
# What LMDB's lock file takes with its readers, and as much again for its first pages of data.
_OPENED_BYTES = 1 << 16


def set_aside(folder: Path) -> None:
    """Move a damaged environment's folder away and delete it; processes that have it open keep their copy."""
    away = folder.with_name(f"damaged-{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):  # another process was first
        folder.rename(away)
    remove_tree(away, ignore_errors=True)


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are not there, for this user alone."""
    missing = [folder, *folder.parents]
    missing = missing[: next(i for i, parent in enumerate(missing) if parent.exists())]
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)


@contextlib.contextmanager
def translated(folder: Path) -> Iterator[None]:
    """Raise LMDB's errors as this package's own, except those that report a full or resized map."""
    try:
        yield
    except (lmdb.MapResizedError, lmdb.MapFullError):
        raise
    except lmdb.Error as error:
        raise storage_error(folder, error) from error


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return _FREE_BYTES_MIN


def refuse_full(folder: Path) -> None:
    """Raise an OSError where a new store has no room.

    LMDB writes its lock file by a map, and where the disk has no page for that the system ends the process.
    """
    try:
        # Pages that it has; its length says nothing, as it begins as a hole.
        held = 512 * (folder / LOCK_FILE).stat().st_blocks
    except FileNotFoundError:
        held = 0
    if not held and _free_bytes(folder) < _OPENED_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def storage_error(folder: Path, error: Exception) -> StateError:
    """Return the error to raise for what the system or LMDB reports about a local store; its text says what to do."""
    if is_damage(error):
        return CorruptStoreError(f"the local store {folder} is damaged: {error}")
    if descriptors.used_up(error):
        return descriptors.too_many(f"the local store {folder} cannot be opened")
    text = str(error)
    number = getattr(error, "errno", None)
    # If the disk takes only a part of a write, LMDB reports an "Input/output error".
    full = "Input/output error" in text and _free_bytes(folder) < _FREE_BYTES_MIN
    if full or number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in text or "quota" in text:
        return StoreFullError(
            f"the disk of the local store {folder} is full: {text}. Make room or set local_dir elsewhere."
        )
    if number == errno.ENOMEM or "Cannot allocate memory" in text:
        return StoreFullError(
            f"no address space to map the local store {folder}: {text}. Raise spark.executor.pyspark.memory, or "
            "use more buckets."
        )
    if "MDB_" in text:  # LMDB's own words, which say nothing about the disk
        return StorageError(
            f"the local store {folder} failed: {text}. Start again; if that fails too, remove this folder: it is a "
            "cache, and is rebuilt from the checkpoint files."
        )
    return StorageError(f"the local store {folder} failed: {text}. Set local_dir to a writable local disk.")
