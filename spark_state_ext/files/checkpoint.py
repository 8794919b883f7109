"""Delta and snapshot files: Arrow IPC files with a lineage header and a checked body.

Written in one stream: header first, body hashed on its way, counts and checksum into the footer. Read in the
order that trusts nothing: the footer's fixed-width record is found by its text, the body is hashed, and only
then does Arrow see the bytes. `docs/format.md` specifies both.
"""

from __future__ import annotations

import hashlib
import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from arrow_schemas.blocks import BLOCK_BYTES, BlockDigest, digest_of
from arrow_schemas.evolution import conform
from arrow_schemas.lineage import (
    BLAKE2B,
    BLOCKCRC,
    BODY_PLACEHOLDER,
    BodyRecord,
    CheckpointRef,
    LineageHeader,
    file_name,
)
from arrow_schemas.row import DELETED, RowSchema
from spark_state_ext.errors import CorruptFileError, LineageError, StateError
from spark_state_ext.files.folder import Readable
from spark_state_ext.store.runs import CHUNK_ROWS, cut
from spark_state_ext.worker.spill import local_errors
from spark_state_ext.worker.threads import side_by_side

__all__ = ["CheckpointFile", "read_checkpoint", "read_header", "verify_checkpoint", "write_checkpoint"]

_MAGIC = b"ARROW1"
_PADDED_MAGIC = b"ARROW1\0\0"
_TAIL = struct.Struct("<i6s")
# A ranged read of this size holds the header of any ordinary schema and lineage; a longer one tells its length.
_HEAD_BYTES = 16 << 10
_IN_MEMORY_BYTES_MAX = 64 << 20
_THREADS_BYTES_MIN = 1 << 20
# Thousands of columns, and a lineage as long as they get.
_HEADER_BYTES_MAX = 64 << 20
_CHECKING_THREADS = 4
# What Arrow raises at bytes that have the right checksum and are none of ours all the same.
_NOT_ARROW = (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError)
# Smaller snapshots go into the environment, as deltas do: a file each for thousands of small buckets is no gain.
_INGESTED_BYTES_MIN = 4 << 20


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


def write_checkpoint(
    target: IO[bytes], header: LineageHeader, schema: RowSchema, batches: Iterable[pa.RecordBatch]
) -> None:
    """Write one checkpoint file to an open binary file.

    A delta is compressed. A snapshot is laid out as the local store will have it, so that restoring it is copying it.
    """
    sink = _HashingSink(target, header.digest)
    rows = tombstones = written = 0
    # Columns are compressed one after the other: each core has its task, and most deltas are small.
    options = pa.ipc.IpcWriteOptions(compression="lz4" if header.digest == BLAKE2B else None, use_threads=False)
    if header.digest == BLOCKCRC:
        batches = cut(batches, CHUNK_ROWS)
    arrow_schema = schema.arrow.with_metadata(header.encode())
    with pa.PythonFile(sink, mode="w") as file:
        writer = pa.ipc.new_file(file, arrow_schema, options=options)
        for batch in batches:
            rows += batch.num_rows
            tombstones += batch.column(DELETED).true_count
            written += 1
            writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=arrow_schema))
        if not written:
            # Arrow writes the schema with the first batch; without any it would come only with the footer.
            writer.write_batch(schema.empty().replace_schema_metadata(arrow_schema.metadata))
        file.flush()
        sink.begin_footer()
        writer.close()
        file.flush()
        sink.finish(rows, tombstones)


@dataclass(frozen=True)
class LocalCopy:
    """A checked copy of a snapshot, laid out as the local store has it.

    Parameters
    ----------
    path
        Where it lies.
    body_bytes, rows
        Length of its body, and number of its rows.
    blocks
        CRC-32 of each block of the body.
    """

    path: Path
    body_bytes: int
    rows: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class CheckpointFile:
    """A checkpoint file that passed its checks.

    Parameters
    ----------
    header
        What it says of itself.
    batches
        Its rows, in run order, conforming to the row schema asked for; decoded one at a time. Iterating raises
        `CorruptFileError` when they are not what the header announces.
    size_bytes
        Size of the file.
    copy
        Where a copy of it lies, if it was asked for and may be used in place of `batches`.
    """

    header: LineageHeader
    batches: Iterator[pa.RecordBatch]
    size_bytes: int
    copy: LocalCopy | None = None


def read_checkpoint(
    files: Readable, ref: CheckpointRef, kind: str, schema: RowSchema, scratch: Path, keep: Path | None = None
) -> CheckpointFile:
    """Read and check one checkpoint file; a large one passes through the local folder `scratch`.

    With `keep`, a large one is copied to that path, and the copy is what is read. It stays there, for the caller to use
    or to remove.

    Raises
    ------
    MissingCheckpointError
        When it does not exist.
    CorruptFileError
        When any check fails.
    """
    name = file_name(ref, kind)
    where = files.where(name)
    file, copied = _open(files, name, scratch, keep)
    try:
        record, blocks = _verified(file, where)
        # The file as a stream, up to where the checksum reaches: Arrow sees no unchecked byte, nor the footer's
        # offsets.
        body = file.get_stream(len(_PADDED_MAGIC), record.length - len(_PADDED_MAGIC))
        # Handing a small file's columns to threads takes longer than reading them.
        options = pa.ipc.IpcReadOptions(use_threads=record.length >= _THREADS_BYTES_MIN)
        reader = pa.ipc.open_stream(body, options=options)
        header = LineageHeader.decode(reader.schema.metadata, where)
    except StateError:
        raise
    except _NOT_ARROW as error:
        raise CorruptFileError(f"{where} is not the Arrow file that its header announces: {error}") from error
    _check_identity(header, ref, kind, where)
    if header.digest != record.algorithm:
        raise CorruptFileError(f"{where} has a checksum of another kind than its format has")
    copy = None
    if copied is not None and blocks and reader.schema.equals(schema.arrow):
        copy = LocalCopy(copied, record.length, record.rows, tuple(blocks))
    return CheckpointFile(header, _checked_batches(reader, record, schema, where), file.size(), copy)


