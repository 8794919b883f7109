"""Memory that a worker process no longer uses, given back to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import pyarrow as pa

__all__ = ["Calls", "give_back"]

# Work over fewer bytes leaves nothing behind that is worth the milliseconds.
_MUCH_BYTES = 8 << 20
# A call with less than one part in so many of the largest one's changes is a small one.
_SMALL_PART = 4
# So many small calls in a row mean that large ones are over. Beside a few large buckets there may be small ones.
_SMALL_CALLS = 8


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


class Calls:
    """The calls of a process: once large ones are over, a backlog's for instance, their memory is given back."""

    def __init__(self) -> None:
        self._most_bytes = 0
        self._small = 0

    def note(self, changed_bytes: int) -> None:
        """A call ends, which changed so many bytes of state."""
        if changed_bytes * _SMALL_PART > self._most_bytes:
            self._most_bytes = max(self._most_bytes, changed_bytes)
            self._small = 0
            return
        self._small += 1
        if self._small == _SMALL_CALLS:
            give_back(self._most_bytes)
            self._most_bytes, self._small = changed_bytes, 0


@functools.lru_cache(maxsize=1)
def _trim() -> Callable[[int], object]:
    """The C library's own; LMDB, NumPy and Arrow's small objects use its memory. Only GNU's needs it, and has it."""
    try:
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return lambda _: None
    return trim
