"""Metrics: one row for each call of a bucket, in Arrow files on the executor's disk, and through OpenTelemetry if it
is installed (`telemetry`).

Spark's own progress counts buckets and payloads; these metrics count keys and rows. Each worker process appends to a
separate file (an Arrow IPC stream, so a killed process's file is readable up to its last batch), and starts another
when it is large. `read` joins the files of a folder, `by_batch` sums them up::

    spark-state-ext metrics /path/to/spark_state_ext-1000/metrics
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from spark_state_ext.worker.host import host_name
from spark_state_ext.worker.removal import remove_file
from spark_state_ext.worker.telemetry import Telemetry
from spark_state_ext.worker.threads import DaemonPool

__all__ = [
    "SCHEMA",
    "CallMetrics",
    "CpuTime",
    "MetricsLog",
    "MetricsLogs",
    "by_batch",
    "read",
    "time_items",
    "time_block",
    "to_whole_ms",
]

_LOGGER = logging.getLogger("spark_state_ext")
FILE_PATTERN = "*.arrows"
_FILE_BYTES_MAX = 4 << 20
_FILES_MAX = 64
_PENDING_ROWS_MAX = 256
_PENDING_S_MAX = 1.0


@dataclass
class CallMetrics:
    """One call of one bucket.

    Parameters
    ----------
    query_id, run_id, batch, operator, bucket
        What was called. If tasks cannot get their batch id from Spark, `batch` is the number of earlier calls.
    ended_ms
        When the call ended: wall-clock time, milliseconds since 1970.
    rows, keys, timeouts
        Number of input rows except late ones, of distinct keys among them, and of keys whose timeout was due.
        (If an operator combines rows before the shuffle, the rows after that.)
    key_rows_max
        Number of these rows that the key with most rows has.
    changed_rows
        Rows of the delta, tombstones included; 0 if the state did not change.
    state_rows, state_rows_min
        Upper and lower bound of the number of keys that have state or a timeout in the bucket, including expired state
        that has not been removed.
    state_bytes
        Size of the bucket's state in the local store, including overwritten rows that are not merged yet.
    read_ms, lookup_ms, user_ms, commit_ms, wait_ms, total_ms
        Milliseconds of restoring state; of looking up state; of the user's function, conversions included; of the
        commit, from settling earlier uploads to the new pointer, `wait_ms` included; of waiting for uploads of deltas;
        and of the whole call from requesting the first row on, including Spark's processing of the output, but not the
        start of the call (lease, opening the store).
    cpu_ms
        Processor time of the call's thread, milliseconds: including the start of the call and the user's function, but
        not Spark's own work and uploads.
    upload_ms, uploaded_bytes, uploads
        Milliseconds, including queues, bytes and number of the background uploads of deltas that were confirmed since
        the bucket's previous call in this process.
    snapshot_ms, snapshot_bytes, snapshots, snapshot_failures
        The same for full snapshots; and how many could not be written, or were refused by a backend.
    delta_bytes, inline_bytes
        Size of the delta, and of the inline deltas in the new pointer.
    oldest_inline_ms
        Age of the oldest delta that not every backend has confirmed, milliseconds; 0 if there is none.
    cache_hit
        True if the local store had the whole state.
    restored_files, restore_gaps
        Checkpoint files that were fetched; and how often the preferred backend (`restore_from`), or one that had
        confirmed the file, did not supply it and another backend did.
    upload_failures
        Uploads of deltas that failed since the bucket's previous call in this process.
    deleted_files
        Checkpoint files that clean-ups deleted since the bucket's previous call in this process.
    lease_age_ms
        How long before the call's end the process last verified that the run holds the lease, milliseconds.
    job_buckets
        How many buckets the operator has.
    """

    query_id: str
    run_id: str
    batch: int
    operator: str
    bucket: int
    ended_ms: int = 0
    rows: int = 0
    keys: int = 0
    key_rows_max: int = 0
    timeouts: int = 0
    changed_rows: int = 0
    state_rows: int = 0
    state_rows_min: int = 0
    state_bytes: int = 0
    read_ms: float = 0.0
    lookup_ms: float = 0.0
    user_ms: float = 0.0
    commit_ms: float = 0.0
    wait_ms: float = 0.0
    total_ms: float = 0.0
    cpu_ms: float = 0.0
    upload_ms: float = 0.0
    uploaded_bytes: int = 0
    uploads: int = 0
    snapshot_ms: float = 0.0
    snapshot_bytes: int = 0
    snapshots: int = 0
    snapshot_failures: int = 0
    delta_bytes: int = 0
    inline_bytes: int = 0
    oldest_inline_ms: int = 0
    cache_hit: bool = True
    restored_files: int = 0
    restore_gaps: int = 0
    upload_failures: int = 0
    deleted_files: int = 0
    lease_age_ms: int = 0
    job_buckets: int = 0


_TYPES = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
SCHEMA = pa.schema(
    [
        *(pa.field(column.name, _TYPES[str(column.type)], nullable=False) for column in fields(CallMetrics)),
        pa.field("host", pa.string(), nullable=False),
        pa.field("pid", pa.int64(), nullable=False),
    ]
)
# Columns that are summed over the buckets of a batch.
_SUMMED = (
    *("rows", "keys", "timeouts", "changed_rows", "read_ms", "lookup_ms", "user_ms", "commit_ms"),
    *("state_rows", "state_rows_min", "state_bytes"),
    *(
        "wait_ms",
        "total_ms",
        "cpu_ms",
        "upload_ms",
        "uploaded_bytes",
        "uploads",
        "snapshot_ms",
        "snapshot_bytes",
        "snapshots",
        "snapshot_failures",
        "delta_bytes",
        "inline_bytes",
        "restored_files",
        "restore_gaps",
        "upload_failures",
        "deleted_files",
    ),
)
# Columns of which the maximum over the buckets is taken.
_MAXIMA = ("key_rows_max", "oldest_inline_ms", "lease_age_ms", "job_buckets", "ended_ms")
_KEYS = ("query_id", "run_id", "operator", "batch")


T = TypeVar("T")


def time_items(work: Iterator[T], call: CallMetrics, column: str) -> Iterator[T]:
    """Yield the items of an iterator, and add the time that producing them took to a column of `call`."""
    spent_s = 0.0
    try:
        while True:
            started_s = time.perf_counter()
            try:
                item = next(work)
            except StopIteration:
                return
            finally:
                spent_s += time.perf_counter() - started_s
            yield item
    finally:
        setattr(call, column, getattr(call, column) + 1000 * spent_s)


@contextlib.contextmanager
def time_block(call: CallMetrics, column: str) -> Iterator[None]:
    """Add the time that a block takes to a column of `call`."""
    started_s = time.perf_counter()
    try:
        yield
    finally:
        setattr(call, column, getattr(call, column) + 1000 * (time.perf_counter() - started_s))


class MetricsLog:
    """Writes a worker process's metrics to files in a folder."""

    def __init__(self, folder: Path, pool: DaemonPool | None = None, telemetry: Telemetry | None = None) -> None:
        self._folder = folder
        self._pool = pool or DaemonPool("metrics")
        self._telemetry = telemetry or Telemetry()
        self._pending: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._stream: Any = None
        self._writer: Any = None

    def add(self, call: CallMetrics) -> None:
        """Add a call; it is written at the end of the task if that is known, and otherwise within a second."""
        self._telemetry.record(call)
        with self._lock:
            self._pending.append({**asdict(call), "host": host_name(), "pid": os.getpid()})
            pending = len(self._pending)
        if pending == 1:
            self._pool.submit(self._flush_later)
        elif pending >= _PENDING_ROWS_MAX:
            self.flush()

    def _flush_later(self) -> None:
        time.sleep(_PENDING_S_MAX)
        self.flush()
        self._telemetry.flush(0)

    def end_task(self) -> None:
        """Write and export pending calls at the end of a task, because the worker may end within a second.

        Waits for the export for at most `telemetry.FLUSH_WAIT_S_MAX`.
        """
        self.flush()
        self._telemetry.flush()

    def flush(self) -> None:
        """Write pending calls; if that fails, log a warning once and drop them."""
        with self._lock:
            rows, self._pending = self._pending, []
            if not rows:
                return
            try:
                if self._writer is None or self._stream.tell() > _FILE_BYTES_MAX:
                    self._begin_file()
                self._writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
                self._stream.flush()
            except (OSError, pa.ArrowException) as error:
                self._writer = self._stream = None
                _warn_once(f"metrics could not be written to {self._folder}: {error}")

    def _begin_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._stream.close()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        old = sorted(self._folder.glob(FILE_PATTERN), key=lambda path: path.stat().st_mtime)
        for path in old[: max(0, len(old) + 1 - _FILES_MAX)]:
            remove_file(path, self._folder.parent, missing_ok=True)
        path = self._folder / f"{int(time.time() * 1000)}-{os.getpid()}-{uuid.uuid4().hex[:8]}.arrows"
        self._stream = path.open("wb")
        self._writer = pa.ipc.new_stream(self._stream, SCHEMA)


