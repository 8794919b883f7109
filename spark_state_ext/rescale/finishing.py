"""When parents may go, and what a query was rescaled from: once no pointer that Spark may hand out needs them.

A call whose input pointer says that a backend holds all of its bucket notes that beside the parents, with the pointer's
heartbeats, before its own pointer has no parents any more. One whose input pointer does not say so, as the query went
back, removes the note. So a bucket without a note may need its parents; and where each has one, all older than what
Spark may hand out, none does.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from dataclasses import replace

from arrow_schemas.pointer import Pointer
from spark_state_ext.backends.replication import needs_parents
from spark_state_ext.errors import OwnershipError, StateError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.horizon import recent_heartbeats
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.rescale.folders import first_folder
from spark_state_ext.rescale.parents import PARENTS_FOLDER, note_free
from spark_state_ext.worker.background import Background

__all__ = ["Finishing", "may_remove"]

_LOGGER = logging.getLogger("spark_state_ext")
_NOTE = re.compile(r"(0|[1-9][0-9]{0,8})\.free-([0-9]{1,18})")


def may_remove(heartbeats: int, batches_retained: int, buckets: int, noted: dict[int, int]) -> bool:
    """Whether no pointer that Spark may hand out needs parents.

    Parameters
    ----------
    heartbeats
        Of a committed pointer.
    batches_retained
        The most batches that Spark retains.
    buckets
        How many buckets the query has.
    noted
        By bucket, the heartbeats of its note.
    """
    whole = noted.keys() >= set(range(buckets))
    return whole and max(noted.values()) < heartbeats - recent_heartbeats(batches_retained)


class Finishing:
    """What a process has done of this; a `Worker` owns it."""

    def __init__(self) -> None:
        # Of which plan the buckets' notes were looked for.
        self._looked: set[tuple[str, int, str]] = set()
        # Query folders of a plan without parents.
        self._without: set[tuple[str, str]] = set()
        # Numbers of leases as they were seen before.
        self._leases: dict[str, int] = {}
        self._lock = threading.Lock()

    def noted(self, query_folder: Folder, plan_id: str, committed: Pointer, made: Pointer) -> Pointer:
        """The pointer that a call hands over, once it is noted what the one says that it was handed.

        Parameters
        ----------
        query_folder
            The bucket's query folder.
        plan_id
            Id of the plan.
        committed
            The input pointer.
        made
            The new one.

        Raises
        ------
        StorageError
            When the store fails: then nothing may be handed over.
        """
        if committed.parents is None:
            return made
        notes, key = query_folder.child(PARENTS_FOLDER), (query_folder.identity, committed.bucket, plan_id)
        if needs_parents(committed):
            if key not in self._looked:
                for name in notes.names():
                    if (match := _NOTE.fullmatch(name)) and int(match[1]) == committed.bucket:
                        notes.remove(name)
                self._looked.add(key)
            return made
        note_free(query_folder, committed.bucket, committed.heartbeats)
        return replace(made, parents=None)

    def in_turn(
        self,
        query_folder: Folder,
        siblings: Folder,
        plan_id: str,
        committed: Pointer,
        batches_retained: int,
        still_ours: Callable[[], None],
        held: Callable[[Folder], bool],
        background: Background,
    ) -> None:
        """Have what is not needed any more removed beside the batch. A query's first bucket has it done, in its turn.

        Parameters
        ----------
        query_folder
            The query folder.
        siblings
            The folder that it lies in.
        plan_id
            Id of the plan.
        committed
            The input pointer.
        batches_retained
            Spark's ``minBatchesToRetain``.
        still_ours
            Raises when another run has taken the state over.
        held
            Whether somebody copies from a query folder.
        background
            Does it.
        """
        key = (query_folder.identity, plan_id)
        if key in self._without:
            return

        def work() -> None:
            try:
                if self._finished(query_folder, siblings, committed, batches_retained, still_ours, held):
                    self._without.add(key)
            except OwnershipError:
                raise
            except StateError as error:
                # Of no harm to a batch; it is tried again.
                _LOGGER.warning("what %s was rescaled from is not removed yet: %s", query_folder.root, error)

        background.submit(f"parents of {query_folder.root}", work)

    def _finished(
        self,
        query_folder: Folder,
        siblings: Folder,
        committed: Pointer,
        batches_retained: int,
        still_ours: Callable[[], None],
        held: Callable[[Folder], bool],
    ) -> bool:
        """Remove what may go; whether nothing is left."""
        names = query_folder.child(PARENTS_FOLDER).names()
        if not names:
            return True
        noted: dict[int, int] = {}
        for match in filter(None, map(_NOTE.fullmatch, names)):
            noted[int(match[1])] = max(int(match[2]), noted.get(int(match[1]), 0))
        retained = max(batches_retained, committed.retained)
        if not may_remove(committed.heartbeats, retained, committed.buckets, noted) or held(query_folder):
            return False
        left = False
        for name in siblings.names():
            if name == query_folder.name or first_folder(name) != first_folder(query_folder.name):
                continue
            old = siblings.child(name)
            if self._is_written(old) or held(old):
                left = True
                continue
            still_ours()
            siblings.remove_tree(name)
            _LOGGER.info("%s is removed: the query was rescaled, and goes on in %s", old.root, query_folder.root)
        if left:
            return False
        still_ours()
        query_folder.remove_tree(PARENTS_FOLDER)
        _LOGGER.info("%s needs nothing any more of what it was rescaled from", query_folder.root)
        return True

    def _is_written(self, query_folder: Folder) -> bool:
        """Whether somebody may write to a query folder: its lease is another one than when it was looked at before."""
        found = LeaseLog(query_folder).newest(first=True)
        number = 0 if found is None else found.number
        with self._lock:
            before = self._leases.get(query_folder.identity)
            self._leases[query_folder.identity] = number
        return before != number
