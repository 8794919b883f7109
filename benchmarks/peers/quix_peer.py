"""The running count and sum in the state store of Quix Streams, which is RocksDB, used as its Application does.

An Application reads its events from a Kafka broker. This benchmark has no broker and reads them from files. It measures
`State` in one transaction of the store for each batch, which is prepared and flushed after the batch, as
`Application(commit_every=...)` does for each checkpoint. Without a broker there is no changelog topic, so this is less
work than an Application does. The store has its default options: JSON for values, and RocksDB's write-ahead log without
fsync.

A variant is a way to count and a number of processes. ``events-2`` counts event by event, as functions of an
Application do, in two processes with one partition of the keys each. ``summed`` first adds up the values of each key
with Arrow, so that each key is read and written only once in a batch: the least work that the store can be given.
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
    """Return keys as bytes, the form in which Kafka delivers them."""
    # A void view is the fastest way to create many small bytes objects, and it keeps trailing zeros.
    key_bytes: list[bytes] = keys.astype(">i8").view(np.dtype((np.void, 8))).tolist()
    return key_bytes


def _process_batch(store: Any, partition: int, table: pa.Table, summed: bool) -> list[Row]:
    """Process one batch and flush its transaction; return the output rows."""
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


def _process_partition(task: Task, partition: int, partitions: int, barrier: Barrier, results: Any) -> None:
    """Process one partition of every batch, and put its times and final states into `results`."""
    store = RocksDBStore(name="default", stream_id="events", base_dir=str(task.work / "state"))
    store.assign_partition(partition)
    edges: list[tuple[float, float]] = []
    output_rows = 0
    keys: set[bytes] = set()
    for files in task.files():
        barrier.wait(_TIMEOUT_S)
        start = time.perf_counter()
        table = pa.concat_tables([pq.read_table(path) for path in files])
        if partitions > 1:
            # Kafka's producer would have partitioned the events, and each process would read only its partition.
            table = table.filter(pa.array(table["key"].to_numpy() % partitions == partition))
        rows = _process_batch(store, partition, table, task.variant.startswith("summed"))
        edges.append((start, time.perf_counter()))
        output_rows += len(rows)
        keys.update(key for key, _, _ in rows)
    store.close()
    # The store is opened again to read the states that a restart would find.
    store.assign_partition(partition)
    transaction = store.start_partition_transaction(partition)
    states = [transaction.as_state(prefix=key).get(_STATE) for key in keys]
    store.close()
    int_keys = [int.from_bytes(key, "big", signed=True) for key in keys]
    results.put((edges, output_rows, int_keys, [n for n, _ in states], [total for _, total in states]))


def _sum_file_sizes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> int:
    """Run all partitions, each in a separate process, and write their combined results."""
    task = read_task(VARIANTS, __doc__)
    processes = int(task.variant.split("-")[1])
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(processes), context.Queue()
    running = [
        context.Process(target=_process_partition, args=(task, number, processes, barrier, results), daemon=True)
        for number in range(processes)
    ]
    for one in running:
        one.start()
    outcomes: list[Any] = []
    while len(outcomes) < processes:
        try:
            outcomes.append(results.get(timeout=1))
        except queue.Empty:
            if any(one.exitcode for one in running):
                print("the process of a partition failed", file=sys.stderr)
                return 1  # the other processes are daemons and end with this one
    # A batch lasts from the start of its first partition to the end of its last.
    batch_seconds = [
        max(stop for _, stop in edges) - min(start for start, _ in edges)
        for edges in zip(*(edges for edges, *_ in outcomes), strict=True)
    ]
    keys, n, total = ([value for one in outcomes for value in one[column]] for column in (2, 3, 4))
    leave(
        task,
        batch_seconds,
        keys,
        n,
        total,
        {
            "durability": "RocksDB's write-ahead log without fsync, and no changelog topic",
            "rows put out": sum(one[1] for one in outcomes),
            "bytes of the store": _sum_file_sizes(task.work / "state"),
            "version": metadata.version("quixstreams"),
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
