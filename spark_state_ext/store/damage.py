"""Damage of a local store: which errors report it, and how it is repaired.

LMDB finds some damage in calls that cannot report it; then only the transaction's next call fails, with BadTxn. Damage
that LMDB does not find is found by this package's checksums, or crashes the process.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import lmdb

from spark_state_ext.errors import CorruptStoreError

__all__ = ["can_be_mapped", "is_damage", "rebuild_if_damaged"]

T = TypeVar("T")

_LOGGER = logging.getLogger("spark_state_ext")
# LMDB raises these only if its files are damaged. Not all releases of py-lmdb have all of them.
_NAMES = (
    "BadDbi",
    "BadRslot",
    "BadTxn",
    "BadValsize",
    "Corrupted",
    "CursorFull",
    "Incompatible",
    "Invalid",
    "PageFull",
    "PageNotFound",
    "Panic",
    "Problem",
    "VersionMismatch",
)
_ERRORS: tuple[type[Exception], ...] = tuple(
    getattr(lmdb, f"{name}Error") for name in _NAMES if hasattr(lmdb, f"{name}Error")
)
# Address space that LMDB needs besides the map.
_SPARE_BYTES = 2 << 20


def is_damage(error: Exception) -> bool:
    """True if LMDB reports that its files are damaged."""
    # py-lmdb 3 has no error class for files of another LMDB version.
    return isinstance(error, _ERRORS) or (isinstance(error, lmdb.Error) and "data format" in str(error))


def can_be_mapped(data_file: Path, map_bytes: int) -> bool:
    """True if this process has enough address space to map a data file of its present length.

    If it has, and LMDB could not map the file, then the file's header claims more pages than the file has.
    """
    try:
        needed_bytes = max(data_file.stat().st_size, map_bytes) + _SPARE_BYTES
        mmap.mmap(-1, needed_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ).close()
    except OSError:
        return False
    return True


def rebuild_if_damaged(work: Callable[[], T], rebuild: Callable[[], None]) -> T:
    """Run `work`; if the store is damaged, call `rebuild` and run `work` once more.

    Only for work that needs none of the runs: after `rebuild` the store is empty.
    """
    try:
        return work()
    except CorruptStoreError as error:
        _LOGGER.warning("%s; it is rebuilt from the checkpoint files", error)
        rebuild()
        return work()
