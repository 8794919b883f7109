"""Ways in which rescaling could have been built wrong. The simulator of it has to find each."""

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
from spark_state_ext.savepoints.start_records import note_detached
from spark_state_ext.store.runs import get_hashes

__all__ = ["BROKEN_RESCALES"]

_GIVE, _OVERLAPPING = Rescaling.give, BucketMap.overlapping
_DIVIDED, _ORIGIN_OF, _SETTLED = initial_state.make_divided_pointer, parents.compute_origin, decisions.settle
_UNCONFIRMED = cadence.with_unconfirmed_snapshot
Notes = Collection[ParentsNote]
_NOTED, _REMOVE_PARENTS = Finishing.noted, Finishing._remove_parents


def _not_compared(self: Rescaling, replicas: Any, scratch: Path) -> None:
    """What was brought is taken for what Spark hands out."""
    try:
        _GIVE(self, replicas, scratch)
    except LineageError:
        return


def _not_called(self: Rescaling, replicas: Any, scratch: Path) -> None:
    """Calls of buckets that are no more do nothing; nobody compares these."""
    if not self.ends:
        _GIVE(self, replicas, scratch)


def _origin_of_the_bucket(found: Sequence[Parent], bucket_map: BucketMap, bucket: int) -> CheckpointRef | None:
    """An origin's id follows from the bucket, whatever it is made of."""
    made = _ORIGIN_OF(found, bucket_map, bucket)
    return None if made is None else CheckpointRef(made.version, f"{bucket:032x}")


def _one_folder(query_folder: str, plan_id: str) -> str:
    """The new folder's name tells the number of the buckets' last change, not the plan."""
    return make_rescaled_name(query_folder, "0" * 32)


def _over_what_is_there(folder: Folder, parent: Parent) -> Parent:
    """Whoever comes later writes its own over what is there."""
    folder.child(PARENTS_FOLDER).put(f"{parent.bucket}.parent.json", parent.encode())
    return parent


def _not_there(folder: Folder, bucket: int) -> Parent | None:
    """Nobody looks whether a parent was brought before."""
    return None


def _without_parents_at_once(pointer: Pointer) -> Pointer:
    """A snapshot that is under way is taken for one that has arrived."""
    return replace(_UNCONFIRMED(pointer), parents=None)


def _complete_with_the_deltas(pointer: Pointer, done: Any) -> Pointer:
    """A backend that has all deltas since the origin is taken to have the state."""
    made = _SETTLED(pointer, done)
    replication = {
        name: replace(it, since=None) if it.since == pointer.parents else it for name, it in made.replication.items()
    }
    return replace(made, replication=replication) if pointer.parents is not None else made


def _up_to_and_with(
    files: Folder, parent: Parent, low: int, high: int, schema: RowSchema, scratch: Path
) -> Iterator[pa.RecordBatch]:
    """A slice ends with the hash at which the next one begins."""
    for rows in read_saved_rows(files, parent.pointer, parent.saved.files, schema, scratch):
        hashes = get_hashes(rows) >> np.uint64(32)
        begin = int(np.searchsorted(hashes, np.uint64(low), side="left"))
        end = int(np.searchsorted(hashes, np.uint64(high), side="right"))
        if begin < end:
            yield rows.slice(begin, end - begin)


def _after(
    files: Folder, parent: Parent, low: int, high: int, schema: RowSchema, scratch: Path
) -> Iterator[pa.RecordBatch]:
    """A slice begins after its first hash."""
    for rows in read_saved_rows(files, parent.pointer, parent.saved.files, schema, scratch):
        hashes = get_hashes(rows) >> np.uint64(32)
        begin = int(np.searchsorted(hashes, np.uint64(low), side="right" if low else "left"))
        end = int(np.searchsorted(hashes, np.uint64(high), side="left"))
        if begin < end:
            yield rows.slice(begin, end - begin)


def _without_the_last(self: BucketMap, other: BucketMap, bucket: int) -> range:
    """The parent in which a bucket's range ends is left out, where the range ends within it."""
    found = _OVERLAPPING(self, other, bucket)
    return found[:-1] if len(found) > 1 else found


def _forgotten(self: Rescaling, pointer: Pointer) -> None:
    """Batches without data do not note their pointers."""


def _without_timeouts(*args: Any) -> Pointer:
    """A bucket begins as if none of its keys had a timeout."""
    return replace(_DIVIDED(*args), earliest_timeout_ms=None)


