"""A query without Spark that starts from another query's state with another bucket map, and runs batches."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from core_support import WRITER, buffer_of, clean_up_at
from reading_support import Job as OldJob
from reading_support import hashed, operator_file

from arrow_schemas import BucketMap, Pointer
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.backends.registry import Backend
from spark_state_ext.backends.replication import is_complete
from spark_state_ext.beginning.first_call import bring_files
from spark_state_ext.beginning.starts import Starts
from spark_state_ext.commit.cadence import SnapshotCadence
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.options import StateOptions
from spark_state_ext.engine.start_from import StartFrom
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.retention import clean_up
from spark_state_ext.rescale.origin import Origin
from spark_state_ext.rescale.parents import Parent
from spark_state_ext.rescale.removal import Finishing
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import SCHEMA, Changes, Key, Model, apply_changes, scan
from tests.helpers.jobs import job_of

__all__ = ["Later", "RescaledQuery", "bucket_in", "job_from"]

T = TypeVar("T")


class Later:
    """Background work that waits until a test runs it or discards it."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, Callable[[], object]] = OrderedDict()

    def submit(self, name: str, work: Callable[[], object]) -> bool:
        """Let the work wait."""
        self._waiting.setdefault(name, work)
        return True

    def busy(self, name: str) -> bool:
        """Return whether work of this name waits."""
        return name in self._waiting

    def do(self) -> None:
        """Do the waiting work."""
        while self._waiting:
            self._waiting.popitem(last=False)[1]()

    def die(self) -> None:
        """Discard the waiting work."""
        self._waiting.clear()


def job_from(root: Path, old: OldJob, bucket_map: BucketMap, start: StartFrom | None, **fields: object) -> Job:
    """Return a job like the old one with another bucket map."""
    options = StateOptions(
        root=str(root), operator=old.operator, bucket_by=bucket_map, start_from=start, backends=(Backend(str(root)),)
    )
    file = operator_file(old.operator, "", old.buckets)
    return job_of(
        options,
        key_schema=file.key_schema,
        state_schema=file.state_schema,
        columns=("name", "x"),
        key_positions=(0, 1),
        **fields,
    )


def bucket_in(bucket_map: BucketMap, key: Key) -> int:
    """Return the bucket of a key, which may be a key of the model."""
    plain = tuple(float("nan") if value == "NaN" else value for value in key)
    return int(bucket_map.of(np.array([hashed(plain)], np.uint64))[0])


@dataclass
class RescaledQuery:
    """The new query.

    Parameters
    ----------
    job
        Its job.
    scratch
        Local folder.
    name
        Name of its query folder.
    model
        The expected state.
    cadence
        When its snapshots are due.
    runner
        Its background work.
    """

    job: Job
    scratch: Path
    model: Model
    name: str = "new"
    query_id: str = WRITER.query_id
    retained: int = 2
    cadence: SnapshotCadence = field(default_factory=SnapshotCadence)
    runner: Later = field(default_factory=Later)
    pointers: list[Pointer] = field(default_factory=list)
    generation: int = 0
    finishing: Finishing = field(default_factory=Finishing)

    @property
    def bucket_map(self) -> BucketMap:
        """The new bucket map."""
        return self.job.options.bucket_map

    @property
    def folder(self) -> Folder:
        """The query folder."""
        return Folder(self.job.options.root).child(self.job.operator, self.name)

    def start(self, sources: Callable[[Pointer], Sequence[object]] | None = None) -> None:
        """Do what the first calls of all buckets do."""
        starts = Starts()
        self.pointers = []
        for bucket in range(self.bucket_map.buckets):
            state = starts.of(self.job, bucket)
            assert state is not None

            def find_sources(parent: Parent) -> Sequence[Any]:
                return () if sources is None else sources(parent.pointer)

            pointer, _ = bring_files(state, self.job, self.name, find_sources, self.scratch)
            self.pointers.append(pointer)

    def called(self, bucket: int, work: Callable[[Bucket], T], local: str = "") -> T:
        """Do some work with a bucket in a separate call."""
        pointer = self.pointers[bucket]
        files, local_folder = (
            self.folder.child(str(bucket)),
            self.scratch / (local or f"local-{self.generation}") / str(bucket),
        )
        origin = None
        if pointer.parents is not None:
            origin = Origin(self.folder, pointer, self.bucket_map, SCHEMA, self.scratch)
        with closing(LocalStore.at(local_folder, SCHEMA)) as store:
            (backend,) = self.job.options.backends
            call_bucket = Bucket(
                store,
                sole_replica(files, self.scratch, backend.name),
                pointer,
                replace(WRITER, query_id=self.query_id, batch=pointer.batch + 1),
                CommitContext(self.scratch, batches_retained=self.retained, cadence=self.cadence, runner=self.runner),
                sources=() if origin is None else (origin,),
            )
            try:
                return work(call_bucket)
            finally:
                if not self.runner._waiting:
                    call_bucket.close()

    def batch(self, changes: Changes, attempts: int = 1) -> None:
        """Commit a batch; only the last attempt of each call counts."""
        for _ in range(attempts):
            pointers = [self._attempt(bucket, changes) for bucket in range(self.bucket_map.buckets)]
        self.pointers = pointers
        self.model = apply_changes(self.model, changes)

    def _attempt(self, bucket: int, changes: Changes) -> Pointer:
        bucket_changes = {key: row for key, row in changes.items() if bucket_in(self.bucket_map, key) == bucket}
        pointer = self.called(
            bucket, lambda call_bucket: call_bucket.commit(buffer_of(bucket_changes, self.scratch, hashed)).pointer
        )
        pointer = self.finishing.noted([self.folder], self.pointers[bucket], pointer, lambda: None)
        return replace(pointer, batch=pointer.batch + 1)

    def lose_disks(self) -> None:
        """Remove the local stores and discard the background work of their processes."""
        self.runner.die()
        shutil.rmtree(self.scratch / f"local-{self.generation}", ignore_errors=True)
        self.generation += 1

    def state(self, local: str = "") -> Model:
        """Return the whole state, and check that each bucket has only its own keys."""
        state: Model = {}
        for bucket in range(self.bucket_map.buckets):
            rows = self.called(bucket, lambda call_bucket: call_bucket.read(scan), local)
            assert all(bucket_in(self.bucket_map, key) == bucket for key in rows)
            assert len(rows) <= self.pointers[bucket].rows
            state |= rows
        return state

    def restored(self) -> Model:
        """Return the whole state restored on an empty disk."""
        try:
            return self.state("fresh")
        finally:
            shutil.rmtree(self.scratch / "fresh", ignore_errors=True)

    def cleaned_up(self, now_s: float) -> int:
        """Clean up each bucket whose backend is complete, and return the number of deleted files."""
        deleted = 0
        for bucket, pointer in enumerate(self.pointers):
            (status,) = pointer.replication.values() or (None,)
            if pointer.ref is not None and is_complete(status):
                files = self.folder.child(str(bucket))
                deleted += clean_up(files, clean_up_at(pointer, self.retained), self.scratch, now_s)
        return deleted
