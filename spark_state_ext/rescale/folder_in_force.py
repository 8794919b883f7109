"""Puts the new folder of a rescaled query in force when Spark's pointers name it.

A rescaling may be refused, fail or be killed in its first batch, and then leaves its new folder behind. Only a pointer
that Spark hands out proves that this batch was committed. So the first call that gets a pointer to the new folder
writes `detached.json` there, which puts it in force; until then the old folder is in force. If the query goes back to a
batch before the rescaling, the file is removed again. Readers, erase requests and clean-up use this file, never the
times of files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from spark_state_ext.errors import CorruptFileError, VersionSkewError
from spark_state_ext.files.erase_requests import EraseFolder
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import DETACHED_NAME
from spark_state_ext.rescale.folders import first_folder, is_rescaled, make_rescaled_name
from spark_state_ext.savepoints.start_records import RESCALE, is_detached, note_detached, read_start

__all__ = ["list_ancestors", "put_in_force", "take_requests"]

_LOGGER = logging.getLogger("spark_state_ext")


def put_in_force(places: Sequence[Folder], name: str, plan_id: str, check_ours: Callable[[], None]) -> None:
    """Put the folder that Spark's pointers name in force, and copy other folders' waiting erase requests to it."""
    operator = places[0]
    others = [other for other in operator.names() if other != name and first_folder(other) == first_folder(name)]
    if make_rescaled_name(name, plan_id) in others:
        # This is a late call: this plan has rescaled the query, or is rescaling it, from this folder.
        return
    formerly_in_force = [other for other in others if is_rescaled(other) and is_detached(operator.child(other))]
    if others:
        check_ours()
        ancestors = list_ancestors(operator, name)
        for other in [*ancestors, *formerly_in_force]:
            if other in others:
                take_requests(operator, other, name, ancestors)
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

    The value is the batch of that folder after which the nearer one began.
    """
    ancestors: dict[str, int] = {}
    record = read_start(operator.child(name))
    while record is not None and record.kind == RESCALE:
        parent = record.source.rpartition("/")[2]
        if parent in (name, *ancestors):
            break
        ancestors[parent] = record.batch
        record = read_start(operator.child(parent))
    return ancestors


def take_requests(operator: Folder, other: str, name: str, ancestors: Mapping[str, int]) -> bool:
    """Copy to a query folder, with their ids, the erase requests of another that its state does not show to be done.

    Copy from the nearest ancestor first. A farther one may have requests of its own: if a query is rescaled again
    before its folder is in force, users still make requests in an older one. But a request that a nearer ancestor has
    waits or is done there. If it was carried out twice, rows that arrived in between would be lost. Return False if a
    request is unreadable.
    """
    requests, target = EraseFolder(operator.child(other)), operator.child(name)
    nearer = list(ancestors)[: list(ancestors).index(other)] if other in ancestors else list(ancestors)
    # A folder that is no ancestor is from before the query went back: nothing that was done there is done here.
    request_numbers = _list_undone(requests, ancestors.get(other, -1))
    if not request_numbers:
        return True
    known_ids = {request_id for folder in (name, *nearer) for request_id in _list_ids(operator.child(folder))}
    all_readable = True
    for number in request_numbers:
        try:
            request = requests.request(number)
        except (CorruptFileError, VersionSkewError) as error:
            _LOGGER.warning(
                "erase request %d of %s cannot be read, so the query, which goes on in %s, cannot carry it out: %s. "
                "Request the erasure of its keys again, and withdraw this request",
                number,
                operator.child(other).root,
                target.root,
                error,
            )
            all_readable = False
            continue
        if request.keys.num_rows and request.id not in known_ids:
            EraseFolder(target).add(request)
    return all_readable


def _list_undone(requests: EraseFolder, batch: int) -> list[int]:
    """Return the numbers of the requests that were not known to be done after a batch."""
    numbers = requests.numbers()
    undone = set(numbers.requests)
    for number in numbers.requests & numbers.done:
        try:
            record = requests.done(number)
        except (CorruptFileError, VersionSkewError) as error:
            _LOGGER.warning("erase request %d of %s: its record cannot be read: %s", number, requests.files.root, error)
            record = None
        if record is None or record.batch <= batch:
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
