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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa

from arrow_schemas import CheckpointRef, Pointer, RowSchema, Writer
from arrow_schemas.lineage import DELTA, SNAPSHOT, parse_file_name
from spark_state_ext import checkpoint, cleanup
from spark_state_ext import lineage as lineage_module
from spark_state_ext.backend import Backend
from spark_state_ext.background import Work
from spark_state_ext.bucket import Bucket
from spark_state_ext.errors import CorruptError, MissingCheckpointError, StorageError
from spark_state_ext.spill import SpillBuffer
from spark_state_ext.store import LocalStore, View
from spark_state_ext.store.runs import sorted_run

SCHEMA = RowSchema((pa.field("k", pa.int64()),), (pa.field("n", pa.int64()),))
KEYS = 6
EXECUTORS = 3
DAY_S = 86_400.0

Model = dict[int, int]
Changes = dict[int, "int | None"]
# Numbers from 0 to 255.
Step = bytes

STEPS = (
    "batch",  # one or several attempts at the next batch, some of which die or fall asleep
    "batch",
    "batch",
    "batch",
    "twice",  # some batches that two executors run both, as with two actions in foreachBatch
    "twice",
    "quiet",  # a batch without changes
    "work",  # an executor gets to what waits in its background
    "work",
    "zombie",  # an attempt of an earlier batch wakes up
    "restart",  # the query starts again, at any batch that Spark retains
    "lose disk",  # an executor loses its local store
    "lose memory",  # an executor's processes die: what it had loaded and what waited is gone
    "damage",  # a snapshot is damaged, once a history
)


class WrongStateError(AssertionError):
    """The state that a pointer gave is not the one its writer had, or is gone though Spark may hand it out."""


class _DiedError(Exception):
    """The process dies at this line."""


@dataclass(frozen=True)
class Config:
    """What stays the same over a history.

    Parameters
    ----------
    checkpoint_v2
        Spark's checkpoint format 2: the driver notes which attempt counts. Format 1 finds state by batch number: what is
        in its file, or what an executor has in memory.
    last_wins
        Under format 1, a later attempt overwrites the file of an earlier one.
    retained
        Spark's minBatchesToRetain.
    adopts
        Snapshots are copied as they are, as large ones are; else they go into the environment.
    """

    checkpoint_v2: bool
    last_wins: bool
    retained: int
    adopts: bool


@dataclass(frozen=True)
class History:
    """A configuration and steps."""

    config: Config
    steps: tuple[Step, ...]


@dataclass
class Executor:
    """One machine: its disk, what it has loaded, and what waits in its background."""

    folder: Path
    store: LocalStore | None = None
    loaded: tuple[int, Pointer] | None = None
    waiting: list[tuple[str, Work]] = field(default_factory=list)

    def submit(self, name: str, work: Work) -> bool:
        self.waiting.append((name, work))
        return True

    def busy(self, name: str) -> bool:
        return any(waiting == name for waiting, _ in self.waiting)

    def opened(self) -> LocalStore:
        if self.store is None:
            self.store = LocalStore(self.folder, SCHEMA, chunk_rows=4)
        return self.store

    def die(self) -> None:
        self.loaded = None
        self.waiting.clear()
        if self.store is not None:
            self.store.close()
            self.store = None


class Fault:
    """Which of the next operations on files fails, how, and whether it was done all the same."""

    def __init__(self, at: int, kills: bool, after: bool) -> None:
        self.left = at
        self.kills = kills
        self.after = after

    def hit(self) -> bool:
        self.left -= 1
        return self.left == -1


class FaultyBackend:
    """A backend of which one operation fails."""

    def __init__(self, real: Backend, fault: Fault) -> None:
        self._real = real
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if name in ("where", "root", "child"):
            return found

        def call(*args: Any) -> Any:
            failing = self._fault.hit()
            if failing and not self._fault.after:
                self._fail(name)
            result = found(*args)
            if failing:
                self._fail(name)
            return result

        return call

    def _fail(self, name: str) -> None:
        if self._fault.kills:
            raise _DiedError(name)
        raise StorageError(f"{name} fails on purpose")


