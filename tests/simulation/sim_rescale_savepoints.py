"""Savepoints of a query that is rescaled, and queries that start from them with another number of buckets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sim_parts import SCHEMA, Model, Numbers, WrongStateError, apply_changes, buffer_changes, scan_rows
from sim_rescale_parts import COUNTS, HASHES, changes_in, of_bucket
from sim_stores import open_folder
from sim_yard import OPERATOR

from arrow_schemas import BucketMap, Writer
from arrow_schemas.pointer import Pointer
from arrow_schemas.savepoint import CANONICAL, NATIVE, SavepointHeader, SavepointManifest
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.backends.replication import Restorable, close_all
from spark_state_ext.beginning.first_call import bring_files
from spark_state_ext.beginning.starts import Starts
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket, CommitResult
from spark_state_ext.engine.folders import operator_folders
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.process_state import Shared
from spark_state_ext.engine.start_from import Savepoint
from spark_state_ext.errors import CorruptError, MissingCheckpointError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.horizon import recent_heartbeats
from spark_state_ext.files.layout import PARENTS_FOLDER
from spark_state_ext.rescale.removal import Finishing
from spark_state_ext.savepoints.bucket_copy import save_bucket
from spark_state_ext.savepoints.writer import write_manifest
from spark_state_ext.store import LocalStore
from spark_state_ext.worker.background import Inline
from spark_state_ext.worker.worker import Worker

if TYPE_CHECKING:
    from sim_rescales import RescaleWorld

__all__ = ["Saving", "save_and_start"]


def save_and_start(world: RescaleWorld, numbers: Numbers) -> None:
    """Save what is committed; then have another query begin with it, and go on without it."""
    saving = Saving(world, next(world.savepoints), CANONICAL if numbers.below(3) == 0 else NATIVE)
    if numbers.below(3) == 0:
        # The query goes on meanwhile, for longer than Spark retains what was read.
        for _ in range(numbers.below(4 * world.config.retained + 8)):
            world._batch(numbers)
            world._work(numbers)
        world.counted["savepoints that took long"] += 1
    saving.copy()
    query = _Other(world, saving.name, BucketMap(COUNTS[numbers.below(len(COUNTS))]), saving.total)
    query.start(saving.folder)
    saving.folder.remove_tree(OPERATOR)
    query.look("its savepoint is gone")
    # A bucket that is quiet is renewed in the last but two of these. The next call sees that its snapshot has arrived,
    # and the one after it notes that.
    for _ in range(world.config.retained + 4):
        query.batch(numbers)
    query.look("some batches")
    if any(pointer.parents is not None for pointer in query.pointers):
        raise WrongStateError("a query still needs its savepoint's buckets, though nothing was late")
    if query.bucket_map.buckets != saving.buckets and not query.parents():
        raise WrongStateError("the parents of a query are gone, to whose first batch Spark may go back")
    if numbers.below(3) == 0:
        for _ in range(recent_heartbeats(world.config.retained + 1) + 2):
            query.batch(numbers)
        if query.parents():
            raise WrongStateError(f"a query keeps the parents {query.parents()} for ever")
        world.counted["queries begun with a savepoint that finished"] += 1
    for name in world.configured:
        world.shared.root(name).child(OPERATOR, query.name).remove_tree(PARENTS_FOLDER)
    query.look("its parents are gone")
    world.counted["queries begun with a savepoint"] += 1


class Saving:
    """A savepoint that is being taken: what it holds is read, and is to be copied.

    Parameters
    ----------
    world
        Where the query lives.
    number
        Which savepoint of it.
    form
        Its form.
    """

    def __init__(self, world: RescaleWorld, number: int, form: str) -> None:
        self.world = world
        self.name = f"s{number}"
        self.folder = open_folder(f"{world.shared.name}/savepoints/{number}", replaces=world.config.replaces)
        self.total = world.total()
        self._number = number
        self._form = form
        self.buckets = world.count
        self._operator = replace(world.job.operator_file("saved"), buckets=self.buckets)
        self._pointers = [held.pointer for _, held in sorted(world.spark.at(world.batch).items())]
        self._backends = list(world.job.options.backends)
        world.held = {pointer.query_folder for pointer in self._pointers}

    def copy(self) -> None:
        """Copy it, and let go of the query."""
        world, buckets = self.world, []
        for pointer in self._pointers:
            target = self.folder.child(OPERATOR, str(pointer.bucket))
            replicas: list[Restorable] = []
            replicas += Shared.of(Worker.current()).replicas.reading(self._backends, pointer, world.folder, 1.0)
            replicas += [] if pointer.parents is None else [world.origin(pointer)]
            world.counted["buckets saved that need parents"] += pointer.parents is not None
            try:
                copy = save_bucket(pointer, replicas, target, self._form, SCHEMA, world.folder)
            except (CorruptError, MissingCheckpointError) as error:
                raise WrongStateError(f"somebody has deleted what a savepoint holds: {error}") from error
            finally:
                close_all(replicas)
            buckets.append(copy.saved)
        header = SavepointHeader(f"{self._number:032x}", self._form, 1, {OPERATOR: self._operator}, "test")
        write_manifest(self.folder, SavepointManifest(header, tuple(buckets)))
        world.held = set()


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
        self._finishing = Finishing()

    def start(self, savepoint: Folder) -> None:
        """What the first calls of all buckets do."""
        world, starts = self.world, Starts()
        source = Savepoint(savepoint.root, storage_options=world.shared.options)
        options = replace(
            world.job.options, buckets=self.bucket_map.buckets, start_from=source, rescale=None, bucket_by=None
        )
        self._job: Job = replace(world.job, options=options, rescaled_from=None, rescaled_buckets=0, plan_id=self.name)
        for bucket in range(self.bucket_map.buckets):
            state = starts.of(self._job, bucket)
            assert state is not None, "it is in the savepoint"
            pointer, _ = bring_files(state, self._job, self.name, lambda parent: (), world.folder)
            self.pointers.append(pointer)
        self.look("its start")

    def batch(self, numbers: Numbers) -> None:
        """A batch with data, after which nothing waits."""
        made = []
        for bucket in range(self.bucket_map.buckets):
            changes = changes_in(numbers, self.bucket_map, bucket)
            result = self._called(bucket, self.world.folder / f"{self.name}-{bucket}", changes)
            assert isinstance(result, CommitResult)
            made.append(replace(result.pointer, batch=result.pointer.batch + 1))
            self.model = apply_changes(self.model, changes)
        first, self.pointers = self.pointers[0], made
        if first.batch >= 0:
            self._finishing.in_turn(
                operator_folders(self._job),
                self.name,
                self.name,
                first,
                self.world.config.retained,
                lambda: None,
                lambda name: False,
                Inline(),
            )

    def parents(self) -> list[str]:
        """Names of what there is among its parents."""
        places = operator_folders(self._job)
        return [name for place in places for name in place.child(self.name, PARENTS_FOLDER).names()]

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
                world.shared.root(name).child(OPERATOR, self.name, str(bucket)), world.folder, name
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
                return it.read(scan_rows)
            result = it.commit(buffer_changes(changes, world.folder, HASHES))
            if not origins:
                return result
            folders = [origins[0].query_folder, *(it.child(self.name) for it in operator_folders(self._job))]
            made = self._finishing.noted(folders, pointer, result.pointer, lambda: None)
            return replace(result, pointer=made)
        finally:
            store.close()
            for origin in origins:
                origin.close()
