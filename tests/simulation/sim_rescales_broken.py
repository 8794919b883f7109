"""Broken variants of rescaling. The simulator must find each of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from sim_parts import Variant
from sim_rescale_parts import PlannedAttempt
from sim_rescales import RescaleWorld

from arrow_schemas import BucketMap, CheckpointRef, Pointer, RowSchema
from spark_state_ext.backends.replication import needs_parents
from spark_state_ext.beginning import first_call, initial_state, rescaling
from spark_state_ext.beginning.rescaling import Rescaling
from spark_state_ext.commit import cadence, committer, decisions, snapshot_writer
from spark_state_ext.engine.folders import operator_folder, operator_folders
from spark_state_ext.engine.job import Job
from spark_state_ext.erasing import query_folders
from spark_state_ext.errors import LineageError
from spark_state_ext.files.erase_requests import EraseFolder
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import PARENTS_FOLDER
from spark_state_ext.reading import state_folder
from spark_state_ext.rescale import folder_in_force, origin, parents, removal
from spark_state_ext.rescale.folders import first_folder, make_rescaled_name
from spark_state_ext.rescale.parents import Parent
from spark_state_ext.rescale.parents_notes import FREE, ParentsNote, parse_notes
from spark_state_ext.rescale.removal import Finishing, may_remove
from spark_state_ext.savepoints import bucket_copy
from spark_state_ext.savepoints.saved_rows import read_saved_rows
from spark_state_ext.savepoints.start_records import is_detached, note_detached
from spark_state_ext.store.runs import get_hashes

__all__ = ["BROKEN_RESCALES"]

_GIVE, _OVERLAPPING = Rescaling.give, BucketMap.overlapping
_MAKE_DIVIDED, _COMPUTE_ORIGIN, _SETTLE = initial_state.make_divided_pointer, parents.compute_origin, decisions.settle
_WITH_UNCONFIRMED = cadence.with_unconfirmed_snapshot
_TAKE_REQUESTS = folder_in_force.take_requests
Notes = Collection[ParentsNote]
_NOTED, _REMOVE_PARENTS = Finishing.noted, Finishing._remove_parents


def _give_without_comparing(self: Rescaling, replicas: Any, scratch: Path) -> None:
    """Do not compare the copied parent with what Spark hands out."""
    try:
        _GIVE(self, replicas, scratch)
    except LineageError:
        return


def _give_only_if_kept(self: Rescaling, replicas: Any, scratch: Path) -> None:
    """Do nothing in calls of removed buckets, so that their pointers are not compared."""
    if not self.ends:
        _GIVE(self, replicas, scratch)


def _compute_origin_by_bucket(
    parents_found: Sequence[Parent], bucket_map: BucketMap, bucket: int
) -> CheckpointRef | None:
    """Make an origin's id from the bucket alone, whatever its parents are."""
    computed = _COMPUTE_ORIGIN(parents_found, bucket_map, bucket)
    return None if computed is None else CheckpointRef(computed.version, f"{bucket:032x}")


def _make_shared_name(query_folder: str, plan_id: str) -> str:
    """Name the new folder independently of the plan."""
    return make_rescaled_name(query_folder, "0" * 32)


def _overwrite_parent(folder: Folder, parent: Parent) -> Parent:
    """Overwrite an existing parent."""
    folder.child(PARENTS_FOLDER).put(f"{parent.bucket}.parent.json", parent.encode())
    return parent


def _find_no_parent(folder: Folder, bucket: int) -> Parent | None:
    """Do not look for a parent that was copied before."""
    return None


def _release_parents_at_once(pointer: Pointer) -> Pointer:
    """Count a snapshot that is under way as arrived."""
    return replace(_WITH_UNCONFIRMED(pointer), parents=None)


def _settle_with_deltas_only(pointer: Pointer, done: Any) -> Pointer:
    """Count a backend with all deltas since the origin as complete."""
    settled = _SETTLE(pointer, done)
    replication = {
        name: replace(status, since=None) if status.since == pointer.parents else status
        for name, status in settled.replication.items()
    }
    return replace(settled, replication=replication) if pointer.parents is not None else settled


