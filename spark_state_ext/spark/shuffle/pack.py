"""Packing: the stage before Spark's shuffle turns rows into payloads, a few per bucket. Runs on executors."""

from __future__ import annotations

import math
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from arrow_schemas.columns import event_times_us
from arrow_schemas.equality import IndexArray
from arrow_schemas.labels import bucket_label
from arrow_schemas.row import RowSchema
from arrow_schemas.spark_types import key_fields
from spark_state_ext.engine.folders import operator_folder
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.spill_folders import spill_folder
from spark_state_ext.engine.task import TaskInfo
from spark_state_ext.files.operator_catalog import list_other_queries
from spark_state_ext.spark.shuffle.combine import Combiner, combine_rows
from spark_state_ext.spark.shuffle.payload import (
    HASH_COLUMN,
    PARTITION_COLUMN,
    STREAM_COLUMN,
    encode,
    encode_partitions,
    encode_spill_reference,
    heartbeat,
    payload_bytes_max,
)
from spark_state_ext.spark.shuffle.progress_numbers import OTHERS_COLUMN
from spark_state_ext.spark.shuffle.source_counts import check_partition_counts
from spark_state_ext.spark.task import current_task
from spark_state_ext.worker.local_folders import scratch_folder
from spark_state_ext.worker.retry import call_with_retries

__all__ = ["inline_share", "pack"]

_OUTPUT = pa.schema(
    [
        ("bucket", pa.int32()),
        ("payload", pa.binary()),
        ("event_time", pa.timestamp("us", tz="UTC")),
        # Number of other queries with state under the operator's name, if this query begins without state (`observed`).
        (OTHERS_COLUMN, pa.int32()),
    ]
)
# The latest event time of a payload goes through Spark's Python worker, which converts it to pandas: local time in 64
# bits of nanoseconds. No time zone is more than two days from UTC.
_EVENT_TIME_US_MAX = (2**63 - 1) // 1000 - 2 * 86_400_000_000
# Rows are collected up to this size, so that Spark's small input batches do not make small payloads.
_WAITING_BYTES_MAX = 32 << 20
# The most that one packing task sends through the shuffle before it uses spill files.
_TASK_INLINE_BYTES_MAX = 128 << 20
# The most that all packing tasks together send to one bucket. Newer releases of Spark gather all of a bucket's rows in
# one buffer of the JVM, which doubles as it grows and fails at 2 GiB, or earlier if memory is short.
_BUCKET_INLINE_BYTES_MAX = 192 << 20
_OUTPUT_BYTES_MAX = 16 << 20
# Size of a payload in a spill file.
_SPILLED_BYTES = 8 << 20


def inline_share(partition: int) -> int:
    """Return the most bytes that the packing task of a partition sends to one bucket through the shuffle.

    A task does not know how many tasks there are. So the shares decrease such that the sum of any number of them stays
    below the bound, as slowly as possible: the sum of 1 / (n ln² n) from 2 on is 2.11.
    """
    n = partition + 2
    return int(_BUCKET_INLINE_BYTES_MAX / (2.11 * n * math.log(n) ** 2))


