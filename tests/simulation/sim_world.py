"""A world in which one bucket lives: Spark's driver with both of its checkpoint formats, executors, and all that goes wrong.

The real thing is simulated around: real buckets, real LMDB stores, real checkpoint files in an object store in memory. A
history is a plain value: a configuration and a list of steps, each a few small numbers that are taken modulo what there is. So
any list of numbers is a history, and a history that fails can be printed, shortened and run again.

The model is a dict for every pointer that was ever made: the state that its writer had.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
from sim_parts import (
    SCHEMA,
    Attempt,
    Config,
    DiedError,
    Executor,
    Fault,
    FaultyFolder,
    History,
    Machine,
    Model,
    Numbers,
    Step,
    WrongStateError,
    changed,
    changes_of,
    dies,
    fails,
    rows_of,
    scanned,
)

from arrow_schemas import CheckpointRef, Pointer, Writer
from arrow_schemas.lineage import SNAPSHOT, parse_file_name
from arrow_schemas.pointer import Standing
from spark_state_ext import bucket as bucket_module
from spark_state_ext import checkpoint, cleanup, loading
from spark_state_ext import lineage as lineage_module
from spark_state_ext.backends.files import sole_place
from spark_state_ext.bucket import Bucket
from spark_state_ext.commit import CommitOptions, Place, is_complete
from spark_state_ext.errors import (
    CorruptError,
    LiveRunError,
    LostFilesError,
    MissingCheckpointError,
    StateError,
    StorageError,
)
from spark_state_ext.folder import Folder
from spark_state_ext.lineage import Fetch
from spark_state_ext.store import LocalStore

EXECUTORS = 3
# Clocks play no part here: every file is old enough to go, as far as that is concerned.
NOW_S = 4e9

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


class World:
    """Spark's part, played by numbers.

    Parameters
    ----------
    config
        What stays the same.
    bucket
        Class of the bucket under test.
    classify
        Clean-up's decision under test.
    """

    def __init__(
        self, config: Config, bucket: type[Bucket] = Bucket, classify: Callable[..., Any] = cleanup.classify
    ) -> None:
        self.config = config
        self._bucket_class = bucket
        self._classify = classify
        self._name = uuid.uuid4().hex
        # Two backends, of which one or both are configured.
        self.folders = {name: Folder(f"memory://{self._name}/{name}/3") for name in ("a", "b")}
        self.files = self.folders["a"]
        self.configured = ["a"]
        self.switches = 0
        # Pointers that say of a backend what is not so any more, as somebody has deleted files.
        self.false: dict[str, set[bytes]] = {name: set() for name in self.folders}
        self.folder = Path(tempfile.mkdtemp(prefix="simulation-", dir=_fast_folder()))
        machines = [Machine(self.folder / str(i)) for i in range(EXECUTORS)]
        if config.one_disk:
            machines[1] = machines[0]
        self.executors: list[Executor] = []
        self.executors += [Executor(machine, self.executors) for machine in machines]
        first = Pointer("simulated", 3, 8, 0, -1, None)
        self.batch = -1
        self.newest_ever = -1
        # What the driver finds for each batch, and the model of every pointer.
        self.committed: dict[int, Pointer] = {-1: first}
        self.models: dict[bytes, Model] = {first.encode(): {}}
        self.sleeping: list[Attempt] = []
        self.damaged: set[str] = set()
        self.deleted = 0
        self.commits = 0
        self._calm = False

    def close(self) -> None:
        """Remove everything."""
        for executor in self.executors:
            executor.machine.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        memory = fsspec.filesystem("memory")
        if memory.exists(f"/{self._name}"):
            memory.rm(f"/{self._name}", recursive=True)

    # -- steps -------------------------------------------------------------------------------------

    def step(self, step: Step) -> None:
        """Take one step."""
        numbers = Numbers(step)
        kind = STEPS[numbers.below(len(STEPS))]
        getattr(self, f"_{kind.replace(' ', '_')}")(numbers)

    def _batch(self, numbers: Numbers) -> None:
        """Attempts at the next batch one after the other, until those that the numbers ask for are done."""
        batch = self.batch + 1
        # The same in every attempt: where there is data, each bucket is called; else some may be, by timeouts.
        heartbeat = numbers.below(4) > 0
        done: list[Pointer] = []
        for _ in range(1 + numbers.below(3)):
            executor = numbers.below(EXECUTORS)
            pointer = self._handed_out(executor, batch)
            # Not deterministic: each attempt does what it likes.
            attempt = Attempt(executor, batch, pointer, changes_of(numbers), numbers.yes(), heartbeat, self.switches)
            fate = numbers.below(6)
            if fate == 0:
                self.sleeping.append(attempt)
                continue
            made = self._run(attempt, self._fault(numbers) if fate < 3 else None, numbers)
            if made is not None:
                done.append(made)
        if not done:
            # The driver tries until one succeeds.
            executor = numbers.below(EXECUTORS)
            changes = changes_of(numbers)
            attempt = Attempt(executor, batch, self._handed_out(executor, batch), changes, True, heartbeat)
            done.append(self._surely(attempt, numbers))
        self._commit(batch, done, numbers)

    def _twice(self, numbers: Numbers) -> None:
        """Each executor goes on from what it has in memory: under format 1 two lineages go on in parallel."""
        busy = numbers.yes()
        for _ in range(1 + numbers.below(5) * numbers.below(4)):
            batch = self.batch + 1
            heartbeat = numbers.below(4) > 0
            done = []
            for executor in (0, 2):
                pointer = self._handed_out(executor, batch)
                if executor and not heartbeat and not busy:
                    # Its state is such that no timeout calls it.
                    self.executors[executor].load(batch, pointer)
                    done.append(pointer)
                    continue
                changes = changes_of(numbers) if busy or not executor else {}
                made = self._run(Attempt(executor, batch, pointer, changes, numbers.yes(), heartbeat), None, numbers)
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
        executor = numbers.below(EXECUTORS)
        attempt = Attempt(executor, batch, self._handed_out(executor, batch), {}, True)
        self._commit(batch, [self._surely(attempt, numbers)], numbers)

    def _gap(self, numbers: Numbers) -> None:
        """Spark's tasks run, and copy the bucket's pointer from one version to the next."""
        both = numbers.yes()
        for _ in range(1 + numbers.below(8)):
            batch = self.batch + 1
            done = []
            for executor in (0, 2) if both else (numbers.below(EXECUTORS),):
                pointer = self._handed_out(executor, batch)
                self.executors[executor].load(batch, pointer)
                done.append(pointer)
            self._commit(batch, done, numbers)

    def _commit(self, batch: int, done: Sequence[Pointer], numbers: Numbers) -> None:
        if self.config.checkpoint_v2:
            chosen = done[numbers.below(len(done))]
        else:
            chosen = done[-1] if self.config.last_wins else done[0]
        self.committed[batch] = chosen
        self.batch = batch
        self.newest_ever = max(self.newest_ever, batch)

    def _zombie(self, numbers: Numbers) -> None:
        if not self.sleeping:
            return
        attempt = self.sleeping.pop(numbers.below(len(self.sleeping)))
        made = self._run(attempt, None, numbers, zombie=True)
        if made is not None and not self.config.checkpoint_v2 and self.config.last_wins and attempt.batch <= self.batch:
            # It overwrites the file of its batch, whatever has happened since.
            self.committed[attempt.batch] = made

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
        batches = [b for b in self.committed if self._oldest() <= b <= self.batch]
        self.batch = batches[0] if numbers.below(3) == 0 else batches[numbers.below(len(batches))]
        for batch in [b for b in self.committed if b > self.batch]:
            del self.committed[batch]
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
        files = self.folders[self.configured[numbers.below(len(self.configured))]]
        snapshots = [n for n in files.names() if (parse_file_name(n) or (None, ""))[1] == SNAPSHOT]
        believed = {name for name in snapshots if f"{files.identity} {name}" in cleanup._whole}
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
        standings = pointer.standings or {"a": Standing(pointer.ref)}
        return is_complete(standings.get(name)) and pointer.encode() not in self.false[name]

    def _raid(self, numbers: Numbers) -> None:
        """Only where another backend holds all that Spark may hand out, in which nothing is damaged."""
        if len(self.configured) < 2:
            return
        lost = self.configured[numbers.below(2)]
        kept = next(name for name in self.configured if name != lost)
        whole = not any(self.folders[kept].where(name) in self.damaged for name in self.folders[kept].names())
        if not whole or not all(self._holds(kept, pointer) for pointer in self.reachable()):
            return
        for name in self.folders[lost].names():
            self.folders[lost].remove(name)
        self.false[lost].update(self.models)

    # -- attempts ----------------------------------------------------------------------------------

    def _oldest(self) -> int:
        """The oldest batch that Spark retains."""
        return max(-1, self.newest_ever - self.config.retained)

    def _handed_out(self, executor: int, batch: int) -> Pointer:
        """The pointer that Spark gives a task of a batch on an executor."""
        if not self.config.checkpoint_v2 and batch - 1 in self.executors[executor].loaded:
            return self.executors[executor].loaded[batch - 1]
        return self.committed[batch - 1]

    def _fault(self, numbers: Numbers) -> Fault:
        kinds: list[Callable[[], None]] = [fails, dies, lambda: self._work(numbers)]
        return Fault(numbers.below(8), kinds[numbers.below(3)], numbers.yes())

    def _surely(self, attempt: Attempt, numbers: Numbers) -> Pointer:
        # An upload that was made to fail before may surface now, and is told once.
        for _ in range(10):
            made = self._run(attempt, None, numbers)
            if made is not None:
                return made
        raise AssertionError("nothing was made to fail")

    def _run(self, attempt: Attempt, fault: Fault | None, numbers: Numbers, zombie: bool = False) -> Pointer | None:
        """A task from its pointer to its new one; None when it failed."""
        executor = self.executors[attempt.executor]
        bucket = self._bucket(executor.machine.store, self._places(fault), attempt.pointer, attempt.batch, executor)
        expected = self.models[attempt.pointer.encode()]
        # What is so old that Spark does not retain it may be cleaned up; it must not be anything else. And a query that was
        # started again with other backends has seen to it that these hold what Spark may hand out, not what it once did.
        excused = zombie and (
            attempt.batch <= self.newest_ever - self.config.retained or attempt.switches != self.switches
        )
        try:
            found = bucket.read(scanned)
            if found != expected:
                raise WrongStateError(
                    f"batch {attempt.batch} read {found}; {attempt.pointer.ref} was written as {expected}"
                )
            may_defer = numbers.yes()
            made = bucket.commit(rows_of(attempt.changes, self.folder), attempt.heartbeat, may_defer=may_defer)
            # What the last call of the task does.
            bucket.committer.await_all(bucket.committer.left)
        except DiedError:
            executor.die()
            return None
        except StorageError:
            return None
        except (CorruptError, MissingCheckpointError) as error:
            if excused:
                return None
            raise WrongStateError(f"batch {attempt.batch} cannot read {attempt.pointer.ref}: {error}") from error
        made = replace(made, batch=attempt.batch)
        self.models[made.encode()] = changed(expected, attempt.changes)
        self.commits += 1
        for name, standing in made.standings.items():
            # What was false stays so, until the backend gets everything anew.
            if attempt.pointer.encode() in self.false[name] and standing.since != made.ref:
                self.false[name].add(made.encode())
        executor.load(attempt.batch, made)
        if attempt.cleans:
            self._submit_clean_up(executor, attempt.pointer, numbers)
        return made

    def _places(self, fault: Fault | None = None, names: Sequence[str] = ()) -> list[Place]:
        places: list[Place] = []
        for name in names or self.configured:
            folder: Any = self.folders[name] if fault is None else FaultyFolder(self.folders[name], fault)
            places += [replace(place, root=name == "a") for place in sole_place(folder, self.folder, name)]
        return places

    def _bucket(
        self, store: LocalStore, places: list[Place], pointer: Pointer, batch: int, executor: Executor | None
    ) -> Bucket:
        writer = Writer("query", "run", batch, "simulated")
        return self._bucket_class(
            store,
            places,
            pointer,
            writer,
            self.folder,
            executor,
            self.config.retained,
            uploads=None if executor is None else executor.uploads,
            options=CommitOptions(
                self.config.journal, 1 << 40 if self.config.patient else 0, 1 << 40, self.config.inline_bytes_max
            ),
        )

    def _submit_clean_up(self, executor: Executor, pointer: Pointer, numbers: Numbers) -> None:
        """Of each backend that holds the pointer's state, with the listing of now, to be used later."""
        for name in self.configured:
            standings = pointer.standings or {"a": Standing(pointer.ref)}
            if is_complete(standings.get(name)) and standings[name].through is not None:
                self._submit_clean_up_of(name, standings[name].through, executor, pointer, numbers)

    def _submit_clean_up_of(
        self, of: str, head: CheckpointRef | None, executor: Executor, pointer: Pointer, numbers: Numbers
    ) -> None:
        entries = self.folders[of].entries()
        fault = self._fault(numbers) if numbers.below(4) == 0 else None
        files: Any = self.folders[of] if fault is None else FaultyFolder(self.folders[of], fault)
        committer = self._bucket(executor.machine.store, self._places(), pointer, self.batch, executor).committer
        # Files that may be deleted before another run takes the state over.
        left = numbers.below(6) if numbers.below(8) == 0 else 1 << 30

        def still_ours() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise LiveRunError("lost on purpose")

        def work() -> None:
            try:
                cleanup.clean_up(
                    files, pointer, self.config.retained, self.folder, still_ours, NOW_S, entries, head=head
                )
            except LostFilesError:
                committer.lose(of, pointer.beats)
            finally:
                gone = {entry.name for entry in entries} - set(self.folders[of].names())
                self.deleted += len(gone)
                # Where nothing goes wrong any more, it is enough to look at the end.
                if gone and not self._calm:
                    self.check()

        executor.submit(f"clean-up {uuid.uuid4()}", work)

    # -- checks ------------------------------------------------------------------------------------

    def reachable(self) -> list[Pointer]:
        """Every pointer that Spark may still hand out."""
        found = [p for b, p in self.committed.items() if b >= self._oldest()]
        if not self.config.checkpoint_v2:
            found += [e.loaded[self.batch] for e in self.executors if self.batch in e.loaded]
        return list({pointer.ref: pointer for pointer in found}.values())

    def check(self) -> None:
        """Each of them gives its writer's state on an empty disk. (Attempts check what executors have.)"""
        for pointer in self.reachable():
            # Each backend that says to hold everything, and where none does, all together.
            holding = [[name] for name in self.configured if self._holds(name, pointer)]
            for names in holding or [self.configured]:
                self._check_with(pointer, names)

    def _check_with(self, pointer: Pointer, names: Sequence[str]) -> None:
        # A disk for each, as what one needs may be inline in another.
        store = LocalStore(self.folder / f"fresh-{uuid.uuid4()}", SCHEMA, chunk_rows=4)
        try:
            self._check_on(store, pointer, names)
        finally:
            store.close()
            shutil.rmtree(store.folder)

    def _check_on(self, store: LocalStore, pointer: Pointer, names: Sequence[str]) -> None:
        expected = self.models[pointer.encode()]
        try:
            found = self._bucket(store, self._places(names=names), pointer, self.batch, None).read(scanned)
        except (CorruptError, MissingCheckpointError) as error:
            raise WrongStateError(f"{pointer.ref} of batch {pointer.batch} is lost: {error}") from error
        if found != expected:
            raise WrongStateError(f"{pointer.ref} of batch {pointer.batch} gives {found} and was written as {expected}")

    def calm(self) -> None:
        """Nothing goes wrong for a while; then little must be left of what did."""
        self._calm = True
        self._restart(Numbers(b"\0"))
        self.sleeping.clear()
        # What was pinned by processes that died stays so for an hour.
        self.executors[0].machine.lose()
        executor, retained, numbers = self.executors[0], self.config.retained, Numbers(b"calm")
        for batch in range(self.batch + 1, self.batch + 5 * retained + 16):
            attempt = Attempt(0, batch, self._handed_out(0, batch), changes_of(numbers), batch % 2 == 0)
            self._commit(batch, [self._surely(attempt, numbers)], numbers)
            while executor.waiting:
                self._work_off(executor, 0)
        self.check()
        self._check_little_is_left()

    def _check_little_is_left(self) -> None:
        for backend in self.configured:
            files = self.folders[backend]
            names = files.names()
            # A header that cannot be read stops clean-up, for somebody to look at.
            stopped = bool(self.damaged & {files.where(name) for name in names})
            if not stopped and len(names) > 6 * self.config.retained + 30:
                raise WrongStateError(f"{len(names)} files are left in {backend}: {names}")
        runs = self.executors[0].machine.store.runs()
        if len(runs) > 12:
            raise WrongStateError(f"{len(runs)} runs are left in the local store")