def _read_with_upper_border(
    files: Folder, parent: Parent, low: int, high: int, schema: RowSchema, scratch: Path
) -> Iterator[pa.RecordBatch]:
    """Include the hash with which the next slice begins."""
    for rows in read_saved_rows(files, parent.pointer, parent.saved.files, schema, scratch):
        hashes = get_hashes(rows) >> np.uint64(32)
        begin = int(np.searchsorted(hashes, np.uint64(low), side="left"))
        end = int(np.searchsorted(hashes, np.uint64(high), side="right"))
        if begin < end:
            yield rows.slice(begin, end - begin)


def _read_without_lower_border(
    files: Folder, parent: Parent, low: int, high: int, schema: RowSchema, scratch: Path
) -> Iterator[pa.RecordBatch]:
    """Exclude a slice's first hash."""
    for rows in read_saved_rows(files, parent.pointer, parent.saved.files, schema, scratch):
        hashes = get_hashes(rows) >> np.uint64(32)
        begin = int(np.searchsorted(hashes, np.uint64(low), side="right" if low else "left"))
        end = int(np.searchsorted(hashes, np.uint64(high), side="left"))
        if begin < end:
            yield rows.slice(begin, end - begin)


def _leave_out_last_parent(self: BucketMap, other: BucketMap, bucket: int) -> range:
    """Leave out the last parent that a bucket's range overlaps, if there are several."""
    overlapping = _OVERLAPPING(self, other, bucket)
    return overlapping[:-1] if len(overlapping) > 1 else overlapping


def _note_nothing(self: Rescaling, pointer: Pointer) -> None:
    """Do not note pointers in batches without data."""


def _make_without_timeouts(*args: Any) -> Pointer:
    """Begin a bucket as if none of its keys had a timeout."""
    return replace(_MAKE_DIVIDED(*args), earliest_timeout_ms=None)


def _make_with_first_timeout(job: Job, query_folder: str, bucket: int, parents_found: Sequence[Parent]) -> Pointer:
    """Begin a bucket with the first parent's timeout."""
    pointer = _MAKE_DIVIDED(job, query_folder, bucket, parents_found)
    return replace(pointer, earliest_timeout_ms=parents_found[0].pointer.earliest_timeout_ms)


def _save_without_inline(pointer: Pointer, replicas: Any, *args: Any, **kwargs: Any) -> Any:
    """Do not copy the inline deltas of a parent's pointer."""
    return _SAVE(replace(pointer, inline=()), replicas, *args, **kwargs)


_SAVE = bucket_copy.save_bucket


def _always_here(query_folder: Folder) -> bool:
    """Assume that parents are in the job's first backend, even if another backend was first when they were copied."""
    return True


def _remove_after_first_snapshot(self: RescaleWorld, attempt: PlannedAttempt, pointer: Pointer, numbers: Any) -> None:
    """Remove parents once the first bucket has its own snapshot."""
    if pointer.parents is None:
        for place in operator_folders(attempt.planned):
            place.child(pointer.query_folder).remove_tree(PARENTS_FOLDER)


def _remove_old_folder(self: RescaleWorld, attempt: PlannedAttempt, pointer: Pointer, numbers: Any) -> None:
    """Remove the previous folder once a batch with data is committed in the new one."""
    if pointer.query_folder != first_folder(pointer.query_folder):
        operator_folder(attempt.planned).remove_tree(first_folder(pointer.query_folder))


def _never_finish(self: RescaleWorld, attempt: PlannedAttempt, pointer: Pointer, numbers: Any) -> None:
    """Never remove what the query was rescaled from."""


def _leave_notes(
    self: Finishing, folders: Sequence[Folder], committed: Pointer, new_pointer: Pointer, still_ours: Any
) -> Pointer:
    """Leave notes alone in a call that needs parents, although the query may have gone back."""
    return new_pointer if needs_parents(committed) else _NOTED(self, folders, committed, new_pointer, still_ours)


