"""Quix Streams' state store: the running count and sum in its RocksDB, written as its Application writes it.

An Application takes its events from a Kafka broker, which is not part of this: the events come from the files, and what
is measured is `State` within one transaction of the store for each checkpoint, prepared and flushed after each batch,
as `Application(commit_every=...)` does it. Without a broker there is no changelog topic, so this is less than what
an Application does. Its default options: JSON for values, RocksDB's write-ahead log without fsync.

A variant is a way to count and a number of processes: ``events-2`` counts event by event, as functions of an
Application do, in two processes with a partition of the keys each. ``summed`` has the values of each key added up with
Arrow first, so that each key is read and written once a batch: the least that this store must be given.
"""

from __future__ import annotations

import multiprocessing
import queue
import sys
import time
from importlib import metadata
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from quixstreams.state.rocksdb import RocksDBStore

from benchmarks.peers.protocol import Task, leave, read_task

_WAYS = ("events", "summed")
VARIANTS = tuple(f"{way}-{processes}" for way in _WAYS for processes in (1, 2))
_STATE = "count"
_TIMEOUT_S = 1800.0

Row = tuple[bytes, int, float]


def _key_bytes(keys: npt.NDArray[np.int64]) -> list[bytes]:
    """Keys as they come from Kafka: bytes."""
    # A void view is the fastest way to many small bytes objects, and keeps trailing zeros.
    parts: list[bytes] = keys.astype(">i8").view(np.dtype((np.void, 8))).tolist()
    return parts


def _batch(store: Any, partition: int, table: pa.Table, summed: bool) -> list[Row]:
    """Process one batch and flush its checkpoint; returns the rows to put out."""
    rows: list[Row] = []
    transaction = store.start_partition_transaction(partition)
    if summed:
        table = table.group_by("key").aggregate([("value", "count"), ("value", "sum")])
        counts, values = table["value_count"].to_pylist(), table["value_sum"].to_pylist()
    else:
        counts, values = [1] * table.num_rows, table["value"].to_pylist()
    for key, count, value in zip(_key_bytes(table["key"].to_numpy()), counts, values, strict=True):
        state = transaction.as_state(prefix=key)
        n, total = state.get(_STATE) or (0, 0.0)
        n += count
        total += value
        state.set(_STATE, (n, total))
        rows.append((key, n, total))
    transaction.prepare()
    transaction.flush()
    return rows


def _partition(task: Task, partition: int, partitions: int, barrier: Barrier, results: Any) -> None:
    """Process one partition of every batch; its times and its final states go to `results`."""
    store = RocksDBStore(name="default", stream_id="events", base_dir=str(task.work / "state"))
    store.assign_partition(partition)
    edges: list[tuple[float, float]] = []
    put_out = 0
    keys: set[bytes] = set()
    for files in task.files():
        barrier.wait(_TIMEOUT_S)
        start = time.perf_counter()
        table = pa.concat_tables([pq.read_table(path) for path in files])
        if partitions > 1:
            # Kafka's producer would have done that: only the own events are read from a topic.
            table = table.filter(pa.array(table["key"].to_numpy() % partitions == partition))
        rows = _batch(store, partition, table, task.variant.startswith("summed"))
        edges.append((start, time.perf_counter()))
        put_out += len(rows)
        keys.update(key for key, _, _ in rows)
    store.close()
    # Opened again: what is there now is what a restart finds.
    store.assign_partition(partition)
    transaction = store.start_partition_transaction(partition)
    states = [transaction.as_state(prefix=key).get(_STATE) for key in keys]
    store.close()
    plain = [int.from_bytes(key, "big", signed=True) for key in keys]
    results.put((edges, put_out, plain, [n for n, _ in states], [total for _, total in states]))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> int:
    """Run all partitions and put together what they leave."""
    task = read_task(VARIANTS, __doc__)
    processes = int(task.variant.split("-")[1])
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(processes), context.Queue()
    running = [
        context.Process(target=_partition, args=(task, number, processes, barrier, results), daemon=True)
        for number in range(processes)
    ]
    for one in running:
        one.start()
    left: list[Any] = []
    while len(left) < processes:
        try:
            left.append(results.get(timeout=1))
        except queue.Empty:
            if any(one.exitcode for one in running):
                print("a process failed", file=sys.stderr)
                return 1  # the other ends with this one
    # A batch ends when the slowest partition is done with it.
    each = [
        max(stop for _, stop in edges) - min(start for start, _ in edges)
        for edges in zip(*(edges for edges, *_ in left), strict=True)
    ]
    keys, n, total = ([value for one in left for value in one[column]] for column in (2, 3, 4))
    leave(
        task,
        each,
        keys,
        n,
        total,
        {
            "durability": "RocksDB's write-ahead log without fsync, and no changelog topic",
            "rows put out": sum(one[1] for one in left),
            "bytes of the store": _size(task.work / "state"),
            "version": metadata.version("quixstreams"),
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
