"""Bytewax: the running count and sum with recovery on, each batch an epoch that is snapshotted.

Bytewax ends an epoch when a source has given out a batch and the epoch's interval is over. With an interval of nothing
each batch is an epoch, and the source is asked for the next one only when all snapshots of the last are in the recovery
store (SQLite, write-ahead log, its default synchronisation) and committed. So the time of a batch is from one call to
the next: reading the files, every output row, and the snapshot.

A variant is a way to count and a number of workers: ``batch-2x1`` is `op.stateful_batch` in two processes of one worker
each, ``map-1x2`` is `op.stateful_map` in one process of two. ``summed`` is ``batch`` after the source has added up the
values of each key with Arrow: no way that Bytewax proposes, and the least that its operator must be given.
"""

from __future__ import annotations

import json
import pickle
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from bytewax import operators as op
from bytewax.dataflow import Dataflow
from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.run import cli_main

from benchmarks.peers.protocol import Task, leave, read_task

_WAYS = ("map", "flat_map", "batch", "summed")
_WORKERS = ("1x1", "1x2", "2x1")
VARIANTS = tuple(f"{way}-{workers}" for way in _WAYS for workers in _WORKERS)
_PROCESS = "process "

State = tuple[int, float]


# -- the job -------------------------------------------------------------------------------------------


def count(state: State | None, value: float) -> tuple[State, State]:
    """Count one event; returns the new state and what to put out."""
    n, total = state or (0, 0.0)
    now = (n + 1, total + value)
    return now, now


def flat_count(state: State | None, value: float) -> tuple[State, tuple[State]]:
    """The same, for an operator that may put out several rows."""
    now, out = count(state, value)
    return now, (out,)


class Count(op.StatefulBatchLogic[float, State, State]):
    """Count the events of one key that arrive together."""

    __slots__ = ("_n", "_total")

    def __init__(self, state: State | None) -> None:
        self._n, self._total = state or (0, 0.0)

    def on_batch(self, values: list[float]) -> tuple[Iterable[State], bool]:
        """Add events; a row for all of them."""
        self._n += len(values)
        self._total += sum(values)
        return [(self._n, self._total)], False

    def snapshot(self) -> State:
        """What recovery keeps."""
        return self._n, self._total


class CountSums(op.StatefulBatchLogic[State, State, State]):
    """Add up counts and sums of one key that were made before."""

    __slots__ = ("_n", "_total")

    def __init__(self, state: State | None) -> None:
        self._n, self._total = state or (0, 0.0)

    def on_batch(self, values: list[State]) -> tuple[Iterable[State], bool]:
        """Add them; a row for all of them."""
        for n, total in values:
            self._n += n
            self._total += total
        return [(self._n, self._total)], False

    def snapshot(self) -> State:
        """What recovery keeps."""
        return self._n, self._total


# -- files in, rows out --------------------------------------------------------------------------------


class _Batches(StatefulSourcePartition[Any, int]):
    """A worker's share of the files of each batch."""

    def __init__(self, batches: list[list[Path]], start: int, summed: bool, asked: list[float]) -> None:
        self._batches = batches
        self._next = start
        self._summed = summed
        self._asked = asked

    def next_batch(self) -> Iterable[Any]:
        """All events of the next batch."""
        self._asked.append(time.perf_counter())
        if self._next == len(self._batches):
            raise StopIteration
        files = self._batches[self._next]
        self._next += 1
        table = pa.concat_tables([pq.read_table(path) for path in files])
        if self._summed:
            table = table.group_by("key").aggregate([("value", "count"), ("value", "sum")])
            sums = zip(table["value_count"].to_pylist(), table["value_sum"].to_pylist(), strict=True)
            return list(zip(_names(table), sums, strict=True))
        return list(zip(_names(table), table["value"].to_pylist(), strict=True))

    def snapshot(self) -> int:
        """Where to go on."""
        return self._next


def _names(table: pa.Table) -> list[str]:
    """Keys must be strings."""
    names: list[str] = pc.cast(table["key"], pa.string()).to_pylist()
    return names


class _Source(FixedPartitionedSource[Any, int]):
    """A partition a worker; each has every so many-th file."""

    def __init__(self, batches: list[list[Path]], workers: int, summed: bool, asked: dict[str, list[float]]) -> None:
        self._batches = batches
        self._workers = workers
        self._summed = summed
        self._asked = asked

    def list_parts(self) -> list[str]:
        """All of them: each worker could read each file."""
        return [str(worker) for worker in range(self._workers)]

    def build_part(self, step_id: str, for_part: str, resume_state: int | None) -> _Batches:
        """Open one."""
        shares = [files[int(for_part) :: self._workers] for files in self._batches]
        return _Batches(shares, resume_state or 0, self._summed, self._asked.setdefault(for_part, []))


class _Rows(StatelessSinkPartition[Any]):
    def __init__(self, rows: list[tuple[str, State]], last: list[float]) -> None:
        self._rows = rows
        self._last = last

    def write_batch(self, items: list[tuple[str, State]]) -> None:
        """Keep them."""
        self._rows.extend(items)
        self._last[0] = time.perf_counter()


