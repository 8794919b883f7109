"""A clock around a user's function that measures it in Spark's workers, where it runs."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["clocked", "cost_s", "seconds"]

_cells: dict[str, Any] = {}


def clocked(function: Callable[..., Iterable[Any]], folder: str) -> Callable[..., Iterator[Any]]:
    """Return the function with a clock: each process notes in a file in `folder` the processor time spent in it."""

    def run_timed(key: Any, pdfs: Any, state: Any) -> Iterator[Any]:
        cell = _open_cell(folder)
        start = time.thread_time()
        for frame in function(key, pdfs, state):
            cell[0] += time.thread_time() - start
            yield frame
            start = time.thread_time()
        cell[0] += time.thread_time() - start

    return run_timed


def cost_s(folder: Path, calls: int = 20_000, repeats: int = 5) -> float:
    """Return the processor seconds that the clock adds to a call.

    The function that is measured does nothing, and its code stays in the processor's cache; among other work the clock
    takes longer. With and without the clock, the fastest repeat counts.
    """

    def do_nothing(key: Any, pdfs: Any, state: Any) -> Iterator[Any]:
        yield None

    def time_call(function: Callable[..., Iterable[Any]]) -> float:
        start = time.thread_time()
        for _ in range(calls):
            for _ in function(None, None, None):
                pass
        return (time.thread_time() - start) / calls

    folder.mkdir(parents=True, exist_ok=True)
    with_clock = clocked(do_nothing, str(folder))
    return min(time_call(with_clock) for _ in range(repeats)) - min(time_call(do_nothing) for _ in range(repeats))


def seconds(folder: Path) -> float:
    """Return the processor seconds that all processes have spent in the function so far."""
    return float(sum(struct.unpack("d", file.read_bytes())[0] for file in folder.glob("*.clock")))


def _open_cell(folder: str) -> Any:
    name = f"{folder}/{os.getpid()}.clock"
    if name not in _cells:
        with open(name, "w+b") as file:
            file.write(struct.pack("d", 0.0))
            file.flush()
            # Other processes see a change of a memory-mapped file at once, even if this process is killed right after
            # it. And a change needs no system call, which would cost time for each key.
            _cells[name] = memoryview(mmap.mmap(file.fileno(), 8)).cast("d")
    return _cells[name]
