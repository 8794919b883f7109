"""Erases keys from the old files of a stopped query: rewrites each file that has them under the same name.

The newest state must already be without the keys, because Spark's state may have deltas inline. Files keep their names,
headers and lineage, so every pointer that Spark has still leads to a state: the one of its batch, without these keys.
Local stores are not used any longer, because they may be older and would miss a tombstone that was erased
(`docs/design/007b-erasing.md`).
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from arrow_schemas.operator import operator_file_name
from spark_state_ext.backends.registry import FSSPEC, Backend
from spark_state_ext.engine.erased_rows import find_matching, find_positions
from spark_state_ext.erasing.checkpoint_files import BucketPast, read_past, rewrite
from spark_state_ext.erasing.leftovers import list_unfinished, scratch_with_keys
from spark_state_ext.erasing.lineages import QueryLines, find_lines
from spark_state_ext.erasing.query_folders import QueryFolder, convert_keys, find_query_folders
from spark_state_ext.erasing.receipt import EraseReceipt
from spark_state_ext.erasing.savepoint_erasure import SavepointBegunWith, plan_erasure
from spark_state_ext.erasing.scan import KEYS_MAX, erase_scan
from spark_state_ext.errors import LiveRunError, StateError, UsageError
from spark_state_ext.files.erase_requests import EraseFolder
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.horizon import recent_heartbeats
from spark_state_ext.files.layout import PARENTS_FOLDER
from spark_state_ext.ownership.holds import HoldWatch
from spark_state_ext.ownership.lease import Lease
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import ERASER, NumberedRecord, RunIdentity
from spark_state_ext.ownership.query_end import wait_until_free
from spark_state_ext.rescale.parents import has_parents
from spark_state_ext.worker.local_folders import root_id
from spark_state_ext.worker.removal import refuse_links, remove_tree

__all__ = ["ErasedHistory", "erase_history"]

_LOGGER = logging.getLogger("spark_state_ext")
# Each file must be rewritten within this time; otherwise the lease is renewed too late, which is an error.
LEASE_MS = 30_000
_REMOVED_PREFIX = "erased-"
_RECENTLY_S = 900


@dataclass(frozen=True)
class ErasedHistory:
    """The result of `erase_history`.

    Parameters
    ----------
    files, rows
        Number of rewritten checkpoint files, and of rows that were removed from them.
    requests
        Number of erase requests from which the keys were removed.
    stores
        Number of local store folders that were removed.
    receipt
        Receipt of a scan after the erasure.
    savepoints
        Number of savepoints that were rewritten, or from which files of a stopped run were removed.
    savepoints_with_keys
        Savepoints in which the scan found keys: the ones you named, and the one that the query began with.
    """

    files: int
    rows: int
    requests: int
    stores: int
    receipt: EraseReceipt
    savepoints: int = 0
    savepoints_with_keys: tuple[str, ...] = ()


def erase_history(
    root: str,
    keys: Any,
    *,
    operator: str = "state",
    query_folder: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    backends: Sequence[Backend] = (),
    local_dirs: Sequence[str] = (),
    inline_batches: int = 100,
    savepoints: Sequence[str] = (),
    write_savepoints: bool = False,
) -> ErasedHistory:
    """Erase keys from all checkpoint files and erase requests of a stopped query.

    First request the erasure with `erase_keys`, let the query run until `erase_status` says ``"done"``, and stop it.
    Afterwards the query can go on as usual; if it goes back to an older batch, that is without the keys too. If this
    call is stopped, repeat it: it continues. Savepoints belong to the user, so they are only rewritten if you ask for
    it. The receipt shows which of the savepoints that you name, and of the one that the query began with, have a key.

    Parameters
    ----------
    root, operator, storage_options
        As given to `ArrowState`.
    keys
        As for `erase_keys`; at most a thousand.
    query_folder
        Name of the query folder; needed if the operator has several.
    backends
        *All* other backends of the query, because a restore may read a file from any of them.
    local_dirs
        Folders of this machine with local stores, as for `erase_scan`. The query's local stores are removed; they are
        only caches.
    inline_batches
        The largest recent value of the query's ``spark.sql.streaming.minBatchesToRetain``: pointers of that many
        batches may have deltas inline, which cannot be changed. The keys' tombstones must be older, by 3 times as many
        batches with data plus 2. Use 0 if the query has kept no deltas inline for that long (its backends are without
        ``"changelog"``, or it has `erase_within_s`).
    savepoints
        Folders of savepoints to search for the keys.
    write_savepoints
        Rewrite these savepoints without the keys: a bucket that has a key gets one compacted snapshot. Meanwhile no
        query can start from them.

    Returns
    -------
    ErasedHistory
        Numbers of rewritten files, and the receipt of a scan.

    Raises
    ------
    UsageError
        If a key is in the newest state, a request with the key is not done, or its tombstones are too new; if the
        storage cannot replace a file in one step; or if an argument is invalid.
    LiveRunError
        If the query is running or a savepoint of it is being taken; or if a query below the root is starting from a
        savepoint that is to be rewritten.
    ClaimedError
        If a savepoint that is to be rewritten is claimed.
    MissingCheckpointError
        If there is no such savepoint.
    CorruptFileError
        If a file cannot be read. Then no file of its bucket was changed.
    StorageError
        If the storage fails.

    Examples
    --------
    >>> erased = erase_history("/state", ["Jane Doe"], operator="count")  # doctest: +SKIP
    >>> erased.receipt.absent  # doctest: +SKIP
    True
    """
    folders = find_query_folders(root, operator, query_folder, storage_options)
    if len(folders) > 1:
        raise UsageError(
            f"operator {operator!r} has {len(folders)} query folders below {root}: name one with query_folder "
            f"({', '.join(folder.name for folder in folders[:5])})"
        )
    if type(inline_batches) is not int or inline_batches < 0:
        raise UsageError(f"inline_batches must be a whole number of batches, not {inline_batches!r}")
    if write_savepoints and (isinstance(savepoints, str) or not savepoints):
        raise UsageError("write_savepoints needs savepoints=[…]: only savepoints that you name are rewritten")
    folder = folders[0]
    stored_keys = convert_keys(keys, folder.schema, "erase_history()")
    if stored_keys.num_rows > KEYS_MAX:
        raise UsageError(f"erase_history() was given more than {KEYS_MAX:,} keys: erase them in several calls")
    query_folders = _find_query_folders(folder, operator, backends, local_dirs)
    root_folder = Folder(root.rstrip("/") or root, storage_options)
    savepoint_erasures = [
        plan_erasure(path, keys, operator, folder.files, root_folder, storage_options)
        for path in (savepoints if write_savepoints else ())
    ]
    unfinished = list_unfinished(query_folders)
    # An earlier run may have been stopped after it had rewritten the last file.
    last = LeaseLog(folder.files).newest(first=True)
    run_before = last is not None and last.record.owner.application == ERASER
    with scratch_with_keys() as scratch, _hold_lease(folder.files) as lease:
        erasure_steps = _Erasure(folder, query_folders, stored_keys, scratch, lease)
        erasure_steps.refuse_waiting()
        files, rows = erasure_steps.erase_files(inline_batches, run_before)
        requests = erasure_steps.erase_requests()
        erasure_steps.remove(unfinished)
        stores = sum(_remove_stores(Path(path), root, operator, folder.name) for path in local_dirs)
        savepoints_rewritten = sum(erasure.carry_out(lease, scratch) for erasure in savepoint_erasures)
    begun_with = SavepointBegunWith.of(folder.files, savepoints, storage_options)
    scanned_savepoints = [*savepoints, *begun_with.paths]
    receipt = erase_scan(
        root,
        keys,
        operator=operator,
        storage_options=storage_options,
        backends=backends,
        savepoints=scanned_savepoints,
        local_dirs=local_dirs,
    )
    receipt = replace(receipt, out_of_reach=(*receipt.out_of_reach, *begun_with.out_of_reach))
    savepoints_with_keys = [
        path
        for path in scanned_savepoints
        if any(found.where.startswith(path.rstrip("/") + "/") for found in receipt.found)
    ]
    return ErasedHistory(files, rows, requests, stores, receipt, savepoints_rewritten, tuple(savepoints_with_keys))


def _find_query_folders(
    folder: QueryFolder, operator: str, backends: Sequence[Backend], local_dirs: Sequence[str]
) -> list[Folder]:
    """Return the query folder in all backends; raise if its files cannot be rewritten."""
    query_folders = [folder.files, *(_find_replica(backend, operator, folder.name) for backend in backends)]
    for query_folder in query_folders:
        if not query_folder.replaces:
            raise UsageError(
                f"the file system of {query_folder.root} cannot replace a file in one step, so a file might be lost if "
                "this is stopped. Move the state to another root instead (docs/operating/erasing.md)"
            )
        # Parents are in the backend that was the first when the query was rescaled.
        if has_parents(query_folder):
            raise UsageError(
                f"the state at {folder.files.root} was rescaled, and the old buckets' files in "
                f"{query_folder.child(PARENTS_FOLDER).root} are still needed: run the query until it has removed them"
            )
    for path in local_dirs:
        if not Path(path).is_dir():
            raise UsageError(f"there is no folder {path}: give the local_dir of the ArrowState")
    return query_folders


def _find_replica(backend: Backend, operator: str, query_folder: str) -> Folder:
    if backend.kind != FSSPEC:
        raise UsageError(
            f"the backend {backend.name} has the kind {backend.kind}, whose files this package cannot rewrite: move "
            "the state to another root instead (docs/operating/erasing.md)"
        )
    return Folder(backend.root, backend.storage_options).child(operator, query_folder)


@contextmanager
def _hold_lease(files: Folder) -> Iterator[Lease]:
    """Hold the query folder's lease like a run of the query, and release it afterwards."""
    log = LeaseLog(files)
    me = RunIdentity.here(ERASER, uuid.uuid4().hex)
    newest = log.newest(first=True)
    claim = None if newest is None else newest.record.claim
    if claim is not None and not claim.built:
        raise UsageError(
            f"the state at {files.root} was claimed by {claim}, which may not have committed a batch yet: run that "
            "query first"
        )

    def make_live_error(newest_record: NumberedRecord) -> LiveRunError:
        return LiveRunError(
            f"the state at {files.root} is in use by {newest_record.record.owner}, which renews its lease: stop the "
            "query first"
        )

    # The lease's own error is meant for another run of the query, so it would not say what to do here.
    wait_until_free(log, None if claim is None else claim.id, make_live_error)
    format_1_too = newest is not None and newest.record.format_1_too
    lease = Lease(files, me, LEASE_MS, format_1_too=format_1_too, claim=claim)
    lease.hold()
    try:
        yield lease
    finally:
        try:
            last = log.newest()
            if last is not None and last.record.owner.plan == me.plan:
                log.append(last, last.record.renew(int(time.time() * 1000), released=True))
        except StateError as error:
            # Only logged, so that it does not hide an error of the erasure: the query waits until the lease expires.
            _LOGGER.warning("the lease of %s is not released: %s", files.root, error)