class MetricsLogs:
    """The metrics logs of a worker process, one for each folder."""

    def __init__(self) -> None:
        self._logs: dict[str, MetricsLog] = {}
        self._lock = threading.Lock()
        self._pool = DaemonPool("metrics")
        self._telemetry = Telemetry()
        self._pid = os.getpid()

    @property
    def is_ours(self) -> bool:
        """True in the process that created the logs, False in a child that it forked."""
        return os.getpid() == self._pid

    def at(self, folder: Path) -> MetricsLog:
        """Return the log of a folder, created on first use."""
        with self._lock:
            if str(folder) not in self._logs:
                self._logs[str(folder)] = MetricsLog(folder, self._pool, self._telemetry)
            return self._logs[str(folder)]

    def close(self) -> None:
        """Write the pending calls of all logs, and end their thread."""
        with self._lock:
            logs = list(self._logs.values())
        for log in logs:
            log.flush()
        self._pool.close()

    def fail(self, call: CallMetrics) -> None:
        """Export a failed call, and write the pending calls of all logs, because the task fails too."""
        if not self.is_ours:
            return  # a child that the user's function forked; files, threads and locks belong to the worker
        self._telemetry.record_failure(call)
        with self._lock:
            logs = list(self._logs.values())
        for log in logs:
            log.end_task()


