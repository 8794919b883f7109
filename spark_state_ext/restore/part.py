"""A part of a snapshot file: the rows of a range of hashes, of which only what they consist of is read.

Both ends of the file tell which chunks may have such rows. Of a large chunk that has others too, the column of hashes
is read, and then the range of rows of each column. Arrow sees a chunk whose other bytes are zeros, and nobody looks at
these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrow_schemas.blocks import BLOCK_BYTES, PIECE_BYTES
from arrow_schemas.evolution import conform
from arrow_schemas.ipc_message import message_at
from arrow_schemas.lineage import SNAPSHOT, file_name
from arrow_schemas.row import KEY_HASH, RowSchema
from arrow_schemas.snapshot_index import IndexedChunk
from spark_state_ext.errors import CorruptFileError, StateError
from spark_state_ext.files.readable import Readable
from spark_state_ext.files.sealed_body import NOT_ARROW
from spark_state_ext.restore.lazy import LazySnapshot, read_pieces, requests_for
from spark_state_ext.store.checksums import BINARY, FIXED, WHOLE, Cells, cells_of
from spark_state_ext.store.runs import hashes_of
from spark_state_ext.worker.threads import side_by_side

__all__ = ["read_part"]

_THREADS_MAX = 8

# Bytes of the file, from and to.
_Span = tuple[int, int]


def read_part(
    files: Readable, snapshot: LazySnapshot, schema: RowSchema, low: int, high: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a snapshot whose hashes are at least `low` and below `high`, and maybe some beside them."""
    where = files.where(file_name(snapshot.header.ref, SNAPSHOT))
    try:
        for chunk in snapshot.index.chunks:
            if chunk.hash_max < low or chunk.hash_min >= high:
                continue
            part = _Part(files, snapshot, chunk, where)
            is_within = low <= chunk.hash_min and chunk.hash_max < high
            # A request for all of a small one costs less than several for its columns.
            rows = part.all_rows() if is_within or chunk.size_bytes <= BLOCK_BYTES else part.rows_between(low, high)
            rows.validate()
            yield conform(rows, schema)
    except StateError:
        raise
    except NOT_ARROW as error:
        raise CorruptFileError(f"{where} is not the Arrow file that its index announces: {error}") from error


