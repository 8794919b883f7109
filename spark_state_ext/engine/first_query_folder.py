"""Choose the query folder, ``<root>/<operator>/<query folder>``, for a bucket that has no pointer yet.

Later the pointer names the folder. Tasks that know their query's id use the folder of that name. Other tasks cannot
know the id: actions in a thread of the user's own, and all actions of `foreachBatch` over Spark Connect. But all calls
of a first batch share the batch's time, which Spark repeats when it runs the batch again, and a random number that the
packing stage sends with its heartbeat. The first call writes a note, named after both, with the folder that it chose,
and the other calls read the note. So a batch makes one folder even if only some tasks know the query's id, and two
queries never share a folder.
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

# A query whose first batch failed can be restarted for this long; the notes are small.
_STALE_AFTER_MS = 30 * 86_400_000
_STARTING = re.compile(r"(\d{1,15})-[0-9a-f]{32}(?:\.start\.arrow(?:\.\d{1,9}\.\d{1,18}\.pointer)?)?")


class FirstQueryFolders:
    """The query folders of first batches that this process knows."""

    _MAX = 256

    def __init__(self) -> None:
        self._folders: OrderedDict[str, str] = OrderedDict()

    def of(self, operator: Folder, query_id: str, batch_ms: int, nonce: bytes) -> str:
        """Return the query folder for a bucket without a pointer."""
        number = (nonce or uuid.uuid4().bytes).hex()
        name = f"{batch_ms}-{number}"
        key = f"{operator.identity} {name}"
        query_folder = self._folders.get(key)
        if query_folder is None:
            proposed = query_id if _may_begin(operator, query_id, batch_ms) else new_query_folder(batch_ms, number)
            query_folder = _agree_on_folder(operator.child(STARTING_FOLDER), name, proposed)
            self._folders[key] = query_folder
            while len(self._folders) > self._MAX:
                self._folders.popitem(last=False)
        return query_folder


def _may_begin(operator: Folder, query_id: str, batch_ms: int) -> bool:
    """True if a first batch may begin in the folder named after the query id that a task got.

    If an application uses one thread for two queries, tasks of the second may get the id of the first. The folder then
    contains state that no attempt at this batch wrote.
    """
    if not query_id:
        return False
    # Packing tasks spill there before any call. The order matters: a call writes its note before any other file.
    return {SPILL_FOLDER}.issuperset(operator.child(query_id).names()) or query_id in query_folders_of_batch(
        operator, batch_ms
    )


def _agree_on_folder(notes: Folder, name: str, proposed: str) -> str:
    """Note the proposed query folder; return the folder that the first call noted."""
    if notes.create(name, proposed.encode()):
        return proposed
    query_folder = notes.get(name).decode(errors="replace")
    if not is_query_folder(query_folder):
        raise CorruptFileError(
            f"{notes.where(name)} does not name a query folder. Remove that file and start the query again."
        )
    return query_folder


def starting_is_stale(name: str, now_ms: int) -> bool:
    """True if a note about a first batch is so old that no restarted query needs it."""
    match = _STARTING.fullmatch(name)
    return match is not None and int(match[1]) < now_ms - _STALE_AFTER_MS
