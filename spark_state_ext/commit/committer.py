"""The committer: takes a bucket's commit through its phases, uploads deltas and keeps records about the uploads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NoReturn

from arrow_schemas.lineage import SNAPSHOT, CheckpointRef, file_name, parse_file_name
from arrow_schemas.pointer import InlineDelta, Pointer
from spark_state_ext.backends import STATE, Checkpoint, Markers
from spark_state_ext.backends.replication import Replica, adapt_to_backends, get_version
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.commit.decisions import (
    CommitOptions,
    DeltaHandling,
    assume_confirmed,
    choose_handling,
    has_overdue_delta,
    list_pending,
    list_sufficient_snapshots,
    settle,
)
from spark_state_ext.commit.failures import FailedStage, Run, StartTimes, still_counts
from spark_state_ext.commit.ledger import DONE, FAILED, RUNNING, UploadRecord, read_upload_records, record_name
from spark_state_ext.commit.snapshots import Snapshots, check_name
from spark_state_ext.commit.uploads import Upload, Uploads
from spark_state_ext.errors import CommitTimeoutError, StateError, UploadFailedError
from spark_state_ext.files.sealed_file import SealedFile
from spark_state_ext.store import LocalStore

__all__ = ["Committer", "SubmittedDelta", "Phase", "await_all"]

# How often to check for uploads by other processes of this machine.
_POLL_S = 0.02
_SLICE_S = 1.0
# Name of the record with start times; and, in it, of the task's own delta, whose file name differs per attempt.
_START_TIMES, _OWN = "clocks", "own"


@dataclass(frozen=True)
class SubmittedDelta:
    """A new delta that was submitted for upload.

    Parameters
    ----------
    handling
        How the delta becomes durable.
    sealed
        The sealed delta file.
    uploads
        Its uploads, one to each backend that is up to date.
    earlier_uploads
        Uploads of earlier deltas that must be waited for first.
    """

    handling: DeltaHandling
    sealed: SealedFile
    uploads: tuple[Upload, ...]
    earlier_uploads: tuple[Upload, ...]


@dataclass(frozen=True)
class Phase:
    """The result of a phase of a commit.

    Parameters
    ----------
    pointer
        The pointer after the phase.
    waited_s
        How long the phase waited for backends, in seconds.
    deferred
        Uploads that the task's last call must wait for.
    """

    pointer: Pointer
    waited_s: float = 0.0
    deferred: tuple[Upload, ...] = ()


class Committer:
    """The commit of one bucket in one call."""

    def __init__(self, store: LocalStore, replicas: Sequence[Replica], context: CommitContext) -> None:
        self._context = context
        self._failed_stage = FailedStage(store.folder)
        self._store = store
        self._replicas = {replica.name: replica for replica in replicas}
        self._stale: list[str] = []
        self.snapshots = Snapshots(store, self._replicas, context, self._counts)

    # -- earlier commits ----------------------------------------------------------------------------

    def begin(self, pointer: Pointer) -> Phase:
        """Return the pointer with uploads of earlier commits that have ended; wait for those that take too long."""
        for replica in self._replicas.values():
            replica.backup.init(None if pointer.ref is None else Checkpoint(pointer.ref, pointer.markers))
        pointer = self._settle(adapt_to_backends(pointer, list(self._replicas.values())))
        self._raise_refused()
        self._resume(pointer)
        if not list_pending(pointer):
            return Phase(pointer)
        since_s = self._find_oldest_start_s(pointer)
        is_late = self._context.clock_s() - since_s > self._context.options.commit_delay_ms_max / 1000
        if is_late or has_overdue_delta(pointer, self._context.batches_retained) or not self._context.options.inline:
            return self._wait(pointer, since_s)
        return Phase(pointer)

    def _settle(self, pointer: Pointer) -> Pointer:
        pointer = self.snapshots.without_lost(pointer)
        records = read_upload_records(self._store)
        self._raise_failed(pointer, records)
        awaited = _list_awaited(pointer)
        checked = {check_name(name, file) for name, file in awaited}
        oldest = pointer.inline[0].ref if pointer.inline else pointer.ref
        names = checked | set(awaited.values())
        if pointer.lineage:
            # When the next snapshot is due, the record of the one before is needed.
            unconfirmed = file_name(pointer.lineage[0].ref, SNAPSHOT)
            names |= {record_name(name, unconfirmed) for name in self._replicas}
        self._stale = [name for name in records if _parse_version(name) < get_version(oldest) and name not in names]
        return settle(pointer, _select_confirmed(awaited, records))

    def with_confirmed(self, pointer: Pointer) -> Pointer:
        """Return an input pointer with everything confirmed since, by this machine's records; change no state."""
        pointer = adapt_to_backends(pointer, list(self._replicas.values()))
        return settle(pointer, _select_confirmed(_list_awaited(pointer), read_upload_records(self._store)))

    def _raise_failed(self, pointer: Pointer, records: Mapping[str, UploadRecord]) -> None:
        for name, delta in list_pending(pointer):
            record = records.get(record_name(name, delta.name))
            if record is not None and record.state == FAILED and self._counts(record.run):
                # Keep the record: for another attempt at this task, the failure must not look fixed.
                self._failed_stage.note(self._context.run)
                raise UploadFailedError(
                    f"the upload of {delta.name} to the backend {name} failed: {record.error}. The delta is in Spark's "
                    "own state and not lost. Fix the cause and start the query again, or remove that backend."
                )

    def _raise_refused(self) -> None:
        for name, refusals in self.snapshots.read_refusals().items():
            if not refusals.have_lasted(self._context.options.commit_timeout_ms / 1000):
                continue
            # Keep the record, as in `_raise_failed`.
            self._failed_stage.note(self._context.run)
            raise UploadFailedError(
                f"the backend {name} has refused full snapshots for {refusals.last_s - refusals.since_s:.0f} s, "
                f"{refusals.attempts} times. The last error: {refusals.error}. No state is lost. Fix the cause and "
                "start the query again, or remove that backend."
            )

    def _counts(self, noted: Run) -> bool:
        """True if a failure that a run noted counts for this call (`still_counts`)."""
        return noted == self._context.run or still_counts(noted, self._context.run, self._last_failed_stage)

    @cached_property
    def _last_failed_stage(self) -> int | None:
        return self._failed_stage.read(self._context.run)

    def _resume(self, pointer: Pointer, mine: bool = False) -> list[Upload]:
        """Restart uploads that no process runs for this run; with `mine`, also those that only another process runs."""
        if not pointer.inline:
            return []
        records = read_upload_records(self._store)
        own: list[Upload] = []
        restarted: list[Upload] = []
        for name, delta in list_pending(pointer):
            upload = self._context.uploads.find(self._store, name, delta.name)
            if upload is not None and not self._counts(upload.run):
                # It may have hung since before the cause was fixed.
                self._context.uploads.give_up([upload])
                upload = None
            record = records.get(record_name(name, delta.name))
            if upload is None:
                if record is not None and (record.state == DONE or (self._runs_elsewhere(record) and not mine)):
                    continue
                since_s = self._find_start_s(record_name(name, delta.name), records)
                upload = self._create_upload(name, delta.ref, SealedFile.of(delta.name, delta.data), since_s)
                restarted.append(upload)
            own.append(upload)
        self._submit(restarted)
        return own

    def _runs_elsewhere(self, record: UploadRecord) -> bool:
        """True if another process is running the upload for this run."""
        return record.owner != self._context.uploads.owner and self._is_running(record)

    def _is_running(self, record: UploadRecord) -> bool:
        alive = record.owner == self._context.uploads.owner or self._context.uploads.is_alive(record.owner)
        return record.state == RUNNING and alive and self._counts(record.run)

    def _find_start_s(self, name: str, records: Mapping[str, UploadRecord]) -> float:
        """Return when an upload began, according to this machine's records; now, if it is not running.

        Uploads end with their process. Another attempt at the same task keeps their start times. A later batch does
        not, because it may come hours after the last attempt.
        """
        record = records.get(name)
        start_times = [self._earlier_start_times.get(name)]
        if record is not None and (
            self._is_running(record) or (record.state == RUNNING and record.run == self._context.run)
        ):
            start_times.append(record.since_s)
        return min((since_s for since_s in start_times if since_s is not None), default=self._context.clock_s())

    @cached_property
    def _earlier_start_times(self) -> Mapping[str, float]:
        """Start times that earlier attempts at this task left."""
        return StartTimes.decode(self._store.records().get(_START_TIMES), self._context.run)

    def _encode_start_times(self, pointer: Pointer, **own: float) -> dict[str, bytes]:
        """Return the record with start times for further attempts at this task; empty if no upload is running."""
        names = [record_name(name, delta.name) for name, delta in list_pending(pointer)]
        if not self._context.run.id or not (names or own):
            return {}
        records = read_upload_records(self._store)
        since_s = {**own, **{name: self._find_start_s(name, records) for name in names}}
        return {_START_TIMES: StartTimes(self._context.run, since_s).encode()}

    def _find_oldest_start_s(self, pointer: Pointer) -> float:
        """Return when the oldest running upload began."""
        records = read_upload_records(self._store)
        start_times = [
            self._find_start_s(record_name(name, delta.name), records) for name, delta in list_pending(pointer)
        ]
        return min(start_times, default=self._context.clock_s())

    def _wait(self, pointer: Pointer, since_s: float) -> Phase:
        """Wait until backends have confirmed all inline deltas of a pointer."""
        began_s = self._context.clock_s()
        self._store.record(self._encode_start_times(pointer))
        while True:
            pointer = self._settle(pointer)
            if not list_pending(pointer):
                return Phase(pointer, self._context.clock_s() - began_s)
            left_s = since_s + self._context.options.commit_timeout_ms / 1000 - self._context.clock_s()
            own = self._find_own_uploads(pointer)
            if left_s <= 0:
                self._context.uploads.give_up(own)
                waiting = [(name, delta.name) for name, delta in list_pending(pointer)]
                # A later call, in any process, starts the uploads again; another attempt at this task is late already.
                self._store.record({}, [record_name(*backend_and_file) for backend_and_file in waiting])
                self._failed_stage.note(self._context.run)
                raise _build_timeout_error(waiting, self._context.clock_s() - since_s, self._context.options)
            foreign = len(own) < len(list_pending(pointer))
            self._context.uploads.pause(own, min(left_s, _POLL_S if foreign else _SLICE_S))
            self._context.while_waiting()
            self._resume(pointer)

    def _find_own_uploads(self, pointer: Pointer) -> list[Upload]:
        """Return the running uploads of this process that a pointer waits for."""
        running = [self._context.uploads.find(self._store, name, delta.name) for name, delta in list_pending(pointer)]
        return [upload for upload in running if upload is not None]

    # -- the new checkpoint ------------------------------------------------------------------------

    def submit_delta(self, pointer: Pointer, sealed: SealedFile, may_defer: bool, room_bytes: int) -> SubmittedDelta:
        """Start uploads of a new checkpoint's delta to every backend that is up to date; `finish` comes next."""
        assert pointer.ref is not None, "a delta must belong to a checkpoint"
        inline_bytes = sum(len(delta.data) for delta in pointer.inline)
        handling = choose_handling(sealed.size_bytes, inline_bytes, room_bytes, may_defer, self._context.options)
        # Uploads to wait for must be in one queue, in order.
        earlier_uploads = [] if handling == DeltaHandling.INLINE else self._resume(pointer, mine=True)
        own = (
            {}
            if handling == DeltaHandling.INLINE
            else {_OWN: self._earlier_start_times.get(_OWN, self._context.clock_s())}
        )
        since_s = own.get(_OWN, self._context.clock_s())
        uploads = [self._create_upload(name, pointer.ref, sealed, since_s) for name in pointer.replication]
        for _ in uploads:
            sealed.take()
        try:
            self._submit(uploads, self._encode_start_times(pointer, **own))
        except BaseException:
            for _ in uploads:
                sealed.let_go()
            raise
        for upload in uploads:
            upload.done.add_done_callback(lambda _: sealed.let_go())
        return SubmittedDelta(handling, sealed, tuple(uploads), tuple(earlier_uploads))

    def finish(self, pointer: Pointer, submitted: SubmittedDelta) -> Phase:
        """Return the new pointer; wait for uploads that must be confirmed within the call."""
        assert pointer.ref is not None, "a delta must belong to a checkpoint"
        sealed, uploads = submitted.sealed, [*submitted.earlier_uploads, *submitted.uploads]
        if submitted.handling == DeltaHandling.INLINE:
            data = sealed.get_range(0, sealed.size_bytes)
            delta = InlineDelta(pointer.ref, data, int(time.time() * 1000), pointer.heartbeats)
            return Phase(replace(pointer, inline=(*pointer.inline, delta)))
        waited_s = 0.0 if submitted.handling == DeltaHandling.DEFERRED else self.await_all(uploads)
        confirmed_pointer = assume_confirmed(pointer, {upload.backend: upload.markers for upload in submitted.uploads})
        return Phase(
            confirmed_pointer, waited_s, tuple(uploads) if submitted.handling == DeltaHandling.DEFERRED else ()
        )

    def await_all(self, uploads: Sequence[Upload]) -> float:
        """Wait until uploads are confirmed; return the seconds waited."""
        return await_all(
            uploads, self._context.uploads, self._context.options, self._context.clock_s, self._context.while_waiting
        )

    # -- uploads -------------------------------------------------------------------------------------

    def _create_upload(self, name: str, ref: CheckpointRef, sealed: SealedFile, since_s: float) -> Upload:
        manager = self._replicas[name].backup
        markers = manager.snapshot(ref, {STATE: sealed})
        return Upload(
            self._store, name, manager, ref, sealed.name, markers, since_s, sealed.size_bytes, self._context.run
        )

    def _submit(self, uploads: Sequence[Upload], more_records: Mapping[str, bytes] | None = None) -> None:
        if not uploads:
            return
        records = dict(more_records or {})
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
    """Wait until uploads are confirmed, as `Committer.await_all`; return the seconds waited."""
    began_s = clock_s()
    while True:
        if any(_find_error(upload) is not None for upload in uploads):
            _raise_first_error(uploads)
        waiting = [upload for upload in uploads if not upload.done.done()]
        if not waiting:
            return clock_s() - began_s
        under_way_s = clock_s() - min(upload.since_s for upload in waiting)
        if under_way_s * 1000 >= options.commit_timeout_ms:
            runner.give_up(waiting)
            for upload in waiting:
                upload.store.record({}, [record_name(upload.backend, upload.file)])
                FailedStage(upload.store.folder).note(upload.run)
            raise _build_timeout_error(((upload.backend, upload.file) for upload in waiting), under_way_s, options)
        runner.pause(waiting, min(_SLICE_S, options.commit_timeout_ms / 1000 - under_way_s))
        while_waiting()


