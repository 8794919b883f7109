"""The outer form of our Arrow files: a checked body, an index where there is one, and a footer that tells of both.

Written in one stream: the body is hashed on its way, counts and checksum go into the footer. Read in the order that
trusts nothing: the footer's fixed-width record is found by its text, the body is hashed, and only then does Arrow see
the bytes. `docs/format.md` specifies it.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO, Any

import pyarrow as pa

from arrow_schemas.blocks import BLOCK_BYTES, BlockDigest, PieceDigest, digest_of
from arrow_schemas.ipc_message import LZ4_FRAME, message_at
from arrow_schemas.lineage import BLAKE2B, BLOCKCRC, BODY_PLACEHOLDER, BodyRecord, LineageHeader
from arrow_schemas.snapshot_index import INDEX_KEY, INDEX_PLACEHOLDER, IndexedChunk, IndexRecord, SnapshotIndex
from spark_state_ext.errors import CorruptFileError, StateError
from spark_state_ext.store.runs import describe
from spark_state_ext.worker.threads import side_by_side

__all__ = [
    "NOT_ARROW",
    "PADDED_MAGIC",
    "SealedBody",
    "Verified",
    "announced_body",
    "announced_index",
    "block_crcs",
    "open_sealed",
    "check_form",
    "verified",
    "write_sealed",
]

PADDED_MAGIC = b"ARROW1\0\0"
# What Arrow raises at bytes that have the right checksum and are none of ours all the same.
NOT_ARROW = (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError)
_MAGIC = b"ARROW1"
_TAIL = struct.Struct("<i6s")
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
# What a file begins with: magic and padding, and the first eight bytes of the schema message, the length in them.
_SCHEMA_HEAD = struct.Struct("<8s4xi")
_CHECKING_THREADS = 4
_THREADS_BYTES_MIN = 1 << 20
# The footer of a file of few record batches, with the schema's metadata, is shorter; of others it tells its length.
_FOOTER_BYTES = 64 << 10
_FOOTER_BYTES_MAX = 64 << 20


class _HashingSink:
    """File-like target that hashes the body, writes an index behind it, and then fills the footer's records in."""

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
        """Where the schema message ends, with which the body begins."""
        _, metadata_bytes = _SCHEMA_HEAD.unpack(self._head)
        return _SCHEMA_HEAD.size + int(metadata_bytes)

    def finish(self, rows: int, tombstones: int, chunks: tuple[IndexedChunk, ...]) -> SnapshotIndex | None:
        assert self._footer is not None
        footer = bytes(self._footer)
        assert footer.startswith(_END_OF_STREAM), "Arrow ends the stream before its footer"
        record = BodyRecord(self.length, rows, tombstones, self._digest.hexdigest(), self._algorithm).encode()
        assert footer.count(BODY_PLACEHOLDER) == 1, "the footer repeats the schema metadata once"
        footer, made = footer.replace(BODY_PLACEHOLDER, record), None
        if self._pieces is not None:
            made = SnapshotIndex(self.length, rows, tombstones, chunks, self._pieces.pieces())
            index = made.encode()
            where = IndexRecord.of(index, self.length + len(_END_OF_STREAM)).encode()
            assert footer.count(INDEX_PLACEHOLDER) == 1, "the footer repeats the schema metadata once"
            # Arrow finds the footer from the file's end, and batches by where they begin, so this is in nobody's way.
            rest = footer[len(_END_OF_STREAM) :].replace(INDEX_PLACEHOLDER, where)
            footer = _END_OF_STREAM + index + rest
        self._target.write(footer)
        return made

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
    """Write a file to an open binary file; returns its index, if it has one."""
    indexed = INDEX_KEY in (schema.metadata or {})
    sink = _HashingSink(target, algorithm, indexed)
    chunks: list[IndexedChunk] = []
    rows = deleted = written = 0
    # Columns are compressed one after the other: each core has its task, and most deltas are small.
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
                chunks.append(_indexed(batch, offset, sink.length - offset))
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


def _indexed(batch: pa.RecordBatch, offset: int, size_bytes: int) -> IndexedChunk:
    it = describe(batch, size_bytes, 0, offset)
    return IndexedChunk(
        offset, size_bytes, it.rows, it.tombstones, it.hash_min, it.hash_max, it.timeout_min, it.timeout_max
    )


@dataclass(frozen=True)
class Verified:
    """What a file says of itself whose body is what it announces.

    Parameters
    ----------
    record
        What the footer says of the body.
    blocks
        CRC-32 of each block of the body, where its checksum is made of these.
    index
        Its index; None where it has none.
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
        What the footer says of the body.
    blocks
        CRC-32 of each block of the body, where its checksum is made of these.
    reader
        Its record batches.
    index
        Its index; None where it has none.
    """

    record: BodyRecord
    blocks: tuple[int, ...]
    reader: pa.RecordBatchReader
    index: SnapshotIndex | None


def open_sealed(file: pa.NativeFile, where: str) -> SealedBody:
    """Check the body of a file, and open it."""
    try:
        found = verified(file, where)
        record = found.record
        # The file as a stream, up to where the checksum reaches: Arrow sees no unchecked byte, nor the footer's
        # offsets.
        body = file.get_stream(len(PADDED_MAGIC), record.length - len(PADDED_MAGIC))
        # Handing a small file's columns to threads takes longer than reading them.
        options = pa.ipc.IpcReadOptions(use_threads=record.length >= _THREADS_BYTES_MIN)
        return SealedBody(record, found.blocks, pa.ipc.open_stream(body, options=options), found.index)
    except StateError:
        raise
    except NOT_ARROW as error:
        raise CorruptFileError(f"{where} is not the Arrow file that its header announces: {error}") from error


