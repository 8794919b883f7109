"""One bucket's state over a commit: reconcile with the pointer, read, commit, new pointer.

Order of a commit: delta sealed → uploads begun → run in the local store → uploads waited for, where they must be →
pointer. Spark then makes the pointer durable with its batch. Whatever dies in between leaves files and runs that no
pointer names. Snapshots are written in the background; pointers only presume them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, LineageHeader, Writer, new_checkpoint_id
from arrow_schemas.pointer import V2, LineageEntry, Pointer
from spark_state_ext.backends.replication import Replica, is_complete, taken_over
from spark_state_ext.commit.cadence import snapshot_due, snapshot_overdue, with_unconfirmed_snapshot
from spark_state_ext.commit.committer import Committer
from spark_state_ext.commit.decisions import CommitOptions
from spark_state_ext.commit.failures import Run
from spark_state_ext.commit.uploads import Uploads, WorkerUploads
from spark_state_ext.errors import CorruptStoreError, LineageError, MissingRunError, StateError, StorageError
from spark_state_ext.files.erasure import is_old, marked, snapshot_asked, with_change, with_snapshot
from spark_state_ext.files.horizon import counted
from spark_state_ext.files.sealed import SealedFile, seal
from spark_state_ext.restore.load_plan import Chain
from spark_state_ext.restore.loader import Loader
from spark_state_ext.restore.sources import Sources, restore_order
from spark_state_ext.store import LocalStore, View
from spark_state_ext.version import __version__
from spark_state_ext.worker.background import Inline, Runner
from spark_state_ext.worker.memory import Calls, give_back
from spark_state_ext.worker.spill import SpillBuffer

__all__ = ["BATCHES_RETAINED", "Bucket", "Sizes"]

T = TypeVar("T")

_LOGGER = logging.getLogger("spark_state_ext")
# Other processes may prune while we fetch; each round makes progress, so a few are plenty.
_ROUNDS_MAX = 5
# Unconfirmed snapshots that never arrived, in a row, until a call writes one itself: workers here die too young.
_MISSED_MAX = 2
# How long the runs of a snapshot stay pinned while it waits for its turn, and from each sign of life of its writer on.
_WAITING_PIN_S = 3_600.0
_PIN_S = 600.0
# Spark's default of spark.sql.streaming.minBatchesToRetain.
BATCHES_RETAINED = 100


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


class Bucket:
    """State of one bucket, as of a pointer.

    Parameters
    ----------
    store
        The bucket's local store.
    replicas
        The backends that keep its checkpoint files.
    pointer
        The committed pointer that Spark handed out.
    writer
        Who is working, for file headers.
    scratch
        Local folder for temporary files.
    runner
        Writes snapshots; by default they are written within `commit`.
    batches_retained
        Spark's ``spark.sql.streaming.minBatchesToRetain``.
    uploads
        Sends files beside batches.
    options
        Limits of commits; by default they are synchronous.
    restore_from
        Name of the backend to restore from, when there is a choice.
    run
        Whose call it is; None where nothing tells.
    clock_s
        The machine's monotonic clock.
    batch_ms
        The batch's time by Spark, milliseconds since 1970.
    memory
        What the process's calls changed: memory is given back when large ones are over.
    """

    def __init__(
        self,
        store: LocalStore,
        replicas: Sequence[Replica],
        pointer: Pointer,
        writer: Writer,
        scratch: Path,
        runner: Runner | None = None,
        batches_retained: int = BATCHES_RETAINED,
        *,
        uploads: Uploads | None = None,
        options: CommitOptions | None = None,
        restore_from: str | None = None,
        run: Run | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        batch_ms: int = 0,
        memory: Calls | None = None,
    ) -> None:
        self._store = store
        self._memory = memory or Calls()
        self._batch_ms = batch_ms
        self._replicas = list(replicas)
        self.pointer = pointer
        self._writer = writer
        self._scratch = scratch
        self._runner = runner or Inline()
        self._batches_retained = batches_retained
        self._uploads = uploads or WorkerUploads()
        self._options = options or CommitOptions(journal=False)
        self._run = run
        self.committer = Committer(
            store, replicas, self._uploads, self._options, batches_retained, self._runner, scratch, clock_s, run
        )
        known = taken_over(pointer, replicas)
        # Longer than a backend that fails is tried again, so that its error is told.
        silent_s = self._options.commit_timeout_ms / 1000 * 1.1
        self._sources = Sources(restore_order(replicas, known, restore_from), pointer, restore_from, silent_s)
        self._sizes: Sizes | None = None
        kept_ms = pointer.ages.window_ms if pointer.ages is not None else None
        self._loader = Loader(store, self._sources, pointer.operator, pointer.bucket, scratch, kept_ms)

    @property
    def store(self) -> LocalStore:
        """Its local store."""
        return self._store

    @property
    def sizes(self) -> Sizes:
        """Of the state as it was committed last; as it is at the pointer, where nothing was."""
        if self._sizes is None:
            self._sizes = self.read(Sizes.of)
        return self._sizes

    @property
    def fetched_files(self) -> int:
        """Checkpoint files that were read and applied."""
        return self._loader.fetched_files

    @property
    def restore_gaps(self) -> int:
        """Checkpoint files that a backend should have given, and another one gave."""
        return self._sources.gaps

    def while_restoring(self, work: Callable[[], None]) -> None:
        """Have `work` called now and then while checkpoint files are waited for; what it raises ends the restore."""
        self._loader.while_waiting = work

    def close(self) -> None:
        """Have a restore that is under way end soon with `InterruptedRestoreError`; from any thread.

        Its backends' restore managers are of no use after that.
        """
        self._sources.close()

    def read(self, work: Callable[[View], T]) -> T:
        """Run `work` on the state at the pointer; what the local store lacks is fetched first.

        `work` must be repeatable.

        Raises
        ------
        MissingCheckpointError, CorruptFileError, LineageError
            When neither the local store nor any checkpoint file has a part of the lineage, or they contradict it.
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
    ) -> Pointer:
        """Make a new checkpoint of changed rows; returns the pointer to hand to Spark.

        Parameters
        ----------
        rows
            Changed rows in run order, tombstones included. When there are none, the checkpoint stays the same, but is
            renewed once in so many batches: clean-up goes by the age of files.
        heartbeat
            Whether the call came with one: then every bucket in this batch has one, in every attempt at it.
        may_defer
            A later call of the task will wait for `committer.left`.
        room_bytes
            How many bytes may go inline.

        Raises
        ------
        StorageError
            When a backend failed, now or since the commit before; `CommitTimeoutError` when one takes too long.
        ForkedProcessError
            In a child that was forked from the process that made this: the commit is its parent's.
        """
        self._store.check_process()
        self._memory.note(str(self._store.folder), rows.size_bytes)
        # Counted before anything is written, so that each file tells its heartbeat.
        pointer = counted(self.committer.begin(self.pointer), heartbeat, self._batches_retained)
        pointer = marked(pointer, self._batch_ms, self._options.erase_window_ms)
        behind = self.committer.snapshots.behind(pointer)
        if rows.rows == 0 and not behind and not self._renewal_due(pointer):
            return self._in_old_terms(pointer)
        self._writer = replace(self._writer, heartbeat=pointer.heartbeats)
        parent = self.pointer.ref
        ref = self._next_ref()
        sealed = seal(self._header(ref, DELTA), self._store.schema, rows, self._scratch)
        try:
            entry = LineageEntry(ref, sealed.size_bytes, pointer.heartbeats)
            new = self._changed(replace(pointer, lineage=(*pointer.lineage, entry), parent=parent), rows)
            handed_in = self.committer.hand_in(new, sealed, may_defer, room_bytes)
            self._sources.hold(sealed)
            self._reconciled(self.pointer, lambda view: self._store.apply(rows, ref, parent))
            # Only what is committed for certain is merged and dropped: the pointer we were given, not the one we make.
            self._tidy(parent)
            state_bytes, self._sizes = self._reconciled(new, lambda view: (self._state_bytes(view), Sizes.of(view)))
            new = self.committer.finish(replace(new, rows=self._sizes.rows_max), handed_in)
            due = snapshot_due(new.lineage, state_bytes)
            return self._in_old_terms(self._with_snapshots_in_time(new, due, behind, changed=rows.rows > 0))
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
        old = pointer.ages is not None and is_old(pointer.ages, self._batch_ms)
        return old or pointer.lineage[-1].heartbeat + self._batches_retained < pointer.heartbeats

    def _changed(self, new: Pointer, rows: SpillBuffer) -> Pointer:
        if new.ages is None:
            return new
        return replace(new, ages=with_change(new.ages, self._batch_ms, rows.rows > 0))

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

    def _with_snapshots_in_time(self, new: Pointer, due: bool, behind: Sequence[str], changed: bool) -> Pointer:
        """As `_with_snapshots`, where removed keys' bytes have to be gone within a time, too."""
        ages = new.ages
        if ages is None:
            return self._with_snapshots(new, due, behind)
        arrived = False
        # A bucket's first checkpoint has its whole state in its delta.
        if len(new.lineage) > 1 and snapshot_asked(ages, self._batch_ms):
            arrived = self._arrived(new)
            if arrived and ages.snapshots_wanted == 1:
                ages = replace(ages, snapshots_wanted=0)
            else:
                due = True
        made = self._with_snapshots(new, due, behind)
        if due and len(made.lineage) == 1 < len(new.lineage):
            ages = with_snapshot(ages, self._batch_ms, changed, arrived)
        return replace(made, ages=ages)

    def _arrived(self, new: Pointer) -> bool:
        """Whether the last unconfirmed snapshot is there by now."""
        unconfirmed = new.lineage[0].ref
        busy = self._runner.busy(self._snapshot_work(unconfirmed))
        return not busy and self.committer.snapshots.has_snapshot(new, unconfirmed)

    def _with_snapshots(self, new: Pointer, due: bool, behind: Sequence[str]) -> Pointer:
        """The pointer with a snapshot of its checkpoint under way, where one is due or a backend has to catch up."""
        again = self.committer.snapshots.to_repeat(new)
        if not (due or behind or again):
            return new
        if not any(is_complete(status) for status in new.replication.values()):
            # Nothing that is configured holds this state, so the pointer must not go before something does.
            self._write_now(new, behind)
            return self.committer.snapshots.bootstrapping(new, behind, known=True)
        try:
            return self._with_snapshot(new, due, behind, again)
        except StateError as error:
            if self._sources.is_closed:  # by a load that failed: the next call needs other restore managers
                raise
            # The deltas are durable and hold everything. The snapshot stays due, so the next commit tries again.
            _LOGGER.warning("checkpoint %s goes on without a snapshot: %s", new.ref, error)
            return new

    def _with_snapshot(self, new: Pointer, due: bool, behind: Sequence[str], again: Sequence[str]) -> Pointer:
        header = self._header(new.lineage[-1].ref, SNAPSHOT)
        names = [replica.name for replica in self._replicas] if due else [*behind, *again]
        missed = self._missed(new) if due else new.snapshots_missed
        # Where the runner has refused for long, it does not keep up either.
        if missed >= _MISSED_MAX or snapshot_overdue(new.lineage):
            self._write_now(new, names)
            return self.committer.snapshots.bootstrapping(
                replace(with_unconfirmed_snapshot(new), snapshots_missed=0), behind, known=True
            )
        view, pin = self._pinned(new)
        # Before the work begins, which records its end.
        awaiting = self.committer.snapshots.bootstrapping(new, behind)
        self.committer.snapshots.taken_on(names)
        if not self._runner.submit(
            self._snapshot_work(header.ref), lambda: self._write_snapshot(header, view, pin, names)
        ):
            self._unpin(pin)
            self.committer.snapshots.not_sent(header.ref, names, "the background has too much to do")
            return new
        if due and self._options.pointer_write == V2:
            return replace(with_unconfirmed_snapshot(awaiting), snapshots_missed=missed)
        return awaiting

    def _write_now(self, new: Pointer, names: Sequence[str]) -> None:
        self._write_snapshot(self._header(new.lineage[-1].ref, SNAPSHOT), *self._pinned(new), names)

    def _pinned(self, new: Pointer) -> tuple[View, str]:
        return self._reconciled(new, lambda view: (view, self._store.pin(view, _WAITING_PIN_S)))

    def _in_old_terms(self, new: Pointer) -> Pointer:
        """The pointer as format 1 has it, where that is written: its lineage begins with a snapshot that is there."""
        if self._options.pointer_write == V2 or not new.lineage:
            return new
        for at in range(len(new.lineage) - 1, -1, -1):
            ref = new.lineage[at].ref
            if ref.version == 1 or self.committer.snapshots.has_snapshot(new, ref):
                return replace(new, lineage=new.lineage[at:])
        self._write_now(new, [replica.name for replica in self._replicas])
        return with_unconfirmed_snapshot(new)

    def _missed(self, new: Pointer) -> int:
        """How many unconfirmed snapshots in a row never arrived, that at the beginning of the lineage included."""
        unconfirmed = new.lineage[0]
        if unconfirmed.ref.version == 1:  # the bucket's first delta, which is the whole state of its time
            return 0
        if self._runner.busy(self._snapshot_work(unconfirmed.ref)):
            return new.snapshots_missed
        return 0 if self.committer.snapshots.has_snapshot(new, unconfirmed.ref) else new.snapshots_missed + 1

    def _snapshot_work(self, ref: CheckpointRef) -> str:
        """Name of the work that writes a checkpoint's snapshot."""
        return f"snapshot {self._store.folder} {ref}"

    def _write_snapshot(self, header: LineageHeader, view: View, pin: str, names: Sequence[str]) -> None:
        def batches() -> Iterable[pa.RecordBatch]:
            for batch in view.scan():
                self._store.renew(pin, _PIN_S)
                yield batch

        try:
            sealed = seal(header, self._store.schema, batches(), self._scratch)
        except BaseException as error:
            # Whoever waits for it should have another one made.
            self.committer.snapshots.not_sent(header.ref, names, str(error) or repr(error))
            raise
        finally:
            self._unpin(pin)
            # Before it is sent, which may take far longer.
            give_back(view.size_bytes)
        try:
            if self._store.outgrown(view):
                self._ingest(sealed, header.ref)
            self.committer.snapshots.send(header.ref, sealed, names)
        finally:
            sealed.let_go()

    def _ingest(self, snapshot: SealedFile, ref: CheckpointRef) -> None:
        try:
            self._loader.ingest(snapshot, ref)
        except StateError as error:
            _LOGGER.warning("the local store goes on with its old runs: %s", error)

    def _unpin(self, pin: str) -> None:
        try:
            self._store.unpin(pin)
        except StateError as error:
            _LOGGER.warning("a pin of the local store is left to expire: %s", error)

    # -- files -------------------------------------------------------------------------------------

    def _header(self, ref: CheckpointRef, kind: str) -> LineageHeader:
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