def _with_one_parents_timeout(job: Job, query_folder: str, bucket: int, found: Sequence[Parent]) -> Pointer:
    """It takes the first parent's timeout for its own."""
    made = _DIVIDED(job, query_folder, bucket, found)
    return replace(made, earliest_timeout_ms=found[0].pointer.earliest_timeout_ms)


def _inline_left_behind(pointer: Pointer, replicas: Any, *args: Any, **kwargs: Any) -> Any:
    """What is inline in a parent's pointer is not brought along."""
    return _SAVE(replace(pointer, inline=()), replicas, *args, **kwargs)


_SAVE = bucket_copy.save_bucket


def _here(query_folder: Folder) -> bool:
    """Parents are where the job's first backend is, whichever was the first one when they were brought."""
    return True


def _removed_with_the_first(self: RescaleWorld, attempt: PlannedAttempt, pointer: Pointer, numbers: Any) -> None:
    """Parents are removed once the first bucket has a snapshot of its own."""
    if pointer.parents is None:
        for place in operator_folders(attempt.planned):
            place.child(pointer.query_folder).remove_tree(PARENTS_FOLDER)


def _old_folder_removed(self: RescaleWorld, attempt: PlannedAttempt, pointer: Pointer, numbers: Any) -> None:
    """Once a batch with data is committed in the new folder, the one before is removed."""
    if pointer.query_folder != first_folder(pointer.query_folder):
        operator_folder(attempt.planned).remove_tree(first_folder(pointer.query_folder))


def _never_finished(self: RescaleWorld, attempt: PlannedAttempt, pointer: Pointer, numbers: Any) -> None:
    """Nobody removes what the query was rescaled from."""


def _notes_stay(
    self: Finishing, folders: Sequence[Folder], committed: Pointer, made: Pointer, still_ours: Any
) -> Pointer:
    """A call that needs parents leaves notes alone, which may be from before the query went back."""
    return made if needs_parents(committed) else _NOTED(self, folders, committed, made, still_ours)


def _looked_for_once(
    self: Finishing, folders: Sequence[Folder], committed: Pointer, made: Pointer, still_ours: Any
) -> Pointer:
    """A process looks for notes only where it did not have the batch before."""
    looked: dict[Any, int] = self.__dict__.setdefault("looked", {})
    key = folders[0].identity, committed.bucket
    if committed.parents is not None and needs_parents(committed):
        before, looked[key] = looked.get(key), committed.heartbeats
        if before == committed.heartbeats - 1:
            return made
    return _NOTED(self, folders, committed, made, still_ours)


def _without_a_note(
    self: Finishing, folders: Sequence[Folder], committed: Pointer, made: Pointer, still_ours: Any
) -> Pointer:
    """Parents are dropped, and nobody writes that down."""
    return replace(made, parents=committed.parents if needs_parents(committed) or needs_parents(made) else None)


def _without_horizon(heartbeats: int, batches_retained: int, buckets: int, notes: Notes) -> bool:
    """Parents go once every bucket has a note, whatever Spark retains."""
    return {note.bucket for note in notes if note.kind == FREE} >= set(range(buckets))


def _by_the_first_bucket(heartbeats: int, batches_retained: int, buckets: int, notes: Notes) -> bool:
    """The first bucket's notes count for all."""
    return may_remove(heartbeats, batches_retained, 1, [note for note in notes if note.bucket == 0])


def _by_free_notes(heartbeats: int, batches_retained: int, buckets: int, notes: Notes) -> bool:
    """A note that a bucket needs parents after all counts for nothing."""
    return may_remove(heartbeats, batches_retained, buckets, [note for note in notes if note.kind == FREE])


def _taken_back(query_folder: Folder, bucket: int, heartbeats: int) -> None:
    """A call that needs parents removes its bucket's notes, in place of adding one."""
    folder = query_folder.child(PARENTS_FOLDER)
    for note in parse_notes(folder.names()):
        if note.bucket == bucket:
            folder.remove(note.name)


def _blind_to_holds(
    self: Finishing,
    places: Sequence[Folder],
    name: str,
    committed: Pointer,
    batches_retained: int,
    still_ours: Any,
    held: Any,
) -> bool:
    """Nobody asks whether somebody copies."""
    return _REMOVE_PARENTS(self, places, name, committed, batches_retained, still_ours, lambda name: False)


def _with_an_operator_file(listed: Mapping[str, Collection[str]]) -> frozenset[str]:
    """A folder counts from the moment at which a call of the first batch writes its operator file."""
    return frozenset(listed)


