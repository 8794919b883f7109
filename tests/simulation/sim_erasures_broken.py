"""Ways in which erase requests could have been built wrong. The simulator of them has to find each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from sim_erasures import Patch
from sim_search import replaced

from arrow_schemas import Pointer
from arrow_schemas.erase import EraseMark, EraseRequest, format_request_name
from spark_state_ext.engine import erase_requests
from spark_state_ext.engine.erase_requests import EraseTurn, EraseWatch, HandledRequests, NewRequests, mark_pointer
from spark_state_ext.errors import CorruptFileError, MissingCheckpointError, StorageError
from spark_state_ext.files.erase_requests import EraseFolder, EraseNumbers, encode_request
from spark_state_ext.files.folder import Folder

__all__ = ["BROKEN_ERASURES"]

_LISTED, _IN_TURN, _IS_OVER = EraseWatch.list_requests, EraseWatch.update_requests, EraseWatch._is_over
_NOTE_DONE, _TAKE_BACK = EraseWatch._note_done, EraseWatch._delete_done_note


def _listed_once(self: EraseWatch, query_folder: Folder, batch: Any) -> EraseNumbers:
    """A process lists the folder when the query begins."""
    return _LISTED(self, query_folder, batch[0])


def _through_gaps(listed: EraseNumbers, pointer: Pointer, where: str, known: bool = True, *_: Any) -> NewRequests:
    """What a listing has is new, whatever is missing between."""
    before = pointer.erased.through if pointer.erased is not None and known else 0
    new = tuple(sorted(number for number in listed.requests if number > before))
    return NewRequests(new, max(new, default=before))


def _done_with_the_mark(self: EraseMark, heartbeats: int) -> int:
    """A request is done once the first bucket has carried it out."""
    return self.through


def _settled_at_once(self: EraseMark, through: int, heartbeat: int, request_id: str) -> EraseMark:
    """What was dealt with before is taken to be so at an earlier heartbeat."""
    return EraseMark(through, heartbeat, self.through, request_id)


def _stays(self: EraseFolder, number: int) -> None:
    """The record that a request is done stays where the query goes back."""


def _over_when_done(self: EraseWatch, query_folder: Folder, number: int, committed: Pointer, **_: Any) -> bool:
    """Nobody needs a request that is done."""
    return True


def _over_as_remembered(self: EraseWatch, query_folder: Folder, number: int, committed: Pointer, **_: Any) -> bool:
    """A record is read once, whatever happens to the query since."""
    return _IS_OVER(self, query_folder, number, committed)


def _numbered_by_what_is_there(self: EraseFolder, request: EraseRequest) -> int:
    """The number of a request that is gone is used again."""
    for _ in range(100):
        number = max(self.numbers().requests, default=0) + 1
        if self.files.create(format_request_name(number), encode_request(request)):
            return number
    raise StorageError("every number is taken")


def _as_it_was(self: EraseTurn, made: Pointer, dealt: HandledRequests | None) -> Pointer:
    """Heartbeats of a run that does not look count as those of one that does."""
    return mark_pointer(made, dealt)


def _unreadable_passed_by(
    self: EraseTurn, asked: range, listed: EraseNumbers
) -> Iterator[tuple[list[pa.Array], int, str]]:
    """A request that cannot be read holds up no other."""
    for number in asked:
        try:
            request = self.watch.read_request(self.files, number)
            yield request.columns(self.schema.keys, "it"), number, request.id
        except (CorruptFileError, MissingCheckpointError):
            yield [], number, "0" * 32


def _noted_whatever_waits(self: EraseWatch, query_folder: Folder, number: int, committed: Pointer) -> None:
    """The record of a request does not wait for one before it that cannot be read."""
    try:
        _NOTE_DONE(self, query_folder, number, committed)
    except (CorruptFileError, MissingCheckpointError):
        return


def _proven_by_the_mark(
    self: EraseWatch, query_folder: Folder, listed: EraseNumbers, committed: Pointer, *args: Any
) -> None:
    """Where the query went back, what the first bucket has carried out stays done."""
    through = committed.erased.through if committed.erased is not None else 0

    def taken(watch: EraseWatch, folder: Folder, number: int) -> None:
        if number > through:
            _TAKE_BACK(watch, folder, number)

    with replaced([(EraseWatch, "_delete_done_note", taken)]):
        _IN_TURN(self, query_folder, listed, committed, *args)


BROKEN_ERASURES: dict[str, tuple[Patch, ...]] = {
    "listed once by each process": ((EraseWatch, "list_requests", _listed_once),),
    "a gap passed by": ((erase_requests, "find_new_requests", _through_gaps),),
    "a mark trusted by its number": ((EraseTurn, "_is_mark_known", lambda self: True),),
    "done with the first bucket": ((EraseMark, "done", _done_with_the_mark),),
    "dealt with earlier, in one heartbeat": ((EraseMark, "raised", _settled_at_once),),
    "done though the query went back": ((EraseFolder, "take_back", _stays),),
    "taken back by the mark": ((EraseWatch, "update_requests", _proven_by_the_mark),),
    "removed when it is done": ((EraseWatch, "_is_over", _over_when_done),),
    "removed by what is remembered": ((EraseWatch, "_is_over", _over_as_remembered),),
    "removed before a pointer is too old": ((erase_requests, "recent_heartbeats", lambda retained: retained - 2),),
    "a number used twice": ((EraseFolder, "add", _numbered_by_what_is_there),),
    "proven by who does not look": ((EraseTurn, "marked", _as_it_was),),
    "noted though one before it waits": ((EraseWatch, "_note_done", _noted_whatever_waits),),
    "an unreadable request passed by": ((EraseTurn, "_read", _unreadable_passed_by),),
}
