"""Return memory that a worker process no longer uses to the system."""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable

import pyarrow as pa

__all__ = ["CallSizes", "release_memory", "tune_memory"]

# After work over at most this many bytes, freeing memory is not worth the milliseconds it takes.
_TRIMMED_BYTES_MIN = 8 << 20
# A call is small if it changes at most a quarter as many bytes as the bucket's largest call.
_SMALL_PART = 4
# How many small calls of a bucket in a row mean that its large calls are over.
_SMALL_CALLS = 2


def release_memory(after_bytes: int) -> None:
    """Return unused memory to the system after work over many bytes, such as a merge of large runs or a snapshot.

    A worker lives as long as its query. Its allocators keep freed memory for later work; other processes cannot use it,
    and it grows with every larger piece of work. Trimming takes some milliseconds, and so does getting the memory
    again, so it is not done after every call. It uses ``malloc_trim``, as Dask's workers do; Arrow's function to trim
    the C library's memory does nothing in its wheels.
    """
    if after_bytes <= _TRIMMED_BYTES_MIN:
        return
    pa.default_memory_pool().release_unused()
    _trim()(0)


class CallSizes:
    """Sizes of a process's calls: frees memory once a bucket's large calls are over, for instance after a backlog.

    They are kept by bucket, because a few large buckets may be among many small ones.
    """

    def __init__(self) -> None:
        # By bucket: bytes of the largest call, and how many small calls followed.
        self._calls: dict[str, tuple[int, int]] = {}

    def note(self, bucket: str, changed_bytes: int) -> None:
        """Record a call of a bucket and how many bytes of state it changed; free memory if large calls are over."""
        largest_bytes, small_calls = self._calls.get(bucket, (0, 0))
        if changed_bytes * _SMALL_PART > largest_bytes:
            self._calls[bucket] = max(largest_bytes, changed_bytes), 0
        elif small_calls + 1 < _SMALL_CALLS:
            self._calls[bucket] = largest_bytes, small_calls + 1
        else:
            self._calls[bucket] = changed_bytes, 0
            release_memory(largest_bytes)


@functools.lru_cache(maxsize=1)
def _trim() -> Callable[[int], object]:
    """Return the C library's `malloc_trim`, or a function that does nothing if it is not GNU's library.

    LMDB, NumPy and Arrow's small objects use memory of the C library; only GNU's library needs trimming.
    """
    try:
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return lambda _: None
    return trim


# Parameter numbers of GNU's `mallopt`, from its headers.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# LMDB allocates 1 MiB and 2 MiB with each environment, and uses little of it.
_MAPPED_BYTES_MIN = 1 << 20
# The threshold that the C library's adaptive rule, which fixed values disable, reaches in a process with large arrays.
_TRIM_BYTES = 64 << 20


def _map_large_allocations() -> None:
    """Have the C library map each large allocation separately, as new pages that take no memory until they are used.

    By default it raises the threshold for this to the largest allocation that was ever freed. From then on, the two
    tables of each open LMDB environment reuse memory of arrays with all its pages: 3 MB per store instead of 0.2 MB.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES_MIN)
    mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)


# How many allocated objects that are not freed yet start a young garbage collection; Python's default is 700.
_YOUNG_OBJECTS_MAX = 5_000


@functools.cache
def tune_memory() -> None:
    """Tune memory once per worker process: map large allocations, and make garbage collections rarer and cheaper.

    Objects alive now, mostly modules, are never freed, but each full collection would visit all of them. And functions
    that make data frames for thousands of keys allocate so many objects that young collections would run all the time.
    """
    _map_large_allocations()
    gc.collect()
    gc.freeze()
    young, *old = gc.get_threshold()
    if young:  # zero means that collections are disabled
        gc.set_threshold(max(young, _YOUNG_OBJECTS_MAX), *old)
