"""How a call comes to its bucket's state: the run holds it, it is this job's, and its backends are ready."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from arrow_schemas.bucket_map import BucketMap
from arrow_schemas.lineage import Writer
from arrow_schemas.operator import OperatorFile
from arrow_schemas.pointer import Pointer
from arrow_schemas.row import RowSchema
from spark_state_ext.backends.registry import Backend
from spark_state_ext.backends.replication import Replica, Restorable, close_all
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.commit.failures import Run
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.engine.folders import (
    local_folder,
    operator_folder,
    operator_folders,
    scratch_folder,
    stores_folder,
)
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.replicas import Leases, names_a_holder
from spark_state_ext.engine.shared import Shared
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
from spark_state_ext.rescale.origin import Origin, origin_beside, origin_in
from spark_state_ext.restore.lazy import lazy_options
from spark_state_ext.savepoints.first_step import FirstStep
from spark_state_ext.savepoints.starting import Beginning, Begun
from spark_state_ext.spark.executor.call_info import CallInfo
from spark_state_ext.spark.executor.going_on import Begin, Rescale, Resume
from spark_state_ext.spark.executor.rescaling import Move
from spark_state_ext.timeline.epochs import Position, sparks_run_id
from spark_state_ext.timeline.records import RunStart
from spark_state_ext.worker.host import host_name
from spark_state_ext.worker.retry import retried

__all__ = ["CallFolders", "OpenBucket", "open_bucket"]


@dataclass(frozen=True)
class CallFolders:
    """Where a call reads and writes.

    Parameters
    ----------
    operator
        The folder ``<root>/<operator>``.
    stores
        Where the local stores lie.
    scratch
        Local folder for temporary files.
    """

    operator: Folder
    stores: Path
    scratch: Path

    @staticmethod
    def of(job: Job) -> CallFolders:
        """Those of a job; local ones are made."""
        local_dir = job.options.local_dir
        return CallFolders(operator_folder(job), stores_folder(local_dir), scratch_folder(local_dir))


@dataclass(frozen=True)
class OpenBucket:
    """A bucket's state at hand.

    Parameters
    ----------
    query_folder, files
        The query folder's name, and the folder.
    leases
        The run's, which it holds.
    operator, schema
        The operator file in force, and its row schema.
    pointer
        The input pointer; the first one where the bucket has no state yet.
    replicas
        The bucket's backends.
    bucket
        The bucket.
    prepare
        Has backends keep what is there for the operator as a whole, where they do not.
    sources
        Backends of another query, or a savepoint's folder, that only this call reads from.
    origin
        What a rescaled bucket began with, as long as it needs that.
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

    def parents_at(self, job: Job) -> Iterator[Folder]:
        """The query folder in each file system, first the one that the bucket's parents are read from."""
        yield self.files if self.origin is None else self.origin.query_folder
        yield from (it.child(self.query_folder) for it in operator_folders(job))

    def let_go(self) -> None:
        """The call is over: close what only it has read from."""
        close_all(self.sources)
        if self.origin is not None:
            self.origin.close()


