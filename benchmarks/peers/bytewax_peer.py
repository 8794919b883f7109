"""The running count and sum in Bytewax, with recovery on: each batch is an epoch, and each epoch has a snapshot.

Bytewax ends an epoch when a source has returned a batch and the epoch's interval is over. With an interval of zero each
batch is an epoch. Bytewax asks the source for the next batch only when all snapshots of the previous epoch are
committed to the recovery store (SQLite with a write-ahead log and its default synchronisation). So the time of a batch
is the time between two calls of the source, and includes reading the files, every output row, and the snapshot.

A variant is a way to count and a number of workers. ``batch-2x1`` is `op.stateful_batch` in two processes of one worker
each, and ``map-1x2`` is `op.stateful_map` in one process of two workers. ``summed`` is ``batch`` with a source that
first adds up the values of each key with Arrow. This is not a way that Bytewax proposes, but the least work that its
operator can be given.
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
    """Count one event; return the new state and the output row."""
    n, total = state or (0, 0.0)
    new_state = (n + 1, total + value)
    return new_state, new_state


def flat_count(state: State | None, value: float) -> tuple[State, tuple[State]]:
    """Count one event, for an operator that may return several output rows."""
    new_state, out = count(state, value)
    return new_state, (out,)


class Count(op.StatefulBatchLogic[float, State, State]):
    """Count the events of one key that arrive together."""

    __slots__ = ("_n", "_total")

    def __init__(self, state: State | None) -> None:
        self._n, self._total = state or (0, 0.0)

    def on_batch(self, values: list[float]) -> tuple[Iterable[State], bool]:
        """Add the values of a key's events, and return one output row for all of them."""
        self._n += len(values)
        self._total += sum(values)
        return [(self._n, self._total)], False

    def snapshot(self) -> State:
        """Return the state that recovery stores."""
        return self._n, self._total


class CountSums(op.StatefulBatchLogic[State, State, State]):
    """Add up the counts and sums of one key that the source has computed."""

    __slots__ = ("_n", "_total")

    def __init__(self, state: State | None) -> None:
        self._n, self._total = state or (0, 0.0)

    def on_batch(self, values: list[State]) -> tuple[Iterable[State], bool]:
        """Add counts and sums, and return one output row for all of them."""
        for n, total in values:
            self._n += n
            self._total += total
        return [(self._n, self._total)], False

    def snapshot(self) -> State:
        """Return the state that recovery stores."""
        return self._n, self._total


# -- files in, rows out --------------------------------------------------------------------------------


class _Batches(StatefulSourcePartition[Any, int]):
    """A worker's share of the files of each batch."""

    def __init__(self, batches: list[list[Path]], start: int, summed: bool, request_times: list[float]) -> None:
        self._batches = batches
        self._next = start
        self._summed = summed
        self._request_times = request_times

    def next_batch(self) -> Iterable[Any]:
        """Return this worker's events of the next batch, with their keys."""
        self._request_times.append(time.perf_counter())
        if self._next == len(self._batches):
            raise StopIteration
        files = self._batches[self._next]
        self._next += 1
        table = pa.concat_tables([pq.read_table(path) for path in files])
        if self._summed:
            table = table.group_by("key").aggregate([("value", "count"), ("value", "sum")])
            sums = zip(table["value_count"].to_pylist(), table["value_sum"].to_pylist(), strict=True)
            return list(zip(_key_names(table), sums, strict=True))
        return list(zip(_key_names(table), table["value"].to_pylist(), strict=True))

    def snapshot(self) -> int:
        """Return the number of the batch with which a restart continues."""
        return self._next


def _key_names(table: pa.Table) -> list[str]:
    """Return the keys as strings, because Bytewax accepts no other keys."""
    names: list[str] = pc.cast(table["key"], pa.string()).to_pylist()
    return names


class _Source(FixedPartitionedSource[Any, int]):
    """A source with one partition for each worker; the files of each batch are dealt out to the partitions in turn."""

    def __init__(
        self, batches: list[list[Path]], workers: int, summed: bool, request_times: dict[str, list[float]]
    ) -> None:
        self._batches = batches
        self._workers = workers
        self._summed = summed
        self._request_times = request_times

    def list_parts(self) -> list[str]:
        """Return the names of all partitions, because each worker can read every file."""
        return [str(worker) for worker in range(self._workers)]

    def build_part(self, step_id: str, for_part: str, resume_state: int | None) -> _Batches:
        """Open one partition."""
        shares = [files[int(for_part) :: self._workers] for files in self._batches]
        return _Batches(shares, resume_state or 0, self._summed, self._request_times.setdefault(for_part, []))


class _Rows(StatelessSinkPartition[Any]):
    def __init__(self, rows: list[tuple[str, State]], last: list[float]) -> None:
        self._rows = rows
        self._last = last

    def write_batch(self, items: list[tuple[str, State]]) -> None:
        """Keep the rows, and note the time."""
        self._rows.extend(items)
        self._last[0] = time.perf_counter()


