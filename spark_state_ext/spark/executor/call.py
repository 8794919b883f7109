"""One call of Spark's stateful function: a bucket, its payloads, and its pointer. Runs on executors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from arrow_schemas.import_mark import ImportMark
from arrow_schemas.labels import label_bucket
from arrow_schemas.pointer import Pointer
from spark_state_ext.beginning.detachment import Detaching
from spark_state_ext.beginning.rescaling import is_dropped_bucket
from spark_state_ext.beginning.starts import Starts
from spark_state_ext.engine.aligned_timeouts import compute_next_call_ms, has_nothing_due
from spark_state_ext.engine.bucket import CommitResult
from spark_state_ext.engine.deferral import Partitioning, TaskEnd
from spark_state_ext.engine.erase_requests import EraseTurn, EraseWatch
from spark_state_ext.engine.folders import operator_folders
from spark_state_ext.engine.housekeeping import CleanUps
from spark_state_ext.engine.job import PANDAS, Job
from spark_state_ext.engine.process_state import Shared
from spark_state_ext.engine.task import TaskInfo
from spark_state_ext.files.retention import clean_up_due
from spark_state_ext.ownership.claim_notes import note_handed_over
from spark_state_ext.rescale.removal import Finishing
from spark_state_ext.spark.executor.call_info import CallInfo
from spark_state_ext.spark.executor.decision import Begin, End, Resume, decide, look
from spark_state_ext.spark.executor.decoded_batch import Decoded, decode_batch
from spark_state_ext.spark.executor.key_work import KeyWork
from spark_state_ext.spark.executor.opened_bucket import CallFolders, OpenBucket, open_bucket
from spark_state_ext.spark.executor.packing_notes import KnownCounts
from spark_state_ext.spark.shuffle.progress_numbers import encode_numbers
from spark_state_ext.spark.task import current_task
from spark_state_ext.store.committed_record import CommittedRecord, write_committed
from spark_state_ext.worker.memory import tune_memory
from spark_state_ext.worker.metrics import CallMetrics, CpuTime, time_block, to_whole_ms
from spark_state_ext.worker.process import get_pid_namespace
from spark_state_ext.worker.retry import call_with_retries
from spark_state_ext.worker.spill import SpillBuffer
from spark_state_ext.worker.worker import Worker

__all__ = ["run_bucket"]


def run_bucket(
    plain: dict[str, Any],
    function: Callable[..., Any],
    key: tuple[Any, ...],
    frames: Iterable[pd.DataFrame],
    state: GroupState,
    worker: Worker | None = None,
    task: TaskInfo | None = None,
) -> Iterator[pd.DataFrame]:
    """Process one call of Spark's stateful function, keyed by bucket label; yield output frames."""
    tune_memory()
    job = Job.from_plain(plain)
    task = task or current_task(job)
    if state.hasTimedOut and _skip_idle_bucket(job, state, task):
        return
    cpu = CpuTime.started()
    info = CallInfo.of(job, label_bucket(int(key[0])), state, task)
    if is_dropped_bucket(job, info.bucket, info.stored):
        return
    process, started_s = _ProcessObjects.of(worker or Worker.current()), time.perf_counter()
    metrics = _make_metrics(info)
    opened: OpenBucket | None = None
    try:
        folders = CallFolders.of(job)
        retry = partial(call_with_retries, timeout_s=job.options.commit.commit_timeout_ms / 1000)
        outlook = look(info, process.starts, retry)
        batch = decode_batch(outlook, frames, folders)
        metrics.rows = batch.rows
        has_heartbeat = batch.notes.heartbeat is not None
        decision = decide(outlook, has_heartbeat, process.shared.replicas, folders.scratch, retry)
        if isinstance(decision, End):
            state.remove()
            return
        opened = open_bucket(process.shared, decision, folders, batch.nonce)
        metrics.query_id = info.task.query_id or opened.query_folder
        call = _OpenCall(process, decision, folders, opened, batch, metrics, state)
        yield from call.run(function, cpu, started_s)
    except BaseException as error:
        # Also for interrupts, and if the consumer stops: the call is over and must not read further.
        if opened is not None:
            # The next call opens new managers.
            opened.bucket.close()
            opened.close_sources()
            process.shared.replicas.forget(job, opened.query_folder, info.bucket)
        if isinstance(error, Exception):
            _report_failure(process.shared, metrics, opened)
        raise


