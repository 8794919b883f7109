"""What a call does besides its bucket's work, now and then: clean-up of files, of spill files, and of local stores."""

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
from spark_state_ext.backends.replication import Replica, is_complete, taken_over
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.engine.first_query_folder import starting_is_stale
from spark_state_ext.engine.in_transit import spill_is_stale
from spark_state_ext.engine.probes import Probes
from spark_state_ext.engine.replicas import Leases
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
from spark_state_ext.store.reclaim import reclaim
from spark_state_ext.worker.background import Background
from spark_state_ext.worker.retry import is_retriable

__all__ = ["CleanUps", "Housekeeping"]

_LOGGER = logging.getLogger("spark_state_ext")
# Within a call, which has something else to do.
_DELETES_MAX = 500
# What is this old when its turn comes, because its process slept, is not to be believed where it misses files.
_LATE_S = 600.0
# Nobody waits longer for a clean-up: it may wait behind an upload that hangs.
_CLEAN_UP_S_MAX = 300.0
_RECLAIM_EVERY_S = 3_600.0
# A listing takes a while where the store is far away.
_SPILL_EVERY_CALLS = 10
# Whoever goes back to an earlier batch by hand takes longer to stop and start a query.
_SPILL_LATE_S = 60.0


class Housekeeping:
    """What a process does besides its calls, and remembers from one to the next."""

    def __init__(self, background: Background, holds: HoldWatch) -> None:
        self.background = background
        self.holds = holds
        self.probes = Probes()
        # Clean-ups of earlier turns that failed, by bucket and backend; told by the next commit.
        self.failed: dict[tuple[str, str], Exception] = {}
        # Those that nobody waits for any more, until they end.
        self.left: dict[tuple[str, str], Future[int]] = {}
        self._counting = threading.Lock()
        # Files that were deleted, by bucket; metrics tell of them.
        self._deleted: dict[str, int] = {}
        self._reclaim_at_s = 0.0

    def count_deleted(self, bucket: str, files: int) -> None:
        """A clean-up of a bucket has deleted so many files."""
        with self._counting:
            self._deleted[bucket] = self._deleted.get(bucket, 0) + files

    def take_deleted(self, bucket: str) -> int:
        """How many files were deleted of a bucket since this was asked last."""
        with self._counting:
            return self._deleted.pop(bucket, 0)

    def drop_spill_files(self, folder: Folder, task: TaskInfo, calls: int, batch_ms: int) -> None:
        """Have earlier batches' spill files removed beside the batch; now and then at once, where no worker gets to
        that.
        """
        background = self.background
        work = partial(_drop_stale, folder, task, batch_ms / 1000, time.monotonic(), calls % _SPILL_EVERY_CALLS == 0)
        if background.finished == 0 and calls % _SPILL_EVERY_CALLS == 0:
            work()
        else:
            background.submit(f"spill files in {folder.root}", work)

    def reclaim_in_turn(self, stores: Path, scratch: Path, keep_s: float) -> None:
        """Have local stores removed that no task has used for long; each process looks once an hour."""
        now_s = time.monotonic()
        if now_s >= self._reclaim_at_s:
            self._reclaim_at_s = now_s + _RECLAIM_EVERY_S
            self.background.submit("reclaiming local stores", lambda: reclaim(stores, scratch, keep_s))