class _Sink(DynamicSink[Any]):
    """Keeps all rows in memory; Spark's drops them, Flink's writes them to files."""

    def __init__(self) -> None:
        self.rows: list[list[tuple[str, State]]] = []
        """By worker."""
        self.last = [0.0]
        """When the last row came."""

    def build(self, step_id: str, worker_index: int, worker_count: int) -> _Rows:
        """For one worker."""
        self.rows.append([])
        return _Rows(self.rows[-1], self.last)


def _flow(way: str, source: _Source, sink: _Sink) -> Dataflow:
    flow = Dataflow("keyed_count")
    events = op.input("events", flow, source)
    if way == "map":
        counted = op.stateful_map("count", events, count)
    elif way == "flat_map":
        counted = op.stateful_flat_map("count", events, flat_count)
    else:
        counted = op.stateful_batch("count", events, Count if way == "batch" else CountSums)
    op.output("rows", counted, sink)
    return flow


# -- processes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Left:
    """What one process left."""

    asked: dict[str, list[float]]
    last_row: float
    rows: int
    newest: dict[str, State]


def _process(task: Task, way: str, processes: int, threads: int, number: int, addresses: list[str]) -> None:
    """Be one of the processes of a cluster."""
    asked: dict[str, list[float]] = {}
    sink = _Sink()
    flow = _flow(way, _Source(task.files(), processes * threads, way == "summed", asked), sink)
    cli_main(
        flow,
        workers_per_process=threads,
        process_id=number if processes > 1 else None,
        addresses=addresses if processes > 1 else None,
        epoch_interval=timedelta(0),
        # Snapshots that are no longer needed are removed at once: the default.
        recovery_config=RecoveryConfig(task.work / "recovery", timedelta(0)),
    )
    newest: dict[str, State] = {}
    for rows in sink.rows:
        newest.update(rows)
    left = _Left(asked, sink.last[0], sum(len(rows) for rows in sink.rows), newest)
    (task.work / f"left-{number}.pickle").write_bytes(pickle.dumps(vars(left)))


def _free_addresses(count: int) -> list[str]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in held]
    for one in held:
        one.close()
    return addresses


def _stored(recovery: Path) -> dict[str, State]:
    """The states that a restart would find: the newest snapshot of each key."""
    found: dict[str, State] = {}
    for path in sorted(recovery.glob("*.sqlite3")):
        with sqlite3.connect(path) as database:
            rows = database.execute(
                "SELECT state_key, ser_change, MAX(snap_epoch) FROM snaps "
                "WHERE step_id NOT LIKE '%.events' GROUP BY step_id, state_key"
            )
            found.update({key: pickle.loads(state) for key, state, _ in rows})
    return found


def main() -> int:
    """Run all processes and put together what they leave."""
    # A process of the cluster is told its number and the addresses before everything else.
    if len(sys.argv) > 1 and sys.argv[1].startswith(_PROCESS):
        told = json.loads(sys.argv.pop(1).removeprefix(_PROCESS))
        task = read_task(VARIANTS)
        way, workers = task.variant.split("-")
        processes, threads = map(int, workers.split("x"))
        _process(task, way, processes, threads, told["number"], told["addresses"])
        return 0
    task = read_task(VARIANTS, __doc__)
    processes, threads = map(int, task.variant.split("-")[1].split("x"))
    (task.work / "recovery").mkdir()
    init_db_dir(task.work / "recovery", processes * threads)
    addresses = _free_addresses(processes)
    running = []
    for number in range(processes):
        told = _PROCESS + json.dumps({"number": number, "addresses": addresses})
        running.append(subprocess.Popen([sys.executable, "-m", __spec__.name, told, *task.arguments()]))
    codes = [one.wait() for one in running]
    if any(codes):
        print(f"processes ended with exit codes {codes}", file=sys.stderr)
        return 1
    left = [_Left(**pickle.loads((task.work / f"left-{number}.pickle").read_bytes())) for number in range(processes)]
    newest: dict[str, State] = {}
    for one in left:
        newest.update(one.newest)
    if _stored(task.work / "recovery") != newest:
        print("the recovery store does not hold the states that were put out last", file=sys.stderr)
        return 1
    asked = [times for one in left for times in one.asked.values()]
    # The clock is one for all processes of a machine. No worker is asked before all are through with a batch.
    edges = [min(times) for times in zip(*asked, strict=True)]
    edges[-1] = max(edges[-1], *(one.last_row for one in left))
    leave(
        task,
        [after - before for before, after in pairwise(edges)],
        [int(key) for key in newest],
        [n for n, _ in newest.values()],
        [total for _, total in newest.values()],
        {
            "durability": "snapshots of each batch in SQLite, write-ahead log",
            "rows put out": sum(one.rows for one in left),
            "bytes of the recovery store": sum(path.stat().st_size for path in (task.work / "recovery").iterdir()),
            "version": metadata.version("bytewax"),
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
