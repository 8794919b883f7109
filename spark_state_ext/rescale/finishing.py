"""When parents may go, and what a query was rescaled from: once no pointer that Spark may hand out needs them.

A call whose input pointer says that a backend holds all of its bucket notes that beside the parents, with the pointer's
heartbeats, before its own pointer has no parents any more. One whose input pointer does not say so, though there is
such a note, as the query went back or the batch before ran twice, notes that it needs them. So a bucket without a note
may need its parents; and where each has one, and all notes of both kinds are older than what Spark may hand out, none
does. A note that were taken back would not come again, as a pointer without parents writes none.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from arrow_schemas.pointer import Pointer
from spark_state_ext.backends.replication import needs_parents
from spark_state_ext.errors import OwnershipError, StateError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.horizon import recent_heartbeats
from spark_state_ext.files.layout import PARENTS_FOLDER
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.rescale.folders import first_folder, rescaled_folder
from spark_state_ext.rescale.in_force import parent_folder, take_requests
from spark_state_ext.rescale.notes import FREE, ParentsNote, note_free, note_needed, notes_among
from spark_state_ext.rescale.parents import has_parents
from spark_state_ext.savepoints.records import is_detached, start_of
from spark_state_ext.worker.background import Runner

__all__ = ["Finishing", "may_remove"]

_LOGGER = logging.getLogger("spark_state_ext")


def may_remove(heartbeats: int, batches_retained: int, buckets: int, notes: Collection[ParentsNote]) -> bool:
    """Whether no pointer that Spark may hand out needs parents."""
    whole = {note.bucket for note in notes if note.kind == FREE} >= set(range(buckets))
    # One batch more than elsewhere: where each batch has two heartbeats, a late note may be as old as two batches.
    return whole and max(note.heartbeats for note in notes) < heartbeats - recent_heartbeats(batches_retained + 1)


def _others(places: Sequence[Folder], name: str) -> Iterator[tuple[Folder, str]]:
    """All other folders that the query has had: where, and by which name."""
    for place in places:
        for other in place.names():
            if other != name and first_folder(other) == first_folder(name):
                yield place, other


def _dead(root: Folder, name: str, plan_id: str, others: Collection[str]) -> set[str]:
    """The folders beside the one in force that are of rescalings of other plans which came to nothing."""
    ancestor, kept = parent_folder(root.child(name)), {name, first_folder(name), rescaled_folder(name, plan_id)}
    while ancestor is not None and ancestor not in kept:
        kept.add(ancestor)
        ancestor = parent_folder(root.child(ancestor))
    return {other for other in others if other not in kept and not is_detached(root.child(other))}


def _tell_left(others: Sequence[tuple[Folder, str]], name: str) -> None:
    """Log what lies beside the folder of a rescaled query when nothing in reach says how long it is needed."""
    for place, other in others if name != first_folder(name) else ():
        _LOGGER.warning(
            "%s is left of a rescaling, and the query goes on in %s: a process that outlived the rescaling wrote "
            "there after it was removed, or what the query was rescaled from lies with a backend that it has not "
            "any more. It is removed in time after a start with that backend, or after the next rescaling",
            place.child(other).root,
            name,
        )


class Finishing:
    """What a process has done of this; a `Worker` owns it."""

    def __init__(self) -> None:
        # Query folders of a plan without parents.
        self._without: set[tuple[str, str]] = set()
        # Numbers of leases as they were seen before.
        self._leases: dict[str, int] = {}
        self._lock = threading.Lock()

    def noted(
        self, query_folders: Iterable[Folder], committed: Pointer, made: Pointer, still_ours: Callable[[], None]
    ) -> Pointer:
        """The pointer that a call hands over, once it is noted what the one says that it was handed."""
        if committed.parents is None:
            return made
        folders = list(query_folders)
        if needs_parents(committed):
            # Each time: where a batch runs twice, the other attempt may go on from a pointer that needs none.
            note_needed(folders[0], committed.bucket, committed.heartbeats)
            return made
        if needs_parents(made):
            # Somebody has deleted files from the one that had all of it.
            return made
        # A late task of a run that is over must not tell the run that went back that it needs none.
        still_ours()
        # Where the query has gone back to such a pointer and all parents are gone, nobody would remove the note. And
        # they may lie with a backend that the query has not any more, but as its root.
        there = next((it for it in folders if has_parents(it)), None)
        if there is not None:
            note_free(there, committed.bucket, committed.heartbeats)
        return replace(made, parents=None)

    def in_turn(
        self,
        places: Sequence[Folder],
        name: str,
        plan_id: str,
        committed: Pointer,
        batches_retained: int,
        still_ours: Callable[[], None],
        held: Callable[[str], bool],
        background: Runner,
    ) -> None:
        """Remove beside the batch what is not needed any more. A query's first bucket does it, in its turn."""
        key = (places[0].child(name).identity, plan_id)
        if key in self._without:
            return

        def work() -> None:
            try:
                finished = self._finished(places, name, committed, batches_retained, still_ours, held)
                if finished and self._is_alone(places, name, plan_id, committed, batches_retained, still_ours, held):
                    self._without.add(key)
            except OwnershipError:
                raise
            except StateError as error:
                # Of no harm to a batch; it is tried again.
                _LOGGER.warning("what %s was rescaled from is not removed yet: %s", places[0].where(name), error)

        background.submit(f"parents of {places[0].where(name)}", work)

    def _finished(
        self,
        places: Sequence[Folder],
        name: str,
        committed: Pointer,
        batches_retained: int,
        still_ours: Callable[[], None],
        held: Callable[[str], bool],
    ) -> bool:
        """Remove what may go; whether nothing is left."""
        query_folders = {it.child(name): it.child(name, PARENTS_FOLDER).names() for it in places}
        query_folder = next((it for it, names in query_folders.items() if names), None)
        if query_folder is None:
            return True
        notes = notes_among(query_folders[query_folder])
        if len(notes) == len(query_folders[query_folder]):
            # Somebody was stopped who removed all else.
            query_folder.remove_tree(PARENTS_FOLDER)
            return True
        retained = max(batches_retained, committed.retained)
        if not may_remove(committed.heartbeats, retained, committed.buckets, notes) or held(name):
            return False
        left = False
        for place, other in _others(places, name):
            old = place.child(other)
            if self._is_written(old) or held(other):
                left = True
                continue
            still_ours()
            if not take_requests(places[0].child(other), places[0].child(name), waiting_only=True):
                left = True
                continue
            place.remove_tree(other)
            _LOGGER.info("%s is removed: the query was rescaled, and goes on in %s", old.root, name)
        if left:
            return False
        still_ours()
        # The notes last: without them nobody would know that the others may go.
        for it in query_folders[query_folder]:
            if not notes_among([it]):
                query_folder.child(PARENTS_FOLDER).remove_tree(it)
        query_folder.remove_tree(PARENTS_FOLDER)
        _LOGGER.info("%s needs nothing any more of what it was rescaled from", query_folder.root)
        return True

    def _is_alone(
        self,
        places: Sequence[Folder],
        name: str,
        plan_id: str,
        committed: Pointer,
        batches_retained: int,
        still_ours: Callable[[], None],
        held: Callable[[str], bool],
    ) -> bool:
        """Remove what rescalings left that came to nothing, once Spark retains no batch of their time; whether nothing
        of these is left."""
        retained, alone = max(batches_retained, committed.retained), True
        # The root's last, as its records tell what the others are.
        others = list(_others(places[::-1], name))
        dead = _dead(places[0], name, plan_id, {other for _, other in others}) if others else set()
        for place, other in [it for it in others if it[1] in dead]:
            record = start_of(places[0].child(other))
            # The folder may have been committed, and the query gone back to before; somebody may undo that.
            recent = record is not None and committed.batch <= record.batch + 1 + retained
            if recent or self._is_written(place.child(other)) or held(other):
                alone = False
                continue
            still_ours()
            place.remove_tree(other)
            _LOGGER.info(
                "%s is removed: it is of a rescaling that failed, and the query goes on in %s",
                place.child(other).root,
                name,
            )
        if alone:
            _tell_left([it for it in others if it[1] not in dead], name)
        return alone

    def _is_written(self, query_folder: Folder) -> bool:
        """Whether somebody may write to a query folder: its lease is another one than when it was looked at before."""
        found = LeaseLog(query_folder).newest(first=True)
        number = 0 if found is None else found.number
        with self._lock:
            before = self._leases.get(query_folder.identity)
            self._leases[query_folder.identity] = number
        return before != number
