"""The first call of a bucket without a pointer, before its state is opened: make the claim, bring the initial state.

The bucket's files are copied to the query's own folder under their own names, duplicated if the stores can, and the
saved pointer becomes the query's. Repeating this gives the same result. Afterwards, no file refers to the snapshot:
once a pointer of the query is committed, every bucket is detached from it. If a bucket begins with parts of its
parents, the parents' files go to a separate folder: their rows are first written with the bucket's first snapshot, in
the background.
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
from spark_state_ext.beginning.initial_state import InitialState, make_divided_pointer
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
from spark_state_ext.files.left_columns import note_left_behind
from spark_state_ext.files.operator_catalog import list_other_queries, query_folders_of_batch
from spark_state_ext.ownership.holds import Hold
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import Claim, refuse_written_since
from spark_state_ext.rescale.origin import list_origin
from spark_state_ext.rescale.parents import Parent, note_parent, parent_files, read_parent
from spark_state_ext.rescale.parents_notes import note_free
from spark_state_ext.savepoints.bucket_copy import save_bucket
from spark_state_ext.savepoints.claims import SavepointClaim, claim_savepoint, refuse_claimed
from spark_state_ext.savepoints.file_copy import copy_file
from spark_state_ext.savepoints.start_records import StartRecord, note_held, note_start, read_start

__all__ = ["begin_bucket", "bring_files", "bring_parent", "claim_source", "make_gone_on_error", "make_source_opener"]

SourcesOf = Callable[[Parent], Sequence[Restorable]]


def claim_source(
    state: InitialState, job: Job, root: Folder, query_folder: str, batch_ms: int
) -> tuple[str, InitialState]:
    """Make the claim that a start asks for; return the query folder, and the state with the claim.

    A claim to another query's folder takes effect only when its lease is taken.
    """
    # First raise an error if the job cannot use the state, so that it does not claim it.
    state.begins(job, query_folder)
    start, owner_root = job.options.start_from, root.child(query_folder).root
    if job.options.strict and not state.adopts:
        _refuse_second_start(state.record, job, root, query_folder, batch_ms)
    if isinstance(start, Savepoint):
        folder = Folder(start.path, start.storage_options)
        if start.mode == CLAIM:
            savepoint_claim = SavepointClaim(state.record.source_id, owner_root, query_folder)
            stored_claim = claim_savepoint(folder, savepoint_claim, query_folders_of_batch(root, batch_ms))
            return query_folder, replace(state, record=replace(state.record, claim=stored_claim.id))
        refuse_claimed(folder)
    if not state.adopts:
        return query_folder, state
    assert isinstance(start, RetainedCheckpoint), "only a retained checkpoint is adopted"
    assert state.captured is not None, "an adopted checkpoint was captured"
    folder_claim = Claim(query_folder, owner_root, int(time.time() * 1000))
    adopted = state.pointer.query_folder
    try:
        return adopted, replace(state, claim=_claim_folder(state, start, root, folder_claim, batch_ms))
    except OwnershipError:
        # Otherwise the owner's clean-up would wait for a query that never begins.
        Hold(root.child(adopted), state.captured.hold_id).release()
        raise


def _refuse_second_start(record: StartRecord, job: Job, root: Folder, query_folder: str, batch_ms: int) -> None:
    """Raise an error if another query already began from the same snapshot, so that a lost checkpoint is noticed."""
    for name in list_other_queries(root, query_folder, batch_ms):
        start_record = read_start(root.child(name))
        if start_record is not None and start_record.is_of(record.source, record.source_id):
            raise ExistingStateError(
                f"operator {job.operator!r} would begin again under {root.root} from {record}, but the query {name} "
                "there already began from it: to go on with that query's state, start it with its "
                "checkpointLocation. (strict=True refuses to begin again here; use another operator name or root.)"
            )


def _claim_folder(state: InitialState, start: RetainedCheckpoint, root: Folder, claim: Claim, batch_ms: int) -> Claim:
    """Return the claim to another query's folder, if this query may claim it."""
    pointer, captured = state.pointer, state.captured
    folder = root.child(pointer.query_folder)
    assert captured is not None, "an adopted checkpoint was captured"
    if not folder.creates_exclusively:
        raise NotClaimableError(
            f"the state at {folder.root} cannot be claimed: in its store several writers may create the same "
            "file, so two queries might own it. Start with mode='no_claim', and delete it yourself."
        )
    lease = LeaseLog(folder).newest(first=True)
    owner_claim = None if lease is None else lease.record.claim
    if owner_claim is not None and (
        owner_claim.id == claim.id or owner_claim.id in query_folders_of_batch(root, batch_ms)
    ):
        return owner_claim
    if owner_claim is not None and owner_claim.id != pointer.claim:
        raise ClaimedError(
            f"the state at {folder.root} belongs to {owner_claim}, which claimed it since the checkpoint "
            f"{start.checkpoint_location} was written. Go on with that query's checkpointLocation, or start from a "
            "savepoint of it with mode='no_claim'. If that query never committed a batch, and is gone for good, "
            f"free the folder with spark-state-ext savepoint release {folder.root}"
        )
    if captured.later and not start.force:
        raise NotClaimableError(
            f"batch {captured.batch} of {start.checkpoint_location} cannot be claimed: the later batches "
            f"{', '.join(map(str, captured.later))} need its files, which the new query deletes when it no longer "
            "needs them. Claim the last batch, or accept with force=True that the later ones are lost."
        )
    # The other query may itself have claimed the folder; its pointers say by which claim, and this claim replaces it.
    # The lease checks this again, as it may have to wait before it writes the record.
    new_claim = replace(claim, instead_of=pointer.claim, after=captured.lease_number)
    refuse_written_since(new_claim, lease, folder.root)
    return new_claim


