"""Parts of the simulated query with erase requests: states next to pointers, processes, and attempts at tasks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from sim_parts import SCHEMA, BucketState, Config, Partition

from spark_state_ext.engine.erase_requests import EraseWatch
from spark_state_ext.engine.erased_rows import ErasedRows

__all__ = ["ErasureConfig", "ErasedState", "Memory", "Process", "Run", "Task", "find_erased_keys"]


@dataclass(frozen=True)
class ErasureConfig(Config):
    """Configuration of a history.

    Parameters
    ----------
    partitions
        Number of tasks that the buckets are spread over.
    switches
        Whether some runs do not look for requests.
    """

    partitions: int = 1
    switches: bool = False


@dataclass(frozen=True)
class ErasedState(BucketState):
    """What Spark's state holds of a bucket, with the state that it stands for.

    Parameters
    ----------
    rows
        By key, when its state began.
    carried
        Ids of the requests that the state reflects: its keys were removed at some time.
    late
        Whether a late attempt of another run wrote it over the committed one.
    waits
        Whether its call could not read a request.
    """

    rows: Mapping[int, int] = field(default_factory=dict)
    carried: frozenset[str] = frozenset()
    late: bool = False
    waits: bool = False


@dataclass
class Memory:
    """What an executor's memory holds of a partition."""

    loaded: dict[int, Partition] = field(default_factory=dict)


class Process:
    """A worker process of an executor."""

    def __init__(self, partitions: int, wall_s: Callable[[], float]) -> None:
        self.watch = EraseWatch(wall_s)
        self.memory = [Memory() for _ in range(partitions)]


@dataclass
class Run:
    """A run of the query."""

    number: int
    looks: bool
    committed: int = 0


@dataclass
class Task:
    """An attempt at a task."""

    run: Run
    batch: int
    began_at: int
    partition: int
    process: Process
    called: Sequence[int]
    heartbeat: bool
    handed_out: Partition
    chance: random.Random
    cleans: bool
    results: dict[int, ErasedState] = field(default_factory=dict)
    has_ended: bool = False
    calls: Iterator[None] = field(default_factory=lambda: iter(()))


def find_erased_keys(rows: Mapping[int, int], columns: Sequence[pa.Array]) -> list[int]:
    """Return the keys of a bucket that a call erases, according to the rows that it finds."""
    keys = sorted(rows)
    count = len(keys)
    arrays = [
        pa.array(keys, pa.uint64()),
        pa.array(keys, pa.int64()),
        pa.array(keys, pa.int64()),
        pa.nulls(count, pa.int64()),
        pa.array([True] * count),
        pa.array([False] * count),
    ]
    live = pa.RecordBatch.from_arrays(arrays, schema=SCHEMA.arrow)
    erased: list[int] = ErasedRows.found([live], columns, SCHEMA).rows.column(1).to_pylist()
    return erased
