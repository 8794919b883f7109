"""Parts of the simulated world: values, machines, executors and errors."""

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
from spark_state_ext.commit.cadence import SnapshotCadence
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
    "CADENCE",
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
# Snapshots are due so often that even short histories have several.
CADENCE = SnapshotCadence(1, 2)
# A background that is behind accepts at most this for each bucket: a snapshot, and a clean-up of two backends, twice.
WAITING_MAX = 6
UPLOAD = "upload"

Model = dict[int, int]
Changes = dict[int, "int | None"]
# Numbers from 0 to 255; the first one gives the kind of step.
Step = bytes


class WrongStateError(AssertionError):
    """A pointer's state differs from what its writer had, or is lost although Spark may hand the pointer out."""


@dataclass(frozen=True)
class BucketState:
    """What Spark's state holds of a bucket: the pointer, and when timeouts call the bucket."""

    pointer: Pointer
    due_ms: int | None = None


# By bucket number.
Partition = Mapping[int, BucketState]


@dataclass(frozen=True)
class Config:
    """Configuration of a history.

    Parameters
    ----------
    checkpoint_v2
        Whether Spark uses checkpoint format 2, in which the driver records which attempt counts. Format 1 finds state by
        batch number: in the batch's file, or in an executor's memory.
    last_wins
        Under format 1, whether a later attempt overwrites the file of an earlier one.
    retained
        Spark's minBatchesToRetain.
    ingests
        Whether snapshots are copied unchanged, like large ones; otherwise their rows are written to the environment.
    one_disk
        Whether two of the executors are on one machine.
    ends_calmly
        Whether the history ends with a time without failures, after which few files may be left.
    journal
        Whether deltas may go inline, and uploads take some time.
    inline_bytes_max
        Maximum size of inline deltas.
    patient
        Whether commits continue however long uploads take.
    buckets
        Number of the partition's buckets. With more than one, each attempt gives some rows to a random bucket.
    changelog
        Under format 1, whether a batch's file holds only the called buckets; otherwise it holds the whole partition.
    timeouts
        Whether there are processing-time timeouts, which call buckets in batches without data.
    replaces
        Whether a rename in the store of the checkpoint files replaces an existing file in one step.
    same_run
        Whether a query that starts again has the identity of its previous run.
    erase_window_ms
        Window of the erasure option, of which the time for removed rows is a multiple; 0 for no limit.
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


# Shared by all histories: their runs have unique names.
_PROBES = Probes()


def probe(key: str, run: str, committer: Committer, replicas: Sequence[Replica], pointer: Pointer) -> None:
    """Look for the files that backends confirmed, as a run's first call of a bucket does."""
    probes = _PROBES.start_once(
        key,
        run,
        partial(committer.with_confirmed, pointer),
        replicas,
        lambda name: committer.snapshots.note_lost(name, pointer.heartbeats),
    )
    _PROBES.await_all(probes)


@dataclass(frozen=True)
class Variant:
    """What is under test: the product or a broken variant of it.

    Parameters
    ----------
    bucket
        The class of buckets.
    classify
        Decides what clean-up deletes.
    next_call_ms
        Computes when a bucket asks to be called for timeouts.
    probe
        What a run's first call of a bucket does about lost files; gets the key, run, committer, replicas and pointer.
    patches
        Further replacements while a history runs: object, name and value.
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
        # Number of disks that it has had.
        self.disks = 1
        self._stores: dict[int | str, LocalStore] = {}

    @property
    def disk(self) -> tuple[Path, int]:
        """What distinguishes its disk from all others."""
        return self.folder, self.disks

    def open_store(self, bucket: int | str) -> LocalStore:
        """Open a bucket's store, by the bucket's number or another name."""
        if bucket not in self._stores:
            self._stores[bucket] = LocalStore.at(self.folder / str(bucket), SCHEMA, chunk_rows=4)
        return self._stores[bucket]

    def close(self) -> None:
        """Close all open stores."""
        while self._stores:
            self._stores.popitem()[1].close()

    def lose(self) -> None:
        """Replace the disk by an empty one."""
        self.close()
        self.disks += 1
        shutil.rmtree(self.folder, ignore_errors=True)


class LateUploads(WorkerUploads):
    """Uploads that begin when their executor works on them.

    Parameters
    ----------
    executor
        The executor.
    world
        All executors, because one may wait for another one's uploads.
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
        """Let this executor work on its uploads; if no uploads are given, let all executors do so."""
        for executor in [self._executor] if list(uploads) else self._world:
            while any(name == UPLOAD for name, _ in executor.waiting):
                at = next(at for at, (name, _) in enumerate(executor.waiting) if name == UPLOAD)
                try:
                    executor.waiting.pop(at)[1]()
                except DiedError:
                    executor.die()
        if self._executor.uploads is not self:
            # The waiting process died while it worked on something else.
            raise DiedError


