"""Open a bucket's state for a call: take the lease, check that the state is this job's, and prepare the backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from arrow_schemas.bucket_map import BucketMap
from arrow_schemas.lineage import Writer
from arrow_schemas.operator import OperatorFile
from arrow_schemas.pointer import Pointer
from arrow_schemas.row import RowSchema
from spark_state_ext.backends.replication import Replica, Restorable, close_all
from spark_state_ext.beginning.first_call import begin_bucket, claim_source
from spark_state_ext.beginning.initial_state import InitialState
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.commit.failures import Run
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.engine.folders import local_folder, operator_folder, operator_folders
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.process_state import Shared
from spark_state_ext.engine.replicas import Leases, names_backend_with_state
from spark_state_ext.errors import (
    BucketCountChangedError,
    CorruptPointerError,
    LineageError,
    MissingCheckpointError,
    OperatorChangedError,
)
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.operator_catalog import is_new_query_folder, newest_operator
from spark_state_ext.files.partition_files import record_assignment, refuse_assignment
from spark_state_ext.ownership.lease_record import Claim
from spark_state_ext.rescale.folders import first_folder
from spark_state_ext.rescale.origin import Origin, find_origin
from spark_state_ext.restore.lazy import lazy_options
from spark_state_ext.spark.executor.call_info import CallInfo
from spark_state_ext.spark.executor.decision import Begin, Resume, Retry
from spark_state_ext.timeline.epochs import Position, parse_run_id
from spark_state_ext.timeline.records import RunStart
from spark_state_ext.worker.host import host_name
from spark_state_ext.worker.local_folders import scratch_folder, stores_folder
from spark_state_ext.worker.retry import call_with_retries

__all__ = ["CallFolders", "OpenBucket", "open_bucket"]


@dataclass(frozen=True)
class CallFolders:
    """Folders that a call reads and writes.

    Parameters
    ----------
    operator
        The folder ``<root>/<operator>``.
    stores
        The folder of the local stores.
    scratch
        The local folder for temporary files.
    """

    operator: Folder
    stores: Path
    scratch: Path

    @staticmethod
    def of(job: Job) -> CallFolders:
        """Return the folders of a job; create the local ones."""
        local_dir = job.options.local_dir
        return CallFolders(operator_folder(job), stores_folder(local_dir), scratch_folder(local_dir))


@dataclass(frozen=True)
class OpenBucket:
    """A bucket whose state is open.

    Parameters
    ----------
    query_folder, files
        The name of the query folder, and the folder.
    leases
        The leases of the run, which it holds.
    operator, schema
        The operator file in force, and its row schema.
    pointer
        The input pointer; a new one if the bucket has no state yet.
    replicas
        The bucket's backends.
    bucket
        The bucket.
    prepare
        Writes the operator's shared files to backends that do not have them.
    sources
        Backends of another query, or a savepoint's folder, which only this call reads from.
    origin
        The origin of a rescaled bucket, as long as the bucket needs it.
    """

    query_folder: str
    files: Folder
    leases: Leases
    operator: OperatorFile
    schema: RowSchema
    pointer: Pointer
    replicas: list[Replica]
    bucket: Bucket
    prepare: Callable[[], None]
    sources: tuple[Restorable, ...] = ()
    origin: Origin | None = None

    def iterate_parent_folders(self, job: Job) -> Iterator[Folder]:
        """Yield the query folder in each file system, first the one that the bucket's parents are read from."""
        yield self.files if self.origin is None else self.origin.query_folder
        yield from (folder.child(self.query_folder) for folder in operator_folders(job))

    def close_sources(self) -> None:
        """Close the sources that only this call reads from."""
        close_all(self.sources)
        if self.origin is not None:
            self.origin.close()