def _skip_idle_bucket(job: Job, state: GroupState, task: TaskInfo) -> bool:
    """Hand the pointer back to Spark unchanged, and return True, if only other buckets have work in this call."""
    if job.timeout_conf != GroupStateTimeout.ProcessingTimeTimeout:
        return False
    stored, now_ms = bytes(state.get[0]), state.getCurrentProcessingTimeMs()
    if ImportMark.decode(stored) is not None:
        return False
    pointer = Pointer.decode(stored, job.options.pointer_read)
    if not has_nothing_due(pointer, now_ms):
        return False
    state.update((stored,))
    _request_next_call(state, pointer, now_ms, task)
    return True


def _request_next_call(state: GroupState, pointer: Pointer, now_ms: int, task: TaskInfo) -> None:
    """Set the bucket's next timeout in Spark, under processing-time timeouts."""
    after_ms = compute_next_call_ms(pointer.earliest_timeout_ms, now_ms, alone=task.state_has_ids)
    if after_ms is not None:
        state.setTimeoutDuration(after_ms)


@dataclass(frozen=True)
class _ProcessObjects:
    """Objects that a worker process has once, for all its calls."""

    shared: Shared
    starts: Starts
    finishing: Finishing
    detaching: Detaching
    known_counts: KnownCounts

    @staticmethod
    def of(worker: Worker) -> _ProcessObjects:
        return _ProcessObjects(
            Shared.of(worker),
            worker.own(Starts),
            worker.own(Finishing),
            worker.own(Detaching),
            worker.own(KnownCounts),
        )


def _make_metrics(info: CallInfo) -> CallMetrics:
    return CallMetrics(
        info.task.query_id,
        info.task.run_id or info.job.plan_id,
        info.batch,
        info.job.operator,
        info.bucket,
        job_buckets=info.job.options.buckets,
    )


def _report_failure(shared: Shared, metrics: CallMetrics, opened: OpenBucket | None) -> None:
    """Write the metrics of a failed call. Spark ends its worker."""
    if not shared.metrics.is_ours:
        return  # a forked child of the user's function, in which a lock of another thread may stay held for ever
    if opened is not None:
        _count_background_work(metrics, opened, shared)
    shared.metrics.fail(metrics)


