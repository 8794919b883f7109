"""A part of a snapshot file: the rows of a range of hashes, read without the rest of the file.

Both ends of the file say which chunks may have such rows. If a large chunk has other rows too, its column of hashes is
read first, and then the wanted range of rows of each column. Arrow gets the chunk with zeros instead of all other
bytes, and rows of such zeros are never returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrow_schemas.blocks import BLOCK_BYTES, PIECE_BYTES
from arrow_schemas.evolution import conform
from arrow_schemas.ipc_message import read_message_head
from arrow_schemas.lineage import SNAPSHOT, file_name
from arrow_schemas.row import KEY_HASH, RowSchema
from arrow_schemas.snapshot_index import IndexedChunk, SnapshotIndex
from spark_state_ext.errors import CorruptFileError, StateError
from spark_state_ext.files.readable import Readable
from spark_state_ext.files.sealed_body import NOT_ARROW
from spark_state_ext.restore.lazy import LazySnapshot, group_pieces, read_pieces
from spark_state_ext.store.chunk_checksums import BINARY, FIXED, NOTHING, WHOLE, Cells, find_cells
from spark_state_ext.store.runs import get_hashes
from spark_state_ext.worker.threads import map_in_parallel

__all__ = ["read_part"]

_THREADS_MAX = 8

# A range of bytes: start and end.
_Span = tuple[int, int]


def read_part(
    files: Readable, snapshot: LazySnapshot, schema: RowSchema, low: int, high: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a snapshot with `low` <= hash < `high`, possibly with neighbouring rows."""
    where = files.where(file_name(snapshot.header.ref, SNAPSHOT))
    try:
        _refuse_gaps(snapshot.index, where)
        for chunk in snapshot.index.chunks:
            if chunk.hash_max < low or chunk.hash_min >= high:
                continue
            part = _Part(files, snapshot, chunk, where)
            is_within = low <= chunk.hash_min and chunk.hash_max < high
            # One request for all of a small chunk costs less than several for its columns.
            rows = part.read_all() if is_within or chunk.size_bytes <= BLOCK_BYTES else part.read_between(low, high)
            rows.validate()
            yield conform(rows, schema)
    except StateError:
        raise
    except NOT_ARROW as error:
        raise CorruptFileError(f"{where} is not the Arrow file that its index announces: {error}") from error


