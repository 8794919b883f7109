"""What calls do about erase requests: which are new to a bucket, which of its rows they name, and when one is done.

`docs/design/007b-erasing.md` has the argument. Decisions are functions over values; a process lists the requests once a
batch, and reads one when a bucket needs it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.equality import BoolArray, HashArray, IndexArray
from arrow_schemas.erase import EraseDone, EraseMark, EraseRequest, request_name
from arrow_schemas.pointer import Pointer
from arrow_schemas.row import DELETED, RowSchema
from spark_state_ext.errors import MissingCheckpointError, OwnershipError, StateError
from spark_state_ext.files.erase_requests import EraseFolder, EraseNumbers
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.horizon import recent_heartbeats
from spark_state_ext.functions.key_match import key_positions
from spark_state_ext.store.runs import find, hashes_of, joined

__all__ = ["EraseWatch", "ErasedRows", "NewRequests", "marked", "matching", "new_requests", "places_of"]

_LOGGER = logging.getLogger("spark_state_ext")
# Listings and requests that a process remembers: of the queries that run in it, and of the requests that are new.
_LISTINGS_MAX = 256
_REQUESTS_MAX = 16
_RECORDS_MAX = 1_024
_NONE_ERASED = EraseMark(0, -1)


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


def new_requests(listed: EraseNumbers, pointer: Pointer, where: str) -> NewRequests:
    """Decide what is new to a bucket.

    Parameters
    ----------
    listed
        What is in the folder.
    pointer
        The input pointer, or the one that a bucket begins with.
    where
        The query folder, for messages.

    Raises
    ------
    MissingCheckpointError
        When the state is from before a request that was done and is gone: its keys would be back.
    """
    before = (pointer.erased or _NONE_ERASED).through
    through = listed.through(before)
    asked = range(before + 1, through + 1)
    gone = [number for number in asked if number not in listed.requests]
    if gone and pointer.ref is not None:
        raise MissingCheckpointError(
            f"the state at {where} is from before erase request {gone[0]} (batch {pointer.batch}), which was done, and "
            "whose keys are not known any more: they would be in the state again. Go back to a later batch."
        )
    return NewRequests(tuple(number for number in asked if number in listed.requests), through)


def marked(pointer: Pointer, through: int) -> Pointer:
    """The pointer of a call that has dealt with requests up to a number.

    Parameters
    ----------
    pointer
        With this call's heartbeat counted.
    through
        The number.
    """
    mark = pointer.erased or _NONE_ERASED
    return pointer if through <= mark.through else replace(pointer, erased=mark.raised(through, pointer.heartbeats))


def matching(own: Sequence[pa.Array], wanted: Sequence[pa.Array]) -> BoolArray:
    """Which of some keys are among others, by value.

    Parameters
    ----------
    own
        Columns of the keys to look at, no key twice; normalised.
    wanted
        Columns of the keys to look for.
    """
    found: BoolArray = np.zeros(len(own[0]), dtype=np.bool_)
    at = places_of(wanted, own)
    found[at[at >= 0]] = True
    return found


def places_of(wanted: Sequence[pa.Array], own: Sequence[pa.Array]) -> IndexArray:
    """Where each of some keys is among others, or -1; int64 (number of wanted keys,). Columns as for `matching`."""
    # Most keys differ in the first column already, which Arrow sees without an index of all of them.
    maybe = np.ones(len(own[0]), dtype=np.bool_)
    for mine, other in zip(own, wanted, strict=True):
        if _is_flat(mine.type):
            maybe &= pc.is_in(mine, value_set=other).to_numpy(zero_copy_only=False)
    candidates = np.flatnonzero(maybe)
    if not len(candidates):
        return np.full(len(wanted[0]), -1, dtype=np.int64)
    taken = pa.array(candidates)
    positions = key_positions([column.take(taken) for column in own], wanted)
    return np.where(positions < 0, -1, candidates[positions])


def _is_flat(kind: pa.DataType) -> bool:
    """Whether equal values are equal bytes, and have no others within."""
    types = pa.types
    return not (types.is_nested(kind) or types.is_floating(kind))


class ErasedRows:
    """The rows of a bucket that a call takes away before the function runs: their tombstones, in run order.

    Parameters
    ----------
    schema
        Of the stored rows.
    rows
        Tombstones, ascending by hash.
    """

    def __init__(self, schema: RowSchema, rows: pa.RecordBatch | None = None) -> None:
        self._schema = schema
        self.rows = schema.empty() if rows is None else rows

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    @staticmethod
    def found(live: Iterable[pa.RecordBatch], keys: Sequence[pa.Array], schema: RowSchema) -> ErasedRows:
        """Those of some keys.

        Parameters
        ----------
        live
            All live rows, ascending by hash.
        keys
            Columns of the keys.
        schema
            Of the stored rows.
        """
        pieces = []
        for batch in live:
            found = matching(schema.key_columns(batch), keys)
            if found.any():
                pieces.append(_tombstones(batch.filter(pa.array(found)), schema))
        return ErasedRows(schema, joined(pieces) if pieces else None)

    def among(self, hashes: HashArray, keys: Sequence[pa.Array]) -> BoolArray:
        """Which of some keys are taken away; their hashes ascend."""
        gone: BoolArray = np.zeros(len(hashes), dtype=np.bool_)
        if len(self) and len(hashes):
            wanted, _ = find(self.rows, self._schema, hashes, keys)
            gone[wanted] = True
        return gone

    def without(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch of rows in run order, without those that are taken away."""
        if not len(self) or not batch.num_rows:
            return batch
        gone = self.among(hashes_of(batch), self._schema.key_columns(batch))
        return batch.filter(pa.array(~gone)) if gone.any() else batch

    def between(self, after: int, upto: int) -> pa.RecordBatch:
        """The tombstones with a hash in (after, upto]."""
        if not len(self):
            return self.rows
        hashes = hashes_of(self.rows)
        low = 0 if after < 0 else int(np.searchsorted(hashes, np.uint64(after), side="right"))
        return self.rows.slice(low, int(np.searchsorted(hashes, np.uint64(upto), side="right")) - low)


