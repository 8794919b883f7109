"""The outer form of our Arrow files: a checked body, optionally an index, and a footer that describes both.

A file is written in one stream: the body is hashed while it is written, and the footer gets the counts and the
checksum. A reader checks before it trusts: it finds the footer's fixed-width record by its text, hashes the body, and
only then gives the bytes to Arrow. `docs/format.md` specifies it.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO, Any

import pyarrow as pa

from arrow_schemas.blocks import BLOCK_BYTES, BlockDigest, PieceDigest, digest_crcs
from arrow_schemas.ipc_message import LZ4_FRAME, read_message_head
from arrow_schemas.lineage import BLAKE2B, BLOCKCRC, BODY_PLACEHOLDER, BodyRecord, LineageHeader
from arrow_schemas.snapshot_index import INDEX_KEY, INDEX_PLACEHOLDER, IndexedChunk, IndexRecord, SnapshotIndex
from spark_state_ext.errors import CorruptFileError, StateError
from spark_state_ext.store.runs import describe
from spark_state_ext.worker.threads import map_in_parallel

__all__ = [
    "NOT_ARROW",
    "PADDED_MAGIC",
    "SealedBody",
    "VerifiedBody",
    "read_announced_body",
    "read_announced_index",
    "block_crcs",
    "open_sealed",
    "check_form",
    "verify_body",
    "write_sealed",
]

PADDED_MAGIC = b"ARROW1\0\0"
# What Arrow raises for bytes that have the right checksum, but were not written by this package.
NOT_ARROW = (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError)
_MAGIC = b"ARROW1"
_TAIL = struct.Struct("<i6s")
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
# The start of a file: magic and padding, and the first eight bytes of the schema message, which include its length.
_SCHEMA_HEAD = struct.Struct("<8s4xi")
_CHECKING_THREADS = 4
_THREADS_BYTES_MIN = 1 << 20
# The footer of a file with few record batches, with the schema's metadata, is shorter; a longer one has its length.
_FOOTER_BYTES = 64 << 10
_FOOTER_BYTES_MAX = 64 << 20


class _HashingSink:
    """File-like target that hashes the body, writes an index after it, and fills in the footer's records."""

    def __init__(self, target: IO[bytes], algorithm: str, indexed: bool) -> None:
        self._target = target
        self._algorithm = algorithm
        self._pieces = PieceDigest() if indexed else None
        self._digest: Any = self._pieces or (hashlib.blake2b(digest_size=16) if algorithm == BLAKE2B else BlockDigest())
        self._footer: bytearray | None = None
        self._head = b""
        self.length = 0
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._footer is not None:
            self._footer += view
        else:
            if len(self._head) < _SCHEMA_HEAD.size:
                self._head += view[: _SCHEMA_HEAD.size - len(self._head)]
            self._target.write(view)
            self._digest.update(view)
            self.length += len(view)
        return len(view)

    def begin_footer(self) -> None:
        self._footer = bytearray()

    @property
    def schema_end(self) -> int:
        """The end of the schema message, which is the first part of the body."""
        _, metadata_bytes = _SCHEMA_HEAD.unpack(self._head)
        return _SCHEMA_HEAD.size + int(metadata_bytes)

    def finish(self, rows: int, tombstones: int, chunks: tuple[IndexedChunk, ...]) -> SnapshotIndex | None:
        assert self._footer is not None
        footer = bytes(self._footer)
        assert footer.startswith(_END_OF_STREAM), "Arrow ends the stream before its footer"
        record = BodyRecord(self.length, rows, tombstones, self._digest.hexdigest(), self._algorithm).encode()
        assert footer.count(BODY_PLACEHOLDER) == 1, "the footer repeats the schema metadata once"
        footer, snapshot_index = footer.replace(BODY_PLACEHOLDER, record), None
        if self._pieces is not None:
            snapshot_index = SnapshotIndex(self.length, rows, tombstones, chunks, self._pieces.pieces())
            index_bytes = snapshot_index.encode()
            index_record = IndexRecord.of(index_bytes, self.length + len(_END_OF_STREAM)).encode()
            assert footer.count(INDEX_PLACEHOLDER) == 1, "the footer repeats the schema metadata once"
            # Arrow finds the footer from the file's end, and batches by their offsets: the index does not disturb it.
            footer_rest = footer[len(_END_OF_STREAM) :].replace(INDEX_PLACEHOLDER, index_record)
            footer = _END_OF_STREAM + index_bytes + footer_rest
        self._target.write(footer)
        return snapshot_index

    def flush(self) -> None:
        self._target.flush()

    def close(self) -> None:
        self.closed = True

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        return self.length + len(self._footer or b"")


