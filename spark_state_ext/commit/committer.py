"""The committer: takes a bucket's commit through its phases (`commit`), with uploads beside it and records about
them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from arrow_schemas.lineage import SNAPSHOT, CheckpointRef, file_name, parse_file_name
from arrow_schemas.pointer import InlineDelta, Pointer
from spark_state_ext.backends import STATE, Checkpoint, Markers
from spark_state_ext.backends.replication import Replica, taken_over, version_of
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.commit.decisions import CommitOptions, How, assured, catching_up, decide, lags, pending, settled
from spark_state_ext.commit.failures import Clocks, Ended, Run, counts
from spark_state_ext.commit.ledger import DONE, FAILED, RUNNING, UploadRecord, record_name, upload_records
from spark_state_ext.commit.snapshots import Snapshots, check_name
from spark_state_ext.commit.uploads import Upload, Uploads
from spark_state_ext.errors import CommitTimeoutError, StateError, UploadFailedError
from spark_state_ext.files.sealed import SealedFile
from spark_state_ext.store import LocalStore

__all__ = ["Committer", "HandedIn", "Phase", "await_all"]

# How often to look for what another process of this machine has uploaded.
_POLL_S = 0.02
_SLICE_S = 1.0
# Names of the record about clocks, and in it of what a task sends itself, which has another name in each attempt.
_CLOCKS, _OWN = "clocks", "own"


@dataclass(frozen=True)
class HandedIn:
    """A delta on its way.

    Parameters
    ----------
    how
        What becomes of it.
    sealed
        The file.
    uploads
        Of it, to each backend that keeps up.
    before
        Uploads of earlier deltas which these come after, where they are to be waited for.
    """

    how: How
    sealed: SealedFile
    uploads: tuple[Upload, ...]
    before: tuple[Upload, ...]


@dataclass(frozen=True)
class Phase:
    """How a phase of a commit ended.

    Parameters
    ----------
    pointer
        The pointer after it.
    waited_s
        How long was waited for backends.
    deferred
        Uploads that the task's last call has to wait for.
    """

    pointer: Pointer
    waited_s: float = 0.0
    deferred: tuple[Upload, ...] = ()


class Committer:
    """The commit of one bucket in one call."""

    def __init__(self, store: LocalStore, replicas: Sequence[Replica], context: CommitContext) -> None:
        self._context = context
        self._ended = Ended(store.folder)
        self._store = store
        self._replicas = {replica.name: replica for replica in replicas}
        self._stale: list[str] = []
        self.snapshots = Snapshots(store, self._replicas, context, self._counts)

    # -- what went before --------------------------------------------------------------------------

    def begin(self, pointer: Pointer) -> Phase:
        """Settle what earlier commits left under way, and wait for it where it takes too long."""
        for replica in self._replicas.values():
            replica.backup.init(None if pointer.ref is None else Checkpoint(pointer.ref, pointer.markers))
        pointer = self._looked_at(taken_over(pointer, list(self._replicas.values())))
        self._raise_refused()
        self._resume(pointer)
        if not pending(pointer):
            return Phase(pointer)
        since_s = self._since_s(pointer)
        late = self._context.clock_s() - since_s > self._context.options.commit_delay_ms_max / 1000
        if late or lags(pointer, self._context.batches_retained) or not self._context.options.inline:
            return self._wait(pointer, since_s)
        return Phase(pointer)

    def _looked_at(self, pointer: Pointer) -> Pointer:
        pointer = self.snapshots.without_lost(pointer)
        records = upload_records(self._store)
        self._raise_failed(pointer, records)
        awaited = _awaited(pointer)
        checked = {check_name(name, file) for name, file in awaited}
        oldest = pointer.inline[0].ref if pointer.inline else pointer.ref
        names = checked | set(awaited.values())
        if pointer.lineage:
            # When the next snapshot is due, that of the one before is asked for.
            unconfirmed = file_name(pointer.lineage[0].ref, SNAPSHOT)
            names |= {record_name(name, unconfirmed) for name in self._replicas}
        self._stale = [name for name in records if _version_in(name) < version_of(oldest) and name not in names]
        return settled(pointer, _done(awaited, records))

    def known(self, pointer: Pointer) -> Pointer:
        """An input pointer with what this machine knows to have been confirmed since; nothing is noted or begun."""
        pointer = taken_over(pointer, list(self._replicas.values()))
        return settled(pointer, _done(_awaited(pointer), upload_records(self._store)))

    def _raise_failed(self, pointer: Pointer, records: Mapping[str, UploadRecord]) -> None:
        for name, delta in pending(pointer):
            record = records.get(record_name(name, delta.name))
            if record is not None and record.state == FAILED and self._counts(record.run):
                # The record stays: another attempt at this task must not take the failure for mended.
                self._ended.tell(self._context.run)
                raise UploadFailedError(
                    f"the upload of {delta.name} to the backend {name} failed: {record.error}. It is in Spark's own "
                    "state and not lost. Mend the cause and start again, or leave that backend out."
                )

    def _raise_refused(self) -> None:
        for name, refused in self.snapshots.refusals().items():
            if not refused.for_long(self._context.options.commit_timeout_ms / 1000):
                continue
            # The record stays, as in `_raise_failed`.
            self._ended.tell(self._context.run)
            raise UploadFailedError(
                f"the backend {name} has refused full snapshots for {refused.last_s - refused.since_s:.0f} s, "
                f"{refused.attempts} times, the last time: {refused.error}. No state is lost. Mend the cause and start "
                "again, or leave that backend out."
            )

    def _counts(self, noted: Run) -> bool:
        """As `counts`, for this call."""
        return noted == self._context.run or counts(noted, self._context.run, self._ended_at)

    @cached_property
    def _ended_at(self) -> int | None:
        return self._ended.of(self._context.run)

    def _resume(self, pointer: Pointer, mine: bool = False) -> list[Upload]:
        """Begin anew what no living process has under way for this run; with `mine`, what this one does not."""
        if not pointer.inline:
            return []
        records = upload_records(self._store)
        own: list[Upload] = []
        begun: list[Upload] = []
        for name, delta in pending(pointer):
            upload = self._context.uploads.find(self._store, name, delta.name)
            if upload is not None and not self._counts(upload.run):
                # It may hang since before the cause was mended.
                self._context.uploads.give_up([upload])
                upload = None
            record = records.get(record_name(name, delta.name))
            if upload is None:
                if record is not None and (record.state == DONE or (self._elsewhere(record) and not mine)):
                    continue
                since_s = self._begun_s(record_name(name, delta.name), records)
                upload = self._upload(name, delta.ref, SealedFile.of(delta.name, delta.data), since_s)
                begun.append(upload)
            own.append(upload)
        self._submit(begun)
        return own

    def _elsewhere(self, record: UploadRecord) -> bool:
        """Whether another process is at it, for this run."""
        return record.owner != self._context.uploads.owner and self._is_running(record)

    def _is_running(self, record: UploadRecord) -> bool:
        alive = record.owner == self._context.uploads.owner or self._context.uploads.is_alive(record.owner)
        return record.state == RUNNING and alive and self._counts(record.run)

    def _begun_s(self, name: str, records: Mapping[str, UploadRecord]) -> float:
        """Since when an upload has been under way, as far as this machine knows; now, where nobody is at it.

        A process that ends takes its uploads with it. Another attempt at its task goes on with their clocks; a later
        batch does not, as nobody may have tried for hours.
        """
        record = records.get(name)
        found = [self._kept.get(name)]
        if record is not None and (
            self._is_running(record) or (record.state == RUNNING and record.run == self._context.run)
        ):
            found.append(record.since_s)
        return min((since_s for since_s in found if since_s is not None), default=self._context.clock_s())

    @cached_property
    def _kept(self) -> Mapping[str, float]:
        """Clocks that earlier attempts at this task left."""
        return Clocks.kept(self._store.records().get(_CLOCKS), self._context.run)

    def _clocks(self, pointer: Pointer, **own: float) -> dict[str, bytes]:
        """The record for further attempts at this task; none where nothing is under way."""
        names = [record_name(name, delta.name) for name, delta in pending(pointer)]
        if not self._context.run.id or not (names or own):
            return {}
        records = upload_records(self._store)
        since_s = {**own, **{name: self._begun_s(name, records) for name in names}}
        return {_CLOCKS: Clocks(self._context.run, since_s).encode()}

    def _since_s(self, pointer: Pointer) -> float:
        """Since when the oldest upload has been under way."""
        records = upload_records(self._store)
        found = [self._begun_s(record_name(name, delta.name), records) for name, delta in pending(pointer)]
        return min(found, default=self._context.clock_s())

    def _wait(self, pointer: Pointer, since_s: float) -> Phase:
        """Wait until nothing of a pointer is under way."""
        began_s = self._context.clock_s()
        self._store.record(self._clocks(pointer))
        while True:
            pointer = self._looked_at(pointer)
            if not pending(pointer):
                return Phase(pointer, self._context.clock_s() - began_s)
            left_s = since_s + self._context.options.commit_timeout_ms / 1000 - self._context.clock_s()
            own = self._own(pointer)
            if left_s <= 0:
                self._context.uploads.give_up(own)
                waiting = [(name, delta.name) for name, delta in pending(pointer)]
                # Who tries again, here or in another process, begins anew; an attempt at this task is late.
                self._store.record({}, [record_name(*it) for it in waiting])
                self._ended.tell(self._context.run)
                raise _timed_out(waiting, self._context.clock_s() - since_s, self._context.options)
            foreign = len(own) < len(pending(pointer))
            self._context.uploads.pause(own, min(left_s, _POLL_S if foreign else _SLICE_S))
            self._context.while_waiting()
            self._resume(pointer)

    def _own(self, pointer: Pointer) -> list[Upload]:
        """Uploads that a pointer waits for and this process has under way."""
        found = [self._context.uploads.find(self._store, name, delta.name) for name, delta in pending(pointer)]
        return [upload for upload in found if upload is not None]

    # -- the new checkpoint ------------------------------------------------------------------------

    def hand_in(self, pointer: Pointer, sealed: SealedFile, may_defer: bool, room_bytes: int) -> HandedIn:
        """Have the delta of a new checkpoint uploaded to every backend that keeps up; `finish` comes next."""
        assert pointer.ref is not None, "a delta has a checkpoint"
        inline_bytes = sum(len(delta.data) for delta in pointer.inline)
        how = decide(sealed.size_bytes, inline_bytes, room_bytes, may_defer, self._context.options)
        # What is waited for must be in one queue, in order.
        before = [] if how == How.INLINE else self._resume(pointer, mine=True)
        own = {} if how == How.INLINE else {_OWN: self._kept.get(_OWN, self._context.clock_s())}
        since_s = own.get(_OWN, self._context.clock_s())
        uploads = [self._upload(name, pointer.ref, sealed, since_s) for name in pointer.replication]
        for _ in uploads:
            sealed.take()
        try:
            self._submit(uploads, self._clocks(pointer, **own))
        except BaseException:
            for _ in uploads:
                sealed.let_go()
            raise
        for upload in uploads:
            upload.done.add_done_callback(lambda _: sealed.let_go())
        return HandedIn(how, sealed, tuple(uploads), tuple(before))

    def finish(self, pointer: Pointer, handed_in: HandedIn) -> Phase:
        """The pointer to hand over; waits for uploads where it must."""
        assert pointer.ref is not None, "a delta has a checkpoint"
        sealed, uploads = handed_in.sealed, [*handed_in.before, *handed_in.uploads]
        if handed_in.how == How.INLINE:
            data = sealed.get_range(0, sealed.size_bytes)
            delta = InlineDelta(pointer.ref, data, int(time.time() * 1000), pointer.heartbeats)
            return Phase(replace(pointer, inline=(*pointer.inline, delta)))
        waited_s = 0.0 if handed_in.how == How.DEFERRED else self.await_all(uploads)
        made = assured(pointer, {upload.backend: upload.markers for upload in handed_in.uploads})
        return Phase(made, waited_s, tuple(uploads) if handed_in.how == How.DEFERRED else ())

    def await_all(self, uploads: Sequence[Upload]) -> float:
        """Wait until uploads are confirmed; returns how long, in seconds."""
        return await_all(
            uploads, self._context.uploads, self._context.options, self._context.clock_s, self._context.while_waiting
        )

    # -- uploads -------------------------------------------------------------------------------------

    def _upload(self, name: str, ref: CheckpointRef, sealed: SealedFile, since_s: float) -> Upload:
        manager = self._replicas[name].backup
        markers = manager.snapshot(ref, {STATE: sealed})
        return Upload(
            self._store, name, manager, ref, sealed.name, markers, since_s, sealed.size_bytes, self._context.run
        )

    def _submit(self, uploads: Sequence[Upload], also: Mapping[str, bytes] | None = None) -> None:
        if not uploads:
            return
        records = dict(also or {})
        for upload in uploads:
            records |= upload.record(RUNNING, self._context.uploads.owner)
        self._store.record(records, self._stale)
        self._stale = []
        self._context.uploads.submit(uploads)


def await_all(
    uploads: Sequence[Upload],
    runner: Uploads,
    options: CommitOptions,
    clock_s: Callable[[], float] = time.monotonic,
    while_waiting: Callable[[], None] = lambda: None,
) -> float:
    """Wait until uploads are confirmed, as `Committer.await_all`; returns how long, in seconds."""
    began_s = clock_s()
    while True:
        for upload in uploads:
            error = upload.done.exception() if upload.done.done() else None
            if error is not None:
                Ended(upload.store.folder).tell(upload.run)
            if isinstance(error, StateError):
                raise error
            if error is not None:
                raise UploadFailedError(
                    f"the upload of {upload.file} to the backend {upload.backend} failed: {error!r}"
                ) from error
        waiting = [upload for upload in uploads if not upload.done.done()]
        if not waiting:
            return clock_s() - began_s
        under_way_s = clock_s() - min(upload.since_s for upload in waiting)
        if under_way_s * 1000 >= options.commit_timeout_ms:
            runner.give_up(waiting)
            for upload in waiting:
                upload.store.record({}, [record_name(upload.backend, upload.file)])
                Ended(upload.store.folder).tell(upload.run)
            raise _timed_out(((it.backend, it.file) for it in waiting), under_way_s, options)
        runner.pause(waiting, min(_SLICE_S, options.commit_timeout_ms / 1000 - under_way_s))
        while_waiting()


def _timed_out(waiting: Iterable[tuple[str, str]], under_way_s: float, options: CommitOptions) -> CommitTimeoutError:
    by_backend: dict[str, list[str]] = {}
    for name, file in waiting:
        by_backend.setdefault(name, []).append(file)
    what = "; ".join(f"{name}: {', '.join(files[:3])}" for name, files in by_backend.items())
    return CommitTimeoutError(
        f"a backend has not confirmed in {under_way_s:.1f} s what it was sent ({what}); commit_timeout_ms is "
        f"{options.commit_timeout_ms}. See to the backend, or leave it out, and start again: no state is lost."
    )


def _awaited(pointer: Pointer) -> dict[tuple[str, str], str]:
    """Names of the records about what a pointer's backends have not confirmed, by backend and file."""
    files = [(name, delta.name) for name, delta in pending(pointer)]
    files += [
        (name, file_name(ref, SNAPSHOT))
        for name, it in pointer.replication.items()
        if it.since
        for ref in catching_up(pointer, it.since)
    ]
    return {(name, file): record_name(name, file) for name, file in files}


def _done(
    awaited: Mapping[tuple[str, str], str], records: Mapping[str, UploadRecord]
) -> dict[tuple[str, str], Markers]:
    """What backends said of those files that they have confirmed, by the records."""
    found = {key: records.get(name) for key, name in awaited.items()}
    return {key: record.markers for key, record in found.items() if record is not None and record.state == DONE}


def _version_in(record: str) -> int:
    """The version in the file name that a record is about."""
    parsed = parse_file_name(record.rpartition(" ")[2])
    return 0 if parsed is None else parsed[0].version
