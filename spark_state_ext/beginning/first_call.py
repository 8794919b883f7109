"""The first call of a bucket without a pointer, before its state is opened: the claim, and what it begins with.

The bucket's files come into the query's own folder under their own names, duplicated where the stores can, and the
saved pointer becomes the query's. Doing it again makes the same. Nothing refers to the snapshot afterwards: once a
pointer of the query is committed, every bucket is detached from it. Parents of which a bucket begins with parts come
into a folder beside: no row is written before the bucket writes its first snapshot, in the background.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, file_name
from arrow_schemas.pointer import Pointer, ReplicationStatus
from arrow_schemas.savepoint import NATIVE, SavedFile
from spark_state_ext.backends import STATE
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.backends.registry import FSSPEC, Backend
from spark_state_ext.backends.replication import Replica, Restorable, close_all, is_complete, needs_parents
from spark_state_ext.beginning.initial_state import InitialState, divided_pointer
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.replicas import Replicas
from spark_state_ext.engine.start_from import CLAIM, RetainedCheckpoint, Savepoint
from spark_state_ext.errors import (
    ClaimedError,
    ExistingStateError,
    LineageError,
    NotClaimableError,
    OwnershipError,
    StateElsewhereError,
)
from spark_state_ext.files.existence import has_checkpoint
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.left_behind import note_left_behind
from spark_state_ext.files.operator_catalog import others_beside, query_folders_of_batch
from spark_state_ext.ownership.holds import Hold
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import Claim, refuse_written_since
from spark_state_ext.rescale.notes import note_free
from spark_state_ext.rescale.origin import origin_beside
from spark_state_ext.rescale.parents import Parent, note_parent, parent_files, parent_of
from spark_state_ext.savepoints.claims import SavepointClaim, claim_savepoint, refuse_claimed
from spark_state_ext.savepoints.copying import copied
from spark_state_ext.savepoints.records import StartRecord, note_held, note_start, start_of
from spark_state_ext.savepoints.taking import save_bucket

__all__ = ["begin_bucket", "bring_files", "bring_parent", "claim_source", "make_gone_on_error", "sources_in"]

SourcesOf = Callable[[Parent], Sequence[Restorable]]


def claim_source(
    state: InitialState, job: Job, root: Folder, query_folder: str, batch_ms: int
) -> tuple[str, InitialState]:
    """Make the claim that a start asks for; return the query folder and the state with it.

    The claim to another query's folder is made with its lease.
    """
    # A job that the state cannot serve claims nothing.
    state.begins(job, query_folder)
    start, by = job.options.start_from, root.child(query_folder).root
    if job.options.strict and not state.adopts:
        _refuse_begun_before(state.record, job, root, query_folder, batch_ms)
    if isinstance(start, Savepoint):
        folder = Folder(start.path, start.storage_options)
        if start.mode == CLAIM:
            wanted = SavepointClaim(state.record.source_id, by, query_folder)
            made = claim_savepoint(folder, wanted, query_folders_of_batch(root, batch_ms))
            return query_folder, replace(state, record=replace(state.record, claim=made.id))
        refuse_claimed(folder)
    if not state.adopts:
        return query_folder, state
    assert isinstance(start, RetainedCheckpoint), "that is what is adopted"
    assert state.captured is not None, "and it was captured"
    made_claim = Claim(query_folder, by, int(time.time() * 1000))
    adopted = state.pointer.query_folder
    try:
        return adopted, replace(state, claim=_claim_folder(state, start, root, made_claim, batch_ms))
    except OwnershipError:
        # Else the owner's clean-up would wait for a query that never begins.
        Hold(root.child(adopted), state.captured.hold_id).release()
        raise


def _refuse_begun_before(record: StartRecord, job: Job, root: Folder, query_folder: str, batch_ms: int) -> None:
    """Refuse to begin twice from one snapshot, so that a lost checkpoint is noticed."""
    for name in others_beside(root, query_folder, batch_ms):
        there = start_of(root.child(name))
        if there is not None and there.is_of(record.source, record.source_id):
            raise ExistingStateError(
                f"operator {job.operator!r} would begin again under {root.root} from {record}, from "
                f"which the query {name} there was begun before: to go on with that query's state, start it with "
                "its checkpointLocation. (strict=True refuses to begin again here; use another operator name or "
                "root.)"
            )


def _claim_folder(state: InitialState, start: RetainedCheckpoint, root: Folder, wanted: Claim, batch_ms: int) -> Claim:
    """Return the claim to another query's folder, if this one may have it."""
    pointer, captured = state.pointer, state.captured
    folder = root.child(pointer.query_folder)
    assert captured is not None, "that is what is adopted"
    if not folder.creates_exclusively:
        raise NotClaimableError(
            f"the state at {folder.root} cannot be claimed: its store does not let exactly one of several make a "
            "file, so two queries might own it. Start with mode='no_claim', and delete it yourself."
        )
    found = LeaseLog(folder).newest(first=True)
    there = None if found is None else found.record.claim
    if there is not None and (there.id == wanted.id or there.id in query_folders_of_batch(root, batch_ms)):
        return there
    if there is not None and there.id != pointer.claim:
        raise ClaimedError(
            f"the state at {folder.root} belongs to {there}, which claimed it since the checkpoint "
            f"{start.checkpoint_location} was written. Go on with that query's checkpointLocation, or start from a "
            "savepoint of it with mode='no_claim'. Where that query never committed a batch, and is gone for good, "
            f"free the folder with spark-state-ext savepoint release {folder.root}"
        )
    if captured.later and not start.force:
        raise NotClaimableError(
            f"batch {captured.batch} of {start.checkpoint_location} cannot be claimed: the later batches "
            f"{', '.join(map(str, captured.later))} build upon its files, which the new query deletes when it "
            "no longer needs them. Claim the last batch, or accept that the later ones are lost with force=True."
        )
    # The other query may have claimed the folder itself: who claims it from that one goes by its pointers.
    # The lease looks again, as it may have to wait before it makes the record.
    made = replace(wanted, instead_of=pointer.claim, after=captured.lease_number)
    refuse_written_since(made, found, folder.root)
    return made


