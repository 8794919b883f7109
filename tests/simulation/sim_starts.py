"""Queries that start from a savepoint, from their first call on, in a simulated world of their own.

The first step of each bucket, the record that a query is detached, and the deletion of a claimed savepoint are the
product's code; they pause, fail or die at any change to a file.
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
from sim_yard import KEY_SCHEMA, OPERATOR, STATE_SCHEMA, Query, SharedWorld, SimSavepoint

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
    """A query is not allowed to start."""


class StartedFiles(StateFiles):
    """After a batch with data is committed, no query goes back to before it, because the savepoint may be deleted."""

    begun_at: int | None = None
    first: frozenset[bytes] = frozenset()

    @property
    def oldest(self) -> int:
        oldest = super().oldest
        return oldest if self.begun_at is None else max(oldest, self.begun_at)

    def commit(self, batch: int, result: TaskResult) -> None:
        super().commit(batch, result)
        if self.begun_at is None and not any(state.pointer.encode() in self.first for state in self.at(batch).values()):
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
    shared, folder_name, variant
        As for `Query`.
    savepoint
        The savepoint.
    mode
        Whether it claims the savepoint.
    clean_up
        Whether the query may delete files.
    newest_ms
        Time of the last batch before its start.
    """

    spark: StartedFiles

    def __init__(
        self,
        shared: SharedWorld,
        folder_name: str,
        savepoint: SimSavepoint,
        mode: str,
        clean_up: bool,
        newest_ms: int,
        variant: Variant = DEFAULT,
    ) -> None:
        self.savepoint, self.mode, self.clean_up = savepoint, mode, clean_up
        super().__init__(shared, folder_name, variant)
        # Attempts at the first batch continue from the saved state.
        self.models = {self._make_first_pointer(number).encode(): savepoint.models[number] for number in self.buckets}
        self.planned[-1] = False, newest_ms
        self.batch_ms = 1_000_000 + int(folder_name[1:])
        self._processes: dict[str, _Process] = {}
        self._jobs: dict[str, Job] = {}

    @property
    def has_begun(self) -> bool:
        """Whether a batch with data is committed in the model, so that the query no longer needs the savepoint."""
        return self.spark.begun_at is not None

    @property
    def is_source_gone(self) -> bool:
        """Whether others deleted the savepoint's files; `SavepointWorld` checks whether they were allowed to."""
        return self.savepoint.owner != self._folder_name and bool(self.savepoint.list_missing_files())

    @property
    def is_known(self) -> bool:
        """Whether its folder records what it was started from."""
        return read_start(self.query_folder) is not None

    def _make_state_files(self, first: Partition) -> StateFiles:
        files = StartedFiles(self.config, first)
        files.first = frozenset(state.pointer.encode() for state in first.values())
        return files

    def _damage(self, numbers: Numbers) -> None:
        """Do nothing: its lineage begins with a snapshot, without files below it."""

    def _get_job(self, run: Run) -> Job:
        """Return the job that a run planned."""
        key = run.id
        if key not in self._jobs:
            root = self.shared.root("a").root
            options = StateOptions(
                root=root,
                operator=OPERATOR,
                buckets=self.number_of_buckets,
                local_dir=str(self.folder),
                storage_options=self.shared.options,
                backends=tuple(self.shared.backends(self.configured)),
                clean_up=self.clean_up,
                start_from=Savepoint(self.savepoint.folder.root, self.mode, storage_options=self.shared.options),
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

    def _get_process(self, executor: Executor) -> _Process:
        return self._processes.setdefault(executor.uploads.owner, _Process())

    # -- attempts ----------------------------------------------------------------------------------

    def _run(self, attempt: Attempt, fault: Fault | None, numbers: Numbers, zombie: bool = False) -> TaskResult | None:
        try:
            return super()._run(attempt, fault, numbers, zombie)
        except OwnershipError as error:
            if self.has_begun:
                return None  # a late attempt at the first batch
            claim = read_claim(self.savepoint.folder)
            if claim is not None and claim.id != self._folder_name:
                self.shared.counted["starts refused"] += 1
                raise RefusedError from error
            raise WrongStateError(
                f"{self._folder_name} may not start, although no other query has claimed: {error}"
            ) from error
        except WrongStateError as error:
            if self.is_source_gone and not self.has_begun:
                raise RefusedError from error
            raise

    def _call(
        self, attempt: Attempt, number: int, run: Run, fault: Fault | None, numbers: Numbers
    ) -> tuple[CommitResult, Committer]:
        pointer, executor = attempt.partition[number].pointer, self.executors[attempt.executor]
        if pointer.encode() in self.empty:
            first_pointer = self._run_first_step(executor, number, run, numbers)
            self.models[first_pointer.encode()] = self.models[pointer.encode()]
            partition: Mapping[int, BucketState] = {**attempt.partition, number: BucketState(first_pointer)}
            attempt = replace(attempt, partition=partition)
        elif number == FIRST_BUCKET:
            self._get_process(executor).detaching.in_turn(
                self._get_job(run),
                self.query_folder,
                lambda: None,
                executor,  # type: ignore[arg-type] # it has what is used of a Worker
            )
        return super()._call(attempt, number, run, fault, numbers)

    def _run_first_step(self, executor: Executor, number: int, run: Run, numbers: Numbers) -> Pointer:
        """Do what `opening.open_bucket` does, except for the lease."""
        process, job, root = self._get_process(executor), self._get_job(run), self.shared.root("a").child(OPERATOR)
        trap = Trap(numbers.below(12), "dies", lambda: None) if numbers.below(4) == 0 else None
        if trap is None and numbers.below(4) == 0:
            trap = Trap(numbers.below(12), "waits", self._advance_other)
        with set_trap(trap) if trap else nullcontext():
            initial_state = process.starts.of(job, number)
            assert initial_state is not None, "it is in the savepoint"
            nonce = run.stage.to_bytes(16, "big")
            folder = process.folders.of(root, self._folder_name, self.batch_ms, nonce)
            assert folder == self._folder_name, "the name is given"
            _, claimed_state = claim_source(initial_state, job, root, folder, self.batch_ms)
            if self.mode == CLAIM:
                self.shared.counted["claims"] += self.savepoint.is_claimed_by(self._folder_name)
            process.catalog.admit(root, claimed_state.begins(job, folder), False, batch_ms=self.batch_ms)
            self.shared.counted["first steps"] += 1
            return begin_bucket(claimed_state, job, root, folder, Shared.of(Worker.current()).replicas, self.folder)[0]

    def _advance_other(self) -> None:
        """Continue another activity while a first step is suspended."""
        if self.shared.activities:
            self.shared.advance(self.shared.activities[0])

    # -- checks ------------------------------------------------------------------------------------

    def _check_on(self, store: LocalStore, pointer: Pointer, names: Sequence[str]) -> None:
        if pointer.encode() not in self.empty:
            super()._check_on(store, pointer, names)
        elif not self.is_source_gone and self.savepoint.list_missing_files():
            raise WrongStateError(
                f"{self._folder_name} has nothing to start from: {self.savepoint.list_missing_files()}"
            )

    def check_now(self) -> None:
        """Check what its folder records."""
        if not self.has_begun and is_detached(self.query_folder):
            raise WrongStateError(f"{self._folder_name} says that it is detached, but has not committed a batch")