def open_bucket(shared: Shared, how: Resume | Begin | Rescale, folders: CallFolders, nonce: bytes) -> OpenBucket:
    """Take the lease, have the backends ready, and open the local store."""
    call, root, scratch = how.info, folders.operator, folders.scratch
    job, stored = call.job, call.stored
    beginning = None if isinstance(how, Resume) else how.beginning
    move = how.move if isinstance(how, Rescale) else None
    # What a new worker asks a store first is tried again for as long as a commit may take.
    tried = partial(retried, timeout_s=job.options.commit.commit_timeout_ms / 1000)
    # A query keeps the folder it began in, whatever later tasks are told of their query.
    first = partial(shared.first_query_folders.of, root, call.task.query_id, call.times.processing_ms, nonce)
    if move is not None:
        query_folder: str = move.folder
    else:
        query_folder = stored.query_folder if stored is not None else tried(first)
    if stored is not None and not names_a_holder(job, stored):
        # Before anything is written there.
        tried(lambda: shared.replicas.refuse_elsewhere(job, root, stored, scratch))
    claim = None if stored is None or stored.claim is None else Claim(stored.claim, root.child(stored.claim).root, 0)
    if beginning is not None and move is None:
        if beginning.adopts and not names_a_holder(job, beginning.pointer):
            # Before the claim, too.
            tried(lambda: shared.replicas.refuse_elsewhere(job, root, beginning.pointer, scratch))
        # A job that the state cannot serve claims nothing.
        beginning.begins(job, query_folder)
        first_step = FirstStep(job, root, query_folder, call.times.processing_ms, partial(_beside, scratch))
        claim = tried(lambda: first_step.claim(beginning))
        query_folder = first_step.folder_of(beginning)
    if move is not None:
        _hold_old(move, call, root, shared, tried)
    leases = Leases.of(job, call.task, root, query_folder, shared.leases, claim, stored is None)
    tried(leases.hold)
    operator: OperatorFile = tried(lambda: _admitted(shared, call, root, query_folder, beginning))
    # An adopted folder has another query's name.
    query_id = claim.id if claim is not None else _name_of(call, query_folder)
    run_start = _run_start(call, query_id, beginning, move)
    # Before the run's first checkpoint file.
    epoch: int = 0 if run_start is None else tried(lambda: shared.epochs.of(leases.folders, run_start, leases.look))
    prepare = partial(shared.replicas.prepare, job, root, query_folder, scratch, operator.schema_id)
    tried(prepare)
    if stored is not None:
        begun = Begun(stored)
    elif move is not None:
        begun = tried(lambda: move.begun(shared.replicas, scratch))
    elif beginning is not None:
        begun = tried(lambda: first_step.begun(beginning, claim, shared.replicas, scratch))
    else:
        begun = Begun(_first_pointer(call, operator, query_folder))
    pointer = begun.pointer
    replicas = shared.replicas.of(job, query_folder, call.bucket, scratch)
    schema = operator.row_schema()
    local = local_folder(job, query_folder, operator.schema_id, call.bucket)
    # Rows are written under the schema in force now, whatever that of the pointer we were given.
    pointer = replace(pointer, schema_id=operator.schema_id)
    origin = origin_in(job.options.backends, pointer, job.options.bucket_map, schema, scratch)
    bucket = Bucket(
        shared.stores.at(str(local), schema),
        replicas,
        pointer,
        _writer_of(call, query_id, epoch),
        _context(shared, call, scratch, leases),
        # The query's own backends have nothing yet where it reads from others.
        restore_from=None if begun.sources else job.options.restore_from,
        memory=shared.memory,
        sources=begun.sources if origin is None else (origin,),
    )
    files = root.child(query_folder)
    return OpenBucket(
        query_folder, files, leases, operator, schema, pointer, replicas, bucket, prepare, begun.sources, origin
    )


def _writer_of(call: CallInfo, query_id: str, epoch: int) -> Writer:
    run_id, told = call.task.run_id or call.job.plan_id, call.task.batch is not None
    return Writer(query_id, run_id, call.batch, host_name(), epoch=epoch, told=told)


def _name_of(call: CallInfo, query_folder: str) -> str:
    """What files call the query: the folder that it began in, unless it claimed that and was rescaled since."""
    name = first_folder(query_folder)
    return name if name == query_folder or is_new_query_folder(name) else call.task.query_id or name


def _run_start(call: CallInfo, query_id: str, beginning: Beginning | None, move: Move | None) -> RunStart | None:
    """Where the run is, by this call; None: that is not known."""
    base, told = beginning.pointer if beginning is not None else call.stored, call.task.batch is not None
    if not told and base is not None and base.lineage and not base.heartbeats:
        # Format 1 of the pointer has no heartbeats, and the batch number is not known.
        return None
    after = Position(query_id, call.batch - 1, 0 if base is None else base.heartbeats, told=told)
    # Epochs are numbered within a query folder.
    here = base if move is None and (beginning is None or beginning.adopts) else None
    claimed = None
    if beginning is not None and beginning.captured is not None and beginning.adopts:
        its = beginning.pointer
        claimed = its.claim or first_folder(its.query_folder), beginning.captured.batch
    return RunStart(call.job.plan_id, sparks_run_id(call.task.run_id), after, here, claimed)


def _context(shared: Shared, call: CallInfo, scratch: Path, leases: Leases) -> CommitContext:
    job = call.job
    peers = shared.peers.of(job.options.root, job.options.storage_options)
    return CommitContext(
        scratch,
        options=job.options.commit,
        batches_retained=call.task.batches_retained,
        uploads=shared.uploads,
        runner=shared.background,
        # Not what Spark calls the run: `foreachBatch` may set another job group.
        run=Run(job.plan_id, call.task.stage),
        batch_ms=call.times.processing_ms,
        # A run that has lost its state to another one need not read on.
        while_waiting=leases.hold,
        lazy=lazy_options(shared.filling, peers=peers, foreground=shared.foreground),
    )


def _hold_old(
    move: Move, call: CallInfo, root: Folder, shared: Shared, tried: Callable[[Callable[[], None]], None]
) -> None:
    """Hold the old query folder's lease, so that a run that still writes there is noticed."""
    old, claim_id = move.old_folder, move.old_claim
    claim = None if claim_id is None else Claim(claim_id, root.child(claim_id).root, 0)
    leases = Leases.of(call.job, call.task, root, old, shared.leases, claim, False)
    tried(leases.hold)