def verify_checkpoint(files: Readable, ref: CheckpointRef, kind: str, scratch: Path) -> LineageHeader:
    """Check a file to the last byte without decoding its rows.

    Raises
    ------
    MissingCheckpointError, CorruptFileError, LineageError
        As `read_checkpoint`.
    """
    name = file_name(ref, kind)
    where = files.where(name)
    _verified(_open(files, name, scratch)[0], where)
    header = read_header(files, ref, kind)
    _check_identity(header, ref, kind, where)
    return header


def _check_identity(header: LineageHeader, ref: CheckpointRef, kind: str, where: str) -> None:
    if header.ref != ref or header.kind != kind:
        raise LineageError(f"{where} holds the {header.kind} of checkpoint {header.ref}")


def _checked_batches(
    reader: pa.RecordBatchReader, record: BodyRecord, schema: RowSchema, where: str
) -> Iterator[pa.RecordBatch]:
    rows = 0
    try:
        for batch in reader:
            batch.validate()
            rows += batch.num_rows
            yield conform(batch.replace_schema_metadata(None), schema)
    except StateError:
        raise
    except _NOT_ARROW as error:
        raise CorruptFileError(f"{where} is not the Arrow file that its header announces: {error}") from error
    if rows != record.rows:
        raise CorruptFileError(f"{where} holds {rows} rows and announces {record.rows}")


def _open(files: Readable, name: str, scratch: Path, keep: Path | None = None) -> tuple[pa.NativeFile, Path | None]:
    """A file to read, and where its copy is when it was kept.

    A small one is read from memory, a large one from the disk: where it lies, or an unnamed local copy.
    """
    size = files.size(name)
    if keep is not None and size > _INGESTED_BYTES_MIN:
        with local_errors(keep.parent):
            files.get_file(name, keep)
            return pa.OSFile(str(keep), "r"), keep
    if size <= _IN_MEMORY_BYTES_MAX:
        return pa.BufferReader(pa.py_buffer(files.get(name))), None
    # Never mapped: what somebody cuts short while it is read must be an error, not the end of the process.
    file = files.open_local(name)
    if file is not None:
        return file, None
    with local_errors(scratch), tempfile.TemporaryDirectory(dir=scratch) as folder:
        copy = Path(folder) / name
        files.get_file(name, copy)
        return pa.OSFile(str(copy), "r"), None
    raise AssertionError("unreachable: local_errors raises what it catches")


def read_header(files: Readable, ref: CheckpointRef, kind: str) -> LineageHeader:
    """Read only the lineage header of a file, with a ranged read.

    Raises
    ------
    MissingCheckpointError
        When the file does not exist.
    CorruptFileError
        When it has no valid header.
    """
    name = file_name(ref, kind)
    where = files.where(name)
    head = files.get_range(name, 0, _HEAD_BYTES)
    length = int.from_bytes(head[12:16], "little") if len(head) == _HEAD_BYTES else 0
    if _HEAD_BYTES < 16 + length <= _HEADER_BYTES_MAX:
        head = files.get_range(name, 0, 16 + length)
    if not head.startswith(_PADDED_MAGIC):
        raise CorruptFileError(f"{where} is no Arrow file")
    try:
        # After the magic and its padding an IPC file goes on as a stream, whose first message is the schema.
        schema = pa.ipc.read_schema(pa.py_buffer(head[len(_PADDED_MAGIC) :]))
    except (pa.ArrowException, OSError, EOFError) as error:
        raise CorruptFileError(f"the schema of {where} cannot be read: {error}") from error
    return LineageHeader.decode(schema.metadata, where)


def _verified(file: pa.NativeFile, where: str) -> tuple[BodyRecord, list[int]]:
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


def _body_record(file: pa.NativeFile, where: str) -> BodyRecord:
    size = file.size()
    tail_at = size - _TAIL.size
    if tail_at < len(_PADDED_MAGIC) or file.read(len(_PADDED_MAGIC)) != _PADDED_MAGIC:
        raise CorruptFileError(f"{where} is no Arrow file: it is damaged or was not finished")
    file.seek(tail_at)
    footer_bytes, magic = _TAIL.unpack(file.read(_TAIL.size))
    if magic != _MAGIC or not 0 < footer_bytes <= tail_at:
        raise CorruptFileError(f"{where} does not end as an Arrow file: it is damaged or was not finished")
    file.seek(tail_at - footer_bytes)
    record = BodyRecord.find(file.read(footer_bytes), where)
    if not len(_PADDED_MAGIC) < record.length <= tail_at - footer_bytes:
        raise CorruptFileError(f"{where} announces a body of {record.length} bytes and has {size} in all")
    return record
