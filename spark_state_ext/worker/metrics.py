"""Metrics: one row for each call of a bucket, as Arrow on the executor's disk, and through OpenTelemetry if it is
there (`telemetry`).

Spark's own progress counts buckets and payloads, not keys and rows; these are the true numbers. Each worker process
appends to a file of its own (an Arrow IPC stream, so what a killed process wrote is readable up to its last batch),
and starts another when it is large. `read` puts the files of a folder together, `by_batch` sums them up::

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
    "timed",
    "timing",
    "whole_ms",
]

_LOGGER = logging.getLogger("spark_state_ext")
FILES = "*.arrows"
_FILE_BYTES_MAX = 4 << 20
_FILES_MAX = 64
_HELD_ROWS_MAX = 256
_HELD_S_MAX = 1.0


@dataclass
class CallMetrics:
    """One call of one bucket.

    Parameters
    ----------
    query_id, run_id, batch, operator, bucket
        Whose. Where tasks are not told their batch, `batch` is the number of calls before.
    ended_ms
        When the call was over: wall-clock time, milliseconds since 1970.
    rows, keys, timeouts
        Input rows without late ones, distinct keys among them, and keys that were called because their time was up.
        (For an operator that makes rows fewer before the shuffle: those that are left.)
    key_rows_max
        Of these rows, those of the key that has most.
    changed_rows
        Rows of the delta, tombstones included; 0 when nothing changed.
    state_rows, state_rows_min
        Bounds of the bucket's keys that have state or a timeout, expired state that has not been removed included: they
        are at most `state_rows` and at least `state_rows_min`.
    state_bytes
        Size of the bucket's state in the local store, rows included that newer ones replace until they are merged.
    read_ms, lookup_ms, user_ms, commit_ms, wait_ms, total_ms
        Milliseconds in which state was restored; in which it was looked up; in which the user's function ran,
        conversions included; of the commit, from settling earlier uploads to the new pointer, `wait_ms` included; in
        which uploads of deltas were waited for; and all from asking for the first row, with what Spark does with the
        output and without how a call begins (lease, opening the store).
    cpu_ms
        Processor time of the call's thread, milliseconds: with its beginning and the user's function, without Spark's
        own work and uploads.
    upload_ms, uploaded_bytes, uploads
        Milliseconds that uploads of deltas took, queues included, which were confirmed since the bucket's call before
        in this process, beside batches; their bytes, and how many.
    snapshot_ms, snapshot_bytes, snapshots, snapshot_failures
        The same of full snapshots; and how many were not made, or refused by a backend.
    delta_bytes, inline_bytes
        Size of the delta, and what is inline in the new pointer.
    oldest_inline_ms
        Age of the oldest delta that not every backend has confirmed, milliseconds; 0 when there is none.
    cache_hit
        The local store had all of the state.
    restored_files, restore_gaps
        Checkpoint files that were fetched; and how many times a backend that should have given one did not, and another
        one gave it: the backend that the job prefers (`restore_from`), or one that had confirmed the file.
    upload_failures
        Uploads of deltas that failed since the bucket's call before in this process.
    deleted_files
        Checkpoint files that clean-ups deleted since the bucket's call before in this process.
    lease_age_ms
        Since when the process knew that the run holds the lease of its state, milliseconds before the call's end.
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
        *(pa.field(it.name, _TYPES[str(it.type)], nullable=False) for it in fields(CallMetrics)),
        pa.field("host", pa.string(), nullable=False),
        pa.field("pid", pa.int64(), nullable=False),
    ]
)
# How columns are summed up over the buckets of a batch.
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
# Of these the largest counts.
_LARGEST = ("key_rows_max", "oldest_inline_ms", "lease_age_ms", "job_buckets", "ended_ms")
_KEYS = ("query_id", "run_id", "operator", "batch")


T = TypeVar("T")


def timed(work: Iterator[T], call: CallMetrics, column: str) -> Iterator[T]:
    """The items of an iterator; the time until each is there is added to a column."""
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
def timing(call: CallMetrics, column: str) -> Iterator[None]:
    """Adds the time of a block to a column."""
    started_s = time.perf_counter()
    try:
        yield
    finally:
        setattr(call, column, getattr(call, column) + 1000 * (time.perf_counter() - started_s))


