"""A simulated world for the buckets of one partition: Spark's driver, both checkpoint formats, executors and failures.

Buckets, LMDB stores and checkpoint files (in an object store in memory) are the product's; the world around them is
simulated. A history is a plain value: a configuration and a list of steps. Each step is a few small numbers, which are
taken modulo the number of choices. So any list of numbers is a history, and a history that fails can be printed,
shortened and run again.

The model keeps a dict for every pointer that was ever made: the state that its writer had. If the partition has several
buckets, each attempt at a batch with data gives that batch's row to a random bucket. In whatever Spark hands out, the
row must be in exactly one bucket.
"""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from sim_failures import Failures
from sim_parts import (
    CADENCE,
    KEYS,
    SCHEMA,
    Attempt,
    BucketState,
    Call,
    Config,
    Executor,
    History,
    Machine,
    Model,
    Numbers,
    Partition,
    Step,
    Variant,
    WrongStateError,
    apply_changes,
    buffer_changes,
    draw_changes,
    scan_rows,
)
from sim_search import replace_attributes
from sim_spark import StateFiles, TaskResult
from sim_stores import DiedError, Fault, FaultyFolder, die_here, fail_here, open_folder

from arrow_schemas import CheckpointRef, Pointer, Writer
from arrow_schemas.lineage import SNAPSHOT, file_name, parse_file_name
from arrow_schemas.pointer import ReplicationStatus
from spark_state_ext.backends import STATE, CleanUp
from spark_state_ext.backends import files as files_module
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.backends.replication import Replica, Restorable, is_complete
from spark_state_ext.commit.committer import Committer
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.commit.decisions import CommitOptions
from spark_state_ext.commit.failures import Run
from spark_state_ext.commit.uploads import Upload, WorkerUploads
from spark_state_ext.engine import bucket as bucket_module
from spark_state_ext.engine.aligned_timeouts import has_nothing_due
from spark_state_ext.engine.bucket import Bucket, CommitResult
from spark_state_ext.errors import (
    CorruptError,
    LiveRunError,
    LostFilesError,
    MissingCheckpointError,
    StateError,
    StorageError,
    UploadFailedError,
)
from spark_state_ext.files import checkpoint, retention
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.horizon import recent_heartbeats
from spark_state_ext.restore import loader
from spark_state_ext.restore.load_plan import Fetch
from spark_state_ext.store import LocalStore
from spark_state_ext.worker.background import Inline

EXECUTORS = 3
# A time at which every file is old enough to be deleted.
NOW_S = 4e9
# Rows that attempts draw are distinguished by their batch, modulo this.
DRAWN = 4
# So many starts after a failure are enough to succeed, even if all runs have one identity.
STARTS_MAX = 3
FIRST_BUCKET = 3

STEPS = (
    "batch",  # one or several attempts at the next batch, some of which die or fall asleep
    "batch",
    "batch",
    "batch",
    "twice",  # some batches that two executors both run, as with two actions in foreachBatch
    "twice",
    "quiet",  # a batch without changes
    "gap",  # batches in which the bucket is not called
    "work",  # an executor works on what waits in its background
    "work",
    "zombie",  # an attempt of an earlier batch wakes up
    "restart",  # the query starts again, at any batch that Spark retains
    "lose disk",  # a machine loses its local disk
    "lose memory",  # an executor's processes die: loaded partitions and waiting work are lost
    "damage",  # a snapshot is damaged
    "switch",  # the query starts again with other backends
    "raid",  # all files in a backend are deleted
)


DEFAULT = Variant()


