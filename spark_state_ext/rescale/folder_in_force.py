"""Puts the new folder of a rescaled query in force when Spark's pointers name it.

A rescaling may be refused, fail or be killed in its first batch, and then leaves its new folder behind. Only a pointer
that Spark hands out proves that this batch was committed. So the first call that gets a pointer to the new folder
writes `detached.json` there, which puts it in force; until then the old folder is in force. If the query goes back to a
batch before the rescaling, the file is removed again. Readers, erase requests and clean-up use this file, never the
times of files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from spark_state_ext.errors import CorruptFileError, VersionSkewError
from spark_state_ext.files.erase_requests import EraseFolder
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import DETACHED_NAME
from spark_state_ext.rescale.folders import first_folder, is_rescaled, make_rescaled_name
from spark_state_ext.savepoints.start_records import RESCALE, is_detached, note_detached, read_start

__all__ = ["list_ancestors", "put_in_force", "take_requests"]

_LOGGER = logging.getLogger("spark_state_ext")


def put_in_force(places: Sequence[Folder], name: str, plan_id: str, check_ours: Callable[[], None]) -> None:
    """Put the folder that Spark's pointers name in force, after copying erase requests that are still to be done."""
    operator = places[0]
    others = [other for other in operator.names() if other != name and first_folder(other) == first_folder(name)]
    if make_rescaled_name(name, plan_id) in others:
        # This is a late call: this plan has rescaled the query, or is rescaling it, from this folder.
        return
    formerly_in_force = [other for other in others if is_rescaled(other) and is_detached(operator.child(other))]
    if others:
        check_ours()
        take_requests(operator, name, others)
    # The root last: its record says that everything is done.
    for place in places[::-1] if is_rescaled(name) else ():
        note_detached(place.child(name))
    if formerly_in_force:
        check_ours()
    for other in formerly_in_force:
        for place in places[::-1]:
            place.child(other).remove(DETACHED_NAME)


def list_ancestors(operator: Folder, name: str) -> dict[str, int]:
    """Return the query folders that this one was rescaled from, the nearest first, as far as their records remain.

    The value is `StartRecord.heartbeats` of the folder that was rescaled from it.
    """
    ancestors: dict[str, int] = {}
    record = read_start(operator.child(name))
    while record is not None and record.kind == RESCALE:
        parent = record.source.rpartition("/")[2]
        if parent in (name, *ancestors):
            break
        ancestors[parent] = record.heartbeats
        record = read_start(operator.child(parent))
    return ancestors


def take_requests(operator: Folder, name: str, others: Collection[str]) -> set[str]:
    """Copy erase requests from other query folders to the folder `name`, if its state does not have them done yet.

    Requests are read from the folder's ancestors first, from the nearest to the farthest. A far ancestor can have
    requests of its own: if a query is rescaled again before its folder is in force, users still make requests in an
    older one. A request that was already found in a nearer folder is not copied again: carried out twice, it would
    delete rows that arrived in between. Copies keep their ids. Return the folders with a request that cannot be read.
    """
    ancestors, target = list_ancestors(operator, name), EraseFolder(operator.child(name))
    known_ids: set[str | None] = set()
    unread, unreadable = [name], set()
    # The others were left when the query went back, or their rescaling failed. What was done there is not done here.
    for other in [*(each for each in ancestors if each in others), *(each for each in others if each not in ancestors)]:
        requests = EraseFolder(operator.child(other))
        for number in _list_undone(requests, ancestors.get(other, -1)):
            while unread:
                known_ids |= _list_ids(operator.child(unread.pop()))
            try:
                request = requests.request(number)
            except (CorruptFileError, VersionSkewError) as error:
                _LOGGER.warning(
                    "erase request %d of %s cannot be read, so the query, which goes on in %s, cannot carry it out: "
                    "%s. Request the erasure of its keys again, and withdraw this request",
                    number,
                    operator.child(other).root,
                    operator.child(name).root,
                    error,
                )
                unreadable.add(other)
                continue
            if request.keys.num_rows and request.id not in known_ids:
                target.add(request)
                known_ids.add(request.id)
        unread.append(other)
    return unreadable


def _list_undone(requests: EraseFolder, heartbeats: int) -> list[int]:
    """Return the numbers of the requests that are not done in a state with this number of heartbeats.

    Requests with an unreadable record of being done are left out: they were done once, and perhaps still are.
    """
    numbers = requests.numbers()
    undone = set(numbers.requests)
    for number in numbers.requests & numbers.done:
        try:
            record = requests.done(number)
        except (CorruptFileError, VersionSkewError) as error:
            _LOGGER.warning("erase request %d of %s: its record cannot be read: %s", number, requests.files.root, error)
            undone.discard(number)
            continue
        if record is not None and record.heartbeat <= heartbeats:
            undone.discard(number)
    return sorted(undone)


def _list_ids(query_folder: Folder) -> set[str | None]:
    """Return the ids of the requests that a folder has or has carried out."""
    requests, ids = EraseFolder(query_folder), set()
    numbers = requests.numbers()
    for number in numbers.requests | numbers.done:
        try:
            ids.add(requests.id_of(number))
        except (CorruptFileError, VersionSkewError) as error:
            _LOGGER.warning("erase request %d of %s cannot be read: %s", number, query_folder.root, error)
    return ids
