"""One bucket's state over a commit: reconcile with the pointer, read, commit, new pointer.

Order of a commit: delta file durable → run in the local store → (snapshot file durable) → pointer. Spark then makes the
pointer durable with its batch. Whatever dies in between leaves files and runs that no pointer names.
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

from arrow_schemas.lineage import (
    DELTA,
    SNAPSHOT,
    CheckpointRef,
    LineageHeader,
    Writer,
    file_name,
    new_checkpoint_id,
)
from arrow_schemas.pointer import LineageEntry, Pointer
from spark_state_ext.backend import Backend
from spark_state_ext.checkpoint import read_checkpoint, write_checkpoint
from spark_state_ext.errors import (
    CorruptError,
    CorruptFileError,
    CorruptStoreError,
    MissingCheckpointError,
    MissingRunError,
    StorageError,
)
from spark_state_ext.lineage import files_to_try, snapshot_due
from spark_state_ext.spill import SpillBuffer, local_errors
from spark_state_ext.store import LocalStore, View
from spark_state_ext.version import __version__

__all__ = ["Bucket"]

T = TypeVar("T")

_LOGGER = logging.getLogger("spark_state_ext")
_IN_MEMORY_BYTES_MAX = 32 << 20
# Other processes may prune while we fetch; each round makes progress, so a few are plenty.
_ROUNDS_MAX = 5


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
    """

    def __init__(self, store: LocalStore, files: Backend, pointer: Pointer, writer: Writer, scratch: Path) -> None:
        self._store = store
        self._files = files
        self.pointer = pointer
        self._writer = writer
        self._scratch = scratch
        self.fetched_files = 0

    def read(self, work: Callable[[View], T]) -> T:
        """Run `work` on the state at the pointer; what the local store lacks is fetched first.

        `work` must be repeatable.

        Raises
        ------
        MissingCheckpointError, CorruptFileError
            When neither the local store nor any checkpoint file has a part of the lineage.
        """
        return self._reconciled(self.pointer.ref, work)

    def commit(self, rows: SpillBuffer) -> Pointer:
        """Make a new checkpoint of changed rows; returns the pointer to hand to Spark.

        Parameters
        ----------
        rows
            Changed rows in run order, tombstones included. When there are none, the checkpoint stays the same.
        """
        if rows.rows == 0:
            return self.pointer
        parent = self.pointer.ref
        ref = CheckpointRef(self.pointer.version + 1, new_checkpoint_id())
        size = self._publish(ref, DELTA, rows)
        self._reconciled(parent, lambda view: self._store.apply(rows, ref, parent))
        lineage = (*self.pointer.lineage, LineageEntry(ref, size))
        # Only what is committed for certain is merged and dropped: the pointer we were given, not the one we make.
        self._tidy(parent)
        state_bytes, rows_max = self._reconciled(ref, lambda view: (view.size_bytes, view.rows_max))
        if snapshot_due(lineage, state_bytes):
            lineage = self._snapshot(ref, lineage)
        return replace(self.pointer, lineage=lineage, rows=rows_max)

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

    def _snapshot(self, ref: CheckpointRef, lineage: tuple[LineageEntry, ...]) -> tuple[LineageEntry, ...]:
        """The lineage that begins with a snapshot of `ref`; the one given when the snapshot could not be written."""
        try:
            size = self._reconciled(ref, lambda view: self._publish(ref, SNAPSHOT, view.scan()))
        except (StorageError, MissingRunError) as error:
            # The deltas are durable and hold everything. The snapshot stays due, so the next commit tries again.
            _LOGGER.warning("checkpoint %s goes on without a snapshot: %s", ref, error)
            return lineage
        return (LineageEntry(ref, size),)

    def _publish(self, ref: CheckpointRef, kind: str, batches: Iterable[pa.RecordBatch]) -> int:
        """Write a checkpoint file; returns its size in bytes."""
        header = LineageHeader(
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
        name = file_name(ref, kind)
        large = not isinstance(batches, SpillBuffer) or batches.size_bytes > _IN_MEMORY_BYTES_MAX
        if not large:
            buffer = io.BytesIO()
            write_checkpoint(buffer, header, self._store.schema, batches)
            # Not getbuffer(): a view of a BytesIO that an error's traceback keeps alive crashes CPython's collector.
            data = buffer.getvalue()
            self._files.put(name, data)
            return len(data)
        with local_errors(self._scratch), tempfile.NamedTemporaryFile(dir=self._scratch, prefix="checkpoint-") as file:
            write_checkpoint(file, header, self._store.schema, batches)
            file.flush()
            self._files.put_file(name, file.name)
            return file.tell()

    def _reconciled(self, head: CheckpointRef | None, work: Callable[[View], T]) -> T:
        rebuilt = False
        rounds = 0
        while True:
            try:
                view = self._whole_view(head)
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

    def _whole_view(self, head: CheckpointRef | None) -> View:
        """The view of a checkpoint, after fetching what the local store lacks of it."""
        rounds = 0
        while True:
            try:
                return self._store.view(head)
            except MissingRunError as error:
                fetched = self._fetch(error.ref)
                # Fetching goes back in versions and must end; only losing races with pruning is counted.
                if fetched is not None and fetched.version >= error.ref.version:
                    raise CorruptFileError(f"checkpoint {error.ref} names {fetched} as its parent") from error
                if fetched is None:
                    rounds += 1
                if rounds > _ROUNDS_MAX:
                    raise

    def _fetch(self, ref: CheckpointRef) -> CheckpointRef | None:
        """Bring one checkpoint into the local store; returns its parent when that is needed too."""
        failures: list[CorruptError | MissingCheckpointError] = []
        for kind in files_to_try(ref, self.pointer.lineage):
            try:
                found = read_checkpoint(self._files, ref, kind, self._store.schema, self._scratch)
                if (found.header.operator, found.header.bucket) != (
                    self.pointer.operator,
                    self.pointer.bucket,
                ):
                    raise CorruptFileError(
                        f"{self._files.where(file_name(ref, kind))} belongs to bucket {found.header.bucket} of "
                        f"operator {found.header.operator!r}"
                    )
                self._store.restore(found.batches, ref, found.header.parent, snapshot=kind == SNAPSHOT)
                self.fetched_files += 1
                return None if kind == SNAPSHOT else found.header.parent
            except (CorruptFileError, MissingCheckpointError) as error:
                failures.append(error)
        damaged = [failure for failure in failures if isinstance(failure, CorruptError)]
        raise type(damaged[0] if damaged else failures[0])(
            f"checkpoint {ref} of bucket {self.pointer.bucket} of operator {self.pointer.operator!r} cannot be loaded: "
            + "; ".join(str(failure) for failure in failures)
            + ". Bring the file back, or go back to an older Spark checkpoint whose files are whole."
        ) from failures[0]
