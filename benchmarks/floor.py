"""The floor: what the user's function costs by itself, without Spark and without any state store.

Plain Python processes, as many as the job has cores, each with the same number of keys, call the very same function on
the same per-key frames at the same time. The clock runs only while the function does: cutting frames, preparing state
objects and collecting garbage of the preparation are not in it. So this is the least that any engine that
calls the function once a key must take.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from benchmarks.counting import count_and_sum
from benchmarks.report import BenchmarkError

__all__ = ["Floor", "FloorTime"]

# Frames prepared at a time: few, so that a call finds its frame in the processor's cache, as in a job that makes each
# frame just before the call. With all frames made in advance the function takes longer.
_CHUNK_KEYS = 256
_ANSWER_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class FloorTime:
    """One measurement.

    Parameters
    ----------
    wall_s
        Seconds until the slowest process was done.
    cpu_s
        Processor seconds of all processes together.
    """

    wall_s: float
    cpu_s: float


class PlainState:
    """As little as a state object can be and still serve the function."""

    __slots__ = ("_value",)

    def __init__(self, value: tuple[Any, ...] | None) -> None:
        self._value = value

    @property
    def exists(self) -> bool:
        """Whether there is state."""
        return self._value is not None

    @property
    def get(self) -> tuple[Any, ...] | None:
        """The state."""
        return self._value

    def update(self, value: tuple[Any, ...]) -> None:
        """Replace the state."""
        self._value = value


class Floor:
    """Processes that measure the floor; a context manager.

    Parameters
    ----------
    processes
        How many work at the same time.
    keys
        All keys there will be. Each process gets a range of them, equally many.
    """

    def __init__(self, processes: int, keys: npt.NDArray[np.int64]) -> None:
        parts = np.array_split(np.unique(keys), processes)
        self._borders = [int(part[0]) for part in parts[1:]]
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Floor:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.join(10)
            if process.is_alive():
                process.terminate()
                process.join()

    def next_batch(self, events: pd.DataFrame) -> None:
        """Go on to a batch's events (columns ``key`` and ``value``): the state becomes that after the batch before."""
        owner = np.searchsorted(self._borders, events["key"].to_numpy(), side="right")
        for i, pipe in enumerate(self._pipes):
            pipe.send(("batch", events[owner == i]))
        self._answers()

    def measure(self) -> FloorTime:
        """Time that the function takes for the batch, all processes working.

        May be repeated: it begins with the state before the batch each time.
        """
        for pipe in self._pipes:
            pipe.send(("measure", None))
        answers = self._answers()
        return FloorTime(max(wall for wall, _ in answers), sum(cpu for _, cpu in answers))

    def answer(self) -> pd.DataFrame:
        """State of all keys after the batch, as `counting.expected` gives it."""
        for pipe in self._pipes:
            pipe.send(("answer", None))
        states: list[pd.DataFrame] = self._answers()
        return pd.concat(states).sort_values("key", ignore_index=True)

    def _answers(self) -> list[Any]:
        found = []
        for pipe in self._pipes:
            try:
                if not pipe.poll(_ANSWER_TIMEOUT_S):
                    raise BenchmarkError(f"a floor process gave no answer in {_ANSWER_TIMEOUT_S:.0f} s")
                found.append(pipe.recv())
            except EOFError:
                raise BenchmarkError("a floor process died; its error is above") from None
        return found


def _serve(pipe: Connection) -> None:
    """One process's loop; it ends when the other side closes the pipe."""
    before: dict[int, tuple[Any, ...]] = {}
    after: dict[int, tuple[Any, ...]] = {}
    events = pd.DataFrame()
    while True:
        try:
            order, content = pipe.recv()
        except EOFError:
            return
        if order == "batch":
            before, events = {**before, **after}, content
            pipe.send(None)
        elif order == "measure":
            time_taken, after = _measure(events, before)
            pipe.send(time_taken)
        else:
            rows = [(key, *value) for key, value in {**before, **after}.items()]
            pipe.send(pd.DataFrame(rows, columns=["key", "n", "total"]))


def _measure(
    events: pd.DataFrame, before: dict[int, tuple[Any, ...]]
) -> tuple[tuple[float, float], dict[int, tuple[Any, ...]]]:
    """Wall and processor seconds in the function for all keys of a batch, and the state it leaves for them."""
    after: dict[int, tuple[Any, ...]] = {}
    wall, cpu = 0.0, 0.0
    # What lives already is not the function's: the collector shall not go through it on the function's time.
    gc.collect()
    gc.freeze()
    try:
        for calls in _prepared(events, before):
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            for key, frame, state in calls:
                for _ in count_and_sum(key, iter((frame,)), state):
                    pass
            wall += time.perf_counter() - wall_start
            cpu += time.process_time() - cpu_start
            for key, _, state in calls:
                after[int(key[0])] = state.get
    finally:
        gc.unfreeze()
    return (wall, cpu), after


def _prepared(
    events: pd.DataFrame, before: dict[int, tuple[Any, ...]]
) -> Iterator[list[tuple[tuple[Any, ...], pd.DataFrame, Any]]]:
    """Calls to make, some at a time: key as Spark gives it (a tuple of NumPy scalars), frame, state."""
    ordered = events.sort_values("key", kind="stable")
    calls: list[tuple[tuple[Any, ...], pd.DataFrame, Any]] = []
    for name, frame in ordered.groupby("key", sort=False):
        frame.index = pd.RangeIndex(len(frame))
        key = np.int64(name)  # type: ignore[arg-type]  # the group's name, an integer here
        calls.append(((key,), frame, PlainState(before.get(int(key)))))
        if len(calls) == _CHUNK_KEYS:
            yield calls
            calls = []
    if calls:
        yield calls
