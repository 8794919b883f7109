"""Delta and snapshot files: Arrow IPC files with a lineage header and a checked body.

A file is written in one stream: the header comes first, the body is hashed while it is written, and the footer gets the
counts and the checksum. A reader checks before it trusts: it finds the footer's fixed-width record by its text, hashes
the body, and only then gives the bytes to Arrow. `docs/format.md` specifies both.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pyarrow as pa

from arrow_schemas.evolution import conform
from arrow_schemas.lineage import (
    BLOCKCRC,
    BodyRecord,
    CheckpointRef,
    LineageHeader,
    file_name,
)
from arrow_schemas.row import DELETED, RowSchema
from arrow_schemas.snapshot_index import SnapshotIndex
from spark_state_ext.errors import CorruptFileError, LineageError, StateError
from spark_state_ext.files.folder import Readable
from spark_state_ext.files.sealed_body import (
    NOT_ARROW,
    PADDED_MAGIC,
    SealedBody,
    check_form,
    open_sealed,
    read_announced_body,
    verify_body,
    write_sealed,
)
from spark_state_ext.store.runs import CHUNK_ROWS, split_batches
from spark_state_ext.worker.spill import translate_local_errors

__all__ = [
    "Announced",
    "CheckpointFile",
    "LocalCopy",
    "read_announced",
    "make_checkpoint",
    "open_body",
    "read_checkpoint",
    "read_header",
    "verify_checkpoint",
    "write_checkpoint",
]

# A ranged read of this size holds the header of any ordinary schema and lineage; a longer one begins with its length.
_HEAD_BYTES = 16 << 10
_IN_MEMORY_BYTES_MAX = 64 << 20
# Enough for thousands of columns and the longest lineage.
_HEADER_BYTES_MAX = 64 << 20
# Smaller snapshots go into the LMDB environment, as deltas do: files for thousands of small buckets would be no gain.
_INGESTED_BYTES_MIN = 4 << 20


def write_checkpoint(
    target: IO[bytes], header: LineageHeader, schema: RowSchema, batches: Iterable[pa.RecordBatch]
) -> SnapshotIndex | None:
    """Write one checkpoint file to an open binary file; return its index, if it has one.

    A delta is compressed. A snapshot has the layout of the local store, so that a restore only copies it.
    """
    if header.digest == BLOCKCRC:
        batches = split_batches(batches, CHUNK_ROWS)
    arrow_schema = schema.arrow.with_metadata(header.encode())
    return write_sealed(target, arrow_schema, batches, header.digest, lambda batch: batch.column(DELETED).true_count)


@dataclass(frozen=True)
class LocalCopy:
    """A checked copy of a snapshot, in the layout of the local store.

    Parameters
    ----------
    path
        Path of the copy.
    body_bytes, rows
        Length of its body, and number of its rows.
    blocks
        CRC-32 of each block of the body.
    index
        The index of the body, if it has one.
    """

    path: Path
    body_bytes: int
    rows: int
    blocks: tuple[int, ...]
    index: SnapshotIndex | None


@dataclass(frozen=True)
class CheckpointFile:
    """A checkpoint file that passed its checks.

    Parameters
    ----------
    header
        Its lineage header.
    batches
        Its rows, in run order, in the requested row schema; decoded one batch at a time. Iterating raises
        `CorruptFileError` if they differ from what the header announces.
    size_bytes
        Size of the file.
    copy
        The local copy, if one was requested and may be used instead of `batches`.
    """

    header: LineageHeader
    batches: Iterator[pa.RecordBatch]
    size_bytes: int
    copy: LocalCopy | None = None


def read_checkpoint(
    files: Readable, ref: CheckpointRef, kind: str, schema: RowSchema, scratch: Path, keep: Path | None = None
) -> CheckpointFile:
    """Read and check one checkpoint file; a large file passes through the local folder `scratch`.

    With `keep`, a large file is copied to that path and read from there. The copy stays, for the caller to use or to
    remove.
    """
    name = file_name(ref, kind)
    where = files.where(name)
    file, copied = _open(files, name, scratch, keep)
    body = open_sealed(file, where)
    record = body.record
    header = LineageHeader.decode(body.reader.schema.metadata, where)
    _check_identity(header, ref, kind, where)
    check_form(header, record, body.index, where)
    copy = None
    if copied is not None and body.blocks and body.reader.schema.equals(schema.arrow):
        copy = LocalCopy(copied, record.length, record.rows, body.blocks, body.index)
    return CheckpointFile(header, _check_batches(body.reader, record, schema, where), file.size(), copy)


def make_checkpoint(
    header: LineageHeader, schema: RowSchema, batches: Iterator[pa.RecordBatch], keep: Path
) -> CheckpointFile:
    """Return what `read_checkpoint` would return for a snapshot file of these rows, without writing that file.

    Many rows go to a file at the path `keep`, which is not read again: writing it gave its checksums.
    """
    rows: list[pa.RecordBatch] = []
    size_bytes = 0
    for batch in batches:
        rows.append(batch)
        size_bytes += batch.nbytes
        if size_bytes > _INGESTED_BYTES_MIN:
            break
    else:
        return CheckpointFile(header, iter(rows), size_bytes)
    with translate_local_errors(keep.parent):
        with keep.open("wb") as file:
            index = write_checkpoint(file, header, schema, itertools.chain(rows, batches))
            size_bytes = file.tell()
        assert index is not None, "a new snapshot has an index"
        copy = LocalCopy(keep, index.body_bytes, index.rows, tuple(index.blocks()), index)
        return CheckpointFile(header, iter(()), size_bytes, copy)
    raise AssertionError("unreachable: local_errors raises what it catches")


@contextmanager
def open_body(files: Readable, name: str, scratch: Path) -> Iterator[SealedBody]:
    """Open the body of a file after checking its checksum, to read its rows in the schema that they were written in."""
    where = files.where(name)
    file, _ = _open(files, name, scratch)
    try:
        with file:
            yield open_sealed(file, where)
    except StateError:
        raise
    except NOT_ARROW as error:
        raise CorruptFileError(f"{where} cannot be read: {error}") from error


def verify_checkpoint(files: Readable, ref: CheckpointRef, kind: str, scratch: Path) -> LineageHeader:
    """Check every byte of a file without decoding its rows; return its header."""
    name = file_name(ref, kind)
    where = files.where(name)
    verified_file = verify_body(_open(files, name, scratch)[0], where)
    header = read_header(files, ref, kind)
    check_form(header, verified_file.record, verified_file.index, where)
    return header


def _check_identity(header: LineageHeader, ref: CheckpointRef, kind: str, where: str) -> None:
    if header.ref != ref or header.kind != kind:
        raise LineageError(f"{where} holds the {header.kind} of checkpoint {header.ref}")


def _check_batches(
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
    except NOT_ARROW as error:
        raise CorruptFileError(f"{where} is not the Arrow file that its header announces: {error}") from error
    if rows != record.rows:
        raise CorruptFileError(f"{where} holds {rows} rows, but announces {record.rows}")


def _open(files: Readable, name: str, scratch: Path, keep: Path | None = None) -> tuple[pa.NativeFile, Path | None]:
    """Return an open file, and the path of its copy if that was kept.

    A small file is read into memory; a large one is read from the disk, in place or from an unnamed local copy.
    """
    size = files.size(name)
    if keep is not None and size > _INGESTED_BYTES_MIN:
        with translate_local_errors(keep.parent):
            files.get_file(name, keep)
            return pa.OSFile(str(keep), "r"), keep
    if size <= _IN_MEMORY_BYTES_MAX:
        return pa.BufferReader(pa.py_buffer(files.get(name))), None
    # Never memory-mapped: if a file is truncated while it is read, that must be an error and not end the process.
    file = files.open_local(name)
    if file is not None:
        return file, None
    with translate_local_errors(scratch), tempfile.TemporaryDirectory(dir=scratch) as folder:
        copy = Path(folder) / name
        files.get_file(name, copy)
        return pa.OSFile(str(copy), "r"), None
    raise AssertionError("unreachable: local_errors raises what it catches")


def read_header(files: Readable, ref: CheckpointRef, kind: str) -> LineageHeader:
    """Read only the lineage header of a file, with a ranged read."""
    name = file_name(ref, kind)
    where = files.where(name)
    head = files.get_range(name, 0, _HEAD_BYTES)
    length = int.from_bytes(head[12:16], "little") if len(head) == _HEAD_BYTES else 0
    if _HEAD_BYTES < 16 + length <= _HEADER_BYTES_MAX:
        head = files.get_range(name, 0, 16 + length)
    if not head.startswith(PADDED_MAGIC):
        raise CorruptFileError(f"{where} is not an Arrow file")
    try:
        # After the magic and its padding, an IPC file is an IPC stream, whose first message is the schema.
        schema = pa.ipc.read_schema(pa.py_buffer(head[len(PADDED_MAGIC) :]))
    except (pa.ArrowException, OSError, EOFError) as error:
        raise CorruptFileError(f"the schema of {where} cannot be read: {error}") from error
    header = LineageHeader.decode(schema.metadata, where)
    _check_identity(header, ref, kind, where)
    return header


@dataclass(frozen=True)
class Announced:
    """Header and footer of a checkpoint file, as it announces them.

    Parameters
    ----------
    header
        Its header.
    size_bytes
        Its size.
    body
        The body record in its footer.
    """

    header: LineageHeader
    size_bytes: int
    body: BodyRecord


def read_announced(files: Readable, ref: CheckpointRef, kind: str) -> Announced:
    """Read header and footer of a checkpoint file with two ranged reads, without its body."""
    name = file_name(ref, kind)
    where = files.where(name)
    size = files.size(name)
    header = read_header(files, ref, kind)
    body = read_announced_body(lambda start, end: files.get_range(name, start, end), size, where)
    if header.digest != body.algorithm:
        raise CorruptFileError(f"{where} has another kind of checksum than its format requires")
    return Announced(header, size, body)
