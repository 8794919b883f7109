"""Memory that a worker process no longer uses, given back to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import pyarrow as pa

__all__ = ["give_back"]

# Work over fewer bytes leaves nothing behind that is worth the milliseconds.
_MUCH_BYTES = 8 << 20


def give_back(after_bytes: int) -> None:
    """Give unused memory back, after work over so many bytes if these are many: a merge of large runs, a snapshot.

    A worker goes on for as long as its query. What its allocators keep for the next such piece of work is memory that
    others lack, and it becomes more with every larger piece, though what is in use stays the same. Trimming takes some
    milliseconds, and fetching the memory again as many: not for every call. As Dask's workers do it (``malloc_trim``);
    Arrow's own way to trim the C library's memory does nothing in its wheels.
    """
    if after_bytes <= _MUCH_BYTES:
        return
    pa.default_memory_pool().release_unused()
    _trim()(0)


@functools.lru_cache(maxsize=1)
def _trim() -> Callable[[int], object]:
    """The C library's own; LMDB, NumPy and Arrow's small objects use its memory. Only GNU's needs it, and has it."""
    try:
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return lambda _: None
    return trim
