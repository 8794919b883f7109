"""A query that is asked to erase keys: askers, its calls, Spark's batches, and all that goes wrong between them.

The calls go by the real code: the turn, the watch of each process, marks, pointers as bytes, the folder and its files, the rows that are
taken away. Spark's part is that of `sim_spark`, a partition each. What a bucket's state is stands beside its pointer: of each key the
moment at which its state began.

What must hold, of what Spark may hand out and by the world's own clock:

- once a record says that a request is done, no bucket's state has a key of it that began before the request was made. What a query that
  goes back leaves behind, or a run that was replaced writes, counts once the first bucket has looked again; and where a late attempt of
  another run writes over a partition's file (format 1), its buckets count once they are called again;
  A bucket that could not read a request, as its file was damaged after others had read it, counts once it is called after the
  request was withdrawn; while it is not, no record says that this one or a later one is done;
- a call takes away what the requests name that its mark covers from then on, and nothing else;
- a mark covers no request of the folder that its state was not without once;
- a call of a batch that began after a request was made carries it out, unless one before it cannot be read;
- a request's file stays while Spark may hand out a state that knows less;
- where nothing goes wrong any more, every request is done within a few batches, and gone after 3R + 2 heartbeats and a few.
"""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pyarrow as pa
from sim_asking import OPERATOR, Asking
from sim_erasure_checks import carried_by, check_kept, check_mark, waits
from sim_erasure_parts import ErasureConfig, Kept, Process, Run, Task, rows_of_keys
from sim_parts import SCHEMA, History, Numbers, Step, WrongStateError
from sim_search import replaced
from sim_spark import Made, StateFiles

from arrow_schemas import CheckpointRef, LineageEntry, Pointer
from spark_state_ext.engine.erase_requests import EraseTurn
from spark_state_ext.errors import LiveRunError, StateError
from spark_state_ext.files.horizon import count_call, recent_heartbeats

__all__ = ["ERASURE_STEPS", "ErasureConfig", "ErasureWorld", "Patch", "simulate_erasures"]

Patch = tuple[Any, str, Any]

EXECUTORS = 3
KEYS = 8
# A run that was replaced may go on for so many batches of the next one: a third of the lease.
REPLACED_MAX = 2
# When nothing goes wrong: carried out, proven, written down; and one more, as a batch may have begun before.
DONE_WITHIN = 4

ERASURE_STEPS = (
    "batch",  # attempts at the next batch, some of which fail, or fall asleep; or the query dies in it
    "go",  # batches of which each succeeds at once
    "ask",  # one or several ask
    "withdraw",  # somebody withdraws a request
    "spoil",  # a request cannot be read any more
    "zombie",  # an attempt that fell asleep goes on
    "restart",  # the query starts again, at any batch that Spark retains, and may look for requests or not
    "process",  # an executor's process ends, and another begins
    "status",  # somebody looks what has become of requests
    "lose",  # the query starts again on a root in which there are no requests
)