class _Part:
    """A chunk of a file: the bytes that were read and checked are in place, all others are zero."""

    def __init__(self, files: Readable, snapshot: LazySnapshot, chunk: IndexedChunk, where: str) -> None:
        self._files, self._snapshot, self._chunk, self._where = files, snapshot, chunk, where
        self._first = chunk.offset // PIECE_BYTES
        self._end = chunk.offset + chunk.size_bytes
        pieces = -(-self._end // PIECE_BYTES) - self._first
        # Pages that are never written to use no memory.
        self._data: npt.NDArray[np.uint8] = np.zeros(pieces * PIECE_BYTES, dtype=np.uint8)
        self._is_missing: npt.NDArray[np.bool_] = np.ones(pieces, dtype=np.bool_)
        start = chunk.offset - self._first * PIECE_BYTES
        self._buffer = pa.py_buffer(self._data).slice(start, chunk.size_bytes)

    def read_all(self) -> pa.RecordBatch:
        """Read the whole chunk."""
        self._fetch([(self._chunk.offset, self._end)])
        batch = self._open()
        self._refuse_other_hashes(get_hashes(batch))
        return batch

    def read_between(self, low: int, high: int) -> pa.RecordBatch:
        """Read the rows of a range of hashes."""
        batch = self._open()
        address = self._buffer.address
        columns = [(find_cells(column, address), column) for column in batch.columns]
        hashes_at = columns[batch.schema.get_field_index(KEY_HASH)][0].values
        self._fetch_here([(hashes_at, hashes_at + 8 * batch.num_rows)])
        hashes = get_hashes(batch)
        self._refuse_other_hashes(hashes)
        begin = int(np.searchsorted(hashes, np.uint64(low), side="left"))
        end = int(np.searchsorted(hashes, np.uint64(high - 1), side="right"))
        if begin < end:
            self._fetch_here(span for column in columns for span in _locate_cells(*column, address, begin, end))
            self._fetch_here(self._locate_values(cells, begin, end) for cells, _ in columns if cells.kind == BINARY)
            for cells, _ in columns:
                if cells.kind == NOTHING and cells.validity >= 0:
                    self._refuse_values(cells.validity, begin, end)
        return batch.slice(begin, end - begin)

    def _open(self) -> pa.RecordBatch:
        """Return the chunk as a record batch; the caller may use only those cells that were read."""
        head = read_message_head(self._read_bytes, self._chunk.offset, self._where)
        size_bytes = head.metadata_bytes + head.body_bytes
        # Arrow allocates memory for a compressed body before checking it; our chunks are never compressed.
        if head.codec is not None or size_bytes != self._chunk.size_bytes:
            raise CorruptFileError(
                f"{self._where} has another message at byte {self._chunk.offset} than its index says"
            )
        batch = pa.ipc.read_record_batch(self._buffer, self._snapshot.schema)
        if batch.num_rows != self._chunk.rows:
            raise CorruptFileError(f"{self._where} holds {batch.num_rows} rows, but announces {self._chunk.rows}")
        # This checks sizes of buffers, which are Arrow's metadata. Offsets that were not read are 0, which is valid.
        batch.validate()
        return batch

    def _refuse_other_hashes(self, hashes: npt.NDArray[np.uint64]) -> None:
        """Raise an error if the chunk's hashes differ from the index, which decides which chunks are read."""
        ends = (int(hashes[0]), int(hashes[-1])) if len(hashes) else ()
        if ends != (self._chunk.hash_min, self._chunk.hash_max) or (hashes[1:] < hashes[:-1]).any():
            raise CorruptFileError(f"{self._where} has other hashes at byte {self._chunk.offset} than its index says")

    def _refuse_values(self, validity: int, begin: int, end: int) -> None:
        """Raise an error if a column that should be all NULL, and so was not read, has a value in these rows."""
        first, last = begin // 8, -(-end // 8)
        marks = np.frombuffer(self._buffer, np.uint8, last - first, offset=validity + first)
        if np.unpackbits(marks, bitorder="little")[begin - 8 * first : end - 8 * first].any():
            raise CorruptFileError(f"{self._where} has values at byte {self._chunk.offset} in a column without any")

    def _read_bytes(self, start: int, size: int) -> bytes:
        self._fetch([(start, min(start + size, self._end))])
        at = start - self._first * PIECE_BYTES
        return self._data[at : at + size].tobytes()

    def _locate_values(self, cells: Cells, begin: int, end: int) -> _Span:
        """Return the range of the text or bytes of rows, whose offsets were read already."""
        offsets = np.frombuffer(self._buffer, np.int64 if cells.bits == 64 else np.int32, offset=cells.values)
        return cells.data + int(offsets[begin]), cells.data + int(offsets[end])

    def _fetch_here(self, spans: Iterable[_Span]) -> None:
        """Read ranges of bytes that are given relative to the chunk."""
        self._fetch([(self._chunk.offset + start, self._chunk.offset + end) for start, end in spans if start != end])

    def _fetch(self, spans: Iterable[_Span]) -> None:
        """Read the pieces that contain these ranges of bytes of the file, unless they were read before."""
        needed = np.zeros_like(self._is_missing)
        for start, end in spans:
            if not self._chunk.offset <= start <= end <= self._end:
                raise CorruptFileError(f"{self._where} has a chunk that refers to bytes outside of it: it is damaged")
            needed[start // PIECE_BYTES - self._first : -(-end // PIECE_BYTES) - self._first] = True
        requests = group_pieces(np.flatnonzero(needed & self._is_missing) + self._first)
        if len(requests) > 1:
            map_in_parallel("part", min(_THREADS_MAX, len(requests)), self._put, requests)
        elif requests:
            self._put(requests[0])

    def _put(self, request: tuple[int, int]) -> None:
        index = self._snapshot.index
        data = read_pieces(self._files, self._snapshot.header.ref, index, request)
        index.check(request[0], data, self._where)
        at, pieces = (request[0] - self._first) * PIECE_BYTES, slice(*(piece - self._first for piece in request))
        self._data[at : at + len(data)] = np.frombuffer(data, dtype=np.uint8)
        self._is_missing[pieces] = False


def _refuse_gaps(index: SnapshotIndex, where: str) -> None:
    """Raise an error if an index omits bytes between its chunks, as these may be rows."""
    ends = [chunk.offset + chunk.size_bytes for chunk in index.chunks]
    if [chunk.offset for chunk in index.chunks[1:]] != ends[:-1] or ends[-1:] not in ([], [index.body_bytes]):
        raise CorruptFileError(f"the index of {where} omits bytes between chunks: it is damaged")


def _locate_cells(cells: Cells, column: pa.Array, address: int, begin: int, end: int) -> Iterator[_Span]:
    """Yield the byte ranges of some rows of a column; for text and bytes, only the range of their offsets."""
    if cells.kind == WHOLE:
        # Structs, lists and maps have too many layouts to locate single rows.
        buffers = [buffer for buffer in column.buffers() if buffer is not None and buffer.size]
        starts = [buffer.address - address for buffer in buffers]
        yield from zip(starts, (at + buffer.size for at, buffer in zip(starts, buffers, strict=True)), strict=True)
        return
    if cells.validity >= 0:
        yield cells.validity + begin // 8, cells.validity - (-end // 8)
    if cells.kind == FIXED:
        yield cells.values + begin * cells.bits // 8, cells.values - (-end * cells.bits // 8)
    elif cells.kind == BINARY:
        yield cells.values + begin * cells.bits // 8, cells.values + (end + 1) * cells.bits // 8
