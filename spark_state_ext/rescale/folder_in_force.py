"""Puts the new folder of a rescaled query in force when Spark's pointers name it.

A rescaling may be refused, fail or be killed in its first batch, and then leaves its new folder behind. Only a pointer
that Spark hands out proves that this batch was committed. So the first call that gets a pointer to the new folder
writes `detached.json` there, which puts it in force; until then the old folder is in force. If the query goes back to a
batch before the rescaling, the file is removed again. Readers, erase requests and clean-up use this file, never the
times of files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from spark_state_ext.errors import CorruptFileError, VersionSkewError
from spark_state_ext.files.erase_requests import EraseFolder
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import DETACHED_NAME
from spark_state_ext.rescale.folders import first_folder, is_rescaled, make_rescaled_name
from spark_state_ext.savepoints.start_records import RESCALE, is_detached, note_detached, read_start

__all__ = ["parent_folder", "put_in_force", "take_requests"]

_LOGGER = logging.getLogger("spark_state_ext")


def put_in_force(places: Sequence[Folder], name: str, plan_id: str, check_ours: Callable[[], None]) -> None:
    """Put the folder that Spark's pointers name in force, and copy other folders' waiting erase requests to it."""
    operator = places[0]
    files = operator.child(name)
    others = [other for other in operator.names() if other != name and first_folder(other) == first_folder(name)]
    if make_rescaled_name(name, plan_id) in others:
        # This is a late call: this plan has rescaled the query, or is rescaling it, from this folder.
        return
    formerly_in_force = [other for other in others if is_rescaled(other) and is_detached(operator.child(other))]
    if others:
        check_ours()
        parent = parent_folder(files)
        for other in dict.fromkeys([*(other for other in others if other == parent), *formerly_in_force]):
            # If the query went back, requests that the other folder has carried out are not carried out here yet.
            take_requests(operator.child(other), files, waiting_only=other == parent)
    # The root last: its record says that everything is done.
    for place in places[::-1] if is_rescaled(name) else ():
        note_detached(place.child(name))
    if formerly_in_force:
        check_ours()
    for other in formerly_in_force:
        for place in places[::-1]:
            place.child(other).remove(DETACHED_NAME)


def parent_folder(query_folder: Folder) -> str | None:
    """Return the name of the query folder that this one was rescaled from; None: it was not, or has no record."""
    record = read_start(query_folder)
    return None if record is None or record.kind != RESCALE else record.source.rpartition("/")[2]


def take_requests(source: Folder, target: Folder, *, waiting_only: bool) -> bool:
    """Copy erase requests with their ids to another query folder; return False if a request is unreadable."""
    requests, target_requests = EraseFolder(source), EraseFolder(target)
    numbers = requests.numbers()
    request_numbers = sorted(numbers.requests - numbers.done if waiting_only else numbers.requests)
    if not request_numbers:
        return True
    target_numbers, target_ids = target_requests.numbers(), set()
    for number in target_numbers.requests | target_numbers.done:
        try:
            target_ids.add(target_requests.id_of(number))
        except (CorruptFileError, VersionSkewError) as error:
            _LOGGER.warning("erase request %d of %s cannot be read: %s", number, target.root, error)
    all_readable = True
    for number in request_numbers:
        try:
            request = requests.request(number)
        except (CorruptFileError, VersionSkewError) as error:
            _LOGGER.warning(
                "erase request %d of %s cannot be read, so the query, which goes on in %s, cannot carry it out: %s. "
                "Request the erasure of its keys again, and withdraw this request",
                number,
                source.root,
                target.root,
                error,
            )
            all_readable = False
            continue
        if request.keys.num_rows and request.id not in target_ids:
            target_requests.add(request)
    return all_readable
