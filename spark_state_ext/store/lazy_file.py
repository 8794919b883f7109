"""The file of a run that is restored lazily: a snapshot's body with holes, and what is known of which parts are there.

A piece is compared with its checksum, written, and then marked, a byte each: whoever dies in between leaves a piece
that counts as absent. Processes that share the store write the same bytes to the same places and mark only what they
have written, so none of them undoes what another did. Once every piece is marked, the marks go, and the run is as if
its file had been fetched whole.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from arrow_schemas.blocks import PIECE_BYTES, digest_of
from arrow_schemas.equality import IndexArray
from arrow_schemas.ipc_message import message_at
from arrow_schemas.snapshot_index import IndexRecord, SnapshotIndex
from arrow_schemas.standby import BucketKey
from spark_state_ext.errors import CorruptFileError, CorruptStoreError, MissingRunError
from spark_state_ext.store.base_file import file_of, mapped
from spark_state_ext.store.local_disk import storage_error
from spark_state_ext.worker.background import Foreground, Runner
from spark_state_ext.worker.removal import remove_file

if TYPE_CHECKING:
    from spark_state_ext.store.runs import Run

__all__ = ["FetchPieces", "LazyFile", "LazyOptions", "PieceGiver", "marks_of"]

_MAGIC = b"SSEL"
# Magic, CRC-32 of the index, its bytes.
_HEAD = struct.Struct("<4sIQ")


class PieceGiver(Protocol):
    """Who may have pieces of a file beside the store (`spark_state_ext.peers`)."""

    def give(
        self,
        key: BucketKey,
        lazy: LazyFile,
        ranges: Sequence[tuple[int, int]],
        beside: bool,
        raise_if_closed: Callable[[], None],
    ) -> None:
        """Put pieces of a bucket's file there, as far as they are had: ranges of their numbers.

        With `beside` nobody waits for them. What `raise_if_closed` raises ends it.
        """
        ...

    def note_store(self, requests: int, size_bytes: int, took_s: float) -> None:
        """How long the store took where nobody waited for it."""
        ...


@dataclass(frozen=True)
class LazyOptions:
    """Whether and how a call restores lazily.

    Parameters
    ----------
    bytes_min
        Smallest snapshot of which only what is asked for is fetched.
    fill_bytes_per_s_max
        How much is fetched beside batches.
    runner
        What that runs in.
    peers
        Who is asked before the store; None: nobody.
    foreground
        What batches of the process wait for: what is fetched beside them stands back meanwhile.
    """

    bytes_min: int
    fill_bytes_per_s_max: int
    runner: Runner
    peers: PieceGiver | None = None
    foreground: Foreground = field(default_factory=Foreground)


def marks_of(folder: Path, run_key: str) -> Path:
    """Where the marks of a run's file lie, while it is not whole."""
    return folder / f"base-{run_key}.lazy"


