"""The floor: the time of the user's function itself, without Spark and without a state store.

As many plain Python processes as the job has cores, each with an equal share of the keys, call the same function on the
same per-key frames at the same time. Only the time within the function is measured: not that of cutting frames,
preparing state objects, or collecting the garbage of earlier work. No engine that calls the function once for each key
can take less.
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

# How many frames are prepared at a time. They are few, so that a call finds its frame in the processor's cache, as in a
# job that makes each frame just before the call. If all frames are made in advance, the function takes longer.
_CHUNK_KEYS = 256
_ANSWER_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class FloorTime:
    """One measurement of the floor.

    Parameters
    ----------
    wall_s
        Seconds that the slowest process spent in the function.
    cpu_s
        Processor seconds that all processes together spent in the function.
    """

    wall_s: float
    cpu_s: float


class PlainState:
    """The smallest state object that the function can work with."""

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
    """The processes that measure the floor; a context manager.

    Parameters
    ----------
    processes
        Number of processes, which work at the same time.
    keys
        All keys that the batches will have. Each process gets an equally large range of them.
    """

    def __init__(self, processes: int, keys: npt.NDArray[np.int64]) -> None:
        parts = np.array_split(np.unique(keys), processes)
        self._borders = [int(part[0]) for part in parts[1:]]
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(processes):
            parent_end, child_end = context.Pipe()
            process = context.Process(target=_serve, args=(child_end,), daemon=True)
            process.start()
            child_end.close()
            self._pipes.append(parent_end)
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
        """Go on to the next batch (columns ``key`` and ``value``), with the state that the previous batch left."""
        owner = np.searchsorted(self._borders, events["key"].to_numpy(), side="right")
        for i, pipe in enumerate(self._pipes):
            pipe.send(("batch", events[owner == i]))
        self._receive_answers()

    def measure(self) -> FloorTime:
        """Measure the time that the function takes for the batch, with all processes at work.

        This may be repeated: each measurement begins with the state before the batch.
        """
        for pipe in self._pipes:
            pipe.send(("measure", None))
        answers = self._receive_answers()
        return FloorTime(max(wall for wall, _ in answers), sum(cpu for _, cpu in answers))

    def answer(self) -> pd.DataFrame:
        """Return the state of all keys after the measured batch, in the form of `counting.expected`."""
        for pipe in self._pipes:
            pipe.send(("answer", None))
        states: list[pd.DataFrame] = self._receive_answers()
        return pd.concat(states).sort_values("key", ignore_index=True)

    def _receive_answers(self) -> list[Any]:
        received = []
        for pipe in self._pipes:
            try:
                if not pipe.poll(_ANSWER_TIMEOUT_S):
                    raise BenchmarkError(f"a process of the floor did not answer within {_ANSWER_TIMEOUT_S:.0f} s")
                received.append(pipe.recv())
            except EOFError:
                raise BenchmarkError("a process of the floor died: see its error above") from None
        return received


def _serve(pipe: Connection) -> None:
    """Carry out the commands from a pipe, in a process of the floor, until the other side closes the pipe."""
    before: dict[int, tuple[Any, ...]] = {}
    after: dict[int, tuple[Any, ...]] = {}
    events = pd.DataFrame()
    while True:
        try:
            command, content = pipe.recv()
        except EOFError:
            return
        if command == "batch":
            before, events = {**before, **after}, content
            pipe.send(None)
        elif command == "measure":
            time_taken, after = _measure(events, before)
            pipe.send(time_taken)
        else:
            rows = [(key, *value) for key, value in {**before, **after}.items()]
            pipe.send(pd.DataFrame(rows, columns=["key", "n", "total"]))


def _measure(
    events: pd.DataFrame, before: dict[int, tuple[Any, ...]]
) -> tuple[tuple[float, float], dict[int, tuple[Any, ...]]]:
    """Return the wall and processor seconds in the function for a batch, and the new states of its keys."""
    after: dict[int, tuple[Any, ...]] = {}
    wall, cpu = 0.0, 0.0
    # Freeze existing objects, so that the garbage collector does not scan them during the function's time.
    gc.collect()
    gc.freeze()
    try:
        for calls in _prepare_calls(events, before):
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


def _prepare_calls(
    events: pd.DataFrame, before: dict[int, tuple[Any, ...]]
) -> Iterator[list[tuple[tuple[Any, ...], pd.DataFrame, Any]]]:
    """Yield calls, some at a time, as key (a tuple of NumPy scalars, as Spark gives it), frame and state."""
    events_by_key = events.sort_values("key", kind="stable")
    calls: list[tuple[tuple[Any, ...], pd.DataFrame, Any]] = []
    for name, frame in events_by_key.groupby("key", sort=False):
        frame.index = pd.RangeIndex(len(frame))
        key = np.int64(name)  # type: ignore[arg-type]  # here a group's name is an integer
        calls.append(((key,), frame, PlainState(before.get(int(key)))))
        if len(calls) == _CHUNK_KEYS:
            yield calls
            calls = []
    if calls:
        yield calls
