"""A world in which a query is started again and again with another number of buckets.

Calls run the product's code: they compare pointers, copy parents, begin histories at origins, load, commit and clean up.
They pause, fail or die between any two changes to files. The simulation plays Spark: it decides which label is called with
which pointer, commits a batch completely or not at all, and chooses the attempt that counts for each partition.

Invariants, by the model: Each state that Spark may hand out loads on an empty disk as its writer had it; if no backend has
all of it, its parents are used too. Each key is only in its bucket. A batch that moves the state takes the complete state
that Spark had handed out. A query that is started again continues, with the old number of buckets or another one.
"""

from __future__ import annotations

import itertools
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import ClassVar

from sim_aside import Trap, list_trap_patches, set_trap
from sim_parts import (
    Attempt,
    BucketState,
    Call,
    Executor,
    History,
    Machine,
    Model,
    Numbers,
    Partition,
    Variant,
    WrongStateError,
    apply_changes,
)
from sim_rescale_finishing import Removals, check_nothing_is_left, list_removal_patches
from sim_rescale_onlookers import Onlookers
from sim_rescale_parts import (
    COUNTS,
    HASHES,
    MovedResult,
    MovingFiles,
    PlannedAttempt,
    RescaleConfig,
    draw_changes_of_bucket,
    merge_models,
    restrict_to,
    select_rows,
)
from sim_rescale_savepoints import save_and_start
from sim_savepoints import map_one_by_one
from sim_search import replace_attributes
from sim_spark import TaskResult
from sim_stores import DiedError, Fault
from sim_world import DEFAULT, EXECUTORS, STARTS_MAX, World, run_world
from sim_yard import KEY_SCHEMA, OPERATOR, STATE_SCHEMA, SharedWorld

from arrow_schemas import BucketMap, CheckpointRef
from arrow_schemas.operator import OperatorFile, operator_file_name
from arrow_schemas.pointer import Pointer
from spark_state_ext.backends import CleanUp
from spark_state_ext.backends.replication import Restorable, is_complete
from spark_state_ext.beginning.first_call import begin_bucket
from spark_state_ext.beginning.rescaling import Rescaling, refuse_requests
from spark_state_ext.beginning.starts import Starts
from spark_state_ext.commit.committer import Committer
from spark_state_ext.commit.failures import Run
from spark_state_ext.engine.bucket import CommitResult
from spark_state_ext.engine.folders import operator_folders
from spark_state_ext.engine.job import ARROW, Job
from spark_state_ext.engine.options import StateOptions
from spark_state_ext.engine.process_state import Shared
from spark_state_ext.errors import (
    ChangedJobError,
    CorruptError,
    LineageError,
    LiveRunError,
    MissingCheckpointError,
    StorageError,
)
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import STARTING_FOLDER
from spark_state_ext.files.operator_catalog import OperatorCatalog, newest_operator
from spark_state_ext.rescale import folder_in_force
from spark_state_ext.rescale.folders import make_rescaled_name
from spark_state_ext.rescale.origin import Origin, find_origin
from spark_state_ext.rescale.parents import has_parents, read_parent
from spark_state_ext.rescale.removal import Finishing
from spark_state_ext.restore import resolution
from spark_state_ext.savepoints.captured_pointers import Captured, make_captured_name
from spark_state_ext.store import LocalStore
from spark_state_ext.worker.worker import Worker
from tests.helpers.jobs import job_of

__all__ = ["RESCALE_STEPS", "RescaleWorld", "patch_for_rescaling", "simulate_rescales"]

RESCALE_STEPS = (
    "batch",  # the first steps are as in `sim_world`
    "twice",
    "quiet",
    "gap",
    "work",
    "zombie",
    "restart",  # with the present number of buckets or another one
    "lose disk",
    "lose memory",
    "switch",
    "rescale",  # the query continues from its last batch with another number of buckets
    "killed",  # attempts at the next batch run, and then the driver dies
    "savepoint",  # a process takes a savepoint, and another query starts from it
    "ask",  # a user makes a request to erase a key
    "read",  # a process reads by the root
)


# A variant may replace `BucketMap.overlapping`, so keep the original.
_overlapping = BucketMap.overlapping


class _RefusedError(Exception):
    """A call may not move the state, because the query has continued since it was planned."""


class _FailedError(Exception):
    """A store fails in a call that moves the state."""


class _Process:
    """Objects that a worker process of the query keeps."""

    def __init__(self) -> None:
        self.starts = Starts()
        self.finishing = Finishing()
        self.catalog = OperatorCatalog()
        # Folders that it has put in force, with the plan.
        self.in_force: set[tuple[str, str]] = set()