class LazyFile:
    """Get one with `LazyFile.opened`."""

    def __init__(
        self, folder: Path, run: Run, index: SnapshotIndex, data: FileIO, marks: FileIO, marks_at: int
    ) -> None:
        self._folder = folder
        self._data, self._marks = data, marks
        self._marks_at = marks_at
        self.run = run
        self.index = index
        self.buffer = mapped(folder, run)
        self.pieces = len(index.pieces)
        # By this process: since it was written here, or before it was looked at first.
        self._compared = np.zeros(self.pieces, dtype=np.bool_)

    @staticmethod
    def begin(folder: Path, run_key: str, path: Path, index: SnapshotIndex) -> None:
        """Make the two files, the larger of them at a path that is still to be moved."""
        data = index.encode()
        try:
            with path.open("wb") as file:
                file.truncate(index.body_bytes)
            with marks_of(folder, run_key).open("wb") as file:
                file.write(_HEAD.pack(_MAGIC, zlib.crc32(data), len(data)) + data + bytes(len(index.pieces)))
        except OSError as error:
            raise storage_error(folder, error) from error

    @staticmethod
    def opened(folder: Path, run: Run) -> LazyFile | None:
        """The file of a run; None when it is whole."""
        try:
            marks = FileIO(marks_of(folder, run.key), "r+")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error(folder, error) from error
        try:
            data = FileIO(file_of(folder, run.key), "r+")
        except FileNotFoundError as error:
            raise MissingRunError(f"run {run.newest} was dropped from the local store", run.newest) from error
        except OSError as error:
            raise storage_error(folder, error) from error
        head = os.pread(marks.fileno(), _HEAD.size, 0)
        magic, crc, size = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0, 0)
        # No more than there is, whatever a damaged head says.
        size_max = os.fstat(marks.fileno()).st_size
        stored = os.pread(marks.fileno(), min(size, size_max), _HEAD.size) if magic == _MAGIC else b""
        where = f"the file of run {run.newest} in the local store"
        try:
            if len(stored) != size or zlib.crc32(stored) != crc:
                raise CorruptFileError(f"the index of {where} fails its checksum")
            # The manifest has the blocks, so an index of another body is none.
            index = SnapshotIndex.decode(stored, IndexRecord.of(stored, 0), digest_of(run.blocks), where)
        except CorruptFileError as error:
            raise CorruptStoreError(str(error)) from error
        return LazyFile(folder, run, index, data, marks, _HEAD.size + size)

    def absent(self, first: int = 0, count: int | None = None) -> IndexArray:
        """The pieces of a range that are not marked, ascending."""
        end = self.pieces if count is None else min(first + count, self.pieces)
        marks = os.pread(self._marks.fileno(), end - first, self._marks_at + first)
        if len(marks) != end - first:
            raise CorruptStoreError("the marks of a file of the local store are fewer than they were")
        found: IndexArray = np.flatnonzero(np.frombuffer(marks, np.uint8) != 1) + first
        return found

    def lacking(self, wanted: IndexArray) -> IndexArray:
        """Which of some pieces are not here; those that are were compared with their checksums then."""
        if not len(wanted):
            return wanted
        pieces: IndexArray = np.unique(wanted)
        first, last = int(pieces[0]), int(pieces[-1])
        if first < 0 or last >= self.pieces:
            raise CorruptStoreError("a chunk of the local store leads to bytes outside of its file")
        if self._compared[pieces].all():
            return pieces[:0]
        absent = self.absent(first, last - first + 1)
        here = ~np.isin(pieces, absent, assume_unique=True)
        for piece in pieces[here & ~self._compared[pieces]].tolist():
            try:
                self.index.check(piece, self._bytes(piece), "a file of the local store")
            except CorruptFileError as error:
                raise CorruptStoreError(str(error)) from error
            self._compared[piece] = True
        lacking: IndexArray = pieces[~here]
        return lacking

    def put(self, first: int, data: bytes | memoryview, where: str) -> None:
        """Write pieces that are not here."""
        self.index.check(first, data, where)
        count = -(-len(data) // PIECE_BYTES)
        try:
            _write(self._data, data, first * PIECE_BYTES)
            # Only now: a process may die at any line.
            _write(self._marks, b"\1" * count, self._marks_at + first)
        except OSError as error:
            raise storage_error(self._folder, error) from error
        self._compared[first : first + count] = True

    def is_finished(self) -> bool:
        """Whether the marks are removed."""
        return not marks_of(self._folder, self.run.key).exists()

    def finish(self) -> bool:
        """Whether every piece is here; then the marks are removed, and the run is as any other."""
        if len(self.absent()):
            return False
        try:
            remove_file(marks_of(self._folder, self.run.key), missing_ok=True)
        except OSError as error:
            raise storage_error(self._folder, error) from error
        return True

    def _bytes(self, piece: int) -> memoryview:
        start = piece * PIECE_BYTES
        return memoryview(self.buffer)[start : min(start + PIECE_BYTES, self.index.body_bytes)]

    def chunk(self, number: int, schema: pa.Schema) -> pa.RecordBatch:
        """A chunk whose message's head is here; of its columns only what is here may be looked at."""
        it, view = self.run.chunks[number], memoryview(self.buffer)
        try:
            # Arrow makes room for a compressed body before it looks at it, and no chunk is compressed.
            head = message_at(lambda at, size: bytes(view[at : at + size]), it.offset, f"chunk {number}")
            if head.codec is not None:
                raise CorruptFileError(f"chunk {number} is compressed")
            return pa.ipc.read_record_batch(self.buffer.slice(it.offset, it.size_bytes), schema)
        except (CorruptFileError, pa.ArrowException, OSError) as error:
            raise CorruptStoreError(f"chunk {number} of run {self.run.newest} is no record batch: {error}") from error


# Fetches pieces of a file that are not here, and puts them there. MissingRunError: nobody has them any more.
FetchPieces: TypeAlias = Callable[[LazyFile, IndexArray], None]


def _write(file: FileIO, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while len(view):
        written = os.pwrite(file.fileno(), view, at)
        view, at = view[written:], at + written
