"""Full snapshots of a bucket in its backends: who needs one, and what became of it.

A pointer says since which snapshot a backend has caught up, or that it waits for one (`ReplicationStatus.since`).
Records in the local store tell the processes of this machine how it stands.
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
from spark_state_ext.backends.replication import Replica, is_complete, is_held
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.commit.decisions import settled
from spark_state_ext.commit.failures import Refused, Run
from spark_state_ext.commit.ledger import DONE, FAILED, RUNNING, UploadRecord, record_name, upload_records
from spark_state_ext.commit.tally import Tally
from spark_state_ext.errors import CorruptError, MissingCheckpointError, StateError, StorageError, UploadFailedError
from spark_state_ext.files.checkpoint import verify_checkpoint
from spark_state_ext.files.horizon import recent_heartbeats
from spark_state_ext.files.sealed import SealedFile
from spark_state_ext.store import LocalStore
from spark_state_ext.worker.background import HUNG_S

__all__ = ["Snapshots", "check_name"]

_LOGGER = logging.getLogger("spark_state_ext")
# Checkpoints until a full snapshot that nobody here knows of is taken for lost.
_PATIENCE_VERSIONS = 10
# In the place of a file's name, in records about a backend that lacks some, and about the full backups that it got
# since.
_LOST, _ANSWERED = "lost", "answered"
# And about one that refuses full snapshots.
_REFUSED = "refused"


class Snapshots:
    """The snapshots of one bucket, in one call."""

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
        # Backends that were found to lack files, and get a full backup by this commit.
        self.lost: set[str] = set()

    @property
    def replica_names(self) -> list[str]:
        """Names of the configured backends, in their order."""
        return list(self._replicas)

    # -- files that somebody has deleted -----------------------------------------------------------

    def lose(self, name: str, heartbeats: int) -> None:
        """Note that a backend cannot give back what it had confirmed, as a clean-up found."""
        # What was sent in full before may be among it.
        self._store.record({record_name(name, _LOST): str(heartbeats).encode()}, [record_name(name, _ANSWERED)])

    def without_lost(self, pointer: Pointer) -> Pointer:
        """The pointer without the replication statuses of backends from which somebody has deleted files: these are
        `behind`.
        """
        records = self._store.records()
        replication = dict(pointer.replication)
        mine = {str(entry.ref) for entry in pointer.lineage}
        for name in pointer.replication:
            lost, answered = record_name(name, _LOST), record_name(name, _ANSWERED)
            if lost not in records:
                continue
            # What a clean-up that came late missed may have been deleted rightly.
            old = int(records[lost]) < pointer.heartbeats - recent_heartbeats(
                max(self._context.batches_retained, pointer.retained)
            )
            # Forgotten when a pointer that has the answer is committed. The commit that gave it may have failed since,
            # or the pointer of another attempt counts, which knows nothing of it.
            if old or mine & set(json.loads(records.get(answered, b"[]"))):
                self._store.record({}, [lost, answered])
                continue
            if name not in self.lost:
                _LOGGER.error("somebody has deleted files from %s: it gets a fresh full backup", name)
            del replication[name]
            self.lost.add(name)
        return replace(pointer, replication=replication)

    # -- who needs one -----------------------------------------------------------------------------

    def behind(self, pointer: Pointer) -> list[str]:
        """Backends that need a full snapshot of the next checkpoint: they have nothing, or the one they got is lost.

        Where no backend holds everything, it is all of them; but of a rescaled bucket one does with the parents, and
        its first snapshot makes it complete.
        """
        if pointer.ref is None:
            return []
        if not is_held(pointer):
            return list(self._replicas)
        if not any(is_complete(status) for status in pointer.replication.values()):
            self._look_for_first(pointer)
            return []
        records = upload_records(self._store)
        return [
            name
            for name in self._replicas
            if name not in pointer.replication or self._stalled(pointer, name, pointer.replication[name], records)
        ]

    def _look_for_first(self, pointer: Pointer) -> None:
        """Have the first snapshot of a rescaled bucket read back, where another machine has sent it."""
        records, first = upload_records(self._store), pointer.lineage[0].ref
        if first != pointer.parents:
            for name, status in pointer.replication.items():
                self._stalled(pointer, name, replace(status, since=first), records)

    def _stalled(
        self, pointer: Pointer, name: str, status: ReplicationStatus, records: Mapping[str, UploadRecord]
    ) -> bool:
        """Whether the full snapshot that a backend waits for will not come."""
        if status.since is None:
            return False
        file = file_name(status.since, SNAPSHOT)
        record = records.get(record_name(name, file))
        if record is not None and record.state == RUNNING:
            return not self._is_at_it(record)
        if record is not None:
            return record.state == FAILED
        check = records.get(check_name(name, file))
        if check is not None and self._is_at_it(check):
            return False
        try:
            there = self._has(name, file)
        except StorageError as error:
            # Others hold the state, so nothing depends on this one.
            _LOGGER.warning("the backend %s does not tell whether it has caught up: %s", name, error)
            there = False
        if there and self._begin_check(name, status.since):
            return False
        # Another machine may be at it.
        return pointer.version >= status.since.version + _PATIENCE_VERSIONS

    def _is_at_it(self, record: UploadRecord) -> bool:
        """Whether the process that noted that it begins lives, and is not taken for hanging."""
        # One that is long over may not have been noted.
        if self._context.clock_s() - record.since_s > HUNG_S:
            return False
        return record.owner == self._context.uploads.owner or self._context.uploads.is_alive(record.owner)

    def with_full_snapshot(self, pointer: Pointer, names: Sequence[str], known: bool = False) -> Pointer:
        """The pointer of which backends get a full snapshot."""
        if not names:
            return pointer
        assert pointer.ref is not None, "there is a state to catch up with"
        since = None if known else pointer.ref
        file = file_name(pointer.ref, SNAPSHOT)
        records = self._answers(pointer.ref, names)
        if not known:
            record = self._noted(RUNNING).encode()
            records |= {record_name(name, file): record for name in names}
        if records:
            self._store.record(records)
        replication = {**pointer.replication, **{name: ReplicationStatus(pointer.ref, since) for name in names}}
        markers = {**pointer.markers, **{name: {STATE: file} for name in names}}
        return settled(replace(pointer, replication=replication, markers=markers), {})

    def _answers(self, ref: CheckpointRef, names: Sequence[str]) -> dict[str, bytes]:
        """Notes that backends which had lost files get a full backup with a checkpoint."""
        records = self._store.records()
        answered = [record_name(name, _ANSWERED) for name in names if record_name(name, _LOST) in records]
        return {name: json.dumps([*json.loads(records.get(name, b"[]")), str(ref)]).encode() for name in answered}

    # -- what becomes of it -------------------------------------------------------------------------

    def send(self, ref: CheckpointRef, sealed: SealedFile, names: Sequence[str]) -> None:
        """Have backends keep a snapshot, side by side."""
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
            # One that takes long goes on when nobody waits for it any more.
            sealed.take()
            futures[name].add_done_callback(partial(self._over, sealed, ended_s, name))
        for name, future in futures.items():
            try:
                future.result(self._context.options.commit_timeout_ms / 1000)
            except Exception as raised:
                failure = raised
                what = str(raised) or repr(raised)
                if not future.done():
                    what = f"it took longer than commit_timeout_ms, {self._context.options.commit_timeout_ms}"
                    future.add_done_callback(partial(self._late, ref, name, sealed.size_bytes, began_s))
                self._tell(ref, [name], self._noted(FAILED, what))
                self._refused(name, began_s, what)
            else:
                took_s = ended_s.get(name, self._context.clock_s()) - began_s
                self._confirmed(ref, name, sealed.size_bytes, took_s)
        if isinstance(failure, StateError):
            raise failure
        if failure is not None:
            raise UploadFailedError(f"{sealed.name} could not be kept: {failure!r}") from failure

    def _over(self, sealed: SealedFile, ended_s: dict[str, float], name: str, _: Future[Markers]) -> None:
        ended_s[name] = self._context.clock_s()
        sealed.let_go()

    def _late(self, ref: CheckpointRef, name: str, size_bytes: int, began_s: float, done: Future[Markers]) -> None:
        """An upload has ended for which nobody waits any more."""
        if done.exception() is None:
            self._confirmed(ref, name, size_bytes, self._context.clock_s() - began_s)

    def _confirmed(self, ref: CheckpointRef, name: str, size_bytes: int, took_s: float) -> None:
        self._context.uploads.tallies.add(self._store, Tally(1, took_s, size_bytes))
        self._tell(ref, [name], self._noted(DONE))
        if record_name(name, _REFUSED) in self._store.records():
            self._record_refused(name, None)

    # -- backends that refuse them ------------------------------------------------------------------

    def _refused(self, name: str, began_s: float, error: str) -> None:
        self._context.uploads.tallies.add(self._store, Tally(failures=1))
        before = self.refusals().get(name)
        last_s = self._context.clock_s()
        if before is None:
            self._record_refused(name, Refused(self._context.run, began_s, last_s, error=error))
        else:
            attempts, since_s = before.attempts + 1, min(before.since_s, began_s)
            self._record_refused(name, Refused(self._context.run, since_s, last_s, attempts, error))

    def _record_refused(self, name: str, refused: Refused | None) -> None:
        noted = record_name(name, _REFUSED)
        try:
            self._store.record({} if refused is None else {noted: refused.encode()}, [noted] if refused is None else [])
        except StateError as error:
            _LOGGER.warning("whether %s refuses snapshots could not be noted: %s", name, error)

    def refusals(self) -> dict[str, Refused]:
        """What configured backends have refused since they took a snapshot last, as far as it counts for this call."""
        records, now_s = self._store.records(), self._context.clock_s()
        found = {name: Refused.decode(records.get(record_name(name, _REFUSED))) for name in self._replicas}
        # The clock begins anew with the machine.
        return {
            name: it for name, it in found.items() if it is not None and self._counts(it.run) and it.last_s <= now_s
        }

    def to_repeat(self, pointer: Pointer) -> list[str]:
        """Backends that hold everything but refused a snapshot, and should be sent another one by now."""
        options, now_s = self._context.options, self._context.clock_s()
        delay_s, timeout_s = options.commit_delay_ms_max / 1000, options.commit_timeout_ms / 1000
        return [
            name
            for name, refused in self.refusals().items()
            if is_complete(pointer.replication.get(name)) and refused.may_try_again(now_s, delay_s, timeout_s)
        ]

    def taken_on(self, names: Sequence[str]) -> None:
        """Backends are about to be sent a snapshot."""
        for name, refused in self.refusals().items():
            if name in names:
                self._record_refused(name, replace(refused, again_s=self._context.clock_s()))

    # -- what is noted ------------------------------------------------------------------------------

    def not_sent(self, ref: CheckpointRef, names: Sequence[str], why: str) -> None:
        """Note that a snapshot which backends may wait for was not made."""
        self._context.uploads.tallies.add(self._store, Tally(failures=len(names)))
        for name, refused in self.refusals().items():
            if name in names:
                self._record_refused(name, replace(refused, again_s=None))
        self._tell(ref, names, self._noted(FAILED, why))

    def _noted(self, state: str, error: str = "") -> UploadRecord:
        """A record of how a file stands, as of now."""
        return UploadRecord(state, self._context.uploads.owner, self._context.clock_s(), error=error)

    def _tell(self, ref: CheckpointRef, names: Sequence[str], record: UploadRecord) -> None:
        """Note what became of a checkpoint's snapshot."""
        try:
            self._store.record({record_name(name, file_name(ref, SNAPSHOT)): record.encode() for name in names})
        except StateError as error:
            # It comes to light when this process ends, or after a while.
            _LOGGER.warning("that the snapshot of checkpoint %s is %s could not be noted: %s", ref, record.state, error)

    def _begin_check(self, name: str, ref: CheckpointRef) -> bool:
        """Have a snapshot read that another machine has sent, beside batches; whether that was taken on.

        That a file is there says nothing of its bytes: whoever sent it may have died before it compared them.
        """
        noted = check_name(name, file_name(ref, SNAPSHOT))
        self._store.record({noted: self._noted(RUNNING).encode()})
        work = partial(self._check, name, ref)
        taken = self._context.runner.submit(f"check of {self._store.folder} {ref} in {name}", work)
        if not taken:
            self._store.record({}, [noted])
        return taken

    def _check(self, name: str, ref: CheckpointRef) -> None:
        try:
            verify_checkpoint(self._replicas[name].files(), ref, SNAPSHOT, self._context.scratch)
            self._tell(ref, [name], self._noted(DONE))
        except CorruptError as error:
            _LOGGER.error("the backend %s did not catch up: %s. It gets another full snapshot.", name, error)
            self._tell(ref, [name], self._noted(FAILED, str(error)))
        finally:
            # After what was found. Where nothing was, as the backend could not be read, the next call begins anew.
            self._store.record({}, [check_name(name, file_name(ref, SNAPSHOT))])

    def has_snapshot(self, pointer: Pointer, ref: CheckpointRef) -> bool:
        """Whether a backend that holds everything has the snapshot of a checkpoint."""
        file = file_name(ref, SNAPSHOT)
        names = [name for name, status in pointer.replication.items() if is_complete(status)]
        records = upload_records(self._store)
        found = {name: records.get(record_name(name, file)) for name in names}
        states = {name: None if record is None else record.state for name, record in found.items()}
        # What an upload left that failed may be there, and torn.
        return DONE in states.values() or any(self._has(name, file) for name in names if states[name] != FAILED)

    def _has(self, name: str, file: str) -> bool:
        try:
            return self._replicas[name].files().size(file) > 0
        except MissingCheckpointError:
            return False


def check_name(backend: str, file: str) -> str:
    """Name of the record that a process reads a file back which it has not sent."""
    return record_name(backend, f"check {file}")
