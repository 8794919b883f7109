"""A world in which the buckets of one partition live: Spark's driver with both of its checkpoint formats, executors, and all that goes wrong.

The real thing is simulated around: real buckets, real LMDB stores, real checkpoint files in an object store in memory. A
history is a plain value: a configuration and a list of steps, each a few small numbers that are taken modulo what there is. So
any list of numbers is a history, and a history that fails can be printed, shortened and run again.

The model is a dict for every pointer that was ever made: the state that its writer had. Where the partition has several
buckets, each attempt at a batch with data gives that batch's row to one of them by chance; whatever Spark hands out has
it once.
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
from spark_state_ext.commit import cadence
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
# Clocks play no part here: every file is old enough to go, as far as that is concerned.
NOW_S = 4e9
# Rows that attempts draw are told apart by their batch, modulo this.
DRAWN = 4
# Whoever mends what failed and starts again succeeds, if not at once where both runs have one identity.
STARTS_MAX = 3
FIRST_BUCKET = 3

STEPS = (
    "batch",  # one or several attempts at the next batch, some of which die or fall asleep
    "batch",
    "batch",
    "batch",
    "twice",  # some batches that two executors run both, as with two actions in foreachBatch
    "twice",
    "quiet",  # a batch without changes
    "gap",  # batches in which the bucket is not called
    "work",  # an executor gets to what waits in its background
    "work",
    "zombie",  # an attempt of an earlier batch wakes up
    "restart",  # the query starts again, at any batch that Spark retains
    "lose disk",  # a machine loses its local disk
    "lose memory",  # an executor's processes die: what it had loaded and what waited is gone
    "damage",  # a snapshot is damaged
    "switch",  # the query starts again, with other backends
    "raid",  # somebody deletes all that lies in a backend
)


DEFAULT = Variant()


class World:
    """Spark's part, played by numbers.

    Parameters
    ----------
    config
        What stays the same.
    variant
        What is under test.
    name
        Of its folder in memory, where that is another world's too.
    """

    # What the first number of a step is.
    kinds: ClassVar[tuple[str, ...]] = STEPS
    # Of keys, by key; None: what follows from the key.
    hashes: ClassVar[Mapping[int, int] | None] = None

    def __init__(self, config: Config, variant: Variant = DEFAULT, name: str = "") -> None:
        self.config = config
        self._variant = variant
        self._name = name or uuid.uuid4().hex
        self.buckets = self._numbered()
        # Two backends, of which one or both are configured.
        homes = {name: self._home(open_folder(f"{self._name}/{name}", replaces=config.replaces)) for name in ("a", "b")}
        self.folders = {name: {b: home.child(str(b)) for b in self.buckets} for name, home in homes.items()}
        self.files = self.folders["a"][self.buckets[0]]
        self.configured = ["a"]
        # What clean-ups have found out.
        self.known = retention.KnownFiles()
        self.switches = 0
        # Pointers that say of a backend what is not so any more, as somebody has deleted files.
        self.false: dict[str, set[bytes]] = {name: set() for name in self.folders}
        # Beats at which a machine's disk was told that a bucket's files in a backend are gone.
        self.noticed: dict[tuple[Path, int, int, str], int] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="simulation-", dir=_fast_folder()))
        machines = [Machine(self.folder / str(i)) for i in range(EXECUTORS)]
        if config.one_disk:
            machines[1] = machines[0]
        self.executors: list[Executor] = []
        self.executors += [Executor(machine, self.executors, config.buckets) for machine in machines]
        first = {b: BucketState(self._first(b)) for b in self.buckets}
        self.spark = self._state_files(first)
        # The model of every pointer.
        self.models: dict[bytes, Model] = {held.pointer.encode(): {} for held in first.values()}
        # Of no state at all, which nobody can lose: a late attempt at the first batch sends all there is.
        self.empty = set(self.models)
        # Of batches that Spark has planned: whether they have data, and their processing time, milliseconds.
        self.planned: dict[int, tuple[bool, int]] = {}
        self.sleeping: list[Attempt] = []
        self.damaged: set[str] = set()
        self.stages, self.starts = itertools.count(), itertools.count()
        self.run_id, self.begun = "", 0
        self.start()
        self.failures = Failures()
        self.deleted = 0
        self.commits = 0
        self._calm = False
        # The run, where each begins with a probe for files that are gone.
        self.looking = ""

    def _numbered(self) -> range:
        """Numbers of the partition's buckets."""
        return range(FIRST_BUCKET, FIRST_BUCKET + self.config.buckets)

    def _files(self, name: str, pointer: Pointer) -> Folder:
        """Where a pointer's bucket has its files in a backend."""
        return self.folders[name][pointer.bucket]

    def _store(self, machine: Machine, pointer: Pointer) -> LocalStore:
        """And on a machine."""
        return machine.store(pointer.bucket)

    def _sources(self, pointer: Pointer) -> Sequence[Restorable]:
        """What its state may be read from besides."""
        return ()

    def _home(self, root: Folder) -> Folder:
        """The query's folder in a backend."""
        return root

    def _first(self, bucket: int) -> Pointer:
        """What Spark holds of a bucket before the first batch."""
        return Pointer("simulated", bucket, 8, 0, -1, None)

    def _state_files(self, first: Partition) -> StateFiles:
        return StateFiles(self.config, first)

    @property
    def batch(self) -> int:
        """The newest batch that is committed."""
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
        """The query starts again."""
        self.begun += 1
        if not (self.run_id and self.config.same_run):
            self.run_id = f"run {next(self.starts)}"

    def stage(self) -> Run:
        """What tells the next stage's attempts from all others."""
        return Run(self.run_id, next(self.stages))

    # -- steps -------------------------------------------------------------------------------------

    def step(self, step: Step) -> None:
        """Take one step."""
        numbers = Numbers(step)
        kind = self.kinds[numbers.below(len(self.kinds))]
        getattr(self, f"_{kind.replace(' ', '_')}")(numbers)

    def _batch(self, numbers: Numbers) -> None:
        """Attempts at the next batch one after the other, until those that the numbers ask for are done."""
        batch = self.batch + 1
        heartbeat, now_ms = self._plan(batch, numbers.below(4) > 0, numbers)
        done: list[TaskResult] = []
        run = self.stage()
        for _ in range(1 + numbers.below(3)):
            executor = numbers.below(EXECUTORS)
            # Not deterministic: each attempt does what it likes.
            attempt = replace(self._attempt(executor, batch, heartbeat, now_ms, numbers), run=run)
            fate = numbers.below(6)
            if fate == 0:
                self.sleeping.append(attempt)
                continue
            made = self._run(attempt, self._fault(numbers, run) if fate < 3 else None, numbers)
            if made is not None:
                done.append(made)
        if not done:
            # The driver tries until one succeeds.
            executor = numbers.below(EXECUTORS)
            attempt = self._attempt(executor, batch, heartbeat, now_ms, numbers, cleans=True)
            done.append(self._surely(replace(attempt, run=run), numbers))
        self._commit(batch, done, numbers)

    def _twice(self, numbers: Numbers) -> None:
        """Each executor goes on from what it has in memory: under format 1 two lineages go on in parallel."""
        busy = numbers.yes()
        for _ in range(1 + numbers.below(5) * numbers.below(4)):
            batch = self.batch + 1
            heartbeat, now_ms = self._plan(batch, numbers.below(4) > 0, numbers)
            done = []
            for executor in (0, 2):
                if executor and not heartbeat and not busy and not self._planned:
                    # Its state is such that no timeout calls it.
                    done.append(self._idle(executor, batch))
                    continue
                quiet = not busy and executor > 0
                attempt = self._attempt(executor, batch, heartbeat, now_ms, numbers, quiet=quiet)
                made = self._run(attempt, None, numbers)
                if made is not None:
                    done.append(made)
            if not done:
                return
            self._commit(batch, done, numbers)
            for executor in (0, 2):
                if numbers.yes():
                    self._work(numbers, executor)

    def _quiet(self, numbers: Numbers) -> None:
        batch = self.batch + 1
        heartbeat, now_ms = self._plan(batch, True, numbers)
        attempt = self._attempt(numbers.below(EXECUTORS), batch, heartbeat, now_ms, numbers, quiet=True, cleans=True)
        self._commit(batch, [self._surely(attempt, numbers)], numbers)

    def _gap(self, numbers: Numbers) -> None:
        """Batches without data: Spark's tasks run, and take what is not called from one version to the next."""
        both = numbers.yes()
        for _ in range(1 + numbers.below(8)):
            batch = self.batch + 1
            heartbeat, now_ms = self._plan(batch, False, numbers)
            done = []
            for executor in (0, 2) if both else (numbers.below(EXECUTORS),):
                if not self._planned:
                    done.append(self._idle(executor, batch))
                    continue
                made = self._surely(self._attempt(executor, batch, heartbeat, now_ms, numbers), numbers)
                done.append(made)
            self._commit(batch, done, numbers)

    def _idle(self, executor: int, batch: int) -> TaskResult:
        """A task that calls nothing."""
        partition = self._handed_out(executor, batch)
        self.executors[executor].load(batch, partition)
        return TaskResult(partition, frozenset())

    @property
    def _planned(self) -> bool:
        """Data and timeouts say what is called; else it is by chance."""
        return self.config.buckets > 1 or self.config.timeouts

    def _plan(self, batch: int, heartbeat: bool, numbers: Numbers) -> tuple[bool, int]:
        """What stands in Spark's log before a batch begins: whether it has data, and its processing time."""
        if not (self._planned or self.config.erase_window_ms):
            return heartbeat, 0
        if batch not in self.planned:
            newest_ms = self.planned[max(self.planned)][1] if self.planned else 0
            # Clocks are set back now and then.
            step_ms = -25 if numbers.below(16) == 0 else numbers.below(20)
            if self.config.erase_window_ms and numbers.below(8) == 0:
                # Nothing came for a while.
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
        """A task of a batch; with `quiet` it changes nothing that nobody draws."""
        partition = self._handed_out(executor, batch)
        calls: dict[int, Call] = {}
        drawn = numbers.below(len(self.buckets)) if self.config.buckets > 1 and heartbeat else -1
        for at, (bucket, held) in enumerate(partition.items()):
            due = held.due_ms is not None and held.due_ms < now_ms
            if self._planned and not (heartbeat or due):
                continue
            changes = {} if quiet else draw_changes(numbers)
            if drawn >= 0:
                changes[KEYS + batch % DRAWN] = batch if drawn == at else None
            timeout_ms = now_ms + numbers.below(60) if self.config.timeouts and numbers.yes() else None
            calls[bucket] = Call(changes, timeout_ms)
        cleans = numbers.yes() if cleans is None else cleans
        return Attempt(executor, batch, partition, calls, cleans, heartbeat, self.switches, now_ms)

    def _commit(self, batch: int, done: Sequence[TaskResult], numbers: Numbers) -> None:
        if self.config.checkpoint_v2:
            chosen = done[numbers.below(len(done))]
        else:
            chosen = done[-1] if self.config.last_wins else done[0]
        if batch in self.planned:
            self.spark.times_ms[batch] = self.planned[batch][1]
        self.spark.commit(batch, chosen)

    def _zombie(self, numbers: Numbers) -> None:
        if not self.sleeping:
            return
        attempt = self.sleeping.pop(numbers.below(len(self.sleeping)))
        made = self._run(attempt, None, numbers, zombie=True)
        if made is not None and not self.config.checkpoint_v2 and self.config.last_wins and attempt.batch <= self.batch:
            self.spark.overwrite(attempt.batch, made)

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
            return  # logged, in the real one
        except DiedError:
            executor.die()

    def _restart(self, numbers: Numbers) -> None:
        """The query ends and starts again, at a batch that Spark still has; another application, or the same."""
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
        """Any snapshot that clean-up has not looked at yet, and one of those that it has.

        Not where backends came and went: what joins late begins with a snapshot, and has nothing below it.
        """
        if self.switches:
            return
        files = self.folders[self.configured[numbers.below(len(self.configured))]][self._one_bucket(numbers)]
        snapshots = [n for n in files.names() if (parse_file_name(n) or (None, ""))[1] == SNAPSHOT]
        parsed = {name: found[0] for name in snapshots if (found := parse_file_name(name))}
        believed = {name for name, ref in parsed.items() if self.known.is_known_whole(files, ref)}
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
        """Another list of backends, such that one of them holds what Spark may hand out."""
        self._restart(numbers)
        wanted = (["a"], ["a", "b"], ["b", "a"], ["b"])[numbers.below(4)]
        if any(all(self._holds(name, pointer) for pointer in self.reachable()) for name in wanted):
            self.switches += wanted != self.configured
            self.configured = wanted

    def _holds(self, name: str, pointer: Pointer) -> bool:
        """Whether a backend gives a pointer's state back, with what is inline."""
        if pointer.ref is None:
            return True
        replication = pointer.replication or {"a": ReplicationStatus(pointer.ref)}
        return is_complete(replication.get(name)) and pointer.encode() not in self.false[name]

    def _raid(self, numbers: Numbers) -> None:
        """Only where another backend holds all that Spark may hand out, in which nothing is damaged."""
        if len(self.configured) < 2:
            return
        lost = self.configured[numbers.below(2)]
        kept = next(name for name in self.configured if name != lost)
        damaged = any(files.where(name) in self.damaged for files in self._all(kept) for name in files.names())
        if damaged or not all(self._holds(kept, pointer) for pointer in self.reachable()):
            return
        self.raid(lost)

    def raid(self, name: str) -> None:
        """Somebody deletes all that lies in a backend."""
        for files in self._all(name):
            for file in files.names():
                files.remove(file)
        self.false[name].update(self.models.keys() - self.empty)
        self.noticed = {key: heartbeats for key, heartbeats in self.noticed.items() if key[-1] != name}

    # -- attempts ----------------------------------------------------------------------------------

    def _handed_out(self, executor: int, batch: int) -> Partition:
        """The partition that Spark gives a task of a batch on an executor."""
        partition = self.spark.handed_out(self.executors[executor], batch)
        self._check_drawn(partition, batch - 1)
        return partition

    def _one_bucket(self, numbers: Numbers) -> int:
        return self.buckets[numbers.below(len(self.buckets))] if self.config.buckets > 1 else FIRST_BUCKET

    def _all(self, name: str) -> list[Folder]:
        """A backend's folders."""
        return list(self.folders[name].values())

    def _fault(self, numbers: Numbers, run: Run | None = None) -> Fault:
        at, kind, after = numbers.below(8), numbers.below(5), numbers.yes()
        if kind == 0:
            return self.failing(at, run, after)
        # Where files cannot be replaced, somebody would have to delete what was damaged on its way.
        if kind < 3 and self.config.replaces:
            return self.torn(at, run, die_here if kind == 1 else lambda: None)
        return Fault(at, die_here if numbers.yes() else lambda: self._work(numbers), after)

    def failing(self, at: int, run: Run | None, after: bool = False) -> Fault:
        """An operation that fails, of a run."""

        def happens() -> None:
            if run is not None:
                self.failures.make(run)
            fail_here()

        return Fault(at, happens, after)

    def torn(self, at: int, run: Run | None, happens: Callable[[], None]) -> Fault:
        """A file that is damaged on its way, of a run; then something happens."""

        def torn(where: str) -> None:
            self.damaged.add(where)
            if run is not None:
                self.failures.make(run)

        return Fault(at, happens, True, torn)

    def _surely(self, attempt: Attempt, numbers: Numbers) -> TaskResult:
        """Until it succeeds, as whoever mends what failed before starts again."""
        attempt = replace(attempt, run=attempt.run or self.stage())
        for _ in range(STARTS_MAX):
            made = self._run(attempt, None, numbers)
            if made is not None:
                return made
            self.start()
            attempt = replace(attempt, run=self.stage())
        raise WrongStateError(f"batch {attempt.batch} fails again and again, and nothing fails any more")

    def _run(self, attempt: Attempt, fault: Fault | None, numbers: Numbers, zombie: bool = False) -> TaskResult | None:
        """A task from its partition to its new one; None when it failed."""
        executor = self.executors[attempt.executor]
        run = attempt.run or self.stage()
        attempt = replace(attempt, run=run)
        noticed = dict(self.noticed)
        ended, hidden = self.failures.ended(executor.machine, run), self.failures.hidden(executor.machine, attempt)
        # What is so old that Spark does not retain it may be cleaned up; it must not be anything else. And a query that was
        # started again with other backends has seen to it that these hold what Spark may hand out, not what it once did.
        excused = zombie and (attempt.batch <= self.spark.oldest or attempt.switches != self.switches)
        partition = dict(attempt.partition)
        models: dict[bytes, Model] = {}
        uploads = executor.uploads
        try:
            left: list[Upload] = []
            for number, call in attempt.calls.items():
                pointer = attempt.partition[number].pointer
                if not attempt.heartbeat and self.config.timeouts and has_nothing_due(pointer, attempt.now_ms):
                    made = pointer
                else:
                    result, committer = self._call(attempt, number, run, fault, numbers)
                    made = result.pointer
                    models[made.encode()] = apply_changes(self.models[pointer.encode()], call.changes)
                    left += result.deferred
                    if executor.uploads is not uploads:
                        # Something beside the call killed its process: nothing of the task is left to go on.
                        raise DiedError
                partition[number] = BucketState(made, self._due_ms(made, attempt.now_ms))
            if left:
                # What the last call of the task does.
                committer.await_all(left)
        except DiedError:
            executor.die()
            return None
        except StorageError as error:
            if fault is None or not fault.has_happened:
                self.failures.refuse_others(run, ended, error)
                if isinstance(error, UploadFailedError):
                    given = [(n, attempt.partition[n].pointer) for n in attempt.calls]
                    where = [(n, name, self._files(name, it)) for n, it in given for name in self.configured]
                    self.failures.tell(executor.machine, attempt, where)
            return None
        except (CorruptError, MissingCheckpointError) as error:
            if excused:
                return None
            raise WrongStateError(f"batch {attempt.batch} cannot read {attempt.partition}: {error}") from error
        if hidden and models:
            raise WrongStateError(f"batch {attempt.batch} hides what another attempt at its task was told in {run}")
        self.models.update(models)
        executor.load(attempt.batch, partition)
        for number in attempt.calls:
            before, made = attempt.partition[number].pointer, partition[number].pointer
            if made is before:
                continue
            self.commits += 1
            for name in made.replication:
                # What was false stays so, until the backend gets everything anew.
                renewed = made.ref != before.ref and _renewed(made, name)
                if before.encode() in self.false[name] and not renewed:
                    self.false[name].add(made.encode())
                since = noticed.get((*executor.machine.disk, number, name), -1)
                self._check_noticed(executor.machine, name, before, made, since)
            if attempt.cleans:
                self._submit_clean_up(executor, before, numbers)
        return TaskResult(partition, frozenset(attempt.calls))

    def _call(
        self, attempt: Attempt, number: int, run: Run, fault: Fault | None, numbers: Numbers
    ) -> tuple[CommitResult, Committer]:
        """A bucket's call, from its pointer to its new one."""
        executor, pointer, call = (
            self.executors[attempt.executor],
            attempt.partition[number].pointer,
            attempt.calls[number],
        )
        replicas = self._replicas(pointer, fault)
        store = self._store(executor.machine, pointer)
        bucket = self._bucket(store, replicas, pointer, attempt.batch, executor, run, attempt.now_ms)
        if self.looking:
            self._variant.probe(f"{self._name}/{number}", self.looking, bucket.committer, replicas, pointer)
        found, expected = bucket.read(scan_rows), self.models[pointer.encode()]
        if found != expected:
            raise WrongStateError(f"batch {attempt.batch} read {found}; {pointer.ref} was written as {expected}")
        may_defer = numbers.yes()
        rows = buffer_changes(call.changes, self.folder, self.hashes)
        made = bucket.commit(rows, attempt.heartbeat, may_defer=may_defer)
        pointer = replace(made.pointer, batch=attempt.batch, earliest_timeout_ms=call.timeout_ms)
        return replace(made, pointer=pointer), bucket.committer

    def _due_ms(self, pointer: Pointer, now_ms: int) -> int | None:
        if not self.config.timeouts:
            return None
        alone = self.config.checkpoint_v2
        after_ms = self._variant.next_call_ms(pointer.earliest_timeout_ms, now_ms, alone=alone)
        return None if after_ms is None else now_ms + after_ms

    def _replicas(self, pointer: Pointer, fault: Fault | None = None, names: Sequence[str] = ()) -> list[Replica]:
        replicas: list[Replica] = []
        for name in names or self.configured:
            files = self._files(name, pointer)
            folder: Any = files if fault is None else FaultyFolder(files, fault)
            replicas += [replace(replica, root=name == "a") for replica in sole_replica(folder, self.folder, name)]
        return replicas

    def _bucket(
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
                uploads=WorkerUploads() if executor is None else executor.uploads,
                runner=executor or Inline(),
                run=run or self.stage(),
                batch_ms=now_ms,
            ),
            sources=self._sources(pointer),
        )

    def _submit_clean_up(self, executor: Executor, pointer: Pointer, numbers: Numbers) -> None:
        """Of each backend that holds the pointer's state, with the listing of now, to be used later."""
        for name in self.configured:
            replication = pointer.replication or {"a": ReplicationStatus(pointer.ref)}
            if is_complete(replication.get(name)) and (head := replication[name].through) is not None:
                self._submit_clean_up_of(name, head, executor, pointer, numbers)

    def _submit_clean_up_of(
        self, of: str, head: CheckpointRef, executor: Executor, pointer: Pointer, numbers: Numbers
    ) -> None:
        number = pointer.bucket
        here = self._files(of, pointer)
        entries = here.entries()
        fault = self._fault(numbers) if numbers.below(4) == 0 and not self._calm else None
        files: Any = here if fault is None else FaultyFolder(here, fault)
        store = self._store(executor.machine, pointer)
        committer = self._bucket(store, self._replicas(pointer), pointer, self.batch, executor).committer
        # Files that may be deleted before another run takes the state over.
        left = numbers.below(6) if numbers.below(8) == 0 and not self._calm else 1 << 30

        def still_ours() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise LiveRunError("lost on purpose")

        def work() -> None:
            try:
                request = self._request(executor, CleanUp(pointer, head, self.config.retained, still_ours), numbers)
                retention.clean_up(files, request, self.folder, NOW_S, entries, self.known)
            except LostFilesError:
                committer.snapshots.note_lost(of, pointer.heartbeats)
                self.noticed[(*executor.machine.disk, number, of)] = pointer.heartbeats
            finally:
                gone = {entry.name for entry in entries} - set(here.names())
                self.deleted += len(gone)
                # Where nothing goes wrong any more, it is enough to look at the end.
                if gone and not self._calm:
                    self.check(number, of)

        executor.submit(f"clean-up {uuid.uuid4()}", work)

    def _request(self, executor: Executor, request: CleanUp, numbers: Numbers) -> CleanUp:
        """What a clean-up that begins now goes by."""
        return request

    # -- checks ------------------------------------------------------------------------------------

    def reachable(self) -> list[Pointer]:
        """Every pointer that Spark may still hand out."""
        partitions = [partition for _, partition in self.spark.reachable(self.executors)]
        found = [held.pointer for partition in partitions for held in partition.values()]
        return list({(it.query_folder, it.bucket, it.ref): it for it in found}.values())

    def check(self, bucket: int | None = None, backend: str | None = None) -> None:
        """Each of them gives its writer's state on an empty disk. (Attempts check what executors have.)

        Parameters
        ----------
        bucket, backend
            Where something has changed, if not everywhere.
        """
        for batch, partition in self.spark.reachable(self.executors):
            self._check_drawn(partition, batch)
        for pointer in self.reachable():
            if bucket not in (None, pointer.bucket):
                continue
            # Each backend that says to hold everything, and where none does, all together.
            holding = [[name] for name in self.configured if self._holds(name, pointer)]
            for names in holding or [self.configured]:
                if backend is None or backend in names:
                    self._check_with(pointer, names)

    def _check_drawn(self, partition: Partition, batch: int) -> None:
        """What attempts drew for the last batches with data is in one bucket each."""
        if self.config.buckets == 1:
            return
        with_data = [b for b in range(batch + 1) if self.planned.get(b, (False, 0))[0]]
        models = {number: self.models[held.pointer.encode()] for number, held in partition.items()}
        for newest in {b % DRAWN: b for b in with_data}.values():
            having = [number for number, model in models.items() if model.get(KEYS + newest % DRAWN) == newest]
            if len(having) != 1:
                raise WrongStateError(f"after batch {batch} the row of batch {newest} is in the buckets {having}")

    def _check_noticed(self, machine: Machine, name: str, before: Pointer, made: Pointer, since: int) -> None:
        """Who knows since a heartbeat that a backend's files are gone must not hand on that it has them."""
        if before.encode() not in self.false[name]:
            self.noticed.pop((*machine.disk, made.bucket, name), None)
            return
        # What was noticed longer ago is noticed again.
        fresh = since >= 0 and since >= before.heartbeats - recent_heartbeats(
            max(self.config.retained, before.retained)
        )
        if fresh and made.encode() in self.false[name] and is_complete(made.replication[name]):
            raise WrongStateError(f"{made.ref} says that {name} has what is lost, as is known since heartbeat {since}")

    def _check_with(self, pointer: Pointer, names: Sequence[str]) -> None:
        # A disk for each, as what one needs may be inline in another.
        store = LocalStore.at(self.folder / f"fresh-{uuid.uuid4()}", SCHEMA, chunk_rows=4)
        try:
            self._check_on(store, pointer, names)
        finally:
            store.close()
            shutil.rmtree(store.folder)

    def _check_on(self, store: LocalStore, pointer: Pointer, names: Sequence[str]) -> None:
        expected = self.models[pointer.encode()]
        try:
            found = self._bucket(store, self._replicas(pointer, names=names), pointer, self.batch, None).read(scan_rows)
        except (CorruptError, MissingCheckpointError) as error:
            raise WrongStateError(f"{pointer.ref} of batch {pointer.batch} is lost: {error}") from error
        if found != expected:
            raise WrongStateError(f"{pointer.ref} of batch {pointer.batch} gives {found} and was written as {expected}")

    def calm(self) -> None:
        """Nothing goes wrong for a while; then little must be left of what did."""
        self._calm = True
        self._restart(Numbers(b"\0"))
        # Nobody runs again what was planned after that batch.
        self.planned = {batch: plan for batch, plan in self.planned.items() if batch <= self.batch}
        self.sleeping.clear()
        # What was pinned by processes that died stays so for an hour.
        self.executors[0].machine.lose()
        executor, retained, numbers = self.executors[0], self.config.retained, Numbers(b"calm")
        for batch in range(self.batch + 1, self.batch + 5 * retained + 16):
            heartbeat, now_ms = self._plan(batch, True, numbers)
            attempt = self._attempt(0, batch, heartbeat, now_ms, numbers, cleans=batch % 2 == 0)
            self._commit(batch, [self._surely(attempt, numbers)], numbers)
            while executor.waiting:
                self._work_off(executor, 0)
        self.check()
        for held, name in itertools.product(self.spark.at(self.batch).values(), self.configured):
            self._check_little_is_left(held.pointer, self._files(name, held.pointer))

    @property
    def files_left_max(self) -> int:
        """The most files of a bucket that may be left in a backend after that."""
        return 6 * self.config.retained + 30

    def _check_little_is_left(self, pointer: Pointer, files: Folder) -> None:
        names = files.names()
        # A header that cannot be read stops clean-up, for somebody to look at.
        stopped = bool(self.damaged & {files.where(name) for name in names})
        if not stopped and len(names) > self.files_left_max:
            raise WrongStateError(f"{len(names)} files are left in {files.root}: {names}")
        runs = self._store(self.executors[0].machine, pointer).runs()
        if len(runs) > 12:
            raise WrongStateError(f"{len(runs)} runs are left in the local store")


