"""Uploads while batches continue: one at a time for each bucket and backend, in parallel for the buckets of a process.

A process may die at any time. The deltas that it was uploading are in a pointer, and the next call, on any machine,
starts their uploads again (`commit`). The start and end of uploads are noted in the bucket's local store, for other
processes of the machine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from arrow_schemas.lineage import CheckpointRef
from spark_state_ext.backends import BackupManager, Markers
from spark_state_ext.commit.failures import NO_RUN, Run
from spark_state_ext.commit.ledger import DONE, FAILED, UploadRecord, record_name
from spark_state_ext.commit.tally import Tallies, Tally
from spark_state_ext.commit.upload_states import UPLOAD, UploadEvent, UploadState
from spark_state_ext.errors import StateError, StorageError
from spark_state_ext.store import LocalStore
from spark_state_ext.worker import process
from spark_state_ext.worker.threads import DaemonPool

__all__ = [
    "Upload",
    "Uploads",
    "WorkerUploads",
]

_LOGGER = logging.getLogger("spark_state_ext")
# Samza's limit. Threads mostly wait, but each needs memory and a connection.
THREADS_MAX = 64


@dataclass(eq=False)
class Upload:
    """The upload of one file of a checkpoint to one backend.

    Parameters
    ----------
    store
        The bucket's local store, which has the upload records.
    backend
        Name of the backend.
    manager
        The backup manager that sends the file.
    ref, file, markers
        The checkpoint, the file's name, and the markers from `BackupManager.snapshot`.
    since_s
        Start time, monotonic; of the first attempt at the same task, if there were several.
    size_bytes
        The file's size.
    run
        The run whose call started the upload.
    """

    store: LocalStore
    backend: str
    manager: BackupManager
    ref: CheckpointRef
    file: str
    markers: Markers
    since_s: float
    size_bytes: int = 0
    run: Run = NO_RUN
    begun_s: float = field(default_factory=time.monotonic)
    # Changed by `WorkerUploads`, under its lock.
    state: UploadState = field(default=UploadState.QUEUED, init=False)
    # Done when the upload was confirmed or failed, and that was noted.
    done: Future[Markers] = field(default_factory=Future)

    def move(self, event: UploadEvent) -> UploadState:
        """Apply an event; return the new state."""
        self.state = UPLOAD.next_state(self.state, event)
        return self.state

    def record(self, state: str, owner: str, **more_fields: Any) -> dict[str, bytes]:
        """Return the upload record for a state, by its name."""
        return {
            record_name(self.backend, self.file): UploadRecord(
                state, owner, self.since_s, run=self.run, **more_fields
            ).encode()
        }


class Uploads(Protocol):
    """A queue of uploads that runs them sooner or later."""

    owner: str
    # Counts of snapshots, for metrics.
    tallies: Tallies

    def submit(self, uploads: Iterable[Upload]) -> None:
        """Queue uploads; those of one bucket to one backend run one after the other."""
        ...

    def find(self, store: LocalStore, backend: str, file: str) -> Upload | None:
        """Return this process's unfinished upload of a file, or None."""
        ...

    def is_alive(self, owner: str) -> bool:
        """True if the process that started an upload still runs."""
        ...

    def pause(self, uploads: Iterable[Upload], timeout_s: float) -> None:
        """Wait until all uploads are done or one has failed, at most `timeout_s` seconds."""
        ...

    def give_up(self, uploads: Iterable[Upload]) -> None:
        """Give up uploads; later ones in their queues are not sent either, as after a failure."""
        ...


