"""Spark as `take_savepoint` sees it: a session whose tasks run in this process, and a reader of the simulated state.

The client and its tasks run the product's code. Between any two of their steps the work may pause.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from sim_aside import die, pause
from sim_parts import BucketState, Model, Numbers, WrongStateError

from arrow_schemas.pointer import Pointer
from spark_state_ext.errors import StateError
from spark_state_ext.ownership.holds import HOLD_MS, Hold
from spark_state_ext.spark.client import savepoints, tasks
from spark_state_ext.spark.client.state_reader import CommittedBatch, StoreOfState
from spark_state_ext.spark.executor import savepoint_tasks

if TYPE_CHECKING:
    from sim_savepoints import SavepointWorld

__all__ = ["HOLD_S", "Session", "SimReader", "Taker", "list_spark_patches"]

HOLD_S = HOLD_MS / 1000
_POINTERS = pa.schema([("pointer", pa.binary())])


@dataclass
class Taker:
    """A process that copies from the query's folder.

    Parameters
    ----------
    world
        The world of the query.
    numbers
        Decide when it pauses or dies.
    lasts_s
        How long its hold lasts.
    """

    world: SavepointWorld
    numbers: Numbers
    lasts_s: float = HOLD_S
    hold: Hold | None = None
    renewed_s: float = 0.0
    # Whether a task copies now; its process renews the hold meanwhile.
    copies: bool = False
    # Whether its process is suspended for a while, so that the hold is not renewed during a copy.
    asleep: bool = False
    # Whether the hold was always renewed in time.
    renewed_in_time: bool = True
    # The query's backends when it began; and whether the query has had other backends since.
    backends_known: tuple[str, ...] = ()
    misses_backends: bool = False
    # By the model: the batch that was read, and the state of each bucket at that batch.
    batch: int = -1
    expected: dict[int, Model] = field(default_factory=dict)

    def note_hold(self, hold_id: str) -> None:
        """Note that its hold was placed."""
        self.hold, self.renewed_s = Hold(self.world.query_folder, hold_id), self.world.shared.now_s

    def pass_time(self, now_s: float, renewed: bool = False) -> None:
        """Let time pass; with `renewed`, a process that copies has renewed its hold meanwhile."""
        if self.hold is None:
            return
        copies = self.copies and not self.asleep
        if now_s - self.renewed_s > self.lasts_s and not (copies and renewed):
            self.renewed_in_time = False
        if copies:
            try:
                self.hold.renew()
            except StateError as error:
                if self.renewed_in_time:
                    raise WrongStateError(f"a hold that was renewed in time is lost: {error}") from error
                return  # the product logs it
            self.renewed_s = now_s

    def run(self, task: Task, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run a task. If the hold is lost, the task must fail before it copies anything."""
        work = getattr(savepoint_tasks, task.what)
        if task.what != "save":
            for row in work(task.plain, batches):
                if task.what == "begin":
                    # The hold begins now, however long it takes until the client gets its id.
                    self.note_hold(json.loads(row.column(0)[0].as_py())["hold"])
                yield row
            return
        assert self.hold is not None, "it is placed first"
        lost, self.copies = not self.hold._numbers(), True
        self.asleep = self.numbers.below(4) == 0
        self.renewed_s = self.world.shared.now_s
        try:
            for row in work(task.plain, batches):
                if lost:
                    raise WrongStateError(f"a savepoint of batch {self.batch} continues without its hold")
                yield row
        finally:
            self.copies = False

    def pause(self) -> None:
        """Pause or die between two steps."""
        if self.numbers.below(50) == 0:
            die()
        if self.numbers.below(2):
            pause()


class Frame:
    """A simulated DataFrame: batches, and tasks that run when the rows are collected."""

    def __init__(self, taker: Taker, batches: Callable[[], Iterable[pa.RecordBatch]]) -> None:
        self._taker = taker
        self._batches = batches

    def coalesce(self, _: int) -> Frame:
        return self

    def mapInArrow(self, task: Task, _: str) -> Frame:
        return Frame(self._taker, lambda: self._taker.run(task, self._batches()))

    def collect(self) -> list[Any]:
        self._taker.pause()
        rows = [SimpleNamespace(**row) for batch in self._batches() for row in batch.to_pylist()]
        self._taker.pause()
        return rows


class Session:
    """A simulated SparkSession, in which one savepoint is taken."""

    def __init__(self, taker: Taker) -> None:
        self.taker = taker

    def range(self, _: int) -> Frame:
        return Frame(self.taker, lambda: ())

    def createDataFrame(self, rows: Sequence[tuple[Any, ...]], schema: str) -> Frame:
        names = [column.split()[0] for column in schema.split(",")]
        batch = pa.RecordBatch.from_pydict(
            {name: [row[at] for row in rows] for at, name in enumerate(names)} if rows else {name: [] for name in names}
        )
        return Frame(self.taker, lambda: (batch,))


class SimReader:
    """Replaces `StateReader`: reads what Spark's files hold now."""

    def __init__(self, spark: Session, location: str) -> None:
        self.taker = spark.taker
        self.world = spark.taker.world

    def stores(self) -> list[StoreOfState]:
        return [StoreOfState(0, "default", "simulated", self.world.query_folder.name)]

    def batch(self, batch: int | None = None) -> CommittedBatch:
        wanted = self.world.batch if batch is None else batch
        self.taker.batch = wanted
        return CommittedBatch("a query", wanted, tuple(range(wanted + 1, self.world.batch + 1)), "", {0: "simulated"})

    def has(self, batch: int) -> bool:
        return batch in self.world.spark.batches

    @contextmanager
    def pointers(self, store: StoreOfState, batch: int) -> Iterator[Frame]:
        yield Frame(self.taker, lambda: self._read(batch))

    def read(self, batch: int) -> dict[int, BucketState]:
        """Return what Spark's files hold after a batch."""
        return dict(self.world.spark.at(batch))

    def _read(self, batch: int) -> Iterator[pa.RecordBatch]:
        taker, world = self.taker, self.world
        if not self.has(batch):
            raise RuntimeError(f"Spark has dropped batch {batch}")
        taker.expected = {b: world.models[state.pointer.encode()] for b, state in world.spark.at(batch).items()}
        states = self.read(batch)
        empty = [world.make_empty_pointer(bucket) for bucket in world.other_buckets]
        for pointers in itertools.chain([empty], ([state.pointer] for state in states.values())):
            yield _make_batch(pointers)
            taker.pause()


def _make_batch(pointers: Iterable[Pointer]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array([pointer.encode() for pointer in pointers], pa.binary())], schema=_POINTERS
    )


@dataclass(frozen=True)
class Task:
    """Replaces the result of `task_functions.task_entry`, without the border to Spark's worker, which changes errors."""

    task: str
    plain: dict[str, Any]

    @property
    def what(self) -> str:
        module, _, function = self.task.partition(".")
        if module != "savepoint_tasks":
            raise AssertionError(f"no history has a task of {module}")
        return function


def list_spark_patches(reader: type[SimReader] = SimReader) -> list[tuple[Any, str, Any]]:
    """Replacements of Spark's parts while a history runs.

    Parameters
    ----------
    reader
        Class that reads Spark's state.
    """
    return [
        (tasks, "task_entry", Task),
        (savepoints, "task_entry", Task),
        (savepoints, "StateReader", reader),
    ]
