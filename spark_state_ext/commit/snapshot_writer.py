"""Writes snapshots: from the moment a snapshot is due until it was sent to backends.

A snapshot is written in the background. The pointer does not wait for it: the snapshot is unconfirmed until a call
finds it in a backend. A call writes a snapshot itself only if workers live too briefly for that, or if no backend has
the state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import pyarrow as pa

from arrow_schemas.lineage import SNAPSHOT, CheckpointRef, LineageHeader
from arrow_schemas.pointer import Pointer
from spark_state_ext.backends.replication import is_restorable
from spark_state_ext.commit.cadence import with_unconfirmed_snapshot
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.commit.snapshots import Snapshots
from spark_state_ext.errors import CorruptStoreError, StateError
from spark_state_ext.files.erasure import is_snapshot_due, with_snapshot
from spark_state_ext.files.sealed_file import SealedFile, seal
from spark_state_ext.store import LocalStore, View
from spark_state_ext.worker.memory import release_memory

__all__ = ["SnapshotSource", "SnapshotWriter"]

_LOGGER = logging.getLogger("spark_state_ext")
# After so many unconfirmed snapshots in a row that never arrived, a call writes one itself.
_MISSED_MAX = 2
# How long a snapshot's runs stay pinned while it waits to be written, and after each batch of rows that was written.
_WAITING_PIN_S = 3_600.0
_PIN_S = 600.0


class SnapshotSource(Protocol):
    """The bucket whose snapshots are written."""

    @property
    def is_closed(self) -> bool:
        """True if this call can no longer restore anything."""
        ...

    def pin_view(self, pointer: Pointer, for_s: float) -> tuple[View, str]:
        """Return the view at a pointer and the name of the pin that keeps its runs for `for_s` seconds."""
        ...

    def unpin(self, pin: str) -> None:
        """Remove a pin."""
        ...

    def header(self, ref: CheckpointRef, kind: str) -> LineageHeader:
        """Return the header of a checkpoint's file."""
        ...

    def ingest(self, snapshot: SealedFile, ref: CheckpointRef) -> None:
        """Replace the runs that a snapshot was made of by that snapshot in the local store."""
        ...


