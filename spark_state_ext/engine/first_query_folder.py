"""The query folder in which a bucket's state begins, ``<root>/<operator>/<query folder>``; afterwards the pointer names
it.

Tasks that are told their query begin in the folder of that name. Others cannot know it: an action in a thread of the
user's own, and every action of `foreachBatch` over Spark Connect. What all calls of a first batch share is the batch's
time, which Spark repeats when it runs the batch again, and a number that the packing stage sends with its heartbeat
and no other stage has. The first call notes under these which folder it took, and the others take the same. So a batch
of which some tasks are told and some are not makes one folder; and two queries never share one.
"""

from __future__ import annotations

import re
import uuid
from collections import OrderedDict

from spark_state_ext.errors import CorruptFileError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import SPILL_FOLDER, STARTING_FOLDER
from spark_state_ext.files.operator_catalog import is_query_folder, new_query_folder, query_folders_of_batch

__all__ = ["FirstQueryFolders", "starting_is_stale"]

# Who starts a query again whose first batch failed has this long for it; the notes are small.
_STALE_AFTER_MS = 30 * 86_400_000
_STARTING = re.compile(r"(\d{1,15})-[0-9a-f]{32}(?:\.start\.arrow(?:\.\d{1,9}\.\d{1,18}\.pointer)?)?")


class FirstQueryFolders:
    """Where first batches began, as far as this process knows."""

    _MAX = 256

    def __init__(self) -> None:
        self._known: OrderedDict[str, str] = OrderedDict()

    def of(self, operator: Folder, query_id: str, batch_ms: int, nonce: bytes) -> str:
        """The folder in which a bucket without a pointer begins."""
        number = (nonce or uuid.uuid4().bytes).hex()
        name = f"{batch_ms}-{number}"
        key = f"{operator.identity} {name}"
        query_folder = self._known.get(key)
        if query_folder is None:
            wanted = query_id if _may_begin(operator, query_id, batch_ms) else new_query_folder(batch_ms, number)
            query_folder = _agreed(operator.child(STARTING_FOLDER), name, wanted)
            self._known[key] = query_folder
            while len(self._known) > self._MAX:
                self._known.popitem(last=False)
        return query_folder


def _may_begin(operator: Folder, query_id: str, batch_ms: int) -> bool:
    """Whether a first batch may begin in the folder of the query that a task was told.

    A thread that an application uses for two queries may tell the second one's tasks the id of the first. Then the
    folder holds what no attempt at this batch began.
    """
    if not query_id:
        return False
    # Packing tasks spill there before any call. In this order: who begins notes it first.
    return {SPILL_FOLDER}.issuperset(operator.child(query_id).names()) or query_id in query_folders_of_batch(
        operator, batch_ms
    )


def _agreed(notes: Folder, name: str, wanted: str) -> str:
    """What the first who came noted."""
    if notes.create(name, wanted.encode()):
        return wanted
    query_folder = notes.get(name).decode(errors="replace")
    if not is_query_folder(query_folder):
        raise CorruptFileError(f"{notes.where(name)} names no folder of a query. Remove it and start the query again.")
    return query_folder


def starting_is_stale(name: str, now_ms: int) -> bool:
    """Whether a note about a first batch is so old that nobody asks for it any more."""
    found = _STARTING.fullmatch(name)
    return found is not None and int(found[1]) < now_ms - _STALE_AFTER_MS
