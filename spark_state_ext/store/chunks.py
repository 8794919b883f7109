"""Opening the chunks of a store's runs: each is checked against its checksums once, and not again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import pyarrow as pa

from arrow_schemas.row import RowSchema
from spark_state_ext.errors import MissingRunError
from spark_state_ext.store.base_file import check_blocks, file_path, map_file
from spark_state_ext.store.check_marks import CheckMarks, FileState
from spark_state_ext.store.chunk_checksums import BlockChecks, PartlyChecked, check_all, check_crcs
from spark_state_ext.store.lazy_file import LazyFile
from spark_state_ext.store.pending_run import chunk_key, crcs_key
from spark_state_ext.store.runs import Chunk, Run, align
from spark_state_ext.store.transaction import Reader

__all__ = ["Chunks"]

# How many chunks (or blocks of files) are remembered as checked, entirely or partly; above this, all are forgotten.
_CHECKED_MAX = 100_000
_PARTLY_MAX = 1_000


class _Unknown:
    """Marks a run of which this process has not determined yet whether its file is complete."""


_UNKNOWN = _Unknown()


class Chunks:
    """Opens chunks of one store and remembers which of them were checked."""

    def __init__(self, schema: RowSchema, write_marks: bool) -> None:
        self._schema = schema.arrow
        # Run key and number of the chunk, or number of the block if the run has a file.
        self._checked: set[tuple[str, int]] = set()
        self._partly_checked: dict[tuple[str, int], BlockChecks] = {}
        self._maps: dict[str, pa.Buffer] = {}
        # Only of files whose checked blocks can be recorded for other processes.
        self._check_marks: dict[str, CheckMarks] = {}
        self._writes_marks = write_marks
        # By run key; None: the file is complete.
        self._lazy_files: dict[str, LazyFile | None] = {}

    @property
    def checked_count(self) -> int:
        """How many chunks and blocks are remembered as checked."""
        return len(self._checked)

    def open(self, folder: Path, txn: Reader, run: Run, index: int) -> pa.RecordBatch:
        """Check and return a whole chunk; it is valid as long as the transaction."""
        chunk = run.chunks[index]
        if run.file_bytes:
            lazy_file = self.open_lazy_file(folder, run)
            if lazy_file is not None:
                # Callers read only pieces that `LazyFile` has checked.
                return lazy_file.chunk(index, self._schema)
            data = self._check_file(folder, run, chunk)
            return pa.ipc.read_record_batch(data.slice(chunk.offset, chunk.size_bytes), self._schema)
        data = _chunk_bytes(txn, run, index)
        if (run.key, index) not in self._checked:
            check_all(data, _chunk_crcs(txn, run, index))
            self._checked.add((run.key, index))
        return pa.ipc.read_record_batch(data, self._schema)

    def open_partly(self, folder: Path, txn: Reader, run: Run, index: int) -> PartlyChecked:
        """Return a chunk that checks only the blocks it reads; it is valid as long as the transaction."""
        chunk = run.chunks[index]
        if run.file_bytes:
            if self.open_lazy_file(folder, run) is not None:
                raise MissingRunError(f"run {run.newest} is being restored lazily and is not complete yet", run.newest)
            # Files have large blocks, each of which is checked once; smaller ones would gain little.
            data = self._check_file(folder, run, chunk)
            data, block_checks = data.slice(chunk.offset, chunk.size_bytes), BlockChecks.all_checked(chunk.size_bytes)
        else:
            data = _chunk_bytes(txn, run, index)
            if (run.key, index) in self._checked:
                block_checks = BlockChecks.all_checked(chunk.size_bytes)
            else:
                checks = self._partly_checked.get((run.key, index))
                if checks is None:
                    checks = self._partly_checked[run.key, index] = BlockChecks.none_checked(
                        _chunk_crcs(txn, run, index)
                    )
                block_checks = checks
        return PartlyChecked(data, block_checks, self._schema, chunk.hash_min, chunk.hash_max)

    def open_lazy_file(self, folder: Path, run: Run) -> LazyFile | None:
        """Return the file of a run that is being restored lazily; None if it is complete or the run has no file."""
        if not run.file_bytes:
            return None
        # Read the entry only once: another thread may remove it between two reads.
        remembered = self._lazy_files.get(run.key, _UNKNOWN)
        file = LazyFile.open(folder, run) if isinstance(remembered, _Unknown) else remembered
        if file is not remembered:
            self._lazy_files[run.key] = file
        if file is not None and file.is_finished():
            # Another process has completed it.
            file = self._lazy_files[run.key] = None
        return file

    def mark_complete(self, run: Run) -> None:
        """Record that a run's file is complete."""
        self._lazy_files[run.key] = None

    def add_checked_file(self, folder: Path, run: Run, data: pa.Buffer) -> None:
        """Record that a run's new file is mapped, and that all its blocks were checked."""
        self._maps[run.key], self._lazy_files[run.key] = data, None
        blocks, path = range(len(run.blocks)), file_path(folder, run.key)
        self._checked.update((run.key, block) for block in blocks)
        self._set_marks(CheckMarks.of(folder, run, path, FileState.of(path)), run)
        self._mark_blocks(folder, run, blocks)

    def mark_checked(self, run: Run) -> None:
        """Record the chunks that this process wrote as checked."""
        self._checked.update((run.key, index) for index in range(len(run.chunks)))

    def keep_only(self, run_keys: Collection[str]) -> None:
        """Forget the chunks of all runs but these: a worker lives longer than runs do."""
        # Iterate over copies, because the background thread reads from this store too.
        self._checked = {key for key in self._checked.copy() if key[0] in run_keys}
        self._partly_checked = {
            key: checks for key, checks in self._partly_checked.copy().items() if key[0] in run_keys
        }
        self._keep_maps(run_keys)

    def keep_files_of(self, run_keys: Collection[str]) -> None:
        """Release the files of all runs but these."""
        if any(key not in run_keys for key in self._maps.copy() | self._lazy_files.copy()):
            self._keep_maps(run_keys)

    def _keep_maps(self, run_keys: Collection[str]) -> None:
        self._maps = {key: data for key, data in self._maps.copy().items() if key in run_keys}
        self._lazy_files = {key: file for key, file in self._lazy_files.copy().items() if key in run_keys}
        self._check_marks = {key: marks for key, marks in self._check_marks.copy().items() if key in run_keys}

    def forget_file(self, run_key: str) -> None:
        """Release the file of a run that was dropped."""
        self._maps.pop(run_key, None)
        self._check_marks.pop(run_key, None)
        self._lazy_files.pop(run_key, None)

    def forget_some(self) -> None:
        """Forget which chunks were checked once too many are remembered."""
        if len(self._checked) > _CHECKED_MAX:
            self._checked.clear()
        if len(self._partly_checked) > _PARTLY_MAX:
            self._partly_checked.clear()

    def forget_all(self) -> None:
        """Forget everything, because the environment was replaced."""
        self._checked.clear()
        self._partly_checked.clear()
        self.close_files()

    def close_files(self) -> None:
        """Release the runs' files; a reader keeps its file mapped until it is done."""
        self._maps.clear()
        self._check_marks.clear()
        self._lazy_files.clear()

    def _check_file(self, folder: Path, run: Run, chunk: Chunk) -> pa.Buffer:
        """Return the mapped file of a run after checking the blocks of one chunk."""
        data = self._map_file(folder, run)
        self._mark_blocks(folder, run, check_blocks(data, run, chunk, self._checked))
        return data

    def _map_file(self, folder: Path, run: Run) -> pa.Buffer:
        data = self._maps.get(run.key)
        if data is None:
            path = file_path(folder, run.key)
            before = FileState.of(path)
            data = self._maps[run.key] = map_file(folder, run)
            marks = CheckMarks.of(folder, run, path, before)
            self._set_marks(marks, run)
            if marks is not None:
                self._checked.update((run.key, block) for block in marks.marked_blocks())
        return data

    def _set_marks(self, marks: CheckMarks | None, run: Run) -> None:
        self._check_marks.pop(run.key, None)
        if marks is not None:
            self._check_marks[run.key] = marks

    def _mark_blocks(self, folder: Path, run: Run, blocks: Sequence[int]) -> None:
        marks = self._check_marks.get(run.key)
        if marks is not None and self._writes_marks:
            marks.mark_blocks(file_path(folder, run.key), blocks)


def _chunk_bytes(txn: Reader, run: Run, index: int) -> pa.Buffer:
    data = txn.get(b"chunks", chunk_key(run.key, index))
    if data is None:
        raise MissingRunError(f"run {run.newest} was dropped from the local store while it was read", run.newest)
    return align(data, run.chunks[index])


def _chunk_crcs(txn: Reader, run: Run, index: int) -> bytes:
    chunk = run.chunks[index]
    return check_crcs(txn.get(b"chunks", crcs_key(run.key, index)), chunk.size_bytes, chunk.crc)