class WorkerUploads:
    """The uploads of a worker process."""

    def __init__(self) -> None:
        self.owner = process.get_process_token()
        self._lock = threading.RLock()
        # Queues by bucket and backend; the first upload of each queue is running.
        self._waiting: dict[tuple[str, str], deque[Upload]] = {}
        self._buckets: dict[str, set[str]] = {}
        self._pools: dict[str, DaemonPool] = {}
        # Clean-ups run one after the other; there are several threads only for clean-ups that hang.
        self.cleaner = DaemonPool("clean-up")
        self.cleaner.threads_max = THREADS_MAX
        self._sent = Tallies()
        self.tallies = Tallies()

    def pool(self, backend: str) -> DaemonPool:
        """Return the threads of a backend; backends do not share threads, so that one that hangs blocks no other."""
        with self._lock:
            if backend not in self._pools:
                self._pools[backend] = DaemonPool(f"uploads to {backend}")
            return self._pools[backend]

    def submit(self, uploads: Iterable[Upload]) -> None:
        for upload in uploads:
            key = _key(upload)
            with self._lock:
                buckets = self._buckets.setdefault(upload.backend, set())
                if key[0] not in buckets:
                    buckets.add(key[0])
                    pool = self.pool(upload.backend)
                    # One thread per bucket, and one more for clean-up.
                    pool.threads_max = min(pool.threads_max + 1, THREADS_MAX)
                waiting = self._waiting.setdefault(key, deque())
                waiting.append(upload)
                first = len(waiting) == 1
                if first:
                    upload.move(UploadEvent.BEGIN)
            if first:
                self._begin(upload)

    def sent(self, store: LocalStore) -> Tally:
        """Return and reset the counts of a bucket's uploads."""
        return self._sent.take(store)

    def has_uploads_of(self, manager: BackupManager) -> bool:
        """True if a backup manager has queued or running uploads."""
        with self._lock:
            return any(upload.manager is manager for waiting in self._waiting.values() for upload in waiting)

    def find(self, store: LocalStore, backend: str, file: str) -> Upload | None:
        with self._lock:
            waiting = self._waiting.get((str(store.folder), backend), ())
            return next((upload for upload in waiting if upload.file == file), None)

    def is_alive(self, owner: str) -> bool:
        return process.is_alive(owner)

    def pause(self, uploads: Iterable[Upload], timeout_s: float) -> None:
        futures = [upload.done for upload in uploads]
        if futures:
            wait(futures, timeout_s, return_when="FIRST_EXCEPTION")
        else:
            time.sleep(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for uploads to end, confirmed or not, then end the threads."""
        with self._lock:
            futures = [upload.done for waiting in self._waiting.values() for upload in waiting]
            pools = [*self._pools.values(), self.cleaner]
        wait(futures, timeout_s)
        for pool in pools:
            pool.close()

    def give_up(self, uploads: Iterable[Upload]) -> None:
        for upload in uploads:
            key = _key(upload)
            with self._lock:
                if upload.state not in (UploadState.QUEUED, UploadState.SENDING):
                    continue
                waiting = self._waiting[key]
                later_uploads = list(waiting)[waiting.index(upload) + 1 :]
                for _ in (upload, *later_uploads):
                    waiting.pop()
                dropped = (
                    [upload, *later_uploads]
                    if upload.move(UploadEvent.GIVE_UP) is UploadState.DROPPED
                    else later_uploads
                )
                for later in later_uploads:
                    later.move(UploadEvent.DROP)
                if not waiting:
                    # The thread may return some day. Until then another thread does its work.
                    del self._waiting[key]
                    pool = self.pool(upload.backend)
                    pool.threads_max = min(pool.threads_max + 1, 2 * THREADS_MAX)
            # No process runs these uploads any longer: the next call starts them again.
            self._record(upload.store, {}, [record_name(later.backend, later.file) for later in dropped])
            for unsent in dropped:
                unsent.done.set_exception(
                    StorageError(f"{unsent.file} was not sent, because {upload.file} took too long")
                )

    def _begin(self, upload: Upload) -> None:
        try:
            future = upload.manager.upload(upload.ref, upload.markers)
        except Exception as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(lambda done: self._finish(upload, done))

    def _finish(self, upload: Upload, future: Future[Markers]) -> None:
        error = future.exception()
        with self._lock:
            # The end of an upload that was given up must not affect the one that was started in its place.
            is_current = upload.state is UploadState.SENDING
            dropped = _list_dropped(upload, self._waiting[_key(upload)]) if is_current and error is not None else []
        took_s = time.monotonic() - upload.begun_s
        self._sent.add(upload.store, Tally(failures=1) if error is not None else Tally(1, took_s, upload.size_bytes))
        # Note the end before `find` no longer returns the upload, so that it is never taken for lost.
        if error is None:
            self._record(upload.store, upload.record(DONE, self.owner, markers=dict(future.result())))
        else:
            _LOGGER.error("the upload of %s to %s failed: %s", upload.file, upload.backend, error)
            text = str(error) if isinstance(error, StateError) else f"{type(error).__name__}: {error}"
            if is_current:
                names = [record_name(later.backend, later.file) for later in dropped]
                self._record(upload.store, upload.record(FAILED, self.owner, error=text), names)
        dropped, following = self._dequeue(upload, UploadEvent.CONFIRM if error is None else UploadEvent.FAIL)
        if error is None:
            upload.done.set_result(future.result())
        else:
            upload.done.set_exception(error)
            for later in dropped:
                later.done.set_exception(
                    StorageError(f"{later.file} was not sent, because {upload.file} before it failed")
                )
        if following is not None:
            self._begin(following)

    def _dequeue(self, upload: Upload, event: UploadEvent) -> tuple[list[Upload], Upload | None]:
        """Remove an upload from its queue; return the uploads that are dropped and the one that begins."""
        with self._lock:
            queued = upload.state is UploadState.SENDING
            upload.move(event)
            if not queued:
                # `give_up` has already handled the later uploads of the queue.
                return [], None
            waiting = self._waiting[_key(upload)]
            waiting.popleft()
            dropped = _list_dropped(upload, waiting) if event is UploadEvent.FAIL else []
            for later in dropped:
                waiting.remove(later)
                later.move(UploadEvent.DROP)
            if not waiting:
                del self._waiting[_key(upload)]
                return dropped, None
            waiting[0].move(UploadEvent.BEGIN)
            return dropped, waiting[0]

    @staticmethod
    def _record(store: LocalStore, records: Mapping[str, bytes], removed_names: Iterable[str] = ()) -> None:
        try:
            store.record(records, tuple(removed_names))
        except Exception as error:
            # Catch everything, so that waiting for the upload ends; a later call checks the upload again.
            _LOGGER.warning("the state of an upload could not be noted: %s", error)


def _list_dropped(failed: Upload, waiting: Iterable[Upload]) -> list[Upload]:
    """Return later uploads that must not be sent after a failure, because the backend would have a gap.

    Uploads of a newer run are not among them: that run has started all uploads that it needs again.
    """
    return [later for later in waiting if later is not failed and later.run.id == failed.run.id]


def _key(upload: Upload) -> tuple[str, str]:
    return str(upload.store.folder), upload.backend
