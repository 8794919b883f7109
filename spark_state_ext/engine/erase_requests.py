"""How calls carry out erase requests: which requests are new to a bucket, and when a request is done.

`docs/design/007b-erasing.md` has the argument. Decisions are functions over values; a process lists the requests once
per batch, and reads a request when a bucket needs it.
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

from arrow_schemas.erase import EraseDone, EraseMark, EraseRequest, format_request_name
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
from spark_state_ext.worker.retry import call_with_retries

__all__ = ["HandledRequests", "EraseTurn", "EraseWatch", "NewRequests", "mark_pointer", "find_new_requests"]

_LOGGER = logging.getLogger("spark_state_ext")
# How many listings and records a process remembers, over all queries that run in it.
_LISTINGS_MAX = 256
_RECORDS_MAX = 1_024
# Size of the requests that a process remembers during a batch for its other buckets, and of the keys of one pass.
_REQUEST_BYTES_MAX = 64 << 20
_UNREADABLE = (CorruptFileError, MissingCheckpointError, VersionSkewError)


@dataclass(frozen=True)
class NewRequests:
    """The erase requests that a call has to carry out.

    Parameters
    ----------
    numbers
        Numbers of the requests, in order.
    through
        The last request that is handled after that; the mark's number if there are no new requests.
    """

    numbers: tuple[int, ...]
    through: int


@dataclass(frozen=True)
class HandledRequests:
    """The erase requests that a call has handled.

    Parameters
    ----------
    through, id
        Number and id of the last request.
    since
        The mark of the input pointer; None: it has none, or the mark belongs to other requests.
    """

    through: int
    id: str
    since: EraseMark | None


def find_new_requests(
    listed: EraseNumbers,
    pointer: Pointer,
    where: str,
    mark_known: bool = True,
    done_heartbeat: Callable[[int], int] = lambda _: 0,
) -> NewRequests:
    """Return the requests that are new to a bucket; raise if the state still needs a request that was deleted."""
    handled = pointer.erased.through if pointer.erased is not None and mark_known else 0
    through = listed.through(handled)
    candidates = range(handled + 1, through + 1)
    missing = [number for number in candidates if number not in listed.requests]
    # A mark of other requests does not prove that these are new: the state may be later than when they were done.
    if missing and pointer.ref is not None and (mark_known or done_heartbeat(missing[-1]) > pointer.heartbeats):
        raise MissingCheckpointError(
            f"the state at {where} is from batch {pointer.batch}, before erase request {missing[0]} was done. That "
            "request was deleted since, so its keys would be in the state again. Go back to a later batch."
        )
    return NewRequests(tuple(number for number in candidates if number in listed.requests), through)


def mark_pointer(pointer: Pointer, handled: HandledRequests | None) -> Pointer:
    """Return the pointer with the erase mark of the requests that its call has handled."""
    if handled is None:
        return pointer
    if handled.since is None:
        return replace(pointer, erased=EraseMark(handled.through, pointer.heartbeats, 0, handled.id))
    return replace(pointer, erased=handled.since.raised(handled.through, pointer.heartbeats, handled.id))


class EraseWatch:
    """A process's cache of erase requests; a `Worker` owns it."""

    def __init__(self, wall_s: Callable[[], float] = time.time) -> None:
        self._wall_s = wall_s
        self._listings: OrderedDict[str, tuple[Any, EraseNumbers]] = OrderedDict()
        # Kept for one batch: the next batch reads the files again, because they may have been replaced.
        self._requests: OrderedDict[tuple[str, int], EraseRequest] = OrderedDict()
        self._ids: OrderedDict[tuple[str, int], str | None] = OrderedDict()
        self._records: OrderedDict[tuple[str, int], EraseDone] = OrderedDict()
        self._lock = threading.Lock()

    def list_requests(self, query_folder: Folder, batch: Any) -> EraseNumbers:
        """Return the numbers of all requests; the folder is listed once per batch."""
        key = query_folder.identity
        with self._lock:
            listing = self._listings.get(key)
        if listing is not None and listing[0] == batch:
            return listing[1]
        numbers = EraseFolder(query_folder).numbers()
        with self._lock:
            _remember(self._listings, key, (batch, numbers), _LISTINGS_MAX)
            for cache in (self._requests, self._ids):
                for cached in [cached for cached in cache if cached[0] == key]:
                    del cache[cached]
        return numbers

    def read_request(self, query_folder: Folder, number: int) -> EraseRequest:
        """Return a request; raises as `EraseFolder.request` does."""
        key = query_folder.identity, number
        with self._lock:
            request = self._requests.get(key)
        if request is None:
            request = EraseFolder(query_folder).request(number)
            with self._lock:
                self._requests[key] = request
                while len(self._requests) > 1 and _total_bytes(self._requests) > _REQUEST_BYTES_MAX:
                    self._requests.popitem(last=False)
        return request

    def read_id(self, query_folder: Folder, number: int) -> str | None:
        """Return the id of a request, or None if it does not exist; raises as `EraseFolder.id_of` does."""
        key = query_folder.identity, number
        with self._lock:
            if key in self._ids:
                return self._ids[key]
        request_id = EraseFolder(query_folder).id_of(number)
        with self._lock:
            _remember(self._ids, key, request_id, _RECORDS_MAX)
        return request_id

    def update_requests(
        self,
        query_folder: Folder,
        listed: EraseNumbers,
        committed: Pointer,
        drops: Callable[[], bool],
        still_ours: Callable[[], None],
    ) -> None:
        """Note which requests are done, delete notes that are no longer true, and delete requests no longer needed.

        Only a query's first bucket calls this. After a failure the next batch tries again.
        """
        if not listed.requests:
            return
        mark = committed.erased
        try:
            if mark is not None and self.read_id(query_folder, mark.through) != mark.id:
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
                        self._delete_done_note(query_folder, number)
                    elif (
                        self._is_over(query_folder, number, committed)
                        and drops()
                        # The cached record may be from before the query went back to an earlier batch: read it again.
                        and self._is_over(query_folder, number, committed, reread=True)
                    ):
                        still_ours()
                        EraseFolder(query_folder).drop(number)
                except _UNREADABLE as error:
                    _LOGGER.warning("erase request %d of %s: %s", number, query_folder.root, error)
                    if number not in listed.done:
                        # Other buckets may not have read it either: this request and all later ones wait.
                        proven = number
        except OwnershipError:
            raise
        except StateError as error:
            _LOGGER.warning(
                "erase requests of %s could not be updated, the next batch tries again: %s", query_folder.root, error
            )

    def _note_done(self, query_folder: Folder, number: int, committed: Pointer) -> None:
        folder = EraseFolder(query_folder)
        request = folder.request(number)
        now_ms = int(self._wall_s() * 1000)
        folder.note_done(
            number,
            EraseDone(
                request.id, request.keys.num_rows, request.asked_ms, now_ms, committed.heartbeats, committed.batch
            ),
        )
        _LOGGER.info("erase request %d of %s is done", number, query_folder.root)

    def _delete_done_note(self, query_folder: Folder, number: int) -> None:
        with self._lock:
            self._records.pop((query_folder.identity, number), None)
        EraseFolder(query_folder).take_back(number)
        _LOGGER.warning(
            "the query at %s went back to a batch before erase request %d was known to be done: it waits until "
            "every bucket has carried it out again",
            query_folder.root,
            number,
        )

    def _is_over(self, query_folder: Folder, number: int, committed: Pointer, *, reread: bool = False) -> bool:
        """True if every pointer that Spark may hand out is newer than the completion of a request."""
        key = query_folder.identity, number
        with self._lock:
            record = None if reread else self._records.get(key)
        if record is None:
            record = EraseFolder(query_folder).done(number)
            if record is None:
                return False
            with self._lock:
                _remember(self._records, key, record, _RECORDS_MAX)
        return committed.heartbeats > record.heartbeat + recent_heartbeats(committed.retained)


