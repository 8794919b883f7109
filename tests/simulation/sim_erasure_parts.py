"""Parts of the simulated query that is asked to erase keys: what stands beside pointers, processes, and attempts at tasks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from sim_parts import SCHEMA, Config, Held, Partition

from spark_state_ext.engine.erase_requests import EraseWatch
from spark_state_ext.engine.erased_rows import ErasedRows

__all__ = ["ErasureConfig", "Kept", "Memory", "Process", "Run", "Task", "rows_of_keys"]


@dataclass(frozen=True)
class ErasureConfig(Config):
    """What stays the same over a history.

    Parameters
    ----------
    partitions
        Over how many tasks the buckets are spread.
    switches
        There are runs that do not look for requests.
    """

    partitions: int = 1
    switches: bool = False


@dataclass(frozen=True)
class Kept(Held):
    """What Spark's state holds of a bucket, and beside it what it stands for.

    Parameters
    ----------
    rows
        Of each key, when its state began.
    carried
        Ids of the requests that the state was without once.
    late
        A late attempt of another run has written it over what was committed.
    waits
        Its call could not read a request.
    """

    rows: Mapping[int, int] = field(default_factory=dict)
    carried: frozenset[str] = frozenset()
    late: bool = False
    waits: bool = False


@dataclass
class Memory:
    """What an executor has of a partition."""

    loaded: dict[int, Partition] = field(default_factory=dict)


class Process:
    """An executor's."""

    def __init__(self, partitions: int) -> None:
        self.watch = EraseWatch()
        self.memory = [Memory() for _ in range(partitions)]


@dataclass
class Run:
    """A start of the query."""

    number: int
    looks: bool
    committed: int = 0


@dataclass
class Task:
    """An attempt at one."""

    run: Run
    batch: int
    began: int
    partition: int
    process: Process
    called: Sequence[int]
    heartbeat: bool
    handed_out: Partition
    chance: random.Random
    cleans: bool
    made: dict[int, Kept] = field(default_factory=dict)
    over: bool = False
    calls: Iterator[None] = field(default_factory=lambda: iter(()))


def rows_of_keys(rows: Mapping[int, int], columns: Sequence[pa.Array]) -> list[int]:
    """Which keys of a bucket a call takes away, by the rows that it finds."""
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
    found: list[int] = ErasedRows.found([live], columns, SCHEMA).rows.column(1).to_pylist()
    return found
