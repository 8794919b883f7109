"""Opening the chunks of a store's runs: each is checked against its checksums once, and not again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import pyarrow as pa

from arrow_schemas.row import RowSchema
from spark_state_ext.errors import MissingRunError
from spark_state_ext.store.base_file import check_blocks, file_of, mapped
from spark_state_ext.store.checksums import Compared, PartlyChecked, check_all, opened_crcs
from spark_state_ext.store.compared import ComparedBlocks, FileState
from spark_state_ext.store.lazy_file import LazyFile
from spark_state_ext.store.pending import chunk_key, crcs_key
from spark_state_ext.store.runs import Chunk, Run, aligned
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

    def __init__(self, schema: RowSchema, notes: bool) -> None:
        self._schema = schema.arrow
        # Run key and number of the chunk, or number of the block if the run has a file.
        self._checked: set[tuple[str, int]] = set()
        self._partly: dict[tuple[str, int], Compared] = {}
        self._maps: dict[str, pa.Buffer] = {}
        # Only of files whose checked blocks can be recorded for other processes.
        self._compared: dict[str, ComparedBlocks] = {}
        self._notes = notes
        # By run key; None: the file is complete.
        self._lazy: dict[str, LazyFile | None] = {}

    @property
    def checked(self) -> int:
        """How many chunks and blocks are remembered as checked."""
        return len(self._checked)

    def opened(self, folder: Path, txn: Reader, run: Run, index: int) -> pa.RecordBatch:
        """Check and return a whole chunk; it is valid as long as the transaction."""
        chunk = run.chunks[index]
        if run.file_bytes:
            lazy = self.lazy(folder, run)
            if lazy is not None:
                # Callers read only pieces that `LazyFile` has checked.
                return lazy.chunk(index, self._schema)
            data = self._checked_file(folder, run, chunk)
            return pa.ipc.read_record_batch(data.slice(chunk.offset, chunk.size_bytes), self._schema)
        data = _data(txn, run, index)
        if (run.key, index) not in self._checked:
            check_all(data, _crcs(txn, run, index))
            self._checked.add((run.key, index))
        return pa.ipc.read_record_batch(data, self._schema)

    def partly(self, folder: Path, txn: Reader, run: Run, index: int) -> PartlyChecked:
        """Return a chunk that checks only the blocks it reads; it is valid as long as the transaction."""
        chunk = run.chunks[index]
        if run.file_bytes:
            if self.lazy(folder, run) is not None:
                raise MissingRunError(f"run {run.newest} is being restored lazily and is not complete yet", run.newest)
            # Files have large blocks, each of which is checked once; smaller ones would gain little.
            data = self._checked_file(folder, run, chunk)
            data, compared = data.slice(chunk.offset, chunk.size_bytes), Compared.everything(chunk.size_bytes)
        else:
            data = _data(txn, run, index)
            if (run.key, index) in self._checked:
                compared = Compared.everything(chunk.size_bytes)
            else:
                known = self._partly.get((run.key, index))
                if known is None:
                    known = self._partly[run.key, index] = Compared.nothing(_crcs(txn, run, index))
                compared = known
        return PartlyChecked(data, compared, self._schema, chunk.hash_min, chunk.hash_max)

    def lazy(self, folder: Path, run: Run) -> LazyFile | None:
        """Return the file of a run that is being restored lazily; None if it is complete or the run has no file."""
        if not run.file_bytes:
            return None
        # Read the entry only once: another thread may remove it between two reads.
        known = self._lazy.get(run.key, _UNKNOWN)
        found = LazyFile.opened(folder, run) if isinstance(known, _Unknown) else known
        if found is not known:
            self._lazy[run.key] = found
        if found is not None and found.is_finished():
            # Another process has completed it.
            found = self._lazy[run.key] = None
        return found

    def note_whole(self, run: Run) -> None:
        """Record that a run's file is complete."""
        self._lazy[run.key] = None

    def note_file(self, folder: Path, run: Run, data: pa.Buffer) -> None:
        """Record that a run's new file is mapped, and that all its blocks were checked."""
        self._maps[run.key], self._lazy[run.key] = data, None
        blocks, path = range(len(run.blocks)), file_of(folder, run.key)
        self._checked.update((run.key, block) for block in blocks)
        self._may_note(ComparedBlocks.of(folder, run, path, FileState.of(path)), run)
        self._note(folder, run, blocks)

    def note_written(self, run: Run) -> None:
        """Record the chunks that this process wrote as checked."""
        self._checked.update((run.key, index) for index in range(len(run.chunks)))

    def keep(self, run_keys: Collection[str]) -> None:
        """Forget the chunks of all runs but these: a worker lives longer than runs do."""
        # Iterate over copies, because the background thread reads from this store too.
        self._checked = {key for key in self._checked.copy() if key[0] in run_keys}
        self._partly = {key: checks for key, checks in self._partly.copy().items() if key[0] in run_keys}
        self._keep_maps(run_keys)

    def keep_files(self, run_keys: Collection[str]) -> None:
        """Release the files of all runs but these."""
        if any(key not in run_keys for key in self._maps.copy() | self._lazy.copy()):
            self._keep_maps(run_keys)

    def _keep_maps(self, run_keys: Collection[str]) -> None:
        self._maps = {key: data for key, data in self._maps.copy().items() if key in run_keys}
        self._lazy = {key: lazy for key, lazy in self._lazy.copy().items() if key in run_keys}
        self._compared = {key: compared for key, compared in self._compared.copy().items() if key in run_keys}

    def forget_file(self, run_key: str) -> None:
        """Release the file of a run that was dropped."""
        self._maps.pop(run_key, None)
        self._compared.pop(run_key, None)
        self._lazy.pop(run_key, None)

    def forget_some(self) -> None:
        """Forget which chunks were checked once too many are remembered."""
        if len(self._checked) > _CHECKED_MAX:
            self._checked.clear()
        if len(self._partly) > _PARTLY_MAX:
            self._partly.clear()

    def forget_all(self) -> None:
        """Forget everything, because the environment was replaced."""
        self._checked.clear()
        self._partly.clear()
        self.close_files()

    def close_files(self) -> None:
        """Release the runs' files; a reader keeps its file mapped until it is done."""
        self._maps.clear()
        self._compared.clear()
        self._lazy.clear()

    def _checked_file(self, folder: Path, run: Run, chunk: Chunk) -> pa.Buffer:
        """Return the mapped file of a run after checking the blocks of one chunk."""
        data = self._file(folder, run)
        self._note(folder, run, check_blocks(data, run, chunk, self._checked))
        return data

    def _file(self, folder: Path, run: Run) -> pa.Buffer:
        data = self._maps.get(run.key)
        if data is None:
            path = file_of(folder, run.key)
            before = FileState.of(path)
            data = self._maps[run.key] = mapped(folder, run)
            compared = ComparedBlocks.of(folder, run, path, before)
            self._may_note(compared, run)
            if compared is not None:
                self._checked.update((run.key, block) for block in compared.known())
        return data

    def _may_note(self, compared: ComparedBlocks | None, run: Run) -> None:
        self._compared.pop(run.key, None)
        if compared is not None:
            self._compared[run.key] = compared

    def _note(self, folder: Path, run: Run, blocks: Sequence[int]) -> None:
        compared = self._compared.get(run.key)
        if compared is not None and self._notes:
            compared.note(file_of(folder, run.key), blocks)


def _data(txn: Reader, run: Run, index: int) -> pa.Buffer:
    data = txn.get(b"chunks", chunk_key(run.key, index))
    if data is None:
        raise MissingRunError(f"run {run.newest} was dropped from the local store while it was read", run.newest)
    return aligned(data, run.chunks[index])


def _crcs(txn: Reader, run: Run, index: int) -> bytes:
    chunk = run.chunks[index]
    return opened_crcs(txn.get(b"chunks", crcs_key(run.key, index)), chunk.size_bytes, chunk.crc)