def write_sealed(
    target: IO[bytes],
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    algorithm: str,
    tombstones: Callable[[pa.RecordBatch], int] = lambda batch: 0,
) -> SnapshotIndex | None:
    """Write a sealed file to an open binary file; return its index, if it has one."""
    indexed = INDEX_KEY in (schema.metadata or {})
    sink = _HashingSink(target, algorithm, indexed)
    chunks: list[IndexedChunk] = []
    rows = deleted = written = 0
    # No threads for compression: each core has its own task, and most deltas are small.
    options = pa.ipc.IpcWriteOptions(compression="lz4" if algorithm == BLAKE2B else None, use_threads=False)
    with pa.PythonFile(sink, mode="w") as file:
        writer = pa.ipc.new_file(file, schema, options=options)
        for batch in batches:
            rows += batch.num_rows
            deleted += tombstones(batch)
            before = sink.length
            writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))
            if indexed and batch.num_rows:
                file.flush()
                # Arrow writes the schema with the first batch.
                offset = before if written else sink.schema_end
                chunks.append(_describe_chunk(batch, offset, sink.length - offset))
            written += 1
        if not written:
            # Without any batch the schema would come only with the footer.
            writer.write_batch(pa.RecordBatch.from_pylist([], schema=schema))
        file.flush()
        sink.begin_footer()
        writer.close()
        file.flush()
        return sink.finish(rows, deleted, tuple(chunks))
    raise AssertionError("unreachable: closing the file lets errors through")


def _describe_chunk(batch: pa.RecordBatch, offset: int, size_bytes: int) -> IndexedChunk:
    run = describe(batch, size_bytes, 0, offset)
    return IndexedChunk(
        offset, size_bytes, run.rows, run.tombstones, run.hash_min, run.hash_max, run.timeout_min, run.timeout_max
    )


@dataclass(frozen=True)
class VerifiedBody:
    """The metadata of a file whose body has the checksum that the file announces.

    Parameters
    ----------
    record
        The body record in the footer.
    blocks
        CRC-32 of each block of the body, if its checksum is made of these.
    index
        Its index, if it has one.
    """

    record: BodyRecord
    blocks: tuple[int, ...]
    index: SnapshotIndex | None


@dataclass(frozen=True)
class SealedBody:
    """A file whose body has the checksum that it announces.

    Parameters
    ----------
    record
        The body record in the footer.
    blocks
        CRC-32 of each block of the body, if its checksum is made of these.
    reader
        Its record batches.
    index
        Its index, if it has one.
    """

    record: BodyRecord
    blocks: tuple[int, ...]
    reader: pa.RecordBatchReader
    index: SnapshotIndex | None


def open_sealed(file: pa.NativeFile, where: str) -> SealedBody:
    """Check the body of a file, and open it."""
    try:
        metadata = verify_body(file, where)
        record = metadata.record
        # Read the file as a stream, up to the end of the checked body: Arrow does not see unchecked bytes or the
        # footer's offsets.
        body = file.get_stream(len(PADDED_MAGIC), record.length - len(PADDED_MAGIC))
        # Passing a small file's columns to threads takes longer than reading them.
        options = pa.ipc.IpcReadOptions(use_threads=record.length >= _THREADS_BYTES_MIN)
        return SealedBody(record, metadata.blocks, pa.ipc.open_stream(body, options=options), metadata.index)
    except StateError:
        raise
    except NOT_ARROW as error:
        raise CorruptFileError(f"{where} is not the Arrow file that its header announces: {error}") from error


def verify_body(file: pa.NativeFile, where: str) -> VerifiedBody:
    """Check the checksums of a file's body and index; return its metadata."""
    size = file.size()
    if size < len(PADDED_MAGIC) or file.read_at(len(PADDED_MAGIC), 0) != PADDED_MAGIC:
        raise CorruptFileError(f"{where} is not an Arrow file: it is damaged or was not finished")
    end = _End(lambda start, end: file.read_at(end - start, start), size, where)
    record, blocks = end.body, []
    if record.algorithm == BLOCKCRC:
        blocks = block_crcs(file, record.length)
        digest_found = digest_crcs(blocks)
    else:
        digest = hashlib.blake2b(digest_size=16)
        for at in range(0, record.length, BLOCK_BYTES):
            digest.update(file.read_at(min(BLOCK_BYTES, record.length - at), at))
        digest_found = digest.hexdigest()
    if digest_found != record.digest:
        raise CorruptFileError(f"the body of {where} fails its checksum")
    _refuse_other_codecs(file, record, where)
    return VerifiedBody(record, tuple(blocks), end.index())