def open_bucket(shared: Shared, decision: Resume | Begin, folders: CallFolders, nonce: bytes) -> OpenBucket:
    """Take the lease, prepare the backends, and open the local store."""
    call, root, scratch = decision.info, folders.operator, folders.scratch
    job, stored = call.job, call.stored
    # Requests to storage are retried for as long as a commit may take.
    retry = partial(call_with_retries, timeout_s=job.options.commit.commit_timeout_ms / 1000)
    state = decision.state if isinstance(decision, Begin) else None
    prior_pointer = state.pointer if state is not None and state.adopts else stored
    if prior_pointer is not None and not names_backend_with_state(job, prior_pointer):
        # Check this before anything is claimed or written.
        retry(lambda: shared.replicas.refuse_elsewhere(job, root, prior_pointer, scratch))
    if stored is not None:
        query_folder = stored.query_folder
        claim = None if stored.claim is None else Claim(stored.claim, root.child(stored.claim).root, 0)
    else:
        # A query keeps its first folder, even if Spark passes another query id to later tasks.
        first = partial(shared.first_query_folders.of, root, call.task.query_id, call.times.processing_ms, nonce)
        query_folder, state = _take_query_folder(state, call, root, first, shared, retry)
        claim = None if state is None else state.claim
    leases = Leases.of(job, call.task, root, query_folder, shared.leases, claim, stored is None)
    retry(leases.hold)
    operator: OperatorFile = retry(lambda: _admit_operator(shared, call, root, query_folder, state))
    # An adopted folder is named after another query.
    query_id = claim.id if claim is not None else _choose_query_id(call, query_folder)
    run_start = _make_run_start(call, query_id, state)
    # This must precede the run's first checkpoint file.
    epoch: int = 0 if run_start is None else retry(lambda: shared.epochs.of(leases.folders, run_start, leases.look))
    prepare = partial(shared.replicas.prepare, job, root, query_folder, scratch, operator.schema_id)
    retry(prepare)
    pointer, sources = stored or _make_first_pointer(call, operator, query_folder), tuple[Restorable, ...]()
    if state is not None:
        pointer, sources = retry(lambda: begin_bucket(state, job, root, query_folder, shared.replicas, scratch))
    replicas = shared.replicas.of(job, query_folder, call.bucket, scratch)
    schema = operator.row_schema()
    local = local_folder(job, query_folder, operator.schema_id, call.bucket)
    # Rows are written under the current schema, whichever schema the input pointer has.
    pointer = replace(pointer, schema_id=operator.schema_id)
    origin = find_origin(job.options.backends, pointer, job.options.bucket_map, schema, scratch)
    bucket = Bucket(
        shared.stores.at(str(local), schema),
        replicas,
        pointer,
        _make_writer(call, query_id, epoch),
        _make_context(shared, call, scratch, leases),
        # If the query reads from other sources, its own backends have no files yet.
        restore_from=None if sources else job.options.restore_from,
        memory=shared.memory,
        sources=sources if origin is None else (origin,),
    )
    files = root.child(query_folder)
    return OpenBucket(
        query_folder, files, leases, operator, schema, pointer, replicas, bucket, prepare, sources, origin
    )


def _make_writer(call: CallInfo, query_id: str, epoch: int) -> Writer:
    run_id, has_batch = call.task.run_id or call.job.plan_id, call.task.batch is not None
    return Writer(query_id, run_id, call.batch, host_name(), epoch=epoch, told=has_batch)


def _choose_query_id(call: CallInfo, query_folder: str) -> str:
    """Return the query id for files: the query's first folder, unless it claimed that folder and was rescaled since."""
    name = first_folder(query_folder)
    return name if name == query_folder or is_new_query_folder(name) else call.task.query_id or name


def _make_run_start(call: CallInfo, query_id: str, state: InitialState | None) -> RunStart | None:
    """Return the position at which the run starts, as far as this call knows; None if it is not known."""
    base, has_batch = state.pointer if state is not None else call.stored, call.task.batch is not None
    if not has_batch and base is not None and base.lineage and not base.heartbeats:
        # Format 1 of the pointer has no heartbeats, and the batch number is not known.
        return None
    after = Position(query_id, call.batch - 1, 0 if base is None else base.heartbeats, told=has_batch)
    # Epochs are numbered within a query folder.
    here = base if state is None or state.adopts else None
    claimed = None
    if state is not None and state.captured is not None and state.adopts:
        claimed_pointer = state.pointer
        claimed = claimed_pointer.claim or first_folder(claimed_pointer.query_folder), state.captured.batch
    return RunStart(call.job.plan_id, parse_run_id(call.task.run_id), after, here, claimed)


def _make_context(shared: Shared, call: CallInfo, scratch: Path, leases: Leases) -> CommitContext:
    job = call.job
    peers = shared.peers.of(job.options.root, job.options.storage_options)
    return CommitContext(
        scratch,
        options=job.options.commit,
        batches_retained=call.task.batches_retained,
        uploads=shared.uploads,
        runner=shared.background,
        # Not Spark's run id: `foreachBatch` may set another job group.
        run=Run(job.plan_id, call.task.stage),
        batch_ms=call.times.processing_ms,
        # A run that has lost its lease to another run must not continue to read.
        while_waiting=leases.hold,
        lazy=lazy_options(shared.filling, peers=peers, foreground=shared.foreground),
    )


def _take_query_folder(
    state: InitialState | None, call: CallInfo, root: Folder, first: Callable[[], str], shared: Shared, retry: Retry
) -> tuple[str, InitialState | None]:
    """Return the query folder of a first call, and its initial state, which is claimed if necessary."""
    job = call.job
    if state is not None and state.in_place:
        # Hold the old query folder's lease, to detect a run that still writes there.
        claim_id = state.parents[0].pointer.claim
        claim = None if claim_id is None else Claim(claim_id, root.child(claim_id).root, 0)
        retry(Leases.of(job, call.task, root, state.source.name, shared.leases, claim, False).hold)
        return state.pointer.query_folder, state
    query_folder: str = retry(first)
    if state is None:
        return query_folder, None
    claimed: tuple[str, InitialState] = retry(
        lambda: claim_source(state, job, root, query_folder, call.times.processing_ms)
    )
    return claimed


