"""Erasing keys from what a stopped query keeps of its past: each file that has them is put in its own place without.

The newest state must be without the keys already, as Spark's state may hold deltas inline. Files keep their names,
headers and lineage, so every pointer that Spark holds still leads to a state: the one of that batch, without these
keys. Local stores, which may be older and would miss a tombstone that is no more, are out of use from then on
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
from spark_state_ext.engine.erasing import matching, places_of
from spark_state_ext.erasing.folders import QueryFolder, keys_as_stored, query_folders_below
from spark_state_ext.erasing.leftovers import scratch_with_keys, unfinished_files
from spark_state_ext.erasing.lines import QueryLines, query_lines
from spark_state_ext.erasing.past import BucketPast, read_past, rewrite
from spark_state_ext.erasing.receipt import EraseReceipt
from spark_state_ext.erasing.savepoints import SavepointBegunWith, savepoint_erasure
from spark_state_ext.erasing.scanning import KEYS_MAX, erase_scan
from spark_state_ext.errors import LiveRunError, StateError, UsageError
from spark_state_ext.files.erase_requests import EraseFolder
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.horizon import recent_heartbeats
from spark_state_ext.files.layout import PARENTS_FOLDER
from spark_state_ext.ownership.free import until_free
from spark_state_ext.ownership.holds import HoldWatch
from spark_state_ext.ownership.lease import Lease
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import ERASER, Found, RunIdentity
from spark_state_ext.rescale.parents import has_parents
from spark_state_ext.worker.local_folders import root_id
from spark_state_ext.worker.removal import refuse_links, remove_tree

__all__ = ["ErasedHistory", "erase_history"]

_LOGGER = logging.getLogger("spark_state_ext")
# A file is read and written anew within it, or the next one finds the lease renewed late, and says so.
LEASE_MS = 30_000
_GONE = "erased-"
_LATELY_S = 900


@dataclass(frozen=True)
class ErasedHistory:
    """What was erased from a query's past.

    Parameters
    ----------
    files, rows
        How many checkpoint files were written anew, and how many rows they lost.
    requests
        How many erase requests name the keys no more.
    stores
        How many folders of local stores were removed.
    receipt
        Of a scan after all that.
    savepoints
        How many savepoints were written anew, or what a run that was stopped had left in them was removed.
    savepoints_with_keys
        Savepoints in which the scan found something: of those that were named, and the one that the query began with.
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
    """Erase keys from all checkpoint files of a stopped query, and from its erase requests.

    Ask for the keys with `erase_keys` first, let the query run until `erase_status` says ``"done"``, and stop it.
    Afterwards the query goes on as it would have; a batch that it goes back to is without the keys. Whatever stops it
    in between, run it again: it goes on. Savepoints are the user's, and stay as they are unless you say that these are
    to be written anew. The receipt tells which of those that you name have a key, and whether the one has that the
    query began with.

    Parameters
    ----------
    root, operator, storage_options
        As `ArrowState` has them.
    keys
        As for `erase_keys`; at most a thousand.
    query_folder
        Name of the query folder; needed where the operator has several.
    backends
        *All* of the query's other backends: a restore reads whichever has a file.
    local_dirs
        Folders of this machine with local stores, as for `erase_scan`. The query's are removed, as they are caches.
    inline_batches
        The largest ``spark.sql.streaming.minBatchesToRetain`` that the query has had lately: pointers of so many
        batches may hold deltas inline, which cannot be changed. The tombstones of the keys have to be older than all
        of these, by 3 times as many batches with data and 2. 0: the query keeps nothing inline, and has not for so
        long (its backends are without ``"changelog"``, or it has `erase_within_s`).
    savepoints
        Folders of savepoints, to look for the keys in.
    write_savepoints
        Write these savepoints anew without the keys: a bucket that has one gets one compacted snapshot. Meanwhile no
        query can start from them.

    Returns
    -------
    ErasedHistory
        With the receipt of a scan.

    Raises
    ------
    UsageError
        When a key is in the newest state, a request that names it is not done, or its tombstones are too young; when a
        store cannot put a file in another's place in one step; or when an argument is none.
    LiveRunError
        When the query runs, or somebody takes a savepoint of it; or when a query below the root is being started from
        one that is to be written anew.
    ClaimedError
        When somebody has claimed a savepoint that is to be written anew.
    MissingCheckpointError
        When there is no such savepoint.
    CorruptFileError
        When a file cannot be read. Nothing was changed then, in any file of its bucket.
    StorageError
        When a store fails.

    Examples
    --------
    >>> done = erase_history("/state", ["Jane Doe"], operator="count")  # doctest: +SKIP
    >>> done.receipt.absent  # doctest: +SKIP
    True
    """
    folders = query_folders_below(root, operator, query_folder, storage_options)
    if len(folders) > 1:
        raise UsageError(
            f"operator {operator!r} has {len(folders)} query folders below {root}: name one with query_folder "
            f"({', '.join(it.name for it in folders[:5])})"
        )
    if type(inline_batches) is not int or inline_batches < 0:
        raise UsageError(f"inline_batches must be a whole number of batches, not {inline_batches!r}")
    if write_savepoints and (isinstance(savepoints, str) or not savepoints):
        raise UsageError("write_savepoints needs savepoints=[…]: only those are written anew that you name")
    folder = folders[0]
    wanted = keys_as_stored(keys, folder.schema, "erase_history()")
    if wanted.num_rows > KEYS_MAX:
        raise UsageError(f"erase_history() was given more than {KEYS_MAX:,} keys: erase them in several calls")
    places = _places(folder, operator, backends, local_dirs)
    top = Folder(root.rstrip("/") or root, storage_options)
    saved = [
        savepoint_erasure(path, keys, operator, folder.files, top, storage_options)
        for path in (savepoints if write_savepoints else ())
    ]
    unfinished = unfinished_files(places)
    # A run before this one may have been stopped after it had rewritten the last file.
    last = LeaseLog(folder.files).newest(first=True)
    again = last is not None and last.record.owner.application == ERASER
    with scratch_with_keys() as scratch, _leased(folder.files) as lease:
        work = _Work(folder, places, wanted, scratch, lease)
        work.refuse_waiting()
        files, rows = work.erase_files(inline_batches, again)
        requests = work.erase_requests()
        work.remove(unfinished)
        stores = sum(_drop_stores(Path(path), root, operator, folder.name) for path in local_dirs)
        written = sum(it.carry_out(lease, scratch) for it in saved)
    begun_with = SavepointBegunWith.of(folder.files, savepoints, storage_options)
    looked_in = [*savepoints, *begun_with.paths]
    receipt = erase_scan(
        root,
        keys,
        operator=operator,
        storage_options=storage_options,
        backends=backends,
        savepoints=looked_in,
        local_dirs=local_dirs,
    )
    receipt = replace(receipt, out_of_reach=(*receipt.out_of_reach, *begun_with.out_of_reach))
    having = [it for it in looked_in if any(found.where.startswith(it.rstrip("/") + "/") for found in receipt.found)]
    return ErasedHistory(files, rows, requests, stores, receipt, written, tuple(having))