class _Part:
    """The bytes of one chunk, at their places, as far as they were read and checked."""

    def __init__(self, files: Readable, snapshot: LazySnapshot, chunk: IndexedChunk, where: str) -> None:
        self._files, self._snapshot, self._chunk, self._where = files, snapshot, chunk, where
        self._first = chunk.offset // PIECE_BYTES
        self._end = chunk.offset + chunk.size_bytes
        pieces = -(-self._end // PIECE_BYTES) - self._first
        # Pages that nobody writes to take no memory.
        self._data: npt.NDArray[np.uint8] = np.zeros(pieces * PIECE_BYTES, dtype=np.uint8)
        self._lacks: npt.NDArray[np.bool_] = np.ones(pieces, dtype=np.bool_)
        start = chunk.offset - self._first * PIECE_BYTES
        self._buffer = pa.py_buffer(self._data).slice(start, chunk.size_bytes)

    def all_rows(self) -> pa.RecordBatch:
        """Read all of the chunk."""
        self._fetch([(self._chunk.offset, self._end)])
        return self._opened()

    def rows_between(self, low: int, high: int) -> pa.RecordBatch:
        """Read the rows of a range of hashes."""
        batch = self._opened()
        address = self._buffer.address
        columns = [(cells_of(column, address), column) for column in batch.columns]
        hashes_at = columns[batch.schema.get_field_index(KEY_HASH)][0].values
        self._fetch_here([(hashes_at, hashes_at + 8 * batch.num_rows)])
        hashes = hashes_of(batch)
        begin = int(np.searchsorted(hashes, np.uint64(low), side="left"))
        end = int(np.searchsorted(hashes, np.uint64(high - 1), side="right"))
        if begin < end:
            self._fetch_here(span for it in columns for span in _cell_spans(*it, address, begin, end))
            self._fetch_here(self._value_span(cells, begin, end) for cells, _ in columns if cells.kind == BINARY)
        return batch.slice(begin, end - begin)

    def _opened(self) -> pa.RecordBatch:
        """The chunk as a record batch; of its columns only what was read may be looked at."""
        head = message_at(self._bytes_at, self._chunk.offset, self._where)
        size_bytes = head.metadata_bytes + head.body_bytes
        # Arrow makes room for a compressed body before it looks at it, and no chunk is compressed.
        if head.codec is not None or size_bytes != self._chunk.size_bytes:
            raise CorruptFileError(f"{self._where} has another message at byte {self._chunk.offset} than its index has")
        batch = pa.ipc.read_record_batch(self._buffer, self._snapshot.schema)
        if batch.num_rows != self._chunk.rows:
            raise CorruptFileError(f"{self._where} holds {batch.num_rows} rows and announces {self._chunk.rows}")
        return batch

    def _bytes_at(self, start: int, size: int) -> bytes:
        self._fetch([(start, min(start + size, self._end))])
        at = start - self._first * PIECE_BYTES
        return self._data[at : at + size].tobytes()

    def _value_span(self, cells: Cells, begin: int, end: int) -> _Span:
        """Where text or bytes of rows are, whose offsets were read."""
        offsets = np.frombuffer(self._buffer, np.int64 if cells.bits == 64 else np.int32, offset=cells.values)
        return cells.data + int(offsets[begin]), cells.data + int(offsets[end])

    def _fetch_here(self, spans: Iterable[_Span]) -> None:
        """Read bytes at places of the chunk."""
        self._fetch([(self._chunk.offset + start, self._chunk.offset + end) for start, end in spans if start != end])

    def _fetch(self, spans: Iterable[_Span]) -> None:
        """Read the pieces that some bytes of the file lie in, as far as they were not."""
        wanted = np.zeros_like(self._lacks)
        for start, end in spans:
            if not self._chunk.offset <= start <= end <= self._end:
                raise CorruptFileError(f"{self._where} has a chunk that leads to bytes outside of it: it is damaged")
            wanted[start // PIECE_BYTES - self._first : -(-end // PIECE_BYTES) - self._first] = True
        requests = requests_for(np.flatnonzero(wanted & self._lacks) + self._first)
        if len(requests) > 1:
            side_by_side("part", min(_THREADS_MAX, len(requests)), self._put, requests)
        elif requests:
            self._put(requests[0])

    def _put(self, request: tuple[int, int]) -> None:
        index = self._snapshot.index
        data = read_pieces(self._files, self._snapshot.header.ref, index, request)
        index.check(request[0], data, self._where)
        at, pieces = (request[0] - self._first) * PIECE_BYTES, slice(*(it - self._first for it in request))
        self._data[at : at + len(data)] = np.frombuffer(data, dtype=np.uint8)
        self._lacks[pieces] = False


def _cell_spans(cells: Cells, column: pa.Array, address: int, begin: int, end: int) -> Iterator[_Span]:
    """Where a column has what rows consist of, but of text and bytes what only their offsets tell."""
    if cells.kind == WHOLE:
        # Structs, lists and maps have too many forms to follow each.
        buffers = [it for it in column.buffers() if it is not None and it.size]
        starts = [it.address - address for it in buffers]
        yield from zip(starts, (at + it.size for at, it in zip(starts, buffers, strict=True)), strict=True)
        return
    if cells.validity >= 0:
        yield cells.validity + begin // 8, cells.validity - (-end // 8)
    if cells.kind == FIXED:
        yield cells.values + begin * cells.bits // 8, cells.values - (-end * cells.bits // 8)
    elif cells.kind == BINARY:
        yield cells.values + begin * cells.bits // 8, cells.values + (end + 1) * cells.bits // 8