def _beside(scratch: Path, part: Beginning, backends: Sequence[Backend]) -> list[Origin]:
    """What a bucket of another query can be read from beside its backends."""
    operator = part.operator_file
    return origin_beside(backends, part.pointer, operator.bucket_map, operator.row_schema(), scratch)


def _first_pointer(call: CallInfo, operator: OperatorFile, query_folder: str) -> Pointer:
    return Pointer(
        operator=call.job.operator,
        bucket=call.bucket,
        buckets=call.job.options.buckets,
        schema_id=operator.schema_id,
        batch=-1,
        watermark_ms=None,
        query_folder=query_folder,
    )


def _admitted(
    shared: Shared, call: CallInfo, root: Folder, query_folder: str, beginning: Beginning | None = None
) -> OperatorFile:
    """The operator file in force, where the state is this job's."""
    job, pointer = call.job, call.stored
    files = root.child(query_folder)
    if pointer is not None:
        _refuse_another_jobs(call, pointer, files)
        _refuse_later(call, pointer)
    wanted = job.operator_file(query_folder)
    if beginning is not None and not beginning.adopts:
        wanted = beginning.begins(job, query_folder)
    ask = partial(
        shared.catalog.admit,
        root,
        wanted,
        job.options.strict,
        # A query that begins with a state does not begin anew; whether it may begin again, its first step has seen.
        with_state=beginning is not None,
        case_sensitive=job.case_sensitive,
        leave_behind=beginning is not None and beginning.adopts and beginning.leaves_behind(job),
    )
    again = not shared.catalog.is_looked_at(files, job.plan_id)
    source = job.options.source_partition
    if again and source is not None:
        refuse_assignment(files, source.assignment)
    in_force = ask(again=again, batch_ms=call.times.processing_ms if pointer is None else None)
    if again and source is not None:
        adopts = beginning is not None and beginning.adopts
        record_assignment(files, source.assignment, has_state=pointer is not None or adopts)
    shared.catalog.note_run(files, job.plan_id)
    if pointer is not None and pointer.schema_id > in_force.schema_id:
        # What this process admitted once may have been succeeded since.
        in_force = ask(again=True)
    if pointer is not None and pointer.schema_id > in_force.schema_id:
        raise MissingCheckpointError(
            f"the state of operator {job.operator!r} was written under operator_{pointer.schema_id}.json, which is "
            f"gone from {root.child(query_folder).root}: bring the file back."
        )
    return in_force


def _refuse_another_jobs(call: CallInfo, pointer: Pointer, files: Folder) -> None:
    job = call.job
    if pointer.buckets != job.options.buckets:
        stored = newest_operator(files)
        if stored is not None and not (stored.bucket_map.by_hash and job.options.bucket_map.by_hash):
            # It knows what kind of buckets these are, and so says more.
            stored.refuse_other_map(job.options.bucket_map)
        known = BucketMap(pointer.buckets) if stored is None else stored.bucket_map
        raise BucketCountChangedError(
            f"operator {job.operator!r} has its state in {known} and the job asks for {job.options.buckets}: set "
            f"{known.argument}, or {_how_to_rescale(job)}."
        )
    if pointer.operator != job.operator:
        raise OperatorChangedError(
            f"Spark's checkpoint holds the state of operator {pointer.operator!r} and the job asks for "
            f"{job.operator!r}: use the old name, or start from a new checkpoint location."
        )
    if pointer.bucket != call.bucket:
        raise CorruptPointerError(
            f"Spark's checkpoint holds bucket {pointer.bucket} of operator {job.operator!r} in the place of "
            f"bucket {call.bucket}"
        )


def _how_to_rescale(job: Job) -> str:
    if job.not_rescaled:
        return f"see why it is not rescaled: {job.not_rescaled}"
    if job.options.rescale is not None:
        return f"give the checkpointLocation of this query in the place of rescale={job.options.rescale!r}"
    return "rescale the query with rescale=<its checkpointLocation>"


def _refuse_later(call: CallInfo, pointer: Pointer) -> None:
    """Refuse a pointer of this batch or a later one: the checkpoint location holds files of two times.

    An action of a sink may run in a thread that an earlier batch has made, and that passes on what it was told then
    (PySpark's `InheritableThread`), also over later starts of the query. So within one application what a task is told
    is no evidence.
    """
    job, task = call.job, call.task
    if task.batch is None or pointer.batch < task.batch or pointer.made_by == job.application_id:
        return
    raise LineageError(
        f"Spark handed batch {task.batch} the pointer of batch {pointer.batch} (bucket {pointer.bucket} of "
        f"operator {job.operator!r}): its checkpoint location holds state of another time. Bring the location back "
        "as it was; to go back to an older batch, use spark-state-ext rollback."
    )