class CleanUps:
    """Clean-ups of a bucket's backends."""

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
        """As `Probes.once`; `probed` comes before the commit."""
        run_id = f"{run_id} {self._leases.times_removed}"
        known, lost = partial(self._bucket.committer.known, committed), partial(self._lose, committed.heartbeats)
        self._probes = self._shared.probes.once(self._key, run_id, known, self._replicas, lost)

    def probed(self) -> bool:
        """As `Probes.await_all`; whether there was anything to wait for."""
        self._shared.probes.await_all(self._probes, self._leases.hold)
        return bool(self._probes)

    def raise_failed(self) -> None:
        """Tell of a clean-up that failed since."""
        for replica in self._replicas:
            failed = self._shared.failed.pop((self._key, replica.name), None)
            if failed is not None:
                raise CleanUpFailedError(
                    f"old files in the backend {replica.name} cannot be deleted: {failed}. The state is as it should "
                    "be. Mend the cause, or plan with clean_up=False and delete nothing."
                ) from failed

    def in_turn(self, committed: Pointer, new: Pointer) -> None:
        """Have what no pointer leads to any more deleted, when it is this bucket's turn."""
        due = clean_up_due(new.calls, committed.bucket, self._batches_retained)
        if not due and not is_marked(committed, new):
            return
        background = self._shared.background
        known = taken_over(committed, self._replicas)
        for replica in self._replicas:
            status = known.replication.get(replica.name)
            if status is None or not is_complete(status) or status.through is None:
                continue
            request = CleanUp(committed, status.through, self._batches_retained, self._leases.check, held=self._is_held)
            asked_s = time.monotonic()
            # Workers that do not live long enough never get to it in the background.
            if background.finished == 0 and self._is_crowded(replica):
                request = replace(request, still_ours=self._still_ours, deletes_max=_DELETES_MAX)
                self._clean_up(replica, request, asked_s)
                continue
            background.submit(
                f"clean-up of {self._key} in {replica.name}",
                partial(self._clean_up, replica, request, asked_s),
            )

    def deleted_files(self) -> int:
        """How many files of the bucket this process has deleted since this was asked last."""
        return self._shared.take_deleted(self._key)

    def _still_ours(self) -> None:
        """Within a call, which renews the lease. That passes where its store does not answer, and this does not."""
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
        if key in self._shared.left and not self._shared.left[key].done():
            return
        self._shared.left.pop(key, None)
        try:
            try:
                cleaning = replica.backup.clean_up(request)
                if not wait([cleaning], _CLEAN_UP_S_MAX).done:
                    _LOGGER.warning("the clean-up in %s takes long; it is left to itself", replica.name)
                    self._shared.left[key] = cleaning
                    return
                self._shared.count_deleted(self._key, cleaning.result())
            except LostFilesError as error:
                if time.monotonic() - asked_s < _LATE_S:
                    _LOGGER.error("%s", error)
                    self._lose(request.pointer.heartbeats, replica.name)
        except OwnershipError:
            raise
        except StateError as error:
            # A link that an earlier release followed is no reason to stop a query: files stay, and the log says why.
            if isinstance(error, StorageError) and not isinstance(error, UnsafeFolderError) and not is_retriable(error):
                self._shared.failed[key] = error
            # Of no harm to a batch.
            _LOGGER.warning("nothing is cleaned up in %s: %s; a later call tries again", replica.name, error)

    def _is_held(self) -> bool:
        """Whether somebody copies from the query folder."""
        holds = self._shared.holds.living(self._files)
        for hold in holds:
            _LOGGER.info("nothing is cleaned up in %s: %s holds it", self._key, hold.holder)
        return bool(holds)

    def _lose(self, heartbeats: int, name: str) -> None:
        """A backend lacks what it had confirmed: it gets a full backup with the next commit."""
        self._leases.check()
        # Before it is noted: should it fail, whoever notices next does it.
        self._bring_back()
        self._bucket.committer.snapshots.lose(name, heartbeats)


def _drop_stale(folder: Folder, task: TaskInfo, began_s: float, asked_s: float, in_common: bool) -> None:
    if time.monotonic() - asked_s > _SPILL_LATE_S:
        return  # the query may have gone back to an earlier batch since
    try:
        folders = [folder.child(task.query_id, SPILL_FOLDER)] if task.query_id else []
        if in_common or not task.query_id:
            folders.append(folder.child(SPILL_FOLDER))
        for spills in folders:
            for name in spills.names():
                if spill_is_stale(name, task.batch, began_s, time.time()):
                    spills.remove_tree(name)
        if in_common:
            starting = folder.child(STARTING_FOLDER)
            for name in starting.names():
                if starting_is_stale(name, int(time.time() * 1000)):
                    starting.remove(name)
    except StorageError as error:
        # Of no harm to this batch; a late attempt at an old one may be writing there.
        _LOGGER.warning("old spill files are left to the next batch: %s", error)
