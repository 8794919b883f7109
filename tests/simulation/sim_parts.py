"""Parts of the simulated world: values, machines, and what fails."""

from __future__ import annotations

import random
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from sim_stores import DiedError

from arrow_schemas import Pointer, RowSchema
from spark_state_ext.backends.replication import Replica
from spark_state_ext.commit.committer import Committer
from spark_state_ext.commit.failures import Run
from spark_state_ext.commit.uploads import Upload, WorkerUploads
from spark_state_ext.engine import aligned_timeouts
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.engine.probes import Probes
from spark_state_ext.files import retention
from spark_state_ext.files.retention import Decision
from spark_state_ext.store import LocalStore, View
from spark_state_ext.store.runs import sort_by_hash
from spark_state_ext.worker.background import Work
from spark_state_ext.worker.spill import SpillBuffer

__all__ = [
    "KEYS",
    "SCHEMA",
    "UPLOAD",
    "Attempt",
    "Variant",
    "Call",
    "Changes",
    "Config",
    "Executor",
    "BucketState",
    "History",
    "Machine",
    "Memory",
    "Model",
    "Numbers",
    "Partition",
    "WrongStateError",
    "apply_changes",
    "draw_changes",
    "probe",
    "buffer_changes",
    "scan_rows",
]

SCHEMA = RowSchema((pa.field("k", pa.int64()),), (pa.field("n", pa.int64()),))
KEYS = 6
# A background that does not keep up takes no more than this for each bucket: a snapshot, and a clean-up of two backends, twice.
WAITING_MAX = 6
UPLOAD = "upload"

Model = dict[int, int]
Changes = dict[int, "int | None"]
# Numbers from 0 to 255.
Step = bytes


class WrongStateError(AssertionError):
    """The state that a pointer gave is not the one its writer had, or is gone though Spark may hand it out."""


@dataclass(frozen=True)
class BucketState:
    """What Spark's state holds of a bucket: the pointer, and when the bucket is called for timeouts."""

    pointer: Pointer
    due_ms: int | None = None


# By bucket.
Partition = Mapping[int, BucketState]


@dataclass(frozen=True)
class Config:
    """What stays the same over a history.

    Parameters
    ----------
    checkpoint_v2
        Spark's checkpoint format 2: the driver records which attempt counts. Format 1 finds state by batch number: what is
        in its file, or what an executor has in memory.
    last_wins
        Under format 1, a later attempt overwrites the file of an earlier one.
    retained
        Spark's minBatchesToRetain.
    ingests
        Snapshots are copied as they are, as large ones are; else they go into the environment.
    one_disk
        Two of the executors are on one machine.
    ends_calmly
        At the end nothing goes wrong for a while, after which there must be few files.
    journal
        Deltas may go inline, and uploads take their time.
    inline_bytes_max
        How many.
    patient
        Commits go on however long uploads take.
    buckets
        How many the partition has. With more than one there are rows that each attempt gives to one of them by chance.
    changelog
        Under format 1, a batch's file holds only what was called; else it holds the whole partition.
    timeouts
        There are processing-time timeouts, which call buckets in batches without data.
    replaces
        In the store of the checkpoint files, a file takes another one's place in one step.
    same_run
        The query that starts again has the identity of the run before.
    erase_window_ms
        Removed rows have to be gone within a time, of which this is a part; 0: they need not.
    """

    checkpoint_v2: bool
    last_wins: bool
    retained: int
    ingests: bool
    one_disk: bool = False
    ends_calmly: bool = False
    journal: bool = False
    inline_bytes_max: int = 1 << 20
    patient: bool = True
    buckets: int = 1
    changelog: bool = False
    timeouts: bool = False
    replaces: bool = True
    same_run: bool = False
    erase_window_ms: int = 0


@dataclass(frozen=True)
class History:
    """A configuration and steps."""

    config: Config
    steps: tuple[Step, ...]


# Runs of histories have names of their own.
_PROBES = Probes()


def probe(key: str, run: str, committer: Committer, replicas: Sequence[Replica], pointer: Pointer) -> None:
    """Look for what backends confirmed, as a run's first call of a bucket does."""
    begun = _PROBES.start_once(
        key,
        run,
        partial(committer.with_confirmed, pointer),
        replicas,
        lambda name: committer.snapshots.note_lost(name, pointer.heartbeats),
    )
    _PROBES.await_all(begun)


@dataclass(frozen=True)
class Variant:
    """What is under test: what is built, or a variant of it.

    Parameters
    ----------
    bucket
        Class of buckets.
    classify
        Clean-up's decision.
    next_call_ms
        When a bucket asks to be called for timeouts.
    probe
        What a run's first call of a bucket does about files that are gone: key, run, committer, replicas, pointer.
    patches
        What else is put in its place while a history runs: object, name, value.
    """

    bucket: type[Bucket] = Bucket
    classify: Callable[..., Decision] = retention.classify
    next_call_ms: Callable[..., int | None] = aligned_timeouts.compute_next_call_ms
    probe: Callable[[str, str, Committer, Sequence[Replica], Pointer], None] = probe
    patches: tuple[tuple[Any, str, Any], ...] = ()


