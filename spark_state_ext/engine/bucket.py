"""One bucket's state over a commit: reconcile with the pointer, read, commit, new pointer.

Order of a commit: delta sealed → uploads begun → run in the local store → uploads waited for, where they must be →
pointer. Spark then makes the pointer durable with its batch. Whatever dies in between leaves files and runs that no
pointer names. Snapshots are written in the background; pointers only presume them.
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
from spark_state_ext.backends.replication import Replica, Restorable, taken_over
from spark_state_ext.commit.cadence import begins_with_parents, snapshot_due
from spark_state_ext.commit.committer import Committer
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.commit.snapshot_writer import SnapshotWriter
from spark_state_ext.commit.uploads import Upload
from spark_state_ext.errors import CorruptStoreError, LineageError, MissingRunError, StateError, StorageError
from spark_state_ext.files.erasure import is_old, marked, with_change
from spark_state_ext.files.horizon import counted
from spark_state_ext.files.sealed import SealedFile, seal
from spark_state_ext.restore.lazy import LazyRestore
from spark_state_ext.restore.load_plan import Chain
from spark_state_ext.restore.loader import Loader
from spark_state_ext.restore.sources import Sources, restore_order
from spark_state_ext.store import LocalStore, View
from spark_state_ext.version import __version__
from spark_state_ext.worker.memory import Calls, give_back
from spark_state_ext.worker.spill import SpillBuffer

__all__ = ["Bucket", "CommitResult", "Sizes"]

T = TypeVar("T")

_LOGGER = logging.getLogger("spark_state_ext")
# Other processes may prune while we fetch; each round makes progress, so a few are plenty.
_ROUNDS_MAX = 5


@dataclass(frozen=True)
class Sizes:
    """How large a bucket's state is.

    Parameters
    ----------
    rows_max, rows_min
        Bounds of its live rows. They meet where one run has all of it.
    size_bytes
        Bytes of its runs.
    """

    rows_max: int
    rows_min: int
    size_bytes: int

    @staticmethod
    def of(view: View) -> Sizes:
        """Those of a view."""
        return Sizes(view.rows_max, view.rows_min, view.size_bytes)


@dataclass(frozen=True)
class CommitResult:
    """What a commit made.

    Parameters
    ----------
    pointer
        To be handed to Spark.
    sizes
        Of the state at it.
    deferred
        Uploads that the task's last call has to wait for: the pointer claims that they are confirmed.
    waited_s
        How long the commit waited for backends.
    """

    pointer: Pointer
    sizes: Sizes
    deferred: tuple[Upload, ...] = ()
    waited_s: float = 0.0


class Bucket:
    """State of one bucket, as of a pointer."""

    def __init__(
        self,
        store: LocalStore,
        replicas: Sequence[Replica],
        pointer: Pointer,
        writer: Writer,
        context: CommitContext,
        *,
        restore_from: str | None = None,
        memory: Calls | None = None,
        sources: Sequence[Restorable] = (),
    ) -> None:
        self._store = store
        self._replicas = list(replicas)
        self.pointer = pointer
        self._writer = writer
        self._context = context
        self._memory = memory or Calls()
        self.committer = Committer(store, replicas, context)
        self._snapshots = SnapshotWriter(store, context, self.committer.snapshots, self)
        asked = [*sources, *replicas]
        known = taken_over(pointer, asked)
        # Longer than a backend that fails is tried again, so that its error is told.
        silent_s = context.options.commit_timeout_ms / 1000 * 1.1
        self._sources = Sources(restore_order(asked, known, restore_from), pointer, restore_from, silent_s)
        kept_ms = pointer.ages.window_ms if pointer.ages is not None else None
        operators = [pointer.operator, *pointer.origins]
        # Other sources are at hand in this call only.
        key = BucketKey(pointer.operator, pointer.query_folder, pointer.bucket)
        self._lazy = LazyRestore(store, self._sources, key, None if sources else context.lazy, context.while_waiting)
        self._loader = Loader(
            store, self._sources, operators, pointer.bucket, context.scratch, kept_ms, context.while_waiting, self._lazy
        )

    @property
    def store(self) -> LocalStore:
        """Its local store."""
        return self._store

    @property
    def fetched_files(self) -> int:
        """Checkpoint files that were read and applied."""
        return self._loader.fetched_files

    @property
    def restore_gaps(self) -> int:
        """Checkpoint files that a backend should have given, and another one gave."""
        return self._sources.gaps

    def close(self) -> None:
        """Have a restore that is under way end soon with `InterruptedRestoreError`; from any thread.

        Its backends' restore managers are of no use after that.
        """
        self._sources.close()

    def read(self, work: Callable[[View], T]) -> T:
        """Run `work` on the state at the pointer; what the local store lacks is fetched first.

        `work` must be repeatable.
        """
        return self._reconciled(self.pointer, work)

    def scan(self) -> Iterator[pa.RecordBatch]:
        """All live rows at the pointer, ascending by hash; each batch is read when it is asked for."""
        after = -1
        while after < 2**64 - 1:
            after, rows = self.read(partial(View.piece, after=after))
            if rows.num_rows:
                yield rows

    def commit(
        self, rows: SpillBuffer, heartbeat: bool = True, *, may_defer: bool = False, room_bytes: int = 1 << 62
    ) -> CommitResult:
        """Make a new checkpoint of changed rows."""
        self._store.check_process()
        self._memory.note(str(self._store.folder), rows.size_bytes)
        # Counted before anything is written, so that each file tells its heartbeat.
        begun = self.committer.begin(self.pointer)
        pointer = counted(begun.pointer, heartbeat, self._context.batches_retained)
        pointer = replace(pointer, epoch=self._writer.epoch)
        pointer = marked(pointer, self._context.batch_ms, self._context.options.erase_window_ms)
        behind = self.committer.snapshots.behind(pointer)
        if rows.rows == 0 and not behind and not self._renewal_due(pointer):
            # Where format 1 needs a snapshot that is not there, an empty delta makes a checkpoint to take it of.
            same = self._snapshots.from_a_snapshot(pointer)
            if same is not None:
                return CommitResult(same, self.read(Sizes.of), waited_s=begun.waited_s)
        self._writer = replace(self._writer, heartbeat=pointer.heartbeats, quiet=not heartbeat)
        parent = self.pointer.ref
        ref = self._next_ref()
        sealed = seal(self.header(ref, DELTA), self._store.schema, rows, self._context.scratch)
        try:
            entry = LineageEntry(ref, sealed.size_bytes, pointer.heartbeats)
            new = self._changed(replace(pointer, lineage=(*pointer.lineage, entry), parent=parent), rows)
            handed_in = self.committer.hand_in(new, sealed, may_defer, room_bytes)
            self._sources.hold(sealed)
            self._reconciled(self.pointer, lambda view: self._store.apply(rows, ref, parent))
            # Only what is committed for certain is merged and dropped: the pointer we were given, not the one we make.
            self._tidy(parent)
            state_bytes, sizes = self._reconciled(new, lambda view: (self._state_bytes(view), Sizes.of(view)))
            finished = self.committer.finish(replace(new, rows=sizes.rows_max), handed_in)
            # What a bucket's first call begins with is in no batch yet. That one is to wait for no state written anew.
            first_due = self.pointer.batch >= 0 and begins_with_parents(finished.pointer)
            due = snapshot_due(finished.pointer.lineage, state_bytes) or first_due
            made = self._snapshots.in_time(finished.pointer, due, behind, changed=rows.rows > 0)
            waited_s = begun.waited_s + finished.waited_s
            return CommitResult(made, sizes, finished.deferred, waited_s)
        finally:
            sealed.let_go()

    def _state_bytes(self, view: View) -> int:
        """About the bytes of the state."""
        if not self._store.outgrown(view):
            return view.size_bytes
        # Most of the runs may be rows that were written anew, and only the snapshot that this is about removes them.
        return max(run.size_bytes for run in view.runs)

    def _next_ref(self) -> CheckpointRef:
        """The new checkpoint: unique to this very call, whatever batch and attempt it is."""
        return CheckpointRef(self.pointer.version + 1, new_checkpoint_id())

    def _renewal_due(self, pointer: Pointer) -> bool:
        """Whether the committed checkpoint is so old that its file might be taken for one that nobody follows."""
        if not pointer.lineage:
            return False
        old = pointer.ages is not None and is_old(pointer.ages, self._context.batch_ms)
        return old or pointer.lineage[-1].heartbeat + self._context.batches_retained < pointer.heartbeats

    def _changed(self, new: Pointer, rows: SpillBuffer) -> Pointer:
        if new.ages is None:
            return new
        return replace(new, ages=with_change(new.ages, self._context.batch_ms, rows.rows > 0))

    def _tidy(self, committed: CheckpointRef | None) -> None:
        """Compact and prune. The new checkpoint is safe already, so no failure here may fail the batch."""
        try:
            try:
                # The snapshot that was due last, which may be under way still.
                unconfirmed = self.pointer.lineage[0].ref if self.pointer.lineage else None
                compacted = self._store.compact(committed, unconfirmed)
                if compacted is not None:
                    give_back(compacted.size_bytes)
            finally:
                # Also where there is no room to merge: this makes some.
                self._store.prune(committed)
        except MissingRunError:
            return  # another process pruned first; the next commit tries again
        except CorruptStoreError as error:
            _LOGGER.warning("%s; it is built anew from the checkpoint files", error)
            self._store.rebuild()
        except StorageError as error:
            _LOGGER.warning("the local store is not tidied: %s; the next commit tries again", error)

    # -- snapshots ---------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called, or a load has failed: the next call needs other restore managers."""
        return self._sources.is_closed

    def pinned(self, pointer: Pointer, for_s: float) -> tuple[View, str]:
        """The view at a pointer, with its runs pinned for a while."""
        return self._reconciled(pointer, lambda view: (view, self._store.pin(view, for_s)))

    def unpin(self, pin: str) -> None:
        """Let go of pinned runs."""
        try:
            self._store.unpin(pin)
        except StateError as error:
            _LOGGER.warning("a pin of the local store is left to expire: %s", error)

    def ingest(self, snapshot: SealedFile, ref: CheckpointRef) -> None:
        """Have the local store use a snapshot in place of the runs that it was made of."""
        try:
            self._loader.ingest(snapshot, ref)
        except StateError as error:
            _LOGGER.warning("the local store goes on with its old runs: %s", error)

    # -- files -------------------------------------------------------------------------------------

    def header(self, ref: CheckpointRef, kind: str) -> LineageHeader:
        """The header of a file of a new checkpoint."""
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

    def _reconciled(self, pointer: Pointer, work: Callable[[View], T]) -> T:
        rebuilt = False
        rounds = 0
        while True:
            try:
                view = self._whole_view(pointer)
                try:
                    self._lazy.attach(view)
                    return work(view)
                except MissingRunError as error:
                    # Pruned by another process in the middle of the work. The view may be whole still, by way of a
                    # compacted run, so it is asked for again before anything is fetched.
                    rounds += 1
                    if rounds > _ROUNDS_MAX:
                        # The manifest names what is not there: somebody has removed a file.
                        raise CorruptStoreError(
                            f"the local store {self._store.folder} has lost what it names: {error}"
                        ) from error
            except CorruptStoreError as error:
                if rebuilt:
                    raise
                _LOGGER.warning("%s; it is built anew from the checkpoint files", error)
                rebuilt, rounds = True, 0
                self._store.rebuild()

    def _whole_view(self, pointer: Pointer) -> View:
        """The view of a checkpoint, after fetching what the local store lacks of it."""
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
        """What is here must have been built on what the pointer says (SPARK-49374: ids of both are passed on)."""
        top = view.runs[0] if view.runs else None
        if top is None or top.base or top.newest != top.oldest or pointer.parent is None:
            return
        if top.parent != pointer.parent:
            raise LineageError(
                f"checkpoint {pointer.ref} of bucket {pointer.bucket} of operator {pointer.operator!r} was built on "
                f"{top.parent}; its pointer says {pointer.parent}. Go back to an older Spark checkpoint."
            )