@dataclass(frozen=True)
class Attempt:
    """A task: what it was told and what it will do."""

    executor: int
    batch: int
    pointer: Pointer
    changes: Changes
    cleans: bool


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
        self.files = Backend(f"memory://{self._name}/3")
        self.folder = Path(tempfile.mkdtemp(prefix="simulation-", dir=_fast_folder()))
        self.executors = [Executor(self.folder / str(i)) for i in range(EXECUTORS)]
        first = Pointer("simulated", 3, 8, 0, -1, None)
        self.batch = -1
        self.newest_ever = -1
        # What the driver finds for each batch, and the model of every pointer.
        self.committed: dict[int, Pointer] = {-1: first}
        self.models: dict[bytes, Model] = {first.encode(): {}}
        self.sleeping: list[Attempt] = []
        self.damaged = False
        self.now_s = 0.0
        self.deleted = 0
        self.commits = 0

    def close(self) -> None:
        """Remove everything."""
        for executor in self.executors:
            executor.die()
        shutil.rmtree(self.folder, ignore_errors=True)
        memory = fsspec.filesystem("memory")
        if memory.exists(f"/{self._name}"):
            memory.rm(f"/{self._name}", recursive=True)

    # -- steps -------------------------------------------------------------------------------------

    def step(self, step: Step) -> None:
        """Take one step."""
        numbers = _Numbers(step)
        kind = STEPS[numbers.below(len(STEPS))]
        getattr(self, f"_{kind.replace(' ', '_')}")(numbers)

    def _batch(self, numbers: _Numbers) -> None:
        """Attempts at the next batch one after the other, until those that the numbers ask for are done."""
        batch = self.batch + 1
        done: list[Pointer] = []
        for _ in range(1 + numbers.below(3)):
            executor = numbers.below(EXECUTORS)
            pointer = self._handed_out(executor, batch)
            # Not deterministic: each attempt does what it likes.
            attempt = Attempt(executor, batch, pointer, _changes(numbers), numbers.below(2) == 0)
            fate = numbers.below(6)
            if fate == 0:
                self.sleeping.append(attempt)
                continue
            fault = Fault(numbers.below(8), numbers.below(2) == 0, numbers.below(2) == 0) if fate == 1 else None
            made = self._run(attempt, fault)
            if made is not None:
                done.append(made)
        if not done:
            # The driver tries until one succeeds.
            executor = numbers.below(EXECUTORS)
            made = self._run(Attempt(executor, batch, self._handed_out(executor, batch), _changes(numbers), True), None)
            assert made is not None, "nothing was made to fail"
            done.append(made)
        self._commit(batch, done, numbers)

    def _twice(self, numbers: _Numbers) -> None:
        """Each executor goes on from what it has in memory: under format 1 two lineages go on in parallel."""
        busy = numbers.below(2) == 0
        for _ in range(1 + numbers.below(6)):
            batch = self.batch + 1
            done = []
            for executor in (0, 1):
                changes = _changes(numbers) if busy or executor == 0 else {}
                attempt = Attempt(executor, batch, self._handed_out(executor, batch), changes, numbers.below(2) == 0)
                made = self._run(attempt, None)
                if made is not None:
                    done.append(made)
            if not done:
                return
            self._commit(batch, done, numbers)
            if numbers.below(2):
                self._work(numbers)

    def _quiet(self, numbers: _Numbers) -> None:
        batch = self.batch + 1
        executor = numbers.below(EXECUTORS)
        made = self._run(Attempt(executor, batch, self._handed_out(executor, batch), {}, True), None)
        assert made is not None, "nothing was made to fail"
        self._commit(batch, [made], numbers)

    def _commit(self, batch: int, done: Sequence[Pointer], numbers: _Numbers) -> None:
        if self.config.checkpoint_v2:
            chosen = done[numbers.below(len(done))]
        else:
            chosen = done[-1] if self.config.last_wins else done[0]
        self.committed[batch] = chosen
        self.batch = batch
        self.newest_ever = max(self.newest_ever, batch)
        self.now_s += (0.0, DAY_S / 2, 2 * DAY_S)[numbers.below(3)]

    def _zombie(self, numbers: _Numbers) -> None:
        if not self.sleeping:
            return
        attempt = self.sleeping.pop(numbers.below(len(self.sleeping)))
        made = self._run(attempt, None, zombie=True)
        if made is not None and not self.config.checkpoint_v2 and self.config.last_wins and attempt.batch <= self.batch:
            # It overwrites the file of its batch, whatever has happened since.
            self.committed[attempt.batch] = made

    def _work(self, numbers: _Numbers) -> None:
        executor = self.executors[numbers.below(EXECUTORS)]
        for _ in range(1 + numbers.below(8)):
            if not executor.waiting:
                return
            _, work = executor.waiting.pop(numbers.below(len(executor.waiting)))
            try:
                work()
            except (StorageError, MissingCheckpointError, CorruptError):
                continue  # logged, in the real one
            except _DiedError:
                executor.die()

    def _restart(self, numbers: _Numbers) -> None:
        """The query ends and starts again, at a batch that Spark still has; another application, or the same."""
        oldest = max(-1, self.newest_ever - self.config.retained)
        batches = [b for b in self.committed if oldest <= b <= self.batch]
        self.batch = batches[numbers.below(len(batches))]
        for batch in [b for b in self.committed if b > self.batch]:
            del self.committed[batch]
        for executor in self.executors:
            executor.loaded = None
            if numbers.below(2):
                executor.die()

    def _lose_disk(self, numbers: _Numbers) -> None:
        executor = self.executors[numbers.below(EXECUTORS)]
        executor.die()
        shutil.rmtree(executor.folder, ignore_errors=True)

    def _lose_memory(self, numbers: _Numbers) -> None:
        self.executors[numbers.below(EXECUTORS)].die()

    def _damage(self, numbers: _Numbers) -> None:
        snapshots = [n for n in self.files.names() if (parse_file_name(n) or (None, ""))[1] == SNAPSHOT]
        if self.damaged or not snapshots:
            return
        self.damaged = True
        name = snapshots[numbers.below(len(snapshots))]
        data = bytearray(self.files.get(name))
        data[numbers.below(len(data))] ^= 0xFF
        self.files.put(name, bytes(data))

    # -- attempts ----------------------------------------------------------------------------------

    def _handed_out(self, executor: int, batch: int) -> Pointer:
        """The pointer that Spark gives a task of a batch on an executor."""
        loaded = self.executors[executor].loaded
        if not self.config.checkpoint_v2 and loaded is not None and loaded[0] == batch - 1:
            return loaded[1]
        return self.committed[batch - 1]

    def _run(self, attempt: Attempt, fault: Fault | None, zombie: bool = False) -> Pointer | None:
        """A task from its pointer to its new one; None when it failed."""
        executor = self.executors[attempt.executor]
        files: Any = self.files if fault is None else FaultyBackend(self.files, fault)
        bucket = self._bucket(executor.opened(), files, attempt.pointer, attempt.batch, executor)
        expected = self.models[attempt.pointer.encode()]
        # What is so old that Spark does not retain it may be cleaned up; it must not be anything else.
        excused = zombie and attempt.batch <= self.newest_ever - self.config.retained
        try:
            found = bucket.read(_scanned)
            if found != expected:
                raise WrongStateError(
                    f"batch {attempt.batch} read {found}; {attempt.pointer.ref} was written as {expected}"
                )
            made = bucket.commit(_rows(attempt.changes, self.folder))
        except _DiedError:
            executor.die()
            return None
        except StorageError:
            return None
        except (CorruptError, MissingCheckpointError) as error:
            if excused or self._may_be_lost():
                return None
            raise WrongStateError(f"batch {attempt.batch} cannot read {attempt.pointer.ref}: {error}") from error
        made = replace(made, batch=attempt.batch)
        self.models[made.encode()] = _changed(expected, attempt.changes)
        self.commits += 1
        executor.loaded = (attempt.batch, made)
        if attempt.cleans:
            executor.submit("clean-up", lambda: self._clean_up(attempt.pointer))
        return made

    def _bucket(self, store: LocalStore, files: Any, pointer: Pointer, batch: int, executor: Executor | None) -> Bucket:
        writer = Writer("query", "run", batch, "simulated")
        return self._bucket_class(store, files, pointer, writer, self.folder, executor, self.config.retained)

    def _clean_up(self, pointer: Pointer) -> None:
        real = cleanup.classify
        cleanup.classify = self._classify
        try:
            # In this world files are as old as the test, so the clock is what moves.
            now_s = 4e9 + self.now_s
            deleted = cleanup.clean_up(self.files, pointer, self.config.retained, self.folder, lambda: None, now_s)
        finally:
            cleanup.classify = real
        self.deleted += deleted
        if deleted:
            self.check()

    def _may_be_lost(self) -> bool:
        """Whether the one damaged snapshot may be all that a lineage had: those in parallel keep one only."""
        return self.damaged and not self.config.checkpoint_v2

    # -- checks ------------------------------------------------------------------------------------

    def reachable(self) -> list[Pointer]:
        """Every pointer that Spark may still hand out."""
        found = [p for b, p in self.committed.items() if b >= self.newest_ever - self.config.retained]
        if not self.config.checkpoint_v2:
            found += [e.loaded[1] for e in self.executors if e.loaded is not None and e.loaded[0] == self.batch]
        return found

    def check(self) -> None:
        """Each of them gives its writer's state on an empty disk. (Attempts check what executors have.)"""
        folder = self.folder / "fresh"
        fresh = LocalStore(folder, SCHEMA, chunk_rows=4)
        try:
            for pointer in self.reachable():
                self._check(fresh, pointer)
        finally:
            fresh.close()
            shutil.rmtree(folder)

    def _check(self, store: LocalStore, pointer: Pointer) -> None:
        expected = self.models[pointer.encode()]
        try:
            found = self._bucket(store, self.files, pointer, self.batch, None).read(_scanned)
        except (CorruptError, MissingCheckpointError) as error:
            if self._may_be_lost():
                return
            raise WrongStateError(f"{pointer.ref} of batch {pointer.batch} is lost: {error}") from error
        if found != expected:
            raise WrongStateError(f"{pointer.ref} of batch {pointer.batch} gives {found} and was written as {expected}")


