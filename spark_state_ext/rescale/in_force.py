"""Put the folder of a rescaled query in force: the one that Spark's pointers name.

A rescaling may be refused, fail or be killed in its first batch, and leaves its new folder behind then. Only a pointer
that Spark hands out says that this batch was committed. So the first call that gets a pointer to the new folder writes
`detached.json` there, which makes the folder the one in force; until then the old one is. A query that goes back to a
batch from before it was rescaled takes the file away again. Readers, erase requests and clean-up go by it, and by no
time of a file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from spark_state_ext.errors import CorruptFileError, VersionSkewError
from spark_state_ext.files.erase_requests import EraseFolder
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import DETACHED_NAME
from spark_state_ext.rescale.folders import first_folder, is_rescaled, rescaled_folder
from spark_state_ext.savepoints.records import RESCALE, is_detached, note_detached, start_of

__all__ = ["parent_folder", "put_in_force", "take_requests"]

_LOGGER = logging.getLogger("spark_state_ext")


def put_in_force(places: Sequence[Folder], name: str, plan_id: str, still_ours: Callable[[], None]) -> None:
    """Write down that Spark hands out pointers to a query folder; erase requests that wait elsewhere come along."""
    operator = places[0]
    files = operator.child(name)
    others = [it for it in operator.names() if it != name and first_folder(it) == first_folder(name)]
    if rescaled_folder(name, plan_id) in others:
        # A late call: by this plan the query was rescaled, or is being rescaled, from here.
        return
    before = [it for it in others if is_rescaled(it) and is_detached(operator.child(it))]
    if others:
        still_ours()
        parent = parent_folder(files)
        for other in dict.fromkeys([*(it for it in others if it == parent), *before]):
            # Where the query went back, what was done in the other folder is not done here.
            take_requests(operator.child(other), files, waiting_only=other == parent)
    # The root last: once it says so, nothing is left to do.
    for place in places[::-1] if is_rescaled(name) else ():
        note_detached(place.child(name))
    if before:
        still_ours()
    for other in before:
        for place in places[::-1]:
            place.child(other).remove(DETACHED_NAME)


def parent_folder(query_folder: Folder) -> str | None:
    """Name of the query folder that one was rescaled from; None: it was not, or that is not written down."""
    record = start_of(query_folder)
    return None if record is None or record.kind != RESCALE else record.source.rpartition("/")[2]


def take_requests(source: Folder, target: Folder, *, waiting_only: bool) -> bool:
    """Ask for the keys of one query folder's erase requests in another folder, which keeps their ids."""
    requests, into = EraseFolder(source), EraseFolder(target)
    numbers = requests.numbers()
    asked = sorted(numbers.requests - numbers.done if waiting_only else numbers.requests)
    if not asked:
        return True
    known, there = into.numbers(), set()
    for number in known.requests | known.done:
        try:
            there.add(into.id_of(number))
        except (CorruptFileError, VersionSkewError) as error:
            _LOGGER.warning("erase request %d of %s cannot be read: %s", number, target.root, error)
    whole = True
    for number in asked:
        try:
            request = requests.request(number)
        except (CorruptFileError, VersionSkewError) as error:
            _LOGGER.warning(
                "erase request %d of %s cannot be read, so the query, which goes on in %s, does not carry it out: %s. "
                "Ask again for its keys, and withdraw it",
                number,
                source.root,
                target.root,
                error,
            )
            whole = False
            continue
        if request.keys.num_rows and request.id not in there:
            into.add(request)
    return whole