def begin_bucket(
    state: InitialState, job: Job, root: Folder, query_folder: str, replicas: Replicas, scratch: Path
) -> tuple[Pointer, tuple[Restorable, ...]]:
    """Prepare the query folder; return the bucket's first pointer, and the backends that only this call reads from."""
    files, start = root.child(query_folder), job.options.start_from
    note_left_behind(files, state.list_left_behind(job))
    if state.captured is not None and job.captured is not None:
        note_held(files, job.captured)
    if state.adopts:
        assert state.claim is not None, "what is adopted is claimed"
        return replace(state.pointer, batch=-1, partitioning=None, made_by=None, claim=state.claim.id), ()
    places: Sequence[Backend] = job.options.backends
    if state.captured is not None:
        assert isinstance(start, RetainedCheckpoint), "that is what was captured"
        places = start.places
        if all(backend.kind != FSSPEC for backend in job.options.backends):
            # They are asked beside the query's own backends, of which one may have the same name.
            places = [replace(it, name=_borrowed(it.name)) for it in places]
        Hold(state.source, state.captured.hold_id).renew()
        read = partial(replicas.reading, places, scratch=scratch, timeout_s=job.options.commit.commit_timeout_ms / 1000)
        for parent in state.parents:
            _refuse_elsewhere(start, parent.pointer, read)
    note_start(files, state.record)
    return bring_files(state, job, query_folder, sources_in(job, places, replicas, scratch), scratch)


def sources_in(job: Job, places: Sequence[Backend], replicas: Replicas, scratch: Path) -> SourcesOf:
    """Return what opens the backends of a parent, to read from only, and what a rescaled one began with."""
    timeout_s = job.options.commit.commit_timeout_ms / 1000

    def sources_of(parent: Parent) -> list[Restorable]:
        pointer, operator = parent.pointer, parent.operator_file
        return [
            *replicas.reading(places, pointer, scratch, timeout_s),
            *origin_beside(places, pointer, operator.bucket_map, operator.row_schema(), scratch),
        ]

    return sources_of


def bring_files(
    state: InitialState, job: Job, query_folder: str, sources_of: SourcesOf, scratch: Path
) -> tuple[Pointer, tuple[Restorable, ...]]:
    """Bring the parents' files to the query's folder, and return what `begin_bucket` does.

    Where no backend of the job is a file system, none can be given files. Then the call reads the state from where it
    is; as nothing of the job's holds it, the commit sends a full snapshot to each backend before it returns.
    """
    backend = _file_system(job)
    if state.divides:
        assert backend is not None, "a job without one cannot begin with parts"
        folder = Folder(backend.root, backend.storage_options).child(job.operator, query_folder)
        if state.in_place:
            parents = [bring_parent(job, query_folder, it, sources_of, scratch) for it in state.parents]
        else:
            parents = [
                note_parent(folder, _copied(state, it, parent_files(folder, it.bucket), sources_of, scratch))
                for it in state.parents
            ]
        pointer = divided_pointer(job, query_folder, state.pointer.bucket, parents)
        if pointer.parents is None:
            note_free(folder, pointer.bucket, pointer.heartbeats)
        return pointer, ()
    if state.pointer.ref is None:
        return _renamed(job, query_folder, state.pointer, {}, {}), ()
    if backend is None:
        return _leave_in_place(state, job, query_folder, sources_of, scratch)
    target = Folder(backend.root, backend.storage_options).child(job.operator, query_folder, str(state.pointer.bucket))
    saved = _copied(state, state.parents[0], target, sources_of, scratch).saved
    replication = {backend.name: ReplicationStatus(saved.pointer.ref)}
    markers = {backend.name: {STATE: _newest(state.pointer.ref, saved.files)}}
    return _renamed(job, query_folder, saved.pointer, replication, markers), ()


