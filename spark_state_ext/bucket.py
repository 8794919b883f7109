"""One bucket's state over a commit: reconcile with the pointer, read, commit, new pointer.

Order of a commit: delta file durable → run in the local store → pointer. Spark then makes the pointer durable with its
batch. Whatever dies in between leaves files and runs that no pointer names. Snapshots are written in the background;
pointers only presume them.
"""

from __future__ import annotations

import io
import logging
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, LineageHeader, Writer, file_name, new_checkpoint_id
from arrow_schemas.pointer import LineageEntry, Pointer
from spark_state_ext.background import Inline, Runner
from spark_state_ext.checkpoint import write_checkpoint
from spark_state_ext.errors import CorruptStoreError, LineageError, MissingRunError, StateError, StorageError
from spark_state_ext.folder import Folder
from spark_state_ext.lineage import Chain, counted, presuming_snapshot, snapshot_due, snapshot_overdue
from spark_state_ext.loading import Loader
from spark_state_ext.spill import SpillBuffer, local_errors
from spark_state_ext.store import LocalStore, View
from spark_state_ext.version import __version__

__all__ = ["BATCHES_RETAINED", "Bucket"]

T = TypeVar("T")

_LOGGER = logging.getLogger("spark_state_ext")
_IN_MEMORY_BYTES_MAX = 32 << 20
# Other processes may prune while we fetch; each round makes progress, so a few are plenty.
_ROUNDS_MAX = 5
# Presumed snapshots that never arrived, in a row, until a call writes one itself: workers here die too young.
_MISSED_MAX = 2
# How long the runs of a snapshot stay pinned while it waits for its turn, and from each sign of life of its writer on.
_WAITING_PIN_S = 3_600.0
_PIN_S = 600.0
# Spark's default of spark.sql.streaming.minBatchesToRetain.
BATCHES_RETAINED = 100