def verified(file: pa.NativeFile, where: str) -> Verified:
    """What a file says of itself, once its body and its index have the checksums that it announces."""
    size = file.size()
    if size < len(PADDED_MAGIC) or file.read_at(len(PADDED_MAGIC), 0) != PADDED_MAGIC:
        raise CorruptFileError(f"{where} is no Arrow file: it is damaged or was not finished")
    end = _End(lambda start, end: file.read_at(end - start, start), size, where)
    record, blocks = end.body, []
    if record.algorithm == BLOCKCRC:
        blocks = block_crcs(file, record.length)
        found = digest_of(blocks)
    else:
        digest = hashlib.blake2b(digest_size=16)
        for at in range(0, record.length, BLOCK_BYTES):
            digest.update(file.read_at(min(BLOCK_BYTES, record.length - at), at))
        found = digest.hexdigest()
    if found != record.digest:
        raise CorruptFileError(f"the body of {where} fails its checksum")
    _refuse_other_codecs(file, record, where)
    return Verified(record, tuple(blocks), end.index())


def _refuse_other_codecs(file: pa.NativeFile, record: BodyRecord, where: str) -> None:
    """Refuse a body that is compressed in another way than files of its kind are, before Arrow makes room for it."""
    allowed = (None, LZ4_FRAME) if record.algorithm == BLAKE2B else (None,)
    at = len(PADDED_MAGIC)
    while at < record.length:
        head = message_at(lambda start, size: file.read_at(size, start), at, where)
        if head.codec not in allowed:
            raise CorruptFileError(
                f"{where} is compressed with codec {head.codec} of Arrow, which no file of this package is: "
                "spark_state_ext did not write it"
            )
        at += head.metadata_bytes + head.body_bytes


def block_crcs(file: pa.NativeFile, length: int) -> list[int]:
    """CRC-32 of each block of a body, side by side where there are several."""

    def crc(at: int) -> int:
        return zlib.crc32(file.read_at(min(BLOCK_BYTES, length - at), at))

    starts = range(0, length, BLOCK_BYTES)
    if len(starts) < 4:
        return [crc(at) for at in starts]
    return side_by_side("check", _CHECKING_THREADS, crc, starts)


class _End:
    """The end of a file: its footer, and before that its index where it has one; found by the text of their records."""

    def __init__(self, read: Callable[[int, int], bytes], size: int, where: str) -> None:
        self._read = read
        self._where = where
        self._begin = max(0, size - _FOOTER_BYTES)
        self._data = read(self._begin, size)
        if len(self._data) < _TAIL.size or not self._data.endswith(_MAGIC):
            raise _unfinished(where)
        footer_bytes, _ = _TAIL.unpack(self._data[-_TAIL.size :])
        if not 0 < footer_bytes <= min(size - _TAIL.size, _FOOTER_BYTES_MAX):
            raise _unfinished(where)
        self._footer_at = size - _TAIL.size - footer_bytes
        footer = self._bytes(self._footer_at, size - _TAIL.size)
        self.body = BodyRecord.find(footer, where)
        if not len(PADDED_MAGIC) < self.body.length <= self._footer_at:
            raise CorruptFileError(f"{where} announces a body of {self.body.length} bytes and has {size} in all")
        self._index = IndexRecord.find(footer)

    def index(self) -> SnapshotIndex | None:
        record, body = self._index, self.body
        if record is None:
            return None
        begin = body.length + len(_END_OF_STREAM)
        if record.offset != begin or record.offset + record.size_bytes != self._footer_at:
            raise CorruptFileError(f"{self._where} announces an index that does not lie between body and footer")
        index = SnapshotIndex.decode(self._bytes(begin, self._footer_at), record, body.digest, self._where)
        if (index.body_bytes, index.rows, index.tombstones) != (body.length, body.rows, body.tombstones):
            raise CorruptFileError(f"the index of {self._where} is of another body than the file announces")
        return index

    def _bytes(self, start: int, end: int) -> bytes:
        """A part of the file, from what was read already where that has it."""
        if start >= self._begin:
            return self._data[start - self._begin : end - self._begin]
        return self._read(start, end)


def announced_body(read: Callable[[int, int], bytes], size: int, where: str) -> BodyRecord:
    """The body record of a file, whose body is not read."""
    return _End(read, size, where).body


def announced_index(
    read: Callable[[int, int], bytes], size: int, where: str
) -> tuple[BodyRecord, SnapshotIndex | None]:
    """The body record of a file, and its index where it has one; most often by one read of fixed size."""
    end = _End(read, size, where)
    return end.body, end.index()


def check_form(header: LineageHeader, record: BodyRecord, index: SnapshotIndex | None, where: str) -> None:
    """See that a file has the checksum, and the index, that its format has."""
    if header.digest != record.algorithm:
        raise CorruptFileError(f"{where} has a checksum of another kind than its format has")
    if header.has_index != (index is not None):
        raise CorruptFileError(f"{where} is of format {header.format}, and its footer is of another: it is damaged")


def _unfinished(where: str) -> CorruptFileError:
    return CorruptFileError(f"{where} does not end as an Arrow file: it is damaged or was not finished")
