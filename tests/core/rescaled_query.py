"""A query without Spark that starts from another one's state with another bucket map, batch after batch."""

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
    """Background work that is done when the test says so, or never."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, Callable[[], object]] = OrderedDict()

    def submit(self, name: str, work: Callable[[], object]) -> bool:
        """It waits."""
        self._waiting.setdefault(name, work)
        return True

    def busy(self, name: str) -> bool:
        """Whether it waits."""
        return name in self._waiting

    def do(self) -> None:
        """What waits is done."""
        while self._waiting:
            self._waiting.popitem(last=False)[1]()

    def die(self) -> None:
        """What waits is never done."""
        self._waiting.clear()


def job_from(root: Path, old: OldJob, bucket_map: BucketMap, start: StartFrom | None, **fields: object) -> Job:
    """A job like the old one, with another map."""
    it = StateOptions(
        root=str(root), operator=old.operator, bucket_by=bucket_map, start_from=start, backends=(Backend(str(root)),)
    )
    of = operator_file(old.operator, "", old.buckets)
    return job_of(
        it,
        key_schema=of.key_schema,
        state_schema=of.state_schema,
        columns=("name", "x"),
        key_positions=(0, 1),
        **fields,
    )


def bucket_in(bucket_map: BucketMap, key: Key) -> int:
    """The bucket of a key, which may be one of the model."""
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
        Of its query folder.
    model
        What it has to hold.
    runner
        Its background.
    """

    job: Job
    scratch: Path
    model: Model
    name: str = "new"
    query_id: str = WRITER.query_id
    retained: int = 2
    runner: Later = field(default_factory=Later)
    pointers: list[Pointer] = field(default_factory=list)
    generation: int = 0
    finishing: Finishing = field(default_factory=Finishing)

    @property
    def bucket_map(self) -> BucketMap:
        """Its map."""
        return self.job.options.bucket_map

    @property
    def folder(self) -> Folder:
        """Its query folder."""
        return Folder(self.job.options.root).child(self.job.operator, self.name)

    def start(self, sources: Callable[[Pointer], Sequence[object]] | None = None) -> None:
        """What the first calls of all buckets do."""
        starts = Starts()
        self.pointers = []
        for bucket in range(self.bucket_map.buckets):
            state = starts.of(self.job, bucket)
            assert state is not None

            def sources_of(parent: Parent) -> Sequence[Any]:
                return () if sources is None else sources(parent.pointer)

            pointer, _ = bring_files(state, self.job, self.name, sources_of, self.scratch)
            self.pointers.append(pointer)

    def called(self, bucket: int, work: Callable[[Bucket], T], local: str = "") -> T:
        """Do something with a bucket in a call of its own."""
        pointer = self.pointers[bucket]
        files, where = (
            self.folder.child(str(bucket)),
            self.scratch / (local or f"local-{self.generation}") / str(bucket),
        )
        origin = None
        if pointer.parents is not None:
            origin = Origin(self.folder, pointer, self.bucket_map, SCHEMA, self.scratch)
        with closing(LocalStore.at(where, SCHEMA)) as store:
            (backend,) = self.job.options.backends
            it = Bucket(
                store,
                sole_replica(files, self.scratch, backend.name),
                pointer,
                replace(WRITER, query_id=self.query_id, batch=pointer.batch + 1),
                CommitContext(self.scratch, batches_retained=self.retained, runner=self.runner),
                sources=() if origin is None else (origin,),
            )
            try:
                return work(it)
            finally:
                if not self.runner._waiting:
                    it.close()

    def batch(self, changes: Changes, attempts: int = 1) -> None:
        """A batch that is committed; all attempts but the last at each call are in vain."""
        for _ in range(attempts):
            made = [self._attempt(bucket, changes) for bucket in range(self.bucket_map.buckets)]
        self.pointers = made
        self.model = apply_changes(self.model, changes)

    def _attempt(self, bucket: int, changes: Changes) -> Pointer:
        mine = {key: row for key, row in changes.items() if bucket_in(self.bucket_map, key) == bucket}
        made = self.called(bucket, lambda it: it.commit(buffer_of(mine, self.scratch, hashed)).pointer)
        made = self.finishing.noted([self.folder], self.pointers[bucket], made, lambda: None)
        return replace(made, batch=made.batch + 1)

    def lose_disks(self) -> None:
        """Local stores are gone, and with them the processes that worked on them."""
        self.runner.die()
        shutil.rmtree(self.scratch / f"local-{self.generation}", ignore_errors=True)
        self.generation += 1

    def state(self, local: str = "") -> Model:
        """All of it, bucket by bucket; each has only what is its own."""
        found: Model = {}
        for bucket in range(self.bucket_map.buckets):
            rows = self.called(bucket, lambda it: it.read(scan), local)
            assert all(bucket_in(self.bucket_map, key) == bucket for key in rows)
            assert len(rows) <= self.pointers[bucket].rows
            found |= rows
        return found

    def restored(self) -> Model:
        """The same on an empty disk."""
        try:
            return self.state("fresh")
        finally:
            shutil.rmtree(self.scratch / "fresh", ignore_errors=True)

    def cleaned_up(self, now_s: float) -> int:
        """How many files a clean-up of each bucket whose backend is complete has deleted."""
        deleted = 0
        for bucket, pointer in enumerate(self.pointers):
            (status,) = pointer.replication.values() or (None,)
            if pointer.ref is not None and is_complete(status):
                files = self.folder.child(str(bucket))
                deleted += clean_up(files, clean_up_at(pointer, self.retained), self.scratch, now_s)
        return deleted
