"""Returning unused memory to the operating system."""

from __future__ import annotations

import platform
import subprocess
import sys
import textwrap

import pytest

from spark_state_ext.worker import memory

_GNU_MEMORY = """
    import ctypes
    from pathlib import Path

    from spark_state_ext.worker.memory import release_memory

    def anonymous_kib():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    c = ctypes.CDLL(None)
    c.malloc.restype = ctypes.c_void_p
    c.free.argtypes = [ctypes.c_void_p]
    pieces = [c.malloc(20_000) for _ in range(4_000)]
    for piece in pieces:
        ctypes.memset(piece, 1, 20_000)
    # Every tenth piece stays in use, so the free memory between them does not reach the end of the heap.
    for at, piece in enumerate(pieces):
        if at % 10:
            c.free(piece)
    before = anonymous_kib()
    release_memory(after_bytes=1 << 30)
    print(before, anonymous_kib())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no malloc_trim to be called")
def test_release_memory_returns_free_memory_between_used_pieces() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_GNU_MEMORY)], capture_output=True, text=True, check=True
    )
    before, after = map(int, done.stdout.split())
    assert before - after > 40_000


_STORES = """
    import ctypes
    import sys
    import tempfile
    from pathlib import Path

    import numpy as np
    import pyarrow as pa

    from arrow_schemas.row import RowSchema
    from spark_state_ext.store import LocalStore
    from spark_state_ext.worker.memory import tune_memory

    def anonymous_kib():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    if sys.argv[1] == "tuned":
        tune_memory()
    # Like in a worker, large arrays come and go, and the C library keeps their memory.
    np.ones(3 << 20)
    before = anonymous_kib()
    used = [(np.ones(3 << 17), np.ones(1 << 14)) for _ in range(80)]
    kept = [small for _, small in used]
    del used
    schema = RowSchema((pa.field("k", pa.int64()),), (pa.field("n", pa.int64()),))
    with tempfile.TemporaryDirectory() as folder:
        stores = [LocalStore.at(Path(folder) / str(at), schema) for at in range(40)]
        ctypes.CDLL(None).malloc_trim(0)
        print((anonymous_kib() - before) / len(stores))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such threshold")
def test_an_open_store_takes_little_memory_after_large_arrays() -> None:
    def kib_a_store(how: str) -> float:
        code = [sys.executable, "-c", textwrap.dedent(_STORES), how]
        return float(subprocess.run(code, capture_output=True, text=True, check=True).stdout)

    # LMDB requests 3 MiB for each store. The first assertion shows that the second one can fail.
    assert kib_a_store("untuned") > 1_000
    assert kib_a_store("tuned") < 600


def test_release_memory_does_nothing_without_malloc_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: object) -> object:
        raise OSError("no such library")

    memory._trim.cache_clear()
    monkeypatch.setattr("ctypes.CDLL", refuse)
    try:
        memory.release_memory(after_bytes=1 << 30)
    finally:
        memory._trim.cache_clear()


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of bytes after which memory was released, for each release."""
    releases: list[int] = []
    monkeypatch.setattr(memory, "release_memory", releases.append)
    return releases


def test_memory_is_released_once_after_large_calls(releases: list[int]) -> None:
    calls = memory.CallSizes()
    for size in [90, 90, 100, 25, 26, 25]:
        calls.note("a", size)
    assert releases == []
    calls.note("a", 25)
    assert releases == [100]
    for _ in range(1_000):
        calls.note("a", 25)
    assert releases == [100], "memory is released only once"


def test_calls_of_small_buckets_next_to_a_large_one_release_no_memory(releases: list[int]) -> None:
    calls = memory.CallSizes()
    for _ in range(100):
        for bucket, size in [("large", 100), *[(f"small {i}", 1) for i in range(20)]]:
            calls.note(bucket, size)
    assert releases == []


def test_calls_of_similar_size_release_no_memory(releases: list[int]) -> None:
    calls = memory.CallSizes()
    for at in range(1_000):
        calls.note("a", 100 + at % 7)
    assert releases == []
