"""Uploads beside batches: for each bucket and backend one after the other, for all buckets of a process side by side.

A process may die at any line. What it had under way is in a pointer, and the next call, wherever that is, begins it
anew (`commit`). What was begun and confirmed is noted in the bucket's local store, so that other processes of the
machine know.
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
# As in the reference: threads mostly wait, but each takes memory and a connection.
THREADS_MAX = 64


@dataclass(eq=False)
class Upload:
    """One file of one checkpoint on its way to one backend.

    Parameters
    ----------
    store
        The bucket's local store, for records.
    backend
        Name of the backend.
    manager
        Which has taken hold of the file.
    ref, file, markers
        The checkpoint, the file's name, and what `BackupManager.snapshot` returned.
    since_s
        Since when it counts as under way, monotonic: when an earlier attempt at the same task took it on, if one did.
    size_bytes
        The file's size.
    run
        Whose call took it on.
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
    # Moved on by `WorkerUploads`, with its lock held.
    state: UploadState = field(default=UploadState.QUEUED, init=False)
    # Done when the file is confirmed or has failed, and that is noted.
    done: Future[Markers] = field(default_factory=Future)

    def move(self, event: UploadEvent) -> UploadState:
        """Note an event; returns how it stands now."""
        self.state = UPLOAD.next_state(self.state, event)
        return self.state

    def record(self, state: str, owner: str, **also: Any) -> dict[str, bytes]:
        """A record of how it stands."""
        return {
            record_name(self.backend, self.file): UploadRecord(
                state, owner, self.since_s, run=self.run, **also
            ).encode()
        }


class Uploads(Protocol):
    """Something that gets to uploads sooner or later."""

    owner: str
    # What became of snapshots, for metrics.
    tallies: Tallies

    def submit(self, uploads: Iterable[Upload]) -> None:
        """Take uploads on: those of a bucket to a backend one after the other."""
        ...

    def find(self, store: LocalStore, backend: str, file: str) -> Upload | None:
        """The upload of a file that this process has taken on and not finished."""
        ...

    def is_alive(self, owner: str) -> bool:
        """Whether the process that took an upload on still runs."""
        ...

    def pause(self, uploads: Iterable[Upload], timeout_s: float) -> None:
        """Wait until all of these are done, or one has failed; at most so long."""
        ...

    def give_up(self, uploads: Iterable[Upload]) -> None:
        """Do not wait for these any more; what is in a queue behind them is not sent either, as after a failure."""
        ...


