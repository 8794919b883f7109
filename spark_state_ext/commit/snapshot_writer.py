"""The one owner of a snapshot, from the moment it is due until backends have been sent it.

A snapshot is written in the background. The pointer goes on without it: it is unconfirmed until somebody finds it in a
backend. Only where workers die too young for that, or no backend holds the state, a call writes it itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import pyarrow as pa

from arrow_schemas.lineage import SNAPSHOT, CheckpointRef, LineageHeader
from arrow_schemas.pointer import Pointer
from spark_state_ext.backends.replication import is_held
from spark_state_ext.commit.cadence import snapshot_overdue, with_unconfirmed_snapshot
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.commit.snapshots import Snapshots
from spark_state_ext.errors import CorruptStoreError, StateError
from spark_state_ext.files.erasure import snapshot_asked, with_snapshot
from spark_state_ext.files.sealed import SealedFile, seal
from spark_state_ext.store import LocalStore, View
from spark_state_ext.worker.memory import give_back

__all__ = ["Snapshotted", "SnapshotWriter"]

_LOGGER = logging.getLogger("spark_state_ext")
# Unconfirmed snapshots that never arrived, in a row, until a call writes one itself: workers here die too young.
_MISSED_MAX = 2
# How long the runs of a snapshot stay pinned while it waits for its turn, and from each sign of life of its writer on.
_WAITING_PIN_S = 3_600.0
_PIN_S = 600.0


class Snapshotted(Protocol):
    """The bucket whose snapshots are written."""

    @property
    def is_closed(self) -> bool:
        """Whether nothing more can be restored in this call."""
        ...

    def pin_view(self, pointer: Pointer, for_s: float) -> tuple[View, str]:
        """The view at a pointer, and the name under which its runs are pinned for a while."""
        ...

    def unpin(self, pin: str) -> None:
        """Let go of pinned runs."""
        ...

    def header(self, ref: CheckpointRef, kind: str) -> LineageHeader:
        """The header of a checkpoint's file."""
        ...

    def ingest(self, snapshot: SealedFile, ref: CheckpointRef) -> None:
        """Have the local store use a snapshot in place of the runs that it was made of."""
        ...