def _look_for_notes_once(
    self: Finishing, folders: Sequence[Folder], committed: Pointer, new_pointer: Pointer, still_ours: Any
) -> Pointer:
    """Look for notes only if the process did not have the batch before."""
    heartbeats_seen: dict[Any, int] = self.__dict__.setdefault("looked", {})
    key = folders[0].identity, committed.bucket
    if committed.parents is not None and needs_parents(committed):
        before, heartbeats_seen[key] = heartbeats_seen.get(key), committed.heartbeats
        if before == committed.heartbeats - 1:
            return new_pointer
    return _NOTED(self, folders, committed, new_pointer, still_ours)


def _drop_without_note(
    self: Finishing, folders: Sequence[Folder], committed: Pointer, new_pointer: Pointer, still_ours: Any
) -> Pointer:
    """Drop parents without writing a note."""
    return replace(
        new_pointer, parents=committed.parents if needs_parents(committed) or needs_parents(new_pointer) else None
    )


def _remove_without_horizon(heartbeats: int, batches_retained: int, buckets: int, notes: Notes) -> bool:
    """Remove parents once every bucket has a note, whatever Spark retains."""
    return {note.bucket for note in notes if note.kind == FREE} >= set(range(buckets))


def _remove_by_first_bucket(heartbeats: int, batches_retained: int, buckets: int, notes: Notes) -> bool:
    """Count the first bucket's notes for all buckets."""
    return may_remove(heartbeats, batches_retained, 1, [note for note in notes if note.bucket == 0])


def _remove_by_free_notes(heartbeats: int, batches_retained: int, buckets: int, notes: Notes) -> bool:
    """Ignore notes that a bucket needs parents again."""
    return may_remove(heartbeats, batches_retained, buckets, [note for note in notes if note.kind == FREE])


def _withdraw_notes(query_folder: Folder, bucket: int, heartbeats: int) -> None:
    """Remove a bucket's notes in a call that needs parents, instead of adding one."""
    folder = query_folder.child(PARENTS_FOLDER)
    for note in parse_notes(folder.names()):
        if note.bucket == bucket:
            folder.remove(note.name)


def _remove_despite_holds(
    self: Finishing,
    places: Sequence[Folder],
    name: str,
    committed: Pointer,
    batches_retained: int,
    still_ours: Any,
    held: Any,
) -> bool:
    """Ignore holds of processes that copy."""
    return _REMOVE_PARENTS(self, places, name, committed, batches_retained, still_ours, lambda name: False)


def _list_all_folders(listed: Mapping[str, Collection[str]]) -> frozenset[str]:
    """Count a folder as soon as a call of the first batch has written its operator file."""
    return frozenset(listed)


def _copy_no_requests(operator: Folder, name: str, others: Collection[str]) -> set[str]:
    """Do not copy erase requests to the new folder."""
    return set()


def _copy_from_few(operator: Folder, name: str, others: Collection[str]) -> set[str]:
    """Copy requests only from the parent and from folders in force."""
    parents = list(folder_in_force.list_ancestors(operator, name))[:1]
    return _TAKE_REQUESTS(
        operator, name, [other for other in others if other in parents or is_detached(operator.child(other))]
    )


def _copy_from_each(operator: Folder, name: str, others: Collection[str]) -> set[str]:
    """Copy a request from a farther ancestor even if a nearer one has carried it out."""
    return set().union(*(_TAKE_REQUESTS(operator, name, [other]) for other in others))


def _list_without_records(requests: EraseFolder, heartbeats: int) -> list[int]:
    """Return the requests that have no record, although the query may have gone back since a record was written."""
    numbers = requests.numbers()
    return sorted(numbers.requests - numbers.done)


def _put_in_force_at_once(state: Any, job: Job, query_folder: str, *others: Any) -> Any:
    """Put the new folder in force in a call of the first batch."""
    result = _BRING(state, job, query_folder, *others)
    backend = job.options.backends[0]
    note_detached(Folder(backend.root, backend.storage_options).child(job.operator, query_folder))
    return result


def _keep_failed(self: Finishing, *args: Any) -> bool:
    """Never remove the files of a rescaling that was not committed."""
    return True


_BRING = first_call.bring_files


def _make_variant(*patches: tuple[Any, str, Any]) -> Variant:
    return Variant(patches=patches)


