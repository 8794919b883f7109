"""Lazily restored runs of one store: begin them with only their index, look up keys, complete and drop them."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from arrow_schemas.blocks import digest_crcs
from arrow_schemas.equality import HashArray
from arrow_schemas.lineage import CheckpointRef
from arrow_schemas.row import RowSchema
from arrow_schemas.snapshot_index import SnapshotIndex
from spark_state_ext.errors import StorageError
from spark_state_ext.store import manifest
from spark_state_ext.store.base_file import chunks_of, file_path
from spark_state_ext.store.check_marks import check_marks_path
from spark_state_ext.store.chunks import Chunks
from spark_state_ext.store.incoming_files import Incoming
from spark_state_ext.store.lazy_file import FetchPieces, LazyFile, marks_path
from spark_state_ext.store.lazy_lookup import Positions, ensure_pieces, fetch_columns, locate_hashes
from spark_state_ext.store.runs import Run
from spark_state_ext.store.shared_environment import SharedEnvironment
from spark_state_ext.worker.removal import remove_file

__all__ = ["LazyRuns", "file_paths", "remove_files"]


class LazyRuns:
    """Lazily restored runs of one store."""

    def __init__(self, environment: SharedEnvironment, schema: RowSchema, chunks: Chunks, incoming: Incoming) -> None:
        self._environment = environment
        self._schema = schema
        self._chunks = chunks
        self._incoming = incoming
        # Checkpoints whose runs this process has dropped because pieces were gone; restored again, they would be again.
        self.lost: set[CheckpointRef] = set()

    def ingest(self, index: SnapshotIndex, ref: CheckpointRef) -> Run:
        """Add a snapshot as a base run of a checkpoint, without fetching any of its rows yet."""
        folder = self._environment.folder
        run = Run(
            key=uuid.uuid4().hex,
            newest=ref,
            oldest=ref,
            parent=None,
            base=True,
            rows=index.rows,
            tombstones=index.tombstones,
            chunks=chunks_of(index),
            file_bytes=index.body_bytes,
            blocks=tuple(index.blocks()),
        )
        # Keeps other processes from removing the files as abandoned until the manifest names the run.
        path = self._incoming.begin(folder)
        written = None
        try:
            LazyFile.begin(folder, run.key, path, index)
            try:
                path.replace(file_path(folder, run.key))
            except OSError as error:
                raise StorageError(f"the local store {folder} was removed while a run was added: {error}") from error
            written = self._environment.write(lambda txn: manifest.put_if_new(txn, run))
        finally:
            self._incoming.end(path)
            if written is not run:
                remove_files(folder, run.key)
        return written

    def among(self, runs: Sequence[Run]) -> list[Run]:
        """Return the incomplete ones among some runs."""
        return [run for run in runs if self.file(run) is not None]

    def file(self, run: Run) -> LazyFile | None:
        """Return the file of an incomplete run; None if the run is complete or has no file."""
        return self._chunks.open_lazy_file(self._environment.folder, run) if run.file_bytes else None

    def whole_file(self, ref: CheckpointRef, body_digest: str) -> tuple[Path, int] | None:
        """Return the path and length of a snapshot's body; None if it is absent, incomplete or has another digest."""
        folder = self._environment.folder
        for run in self._environment.read(lambda txn: list(manifest.read_runs(txn))):
            if run.newest == ref and run.base and run.file_bytes and digest_crcs(run.blocks) == body_digest:
                return None if self.file(run) is not None else (file_path(folder, run.key), run.file_bytes)
        return None

    def locate_hashes(self, runs: Sequence[Run], hashes: HashArray, fetch: FetchPieces | None) -> dict[str, Positions]:
        """Fetch all pieces that a lookup reads; return the hashes' positions by the key of each incomplete run."""
        positions: dict[str, Positions] = {}
        for run in runs:
            lazy = self.file(run)
            if lazy is not None:
                self._environment.check_process()
                positions[run.key] = locate_hashes(lazy, self._schema, hashes, fetch)
        return positions

    def fetch_columns(self, run: Run, chunks: Sequence[int], names: Collection[str], fetch: FetchPieces | None) -> None:
        """Fetch whole columns of some chunks of a run, if the run is incomplete."""
        lazy = self.file(run)
        if lazy is not None:
            self._environment.check_process()
            fetch_columns(lazy, self._schema, chunks, names, fetch)

    def complete(self, run: Run, fetch: FetchPieces | None) -> None:
        """Fetch all absent pieces of a run, which completes it."""
        lazy = self.file(run)
        if lazy is None:
            return
        self._environment.check_process()
        ensure_pieces(lazy, np.arange(lazy.pieces), fetch)
        self.finish(lazy)

    def finish(self, lazy: LazyFile) -> bool:
        """Mark a run as complete if it is; return whether it is."""
        whole = lazy.finish()
        if whole:
            self._chunks.mark_complete(lazy.run)
        return whole

    def lose(self, run: Run) -> None:
        """Drop a run whose absent pieces no source has."""
        self.lost.add(run.newest)
        self._environment.write(lambda txn: manifest.drop(txn, run))
        self._chunks.forget_file(run.key)
        remove_files(self._environment.folder, run.key)


def file_paths(folder: Path, run_key: str) -> tuple[Path, ...]:
    """Return the paths of all files that a run may have."""
    return file_path(folder, run_key), marks_path(folder, run_key), check_marks_path(folder, run_key)


def remove_files(folder: Path, run_key: str) -> None:
    """Remove the files of a run; processes that have them mapped can still read them."""
    for path in file_paths(folder, run_key):
        remove_file(path, missing_ok=True)
