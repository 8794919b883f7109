"""Broken variants of erase requests. The simulator must find each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from sim_erasures import Patch
from sim_search import replace_attributes

from arrow_schemas import Pointer
from arrow_schemas.erase import EraseMark, EraseRequest, format_request_name
from spark_state_ext.engine import erase_requests
from spark_state_ext.engine.erase_requests import EraseTurn, EraseWatch, HandledRequests, NewRequests, mark_pointer
from spark_state_ext.errors import CorruptFileError, MissingCheckpointError, StorageError
from spark_state_ext.files.erase_requests import EraseFolder, EraseNumbers, encode_request
from spark_state_ext.files.folder import Folder

__all__ = ["BROKEN_ERASURES"]

_LIST_REQUESTS, _UPDATE_REQUESTS, _IS_OVER = EraseWatch.list_requests, EraseWatch.update_requests, EraseWatch._is_over
_NOTE_DONE, _TAKE_BACK = EraseWatch._note_done, EraseWatch._delete_done_note


def _list_once(self: EraseWatch, query_folder: Folder, batch: Any) -> EraseNumbers:
    """A process lists the folder only when the query begins."""
    return _LIST_REQUESTS(self, query_folder, batch[0])


def _skip_gaps(listed: EraseNumbers, pointer: Pointer, where: str, known: bool = True, *_: Any) -> NewRequests:
    """Every listed request is new, even if earlier numbers are missing."""
    before = pointer.erased.through if pointer.erased is not None and known else 0
    new_numbers = tuple(sorted(number for number in listed.requests if number > before))
    return NewRequests(new_numbers, max(new_numbers, default=before))


def _find_done_by_mark(self: EraseMark, heartbeats: int) -> int:
    """A request is done once the first bucket has carried it out."""
    return self.through


def _settle_at_once(self: EraseMark, through: int, heartbeat: int, request_id: str) -> EraseMark:
    """Requests that were handled before count as handled at an earlier heartbeat."""
    return EraseMark(through, heartbeat, self.through, request_id)


def _keep_record(self: EraseFolder, number: int) -> None:
    """The record that a request is done stays if the query goes back."""


def _is_over_when_done(self: EraseWatch, query_folder: Folder, number: int, committed: Pointer, **_: Any) -> bool:
    """A done request is no longer needed."""
    return True


def _is_over_as_remembered(self: EraseWatch, query_folder: Folder, number: int, committed: Pointer, **_: Any) -> bool:
    """A record is read once, whatever happens to the query afterwards."""
    return _IS_OVER(self, query_folder, number, committed)


def _add_by_existing_numbers(self: EraseFolder, request: EraseRequest) -> int:
    """The number of a removed request is used again."""
    for _ in range(100):
        number = max(self.numbers().requests, default=0) + 1
        if self.files.create(format_request_name(number), encode_request(request)):
            return number
    raise StorageError("every number is taken")


def _mark_without_look(self: EraseTurn, made: Pointer, handled: HandledRequests | None) -> Pointer:
    """Heartbeats of a run that does not look for requests count like those of a run that does."""
    return mark_pointer(made, handled)


def _skip_unreadable(
    self: EraseTurn, numbers: range, listed: EraseNumbers
) -> Iterator[tuple[list[pa.Array], int, str]]:
    """An unreadable request does not delay other requests."""
    for number in numbers:
        try:
            request = self.watch.read_request(self.files, number)
            yield request.columns(self.schema.keys, "it"), number, request.id
        except (CorruptFileError, MissingCheckpointError):
            yield [], number, "0" * 32


def _note_despite_waiting(self: EraseWatch, query_folder: Folder, number: int, committed: Pointer) -> None:
    """The record of a request does not wait for an earlier request that cannot be read."""
    try:
        _NOTE_DONE(self, query_folder, number, committed)
    except (CorruptFileError, MissingCheckpointError):
        return


def _prove_by_mark(
    self: EraseWatch, query_folder: Folder, listed: EraseNumbers, committed: Pointer, *args: Any
) -> None:
    """If the query went back, requests that the first bucket's mark covers stay done."""
    through = committed.erased.through if committed.erased is not None else 0

    def take_back(watch: EraseWatch, folder: Folder, number: int) -> None:
        if number > through:
            _TAKE_BACK(watch, folder, number)

    with replace_attributes([(EraseWatch, "_delete_done_note", take_back)]):
        _UPDATE_REQUESTS(self, query_folder, listed, committed, *args)


BROKEN_ERASURES: dict[str, tuple[Patch, ...]] = {
    "each process lists requests only once": ((EraseWatch, "list_requests", _list_once),),
    "a missing request number is skipped": ((erase_requests, "find_new_requests", _skip_gaps),),
    "a mark is trusted by its number alone": ((EraseTurn, "_is_mark_known", lambda self: True),),
    "a request is done with its first bucket": ((EraseMark, "done", _find_done_by_mark),),
    "requests of one heartbeat count as handled earlier": ((EraseMark, "raised", _settle_at_once),),
    "a record stays when the query goes back": ((EraseFolder, "take_back", _keep_record),),
    "a record is withdrawn by the mark alone": ((EraseWatch, "update_requests", _prove_by_mark),),
    "a request is removed when it is done": ((EraseWatch, "_is_over", _is_over_when_done),),
    "a request is removed by a remembered record": ((EraseWatch, "_is_over", _is_over_as_remembered),),
    "a request is removed while a pointer needs it": (
        (erase_requests, "recent_heartbeats", lambda retained: retained - 2),
    ),
    "a request number is used twice": ((EraseFolder, "add", _add_by_existing_numbers),),
    "a run that does not look proves requests done": ((EraseTurn, "marked", _mark_without_look),),
    "a record does not wait for an earlier request": ((EraseWatch, "_note_done", _note_despite_waiting),),
    "an unreadable request is skipped": ((EraseTurn, "_read", _skip_unreadable),),
}
