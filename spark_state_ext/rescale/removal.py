"""Removes parents, and the folders that a query was rescaled from, when no pointer that Spark may hand out needs them.

If a call's input pointer says that a backend has all of its bucket, the call writes a note next to the parents, with
the pointer's heartbeats, before it hands over a pointer without parents. If the input pointer does not say so although
there is such a note (the query went back, or the previous batch ran twice), the call notes that it needs the parents.
So a bucket without a note may need its parents. When every bucket has a note, and all notes of both kinds are older
than any pointer that Spark may hand out, no bucket needs them. A deleted note would never be rewritten, because a
pointer without parents writes no note.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from arrow_schemas.pointer import Pointer
from spark_state_ext.backends.replication import needs_parents
from spark_state_ext.errors import OwnershipError, StateError
from spark_state_ext.files.erase_requests import EraseFolder
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.horizon import recent_heartbeats
from spark_state_ext.files.layout import PARENTS_FOLDER
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.rescale.folder_in_force import list_ancestors, take_requests
from spark_state_ext.rescale.folders import first_folder, make_rescaled_name
from spark_state_ext.rescale.parents import has_parents
from spark_state_ext.rescale.parents_notes import FREE, ParentsNote, note_free, note_needed, parse_notes
from spark_state_ext.savepoints.start_records import is_detached, read_start
from spark_state_ext.worker.background import Runner

__all__ = ["Finishing", "may_remove"]

_LOGGER = logging.getLogger("spark_state_ext")


def may_remove(heartbeats: int, batches_retained: int, buckets: int, notes: Collection[ParentsNote]) -> bool:
    """True if no pointer that Spark may hand out needs parents."""
    all_free = {note.bucket for note in notes if note.kind == FREE} >= set(range(buckets))
    # One batch more than elsewhere: if each batch has two heartbeats, a late note may be two batches old.
    return all_free and max(note.heartbeats for note in notes) < heartbeats - recent_heartbeats(batches_retained + 1)


def _list_other_folders(places: Sequence[Folder], name: str) -> Iterator[tuple[Folder, str]]:
    """Yield the query's other query folders: the operator folder, and the name in it."""
    for place in places:
        for other in place.names():
            if other != name and first_folder(other) == first_folder(name):
                yield place, other


def _find_failed(root: Folder, name: str, plan_id: str, others: Collection[str]) -> set[str]:
    """Return the folders of failed rescalings by other plans: they are not in force and not ancestors of `name`."""
    kept_names = {name, first_folder(name), make_rescaled_name(name, plan_id), *list_ancestors(root, name)}
    return {other for other in others if other not in kept_names and not is_detached(root.child(other))}


def _log_remaining(others: Sequence[tuple[Folder, str]], name: str) -> None:
    """Log remaining folders of a rescaled query if no record shows how long they are needed."""
    for place, other in others if name != first_folder(name) else ():
        _LOGGER.warning(
            "%s remains after a rescaling, and the query goes on in %s: a process that outlived the rescaling wrote "
            "there after it was removed, or the folder that the query was rescaled from is in a backend that the query "
            "no longer has. It will be removed some time after a start with that backend, or after the next rescaling",
            place.child(other).root,
            name,
        )


