"""Runs whose chunks lie in a file next to the environment: unchanged copies of a snapshot's checkpoint file.

This way, restoring millions of rows only copies one file. Chunks are Arrow IPC record batch messages anyway; the
manifest says where each begins in the file. The file is memory-mapped, so its chunks live as long as the map, longer
than a transaction.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa

from arrow_schemas.blocks import BLOCK_BYTES
from arrow_schemas.snapshot_index import SnapshotIndex
from spark_state_ext.errors import CorruptFileError, CorruptStoreError, MissingRunError
from spark_state_ext.store.local_disk import storage_error
from spark_state_ext.store.runs import Chunk, Run, describe

__all__ = ["check_blocks", "chunks_of", "file_path", "map_file", "read_chunks"]

# Bytes of an Arrow IPC file before its first message: magic and padding.
_FIRST_MESSAGE = 8
_PREFIX = struct.Struct("<Ii")
_CONTINUES = 0xFFFFFFFF


def file_path(folder: Path, run_key: str) -> Path:
    """Return the path of a run's file."""
    return folder / f"base-{run_key}.arrow"


def map_file(folder: Path, run: Run) -> pa.Buffer:
    """Memory-map the file of a run."""
    try:
        with pa.memory_map(str(file_path(folder, run.key))) as file:
            return file.read_buffer()
    except FileNotFoundError as error:
        raise MissingRunError(
            f"run {run.newest} was dropped from the local store while it was read", run.newest
        ) from error
    except OSError as error:
        raise storage_error(folder, error) from error


def check_blocks(data: pa.Buffer, run: Run, chunk: Chunk, checked: set[tuple[str, int]]) -> list[int]:
    """Check the blocks of a chunk that are not in `checked` against their checksums; return and add these blocks."""
    if data.size < run.file_bytes:
        raise CorruptStoreError("a file of the local store is shorter than the manifest says")
    newly_checked = []
    for block in range(chunk.offset // BLOCK_BYTES, (chunk.offset + chunk.size_bytes - 1) // BLOCK_BYTES + 1):
        if (run.key, block) in checked:
            continue
        start = block * BLOCK_BYTES
        if zlib.crc32(memoryview(data)[start : min(start + BLOCK_BYTES, run.file_bytes)]) != run.blocks[block]:
            raise CorruptStoreError("a file of the local store differs from its checksum")
        checked.add((run.key, block))
        newly_checked.append(block)
    return newly_checked


def read_chunks(
    data: pa.Buffer, run: Run, schema: pa.Schema, where: str, index: SnapshotIndex | None = None
) -> tuple[Chunk, ...]:
    """Return the chunks of a run's Arrow IPC file, whose body has been checked already."""
    if index is not None:
        return _read_indexed_chunks(data, index, schema, where)
    view, length, rows = memoryview(data), run.file_bytes, run.rows
    chunks: list[Chunk] = []
    try:
        # The first message is the schema.
        at = _FIRST_MESSAGE + _message_bytes(view, _FIRST_MESSAGE, data)
        while at < length:
            size = _message_bytes(view, at, data)
            batch = pa.ipc.read_record_batch(data.slice(at, size), schema)
            batch.validate()
            if batch.num_rows:
                chunks.append(describe(batch, size, 0, at))
            at += size
    except (pa.ArrowException, OSError, struct.error) as error:
        raise CorruptFileError(f"{where} is not the Arrow file that its header describes: {error}") from error
    rows_found = sum(chunk.rows for chunk in chunks)
    if at != length or rows_found != rows:
        raise CorruptFileError(f"{where} holds {rows_found} rows in {at} bytes, but its footer says {rows} in {length}")
    return tuple(chunks)


def _read_indexed_chunks(data: pa.Buffer, index: SnapshotIndex, schema: pa.Schema, where: str) -> tuple[Chunk, ...]:
    chunks = chunks_of(index)
    try:
        for chunk in chunks:
            batch = pa.ipc.read_record_batch(data.slice(chunk.offset, chunk.size_bytes), schema)
            batch.validate()
            if batch.num_rows != chunk.rows:
                raise pa.ArrowInvalid(f"a chunk has {batch.num_rows} rows instead of {chunk.rows}")
    except (pa.ArrowException, OSError) as error:
        raise CorruptFileError(f"{where} is not the Arrow file that its index describes: {error}") from error
    return chunks


def chunks_of(index: SnapshotIndex) -> tuple[Chunk, ...]:
    """Convert the chunks of a snapshot's index to manifest entries."""
    return tuple(Chunk(**asdict(chunk), crc=0) for chunk in index.chunks)


def _message_bytes(view: memoryview, at: int, data: pa.Buffer) -> int:
    continues, metadata_bytes = _PREFIX.unpack_from(view, at)
    if continues != _CONTINUES or metadata_bytes <= 0:
        raise pa.ArrowInvalid(f"no message at {at}")
    message = pa.ipc.read_message(data.slice(at))
    body_bytes = message.body.size if message.body is not None else 0
    return _PREFIX.size + int(metadata_bytes) + int(body_bytes)