@dataclass(frozen=True)
class EraseTurn:
    """The handling of erase requests by one call.

    Parameters
    ----------
    watch
        The process's cache of requests.
    files
        The query folder.
    schema
        Schema of the stored rows.
    pointer
        The input pointer, or the pointer that the bucket begins with.
    batch
        The batch, as for `EraseWatch.list_requests`.
    format_1_too
        Pointers of format 1 are written, which cannot hold the mark.
    timeout_s
        How long failing accesses to the store are retried.
    looks
        False: the job does not look for requests, so that it does not access the store for them.
    """

    watch: EraseWatch
    files: Folder
    schema: RowSchema
    pointer: Pointer
    batch: Any
    format_1_too: bool
    timeout_s: float
    looks: bool = True

    def carry_out(self, erase: Callable[[Sequence[pa.Array]], int]) -> HandledRequests | None:
        """Carry out the requests that are new to the bucket and return the handled ones; None: nothing is new.

        A request that cannot be read waits, and so do all requests after it.
        """
        pointer, where = self.pointer, self.files.root
        if self.format_1_too and pointer.erased is not None:
            raise UsageError(
                f"erase requests up to {pointer.erased.through} of {where} were carried out, and pointers of format 1 "
                "cannot record that: keep pointer_write='v2'"
            )
        if not self.looks:
            return None
        listed = self._retry(partial(self.watch.list_requests, self.files, self.batch))
        if self.format_1_too:
            self._warn_of_waiting(listed)
            return None
        if not listed.requests | listed.done:
            return None
        try:
            mark_known = self._is_mark_known()
            new_requests = find_new_requests(listed, pointer, where, mark_known, self._done_heartbeat)
        except (CorruptFileError, VersionSkewError) as error:
            _LOGGER.error("erase requests of %s wait: %s", where, error)
            return None
        since = pointer.erased if mark_known else None
        last_request = self._carry_out(
            range(since.through + 1 if since is not None else 1, new_requests.through + 1), listed, erase
        )
        return None if last_request is None else HandledRequests(*last_request, since)

    def marked(self, pointer: Pointer, handled: HandledRequests | None) -> Pointer:
        """Return the call's pointer with its erase mark."""
        if self.looks or pointer.erased is None:
            return mark_pointer(pointer, handled)
        return replace(pointer, erased=pointer.erased.passed(self.pointer.heartbeats, pointer.heartbeats))

    def look_after(self, drops: Callable[[], bool], still_ours: Callable[[], None]) -> None:
        """Update the requests (`EraseWatch.update_requests`); only the query's first bucket calls this."""
        if self.looks and not self.format_1_too:
            listed = self._retry(partial(self.watch.list_requests, self.files, self.batch))
            self.watch.update_requests(self.files, listed, self.pointer, drops, still_ours)

    def _is_mark_known(self) -> bool:
        """True if the pointer's mark belongs to the requests in the folder, or it has none."""
        mark = self.pointer.erased
        if mark is None:
            return True
        if self._retry(partial(self.watch.read_id, self.files, mark.through)) == mark.id:
            return True
        _LOGGER.warning(
            "the pointer of bucket %d names erase request %d with the id %s, which %s does not have: all requests that "
            "are there are carried out",
            self.pointer.bucket,
            mark.through,
            mark.id,
            self.files.root,
        )
        return False

    def _done_heartbeat(self, number: int) -> int:
        record = self._retry(partial(EraseFolder(self.files).done, number))
        return 0 if record is None else record.heartbeat

    def _carry_out(
        self, numbers: range, listed: EraseNumbers, erase: Callable[[Sequence[pa.Array]], int]
    ) -> tuple[int, str] | None:
        """Carry out requests; return number and id of the last one, or None if none was handled."""
        last_request: tuple[int, str] | None = None
        erased_keys = 0
        requests = self._read(numbers, listed)
        for columns, number, request_id in _merge_small_requests(requests):
            erased_keys += erase(columns) if len(columns) and len(columns[0]) else 0
            last_request = number, request_id
        if last_request is not None:
            _LOGGER.info(
                "erase requests up to %d of %s: bucket %d had %d of the keys",
                last_request[0],
                self.files.root,
                self.pointer.bucket,
                erased_keys,
            )
        return last_request

    def _read(self, numbers: range, listed: EraseNumbers) -> Iterator[tuple[list[pa.Array], int, str]]:
        """Yield keys, number and id of each request until one cannot be read; a deleted request has no keys."""
        for number in numbers:
            try:
                request = self._request(number) if number in listed.requests else None
                if request is not None:
                    where = EraseFolder(self.files).files.where(format_request_name(number))
                    keys_and_id: tuple[list[pa.Array], str | None] = (
                        request.columns(self.schema.keys, where),
                        request.id,
                    )
                else:
                    keys_and_id = [], self._retry(partial(self.watch.read_id, self.files, number))
            except _UNREADABLE as error:
                _LOGGER.error("erase request %d of %s and all later ones wait: %s", number, self.files.root, error)
                return
            columns, request_id = keys_and_id
            if request_id is None:
                if number in listed.requests:
                    _LOGGER.error(
                        "erase request %d of %s and all later ones wait: its file is missing", number, self.files.root
                    )
                return
            yield columns, number, request_id

    def _request(self, number: int) -> EraseRequest | None:
        """Return a request; None if the first bucket deleted it after the listing, because it was done long ago."""
        try:
            request: EraseRequest = self._retry(partial(self.watch.read_request, self.files, number))
        except MissingCheckpointError:
            return None
        return request

    def _warn_of_waiting(self, listed: EraseNumbers) -> None:
        waiting = sorted(listed.requests - listed.done)
        if waiting and self.pointer.bucket == 0:
            _LOGGER.warning(
                "erase requests of %s wait (%s): pointers of format 1 cannot record what was erased; set "
                "pointer_write='v2'",
                self.files.root,
                ", ".join(map(str, waiting[:10])),
            )

    def _retry(self, work: Callable[[], Any]) -> Any:
        return call_with_retries(work, self.timeout_s)