class Bucket:
    """State of one bucket, as of a pointer.

    Parameters
    ----------
    store
        The bucket's local store.
    files
        The bucket's folder of checkpoint files.
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
    """

    def __init__(
        self,
        store: LocalStore,
        files: Folder,
        pointer: Pointer,
        writer: Writer,
        scratch: Path,
        runner: Runner | None = None,
        batches_retained: int = BATCHES_RETAINED,
    ) -> None:
        self._store = store
        self.files = files
        self.pointer = pointer
        self._writer = writer
        self._scratch = scratch
        self._runner = runner or Inline()
        self._batches_retained = batches_retained
        self._loader = Loader(store, files, pointer.operator, pointer.bucket, scratch)

    @property
    def fetched_files(self) -> int:
        """Checkpoint files that were read and applied."""
        return self._loader.fetched_files

    def read(self, work: Callable[[View], T]) -> T:
        """Run `work` on the state at the pointer; what the local store lacks is fetched first.

        `work` must be repeatable.

        Raises
        ------
        MissingCheckpointError, CorruptFileError, LineageError
            When neither the local store nor any checkpoint file has a part of the lineage, or they contradict it.
        """
        return self._reconciled(self.pointer, work)

    def commit(self, rows: SpillBuffer, heartbeat: bool = True) -> Pointer:
        """Make a new checkpoint of changed rows; returns the pointer to hand to Spark.

        Parameters
        ----------
        rows
            Changed rows in run order, tombstones included. When there are none, the checkpoint stays the same, but is
            renewed once in so many batches: clean-up goes by the age of files.
        heartbeat
            Whether the call came with one: then every bucket in this batch has one, in every attempt at it.
        """
        # Counted before anything is written, so that each file tells its beat.
        pointer = counted(self.pointer, heartbeat, self._batches_retained)
        if rows.rows == 0 and not self._renewal_due(pointer):
            return pointer
        self._writer = replace(self._writer, beat=pointer.beats)
        parent = self.pointer.ref
        ref = self._next_ref()
        size = self._publish(self._header(ref, DELTA), rows)
        self._reconciled(self.pointer, lambda view: self._store.apply(rows, ref, parent))
        entry = LineageEntry(ref, size, pointer.beats)
        new = replace(pointer, lineage=(*pointer.lineage, entry), parent=parent)
        # Only what is committed for certain is merged and dropped: the pointer we were given, not the one we make.
        self._tidy(parent)
        state_bytes, rows_max = self._reconciled(new, lambda view: (view.size_bytes, view.rows_max))
        new = replace(new, rows=rows_max)
        return self._with_snapshot(new) if snapshot_due(new.lineage, state_bytes) else new

    def _next_ref(self) -> CheckpointRef:
        """The new checkpoint: unique to this very call, whatever batch and attempt it is."""
        return CheckpointRef(self.pointer.version + 1, new_checkpoint_id())

    def _renewal_due(self, pointer: Pointer) -> bool:
        """Whether the committed checkpoint is so old that its file might be taken for one that nobody follows."""
        return bool(pointer.lineage) and pointer.lineage[-1].beat + self._batches_retained < pointer.beats

    def _tidy(self, committed: CheckpointRef | None) -> None:
        """Compact and prune. The new checkpoint is safe already, so no failure here may fail the batch."""
        try:
            try:
                self._store.compact(committed)
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

    def _with_snapshot(self, new: Pointer) -> Pointer:
        """The pointer that presumes a snapshot of its checkpoint, which is under way; or as it is, where none is."""
        header = self._header(new.lineage[-1].ref, SNAPSHOT)
        try:
            missed = self._missed(new)
            pinned = self._reconciled(new, lambda view: (view, self._store.pin(view, _WAITING_PIN_S)))
        except StateError as error:
            # The deltas are durable and hold everything. The snapshot stays due, so the next commit tries again.
            _LOGGER.warning("checkpoint %s goes on without a snapshot: %s", header.ref, error)
            return new
        presuming = replace(presuming_snapshot(new), snapshots_missed=missed)

        def write() -> None:
            self._write_snapshot(header, *pinned)

        # Where the runner has refused for long, it does not keep up either.
        if missed < _MISSED_MAX and not snapshot_overdue(new.lineage):
            if self._runner.submit(self._snapshot_work(header.ref), write):
                return presuming
            self._unpin(pinned[1])
            return new
        try:
            write()
        except StateError as error:
            _LOGGER.warning("checkpoint %s goes on without a snapshot: %s", header.ref, error)
            return new
        return replace(presuming, snapshots_missed=0)

    def _missed(self, new: Pointer) -> int:
        """How many presumed snapshots in a row never arrived, that at the beginning of the lineage included."""
        presumed = new.lineage[0]
        if presumed.ref.version == 1:  # the bucket's first delta, which is the whole state of its time
            return 0
        if self._runner.busy(self._snapshot_work(presumed.ref)):
            return new.snapshots_missed
        if self.files.exists(file_name(presumed.ref, SNAPSHOT)):
            return 0
        return new.snapshots_missed + 1

    def _snapshot_work(self, ref: CheckpointRef) -> str:
        """Name of the work that writes a checkpoint's snapshot."""
        return f"snapshot {self.files.where(file_name(ref, SNAPSHOT))}"

    def _write_snapshot(self, header: LineageHeader, view: View, pin: str) -> None:
        def batches() -> Iterable[pa.RecordBatch]:
            for batch in view.scan():
                self._store.renew(pin, _PIN_S)
                yield batch

        try:
            self._publish(header, batches())
        finally:
            self._unpin(pin)

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

    def _publish(self, header: LineageHeader, batches: Iterable[pa.RecordBatch]) -> int:
        """Write a checkpoint file; returns its size in bytes."""
        name = file_name(header.ref, header.kind)
        large = not isinstance(batches, SpillBuffer) or batches.size_bytes > _IN_MEMORY_BYTES_MAX
        if not large:
            buffer = io.BytesIO()
            write_checkpoint(buffer, header, self._store.schema, batches)
            # Not getbuffer(): a view of a BytesIO that an error's traceback keeps alive crashes CPython's collector.
            data = buffer.getvalue()
            self.files.put(name, data)
            return len(data)
        with local_errors(self._scratch), tempfile.NamedTemporaryFile(dir=self._scratch, prefix="checkpoint-") as file:
            write_checkpoint(file, header, self._store.schema, batches)
            file.flush()
            self.files.put_file(name, file.name)
            return file.tell()

    # -- reconciling -------------------------------------------------------------------------------

    def _reconciled(self, pointer: Pointer, work: Callable[[View], T]) -> T:
        rebuilt = False
        rounds = 0
        while True:
            try:
                view = self._whole_view(pointer)
                try:
                    return work(view)
                except MissingRunError:
                    # Pruned by another process in the middle of the work. The view may be whole still, by way of a
                    # merged run, so it is asked for again before anything is fetched.
                    rounds += 1
                    if rounds > _ROUNDS_MAX:
                        raise
            except CorruptStoreError:
                if rebuilt:
                    raise
                rebuilt = True
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
