"""Opens one checkpoint file in memory: maps it if it is on a local disk, checks every byte, and reads it in place.

A named file is never rewritten, so its map stays valid, even if the file is deleted. Truncating a mapped file kills the
process (SIGBUS). On disks where that may happen, use ``memory_map=False``.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from arrow_schemas.blocks import BLOCK_BYTES, digest_crcs
from arrow_schemas.equality import HashArray
from arrow_schemas.evolution import conform
from arrow_schemas.lineage import BLOCKCRC, BodyRecord, LineageHeader, file_name
from arrow_schemas.row import KEY_HASH, RowSchema
from arrow_schemas.snapshot_index import SnapshotIndex
from spark_state_ext.errors import CorruptFileError, LineageError, StateError
from spark_state_ext.files.folder import Folder, Readable
from spark_state_ext.files.sealed_body import NOT_ARROW, PADDED_MAGIC, check_form, read_announced_index
from spark_state_ext.restore.load_plan import Fetch
from spark_state_ext.worker.spill import translate_local_errors
from spark_state_ext.worker.threads import map_in_parallel

__all__ = ["Body", "Scratch", "read_hashes", "open_body"]

_CHECKING_THREADS = 4
_PARALLEL_BLOCKS_MIN = 4
_IN_MEMORY_BYTES_MAX = 64 << 20


@dataclass(frozen=True)
class Scratch:
    """Settings for copies of remote files, and for memory mapping.

    Parameters
    ----------
    local_dir
        Local folder for copies; None: Spark's first scratch folder, or the machine's.
    memory_map
        True: map files that are on a local disk. False: read each file into memory.
    """

    local_dir: str | None = None
    memory_map: bool = True

    def folder(self) -> Path:
        """Return the folder for copies; create it if it is missing."""
        # Imported here because it imports a lot, and a lookup should start fast.
        from spark_state_ext.worker.local_folders import scratch_folder

        return scratch_folder(self.local_dir)


class Body:
    """The rows of a checkpoint file whose checksum was verified."""

    def __init__(self, data: pa.Buffer, where: str, fetch: Fetch, schema: RowSchema) -> None:
        self.size_bytes = data.size
        self._schema = schema
        self._where = where
        self._record, index = _check_body(data, where)
        length = self._record.length
        # Only the bytes that the checksum covers: Arrow must not read unchecked bytes or the footer's offsets.
        self._body = data.slice(len(PADDED_MAGIC), length - len(PADDED_MAGIC))
        try:
            self.header = LineageHeader.decode(self._reader().schema.metadata, where)
        except StateError:
            raise
        except NOT_ARROW as error:
            raise self._not_arrow(error) from error
        check_form(self.header, self._record, index, where)
        if (self.header.ref, self.header.kind) != (fetch.ref, fetch.kind):
            raise LineageError(f"{where} contains the {self.header.kind} of checkpoint {self.header.ref}")

    @property
    def rows(self) -> int:
        """Number of rows in the file."""
        return self._record.rows

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows in run order, without a copy if the file is not compressed."""
        rows = 0
        try:
            for batch in self._reader():
                batch.validate()
                rows += batch.num_rows
                if batch.num_rows:
                    yield conform(batch.replace_schema_metadata(None), self._schema)
        except StateError:
            raise
        except NOT_ARROW as error:
            raise self._not_arrow(error) from error
        if rows != self._record.rows:
            raise CorruptFileError(f"{self._where} has {rows} rows, but its footer says {self._record.rows}")

    def find_rows(self, key_hash: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows with one hash; of the other batches, only the first and last hash are read."""
        for batch in self.batches():
            hashes = read_hashes(batch)
            if int(hashes[0]) <= key_hash <= int(hashes[-1]):
                low = int(np.searchsorted(hashes, np.uint64(key_hash), side="left"))
                high = int(np.searchsorted(hashes, np.uint64(key_hash), side="right"))
                if low < high:
                    yield batch.slice(low, high - low)
            elif int(hashes[0]) > key_hash:
                return

    def _reader(self) -> pa.RecordBatchReader:
        return pa.ipc.open_stream(self._body)

    def _not_arrow(self, error: Exception) -> CorruptFileError:
        return CorruptFileError(f"{self._where} is not the Arrow file that its header describes: {error}")


def read_hashes(batch: pa.RecordBatch) -> HashArray:
    """Return the hash column of a batch, without a copy."""
    column = batch.column(batch.schema.get_field_index(KEY_HASH))
    # `to_numpy` would import pandas, which takes longer than a whole lookup.
    return np.frombuffer(column.buffers()[1], np.uint64, len(column), column.offset * 8)


def open_body(files: Readable, fetch: Fetch, folder: Folder, schema: RowSchema, scratch: Scratch) -> Body:
    """Open and check one file of a load plan."""
    name = file_name(fetch.ref, fetch.kind)
    where = files.where(name)
    if scratch.memory_map and folder.is_local and where == folder.where(name):
        return Body(folder.mapped(name), where, fetch, schema)
    return Body(_copy_to_memory(files, name, scratch), where, fetch, schema)


def _copy_to_memory(files: Readable, name: str, scratch: Scratch) -> pa.Buffer:
    if files.size(name) <= _IN_MEMORY_BYTES_MAX or not scratch.memory_map:
        return pa.py_buffer(files.get(name))
    # Mapped from a copy that is already deleted: the disk space is freed when the map is closed.
    folder = scratch.folder()
    with translate_local_errors(folder), tempfile.TemporaryDirectory(dir=folder) as temporary:
        copy = os.path.join(temporary, name)
        files.get_file(name, copy)
        with pa.memory_map(copy) as file:
            return file.read_buffer()
    raise AssertionError("unreachable: local_errors raises what it catches")


def _check_body(data: pa.Buffer, where: str) -> tuple[BodyRecord, SnapshotIndex | None]:
    """Check the body's checksum and return the file's body record, and its index if it has one."""
    view = memoryview(data)
    if bytes(view[: len(PADDED_MAGIC)]) != PADDED_MAGIC:
        raise CorruptFileError(f"{where} is not an Arrow file: it is damaged or incomplete")
    record, index = read_announced_index(lambda start, end: bytes(view[start:end]), len(view), where)
    if record.algorithm == BLOCKCRC:
        digest = digest_crcs(_compute_block_crcs(view[: record.length]))
    else:
        digest = hashlib.blake2b(view[: record.length], digest_size=16).hexdigest()
    if digest != record.digest:
        raise CorruptFileError(f"the body of {where} fails its checksum")
    return record, index


def _compute_block_crcs(body: memoryview) -> list[int]:
    blocks = [body[start : start + BLOCK_BYTES] for start in range(0, len(body), BLOCK_BYTES)]
    if len(blocks) < _PARALLEL_BLOCKS_MIN:
        return [zlib.crc32(block) for block in blocks]
    return map_in_parallel("check", _CHECKING_THREADS, zlib.crc32, blocks)