class ErasureWorld:
    """The query, its folder and its users.

    Parameters
    ----------
    config
        What stays the same.
    """

    # What the first number of a step is.
    kinds: ClassVar[tuple[str, ...]] = ERASURE_STEPS

    def __init__(self, config: ErasureConfig) -> None:
        self.config = config
        self._clock = itertools.count(1)
        self.asking = Asking(uuid.uuid4().hex, config.buckets, lambda: next(self._clock))
        self.asking.told = self._told
        self.buckets = range(config.buckets)
        first = [
            {b: Kept(Pointer(OPERATOR, b, config.buckets, 0, -1, None)) for b in self.buckets if self._home(b) == p}
            for p in range(config.partitions)
        ]
        self.spark = [StateFiles(config, partition) for partition in first]
        self.processes = [Process(config.partitions) for _ in range(EXECUTORS)]
        self.run = Run(0, True)
        self.sleeping: list[Task] = []
        # Of batches that Spark has planned: which buckets are called; None: there is data, and all are.
        self.planned: dict[int, tuple[int, ...] | None] = {}
        # Requests of which the record is not to be believed yet, with the moment since when.
        self.doubtful: dict[int, int] = {}
        self._task: Task | None = None
        self.done = self.back = self.erased = self.unread = 0
        self._ids = itertools.count()
        self._calm = False

    def close(self) -> None:
        """Remove everything."""
        self.asking.close()

    @property
    def counted(self) -> dict[str, int]:
        """How often what matters has happened."""
        asking = self.asking
        return {
            "requests made": asking.asked,
            "requests done": self.done,
            "requests removed": asking.dropped,
            "records taken back": asking.taken_back,
            "keys erased": self.erased,
            "goings back": self.back,
            "listings overtaken": asking.overtaken,
            "store failures": asking.failures,
            "calls that could not read a request": self.unread,
        }

    @property
    def batch(self) -> int:
        """The newest batch that is committed."""
        return self.spark[0].batch

    def _home(self, bucket: int) -> int:
        return bucket % self.config.partitions

    # -- steps -------------------------------------------------------------------------------------

    def step(self, step: Step) -> None:
        """Take one step."""
        numbers = Numbers(step)
        getattr(self, f"_{self.kinds[numbers.below(len(self.kinds))]}")(numbers)
        self.asking.disarm()
        self.check()

    def _batch(self, numbers: Numbers) -> None:
        for _ in range(numbers.below(3)):
            self.asking.arm(numbers.below(20), numbers.below(4), numbers.below(64))
        dies, asks = numbers.below(8) == 0, numbers.below(2) == 0
        self.plan(self.batch + 1, numbers)
        going = [self.begin(p, numbers) for p in self._homes() for _ in range(1 + (numbers.below(4) == 0))]
        done: dict[int, list[Task]] = {p: [] for p in self._homes()}
        began = going[0].began
        while going:
            task = going[numbers.below(len(going))]
            fate = numbers.below(16)
            if asks and fate in (1, 2):
                self.asking.ask(*{numbers.below(KEYS) for _ in range(3)})
            if dies and numbers.below(6) == 0:
                self.sleeping += going
                return self._restart(numbers)
            if fate > 0 and self.go_on_with(task):
                continue
            going.remove(task)
            if task.over:
                done[task.partition].append(task)
            elif fate == 0:
                self.sleeping.append(task)
        self.asking.disarm()
        for partition in [p for p in self._homes() if not done[p]]:
            done[partition].append(self._surely(partition, numbers, began))
        return self.commit(done, numbers)

    def _go(self, numbers: Numbers) -> None:
        for _ in range(1 + numbers.below(4 + recent_heartbeats(self.config.retained))):
            self.go_on(numbers)

    def go_on(self, numbers: Numbers, heartbeat: bool | None = None) -> None:
        """A batch that succeeds at once."""
        self.plan(self.batch + 1, numbers, heartbeat)
        began = next(self._clock)
        self.commit({p: [self._surely(p, numbers, began)] for p in self._homes()}, numbers)

    def _ask(self, numbers: Numbers) -> None:
        if numbers.yes():
            self.asking.arm(numbers.below(6), numbers.below(4), numbers.below(64))
        self.asking.ask(*{numbers.below(KEYS) for _ in range(1 + numbers.below(2))})

    def _withdraw(self, numbers: Numbers) -> None:
        if numbers.yes():
            self.asking.arm(numbers.below(4), numbers.below(4), numbers.below(64))
        if self.asking.requests:
            self.asking.withdraw(1 + numbers.below(max(self.asking.requests)))

    def _spoil(self, numbers: Numbers) -> None:
        if self.asking.requests:
            self.asking.spoil(max(self.asking.requests) - numbers.below(min(3, max(self.asking.requests))))

    def _zombie(self, numbers: Numbers) -> None:
        if not self.sleeping:
            return
        task = self.sleeping.pop(numbers.below(len(self.sleeping)))
        for _ in range(1 + numbers.below(4) * 8):
            if not self.go_on_with(task):
                break
        else:
            self.sleeping.append(task)
        overwrites = not self.config.checkpoint_v2 and self.config.last_wins and task.batch <= self.batch
        if task.over and overwrites:
            late = task.run is not self.run
            made = {b: replace(kept, late=late or kept.late) for b, kept in task.made.items()}
            self.spark[task.partition].overwrite(task.batch, self._made(task, made))

    def _restart(self, numbers: Numbers) -> None:
        batches = self.spark[0].batches
        to = batches[0] if numbers.below(3) == 0 else batches[numbers.below(len(batches))]
        looks = not self.config.switches or numbers.below(3) > 0
        self.restart(to, looks, [numbers.yes() for _ in self.processes])

    def restart(self, to: int, looks: bool = True, ended: Sequence[bool] = (True,) * EXECUTORS) -> None:
        """The query starts again after a batch; some processes go on."""
        if to < self.batch:
            self.back += 1
            for number, record in self.asking.records.items():
                if record.batch > to:
                    self.doubtful[number] = next(self._clock)
        for files in self.spark:
            files.go_back(to)
        self.planned = {batch: called for batch, called in self.planned.items() if batch <= to + 1}
        self.run = Run(self.run.number + 1, looks)
        for at, ends in enumerate(ended):
            for memory in self.processes[at].memory:
                memory.loaded.clear()
            if ends:
                self.processes[at] = Process(self.config.partitions)

    def _process(self, numbers: Numbers) -> None:
        self.processes[numbers.below(EXECUTORS)] = Process(self.config.partitions)

    def _status(self, numbers: Numbers) -> None:
        self.asking.states()

    def _lose(self, numbers: Numbers) -> None:
        """Only what happens in the folder can be known: what was asked for in the other one is over."""
        if numbers.below(3):
            return
        self.sleeping.clear()
        self._restart(numbers)
        self.asking.lose()
        self.doubtful.clear()

    # -- batches -----------------------------------------------------------------------------------

    def _homes(self) -> range:
        return range(self.config.partitions)

    def plan(self, batch: int, numbers: Numbers, heartbeat: bool | None = None) -> None:
        """What stands in Spark's log before a batch begins."""
        if batch not in self.planned:
            data = not self.config.timeouts or numbers.below(3) > 0 if heartbeat is None else heartbeat
            called = tuple(b for b in self.buckets if numbers.yes())
            self.planned[batch] = None if data or batch == 0 else called

    def begin(self, partition: int, numbers: Numbers, began: int | None = None) -> Task:
        """An attempt at the next batch's task of a partition."""
        batch, process = self.batch + 1, self.processes[numbers.below(EXECUTORS)]
        planned = self.planned[batch]
        called = [b for b in self.buckets if self._home(b) == partition and (planned is None or b in planned)]
        task = Task(
            self.run,
            batch,
            next(self._clock) if began is None else began,
            partition,
            process,
            called,
            planned is None,
            self.spark[partition].handed_out(process.memory[partition], batch),
            random.Random(numbers.below(1 << 8)),
            numbers.below(4) > 0 or self._calm,
        )
        task.calls = self._calls(task)
        return task

    def _surely(self, partition: int, numbers: Numbers, began: int) -> Task:
        task = self.begin(partition, numbers, began)
        try:
            for _ in task.calls:
                pass
        except StateError as error:
            raise WrongStateError(f"a call of batch {task.batch} fails again and again: {error!r}") from error
        task.over = True
        return task

    def go_on_with(self, task: Task) -> bool:
        """Whether it is still at it."""
        try:
            next(task.calls)
        except StopIteration:
            task.over = True
            return False
        except StateError:
            return False
        return True

    def commit(self, done: Mapping[int, Sequence[Task]], numbers: Numbers) -> None:
        """The next batch is over, with attempts that succeeded at each task."""
        batch = self.batch + 1
        for partition, tasks in done.items():
            if self.config.checkpoint_v2:
                chosen = tasks[numbers.below(len(tasks))]
            else:
                chosen = tasks[-1] if self.config.last_wins else tasks[0]
            self.spark[partition].commit(batch, self._made(chosen, chosen.made))
            for task in tasks:
                self._load(task)
        self.run.committed += 1

    def _load(self, task: Task) -> None:
        loaded = task.process.memory[task.partition].loaded
        loaded[task.batch] = {**task.handed_out, **task.made}
        for old in sorted(loaded)[:-2]:
            del loaded[old]

    def _made(self, task: Task, made: Mapping[int, Kept]) -> Made:
        return Made({**task.handed_out, **made}, frozenset(task.called))

    # -- calls -------------------------------------------------------------------------------------

    def _calls(self, task: Task) -> Iterator[None]:
        for bucket in task.called:
            self._still_ours(task)
            before = task.handed_out[bucket]
            assert isinstance(before, Kept)
            pointer = Pointer.decode(before.pointer.encode())
            turn = EraseTurn(
                task.process.watch,
                self.asking.files,
                SCHEMA,
                pointer,
                (task.run.number, task.batch),
                False,
                0.0,
                task.run.looks,
            )
            rows, found = dict(before.rows), frozenset[int]()

            def erase(columns: Sequence[pa.Array], rows: dict[int, int] = rows) -> int:
                gone = rows_of_keys(rows, columns)
                for key in gone:
                    del rows[key]
                return len(gone)

            with self._at(task):
                dealt = turn.carry_out(erase)
            found = frozenset(before.rows.keys() - rows.keys())
            carried = carried_by(self.asking, task, before, found, dealt)
            waiting = task.run.looks and waits(self.asking, task, before, carried)
            self.unread += waiting
            self.erased += len(found)
            yield
            changed = self._changed(task, bucket, rows) or bool(found)
            made = self._pointer(task, pointer, changed)
            made = turn.marked(made, dealt)
            task.made[bucket] = Kept(made, None, rows, carried, waits=waiting)
            check_mark(self.asking, task.made[bucket])
            if bucket == 0 and pointer.batch >= 0:
                yield
                failures = self.asking.failures
                with self._at(task):
                    turn.look_after(lambda: task.cleans, lambda: self._still_ours(task))
                if task.run is self.run and task.run.looks and failures == self.asking.failures:
                    self.doubtful = {n: at for n, at in self.doubtful.items() if at >= task.began}
                    self.check()
            yield

    def _at(self, task: Task) -> _At:
        """What is written now is written by a task."""
        return _At(self, task)

    def _still_ours(self, task: Task) -> None:
        """Raises where another run has the lease, once the task's process has looked."""
        if task.run is self.run:
            return
        just_now = task.run.number == self.run.number - 1 and self.run.committed <= REPLACED_MAX
        if not just_now or task.chance.random() < 0.5:
            raise LiveRunError("another run has it")

    def _changed(self, task: Task, bucket: int, rows: dict[int, int]) -> bool:
        """The function's part."""
        keys = [key for key in range(KEYS) if key % self.config.buckets == bucket and task.chance.random() < 0.4]
        for key in keys:
            if task.chance.random() < 0.2:
                rows.pop(key, None)
            else:
                rows.setdefault(key, next(self._clock))
        return bool(keys)

    def _pointer(self, task: Task, before: Pointer, changed: bool) -> Pointer:
        lineage = before.lineage
        if changed:
            ref = CheckpointRef(before.version + 1, f"{next(self._ids):032x}")
            lineage = (LineageEntry(ref, 10),)
        made = count_call(before, task.heartbeat, self.config.retained)
        return replace(made, batch=task.batch, lineage=lineage)

    # -- checks ------------------------------------------------------------------------------------

    def _told(self, number: int) -> None:
        """Somebody has written that a request is done."""
        self.done += 1
        self.doubtful.pop(number, None)
        if self._task is None or self._task.run is not self.run:
            self.doubtful[number] = next(self._clock)
        self.check(number)

    def check(self, told: int = 0) -> None:
        """What Spark may hand out is what the folder says; with the request that is told to be done just now."""
        requests = self.asking.requests
        said = {
            number: record
            for number, record in self.asking.records.items()
            if number not in self.doubtful and number in requests and requests[number].id == record.id
        }
        for at, files in enumerate(self.spark):
            memory = [process.memory[at] for process in self.processes]
            for batch, partition in files.reachable(memory):
                for kept in partition.values():
                    assert isinstance(kept, Kept)
                    now = {n for n, it in said.items() if batch >= min(it.batch, files.batch)}
                    check_kept(self.asking, batch, kept, now, told)

    def calm(self) -> None:
        """Nothing goes wrong any more; then every request is done soon, and gone in the end."""
        self._calm = True
        self.sleeping.clear()
        self.restart(self.batch)
        for number, asked in list(self.asking.requests.items()):
            if asked.spoilt and not asked.dropped:
                self.asking.withdraw(number)
        numbers = Numbers(b"calm")
        for _ in range(DONE_WITHIN):
            self.go_on(numbers, heartbeat=True)
            self.check()
        states = self.asking.states()
        late = [number for number, state in states.items() if state != "done" and not self._replaced_by_none(number)]
        if late:
            raise WrongStateError(f"requests {late} are not done after {DONE_WITHIN} batches: {states}")
        most = max((it.heartbeat for it in self.asking.records.values()), default=0)
        while self._heartbeats() <= most + recent_heartbeats(self.config.retained) + 2:
            self.go_on(numbers, heartbeat=True)
            self.check()
        left = [it.number for it in self.asking.requests.values() if not it.dropped]
        if left:
            raise WrongStateError(
                f"the files of requests {left} are there after {self._heartbeats() - most} heartbeats"
            )

    def _heartbeats(self) -> int:
        return self.spark[0].at(self.batch)[0].pointer.heartbeats

    def _replaced_by_none(self, number: int) -> bool:
        """Somebody withdrew what was done and gone: its record is that of the other one."""
        record = self.asking.records.get(number)
        return record is not None and record.id != self.asking.requests[number].id


class _At:
    """While it lasts, what is written is written by a task."""

    def __init__(self, world: ErasureWorld, task: Task) -> None:
        self._world, self._now, self._before = world, task, world._task

    def __enter__(self) -> None:
        self._world._task = self._now

    def __exit__(self, *_: object) -> None:
        self._world._task = self._before


def simulate_erasures(history: History, patches: Iterable[Patch] = ()) -> ErasureWorld:
    """Run a history to its end; raises `WrongStateError` when anything is.

    Parameters
    ----------
    history
        The history; its configuration is an `ErasureConfig`.
    patches
        What is put in the place of something, for a broken variant: object, name, value.
    """
    assert isinstance(history.config, ErasureConfig)
    world = ErasureWorld(history.config)
    try:
        with replaced([*world.asking.patches(), *patches]):
            for step in history.steps:
                world.step(step)
            world.calm()
    finally:
        world.close()
    return world