def begin_bucket(
    state: InitialState, job: Job, root: Folder, query_folder: str, replicas: Replicas, scratch: Path
) -> tuple[Pointer, tuple[Restorable, ...]]:
    """Prepare the query folder; return the bucket's first pointer, and the backends that only this call reads from."""
    files, start = root.child(query_folder), job.options.start_from
    note_left_behind(files, state.list_left_behind(job))
    if state.captured is not None and job.captured is not None:
        note_held(files, job.captured)
    if state.adopts:
        assert state.claim is not None, "an adopted folder is claimed"
        return replace(state.pointer, batch=-1, partitioning=None, made_by=None, claim=state.claim.id), ()
    places: Sequence[Backend] = job.options.backends
    if state.captured is not None:
        assert isinstance(start, RetainedCheckpoint), "only a retained checkpoint is captured"
        places = start.places
        if all(backend.kind != FSSPEC for backend in job.options.backends):
            # They are read next to the query's own backends, which may have the same names.
            places = [replace(place, name=_borrowed_name(place.name)) for place in places]
        Hold(state.source, state.captured.hold_id).renew()
        read = partial(replicas.reading, places, scratch=scratch, timeout_s=job.options.commit.commit_timeout_ms / 1000)
        for parent in state.parents:
            _refuse_elsewhere(start, parent.pointer, read)
    note_start(files, state.record)
    return bring_files(state, job, query_folder, make_source_opener(job, places, replicas, scratch), scratch)


def make_source_opener(job: Job, places: Sequence[Backend], replicas: Replicas, scratch: Path) -> SourcesOf:
    """Return a function that opens a parent's backends for reading, and the origin of a rescaled parent."""
    timeout_s = job.options.commit.commit_timeout_ms / 1000

    def sources_of(parent: Parent) -> list[Restorable]:
        pointer, operator = parent.pointer, parent.operator_file
        return [
            *replicas.reading(places, pointer, scratch, timeout_s),
            *list_origin(places, pointer, operator.bucket_map, operator.row_schema(), scratch),
        ]

    return sources_of


def bring_files(
    state: InitialState, job: Job, query_folder: str, sources_of: SourcesOf, scratch: Path
) -> tuple[Pointer, tuple[Restorable, ...]]:
    """Bring the parents' files to the query's folder, and return what `begin_bucket` returns.

    If no backend of the job is a file system, files cannot be copied to it. Then the call reads the state in place; as
    no backend of the job has it, the commit sends a full snapshot to each backend before it returns.
    """
    backend = _find_file_system(job)
    if state.divides:
        assert backend is not None, "a job without a file system cannot begin with parts"
        folder = Folder(backend.root, backend.storage_options).child(job.operator, query_folder)
        if state.in_place:
            parents = [bring_parent(job, query_folder, parent, sources_of, scratch) for parent in state.parents]
        else:
            parents = [
                note_parent(
                    folder, _copy_parent(state, parent, parent_files(folder, parent.bucket), sources_of, scratch)
                )
                for parent in state.parents
            ]
        pointer = make_divided_pointer(job, query_folder, state.pointer.bucket, parents)
        if pointer.parents is None:
            note_free(folder, pointer.bucket, pointer.heartbeats)
        return pointer, ()
    if state.pointer.ref is None:
        return _adapt_pointer(job, query_folder, state.pointer, {}, {}), ()
    if backend is None:
        return _leave_in_place(state, job, query_folder, sources_of, scratch)
    target = Folder(backend.root, backend.storage_options).child(job.operator, query_folder, str(state.pointer.bucket))
    saved = _copy_parent(state, state.parents[0], target, sources_of, scratch).saved
    replication = {backend.name: ReplicationStatus(saved.pointer.ref)}
    markers = {backend.name: {STATE: _newest_file(state.pointer.ref, saved.files)}}
    return _adapt_pointer(job, query_folder, saved.pointer, replication, markers), ()


