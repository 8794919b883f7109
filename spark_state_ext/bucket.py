"""One bucket's state over a commit: reconcile with the pointer, read, commit, new pointer.

Order of a commit: delta file durable → run in the local store → (snapshot file durable) → pointer. Spark then makes the
pointer durable with its batch. Whatever dies in between leaves files and runs that no pointer names.
"""

from __future__ import annotations

import io
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
)
from spark_state_ext.lineage import files_to_try, snapshot_due
from spark_state_ext.spill import SpillBuffer
from spark_state_ext.store import LocalStore, View
from spark_state_ext.version import __version__

__all__ = ["Bucket"]

T = TypeVar("T")

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
        self._quietly(lambda: self._store.compact(parent))
        self._quietly(lambda: self._store.prune(parent))
        view = self._store.view(ref)
        if snapshot_due(lineage, view.size_bytes):
            snapshot_bytes = self._publish(ref, SNAPSHOT, view.scan())
            lineage = (LineageEntry(ref, snapshot_bytes),)
        return replace(self.pointer, lineage=lineage, rows=view.rows_max)

    def _quietly(self, work: Callable[[], object]) -> None:
        """Housekeeping that may lose a race with another process's; the next commit does it again."""
        try:
            work()
        except MissingRunError:
            return

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
            self._files.put(name, buffer.getbuffer())
            return buffer.tell()
        with tempfile.NamedTemporaryFile(dir=self._scratch, prefix="checkpoint-") as file:
            write_checkpoint(file, header, self._store.schema, batches)
            file.flush()
            self._files.put_file(name, file.name)
            return file.tell()

    def _reconciled(self, head: CheckpointRef | None, work: Callable[[View], T]) -> T:
        rebuilt = False
        rounds = 0
        while True:
            try:
                return work(self._store.view(head))
            except MissingRunError as error:
                fetched = self._fetch(error.ref)
                # Fetching goes back in versions and must end; only losing races with pruning is counted.
                if fetched is not None and fetched.version >= error.ref.version:
                    raise CorruptFileError(f"checkpoint {error.ref} names {fetched} as its parent") from error
                if fetched is None:
                    rounds += 1
                if rounds > _ROUNDS_MAX:
                    raise
            except CorruptStoreError:
                if rebuilt:
                    raise
                rebuilt = True
                self._store.rebuild()

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
