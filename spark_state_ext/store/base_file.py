"""A run whose chunks lie in a file beside the environment: a snapshot, as it was copied from its checkpoint file.

Restoring millions of rows is then copying one file. The record batch messages of an Arrow IPC file are what chunks are
anyway; the manifest says where each begins. The file is mapped, so its chunks live as long as the map, longer than a
transaction.
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

__all__ = ["check_blocks", "chunks_in", "chunks_of", "file_of", "mapped"]

# What is before the first message of an Arrow IPC file: magic and padding.
_FIRST_MESSAGE = 8
_PREFIX = struct.Struct("<Ii")
_CONTINUES = 0xFFFFFFFF


def file_of(folder: Path, run_key: str) -> Path:
    """Where the file of a run lies."""
    return folder / f"base-{run_key}.arrow"


def mapped(folder: Path, run: Run) -> pa.Buffer:
    """The file of a run as memory."""
    try:
        with pa.memory_map(str(file_of(folder, run.key))) as file:
            return file.read_buffer()
    except FileNotFoundError as error:
        raise MissingRunError(
            f"run {run.newest} was dropped from the local store while it was read", run.newest
        ) from error
    except OSError as error:
        raise storage_error(folder, error) from error


def check_blocks(data: pa.Buffer, run: Run, chunk: Chunk, checked: set[tuple[str, int]]) -> list[int]:
    """Compare the blocks that a chunk lies in with their checksums, those that were not compared before."""
    if data.size < run.file_bytes:
        raise CorruptStoreError("a file of the local store is shorter than it was")
    compared = []
    for block in range(chunk.offset // BLOCK_BYTES, (chunk.offset + chunk.size_bytes - 1) // BLOCK_BYTES + 1):
        # As chunks of runs inside the environment are noted by their number.
        if (run.key, block) in checked:
            continue
        start = block * BLOCK_BYTES
        if zlib.crc32(memoryview(data)[start : min(start + BLOCK_BYTES, run.file_bytes)]) != run.blocks[block]:
            raise CorruptStoreError("a file of the local store differs from its checksum")
        checked.add((run.key, block))
        compared.append(block)
    return compared


def chunks_in(
    data: pa.Buffer, run: Run, schema: pa.Schema, where: str, index: SnapshotIndex | None = None
) -> tuple[Chunk, ...]:
    """The chunks of the Arrow IPC file of a run, whose body was checked before."""
    if index is not None:
        return _indexed(data, index, schema, where)
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
        raise CorruptFileError(f"{where} is not the Arrow file that its header announces: {error}") from error
    found = sum(chunk.rows for chunk in chunks)
    if at != length or found != rows:
        raise CorruptFileError(f"{where} holds {found} rows in {at} bytes and announces {rows} in {length}")
    return tuple(chunks)


def _indexed(data: pa.Buffer, index: SnapshotIndex, schema: pa.Schema, where: str) -> tuple[Chunk, ...]:
    chunks = chunks_of(index)
    try:
        for chunk in chunks:
            batch = pa.ipc.read_record_batch(data.slice(chunk.offset, chunk.size_bytes), schema)
            batch.validate()
            if batch.num_rows != chunk.rows:
                raise pa.ArrowInvalid(f"{batch.num_rows} rows are where {chunk.rows} should be")
    except (pa.ArrowException, OSError) as error:
        raise CorruptFileError(f"{where} is not the Arrow file that its index announces: {error}") from error
    return chunks


def chunks_of(index: SnapshotIndex) -> tuple[Chunk, ...]:
    """What the manifest keeps of the chunks of an index."""
    return tuple(Chunk(**asdict(it), crc=0) for it in index.chunks)


def _message_bytes(view: memoryview, at: int, data: pa.Buffer) -> int:
    continues, metadata_bytes = _PREFIX.unpack_from(view, at)
    if continues != _CONTINUES or metadata_bytes <= 0:
        raise pa.ArrowInvalid(f"no message at {at}")
    message = pa.ipc.read_message(data.slice(at))
    body_bytes = message.body.size if message.body is not None else 0
    return _PREFIX.size + int(metadata_bytes) + int(body_bytes)