def _renewed(pointer: Pointer, name: str) -> bool:
    """Whether a backend gets all of a pointer's state with it."""
    if pointer.ref is None:
        return True
    return pointer.replication[name].since == pointer.ref or (
        pointer.markers.get(name, {}).get(STATE) == file_name(pointer.ref, SNAPSHOT)
    )


def scale_down(ingests: bool, variant: Variant) -> AbstractContextManager[None]:
    """Everything happens sooner, and one thing at a time, so that a history is the same again."""
    ids = random.Random(49374)
    values = [
        (bucket_module, "new_checkpoint_id", lambda: f"{ids.getrandbits(128):032x}"),
        (cadence, "DELTAS_MIN", 1),
        (cadence, "DELTAS_MAX", 2),
        # So that both ways to compare files are gone.
        (files_module, "_PIECE_BYTES", 1 << 10 if ingests else files_module._PIECE_BYTES),
        (checkpoint, "_INGESTED_BYTES_MIN", 0 if ingests else checkpoint._INGESTED_BYTES_MIN),
        (loader, "_read_in_order", _one_by_one),
        (retention, "classify", variant.classify),
        *variant.patches,
    ]
    return replace_attributes(values)


def simulate(history: History, variant: Variant = DEFAULT) -> World:
    """Run a history to its end; raises `WrongStateError` when anything is."""
    world = World(history.config, variant)
    run_world(world, history, variant)
    return world


def run_world(world: World, history: History, variant: Variant) -> None:
    """Run a history in a world to its end; it is closed then."""
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
def _one_by_one(
    plan: Iterable[Fetch], read: Callable[[Fetch], Any], result: Callable[..., Any]
) -> Iterator[Iterator[tuple[Fetch, Any]]]:
    yield ((fetch, read(fetch)) for fetch in plan)


def _fast_folder() -> str | None:
    """A folder in memory, where there is one: thousands of stores are made and removed."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


__all__ = ["Config", "History", "World", "WrongStateError", "run_world", "simulate", "scale_down"]
