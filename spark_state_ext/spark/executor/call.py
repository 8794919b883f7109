"""One call of Spark's stateful function: a bucket, its payloads, and its pointer. Runs on executors."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from arrow_schemas.labels import label_bucket
from arrow_schemas.lineage import Writer
from arrow_schemas.operator import OperatorFile
from arrow_schemas.pointer import Pointer
from spark_state_ext.commit.failures import Run
from spark_state_ext.engine.aligned_timeouts import has_nothing_due, next_call_ms
from spark_state_ext.engine.bucket import Bucket, CommitResult
from spark_state_ext.engine.deferral import Partitioning
from spark_state_ext.engine.folders import local_folder, operator_folder, scratch_folder, stores_folder
from spark_state_ext.engine.housekeeping import CleanUps
from spark_state_ext.engine.job import PANDAS, Job
from spark_state_ext.engine.replicas import (
    Leases,
    names_a_holder,
)
from spark_state_ext.engine.shared import Shared
from spark_state_ext.engine.task import TaskInfo
from spark_state_ext.errors import (
    BucketCountChangedError,
    CorruptFileError,
    CorruptPointerError,
    LineageError,
    MissingCheckpointError,
    OperatorChangedError,
)
from spark_state_ext.spark.executor.key_work import KeyWork, Times
from spark_state_ext.spark.shuffle.observed import number_rows
from spark_state_ext.spark.shuffle.output import OUTPUT_COLUMN
from spark_state_ext.spark.shuffle.pack import event_times
from spark_state_ext.spark.shuffle.payload import HASH_COLUMN, decode, heartbeat_nonce
from spark_state_ext.spark.task import current_task
from spark_state_ext.worker.memory import settle
from spark_state_ext.worker.metrics import CallMetrics, timing
from spark_state_ext.worker.retry import retried
from spark_state_ext.worker.spill import HashSorter, SpillBuffer
from spark_state_ext.worker.worker import Worker

__all__ = ["run_bucket"]

_LOGGER = logging.getLogger("spark_state_ext")


def run_bucket(
    plain: dict[str, Any],
    function: Callable[..., Any],
    key: tuple[Any, ...],
    frames: Iterable[pd.DataFrame],
    state: GroupState,
) -> Iterator[pd.DataFrame]:
    """Body of Spark's stateful function, keyed by bucket label.

    Parameters
    ----------
    plain
        `Job.to_plain`.
    function
        The user's function.
    key
        The bucket's label.
    frames
        Payload rows of the bucket; one empty frame when Spark calls for a timeout.
    state
        Spark's state of the bucket: the pointer.
    """
    settle()
    job = Job.from_plain(plain)
    if state.hasTimedOut and _rested(job, state):
        return
    shared = Shared.of(Worker.current())
    call = _BucketCall(shared, job, function, label_bucket(int(key[0])), state)
    try:
        yield from call.run(frames)
    except BaseException:
        # Interrupts and a consumer that goes away too: nothing is to be read on for a call that is over.
        call.give_up()
        raise


def _rested(job: Job, state: GroupState) -> bool:
    """Hand a pointer on as it is, where the bucket is called only because its neighbours are."""
    if job.timeout_conf != GroupStateTimeout.ProcessingTimeTimeout:
        return False
    stored, now_ms = bytes(state.get[0]), state.getCurrentProcessingTimeMs()
    pointer = Pointer.decode(stored, job.options.pointer_read)
    if not has_nothing_due(pointer, now_ms):
        return False
    state.update((stored,))
    _ask_for_next_call(state, pointer, now_ms, current_task(job))
    return True


def _ask_for_next_call(state: GroupState, pointer: Pointer, now_ms: int, task: TaskInfo) -> None:
    """Under processing-time timeouts."""
    after_ms = next_call_ms(pointer.earliest_timeout_ms, now_ms, alone=task.state_has_ids)
    if after_ms is not None:
        state.setTimeoutDuration(after_ms)


class _BucketCall:
    def __init__(self, shared: Shared, job: Job, function: Callable[..., Any], bucket: int, state: GroupState) -> None:
        self._cpu_s = -time.thread_time()
        self._shared = shared
        self._job = job
        self._function = function
        self._state = state
        self._bucket_number = bucket
        # The number that came with the heartbeat; None: there was none.
        self._heartbeat: bytes | None = None
        self._task = current_task(job)
        self._times = Times.of(state)
        stored = state.getOption
        # Before the call has come so far, there is nothing to end.
        self._made: Bucket | None = None
        self._stored = Pointer.decode(bytes(stored[0]), job.options.pointer_read) if stored is not None else None
        before = self._stored.batch if self._stored is not None else -1
        # A thread that lives on may tell the batch in which it was made (`_refuse_later`).
        self._batch = max(before + 1, -1 if self._task.batch is None else self._task.batch)
        self._operator_folder = operator_folder(job)
        self._scratch = scratch_folder(job.options.local_dir)
        self._call = CallMetrics(
            self._task.query_id, self._task.run_id or job.plan_id, self._batch, job.operator, bucket
        )

    def _open(self) -> None:
        """Have the state at hand: the run holds it, it is this job's, and its backends are ready."""
        job, stored = self._job, self._stored
        # What a new worker asks a store first is tried again for as long as a commit may take.
        tried = partial(retried, timeout_s=job.options.commit.commit_timeout_ms / 1000)
        # A query keeps the folder it began in, whatever later tasks are told of their query.
        self._query_folder = stored.query_folder if stored is not None else tried(self._first_query_folder)
        self._call.query_id = self._task.query_id or self._query_folder
        self._files = self._operator_folder.child(self._query_folder)
        if stored is not None and not names_a_holder(job, stored):
            # Before anything is written there.
            tried(lambda: self._shared.replicas.refuse_elsewhere(job, self._operator_folder, stored, self._scratch))
        self._leases = Leases.of(job, self._task, self._operator_folder, self._query_folder, self._shared.leases)
        tried(self._leases.hold)
        self._operator = tried(lambda: self._admitted(stored))
        self._schema = self._operator.row_schema()
        self._pointer = stored if stored is not None else self._first_pointer()
        schema_id = self._operator.schema_id
        self._prepare = partial(
            self._shared.replicas.prepare,
            job,
            self._operator_folder,
            self._query_folder,
            self._scratch,
            schema_id,
        )
        tried(self._prepare)
        self._replicas = self._shared.replicas.of(job, self._query_folder, self._bucket_number, self._scratch)
        self._uploads = self._shared.uploads
        self._bucket = self._made = self._opened()
        retained, where = self._task.batches_retained, f"{self._files.root}/{self._bucket_number}"
        brought = partial(self._shared.replicas.bring_back, self._operator_folder, self._query_folder, self._operator)
        self._clean_ups = CleanUps(
            self._bucket, self._replicas, self._leases, retained, where, self._shared.housekeeping, brought
        )
        # While the function runs; the commit waits for it.
        self._clean_ups.probe(self._pointer, job.plan_id)
        run_id = job.plan_id if self._task.batch is not None else ""
        self._partitioning = Partitioning(
            run_id,
            self._task.partitions,
            self._task.partition,
            job.options.buckets,
            self._shared.differences,
        )
        self._task_end = self._shared.task_ends.of(self._task.attempt)
        self._work = KeyWork(
            job, self._function, self._bucket, self._schema, self._times, self._batch, self._call, self._leases.hold
        )

    def _first_query_folder(self) -> str:
        batch_ms = self._times.processing_ms
        return self._shared.first_query_folders.of(
            self._operator_folder, self._task.query_id, batch_ms, self._heartbeat or b""
        )

    def give_up(self) -> None:
        """The call failed: end what it still has under way, and have the next one begin with other managers."""
        if self._made is not None:
            self._made.close()
            self._shared.replicas.forget(self._job, self._query_folder, self._bucket_number)

    # -- the call ----------------------------------------------------------------------------------

    def run(self, frames: Iterable[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        started_s = time.perf_counter()
        sorter = HashSorter(self._scratch, HASH_COLUMN, self._job.options.memory_bytes_max)
        if self._stored is None:
            # Where the state begins is told by the heartbeat, which is one of the payloads.
            self._fill(sorter, frames)
            self._open()
        else:
            self._open()
            self._fill(sorter, frames)
        rows = SpillBuffer(self._scratch, self._job.options.memory_bytes_max)
        # Also a bucket without rows is restored, so that no later batch has to wait for it.
        with timing(self._call, "read_ms"):
            self._bucket.read(lambda view: None)
        for frame in self._work.run(sorter.ranges(), rows):
            # A child that the function forked, and that came back from it, ends here.
            self._bucket.store.check_process()
            self._cpu_s += time.thread_time()
            yield frame
            # What Spark does with the frame is not ours.
            self._cpu_s -= time.thread_time()
        with timing(self._call, "commit_ms"):
            made = self._committed(rows)
            pointer = made.pointer
        if self._bucket_number == 0:
            self._shared.housekeeping.drop_spill_files(
                self._operator_folder, self._task, pointer.calls, self._times.processing_ms
            )
        if self._job.options.clean_up:
            self._clean_ups.in_turn(self._pointer, pointer)
        if self._job.timeout_conf == GroupStateTimeout.ProcessingTimeTimeout:
            pointer = replace(pointer, earliest_timeout_ms=self._work.earliest_timeout(rows))
        self._hand_over(pointer)
        stores = stores_folder(self._job.options.local_dir)
        self._shared.housekeeping.reclaim_in_turn(stores, self._scratch, self._job.options.local_keep_s)
        self._call.total_ms = 1000 * (time.perf_counter() - started_s)
        self._call.cpu_ms = 1000 * (self._cpu_s + time.thread_time())
        self._note_metrics(replace(made, pointer=pointer), rows, stores / "metrics")
        if self._job.api != PANDAS:
            yield number_rows(self._call, OUTPUT_COLUMN)

    def _fill(self, sorter: HashSorter, frames: Iterable[pd.DataFrame]) -> None:
        for batch in self._payload_rows(frames):
            self._call.rows += batch.num_rows
            sorter.add(batch)

    def _note_metrics(self, made: CommitResult, rows: SpillBuffer, folder: Path) -> None:
        call, pointer, sizes, now_ms = self._call, made.pointer, made.sizes, int(time.time() * 1000)
        uploads, upload_s, uploaded_bytes = self._uploads.sent(self._bucket.store)
        call.uploads, call.upload_ms, call.uploaded_bytes = uploads, 1000 * upload_s, uploaded_bytes
        snapshots = self._uploads.tallies.take(self._bucket.store)
        call.snapshots, call.snapshot_failures = snapshots.confirmed, snapshots.failures
        call.snapshot_ms, call.snapshot_bytes = 1000 * snapshots.took_s, snapshots.size_bytes
        call.ended_ms, call.changed_rows = now_ms, rows.rows
        call.state_rows, call.state_rows_min, call.state_bytes = sizes.rows_max, sizes.rows_min, sizes.size_bytes
        call.wait_ms = 1000 * made.waited_s
        call.delta_bytes = pointer.lineage[-1].size_bytes if pointer.ref != self._pointer.ref else 0
        call.inline_bytes = sum(len(delta.data) for delta in pointer.inline)
        call.oldest_inline_ms = max((now_ms - delta.made_ms for delta in pointer.inline), default=0)
        call.restored_files, call.restore_gaps = self._bucket.fetched_files, self._bucket.restore_gaps
        call.cache_hit = call.restored_files == 0
        log = self._shared.metrics.at(folder)
        log.add(call)
        if self._partitioning.is_last(self._task_end.called):
            # A worker may be gone within a second of its last batch.
            log.flush()

    def _committed(self, rows: SpillBuffer) -> CommitResult:
        """The commit; what its pointer claims is so when the task's last call returns."""
        bucket, end = self._bucket_number, self._task_end
        self._clean_ups.raise_failed()
        if self._clean_ups.probed():
            # Where another backend than the root has lost the operator's files too.
            self._prepare()
        has_heartbeat = self._heartbeat is not None
        expected = self._partitioning.expected(self._pointer, self._files) if has_heartbeat else frozenset[int]()
        may_defer = end.may_leave(bucket, expected)
        room_bytes = self._job.options.commit.task_inline_bytes_max - end.inline_bytes
        made = self._bucket.commit(rows, has_heartbeat, may_defer=may_defer, room_bytes=room_bytes)
        pointer, hold = made.pointer, self._leases.hold
        end.inline_bytes += sum(len(delta.data) for delta in pointer.inline)
        waited_s = end.over(bucket, made.deferred, expected, self._uploads, self._job.options.commit, hold)
        if has_heartbeat:
            pointer = replace(pointer, partitioning=self._partitioning.noted(bucket, self._files))
        return replace(made, pointer=self._stamped(pointer), waited_s=made.waited_s + waited_s)

    # -- input -------------------------------------------------------------------------------------

    def _payload_rows(self, frames: Iterable[pd.DataFrame]) -> Iterator[pa.RecordBatch]:
        late_until_us = self._late_threshold_us()
        for frame in frames:
            if "payload" not in frame.columns:
                continue
            for payload in frame["payload"]:
                if not isinstance(payload, (bytes, bytearray)):
                    raise CorruptFileError(f"a payload of bucket {self._bucket_number} is {type(payload).__name__}")
                payload = bytes(payload)
                nonce = heartbeat_nonce(payload)
                if nonce is not None:
                    self._heartbeat = nonce
                    continue
                for batch in decode(payload, self._load_spilled):
                    yield batch if late_until_us is None else self._on_time(batch, late_until_us)

    def _load_spilled(self, name: str, offset: int, length: int) -> bytes:
        return self._operator_folder.get_range(name, offset, offset + length)

    def _late_threshold_us(self) -> int | None:
        """Rows at or before this event time are late; Spark filters only under the event-time timeout."""
        job = self._job
        if job.timeout_conf != GroupStateTimeout.EventTimeTimeout or job.event_time_position < 0:
            return None
        if not job.late_by_previous_watermark:
            return self._times.watermark_ms * 1000
        return ((self._stored.watermark_ms if self._stored is not None else None) or 0) * 1000

    def _on_time(self, batch: pa.RecordBatch, late_until_us: int) -> pa.RecordBatch:
        times = event_times(self._job, pa.Table.from_batches([batch]))
        assert times is not None, "checked in _late_threshold_us"
        # A NULL event time is never late.
        late = times.combine_chunks().fill_null(2**63 - 1).to_numpy(zero_copy_only=False) <= late_until_us
        return batch.filter(pa.array(~late)) if late.any() else batch

    # -- pointer -----------------------------------------------------------------------------------

    def _first_pointer(self) -> Pointer:
        return Pointer(
            operator=self._job.operator,
            bucket=self._bucket_number,
            buckets=self._job.options.buckets,
            schema_id=self._operator.schema_id,
            batch=-1,
            watermark_ms=None,
            query_folder=self._query_folder,
        )

    def _stamped(self, pointer: Pointer) -> Pointer:
        threshold_ms = self._work.threshold_ms()
        watermark_ms = self._times.watermark_ms if self._times.watermark_present else None
        pointer = replace(
            pointer,
            batch=self._batch,
            watermark_ms=watermark_ms,
            schema_id=self._operator.schema_id,
            made_by=self._job.application_id,
        )
        if threshold_ms is not None:
            # This call saw to every row due before the threshold; those that stay due were written anew, in the run of
            # the new checkpoint. Without a new checkpoint there were none.
            fresh = pointer.ref != self._pointer.ref
            low_watermark_version = pointer.version if fresh else pointer.version + 1
            pointer = replace(
                pointer, timer_low_watermark_ms=threshold_ms, timer_low_watermark_version=low_watermark_version
            )
        return pointer

    def _hand_over(self, pointer: Pointer) -> None:
        self._state.update((pointer.encode(self._job.options.commit.pointer_write),))
        if self._job.timeout_conf == GroupStateTimeout.EventTimeTimeout:
            # Due at the next advance of the watermark, so that no advance passes a bucket by.
            self._state.setTimeoutTimestamp(max(self._times.watermark_ms, 1))
        elif self._job.timeout_conf == GroupStateTimeout.ProcessingTimeTimeout:
            _ask_for_next_call(self._state, pointer, self._times.processing_ms, self._task)

    # -- opening -----------------------------------------------------------------------------------

    def _admitted(self, pointer: Pointer | None) -> OperatorFile:
        job = self._job
        if pointer is not None:
            if pointer.buckets != job.options.buckets:
                raise BucketCountChangedError(
                    f"operator {job.operator!r} has its state in {pointer.buckets} buckets and the job asks for "
                    f"{job.options.buckets}: "
                    f"set buckets={pointer.buckets}, or start from a new checkpoint location."
                )
            if pointer.operator != job.operator:
                raise OperatorChangedError(
                    f"Spark's checkpoint holds the state of operator {pointer.operator!r} and the job asks for "
                    f"{job.operator!r}: use the old name, or start from a new checkpoint location."
                )
            if pointer.bucket != self._bucket_number:
                raise CorruptPointerError(
                    f"Spark's checkpoint holds bucket {pointer.bucket} of operator {job.operator!r} in the place of "
                    f"bucket {self._bucket_number}"
                )
            self._refuse_later(pointer)
        batch_ms = self._times.processing_ms if pointer is None else None
        ask = partial(
            self._shared.catalog.admit,
            self._operator_folder,
            job.operator_file(self._query_folder),
            job.options.strict,
            case_sensitive=job.case_sensitive,
        )
        in_force = ask(batch_ms=batch_ms)
        if pointer is not None and pointer.schema_id > in_force.schema_id:
            # What this process admitted once may have been succeeded since.
            in_force = ask(again=True)
        if pointer is not None and pointer.schema_id > in_force.schema_id:
            raise MissingCheckpointError(
                f"the state of operator {job.operator!r} was written under operator_{pointer.schema_id}.json, "
                "which is gone "
                f"from {self._files.root}: bring the file back."
            )
        return in_force

    def _refuse_later(self, pointer: Pointer) -> None:
        """Refuse a pointer of this batch or a later one: the checkpoint location holds files of two times.

        An action of a sink may run in a thread that an earlier batch has made, and that passes on what it was told then
        (PySpark's `InheritableThread`), also over later starts of the query. So within one application what a task is
        told is no evidence.
        """
        job, task = self._job, self._task
        if task.batch is None or pointer.batch < task.batch or pointer.made_by == job.application_id:
            return
        raise LineageError(
            f"Spark handed batch {task.batch} the pointer of batch {pointer.batch} (bucket {pointer.bucket} of "
            f"operator {job.operator!r}): its checkpoint location holds state of another time. Bring the location back "
            "as it was; to go back to an older batch, use python -m spark_state_ext rollback."
        )

    def _opened(self) -> Bucket:
        folder = local_folder(self._job, self._query_folder, self._operator.schema_id, self._bucket_number)
        writer = Writer(self._call.query_id, self._call.run_id, self._batch, socket.gethostname())
        # Rows are written under the schema in force now, whatever that of the pointer we were given.
        pointer = replace(self._pointer, schema_id=self._operator.schema_id)
        return Bucket(
            self._shared.stores.at(str(folder), self._schema),
            self._replicas,
            pointer,
            writer,
            self._scratch,
            self._shared.background,
            self._task.batches_retained,
            uploads=self._uploads,
            options=self._job.options.commit,
            restore_from=self._job.options.restore_from,
            # Not what Spark calls the run: `foreachBatch` may set another job group.
            run=Run(self._job.plan_id, self._task.stage),
            batch_ms=self._times.processing_ms,
            memory=self._shared.memory,
            # A run that has lost its state to another one need not read on.
            while_waiting=self._leases.hold,
        )