def _left_behind(source: Folder, target: Folder, *, waiting_only: bool) -> bool:
    """Erase requests stay where they were made."""
    return True


def _put_in_force_when_begun(state: Any, job: Job, query_folder: str, *others: Any) -> Any:
    """A call of the first batch puts the new folder in force itself."""
    made = _BRING(state, job, query_folder, *others)
    backend = job.options.backends[0]
    note_detached(Folder(backend.root, backend.storage_options).child(job.operator, query_folder))
    return made


def _dead_stay(self: Finishing, *args: Any) -> bool:
    """Nobody removes what a rescaling left that came to nothing."""
    return True


_BRING = first_call.bring_files


def _patched(*patches: tuple[Any, str, Any]) -> Variant:
    return Variant(patches=patches)


BROKEN_RESCALES: dict[str, Variant] = {
    "parents are not compared with Spark's pointers": _patched((Rescaling, "give", _not_compared)),
    "removed buckets do not compare pointers": _patched((Rescaling, "give", _not_called)),
    "each call copies its own parents": _patched(
        (first_call, "read_parent", _not_there), (first_call, "note_parent", _over_what_is_there)
    ),
    "an origin's id follows from its bucket, and plans share a folder": _patched(
        *((module, "compute_origin", _origin_of_the_bucket) for module in (initial_state, origin)),
        (rescaling, "make_rescaled_name", _one_folder),
        (first_call, "read_parent", _not_there),
        (first_call, "note_parent", _over_what_is_there),
    ),
    "all plans share a folder": _patched((rescaling, "make_rescaled_name", _one_folder)),
    "parents are released before a snapshot arrives": _patched(
        (snapshot_writer, "with_unconfirmed_snapshot", _without_parents_at_once)
    ),
    "a backend is complete with the deltas alone": _patched((committer, "settle", _complete_with_the_deltas)),
    "a slice includes its upper border": _patched((origin, "read_rows_of_parent", _up_to_and_with)),
    "a slice excludes its lower border": _patched((origin, "read_rows_of_parent", _after)),
    "a parent is left out": _patched((BucketMap, "overlapping", _without_the_last)),
    "batches without data do not note pointers": _patched((Rescaling, "note", _forgotten)),
    "pointers are neither noted nor compared": _patched(
        (Rescaling, "note", _forgotten), (Rescaling, "give", _not_compared)
    ),
    "a new bucket forgets timeouts": _patched(
        *((it, "make_divided_pointer", _without_timeouts) for it in (first_call, rescaling))
    ),
    "a new bucket takes its first parent's timeout": _patched(
        *((it, "make_divided_pointer", _with_one_parents_timeout) for it in (first_call, rescaling))
    ),
    "inline deltas are not copied": _patched((first_call, "save_bucket", _inline_left_behind)),
    "parents are searched in the first backend only": _patched((origin, "has_parents", _here)),
    "parents are removed after the first snapshot": _patched((RescaleWorld, "finish", _removed_with_the_first)),
    "the old folder is removed at once": _patched((RescaleWorld, "finish", _old_folder_removed)),
    "nothing is ever removed": _patched((RescaleWorld, "finish", _never_finished)),
    "parents are dropped without a note": _patched((Finishing, "noted", _without_a_note)),
    "notes stay when the query goes back": _patched((Finishing, "noted", _notes_stay)),
    "a process looks for notes only once": _patched((Finishing, "noted", _looked_for_once)),
    "parents are removed without a horizon": _patched((removal, "may_remove", _without_horizon)),
    "the first bucket's note counts for all buckets": _patched((removal, "may_remove", _by_the_first_bucket)),
    "notes that parents are needed do not count": _patched((removal, "may_remove", _by_free_notes)),
    "notes are withdrawn": _patched((removal, "note_needed", _taken_back)),
    "a refused rescaling counts as the query": _patched(
        *((module, "folders_in_force", _with_an_operator_file) for module in (state_folder, query_folders))
    ),
    "a folder is in force at the first call": _patched((first_call, "bring_files", _put_in_force_when_begun)),
    "erase requests are not copied": _patched(
        *((module, "take_requests", _left_behind) for module in (removal, folder_in_force))
    ),
    "refused rescalings are never removed": _patched((Finishing, "_remove_failed", _dead_stay)),
    "removals ignore holds": _patched((Finishing, "_remove_parents", _blind_to_holds)),
}
