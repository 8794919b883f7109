"""The local store of one bucket: runs in LMDB, addressed by checkpoint.

It is a cache; the checkpoint files and the pointer are authoritative. There is no head: every read names a checkpoint,
and a commit only adds a run. So failed attempts, zombie tasks and speculative tasks may write here freely: their runs
are never read.
"""

from __future__ import annotations

import itertools
import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from arrow_schemas.lineage import CheckpointRef
from arrow_schemas.row import RowSchema
from arrow_schemas.snapshot_index import SnapshotIndex
from spark_state_ext.errors import StateError, StorageError
from spark_state_ext.store import manifest, pins, records
from spark_state_ext.store.base_file import file_path, map_file, read_chunks
from spark_state_ext.store.chunk_checksums import PartlyChecked
from spark_state_ext.store.chunks import Chunks
from spark_state_ext.store.compaction import (
    COMPACTION_BYTES_MAX,
    choose_runs,
    choose_runs_to_compact,
    find_droppable,
    is_outgrown,
)
from spark_state_ext.store.damage import rebuild_if_damaged
from spark_state_ext.store.environment import MAP_BYTES_MIN
from spark_state_ext.store.identity import check_identity
from spark_state_ext.store.incoming_files import Incoming, remove_abandoned
from spark_state_ext.store.lazy_runs import LazyRuns, file_paths, remove_files
from spark_state_ext.store.pending_run import PendingRun
from spark_state_ext.store.runs import CHUNK_ROWS, Run, encode_chunk, split_batches
from spark_state_ext.store.shared_environment import SharedEnvironment
from spark_state_ext.store.transaction import Reader, Writer
from spark_state_ext.store.view import View

__all__ = ["LocalStore"]

T = TypeVar("T")
Store = TypeVar("Store", bound="LocalStore")

_LOGGER = logging.getLogger("spark_state_ext")
# Most bytes of chunks in one write transaction, because LMDB keeps a transaction's dirty pages in memory.
_TRANSACTION_BYTES = 16 << 20
# Chunks of a writer that died before adding its run are removed after this time.
_ABANDONED_AFTER_S = 3600.0


