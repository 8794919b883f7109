"""Lookups in a run that is being restored lazily: fetch only the pieces that a lookup reads, and locate its keys.

For each chunk that may have a wanted hash, these are: the head of the chunk's message; the pieces of the hash column
around the estimated position of the hash, as hashes are spread evenly; then the cells of the rows with that hash. Each
step fetches its absent pieces for all chunks in one request. A search for timeouts fetches whole columns, and then the
rows that it finds in them.
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
from spark_state_ext.store.chunk_checksums import BINARY, FIXED, WHOLE, Cells, find_cells
from spark_state_ext.store.lazy_file import FetchPieces, LazyFile

__all__ = ["Positions", "ensure_pieces", "fetch_columns", "locate_hashes"]

_PREFIX = struct.Struct("<Ii")
# Bytes fetched first for the head of a message: enough unless there are many columns.
_HEAD_BYTES = 16 << 10
# Rows searched on each side of a hash's estimated position.
_REACH = 256
# Attempts to locate hashes in a column; the last one fetches the whole column.
_LOOKS_MAX = 4

_Require = Callable[[IndexArray], None]


def ensure_pieces(lazy: LazyFile, pieces: IndexArray, fetch: FetchPieces | None) -> None:
    """Fetch the pieces that are absent."""
    missing = lazy.lacking(pieces)
    if not len(missing):
        return
    if fetch is None:
        raise MissingRunError(
            f"run {lazy.run.newest} is being restored lazily, and the rows looked for are not here yet", lazy.run.newest
        )
    fetch(lazy, missing)
    still_missing = lazy.lacking(missing)
    if len(still_missing):
        raise CorruptStoreError(
            f"{len(still_missing)} pieces of run {lazy.run.newest} are still missing after they were fetched"
        )


class Positions:
    """Rows at which wanted hashes stand in the chunks of a run."""

    def __init__(self, rank: IndexArray, chunks: dict[int, tuple[int, IndexArray]]) -> None:
        self._rank = rank
        self._chunks = chunks

    def rows(self, chunk: int, indices: IndexArray) -> IndexArray:
        """Return the rows of some of the hashes in a chunk; at least one of these hashes may be in the chunk."""
        first, at = self._chunks[chunk]
        rows: IndexArray = at[self._rank[indices] - first]
        return rows


def locate_hashes(lazy: LazyFile, schema: RowSchema, hashes: HashArray, fetch: FetchPieces | None) -> Positions:
    """Fetch all pieces that a lookup of hashes reads, and return the position of each hash."""
    require = _make_require(lazy, fetch)
    order = np.argsort(hashes, kind="stable")
    ascending = hashes[order]
    searches: list[_Search] = []
    for number, chunk in enumerate(lazy.run.chunks):
        low = int(np.searchsorted(ascending, np.uint64(chunk.hash_min), side="left"))
        high = int(np.searchsorted(ascending, np.uint64(chunk.hash_max), side="right"))
        if low < high:
            searches.append(_Search(lazy, number, low, ascending[low:high]))
    _open_chunks(lazy, searches, schema, require)
    _locate(searches, require)
    _find_followers(searches, require)
    require(_concatenate(search.cell_pieces() for search in searches))
    require(_concatenate(search.value_pieces() for search in searches))
    rank = np.empty(len(hashes), dtype=np.int64)
    rank[order] = np.arange(len(hashes))
    return Positions(rank, {search.number: (search.first, search.at) for search in searches})


def fetch_columns(
    lazy: LazyFile, schema: RowSchema, chunks: Iterable[int], names: Collection[str], fetch: FetchPieces | None
) -> None:
    """Fetch whole columns of some chunks."""
    require, no_hashes = _make_require(lazy, fetch), np.empty(0, dtype=np.uint64)
    searches = [_Search(lazy, number, 0, no_hashes) for number in chunks]
    _open_chunks(lazy, searches, schema, require)
    positions = [schema.arrow.get_field_index(name) for name in names]
    require(_concatenate(search.column_pieces(position) for search in searches for position in positions))


def _make_require(lazy: LazyFile, fetch: FetchPieces | None) -> _Require:
    return lambda pieces: ensure_pieces(lazy, pieces, fetch)


def _open_chunks(lazy: LazyFile, searches: Iterable[_Search], schema: RowSchema, require: _Require) -> None:
    """Fetch the heads of chunks' messages and open the chunks."""
    starts = [(search.offset, search.offset + min(_HEAD_BYTES, search.size_bytes)) for search in searches]
    require(_concatenate(_pieces_between(start, end) for start, end in starts))
    heads = []
    for search in searches:
        _, metadata_bytes = _PREFIX.unpack_from(memoryview(lazy.buffer), search.offset)
        if not 0 < metadata_bytes <= search.size_bytes - _PREFIX.size:
            raise CorruptStoreError(
                f"chunk {search.number} of run {lazy.run.newest} has a head of {metadata_bytes} bytes"
            )
        heads.append(_pieces_between(search.offset, search.offset + _PREFIX.size + metadata_bytes))
    require(_concatenate(heads))
    for search in searches:
        search.open(schema)


