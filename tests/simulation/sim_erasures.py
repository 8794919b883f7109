"""A query with erase requests: its users, its calls, Spark's batches, and the failures between them.

The calls run the product's code: the turn, the watch of each process, marks, pointers as bytes, the folder with its
files, and the removal of rows. Spark's part is that of `sim_spark`, once for each partition. Next to a bucket's pointer
stands its state: for each key the moment at which the key's state began.

Invariants of what Spark may hand out, by the world's own clock:

- Once a record says that a request is done, no bucket's state has a key of the request that began before the request
  was made. There are three exceptions. A record that a query left behind when it went back, or that a replaced run
  writes, counts once the first bucket has looked again. If a late attempt of another run overwrites a partition's
  file (format 1), the partition's buckets count once they are called again. A bucket that could not read a request,
  because the file was damaged after others had read it, counts once it is called after the request was withdrawn;
  until then no record says that this request or a later one is done.
- A call removes the keys that are named by the requests that its mark newly covers, and no other keys.
- A mark covers only requests of the folder whose keys were removed from its state at some time.
- A call of a batch that began after a request was made carries it out, unless an earlier request cannot be read.
- A request's file stays while Spark may hand out a state that does not reflect the request.
- After failures end, every request is done within a few batches, and its file is removed after about 3R + 2 heartbeats.
"""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pyarrow as pa
from sim_asking import OPERATOR, EraseUsers
from sim_erasure_checks import check_mark, check_removed_keys, check_requests_carried_out, check_state
from sim_erasure_parts import ErasedState, ErasureConfig, Process, Run, Task, find_erased_keys
from sim_parts import SCHEMA, History, Numbers, Step, WrongStateError
from sim_search import replace_attributes
from sim_spark import StateFiles, TaskResult

from arrow_schemas import CheckpointRef, LineageEntry, Pointer
from spark_state_ext.engine.erase_requests import EraseTurn
from spark_state_ext.errors import LiveRunError, StateError
from spark_state_ext.files.horizon import count_call, recent_heartbeats

__all__ = ["ERASURE_STEPS", "ErasureConfig", "ErasureWorld", "Patch", "simulate_erasures"]

Patch = tuple[Any, str, Any]

EXECUTORS = 3
KEYS = 8
# A run that was replaced may continue for so many batches of the next run: a third of the lease.
REPLACED_MAX = 2
# Batches without failures until a request is done: it is carried out, proven and recorded; one more may have begun before.
DONE_WITHIN = 4

ERASURE_STEPS = (
    "batch",  # attempts at the next batch, some of which fail or fall asleep; or the query dies in it
    "go",  # batches that succeed at once
    "ask",  # a user makes a request
    "withdraw",  # a user withdraws a request
    "spoil",  # a request's file is damaged
    "zombie",  # an attempt that fell asleep continues
    "restart",  # the query starts again, at any batch that Spark retains, and may look for requests or not
    "process",  # an executor's process ends, and another one begins
    "status",  # a user reads the status of requests
    "lose",  # the query starts again on a root without requests
)


