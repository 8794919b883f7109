"""A bucket's copy: the local store that a task on this host would open, kept as new as the bucket's files.

What is loaded is what a task that goes on from the newest file would load, by the same loader. Nobody has to trust the
copy: every run in a local store is named by its checkpoint, and a task reads those of its pointer's lineage only.

Nothing is written in a query folder. Runs are merged and pruned only up to a checkpoint that another file names as its
parent, as only that is known to be committed.
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
from spark_state_ext.reading.loading import sources_in
from spark_state_ext.rescale.origin import Origin
from spark_state_ext.restore.lazy import LazyRestore
from spark_state_ext.restore.load_plan import Chain, plan_load
from spark_state_ext.restore.loader import Loader
from spark_state_ext.standby.line import Line, judged
from spark_state_ext.standby.listed import Listing
from spark_state_ext.standby.metered import Bandwidth
from spark_state_ext.standby.recovery import Reading
from spark_state_ext.standby.values import Followed, FollowedRoot, Lag
from spark_state_ext.store import LocalStore
from spark_state_ext.store.committed import CommittedRecord, read_committed, write_committed
from spark_state_ext.store.local_disk import DATA_FILE, storage_error
from spark_state_ext.store.reclaim import note_use
from spark_state_ext.timeline.epochs import Epochs
from spark_state_ext.timeline.records import epochs_of
from spark_state_ext.worker.boot import boot_id
from spark_state_ext.worker.host import host_name
from spark_state_ext.worker.memory import give_back
from spark_state_ext.worker.process import namespace

__all__ = ["BucketFollower", "FollowedStores"]

T = TypeVar("T")

_LOGGER = logging.getLogger("spark_state_ext")
# Clean-up may delete files while they are read. Each listing begins with a newer snapshot, so a few are plenty.
_LISTINGS_MAX = 3
# Times of files may be this coarse.
_SAME_TIME_S = 2.0
# Tasks of this host may prune while we load.
_ROUNDS_MAX = 5
# In the place of a run's plan, in what is written down for readers.
_STANDBY = "standby "


@dataclass(frozen=True)
class _Reading:
    """What a step that is under way reads: since when, of which listing, and how far the copy was behind then."""

    begun_s: float
    listing: Listing
    lag: Lag


class FollowedStores:
    """The local stores that a service has open, a bounded number of them; several threads may ask."""

    def __init__(self) -> None:
        self._stores = Stores()
        self._lock = threading.Lock()

    def at(self, folder: Path, schema: RowSchema) -> LocalStore:
        """The store of a folder, as `Stores.at`."""
        with self._lock:
            return self._stores.at(str(folder), schema)

    def close(self) -> None:
        """Close them all."""
        with self._lock:
            self._stores.close()


class BucketFollower:
    """Follows one bucket. One thread at a time may step."""

    def __init__(
        self,
        root: FollowedRoot,
        key: BucketKey,
        operator: OperatorFile,
        stores: FollowedStores,
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
        # Listed before, and loaded or known not to count.
        self._settled: frozenset[CheckpointRef] = frozenset()
        # Of the copy: bytes and rows.
        self._size = (0, 0)
        # The local store's file when the last step ended.
        self._seen: tuple[int, int, int] | None = None
        # The line has changed since runs were merged and pruned.
        self._untidied = False
        # A snapshot that is of no use.
        self._refused: CheckpointRef | None = None
        # As of which change of the folder all is loaded, and since when that is so by our clock.
        self._unchanged: tuple[int, float] | None = None
        self._clock = clock
        # What a step that is under way reads; another thread looks at it.
        self._reading: _Reading | None = None
        self._rows_read = 0
        # By host how many checkpoints the copy lacked when the bucket last moved there.
        self._lacked: dict[str, int] = {}

    @property
    def key(self) -> BucketKey:
        """The bucket."""
        return self._key

    @property
    def store_folder(self) -> Path:
        """Where the copy lies."""
        return self._store_folder

    def under_way(self) -> tuple[Reading, Lag] | None:
        """What the step that is under way has read by now, and what it still lacks; None: none has begun to read."""
        reading = self._reading
        if reading is None:
            return None
        size_bytes = reading.listing.meter.taken.size_bytes
        left = replace(reading.lag, size_bytes=max(0, reading.lag.size_bytes - size_bytes))
        return Reading(reading.begun_s, self._clock(), size_bytes, 0), left

    def use(self, operator: OperatorFile) -> None:
        """Go on under a newer operator file; an older one changes nothing.

        Tasks have another local store for it, so the copy begins anew in that.
        """
        if operator.schema_id > self._operator.schema_id:
            self._operator = operator
            self._store_folder = self._root.store_folder(self._key, operator.schema_id)
            self._forget()

    def step(self) -> Followed:
        """Load what is new."""
        found, begun_s = Followed(self._key), self._clock()
        try:
            for _ in range(_LISTINGS_MAX):
                found = self._stepped(found)
                # Deleted while it was read, or written under a newer operator file: the next listing tells more.
                if not isinstance(found.error, MissingCheckpointError):
                    break
        except StateError as error:
            found = replace(self._standing(found), error=error)
        finally:
            self._reading = None
        rows, self._rows_read = self._rows_read, 0
        return replace(found, rows_read=rows, begun_s=begun_s, spent_s=self._clock() - begun_s)

    # -- a step ------------------------------------------------------------------------------------

    def _stepped(self, before: Followed) -> Followed:
        self._notice_new_store()
        changed_ns = self._folder.changed_ns()
        if self._is_unchanged(changed_ns):
            return self._standing(before)
        listing = Listing(self._folder, self._key.bucket, self._folder.entries(), self._bandwidth)
        fresh = listing.refs - self._settled
        candidates = listing.candidates(fresh)
        lag = listing.lag(self._loaded, candidates)
        self._reading = _Reading(self._clock(), listing, lag)
        behind = max(before.behind, lag, key=lambda it: it.versions)
        schema_id = self._operator.schema_id
        errors = self._follow(listing, candidates)
        if schema_id == self._operator.schema_id:
            # What nobody looked at is superseded. What failed is looked at again.
            self._settled = listing.refs - errors.keys()
        error = next(iter(errors.values()), None)
        if self._untidied and self._line is not None and self._loaded == self._line.head.ref:
            try:
                self._tidy(listing, self._line)
                self._untidied = False
            except StateError as it:
                error = error or it
        if fresh:
            self._measure()
            if self._line is not None and self._loaded == self._line.head.ref:
                self._write_committed(self._line)
        self._seen = self._written()
        # Tidying may have found the copy damaged, and begun anew: then there are files, and nothing of them.
        lacks_all = self._loaded is None and bool(listing.refs)
        self._note_change(None if error is not None or lacks_all else changed_ns)
        taken = listing.meter.taken
        return self._standing(
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
        """Whether no file has come or gone since a step that has loaded all; on disks, which tell that for less than a
        listing."""
        if self._unchanged is None or self._unchanged[0] != changed_ns:
            return False
        # Two changes may have one time, so a time counts once it is old.
        return self._clock() - self._unchanged[1] > _SAME_TIME_S

    def _note_change(self, changed_ns: int | None) -> None:
        if changed_ns is None:
            self._unchanged = None
        elif self._unchanged is None or self._unchanged[0] != changed_ns:
            self._unchanged = (changed_ns, self._clock())

    def _standing(self, found: Followed) -> Followed:
        """With what is known of the bucket."""
        found = replace(found, newest=self._loaded, size_bytes=self._size[0], rows=self._size[1])
        if self._line is None:
            return found
        writer = self._line.head.writer
        return replace(
            found,
            committed=self._line.committed,
            host=writer.host,
            batch=writer.batch,
            lacked=self._lacked.get(writer.host),
        )

    def _measure(self) -> None:
        """Note how large the copy is. While a task prunes it, the size stays as it was."""
        if self._loaded is not None:
            store = self.store()
            try:
                view = store.view(self._loaded)
                self._size = (view.size_bytes, view.rows_max)
            except MissingRunError:
                pass  # a task prunes it just now
            except CorruptStoreError as error:
                self._rebuild(store, error)
                self._forget()

    def _follow(self, listing: Listing, candidates: Sequence[CheckpointRef]) -> dict[CheckpointRef, StateError]:
        """Load the newest files, in the order in which they were written; returns what went wrong with which."""
        errors: dict[CheckpointRef, StateError] = {}
        read = (self._tried(ref, errors, partial(listing.files.header, ref)) for ref in candidates)
        headers = [header for header in read if header is not None]
        self._note_moves(headers)
        # What another one is built upon comes with that.
        covered = {ref for header in headers for ref in header.lineage}
        tops = [header for header in headers if header.ref not in covered]
        done = [self._tried(it.ref, errors, partial(self._follow_one, listing, it)) for it in tops]
        # A file that is damaged tells nothing any more once a newer one is loaded.
        newest = max((ref.version for ref in done if ref is not None), default=0)
        return {ref: error for ref, error in errors.items() if ref.version >= newest}

    def _note_moves(self, headers: Sequence[LineageHeader]) -> None:
        """Note how much the copy lacks if another host than before wrote a file, unless this is the first step."""
        if self._line is None:
            return
        host, loaded = self._line.head.writer.host, 0 if self._loaded is None else self._loaded.version
        for header in headers:
            if header.writer.host != host:
                parent = 0 if header.parent is None else header.parent.version
                self._lacked[header.writer.host] = max(0, parent - loaded)
            host = header.writer.host

    def _tried(self, ref: CheckpointRef, errors: dict[CheckpointRef, StateError], work: Callable[[], T]) -> T | None:
        """What `work` gives; None where it went wrong, which is noted. After an error of a store none is tried."""
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
            # An epoch that is known may have been withdrawn since.
            self._epochs = epochs_of(self._query_folder)
        line, counts = judged(self._line, header, self._epochs)
        if counts:
            self._load(listing, header)
        # Not before: what failed is judged anew, whatever comes in between.
        self._untidied |= line != self._line
        self._line = line
        if line.head.ref == header.ref:
            self._loaded = header.ref
        return header.ref

    def _load(self, listing: Listing, header: LineageHeader) -> None:
        """Fetch what the local store lacks of a checkpoint."""
        store = self.store()
        try:
            self._load_into(store, listing, header)
        except CorruptStoreError as error:
            self._rebuild(store, error)
            self._load_into(store, listing, header)

    def _load_into(self, store: LocalStore, listing: Listing, header: LineageHeader) -> None:
        for left in reversed(range(_ROUNDS_MAX)):
            chain = listing.chain(header, {run.newest for run in store.runs()})
            with self._loader(store, listing, header, chain) as loader:
                try:
                    loader.load(chain)
                    if header.writer.host != host_name():
                        # A task of this host completes it itself, and may have it from a backend that is not followed.
                        loader.complete(store.view(header.ref))
                    store.view(header.ref)
                except MissingRunError:
                    # Pruned by a task meanwhile, or nobody has the rest of it: the next round loads another one.
                    if not left:
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
        if first in listing.files and any(it.ref != header.ref for it in plan_load(chain, store.runs(), ()) or ()):
            # A query that began with another operator's state has files that name that one.
            others.add(listing.files.header(first).operator)
        names = [operator.operator, *sorted(others - {operator.operator})]
        with closing(Origin(self._query_folder, pointer, operator.bucket_map, store.schema, scratch)) as origin:
            beside = [origin] if first not in listing.files and origin.is_there() else []
            sources = sources_in(self._folder, pointer, *beside, files=listing.meter, in_thread=True)
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
        """Merge and prune up to the committed checkpoint, as a task does with its input."""
        store = self.store()
        try:
            try:
                unconfirmed = line.head.lineage[0] if line.head.lineage else None
                compacted = store.compact(line.committed, unconfirmed, self._root.gives_bytes_min)
                if compacted is not None:
                    give_back(compacted.size_bytes)
                self._take_snapshot(store, listing, line)
            finally:
                # Also where there is no room to merge: this makes some.
                store.prune(line.committed)
        except MissingRunError:
            return  # a task has pruned meanwhile, or the copy began with a later snapshot
        except CorruptStoreError as error:
            self._rebuild(store, error)
            self._forget()

    def _take_snapshot(self, store: LocalStore, listing: Listing, line: Line) -> None:
        """Its task's snapshot replaces the runs that it was made of, where these are too large to be merged, or where
        peers may ask for it."""
        view = store.view(line.committed)
        snapshot = listing.newest_snapshot(line.head.lineage)
        if snapshot is None or snapshot == self._refused:
            return
        gives, size_bytes = self._root.gives_bytes_min, listing.sizes[file_name(snapshot, SNAPSHOT)]
        if not store.outgrown(view) and (gives is None or size_bytes < gives):
            return
        # Where no run ends with it, it would lie beside the way down, and be dropped and read again and again.
        if view.runs[-1].newest.version < snapshot.version and any(run.newest == snapshot for run in view.runs):
            chain = Chain(line.head.lineage)
            with self._loader(store, listing, line.head, chain) as loader:
                if not loader.replace_runs(chain, snapshot):
                    self._refused = snapshot
                self._rows_read += loader.fetched_rows

    # -- the local store ---------------------------------------------------------------------------

    def store(self) -> LocalStore:
        """The local store that the copy is in. Several threads may ask."""
        return self._stores.at(self.store_folder, self._operator.row_schema())

    def _write_committed(self, line: Line) -> None:
        """Write down beside the local store which checkpoint in it is committed, so that `open_live` answers from it.

        Of an operator with a time to live only its calls know by which clock rows have expired, so nothing is written.
        """
        if self._operator.row_schema().expires:
            return
        noticed_ms = int(time.time() * 1000)
        with suppress(CorruptStoreError):  # just being written, or never whole: it is written again
            before = read_committed(self._store_folder)
            # A later call on this host is the active task's, which knows more.
            if before is not None and not before.plan_id.startswith(_STANDBY) and before.called_ms >= noticed_ms:
                return
        writer = line.head.writer
        # What the newest file was built upon was the state before its batch.
        plan_id = f"{_STANDBY}{writer.run_id}"
        record = CommittedRecord(line.committed, writer.batch - 1, noticed_ms, plan_id, namespace())
        write_committed(self._store_folder, record, self._operator)

    def _written(self) -> tuple[int, int, int] | None:
        """Which file the copy is in, and when somebody wrote it last; None: there is none."""
        try:
            found = (self.store_folder / boot_id() / DATA_FILE).stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error(self.store_folder, error) from error
        return found.st_dev, found.st_ino, found.st_mtime_ns

    def _note_use(self) -> bool:
        """As `note_use`; what the disk says is an error of the step, and does not end the service."""
        try:
            return note_use(self.store_folder)
        except OSError as error:
            raise storage_error(self.store_folder, error) from error

    def _notice_new_store(self) -> None:
        """Begin anew where the copy was taken for unused and removed, or for damaged and set aside by a task."""
        if self._loaded is None:
            return
        if self._note_use():
            # Mostly nobody else has written it. A new file may have the number of the old one.
            written = self._written()
            if written is not None and (written == self._seen or self.store().has(self._loaded)):
                self._seen = written
                return
        _LOGGER.info("the local store %s was replaced or removed; it is filled again", self.store_folder)
        self._forget()

    def _rebuild(self, store: LocalStore, error: CorruptStoreError) -> None:
        _LOGGER.warning("%s; it is built anew from the checkpoint files", error)
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
            f"checkpoint {header.ref} was written under operator_{header.schema_id}.json, which is followed from now on"
        )

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise InterruptedRestoreError(f"following {self._key} was told to stop")
