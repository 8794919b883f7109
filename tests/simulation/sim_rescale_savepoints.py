"""Savepoints of a query that is rescaled, and queries that start from them with another number of buckets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sim_parts import CADENCE, SCHEMA, Model, Numbers, WrongStateError, apply_changes, buffer_changes, scan_rows
from sim_rescale_parts import COUNTS, HASHES, draw_changes_of_bucket, select_rows
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

__all__ = ["SavepointTaker", "save_and_start"]


def save_and_start(world: RescaleWorld, numbers: Numbers) -> None:
    """Take a savepoint; then start another query from it, and run that query after the savepoint is deleted."""
    taker = SavepointTaker(world, next(world.savepoints), CANONICAL if numbers.below(3) == 0 else NATIVE)
    if numbers.below(3) == 0:
        # The query continues meanwhile, for longer than Spark retains the batch that was read.
        for _ in range(numbers.below(4 * world.config.retained + 8)):
            world._batch(numbers)
            world._work(numbers)
        world.counted["savepoints that took long"] += 1
    taker.copy()
    query = _StartedQuery(world, taker.name, BucketMap(COUNTS[numbers.below(len(COUNTS))]), taker.total)
    query.start(taker.folder)
    taker.folder.remove_tree(OPERATOR)
    query.check_state("its savepoint was deleted")
    # A quiet bucket is renewed in the third last of these batches. The next call sees that its snapshot has arrived, and
    # the call after that notes it.
    for _ in range(world.config.retained + 4):
        query.batch(numbers)
    query.check_state("some batches")
    if any(pointer.parents is not None for pointer in query.pointers):
        raise WrongStateError("a query still needs its savepoint's buckets although nothing was late")
    if query.bucket_map.buckets != taker.buckets and not query.list_parents():
        raise WrongStateError("parents were removed although Spark may go back to the query's first batch")
    if numbers.below(3) == 0:
        for _ in range(recent_heartbeats(world.config.retained + 1) + 2):
            query.batch(numbers)
        if query.list_parents():
            raise WrongStateError(f"a query keeps the parents {query.list_parents()} for ever")
        world.counted["queries begun with a savepoint that finished"] += 1
    for name in world.configured:
        world.shared.root(name).child(OPERATOR, query.name).remove_tree(PARENTS_FOLDER)
    query.check_state("its parents were removed")
    world.counted["queries begun with a savepoint"] += 1


class SavepointTaker:
    """A process that takes a savepoint: it has read the pointers, and copies their files later.

    Parameters
    ----------
    world
        Where the query lives.
    number
        Number of the savepoint.
    form
        Form of the savepoint.
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
        self._pointers = [state.pointer for _, state in sorted(world.spark.at(world.batch).items())]
        self._backends = list(world.job.options.backends)
        world.held_folders = {pointer.query_folder for pointer in self._pointers}

    def copy(self) -> None:
        """Copy the files, and release the query folder."""
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
                raise WrongStateError(f"files that a savepoint holds were deleted: {error}") from error
            finally:
                close_all(replicas)
            buckets.append(copy.saved)
        header = SavepointHeader(f"{self._number:032x}", self._form, 1, {OPERATOR: self._operator}, "test")
        write_manifest(self.folder, SavepointManifest(header, tuple(buckets)))
        world.held_folders = set()


@dataclass
class _StartedQuery:
    """A query that starts from a savepoint and runs without failures.

    Parameters
    ----------
    world
        The simulated world.
    name
        Name of its query folder.
    bucket_map
        Its bucket map.
    model
        The state that it must have.
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
        """Do what the first calls of all buckets do."""
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
        self.check_state("its start")

    def batch(self, numbers: Numbers) -> None:
        """Run a batch with data, and all its background work."""
        new_pointers = []
        for bucket in range(self.bucket_map.buckets):
            changes = draw_changes_of_bucket(numbers, self.bucket_map, bucket)
            result = self._call_or_read(bucket, self.world.folder / f"{self.name}-{bucket}", changes)
            assert isinstance(result, CommitResult)
            new_pointers.append(replace(result.pointer, batch=result.pointer.batch + 1))
            self.model = apply_changes(self.model, changes)
        first, self.pointers = self.pointers[0], new_pointers
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

    def list_parents(self) -> list[str]:
        """Return the names of the files among its parents."""
        places = operator_folders(self._job)
        return [name for place in places for name in place.child(self.name, PARENTS_FOLDER).names()]

    def check_state(self, after: str) -> None:
        """Check the state of all buckets on an empty disk."""
        for bucket in range(self.bucket_map.buckets):
            self._disks += 1
            model = self._call_or_read(bucket, self.world.folder / f"{self.name}-{bucket}-{self._disks}", None)
            expected = select_rows(self.model, self.bucket_map, bucket)
            if model != expected:
                raise WrongStateError(f"after {after}, bucket {bucket} of a query has {model}, and not {expected}")

    def _call_or_read(self, bucket: int, local: Path, changes: dict[int, int | None] | None) -> Model | CommitResult:
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
            opened_bucket = Bucket(
                store,
                replicas,
                pointer,
                Writer(self.name, "run", pointer.batch + 1, "simulated"),
                CommitContext(world.folder, batches_retained=world.config.retained, cadence=CADENCE, runner=Inline()),
                sources=origins,
            )
            if changes is None:
                return opened_bucket.read(scan_rows)
            result = opened_bucket.commit(buffer_changes(changes, world.folder, HASHES))
            if not origins:
                return result
            folders = [origins[0].query_folder, *(root.child(self.name) for root in operator_folders(self._job))]
            new_pointer = self._finishing.noted(folders, pointer, result.pointer, lambda: None)
            return replace(result, pointer=new_pointer)
        finally:
            store.close()
            for origin in origins:
                origin.close()