@contextmanager
def small(adopts: bool, classify: Callable[..., Any]) -> Iterator[None]:
    """Everything happens sooner, and one thing at a time, so that a history is the same again."""
    ids = random.Random(49374)
    values = (
        (bucket_module, "new_checkpoint_id", lambda: f"{ids.getrandbits(128):032x}"),
        (lineage_module, "DELTAS_MIN", 1),
        (lineage_module, "DELTAS_MAX", 2),
        (checkpoint, "_ADOPTED_BYTES_MIN", 0 if adopts else checkpoint._ADOPTED_BYTES_MIN),
        (loading, "_in_order", _one_by_one),
        (cleanup, "classify", classify),
    )
    before = [(module, name, getattr(module, name)) for module, name, _ in values]
    try:
        for module, name, value in values:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def simulate(history: History, bucket: type[Bucket] = Bucket, classify: Callable[..., Any] = cleanup.classify) -> World:
    """Run a history to its end; raises `WrongStateError` when anything is."""
    world = World(history.config, bucket, classify)
    try:
        with small(history.config.adopts, classify):
            for step in history.steps:
                world.step(step)
            world.check()
            if history.config.ends_calmly:
                world.calm()
    finally:
        world.close()
    return world


def _one_by_one(plan: Iterable[Fetch], read: Callable[[Fetch], Any]) -> Iterator[tuple[Fetch, Any]]:
    for fetch in plan:
        yield fetch, read(fetch)


def _fast_folder() -> str | None:
    """A folder in memory, where there is one: thousands of stores are made and removed."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


__all__ = ["Config", "History", "World", "WrongStateError", "simulate", "small"]