class Finishing:
    """Removes parents and old query folders in one process; a `Worker` owns it."""

    def __init__(self) -> None:
        # Query folders and plans for which everything is removed.
        self._done: set[tuple[str, str]] = set()
        # Lease numbers that were seen last.
        self._leases: dict[str, int] = {}
        self._lock = threading.Lock()

    def noted(
        self, query_folders: Iterable[Folder], committed: Pointer, new: Pointer, check_ours: Callable[[], None]
    ) -> Pointer:
        """Note whether the call's input pointer needs parents, and return the pointer that the call hands over."""
        if committed.parents is None:
            return new
        folders = list(query_folders)
        if needs_parents(committed):
            # Noted each time: if a batch runs twice, the other attempt may go on from a pointer that needs no parents.
            note_needed(folders[0], committed.bucket, committed.heartbeats)
            return new
        if needs_parents(new):
            # Files were deleted from the backend that had all of the bucket.
            return new
        # A late task of an old run must not note for a newer run, which went back, that parents are not needed.
        check_ours()
        # If the query has gone back to such a pointer and all parents are gone, a note would never be removed. The
        # parents may also be in a backend that the query has only as its root now.
        with_parents = next((folder for folder in folders if has_parents(folder)), None)
        if with_parents is not None:
            note_free(with_parents, committed.bucket, committed.heartbeats)
        return replace(new, parents=None)

    def in_turn(
        self,
        places: Sequence[Folder],
        name: str,
        plan_id: str,
        committed: Pointer,
        batches_retained: int,
        check_ours: Callable[[], None],
        is_held: Callable[[str], bool],
        background: Runner,
    ) -> None:
        """Remove in the background what is no longer needed; a query's first bucket calls this."""
        key = (places[0].child(name).identity, plan_id)
        if key in self._done:
            return

        def remove() -> None:
            try:
                parents_removed = self._remove_parents(places, name, committed, batches_retained, check_ours, is_held)
                if parents_removed and self._remove_failed(
                    places, name, plan_id, committed, batches_retained, check_ours, is_held
                ):
                    self._done.add(key)
            except OwnershipError:
                raise
            except StateError as error:
                # This does not harm the batch; a later batch tries again.
                _LOGGER.warning(
                    "the folders that %s was rescaled from are not removed yet: %s", places[0].where(name), error
                )

        background.submit(f"parents of {places[0].where(name)}", remove)

    def _remove_parents(
        self,
        places: Sequence[Folder],
        name: str,
        committed: Pointer,
        batches_retained: int,
        check_ours: Callable[[], None],
        is_held: Callable[[str], bool],
    ) -> bool:
        """Remove parents and old folders if no pointer needs them; return True if all are removed."""
        query_folders = {place.child(name): place.child(name, PARENTS_FOLDER).names() for place in places}
        query_folder = next((folder for folder, names in query_folders.items() if names), None)
        if query_folder is None:
            return True
        notes = parse_notes(query_folders[query_folder])
        if len(notes) == len(query_folders[query_folder]):
            # An earlier removal was stopped after it had removed everything except the notes.
            query_folder.remove_tree(PARENTS_FOLDER)
            return True
        retained = max(batches_retained, committed.retained)
        if not may_remove(committed.heartbeats, retained, committed.buckets, notes) or is_held(name):
            return False
        ancestors = list_ancestors(places[0], name)
        # `take_requests` asks nearer folders what was done, so ancestors are removed last, and the nearest at the end.
        distances = {ancestor: distance for distance, ancestor in enumerate(ancestors)}
        others = sorted(
            _list_other_folders(places, name), key=lambda pair: distances.get(pair[1], len(distances)), reverse=True
        )
        in_use = [self._is_written(place.child(other)) or is_held(other) for place, other in others]
        remaining = {other for (_, other), used in zip(others, in_use, strict=True) if used}
        if not all(in_use):
            check_ours()
            remaining |= take_requests(places[0], name, {other for _, other in others})
        for place, other in others:
            if other in remaining or (other in ancestors and remaining):
                remaining.add(other)
                continue
            check_ours()
            if place is places[0]:
                # If the removal stops in the middle, a request without its record would seem to wait.
                requests = EraseFolder(place.child(other))
                for number in requests.numbers().requests:
                    requests.drop(number)
            place.remove_tree(other)
            _LOGGER.info("%s is removed: the query was rescaled and goes on in %s", place.child(other).root, name)
        if remaining:
            return False
        check_ours()
        # Notes are removed last, because they show that the parents may be removed.
        for file_name in query_folders[query_folder]:
            if not parse_notes([file_name]):
                query_folder.child(PARENTS_FOLDER).remove_tree(file_name)
        query_folder.remove_tree(PARENTS_FOLDER)
        _LOGGER.info("%s no longer needs the state that it was rescaled from", query_folder.root)
        return True

    def _remove_failed(
        self,
        places: Sequence[Folder],
        name: str,
        plan_id: str,
        committed: Pointer,
        batches_retained: int,
        check_ours: Callable[[], None],
        is_held: Callable[[str], bool],
    ) -> bool:
        """Remove folders of failed rescalings that Spark's batches no longer need; return True if all are removed."""
        retained, all_removed = max(batches_retained, committed.retained), True
        # The root's folders last, because their records identify the others.
        others = list(_list_other_folders(places[::-1], name))
        failed = _find_failed(places[0], name, plan_id, {other for _, other in others}) if others else set()
        for place, other in [pair for pair in others if pair[1] in failed]:
            record = read_start(places[0].child(other))
            # The folder may have been committed before the query went back, and going back may be undone.
            recent = record is not None and committed.batch <= record.batch + 1 + retained
            if recent or self._is_written(place.child(other)) or is_held(other):
                all_removed = False
                continue
            check_ours()
            place.remove_tree(other)
            _LOGGER.info(
                "%s is removed: its rescaling failed, and the query goes on in %s",
                place.child(other).root,
                name,
            )
        if all_removed:
            _log_remaining([pair for pair in others if pair[1] not in failed], name)
        return all_removed

    def _is_written(self, query_folder: Folder) -> bool:
        """True if the folder may be in use: its lease changed since the last check, or was not checked before."""
        record = LeaseLog(query_folder).newest(first=True)
        number = 0 if record is None else record.number
        with self._lock:
            last_number = self._leases.get(query_folder.identity)
            self._leases[query_folder.identity] = number
        return last_number != number