class World:
    """The simulated world; the numbers of steps decide what Spark does.

    Parameters
    ----------
    config
        Configuration of the history.
    variant
        What is under test.
    name
        Name of its folder in memory, if it is shared with another world.
    """

    # The kind of a step by its first number.
    kinds: ClassVar[tuple[str, ...]] = STEPS
    # Hashes by key; None if they follow from the keys.
    hashes: ClassVar[Mapping[int, int] | None] = None

    def __init__(self, config: Config, variant: Variant = DEFAULT, name: str = "") -> None:
        self.config = config
        self._variant = variant
        self._name = name or uuid.uuid4().hex
        self.buckets = self._list_bucket_numbers()
        # Two backends, of which one or both are configured.
        homes = {
            name: self._locate_query(open_folder(f"{self._name}/{name}", replaces=config.replaces))
            for name in ("a", "b")
        }
        self.folders = {name: {b: home.child(str(b)) for b in self.buckets} for name, home in homes.items()}
        self.files = self.folders["a"][self.buckets[0]]
        self.configured = ["a"]
        # What clean-ups know about files.
        self.known_files = retention.KnownFiles()
        self.switches = 0
        # By backend, pointers whose replication status is no longer true because files were deleted.
        self.outdated: dict[str, set[bytes]] = {name: set() for name in self.folders}
        # The heartbeat at which a bucket's lost files in a backend were noted on a machine's disk.
        self.known_losses: dict[tuple[Path, int, int, str], int] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="simulation-"))
        machines = [Machine(self.folder / str(i)) for i in range(EXECUTORS)]
        if config.one_disk:
            machines[1] = machines[0]
        self.executors: list[Executor] = []
        self.executors += [Executor(machine, self.executors, config.buckets) for machine in machines]
        first = {b: BucketState(self._make_first_pointer(b)) for b in self.buckets}
        self.spark = self._make_state_files(first)
        # The model state of every pointer.
        self.models: dict[bytes, Model] = {state.pointer.encode(): {} for state in first.values()}
        # Pointers without state, which cannot be lost.
        self.empty = set(self.models)
        # By planned batch: whether it has data, and its processing time in milliseconds.
        self.planned: dict[int, tuple[bool, int]] = {}
        self.sleeping: list[Attempt] = []
        self.damaged: set[str] = set()
        self.stages, self.starts = itertools.count(), itertools.count()
        self.run_id, self.start_count = "", 0
        self.start()
        self.failures = Failures()
        self.deleted = 0
        self.commits = 0
        self._calm = False
        # The run's name, if each run begins with a probe for lost files.
        self.probing_run = ""

    def _list_bucket_numbers(self) -> range:
        """Return the numbers of the partition's buckets."""
        return range(FIRST_BUCKET, FIRST_BUCKET + self.config.buckets)

    def _get_folder(self, name: str, pointer: Pointer) -> Folder:
        """Return a backend's folder with the files of a pointer's bucket."""
        return self.folders[name][pointer.bucket]

    def _get_store(self, machine: Machine, pointer: Pointer) -> LocalStore:
        """Return a machine's local store of a pointer's bucket."""
        return machine.open_store(pointer.bucket)

    def _list_sources(self, pointer: Pointer) -> Sequence[Restorable]:
        """Return additional sources of a pointer's state."""
        return ()

    def _locate_query(self, root: Folder) -> Folder:
        """Return the query's folder in a backend."""
        return root

    def _make_first_pointer(self, bucket: int) -> Pointer:
        """Return the pointer that Spark holds of a bucket before the first batch."""
        return Pointer("simulated", bucket, 8, 0, -1, None)

    def _make_state_files(self, first: Partition) -> StateFiles:
        return StateFiles(self.config, first)

    @property
    def batch(self) -> int:
        """The newest committed batch."""
        return self.spark.batch

    def close(self) -> None:
        """Remove everything."""
        self._close_machines()
        memory = fsspec.filesystem("memory")
        if memory.exists(f"/{self._name}"):
            memory.rm(f"/{self._name}", recursive=True)

    def _close_machines(self) -> None:
        for executor in self.executors:
            executor.machine.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        """Start the query again."""
        self.start_count += 1
        if not (self.run_id and self.config.same_run):
            self.run_id = f"run {next(self.starts)}"

    def stage(self) -> Run:
        """Return the identity of the next stage, which distinguishes its attempts from all others."""
        return Run(self.run_id, next(self.stages))

    # -- steps -------------------------------------------------------------------------------------

    def step(self, step: Step) -> None:
        """Take one step."""
        numbers = Numbers(step)
        kind = self.kinds[numbers.below(len(self.kinds))]
        getattr(self, f"_{kind.replace(' ', '_')}")(numbers)

    def _batch(self, numbers: Numbers) -> None:
        """Run attempts at the next batch one after the other, as many as the numbers ask for."""
        batch = self.batch + 1
        heartbeat, now_ms = self._plan(batch, numbers.below(4) > 0, numbers)
        results: list[TaskResult] = []
        run = self.stage()
        for _ in range(1 + numbers.below(3)):
            executor = numbers.below(EXECUTORS)
            # Attempts are not deterministic: each one makes its own changes.
            attempt = replace(self._attempt(executor, batch, heartbeat, now_ms, numbers), run=run)
            fate = numbers.below(6)
            if fate == 0:
                self.sleeping.append(attempt)
                continue
            result = self._run(attempt, self._draw_fault(numbers, run) if fate < 3 else None, numbers)
            if result is not None:
                results.append(result)
        if not results:
            # The driver tries until one succeeds.
            executor = numbers.below(EXECUTORS)
            attempt = self._attempt(executor, batch, heartbeat, now_ms, numbers, cleans=True)
            results.append(self._run_until_success(replace(attempt, run=run), numbers))
        self._commit(batch, results, numbers)

    def _twice(self, numbers: Numbers) -> None:
        """Run batches on two executors that continue from memory: under format 1 two lineages continue in parallel."""
        busy = numbers.yes()
        for _ in range(1 + numbers.below(5) * numbers.below(4)):
            batch = self.batch + 1
            heartbeat, now_ms = self._plan(batch, numbers.below(4) > 0, numbers)
            results = []
            for executor in (0, 2):
                if executor and not heartbeat and not busy and not self._has_planned_calls:
                    # No timeout calls its state.
                    results.append(self._idle(executor, batch))
                    continue
                quiet = not busy and executor > 0
                attempt = self._attempt(executor, batch, heartbeat, now_ms, numbers, quiet=quiet)
                result = self._run(attempt, None, numbers)
                if result is not None:
                    results.append(result)
            if not results:
                return
            self._commit(batch, results, numbers)
            for executor in (0, 2):
                if numbers.yes():
                    self._work(numbers, executor)

    def _quiet(self, numbers: Numbers) -> None:
        batch = self.batch + 1
        heartbeat, now_ms = self._plan(batch, True, numbers)
        attempt = self._attempt(numbers.below(EXECUTORS), batch, heartbeat, now_ms, numbers, quiet=True, cleans=True)
        self._commit(batch, [self._run_until_success(attempt, numbers)], numbers)

    def _gap(self, numbers: Numbers) -> None:
        """Run batches without data: Spark's tasks carry buckets that are not called from one version to the next."""
        both = numbers.yes()
        for _ in range(1 + numbers.below(8)):
            batch = self.batch + 1
            heartbeat, now_ms = self._plan(batch, False, numbers)
            results = []
            for executor in (0, 2) if both else (numbers.below(EXECUTORS),):
                if not self._has_planned_calls:
                    results.append(self._idle(executor, batch))
                    continue
                result = self._run_until_success(self._attempt(executor, batch, heartbeat, now_ms, numbers), numbers)
                results.append(result)
            self._commit(batch, results, numbers)

    def _idle(self, executor: int, batch: int) -> TaskResult:
        """Run a task that calls no bucket."""
        partition = self._hand_out(executor, batch)
        self.executors[executor].load(batch, partition)
        return TaskResult(partition, frozenset())

    @property
    def _has_planned_calls(self) -> bool:
        """Whether data and timeouts decide which buckets are called; otherwise chance does."""
        return self.config.buckets > 1 or self.config.timeouts

    def _plan(self, batch: int, heartbeat: bool, numbers: Numbers) -> tuple[bool, int]:
        """Decide what Spark's log says before a batch begins: whether it has data, and its processing time."""
        if not (self._has_planned_calls or self.config.erase_window_ms):
            return heartbeat, 0
        if batch not in self.planned:
            newest_ms = self.planned[max(self.planned)][1] if self.planned else 0
            # Clocks are set back now and then.
            step_ms = -25 if numbers.below(16) == 0 else numbers.below(20)
            if self.config.erase_window_ms and numbers.below(8) == 0:
                # The stream paused for a while.
                step_ms *= 20
            self.planned[batch] = heartbeat, newest_ms + step_ms
        return self.planned[batch]

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
    ) -> Attempt:
        """Make an attempt at a batch's task; with `quiet` it only changes drawn rows."""
        partition = self._hand_out(executor, batch)
        calls: dict[int, Call] = {}
        drawing_index = numbers.below(len(self.buckets)) if self.config.buckets > 1 and heartbeat else -1
        for index, (bucket, state) in enumerate(partition.items()):
            due = state.due_ms is not None and state.due_ms < now_ms
            if self._has_planned_calls and not (heartbeat or due):
                continue
            changes = {} if quiet else draw_changes(numbers)
            if drawing_index >= 0:
                changes[KEYS + batch % DRAWN] = batch if drawing_index == index else None
            timeout_ms = now_ms + numbers.below(60) if self.config.timeouts and numbers.yes() else None
            calls[bucket] = Call(changes, timeout_ms)
        cleans = numbers.yes() if cleans is None else cleans
        return Attempt(executor, batch, partition, calls, cleans, heartbeat, self.switches, now_ms)

    def _commit(self, batch: int, results: Sequence[TaskResult], numbers: Numbers) -> None:
        if self.config.checkpoint_v2:
            chosen = results[numbers.below(len(results))]
        else:
            chosen = results[-1] if self.config.last_wins else results[0]
        if batch in self.planned:
            self.spark.times_ms[batch] = self.planned[batch][1]
        self.spark.commit(batch, chosen)

    def _zombie(self, numbers: Numbers) -> None:
        if not self.sleeping:
            return
        attempt = self.sleeping.pop(numbers.below(len(self.sleeping)))
        result = self._run(attempt, None, numbers, zombie=True)
        if (
            result is not None
            and not self.config.checkpoint_v2
            and self.config.last_wins
            and attempt.batch <= self.batch
        ):
            self.spark.overwrite(attempt.batch, result)

    def _work(self, numbers: Numbers, which: int | None = None) -> None:
        executor = self.executors[numbers.below(EXECUTORS) if which is None else which]
        for _ in range(1 + numbers.below(8)):
            if not executor.waiting:
                return
            self._work_off(executor, numbers.below(len(executor.waiting)))

    def _work_off(self, executor: Executor, at: int) -> None:
        _, work = executor.waiting.pop(at)
        try:
            work()
        except StateError:
            return  # the product logs it
        except DiedError:
            executor.die()

    def _restart(self, numbers: Numbers) -> None:
        """End the query and start it again, at a batch that Spark retains, in another application or the same."""
        batches = self.spark.batches
        self.start()
        self.spark.go_back(batches[0] if numbers.below(3) == 0 else batches[numbers.below(len(batches))])
        for executor in self.executors:
            executor.loaded.clear()
            if numbers.yes():
                executor.die()

    def _lose_disk(self, numbers: Numbers) -> None:
        lost = self.executors[numbers.below(EXECUTORS)].machine
        for executor in self.executors:
            if executor.machine is lost:
                executor.die()
        lost.lose()

    def _lose_memory(self, numbers: Numbers) -> None:
        self.executors[numbers.below(EXECUTORS)].die()

    def _damage(self, numbers: Numbers) -> None:
        """Damage a snapshot: any that clean-up has not verified yet, and at most one of the verified snapshots.

        Do nothing after backends changed: a backend that joins late begins with a snapshot, without files below it.
        """
        if self.switches:
            return
        files = self.folders[self.configured[numbers.below(len(self.configured))]][self._draw_bucket(numbers)]
        snapshots = [n for n in files.names() if (parse_file_name(n) or (None, ""))[1] == SNAPSHOT]
        parsed = {name: parts[0] for name in snapshots if (parts := parse_file_name(name))}
        believed = {name for name, ref in parsed.items() if self.known_files.is_known_whole(files, ref)}
        if self.damaged & {files.where(name) for name in believed}:
            snapshots = [name for name in snapshots if name not in believed]
        if not snapshots:
            return
        name = snapshots[numbers.below(len(snapshots))]
        self.damaged.add(files.where(name))
        data = bytearray(files.get(name))
        data[numbers.below(len(data))] ^= 0xFF
        files.put(name, bytes(data))

    def _switch(self, numbers: Numbers) -> None:
        """Start with another list of backends, one of which holds all states that Spark may hand out."""
        self._restart(numbers)
        wanted = (["a"], ["a", "b"], ["b", "a"], ["b"])[numbers.below(4)]
        if any(all(self._holds(name, pointer) for pointer in self.list_reachable()) for name in wanted):
            self.switches += wanted != self.configured
            self.configured = wanted

    def _holds(self, name: str, pointer: Pointer) -> bool:
        """Whether a backend holds a pointer's state, together with the inline deltas."""
        if pointer.ref is None:
            return True
        replication = pointer.replication or {"a": ReplicationStatus(pointer.ref)}
        return is_complete(replication.get(name)) and pointer.encode() not in self.outdated[name]

    def _raid(self, numbers: Numbers) -> None:
        """Delete a backend's files, if another backend without damage holds all states that Spark may hand out."""
        if len(self.configured) < 2:
            return
        lost_name = self.configured[numbers.below(2)]
        kept_name = next(name for name in self.configured if name != lost_name)
        damaged = any(
            files.where(name) in self.damaged for files in self._list_folders(kept_name) for name in files.names()
        )
        if damaged or not all(self._holds(kept_name, pointer) for pointer in self.list_reachable()):
            return
        self.raid(lost_name)

    def raid(self, name: str) -> None:
        """Delete all files in a backend."""
        for files in self._list_folders(name):
            for file in files.names():
                files.remove(file)
        self.outdated[name].update(self.models.keys() - self.empty)
        self.known_losses = {key: heartbeats for key, heartbeats in self.known_losses.items() if key[-1] != name}

    # -- attempts ----------------------------------------------------------------------------------

    def _hand_out(self, executor: int, batch: int) -> Partition:
        """Return the partition that Spark gives to a task of a batch on an executor."""
        partition = self.spark.hand_out(self.executors[executor], batch)
        self._check_drawn_rows(partition, batch - 1)
        return partition

    def _draw_bucket(self, numbers: Numbers) -> int:
        return self.buckets[numbers.below(len(self.buckets))] if self.config.buckets > 1 else FIRST_BUCKET

    def _list_folders(self, name: str) -> list[Folder]:
        """Return a backend's folders."""
        return list(self.folders[name].values())

    def _draw_fault(self, numbers: Numbers, run: Run | None = None) -> Fault:
        at, kind, after = numbers.below(8), numbers.below(5), numbers.yes()
        if kind == 0:
            return self.make_failing(at, run, after)
        # If files cannot be replaced, a damaged upload would stay for ever.
        if kind < 3 and self.config.replaces:
            return self.make_torn(at, run, die_here if kind == 1 else lambda: None)
        return Fault(at, die_here if numbers.yes() else lambda: self._work(numbers), after)

    def make_failing(self, at: int, run: Run | None, after: bool = False) -> Fault:
        """Make a fault that lets an operation of a run fail."""

        def fail() -> None:
            if run is not None:
                self.failures.note_failure(run)
            fail_here()

        return Fault(at, fail, after)

    def make_torn(self, at: int, run: Run | None, action: Callable[[], None]) -> Fault:
        """Make a fault that damages a file of a run on its way, and then calls `action`."""

        def note_torn(where: str) -> None:
            self.damaged.add(where)
            if run is not None:
                self.failures.note_failure(run)

        return Fault(at, action, True, note_torn)

    def _run_until_success(self, attempt: Attempt, numbers: Numbers) -> TaskResult:
        """Run an attempt until it succeeds; after each failure the query is started again."""
        attempt = replace(attempt, run=attempt.run or self.stage())
        for _ in range(STARTS_MAX):
            result = self._run(attempt, None, numbers)
            if result is not None:
                return result
            self.start()
            attempt = replace(attempt, run=self.stage())
        raise WrongStateError(f"batch {attempt.batch} fails again and again without faults")

    def _run(self, attempt: Attempt, fault: Fault | None, numbers: Numbers, zombie: bool = False) -> TaskResult | None:
        """Run a task from its input partition to its new one; returns None if it fails."""
        executor = self.executors[attempt.executor]
        run = attempt.run or self.stage()
        attempt = replace(attempt, run=run)
        losses_before = dict(self.known_losses)
        failed_stage, must_fail = (
            self.failures.read_failed_stage(executor.machine, run),
            self.failures.must_fail(executor.machine, attempt),
        )
        partition = dict(attempt.partition)
        models: dict[bytes, Model] = {}
        uploads = executor.uploads
        try:
            deferred: list[Upload] = []
            for number, call in attempt.calls.items():
                pointer = attempt.partition[number].pointer
                if not attempt.heartbeat and self.config.timeouts and has_nothing_due(pointer, attempt.now_ms):
                    new_pointer = pointer
                else:
                    result, committer = self._call(attempt, number, run, fault, numbers)
                    new_pointer = result.pointer
                    models[new_pointer.encode()] = apply_changes(self.models[pointer.encode()], call.changes)
                    deferred += result.deferred
                    if executor.uploads is not uploads:
                        # Work next to the call killed its process: nothing of the task is left to continue.
                        raise DiedError
                partition[number] = BucketState(new_pointer, self._compute_due_ms(new_pointer, attempt.now_ms))
            if deferred:
                # The last call of a task waits for deferred uploads.
                committer.await_all(deferred)
        except DiedError:
            executor.die()
            return None
        except StorageError as error:
            if fault is None or not fault.has_happened:
                self.failures.check_failure(run, failed_stage, error)
                if isinstance(error, UploadFailedError):
                    inputs = [(n, attempt.partition[n].pointer) for n in attempt.calls]
                    folders = [
                        (n, name, self._get_folder(name, pointer)) for n, pointer in inputs for name in self.configured
                    ]
                    self.failures.note_report(executor.machine, attempt, folders)
            return None
        except (CorruptError, MissingCheckpointError) as error:
            if self._may_find_nothing(attempt, zombie):
                return None
            raise WrongStateError(f"batch {attempt.batch} cannot read {attempt.partition}: {error}") from error
        if must_fail and models:
            raise WrongStateError(
                f"batch {attempt.batch} succeeds although another attempt at its task reported a failure in {run}"
            )
        self.models.update(models)
        executor.load(attempt.batch, partition)
        for number in attempt.calls:
            before, new_pointer = attempt.partition[number].pointer, partition[number].pointer
            if new_pointer is before:
                continue
            self.commits += 1
            for name in new_pointer.replication:
                # A status that is no longer true stays so until the backend gets the whole state again.
                gets_snapshot = new_pointer.ref != before.ref and _gets_full_snapshot(new_pointer, name)
                if before.encode() in self.outdated[name] and not gets_snapshot:
                    self.outdated[name].add(new_pointer.encode())
                since = losses_before.get((*executor.machine.disk, number, name), -1)
                self._check_known_loss(executor.machine, name, before, new_pointer, since)
            if attempt.cleans:
                self._submit_clean_up(executor, before, numbers)
        return TaskResult(partition, frozenset(attempt.calls))

    def _may_find_nothing(self, attempt: Attempt, zombie: bool) -> bool:
        """Whether an attempt may fail as its input is gone; it must not read wrong state.

        A late attempt may, if its batch is so old that its files may be deleted, or after a change of backends: these must
        hold what Spark may hand out now, not what it did before.
        """
        return zombie and (attempt.batch <= self.spark.oldest or attempt.switches != self.switches)

    def _call(
        self, attempt: Attempt, number: int, run: Run, fault: Fault | None, numbers: Numbers
    ) -> tuple[CommitResult, Committer]:
        """Run a bucket's call, from its input pointer to its new one."""
        executor, pointer, call = (
            self.executors[attempt.executor],
            attempt.partition[number].pointer,
            attempt.calls[number],
        )
        replicas = self._make_replicas(pointer, fault)
        store = self._get_store(executor.machine, pointer)
        self._drop_old_losses(executor.machine, pointer)
        bucket = self._open_bucket(store, replicas, pointer, attempt.batch, executor, run, attempt.now_ms)
        if self.probing_run:
            self._variant.probe(f"{self._name}/{number}", self.probing_run, bucket.committer, replicas, pointer)
        rows_found, expected = bucket.read(scan_rows), self.models[pointer.encode()]
        if rows_found != expected:
            raise WrongStateError(f"batch {attempt.batch} read {rows_found}; {pointer.ref} was written as {expected}")
        may_defer = numbers.yes()
        rows = buffer_changes(call.changes, self.folder, self.hashes)
        result = bucket.commit(rows, attempt.heartbeat, may_defer=may_defer)
        pointer = replace(result.pointer, batch=attempt.batch, earliest_timeout_ms=call.timeout_ms)
        return replace(result, pointer=pointer), bucket.committer

    def _compute_due_ms(self, pointer: Pointer, now_ms: int) -> int | None:
        if not self.config.timeouts:
            return None
        alone = self.config.checkpoint_v2
        after_ms = self._variant.next_call_ms(pointer.earliest_timeout_ms, now_ms, alone=alone)
        return None if after_ms is None else now_ms + after_ms

    def _make_replicas(self, pointer: Pointer, fault: Fault | None = None, names: Sequence[str] = ()) -> list[Replica]:
        replicas: list[Replica] = []
        for name in names or self.configured:
            files = self._get_folder(name, pointer)
            folder: Any = files if fault is None else FaultyFolder(files, fault)
            replicas += [replace(replica, root=name == "a") for replica in sole_replica(folder, self.folder, name)]
        return replicas

    def _open_bucket(
        self,
        store: LocalStore,
        replicas: list[Replica],
        pointer: Pointer,
        batch: int,
        executor: Executor | None,
        run: Run | None = None,
        now_ms: int = 0,
    ) -> Bucket:
        writer = Writer("query", "run", batch, "simulated")
        return self._variant.bucket(
            store,
            replicas,
            pointer,
            writer,
            CommitContext(
                self.folder,
                options=CommitOptions(
                    self.config.journal,
                    1 << 40 if self.config.patient else 0,
                    1 << 40,
                    self.config.inline_bytes_max,
                    erase_window_ms=self.config.erase_window_ms or None,
                ),
                batches_retained=self.config.retained,
                cadence=CADENCE,
                uploads=WorkerUploads() if executor is None else executor.uploads,
                runner=executor or Inline(),
                run=run or self.stage(),
                batch_ms=now_ms,
            ),
            sources=self._list_sources(pointer),
        )

    def _submit_clean_up(self, executor: Executor, pointer: Pointer, numbers: Numbers) -> None:
        """Submit a clean-up of each backend that holds the pointer's state; it lists the files now and deletes later."""
        for name in self.configured:
            replication = pointer.replication or {"a": ReplicationStatus(pointer.ref)}
            if is_complete(replication.get(name)) and (head := replication[name].through) is not None:
                self._submit_clean_up_of(name, head, executor, pointer, numbers)

    def _submit_clean_up_of(
        self, backend: str, head: CheckpointRef, executor: Executor, pointer: Pointer, numbers: Numbers
    ) -> None:
        number = pointer.bucket
        folder = self._get_folder(backend, pointer)
        entries = folder.entries()
        fault = self._draw_fault(numbers) if numbers.below(4) == 0 and not self._calm else None
        files: Any = folder if fault is None else FaultyFolder(folder, fault)
        store = self._get_store(executor.machine, pointer)
        committer = self._open_bucket(store, self._make_replicas(pointer), pointer, self.batch, executor).committer
        # Number of files that may be deleted before another run takes the state over.
        checks_left = numbers.below(6) if numbers.below(8) == 0 and not self._calm else 1 << 30

        def check_lease() -> None:
            nonlocal checks_left
            checks_left -= 1
            if checks_left < 0:
                raise LiveRunError("lost on purpose")

        def work() -> None:
            try:
                request = self._adjust_clean_up(
                    executor, CleanUp(pointer, head, self.config.retained, check_lease), numbers
                )
                retention.clean_up(files, request, self.folder, NOW_S, entries, self.known_files)
            except LostFilesError:
                committer.snapshots.note_lost(backend, pointer.heartbeats)
                self.known_losses[(*executor.machine.disk, number, backend)] = pointer.heartbeats
            finally:
                deleted = {entry.name for entry in entries} - set(folder.names())
                self.deleted += len(deleted)
                # In a time without failures it is enough to check at the end.
                if deleted and not self._calm:
                    self.check(number, backend)

        executor.submit(f"clean-up {uuid.uuid4()}", work)

    def _adjust_clean_up(self, executor: Executor, request: CleanUp, numbers: Numbers) -> CleanUp:
        """Return the request of a clean-up that begins now."""
        return request

    # -- checks ------------------------------------------------------------------------------------

    def list_reachable(self) -> list[Pointer]:
        """Return every pointer that Spark may still hand out."""
        partitions = [partition for _, partition in self.spark.list_reachable(self.executors)]
        pointers = [state.pointer for partition in partitions for state in partition.values()]
        return list({(pointer.query_folder, pointer.bucket, pointer.ref): pointer for pointer in pointers}.values())

    def check(self, bucket: int | None = None, backend: str | None = None) -> None:
        """Check that each reachable pointer gives its writer's state on an empty disk. (Attempts check executors' disks.)

        Parameters
        ----------
        bucket, backend
            Where files have changed, if not everywhere.
        """
        for batch, partition in self.spark.list_reachable(self.executors):
            self._check_drawn_rows(partition, batch)
        for pointer in self.list_reachable():
            if bucket not in (None, pointer.bucket):
                continue
            # Each backend that claims to be complete is checked alone; if there is none, all are checked together.
            holding = [[name] for name in self.configured if self._holds(name, pointer)]
            for names in holding or [self.configured]:
                if backend is None or backend in names:
                    self._check_with(pointer, names)

    def _check_drawn_rows(self, partition: Partition, batch: int) -> None:
        """Check that each row that attempts drew for the last batches with data is in one bucket."""
        if self.config.buckets == 1:
            return
        with_data = [b for b in range(batch + 1) if self.planned.get(b, (False, 0))[0]]
        models = {number: self.models[state.pointer.encode()] for number, state in partition.items()}
        for newest in {b % DRAWN: b for b in with_data}.values():
            having = [number for number, model in models.items() if model.get(KEYS + newest % DRAWN) == newest]
            if len(having) != 1:
                raise WrongStateError(f"after batch {batch} the row of batch {newest} is in the buckets {having}")

    def _check_known_loss(self, machine: Machine, name: str, before: Pointer, new_pointer: Pointer, since: int) -> None:
        """Check that a new pointer does not claim files that were noted as lost."""
        if before.encode() not in self.outdated[name]:
            self.known_losses.pop((*machine.disk, new_pointer.bucket, name), None)
            return
        # An older note has expired; the loss is noticed again.
        if (
            self._is_recent(since, before)
            and new_pointer.encode() in self.outdated[name]
            and is_complete(new_pointer.replication[name])
        ):
            raise WrongStateError(
                f"{new_pointer.ref} says that {name} has files that were noted as lost at heartbeat {since}"
            )

    def _drop_old_losses(self, machine: Machine, pointer: Pointer) -> None:
        """Forget losses whose notes a call removes, as they are too old for its pointer."""
        for name in pointer.replication:
            key = (*machine.disk, pointer.bucket, name)
            if key in self.known_losses and not self._is_recent(self.known_losses[key], pointer):
                del self.known_losses[key]

    def _is_recent(self, since: int, pointer: Pointer) -> bool:
        """Return whether a loss that was noted at heartbeat `since` (-1: never) counts for a call with this pointer."""
        return 0 <= since >= pointer.heartbeats - recent_heartbeats(max(self.config.retained, pointer.retained))

    def _check_with(self, pointer: Pointer, names: Sequence[str]) -> None:
        # Each check has its own disk, because one backend's missing delta may be inline in another pointer.
        store = LocalStore.at(self.folder / f"fresh-{uuid.uuid4()}", SCHEMA, chunk_rows=4)
        try:
            self._check_on(store, pointer, names)
        finally:
            store.close()
            shutil.rmtree(store.folder)

    def _check_on(self, store: LocalStore, pointer: Pointer, names: Sequence[str]) -> None:
        expected = self.models[pointer.encode()]
        try:
            rows_found = self._open_bucket(
                store, self._make_replicas(pointer, names=names), pointer, self.batch, None
            ).read(scan_rows)
        except (CorruptError, MissingCheckpointError) as error:
            raise WrongStateError(f"{pointer.ref} of batch {pointer.batch} is lost: {error}") from error
        if rows_found != expected:
            raise WrongStateError(
                f"{pointer.ref} of batch {pointer.batch} gives {rows_found} and was written as {expected}"
            )

    def calm(self) -> None:
        """Run for a while without failures; then few files and runs may be left."""
        self._calm = True
        self._restart(Numbers(b"\0"))
        # Later batches are not run again, so their plans are void.
        self.planned = {batch: plan for batch, plan in self.planned.items() if batch <= self.batch}
        self.sleeping.clear()
        # Pins of dead processes would stay for an hour.
        self.executors[0].machine.lose()
        executor, retained, numbers = self.executors[0], self.config.retained, Numbers(b"calm")
        for batch in range(self.batch + 1, self.batch + 5 * retained + 16):
            heartbeat, now_ms = self._plan(batch, True, numbers)
            attempt = self._attempt(0, batch, heartbeat, now_ms, numbers, cleans=batch % 2 == 0)
            self._commit(batch, [self._run_until_success(attempt, numbers)], numbers)
            while executor.waiting:
                self._work_off(executor, 0)
        self.check()
        for state, name in itertools.product(self.spark.at(self.batch).values(), self.configured):
            self._check_little_is_left(state.pointer, self._get_folder(name, state.pointer))

    @property
    def files_left_max(self) -> int:
        """Largest number of a bucket's files that may be left in a backend afterwards."""
        return 6 * self.config.retained + 30

    def _check_little_is_left(self, pointer: Pointer, files: Folder) -> None:
        names = files.names()
        # An unreadable header stops clean-up until a user investigates.
        stopped = bool(self.damaged & {files.where(name) for name in names})
        if not stopped and len(names) > self.files_left_max:
            raise WrongStateError(f"{len(names)} files are left in {files.root}: {names}")
        runs = self._get_store(self.executors[0].machine, pointer).runs()
        if len(runs) > 12:
            raise WrongStateError(f"{len(runs)} runs are left in the local store")