class _Erasure:
    """The steps of an erasure while the lease is held."""

    def __init__(
        self,
        folder: QueryFolder,
        query_folders: Sequence[Folder],
        stored_keys: pa.RecordBatch,
        scratch: Path,
        lease: Lease,
    ) -> None:
        self._folder = folder
        self._query_folders = query_folders
        self._stored_keys = stored_keys
        self._keys = list(stored_keys.columns)
        self._scratch = scratch
        self._lease = lease
        self._holds = HoldWatch()
        # From requests that are done: the keys that they name, and the last heartbeat that is certainly committed.
        self._erased: set[int] = set()
        self._done_heartbeat = 0
        self._refuse_held()

    def refuse_waiting(self) -> None:
        """Raise if a request with one of the keys is not done in all buckets; note the requests that are done."""
        requests = EraseFolder(self._folder.files)
        for number, keys in self._read_requests():
            requested = np.flatnonzero(find_positions(self._keys, keys) >= 0)
            record = requests.done(number)
            if record is not None:
                self._done_heartbeat = max(self._done_heartbeat, record.heartbeat)
                self._erased.update(requested.tolist())
            elif len(requested):
                raise UsageError(
                    f"erase request {number} of {self._folder.files.root} has some of the keys and is not done: run "
                    "the query until erase_status() says that it is done, then stop it"
                )

    def erase_files(self, inline_batches: int, run_before: bool) -> tuple[int, int]:
        """Rewrite all checkpoint files that have a key; return the number of files and of removed rows.

        `run_before`: an earlier run may have been stopped half-way.
        """
        buckets = [self._read_past(bucket) for bucket in range(self._folder.operator.buckets)]
        lines = find_lines(self._folder.files, buckets)
        committed = lines.find_last_committed(self._done_heartbeat)
        living = sum(len(bucket.find_living(self._erased, committed)) for bucket in lines.buckets)
        if living:
            raise UsageError(
                f"{living} of the keys are or may be in the newest state at {self._folder.files.root}: erase them with "
                "erase_keys(), run the query until erase_status() says that it is done, then stop it"
            )
        if inline_batches:
            self._refuse_given_up(lines)
            self._refuse_young(lines, inline_batches)
        if any(past.list_with_keys() for past in buckets):
            self._leave_local_stores()
        files = rows = 0
        for past in buckets:
            for file in past.list_with_keys():
                rows += rewrite(file, self._folder.schema, self._keys, self._scratch, self._check_allowed)
                files += 1
        if files or run_before:
            # Standby services run while the query is stopped, and may have read the files before they were rewritten.
            self._leave_local_stores()
        return files, rows

    def _refuse_given_up(self, lines: QueryLines) -> None:
        """Raise if a key lives in a given-up lineage: Spark's state may have it inline."""
        living = sum(len(bucket.find_living_elsewhere()) for bucket in lines.buckets)
        if living:
            raise UsageError(
                f"{living} of the keys live at {self._folder.files.root} in batches that the query went back from, up "
                f"to {lines.newest_given_up}, and Spark's state may have deltas of these batches inline: run the query "
                "past that batch and stop it. If it keeps no deltas inline, use inline_batches=0"
            )

    def _refuse_young(self, lines: QueryLines, inline_batches: int) -> None:
        """Raise if an inline delta may be older than a tombstone: without the tombstone the key would return."""
        tombstones = [heartbeat for line in lines.buckets if (heartbeat := line.tombstone_heartbeat) is not None]
        if not tombstones:
            return
        older_by = lines.heartbeat - max(tombstones)
        missing = recent_heartbeats(inline_batches) + 1 - older_by
        if missing > 0:
            raise UsageError(
                f"the keys were erased {older_by} batches with data ago, and batches that Spark retains may have older "
                f"deltas inline: run {missing} more batches with data and stop the query. If it keeps no deltas "
                "inline, use inline_batches=0; if Spark retains fewer batches, pass their number"
            )

    def _leave_local_stores(self) -> None:
        """Make every executor begin with an empty local store.

        A store that is older than a tombstone has the key, and the delta that it reads next will no longer have the
        tombstone. Folders of stores are named after the operator file in force, so a new operator file with the same
        content is written. Old stores are removed like any unused store.
        """
        operator = replace(self._folder.operator, schema_id=self._folder.operator.schema_id + 1)
        name = operator_file_name(operator.schema_id)
        self._check_allowed()
        if not self._folder.files.create(name, operator.encode()):
            raise LiveRunError(
                f"{self._folder.files.where(name)} was created by another process meanwhile: run this again"
            )
        self._folder = replace(self._folder, operator=operator)

    def erase_requests(self) -> int:
        """Remove the keys from erase requests; return the number of changed requests."""
        changed, requests = 0, EraseFolder(self._folder.files)
        for number, keys in self._read_requests():
            erased = find_matching(keys, self._keys)
            if erased.any():
                self._check_allowed()
                request = requests.request(number)
                requests.replace(number, replace(request, keys=request.keys.filter(pa.array(~erased))))
                changed += 1
        return changed

    def remove(self, unfinished: Sequence[tuple[Folder, str]]) -> None:
        """Remove unfinished files that a killed erasure or a killed run of the query left behind."""
        for files, name in unfinished:
            self._check_allowed()
            files.remove(name)

    def _read_requests(self) -> Iterator[tuple[int, list[pa.Array]]]:
        requests = EraseFolder(self._folder.files)
        for number in sorted(requests.numbers().requests):
            self._lease.hold()
            where = f"erase request {number} of {self._folder.files.root}"
            yield number, requests.request(number).columns(self._folder.schema.keys, where)

    def _read_past(self, bucket: int) -> BucketPast:
        past = BucketPast()
        for query_folder in self._query_folders:
            files = query_folder.child(str(bucket))
            for entry in files.entries():
                self._lease.hold()
                file_past = read_past(files, entry, self._folder.schema, self._keys, self._scratch)
                if file_past is not None:
                    past.files.append(file_past)
        return past

    def _check_allowed(self) -> None:
        self._lease.hold()
        self._lease.check()
        self._refuse_held()

    def _refuse_held(self) -> None:
        for hold in self._holds.living(self._folder.files):
            raise LiveRunError(
                f"the state at {self._folder.files.root} is being copied by {hold.holder}: wait until that is finished"
            )