class SnapshotWriter:
    """Writes the snapshots of one bucket in one call."""

    def __init__(self, store: LocalStore, context: CommitContext, snapshots: Snapshots, bucket: SnapshotSource) -> None:
        self._store = store
        self._context = context
        self._snapshots = snapshots
        self._bucket = bucket

    def with_due_snapshots(
        self, pointer: Pointer, is_due: bool, backends_behind: Sequence[str], changed: bool
    ) -> Pointer:
        """Return the pointer after starting the snapshots that it needs, or writing them if it cannot do without."""
        trimmed = self.trim_to_snapshot(pointer)
        with_snapshots = self._with_erasure_snapshots(
            pointer, is_due or trimmed is None, backends_behind, changed, now=trimmed is None
        )
        return (
            with_snapshots
            if trimmed is None or with_snapshots.lineage != pointer.lineage
            else replace(with_snapshots, lineage=trimmed.lineage)
        )

    def _with_erasure_snapshots(
        self, pointer: Pointer, is_due: bool, backends_behind: Sequence[str], changed: bool, now: bool
    ) -> Pointer:
        """Start snapshots as `_with_snapshots`, and also those that erase removed keys' bytes in time."""
        ages = pointer.ages
        if ages is None:
            return self._with_snapshots(pointer, is_due, backends_behind, now)
        arrived = False
        # The first checkpoint needs none: its delta is the whole state.
        if len(pointer.lineage) > 1 and is_snapshot_due(ages, self._context.batch_ms):
            arrived = self._has_arrived(pointer)
            if arrived and ages.snapshots_wanted == 1:
                ages = replace(ages, snapshots_wanted=0)
            else:
                is_due = True
        with_snapshots = self._with_snapshots(pointer, is_due, backends_behind, now)
        if is_due and len(with_snapshots.lineage) == 1 < len(pointer.lineage):
            ages = with_snapshot(ages, self._context.batch_ms, changed, arrived)
        return replace(with_snapshots, ages=ages)

    def _has_arrived(self, pointer: Pointer) -> bool:
        """True if the last unconfirmed snapshot has arrived."""
        unconfirmed = pointer.lineage[0].ref
        busy = self._context.runner.busy(self._work_name(unconfirmed))
        return not busy and self._snapshots.has_snapshot(pointer, unconfirmed)

    def _with_snapshots(self, pointer: Pointer, is_due: bool, backends_behind: Sequence[str], now: bool) -> Pointer:
        """Return the pointer after starting a snapshot of its checkpoint, if one is due or a backend needs one.

        With `now`, the snapshot is written before this returns, and the pointer's lineage begins with it.
        """
        retries = self._snapshots.find_retries(pointer)
        if not (is_due or backends_behind or retries):
            return pointer
        if not is_restorable(pointer):
            # No configured backend has this state, so one must get it before the pointer is returned.
            self._write_now(pointer, backends_behind)
            return self._snapshots.with_full_snapshot(
                with_unconfirmed_snapshot(pointer) if now else pointer, backends_behind, confirmed=True
            )
        try:
            return self._with_snapshot(pointer, is_due, backends_behind, retries, now)
        except StateError as error:
            # A failed load has closed the bucket: the next call needs new restore managers.
            if self._bucket.is_closed or now:
                raise
            # The deltas are durable and complete. The snapshot stays due, so the next commit tries again.
            _LOGGER.warning(
                "no snapshot of checkpoint %s was started, the next commit tries again: %s", pointer.ref, error
            )
            return pointer

    def _with_snapshot(
        self, pointer: Pointer, is_due: bool, backends_behind: Sequence[str], retries: Sequence[str], now: bool
    ) -> Pointer:
        header = self._header(pointer)
        names = self._snapshots.replica_names if is_due else [*backends_behind, *retries]
        missed = self._count_missed(pointer) if is_due else pointer.snapshots_missed
        # An overdue snapshot means that the background has refused it for long.
        if now or missed >= _MISSED_MAX or self._context.cadence.is_overdue(pointer.lineage):
            self._write_now(pointer, names)
            # For a rescaled bucket, this snapshot completes all backends.
            return self._snapshots.with_full_snapshot(
                replace(with_unconfirmed_snapshot(pointer), snapshots_missed=0),
                backends_behind if pointer.parents is None else names,
                confirmed=True,
            )
        view, pin = self._bucket.pin_view(pointer, _WAITING_PIN_S)
        # Before the background work begins, because that notes its end.
        awaiting_pointer = self._snapshots.with_full_snapshot(pointer, backends_behind)
        self._snapshots.note_retry(names)
        if not self._context.runner.submit(
            self._work_name(header.ref), lambda: self._write_snapshot(header, view, pin, names)
        ):
            self._bucket.unpin(pin)
            self._snapshots.note_not_sent(header.ref, names, "the background has too much to do")
            return pointer
        if is_due and not self._context.options.format_1_too:
            return replace(with_unconfirmed_snapshot(awaiting_pointer), snapshots_missed=missed)
        return awaiting_pointer

    def _write_now(self, pointer: Pointer, names: Sequence[str]) -> None:
        self._write_snapshot(self._header(pointer), *self._bucket.pin_view(pointer, _WAITING_PIN_S), names)

    def _header(self, pointer: Pointer) -> LineageHeader:
        """Return the header of a snapshot; it has format 1 if pointers have."""
        header = self._bucket.header(pointer.lineage[-1].ref, SNAPSHOT)
        return replace(header, format=1) if self._context.options.format_1_too else header

    def trim_to_snapshot(self, pointer: Pointer) -> Pointer | None:
        """Return the pointer as format 1 needs it, if that is written: its lineage begins with an existing snapshot.

        None: there is no snapshot.
        """
        if not self._context.options.format_1_too or not pointer.lineage:
            return pointer
        for position in range(len(pointer.lineage) - 1, -1, -1):
            ref = pointer.lineage[position].ref
            if ref.version == 1 or self._snapshots.has_snapshot(pointer, ref):
                return replace(pointer, lineage=pointer.lineage[position:])
        return None

    def _count_missed(self, pointer: Pointer) -> int:
        """Return how many unconfirmed snapshots in a row never arrived, up to the one that begins the lineage."""
        unconfirmed = pointer.lineage[0]
        if unconfirmed.ref.version == 1:  # the bucket's first delta, which is its whole state
            return 0
        if unconfirmed.ref == pointer.parents:  # no snapshot of it is ever written
            return pointer.snapshots_missed
        if self._context.runner.busy(self._work_name(unconfirmed.ref)):
            return pointer.snapshots_missed
        return 0 if self._snapshots.has_snapshot(pointer, unconfirmed.ref) else pointer.snapshots_missed + 1

    def _work_name(self, ref: CheckpointRef) -> str:
        """Return the name of the background work that writes a checkpoint's snapshot."""
        return f"snapshot {self._store.folder} {ref}"

    def _write_snapshot(self, header: LineageHeader, view: View, pin: str, names: Sequence[str]) -> None:
        def batches() -> Iterable[pa.RecordBatch]:
            for batch in view.scan():
                self._store.renew(pin, _PIN_S)
                yield batch

        try:
            sealed = seal(header, self._store.schema, batches(), self._context.scratch)
        except BaseException as error:
            # Note it, so that backends which wait for the snapshot get another one.
            self._snapshots.note_not_sent(header.ref, names, str(error) or repr(error))
            if isinstance(error, CorruptStoreError):
                # Rebuild now: calls may never read this part of the store, and then snapshots would always fail.
                self._store.rebuild()
            raise
        finally:
            self._bucket.unpin(pin)
            # Before sending, which may take far longer.
            release_memory(view.size_bytes)
        try:
            if self._store.outgrown(view):
                self._bucket.ingest(sealed, header.ref)
            self._snapshots.send(header.ref, sealed, names)
        finally:
            sealed.let_go()
