"""The outer form of our Arrow files: a checked body, and a footer that tells its length and checksum.

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

from arrow_schemas.blocks import BLOCK_BYTES, BlockDigest, digest_of
from arrow_schemas.lineage import BLAKE2B, BLOCKCRC, BODY_PLACEHOLDER, BodyRecord
from spark_state_ext.errors import CorruptFileError, StateError
from spark_state_ext.worker.threads import side_by_side

__all__ = [
    "NOT_ARROW",
    "PADDED_MAGIC",
    "SealedBody",
    "announced_body",
    "block_crcs",
    "open_sealed",
    "verified",
    "write_sealed",
]

PADDED_MAGIC = b"ARROW1\0\0"
# What Arrow raises at bytes that have the right checksum and are none of ours all the same.
NOT_ARROW = (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError)
_MAGIC = b"ARROW1"
_TAIL = struct.Struct("<i6s")
_CHECKING_THREADS = 4
_THREADS_BYTES_MIN = 1 << 20
# The footer of a file of few record batches, with the schema's metadata, is shorter; of others it tells its length.
_FOOTER_BYTES = 64 << 10
_FOOTER_BYTES_MAX = 64 << 20


def _digest(algorithm: str) -> Any:
    return hashlib.blake2b(digest_size=16) if algorithm == BLAKE2B else BlockDigest()


class _HashingSink:
    """File-like target that hashes the body and then fills the footer's body record in."""

    def __init__(self, target: IO[bytes], algorithm: str) -> None:
        self._target = target
        self._algorithm = algorithm
        self._digest = _digest(algorithm)
        self._footer: bytearray | None = None
        self.length = 0
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._footer is not None:
            self._footer += view
        else:
            self._target.write(view)
            self._digest.update(view)
            self.length += len(view)
        return len(view)

    def begin_footer(self) -> None:
        self._footer = bytearray()

    def finish(self, rows: int, tombstones: int) -> None:
        assert self._footer is not None
        record = BodyRecord(self.length, rows, tombstones, self._digest.hexdigest(), self._algorithm).encode()
        assert self._footer.count(BODY_PLACEHOLDER) == 1, "the footer repeats the schema metadata once"
        self._target.write(bytes(self._footer).replace(BODY_PLACEHOLDER, record))

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
) -> None:
    """Write a file to an open binary file.

    Parameters
    ----------
    target
        The file.
    schema
        Its schema, whose metadata has `BODY_PLACEHOLDER` under `BODY_KEY`.
    batches
        Its record batches, of any metadata; one without rows is written where there is none.
    algorithm
        Of the checksum: `BLAKE2B`, with which columns are compressed, or `BLOCKCRC`, with which they are not.
    tombstones
        How many of a batch's rows are tombstones.
    """
    sink = _HashingSink(target, algorithm)
    rows = deleted = written = 0
    # Columns are compressed one after the other: each core has its task, and most deltas are small.
    options = pa.ipc.IpcWriteOptions(compression="lz4" if algorithm == BLAKE2B else None, use_threads=False)
    with pa.PythonFile(sink, mode="w") as file:
        writer = pa.ipc.new_file(file, schema, options=options)
        for batch in batches:
            rows += batch.num_rows
            deleted += tombstones(batch)
            written += 1
            writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))
        if not written:
            # Arrow writes the schema with the first batch; without any it would come only with the footer.
            writer.write_batch(pa.RecordBatch.from_pylist([], schema=schema))
        file.flush()
        sink.begin_footer()
        writer.close()
        file.flush()
        sink.finish(rows, deleted)


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
    """

    record: BodyRecord
    blocks: tuple[int, ...]
    reader: pa.RecordBatchReader


def open_sealed(file: pa.NativeFile, where: str) -> SealedBody:
    """Check the body of a file, and open it.

    Parameters
    ----------
    file
        The file.
    where
        How to call it in messages.

    Raises
    ------
    CorruptFileError
        When the body is not what the footer announces, or nothing that Arrow can read.
    """
    try:
        record, blocks = verified(file, where)
        # The file as a stream, up to where the checksum reaches: Arrow sees no unchecked byte, nor the footer's
        # offsets.
        body = file.get_stream(len(PADDED_MAGIC), record.length - len(PADDED_MAGIC))
        # Handing a small file's columns to threads takes longer than reading them.
        options = pa.ipc.IpcReadOptions(use_threads=record.length >= _THREADS_BYTES_MIN)
        return SealedBody(record, tuple(blocks), pa.ipc.open_stream(body, options=options))
    except StateError:
        raise
    except NOT_ARROW as error:
        raise CorruptFileError(f"{where} is not the Arrow file that its header announces: {error}") from error


def verified(file: pa.NativeFile, where: str) -> tuple[BodyRecord, list[int]]:
    """The body record of a file whose body has the checksum that it announces, and CRC-32s by block if it has them."""
    record = _body_record(file, where)
    blocks: list[int] = []
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
    return record, blocks


def block_crcs(file: pa.NativeFile, length: int) -> list[int]:
    """CRC-32 of each block of a body, side by side where there are several."""

    def crc(at: int) -> int:
        return zlib.crc32(file.read_at(min(BLOCK_BYTES, length - at), at))

    starts = range(0, length, BLOCK_BYTES)
    if len(starts) < 4:
        return [crc(at) for at in starts]
    return side_by_side("check", _CHECKING_THREADS, crc, starts)


def announced_body(read: Callable[[int, int], bytes], size: int, where: str) -> BodyRecord:
    """The body record of a file, whose body is not read.

    Parameters
    ----------
    read
        Gives the bytes from one place of the file to another.
    size
        Size of the file, bytes.
    where
        How to call it in messages.

    Raises
    ------
    CorruptFileError
        When there is none.
    """
    begin = max(0, size - _FOOTER_BYTES)
    end = read(begin, size)
    if len(end) < _TAIL.size or not end.endswith(_MAGIC):
        raise _unfinished(where)
    footer_bytes, _ = _TAIL.unpack(end[-_TAIL.size :])
    if not 0 < footer_bytes <= min(size - _TAIL.size, _FOOTER_BYTES_MAX):
        raise _unfinished(where)
    if footer_bytes + _TAIL.size > len(end):
        end = read(size - _TAIL.size - footer_bytes, size)
    footer = end[len(end) - _TAIL.size - footer_bytes : -_TAIL.size]
    return _whole(BodyRecord.find(footer, where), size, size - _TAIL.size - footer_bytes, where)


def _body_record(file: pa.NativeFile, where: str) -> BodyRecord:
    size = file.size()
    tail_at = size - _TAIL.size
    if tail_at < len(PADDED_MAGIC) or file.read(len(PADDED_MAGIC)) != PADDED_MAGIC:
        raise CorruptFileError(f"{where} is no Arrow file: it is damaged or was not finished")
    file.seek(tail_at)
    footer_bytes, magic = _TAIL.unpack(file.read(_TAIL.size))
    if magic != _MAGIC or not 0 < footer_bytes <= tail_at:
        raise _unfinished(where)
    file.seek(tail_at - footer_bytes)
    return _whole(BodyRecord.find(file.read(footer_bytes), where), size, tail_at - footer_bytes, where)


def _unfinished(where: str) -> CorruptFileError:
    return CorruptFileError(f"{where} does not end as an Arrow file: it is damaged or was not finished")


def _whole(record: BodyRecord, size: int, footer_at: int, where: str) -> BodyRecord:
    if not len(PADDED_MAGIC) < record.length <= footer_at:
        raise CorruptFileError(f"{where} announces a body of {record.length} bytes and has {size} in all")
    return record
