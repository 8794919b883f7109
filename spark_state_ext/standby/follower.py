"""A bucket's copy: the local store that a task on this host would open, kept up to date with the bucket's files.

A follower uses a task's loader, and loads what a task would load that continues from the newest file. A task need not
trust the copy: each run in a local store is named by its checkpoint, and a task reads only runs of its pointer's
lineage.

A follower never writes to a query folder. It merges and prunes runs only up to a checkpoint that another file names as
its parent, because only that one is known to be committed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from arrow_schemas.lineage import SNAPSHOT, CheckpointRef, LineageHeader, file_name
from arrow_schemas.operator import OperatorFile
from arrow_schemas.pointer import LineageEntry, Pointer
from arrow_schemas.row import RowSchema
from arrow_schemas.standby import BucketKey
from spark_state_ext.engine.stores import Stores
from spark_state_ext.errors import (
    CorruptStoreError,
    InterruptedRestoreError,
    MissingCheckpointError,
    MissingRunError,
    StateError,
    StorageError,
)
from spark_state_ext.files.operator_catalog import newest_operator
from spark_state_ext.reading.sources import make_sources
from spark_state_ext.rescale.origin import Origin
from spark_state_ext.restore.lazy import LazyRestore
from spark_state_ext.restore.load_plan import Chain, plan_load
from spark_state_ext.restore.loader import Loader
from spark_state_ext.standby.bucket_listing import Listing
from spark_state_ext.standby.line import Line, judge
from spark_state_ext.standby.metered_reads import Bandwidth
from spark_state_ext.standby.recovery import Reading
from spark_state_ext.standby.values import Followed, FollowedRoot, Lag
from spark_state_ext.store import LocalStore
from spark_state_ext.store.committed_record import CommittedRecord, read_committed, write_committed
from spark_state_ext.store.local_disk import DATA_FILE, storage_error
from spark_state_ext.store.reclaim import record_use
from spark_state_ext.timeline.epochs import Epochs
from spark_state_ext.timeline.records import read_epochs
from spark_state_ext.worker.boot import boot_id
from spark_state_ext.worker.host import host_name
from spark_state_ext.worker.memory import release_memory
from spark_state_ext.worker.process import get_pid_namespace

__all__ = ["BucketFollower", "SharedStores"]

T = TypeVar("T")

_LOGGER = logging.getLogger("spark_state_ext")
# Clean-up may delete files while they are read. Each listing has a newer snapshot, so a few listings are enough.
_LISTINGS_MAX = 3
# File times may be this coarse.
_SAME_TIME_S = 2.0
# Tasks of this host may prune while a follower loads.
_ROUNDS_MAX = 5
# Prefix of the plan id in a committed record that a follower writes.
_STANDBY = "standby "


@dataclass(frozen=True)
class _Reading:
    """A running step: when it began, the listing it reads, and the copy's lag at that time."""

    begun_s: float
    listing: Listing
    lag: Lag


class SharedStores:
    """The open local stores of a service, a bounded number of them. Thread-safe."""

    def __init__(self) -> None:
        self._stores = Stores()
        self._lock = threading.Lock()

    def at(self, folder: Path, schema: RowSchema) -> LocalStore:
        """Return the store of a folder, like `Stores.at`."""
        with self._lock:
            return self._stores.at(str(folder), schema)

    def close(self) -> None:
        """Close all stores."""
        with self._lock:
            self._stores.close()