def _places(folder: QueryFolder, operator: str, backends: Sequence[Backend], local_dirs: Sequence[str]) -> list[Folder]:
    """The query folder in all backends, where files can be written anew."""
    places = [folder.files, *(_replica(backend, operator, folder.name) for backend in backends)]
    for place in places:
        if not place.replaces:
            raise UsageError(
                f"{place.root} lies in a store that does not put one file in another's place in one step: a file might "
                "be gone when this is stopped. Move the state to another root instead (docs/operating/erasing.md)"
            )
        # They lie with the backend that came first when the query was rescaled.
        if has_parents(place):
            raise UsageError(
                f"the state at {folder.files.root} was rescaled, and the old buckets' files in "
                f"{place.child(PARENTS_FOLDER).root} are needed still: run the query until it has removed them"
            )
    for path in local_dirs:
        if not Path(path).is_dir():
            raise UsageError(f"there is no folder {path}: give the local_dir of the ArrowState")
    return places


def _replica(backend: Backend, operator: str, query_folder: str) -> Folder:
    if backend.kind != FSSPEC:
        raise UsageError(
            f"the backend {backend.name} is of the kind {backend.kind}, whose files this package cannot write anew: "
            "move the state to another root instead (docs/operating/erasing.md)"
        )
    return Folder(backend.root, backend.storage_options).child(operator, query_folder)