def to_whole_ms(spent_s: float) -> int:
    """Convert seconds to whole milliseconds for an int64 column; infinity becomes the largest value."""
    return int(min(1000 * spent_s, 2**63 - 1))


@functools.cache
def _warn_once(text: str) -> None:
    _LOGGER.warning(text)


def read(folder: Path | str) -> pa.Table:
    """Read the calls that are recorded in a folder and its subfolders, in the order in which they ended.

    The file of a killed process is read up to its last complete batch.
    """
    batches: list[pa.RecordBatch] = []
    for path in sorted(Path(folder).rglob(FILE_PATTERN)):
        with contextlib.suppress(pa.ArrowInvalid, OSError, EOFError), pa.OSFile(str(path), "r") as file:
            reader = pa.ipc.open_stream(file)
            # A file of another release, whose columns may have other meanings.
            if not reader.schema.equals(SCHEMA):
                continue
            for batch in reader:
                batch.validate(full=True)
                batches.append(batch)
    return pa.Table.from_batches(batches, SCHEMA).sort_by([("ended_ms", "ascending")])


def by_batch(calls: pa.Table) -> pa.Table:
    """Sum the calls of each batch over its buckets; if a bucket was called again, only its last call counts."""
    calls = calls.append_column("at", pa.array(range(calls.num_rows), pa.int64()))
    last = calls.group_by([*_KEYS, "bucket"]).aggregate([("at", "max")]).column("at_max")
    calls = calls.take(last)
    calls = calls.set_column(
        calls.schema.get_field_index("cache_hit"), "cache_hit", calls.column("cache_hit").cast(pa.int64())
    )
    aggregates: list[tuple[str, str]] = [(name, "sum") for name in _SUMMED]
    aggregates += [("bucket", "count"), ("cache_hit", "sum"), *((name, "max") for name in _MAXIMA)]
    batches = calls.group_by(list(_KEYS)).aggregate(aggregates)
    names = {"bucket_count": "buckets", "cache_hit_sum": "cache_hits"}
    names |= {f"{name}_max": name for name in _MAXIMA} | {f"{name}_sum": name for name in _SUMMED}
    batches = batches.rename_columns([names.get(name, name) for name in batches.column_names])
    return batches.sort_by([("query_id", "ascending"), ("ended_ms", "ascending"), ("batch", "ascending")])


class CpuTime:
    """Measures the processor time of a call's thread, without Spark's own work in between."""

    def __init__(self, spent_s: float) -> None:
        self._spent_s = spent_s

    @staticmethod
    def started() -> CpuTime:
        """Start measuring now."""
        return CpuTime(-time.thread_time())

    def pause(self) -> None:
        """Stop counting until `resume`."""
        self._spent_s += time.thread_time()

    def resume(self) -> None:
        """Continue counting."""
        self._spent_s -= time.thread_time()

    def spent_s(self) -> float:
        """Return the processor time so far, in seconds; only while counting."""
        return self._spent_s + time.thread_time()
