"""What a lookup has to have here of a run that is restored lazily, and where its keys are in it.

Of each chunk that may have a wanted hash: the head of its message; of the column of hashes the pieces around where the
hash should be, as hashes are spread evenly; then the cells of the rows that have it. What lacks is asked for once a
step, for all chunks together. Who looks for timeouts has whole columns, and then the rows that he finds in them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from arrow_schemas.blocks import PIECE_BYTES
from arrow_schemas.equality import HashArray, IndexArray
from arrow_schemas.row import KEY_HASH, RowSchema
from spark_state_ext.errors import CorruptStoreError, MissingRunError
from spark_state_ext.store.checksums import BINARY, FIXED, WHOLE, Cells, cells_of
from spark_state_ext.store.lazy_file import FetchPieces, LazyFile

__all__ = ["Places", "columns", "ensured", "places"]

_PREFIX = struct.Struct("<Ii")
# The head of a message with few columns is shorter.
_HEAD_BYTES = 16 << 10
# Rows on each side of where a hash should be.
_REACH = 256
# Looks at a column of hashes, until the whole column is fetched.
_LOOKS_MAX = 4

_Step = Callable[[IndexArray], None]


def ensured(lazy: LazyFile, pieces: IndexArray, fetch: FetchPieces | None) -> None:
    """Have pieces here."""
    lacking = lazy.lacking(pieces)
    if not len(lacking):
        return
    if fetch is None:
        raise MissingRunError(
            f"run {lazy.run.newest} is restored lazily, and what is looked for is not here yet", lazy.run.newest
        )
    fetch(lazy, lacking)
    left = lazy.lacking(lacking)
    if len(left):
        raise CorruptStoreError(f"{len(left)} pieces of run {lazy.run.newest} are not here after they were fetched")


class Places:
    """Where wanted hashes are in the chunks of a run."""

    def __init__(self, rank: IndexArray, found: dict[int, tuple[int, IndexArray]]) -> None:
        self._rank = rank
        self._found = found

    def rows(self, chunk: int, wanted: IndexArray) -> IndexArray:
        """The rows of some of the hashes in a chunk that may have them."""
        first, at = self._found[chunk]
        rows: IndexArray = at[self._rank[wanted] - first]
        return rows


def places(lazy: LazyFile, schema: RowSchema, hashes: HashArray, fetch: FetchPieces | None) -> Places:
    """Have here what a lookup of hashes looks at, and tell where each is."""
    step = _step(lazy, fetch)
    order = np.argsort(hashes, kind="stable")
    ascending = hashes[order]
    searches: list[_Search] = []
    for number, chunk in enumerate(lazy.run.chunks):
        low = int(np.searchsorted(ascending, np.uint64(chunk.hash_min), side="left"))
        high = int(np.searchsorted(ascending, np.uint64(chunk.hash_max), side="right"))
        if low < high:
            searches.append(_Search(lazy, number, low, ascending[low:high]))
    _open(lazy, searches, schema, step)
    _find(searches, step)
    _with_followers(searches, step)
    step(_joined(it.cells() for it in searches))
    step(_joined(it.values() for it in searches))
    rank = np.empty(len(hashes), dtype=np.int64)
    rank[order] = np.arange(len(hashes))
    return Places(rank, {it.number: (it.first, it.at) for it in searches})


def columns(
    lazy: LazyFile, schema: RowSchema, chunks: Iterable[int], names: Collection[str], fetch: FetchPieces | None
) -> None:
    """Have some columns of chunks here, all of each."""
    step, none = _step(lazy, fetch), np.empty(0, dtype=np.uint64)
    opened = [_Search(lazy, number, 0, none) for number in chunks]
    _open(lazy, opened, schema, step)
    places = [schema.arrow.get_field_index(name) for name in names]
    step(_joined(it.column(place) for it in opened for place in places))


def _step(lazy: LazyFile, fetch: FetchPieces | None) -> _Step:
    return lambda pieces: ensured(lazy, pieces, fetch)


def _open(lazy: LazyFile, searches: Iterable[_Search], schema: RowSchema, step: _Step) -> None:
    """Have the heads of chunks' messages here."""
    starts = [(it.offset, it.offset + min(_HEAD_BYTES, it.size_bytes)) for it in searches]
    step(_joined(_between(start, end) for start, end in starts))
    longer = []
    for it in searches:
        _, metadata_bytes = _PREFIX.unpack_from(memoryview(lazy.buffer), it.offset)
        if not 0 < metadata_bytes <= it.size_bytes - _PREFIX.size:
            raise CorruptStoreError(f"chunk {it.number} of run {lazy.run.newest} has a head of {metadata_bytes} bytes")
        longer.append(_between(it.offset, it.offset + _PREFIX.size + metadata_bytes))
    step(_joined(longer))
    for it in searches:
        it.open(schema)