class SnapshotWriter:
    """Writes the snapshots of one bucket in one call."""

    def __init__(self, store: LocalStore, context: CommitContext, snapshots: Snapshots, bucket: Snapshotted) -> None:
        self._store = store
        self._context = context
        self._snapshots = snapshots
        self._bucket = bucket

    def with_due_snapshots(self, new: Pointer, due: bool, behind: Sequence[str], changed: bool) -> Pointer:
        """The pointer with the snapshots that it needs under way, or written where it cannot go without one."""
        based = self.trim_to_snapshot(new)
        made = self._before_bytes_are_too_old(new, due or based is None, behind, changed, now=based is None)
        return made if based is None or made.lineage != new.lineage else replace(made, lineage=based.lineage)

    def _before_bytes_are_too_old(
        self, new: Pointer, due: bool, behind: Sequence[str], changed: bool, now: bool
    ) -> Pointer:
        """As `_with_snapshots`, where removed keys' bytes have to be gone within a time, too."""
        ages = new.ages
        if ages is None:
            return self._with_snapshots(new, due, behind, now)
        arrived = False
        # A bucket's first checkpoint has its whole state in its delta.
        if len(new.lineage) > 1 and snapshot_asked(ages, self._context.batch_ms):
            arrived = self._arrived(new)
            if arrived and ages.snapshots_wanted == 1:
                ages = replace(ages, snapshots_wanted=0)
            else:
                due = True
        made = self._with_snapshots(new, due, behind, now)
        if due and len(made.lineage) == 1 < len(new.lineage):
            ages = with_snapshot(ages, self._context.batch_ms, changed, arrived)
        return replace(made, ages=ages)

    def _arrived(self, new: Pointer) -> bool:
        """Whether the last unconfirmed snapshot is there by now."""
        unconfirmed = new.lineage[0].ref
        busy = self._context.runner.busy(self._snapshot_work(unconfirmed))
        return not busy and self._snapshots.has_snapshot(new, unconfirmed)

    def _with_snapshots(self, new: Pointer, due: bool, behind: Sequence[str], now: bool) -> Pointer:
        """The pointer with a snapshot of its checkpoint under way, where one is due or a backend has to catch up.

        With `now` it is written before this returns, and the pointer begins with it.
        """
        again = self._snapshots.to_repeat(new)
        if not (due or behind or again):
            return new
        if not is_held(new):
            # Nothing that is configured holds this state, so the pointer must not go before something does.
            self._write_now(new, behind)
            return self._snapshots.with_full_snapshot(
                with_unconfirmed_snapshot(new) if now else new, behind, known=True
            )
        try:
            return self._with_snapshot(new, due, behind, again, now)
        except StateError as error:
            # Closed by a load that failed: the next call needs other restore managers.
            if self._bucket.is_closed or now:
                raise
            # The deltas are durable and hold everything. The snapshot stays due, so the next commit tries again.
            _LOGGER.warning("checkpoint %s goes on without a snapshot: %s", new.ref, error)
            return new

    def _with_snapshot(
        self, new: Pointer, due: bool, behind: Sequence[str], again: Sequence[str], now: bool
    ) -> Pointer:
        header = self._header(new)
        names = self._snapshots.replica_names if due else [*behind, *again]
        missed = self._missed(new) if due else new.snapshots_missed
        # Where the runner has refused for long, it does not keep up either.
        if now or missed >= _MISSED_MAX or snapshot_overdue(new.lineage):
            self._write_now(new, names)
            # A rescaled bucket's backends have caught up with it.
            return self._snapshots.with_full_snapshot(
                replace(with_unconfirmed_snapshot(new), snapshots_missed=0),
                behind if new.parents is None else names,
                known=True,
            )
        view, pin = self._bucket.pin_view(new, _WAITING_PIN_S)
        # Before the work begins, which records its end.
        awaiting = self._snapshots.with_full_snapshot(new, behind)
        self._snapshots.taken_on(names)
        if not self._context.runner.submit(
            self._snapshot_work(header.ref), lambda: self._write_snapshot(header, view, pin, names)
        ):
            self._bucket.unpin(pin)
            self._snapshots.not_sent(header.ref, names, "the background has too much to do")
            return new
        if due and not self._context.options.format_1_too:
            return replace(with_unconfirmed_snapshot(awaiting), snapshots_missed=missed)
        return awaiting

    def _write_now(self, new: Pointer, names: Sequence[str]) -> None:
        self._write_snapshot(self._header(new), *self._bucket.pin_view(new, _WAITING_PIN_S), names)

    def _header(self, new: Pointer) -> LineageHeader:
        """The header of a snapshot, which with pointers of format 1 is of format 1 too."""
        header = self._bucket.header(new.lineage[-1].ref, SNAPSHOT)
        return replace(header, format=1) if self._context.options.format_1_too else header

    def trim_to_snapshot(self, new: Pointer) -> Pointer | None:
        """The pointer as format 1 has it, where that is written: its lineage begins with a snapshot that is there. None
        where none is.
        """
        if not self._context.options.format_1_too or not new.lineage:
            return new
        for at in range(len(new.lineage) - 1, -1, -1):
            ref = new.lineage[at].ref
            if ref.version == 1 or self._snapshots.has_snapshot(new, ref):
                return replace(new, lineage=new.lineage[at:])
        return None

    def _missed(self, new: Pointer) -> int:
        """How many unconfirmed snapshots in a row never arrived, that at the beginning of the lineage included."""
        unconfirmed = new.lineage[0]
        if unconfirmed.ref.version == 1:  # the bucket's first delta, which is the whole state of its time
            return 0
        if unconfirmed.ref == new.parents:  # of which nobody writes one
            return new.snapshots_missed
        if self._context.runner.busy(self._snapshot_work(unconfirmed.ref)):
            return new.snapshots_missed
        return 0 if self._snapshots.has_snapshot(new, unconfirmed.ref) else new.snapshots_missed + 1

    def _snapshot_work(self, ref: CheckpointRef) -> str:
        """Name of the work that writes a checkpoint's snapshot."""
        return f"snapshot {self._store.folder} {ref}"

    def _write_snapshot(self, header: LineageHeader, view: View, pin: str, names: Sequence[str]) -> None:
        def batches() -> Iterable[pa.RecordBatch]:
            for batch in view.scan():
                self._store.renew(pin, _PIN_S)
                yield batch

        try:
            sealed = seal(header, self._store.schema, batches(), self._context.scratch)
        except BaseException as error:
            # Whoever waits for it should have another one made.
            self._snapshots.not_sent(header.ref, names, str(error) or repr(error))
            if isinstance(error, CorruptStoreError):
                # No call may ever read this part of the store, and then no snapshot would ever be made.
                self._store.rebuild()
            raise
        finally:
            self._bucket.unpin(pin)
            # Before it is sent, which may take far longer.
            give_back(view.size_bytes)
        try:
            if self._store.outgrown(view):
                self._bucket.ingest(sealed, header.ref)
            self._snapshots.send(header.ref, sealed, names)
        finally:
            sealed.let_go()