class _Numbers:
    """Small numbers of a step, one after the other; when they are used up, others that follow from them."""

    def __init__(self, step: Step) -> None:
        self._left = list(step)
        self._further = random.Random(step)

    def below(self, n: int) -> int:
        return (self._left.pop(0) if self._left else self._further.randrange(256)) % n


def simulate(history: History, bucket: type[Bucket] = Bucket, classify: Callable[..., Any] = cleanup.classify) -> World:
    """Run a history to its end; raises `WrongStateError` when anything is."""
    world = World(history.config, bucket, classify)
    minimum, maximum = lineage_module.DELTAS_MIN, lineage_module.DELTAS_MAX
    adopted = checkpoint._ADOPTED_BYTES_MIN
    lineage_module.DELTAS_MIN, lineage_module.DELTAS_MAX = 1, 2
    checkpoint._ADOPTED_BYTES_MIN = 0 if history.config.adopts else adopted
    try:
        for step in history.steps:
            world.step(step)
        world.check()
    finally:
        lineage_module.DELTAS_MIN, lineage_module.DELTAS_MAX = minimum, maximum
        checkpoint._ADOPTED_BYTES_MIN = adopted
        world.close()
    return world


def _changes(numbers: _Numbers) -> Changes:
    changes: Changes = {}
    for _ in range(1 + numbers.below(3)):
        value = numbers.below(100)
        changes[numbers.below(KEYS)] = None if value < 20 else value
    return changes


def _changed(model: Model, changes: Changes) -> Model:
    after = {**model, **{k: n for k, n in changes.items() if n is not None}}
    return {k: n for k, n in after.items() if changes.get(k, n) is not None}


def _rows(changes: Changes, scratch: Path) -> SpillBuffer:
    buffer = SpillBuffer(scratch, 1 << 20)
    if changes:
        keys, values = list(changes), list(changes.values())
        gone = [value is None for value in values]
        columns = [
            pa.array(np.array(keys, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)),
            pa.array(keys, pa.int64()),
            pa.array(values, pa.int64()),
            pa.nulls(len(keys), pa.int64()),
            pa.array([not g for g in gone]),
            pa.array(gone),
        ]
        buffer.append(sorted_run(pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow)))
    return buffer


def _scanned(view: View) -> Model:
    return {
        k: n
        for batch in view.scan()
        for k, n in zip(batch.column(1).to_pylist(), batch.column(2).to_pylist(), strict=True)
    }


def _fast_folder() -> str | None:
    """A folder in memory, where there is one: thousands of stores are made and removed."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


__all__ = ["DELTA", "CheckpointRef", "Config", "History", "World", "WrongStateError", "simulate"]
