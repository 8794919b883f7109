"""Full snapshots of a bucket in its backends: which backends need one, and whether they got it.

A pointer states whether a backend still waits for a full snapshot, and for which (`ReplicationStatus.since`). Records
in the local store share the progress among the processes of this machine.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from arrow_schemas.lineage import SNAPSHOT, CheckpointRef, file_name
from arrow_schemas.pointer import Pointer, ReplicationStatus
from spark_state_ext.backends import STATE, Markers
from spark_state_ext.backends.replication import Replica, is_complete, is_restorable
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.commit.decisions import settle
from spark_state_ext.commit.failures import Refusals, Run
from spark_state_ext.commit.ledger import DONE, FAILED, RUNNING, UploadRecord, read_upload_records, record_name
from spark_state_ext.commit.tally import Tally
from spark_state_ext.errors import CorruptError, MissingCheckpointError, StateError, StorageError, UploadFailedError
from spark_state_ext.files.checkpoint import verify_checkpoint
from spark_state_ext.files.horizon import recent_heartbeats
from spark_state_ext.files.sealed_file import SealedFile
from spark_state_ext.store import LocalStore
from spark_state_ext.worker.background import HUNG_S

__all__ = ["Snapshots", "check_name"]

_LOGGER = logging.getLogger("spark_state_ext")
# Number of checkpoints after which a full snapshot without a record on this machine is taken for lost.
_PATIENCE_VERSIONS = 10
# Used in place of a file name: in the record about a backend that has lost files, and in the record about full backups
# that it got since.
_LOST, _ANSWERED = "lost", "answered"
# Also: in the record about a backend that refuses full snapshots.
_REFUSED = "refused"


class Snapshots:
    """The snapshots of one bucket in one call."""

    def __init__(
        self,
        store: LocalStore,
        replicas: Mapping[str, Replica],
        context: CommitContext,
        counts: Callable[[Run], bool] = lambda run: True,
    ) -> None:
        self._counts = counts
        self._store = store
        self._replicas = replicas
        self._context = context
        # Backends that have lost files and get a full backup from this commit.
        self.lost: set[str] = set()

    @property
    def replica_names(self) -> list[str]:
        """Names of the configured backends, in their order."""
        return list(self._replicas)

    # -- backends that have lost files -------------------------------------------------------------

    def note_lost(self, name: str, heartbeats: int) -> None:
        """Note that a backend has lost files that it had confirmed."""
        # Remove the note about full backups sent since: they may be among the lost files.
        self._store.record({record_name(name, _LOST): str(heartbeats).encode()}, [record_name(name, _ANSWERED)])

    def without_lost(self, pointer: Pointer) -> Pointer:
        """Return the pointer without the replication statuses of backends that have lost files.

        `find_behind` then returns these backends, so that they get a full snapshot.
        """
        records = self._store.records()
        replication = dict(pointer.replication)
        lineage_refs = {str(entry.ref) for entry in pointer.lineage}
        for name in pointer.replication:
            lost, answered = record_name(name, _LOST), record_name(name, _ANSWERED)
            if lost not in records:
                continue
            # An old note may come from a late clean-up that missed files which were deleted rightly.
            is_old = int(records[lost]) < pointer.heartbeats - recent_heartbeats(
                max(self._context.batches_retained, pointer.retained)
            )
            # Remove the note only when a pointer with the full backup is committed: the commit that sent it may have
            # failed since, or Spark may have committed another attempt's pointer.
            if is_old or lineage_refs & set(json.loads(records.get(answered, b"[]"))):
                self._store.record({}, [lost, answered])
                continue
            if name not in self.lost:
                _LOGGER.error("files were deleted from %s: it gets a new full backup", name)
            del replication[name]
            self.lost.add(name)
        return replace(pointer, replication=replication)

    # -- which backends need one -------------------------------------------------------------------

    def find_behind(self, pointer: Pointer) -> list[str]:
        """Return backends that need a full snapshot of the next checkpoint, because they have no state or have lost it.

        If no backend has the whole state, all backends need one. A rescaled bucket is an exception: a backend has its
        state together with the parents, and the bucket's first snapshot completes the backend.
        """
        if pointer.ref is None:
            return []
        if not is_restorable(pointer):
            return list(self._replicas)
        if not any(is_complete(status) for status in pointer.replication.values()):
            self._check_first_snapshot(pointer)
            return []
        records = read_upload_records(self._store)
        return [
            name
            for name in self._replicas
            if name not in pointer.replication or self._is_stalled(pointer, name, pointer.replication[name], records)
        ]

    def _check_first_snapshot(self, pointer: Pointer) -> None:
        """Start reading back the first snapshot of a rescaled bucket, if another machine has sent it."""
        records, first = read_upload_records(self._store), pointer.lineage[0].ref
        if first != pointer.parents:
            for name, status in pointer.replication.items():
                self._is_stalled(pointer, name, replace(status, since=first), records)

    def _is_stalled(
        self, pointer: Pointer, name: str, status: ReplicationStatus, records: Mapping[str, UploadRecord]
    ) -> bool:
        """True if the full snapshot that a backend waits for will not arrive."""
        if status.since is None:
            return False
        file = file_name(status.since, SNAPSHOT)
        record = records.get(record_name(name, file))
        if record is not None and record.state == RUNNING:
            return not self._is_active(record)
        if record is not None:
            return record.state == FAILED
        check = records.get(check_name(name, file))
        if check is not None and self._is_active(check):
            return False
        try:
            exists = self._has_file(name, file)
        except StorageError as error:
            # Other backends have the state, so this one is not critical.
            _LOGGER.warning("could not check whether the backend %s has caught up: %s", name, error)
            exists = False
        if exists and self._begin_check(name, status.since):
            return False
        # Another machine may still be sending it.
        return pointer.version >= status.since.version + _PATIENCE_VERSIONS

    def _is_active(self, record: UploadRecord) -> bool:
        """True if the process that started an upload is alive and does not seem to hang."""
        # The end of a very old upload may not have been noted.
        if self._context.clock_s() - record.since_s > HUNG_S:
            return False
        return record.owner == self._context.uploads.owner or self._context.uploads.is_alive(record.owner)

    def with_full_snapshot(self, pointer: Pointer, names: Sequence[str], confirmed: bool = False) -> Pointer:
        """Return the pointer once backends get a full snapshot of its checkpoint, or have it already (`confirmed`)."""
        if not names:
            return pointer
        assert pointer.ref is not None, "a full snapshot needs a checkpoint"
        since = None if confirmed else pointer.ref
        file = file_name(pointer.ref, SNAPSHOT)
        records = self._encode_answers(pointer.ref, names)
        if not confirmed:
            record = self._create_record(RUNNING).encode()
            records |= {record_name(name, file): record for name in names}
        if records:
            self._store.record(records)
        replication = {**pointer.replication, **{name: ReplicationStatus(pointer.ref, since) for name in names}}
        markers = {**pointer.markers, **{name: {STATE: file} for name in names}}
        return settle(replace(pointer, replication=replication, markers=markers), {})

    def _encode_answers(self, ref: CheckpointRef, names: Sequence[str]) -> dict[str, bytes]:
        """Return records which note that backends with lost files get a full backup of a checkpoint."""
        records = self._store.records()
        answered = [record_name(name, _ANSWERED) for name in names if record_name(name, _LOST) in records]
        return {name: json.dumps([*json.loads(records.get(name, b"[]")), str(ref)]).encode() for name in answered}

    # -- sending -------------------------------------------------------------------------------------

    def send(self, ref: CheckpointRef, sealed: SealedFile, names: Sequence[str]) -> None:
        """Send a snapshot to several backends in parallel and wait for them."""
        failure: Exception | None = None
        futures: dict[str, Future[Markers]] = {}
        ended_s: dict[str, float] = {}
        began_s = self._context.clock_s()
        for name in names:
            manager = self._replicas[name].backup
            try:
                futures[name] = manager.upload(ref, manager.snapshot(ref, {STATE: sealed}))
            except Exception as raised:
                futures[name] = Future()
                futures[name].set_exception(raised)
            # Keep the file open: a slow upload continues after the wait has ended.
            sealed.take()
            futures[name].add_done_callback(partial(self._end_upload, sealed, ended_s, name))
        for name, future in futures.items():
            try:
                future.result(self._context.options.commit_timeout_ms / 1000)
            except Exception as raised:
                failure = raised
                reason = str(raised) or repr(raised)
                if not future.done():
                    reason = f"it took longer than commit_timeout_ms, {self._context.options.commit_timeout_ms}"
                    future.add_done_callback(partial(self._note_late_upload, ref, name, sealed.size_bytes, began_s))
                self._note_outcome(ref, [name], self._create_record(FAILED, reason))
                self._note_refused(name, began_s, reason)
            else:
                took_s = ended_s.get(name, self._context.clock_s()) - began_s
                self._note_confirmed(ref, name, sealed.size_bytes, took_s)
        if isinstance(failure, StateError):
            raise failure
        if failure is not None:
            raise UploadFailedError(f"{sealed.name} could not be stored: {failure!r}") from failure

    def _end_upload(self, sealed: SealedFile, ended_s: dict[str, float], name: str, _: Future[Markers]) -> None:
        ended_s[name] = self._context.clock_s()
        sealed.let_go()

    def _note_late_upload(
        self, ref: CheckpointRef, name: str, size_bytes: int, began_s: float, future: Future[Markers]
    ) -> None:
        """Note the success of an upload that ended after the wait for it."""
        if future.exception() is None:
            self._note_confirmed(ref, name, size_bytes, self._context.clock_s() - began_s)

    def _note_confirmed(self, ref: CheckpointRef, name: str, size_bytes: int, took_s: float) -> None:
        self._context.uploads.tallies.add(self._store, Tally(1, took_s, size_bytes))
        self._note_outcome(ref, [name], self._create_record(DONE))
        if record_name(name, _REFUSED) in self._store.records():
            self._store_refusals(name, None)

    # -- backends that refuse them ------------------------------------------------------------------

    def _note_refused(self, name: str, began_s: float, error: str) -> None:
        self._context.uploads.tallies.add(self._store, Tally(failures=1))
        refusals = self.read_refusals().get(name)
        last_s = self._context.clock_s()
        if refusals is None:
            self._store_refusals(name, Refusals(self._context.run, began_s, last_s, error=error))
        else:
            attempts, since_s = refusals.attempts + 1, min(refusals.since_s, began_s)
            self._store_refusals(name, Refusals(self._context.run, since_s, last_s, attempts, error))

    def _store_refusals(self, name: str, refusals: Refusals | None) -> None:
        record = record_name(name, _REFUSED)
        try:
            self._store.record(
                {} if refusals is None else {record: refusals.encode()}, [record] if refusals is None else []
            )
        except StateError as error:
            _LOGGER.warning("a snapshot that %s refused or accepted could not be noted: %s", name, error)

    def read_refusals(self) -> dict[str, Refusals]:
        """Return snapshots that backends refused since they last accepted one, as far as they count for this call."""
        records, now_s = self._store.records(), self._context.clock_s()
        decoded = {name: Refusals.decode(records.get(record_name(name, _REFUSED))) for name in self._replicas}
        # The clock restarts with the machine, so later times are from before a restart.
        return {
            name: refusals
            for name, refusals in decoded.items()
            if refusals is not None and self._counts(refusals.run) and refusals.last_s <= now_s
        }

    def find_retries(self, pointer: Pointer) -> list[str]:
        """Return backends that have the whole state but refused a snapshot, and should get another one now."""
        options, now_s = self._context.options, self._context.clock_s()
        delay_s, timeout_s = options.commit_delay_ms_max / 1000, options.commit_timeout_ms / 1000
        return [
            name
            for name, refusals in self.read_refusals().items()
            if is_complete(pointer.replication.get(name)) and refusals.may_try_again(now_s, delay_s, timeout_s)
        ]

    def note_retry(self, names: Sequence[str]) -> None:
        """Note that backends are about to get another snapshot."""
        for name, refusals in self.read_refusals().items():
            if name in names:
                self._store_refusals(name, replace(refusals, again_s=self._context.clock_s()))

    # -- records ------------------------------------------------------------------------------------

    def note_not_sent(self, ref: CheckpointRef, names: Sequence[str], why: str) -> None:
        """Note that a snapshot was not made although backends may wait for it."""
        self._context.uploads.tallies.add(self._store, Tally(failures=len(names)))
        for name, refusals in self.read_refusals().items():
            if name in names:
                self._store_refusals(name, replace(refusals, again_s=None))
        self._note_outcome(ref, names, self._create_record(FAILED, why))

    def _create_record(self, state: str, error: str = "") -> UploadRecord:
        """Return an upload record with the current time."""
        return UploadRecord(state, self._context.uploads.owner, self._context.clock_s(), error=error)

    def _note_outcome(self, ref: CheckpointRef, names: Sequence[str], record: UploadRecord) -> None:
        """Write the upload record of a checkpoint's snapshot for each backend."""
        try:
            self._store.record({record_name(name, file_name(ref, SNAPSHOT)): record.encode() for name in names})
        except StateError as error:
            # Other processes notice when this process ends, or after a while.
            _LOGGER.warning("could not note that the snapshot of checkpoint %s is %s: %s", ref, record.state, error)

    def _begin_check(self, name: str, ref: CheckpointRef) -> bool:
        """Start reading back, in the background, a snapshot that another machine has sent; return True if started.

        The existence of a file does not prove its content: the sender may have died before it compared the bytes.
        """
        record = check_name(name, file_name(ref, SNAPSHOT))
        self._store.record({record: self._create_record(RUNNING).encode()})
        work = partial(self._check, name, ref)
        accepted = self._context.runner.submit(f"check of {self._store.folder} {ref} in {name}", work)
        if not accepted:
            self._store.record({}, [record])
        return accepted

    def _check(self, name: str, ref: CheckpointRef) -> None:
        try:
            verify_checkpoint(self._replicas[name].files(), ref, SNAPSHOT, self._context.scratch)
            self._note_outcome(ref, [name], self._create_record(DONE))
        except CorruptError as error:
            _LOGGER.error("the backend %s did not catch up: %s. It gets another full snapshot.", name, error)
            self._note_outcome(ref, [name], self._create_record(FAILED, str(error)))
        finally:
            # After the result was noted. If there is none, because reading failed, the next call starts again.
            self._store.record({}, [check_name(name, file_name(ref, SNAPSHOT))])

    def has_snapshot(self, pointer: Pointer, ref: CheckpointRef) -> bool:
        """True if a backend that has the whole state has the snapshot of a checkpoint."""
        file = file_name(ref, SNAPSHOT)
        names = [name for name, status in pointer.replication.items() if is_complete(status)]
        records = read_upload_records(self._store)
        found_records = {name: records.get(record_name(name, file)) for name in names}
        states = {name: None if record is None else record.state for name, record in found_records.items()}
        # A failed upload may have left an incomplete file.
        return DONE in states.values() or any(self._has_file(name, file) for name in names if states[name] != FAILED)

    def _has_file(self, name: str, file: str) -> bool:
        try:
            return self._replicas[name].files().size(file) > 0
        except MissingCheckpointError:
            return False


def check_name(backend: str, file: str) -> str:
    """Return the name of the record that a process is reading back a file which it did not send."""
    return record_name(backend, f"check {file}")