def _merge_small_requests(
    requests: Iterator[tuple[list[pa.Array], int, str]],
) -> Iterator[tuple[list[pa.Array], int, str]]:
    """Merge small requests, because each costs a pass over the bucket; yield number and id of the last one."""
    batch: list[list[pa.Array]] = []
    batch_bytes, last = 0, (0, "")
    for columns, number, request_id in requests:
        size_bytes = sum(column.nbytes for column in columns)
        if batch and batch_bytes + size_bytes > _REQUEST_BYTES_MAX:
            yield _concatenate(batch), *last
            batch, batch_bytes = [], 0
        if columns:
            batch.append(columns)
            batch_bytes += size_bytes
        last = number, request_id
    if last[0]:
        yield _concatenate(batch), *last


def _concatenate(batch: list[list[pa.Array]]) -> list[pa.Array]:
    return [pa.concat_arrays(columns) for columns in zip(*batch, strict=True)] if len(batch) != 1 else batch[0]


def _total_bytes(requests: OrderedDict[tuple[str, int], EraseRequest]) -> int:
    return sum(int(request.keys.nbytes) for request in requests.values())


def _remember(cache: OrderedDict[Any, Any], key: Any, value: Any, entries_max: int) -> None:
    cache.pop(key, None)
    cache[key] = value
    while len(cache) > entries_max:
        cache.popitem(last=False)