class RescaleWorld(World):
    """A query of several buckets.

    Parameters
    ----------
    config, variant
        As for `World`.
    """

    kinds: ClassVar[tuple[str, ...]] = RESCALE_STEPS
    hashes = HASHES
    config: RescaleConfig

    def __init__(self, config: RescaleConfig, variant: Variant = DEFAULT) -> None:
        self.shared = SharedWorld(config, uuid.uuid4().hex)
        self.counted: Counter[str] = Counter()
        # Folders that were removed because they were no longer needed.
        self.removed: set[str] = set()
        self._checked: set[bytes] = set()
        self._processes: dict[str, _Process] = {}
        # Results of attempts that ran while another attempt was suspended.
        self._other_results: list[tuple[int, TaskResult]] = []
        self._origins: list[Origin] = []
        # By plan, the old buckets' pointers: read when the query was planned, and noted since then.
        self._known_pointers: dict[str, dict[int, Pointer]] = {}
        # By plan and old bucket, the checkpoints with which attempts that moved the state began.
        self._handed_out_to: dict[str, dict[int, set[CheckpointRef | None]]] = {}
        # The plan of the last calls, which has the lease; and names of query folders from which a process copies.
        self._lease_plan = ""
        self.held_folders: set[str] = set()
        # The model state by checkpoint, for all pointers that name it.
        self._models_by_ref: dict[CheckpointRef, Model] = {}
        self._without_parents = self._no_faults = False
        self._plans, self._markers, self.savepoints = itertools.count(1), itertools.count(1), itertools.count(1)
        super().__init__(config, variant, self.shared.name)
        self.configured = ["a", "b"] if config.two else ["a"]
        self.operator = self.shared.root("a").child(OPERATOR)
        first = OperatorFile(OPERATOR, "q0", config.buckets, KEY_SCHEMA, STATE_SCHEMA)
        self.operator.child("q0").put(operator_file_name(0), first.encode())
        self.onlookers = Onlookers(self)
        self.job = self._plan_query(config.buckets)

    def _list_bucket_numbers(self) -> range:
        return range(self.config.buckets)

    def _locate_query(self, root: Folder) -> Folder:
        return root.child(OPERATOR, "q0")

    def _make_first_pointer(self, bucket: int) -> Pointer:
        return Pointer(OPERATOR, bucket, self.config.buckets, 0, -1, None, query_folder="q0")

    def _make_state_files(self, first: Partition) -> MovingFiles:
        return MovingFiles(self.config, first)

    def _get_folder(self, name: str, pointer: Pointer) -> Folder:
        return self.shared.root(name).child(OPERATOR, pointer.query_folder, str(pointer.bucket))

    def _get_store(self, machine: Machine, pointer: Pointer) -> LocalStore:
        return machine.open_store(f"{pointer.query_folder}-{pointer.bucket}")

    def _list_sources(self, pointer: Pointer) -> Sequence[Restorable]:
        if pointer.parents is None or self._without_parents:
            return ()
        self._origins.append(self.origin(pointer))
        return (self._origins[-1],)

    def origin(self, pointer: Pointer) -> Origin:
        """Return the origin of a rescaled bucket."""
        backends, schema = self.shared.backends(self.configured), self.job.operator_file("").row_schema()
        origin = find_origin(backends, pointer, BucketMap(pointer.buckets), schema, self.folder)
        assert origin is not None, "it needs its parents"
        return origin

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Close all origins that are opened meanwhile."""
        before, self._origins = self._origins, []
        try:
            yield
        finally:
            for origin in self._origins:
                origin.close()
            self._origins = before

    def finish(self, attempt: PlannedAttempt, pointer: Pointer, numbers: Numbers) -> None:
        """Remove old folders and parents as a call of the first bucket does, by its input pointer."""
        job, executor = attempt.planned, self.executors[attempt.executor]
        self._get_process(executor).finishing.in_turn(
            operator_folders(job),
            pointer.query_folder,
            job.plan_id,
            pointer,
            self.config.retained,
            lambda: self._check_lease(job),
            lambda name: name in self.held_folders,
            Removals(self, executor, numbers, not (self._calm or self._no_faults)),  # type: ignore[arg-type]
        )

    def put_in_force(self, attempt: PlannedAttempt, pointer: Pointer, numbers: Numbers) -> None:
        """Put the input pointer's folder in force, as a call of the first bucket does."""
        job, process = attempt.planned, self._get_process_of(attempt)
        if (pointer.query_folder, job.plan_id) in process.in_force:
            return
        action = "" if self._calm or self._no_faults else ("dies", "fails", "", "")[numbers.below(4)]
        try:
            with set_trap(Trap(numbers.below(4), action)) if action else nullcontext():
                folder_in_force.put_in_force(
                    operator_folders(job), pointer.query_folder, job.plan_id, lambda: self._check_lease(job)
                )
        except (LiveRunError, StorageError):
            # The product logs the error, and the next turn tries again.
            self.counted["folders not put in force at once"] += 1
            return
        process.in_force.add((pointer.query_folder, job.plan_id))

    def _check_lease(self, job: Job) -> None:
        """Check the lease: an earlier plan has lost it to the present one."""
        if self._lease_plan != job.plan_id:
            raise LiveRunError("another run has taken the state over")

    def _note_free_bucket(
        self, attempt: PlannedAttempt, pointer: Pointer, result: tuple[CommitResult, Committer], numbers: Numbers
    ) -> tuple[CommitResult, Committer]:
        """Note that a bucket no longer needs its parents; returns the result that its call hands over."""
        if pointer.parents is None:
            return result
        if attempt.batch <= self.spark.oldest:
            # Attempts at batches that Spark does not retain are assumed to have ended.
            self.counted["late calls that note nothing"] += 1
            raise _FailedError
        others = (root.child(pointer.query_folder) for root in operator_folders(attempt.planned))
        folders, finishing = [self.origin(pointer).query_folder, *others], self._get_process_of(attempt).finishing
        try:
            with self._disturb(attempt, numbers, allows_attempts=False):
                handed_over = finishing.noted(
                    folders, pointer, result[0].pointer, lambda: self._check_lease(attempt.planned)
                )
        except LiveRunError:
            self.counted["late calls that note nothing"] += 1
            raise _FailedError from None
        self.counted["buckets that need no parents"] += handed_over.parents is None
        return replace(result[0], pointer=handed_over), result[1]

    def _get_process_of(self, attempt: PlannedAttempt) -> _Process:
        return self._get_process(self.executors[attempt.executor])

    def _adjust_clean_up(self, executor: Executor, request: CleanUp, numbers: Numbers) -> CleanUp:
        """Let a clean-up respect folders from which a process copies."""
        return replace(request, held=lambda: request.pointer.query_folder in self.held_folders)

    # -- plans -------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Number of buckets of the committed state."""
        return _count_buckets(self.spark.at(self.batch))

    def _plan_query(self, count: int) -> Job:
        """Plan the query; if the number of buckets changes, the plan reads the pointers of the last batch."""
        number = next(self._plans)
        plan_id = f"{number:012x}".ljust(32, "0")
        options = StateOptions(
            root=self.shared.root("a").root,
            operator=OPERATOR,
            buckets=count,
            local_dir=str(self.folder),
            storage_options=self.shared.options,
            backends=tuple(self.shared.backends(self.configured)),
            rescale="/a/checkpoint",
        )
        job = job_of(
            options,
            key_schema=KEY_SCHEMA,
            state_schema=STATE_SCHEMA,
            columns=("k", "n"),
            application_id="simulated",
            plan_id=plan_id,
            batches_retained=self.config.retained,
            api=ARROW,
            input_schema=KEY_SCHEMA,
            output_schema=KEY_SCHEMA,
        )
        self.counted["plans"] += 1
        if count == self.count:
            return job
        self.counted["plans that rescale"] += 1
        pointers = {bucket: state.pointer for bucket, state in self.spark.at(self.batch).items()}
        self._known_pointers[plan_id] = pointers
        name = make_captured_name(number, plan_id)
        captured = Captured(OPERATOR, self.batch, (), "", 0, dict(sorted(pointers.items())))
        self.operator.child(STARTING_FOLDER).put(name, captured.encode())
        return replace(job, rescaled_from=name, rescaled_buckets=self.count)

    def _start_query(self, count: int) -> None:
        """Start the query again; before its first batch it has no state to rescale."""
        self.job = self._plan_query(count if self.batch >= 0 and not self._is_refused(count) else self.count)
        # Attempts of the previous run no longer count.
        self._other_results.clear()

    def _is_refused(self, count: int) -> bool:
        """Whether planning refuses to rescale the query."""
        if count == self.count:
            return False
        name = next(iter(self.spark.at(self.batch).values())).pointer.query_folder
        stored = newest_operator(self.operator.child(name))
        assert stored is not None, "it has an operator file"
        try:
            refuse_requests(self.operator.child(name), stored)
        except ChangedJobError:
            self.counted["plans refused"] += 1
            return True
        return False

    def _restart(self, numbers: Numbers) -> None:
        before, oldest = self.batch, self.count
        super()._restart(numbers)
        if self.batch < before:
            self.onlookers.go_back(self.batch)
        self.counted["goings back"] += self.batch < before
        self.counted["goings back to other buckets"] += self.count != oldest
        self._start_query(self.count if numbers.yes() else COUNTS[numbers.below(len(COUNTS))])

    def _rescale(self, numbers: Numbers) -> None:
        self._restart_in_place(numbers)
        others = [count for count in COUNTS if count != self.count]
        self._start_query(others[numbers.below(len(others))])
        # Events between the plan and the first batch with data.
        after = numbers.below(4)
        if after == 0:
            self._gap(numbers)
        elif after == 1:
            self._zombie(numbers)

    def _restart_in_place(self, numbers: Numbers) -> None:
        """Restart the query after its last batch; processes may live on."""
        self.start()
        for executor in self.executors:
            executor.loaded.clear()
            if numbers.yes():
                executor.die()

    def _switch(self, numbers: Numbers) -> None:
        """Switch to other backends: one of them must hold all reachable states, or the present ones stay among them."""
        before = list(self.configured)
        super()._switch(numbers)
        wanted = (["a", "b"], ["b", "a"])[numbers.below(2)]
        if self.configured == before and set(before) <= set(wanted):
            self.configured = wanted
        self.counted["switches of backends"] += self.configured != before
        self._start_query(self.job.options.buckets)

    def _killed(self, numbers: Numbers) -> None:
        batch = self.batch + 1
        heartbeat, now_ms = self._plan(batch, numbers.below(4) > 0, numbers)
        run = self.stage()
        for _ in range(1 + numbers.below(2)):
            attempt = self._attempt(numbers.below(EXECUTORS), batch, heartbeat, now_ms, numbers)
            attempt = replace(attempt, run=run)
            if numbers.below(4) == 0:
                self.sleeping.append(attempt)
            else:
                self._run(attempt, self._draw_fault(numbers, run) if numbers.yes() else None, numbers)
        self._other_results.clear()
        self.counted["killed in a first batch"] += heartbeat and self.count != self.job.options.buckets
        self._restart_in_place(numbers)
        counts = (self.count, self.count, self.job.options.buckets, COUNTS[numbers.below(len(COUNTS))])
        self._start_query(counts[numbers.below(4)])

    def _savepoint(self, numbers: Numbers) -> None:
        if self.batch >= 0:
            save_and_start(self, numbers)

    def _ask(self, numbers: Numbers) -> None:
        self.onlookers.ask(numbers)

    def _read(self, numbers: Numbers) -> None:
        self.onlookers.read()

    def root_has(self, pointer: Pointer) -> bool:
        """Whether the query's root has a bucket's whole state, including the parents that it needs."""
        if pointer.ref is None or self._holds("a", pointer):
            return True
        status = pointer.replication.get("a")
        if (
            pointer.parents is None
            or status is None
            or (status.since, status.through) != (pointer.parents, pointer.ref)
        ):
            return False
        return has_parents(self.operator.child(pointer.query_folder))

    def _get_process(self, executor: Executor) -> _Process:
        return self._processes.setdefault(executor.uploads.owner, _Process())

    # -- attempts ----------------------------------------------------------------------------------

    @property
    def _has_planned_calls(self) -> bool:
        return True

    def _attempt(
        self,
        executor: int,
        batch: int,
        heartbeat: bool,
        now_ms: int,
        numbers: Numbers,
        *,
        quiet: bool = False,
        cleans: bool | None = None,
    ) -> PlannedAttempt:
        partition = self._hand_out(executor, batch)
        bucket_map = self.job.options.bucket_map if heartbeat else BucketMap(_count_buckets(partition))
        calls: dict[int, Call] = {}
        # Tasks run in parallel, so any label may be called first.
        begins = numbers.below(bucket_map.buckets)
        for bucket in (*range(begins, bucket_map.buckets), *range(begins)):
            state = partition.get(bucket)
            if not heartbeat and (state is None or state.due_ms is None or state.due_ms >= now_ms):
                continue
            changes = {} if quiet else draw_changes_of_bucket(numbers, bucket_map, bucket)
            timeout_ms = now_ms + numbers.below(60) if self.config.timeouts and numbers.yes() else None
            calls[bucket] = Call(changes, timeout_ms)
        cleans = numbers.yes() if cleans is None else cleans
        return PlannedAttempt(executor, batch, partition, calls, cleans, heartbeat, self.switches, now_ms, job=self.job)

    def _run_until_success(self, attempt: Attempt, numbers: Numbers) -> TaskResult:
        attempt = replace(attempt, run=attempt.run or self.stage())
        for _ in range(STARTS_MAX):
            steady, self._no_faults = self._no_faults, True
            try:
                result = self._run(attempt, None, numbers)
            finally:
                self._no_faults = steady
            if result is not None and _list_groups(result, self.config.partitions) == set(
                range(self.config.partitions)
            ):
                return result
            # After a refusal or a failure, the query is started again.
            self._restart_in_place(numbers)
            self._start_query(self.job.options.buckets)
            quiet = not any(call.changes for call in attempt.calls.values())
            again = self._attempt(
                *(attempt.executor, attempt.batch, attempt.heartbeat, attempt.now_ms, numbers),
                quiet=quiet,
                cleans=attempt.cleans,
            )
            attempt = replace(again, run=self.stage())
        raise WrongStateError(f"batch {attempt.batch} fails again and again without faults")

    def _run(self, attempt: Attempt, fault: Fault | None, numbers: Numbers, zombie: bool = False) -> TaskResult | None:
        assert isinstance(attempt, PlannedAttempt)
        executor = self.executors[attempt.executor]
        before = dict(executor.loaded)
        try:
            with self._reading():
                if attempt.heartbeat and _count_buckets(attempt.partition) != attempt.planned.options.buckets:
                    return self._run_moving(attempt, fault, numbers, zombie)
                return super()._run(attempt, fault, numbers, zombie)
        except _RefusedError:
            self.counted["calls refused"] += 1
            return None
        except _FailedError:
            return None
        finally:
            if attempt.planned.plan_id != self.job.plan_id:
                # The next run does not continue from the memory of an ended run.
                executor.loaded = {
                    b: partition for b, partition in executor.loaded.items() if before.get(b) is partition
                }

    def _run_moving(
        self, attempt: PlannedAttempt, fault: Fault | None, numbers: Numbers, zombie: bool
    ) -> MovedResult | None:
        """Run an attempt that moves the state, as one task for each partition; some tasks may fail."""
        handed_out, executor, batch = attempt.partition, self.executors[attempt.executor], attempt.batch
        refs_seen = self._handed_out_to.setdefault(attempt.planned.plan_id, {})
        for bucket, state in handed_out.items():
            refs_seen.setdefault(bucket, set()).add(state.pointer.ref)
        before, owner = executor.loaded.get(batch), executor.uploads.owner
        results: dict[int, TaskResult] = {}
        for number in range(self.config.partitions):
            calls = {b: call for b, call in attempt.calls.items() if b % self.config.partitions == number}
            task = replace(attempt, calls=calls, partition=self._make_stateless(attempt, calls), handed_out=handed_out)
            try:
                removed_labels = self._list_removed(task, number)
                if attempt.cleans:
                    self._run_removed_buckets(task, removed_labels, numbers)
                result = super()._run(task, fault, numbers, zombie)
                if result is not None and not attempt.cleans:
                    self._run_removed_buckets(task, removed_labels, numbers)
            except _RefusedError:
                self.counted["calls refused"] += 1
            except _FailedError:
                pass
            except DiedError:
                executor.die()
            except (CorruptError, MissingCheckpointError) as error:
                # A late call of a bucket that no longer exists.
                if not self._may_find_nothing(task, zombie):
                    raise WrongStateError(f"batch {batch} cannot read {handed_out}: {error}") from error
                self.counted["late calls that find nothing to begin with"] += 1
            else:
                if result is not None:
                    results[number] = replace(
                        result, called=result.called | {*removed_labels}, removed=frozenset(removed_labels)
                    )
        is_whole = len(results) == self.config.partitions and executor.uploads.owner == owner
        partition = {b: state for task in results.values() for b, state in task.partition.items()}
        if executor.uploads.owner == owner and (is_whole or before is not None):
            executor.load(batch, partition if is_whole or before is None else before)
        else:
            executor.loaded.pop(batch, None)
        if not results:
            return None
        self.counted["moves"] += 1
        return MovedResult(
            partition,
            frozenset().union(*(task.called for task in results.values())),
            frozenset().union(*(task.removed for task in results.values())),
            handed_out,
            {bucket: call.changes for bucket, call in attempt.calls.items()},
            frozenset(results),
            attempt.planned.plan_id,
        )

    def _list_removed(self, task: PlannedAttempt, number: int) -> list[int]:
        """Return a partition's labels that no longer exist."""
        assert task.handed_out is not None
        count = task.planned.options.buckets
        return [b for b in sorted(task.handed_out) if b >= count and b % self.config.partitions == number]

    def _make_stateless(self, attempt: PlannedAttempt, buckets: Iterable[int]) -> dict[int, BucketState]:
        """Make states without data for buckets that have no pointer yet."""
        count, marker = attempt.planned.options.buckets, next(self._markers)
        states = {}
        for bucket in buckets:
            pointer = Pointer(OPERATOR, bucket, count, 0, -1, None, calls=marker)
            self.models[pointer.encode()] = {}
            states[bucket] = BucketState(pointer)
        return states

    def _call(
        self, attempt: Attempt, number: int, run: Run, fault: Fault | None, numbers: Numbers
    ) -> tuple[CommitResult, Committer]:
        assert isinstance(attempt, PlannedAttempt)
        if attempt.handed_out is not None:
            return self._first_call(attempt, number, run, fault, numbers)
        pointer = attempt.partition[number].pointer
        self._lease_plan = self.job.plan_id if attempt.planned is self.job else self._lease_plan
        result = super()._call(attempt, number, run, fault, numbers)
        result = self._note_free_bucket(attempt, pointer, result, numbers)
        self._note_state(result[0].pointer, pointer, attempt.calls[number])
        if number == 0 and pointer.batch >= 0:
            self.put_in_force(attempt, pointer, numbers)
            self.finish(attempt, pointer, numbers)
        rescaling = self._get_process(self.executors[attempt.executor]).starts.rescaling(
            attempt.planned, number, pointer
        )
        if rescaling is not None:
            # The batch has no data, so it continues with the old buckets.
            rescaling.note(result[0].pointer)
            self._known_pointers[attempt.planned.plan_id][number] = result[0].pointer
            self.counted["pointers noted"] += 1
        return result

    def _note_state(self, new_pointer: Pointer, before: Pointer, call: Call) -> None:
        if new_pointer.ref is not None:
            self._models_by_ref[new_pointer.ref] = apply_changes(self.models[before.encode()], call.changes)

    def _first_call(
        self, attempt: PlannedAttempt, number: int, run: Run, fault: Fault | None, numbers: Numbers
    ) -> tuple[CommitResult, Committer]:
        self._lease_plan = self.job.plan_id if attempt.planned is self.job else self._lease_plan
        first_pointer, model = self._begin_bucket(attempt, number, numbers)
        stateless = attempt.partition[number].pointer
        self.models[first_pointer.encode()] = self.models[stateless.encode()] = model
        partition = {**attempt.partition, number: BucketState(first_pointer)}
        result = super()._call(replace(attempt, partition=partition), number, run, fault, numbers)
        result = self._note_free_bucket(attempt, first_pointer, result, numbers)
        self._note_state(result[0].pointer, first_pointer, attempt.calls[number])
        return result

    def _run_removed_buckets(self, attempt: PlannedAttempt, removed_labels: Sequence[int], numbers: Numbers) -> None:
        """Run the calls of buckets that no longer exist."""
        for bucket in removed_labels:
            with self._disturb(attempt, numbers):
                self._find_rescaling(attempt, bucket).give(Shared.of(Worker.current()).replicas, self.folder)

    def _begin_bucket(self, attempt: PlannedAttempt, number: int, numbers: Numbers) -> tuple[Pointer, Model]:
        """Do what `going_on.decide` and `opening.open_bucket` do, except for the lease; also returns the copied state.

        Whether this state is what Spark handed out is checked after all tasks have ended.
        """
        assert attempt.handed_out is not None
        job, catalog = attempt.planned, self._get_process(self.executors[attempt.executor]).catalog
        with self._disturb(attempt, numbers):
            rescaling, replicas = self._find_rescaling(attempt, number), Shared.of(Worker.current()).replicas
            rescaling.give(replicas, self.folder)
            state = rescaling.initial_state()
            folder = state.pointer.query_folder
            operator_file = state.begins(job, folder)
            with set_trap(Trap(-1, "")):
                # Only one thread of a process does this at a time, so it must not pause.
                operator = catalog.admit(self.operator, operator_file, False, with_state=True)
            first_pointer, _ = begin_bucket(state, job, self.operator, folder, replicas, self.folder)
            first_pointer = replace(first_pointer, schema_id=operator.schema_id)
        old_map, bucket_map = BucketMap(_count_buckets(attempt.handed_out)), job.options.bucket_map
        overlapping = _overlapping(bucket_map, old_map, number)
        parents = [attempt.handed_out[parent_bucket].pointer for parent_bucket in overlapping]
        self.counted["parents without a snapshot of their own"] += any(parent.parents is not None for parent in parents)
        copied_parents = [read_parent(self._locate_new_folder(job), parent_bucket) for parent_bucket in overlapping]
        refs = [parent.pointer.ref for parent in copied_parents if parent is not None]
        timeouts_ms = [parent.pointer.earliest_timeout_ms for parent in copied_parents if parent is not None]
        earliest_ms = min((timeout_ms for timeout_ms in timeouts_ms if timeout_ms is not None), default=None)
        if first_pointer.earliest_timeout_ms != earliest_ms:
            raise WrongStateError(f"bucket {number} begins without the timeouts that are due at {earliest_ms}")
        return first_pointer, select_rows(
            merge_models(self._models_by_ref[ref] for ref in refs if ref is not None), bucket_map, number
        )

    def _locate_new_folder(self, job: Job) -> Folder:
        """Return the folder to which a plan copies parents."""
        root = Folder(job.options.backends[0].root, job.options.backends[0].storage_options)
        return root.child(OPERATOR, make_rescaled_name("q0", job.plan_id))

    def _find_rescaling(self, attempt: PlannedAttempt, bucket: int) -> Rescaling:
        assert attempt.handed_out is not None
        state = attempt.handed_out.get(bucket)
        starts = self._get_process(self.executors[attempt.executor]).starts
        rescaling = starts.rescaling(attempt.planned, bucket, None if state is None else state.pointer)
        if rescaling is None:
            raise WrongStateError(f"bucket {bucket} is not moved, although its state is of other buckets")
        return rescaling

    @contextmanager
    def _disturb(self, attempt: PlannedAttempt, numbers: Numbers, allows_attempts: bool = True) -> Iterator[None]:
        """Let a call pause, fail or die at any change to a file; meanwhile other attempts may run, if allowed."""
        trap = None
        if not self._calm and not self._no_faults:
            action = ("dies", "fails", *["waits"] * 4, *[""] * 6)[numbers.below(12)]
            if action:
                trap = Trap(
                    numbers.below(6) if allows_attempts else numbers.below(2),
                    action,
                    lambda: self._meanwhile(attempt, numbers) if allows_attempts else self._work(numbers),
                )
        try:
            with set_trap(trap) if trap else nullcontext():
                yield
        except LineageError as error:
            self._check_refused(attempt, error)
            raise _RefusedError from error
        except ChangedJobError as error:
            # An erase request was made after the query was planned.
            self.counted["calls refused for a request"] += 1
            raise _RefusedError from error
        except StorageError as error:
            raise _FailedError from error

    def _meanwhile(self, attempt: PlannedAttempt, numbers: Numbers) -> None:
        """Run another attempt at the task, or background work, while a call is suspended."""
        self.counted["calls that stood still"] += 1
        if numbers.below(4) == 0:
            with set_trap(Trap(-1, "")):
                self.onlookers.ask(numbers)
                self.onlookers.read()
        if numbers.yes() or attempt.planned is not self.job or attempt.batch != self.batch + 1:
            self._work(numbers)
            return
        self._no_faults = True
        try:
            with set_trap(Trap(-1, "")):
                again = self._attempt(
                    numbers.below(EXECUTORS), attempt.batch, attempt.heartbeat, attempt.now_ms, numbers
                )
                result = self._run(replace(again, run=attempt.run), None, numbers)
        finally:
            self._no_faults = False
        if result is not None:
            self._other_results.append((attempt.batch, result))

    def _zombie(self, numbers: Numbers) -> None:
        if not self.sleeping:
            return
        attempt = self.sleeping.pop(numbers.below(len(self.sleeping)))
        result = self._run(attempt, None, numbers, zombie=True)
        if result is None or self.config.checkpoint_v2 or not self.config.last_wins or attempt.batch > self.batch:
            return
        late = [partition for partition in range(self.config.partitions) if numbers.yes()]
        labels = {
            bucket for bucket in result.called | result.partition.keys() if bucket % self.config.partitions in late
        }
        self.spark.overwrite(attempt.batch, restrict_to(result, labels))

    def _commit(self, batch: int, results: Sequence[TaskResult], numbers: Numbers) -> None:
        results = self._complete_partitions(
            batch, [*(result for of, result in self._other_results if of == batch), *results], numbers
        )
        self._other_results.clear()
        parts = []
        for number in range(self.config.partitions):
            result = self._choose(
                [result for result in results if number in _list_groups(result, self.config.partitions)], numbers
            )
            labels = result.called | result.partition.keys()
            parts.append(
                restrict_to(result, {bucket for bucket in labels if bucket % self.config.partitions == number})
            )
        self._check_moved(batch, parts)
        self.spark.times_ms[batch] = self.planned[batch][1]
        self.spark.commit(
            batch,
            TaskResult(
                {bucket: state for part in parts for bucket, state in sorted(part.partition.items())},
                frozenset().union(*(part.called for part in parts)),
                frozenset().union(*(part.removed for part in parts)),
            ),
        )
        self.onlookers.commit(batch, data=self.planned[batch][0])

    def _complete_partitions(self, batch: int, results: list[TaskResult], numbers: Numbers) -> list[TaskResult]:
        """Return results of the present plan, with further attempts until some task of each partition has succeeded."""
        number = self.config.partitions
        own_results = [
            result for result in results if not isinstance(result, MovedResult) or result.plan_id == self.job.plan_id
        ]
        if {group for result in own_results for group in _list_groups(result, number)} == set(range(number)):
            return own_results
        heartbeat, now_ms = self.planned[batch]
        result = self._run_until_success(
            self._attempt(numbers.below(EXECUTORS), batch, heartbeat, now_ms, numbers), numbers
        )
        return self._complete_partitions(batch, [*own_results, result], numbers)

    def _choose(self, results: Sequence[TaskResult], numbers: Numbers) -> TaskResult:
        if self.config.checkpoint_v2:
            return results[numbers.below(len(results))]
        return results[-1] if self.config.last_wins else results[0]

    # -- checks ------------------------------------------------------------------------------------

    def _check_moved(self, batch: int, parts: Sequence[TaskResult]) -> None:
        """Check that the moved state is what Spark had handed out to the attempts that count."""
        moved = [part for part in parts if isinstance(part, MovedResult)]
        if not moved:
            return
        number = len(parts)
        handed_out = {
            bucket: state
            for at, part in enumerate(moved)
            for bucket, state in part.handed_out.items()
            if bucket % number == at
        }
        total = merge_models(self.models[state.pointer.encode()] for state in handed_out.values())
        self.counted["batches that moved the state"] += 1
        self.counted["moved by several attempts"] += len({id(part.handed_out) for part in moved}) > 1
        for part in moved:
            for bucket, state in part.partition.items():
                before = select_rows(total, BucketMap(state.pointer.buckets), bucket)
                expected, model = apply_changes(before, dict(part.changes[bucket])), self.models[state.pointer.encode()]
                if model != expected:
                    raise WrongStateError(f"batch {batch} moved {model} to bucket {bucket}, but should move {expected}")

    def _check_refused(self, attempt: PlannedAttempt, error: LineageError) -> None:
        """Check that a refused call had another input than its plan knows, or than another attempt had.

        A late call may also be refused because the old folder was removed.
        """
        assert attempt.handed_out is not None
        job = attempt.planned
        if attempt.batch <= self.batch and isinstance(error.__cause__, MissingCheckpointError):
            self.counted["late calls that find nothing to begin with"] += 1
            return
        known_pointers, refs_seen = self._known_pointers[job.plan_id], self._handed_out_to[job.plan_id]
        folder = self._locate_new_folder(job)
        for bucket, state in attempt.handed_out.items():
            copied_parent = read_parent(folder, bucket)
            is_other = copied_parent is not None and copied_parent.pointer.ref in refs_seen[bucket] - {
                known_pointers[bucket].ref
            }
            if is_other or state.pointer.ref != known_pointers[bucket].ref:
                return
        raise WrongStateError(f"a call is refused although it continues from what its plan knows: {error}") from error

    def _check_drawn_rows(self, partition: Partition, batch: int) -> None:
        """Check that each key is in its bucket, and that all buckets exist."""
        bucket_map = BucketMap(_count_buckets(partition))
        if partition.keys() != set(range(bucket_map.buckets)):
            raise WrongStateError(f"after batch {batch} there are the buckets {sorted(partition)} of {bucket_map}")
        for bucket, state in partition.items():
            model = self.models[state.pointer.encode()]
            if select_rows(model, bucket_map, bucket) != model:
                raise WrongStateError(f"after batch {batch} bucket {bucket} has the keys {sorted(model)}")

    def check(self, bucket: int | None = None, backend: str | None = None) -> None:
        """Check as `World.check` does; new files cannot harm earlier states, so `step` checks each state only once."""
        self._checked.clear()
        super().check(bucket, backend)

    def step(self, step: bytes) -> None:
        """Take one step, and check what Spark may hand out."""
        super().step(step)
        for batch, partition in self.spark.list_reachable(self.executors):
            self._check_drawn_rows(partition, batch)
        for pointer in self.list_reachable():
            if pointer.encode() not in self._checked:
                holding = [[name] for name in self.configured if self._holds(name, pointer)]
                for names in holding or [self.configured]:
                    self._check_with(pointer, names)
                self._checked.add(pointer.encode())

    def _check_on(self, store: LocalStore, pointer: Pointer, names: Sequence[str]) -> None:
        # A backend that claims to be complete must not need the parents.
        self._without_parents = any(is_complete(pointer.replication.get(name)) for name in names)
        try:
            with self._reading():
                super()._check_on(store, pointer, names)
        finally:
            self._without_parents = False

    def total(self) -> Model:
        """Return the whole committed state."""
        return merge_models(self.models[state.pointer.encode()] for state in self.spark.at(self.batch).values())

    @property
    def files_left_max(self) -> int:
        # Clean-up begins late and takes turns over more buckets; each batch leaves a delta and perhaps a snapshot.
        return super().files_left_max + 4 * 2 * len(self.configured)

    def calm(self) -> None:
        super().calm()
        for state in self.spark.at(self.batch).values():
            if state.pointer.parents is not None:
                raise WrongStateError(f"bucket {state.pointer.bucket} still needs {state.pointer.parents}")
        check_nothing_is_left(self)
        self.onlookers.check_calm()


