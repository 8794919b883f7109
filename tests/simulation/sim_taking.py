"""Spark as `take_savepoint` sees it: a session whose tasks run here, and a reader of the simulated state.

What the client and its tasks do is the product's code. Between any two of its steps the work may pause.
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

__all__ = ["HOLD_S", "Session", "SimReader", "Taking", "spark_parts"]

HOLD_S = HOLD_MS / 1000
_POINTERS = pa.schema([("pointer", pa.binary())])


@dataclass
class Taking:
    """Somebody who copies from the query's folder.

    Parameters
    ----------
    world
        The query's.
    numbers
        How it goes.
    lasts_s
        How long its hold lasts.
    """

    world: SavepointWorld
    numbers: Numbers
    lasts_s: float = HOLD_S
    hold: Hold | None = None
    renewed_s: float = 0.0
    # A task copies, and renews the hold beside that.
    copies: bool = False
    # Its process stands still for a while: nothing is renewed beside a copy.
    asleep: bool = False
    # It was never silent for longer than its hold lasts.
    in_time: bool = True
    # Backends that it knows, as the query had them when it began; and whether the query has had others since.
    named: tuple[str, ...] = ()
    misses_some: bool = False
    # By the model: the batch that was read, and the state of each bucket then.
    batch: int = -1
    expected: dict[int, Model] = field(default_factory=dict)

    def began(self, hold_id: str) -> None:
        """Its hold was placed."""
        self.hold, self.renewed_s = Hold(self.world.query_folder, hold_id), self.world.yard.now_s

    def passed(self, now_s: float, renewed: bool = False) -> None:
        """Time has passed; in little steps, or the hold was renewed meanwhile where somebody copies."""
        if self.hold is None:
            return
        copies = self.copies and not self.asleep
        if now_s - self.renewed_s > self.lasts_s and not (copies and renewed):
            self.in_time = False
        if copies:
            try:
                self.hold.renew()
            except StateError as error:
                if self.in_time:
                    raise WrongStateError(f"a hold that was renewed in time is gone: {error}") from error
                return  # logged, in the real one
            self.renewed_s = now_s

    def run(self, task: Task, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """A task. Who lost the hold must be told before anything is copied."""
        work = getattr(savepoint_tasks, task.what)
        if task.what != "save":
            for row in work(task.plain, batches):
                if task.what == "begin":
                    # It lasts from now on, however long it takes until the client hears of it.
                    self.began(json.loads(row.column(0)[0].as_py())["hold"])
                yield row
            return
        assert self.hold is not None, "it is placed first"
        lost, self.copies = not self.hold._numbers(), True
        self.asleep = self.numbers.below(4) == 0
        self.renewed_s = self.world.yard.now_s
        try:
            for row in work(task.plain, batches):
                if lost:
                    raise WrongStateError(f"a savepoint of batch {self.batch} goes on without its hold")
                yield row
        finally:
            self.copies = False

    def pause(self) -> None:
        """Between two of its steps."""
        if self.numbers.below(50) == 0:
            die()
        if self.numbers.below(2):
            pause()


class Frame:
    """A DataFrame: batches, and what is done with each when somebody asks for them."""

    def __init__(self, taking: Taking, batches: Callable[[], Iterable[pa.RecordBatch]]) -> None:
        self._taking = taking
        self._batches = batches

    def coalesce(self, _: int) -> Frame:
        return self

    def mapInArrow(self, task: Task, _: str) -> Frame:
        return Frame(self._taking, lambda: self._taking.run(task, self._batches()))

    def collect(self) -> list[Any]:
        self._taking.pause()
        found = [SimpleNamespace(**row) for batch in self._batches() for row in batch.to_pylist()]
        self._taking.pause()
        return found


class Session:
    """A SparkSession, in which one savepoint is taken."""

    def __init__(self, taking: Taking) -> None:
        self.taking = taking

    def range(self, _: int) -> Frame:
        return Frame(self.taking, lambda: ())

    def createDataFrame(self, rows: Sequence[tuple[Any, ...]], schema: str) -> Frame:
        names = [column.split()[0] for column in schema.split(",")]
        batch = pa.RecordBatch.from_pydict(
            {name: [row[at] for row in rows] for at, name in enumerate(names)} if rows else {name: [] for name in names}
        )
        return Frame(self.taking, lambda: (batch,))


class SimReader:
    """In the place of `StateReader`: what Spark's files hold now."""

    def __init__(self, spark: Session, location: str) -> None:
        self.taking = spark.taking
        self.world = spark.taking.world

    def stores(self) -> list[StoreOfState]:
        return [StoreOfState(0, "default", "simulated", self.world.query_folder.name)]

    def batch(self, batch: int | None = None) -> CommittedBatch:
        wanted = self.world.batch if batch is None else batch
        self.taking.batch = wanted
        return CommittedBatch("a query", wanted, tuple(range(wanted + 1, self.world.batch + 1)), "", {0: "simulated"})

    def has(self, batch: int) -> bool:
        return batch in self.world.spark.batches

    @contextmanager
    def pointers(self, store: StoreOfState, batch: int) -> Iterator[Frame]:
        yield Frame(self.taking, lambda: self._read(batch))

    def read(self, batch: int) -> dict[int, BucketState]:
        """What Spark gives of a batch."""
        return dict(self.world.spark.at(batch))

    def _read(self, batch: int) -> Iterator[pa.RecordBatch]:
        taking, world = self.taking, self.world
        if not self.has(batch):
            raise RuntimeError(f"Spark has dropped batch {batch}")
        taking.expected = {b: world.models[held.pointer.encode()] for b, held in world.spark.at(batch).items()}
        found = self.read(batch)
        empty = [world.without_state(bucket) for bucket in world.other_buckets]
        for some in itertools.chain([empty], ([held.pointer] for held in found.values())):
            yield _batch(some)
            taking.pause()


def _batch(pointers: Iterable[Pointer]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array([pointer.encode() for pointer in pointers], pa.binary())], schema=_POINTERS
    )


@dataclass(frozen=True)
class Task:
    """What `task_functions.task_entry` makes, without the border to Spark's worker, which tells errors anew."""

    task: str
    plain: dict[str, Any]

    @property
    def what(self) -> str:
        module, _, function = self.task.partition(".")
        if module != "savepoint_tasks":
            raise AssertionError(f"no history has a task of {module}")
        return function


def spark_parts(reader: type[SimReader] = SimReader) -> list[tuple[Any, str, Any]]:
    """What is put in the place of Spark's parts while a history runs.

    Parameters
    ----------
    reader
        What reads Spark's state.
    """
    return [
        (tasks, "task_entry", Task),
        (savepoints, "task_entry", Task),
        (savepoints, "StateReader", reader),
    ]