class Memory(Protocol):
    """What an executor's memory holds of a partition."""

    loaded: dict[int, Partition]


@dataclass
class Executor:
    """What Spark has loaded in an executor's memory, by batch, and what waits in its workers' background."""

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
        """Keep a partition in memory; Spark keeps the last two versions."""
        self.loaded[batch] = partition
        for old_batch in sorted(self.loaded)[:-2]:
            del self.loaded[old_batch]

    def die(self) -> None:
        self.loaded.clear()
        self.waiting.clear()
        self.uploads = LateUploads(self, self.world)


@dataclass(frozen=True)
class Call:
    """A call of a bucket.

    Parameters
    ----------
    changes
        Changes to its rows.
    timeout_ms
        Earliest timeout of its keys after the call.
    """

    changes: Changes
    timeout_ms: int | None = None


@dataclass(frozen=True)
class Attempt:
    """A task: what Spark gave it and what it will do.

    Parameters
    ----------
    executor, batch, now_ms
        Where and when it runs.
    partition
        The partition that Spark handed out.
    calls
        Calls of the buckets that Spark calls.
    cleans
        Whether it submits clean-ups.
    heartbeat
        Whether the batch has data.
    switches
        Number of changes of the query's backends until then.
    run
        Its run and stage; if not given, it gets a stage of its own.
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
    """The numbers of a step, one after the other; when they are used up, random numbers that follow from them."""

    def __init__(self, step: Step) -> None:
        self._left = list(step)
        self._random = random.Random(step)

    def below(self, n: int) -> int:
        return (self._left.pop(0) if self._left else self._random.randrange(256)) % n

    def yes(self) -> bool:
        return self.below(2) == 0


def draw_changes(numbers: Numbers) -> Changes:
    changes: Changes = {}
    for _ in range(1 + numbers.below(3)):
        value = numbers.below(100)
        changes[numbers.below(KEYS)] = None if value < 20 else value
    return changes


def apply_changes(model: Model, changes: Changes) -> Model:
    merged = {**model, **{k: n for k, n in changes.items() if n is not None}}
    return {k: n for k, n in merged.items() if changes.get(k, n) is not None}


def buffer_changes(changes: Changes, scratch: Path, hashes: Mapping[int, int] | None = None) -> SpillBuffer:
    """Buffer changes for a commit; `hashes` gives the keys' hashes if they do not follow from the keys."""
    buffer = SpillBuffer(scratch, 1 << 20)
    if changes:
        keys, values = list(changes), list(changes.values())
        removed = [value is None for value in values]
        columns = [
            pa.array(
                np.array(keys, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
                if hashes is None
                else np.array([hashes[key] for key in keys], dtype=np.uint64)
            ),
            pa.array(keys, pa.int64()),
            pa.array(values, pa.int64()),
            pa.nulls(len(keys), pa.int64()),
            pa.array([not is_removed for is_removed in removed]),
            pa.array(removed),
        ]
        buffer.append(sort_by_hash(pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow)))
    return buffer


def scan_rows(view: View) -> Model:
    return {
        k: n
        for batch in view.scan()
        for k, n in zip(batch.column(1).to_pylist(), batch.column(2).to_pylist(), strict=True)
    }
