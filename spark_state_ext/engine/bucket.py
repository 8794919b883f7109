"""One bucket's state during a call: fetch what the pointer needs, read, commit, return a new pointer.

A commit seals the delta, starts its uploads, writes the run into the local store, waits for uploads that must be
confirmed, and returns the pointer. Spark then makes the pointer durable with its batch. A process that dies in between
leaves files and runs that no pointer names. Snapshots are written in the background; a pointer only expects them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import pyarrow as pa

from arrow_schemas.lineage import DELTA, CheckpointRef, LineageHeader, Writer, new_checkpoint_id
from arrow_schemas.pointer import LineageEntry, Pointer
from arrow_schemas.standby import BucketKey
from spark_state_ext.backends.replication import Replica, Restorable, adapt_to_backends
from spark_state_ext.commit.cadence import begins_with_parents
from spark_state_ext.commit.committer import Committer
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.commit.snapshot_writer import SnapshotWriter
from spark_state_ext.commit.uploads import Upload
from spark_state_ext.errors import CorruptStoreError, LineageError, MissingRunError, StateError, StorageError
from spark_state_ext.files.erasure import is_old, note_time, with_change
from spark_state_ext.files.horizon import count_call
from spark_state_ext.files.sealed_file import SealedFile, seal
from spark_state_ext.restore.lazy import LazyRestore
from spark_state_ext.restore.load_plan import Chain
from spark_state_ext.restore.loader import Loader
from spark_state_ext.restore.sources import Sources, restore_order
from spark_state_ext.store import LocalStore, View
from spark_state_ext.version import __version__
from spark_state_ext.worker.memory import CallSizes, release_memory
from spark_state_ext.worker.spill import SpillBuffer

__all__ = ["Bucket", "CommitResult", "Sizes"]

T = TypeVar("T")

_LOGGER = logging.getLogger("spark_state_ext")
# Other processes may prune during a fetch. Each round makes progress, so a few rounds are enough.
_ROUNDS_MAX = 5


@dataclass(frozen=True)
class Sizes:
    """The size of a bucket's state.

    Parameters
    ----------
    rows_max, rows_min
        Bounds of the number of live rows. They are equal if one run has the whole state.
    size_bytes
        Total size of the runs of the view.
    """

    rows_max: int
    rows_min: int
    size_bytes: int

    @staticmethod
    def of(view: View) -> Sizes:
        """Return the sizes of the state in a view."""
        return Sizes(view.rows_max, view.rows_min, view.size_bytes)


@dataclass(frozen=True)
class CommitResult:
    """The result of a commit.

    Parameters
    ----------
    pointer
        The pointer to return to Spark.
    sizes
        Sizes of the state at that pointer.
    deferred
        Uploads that the task's last call must wait for, because the pointer says that they are confirmed.
    waited_s
        How long the commit waited for backends, in seconds.
    """

    pointer: Pointer
    sizes: Sizes
    deferred: tuple[Upload, ...] = ()
    waited_s: float = 0.0


class Bucket:
    """The state of one bucket at a pointer."""

    def __init__(
        self,
        store: LocalStore,
        replicas: Sequence[Replica],
        pointer: Pointer,
        writer: Writer,
        context: CommitContext,
        *,
        restore_from: str | None = None,
        memory: CallSizes | None = None,
        sources: Sequence[Restorable] = (),
    ) -> None:
        self._store = store
        self._replicas = list(replicas)
        self.pointer = pointer
        self._writer = writer
        self._context = context
        self._memory = memory or CallSizes()
        self.committer = Committer(store, replicas, context)
        self._snapshots = SnapshotWriter(store, context, self.committer.snapshots, self)
        all_sources = [*sources, *replicas]
        replication_pointer = adapt_to_backends(pointer, all_sources)
        # Longer than the retries of a failing backend, so that its own error is reported.
        silent_s = context.options.commit_timeout_ms / 1000 * 1.1
        self._sources = Sources(
            restore_order(all_sources, replication_pointer, restore_from), pointer, restore_from, silent_s
        )
        window_ms = pointer.ages.window_ms if pointer.ages is not None else None
        operators = [pointer.operator, *pointer.origins]
        # Other sources exist only during this call, so later calls could not fetch from them lazily.
        key = BucketKey(pointer.operator, pointer.query_folder, pointer.bucket)
        self._lazy = LazyRestore(store, self._sources, key, None if sources else context.lazy, context.while_waiting)
        self._loader = Loader(
            store,
            self._sources,
            operators,
            pointer.bucket,
            context.scratch,
            window_ms,
            context.while_waiting,
            self._lazy,
        )

    @property
    def store(self) -> LocalStore:
        """The bucket's local store."""
        return self._store

    @property
    def fetched_files(self) -> int:
        """Number of checkpoint files that were read and applied."""
        return self._loader.fetched_files

    @property
    def restore_gaps(self) -> int:
        """Number of checkpoint files that the expected backend did not have and another one did."""
        return self._sources.gaps

    def close(self) -> None:
        """Interrupt a running restore with `InterruptedRestoreError`; may be called from any thread.

        The backends' restore managers cannot be used after that.
        """
        self._sources.close()

    def read(self, work: Callable[[View], T]) -> T:
        """Run `work` on the state at the pointer, after fetching what is missing in the local store.

        `work` may run several times.
        """
        return self._run_on_view(self.pointer, work)

    def scan(self) -> Iterator[pa.RecordBatch]:
        """Yield all live rows at the pointer, ascending by hash; each batch is read when it is requested."""
        after = -1
        while after < 2**64 - 1:
            after, rows = self.read(partial(View.piece, after=after))
            if rows.num_rows:
                yield rows

    def commit(
        self, rows: SpillBuffer, heartbeat: bool = True, *, may_defer: bool = False, room_bytes: int = 1 << 62
    ) -> CommitResult:
        """Commit changed rows as a new checkpoint."""
        self._store.check_process()
        self._memory.note(str(self._store.folder), rows.size_bytes)
        # Count the heartbeat before anything is written, because each file contains it.
        begin_phase = self.committer.begin(self.pointer)
        pointer = count_call(begin_phase.pointer, heartbeat, self._context.batches_retained)
        pointer = replace(pointer, epoch=self._writer.epoch)
        pointer = note_time(pointer, self._context.batch_ms, self._context.options.erase_window_ms)
        backends_behind = self.committer.snapshots.find_behind(pointer)
        if rows.rows == 0 and not backends_behind and not self._renewal_due(pointer):
            # If format 1 needs a snapshot that is missing, an empty delta makes a checkpoint to take the snapshot of.
            unchanged = self._snapshots.trim_to_snapshot(pointer)
            if unchanged is not None:
                return CommitResult(unchanged, self.read(Sizes.of), waited_s=begin_phase.waited_s)
        self._writer = replace(self._writer, heartbeat=pointer.heartbeats, quiet=not heartbeat)
        parent = self.pointer.ref
        ref = self._create_ref()
        sealed = seal(self.header(ref, DELTA), self._store.schema, rows, self._context.scratch)
        try:
            entry = LineageEntry(ref, sealed.size_bytes, pointer.heartbeats)
            new_pointer = self._note_change(replace(pointer, lineage=(*pointer.lineage, entry), parent=parent), rows)
            submitted = self.committer.submit_delta(new_pointer, sealed, may_defer, room_bytes)
            self._sources.hold(sealed)
            self._run_on_view(self.pointer, lambda view: self._store.apply(rows, ref, parent))
            # Only up to the input pointer: the new one may never be committed.
            self._compact_and_prune(parent)
            state_bytes, sizes = self._run_on_view(
                new_pointer, lambda view: (self._estimate_state_bytes(view), Sizes.of(view))
            )
            finish_phase = self.committer.finish(replace(new_pointer, rows=sizes.rows_max), submitted)
            # Not in a bucket's first call: no batch has its pointer yet, and the first must not wait for a snapshot.
            is_first_due = self.pointer.batch >= 0 and begins_with_parents(finish_phase.pointer)
            is_due = self._context.cadence.is_due(finish_phase.pointer.lineage, state_bytes) or is_first_due
            final_pointer = self._snapshots.with_due_snapshots(
                finish_phase.pointer, is_due, backends_behind, changed=rows.rows > 0
            )
            waited_s = begin_phase.waited_s + finish_phase.waited_s
            return CommitResult(final_pointer, sizes, finish_phase.deferred, waited_s)
        finally:
            sealed.let_go()

    def _estimate_state_bytes(self, view: View) -> int:
        """Return the approximate size of the state in bytes."""
        if not self._store.outgrown(view):
            return view.size_bytes
        # Most runs may hold rows that were overwritten since, and only the snapshot to be decided on removes them.
        return max(run.size_bytes for run in view.runs)

    def _create_ref(self) -> CheckpointRef:
        """Return a new checkpoint, unique to this call whatever its batch and attempt."""
        return CheckpointRef(self.pointer.version + 1, new_checkpoint_id())

    def _renewal_due(self, pointer: Pointer) -> bool:
        """True if the committed checkpoint is so old that its file might be taken for abandoned."""
        if not pointer.lineage:
            return False
        is_too_old = pointer.ages is not None and is_old(pointer.ages, self._context.batch_ms)
        return is_too_old or pointer.lineage[-1].heartbeat + self._context.batches_retained < pointer.heartbeats

    def _note_change(self, pointer: Pointer, rows: SpillBuffer) -> Pointer:
        if pointer.ages is None:
            return pointer
        return replace(pointer, ages=with_change(pointer.ages, self._context.batch_ms, rows.rows > 0))

    def _compact_and_prune(self, committed: CheckpointRef | None) -> None:
        """Compact and prune the local store; a failure must not fail the batch, whose checkpoint is already safe."""
        try:
            try:
                # The snapshot that was due last may still be in progress.
                unconfirmed = self.pointer.lineage[0].ref if self.pointer.lineage else None
                compacted_run = self._store.compact(committed, unconfirmed)
                if compacted_run is not None:
                    release_memory(compacted_run.size_bytes)
            finally:
                # Even if there was no space to compact: pruning makes some.
                self._store.prune(committed)
        except MissingRunError:
            return  # another process pruned first; the next commit tries again
        except CorruptStoreError as error:
            _LOGGER.warning("%s; it is rebuilt from the checkpoint files", error)
            self._store.rebuild()
        except StorageError as error:
            _LOGGER.warning("the local store was not fully compacted or pruned: %s; the next commit tries again", error)

    # -- snapshots ---------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """True if `close` was called or a load failed: the next call needs new restore managers."""
        return self._sources.is_closed

    def pin_view(self, pointer: Pointer, for_s: float) -> tuple[View, str]:
        """Return the view at a pointer and the name of the pin that keeps its runs for `for_s` seconds."""
        return self._run_on_view(pointer, lambda view: (view, self._store.pin(view, for_s)))

    def unpin(self, pin: str) -> None:
        """Remove a pin."""
        try:
            self._store.unpin(pin)
        except StateError as error:
            _LOGGER.warning("a pin of the local store could not be removed and will expire: %s", error)

    def ingest(self, snapshot: SealedFile, ref: CheckpointRef) -> None:
        """Replace the runs that a snapshot was made of by that snapshot in the local store."""
        try:
            self._loader.ingest(snapshot, ref)
        except StateError as error:
            _LOGGER.warning("the local store could not ingest a snapshot and keeps its old runs: %s", error)

    # -- files -------------------------------------------------------------------------------------

    def header(self, ref: CheckpointRef, kind: str) -> LineageHeader:
        """Return the header of a file of a new checkpoint."""
        return LineageHeader(
            kind=kind,
            operator=self.pointer.operator,
            bucket=self.pointer.bucket,
            ref=ref,
            parent=self.pointer.ref,
            lineage=tuple(entry.ref for entry in self.pointer.lineage),
            schema_id=self.pointer.schema_id,
            writer=self._writer,
            package_version=__version__,
        )

    # -- reconciling -------------------------------------------------------------------------------

    def _run_on_view(self, pointer: Pointer, work: Callable[[View], T]) -> T:
        rebuilt = False
        rounds = 0
        while True:
            try:
                view = self._load_view(pointer)
                try:
                    self._lazy.attach(view)
                    return work(view)
                except MissingRunError as error:
                    # Another process pruned a run during the work. A compacted run may have replaced it, so get the
                    # view again before fetching anything.
                    rounds += 1
                    if rounds > _ROUNDS_MAX:
                        # The manifest names a missing run: its file was deleted.
                        raise CorruptStoreError(
                            f"a run is missing from the local store {self._store.folder}: {error}"
                        ) from error
            except CorruptStoreError as error:
                if rebuilt:
                    raise
                _LOGGER.warning("%s; it is rebuilt from the checkpoint files", error)
                rebuilt, rounds = True, 0
                self._store.rebuild()

    def _load_view(self, pointer: Pointer) -> View:
        """Return the view at a pointer, after fetching the runs that are missing in the local store."""
        rounds = 0
        while True:
            try:
                view = self._store.view(pointer.ref)
            except MissingRunError:
                rounds += 1
                if rounds > _ROUNDS_MAX:
                    raise
                self._loader.load(Chain.of(pointer))
                continue
            self._check_parent(view, pointer)
            return view

    @staticmethod
    def _check_parent(view: View, pointer: Pointer) -> None:
        """Refuse a run whose parent is not the parent in the pointer (SPARK-49374 passes on both ids)."""
        top = view.runs[0] if view.runs else None
        if top is None or top.base or top.newest != top.oldest or pointer.parent is None:
            return
        if top.parent != pointer.parent:
            raise LineageError(
                f"checkpoint {pointer.ref} of bucket {pointer.bucket} of operator {pointer.operator!r} was built on "
                f"{top.parent}, but its pointer names {pointer.parent} as parent. Go back to an older Spark checkpoint."
            )