def bring_parent(job: Job, query_folder: str, parent: Parent, sources_of: SourcesOf, scratch: Path) -> Parent:
    """Bring an old bucket of a query that is rescaled to the new folder, unless an earlier call did; return it."""
    backend = _find_file_system(job)
    assert backend is not None, "a job without a file system is not rescaled"
    folder = Folder(backend.root, backend.storage_options).child(job.operator, query_folder)
    known_parent = read_parent(folder, parent.bucket)
    if known_parent is not None:
        return known_parent
    copied_parent = _find_and_copy(parent, parent_files(folder, parent.bucket), sources_of, scratch)
    try:
        return note_parent(folder, copied_parent)
    except LineageError as error:
        # Another call has brought it meanwhile, from another batch.
        problem = f"bucket {parent.bucket} is copied from {parent.pointer.ref} and from another checkpoint"
        raise make_gone_on_error(job.operator, problem) from error


def make_gone_on_error(operator: str, problem: str) -> LineageError:
    """Return the error for a query that committed batches after the plan that rescales it was made."""
    return LineageError(
        f"operator {operator!r} is not rescaled, as its query has gone on since it was planned: {problem}. "
        "No state is lost: plan the query again, as a restart of the program does. Starting the same DataFrame "
        "again fails again"
    )


def _find_file_system(job: Job) -> Backend | None:
    return next((backend for backend in job.options.backends if backend.kind == FSSPEC), None)


def _copy_parent(state: InitialState, parent: Parent, target: Folder, sources_of: SourcesOf, scratch: Path) -> Parent:
    """Copy a parent's files into a folder: the files that the savepoint names, or those that the pointer needs."""
    if not state.in_savepoint:
        return _find_and_copy(parent, target, sources_of, scratch)
    source = state.source.child(str(parent.bucket))
    for file in parent.saved.files:
        copy_file(source, file, target, scratch)
    target.sync()
    return parent


def _find_and_copy(parent: Parent, target: Folder, sources_of: SourcesOf, scratch: Path) -> Parent:
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
            f"bucket {pointer.bucket} of operator {pointer.operator!r} was rescaled, and does not have its own "
            "snapshot yet: start from it after some more batches of its query, or with a backend that is a file system"
        )
    if state.in_savepoint:
        name = _borrowed_name(state.record.source)
        sources = sole_replica(state.source.child(str(pointer.bucket)), scratch, name)
        return _adapt_pointer(job, query_folder, pointer, {name: ReplicationStatus(pointer.ref)}, {}), tuple(sources)
    replication = {_borrowed_name(name): status for name, status in pointer.replication.items()}
    markers = {_borrowed_name(name): backend_markers for name, backend_markers in pointer.markers.items()}
    return _adapt_pointer(job, query_folder, pointer, replication, markers), tuple(sources_of(state.parents[0]))


def _adapt_pointer(
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


def _borrowed_name(name: str) -> str:
    """Return a pointer's name for a backend that only its first call reads; no backend of the query has this name."""
    return f"start_from {name}"


def _newest_file(ref: CheckpointRef, files: Sequence[SavedFile]) -> str:
    """Return the name of the committed checkpoint's file, which a marker names."""
    names = {file.name for file in files}
    return next(name for kind in (DELTA, SNAPSHOT) if (name := file_name(ref, kind)) in names)


def _refuse_elsewhere(
    start: RetainedCheckpoint, pointer: Pointer, read: Callable[[Pointer], Sequence[Replica]]
) -> None:
    """Raise an error if a start names no backend that has the state, unless a named one has its files nevertheless."""
    named = [place.name for place in start.places]
    confirmed = {status.through for status in pointer.replication.values() if is_complete(status)}
    if not pointer.replication.keys().isdisjoint(named) or confirmed <= {None}:
        return
    sources = read(pointer)
    try:
        all_files = [source.files() for source in sources]
        is_there = any(has_checkpoint(files, ref) for files in all_files for ref in confirmed if ref is not None)
    finally:
        close_all(sources)
    if not is_there:
        raise StateElsewhereError(
            f"{start} has its state in {', '.join(pointer.replication)}, but start_from names {', '.join(named)}, "
            "where it is not: name the backends that have it, RetainedCheckpoint(…, backends=[…]). If its files were "
            "moved, give the new place the old name."
        )
