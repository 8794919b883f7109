"""Housekeeping that calls do now and then: clean-up of checkpoint files, spill files and local stores."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path

from arrow_schemas.pointer import Pointer
from spark_state_ext.backends import CleanUp
from spark_state_ext.backends.files import FilesBackup
from spark_state_ext.backends.replication import Replica, adapt_to_backends, is_complete
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.engine.first_query_folder import starting_is_stale
from spark_state_ext.engine.probes import Probes
from spark_state_ext.engine.replicas import Leases
from spark_state_ext.engine.spill_folders import spill_is_stale
from spark_state_ext.engine.task import TaskInfo
from spark_state_ext.errors import (
    CleanUpFailedError,
    LostFilesError,
    OwnershipError,
    StateError,
    StorageError,
    UnsafeFolderError,
)
from spark_state_ext.files.erasure import is_marked
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import SPILL_FOLDER, STARTING_FOLDER
from spark_state_ext.files.retention import clean_up_due
from spark_state_ext.ownership.holds import HoldWatch
from spark_state_ext.store.reclaim import remove_unused
from spark_state_ext.worker.background import Background
from spark_state_ext.worker.retry import is_retriable

__all__ = ["CleanUps", "Housekeeping"]

_LOGGER = logging.getLogger("spark_state_ext")
# For a clean-up within a call, which must not delay the batch for long.
_DELETES_MAX = 500
# If a clean-up runs this late, because its process slept, files that it misses may have been deleted rightly.
_LATE_S = 600.0
# Longest wait for a clean-up: it may be queued behind an upload that hangs.
_CLEAN_UP_S_MAX = 300.0
_RECLAIM_EVERY_S = 3_600.0
# Not in every call, because a listing takes long if the store is far away.
_SPILL_EVERY_CALLS = 10
# A user who goes back to an earlier batch needs longer than this to stop and start the query.
_SPILL_LATE_S = 60.0


class Housekeeping:
    """The housekeeping of a process, and what it remembers between calls."""

    def __init__(self, background: Background, holds: HoldWatch) -> None:
        self.background = background
        self.holds = holds
        self.probes = Probes()
        # Failures of earlier clean-ups, by bucket and backend; the next commit raises them.
        self.failed: dict[tuple[str, str], Exception] = {}
        # Clean-ups that took too long and still run, by bucket and backend.
        self.abandoned: dict[tuple[str, str], Future[int]] = {}
        self._counting = threading.Lock()
        # Number of deleted files by bucket, for metrics.
        self._deleted: dict[str, int] = {}
        self._reclaim_at_s = 0.0

    def count_deleted(self, bucket: str, files: int) -> None:
        """Add to the number of files that clean-ups of a bucket have deleted."""
        with self._counting:
            self._deleted[bucket] = self._deleted.get(bucket, 0) + files

    def take_deleted(self, bucket: str) -> int:
        """Return and reset the number of deleted files of a bucket."""
        with self._counting:
            return self._deleted.pop(bucket, 0)

    def drop_spill_files(self, folder: Folder, task: TaskInfo, calls: int, batch_ms: int) -> None:
        """Remove earlier batches' spill files: in the background, or now and then at once if workers live briefly."""
        background = self.background
        work = partial(
            _remove_stale_spill_files, folder, task, batch_ms / 1000, time.monotonic(), calls % _SPILL_EVERY_CALLS == 0
        )
        if background.finished == 0 and calls % _SPILL_EVERY_CALLS == 0:
            work()
        else:
            background.submit(f"spill files in {folder.root}", work)

    def reclaim_in_turn(self, stores: Path, scratch: Path, keep_s: float) -> None:
        """Remove local stores that no task has used for long, in the background; once an hour per process."""
        now_s = time.monotonic()
        if now_s >= self._reclaim_at_s:
            self._reclaim_at_s = now_s + _RECLAIM_EVERY_S
            self.background.submit("reclaiming local stores", lambda: remove_unused(stores, scratch, keep_s))


