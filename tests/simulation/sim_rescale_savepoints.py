"""Savepoints of a query that is rescaled, and queries that start from them with another number of buckets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sim_parts import SCHEMA, Model, Numbers, WrongStateError, changed, rows_of, scanned
from sim_rescale_parts import COUNTS, HASHES, changes_in, of_bucket
from sim_stores import opened
from sim_yard import OPERATOR

from arrow_schemas import BucketMap, Writer
from arrow_schemas.pointer import Pointer
from arrow_schemas.savepoint import CANONICAL, NATIVE, SavepointHeader, SavepointManifest
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.backends.replication import close_all
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket, CommitResult
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.shared import Shared
from spark_state_ext.engine.start_from import Savepoint
from spark_state_ext.files.folder import Folder
from spark_state_ext.rescale.dividing import DividingStarts
from spark_state_ext.rescale.parents import PARENTS_FOLDER
from spark_state_ext.savepoints.manifest_file import write_manifest
from spark_state_ext.savepoints.taking import save_bucket
from spark_state_ext.store import LocalStore
from spark_state_ext.worker.background import Inline
from spark_state_ext.worker.worker import Worker

if TYPE_CHECKING:
    from sim_rescales import RescaleWorld

__all__ = ["save_and_start"]


def save_and_start(world: RescaleWorld, numbers: Numbers) -> None:
    """Save what is committed; then have another query begin with it, and go on without it."""
    number = next(world.savepoints)
    folder = opened(f"{world.yard.name}/savepoints/{number}", replaces=world.config.replaces)
    total = world.total()
    _saved(world, folder, number, CANONICAL if numbers.below(3) == 0 else NATIVE)
    query = _Other(world, f"s{number}", BucketMap(COUNTS[numbers.below(len(COUNTS))]), total)
    query.start(folder)
    folder.remove_tree(OPERATOR)
    query.look("its savepoint is gone")
    # A bucket that is quiet is renewed in the last of these, and the next call sees that its snapshot has arrived.
    for _ in range(world.config.retained + 3):
        query.batch(numbers)
    query.look("some batches")
    if any(pointer.parents is not None for pointer in query.pointers):
        raise WrongStateError("a query still needs its savepoint's buckets, though nothing was late")
    for name in world.configured:
        world.yard.root(name).child(OPERATOR, query.name).remove_tree(PARENTS_FOLDER)
    query.look("its parents are gone")
    world.counted["queries begun with a savepoint"] += 1


def _saved(world: RescaleWorld, folder: Folder, number: int, form: str) -> None:
    operator = replace(world.job.operator_file("saved"), buckets=world.count)
    buckets = []
    for bucket, held in sorted(world.spark.at(world.batch).items()):
        pointer, target = held.pointer, folder.child(OPERATOR, str(bucket))
        replicas = Shared.of(Worker.current()).replicas.reading(world.job.options.backends, pointer, world.folder, 1.0)
        origins = [] if pointer.parents is None else [world.origin(pointer)]
        world.counted["buckets saved that need parents"] += len(origins)
        try:
            copy = save_bucket(pointer, [*replicas, *origins], target, form, SCHEMA, world.folder)
        finally:
            close_all(replicas)
            for origin in origins:
                origin.close()
        buckets.append(copy.saved)
    header = SavepointHeader(f"{number:032x}", form, 1, {OPERATOR: operator}, "test")
    write_manifest(folder, SavepointManifest(header, tuple(buckets)))


@dataclass
class _Other:
    """A query that starts from a savepoint, and does nothing wrong.

    Parameters
    ----------
    world
        Where it lives.
    name
        Of its query folder.
    bucket_map
        Its buckets.
    model
        What it has to hold.
    """

    world: RescaleWorld
    name: str
    bucket_map: BucketMap
    model: Model

    def __post_init__(self) -> None:
        self.pointers: list[Pointer] = []
        self._disks = 0

    def start(self, savepoint: Folder) -> None:
        """What the first calls of all buckets do."""
        world, starts = self.world, DividingStarts()
        source = Savepoint(savepoint.root, storage_options=world.yard.options)
        options = replace(
            world.job.options, buckets=self.bucket_map.buckets, start_from=source, rescale=None, bucket_by=None
        )
        job: Job = replace(world.job, options=options, rescaled_from=None, rescaled_buckets=0, plan_id=self.name)
        for bucket in range(self.bucket_map.buckets):
            beginning = starts.of(job, bucket)
            assert beginning is not None, "it is in the savepoint"
            begun = beginning.detached_from(job, self.name, [()] * len(beginning.parts), world.folder)
            self.pointers.append(begun.pointer)
        self.look("its start")

    def batch(self, numbers: Numbers) -> None:
        """A batch with data, after which nothing waits."""
        made = []
        for bucket in range(self.bucket_map.buckets):
            changes = changes_in(numbers, self.bucket_map, bucket)
            result = self._called(bucket, self.world.folder / f"{self.name}-{bucket}", changes)
            assert isinstance(result, CommitResult)
            made.append(replace(result.pointer, batch=result.pointer.batch + 1))
            self.model = changed(self.model, changes)
        self.pointers = made

    def look(self, after: str) -> None:
        """On an empty disk."""
        for bucket in range(self.bucket_map.buckets):
            self._disks += 1
            found = self._called(bucket, self.world.folder / f"{self.name}-{bucket}-{self._disks}", None)
            expected = of_bucket(self.model, self.bucket_map, bucket)
            if found != expected:
                raise WrongStateError(f"after {after}, bucket {bucket} of a query has {found}, and not {expected}")

    def _called(self, bucket: int, local: Path, changes: dict[int, int | None] | None) -> Model | CommitResult:
        world, pointer = self.world, self.pointers[bucket]
        origins = [world.origin(pointer)] if pointer.parents is not None else []
        store = LocalStore.at(local, SCHEMA, chunk_rows=4)
        replicas = [
            replica
            for name in world.configured
            for replica in sole_replica(
                world.yard.root(name).child(OPERATOR, self.name, str(bucket)), world.folder, name
            )
        ]
        try:
            it = Bucket(
                store,
                replicas,
                pointer,
                Writer(self.name, "run", pointer.batch + 1, "simulated"),
                CommitContext(world.folder, batches_retained=world.config.retained, runner=Inline()),
                sources=origins,
            )
            if changes is None:
                return it.read(scanned)
            return it.commit(rows_of(changes, world.folder, HASHES))
        finally:
            store.close()
            for origin in origins:
                origin.close()