@contextmanager
def _leased(files: Folder) -> Iterator[Lease]:
    """The query folder's lease, as a run would hold it; others find it released afterwards."""
    log = LeaseLog(files)
    me = RunIdentity.here(ERASER, uuid.uuid4().hex)
    found = log.newest(first=True)
    claim = None if found is None else found.record.claim
    if claim is not None and not claim.built:
        raise UsageError(
            f"the state at {files.root} was claimed by {claim}, of which no batch is known to be committed: run that "
            "query first"
        )

    def live(there: Found) -> LiveRunError:
        return LiveRunError(
            f"the state at {files.root} is in use by {there.record.owner}, which renews its lease: stop the query first"
        )

    # It says what to do, where the lease's own error is for another run of the query.
    until_free(log, None if claim is None else claim.id, live)
    format_1_too = found is not None and found.record.format_1_too
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
            # The query waits then until it lapses; an error of the work itself is what matters.
            _LOGGER.warning("the lease of %s is not released: %s", files.root, error)


class _Work:
    """What is done while the lease is held."""

    def __init__(
        self, folder: QueryFolder, places: Sequence[Folder], wanted: pa.RecordBatch, scratch: Path, lease: Lease
    ) -> None:
        self._folder = folder
        self._places = places
        self._wanted = wanted
        self._keys = list(wanted.columns)
        self._scratch = scratch
        self._lease = lease
        self._holds = HoldWatch()
        # What requests tell that are done: which of the keys they name, and the last heartbeat that is known committed.
        self._erased: set[int] = set()
        self._done_heartbeat = 0
        self._refuse_held()

    def refuse_waiting(self) -> None:
        """Refuse where a request with one of the keys was not carried out in all buckets; note those that were."""
        requests = EraseFolder(self._folder.files)
        for number, keys in self._requests():
            named = np.flatnonzero(places_of(self._keys, keys) >= 0)
            record = requests.done(number)
            if record is not None:
                self._done_heartbeat = max(self._done_heartbeat, record.heartbeat)
                self._erased.update(named.tolist())
            elif len(named):
                raise UsageError(
                    f"erase request {number} of {self._folder.files.root} names some of the keys and is not done: run "
                    "the query until erase_status() says so, and stop it"
                )

    def erase_files(self, inline_batches: int, again: bool) -> tuple[int, int]:
        """Write all checkpoint files anew that have a key; how many these were, and how many rows they lost.

        `again`: an earlier run may have been stopped half-way.
        """
        buckets = [self._past(bucket) for bucket in range(self._folder.operator.buckets)]
        lines = query_lines(self._folder.files, buckets)
        committed = lines.committed(self._done_heartbeat)
        living = sum(len(it.living(self._erased, committed)) for it in lines.buckets)
        if living:
            raise UsageError(
                f"{living} of the keys are in the newest state at {self._folder.files.root}, or may be: ask for them "
                "with erase_keys(), run the query until erase_status() says that it is done, and stop it"
            )
        if inline_batches:
            self._refuse_given_up(lines)
            self._refuse_young(lines, inline_batches)
        if any(past.with_keys() for past in buckets):
            self._leave_local_stores()
        files = rows = 0
        for past in buckets:
            for it in past.with_keys():
                rows += rewrite(it, self._folder.schema, self._keys, self._scratch, self._allowed)
                files += 1
        if files or again:
            # Standby services go on while the query is stopped, and have begun with the files as they were.
            self._leave_local_stores()
        return files, rows

    def _refuse_given_up(self, lines: QueryLines) -> None:
        """Refuse where a key lives on a line that was given up, and Spark's state may have it inline."""
        living = sum(len(it.living_elsewhere()) for it in lines.buckets)
        if living:
            raise UsageError(
                f"{living} of the keys live at {self._folder.files.root} in batches that the query went back from, up "
                f"to {lines.newest_given_up}, of which Spark's state may hold deltas inline: run the query past that "
                "one and stop it. Where it keeps nothing inline, say inline_batches=0"
            )

    def _refuse_young(self, lines: QueryLines, inline_batches: int) -> None:
        """Refuse where a pointer may have a delta inline from before a tombstone: without it the key would be back."""
        tombstones = [it for line in lines.buckets if (it := line.tombstone_heartbeat) is not None]
        if not tombstones:
            return
        older_by = lines.heartbeat - max(tombstones)
        lacking = recent_heartbeats(inline_batches) + 1 - older_by
        if lacking > 0:
            raise UsageError(
                f"the keys were erased {older_by} batches with data ago, and batches that Spark retains may hold deltas"
                f" from before inline: run {lacking} more batches with data and stop the query. Where it keeps nothing "
                "inline, say inline_batches=0; where Spark retains fewer batches, say how many"
            )

    def _leave_local_stores(self) -> None:
        """Have every executor begin with an empty local store.

        A store that is older than a tombstone has the key, and the delta with the tombstone, which it would read next,
        will be without. Stores lie in folders named after the operator file in force: so there is a new one, which says
        the same. What is left behind goes as any store that nobody uses.
        """
        made = replace(self._folder.operator, schema_id=self._folder.operator.schema_id + 1)
        name = operator_file_name(made.schema_id)
        self._allowed()
        if not self._folder.files.create(name, made.encode()):
            raise LiveRunError(f"{self._folder.files.where(name)} was made by somebody else meanwhile: begin again")
        self._folder = replace(self._folder, operator=made)

    def erase_requests(self) -> int:
        """Have erase requests name the keys no more; how many these were."""
        changed, requests = 0, EraseFolder(self._folder.files)
        for number, keys in self._requests():
            gone = matching(keys, self._keys)
            if gone.any():
                self._allowed()
                request = requests.request(number)
                requests.replace(number, replace(request, keys=request.keys.filter(pa.array(~gone))))
                changed += 1
        return changed

    def remove(self, unfinished: Sequence[tuple[Folder, str]]) -> None:
        """Remove files that a run which was killed has not finished, of this kind or of the query's."""
        for files, name in unfinished:
            self._allowed()
            files.remove(name)

    def _requests(self) -> Iterator[tuple[int, list[pa.Array]]]:
        requests = EraseFolder(self._folder.files)
        for number in sorted(requests.numbers().requests):
            self._lease.hold()
            where = f"erase request {number} of {self._folder.files.root}"
            yield number, requests.request(number).columns(self._folder.schema.keys, where)

    def _past(self, bucket: int) -> BucketPast:
        past = BucketPast()
        for place in self._places:
            files = place.child(str(bucket))
            for entry in files.entries():
                self._lease.hold()
                found = read_past(files, entry, self._folder.schema, self._keys, self._scratch)
                if found is not None:
                    past.files.append(found)
        return past

    def _allowed(self) -> None:
        self._lease.hold()
        self._lease.check()
        self._refuse_held()

    def _refuse_held(self) -> None:
        for hold in self._holds.living(self._folder.files):
            raise LiveRunError(
                f"the state at {self._folder.files.root} is being copied by {hold.holder}: wait until that is over"
            )