def pack(
    plain: dict[str, Any], batches: Iterable[pa.RecordBatch], combiner: Combiner | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the payloads of a task's rows: the `mapInArrow` stage before the shuffle."""
    job = Job.from_plain(plain)
    task = current_task(job)
    context = TaskContext.get()
    partition = context.partitionId() if context is not None else 0
    packer = _Packer(job, task, inline_share(partition), combiner)
    if context is not None and partition == 0:
        # This task runs before the calls, so before a row of the batch reaches a function.
        check_partition_counts(job, task)
        # Every bucket is called in every batch with data: to restore, to time out, to be cleaned up. In a query that is
        # being rescaled also the old buckets are called, which hand over their state.
        bucket_count = max(job.options.buckets, job.rescaled_buckets)
        origin = f"{job.application_id} {job.plan_id} {task.stage}"
        yield _repeat_for_each_bucket(bucket_count, heartbeat(origin), _count_other_queries(job, task))
    waiting: list[pa.RecordBatch] = []
    waiting_bytes = 0
    for batch in batches:
        if batch.num_rows:
            waiting.append(batch)
            waiting_bytes += batch.get_total_buffer_size()
        if waiting_bytes >= _WAITING_BYTES_MAX:
            yield from packer.pack_table(pa.Table.from_batches(waiting))
            waiting, waiting_bytes = [], 0
    if waiting:
        yield from packer.pack_table(pa.Table.from_batches(waiting))
    packer.close()
    if packer.largest:
        yield _repeat_for_each_bucket(job.options.buckets, encode_partitions(packer.largest))


def _repeat_for_each_bucket(buckets: int, payload: bytes, others: int | None = None) -> pa.RecordBatch:
    """Return one payload for each bucket."""
    labels = [bucket_label(bucket) for bucket in range(buckets)]
    columns = [
        pa.array(labels, pa.int32()),
        pa.array([payload] * buckets, pa.binary()),
        pa.nulls(buckets, _OUTPUT.field("event_time").type),
        pa.array([others] * buckets, pa.int32()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_OUTPUT)


def _count_other_queries(job: Job, task: TaskInfo) -> int | None:
    """Return how many other queries have state under the operator's name, if this one begins without state; else 0.
    None if the task does not know its query.

    A query's folder is created by the calls of its first batch, which run after the packing.
    """
    if task.batch != 0:
        return None if task.batch is None else 0
    timeout_s = job.options.commit.commit_timeout_ms / 1000
    ids: list[str] = call_with_retries(lambda: list_other_queries(operator_folder(job)), timeout_s=timeout_s)
    return 0 if task.query_id in ids else len(ids)


class _Packer:
    def __init__(self, job: Job, task: TaskInfo, bucket_bytes_max: int, combiner: Combiner | None) -> None:
        self._job = job
        self._combiner = combiner
        self._task = task
        self._labels = pa.array([bucket_label(bucket) for bucket in range(job.options.buckets)], pa.int32())
        self._target_bytes = payload_bytes_max(job.frame_rows_max)
        self._inline_bytes = 0
        self._bucket_bytes_max = bucket_bytes_max
        self._bucket_bytes = [0] * job.options.buckets
        self._spill: _SpillFile | None = None
        # By stream: the largest partition with rows. The calls decide whether the source may have grown to it.
        self.largest: dict[str, int] = {}

    def pack_table(self, table: pa.Table) -> Iterator[pa.RecordBatch]:
        table, buckets = self._assign_buckets(table)
        times = read_event_times(self._job, table)
        # Combined rows are sorted by hash, so mostly by bucket too.
        if np.any(buckets[1:] < buckets[:-1]):
            order = np.argsort(buckets, kind="stable")
            indices = pa.array(order)
            table, buckets = table.take(indices), buckets[order]
            if times is not None:
                times = times.take(indices)
        # One batch, so that each payload is a slice of it.
        data = table.combine_chunks().to_batches()[0]
        row_bytes = max(1, data.get_total_buffer_size() // data.num_rows)
        step = max(1, self._target_bytes // row_bytes)
        bounds = np.searchsorted(buckets, np.arange(self._job.options.buckets + 1))
        rows: list[tuple[int, bytes, Any]] = []
        size = 0
        for bucket in np.flatnonzero(np.diff(bounds)).tolist():
            start, end = int(bounds[bucket]), int(bounds[bucket + 1])
            while start < end:
                stop = _shorten(data, start, min(start + step, end), 2 * self._target_bytes)
                inline = self._fits(bucket, data.slice(start, stop - start).nbytes)
                if not inline:
                    # Large slices, as each read of a spill file costs a request to the object store.
                    stop = min(start + max(1, _SPILLED_BYTES // row_bytes), end)
                    stop = _shorten(data, start, stop, 2 * _SPILLED_BYTES)
                payload = encode(data.slice(start, stop - start))
                if inline:
                    self._inline_bytes += len(payload)
                    self._bucket_bytes[bucket] += len(payload)
                else:
                    payload = self._spill_payload(payload)
                rows.append((bucket, payload, self._find_latest_time(times, start, stop)))
                size += len(payload)
                start = stop
                if size >= _OUTPUT_BYTES_MAX:
                    yield self._make_output(rows)
                    rows, size = [], 0
        if self._spill is not None:
            # Publish the file before a reference to it leaves this task.
            self._spill.publish()
            self._spill = None
        if rows:
            yield self._make_output(rows)

    def _assign_buckets(self, table: pa.Table) -> tuple[pa.Table, IndexArray]:
        """Return the rows to pack, and the bucket of each."""
        buckets, source = None, self._job.options.source_partition
        if source is not None:
            streams = None if source.stream is None else table.column(STREAM_COLUMN)
            buckets, largest = source.buckets_of(table.column(PARTITION_COLUMN), streams)
            if source.checkpoint_location is None:
                self.largest |= {name: max(index, self.largest.get(name, 0)) for name, index in largest.items()}
            partition_columns = [PARTITION_COLUMN] if streams is None else [PARTITION_COLUMN, STREAM_COLUMN]
            table = table.drop_columns(partition_columns)
        if self._combiner is not None:
            schema = RowSchema(key_fields(self._job.key_schema), ())
            table, buckets = combine_rows(table, self._combiner, schema, buckets)
        if buckets is None:
            buckets = self._job.options.bucket_map.of(table.column(HASH_COLUMN).to_numpy().view(np.uint64))
        return table, buckets

    def close(self) -> None:
        assert self._spill is None, "spill files are published with the rows that refer to them"

    def _fits(self, bucket: int, size: int) -> bool:
        """True if this many more bytes may go to a bucket through the shuffle."""
        return (
            self._inline_bytes + size <= _TASK_INLINE_BYTES_MAX
            and self._bucket_bytes[bucket] + size <= self._bucket_bytes_max
            # A single row may be larger than a payload should be.
            and size <= 4 * self._target_bytes + (1 << 20)
        )

    def _spill_payload(self, payload: bytes) -> bytes:
        if self._spill is None:
            self._spill = _SpillFile(self._job, self._task)
        return self._spill.add(payload)

    def _make_output(self, rows: list[tuple[int, bytes, Any]]) -> pa.RecordBatch:
        if self._spill is not None:
            self._spill.publish()
            self._spill = None
        buckets, payloads, times = zip(*rows, strict=True)
        return pa.RecordBatch.from_arrays(
            [
                self._labels.take(pa.array(buckets)),
                pa.array(payloads, pa.binary()),
                pa.array(times, pa.int64()).cast(_OUTPUT.field("event_time").type),
                pa.nulls(len(rows), pa.int32()),
            ],
            schema=_OUTPUT,
        )

    @staticmethod
    def _find_latest_time(times: pa.ChunkedArray | None, start: int, stop: int) -> int | None:
        """Return the latest event time of some rows, by which Spark drops payloads; None: the call checks each row.

        It is None if a row has no event time, as such a row is never late, or if a time is too far away for Spark's
        worker.
        """
        if times is None:
            return None
        piece = times.slice(start, stop - start)
        latest: int | None = None if piece.null_count else pc.max(piece).as_py()
        return None if latest is None or abs(latest) > _EVENT_TIME_US_MAX else latest


def _shorten(data: pa.RecordBatch, start: int, stop: int, bytes_max: int) -> int:
    """Lower `stop` until the rows from `start` on fit into `bytes_max`, or one row is left; return it."""
    while stop - start > 1 and data.slice(start, stop - start).nbytes > bytes_max:
        stop = start + (stop - start) // 2
    return stop


def read_event_times(job: Job, table: pa.Table) -> pa.ChunkedArray | None:
    """Return the event times in microseconds since 1970, int64, NULL for a row without; None without a watermark."""
    if job.event_time_position < 0:
        return None
    return event_times_us(table.column(job.event_time_position))


class _SpillFile:
    """A file under the root for payloads that exceed what may go through the shuffle."""

    def __init__(self, job: Job, task: TaskInfo) -> None:
        self._files = operator_folder(job)
        self._name = f"{spill_folder(task.query_id, task.batch, time.time())}/{uuid.uuid4().hex}.payloads"
        self._file: IO[bytes] = tempfile.NamedTemporaryFile(  # noqa: SIM115
            dir=scratch_folder(job.options.local_dir), prefix="payloads-"
        )

    def add(self, payload: bytes) -> bytes:
        offset = self._file.tell()
        self._file.write(payload)
        return encode_spill_reference(self._name, offset, len(payload))

    def publish(self) -> None:
        with self._file:
            self._file.flush()
            self._files.put_file(self._name, self._file.name)