class _OpenCall:
    """A call whose bucket is open: it processes the rows and returns the new pointer to Spark."""

    def __init__(
        self,
        process: _ProcessObjects,
        decision: Resume | Begin,
        folders: CallFolders,
        opened: OpenBucket,
        batch: Decoded,
        metrics: CallMetrics,
        state: GroupState,
    ) -> None:
        self._process = process
        self._shared = process.shared
        self._decision = decision
        self._info = decision.info
        self._job = decision.info.job
        self._task = decision.info.task
        self._folders = folders
        self._opened = opened
        self._batch = batch
        self._metrics = metrics
        self._state = state

    def run(self, function: Callable[..., Any], cpu: CpuTime, started_s: float) -> Iterator[pd.DataFrame]:
        """Run the function, commit its changes, and hand the new pointer to Spark."""
        opened, bucket, folders = self._opened, self._opened.bucket, self._folders
        clean_ups = self._make_clean_ups()
        # The probe runs in parallel to the function; the commit waits for it.
        clean_ups.probe(opened.pointer, self._job.plan_id)
        self._batch.notes.record_growth(self._process.known_counts, self._job, opened.files)
        work, erase_turn = self._make_key_work(function), self._make_erase_turn()
        rows = SpillBuffer(folders.scratch, self._job.options.memory_bytes_max)
        # A bucket without rows is restored too, so that no later batch has to wait for it.
        with time_block(self._metrics, "read_ms"):
            bucket.read(lambda view: None)
            erased = erase_turn.carry_out(work.erase)
        self._record_committed(work.expires_by_ms)
        for frame in work.run(self._batch.sorter.ranges(), rows):
            # A child process that the function forked and that returned from it ends here.
            bucket.store.check_process()
            cpu.pause()
            yield frame
            # Spark's work on the frame is not counted.
            cpu.resume()
        task_end, partitioning = self._shared.task_ends.of(self._task.attempt), self._make_partitioning()
        with time_block(self._metrics, "commit_ms"):
            result = self._commit(clean_ups, rows, task_end, partitioning)
            pointer = erase_turn.marked(self._stamp(result.pointer, work.get_threshold_ms()), erased)
            parent_folders = opened.iterate_parent_folders(self._job)
            pointer = self._process.finishing.noted(parent_folders, opened.pointer, pointer, opened.leases.check)
        opened.close_sources()
        self._run_maintenance(pointer, clean_ups, erase_turn)
        if self._job.timeout_conf == GroupStateTimeout.ProcessingTimeTimeout:
            pointer = replace(pointer, earliest_timeout_ms=work.find_earliest_timeout(rows))
        self._hand_over(pointer)
        if isinstance(self._decision, Resume) and self._decision.waiting is not None:
            self._decision.waiting.note(pointer)
        self._shared.housekeeping.reclaim_in_turn(folders.stores, folders.scratch, self._job.options.local_keep_s)
        self._metrics.total_ms = 1000 * (time.perf_counter() - started_s)
        self._metrics.cpu_ms = 1000 * cpu.spent_s()
        self._count(replace(result, pointer=pointer), rows)
        self._metrics.deleted_files = clean_ups.deleted_files()
        log = self._shared.metrics.at(folders.stores / "metrics")
        log.add(self._metrics)
        if partitioning.is_last(task_end.called):
            log.end_task()
        if self._job.api != PANDAS:
            yield encode_numbers(self._metrics)

    def _record_committed(self, expires_by_ms: int | None) -> None:
        """Record for other processes of the machine that the checkpoint which Spark handed out is committed."""
        opened = self._opened
        batch = opened.pointer.batch if self._task.batch is None else self._info.batch - 1
        record = CommittedRecord(
            opened.pointer.ref, batch, int(time.time() * 1000), self._job.plan_id, get_pid_namespace(), expires_by_ms
        )
        write_committed(opened.bucket.store.folder, record, opened.operator)

    def _make_clean_ups(self) -> CleanUps:
        opened, source = self._opened, self._job.options.source_partition
        return CleanUps(
            opened.bucket,
            opened.replicas,
            opened.leases,
            self._task.batches_retained,
            opened.files,
            self._shared.housekeeping,
            partial(
                self._shared.replicas.bring_back,
                self._folders.operator,
                opened.query_folder,
                opened.operator,
                None if source is None else source.assignment,
            ),
        )

    def _make_key_work(self, function: Callable[..., Any]) -> KeyWork:
        return KeyWork(
            self._job,
            function,
            self._opened.bucket,
            self._opened.schema,
            self._info.times,
            self._info.batch,
            self._metrics,
            self._opened.leases.hold,
        )

    def _make_partitioning(self) -> Partitioning:
        return Partitioning(
            self._job.plan_id if self._task.batch is not None else "",
            self._task.partitions,
            self._task.partition,
            self._job.options.buckets,
            self._shared.differences,
        )

    def _commit(self, clean_ups: CleanUps, rows: SpillBuffer, end: TaskEnd, partitioning: Partitioning) -> CommitResult:
        """Commit the changed rows; what the pointer claims as confirmed is true when the task's last call returns."""
        opened, number, options = self._opened, self._info.bucket, self._job.options.commit
        clean_ups.raise_failed()
        if clean_ups.probed():
            # A backend other than the root may have lost the operator's files too.
            opened.prepare()
        has_heartbeat = self._batch.notes.heartbeat is not None
        expected = partitioning.expected(opened.pointer, opened.files) if has_heartbeat else frozenset[int]()
        may_defer = end.may_leave(number, expected)
        room_bytes = options.task_inline_bytes_max - end.inline_bytes
        result = opened.bucket.commit(rows, has_heartbeat, may_defer=may_defer, room_bytes=room_bytes)
        end.inline_bytes += sum(len(delta.data) for delta in result.pointer.inline)
        waited_s = end.over(number, result.deferred, expected, self._shared.uploads, options, opened.leases.hold)
        pointer = result.pointer
        if has_heartbeat:
            pointer = replace(pointer, partitioning=partitioning.noted(number, opened.files))
        return replace(result, pointer=pointer, waited_s=result.waited_s + waited_s)

    def _count(self, result: CommitResult, rows: SpillBuffer) -> None:
        """Fill in the call's metrics of the commit."""
        call, pointer, sizes, now_ms = self._metrics, result.pointer, result.sizes, int(time.time() * 1000)
        opened = self._opened
        _count_background_work(call, opened, self._shared)
        call.ended_ms, call.changed_rows = now_ms, rows.rows
        call.state_rows, call.state_rows_min, call.state_bytes = (
            sizes.rows_max,
            sizes.rows_min,
            sizes.size_bytes,
        )
        call.wait_ms = 1000 * result.waited_s
        call.delta_bytes = pointer.lineage[-1].size_bytes if pointer.ref != opened.pointer.ref else 0
        call.inline_bytes = sum(len(delta.data) for delta in pointer.inline)
        call.oldest_inline_ms = max((now_ms - delta.made_ms for delta in pointer.inline), default=0)
        call.restored_files, call.restore_gaps = opened.bucket.fetched_files, opened.bucket.restore_gaps
        call.cache_hit = call.restored_files == 0
        call.lease_age_ms = to_whole_ms(opened.leases.age_s)

    def _make_erase_turn(self) -> EraseTurn:
        opened, commit = self._opened, self._job.options.commit
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

    def _stamp(self, pointer: Pointer, threshold_ms: int | None) -> Pointer:
        opened, times = self._opened, self._info.times
        pointer = replace(
            pointer,
            batch=self._info.batch,
            watermark_ms=times.watermark_ms if times.watermark_present else None,
            schema_id=opened.operator.schema_id,
            made_by=self._job.application_id,
        )
        if threshold_ms is None:
            return pointer
        # This call processed every row due before the threshold; rows that stay due were written again, in the run of
        # the new checkpoint. Without a new checkpoint there were no such rows.
        fresh = pointer.ref != opened.pointer.ref
        low_watermark_version = pointer.version if fresh else pointer.version + 1
        return replace(pointer, timer_low_watermark_ms=threshold_ms, timer_low_watermark_version=low_watermark_version)

    def _hand_over(self, pointer: Pointer) -> None:
        times = self._info.times
        self._state.update((pointer.encode(self._job.options.commit.pointer_write),))
        if self._job.timeout_conf == GroupStateTimeout.EventTimeTimeout:
            # Due at the next advance of the watermark, so that every advance calls every bucket.
            self._state.setTimeoutTimestamp(max(times.watermark_ms, 1))
        elif self._job.timeout_conf == GroupStateTimeout.ProcessingTimeTimeout:
            _request_next_call(self._state, pointer, times.processing_ms, self._task)

    def _run_maintenance(self, new: Pointer, clean_ups: CleanUps, erase_turn: EraseTurn) -> None:
        """Run maintenance for the bucket and, in the query's first bucket, for the query."""
        options, is_first, opened = self._job.options, self._info.bucket == 0, self._opened
        if self._info.stored is None and new.claim is not None:
            note_handed_over(opened.files, new.claim)
        if is_first and self._info.stored is not None:
            self._process.detaching.in_turn(self._job, opened.files, opened.leases.check, self._shared.background)
            erase_turn.look_after(
                lambda: options.clean_up and not self._shared.holds.living(opened.files), opened.leases.check
            )
        if is_first:
            self._shared.housekeeping.drop_spill_files(
                self._folders.operator, self._task, new.calls, self._info.times.processing_ms
            )
        if options.clean_up:
            clean_ups.in_turn(opened.pointer, new)
        if options.clean_up and is_first and self._info.stored is not None:
            self._finish_rescaling(new)

    def _finish_rescaling(self, new: Pointer) -> None:
        """Now and then remove the state that the query was rescaled from."""
        opened, retained = self._opened, self._task.batches_retained
        if clean_up_due(new.calls, 0, retained):
            self._process.finishing.in_turn(
                operator_folders(self._job),
                opened.query_folder,
                self._job.plan_id,
                opened.pointer,
                retained,
                opened.leases.check,
                lambda name: bool(self._shared.holds.living(self._folders.operator.child(name))),
                self._shared.background,
            )


def _count_background_work(metrics: CallMetrics, opened: OpenBucket, shared: Shared) -> None:
    """Fill in a call's metrics of work in the background."""
    store, uploads = opened.bucket.store, shared.uploads
    deltas, snapshots = uploads.sent(store), uploads.tallies.take(store)
    metrics.uploads, metrics.upload_failures = deltas.confirmed, deltas.failures
    metrics.upload_ms, metrics.uploaded_bytes = 1000 * deltas.took_s, deltas.size_bytes
    metrics.snapshots, metrics.snapshot_failures = snapshots.confirmed, snapshots.failures
    metrics.snapshot_ms, metrics.snapshot_bytes = 1000 * snapshots.took_s, snapshots.size_bytes