def _make_first_pointer(call: CallInfo, operator: OperatorFile, query_folder: str) -> Pointer:
    return Pointer(
        operator=call.job.operator,
        bucket=call.bucket,
        buckets=call.job.options.buckets,
        schema_id=operator.schema_id,
        batch=-1,
        watermark_ms=None,
        query_folder=query_folder,
    )


def _admit_operator(
    shared: Shared, call: CallInfo, root: Folder, query_folder: str, state: InitialState | None = None
) -> OperatorFile:
    """Check that the state is this job's, and return the current operator file."""
    job, pointer = call.job, call.stored
    files = root.child(query_folder)
    if pointer is not None:
        _refuse_other_job(call, pointer, files)
        _refuse_later_pointer(call, pointer)
    operator = job.operator_file(query_folder)
    if state is not None and not state.adopts:
        operator = state.begins(job, query_folder)
    ask = partial(
        shared.catalog.admit,
        root,
        operator,
        job.options.strict,
        # A query with an initial state does not begin empty; `claim_source` has checked whether it may begin again.
        with_state=state is not None,
        case_sensitive=job.case_sensitive,
        leave_behind=state is not None and state.adopts and state.leaves_behind(job),
    )
    again = not shared.catalog.is_looked_at(files, job.plan_id)
    source = job.options.source_partition
    if again and source is not None:
        refuse_assignment(files, source.assignment)
    in_force = ask(again=again, batch_ms=call.times.processing_ms if pointer is None else None)
    if again and source is not None:
        adopts = state is not None and state.adopts
        record_assignment(files, source.assignment, has_state=pointer is not None or adopts)
    shared.catalog.note_run(files, job.plan_id)
    if pointer is not None and pointer.schema_id > in_force.schema_id:
        # A newer operator file may have replaced the one that this process has admitted.
        in_force = ask(again=True)
    if pointer is not None and pointer.schema_id > in_force.schema_id:
        raise MissingCheckpointError(
            f"the state of operator {job.operator!r} was written under operator_{pointer.schema_id}.json, which is "
            f"gone from {root.child(query_folder).root}: bring the file back."
        )
    return in_force


def _refuse_other_job(call: CallInfo, pointer: Pointer, files: Folder) -> None:
    job = call.job
    if pointer.buckets != job.options.buckets:
        stored = newest_operator(files)
        if stored is not None and not (stored.bucket_map.by_hash and job.options.bucket_map.by_hash):
            # Its error is more specific.
            stored.refuse_other_map(job.options.bucket_map)
        stored_map = BucketMap(pointer.buckets) if stored is None else stored.bucket_map
        raise BucketCountChangedError(
            f"operator {job.operator!r} has its state in {stored_map} and the job asks for {job.options.buckets}: set "
            f"{stored_map.argument}, or {_explain_rescaling(job)}."
        )
    if pointer.operator != job.operator:
        raise OperatorChangedError(
            f"Spark's checkpoint holds the state of operator {pointer.operator!r} and the job asks for "
            f"{job.operator!r}: use the old name, or start from a new checkpoint location."
        )
    if pointer.bucket != call.bucket:
        raise CorruptPointerError(
            f"Spark's checkpoint holds bucket {pointer.bucket} of operator {job.operator!r} in place of "
            f"bucket {call.bucket}"
        )


def _explain_rescaling(job: Job) -> str:
    if job.not_rescaled:
        return f"see why it is not rescaled: {job.not_rescaled}"
    if job.options.rescale is not None:
        return f"give the checkpointLocation of this query instead of rescale={job.options.rescale!r}"
    return "rescale the query with rescale=<its checkpointLocation>"


def _refuse_later_pointer(call: CallInfo, pointer: Pointer) -> None:
    """Refuse a pointer of this batch or a later one: the checkpoint location mixes files of two times.

    A sink's action may run in a thread that an earlier batch created. It passes that batch's number to tasks (PySpark's
    `InheritableThread`), even after the query was started again. So within one application the batch number that a task
    gets proves nothing.
    """
    job, task = call.job, call.task
    if task.batch is None or pointer.batch < task.batch or pointer.made_by == job.application_id:
        return
    raise LineageError(
        f"Spark handed batch {task.batch} the pointer of batch {pointer.batch} (bucket {pointer.bucket} of "
        f"operator {job.operator!r}): its checkpoint location holds state of another time. Bring back the location "
        "with all its files; to go back to an older batch, use spark-state-ext rollback."
    )
