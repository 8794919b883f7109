"""A world in which a query is started again and again with another number of buckets.

What calls do is the product's code: they compare, bring parents, begin histories at origins, load, commit and clean up,
and stop or die between any two changes to files. Spark's part is played: which label is called with which pointer, that
a batch counts whole or not at all, and which attempt at each partition counts.

What must hold, by the model: whatever Spark may hand out loads on an empty disk, where no backend has all of it with the
parents, as its writer had it; each key is in its bucket only; a batch that moves the state takes all of what Spark had
handed out; and a query that is started again goes on, with the old number or another one.
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
from spark_state_ext.errors import ChangedJobError, LineageError, LiveRunError, MissingCheckpointError, StorageError
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
    "batch",  # as in `sim_world`, each
    "twice",
    "quiet",
    "gap",
    "work",
    "zombie",
    "restart",  # with the number of buckets that there was, or another one
    "lose disk",
    "lose memory",
    "switch",
    "rescale",  # the query starts again where it was, with another number of buckets
    "killed",  # attempts at the next batch, and then the driver dies
    "savepoint",  # somebody takes one, and another query starts from it
    "ask",  # somebody asks for a key to be erased
    "read",  # somebody reads by the root
)


# A variant may put something else in its place.
_overlapping = BucketMap.overlapping


class _RefusedError(Exception):
    """A call may not move the state, as the query has gone on since it was planned."""


class _FailedError(Exception):
    """A store fails in a call that moves the state."""


class _Process:
    """What a worker process of the query keeps."""

    def __init__(self) -> None:
        self.starts = Starts()
        self.finishing = Finishing()
        self.catalog = OperatorCatalog()
        # Folders that it has put in force, each for a plan.
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
        # Folders that were removed, as nothing needed them any more.
        self.removed: set[str] = set()
        self._checked: set[bytes] = set()
        self._processes: dict[str, _Process] = {}
        # Attempts that succeeded while another one stood still.
        self._beside: list[tuple[int, TaskResult]] = []
        self._origins: list[Origin] = []
        # What plans know of the old buckets: read when the query was planned, and noted since.
        self._known: dict[str, dict[int, Pointer]] = {}
        # And where their attempts that moved the state began.
        self._handed_out_to: dict[str, dict[int, set[CheckpointRef | None]]] = {}
        # The plan whose calls came last, which has the lease; and names of query folders that somebody copies from.
        self._owner = ""
        self.held_folders: set[str] = set()
        # The model by checkpoint, whatever else pointers say.
        self._states: dict[CheckpointRef, Model] = {}
        self._alone = self._steady = False
        self._plans, self._markers, self.savepoints = itertools.count(1), itertools.count(1), itertools.count(1)
        super().__init__(config, variant, self.shared.name)
        self.configured = ["a", "b"] if config.two else ["a"]
        self.operator = self.shared.root("a").child(OPERATOR)
        first = OperatorFile(OPERATOR, "q0", config.buckets, KEY_SCHEMA, STATE_SCHEMA)
        self.operator.child("q0").put(operator_file_name(0), first.encode())
        self.onlookers = Onlookers(self)
        self.job = self._planned_with(config.buckets)

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
        if pointer.parents is None or self._alone:
            return ()
        self._origins.append(self.origin(pointer))
        return (self._origins[-1],)

    def origin(self, pointer: Pointer) -> Origin:
        """What a rescaled bucket began with."""
        backends, schema = self.shared.backends(self.configured), self.job.operator_file("").row_schema()
        found = find_origin(backends, pointer, BucketMap(pointer.buckets), schema, self.folder)
        assert found is not None, "it needs its parents"
        return found

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """What is opened in the meantime is closed."""
        before, self._origins = self._origins, []
        try:
            yield
        finally:
            for origin in self._origins:
                origin.close()
            self._origins = before

    def finish(self, attempt: PlannedAttempt, pointer: Pointer, numbers: Numbers) -> None:
        """What a call of the first bucket does about old folders and parents, by its input pointer."""
        job, executor = attempt.planned, self.executors[attempt.executor]
        self._process(executor).finishing.in_turn(
            operator_folders(job),
            pointer.query_folder,
            job.plan_id,
            pointer,
            self.config.retained,
            lambda: self._check_ours(job),
            lambda name: name in self.held_folders,
            Removals(self, executor, numbers, not (self._calm or self._steady)),  # type: ignore[arg-type]
        )

    def put_in_force(self, attempt: PlannedAttempt, pointer: Pointer, numbers: Numbers) -> None:
        """What a call of the first bucket writes down, beside the batch, of the folder that it was handed a pointer of."""
        job, process = attempt.planned, self._process_of(attempt)
        if (pointer.query_folder, job.plan_id) in process.in_force:
            return
        happens = "" if self._calm or self._steady else ("dies", "fails", "", "")[numbers.below(4)]
        try:
            with set_trap(Trap(numbers.below(4), happens)) if happens else nullcontext():
                folder_in_force.put_in_force(
                    operator_folders(job), pointer.query_folder, job.plan_id, lambda: self._check_ours(job)
                )
        except (LiveRunError, StorageError):
            # It is logged, and done in the next turn.
            self.counted["folders not put in force at once"] += 1
            return
        process.in_force.add((pointer.query_folder, job.plan_id))

    def _check_ours(self, job: Job) -> None:
        """The lease: who runs a plan that is over has lost it to the one that came after."""
        if self._owner != job.plan_id:
            raise LiveRunError("another run has taken the state over")

    def _noted(
        self, attempt: PlannedAttempt, pointer: Pointer, made: tuple[CommitResult, Committer], numbers: Numbers
    ) -> tuple[CommitResult, Committer]:
        """What a call hands over, once it is noted that its bucket needs no parents."""
        if pointer.parents is None:
            return made
        if attempt.batch <= self.spark.oldest:
            # Nobody is at work for longer at a batch that Spark does not retain.
            self.counted["late calls that note nothing"] += 1
            raise _FailedError
        others = (it.child(pointer.query_folder) for it in operator_folders(attempt.planned))
        folders, finishing = [self.origin(pointer).query_folder, *others], self._process_of(attempt).finishing
        try:
            with self._troubled(attempt, numbers, beside=False):
                handed_over = finishing.noted(
                    folders, pointer, made[0].pointer, lambda: self._check_ours(attempt.planned)
                )
        except LiveRunError:
            self.counted["late calls that note nothing"] += 1
            raise _FailedError from None
        self.counted["buckets that need no parents"] += handed_over.parents is None
        return replace(made[0], pointer=handed_over), made[1]

    def _process_of(self, attempt: PlannedAttempt) -> _Process:
        return self._process(self.executors[attempt.executor])

    def _adjust_clean_up(self, executor: Executor, request: CleanUp, numbers: Numbers) -> CleanUp:
        """It leaves alone what somebody copies from."""
        return replace(request, held=lambda: request.pointer.query_folder in self.held_folders)

    # -- plans -------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """How many buckets the state has that is committed."""
        return _count(self.spark.at(self.batch))

    def _planned_with(self, count: int) -> Job:
        """The query is planned, which has Spark read the pointers of its last batch where these are of other buckets."""
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
        pointers = {bucket: held.pointer for bucket, held in self.spark.at(self.batch).items()}
        self._known[plan_id] = pointers
        name = make_captured_name(number, plan_id)
        captured = Captured(OPERATOR, self.batch, (), "", 0, dict(sorted(pointers.items())))
        self.operator.child(STARTING_FOLDER).put(name, captured.encode())
        return replace(job, rescaled_from=name, rescaled_buckets=self.count)

    def _starts(self, count: int) -> None:
        """The query starts again; before its first batch it has no state that could be rescaled."""
        self.job = self._planned_with(count if self.batch >= 0 and not self._is_refused(count) else self.count)
        # Attempts of the run before do not count any more.
        self._beside.clear()

    def _is_refused(self, count: int) -> bool:
        """Whether the plan finds that it cannot rescale the query."""
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
        self._starts(self.count if numbers.yes() else COUNTS[numbers.below(len(COUNTS))])

    def _rescale(self, numbers: Numbers) -> None:
        self._begin_anew(numbers)
        others = [count for count in COUNTS if count != self.count]
        self._starts(others[numbers.below(len(others))])
        # What comes between the plan and the first batch with data.
        after = numbers.below(4)
        if after == 0:
            self._gap(numbers)
        elif after == 1:
            self._zombie(numbers)

    def _begin_anew(self, numbers: Numbers) -> None:
        """The query ends and starts again where it was; processes may live on."""
        self.start()
        for executor in self.executors:
            executor.loaded.clear()
            if numbers.yes():
                executor.die()

    def _switch(self, numbers: Numbers) -> None:
        """Other backends: such that one of them holds what Spark may hand out, or those that there were and others."""
        before = list(self.configured)
        super()._switch(numbers)
        wanted = (["a", "b"], ["b", "a"])[numbers.below(2)]
        if self.configured == before and set(before) <= set(wanted):
            self.configured = wanted
        self.counted["switches of backends"] += self.configured != before
        self._starts(self.job.options.buckets)

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
        self._beside.clear()
        self.counted["killed in a first batch"] += heartbeat and self.count != self.job.options.buckets
        self._begin_anew(numbers)
        counts = (self.count, self.count, self.job.options.buckets, COUNTS[numbers.below(len(COUNTS))])
        self._starts(counts[numbers.below(4)])

    def _savepoint(self, numbers: Numbers) -> None:
        if self.batch >= 0:
            save_and_start(self, numbers)

    def _ask(self, numbers: Numbers) -> None:
        self.onlookers.ask(numbers)

    def _read(self, numbers: Numbers) -> None:
        self.onlookers.read()

    def root_has(self, pointer: Pointer) -> bool:
        """Whether all of a bucket's state is with the query's root, the parents that it needs included."""
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

    def _process(self, executor: Executor) -> _Process:
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
        bucket_map = self.job.options.bucket_map if heartbeat else BucketMap(_count(partition))
        calls: dict[int, Call] = {}
        # Tasks run side by side, so that any label's call may come first.
        begins = numbers.below(bucket_map.buckets)
        for bucket in (*range(begins, bucket_map.buckets), *range(begins)):
            held = partition.get(bucket)
            if not heartbeat and (held is None or held.due_ms is None or held.due_ms >= now_ms):
                continue
            changes = {} if quiet else draw_changes_of_bucket(numbers, bucket_map, bucket)
            timeout_ms = now_ms + numbers.below(60) if self.config.timeouts and numbers.yes() else None
            calls[bucket] = Call(changes, timeout_ms)
        cleans = numbers.yes() if cleans is None else cleans
        return PlannedAttempt(executor, batch, partition, calls, cleans, heartbeat, self.switches, now_ms, job=self.job)

    def _run_until_success(self, attempt: Attempt, numbers: Numbers) -> TaskResult:
        attempt = replace(attempt, run=attempt.run or self.stage())
        for _ in range(STARTS_MAX):
            steady, self._steady = self._steady, True
            try:
                made = self._run(attempt, None, numbers)
            finally:
                self._steady = steady
            if made is not None and _groups(made, self.config.partitions) == set(range(self.config.partitions)):
                return made
            # Whoever is refused, or mends what failed, starts the query again.
            self._begin_anew(numbers)
            self._starts(self.job.options.buckets)
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
                if attempt.heartbeat and _count(attempt.partition) != attempt.planned.options.buckets:
                    return self._run_moving(attempt, fault, numbers, zombie)
                return super()._run(attempt, fault, numbers, zombie)
        except _RefusedError:
            self.counted["calls refused"] += 1
            return None
        except _FailedError:
            return None
        finally:
            if attempt.planned.plan_id != self.job.plan_id:
                # What a run that is over has in memory, the next one does not go on from.
                executor.loaded = {b: it for b, it in executor.loaded.items() if before.get(b) is it}

    def _run_moving(
        self, attempt: PlannedAttempt, fault: Fault | None, numbers: Numbers, zombie: bool
    ) -> MovedResult | None:
        """A task for each partition: some may succeed and others fail."""
        handed_out, executor, at = attempt.partition, self.executors[attempt.executor], attempt.batch
        seen = self._handed_out_to.setdefault(attempt.planned.plan_id, {})
        for bucket, held in handed_out.items():
            seen.setdefault(bucket, set()).add(held.pointer.ref)
        before, owner = executor.loaded.get(at), executor.uploads.owner
        made: dict[int, TaskResult] = {}
        for number in range(self.config.partitions):
            calls = {b: call for b, call in attempt.calls.items() if b % self.config.partitions == number}
            task = replace(attempt, calls=calls, partition=self._stateless(attempt, calls), handed_out=handed_out)
            try:
                ended = self._ended(task, number)
                if attempt.cleans:
                    self._give(task, ended, numbers)
                done = super()._run(task, fault, numbers, zombie)
                if done is not None and not attempt.cleans:
                    self._give(task, ended, numbers)
            except _RefusedError:
                self.counted["calls refused"] += 1
            except _FailedError:
                pass
            except DiedError:
                executor.die()
            else:
                if done is not None:
                    made[number] = replace(done, called=done.called | {*ended}, removed=frozenset(ended))
        whole_attempt = len(made) == self.config.partitions and executor.uploads.owner == owner
        partition = {b: held for task in made.values() for b, held in task.partition.items()}
        if executor.uploads.owner == owner and (whole_attempt or before is not None):
            executor.load(at, partition if whole_attempt or before is None else before)
        else:
            executor.loaded.pop(at, None)
        if not made:
            return None
        self.counted["moves"] += 1
        return MovedResult(
            partition,
            frozenset().union(*(task.called for task in made.values())),
            frozenset().union(*(task.removed for task in made.values())),
            handed_out,
            {bucket: call.changes for bucket, call in attempt.calls.items()},
            frozenset(made),
            attempt.planned.plan_id,
        )

    def _ended(self, task: PlannedAttempt, number: int) -> list[int]:
        """Labels of a partition that are no more."""
        assert task.handed_out is not None
        count = task.planned.options.buckets
        return [b for b in sorted(task.handed_out) if b >= count and b % self.config.partitions == number]

    def _stateless(self, attempt: PlannedAttempt, buckets: Iterable[int]) -> dict[int, BucketState]:
        """In the place of pointers that buckets have not yet."""
        count, marker = attempt.planned.options.buckets, next(self._markers)
        made = {}
        for bucket in buckets:
            pointer = Pointer(OPERATOR, bucket, count, 0, -1, None, calls=marker)
            self.models[pointer.encode()] = {}
            made[bucket] = BucketState(pointer)
        return made

    def _call(
        self, attempt: Attempt, number: int, run: Run, fault: Fault | None, numbers: Numbers
    ) -> tuple[CommitResult, Committer]:
        assert isinstance(attempt, PlannedAttempt)
        if attempt.handed_out is not None:
            return self._first_call(attempt, number, run, fault, numbers)
        pointer = attempt.partition[number].pointer
        self._owner = self.job.plan_id if attempt.planned is self.job else self._owner
        made = super()._call(attempt, number, run, fault, numbers)
        made = self._noted(attempt, pointer, made, numbers)
        self._note_state(made[0].pointer, pointer, attempt.calls[number])
        if number == 0 and pointer.batch >= 0:
            self.put_in_force(attempt, pointer, numbers)
            self.finish(attempt, pointer, numbers)
        rescaling = self._process(self.executors[attempt.executor]).starts.rescaling(attempt.planned, number, pointer)
        if rescaling is not None:
            # The batch has no data, and goes on as before.
            rescaling.note(made[0].pointer)
            self._known[attempt.planned.plan_id][number] = made[0].pointer
            self.counted["pointers noted"] += 1
        return made

    def _note_state(self, made: Pointer, before: Pointer, call: Call) -> None:
        if made.ref is not None:
            self._states[made.ref] = apply_changes(self.models[before.encode()], call.changes)

    def _first_call(
        self, attempt: PlannedAttempt, number: int, run: Run, fault: Fault | None, numbers: Numbers
    ) -> tuple[CommitResult, Committer]:
        self._owner = self.job.plan_id if attempt.planned is self.job else self._owner
        begun, model = self._begun(attempt, number, numbers)
        stateless = attempt.partition[number].pointer
        self.models[begun.encode()] = self.models[stateless.encode()] = model
        partition = {**attempt.partition, number: BucketState(begun)}
        made = super()._call(replace(attempt, partition=partition), number, run, fault, numbers)
        made = self._noted(attempt, begun, made, numbers)
        self._note_state(made[0].pointer, begun, attempt.calls[number])
        return made

    def _give(self, attempt: PlannedAttempt, ended: Sequence[int], numbers: Numbers) -> None:
        """Calls of buckets that are no more."""
        for bucket in ended:
            with self._troubled(attempt, numbers):
                self._rescaling(attempt, bucket).give(Shared.of(Worker.current()).replicas, self.folder)

    def _begun(self, attempt: PlannedAttempt, number: int, numbers: Numbers) -> tuple[Pointer, Model]:
        """As `going_on.decide` and `opening.open_bucket`, but for the lease; with the state of what was brought.

        Whether that is what Spark hands out is seen when all tasks are over.
        """
        assert attempt.handed_out is not None
        job, catalog = attempt.planned, self._process(self.executors[attempt.executor]).catalog
        with self._troubled(attempt, numbers):
            rescaling, replicas = self._rescaling(attempt, number), Shared.of(Worker.current()).replicas
            rescaling.give(replicas, self.folder)
            state = rescaling.initial_state()
            folder = state.pointer.query_folder
            wanted = state.begins(job, folder)
            with set_trap(Trap(-1, "")):
                # It is done by one thread of a process at a time.
                operator = catalog.admit(self.operator, wanted, False, with_state=True)
            begun, _ = begin_bucket(state, job, self.operator, folder, replicas, self.folder)
            begun = replace(begun, schema_id=operator.schema_id)
        stored, bucket_map = BucketMap(_count(attempt.handed_out)), job.options.bucket_map
        overlapping = _overlapping(bucket_map, stored, number)
        parents = [attempt.handed_out[it].pointer for it in overlapping]
        self.counted["parents without a snapshot of their own"] += any(it.parents is not None for it in parents)
        brought = [read_parent(self._new_folder(job), it) for it in overlapping]
        refs = [it.pointer.ref for it in brought if it is not None]
        due = [it.pointer.earliest_timeout_ms for it in brought if it is not None]
        earliest_ms = min((it for it in due if it is not None), default=None)
        if begun.earliest_timeout_ms != earliest_ms:
            raise WrongStateError(f"bucket {number} begins without the timeouts that are due at {earliest_ms}")
        return begun, select_rows(
            merge_models(self._states[ref] for ref in refs if ref is not None), bucket_map, number
        )

    def _new_folder(self, job: Job) -> Folder:
        """Where a plan has parents brought."""
        root = Folder(job.options.backends[0].root, job.options.backends[0].storage_options)
        return root.child(OPERATOR, make_rescaled_name("q0", job.plan_id))

    def _rescaling(self, attempt: PlannedAttempt, bucket: int) -> Rescaling:
        assert attempt.handed_out is not None
        held = attempt.handed_out.get(bucket)
        starts = self._process(self.executors[attempt.executor]).starts
        rescaling = starts.rescaling(attempt.planned, bucket, None if held is None else held.pointer)
        if rescaling is None:
            raise WrongStateError(f"bucket {bucket} is not moved, and its state is of other buckets")
        return rescaling

    @contextmanager
    def _troubled(self, attempt: PlannedAttempt, numbers: Numbers, beside: bool = True) -> Iterator[None]:
        """What a call does may stop, fail or die at any change to a file; other attempts run beside it, or none do."""
        trap = None
        if not self._calm and not self._steady:
            happens = ("dies", "fails", *["waits"] * 4, *[""] * 6)[numbers.below(12)]
            if happens:
                trap = Trap(
                    numbers.below(6) if beside else numbers.below(2),
                    happens,
                    lambda: self._meanwhile(attempt, numbers) if beside else self._work(numbers),
                )
        try:
            with set_trap(trap) if trap else nullcontext():
                yield
        except LineageError as error:
            self._check_refused(attempt, error)
            raise _RefusedError from error
        except ChangedJobError as error:
            # Somebody has asked for a key to be erased since the query was planned.
            self.counted["calls refused for a request"] += 1
            raise _RefusedError from error
        except StorageError as error:
            raise _FailedError from error

    def _meanwhile(self, attempt: PlannedAttempt, numbers: Numbers) -> None:
        """While a call stands still, another attempt at its task runs, or what waits in backgrounds is done."""
        self.counted["calls that stood still"] += 1
        if numbers.below(4) == 0:
            with set_trap(Trap(-1, "")):
                self.onlookers.ask(numbers)
                self.onlookers.read()
        if numbers.yes() or attempt.planned is not self.job or attempt.batch != self.batch + 1:
            self._work(numbers)
            return
        self._steady = True
        try:
            with set_trap(Trap(-1, "")):
                again = self._attempt(
                    numbers.below(EXECUTORS), attempt.batch, attempt.heartbeat, attempt.now_ms, numbers
                )
                made = self._run(replace(again, run=attempt.run), None, numbers)
        finally:
            self._steady = False
        if made is not None:
            self._beside.append((attempt.batch, made))

    def _zombie(self, numbers: Numbers) -> None:
        if not self.sleeping:
            return
        attempt = self.sleeping.pop(numbers.below(len(self.sleeping)))
        made = self._run(attempt, None, numbers, zombie=True)
        if made is None or self.config.checkpoint_v2 or not self.config.last_wins or attempt.batch > self.batch:
            return
        late = [it for it in range(self.config.partitions) if numbers.yes()]
        labels = {bucket for bucket in made.called | made.partition.keys() if bucket % self.config.partitions in late}
        self.spark.overwrite(attempt.batch, restrict_to(made, labels))

    def _commit(self, batch: int, done: Sequence[TaskResult], numbers: Numbers) -> None:
        done = self._complete(batch, [*(made for of, made in self._beside if of == batch), *done], numbers)
        self._beside.clear()
        parts = []
        for number in range(self.config.partitions):
            made = self._chosen([it for it in done if number in _groups(it, self.config.partitions)], numbers)
            labels = made.called | made.partition.keys()
            parts.append(restrict_to(made, {bucket for bucket in labels if bucket % self.config.partitions == number}))
        self._check_moved(batch, parts)
        self.spark.times_ms[batch] = self.planned[batch][1]
        self.spark.commit(
            batch,
            TaskResult(
                {bucket: held for part in parts for bucket, held in sorted(part.partition.items())},
                frozenset().union(*(part.called for part in parts)),
                frozenset().union(*(part.removed for part in parts)),
            ),
        )
        self.onlookers.commit(batch, data=self.planned[batch][0])

    def _complete(self, batch: int, done: list[TaskResult], numbers: Numbers) -> list[TaskResult]:
        """Attempts of the query as it was planned last, of which some task of each partition succeeded."""
        number = self.config.partitions
        mine = [it for it in done if not isinstance(it, MovedResult) or it.plan_id == self.job.plan_id]
        if {group for it in mine for group in _groups(it, number)} == set(range(number)):
            return mine
        heartbeat, now_ms = self.planned[batch]
        made = self._run_until_success(
            self._attempt(numbers.below(EXECUTORS), batch, heartbeat, now_ms, numbers), numbers
        )
        return self._complete(batch, [*mine, made], numbers)

    def _chosen(self, done: Sequence[TaskResult], numbers: Numbers) -> TaskResult:
        if self.config.checkpoint_v2:
            return done[numbers.below(len(done))]
        return done[-1] if self.config.last_wins else done[0]

    # -- checks ------------------------------------------------------------------------------------

    def _check_moved(self, batch: int, parts: Sequence[TaskResult]) -> None:
        """The state that is moved is what Spark had handed to those attempts that count."""
        moved = [part for part in parts if isinstance(part, MovedResult)]
        if not moved:
            return
        number = len(parts)
        handed_out = {
            bucket: held
            for at, part in enumerate(moved)
            for bucket, held in part.handed_out.items()
            if bucket % number == at
        }
        total = merge_models(self.models[held.pointer.encode()] for held in handed_out.values())
        self.counted["batches that moved the state"] += 1
        self.counted["moved by several attempts"] += len({id(part.handed_out) for part in moved}) > 1
        for part in moved:
            for bucket, held in part.partition.items():
                before = select_rows(total, BucketMap(held.pointer.buckets), bucket)
                expected, found = apply_changes(before, dict(part.changes[bucket])), self.models[held.pointer.encode()]
                if found != expected:
                    raise WrongStateError(f"batch {batch} moved {found} to bucket {bucket}, and should have {expected}")

    def _check_refused(self, attempt: PlannedAttempt, error: LineageError) -> None:
        """Whoever is refused was handed out something else than what the plan knows, or than another attempt was.

        Or is late, and what the query was is removed.
        """
        assert attempt.handed_out is not None
        job = attempt.planned
        if attempt.batch <= self.batch and isinstance(error.__cause__, MissingCheckpointError):
            self.counted["late calls that find nothing to begin with"] += 1
            return
        known, seen = self._known[job.plan_id], self._handed_out_to[job.plan_id]
        folder = self._new_folder(job)
        for bucket, held in attempt.handed_out.items():
            there = read_parent(folder, bucket)
            others = there is not None and there.pointer.ref in seen[bucket] - {known[bucket].ref}
            if others or held.pointer.ref != known[bucket].ref:
                return
        raise WrongStateError(f"a call is refused that goes on from what its plan knows: {error}") from error

    def _check_drawn_rows(self, partition: Partition, batch: int) -> None:
        """Each key is in its bucket, and every bucket is there."""
        bucket_map = BucketMap(_count(partition))
        if partition.keys() != set(range(bucket_map.buckets)):
            raise WrongStateError(f"after batch {batch} there are the buckets {sorted(partition)} of {bucket_map}")
        for bucket, held in partition.items():
            model = self.models[held.pointer.encode()]
            if select_rows(model, bucket_map, bucket) != model:
                raise WrongStateError(f"after batch {batch} bucket {bucket} has the keys {sorted(model)}")

    def check(self, bucket: int | None = None, backend: str | None = None) -> None:
        """As `World.check`. Files that came meanwhile take nothing away from what was there before."""
        self._checked.clear()
        super().check(bucket, backend)

    def step(self, step: bytes) -> None:
        """Take one step, and look at what Spark may hand out."""
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
        # A backend that says to hold all of it does so without the parents.
        self._alone = any(is_complete(pointer.replication.get(name)) for name in names)
        try:
            with self._reading():
                super()._check_on(store, pointer, names)
        finally:
            self._alone = False

    def total(self) -> Model:
        """All of the state that is committed."""
        return merge_models(self.models[held.pointer.encode()] for held in self.spark.at(self.batch).values())

    @property
    def files_left_max(self) -> int:
        # Clean-up begins late, and takes its turns over more buckets; each batch leaves a delta and perhaps a snapshot.
        return super().files_left_max + 4 * 2 * len(self.configured)

    def calm(self) -> None:
        super().calm()
        for held in self.spark.at(self.batch).values():
            if held.pointer.parents is not None:
                raise WrongStateError(f"bucket {held.pointer.bucket} still needs {held.pointer.parents}")
        check_nothing_is_left(self)
        self.onlookers.check_calm()


def _groups(made: TaskResult, partitions: int) -> frozenset[int]:
    """Partitions of which an attempt's task succeeded."""
    return made.groups if isinstance(made, MovedResult) else frozenset(range(partitions))


def _count(partition: Partition) -> int:
    counts = {held.pointer.buckets for held in partition.values()}
    if len(counts) != 1:
        raise WrongStateError(f"the state is of {counts} buckets")
    return counts.pop()


def patch_for_rescaling(variant: Variant) -> AbstractContextManager[None]:
    """What is put in the place of threads, of folders' methods, and of what is broken."""
    return replace_attributes(
        [
            *list_removal_patches(),
            *list_trap_patches(),
            (resolution, "map_in_parallel", map_one_by_one),
            *variant.patches,
        ]
    )


def simulate_rescales(history: History, variant: Variant = DEFAULT) -> RescaleWorld:
    """Run a history to its end; raises `WrongStateError` when anything is.

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