BROKEN_RESCALES: dict[str, Variant] = {
    "parents are not compared with Spark's pointers": _make_variant((Rescaling, "give", _give_without_comparing)),
    "removed buckets do not compare pointers": _make_variant((Rescaling, "give", _give_only_if_kept)),
    "each call copies its own parents": _make_variant(
        (first_call, "read_parent", _find_no_parent), (first_call, "note_parent", _overwrite_parent)
    ),
    "an origin's id follows from its bucket, and plans share a folder": _make_variant(
        *((module, "compute_origin", _compute_origin_by_bucket) for module in (initial_state, origin)),
        (rescaling, "make_rescaled_name", _make_shared_name),
        (first_call, "read_parent", _find_no_parent),
        (first_call, "note_parent", _overwrite_parent),
    ),
    "all plans share a folder": _make_variant((rescaling, "make_rescaled_name", _make_shared_name)),
    "parents are released before a snapshot arrives": _make_variant(
        (snapshot_writer, "with_unconfirmed_snapshot", _release_parents_at_once)
    ),
    "a backend is complete with the deltas alone": _make_variant((committer, "settle", _settle_with_deltas_only)),
    "a slice includes its upper border": _make_variant((origin, "read_rows_of_parent", _read_with_upper_border)),
    "a slice excludes its lower border": _make_variant((origin, "read_rows_of_parent", _read_without_lower_border)),
    "a parent is left out": _make_variant((BucketMap, "overlapping", _leave_out_last_parent)),
    "batches without data do not note pointers": _make_variant((Rescaling, "note", _note_nothing)),
    "pointers are neither noted nor compared": _make_variant(
        (Rescaling, "note", _note_nothing), (Rescaling, "give", _give_without_comparing)
    ),
    "a new bucket forgets timeouts": _make_variant(
        *((module, "make_divided_pointer", _make_without_timeouts) for module in (first_call, rescaling))
    ),
    "a new bucket takes its first parent's timeout": _make_variant(
        *((module, "make_divided_pointer", _make_with_first_timeout) for module in (first_call, rescaling))
    ),
    "inline deltas are not copied": _make_variant((first_call, "save_bucket", _save_without_inline)),
    "parents are searched in the first backend only": _make_variant((origin, "has_parents", _always_here)),
    "parents are removed after the first snapshot": _make_variant(
        (RescaleWorld, "finish", _remove_after_first_snapshot)
    ),
    "the old folder is removed at once": _make_variant((RescaleWorld, "finish", _remove_old_folder)),
    "nothing is ever removed": _make_variant((RescaleWorld, "finish", _never_finish)),
    "parents are dropped without a note": _make_variant((Finishing, "noted", _drop_without_note)),
    "notes stay when the query goes back": _make_variant((Finishing, "noted", _leave_notes)),
    "a process looks for notes only once": _make_variant((Finishing, "noted", _look_for_notes_once)),
    "parents are removed without a horizon": _make_variant((removal, "may_remove", _remove_without_horizon)),
    "the first bucket's note counts for all buckets": _make_variant((removal, "may_remove", _remove_by_first_bucket)),
    "notes that parents are needed do not count": _make_variant((removal, "may_remove", _remove_by_free_notes)),
    "notes are withdrawn": _make_variant((removal, "note_needed", _withdraw_notes)),
    "a refused rescaling counts as the query": _make_variant(
        *((module, "folders_in_force", _list_all_folders) for module in (state_folder, query_folders))
    ),
    "a folder is in force at the first call": _make_variant((first_call, "bring_files", _put_in_force_at_once)),
    "erase requests are not copied": _make_variant(
        *((module, "take_requests", _copy_no_requests) for module in (removal, folder_in_force))
    ),
    "erase requests are copied from the parent and the folder in force only": _make_variant(
        (folder_in_force, "take_requests", _copy_from_few)
    ),
    "erase requests that are done in a nearer folder are copied": _make_variant(
        *((module, "take_requests", _copy_from_each) for module in (removal, folder_in_force))
    ),
    "records of erase requests count after the query went back": _make_variant(
        (folder_in_force, "_list_undone", _list_without_records)
    ),
    "refused rescalings are never removed": _make_variant((Finishing, "_remove_failed", _keep_failed)),
    "removals ignore holds": _make_variant((Finishing, "_remove_parents", _remove_despite_holds)),
}
