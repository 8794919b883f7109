"""One checkpoint file as memory: mapped where it lies on a local disk, checked to the last byte, and read in place.

A file is never written again once it has its name, so a map of it stays what it was; deleting the file does not end the
map. Only who cuts a file short while it is mapped ends the process (SIGBUS): such disks are read without maps, with
``memory_map=False``.
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

from arrow_schemas.blocks import BLOCK_BYTES, digest_of
from arrow_schemas.equality import HashArray
from arrow_schemas.evolution import conform
from arrow_schemas.lineage import BLOCKCRC, BodyRecord, LineageHeader, file_name
from arrow_schemas.row import KEY_HASH, RowSchema
from arrow_schemas.snapshot_index import SnapshotIndex
from spark_state_ext.errors import CorruptFileError, LineageError, StateError
from spark_state_ext.files.folder import Folder, Readable
from spark_state_ext.files.sealed_body import NOT_ARROW, PADDED_MAGIC, announced_index, check_form
from spark_state_ext.restore.load_plan import Fetch
from spark_state_ext.worker.spill import local_errors
from spark_state_ext.worker.threads import side_by_side

__all__ = ["Body", "Scratch", "hashes_in", "opened"]

_CHECKING_THREADS = 4
_BLOCKS_SIDE_BY_SIDE_MIN = 4
_IN_MEMORY_BYTES_MAX = 64 << 20


@dataclass(frozen=True)
class Scratch:
    """Where files from elsewhere are copied to, and whether files are mapped.

    Parameters
    ----------
    local_dir
        Local folder; None: Spark's first folder for scratch, or the machine's.
    memory_map
        Files on a local disk are mapped; else each is read into memory.
    """

    local_dir: str | None = None
    memory_map: bool = True

    def folder(self) -> Path:
        """The folder, made where it is not there."""
        # Imported where it is needed, as it brings much along and a lookup is to begin fast.
        from spark_state_ext.worker.local_folders import scratch_folder

        return scratch_folder(self.local_dir)


class Body:
    """The rows of a checkpoint file whose bytes were checked."""

    def __init__(self, data: pa.Buffer, where: str, fetch: Fetch, schema: RowSchema) -> None:
        self.size_bytes = data.size
        self._schema = schema
        self._where = where
        self._record, index = _checked(data, where)
        length = self._record.length
        # A stream up to where the checksum reaches: Arrow sees no unchecked byte, nor the footer's offsets.
        self._body = data.slice(len(PADDED_MAGIC), length - len(PADDED_MAGIC))
        try:
            self.header = LineageHeader.decode(self._reader().schema.metadata, where)
        except StateError:
            raise
        except NOT_ARROW as error:
            raise self._not_arrow(error) from error
        check_form(self.header, self._record, index, where)
        if (self.header.ref, self.header.kind) != (fetch.ref, fetch.kind):
            raise LineageError(f"{where} holds the {self.header.kind} of checkpoint {self.header.ref}")

    @property
    def rows(self) -> int:
        """Rows in the file."""
        return self._record.rows

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows, in run order; without a copy where the file is not compressed."""
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
            raise CorruptFileError(f"{self._where} holds {rows} rows and announces {self._record.rows}")

    def with_hash(self, wanted: int) -> Iterator[pa.RecordBatch]:
        """The rows of one hash; of batches that cannot have it no column is touched but two hashes."""
        for batch in self.batches():
            hashes = hashes_in(batch)
            if int(hashes[0]) <= wanted <= int(hashes[-1]):
                low = int(np.searchsorted(hashes, np.uint64(wanted), side="left"))
                high = int(np.searchsorted(hashes, np.uint64(wanted), side="right"))
                if low < high:
                    yield batch.slice(low, high - low)
            elif int(hashes[0]) > wanted:
                return

    def _reader(self) -> pa.RecordBatchReader:
        return pa.ipc.open_stream(self._body)

    def _not_arrow(self, error: Exception) -> CorruptFileError:
        return CorruptFileError(f"{self._where} is not the Arrow file that its header announces: {error}")


def hashes_in(batch: pa.RecordBatch) -> HashArray:
    """The hash column of a batch, without a copy."""
    column = batch.column(batch.schema.get_field_index(KEY_HASH))
    # Not `to_numpy`, which imports pandas: that takes longer than a whole lookup.
    return np.frombuffer(column.buffers()[1], np.uint64, len(column), column.offset * 8)


def opened(files: Readable, fetch: Fetch, folder: Folder, schema: RowSchema, scratch: Scratch) -> Body:
    """Open and check one file of a load plan."""
    name = file_name(fetch.ref, fetch.kind)
    where = files.where(name)
    if scratch.memory_map and folder.is_local and where == folder.where(name):
        return Body(folder.mapped(name), where, fetch, schema)
    return Body(_copied(files, name, scratch), where, fetch, schema)


def _copied(files: Readable, name: str, scratch: Scratch) -> pa.Buffer:
    if files.size(name) <= _IN_MEMORY_BYTES_MAX or not scratch.memory_map:
        return pa.py_buffer(files.get(name))
    # Mapped from a copy that has no name any more: the disk gives it back when nobody reads it.
    folder = scratch.folder()
    with local_errors(folder), tempfile.TemporaryDirectory(dir=folder) as temporary:
        copy = os.path.join(temporary, name)
        files.get_file(name, copy)
        with pa.memory_map(copy) as file:
            return file.read_buffer()
    raise AssertionError("unreachable: local_errors raises what it catches")


def _checked(data: pa.Buffer, where: str) -> tuple[BodyRecord, SnapshotIndex | None]:
    """The body record of a file, and its index if any, whose body has the checksum that it announces."""
    view = memoryview(data)
    if bytes(view[: len(PADDED_MAGIC)]) != PADDED_MAGIC:
        raise CorruptFileError(f"{where} is no Arrow file: it is damaged or was not finished")
    record, index = announced_index(lambda start, end: bytes(view[start:end]), len(view), where)
    if record.algorithm == BLOCKCRC:
        found = digest_of(_block_crcs(view[: record.length]))
    else:
        found = hashlib.blake2b(view[: record.length], digest_size=16).hexdigest()
    if found != record.digest:
        raise CorruptFileError(f"the body of {where} fails its checksum")
    return record, index


def _block_crcs(body: memoryview) -> list[int]:
    blocks = [body[at : at + BLOCK_BYTES] for at in range(0, len(body), BLOCK_BYTES)]
    if len(blocks) < _BLOCKS_SIDE_BY_SIDE_MIN:
        return [zlib.crc32(block) for block in blocks]
    return side_by_side("check", _CHECKING_THREADS, zlib.crc32, blocks)