def _refuse_other_codecs(file: pa.NativeFile, record: BodyRecord, where: str) -> None:
    """Refuse a body with another compression than files of its kind have, before Arrow allocates memory for it."""
    allowed = (None, LZ4_FRAME) if record.algorithm == BLAKE2B else (None,)
    at = len(PADDED_MAGIC)
    while at < record.length:
        head = read_message_head(lambda start, size: file.read_at(size, start), at, where)
        if head.codec not in allowed:
            raise CorruptFileError(
                f"{where} is compressed with Arrow's codec {head.codec}, which spark_state_ext does not use here: it "
                "did not write this file"
            )
        at += head.metadata_bytes + head.body_bytes


def block_crcs(file: pa.NativeFile, length: int) -> list[int]:
    """Return the CRC-32 of each block of a body; several blocks are read in parallel."""

    def crc(at: int) -> int:
        return zlib.crc32(file.read_at(min(BLOCK_BYTES, length - at), at))

    starts = range(0, length, BLOCK_BYTES)
    if len(starts) < 4:
        return [crc(at) for at in starts]
    return map_in_parallel("check", _CHECKING_THREADS, crc, starts)


class _End:
    """The end of a file: its footer, and the index before it if there is one; found by the text of their records."""

    def __init__(self, read: Callable[[int, int], bytes], size: int, where: str) -> None:
        self._read = read
        self._where = where
        self._begin = max(0, size - _FOOTER_BYTES)
        self._data = read(self._begin, size)
        if len(self._data) < _TAIL.size or not self._data.endswith(_MAGIC):
            raise _unfinished_error(where)
        footer_bytes, _ = _TAIL.unpack(self._data[-_TAIL.size :])
        if not 0 < footer_bytes <= min(size - _TAIL.size, _FOOTER_BYTES_MAX):
            raise _unfinished_error(where)
        self._footer_at = size - _TAIL.size - footer_bytes
        footer = self._bytes(self._footer_at, size - _TAIL.size)
        self.body = BodyRecord.find(footer, where)
        if not len(PADDED_MAGIC) < self.body.length <= self._footer_at:
            raise CorruptFileError(f"{where} announces a body of {self.body.length} bytes, but has {size} in all")
        self._index = IndexRecord.find(footer)

    def index(self) -> SnapshotIndex | None:
        record, body = self._index, self.body
        if record is None:
            return None
        begin = body.length + len(_END_OF_STREAM)
        if record.offset != begin or record.offset + record.size_bytes != self._footer_at:
            raise CorruptFileError(f"{self._where} announces an index that is not between body and footer")
        index = SnapshotIndex.decode(self._bytes(begin, self._footer_at), record, body.digest, self._where)
        if (index.body_bytes, index.rows, index.tombstones) != (body.length, body.rows, body.tombstones):
            raise CorruptFileError(f"the index of {self._where} belongs to another body than the file announces")
        return index

    def _bytes(self, start: int, end: int) -> bytes:
        """Return a part of the file, from the bytes that were read already if they contain it."""
        if start >= self._begin:
            return self._data[start - self._begin : end - self._begin]
        return self._read(start, end)


def read_announced_body(read: Callable[[int, int], bytes], size: int, where: str) -> BodyRecord:
    """Return the body record of a file without reading its body."""
    return _End(read, size, where).body


def read_announced_index(
    read: Callable[[int, int], bytes], size: int, where: str
) -> tuple[BodyRecord, SnapshotIndex | None]:
    """Return the body record of a file, and its index if it has one; this mostly takes one read of fixed size."""
    end = _End(read, size, where)
    return end.body, end.index()


def check_form(header: LineageHeader, record: BodyRecord, index: SnapshotIndex | None, where: str) -> None:
    """Raise an error if a file's kind of checksum, or having an index or not, does not match its format."""
    if header.digest != record.algorithm:
        raise CorruptFileError(f"{where} has another kind of checksum than its format requires")
    if header.has_index != (index is not None):
        raise CorruptFileError(f"{where} has format {header.format}, but its footer has another one: it is damaged")


def _unfinished_error(where: str) -> CorruptFileError:
    return CorruptFileError(f"{where} does not end as an Arrow file: it is damaged or was not finished")