def _find(searches: Iterable[_Search], step: _Step) -> None:
    for look in range(_LOOKS_MAX):
        unsettled = [it for it in searches if it.unsettled]
        if not unsettled:
            return
        step(_joined(it.looks_at() if look + 1 < _LOOKS_MAX else it.all_hashes() for it in unsettled))
        for it in unsettled:
            if look + 1 < _LOOKS_MAX:
                it.look()
            else:
                it.search()


def _with_followers(searches: Iterable[_Search], step: _Step) -> None:
    """Rows of other keys of the same hash stand behind the first one of it."""
    left = [it for it in searches if it.begin_followers()]
    while left:
        step(_joined(it.next_hashes() for it in left))
        left = [it for it in left if it.follow()]


@dataclass
class _Window:
    """Rows that are looked at, from and to, for each hash that is not settled."""

    first: IndexArray
    last: IndexArray


class _Search:
    """The wanted hashes that one chunk may have."""

    def __init__(self, lazy: LazyFile, number: int, first: int, hashes: HashArray) -> None:
        chunk = lazy.run.chunks[number]
        self.number, self.first = number, first
        self.offset, self.size_bytes = chunk.offset, chunk.size_bytes
        self._lazy, self._hashes = lazy, hashes
        self._rows = chunk.rows
        count = len(hashes)
        self.at: IndexArray = np.full(count, -1, dtype=np.int64)
        # The row that is wanted is none before `low` and none behind `high`; and what hashes these have.
        self._low, self._high = np.zeros(count, dtype=np.int64), np.full(count, chunk.rows - 1, dtype=np.int64)
        self._low_hash = np.full(count, chunk.hash_min, dtype=np.uint64)
        self._high_hash = np.full(count, chunk.hash_max, dtype=np.uint64)
        self._found: IndexArray = np.empty(0, dtype=np.int64)

    def open(self, schema: RowSchema) -> None:
        """The head of its message is here."""
        batch = self._lazy.chunk(self.number, schema.arrow)
        if batch.num_rows != self._rows:
            raise CorruptStoreError(f"chunk {self.number} has {batch.num_rows} rows, and {self._rows} are announced")
        address = self._lazy.buffer.address
        self._columns = [(cells_of(column, address), column) for column in batch.columns]
        self._hashes_at = self._columns[schema.arrow.get_field_index(KEY_HASH)][0].values
        self._all: HashArray = np.frombuffer(self._lazy.buffer, np.uint64, self._rows, self._hashes_at)

    @property
    def unsettled(self) -> bool:
        return bool((self.at < 0).any())

    def all_hashes(self) -> IndexArray:
        return _between(self._hashes_at, self._hashes_at + 8 * self._rows)

    def search(self) -> None:
        """All hashes are here."""
        self.at = np.searchsorted(self._all, self._hashes, side="left").astype(np.int64)

    def looks_at(self) -> IndexArray:
        """Pieces around where hashes should be that are not settled."""
        self._at_work = np.flatnonzero(self.at < 0)
        low, high = self._low[self._at_work], self._high[self._at_work]
        below = self._low_hash[self._at_work]
        span = np.maximum(self._high_hash[self._at_work] - below, np.uint64(1)).astype(np.float64)
        share = np.clip((self._hashes[self._at_work] - below).astype(np.float64) / span, 0.0, 1.0)
        guess = low + (share * (high - low)).astype(np.int64)
        first = (self._hashes_at + 8 * np.maximum(guess - _REACH, low)) // PIECE_BYTES
        last = (self._hashes_at + 8 * np.minimum(guess + _REACH, high) + 7) // PIECE_BYTES
        # All rows that lie in these pieces wholly.
        self._window = _Window(
            np.maximum(low, -(-(first * PIECE_BYTES - self._hashes_at) // 8)),
            np.minimum(high, ((last + 1) * PIECE_BYTES - self._hashes_at) // 8 - 1),
        )
        return _expanded(first, last)

    def look(self) -> None:
        """What was to be looked at is here."""
        work, first, last = self._at_work, self._window.first, self._window.last
        wanted, begins, ends = self._hashes[work], self._all[first], self._all[last]
        above, below = (begins >= wanted) & (first > 0), ends < wanted
        self._high[work[above]], self._high_hash[work[above]] = first[above], begins[above]
        self._low[work[below]], self._low_hash[work[below]] = last[below], ends[below]
        inside = ~(above | below)
        low, high, settled = first[inside].copy(), last[inside].copy(), wanted[inside]
        while (low < high).any():
            middle = (low + high) // 2
            less = self._all[middle] < settled
            low, high = np.where(less, middle + 1, low), np.where(less, high, middle)
        self.at[work[inside]] = low

    def begin_followers(self) -> bool:
        """Whether any of the hashes is there at all."""
        self._found = self.at[self._all[self.at] == self._hashes]
        self._next = self._found + 1
        self._next = self._next[self._next < self._rows]
        return bool(len(self._next))

    def next_hashes(self) -> IndexArray:
        """Pieces of the hashes behind those found."""
        return _cells(self._hashes_at, self._next, 64)

    def follow(self) -> bool:
        """Those that are the same are found too; whether there may be more."""
        same = self._next[self._all[self._next] == self._all[self._next - 1]]
        self._found = np.concatenate([self._found, same])
        self._next = same + 1
        self._next = self._next[self._next < self._rows]
        return bool(len(self._next))

    def cells(self) -> IndexArray:
        """Pieces of all that rows found have, but of text and bytes what only their offsets tell."""
        rows = self._found
        if not len(rows):
            return rows
        return _joined(self._cells_of(cells, column, rows) for cells, column in self._columns)

    def _cells_of(self, cells: Cells, column: pa.Array, rows: IndexArray) -> IndexArray:
        if cells.kind == WHOLE:
            return self._all_of(column)
        found = []
        if cells.validity >= 0:
            found.append(_cells(cells.validity, rows, 1))
        if cells.kind == FIXED:
            found.append(_cells(cells.values, rows, cells.bits))
        elif cells.kind == BINARY:
            # Arrow makes room by the last offset, of all rows.
            ends = np.array([0, self._rows], dtype=np.int64)
            found.append(_cells(cells.values, np.concatenate([rows, rows + 1, ends]), cells.bits))
        return _joined(found)

    def column(self, place: int) -> IndexArray:
        """Pieces of a whole column."""
        return self._all_of(self._columns[place][1])

    def _all_of(self, column: pa.Array) -> IndexArray:
        buffers = [it for it in column.buffers() if it is not None and it.size]
        starts = [it.address - self._lazy.buffer.address for it in buffers]
        return _joined(_between(at, at + it.size) for at, it in zip(starts, buffers, strict=True))

    def values(self) -> IndexArray:
        """Pieces of the text and bytes of rows found."""
        found = []
        for cells, _ in self._columns if len(self._found) else ():
            if cells.kind == BINARY:
                kind = np.int64 if cells.bits == 64 else np.int32
                table = np.frombuffer(self._lazy.buffer, kind, self._rows + 1, cells.values)
                starts, ends = table[self._found].astype(np.int64), table[self._found + 1].astype(np.int64)
                some = starts < ends
                if len(ends) and int(ends.max()) > self.size_bytes:
                    raise CorruptStoreError(f"chunk {self.number} of the local store has offsets that lead out of it")
                first = (cells.data + starts[some]) // PIECE_BYTES
                last = (cells.data + ends[some] - 1) // PIECE_BYTES
                found.append(_expanded(first, last))
        return _joined(found)


def _between(start: int, end: int) -> IndexArray:
    """The pieces from one place of the file to another."""
    return np.arange(start // PIECE_BYTES, -(-end // PIECE_BYTES), dtype=np.int64)


def _cells(at: int, rows: IndexArray, bits: int) -> IndexArray:
    """The pieces of a column's cells."""
    first = at + rows * bits // 8
    last = at + -(-(rows + 1) * bits // 8) - 1
    return np.concatenate([first // PIECE_BYTES, last // PIECE_BYTES])


def _expanded(first: IndexArray, last: IndexArray) -> IndexArray:
    """All numbers of some ranges."""
    if not len(first):
        return first
    counts = last - first + 1
    if (counts <= 0).any():
        raise CorruptStoreError("a chunk of the local store has offsets that lead backwards")
    begins = np.cumsum(counts) - counts
    return np.repeat(first - begins, counts) + np.arange(int(counts.sum()), dtype=np.int64)


def _joined(parts: Iterable[IndexArray]) -> IndexArray:
    parts = [part for part in parts if len(part)]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