def bring_parent(job: Job, query_folder: str, parent: Parent, sources_of: SourcesOf, scratch: Path) -> Parent:
    """Return an old bucket of a query that is rescaled, as the call that came first brought it to the new folder."""
    backend = _file_system(job)
    assert backend is not None, "a job without one is not rescaled"
    folder = Folder(backend.root, backend.storage_options).child(job.operator, query_folder)
    there = parent_of(folder, parent.bucket)
    if there is not None:
        return there
    brought = _saved(parent, parent_files(folder, parent.bucket), sources_of, scratch)
    try:
        return note_parent(folder, brought)
    except LineageError as error:
        # Another call has brought it meanwhile, from another batch.
        shown = f"bucket {parent.bucket} is brought from {parent.pointer.ref} and from another checkpoint"
        raise make_gone_on_error(job.operator, shown) from error


def make_gone_on_error(operator: str, shown: str) -> LineageError:
    """Return the error of a query that committed batches since the plan that rescales it."""
    return LineageError(
        f"operator {operator!r} is not rescaled, as its query has gone on since it was planned: {shown}. "
        "Nothing is lost: plan the query again, as a restart of the program does. The same DataFrame "
        "started again fails again"
    )


def _file_system(job: Job) -> Backend | None:
    return next((backend for backend in job.options.backends if backend.kind == FSSPEC), None)


def _copied(state: InitialState, parent: Parent, target: Folder, sources_of: SourcesOf, scratch: Path) -> Parent:
    """Copy a parent's files into a folder, as the savepoint names them or as they are found."""
    if not state.in_savepoint:
        return _saved(parent, target, sources_of, scratch)
    source = state.source.child(str(parent.bucket))
    for file in parent.saved.files:
        copied(source, file, target, scratch)
    target.sync()
    return parent


def _saved(parent: Parent, target: Folder, sources_of: SourcesOf, scratch: Path) -> Parent:
    """Find a parent's files, and copy them into a folder."""
    sources, schema = sources_of(parent), parent.operator_file.row_schema()
    try:
        return replace(parent, saved=save_bucket(parent.pointer, sources, target, NATIVE, schema, scratch).saved)
    finally:
        close_all(sources)


def _leave_in_place(
    state: InitialState, job: Job, query_folder: str, sources_of: SourcesOf, scratch: Path
) -> tuple[Pointer, tuple[Restorable, ...]]:
    pointer = state.pointer
    if needs_parents(pointer):
        raise StateElsewhereError(
            f"bucket {pointer.bucket} of operator {pointer.operator!r} was rescaled, and has no snapshot of its "
            "own yet: start from it after some more batches of its query, or with a backend that is a file system"
        )
    if state.in_savepoint:
        name = _borrowed(state.record.source)
        sources = sole_replica(state.source.child(str(pointer.bucket)), scratch, name)
        return _renamed(job, query_folder, pointer, {name: ReplicationStatus(pointer.ref)}, {}), tuple(sources)
    replication = {_borrowed(name): status for name, status in pointer.replication.items()}
    markers = {_borrowed(name): of_one for name, of_one in pointer.markers.items()}
    return _renamed(job, query_folder, pointer, replication, markers), tuple(sources_of(state.parents[0]))


def _renamed(
    job: Job,
    query_folder: str,
    saved: Pointer,
    replication: dict[str, ReplicationStatus],
    markers: dict[str, dict[str, str]],
) -> Pointer:
    origins = saved.origins if saved.operator == job.operator else (*saved.origins, saved.operator)
    return replace(
        saved,
        operator=job.operator,
        origins=tuple(dict.fromkeys(origins)),
        query_folder=query_folder,
        schema_id=0,
        batch=-1,
        replication=replication,
        markers=markers,
        partitioning=None,
        made_by=None,
        claim=None,
        erased=None,
        parents=None,
    )


def _borrowed(name: str) -> str:
    """What a pointer calls a backend from which only its first call reads; no backend of the query has this name."""
    return f"start_from {name}"


def _newest(ref: CheckpointRef, files: Sequence[SavedFile]) -> str:
    """The file that a marker names: of the committed checkpoint."""
    names = {file.name for file in files}
    return next(name for kind in (DELTA, SNAPSHOT) if (name := file_name(ref, kind)) in names)


def _refuse_elsewhere(
    start: RetainedCheckpoint, pointer: Pointer, read: Callable[[Pointer], Sequence[Replica]]
) -> None:
    """Refuse a start that names none of the backends which hold the state, unless its files were moved to one."""
    named = [it.name for it in start.places]
    confirmed = {it.through for it in pointer.replication.values() if is_complete(it)}
    if not pointer.replication.keys().isdisjoint(named) or confirmed <= {None}:
        return
    sources = read(pointer)
    try:
        there = [source.files() for source in sources]
        found = any(has_checkpoint(files, ref) for files in there for ref in confirmed if ref is not None)
    finally:
        close_all(sources)
    if not found:
        raise StateElsewhereError(
            f"{start} has its state in {', '.join(pointer.replication)}, and start_from names {', '.join(named)}, "
            "where it is not: name the backends that it is in, RetainedCheckpoint(…, backends=[…]). Where its files "
            "were moved, give their new place the old name."
        )