def _gets_full_snapshot(pointer: Pointer, name: str) -> bool:
    """Whether a backend gets the whole state of a pointer with it."""
    if pointer.ref is None:
        return True
    return pointer.replication[name].since == pointer.ref or (
        pointer.markers.get(name, {}).get(STATE) == file_name(pointer.ref, SNAPSHOT)
    )


def scale_down(ingests: bool, variant: Variant) -> AbstractContextManager[None]:
    """Lower all limits so that everything happens sooner, and run one thing at a time so that a history is repeatable."""
    ids = random.Random(49374)
    values = [
        (bucket_module, "new_checkpoint_id", lambda: f"{ids.getrandbits(128):032x}"),
        # This covers both ways to compare files.
        (files_module, "_PIECE_BYTES", 1 << 10 if ingests else files_module._PIECE_BYTES),
        (checkpoint, "_INGESTED_BYTES_MIN", 0 if ingests else checkpoint._INGESTED_BYTES_MIN),
        (loader, "_read_in_order", _read_one_by_one),
        (retention, "classify", variant.classify),
        *variant.patches,
    ]
    return replace_attributes(values)


def simulate(history: History, variant: Variant = DEFAULT) -> World:
    """Run a history to its end; raises `WrongStateError` if an invariant is violated."""
    world = World(history.config, variant)
    run_world(world, history, variant)
    return world


def run_world(world: World, history: History, variant: Variant) -> None:
    """Run a history in a world to its end, and close the world."""
    try:
        with scale_down(history.config.ingests, variant):
            for step in history.steps:
                world.step(step)
            world.check()
            if history.config.ends_calmly:
                world.calm()
    finally:
        world.close()


@contextmanager
def _read_one_by_one(
    plan: Iterable[Fetch], read: Callable[[Fetch], Any], result: Callable[..., Any]
) -> Iterator[Iterator[tuple[Fetch, Any]]]:
    yield ((fetch, read(fetch)) for fetch in plan)


__all__ = ["Config", "History", "World", "WrongStateError", "run_world", "simulate", "scale_down"]