def _remove_stores(local_dir: Path, root: str, operator: str, query_folder: str) -> int:
    """Remove a query's local stores; return the number of removed folders.

    Folder names of other containers do not show which query they belong to. So a folder that was used recently, and may
    belong to a running query on another root, is kept; the scan reports it.
    """
    removed, own_prefix = 0, root_id(root)
    for operators in local_dir.glob("spark_state_ext-*/*"):
        if not re.fullmatch(r"[0-9a-f]{16}-" + re.escape(operator), operators.name):
            continue
        stores = operators / query_folder
        # Files behind a link would be missed, or may belong to somebody else.
        refuse_links(stores, local_dir)
        if stores.is_dir() and (operators.name.startswith(own_prefix) or not _is_recently_used(stores)):
            # Renamed first: a process that opens the store now makes a new one, and never sees a part of it.
            stores.rename(operators / f"{_REMOVED_PREFIX}{uuid.uuid4().hex}")
            removed += 1
        for renamed in operators.glob(f"{_REMOVED_PREFIX}*"):
            remove_tree(renamed, local_dir)
    return removed


def _is_recently_used(stores: Path) -> bool:
    """True if a call used one of the stores in the last 15 minutes, by their committed records."""
    last_use_s = max((path.stat().st_mtime for path in stores.glob("s*/*/*/committed")), default=0.0)
    return time.time() - last_use_s < _RECENTLY_S
