"""Queries that start from a savepoint, in a simulated world of their own: from their first call on.

The first step of each bucket, what says that a query is detached, and what deletes a claimed savepoint are the product's
code, stopped or broken off at any change to a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

from sim_aside import Trap, set_trap
from sim_parts import Attempt, BucketState, Executor, Numbers, Partition, Variant, WrongStateError
from sim_spark import StateFiles, TaskResult
from sim_stores import Fault
from sim_world import DEFAULT, FIRST_BUCKET
from sim_yard import KEY_SCHEMA, OPERATOR, STATE_SCHEMA, Query, SimSavepoint, Yard

from arrow_schemas.pointer import Pointer
from spark_state_ext.beginning.detachment import Detaching
from spark_state_ext.beginning.first_call import begin_bucket, claim_source
from spark_state_ext.beginning.starts import Starts
from spark_state_ext.commit.committer import Committer
from spark_state_ext.commit.failures import Run
from spark_state_ext.engine.bucket import CommitResult
from spark_state_ext.engine.first_query_folder import FirstQueryFolders
from spark_state_ext.engine.job import ARROW, Job
from spark_state_ext.engine.options import StateOptions
from spark_state_ext.engine.process_state import Shared
from spark_state_ext.engine.start_from import CLAIM, Savepoint
from spark_state_ext.errors import OwnershipError
from spark_state_ext.files.operator_catalog import OperatorCatalog
from spark_state_ext.savepoints.claims import read_claim
from spark_state_ext.savepoints.start_records import is_detached, read_start
from spark_state_ext.store import LocalStore
from spark_state_ext.worker.worker import Worker
from tests.helpers.jobs import job_of

__all__ = ["RefusedError", "StartedQuery"]


class RefusedError(Exception):
    """A query cannot start, as it may not."""


class StartedFiles(StateFiles):
    """Once a batch with data is committed, nobody goes back to before it: what the query was started from may be gone."""

    begun_at: int | None = None
    first: frozenset[bytes] = frozenset()

    @property
    def oldest(self) -> int:
        oldest = super().oldest
        return oldest if self.begun_at is None else max(oldest, self.begun_at)

    def commit(self, batch: int, made: TaskResult) -> None:
        super().commit(batch, made)
        if self.begun_at is None and not any(it.pointer.encode() in self.first for it in self.at(batch).values()):
            self.begun_at = batch


class _Process:
    """What a worker process of the query keeps."""

    def __init__(self) -> None:
        self.starts = Starts()
        self.folders = FirstQueryFolders()
        self.catalog = OperatorCatalog()
        self.detaching = Detaching()


class StartedQuery(Query):
    """A query that starts from a savepoint.

    Parameters
    ----------
    yard, folder_name, variant
        As for `Query`.
    taken
        The savepoint.
    mode
        Whether it claims it.
    clean_up
        Whether the query deletes anything.
    newest_ms
        Time of the last batch that there was before.
    """

    spark: StartedFiles

    def __init__(
        self,
        yard: Yard,
        folder_name: str,
        taken: SimSavepoint,
        mode: str,
        clean_up: bool,
        newest_ms: int,
        variant: Variant = DEFAULT,
    ) -> None:
        self.taken, self.mode, self.clean_up = taken, mode, clean_up
        super().__init__(yard, folder_name, variant)
        # Attempts at the first batch go on from what was saved.
        self.models = {self._first(number).encode(): taken.models[number] for number in self.buckets}
        self.planned[-1] = False, newest_ms
        self.batch_ms = 1_000_000 + int(folder_name[1:])
        self._processes: dict[str, _Process] = {}
        self._jobs: dict[str, Job] = {}

    @property
    def is_begun(self) -> bool:
        """By the model: a batch with data is committed, so that the query needs nothing of the savepoint."""
        return self.spark.begun_at is not None

    @property
    def source_gone(self) -> bool:
        """Somebody else deleted the savepoint; whether he might, the world of all queries says."""
        return self.taken.owner != self._folder_name and bool(self.taken.gone())

    @property
    def is_known(self) -> bool:
        """Its folder says what it was started from."""
        return read_start(self.query_folder) is not None

    def _state_files(self, first: Partition) -> StateFiles:
        made = StartedFiles(self.config, first)
        made.first = frozenset(held.pointer.encode() for held in first.values())
        return made

    def _damage(self, numbers: Numbers) -> None:
        """Its lineage begins with a snapshot, and has nothing below it."""

    def _job(self, run: Run) -> Job:
        """The job as that run planned it."""
        key = run.id
        if key not in self._jobs:
            root = self.yard.root("a").root
            options = StateOptions(
                root=root,
                operator=OPERATOR,
                buckets=self.number_of_buckets,
                local_dir=str(self.folder),
                storage_options=self.yard.options,
                backends=tuple(self.yard.backends(self.configured)),
                clean_up=self.clean_up,
                start_from=Savepoint(self.taken.folder.root, self.mode, storage_options=self.yard.options),
            )
            self._jobs[key] = job_of(
                options,
                key_schema=KEY_SCHEMA,
                state_schema=STATE_SCHEMA,
                columns=("k", "n"),
                application_id=self._folder_name,
                plan_id=f"{self._folder_name} {key}",
                batches_retained=self.config.retained,
                api=ARROW,
                input_schema=KEY_SCHEMA,
                output_schema=KEY_SCHEMA,
            )
        return self._jobs[key]

    def _process(self, executor: Executor) -> _Process:
        return self._processes.setdefault(executor.uploads.owner, _Process())

    # -- attempts ----------------------------------------------------------------------------------

    def _run(self, attempt: Attempt, fault: Fault | None, numbers: Numbers, zombie: bool = False) -> TaskResult | None:
        try:
            return super()._run(attempt, fault, numbers, zombie)
        except OwnershipError as error:
            if self.is_begun:
                return None  # a late attempt at the first batch
            there = read_claim(self.taken.folder)
            if there is not None and there.id != self._folder_name:
                self.yard.counted["starts refused"] += 1
                raise RefusedError from error
            raise WrongStateError(f"{self._folder_name} may not start, though nobody else claims: {error}") from error
        except WrongStateError as error:
            if self.source_gone and not self.is_begun:
                raise RefusedError from error
            raise

    def _call(
        self, attempt: Attempt, number: int, run: Run, fault: Fault | None, numbers: Numbers
    ) -> tuple[CommitResult, Committer]:
        pointer, executor = attempt.partition[number].pointer, self.executors[attempt.executor]
        if pointer.encode() in self.empty:
            begun = self._first_step(executor, number, run, numbers)
            self.models[begun.encode()] = self.models[pointer.encode()]
            partition: Mapping[int, BucketState] = {**attempt.partition, number: BucketState(begun)}
            attempt = replace(attempt, partition=partition)
        elif number == FIRST_BUCKET:
            self._process(executor).detaching.in_turn(
                self._job(run),
                self.query_folder,
                lambda: None,
                executor,  # type: ignore[arg-type] # it has what is used of a Worker
            )
        return super()._call(attempt, number, run, fault, numbers)

    def _first_step(self, executor: Executor, number: int, run: Run, numbers: Numbers) -> Pointer:
        """As `opening.open_bucket`, but for the lease."""
        process, job, root = self._process(executor), self._job(run), self.yard.root("a").child(OPERATOR)
        trap = Trap(numbers.below(12), "dies", lambda: None) if numbers.below(4) == 0 else None
        if trap is None and numbers.below(4) == 0:
            trap = Trap(numbers.below(12), "waits", self._meanwhile)
        with set_trap(trap) if trap else nullcontext():
            found = process.starts.of(job, number)
            assert found is not None, "it is in the savepoint"
            nonce = run.stage.to_bytes(16, "big")
            folder = process.folders.of(root, self._folder_name, self.batch_ms, nonce)
            assert folder == self._folder_name, "tasks are told it"
            _, state = claim_source(found, job, root, folder, self.batch_ms)
            if self.mode == CLAIM:
                self.yard.counted["claims"] += self.taken.is_claimed_by(self._folder_name)
            process.catalog.admit(root, state.begins(job, folder), False, batch_ms=self.batch_ms)
            self.yard.counted["first steps"] += 1
            return begin_bucket(state, job, root, folder, Shared.of(Worker.current()).replicas, self.folder)[0]

    def _meanwhile(self) -> None:
        """Something else goes on while a first step stands still."""
        if self.yard.activities:
            self.yard.advance(self.yard.activities[0])

    # -- checks ------------------------------------------------------------------------------------

    def _check_on(self, store: LocalStore, pointer: Pointer, names: Sequence[str]) -> None:
        if pointer.encode() not in self.empty:
            super()._check_on(store, pointer, names)
        elif not self.source_gone and self.taken.gone():
            raise WrongStateError(f"{self._folder_name} has nothing to start from: {self.taken.gone()}")

    def look(self) -> None:
        """What its folder says must be so."""
        if not self.is_begun and is_detached(self.query_folder):
            raise WrongStateError(f"{self._folder_name} says that it is detached, and has not committed a batch")
