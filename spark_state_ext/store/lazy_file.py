"""The file of a run that is restored lazily: a snapshot's body with holes, and marks of the pieces that are present.

A piece is checked against its checksum, written, and then marked with one byte: if the process dies in between, the
piece counts as absent. Processes that share the store write the same bytes to the same places and mark only pieces
that they have written, so they do not disturb each other. Once every piece is marked, the marks are removed, and the
run is the same as one whose file was fetched at once.
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

from arrow_schemas.blocks import PIECE_BYTES, digest_crcs
from arrow_schemas.equality import IndexArray
from arrow_schemas.ipc_message import read_message_head
from arrow_schemas.snapshot_index import IndexRecord, SnapshotIndex
from arrow_schemas.standby import BucketKey
from spark_state_ext.errors import CorruptFileError, CorruptStoreError, MissingRunError
from spark_state_ext.store.base_file import file_path, map_file
from spark_state_ext.store.local_disk import storage_error
from spark_state_ext.worker.background import Foreground, Runner
from spark_state_ext.worker.removal import remove_file

if TYPE_CHECKING:
    from spark_state_ext.store.runs import Run

__all__ = ["FetchPieces", "LazyFile", "LazyOptions", "PieceSource", "marks_path"]

_MAGIC = b"SSEL"
# Magic, CRC-32 of the index, length of the index in bytes.
_HEAD = struct.Struct("<4sIQ")


class PieceSource(Protocol):
    """A source of snapshots' pieces besides the backend: standby services of other hosts (`spark_state_ext.peers`)."""

    def give(
        self,
        key: BucketKey,
        lazy: LazyFile,
        ranges: Sequence[tuple[int, int]],
        in_background: bool,
        raise_if_closed: Callable[[], None],
    ) -> None:
        """Put those pieces of a bucket's file into `lazy` that can be had; `ranges` are ranges of piece numbers.

        `in_background` is true if no batch waits for the pieces. An error of `raise_if_closed` ends the transfer.
        """
        ...

    def note_store(self, requests: int, size_bytes: int, took_s: float) -> None:
        """Record how long the backend took for requests that no batch waited for."""
        ...


@dataclass(frozen=True)
class LazyOptions:
    """Whether and how a call restores lazily.

    Parameters
    ----------
    bytes_min
        Size of the smallest snapshot that is restored lazily.
    fill_bytes_per_s_max
        Maximum rate at which the remaining pieces are fetched in the background.
    runner
        Runs the fetching in the background.
    peers
        Source of pieces that is asked before the backend; None: only the backend is asked.
    foreground
        What batches of the process wait for: background fetching pauses meanwhile.
    """

    bytes_min: int
    fill_bytes_per_s_max: int
    runner: Runner
    peers: PieceSource | None = None
    foreground: Foreground = field(default_factory=Foreground)


def marks_path(folder: Path, run_key: str) -> Path:
    """Return the path of the marks of a run's file; they exist until the file is complete."""
    return folder / f"base-{run_key}.lazy"