class CleanUps:
    """The clean-ups and existence probes of a bucket's backends."""

    def __init__(
        self,
        bucket: Bucket,
        replicas: list[Replica],
        leases: Leases,
        batches_retained: int,
        files: Folder,
        shared: Housekeeping,
        bring_back: Callable[[], None] = lambda: None,
    ) -> None:
        self._shared = shared
        self._bucket = bucket
        self._replicas = replicas
        self._leases = leases
        self._batches_retained = batches_retained
        self._files = files
        self._key = f"{files.root}/{bucket.pointer.bucket}"
        self._bring_back = bring_back
        self._probes: list[Future[None]] = []

    def probe(self, committed: Pointer, run_id: str) -> None:
        """Start existence probes (`Probes.start_once`); `probed` waits for them before the commit."""
        run_id = f"{run_id} {self._leases.times_removed}"
        read_confirmed, on_lost = (
            partial(self._bucket.committer.with_confirmed, committed),
            partial(self._note_lost, committed.heartbeats),
        )
        self._probes = self._shared.probes.start_once(self._key, run_id, read_confirmed, self._replicas, on_lost)

    def probed(self) -> bool:
        """Wait for the probes (`Probes.await_all`); return True if there were any."""
        self._shared.probes.await_all(self._probes, self._leases.hold)
        return bool(self._probes)

    def raise_failed(self) -> None:
        """Raise the failure of an earlier clean-up."""
        for replica in self._replicas:
            failed = self._shared.failed.pop((self._key, replica.name), None)
            if failed is not None:
                raise CleanUpFailedError(
                    f"old files in the backend {replica.name} cannot be deleted: {failed}. The state itself is "
                    "correct. Fix the cause, or plan with clean_up=False to delete no files."
                ) from failed

    def in_turn(self, committed: Pointer, new_pointer: Pointer) -> None:
        """Delete files that no pointer needs any longer, if it is this bucket's turn."""
        is_due = clean_up_due(new_pointer.calls, committed.bucket, self._batches_retained)
        if not is_due and not is_marked(committed, new_pointer):
            return
        background = self._shared.background
        replication_pointer = adapt_to_backends(committed, self._replicas)
        for replica in self._replicas:
            status = replication_pointer.replication.get(replica.name)
            if status is None or not is_complete(status) or status.through is None:
                continue
            request = CleanUp(committed, status.through, self._batches_retained, self._leases.check, held=self._is_held)
            asked_s = time.monotonic()
            # Workers that live only briefly never finish work in the background.
            if background.finished == 0 and self._is_crowded(replica):
                request = replace(request, still_ours=self._still_ours, deletes_max=_DELETES_MAX)
                self._clean_up(replica, request, asked_s)
                continue
            background.submit(
                f"clean-up of {self._key} in {replica.name}",
                partial(self._clean_up, replica, request, asked_s),
            )

    def deleted_files(self) -> int:
        """Return and reset the number of files of the bucket that this process has deleted."""
        return self._shared.take_deleted(self._key)

    def _still_ours(self) -> None:
        """Renew the lease and check it; unlike renewing alone, this fails if the lease's store does not answer."""
        self._leases.hold()
        self._leases.check()

    def _is_crowded(self, replica: Replica) -> bool:
        try:
            return isinstance(replica.backup, FilesBackup) and replica.backup.is_crowded(self._batches_retained)
        except StorageError as error:
            _LOGGER.warning("%s cannot be listed: %s", replica.name, error)
            return False

    def _clean_up(self, replica: Replica, request: CleanUp, asked_s: float) -> None:
        key = self._key, replica.name
        if key in self._shared.abandoned and not self._shared.abandoned[key].done():
            return
        self._shared.abandoned.pop(key, None)
        try:
            try:
                future = replica.backup.clean_up(request)
                if not wait([future], _CLEAN_UP_S_MAX).done:
                    _LOGGER.warning("the clean-up in %s takes long; the query no longer waits for it", replica.name)
                    self._shared.abandoned[key] = future
                    return
                self._shared.count_deleted(self._key, future.result())
            except LostFilesError as error:
                if time.monotonic() - asked_s < _LATE_S:
                    _LOGGER.error("%s", error)
                    self._note_lost(request.pointer.heartbeats, replica.name)
        except OwnershipError:
            raise
        except StateError as error:
            # A link that an earlier release followed does not stop the query: the files stay and the log says why.
            if isinstance(error, StorageError) and not isinstance(error, UnsafeFolderError) and not is_retriable(error):
                self._shared.failed[key] = error
            _LOGGER.warning("no files are cleaned up in %s: %s; a later call tries again", replica.name, error)

    def _is_held(self) -> bool:
        """True if the query folder has a hold, because somebody copies from it."""
        holds = self._shared.holds.living(self._files)
        for hold in holds:
            _LOGGER.info("no files are cleaned up in %s: %s holds it", self._key, hold.holder)
        return bool(holds)

    def _note_lost(self, heartbeats: int, name: str) -> None:
        """Note that a backend has lost files that it had confirmed: the next commit sends it the full state."""
        self._leases.check()
        # Before the note: if this fails, the loss is noticed again later.
        self._bring_back()
        self._bucket.committer.snapshots.note_lost(name, heartbeats)


def _remove_stale_spill_files(
    folder: Folder, task: TaskInfo, began_s: float, asked_s: float, shared_folders_too: bool
) -> None:
    if time.monotonic() - asked_s > _SPILL_LATE_S:
        return  # the query may have gone back to an earlier batch since
    try:
        folders = [folder.child(task.query_id, SPILL_FOLDER)] if task.query_id else []
        if shared_folders_too or not task.query_id:
            folders.append(folder.child(SPILL_FOLDER))
        for spill_files in folders:
            for name in spill_files.names():
                if spill_is_stale(name, task.batch, began_s, time.time()):
                    spill_files.remove_tree(name)
        if shared_folders_too:
            starting_notes = folder.child(STARTING_FOLDER)
            for name in starting_notes.names():
                if starting_is_stale(name, int(time.time() * 1000)):
                    starting_notes.remove(name)
    except StorageError as error:
        # Does not harm this batch. A late attempt at an old batch may still be writing there.
        _LOGGER.warning("old spill files could not be removed, the next batch tries again: %s", error)