class LocalStore:
    """Runs of one bucket. Several processes may have it open. Get one with `LocalStore.at`."""

    def __init__(
        self,
        folder: Path,
        schema: RowSchema,
        environment: SharedEnvironment,
        *,
        chunk_rows: int = CHUNK_ROWS,
        compaction_bytes_max: int = COMPACTION_BYTES_MAX,
    ) -> None:
        self.folder = folder
        self.schema = schema
        self._chunk_rows = chunk_rows
        self._compaction_bytes_max = compaction_bytes_max
        self._chunks = Chunks(schema, write_marks=environment.writes)
        self._closed, self._incoming = False, Incoming()
        self._environment = environment
        self.lazy = LazyRuns(environment, schema, self._chunks, self._incoming)

    @classmethod
    def at(
        cls: type[Store],
        folder: str | Path,
        schema: RowSchema,
        *,
        map_bytes: int = MAP_BYTES_MIN,
        chunk_rows: int = CHUNK_ROWS,
        compaction_bytes_max: int = COMPACTION_BYTES_MAX,
    ) -> Store:
        """Open the store of a folder; runs of another format or schema are removed."""
        environment = SharedEnvironment.at(Path(folder), map_bytes)
        store = cls(Path(folder), schema, environment, chunk_rows=chunk_rows, compaction_bytes_max=compaction_bytes_max)
        check_identity(environment, schema)
        store._remove_abandoned()
        return store

    # -- reading -----------------------------------------------------------------------------------

    def view(self, head: CheckpointRef | None) -> View:
        """Return the state at a checkpoint (None: no state)."""
        runs = self._environment.read(lambda txn: list(manifest.read_runs(txn)))
        # Done here because a reader never calls `prune`, and a dropped file takes disk space while it is mapped.
        self._chunks.keep_files_of({run.key for run in runs})
        self._chunks.forget_some()
        return View(self, choose_runs(runs, head))

    def rollback(self, head: CheckpointRef | None) -> View:
        """Return the state at an earlier checkpoint: an alias of `view`, because there is no head to move."""
        return self.view(head)

    def has(self, ref: CheckpointRef) -> bool:
        """True if a run ends at this checkpoint."""
        return any(run.newest == ref for run in self.runs())

    def runs(self) -> list[Run]:
        """Return all runs, in no particular order."""
        return self._rebuild_if_damaged(lambda: self._environment.read(lambda txn: list(manifest.read_runs(txn))))

    # -- writing -----------------------------------------------------------------------------------

    def apply(self, batches: Iterable[pa.RecordBatch], ref: CheckpointRef, parent: CheckpointRef | None) -> Run:
        """Add the run of a new checkpoint, unless there is one already."""

        def check_parent(txn: Reader) -> None:
            choose_runs(manifest.read_runs(txn), parent)

        return self._add(batches, newest=ref, oldest=ref, parent=parent, base=False, check=check_parent)

    def restore(
        self,
        batches: Iterable[pa.RecordBatch],
        ref: CheckpointRef,
        parent: CheckpointRef | None,
        *,
        snapshot: bool,
    ) -> Run:
        """Add a run read from a checkpoint file, even if its parent is not here yet."""
        return self._add(
            batches,
            newest=ref,
            oldest=ref,
            parent=None if snapshot else parent,
            base=snapshot,
            check=lambda txn: None,
        )

    def incoming(self) -> Path:
        """Return a path on the store's disk for a file that `ingest` will take; release it with `end_incoming`."""
        self._remove_abandoned()
        return self._incoming.begin(self._environment.folder)

    def end_incoming(self, path: Path) -> None:
        """Release a path from `incoming`, and remove the file if it was not ingested."""
        self._incoming.end(path)

    def ingest(
        self,
        path: Path,
        body_bytes: int,
        blocks: Sequence[int],
        rows: int,
        ref: CheckpointRef,
        index: SnapshotIndex | None = None,
    ) -> Run:
        """Move a snapshot's file from a path of `incoming` into the store, as the base run of a checkpoint."""
        folder = self._environment.folder
        run = Run(uuid.uuid4().hex, ref, ref, None, True, rows, 0, (), body_bytes, tuple(blocks))
        try:
            path.replace(file_path(folder, run.key))
        except OSError as error:
            raise StorageError(f"the local store {folder} was removed while a snapshot was added: {error}") from error
        try:
            data = map_file(folder, run)
            run = replace(run, chunks=read_chunks(data, run, self.schema.arrow, f"the snapshot of {ref}", index))
            written = self._environment.write(lambda txn: manifest.put_if_new(txn, run))
        except BaseException:
            remove_files(folder, run.key)
            raise
        if written is not run:
            remove_files(folder, run.key)
        else:
            self._chunks.add_checked_file(folder, run, data)
        return written

    def outgrown(self, view: View) -> bool:
        """True if a snapshot of a view should replace its runs (`ingest`), because merging cannot keep them small."""
        return is_outgrown([run.size_bytes for run in view.runs], self._compaction_bytes_max)

    def compact(
        self, head: CheckpointRef | None, unconfirmed: CheckpointRef | None = None, keeps_bytes_min: int | None = None
    ) -> Run | None:
        """Merge some runs of a *committed* checkpoint if a merge is due; the merged runs stay until `prune`."""
        view = self.view(head)
        # Incomplete runs, and the runs below them, are not merged.
        runs = list(itertools.takewhile(lambda run: self.lazy.file(run) is None, view.runs))
        large = self.outgrown(view)
        keeps_files = keeps_bytes_min is not None and view.size_bytes >= keeps_bytes_min
        chosen_runs = choose_runs_to_compact(runs, self._compaction_bytes_max, unconfirmed, large, keeps_files)
        if not chosen_runs:
            return None
        base = chosen_runs[-1].base or chosen_runs[-1].parent is None

        def check_runs(txn: Reader) -> None:
            manifest.check_present(txn, chosen_runs, "merged")

        return self._add(
            View(self, chosen_runs).scan(keep_tombstones=not base),
            newest=chosen_runs[0].newest,
            oldest=chosen_runs[-1].oldest,
            parent=chosen_runs[-1].parent,
            base=base,
            check=check_runs,
        )

    def prune(self, head: CheckpointRef | None) -> int:
        """Drop runs that no call with this input pointer or a newer one can need; return how many."""

        def work(txn: Writer) -> list[Run]:
            now = time.time()
            dropped = find_droppable(manifest.read_runs(txn), head, frozenset(pins.read_pinned(txn)))
            for run in dropped:
                manifest.drop(txn, run)
                txn.delete_prefix(b"chunks", bytes.fromhex(run.key))
            for key, started_s in manifest.read_begun(txn):
                if started_s < now - _ABANDONED_AFTER_S:
                    txn.delete_prefix(b"chunks", bytes.fromhex(key))
                    manifest.unmark_begun(txn, key)
            return dropped

        self._environment.check_readers()
        # Most calls have nothing to drop, and should not wait for the write lock just to find out.
        if not self._is_worth_pruning(head):
            return 0
        dropped = self._environment.write(work)
        for run in dropped:
            if run.file_bytes:
                self._chunks.forget_file(run.key)
                remove_files(self._environment.folder, run.key)
        return len(dropped)

    def pin(self, view: View, seconds: float) -> str:
        """Keep a view's runs from being dropped for some seconds; return the pin's name for `unpin`."""
        name = uuid.uuid4().hex

        def work(txn: Writer) -> None:
            manifest.check_present(txn, view.runs, "pinned")
            pins.put(txn, name, [run.key for run in view.runs], seconds)

        self._environment.write(work)
        return name

    def renew(self, name: str, seconds: float) -> None:
        """Extend a pin, to expire this many seconds from now."""
        # Most calls come long before the pin expires, and need not wait for the write lock.
        if self._environment.read(lambda txn: pins.read_expiry_s(txn, name)) - time.time() > seconds / 2:
            return
        if not self._environment.write(lambda txn: pins.extend(txn, name, seconds)):
            raise StorageError(f"a pin of the local store {self.folder} expired while its runs were read")

    def unpin(self, name: str) -> None:
        """Release a pin."""
        self._rebuild_if_damaged(lambda: self._environment.write(lambda txn: pins.release(txn, name)))
        self._close_again()

    def record(self, written: Mapping[str, bytes], removed: Collection[str] = ()) -> None:
        """Write records for other processes of this machine, and remove some."""

        def work(txn: Writer) -> None:
            records.remove(txn, removed)
            records.put(txn, written)

        self._rebuild_if_damaged(lambda: self._environment.write(work))
        self._close_again()

    def records(self) -> dict[str, bytes]:
        """Return all records by name."""
        return self._rebuild_if_damaged(lambda: self._environment.read(records.read_all))

    def rebuild(self) -> None:
        """Remove a damaged environment and begin an empty one."""
        self._environment.discard()
        self._chunks.forget_all()
        check_identity(self._environment, self.schema)

    def check_process(self) -> None:
        """See `SharedEnvironment.check_process`."""
        self._environment.check_process()

    def is_replaced(self) -> bool:
        """True if another process has begun a new store in its place (after damage or disuse): then close this one."""
        return self._environment.is_replaced()

    def close(self) -> None:
        """Close the environment in this process.

        Background work that still uses this object may open the environment again, and closes it when it is done.
        (Other objects of the same folder open it again when they need it.)
        """
        self._closed = True
        self._chunks.close_files()
        self._environment.close()

    @property
    def is_closed(self) -> bool:
        """True if `close` was called."""
        return self._closed

    def _close_again(self) -> None:
        if self._closed:
            self.close()

    @property
    def map_bytes(self) -> int:
        """Current size of the map."""
        return self._environment.map_bytes

    # -- for View ----------------------------------------------------------------------------------

    def read(self, work: Callable[[Callable[[Run, int], pa.RecordBatch]], None]) -> None:
        """Run `work` in one read transaction, with a function that opens chunk *i* of a run.

        Batches are valid only within the call: copy (`take`) rows that must live longer.
        """

        def with_txn(txn: Reader) -> None:
            work(lambda run, i: self._chunks.open(self._environment.folder, txn, run, i))

        self._environment.read(with_txn)

    def read_partly(self, work: Callable[[Callable[[Run, int], PartlyChecked]], None]) -> None:
        """Like `read`, for reading a small part of each chunk: only that part is checked against its checksums."""

        def with_txn(txn: Reader) -> None:
            work(lambda run, i: self._chunks.open_partly(self._environment.folder, txn, run, i))

        self._environment.read(with_txn)

    # -- inside ------------------------------------------------------------------------------------

    def _rebuild_if_damaged(self, work: Callable[[], T]) -> T:
        return rebuild_if_damaged(work, self.rebuild) if self._environment.writes else work()

    def _remove_abandoned(self) -> None:
        def read_known_names() -> set[str] | None:
            folder, runs = self._environment.folder, self.runs()
            files = {path.name for run in runs for path in file_paths(folder, run.key)}
            return None if self.is_replaced() else files

        try:
            remove_abandoned(self._environment.folder, read_known_names)
        except (StateError, OSError) as error:
            # Only a warning: abandoned files take disk space and have no other effect.
            _LOGGER.warning("abandoned files in %s could not be removed: %s", self.folder, error)

    def _add(
        self,
        batches: Iterable[pa.RecordBatch],
        newest: CheckpointRef,
        oldest: CheckpointRef,
        parent: CheckpointRef | None,
        base: bool,
        check: Callable[[Reader], None],
    ) -> Run:
        pending = PendingRun(uuid.uuid4().hex)
        for batch in split_batches(batches, self._chunk_rows):
            chunk, data, crcs = encode_chunk(batch)
            pending.add(chunk, data, crcs)
            del batch, data  # LMDB holds another copy while a transaction is open
            if pending.waiting_bytes >= _TRANSACTION_BYTES:
                self._environment.write(pending.put_waiting, pending.waiting_bytes)
                pending.mark_flushed()
        run = Run(
            key=pending.key,
            newest=newest,
            oldest=oldest,
            parent=parent,
            base=base,
            rows=sum(chunk.rows for chunk in pending.chunks),
            tombstones=sum(chunk.tombstones for chunk in pending.chunks),
            chunks=tuple(pending.chunks),
        )

        def finish(txn: Writer) -> Run:
            existing = manifest.find_same(txn, run)
            if existing is not None:
                txn.delete_prefix(b"chunks", bytes.fromhex(run.key))
                manifest.unmark_begun(txn, run.key)
                return existing
            check(txn)
            if pending.any_flushed and not manifest.is_begun(txn, run.key):
                raise StorageError(
                    f"writing run {newest} to the local store {self.folder} took so long that another process removed "
                    "it as abandoned; try again"
                )
            pending.put_waiting(txn)
            manifest.put(txn, run)
            manifest.unmark_begun(txn, run.key)
            return run

        written = self._environment.write(finish, pending.waiting_bytes)
        if written is run:
            self._chunks.mark_checked(run)
        return written

    def _is_worth_pruning(self, head: CheckpointRef | None) -> bool:
        def work(txn: Reader) -> bool:
            if manifest.read_begun(txn):
                return True
            runs = list(manifest.read_runs(txn))
            self._chunks.keep_only({run.key for run in runs})
            return bool(find_droppable(runs, head, frozenset()))

        return self._environment.read(work)
