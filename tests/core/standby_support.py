"""One bucket of a query that is written call by call, and a task on the follower's host, for the tests of followers."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from core_support import buffer_of
from fsspec.implementations.local import LocalFileSystem
from reading_support import operator_file

from arrow_schemas import Pointer, Writer
from arrow_schemas.lineage import CheckpointRef, LineageHeader
from arrow_schemas.operator import OperatorFile, operator_file_name
from arrow_schemas.standby import BucketKey
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.commit.cadence import SnapshotCadence
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.files.folder import Folder
from spark_state_ext.standby.bucket_listing import Listing
from spark_state_ext.standby.follower import BucketFollower, SharedStores
from spark_state_ext.standby.line import Line
from spark_state_ext.standby.values import FollowedRoot
from spark_state_ext.store import LocalStore
from spark_state_ext.store.lazy_file import LazyOptions
from spark_state_ext.testing.model import KEYS, SCHEMA, Changes, Model, Row, apply_changes, scan
from spark_state_ext.timeline.epochs import Epoch, Epochs, Position
from spark_state_ext.timeline.records import EpochLog

__all__ = ["BUCKET", "FAULTY", "Faults", "PrunesToTheNewest", "World", "changes", "covering"]

OPERATOR, QUERY, BUCKET, BUCKETS = "counts", "query", 3, 8


class Faults(LocalFileSystem):  # type: ignore[misc] # fsspec has no types
    """A disk on which reads fail: that many reads, from the one with the given number on."""

    cachable = False
    reads: ClassVar[int] = 0
    fails_from: ClassVar[int] = 1 << 62
    fails: ClassVar[int] = 0

    @classmethod
    def fail(cls, at: int, count: int = 1 << 61) -> None:
        """Fail at reads from number `at` on, counted from now."""
        cls.reads, cls.fails_from, cls.fails = 0, at, count

    @classmethod
    def heal(cls) -> None:
        """Never fail."""
        cls.fail(1 << 62)

    def _read(self, path: str) -> None:
        cls = type(self)
        cls.reads += 1
        if cls.fails_from <= cls.reads < cls.fails_from + cls.fails:
            raise OSError(errno.EIO, "the disk fails", path)

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        self._read(path)
        return super().ls(path, detail, **kwargs)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self._read(path)
        return super().cat_file(path, *args, **kwargs)


FAULTY = {"implementation": "standby_support.Faults"}


@dataclass
class World:
    """A bucket of a query, and a host that follows it.

    Parameters
    ----------
    base
        Folder of a test.
    root
        The root; by default in that folder.
    """

    base: Path
    root: str = ""
    chunk_rows: int = 3
    # Epoch of the run: going back begins the next one.
    epoch: int = 1
    retained: int = 2
    cadence: SnapshotCadence = field(default_factory=SnapshotCadence)
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    follower_class: type[BucketFollower] = BucketFollower
    # The committed pointer of each batch, with the state at that pointer.
    history: list[tuple[Pointer, Model]] = field(default_factory=list)
    committed: set[CheckpointRef] = field(default_factory=set)
    clock_s: float = 1e9
    # Options of tasks' lazy restores.
    lazy: LazyOptions | None = None

    def __post_init__(self) -> None:
        self.root = self.root or str(self.base / "root")
        self.scratch = self.base / "scratch"
        self.scratch.mkdir(parents=True)
        (self.base / "b").mkdir()
        self.at = FollowedRoot(self.root, self.storage_options, str(self.base / "b"))
        self.key = BucketKey(OPERATOR, QUERY, BUCKET)
        self.query_folder = self.at.folder.child(OPERATOR, QUERY)
        self.files: Folder = self.query_folder.child(str(BUCKET))
        self.operator: OperatorFile = operator_file(OPERATOR, QUERY, BUCKETS)
        self.query_folder.put(operator_file_name(0), self.operator.encode())
        self.active = LocalStore.at(self.base / "a", SCHEMA, chunk_rows=self.chunk_rows)
        no_pointer = Pointer(OPERATOR, BUCKET, BUCKETS, 0, -1, None, query_folder=QUERY)
        self.history.append((no_pointer, {}))
        self.follow()

    def follow(self, **changes: Any) -> None:
        """Start the host's service."""
        self.stores = SharedStores()
        at = replace(self.at, **changes)
        self.follower = self.follower_class(at, self.key, self.operator, self.stores)

    def close(self) -> None:
        """Close the local stores."""
        self.stores.close()
        self.active.close()

    @property
    def pointer(self) -> Pointer:
        """The last committed pointer."""
        return self.history[-1][0]

    @property
    def model(self) -> Model:
        """The state at the last committed pointer."""
        return self.history[-1][1]

    def bucket(self, store: LocalStore, pointer: Pointer, host: str = "a") -> Bucket:
        """Return the bucket as a task opens it."""
        self._record(pointer)
        writer = Writer(QUERY, f"run {self.epoch}", pointer.batch + 1, host, epoch=self.epoch)
        context = CommitContext(self.scratch, batches_retained=self.retained, cadence=self.cadence, lazy=self.lazy)
        return Bucket(store, sole_replica(self.files, self.scratch), pointer, writer, context)

    def _record(self, pointer: Pointer) -> None:
        """Record where a run began, before it writes its first file."""
        log = EpochLog(self.query_folder)
        number, epochs = log.newest()
        if self.epoch > epochs.numbers_to:
            parents = tuple(epoch.number for epoch in epochs.entries[-1:]) or (0,)
            after = Position(QUERY, pointer.batch, pointer.heartbeats)
            epoch = Epoch(self.epoch, parents, f"plan {self.epoch}", "", after)
            assert log.append(number + 1, Epochs((*epochs.entries, epoch)))

    def attempt(self, changes: Changes, at: int = -1, store: LocalStore | None = None) -> tuple[Pointer, Model]:
        """Run one attempt at the batch after a committed one."""
        pointer, model = self.history[at]
        before = {entry.name for entry in self.files.entries()}
        new_pointer = self.bucket(store or self.active, pointer).commit(buffer_of(changes, self.scratch)).pointer
        self._set_times(before)
        return replace(new_pointer, batch=pointer.batch + 1), apply_changes(model, changes)

    def commit(self, attempt: tuple[Pointer, Model]) -> None:
        """Commit an attempt, as Spark does."""
        if attempt[0].parent is not None:
            self.committed.add(attempt[0].parent)
        self.history.append(attempt)
        if attempt[0].ref is not None:
            self.committed.add(attempt[0].ref)

    def batch(self, changes: Changes, store: LocalStore | None = None) -> None:
        """Run and commit a batch of one attempt."""
        self.commit(self.attempt(changes, store=store))

    def go_back(self, at: int) -> None:
        """Start the query again from an earlier batch."""
        del self.history[at + 1 :]
        self.epoch += 1

    def task(self) -> LocalStore:
        """Open the local store as a task on the follower's host does."""
        return LocalStore.at(self.follower.store_folder, self.operator.row_schema(), chunk_rows=self.chunk_rows)

    def adopted(self, at: int = -1) -> int:
        """Check the state after a batch in a task on the follower's host, and return the number of files that it fetches."""
        pointer, model = self.history[at]
        bucket = self.bucket(self.task(), pointer, "b")
        assert bucket.read(scan) == model
        return bucket.fetched_files

    def names(self) -> list[str]:
        """Return the names of the bucket's files."""
        return self.files.names()

    def _set_times(self, before: set[str]) -> None:
        """Give the files of each call a later time than those of the previous call."""
        if not self.files.is_local:
            return
        self.clock_s += 1
        for name in set(self.files.names()) - before:
            os.utime(Path(self.files.root) / name, (self.clock_s, self.clock_s))


class PrunesToTheNewest(BucketFollower):
    """A follower that wrongly treats the newest file as committed."""

    def _tidy(self, listing: Listing, line: Line) -> None:
        super()._tidy(listing, replace(line, head=make_child_of_head(line.head)))


def make_child_of_head(head: LineageHeader) -> LineageHeader:
    child = replace(head.ref, version=head.ref.version + 1)
    return replace(head, ref=child, parent=head.ref, lineage=(*head.lineage, head.ref))


def covering(store: LocalStore) -> set[CheckpointRef]:
    """Return the newest checkpoints of compacted runs."""
    return {run.newest for run in store.runs() if run.newest != run.oldest}


def changes(number: int) -> Changes:
    """Return the changes of a batch; every third one includes a deletion."""
    return {KEYS[number % 5]: Row(number), KEYS[(number + 2) % 5]: None if number % 3 == 0 else Row(-number, "note")}