def _locate(searches: Iterable[_Search], require: _Require) -> None:
    for attempt in range(_LOOKS_MAX):
        unsettled = [search for search in searches if search.unsettled]
        if not unsettled:
            return
        require(
            _concatenate(
                search.pieces_to_search() if attempt + 1 < _LOOKS_MAX else search.hash_pieces() for search in unsettled
            )
        )
        for search in unsettled:
            if attempt + 1 < _LOOKS_MAX:
                search.narrow()
            else:
                search.search_all()


def _find_followers(searches: Iterable[_Search], require: _Require) -> None:
    """Find the rows of other keys with the same hashes: they follow the first row with that hash."""
    unfinished = [search for search in searches if search.begin_followers()]
    while unfinished:
        require(_concatenate(search.follower_pieces() for search in unfinished))
        unfinished = [search for search in unfinished if search.follow()]


@dataclass
class _Window:
    """First and last row of the hash column to read for each hash that is not located yet."""

    first: IndexArray
    last: IndexArray


class _Search:
    """Search for the wanted hashes that one chunk may have."""

    def __init__(self, lazy: LazyFile, number: int, first: int, hashes: HashArray) -> None:
        chunk = lazy.run.chunks[number]
        self.number, self.first = number, first
        self.offset, self.size_bytes = chunk.offset, chunk.size_bytes
        self._lazy, self._hashes = lazy, hashes
        self._rows = chunk.rows
        count = len(hashes)
        self.at: IndexArray = np.full(count, -1, dtype=np.int64)
        # For each hash, the first and last row at which it may be, and the hashes of these rows.
        self._low, self._high = np.zeros(count, dtype=np.int64), np.full(count, chunk.rows - 1, dtype=np.int64)
        self._low_hash = np.full(count, chunk.hash_min, dtype=np.uint64)
        self._high_hash = np.full(count, chunk.hash_max, dtype=np.uint64)
        self._rows_found: IndexArray = np.empty(0, dtype=np.int64)

    def open(self, schema: RowSchema) -> None:
        """Open the chunk, once the head of its message is present."""
        batch = self._lazy.chunk(self.number, schema.arrow)
        if batch.num_rows != self._rows:
            raise CorruptStoreError(
                f"chunk {self.number} has {batch.num_rows} rows, but the manifest says {self._rows}"
            )
        address = self._lazy.buffer.address
        self._columns = [(find_cells(column, address), column) for column in batch.columns]
        self._hashes_at = self._columns[schema.arrow.get_field_index(KEY_HASH)][0].values
        self._chunk_hashes: HashArray = np.frombuffer(self._lazy.buffer, np.uint64, self._rows, self._hashes_at)

    @property
    def unsettled(self) -> bool:
        return bool((self.at < 0).any())

    def hash_pieces(self) -> IndexArray:
        return _pieces_between(self._hashes_at, self._hashes_at + 8 * self._rows)

    def search_all(self) -> None:
        """Locate all hashes, once the whole column is present."""
        self.at = np.searchsorted(self._chunk_hashes, self._hashes, side="left").astype(np.int64)

    def pieces_to_search(self) -> IndexArray:
        """Return the pieces around the estimated positions of the hashes that are not located yet."""
        self._unsettled = np.flatnonzero(self.at < 0)
        low, high = self._low[self._unsettled], self._high[self._unsettled]
        below = self._low_hash[self._unsettled]
        span = np.maximum(self._high_hash[self._unsettled] - below, np.uint64(1)).astype(np.float64)
        share = np.clip((self._hashes[self._unsettled] - below).astype(np.float64) / span, 0.0, 1.0)
        guess = low + (share * (high - low)).astype(np.int64)
        first = (self._hashes_at + 8 * np.maximum(guess - _REACH, low)) // PIECE_BYTES
        last = (self._hashes_at + 8 * np.minimum(guess + _REACH, high) + 7) // PIECE_BYTES
        # All rows that lie entirely in these pieces.
        self._window = _Window(
            np.maximum(low, -(-(first * PIECE_BYTES - self._hashes_at) // 8)),
            np.minimum(high, ((last + 1) * PIECE_BYTES - self._hashes_at) // 8 - 1),
        )
        return _expand_ranges(first, last)

    def narrow(self) -> None:
        """Locate hashes in the window, or narrow their bounds, once the pieces from `pieces_to_search` are present."""
        unsettled, first, last = self._unsettled, self._window.first, self._window.last
        hashes, begins, ends = self._hashes[unsettled], self._chunk_hashes[first], self._chunk_hashes[last]
        above, below = (begins >= hashes) & (first > 0), ends < hashes
        self._high[unsettled[above]], self._high_hash[unsettled[above]] = first[above], begins[above]
        self._low[unsettled[below]], self._low_hash[unsettled[below]] = last[below], ends[below]
        inside = ~(above | below)
        low, high, settled = first[inside].copy(), last[inside].copy(), hashes[inside]
        while (low < high).any():
            middle = (low + high) // 2
            less = self._chunk_hashes[middle] < settled
            low, high = np.where(less, middle + 1, low), np.where(less, high, middle)
        self.at[unsettled[inside]] = low

    def begin_followers(self) -> bool:
        """Find the hashes that the chunk really has; return whether any of them has a following row to check."""
        self._rows_found = self.at[self._chunk_hashes[self.at] == self._hashes]
        self._followers = self._rows_found + 1
        self._followers = self._followers[self._followers < self._rows]
        return bool(len(self._followers))

    def follower_pieces(self) -> IndexArray:
        """Return the pieces with the hashes of the following rows."""
        return _cell_pieces(self._hashes_at, self._followers, 64)

    def follow(self) -> bool:
        """Add the following rows with the same hash to those found; return whether there may be more."""
        same = self._followers[self._chunk_hashes[self._followers] == self._chunk_hashes[self._followers - 1]]
        self._rows_found = np.concatenate([self._rows_found, same])
        self._followers = same + 1
        self._followers = self._followers[self._followers < self._rows]
        return bool(len(self._followers))

    def cell_pieces(self) -> IndexArray:
        """Return the pieces of all cells of the rows found; for text and bytes, of their offsets only."""
        rows = self._rows_found
        if not len(rows):
            return rows
        return _concatenate(self._pieces_of_rows(cells, column, rows) for cells, column in self._columns)

    def _pieces_of_rows(self, cells: Cells, column: pa.Array, rows: IndexArray) -> IndexArray:
        if cells.kind == WHOLE:
            return self._column_pieces(column)
        pieces = []
        if cells.validity >= 0:
            pieces.append(_cell_pieces(cells.validity, rows, 1))
        if cells.kind == FIXED:
            pieces.append(_cell_pieces(cells.values, rows, cells.bits))
        elif cells.kind == BINARY:
            # Arrow allocates memory by the column's first and last offset.
            ends = np.array([0, self._rows], dtype=np.int64)
            pieces.append(_cell_pieces(cells.values, np.concatenate([rows, rows + 1, ends]), cells.bits))
        return _concatenate(pieces)

    def column_pieces(self, position: int) -> IndexArray:
        """Return the pieces of a whole column."""
        return self._column_pieces(self._columns[position][1])

    def _column_pieces(self, column: pa.Array) -> IndexArray:
        buffers = [buffer for buffer in column.buffers() if buffer is not None and buffer.size]
        starts = [buffer.address - self._lazy.buffer.address for buffer in buffers]
        return _concatenate(_pieces_between(at, at + buffer.size) for at, buffer in zip(starts, buffers, strict=True))

    def value_pieces(self) -> IndexArray:
        """Return the pieces of the text and bytes of the rows found."""
        pieces = []
        for cells, _ in self._columns if len(self._rows_found) else ():
            if cells.kind == BINARY:
                kind = np.int64 if cells.bits == 64 else np.int32
                table = np.frombuffer(self._lazy.buffer, kind, self._rows + 1, cells.values)
                starts, ends = table[self._rows_found].astype(np.int64), table[self._rows_found + 1].astype(np.int64)
                filled = starts < ends
                if len(ends) and int(ends.max()) > self.size_bytes:
                    raise CorruptStoreError(f"chunk {self.number} of the local store has offsets beyond its end")
                first = (cells.data + starts[filled]) // PIECE_BYTES
                last = (cells.data + ends[filled] - 1) // PIECE_BYTES
                pieces.append(_expand_ranges(first, last))
        return _concatenate(pieces)


def _pieces_between(start: int, end: int) -> IndexArray:
    """Return the pieces of a range of bytes of the file."""
    return np.arange(start // PIECE_BYTES, -(-end // PIECE_BYTES), dtype=np.int64)


def _cell_pieces(at: int, rows: IndexArray, bits: int) -> IndexArray:
    """Return the pieces of some rows' cells in a column whose values begin at `at`."""
    first = at + rows * bits // 8
    last = at + -(-(rows + 1) * bits // 8) - 1
    return np.concatenate([first // PIECE_BYTES, last // PIECE_BYTES])


def _expand_ranges(first: IndexArray, last: IndexArray) -> IndexArray:
    """Return all numbers of some ranges, whose ends are included."""
    if not len(first):
        return first
    counts = last - first + 1
    if (counts <= 0).any():
        raise CorruptStoreError("a chunk of the local store has descending offsets")
    begins = np.cumsum(counts) - counts
    return np.repeat(first - begins, counts) + np.arange(int(counts.sum()), dtype=np.int64)


def _concatenate(parts: Iterable[IndexArray]) -> IndexArray:
    parts = [part for part in parts if len(part)]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
