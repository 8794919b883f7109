"""The running count and sum in PyFlink, with RocksDB state and checkpoints, in SQL and as a Python function.

``sql`` and ``sql-minibatch`` are `GROUP BY` in Flink's JVM, without any Python. ``python`` corresponds to our job: a
`KeyedProcessFunction` in Python with a `ValueState`, which Flink runs in Python processes next to the JVM.
``python-thread`` runs the same function in threads of a Python inside the JVM.

Flink has no batches: it reads all files as one bounded stream. Each output row has the time at which it was made. From
these times we compute when Flink had counted as many events as the first batch has. The reported time is the time from
then to the last row, divided by the number of the other batches, so it does not include the start of the job. There
are about as many checkpoints as batches; rows do not wait for them.

The pip package cannot read Parquet, which needs a jar from Maven. So the files are converted to CSV before time is
measured.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
from pyflink.common import Configuration, Encoder, Row, Types
from pyflink.datastream import DataStream, KeyedProcessFunction, RuntimeContext, StreamExecutionEnvironment
from pyflink.datastream.connectors.file_system import FileSink
from pyflink.datastream.state import ValueStateDescriptor
from pyflink.table import ChangelogMode, DataTypes, Schema, StreamTableEnvironment

from benchmarks.peers.protocol import Task, leave, read_task

VARIANTS = ("sql", "sql-minibatch", "python", "python-thread")
_PARALLELISM = 2
_KEYS_AT_MOST = 10_000_000
# About how many events a second a small machine processes; with it the checkpoint interval is about one batch.
_EVENTS_A_SECOND = {"sql": 100_000, "sql-minibatch": 100_000, "python": 10_000, "python-thread": 10_000}


class Count(KeyedProcessFunction):
    """Count a key's events and add up their values."""

    def open(self, runtime_context: RuntimeContext) -> None:
        """Get the handle of the state."""
        self._state = runtime_context.get_state(
            ValueStateDescriptor("count", Types.TUPLE([Types.LONG(), Types.DOUBLE()]))
        )

    def process_element(self, value: Row, ctx: KeyedProcessFunction.Context) -> Iterator[Row]:
        """Count one event."""
        n, total = self._state.value() or (0, 0.0)
        n += 1
        total += value[1]
        self._state.update((n, total))
        yield Row(value[0], n, total, time.time_ns() // 1_000_000)


def _get_key(row: Row) -> int:
    key: int = row[0]
    return key


def _make_configuration(task: Task, events: int) -> Configuration:
    checkpoint_ms = 1000 * events // _EVENTS_A_SECOND[task.variant]
    settings = {
        "parallelism.default": str(_PARALLELISM),
        "state.backend.type": "rocksdb",
        # By default Flink restarts a failed job forever.
        "restart-strategy.type": "none",
        "execution.checkpointing.interval": f"{checkpoint_ms} ms",
        "execution.checkpointing.incremental": "true",
        "execution.checkpointing.dir": (task.work / "checkpoints").as_uri(),
        "io.tmp.dirs": str(task.work / "local"),
        "taskmanager.memory.managed.size": "1g",
        "python.executable": sys.executable,
        "python.client.executable": sys.executable,
    }
    if task.variant == "sql-minibatch":
        settings |= {
            "table.exec.mini-batch.enabled": "true",
            "table.exec.mini-batch.allow-latency": "1 s",
            "table.exec.mini-batch.size": str(events // _PARALLELISM),
        }
    if task.variant.startswith("python"):
        settings |= {
            "python.execution-mode": "thread" if task.variant.endswith("thread") else "process",
            # Python makes a call for each state that is not in its cache, and for each state that it writes at the end
            # of a bundle. So bundles as large as a batch and a cache for all keys are faster for this job than the
            # defaults (1,000 for both, and 1 s).
            "python.fn-execution.bundle.size": str(events),
            "python.fn-execution.bundle.time": str(checkpoint_ms),
            "python.state.cache-size": str(_KEYS_AT_MOST),
            # Threads run the Python that the environment was created from, which does not have its packages.
            "python.pythonpath": sysconfig.get_path("purelib"),
        }
    configuration = Configuration()
    for name, value in settings.items():
        configuration.set_string(name, value)
    return configuration


def _build_job(task: Task, environment: StreamExecutionEnvironment, csv: Path) -> DataStream:
    """Build the job up to its output rows: key, n, total, and the time of the row in milliseconds since 1970."""
    tables = StreamTableEnvironment.create(environment)
    tables.execute_sql(
        "CREATE TABLE events (`key` BIGINT NOT NULL, `value` DOUBLE NOT NULL) "
        f"WITH ('connector' = 'filesystem', 'path' = '{csv.as_uri()}', 'format' = 'csv')"
    )
    if task.variant.startswith("python"):
        events = tables.to_data_stream(tables.from_path("events"))
        row = Types.ROW([Types.LONG(), Types.LONG(), Types.DOUBLE(), Types.LONG()])
        return events.key_by(_get_key, key_type=Types.LONG()).process(Count(), output_type=row)
    counted = tables.sql_query(
        "SELECT `key`, n, total, CURRENT_ROW_TIMESTAMP() AS made FROM "
        "(SELECT `key`, COUNT(*) AS n, SUM(`value`) AS total FROM events GROUP BY `key`)"
    )
    schema = (
        Schema.new_builder()
        .column("key", DataTypes.BIGINT().not_null())
        .column("n", DataTypes.BIGINT())
        .column("total", DataTypes.DOUBLE())
        .column("made", DataTypes.TIMESTAMP_LTZ(3))
        .primary_key("key")
        .build()
    )
    return tables.to_changelog_stream(counted, schema, ChangelogMode.upsert())


def _write_csv(task: Task, folder: Path) -> list[int]:
    """Write the batches as CSV; return the number of events of each."""
    folder.mkdir()
    events = []
    for number, files in enumerate(task.files()):
        tables = [pq.read_table(path) for path in files]
        for part, table in enumerate(tables):
            pcsv.write_csv(table, folder / f"{number:05d}-{part:05d}.csv", pcsv.WriteOptions(include_header=False))
        events.append(sum(table.num_rows for table in tables))
    return events


_ROW = re.compile(rb"\+[IU]\[(-?\d+), (\d+), ([-\d.E]+), ([^\]]+)\]")


def _read_rows(folder: Path) -> pa.Table:
    """Return the output rows in all files that Flink has finished."""
    columns: dict[str, list[Any]] = {"key": [], "n": [], "total": [], "ms": []}
    for path in sorted(folder.rglob("part-*")):
        if path.name.startswith("."):
            continue
        for key, n, total, made in _ROW.findall(path.read_bytes()):
            columns["key"].append(int(key))
            columns["n"].append(int(n))
            columns["total"].append(float(total))
            columns["ms"].append(_parse_milliseconds(made.decode()))
    return pa.table(columns)


def _parse_milliseconds(made: str) -> int:
    if made.isdigit():
        return int(made)
    return round(1000 * datetime.datetime.fromisoformat(made.replace("Z", "+00:00")).timestamp())


def _find_edges(rows: pa.Table, events: int) -> tuple[float, float]:
    """Return when the first `events` events had been counted and when the last row was made, in seconds since 1970."""
    key, n, ms = (rows[name].to_numpy() for name in ("key", "n", "ms"))
    order = np.lexsort((n, key))
    key, n, ms = key[order], n[order], ms[order]
    before: npt.NDArray[np.int64] = np.zeros_like(n)
    before[1:] = np.where(key[1:] == key[:-1], n[:-1], 0)
    by_time = np.argsort(ms, kind="stable")
    counted = np.cumsum((n - before)[by_time])
    return ms[by_time][np.searchsorted(counted, events)] / 1000, ms.max() / 1000


class _Checkpoints:
    """Watches, in a thread, for the newest completed checkpoint. When the job ends, Flink removes all checkpoints."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stopping = threading.Event()
        self.newest = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopping.wait(0.02):
            for path in self._folder.glob("*/chk-*/_metadata"):
                self.newest = max(self.newest, int(path.parent.name.removeprefix("chk-")))

    def stop(self) -> int:
        """Stop watching; return the number of the newest completed checkpoint."""
        self._stopping.set()
        self._thread.join()
        return self.newest


def main() -> int:
    """Run the job, and write the times and the final state that its output rows show."""
    task = read_task(VARIANTS, __doc__)
    csv, out = task.work / "csv", task.work / "rows"
    events = _write_csv(task, csv)
    (task.work / "local").mkdir()
    os.environ["FLINK_LOG_DIR"] = str(task.work)
    # Without this the Python of a local job runs in threads of this process, which share one global interpreter lock.
    os.environ["_python_worker_execution_mode"] = "process"  # noqa: SIM112, Flink's own spelling
    environment = StreamExecutionEnvironment.get_execution_environment(_make_configuration(task, events[0]))
    sink = FileSink.for_row_format(str(out), Encoder.simple_string_encoder()).build()
    _build_job(task, environment, csv).sink_to(sink)
    checkpoints = _Checkpoints(task.work / "checkpoints")
    start = time.time()
    environment.execute("keyed_count")
    completed = checkpoints.stop()
    rows = _read_rows(out)
    first, last = _find_edges(rows, events[0])
    final = rows.group_by("key").aggregate([("n", "max")]).rename_columns(["key", "n"])
    # The row of a key with the highest count is its last row.
    final = final.join(rows.select(["key", "n", "total"]), ["key", "n"])
    leave(
        task,
        # The first time includes the start of the job; the second is the mean of all other batches.
        [first - start, (last - first) / (len(events) - 1)],
        final["key"].to_numpy(),
        final["n"].to_numpy(),
        final["total"].to_numpy(),
        {
            "durability": "incremental checkpoints of RocksDB on a local disk, not one for each batch's rows",
            "checkpoints completed": completed,
            "rows put out": rows.num_rows,
            "input": "CSV: the pip package has no reader of parquet",
            "version": metadata.version("apache-flink"),
        },
    )
    shutil.rmtree(csv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
