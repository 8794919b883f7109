"""What calls do about erase requests: which are new to a bucket, and when one is done.

`docs/design/007b-erasing.md` has the argument. Decisions are functions over values; a process lists the requests once a
batch, and reads one when a bucket needs it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa

from arrow_schemas.erase import EraseDone, EraseMark, EraseRequest, request_name
from arrow_schemas.pointer import Pointer
from arrow_schemas.row import RowSchema
from spark_state_ext.errors import (
    CorruptFileError,
    MissingCheckpointError,
    OwnershipError,
    StateError,
    UsageError,
    VersionSkewError,
)
from spark_state_ext.files.erase_requests import EraseFolder, EraseNumbers
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.horizon import recent_heartbeats
from spark_state_ext.worker.retry import retried

__all__ = ["Dealt", "EraseTurn", "EraseWatch", "NewRequests", "marked", "new_requests"]

_LOGGER = logging.getLogger("spark_state_ext")
# Listings and records that a process remembers, of the queries that run in it.
_LISTINGS_MAX = 256
_RECORDS_MAX = 1_024
# Requests that it remembers within a batch, for its other buckets; and keys that are looked for in one pass.
_REQUEST_BYTES_MAX = 64 << 20
_UNREADABLE = (CorruptFileError, MissingCheckpointError, VersionSkewError)


@dataclass(frozen=True)
class NewRequests:
    """What a call has to do about erase requests.

    Parameters
    ----------
    numbers
        Requests to carry out, in order.
    through
        Up to which they are dealt with then; the mark's where there is nothing new.
    """

    numbers: tuple[int, ...]
    through: int


@dataclass(frozen=True)
class Dealt:
    """What a call has dealt with.

    Parameters
    ----------
    through, id
        The last request, and its id.
    since
        The mark that it goes on from; None: there is none, or it is of other requests.
    """

    through: int
    id: str
    since: EraseMark | None


def new_requests(
    listed: EraseNumbers,
    pointer: Pointer,
    where: str,
    known: bool = True,
    done_heartbeat: Callable[[int], int] = lambda _: 0,
) -> NewRequests:
    """Decide what is new to a bucket."""
    before = pointer.erased.through if pointer.erased is not None and known else 0
    through = listed.through(before)
    asked = range(before + 1, through + 1)
    gone = [number for number in asked if number not in listed.requests]
    # A mark of other requests does not tell that these are new: the state may be a later one than what they left.
    if gone and pointer.ref is not None and (known or done_heartbeat(gone[-1]) > pointer.heartbeats):
        raise MissingCheckpointError(
            f"the state at {where} is from before erase request {gone[0]} (batch {pointer.batch}), which was done, and "
            "whose keys are not known any more: they would be in the state again. Go back to a later batch."
        )
    return NewRequests(tuple(number for number in asked if number in listed.requests), through)


def marked(pointer: Pointer, dealt: Dealt | None) -> Pointer:
    """The pointer of a call that has dealt with requests."""
    if dealt is None:
        return pointer
    if dealt.since is None:
        return replace(pointer, erased=EraseMark(dealt.through, pointer.heartbeats, 0, dealt.id))
    return replace(pointer, erased=dealt.since.raised(dealt.through, pointer.heartbeats, dealt.id))


class EraseWatch:
    """What a process knows of erase requests; a `Worker` owns it."""

    def __init__(self) -> None:
        self._listings: OrderedDict[str, tuple[Any, EraseNumbers]] = OrderedDict()
        # Of the batch: files are read anew in the next one, as somebody may have put others in their places.
        self._requests: OrderedDict[tuple[str, int], EraseRequest] = OrderedDict()
        self._ids: OrderedDict[tuple[str, int], str | None] = OrderedDict()
        self._records: OrderedDict[tuple[str, int], EraseDone] = OrderedDict()
        self._lock = threading.Lock()

    def listed(self, query_folder: Folder, batch: Any) -> EraseNumbers:
        """Which requests there are; listed once a batch."""
        key = query_folder.identity
        with self._lock:
            found = self._listings.get(key)
        if found is not None and found[0] == batch:
            return found[1]
        numbers = EraseFolder(query_folder).numbers()
        with self._lock:
            _remember(self._listings, key, (batch, numbers), _LISTINGS_MAX)
            for known in (self._requests, self._ids):
                for it in [it for it in known if it[0] == key]:
                    del known[it]
        return numbers

    def request(self, query_folder: Folder, number: int) -> EraseRequest:
        """A request; what it raises is what `EraseFolder.request` does."""
        key = query_folder.identity, number
        with self._lock:
            request = self._requests.get(key)
        if request is None:
            request = EraseFolder(query_folder).request(number)
            with self._lock:
                self._requests[key] = request
                while len(self._requests) > 1 and _size_bytes(self._requests) > _REQUEST_BYTES_MAX:
                    self._requests.popitem(last=False)
        return request

    def id_of(self, query_folder: Folder, number: int) -> str | None:
        """Id of the request of a number; None: there is none. What it raises is what `EraseFolder.id_of` does."""
        key = query_folder.identity, number
        with self._lock:
            if key in self._ids:
                return self._ids[key]
        found = EraseFolder(query_folder).id_of(number)
        with self._lock:
            _remember(self._ids, key, found, _RECORDS_MAX)
        return found

    def in_turn(
        self,
        query_folder: Folder,
        listed: EraseNumbers,
        committed: Pointer,
        drops: Callable[[], bool],
        still_ours: Callable[[], None],
    ) -> None:
        """Write down which requests are done, or are not any more, and remove those that nobody needs.

        For a query's first bucket. What fails is tried again in the next batch.
        """
        if not listed.requests:
            return
        mark = committed.erased
        try:
            if mark is not None and self.id_of(query_folder, mark.through) != mark.id:
                mark = None
            proven = 0 if mark is None else mark.done(committed.heartbeats)
            for number in sorted(listed.requests):
                try:
                    if number not in listed.done:
                        if number <= proven:
                            still_ours()
                            self._note_done(query_folder, number, committed)
                    elif number > proven:
                        still_ours()
                        self._take_back(query_folder, number)
                    elif (
                        self._is_over(query_folder, number, committed)
                        and drops()
                        # What is remembered may be of a time before the query went back: it may be done later since.
                        and self._is_over(query_folder, number, committed, anew=True)
                    ):
                        still_ours()
                        EraseFolder(query_folder).drop(number)
                except _UNREADABLE as error:
                    _LOGGER.warning("erase request %d of %s: %s", number, query_folder.root, error)
                    if number not in listed.done:
                        # Other buckets may not have read it either: they wait, and so do all requests after it.
                        proven = number
        except OwnershipError:
            raise
        except StateError as error:
            _LOGGER.warning("erase requests of %s are looked after in the next batch: %s", query_folder.root, error)

    def _note_done(self, query_folder: Folder, number: int, committed: Pointer) -> None:
        folder = EraseFolder(query_folder)
        request = folder.request(number)
        now_ms = int(time.time() * 1000)
        folder.note_done(
            number,
            EraseDone(
                request.id, request.keys.num_rows, request.asked_ms, now_ms, committed.heartbeats, committed.batch
            ),
        )
        _LOGGER.info("erase request %d of %s is done", number, query_folder.root)

    def _take_back(self, query_folder: Folder, number: int) -> None:
        with self._lock:
            self._records.pop((query_folder.identity, number), None)
        EraseFolder(query_folder).take_back(number)
        _LOGGER.warning(
            "the query at %s went back to a batch in which erase request %d is not known to be done: it waits until "
            "every bucket has carried it out again",
            query_folder.root,
            number,
        )

    def _is_over(self, query_folder: Folder, number: int, committed: Pointer, *, anew: bool = False) -> bool:
        """Whether no pointer that Spark may hand out is from before a request was done."""
        key = query_folder.identity, number
        with self._lock:
            record = None if anew else self._records.get(key)
        if record is None:
            record = EraseFolder(query_folder).done(number)
            if record is None:
                return False
            with self._lock:
                _remember(self._records, key, record, _RECORDS_MAX)
        return committed.heartbeats > record.heartbeat + recent_heartbeats(committed.retained)


@dataclass(frozen=True)
class EraseTurn:
    """What one call does about erase requests.

    Parameters
    ----------
    watch
        The process's.
    files
        The query folder.
    schema
        Of the stored rows.
    pointer
        The input pointer, or the one that the bucket begins with.
    batch
        As for `EraseWatch.listed`.
    format_1_too
        Whether pointers are written that have no place for the mark.
    timeout_s
        How long it tries to list the folder again, where the store fails.
    looks
        Whether the job looks for requests at all: a batch that does not asks the store for nothing.
    """

    watch: EraseWatch
    files: Folder
    schema: RowSchema
    pointer: Pointer
    batch: Any
    format_1_too: bool
    timeout_s: float
    looks: bool = True

    def carry_out(self, erase: Callable[[Sequence[pa.Array]], int]) -> Dealt | None:
        """Carry out the requests that are new to the bucket; None: there is nothing new.

        One that cannot be read waits, and those after it.
        """
        pointer, where = self.pointer, self.files.root
        if self.format_1_too and pointer.erased is not None:
            raise UsageError(
                f"erase requests up to {pointer.erased.through} of {where} were carried out, which pointers of format "
                "1 cannot tell: keep pointer_write='v2'"
            )
        if not self.looks:
            return None
        listed = self._tried(partial(self.watch.listed, self.files, self.batch))
        if self.format_1_too:
            self._say_that_they_wait(listed)
            return None
        if not listed.requests | listed.done:
            return None
        try:
            known = self._is_known()
            new = new_requests(listed, pointer, where, known, self._done_heartbeat)
        except (CorruptFileError, VersionSkewError) as error:
            _LOGGER.error("erase requests of %s wait: %s", where, error)
            return None
        since = pointer.erased if known else None
        last = self._carry_out(range(since.through + 1 if since is not None else 1, new.through + 1), listed, erase)
        return None if last is None else Dealt(*last, since)

    def marked(self, made: Pointer, dealt: Dealt | None) -> Pointer:
        """The call's pointer, with its mark."""
        if self.looks or made.erased is None:
            return marked(made, dealt)
        return replace(made, erased=made.erased.passed(self.pointer.heartbeats, made.heartbeats))

    def look_after(self, drops: Callable[[], bool], still_ours: Callable[[], None]) -> None:
        """What the query's first bucket does besides: `EraseWatch.in_turn`."""
        if self.looks and not self.format_1_too:
            listed = self._tried(partial(self.watch.listed, self.files, self.batch))
            self.watch.in_turn(self.files, listed, self.pointer, drops, still_ours)

    def _is_known(self) -> bool:
        """Whether the mark is of the requests in the folder; where there is none, they are new."""
        mark = self.pointer.erased
        if mark is None:
            return True
        if self._tried(partial(self.watch.id_of, self.files, mark.through)) == mark.id:
            return True
        _LOGGER.warning(
            "the pointer of bucket %d tells of erase request %d with the id %s, and %s has no such request: all that "
            "are there are carried out",
            self.pointer.bucket,
            mark.through,
            mark.id,
            self.files.root,
        )
        return False

    def _done_heartbeat(self, number: int) -> int:
        record = self._tried(partial(EraseFolder(self.files).done, number))
        return 0 if record is None else record.heartbeat

    def _carry_out(
        self, asked: range, listed: EraseNumbers, erase: Callable[[Sequence[pa.Array]], int]
    ) -> tuple[int, str] | None:
        """Number and id of the last request that was dealt with; None: there is none."""
        last: tuple[int, str] | None = None
        found = 0
        read = self._read(asked, listed)
        for columns, number, request_id in _together(read):
            found += erase(columns) if len(columns) and len(columns[0]) else 0
            last = number, request_id
        if last is not None:
            _LOGGER.info(
                "erase requests up to %d of %s: bucket %d had %d of the keys",
                last[0],
                self.files.root,
                self.pointer.bucket,
                found,
            )
        return last

    def _read(self, asked: range, listed: EraseNumbers) -> Iterator[tuple[list[pa.Array], int, str]]:
        """Requests one after the other, up to the first one that cannot be read; without keys where one is gone."""
        for number in asked:
            try:
                request = self._request(number) if number in listed.requests else None
                if request is not None:
                    where = EraseFolder(self.files).files.where(request_name(number))
                    found: tuple[list[pa.Array], str | None] = request.columns(self.schema.keys, where), request.id
                else:
                    found = [], self._tried(partial(self.watch.id_of, self.files, number))
            except _UNREADABLE as error:
                _LOGGER.error("erase request %d of %s, and those after it, wait: %s", number, self.files.root, error)
                return
            columns, request_id = found
            if request_id is None:
                if number in listed.requests:
                    _LOGGER.error(
                        "erase request %d of %s, and those after it, wait: it is gone", number, self.files.root
                    )
                return
            yield columns, number, request_id

    def _request(self, number: int) -> EraseRequest | None:
        """A request; None where the query's first bucket has removed it since it was listed, as it is long done."""
        try:
            request: EraseRequest = self._tried(partial(self.watch.request, self.files, number))
        except MissingCheckpointError:
            return None
        return request

    def _say_that_they_wait(self, listed: EraseNumbers) -> None:
        waiting = sorted(listed.requests - listed.done)
        if waiting and self.pointer.bucket == 0:
            _LOGGER.warning(
                "erase requests of %s wait (%s): pointers of format 1 cannot tell what is erased; set "
                "pointer_write='v2'",
                self.files.root,
                ", ".join(map(str, waiting[:10])),
            )

    def _tried(self, work: Callable[[], Any]) -> Any:
        return retried(work, self.timeout_s)


def _together(
    requests: Iterator[tuple[list[pa.Array], int, str]],
) -> Iterator[tuple[list[pa.Array], int, str]]:
    """Small ones in one, as each costs a pass over the bucket, with number and id of the last."""
    held: list[list[pa.Array]] = []
    held_bytes, last = 0, (0, "")
    for columns, number, request_id in requests:
        size_bytes = sum(column.nbytes for column in columns)
        if held and held_bytes + size_bytes > _REQUEST_BYTES_MAX:
            yield _concatenated(held), *last
            held, held_bytes = [], 0
        if columns:
            held.append(columns)
            held_bytes += size_bytes
        last = number, request_id
    if last[0]:
        yield _concatenated(held), *last


def _concatenated(held: list[list[pa.Array]]) -> list[pa.Array]:
    return [pa.concat_arrays(columns) for columns in zip(*held, strict=True)] if len(held) != 1 else held[0]


def _size_bytes(requests: OrderedDict[tuple[str, int], EraseRequest]) -> int:
    return sum(int(it.keys.nbytes) for it in requests.values())


def _remember(known: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    known.pop(key, None)
    known[key] = value
    while len(known) > most:
        known.popitem(last=False)
