"""Memory that a worker process no longer uses, given back to the system."""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable

import pyarrow as pa

__all__ = ["Calls", "give_back", "settle"]

# Work over fewer bytes leaves nothing behind that is worth the milliseconds.
_MUCH_BYTES = 8 << 20
# A call with at most one part in so many of its bucket's largest one's changes is a small one.
_SMALL_PART = 4
# So many small calls of a bucket in a row mean that its large ones are over.
_SMALL_CALLS = 2


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
    """The calls of a process: once a bucket's large ones are over, after a backlog for instance, memory is given back.

    By bucket, as a few large ones may lie beside many small ones.
    """

    def __init__(self) -> None:
        # By bucket, bytes of the largest call and how many small ones followed.
        self._known: dict[str, tuple[int, int]] = {}

    def note(self, bucket: str, changed_bytes: int) -> None:
        """A call of a bucket changed so many bytes of state."""
        most_bytes, small = self._known.get(bucket, (0, 0))
        if changed_bytes * _SMALL_PART > most_bytes:
            self._known[bucket] = max(most_bytes, changed_bytes), 0
        elif small + 1 < _SMALL_CALLS:
            self._known[bucket] = most_bytes, small + 1
        else:
            self._known[bucket] = changed_bytes, 0
            give_back(most_bytes)


@functools.lru_cache(maxsize=1)
def _trim() -> Callable[[int], object]:
    """The C library's own; LMDB, NumPy and Arrow's small objects use its memory. Only GNU's needs it, and has it."""
    try:
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return lambda _: None
    return trim


# Numbers of GNU's `mallopt`, which its headers fix.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# LMDB asks for 1 MiB and for 2 MiB with each environment, and touches little of them.
_APART_BYTES_MIN = 1 << 20
# What the C library's own rule, which a fixed threshold switches off, comes to in a process with large arrays.
_TRIM_BYTES = 64 << 20


def _large_pieces_apart() -> None:
    """Have the C library map each large piece by itself, as fresh pages that take no memory until they are touched.

    Its own rule raises the threshold to the largest piece that was ever freed. From then on LMDB's two tables of each
    open environment lie in memory that arrays had before, whose pages all count: 3 MB a store in place of 0.2 MB.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _APART_BYTES_MIN)
    mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)


# Containers allocated, and not freed yet, at which a young collection begins; Python's own default is 700.
_YOUNG_OBJECTS_MAX = 5_000


@functools.cache
def settle() -> None:
    """Once in the life of a worker process: map large memory, and let the garbage collector run less often, over less.

    What is alive now, modules mostly, stays for good, but each full collection would go through all of it again. And
    the frames that functions make for thousands of keys allocate so much that young collections follow each other.
    """
    _large_pieces_apart()
    gc.collect()
    gc.freeze()
    young, *old = gc.get_threshold()
    if young:  # zero: somebody switched collections off
        gc.set_threshold(max(young, _YOUNG_OBJECTS_MAX), *old)
