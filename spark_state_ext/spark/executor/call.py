"""One call of Spark's stateful function: a bucket, its payloads, and its pointer. Runs on executors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from arrow_schemas.import_mark import ImportMark
from arrow_schemas.labels import label_bucket
from arrow_schemas.pointer import Pointer
from spark_state_ext.engine.aligned_timeouts import has_nothing_due, next_call_ms
from spark_state_ext.engine.bucket import CommitResult
from spark_state_ext.engine.deferral import Partitioning, TaskEnd
from spark_state_ext.engine.erase_turn import EraseTurn, EraseWatch
from spark_state_ext.engine.folders import operator_folders
from spark_state_ext.engine.housekeeping import CleanUps
from spark_state_ext.engine.job import PANDAS, Job
from spark_state_ext.engine.shared import Shared
from spark_state_ext.engine.task import TaskInfo
from spark_state_ext.errors import CorruptFileError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.retention import clean_up_due
from spark_state_ext.ownership.claim_notes import note_handed_over
from spark_state_ext.rescale.dividing import DividingStarts, Division
from spark_state_ext.rescale.finishing import Finishing
from spark_state_ext.rescale.in_force import DetachingRescaled
from spark_state_ext.savepoints.starting import Beginning
from spark_state_ext.spark.executor.key_work import KeyWork
from spark_state_ext.spark.executor.opening import (
    CallFolders,
    CallInfo,
    OpenBucket,
    open_bucket,
    refuse_without_import,
)
from spark_state_ext.spark.executor.packing_notes import KnownCounts, PackingNotes
from spark_state_ext.spark.executor.rescaling import Move, Rescales
from spark_state_ext.spark.shuffle.observed import numbers_of
from spark_state_ext.spark.shuffle.pack import event_times
from spark_state_ext.spark.shuffle.payload import HASH_COLUMN, decode
from spark_state_ext.spark.task import current_task
from spark_state_ext.store.committed import CommittedRecord, write_committed
from spark_state_ext.worker.memory import settle
from spark_state_ext.worker.metrics import CallMetrics, CpuTime, timing, whole_ms
from spark_state_ext.worker.process import namespace
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
    worker: Worker | None = None,
    task: TaskInfo | None = None,
) -> Iterator[pd.DataFrame]:
    """Body of Spark's stateful function, keyed by bucket label."""
    settle()
    job = Job.from_plain(plain)
    task = task or current_task(job)
    if state.hasTimedOut and _rested(job, state, task):
        return
    cpu = CpuTime.started()
    info = CallInfo.of(job, label_bucket(int(key[0])), state, task)
    call = _BucketCall(worker or Worker.current(), info, function, state, cpu)
    try:
        yield from call.run(frames)
    except BaseException as error:
        # Interrupts and a consumer that goes away too: nothing is to be read on for a call that is over.
        call.give_up()
        if isinstance(error, Exception):
            call.tell_of_failure()
        raise


def _rested(job: Job, state: GroupState, task: TaskInfo) -> bool:
    """Hand a pointer on as it is, where the bucket is called only because its neighbours are."""
    if job.timeout_conf != GroupStateTimeout.ProcessingTimeTimeout:
        return False
    stored, now_ms = bytes(state.get[0]), state.getCurrentProcessingTimeMs()
    if ImportMark.decode(stored) is not None:
        return False
    pointer = Pointer.decode(stored, job.options.pointer_read)
    if not has_nothing_due(pointer, now_ms):
        return False
    state.update((stored,))
    _ask_for_next_call(state, pointer, now_ms, task)
    return True


def _ask_for_next_call(state: GroupState, pointer: Pointer, now_ms: int, task: TaskInfo) -> None:
    """Under processing-time timeouts."""
    after_ms = next_call_ms(pointer.earliest_timeout_ms, now_ms, alone=task.state_has_ids)
    if after_ms is not None:
        state.setTimeoutDuration(after_ms)