def _drop_stores(local_dir: Path, root: str, operator: str, query_folder: str) -> int:
    """Remove a query's local stores; how many folders there were.

    Whose a folder is its name does not tell for other containers. So one that was used lately stays where it may be
    that of a query that runs, on another root: the scan tells of it.
    """
    dropped, mine = 0, root_id(root)
    for operators in local_dir.glob("spark_state_ext-*/*"):
        if not re.fullmatch(r"[0-9a-f]{16}-" + re.escape(operator), operators.name):
            continue
        stores = operators / query_folder
        # What is in a folder elsewhere would be missed, or belongs to somebody else.
        refuse_links(stores, local_dir)
        if stores.is_dir() and (operators.name.startswith(mine) or not _used_lately(stores)):
            # Renamed first: whoever opens it now makes a new one, and none sees half of it.
            stores.rename(operators / f"{_GONE}{uuid.uuid4().hex}")
            dropped += 1
        for gone in operators.glob(f"{_GONE}*"):
            remove_tree(gone, local_dir)
    return dropped


def _used_lately(stores: Path) -> bool:
    """Whether a call was made on one of them in the last quarter of an hour, by their records."""
    newest_s = max((path.stat().st_mtime for path in stores.glob("s*/*/*/committed")), default=0.0)
    return time.time() - newest_s < _LATELY_S