def _tombstones(rows: pa.RecordBatch, schema: RowSchema) -> pa.RecordBatch:
    count, keep = rows.num_rows, schema.key_slice.stop
    arrays = [*rows.columns[:keep], *(pa.nulls(count, field.type) for field in list(schema.arrow)[keep:-2])]
    no, yes = np.zeros(count, dtype=np.bool_), np.ones(count, dtype=np.bool_)
    assert schema.arrow.names[-1] == DELETED, "the last column"
    return pa.RecordBatch.from_arrays([*arrays, pa.array(no), pa.array(yes)], schema=schema.arrow)


class EraseWatch:
    """What a process knows of erase requests; a `Worker` owns it."""

    def __init__(self) -> None:
        self._listings: OrderedDict[str, tuple[Any, EraseNumbers]] = OrderedDict()
        self._requests: OrderedDict[str, EraseRequest] = OrderedDict()
        self._records: OrderedDict[str, EraseDone] = OrderedDict()
        self._lock = threading.Lock()

    def listed(self, query_folder: Folder, batch: Any) -> EraseNumbers:
        """Which requests there are; listed once a batch.

        Parameters
        ----------
        query_folder
            The query folder.
        batch
            What tells the batch, and the run of the query, from all others that this process has seen.
        """
        key = query_folder.identity
        with self._lock:
            known = self._listings.get(key)
        if known is not None and known[0] == batch:
            return known[1]
        numbers = EraseFolder(query_folder).numbers()
        with self._lock:
            _remember(self._listings, key, (batch, numbers), _LISTINGS_MAX)
        return numbers

    def keys_of(self, query_folder: Folder, numbers: Sequence[int], schema: RowSchema) -> Iterator[list[pa.Array]]:
        """Key columns of requests, one after the other.

        Raises
        ------
        CorruptFileError, VersionSkewError
            When one cannot be read.
        MissingCheckpointError
            When one is gone.
        StorageError
            When the store fails.
        """
        folder = EraseFolder(query_folder)
        for number in numbers:
            where = folder.files.where(request_name(number))
            key = f"{query_folder.identity} {number}"
            with self._lock:
                request = self._requests.get(key)
            if request is None:
                request = folder.request(number)
                with self._lock:
                    _remember(self._requests, key, request, _REQUESTS_MAX)
            yield request.columns(schema.keys, where)

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

        Parameters
        ----------
        query_folder, listed
            As for `listed`.
        committed
            The input pointer of the call.
        drops
            Whether requests may be removed.
        still_ours
            Raises when another run has taken the state over.
        """
        if not listed.requests:
            return
        mark = committed.erased or _NONE_ERASED
        proven = mark.done(committed.heartbeats)
        folder = EraseFolder(query_folder)
        try:
            for number in sorted(listed.requests):
                if number <= proven and number not in listed.done:
                    still_ours()
                    request = folder.request(number)
                    now_ms = int(time.time() * 1000)
                    folder.note_done(
                        number,
                        EraseDone(
                            request.id,
                            request.keys.num_rows,
                            request.asked_ms,
                            now_ms,
                            committed.heartbeats,
                            committed.batch,
                        ),
                    )
                    _LOGGER.info("erase request %d of %s is done", number, query_folder.root)
                elif number > mark.through and number in listed.done:
                    still_ours()
                    self._forget(query_folder, number)
                    folder.take_back(number)
                    _LOGGER.warning(
                        "the query at %s went back to a batch from before erase request %d: it is carried out again",
                        query_folder.root,
                        number,
                    )
                elif number in listed.done and self._is_over(folder, query_folder, number, committed) and drops():
                    still_ours()
                    folder.drop(number)
        except OwnershipError:
            raise
        except StateError as error:
            _LOGGER.warning("erase requests of %s are looked after in the next batch: %s", query_folder.root, error)

    def _is_over(self, folder: EraseFolder, query_folder: Folder, number: int, committed: Pointer) -> bool:
        """Whether no pointer that Spark may hand out is from before a request was done."""
        key = f"{query_folder.identity} {number}"
        with self._lock:
            record = self._records.get(key)
        if record is None:
            record = folder.done(number)
            if record is None:
                return False
            with self._lock:
                _remember(self._records, key, record, _RECORDS_MAX)
        return committed.heartbeats > record.heartbeat + recent_heartbeats(committed.retained)

    def _forget(self, query_folder: Folder, number: int) -> None:
        with self._lock:
            self._records.pop(f"{query_folder.identity} {number}", None)


def _remember(known: OrderedDict[str, Any], key: str, value: Any, most: int) -> None:
    known.pop(key, None)
    known[key] = value
    while len(known) > most:
        known.popitem(last=False)