class WorkerUploads:
    """The uploads of a worker process."""

    def __init__(self) -> None:
        self.owner = process.token()
        self._lock = threading.RLock()
        # By bucket and backend; the first of each is under way.
        self._waiting: dict[tuple[str, str], deque[Upload]] = {}
        self._buckets: dict[str, set[str]] = {}
        self._pools: dict[str, DaemonPool] = {}
        # Clean-ups come one after the other; only those that hang have several threads.
        self.cleaner = DaemonPool("clean-up")
        self.cleaner.threads_max = THREADS_MAX
        self._sent = Tallies()
        self.tallies = Tallies()

    def pool(self, backend: str) -> DaemonPool:
        """The threads for a backend: each has its own, so that one that hangs does not hold up the others."""
        with self._lock:
            if backend not in self._pools:
                self._pools[backend] = DaemonPool(f"uploads to {backend}")
            return self._pools[backend]

    def submit(self, uploads: Iterable[Upload]) -> None:
        for upload in uploads:
            key = _key(upload)
            with self._lock:
                known = self._buckets.setdefault(upload.backend, set())
                if key[0] not in known:
                    known.add(key[0])
                    pool = self.pool(upload.backend)
                    # And one for clean-up, where a backend has that run here.
                    pool.threads_max = min(pool.threads_max + 1, THREADS_MAX)
                waiting = self._waiting.setdefault(key, deque())
                waiting.append(upload)
                first = len(waiting) == 1
                if first:
                    upload.move(UploadEvent.BEGIN)
            if first:
                self._begin(upload)

    def sent(self, store: LocalStore) -> Tally:
        """What became of a bucket's uploads since this was asked last."""
        return self._sent.take(store)

    def is_at(self, manager: BackupManager) -> bool:
        """Whether uploads of a manager are under way."""
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
        """Wait until those that are under way are over, confirmed or not, but no longer than so; then threads end."""
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
                behind = list(waiting)[waiting.index(upload) + 1 :]
                for _ in (upload, *behind):
                    waiting.pop()
                dropped = [upload, *behind] if upload.move(UploadEvent.GIVE_UP) is UploadState.DROPPED else behind
                for later in behind:
                    later.move(UploadEvent.DROP)
                if not waiting:
                    # The thread may come back some day. Until then another one does its work.
                    del self._waiting[key]
                    pool = self.pool(upload.backend)
                    pool.threads_max = min(pool.threads_max + 1, 2 * THREADS_MAX)
            # Nobody is at these any more, here or elsewhere: the next call begins them anew.
            self._record(upload.store, {}, [record_name(it.backend, it.file) for it in dropped])
            for it in dropped:
                it.done.set_exception(StorageError(f"{it.file} was not sent, as {upload.file} took too long"))

    def _begin(self, upload: Upload) -> None:
        try:
            future = upload.manager.upload(upload.ref, upload.markers)
        except Exception as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(lambda done: self._finish(upload, done))

    def _finish(self, upload: Upload, done: Future[Markers]) -> None:
        error = done.exception()
        with self._lock:
            # One that was given up says nothing of the one that was begun in its place.
            mine = upload.state is UploadState.SENDING
            dropped = _behind(upload, self._waiting[_key(upload)]) if mine and error is not None else []
        took_s = time.monotonic() - upload.begun_s
        self._sent.add(upload.store, Tally(failures=1) if error is not None else Tally(1, took_s, upload.size_bytes))
        # Noted before it is no longer found here, so that nobody takes it for lost in between.
        if error is None:
            self._record(upload.store, upload.record(DONE, self.owner, markers=dict(done.result())))
        else:
            _LOGGER.error("the upload of %s to %s failed: %s", upload.file, upload.backend, error)
            text = str(error) if isinstance(error, StateError) else f"{type(error).__name__}: {error}"
            if mine:
                names = [record_name(later.backend, later.file) for later in dropped]
                self._record(upload.store, upload.record(FAILED, self.owner, error=text), names)
        dropped, following = self._ended(upload, UploadEvent.CONFIRM if error is None else UploadEvent.FAIL)
        if error is None:
            upload.done.set_result(done.result())
        else:
            upload.done.set_exception(error)
            for later in dropped:
                later.done.set_exception(StorageError(f"{later.file} was not sent, as {upload.file} before it failed"))
        if following is not None:
            self._begin(following)

    def _ended(self, upload: Upload, event: UploadEvent) -> tuple[list[Upload], Upload | None]:
        """Take an upload out of its queue; returns what is dropped, with what was added meanwhile, and what begins."""
        with self._lock:
            queued = upload.state is UploadState.SENDING
            upload.move(event)
            if not queued:
                # Whoever gave it up has seen to what was behind it.
                return [], None
            waiting = self._waiting[_key(upload)]
            waiting.popleft()
            dropped = _behind(upload, waiting) if event is UploadEvent.FAIL else []
            for later in dropped:
                waiting.remove(later)
                later.move(UploadEvent.DROP)
            if not waiting:
                del self._waiting[_key(upload)]
                return dropped, None
            waiting[0].move(UploadEvent.BEGIN)
            return dropped, waiting[0]

    @staticmethod
    def _record(store: LocalStore, records: Mapping[str, bytes], removed: Iterable[str] = ()) -> None:
        try:
            store.record(records, tuple(removed))
        except Exception as error:
            # Whatever it is, who waits for the upload must not wait for ever; somebody will have another look at it.
            _LOGGER.warning("an upload could not be noted: %s", error)


def _behind(failed: Upload, waiting: Iterable[Upload]) -> list[Upload]:
    """What is not sent as it comes after a file that failed, so that a backend has no gaps; the next call sees to it.

    A run that began since has begun anew what it builds on, so the failure says nothing of its files.
    """
    return [later for later in waiting if later is not failed and later.run.id == failed.run.id]


def _key(upload: Upload) -> tuple[str, str]:
    return str(upload.store.folder), upload.backend
