"""The local disk of a store: create and remove its folder, and translate errors of LMDB and the system into ours."""

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

__all__ = ["DATA_FILE", "make_private", "refuse_full", "set_aside", "storage_error", "translate_errors"]

DATA_FILE, LOCK_FILE = "data.mdb", "lock.mdb"
# A disk with less free space than this counts as full.
_FREE_BYTES_MIN = 1 << 20
# Twice the size of LMDB's lock file, which leaves room for its first pages of data.
_OPENED_BYTES = 1 << 16


def set_aside(folder: Path) -> None:
    """Rename a damaged environment's folder and delete it; processes that have it open can still use their files."""
    damaged = folder.with_name(f"damaged-{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        folder.rename(damaged)
    remove_tree(damaged, ignore_errors=True)


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents with access for this user only."""
    missing = [folder, *folder.parents]
    missing = missing[: next(i for i, parent in enumerate(missing) if parent.exists())]
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)


@contextlib.contextmanager
def translate_errors(folder: Path) -> Iterator[None]:
    """Raise LMDB's errors as this package's errors, except those that report a full or resized map."""
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
    """Raise an OSError if the disk has no room for a new store.

    LMDB writes its lock file through a map, and the system kills the process if the disk has no room for a page.
    """
    try:
        # Bytes allocated on disk: the file's length includes holes, with which LMDB creates it.
        allocated = 512 * (folder / LOCK_FILE).stat().st_blocks
    except FileNotFoundError:
        allocated = 0
    if not allocated and _free_bytes(folder) < _OPENED_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def storage_error(folder: Path, error: Exception) -> StateError:
    """Return the error to raise for an error of LMDB or the system about a local store; its text says what to do."""
    if is_damage(error):
        return CorruptStoreError(f"the local store {folder} is damaged: {error}")
    if descriptors.is_limit_reached(error):
        return descriptors.make_too_many_error(f"the local store {folder} cannot be opened")
    text = str(error)
    number = getattr(error, "errno", None)
    # If the disk takes only a part of a write, LMDB reports an "Input/output error".
    full = "Input/output error" in text and _free_bytes(folder) < _FREE_BYTES_MIN
    if full or number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in text or "quota" in text:
        return StoreFullError(
            f"the disk of the local store {folder} is full: {text}. Make room, or set local_dir to another disk."
        )
    if number == errno.ENOMEM or "Cannot allocate memory" in text:
        return StoreFullError(
            f"no address space to map the local store {folder}: {text}. Raise spark.executor.pyspark.memory, "
            "or use more buckets."
        )
    if "MDB_" in text:  # an error code of LMDB, which is not about the disk
        return StorageError(
            f"the local store {folder} failed: {text}. Start again; if that fails too, remove this folder: it is a "
            "cache, and is rebuilt from the checkpoint files."
        )
    return StorageError(f"the local store {folder} failed: {text}. Set local_dir to a writable local disk.")