class ErasureWorld:
    """A query, its folder and its users.

    Parameters
    ----------
    config
        Configuration of the history.
    """

    # The kind of a step by its first number.
    kinds: ClassVar[tuple[str, ...]] = ERASURE_STEPS

    def __init__(self, config: ErasureConfig) -> None:
        self.config = config
        self._clock = itertools.count(1)
        self.users = EraseUsers(uuid.uuid4().hex, config.buckets, lambda: next(self._clock))
        self.users.on_done_record = self._note_done_record
        self.buckets = range(config.buckets)
        first = [
            {
                b: ErasedState(Pointer(OPERATOR, b, config.buckets, 0, -1, None))
                for b in self.buckets
                if self._find_partition(b) == p
            }
            for p in range(config.partitions)
        ]
        self.spark = [StateFiles(config, partition) for partition in first]
        self.processes = [self._begin_process() for _ in range(EXECUTORS)]
        self.run = Run(0, True)
        self.sleeping: list[Task] = []
        # By planned batch, the buckets that are called; None if there is data, so that all are called.
        self.planned: dict[int, tuple[int, ...] | None] = {}
        # Requests whose records do not count yet, with the moment since when.
        self.doubtful: dict[int, int] = {}
        self._task: Task | None = None
        self.done_count = self.go_backs = self.erased_count = self.unread_count = 0
        self._ids = itertools.count()
        self._calm = False

    def close(self) -> None:
        """Remove everything."""
        self.users.close()

    @property
    def counted(self) -> dict[str, int]:
        """How often relevant events have happened."""
        users = self.users
        return {
            "requests made": users.made_requests,
            "requests done": self.done_count,
            "requests removed": users.removed_requests,
            "records taken back": users.withdrawn_records,
            "keys erased": self.erased_count,
            "goings back": self.go_backs,
            "listings overtaken": users.overtaken_listings,
            "store failures": users.failures,
            "calls that could not read a request": self.unread_count,
        }

    @property
    def batch(self) -> int:
        """The newest committed batch."""
        return self.spark[0].batch

    def _find_partition(self, bucket: int) -> int:
        return bucket % self.config.partitions

    def _begin_process(self) -> Process:
        # Records with the same time are the same record, so a history that is repeated needs the same times.
        return Process(self.config.partitions, lambda: next(self._clock))

    # -- steps -------------------------------------------------------------------------------------

    def step(self, step: Step) -> None:
        """Take one step."""
        numbers = Numbers(step)
        getattr(self, f"_{self.kinds[numbers.below(len(self.kinds))]}")(numbers)
        self.users.clear_faults()
        self.check()

    def _batch(self, numbers: Numbers) -> None:
        for _ in range(numbers.below(3)):
            self.users.set_fault(numbers.below(20), numbers.below(4), numbers.below(64))
        query_dies, user_asks = numbers.below(8) == 0, numbers.below(2) == 0
        self.plan(self.batch + 1, numbers)
        running = [self.begin(p, numbers) for p in self._list_partitions() for _ in range(1 + (numbers.below(4) == 0))]
        finished_tasks: dict[int, list[Task]] = {p: [] for p in self._list_partitions()}
        began_at = running[0].began_at
        while running:
            task = running[numbers.below(len(running))]
            fate = numbers.below(16)
            if user_asks and fate in (1, 2):
                self.users.ask(*{numbers.below(KEYS) for _ in range(3)})
            if query_dies and numbers.below(6) == 0:
                self.sleeping += running
                return self._restart(numbers)
            if fate > 0 and self.advance_task(task):
                continue
            running.remove(task)
            if task.has_ended:
                finished_tasks[task.partition].append(task)
            elif fate == 0:
                self.sleeping.append(task)
        self.users.clear_faults()
        for partition in [p for p in self._list_partitions() if not finished_tasks[p]]:
            finished_tasks[partition].append(self._run_task(partition, numbers, began_at))
        return self.commit(finished_tasks, numbers)

    def _go(self, numbers: Numbers) -> None:
        for _ in range(1 + numbers.below(4 + recent_heartbeats(self.config.retained))):
            self.run_batch(numbers)

    def run_batch(self, numbers: Numbers, heartbeat: bool | None = None) -> None:
        """Run a batch that succeeds at once."""
        self.plan(self.batch + 1, numbers, heartbeat)
        began_at = next(self._clock)
        self.commit({p: [self._run_task(p, numbers, began_at)] for p in self._list_partitions()}, numbers)

    def _ask(self, numbers: Numbers) -> None:
        if numbers.yes():
            self.users.set_fault(numbers.below(6), numbers.below(4), numbers.below(64))
        self.users.ask(*{numbers.below(KEYS) for _ in range(1 + numbers.below(2))})

    def _withdraw(self, numbers: Numbers) -> None:
        if numbers.yes():
            self.users.set_fault(numbers.below(4), numbers.below(4), numbers.below(64))
        if self.users.requests:
            self.users.withdraw(1 + numbers.below(max(self.users.requests)))

    def _spoil(self, numbers: Numbers) -> None:
        if self.users.requests:
            self.users.spoil(max(self.users.requests) - numbers.below(min(3, max(self.users.requests))))

    def _zombie(self, numbers: Numbers) -> None:
        if not self.sleeping:
            return
        task = self.sleeping.pop(numbers.below(len(self.sleeping)))
        for _ in range(1 + numbers.below(4) * 8):
            if not self.advance_task(task):
                break
        else:
            self.sleeping.append(task)
        overwrites = not self.config.checkpoint_v2 and self.config.last_wins and task.batch <= self.batch
        if task.has_ended and overwrites:
            late = task.run is not self.run
            results = {b: replace(state, late=late or state.late) for b, state in task.results.items()}
            self.spark[task.partition].overwrite(task.batch, self._make_result(task, results))

    def _restart(self, numbers: Numbers) -> None:
        batches = self.spark[0].batches
        batch_to = batches[0] if numbers.below(3) == 0 else batches[numbers.below(len(batches))]
        looks = not self.config.switches or numbers.below(3) > 0
        self.restart(batch_to, looks, [numbers.yes() for _ in self.processes])

    def restart(self, batch_to: int, looks: bool = True, ended: Sequence[bool] = (True,) * EXECUTORS) -> None:
        """Start the query again after a batch; some processes live on."""
        if batch_to < self.batch:
            self.go_backs += 1
            for number, record in self.users.records.items():
                if record.batch > batch_to:
                    self.doubtful[number] = next(self._clock)
        for files in self.spark:
            files.go_back(batch_to)
        self.planned = {batch: called for batch, called in self.planned.items() if batch <= batch_to + 1}
        self.run = Run(self.run.number + 1, looks)
        for at, ends in enumerate(ended):
            for memory in self.processes[at].memory:
                memory.loaded.clear()
            if ends:
                self.processes[at] = self._begin_process()

    def _process(self, numbers: Numbers) -> None:
        self.processes[numbers.below(EXECUTORS)] = self._begin_process()

    def _status(self, numbers: Numbers) -> None:
        self.users.states()

    def _lose(self, numbers: Numbers) -> None:
        """Lose all requests; those of the lost folder are not checked any further."""
        if numbers.below(3):
            return
        self.sleeping.clear()
        self._restart(numbers)
        self.users.lose()
        self.doubtful.clear()

    # -- batches -----------------------------------------------------------------------------------

    def _list_partitions(self) -> range:
        return range(self.config.partitions)

    def plan(self, batch: int, numbers: Numbers, heartbeat: bool | None = None) -> None:
        """Decide what Spark's log says before a batch begins."""
        if batch not in self.planned:
            has_data = not self.config.timeouts or numbers.below(3) > 0 if heartbeat is None else heartbeat
            called = tuple(b for b in self.buckets if numbers.yes())
            self.planned[batch] = None if has_data or batch == 0 else called

    def begin(self, partition: int, numbers: Numbers, began_at: int | None = None) -> Task:
        """Begin an attempt at the next batch's task of a partition."""
        batch, process = self.batch + 1, self.processes[numbers.below(EXECUTORS)]
        planned = self.planned[batch]
        called = [b for b in self.buckets if self._find_partition(b) == partition and (planned is None or b in planned)]
        task = Task(
            self.run,
            batch,
            next(self._clock) if began_at is None else began_at,
            partition,
            process,
            called,
            planned is None,
            self.spark[partition].hand_out(process.memory[partition], batch),
            random.Random(numbers.below(1 << 8)),
            numbers.below(4) > 0 or self._calm,
        )
        task.calls = self._run_calls(task)
        return task

    def _run_task(self, partition: int, numbers: Numbers, began_at: int) -> Task:
        task = self.begin(partition, numbers, began_at)
        try:
            for _ in task.calls:
                pass
        except StateError as error:
            raise WrongStateError(f"a call of batch {task.batch} fails again and again: {error!r}") from error
        task.has_ended = True
        return task

    def advance_task(self, task: Task) -> bool:
        """Continue a task until its next pause; returns whether it still runs."""
        try:
            next(task.calls)
        except StopIteration:
            task.has_ended = True
            return False
        except StateError:
            return False
        return True

    def commit(self, finished_tasks: Mapping[int, Sequence[Task]], numbers: Numbers) -> None:
        """Commit the next batch, given the successful attempts at each task."""
        batch = self.batch + 1
        for partition, tasks in finished_tasks.items():
            if self.config.checkpoint_v2:
                chosen = tasks[numbers.below(len(tasks))]
            else:
                chosen = tasks[-1] if self.config.last_wins else tasks[0]
            self.spark[partition].commit(batch, self._make_result(chosen, chosen.results))
            for task in tasks:
                self._load(task)
        self.run.committed += 1

    def _load(self, task: Task) -> None:
        loaded = task.process.memory[task.partition].loaded
        loaded[task.batch] = {**task.handed_out, **task.results}
        for old in sorted(loaded)[:-2]:
            del loaded[old]

    def _make_result(self, task: Task, results: Mapping[int, ErasedState]) -> TaskResult:
        return TaskResult({**task.handed_out, **results}, frozenset(task.called))

    # -- calls -------------------------------------------------------------------------------------

    def _run_calls(self, task: Task) -> Iterator[None]:
        for bucket in task.called:
            self._check_lease(task)
            before = task.handed_out[bucket]
            assert isinstance(before, ErasedState)
            pointer = Pointer.decode(before.pointer.encode())
            turn = EraseTurn(
                task.process.watch,
                self.users.files,
                SCHEMA,
                pointer,
                (task.run.number, task.batch),
                False,
                0.0,
                task.run.looks,
            )
            rows, erased_keys = dict(before.rows), frozenset[int]()

            def erase(columns: Sequence[pa.Array], rows: dict[int, int] = rows) -> int:
                call_erased_keys = find_erased_keys(rows, columns)
                for key in call_erased_keys:
                    del rows[key]
                return len(call_erased_keys)

            with self._attribute_to(task):
                handled = turn.carry_out(erase)
            erased_keys = frozenset(before.rows.keys() - rows.keys())
            carried = check_removed_keys(self.users, task, before, erased_keys, handled)
            waiting = task.run.looks and check_requests_carried_out(self.users, task, before, carried)
            self.unread_count += waiting
            self.erased_count += len(erased_keys)
            yield
            changed = self._change_rows(task, bucket, rows) or bool(erased_keys)
            new_pointer = self._make_pointer(task, pointer, changed)
            new_pointer = turn.marked(new_pointer, handled)
            task.results[bucket] = ErasedState(new_pointer, None, rows, carried, waits=waiting)
            check_mark(self.users, task.results[bucket])
            if bucket == 0 and pointer.batch >= 0:
                yield
                failures = self.users.failures
                with self._attribute_to(task):
                    turn.look_after(lambda: task.cleans, lambda: self._check_lease(task))
                if task.run is self.run and task.run.looks and failures == self.users.failures:
                    self.doubtful = {n: at for n, at in self.doubtful.items() if at >= task.began_at}
                    self.check()
            yield

    def _attribute_to(self, task: Task) -> _Attribution:
        """Attribute records that are written meanwhile to a task."""
        return _Attribution(self, task)

    def _check_lease(self, task: Task) -> None:
        """Check the lease; raises if another run has it and the task's process has noticed that."""
        if task.run is self.run:
            return
        recently_replaced = task.run.number == self.run.number - 1 and self.run.committed <= REPLACED_MAX
        if not recently_replaced or task.chance.random() < 0.5:
            raise LiveRunError("another run has the lease")

    def _change_rows(self, task: Task, bucket: int, rows: dict[int, int]) -> bool:
        """Change some rows, as the user's function does."""
        keys = [key for key in range(KEYS) if key % self.config.buckets == bucket and task.chance.random() < 0.4]
        for key in keys:
            if task.chance.random() < 0.2:
                rows.pop(key, None)
            else:
                rows.setdefault(key, next(self._clock))
        return bool(keys)

    def _make_pointer(self, task: Task, before: Pointer, changed: bool) -> Pointer:
        lineage = before.lineage
        if changed:
            ref = CheckpointRef(before.version + 1, f"{next(self._ids):032x}")
            lineage = (LineageEntry(ref, 10),)
        new_pointer = count_call(before, task.heartbeat, self.config.retained)
        return replace(new_pointer, batch=task.batch, lineage=lineage)

    # -- checks ------------------------------------------------------------------------------------

    def _note_done_record(self, number: int) -> None:
        """Note that a record says that a request is done."""
        self.done_count += 1
        self.doubtful.pop(number, None)
        if self._task is None or self._task.run is not self.run:
            self.doubtful[number] = next(self._clock)
        self.check(number)

    def check(self, just_done: int = 0) -> None:
        """Check what Spark may hand out; `just_done` is the request whose record was just written, or 0."""
        requests = self.users.requests
        done_records = {
            number: record
            for number, record in self.users.records.items()
            if number not in self.doubtful and number in requests and requests[number].id == record.id
        }
        for at, files in enumerate(self.spark):
            memory = [process.memory[at] for process in self.processes]
            for batch, partition in files.list_reachable(memory):
                for state in partition.values():
                    assert isinstance(state, ErasedState)
                    now = {number for number, record in done_records.items() if batch >= min(record.batch, files.batch)}
                    check_state(self.users, batch, state, now, just_done)

    def calm(self) -> None:
        """Run without failures; then every request must soon be done, and finally be removed."""
        self._calm = True
        self.sleeping.clear()
        self.restart(self.batch)
        for number, request in list(self.users.requests.items()):
            if request.damaged and not request.removed:
                self.users.withdraw(number)
        numbers = Numbers(b"calm")
        for _ in range(DONE_WITHIN):
            self.run_batch(numbers, heartbeat=True)
            self.check()
        states = self.users.states()
        late = [
            number for number, state in states.items() if state != "done" and not self._was_withdrawn_when_done(number)
        ]
        if late:
            raise WrongStateError(f"requests {late} are not done after {DONE_WITHIN} batches: {states}")
        newest = max((record.heartbeat for record in self.users.records.values()), default=0)
        while self._heartbeats() <= newest + recent_heartbeats(self.config.retained) + 2:
            self.run_batch(numbers, heartbeat=True)
            self.check()
        left = [request.number for request in self.users.requests.values() if not request.removed]
        if left:
            raise WrongStateError(
                f"the files of requests {left} are there after {self._heartbeats() - newest} heartbeats"
            )

    def _heartbeats(self) -> int:
        return self.spark[0].at(self.batch)[0].pointer.heartbeats

    def _was_withdrawn_when_done(self, number: int) -> bool:
        """Whether a request was withdrawn after it was done and removed: then its record is that of another request."""
        record = self.users.records.get(number)
        return record is not None and record.id != self.users.requests[number].id


class _Attribution:
    """Attributes records to a task until the context ends."""

    def __init__(self, world: ErasureWorld, task: Task) -> None:
        self._world, self._now, self._before = world, task, world._task

    def __enter__(self) -> None:
        self._world._task = self._now

    def __exit__(self, *_: object) -> None:
        self._world._task = self._before


def simulate_erasures(history: History, patches: Iterable[Patch] = ()) -> ErasureWorld:
    """Run a history to its end; raises `WrongStateError` if an invariant is violated.

    Parameters
    ----------
    history
        The history; its configuration is an `ErasureConfig`.
    patches
        Replacements for a broken variant: object, name and value.
    """
    assert isinstance(history.config, ErasureConfig)
    world = ErasureWorld(history.config)
    try:
        with replace_attributes([*world.users.patches(), *patches]):
            for step in history.steps:
                world.step(step)
            world.calm()
    finally:
        world.close()
    return world