class Machine:
    """A local disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # How many disks it has had.
        self.disks = 1
        self._stores: dict[int | str, LocalStore] = {}

    @property
    def disk(self) -> tuple[Path, int]:
        """What tells its disk from all others."""
        return self.folder, self.disks

    def store(self, bucket: int | str) -> LocalStore:
        """A bucket's store on it, by the bucket's number or its own name."""
        if bucket not in self._stores:
            self._stores[bucket] = LocalStore.at(self.folder / str(bucket), SCHEMA, chunk_rows=4)
        return self._stores[bucket]

    def close(self) -> None:
        """Close what is open."""
        while self._stores:
            self._stores.popitem()[1].close()

    def lose(self) -> None:
        """The disk is empty."""
        self.close()
        self.disks += 1
        shutil.rmtree(self.folder, ignore_errors=True)


class LateUploads(WorkerUploads):
    """Uploads that begin when their executor gets to them.

    Parameters
    ----------
    executor
        The executor.
    world
        All of them, as one may wait for what another has under way.
    """

    def __init__(self, executor: Executor, world: list[Executor]) -> None:
        super().__init__()
        self.owner = uuid.uuid4().hex
        self._executor = executor
        self._world = world

    def _begin(self, upload: Upload) -> None:
        self._executor.waiting.append((UPLOAD, lambda: super(LateUploads, self)._begin(upload)))

    def is_alive(self, owner: str) -> bool:
        return any(executor.uploads.owner == owner for executor in self._world)

    def pause(self, uploads: Iterable[Upload], timeout_s: float) -> None:
        """Who is waited for gets to uploads, in whatever order they wait in: this executor, or else everybody."""
        for executor in [self._executor] if list(uploads) else self._world:
            while any(name == UPLOAD for name, _ in executor.waiting):
                at = next(at for at, (name, _) in enumerate(executor.waiting) if name == UPLOAD)
                try:
                    executor.waiting.pop(at)[1]()
                except DiedError:
                    executor.die()
        if self._executor.uploads is not self:
            # The process that waits died in the middle of something else.
            raise DiedError


class Memory(Protocol):
    """What an executor has of a partition."""

    loaded: dict[int, Partition]


@dataclass
class Executor:
    """What Spark has loaded in its memory, by batch, and what waits in its workers' background."""

    machine: Machine
    world: list[Executor] = field(default_factory=list)
    buckets: int = 1
    loaded: dict[int, Partition] = field(default_factory=dict)
    waiting: list[tuple[str, Work]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.uploads = LateUploads(self, self.world)

    def submit(self, name: str, work: Work) -> bool:
        if sum(waiting != UPLOAD for waiting, _ in self.waiting) >= WAITING_MAX * self.buckets:
            return False
        self.waiting.append((name, work))
        return True

    def busy(self, name: str) -> bool:
        return any(waiting == name for waiting, _ in self.waiting)

    def load(self, batch: int, partition: Partition) -> None:
        """Spark keeps the last two versions."""
        self.loaded[batch] = partition
        for old in sorted(self.loaded)[:-2]:
            del self.loaded[old]

    def die(self) -> None:
        self.loaded.clear()
        self.waiting.clear()
        self.uploads = LateUploads(self, self.world)


@dataclass(frozen=True)
class Call:
    """What a bucket's call does.

    Parameters
    ----------
    changes
        To its rows.
    timeout_ms
        The earliest timeout of its keys afterwards.
    """

    changes: Changes
    timeout_ms: int | None = None


@dataclass(frozen=True)
class Attempt:
    """A task: what it was told and what it will do.

    Parameters
    ----------
    executor, batch, now_ms
        Where and when.
    partition
        What Spark handed out.
    calls
        Of the buckets that Spark calls.
    cleans
        Whether it has files cleaned up.
    heartbeat
        Whether the batch has data.
    switches
        How often the query had changed its backends by then.
    run
        Of which run and stage; of a stage of its own where not given.
    """

    executor: int
    batch: int
    partition: Partition
    calls: Mapping[int, Call]
    cleans: bool
    heartbeat: bool = True
    switches: int = 0
    now_ms: int = 0
    run: Run | None = None


class Numbers:
    """Small numbers of a step, one after the other; when they are used up, others that follow from them."""

    def __init__(self, step: Step) -> None:
        self._left = list(step)
        self._further = random.Random(step)

    def below(self, n: int) -> int:
        return (self._left.pop(0) if self._left else self._further.randrange(256)) % n

    def yes(self) -> bool:
        return self.below(2) == 0


def draw_changes(numbers: Numbers) -> Changes:
    changes: Changes = {}
    for _ in range(1 + numbers.below(3)):
        value = numbers.below(100)
        changes[numbers.below(KEYS)] = None if value < 20 else value
    return changes


def apply_changes(model: Model, changes: Changes) -> Model:
    after = {**model, **{k: n for k, n in changes.items() if n is not None}}
    return {k: n for k, n in after.items() if changes.get(k, n) is not None}


def buffer_changes(changes: Changes, scratch: Path, hashes: Mapping[int, int] | None = None) -> SpillBuffer:
    """As a commit takes them; with the hashes of their keys, where these do not follow from the keys."""
    buffer = SpillBuffer(scratch, 1 << 20)
    if changes:
        keys, values = list(changes), list(changes.values())
        gone = [value is None for value in values]
        columns = [
            pa.array(
                np.array(keys, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
                if hashes is None
                else np.array([hashes[key] for key in keys], dtype=np.uint64)
            ),
            pa.array(keys, pa.int64()),
            pa.array(values, pa.int64()),
            pa.nulls(len(keys), pa.int64()),
            pa.array([not g for g in gone]),
            pa.array(gone),
        ]
        buffer.append(sort_by_hash(pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow)))
    return buffer


def scan_rows(view: View) -> Model:
    return {
        k: n
        for batch in view.scan()
        for k, n in zip(batch.column(1).to_pylist(), batch.column(2).to_pylist(), strict=True)
    }