def _list_groups(result: TaskResult, partitions: int) -> frozenset[int]:
    """Return the partitions whose tasks succeeded in an attempt."""
    return result.groups if isinstance(result, MovedResult) else frozenset(range(partitions))


def _count_buckets(partition: Partition) -> int:
    counts = {state.pointer.buckets for state in partition.values()}
    if len(counts) != 1:
        raise WrongStateError(f"the state is of {counts} buckets")
    return counts.pop()


def patch_for_rescaling(variant: Variant) -> AbstractContextManager[None]:
    """Replace threads, folders' methods, and what a variant breaks."""
    return replace_attributes(
        [
            *list_removal_patches(),
            *list_trap_patches(),
            (resolution, "map_in_parallel", map_one_by_one),
            *variant.patches,
        ]
    )


def simulate_rescales(history: History, variant: Variant = DEFAULT) -> RescaleWorld:
    """Run a history to its end; raises `WrongStateError` if an invariant is violated.

    Parameters
    ----------
    history
        The history; its configuration is a `RescaleConfig`.
    variant
        What is under test.
    """
    assert isinstance(history.config, RescaleConfig)
    world = RescaleWorld(history.config, variant)
    with patch_for_rescaling(variant):
        run_world(world, history, replace(variant, patches=()))
    return world