def _find_error(upload: Upload) -> BaseException | None:
    """Return the error with which an upload has ended."""
    return upload.done.exception() if upload.done.done() else None


def _raise_first_error(uploads: Sequence[Upload]) -> NoReturn:
    """Raise the first error of uploads of which one has failed.

    The caller may have found a later upload, which was not sent because an earlier one failed meanwhile. The earlier
    one ended first, so it is found now.
    """
    upload, error = next((upload, error) for upload in uploads if (error := _find_error(upload)) is not None)
    FailedStage(upload.store.folder).note(upload.run)
    if isinstance(error, StateError):
        raise error
    raise UploadFailedError(f"the upload of {upload.file} to the backend {upload.backend} failed: {error!r}") from error


def _build_timeout_error(
    waiting: Iterable[tuple[str, str]], under_way_s: float, options: CommitOptions
) -> CommitTimeoutError:
    by_backend: dict[str, list[str]] = {}
    for name, file in waiting:
        by_backend.setdefault(name, []).append(file)
    files_by_backend = "; ".join(f"{name}: {', '.join(files[:3])}" for name, files in by_backend.items())
    return CommitTimeoutError(
        f"a backend has not confirmed files within {under_way_s:.1f} s ({files_by_backend}); commit_timeout_ms is "
        f"{options.commit_timeout_ms}. Repair or remove the backend and start the query again: no state is lost."
    )


def _list_awaited(pointer: Pointer) -> dict[tuple[str, str], str]:
    """Return record names, by backend and file, of files that a pointer's backends have not confirmed."""
    files = [(name, delta.name) for name, delta in list_pending(pointer)]
    files += [
        (name, file_name(ref, SNAPSHOT))
        for name, status in pointer.replication.items()
        if status.since
        for ref in list_sufficient_snapshots(pointer, status.since)
    ]
    return {(name, file): record_name(name, file) for name, file in files}


def _select_confirmed(
    awaited: Mapping[tuple[str, str], str], records: Mapping[str, UploadRecord]
) -> dict[tuple[str, str], Markers]:
    """Return the markers of those awaited files that backends have confirmed, according to records."""
    found_records = {key: records.get(name) for key, name in awaited.items()}
    return {key: record.markers for key, record in found_records.items() if record is not None and record.state == DONE}


def _parse_version(record: str) -> int:
    """Return the version of the file that a record is about; 0 if its name has no version."""
    parsed = parse_file_name(record.rpartition(" ")[2])
    return 0 if parsed is None else parsed[0].version