class _Sink(DynamicSink[Any]):
    """A sink that keeps all rows in memory. (Spark's sink drops the rows, and Flink's writes them to files.)"""

    def __init__(self) -> None:
        self.rows: list[list[tuple[str, State]]] = []
        """The output rows, by worker."""
        self.last = [0.0]
        """The time of the last output row, as the only element."""

    def build(self, step_id: str, worker_index: int, worker_count: int) -> _Rows:
        """Return the part of the sink for one worker."""
        self.rows.append([])
        return _Rows(self.rows[-1], self.last)


def _build_flow(way: str, source: _Source, sink: _Sink) -> Dataflow:
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
class _Results:
    """The results of one process."""

    request_times: dict[str, list[float]]
    last_row: float
    rows: int
    newest: dict[str, State]


def _run_process(task: Task, way: str, processes: int, threads: int, number: int, addresses: list[str]) -> None:
    """Run one process of a Bytewax cluster, and write its results to a file."""
    request_times: dict[str, list[float]] = {}
    sink = _Sink()
    flow = _build_flow(way, _Source(task.files(), processes * threads, way == "summed", request_times), sink)
    cli_main(
        flow,
        workers_per_process=threads,
        process_id=number if processes > 1 else None,
        addresses=addresses if processes > 1 else None,
        epoch_interval=timedelta(0),
        # The default: snapshots that are no longer needed are removed at once.
        recovery_config=RecoveryConfig(task.work / "recovery", timedelta(0)),
    )
    newest: dict[str, State] = {}
    for rows in sink.rows:
        newest.update(rows)
    results = _Results(request_times, sink.last[0], sum(len(rows) for rows in sink.rows), newest)
    (task.work / f"left-{number}.pickle").write_bytes(pickle.dumps(vars(results)))


def _find_free_addresses(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return addresses


def _read_stored(recovery: Path) -> dict[str, State]:
    """Return the newest snapshot of each key, which is the state that a restart would find."""
    states: dict[str, State] = {}
    for path in sorted(recovery.glob("*.sqlite3")):
        with sqlite3.connect(path) as database:
            rows = database.execute(
                "SELECT state_key, ser_change, MAX(snap_epoch) FROM snaps "
                "WHERE step_id NOT LIKE '%.events' GROUP BY step_id, state_key"
            )
            states.update({key: pickle.loads(state) for key, state, _ in rows})
    return states


def main() -> int:
    """Run all processes of the cluster, and write their combined results."""
    # The processes of the cluster get their number and the addresses in an additional first argument.
    if len(sys.argv) > 1 and sys.argv[1].startswith(_PROCESS):
        process_spec = json.loads(sys.argv.pop(1).removeprefix(_PROCESS))
        task = read_task(VARIANTS)
        way, workers = task.variant.split("-")
        processes, threads = map(int, workers.split("x"))
        _run_process(task, way, processes, threads, process_spec["number"], process_spec["addresses"])
        return 0
    task = read_task(VARIANTS, __doc__)
    processes, threads = map(int, task.variant.split("-")[1].split("x"))
    (task.work / "recovery").mkdir()
    init_db_dir(task.work / "recovery", processes * threads)
    addresses = _find_free_addresses(processes)
    running = []
    for number in range(processes):
        process_spec = _PROCESS + json.dumps({"number": number, "addresses": addresses})
        running.append(subprocess.Popen([sys.executable, "-m", __spec__.name, process_spec, *task.arguments()]))
    codes = [one.wait() for one in running]
    if any(codes):
        print(f"processes ended with exit codes {codes}", file=sys.stderr)
        return 1
    results = [
        _Results(**pickle.loads((task.work / f"left-{number}.pickle").read_bytes())) for number in range(processes)
    ]
    newest: dict[str, State] = {}
    for one in results:
        newest.update(one.newest)
    if _read_stored(task.work / "recovery") != newest:
        print("the recovery store does not hold the states that were put out last", file=sys.stderr)
        return 1
    request_times = [times for one in results for times in one.request_times.values()]
    # All processes of a machine read the same clock, and no worker is asked for a batch until all workers have finished
    # the previous one.
    edges = [min(times) for times in zip(*request_times, strict=True)]
    edges[-1] = max(edges[-1], *(one.last_row for one in results))
    leave(
        task,
        [after - before for before, after in pairwise(edges)],
        [int(key) for key in newest],
        [n for n, _ in newest.values()],
        [total for _, total in newest.values()],
        {
            "durability": "snapshots of each batch in SQLite, write-ahead log",
            "rows put out": sum(one.rows for one in results),
            "bytes of the recovery store": sum(path.stat().st_size for path in (task.work / "recovery").iterdir()),
            "version": metadata.version("bytewax"),
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