class MetricsLog:
    """Where a worker process writes its metrics."""

    def __init__(self, folder: Path, beside: DaemonPool | None = None, telemetry: Telemetry | None = None) -> None:
        self._folder = folder
        self._beside = beside or DaemonPool("metrics")
        self._telemetry = telemetry or Telemetry()
        self._held: list[dict[str, Any]] = []
        self._writing = threading.Lock()
        self._stream: Any = None
        self._writer: Any = None

    def add(self, call: CallMetrics) -> None:
        """Note a call; it is written with the task's last one where that is known, or within a second."""
        self._telemetry.record(call)
        with self._writing:
            self._held.append({**asdict(call), "host": host_name(), "pid": os.getpid()})
            held = len(self._held)
        if held == 1:
            self._beside.submit(self._flush_later)
        elif held >= _HELD_ROWS_MAX:
            self.flush()

    def _flush_later(self) -> None:
        time.sleep(_HELD_S_MAX)
        self.flush()
        self._telemetry.flush(0)

    def end_task(self) -> None:
        """A task is over, and its worker may be gone within a second: have what is held back written and exported.

        It waits for an export for `telemetry.FLUSH_WAIT_S_MAX` at most.
        """
        self.flush()
        self._telemetry.flush()

    def flush(self) -> None:
        """Write what is held back. That it cannot be written is told once, and harms nothing else."""
        with self._writing:
            rows, self._held = self._held, []
            if not rows:
                return
            try:
                if self._writer is None or self._stream.tell() > _FILE_BYTES_MAX:
                    self._begin_file()
                self._writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
                self._stream.flush()
            except (OSError, pa.ArrowException) as error:
                self._writer = self._stream = None
                _tell(f"metrics are not written to {self._folder}: {error}")

    def _begin_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._stream.close()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        old = sorted(self._folder.glob(FILES), key=lambda path: path.stat().st_mtime)
        for path in old[: max(0, len(old) + 1 - _FILES_MAX)]:
            remove_file(path, self._folder.parent, missing_ok=True)
        path = self._folder / f"{int(time.time() * 1000)}-{os.getpid()}-{uuid.uuid4().hex[:8]}.arrows"
        self._stream = path.open("wb")
        self._writer = pa.ipc.new_stream(self._stream, SCHEMA)


class MetricsLogs:
    """The logs of a worker process, one for each folder."""

    def __init__(self) -> None:
        self._logs: dict[str, MetricsLog] = {}
        self._lock = threading.Lock()
        self._beside = DaemonPool("metrics")
        self._telemetry = Telemetry()
        self._pid = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that made them, and no child that it forked."""
        return os.getpid() == self._pid

    def at(self, folder: Path) -> MetricsLog:
        """The log in a folder."""
        with self._lock:
            if str(folder) not in self._logs:
                self._logs[str(folder)] = MetricsLog(folder, self._beside, self._telemetry)
            return self._logs[str(folder)]

    def close(self) -> None:
        """Write what they hold back, and have their thread end."""
        with self._lock:
            logs = list(self._logs.values())
        for log in logs:
            log.flush()
        self._beside.close()

    def fail(self, call: CallMetrics) -> None:
        """A call failed, and so does its task: export that, and have written what its calls before held back."""
        if not self.is_ours:
            return  # a child that the user's function forked; files, threads and locks are the worker's
        self._telemetry.record_failure(call)
        with self._lock:
            logs = list(self._logs.values())
        for log in logs:
            log.end_task()


def whole_ms(spent_s: float) -> int:
    """Seconds as a column of milliseconds holds them; for what never was, the most that it can."""
    return int(min(1000 * spent_s, 2**63 - 1))


@functools.cache
def _tell(text: str) -> None:
    _LOGGER.warning(text)


def read(folder: Path | str) -> pa.Table:
    """Calls that are noted in a folder and those below it, in the order in which they ended.

    A file ends where its process was killed; what comes after the last whole batch is passed over.
    """
    batches: list[pa.RecordBatch] = []
    for path in sorted(Path(folder).rglob(FILES)):
        with contextlib.suppress(pa.ArrowInvalid, OSError, EOFError), pa.OSFile(str(path), "r") as file:
            reader = pa.ipc.open_stream(file)
            # Of another release; its columns may mean something else.
            if not reader.schema.equals(SCHEMA):
                continue
            for batch in reader:
                batch.validate(full=True)
                batches.append(batch)
    return pa.Table.from_batches(batches, SCHEMA).sort_by([("ended_ms", "ascending")])


def by_batch(calls: pa.Table) -> pa.Table:
    """Sums over the buckets of each batch; of calls that were made again, the last one counts."""
    calls = calls.append_column("at", pa.array(range(calls.num_rows), pa.int64()))
    last = calls.group_by([*_KEYS, "bucket"]).aggregate([("at", "max")]).column("at_max")
    calls = calls.take(last)
    calls = calls.set_column(
        calls.schema.get_field_index("cache_hit"), "cache_hit", calls.column("cache_hit").cast(pa.int64())
    )
    aggregates: list[tuple[str, str]] = [(name, "sum") for name in _SUMMED]
    aggregates += [("bucket", "count"), ("cache_hit", "sum"), *((name, "max") for name in _LARGEST)]
    found = calls.group_by(list(_KEYS)).aggregate(aggregates)
    names = {"bucket_count": "buckets", "cache_hit_sum": "cache_hits"}
    names |= {f"{name}_max": name for name in _LARGEST} | {f"{name}_sum": name for name in _SUMMED}
    found = found.rename_columns([names.get(name, name) for name in found.column_names])
    return found.sort_by([("query_id", "ascending"), ("ended_ms", "ascending"), ("batch", "ascending")])


class CpuTime:
    """Processor time of a call's thread, without what Spark does meanwhile."""

    def __init__(self, spent_s: float) -> None:
        self._spent_s = spent_s

    @staticmethod
    def started() -> CpuTime:
        """From now on."""
        return CpuTime(-time.thread_time())

    def pause(self) -> None:
        """What comes next does not count."""
        self._spent_s += time.thread_time()

    def resume(self) -> None:
        """It counts again."""
        self._spent_s -= time.thread_time()

    def spent_s(self) -> float:
        """So far, seconds."""
        return self._spent_s + time.thread_time()