class _BucketCall:
    """One call, from its payloads to the pointer that it hands back."""

    def __init__(
        self,
        worker: Worker,
        info: CallInfo,
        function: Callable[..., Any],
        state: GroupState,
        cpu: CpuTime,
    ) -> None:
        self._shared = Shared.of(worker)
        self._starts = worker.own(DividingStarts)
        self._rescales = worker.own(Rescales)
        self._finishing = worker.own(Finishing)
        self._detaching = worker.own(DetachingRescaled)
        self._known_counts = worker.own(KnownCounts)
        self._info = info
        self._job = info.job
        self._task = info.task
        self._function = function
        self._state = state
        self._cpu = cpu
        self._notes = PackingNotes()
        # What a bucket without state begins with, where the job says so.
        self._beginning: Beginning | None = None
        # Before the call has come so far, there is nothing to end.
        self._opened: OpenBucket | None = None
        self._call = CallMetrics(
            info.task.query_id,
            info.task.run_id or self._job.plan_id,
            info.batch,
            self._job.operator,
            info.bucket,
            job_buckets=self._job.options.buckets,
        )

    def give_up(self) -> None:
        """The call failed: end what it still has under way, and have the next one begin with other managers."""
        if self._opened is not None:
            self._opened.bucket.close()
            self._opened.let_go()
            self._shared.replicas.forget(self._job, self._opened.query_folder, self._info.bucket)

    def tell_of_failure(self) -> None:
        """Metrics of a call that failed. Spark ends its worker."""
        if not self._shared.metrics.is_ours:
            return  # a child that the user's function forked: a thread of the worker may hold the locks for ever
        if self._opened is not None:
            self._count_beside(self._opened)
        self._shared.metrics.fail(self._call)

    # -- the call ----------------------------------------------------------------------------------

    def run(self, frames: Iterable[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        if Rescales.is_no_more(self._job, self._info.bucket, self._info.stored):
            return
        started_s = time.perf_counter()
        folders = CallFolders.of(self._job)
        sorter = HashSorter(folders.scratch, HASH_COLUMN, self._job.options.memory_bytes_max)
        tried = partial(retried, timeout_s=self._job.options.commit.commit_timeout_ms / 1000)
        move: Move | None = tried(lambda: self._rescales.of(self._job, self._info.bucket, self._info.stored))
        if move is not None and self._moves(move, sorter, frames, folders):
            # The bucket is no more.
            return
        if move is not None:
            pass
        elif self._info.stored is None:
            self._beginning = self._starts.of(self._job, self._info.bucket)
            refuse_without_import(self._info, self._beginning)
            if self._beginning is not None:
                self._info = self._info.not_before(self._beginning.pointer)
            # Where the state begins is told by the heartbeat, which is one of the payloads.
            self._fill(sorter, frames, folders.operator)
        # An imported bucket's first batch may have no rows, and so no heartbeat.
        imported = self._info.imported.nonce if self._info.imported is not None else b""
        nonce = self._notes.heartbeat or imported
        opened = self._opened = open_bucket(self._shared, self._info, folders, nonce, self._beginning)
        self._call.query_id = self._task.query_id or opened.query_folder
        clean_ups = self._clean_ups(opened, folders.operator)
        # While the function runs; the commit waits for it.
        clean_ups.probe(opened.pointer, self._job.plan_id)
        if self._info.stored is not None and move is None:
            self._fill(sorter, frames, folders.operator)
        self._notes.record_growth(self._known_counts, self._job, opened.files)
        work, bucket, erase_turn = self._key_work(opened), opened.bucket, self._erase_turn(opened)
        rows = SpillBuffer(folders.scratch, self._job.options.memory_bytes_max)
        # Also a bucket without rows is restored, so that no later batch has to wait for it.
        with timing(self._call, "read_ms"):
            bucket.read(lambda view: None)
            erased = erase_turn.carry_out(work.erase)
        self._tell_what_is_committed(opened, work.expires_by_ms)
        for frame in work.run(sorter.ranges(), rows):
            # A child that the function forked, and that came back from it, ends here.
            bucket.store.check_process()
            self._cpu.pause()
            yield frame
            # What Spark does with the frame is not ours.
            self._cpu.resume()
        task_end, partitioning = self._shared.task_ends.of(self._task.attempt), self._partitioning()
        with timing(self._call, "commit_ms"):
            made = self._committed(opened, clean_ups, rows, task_end, partitioning)
            pointer = erase_turn.marked(self._stamped(made.pointer, opened, work.threshold_ms()), erased)
            at = opened.parents_at(self._job)
            pointer = self._finishing.noted(at, opened.pointer, pointer, opened.leases.check)
        opened.let_go()
        self._look_after(opened, folders, pointer, clean_ups, erase_turn)
        if self._job.timeout_conf == GroupStateTimeout.ProcessingTimeTimeout:
            pointer = replace(pointer, earliest_timeout_ms=work.earliest_timeout(rows))
        self._hand_over(pointer)
        if move is not None and self._info.move is None:
            move.note(pointer)
        self._shared.housekeeping.reclaim_in_turn(folders.stores, folders.scratch, self._job.options.local_keep_s)
        self._call.total_ms = 1000 * (time.perf_counter() - started_s)
        self._call.cpu_ms = 1000 * self._cpu.spent_s()
        self._count(replace(made, pointer=pointer), opened, rows)
        self._call.deleted_files = clean_ups.deleted_files()
        log = self._shared.metrics.at(folders.stores / "metrics")
        log.add(self._call)
        if partitioning.is_last(task_end.called):
            log.end_task()
        if self._job.api != PANDAS:
            yield numbers_of(self._call)

    def _look_after(
        self, opened: OpenBucket, folders: CallFolders, new: Pointer, clean_ups: CleanUps, erase_turn: EraseTurn
    ) -> None:
        """What a call does besides, for the bucket and, as the query's first bucket, for the query."""
        options, is_first = self._job.options, self._info.bucket == 0
        if self._info.stored is None and new.claim is not None:
            note_handed_over(opened.files, new.claim)
        if is_first and self._info.stored is not None:
            self._detaching.in_turn(self._job, opened.files, opened.leases.check, self._shared.background)
            erase_turn.look_after(
                lambda: options.clean_up and not self._shared.holds.living(opened.files), opened.leases.check
            )
        if is_first:
            self._shared.housekeeping.drop_spill_files(
                folders.operator, self._task, new.calls, self._info.times.processing_ms
            )
        if options.clean_up:
            clean_ups.in_turn(opened.pointer, new)
        if options.clean_up and is_first and self._info.stored is not None:
            self._finish(opened, folders, new)

    def _finish(self, opened: OpenBucket, folders: CallFolders, new: Pointer) -> None:
        """Now and then remove what the query was rescaled from."""
        retained = self._task.batches_retained
        if clean_up_due(new.calls, 0, retained):
            self._finishing.in_turn(
                operator_folders(self._job),
                opened.query_folder,
                self._job.plan_id,
                opened.pointer,
                retained,
                opened.leases.check,
                lambda name: bool(self._shared.holds.living(folders.operator.child(name))),
                self._shared.background,
            )

    def _moves(self, move: Move, sorter: HashSorter, frames: Iterable[pd.DataFrame], folders: CallFolders) -> bool:
        """Read the rows, and see how the bucket of a query that is rescaled goes on; whether it does not."""
        tried = partial(retried, timeout_s=self._job.options.commit.commit_timeout_ms / 1000)
        if move.stored is None:
            # Called for the first time, so with a heartbeat.
            self._begin_moved(move, tried)
        self._fill(sorter, frames, folders.operator)
        if move.stored is None:
            return False
        if self._notes.heartbeat is None:
            # Not every bucket is called: they all go on as they were.
            self._job = move.as_before()
            self._info = replace(self._info, job=self._job)
            return False
        tried(lambda: move.give(self._shared.replicas, folders.scratch))
        if move.ends:
            self._state.remove()
            return True
        self._begin_moved(move, tried)
        return False

    def _begin_moved(self, move: Move, tried: Callable[[Callable[[], Division]], Division]) -> None:
        self._beginning = tried(move.beginning)
        self._info = replace(self._info, stored=None, move=move).not_before(self._beginning.pointer)

    def _tell_what_is_committed(self, opened: OpenBucket, expires_by_ms: int | None) -> None:
        """To other processes of the machine: what Spark hands out is, up to the batch before."""
        batch = opened.pointer.batch if self._task.batch is None else self._info.batch - 1
        record = CommittedRecord(
            opened.pointer.ref, batch, int(time.time() * 1000), self._job.plan_id, namespace(), expires_by_ms
        )
        write_committed(opened.bucket.store.folder, record, opened.operator)

    def _clean_ups(self, opened: OpenBucket, root: Folder) -> CleanUps:
        source = self._job.options.source_partition
        return CleanUps(
            opened.bucket,
            opened.replicas,
            opened.leases,
            self._task.batches_retained,
            opened.files,
            self._shared.housekeeping,
            partial(
                self._shared.replicas.bring_back,
                root,
                opened.query_folder,
                opened.operator,
                None if source is None else source.assignment,
            ),
        )

    def _key_work(self, opened: OpenBucket) -> KeyWork:
        return KeyWork(
            self._job,
            self._function,
            opened.bucket,
            opened.schema,
            self._info.times,
            self._info.batch,
            self._call,
            opened.leases.hold,
        )

    def _partitioning(self) -> Partitioning:
        return Partitioning(
            self._job.plan_id if self._task.batch is not None else "",
            self._task.partitions,
            self._task.partition,
            self._job.options.buckets,
            self._shared.differences,
        )

    def _fill(self, sorter: HashSorter, frames: Iterable[pd.DataFrame], root: Folder) -> None:
        for batch in self._payload_rows(frames, root):
            self._call.rows += batch.num_rows
            sorter.add(batch)

    def _committed(
        self, opened: OpenBucket, clean_ups: CleanUps, rows: SpillBuffer, end: TaskEnd, partitioning: Partitioning
    ) -> CommitResult:
        """The commit; what its pointer claims is so when the task's last call returns."""
        number, bucket, options = self._info.bucket, opened.bucket, self._job.options.commit
        clean_ups.raise_failed()
        if clean_ups.probed():
            # Where another backend than the root has lost the operator's files too.
            opened.prepare()
        has_heartbeat = self._notes.heartbeat is not None
        expected = partitioning.expected(opened.pointer, opened.files) if has_heartbeat else frozenset[int]()
        may_defer = end.may_leave(number, expected)
        room_bytes = options.task_inline_bytes_max - end.inline_bytes
        made = bucket.commit(rows, has_heartbeat, may_defer=may_defer, room_bytes=room_bytes)
        end.inline_bytes += sum(len(delta.data) for delta in made.pointer.inline)
        waited_s = end.over(number, made.deferred, expected, self._shared.uploads, options, opened.leases.hold)
        pointer = made.pointer
        if has_heartbeat:
            pointer = replace(pointer, partitioning=partitioning.noted(number, opened.files))
        return replace(made, pointer=pointer, waited_s=made.waited_s + waited_s)

    def _count(self, made: CommitResult, opened: OpenBucket, rows: SpillBuffer) -> None:
        """What the call's metrics say of the commit."""
        call, pointer, sizes, now_ms = self._call, made.pointer, made.sizes, int(time.time() * 1000)
        self._count_beside(opened)
        call.ended_ms, call.changed_rows = now_ms, rows.rows
        call.state_rows, call.state_rows_min, call.state_bytes = sizes.rows_max, sizes.rows_min, sizes.size_bytes
        call.wait_ms = 1000 * made.waited_s
        call.delta_bytes = pointer.lineage[-1].size_bytes if pointer.ref != opened.pointer.ref else 0
        call.inline_bytes = sum(len(delta.data) for delta in pointer.inline)
        call.oldest_inline_ms = max((now_ms - delta.made_ms for delta in pointer.inline), default=0)
        call.restored_files, call.restore_gaps = opened.bucket.fetched_files, opened.bucket.restore_gaps
        call.cache_hit = call.restored_files == 0
        call.lease_age_ms = whole_ms(opened.leases.age_s)

    def _count_beside(self, opened: OpenBucket) -> None:
        """What they say of work beside batches."""
        call, store, uploads = self._call, opened.bucket.store, self._shared.uploads
        deltas, snapshots = uploads.sent(store), uploads.tallies.take(store)
        call.uploads, call.upload_failures = deltas.confirmed, deltas.failures
        call.upload_ms, call.uploaded_bytes = 1000 * deltas.took_s, deltas.size_bytes
        call.snapshots, call.snapshot_failures = snapshots.confirmed, snapshots.failures
        call.snapshot_ms, call.snapshot_bytes = 1000 * snapshots.took_s, snapshots.size_bytes

    # -- erase requests ----------------------------------------------------------------------------

    def _erase_turn(self, opened: OpenBucket) -> EraseTurn:
        commit = self._job.options.commit
        return EraseTurn(
            Worker.current().own(EraseWatch),
            opened.files,
            opened.schema,
            opened.pointer,
            (self._job.plan_id, self._info.batch, self._info.times.processing_ms),
            commit.format_1_too,
            commit.commit_timeout_ms / 1000,
            self._job.options.erase_requests,
        )

    # -- input -------------------------------------------------------------------------------------

    def _payload_rows(self, frames: Iterable[pd.DataFrame], root: Folder) -> Iterator[pa.RecordBatch]:
        late_until_us = self._late_threshold_us()

        def load_spilled(name: str, offset: int, length: int) -> bytes:
            return root.get_range(name, offset, offset + length)

        for frame in frames:
            if "payload" not in frame.columns:
                continue
            for payload in frame["payload"]:
                if not isinstance(payload, (bytes, bytearray)):
                    raise CorruptFileError(f"a payload of bucket {self._info.bucket} is {type(payload).__name__}")
                payload = bytes(payload)
                if self._notes.take(payload):
                    continue
                for batch in decode(payload, load_spilled):
                    yield batch if late_until_us is None else self._on_time(batch, late_until_us)

    def _late_threshold_us(self) -> int | None:
        """Rows at or before this event time are late; Spark filters only under the event-time timeout."""
        job, stored = self._job, self._info.stored
        if job.timeout_conf != GroupStateTimeout.EventTimeTimeout or job.event_time_position < 0:
            return None
        if not job.late_by_previous_watermark:
            return self._info.times.watermark_ms * 1000
        before = self._beginning.pointer if stored is None and self._beginning is not None else stored
        return ((before.watermark_ms if before is not None else None) or 0) * 1000

    def _on_time(self, batch: pa.RecordBatch, late_until_us: int) -> pa.RecordBatch:
        times = event_times(self._job, pa.Table.from_batches([batch]))
        assert times is not None, "checked in _late_threshold_us"
        # A NULL event time is never late.
        late = times.combine_chunks().fill_null(2**63 - 1).to_numpy(zero_copy_only=False) <= late_until_us
        return batch.filter(pa.array(~late)) if late.any() else batch

    # -- pointer -----------------------------------------------------------------------------------

    def _stamped(self, pointer: Pointer, opened: OpenBucket, threshold_ms: int | None) -> Pointer:
        times = self._info.times
        pointer = replace(
            pointer,
            batch=self._info.batch,
            watermark_ms=times.watermark_ms if times.watermark_present else None,
            schema_id=opened.operator.schema_id,
            made_by=self._job.application_id,
        )
        if threshold_ms is None:
            return pointer
        # This call saw to every row due before the threshold; those that stay due were written anew, in the run of
        # the new checkpoint. Without a new checkpoint there were none.
        fresh = pointer.ref != opened.pointer.ref
        low_watermark_version = pointer.version if fresh else pointer.version + 1
        return replace(pointer, timer_low_watermark_ms=threshold_ms, timer_low_watermark_version=low_watermark_version)

    def _hand_over(self, pointer: Pointer) -> None:
        times = self._info.times
        self._state.update((pointer.encode(self._job.options.commit.pointer_write),))
        if self._job.timeout_conf == GroupStateTimeout.EventTimeTimeout:
            # Due at the next advance of the watermark, so that no advance passes a bucket by.
            self._state.setTimeoutTimestamp(max(times.watermark_ms, 1))
        elif self._job.timeout_conf == GroupStateTimeout.ProcessingTimeTimeout:
            _ask_for_next_call(self._state, pointer, times.processing_ms, self._task)
