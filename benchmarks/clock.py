"""A clock around a user's function, where it runs: in Spark's workers."""

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
    """The same function; each process notes in a file in `folder` the processor time it has spent in it."""

    def timed(key: Any, pdfs: Any, state: Any) -> Iterator[Any]:
        cell = _cell(folder)
        start = time.thread_time()
        for frame in function(key, pdfs, state):
            cell[0] += time.thread_time() - start
            yield frame
            start = time.thread_time()
        cell[0] += time.thread_time() - start

    return timed


def cost_s(folder: Path, calls: int = 20_000, repeats: int = 5) -> float:
    """Processor seconds that a clock takes around one call: the least of some measurements with a function that does
    nothing, whose code stays in the processor's cache; among other work it takes more."""

    def nothing(key: Any, pdfs: Any, state: Any) -> Iterator[Any]:
        yield None

    def once(function: Callable[..., Iterable[Any]]) -> float:
        start = time.thread_time()
        for _ in range(calls):
            for _ in function(None, None, None):
                pass
        return (time.thread_time() - start) / calls

    folder.mkdir(parents=True, exist_ok=True)
    with_clock = clocked(nothing, str(folder))
    return min(once(with_clock) for _ in range(repeats)) - min(once(nothing) for _ in range(repeats))


def seconds(folder: Path) -> float:
    """Processor seconds spent in the function so far, in all processes."""
    return float(sum(struct.unpack("d", file.read_bytes())[0] for file in folder.glob("*.clock")))


def _cell(folder: str) -> Any:
    name = f"{folder}/{os.getpid()}.clock"
    if name not in _cells:
        with open(name, "w+b") as file:
            file.write(struct.pack("d", 0.0))
            file.flush()
            # Seen by whoever reads the file at once, also when this process is killed; no call to the system per key.
            _cells[name] = memoryview(mmap.mmap(file.fileno(), 8)).cast("d")
    return _cells[name]