class LazyFile:
    """The incomplete file of a run and its marks. Get one with `LazyFile.open`."""

    def __init__(
        self, folder: Path, run: Run, index: SnapshotIndex, data: FileIO, marks: FileIO, marks_at: int
    ) -> None:
        self._folder = folder
        self._data, self._marks = data, marks
        self._marks_at = marks_at
        self.run = run
        self.index = index
        self.buffer = map_file(folder, run)
        self.pieces = len(index.pieces)
        # Pieces that this process has checked: when it wrote them, or before it first read them.
        self._checked = np.zeros(self.pieces, dtype=np.bool_)

    @staticmethod
    def begin(folder: Path, run_key: str, path: Path, index: SnapshotIndex) -> None:
        """Create both files: the marks in place, and the file of the run at `path`, from where the caller moves it."""
        data = index.encode()
        try:
            with path.open("wb") as file:
                file.truncate(index.body_bytes)
            with marks_path(folder, run_key).open("wb") as file:
                file.write(_HEAD.pack(_MAGIC, zlib.crc32(data), len(data)) + data + bytes(len(index.pieces)))
        except OSError as error:
            raise storage_error(folder, error) from error

    @staticmethod
    def open(folder: Path, run: Run) -> LazyFile | None:
        """Open the file of a run; None if it is complete."""
        try:
            marks = FileIO(marks_path(folder, run.key), "r+")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error(folder, error) from error
        try:
            data = FileIO(file_path(folder, run.key), "r+")
        except FileNotFoundError as error:
            raise MissingRunError(f"run {run.newest} was dropped from the local store", run.newest) from error
        except OSError as error:
            raise storage_error(folder, error) from error
        head = os.pread(marks.fileno(), _HEAD.size, 0)
        magic, crc, size = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0, 0)
        # A damaged head may give any size, so read at most the length of the file.
        size_max = os.fstat(marks.fileno()).st_size
        stored = os.pread(marks.fileno(), min(size, size_max), _HEAD.size) if magic == _MAGIC else b""
        where = f"the file of run {run.newest} in the local store"
        try:
            if len(stored) != size or zlib.crc32(stored) != crc:
                raise CorruptFileError(f"the index of {where} fails its checksum")
            # The manifest has the checksums of the body's blocks, so the index of another body is refused.
            index = SnapshotIndex.decode(stored, IndexRecord.of(stored, 0), digest_crcs(run.blocks), where)
        except CorruptFileError as error:
            raise CorruptStoreError(str(error)) from error
        return LazyFile(folder, run, index, data, marks, _HEAD.size + size)

    def absent(self, first: int = 0, count: int | None = None) -> IndexArray:
        """Return the pieces of a range that are not marked, ascending."""
        end = self.pieces if count is None else min(first + count, self.pieces)
        marks = os.pread(self._marks.fileno(), end - first, self._marks_at + first)
        if len(marks) != end - first:
            raise CorruptStoreError("marks of pieces are missing for a file of the local store")
        absent: IndexArray = np.flatnonzero(np.frombuffer(marks, np.uint8) != 1) + first
        return absent

    def lacking(self, numbers: IndexArray) -> IndexArray:
        """Return which of some pieces are absent; the others have been checked against their checksums."""
        if not len(numbers):
            return numbers
        pieces: IndexArray = np.unique(numbers)
        first, last = int(pieces[0]), int(pieces[-1])
        if first < 0 or last >= self.pieces:
            raise CorruptStoreError("a chunk of the local store refers to bytes outside its file")
        if self._checked[pieces].all():
            return pieces[:0]
        absent = self.absent(first, last - first + 1)
        present = ~np.isin(pieces, absent, assume_unique=True)
        for piece in pieces[present & ~self._checked[pieces]].tolist():
            try:
                self.index.check(piece, self._piece_bytes(piece), "a file of the local store")
            except CorruptFileError as error:
                raise CorruptStoreError(str(error)) from error
            self._checked[piece] = True
        missing: IndexArray = pieces[~present]
        return missing

    def put(self, first: int, data: bytes | memoryview, where: str) -> None:
        """Check absent pieces, write them and mark them as present."""
        self.index.check(first, data, where)
        count = -(-len(data) // PIECE_BYTES)
        try:
            _write(self._data, data, first * PIECE_BYTES)
            # Marked only after writing, because the process may die at any line.
            _write(self._marks, b"\1" * count, self._marks_at + first)
        except OSError as error:
            raise storage_error(self._folder, error) from error
        self._checked[first : first + count] = True

    def is_finished(self) -> bool:
        """True if the marks were removed."""
        return not marks_path(self._folder, self.run.key).exists()

    def finish(self) -> bool:
        """Remove the marks if every piece is present, which completes the run; return whether it is."""
        if len(self.absent()):
            return False
        try:
            remove_file(marks_path(self._folder, self.run.key), missing_ok=True)
        except OSError as error:
            raise storage_error(self._folder, error) from error
        return True

    def _piece_bytes(self, piece: int) -> memoryview:
        start = piece * PIECE_BYTES
        return memoryview(self.buffer)[start : min(start + PIECE_BYTES, self.index.body_bytes)]

    def chunk(self, number: int, schema: pa.Schema) -> pa.RecordBatch:
        """Return a chunk, once the head of its message is present; only present parts of its columns may be read."""
        chunk, view = self.run.chunks[number], memoryview(self.buffer)
        try:
            # Arrow allocates memory for a compressed body before it checks the body. Chunks are never compressed.
            head = read_message_head(lambda at, size: bytes(view[at : at + size]), chunk.offset, f"chunk {number}")
            if head.codec is not None:
                raise CorruptFileError(f"chunk {number} is compressed")
            return pa.ipc.read_record_batch(self.buffer.slice(chunk.offset, chunk.size_bytes), schema)
        except (CorruptFileError, pa.ArrowException, OSError) as error:
            raise CorruptStoreError(
                f"chunk {number} of run {self.run.newest} is not a record batch: {error}"
            ) from error


# Fetches absent pieces of a file and puts them into it; raises a MissingRunError if no source has them any longer.
FetchPieces: TypeAlias = Callable[[LazyFile, IndexArray], None]


def _write(file: FileIO, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while len(view):
        written = os.pwrite(file.fileno(), view, at)
        view, at = view[written:], at + written