class BucketFollower:
    """Follows one bucket. Only one thread at a time may call `step`."""

    def __init__(
        self,
        root: FollowedRoot,
        key: BucketKey,
        operator: OperatorFile,
        stores: SharedStores,
        bandwidth: Bandwidth | None = None,
        stop: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root = root
        self._key = key
        self._operator = operator
        self._store_folder = root.store_folder(key, operator.schema_id)
        self._stores = stores
        self._bandwidth = bandwidth or Bandwidth(None)
        self._stop = stop or threading.Event()
        self._query_folder = root.folder.child(key.operator, key.query_folder)
        self._folder = self._query_folder.child(str(key.bucket))
        self._line: Line | None = None
        self._epochs = Epochs()
        self._loaded: CheckpointRef | None = None
        # Listed before, and either loaded or known not to be on the line.
        self._settled: frozenset[CheckpointRef] = frozenset()
        # Bytes and rows of the copy.
        self._size = (0, 0)
        # Identity and last write time of the copy's file when the last step ended.
        self._last_state: tuple[int, int, int] | None = None
        # True if the line has changed since runs were last merged and pruned.
        self._needs_tidying = False
        # A snapshot that could not replace runs.
        self._useless_snapshot: CheckpointRef | None = None
        # The folder's change time when everything was loaded, and when our clock first saw this change time.
        self._unchanged: tuple[int, float] | None = None
        self._clock = clock
        # What a running step reads; another thread looks at it.
        self._reading: _Reading | None = None
        self._rows_read = 0
        # By host, how many checkpoints the copy was missing when the bucket last moved there.
        self._missing_at_move: dict[str, int] = {}

    @property
    def key(self) -> BucketKey:
        """The bucket."""
        return self._key

    @property
    def store_folder(self) -> Path:
        """The folder of the copy."""
        return self._store_folder

    def under_way(self) -> tuple[Reading, Lag] | None:
        """Return what the running step has read by now and what is still missing; None if no step is reading."""
        reading = self._reading
        if reading is None:
            return None
        size_bytes = reading.listing.meter.taken.size_bytes
        left = replace(reading.lag, size_bytes=max(0, reading.lag.size_bytes - size_bytes))
        return Reading(reading.begun_s, self._clock(), size_bytes, 0), left

    def use(self, operator: OperatorFile) -> None:
        """Continue under a newer operator file; an older one changes nothing.

        Tasks use another local store for a newer file, so the copy starts again in that store.
        """
        if operator.schema_id > self._operator.schema_id:
            self._operator = operator
            self._store_folder = self._root.store_folder(self._key, operator.schema_id)
            self._forget()

    def step(self) -> Followed:
        """Load what is new, and return the result."""
        result, begun_s = Followed(self._key), self._clock()
        try:
            for _ in range(_LISTINGS_MAX):
                result = self._step_once(result)
                # Deleted while it was read, or written under a newer operator file: list the folder again.
                if not isinstance(result.error, MissingCheckpointError):
                    break
        except StateError as error:
            result = replace(self._fill_in(result), error=error)
        finally:
            self._reading = None
        rows, self._rows_read = self._rows_read, 0
        return replace(result, rows_read=rows, begun_s=begun_s, spent_s=self._clock() - begun_s)

    # -- a step ------------------------------------------------------------------------------------

    def _step_once(self, before: Followed) -> Followed:
        self._notice_new_store()
        changed_ns = self._folder.changed_ns()
        if self._is_unchanged(changed_ns):
            return self._fill_in(before)
        listing = Listing(self._folder, self._key.bucket, self._folder.entries(), self._bandwidth)
        fresh = listing.refs - self._settled
        candidates = listing.candidates(fresh)
        lag = listing.lag(self._loaded, candidates)
        self._reading = _Reading(self._clock(), listing, lag)
        behind = max(before.behind, lag, key=lambda each: each.versions)
        schema_id = self._operator.schema_id
        errors = self._follow(listing, candidates)
        if schema_id == self._operator.schema_id:
            # A file that was not looked at is superseded. A file that failed is tried again.
            self._settled = listing.refs - errors.keys()
        error = next(iter(errors.values()), None)
        if self._needs_tidying and self._line is not None and self._loaded == self._line.head.ref:
            try:
                self._tidy(listing, self._line)
                self._needs_tidying = False
            except StateError as failure:
                error = error or failure
        if fresh:
            self._measure()
            if self._line is not None and self._loaded == self._line.head.ref:
                self._write_committed(self._line)
        self._last_state = self._stat_store()
        # If tidying found the copy damaged and emptied it, there are files but the copy has none of them.
        lacks_all = self._loaded is None and bool(listing.refs)
        self._note_change(None if error is not None or lacks_all else changed_ns)
        taken = listing.meter.taken
        return self._fill_in(
            replace(
                before,
                files_read=before.files_read + taken.files,
                bytes_read=before.bytes_read + taken.size_bytes,
                is_new=before.is_new or bool(fresh),
                behind=behind,
                lag=listing.lag(self._loaded, errors),
                error=error,
            )
        )

    def _is_unchanged(self, changed_ns: int | None) -> bool:
        """True if no file was added or removed since a step that loaded everything. On local disks only, where reading
        the change time is cheaper than a listing."""
        if self._unchanged is None or self._unchanged[0] != changed_ns:
            return False
        # Two changes may have the same time, so only an old time is trusted.
        return self._clock() - self._unchanged[1] > _SAME_TIME_S

    def _note_change(self, changed_ns: int | None) -> None:
        if changed_ns is None:
            self._unchanged = None
        elif self._unchanged is None or self._unchanged[0] != changed_ns:
            self._unchanged = (changed_ns, self._clock())

    def _fill_in(self, result: Followed) -> Followed:
        """Return the result with what is known of the bucket filled in."""
        result = replace(result, newest=self._loaded, size_bytes=self._size[0], rows=self._size[1])
        if self._line is None:
            return result
        writer = self._line.head.writer
        return replace(
            result,
            committed=self._line.committed,
            host=writer.host,
            batch=writer.batch,
            missing_at_move=self._missing_at_move.get(writer.host),
        )

    def _measure(self) -> None:
        """Measure the size of the copy; keep the last size if a task is pruning it."""
        if self._loaded is not None:
            store = self.store()
            try:
                view = store.view(self._loaded)
                self._size = (view.size_bytes, view.rows_max)
            except MissingRunError:
                pass  # a task is pruning it
            except CorruptStoreError as error:
                self._rebuild(store, error)
                self._forget()

    def _follow(self, listing: Listing, candidates: Sequence[CheckpointRef]) -> dict[CheckpointRef, StateError]:
        """Load the newest files in the order in which they were written; return the error of each file that failed."""
        errors: dict[CheckpointRef, StateError] = {}
        results = (self._try(ref, errors, partial(listing.files.header, ref)) for ref in candidates)
        headers = [header for header in results if header is not None]
        self._note_moves(headers)
        # Loading a file also loads the checkpoints that it was built upon.
        covered = {ref for header in headers for ref in header.lineage}
        tops = [header for header in headers if header.ref not in covered]
        loaded = [self._try(top.ref, errors, partial(self._follow_one, listing, top)) for top in tops]
        # The error of a damaged file no longer matters once a newer file is loaded.
        newest = max((ref.version for ref in loaded if ref is not None), default=0)
        return {ref: error for ref, error in errors.items() if ref.version >= newest}

    def _note_moves(self, headers: Sequence[LineageHeader]) -> None:
        """Note how much the copy is missing if the bucket's writer is now another host; not in the first step."""
        if self._line is None:
            return
        host, loaded = self._line.head.writer.host, 0 if self._loaded is None else self._loaded.version
        for header in headers:
            if header.writer.host != host:
                parent = 0 if header.parent is None else header.parent.version
                self._missing_at_move[header.writer.host] = max(0, parent - loaded)
            host = header.writer.host

    def _try(self, ref: CheckpointRef, errors: dict[CheckpointRef, StateError], work: Callable[[], T]) -> T | None:
        """Return the result of `work`, or None and note its error. After a storage error it fails without trying."""
        try:
            for error in errors.values():
                if isinstance(error, (StorageError, InterruptedRestoreError)):
                    raise error
            self._raise_if_stopped()
            return work()
        except StateError as error:
            errors[ref] = error
            return None

    def _follow_one(self, listing: Listing, header: LineageHeader) -> CheckpointRef:
        self._follow_schema(header)
        before = 0 if self._line is None else self._line.head.writer.epoch
        if header.writer.epoch not in (0, before) or header.writer.epoch > self._epochs.numbers_to:
            # A known epoch may have been withdrawn since.
            self._epochs = read_epochs(self._query_folder)
        line, is_on_line = judge(self._line, header, self._epochs)
        if is_on_line:
            self._load(listing, header)
        # Only after loading: a file that failed is judged again, whatever happens in between.
        self._needs_tidying |= line != self._line
        self._line = line
        if line.head.ref == header.ref:
            self._loaded = header.ref
        return header.ref

    def _load(self, listing: Listing, header: LineageHeader) -> None:
        """Fetch the parts of a checkpoint that the local store does not have."""
        store = self.store()
        try:
            self._load_into(store, listing, header)
        except CorruptStoreError as error:
            self._rebuild(store, error)
            self._load_into(store, listing, header)

    def _load_into(self, store: LocalStore, listing: Listing, header: LineageHeader) -> None:
        for rounds_left in reversed(range(_ROUNDS_MAX)):
            chain = listing.chain(header, {run.newest for run in store.runs()})
            with self._loader(store, listing, header, chain) as loader:
                try:
                    loader.load(chain)
                    if header.writer.host != host_name():
                        # A task of this host completes it itself, perhaps from a backend that is not followed.
                        loader.complete(store.view(header.ref))
                    store.view(header.ref)
                except MissingRunError:
                    # A task pruned it, or its file was deleted before it was complete: the next round loads another.
                    if not rounds_left:
                        raise
                else:
                    return
                finally:
                    self._rows_read += loader.fetched_rows

    @contextmanager
    def _loader(self, store: LocalStore, listing: Listing, header: LineageHeader, chain: Chain) -> Iterator[Loader]:
        operator, scratch = self._operator, self._root.scratch
        pointer = Pointer(
            operator.operator,
            self._key.bucket,
            operator.buckets,
            operator.schema_id,
            header.writer.batch,
            None,
            lineage=tuple(LineageEntry(ref, 0) for ref in chain.refs),
            parent=header.parent if chain.refs[-1] == header.ref else None,
        )
        first = chain.refs[chain.start]
        others = {header.operator}
        if first in listing.files and any(
            fetch.ref != header.ref for fetch in plan_load(chain, store.runs(), ()) or ()
        ):
            # A query that began with another operator's state has files that name that operator.
            others.add(listing.files.header(first).operator)
        names = [operator.operator, *sorted(others - {operator.operator})]
        with closing(Origin(self._query_folder, pointer, operator.bucket_map, store.schema, scratch)) as origin:
            origins = [origin] if first not in listing.files and origin.is_there() else []
            sources = make_sources(self._folder, pointer, *origins, files=listing.meter, in_thread=True)
            yield Loader(
                store,
                sources,
                names,
                self._key.bucket,
                scratch,
                while_waiting=self._raise_if_stopped,
                lazy=LazyRestore(store, sources, self._key, None, self._raise_if_stopped),
            )

    def _tidy(self, listing: Listing, line: Line) -> None:
        """Merge and prune up to the committed checkpoint, like a task does with its input."""
        store = self.store()
        try:
            try:
                unconfirmed = line.head.lineage[0] if line.head.lineage else None
                compacted = store.compact(line.committed, unconfirmed, self._root.gives_bytes_min)
                if compacted is not None:
                    release_memory(compacted.size_bytes)
                self._take_snapshot(store, listing, line)
            finally:
                # Prune even if there was no room to merge: this frees some.
                store.prune(line.committed)
        except MissingRunError:
            return  # a task has pruned it, or the copy began with a later snapshot
        except CorruptStoreError as error:
            self._rebuild(store, error)
            self._forget()

    def _take_snapshot(self, store: LocalStore, listing: Listing, line: Line) -> None:
        """Replace runs by the task's snapshot of the same rows, if they are too large to be merged or if peers may ask
        for the snapshot."""
        view = store.view(line.committed)
        snapshot = listing.newest_snapshot(line.head.lineage)
        if snapshot is None or snapshot == self._useless_snapshot:
            return
        gives_bytes_min, size_bytes = self._root.gives_bytes_min, listing.sizes[file_name(snapshot, SNAPSHOT)]
        if not store.outgrown(view) and (gives_bytes_min is None or size_bytes < gives_bytes_min):
            return
        # If no run ends with its checkpoint, the view would not use it: it would be dropped and read again and again.
        if view.runs[-1].newest.version < snapshot.version and any(run.newest == snapshot for run in view.runs):
            chain = Chain(line.head.lineage)
            with self._loader(store, listing, line.head, chain) as loader:
                if not loader.replace_runs(chain, snapshot):
                    self._useless_snapshot = snapshot
                self._rows_read += loader.fetched_rows

    # -- the local store ---------------------------------------------------------------------------

    def store(self) -> LocalStore:
        """Return the local store of the copy. Thread-safe."""
        return self._stores.at(self.store_folder, self._operator.row_schema())

    def _write_committed(self, line: Line) -> None:
        """Write next to the local store which checkpoint in it is committed, so that `open_live` can answer from it.

        Nothing is written for an operator with a time to live: only its calls know by which clock rows have expired.
        """
        if self._operator.row_schema().expires:
            return
        noticed_ms = int(time.time() * 1000)
        with suppress(CorruptStoreError):  # the record is being written or was never complete: write it again
            before = read_committed(self._store_folder)
            # A later call on this host was made by the active task, which knows more.
            if before is not None and not before.plan_id.startswith(_STANDBY) and before.called_ms >= noticed_ms:
                return
        writer = line.head.writer
        # The newest file's parent was the state before its batch.
        plan_id = f"{_STANDBY}{writer.run_id}"
        record = CommittedRecord(line.committed, writer.batch - 1, noticed_ms, plan_id, get_pid_namespace())
        write_committed(self._store_folder, record, self._operator)

    def _stat_store(self) -> tuple[int, int, int] | None:
        """Return the identity and the last write time of the copy's file; None if there is no file."""
        try:
            status = (self.store_folder / boot_id() / DATA_FILE).stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error(self.store_folder, error) from error
        return status.st_dev, status.st_ino, status.st_mtime_ns

    def _note_use(self) -> bool:
        """Call `record_use`; a disk error becomes an error of the step, so that it does not end the service."""
        try:
            return record_use(self.store_folder)
        except OSError as error:
            raise storage_error(self.store_folder, error) from error

    def _notice_new_store(self) -> None:
        """Start again with an empty copy if it was removed as unused, or set aside by a task as damaged."""
        if self._loaded is None:
            return
        if self._note_use():
            # Usually only this follower has written it. A new file may have the inode number of the old one.
            state = self._stat_store()
            if state is not None and (state == self._last_state or self.store().has(self._loaded)):
                self._last_state = state
                return
        _LOGGER.info("the local store %s was replaced or removed; it is filled again", self.store_folder)
        self._forget()

    def _rebuild(self, store: LocalStore, error: CorruptStoreError) -> None:
        _LOGGER.warning("%s; rebuilding it from the checkpoint files", error)
        store.rebuild()

    def _forget(self) -> None:
        self._loaded = None
        self._settled = frozenset()
        self._unchanged = None

    def _follow_schema(self, header: LineageHeader) -> None:
        if header.schema_id <= self._operator.schema_id:
            return
        newest = newest_operator(self._query_folder)
        if newest is None or newest.schema_id < header.schema_id:
            raise MissingCheckpointError(
                f"checkpoint {header.ref} was written under operator_{header.schema_id}.json, which is gone from "
                f"{self._query_folder.root}: bring the file back"
            )
        self.use(newest)
        raise MissingCheckpointError(
            f"checkpoint {header.ref} was written under operator_{header.schema_id}.json, which is used from now on"
        )

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise InterruptedRestoreError(f"the service has stopped following {self._key}")
