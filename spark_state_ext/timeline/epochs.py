"""Epochs: which run of a query made a file, and whether the file counts. Decisions over values; no I/O and no clock.

Each run of a query has a number, its epoch, and writes down where it began before it writes its first file: after which
batch, and in which epoch that batch was made. A query that goes back begins a new epoch at an earlier batch, and what
the epoch before did after that batch was given up. A query may also return to what it had given up, where somebody
kept a copy of its checkpoint; so epochs are a tree, and the line from the newest epoch to the root is what counts.

The idea is PostgreSQL's: timelines, and their history files (`src/backend/access/transam/timeline.c`).
"""

from __future__ import annotations

import enum
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from arrow_schemas.checksum import whole_number
from arrow_schemas.lineage import LineageHeader
from arrow_schemas.pointer import Pointer

__all__ = ["EPOCHS_MAX", "Epoch", "Epochs", "Made", "Position", "Start", "Verdict", "begin", "sparks_run_id"]

# Older epochs are forgotten. What they made counts as what was made before there were epochs (`before_epochs`).
EPOCHS_MAX = 512
_JUDGED_MAX = 10_000
# Where records were removed, numbers go on so much higher for each batch.
_LOST_STEP = 2**20
_RECENT = 3
_SPARKS_RUN_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


@dataclass(frozen=True)
class Position:
    """How far a query has come.

    Parameters
    ----------
    query_id
        The query whose batches are counted.
    batch
        Number of the batch.
    heartbeat
        Number of heartbeats. It goes on where another query takes a folder over, which batches do not.
    before
        Where the query took the folder over from another one: that one, and the number of its batch then.
    told
        Whether the task was told its batch. Else `batch` counts the bucket's calls, and heartbeats are compared.
    """

    query_id: str
    batch: int
    heartbeat: int
    before: tuple[str, int] = ("", -1)
    told: bool = True

    def beyond(self, other: Position) -> int:
        """How many batches this is after another position; in heartbeats where they count different batches."""
        batch = self._batch_of(other)
        if batch is None and not other.heartbeat and self.query_id != other.query_id:
            # Format 1 of the pointer has no heartbeats: what a query began with copies of was before it, for certain.
            return 0
        return self.heartbeat - other.heartbeat if batch is None else self.batch - batch

    def is_exact(self, other: Position) -> bool:
        """Whether batches are compared, and not heartbeats, of which batches without data have none of their own."""
        return self._batch_of(other) is not None

    def _batch_of(self, other: Position) -> int | None:
        """Another position's batch as this one's query counts them; None where that is not known."""
        if not (self.told and other.told):
            return None
        if self.query_id == other.query_id:
            return other.batch
        return other.before[1] if self.query_id == other.before[0] else None


@dataclass(frozen=True)
class Made:
    """When a checkpoint was made: in which epoch, and in which batch of it. Epoch 0: without a record.

    `quiet`: perhaps in a batch without data, which has the heartbeat of the one before.
    """

    epoch: int
    at: Position
    quiet: bool = True

    @staticmethod
    def of(header: LineageHeader) -> Made:
        """When a file was made. One without an epoch may be of a release that does not tell what is quiet."""
        writer = header.writer
        at = Position(writer.query_id, writer.batch, writer.heartbeat, told=writer.told)
        return Made(writer.epoch, at, writer.quiet or not writer.epoch)


@dataclass(frozen=True)
class Epoch:
    """One run of a query.

    Parameters
    ----------
    number
        1, 2, …
    parents
        The epoch that it went on from; 0: one that is not recorded, or the folder was empty. Several, where no call so
        far had an input that tells which.
    plan_id
        The plan that the run was started from.
    run_id
        Spark's id of the run (`sparks_run_id`); empty where tasks are not told it.
    after
        What was committed when it began; it made the batch after that first.
    same_plan
        The epoch before was started from the same plan, and only Spark's run id tells that this is another run.
    withdrawn
        It was begun by a late task of a run that another one had followed before: nothing goes on from it.
    """

    number: int
    parents: tuple[int, ...]
    plan_id: str
    run_id: str
    after: Position
    same_plan: bool = False
    withdrawn: bool = False

    def to_plain(self) -> list[Any]:
        """As a record has it."""
        after = [self.after.query_id, self.after.batch, self.after.heartbeat, *self.after.before, self.after.told]
        return [self.number, list(self.parents), self.plan_id, self.run_id, *after, self.same_plan, self.withdrawn]

    @staticmethod
    def of_plain(plain: list[Any]) -> Epoch:
        """Inverse of `to_plain`."""
        names = ["number", "parents", "plan_id", "run_id", "query_id", "batch", "heartbeat"]
        names += ["before_query_id", "before_batch", "told", "same_plan", "withdrawn"]
        fields: dict[str, Any] = dict(zip(names, plain, strict=True))
        number = whole_number(fields, "number", 1)
        parents = tuple(whole_number({"parent": it}, "parent", 0, number - 1) for it in fields["parents"])
        batch, heartbeat = whole_number(fields, "batch", -1), whole_number(fields, "heartbeat", 0)
        before = str(fields["before_query_id"]), whole_number(fields, "before_batch", -1)
        plan_id, run_id, query_id = (str(fields[name]) for name in ("plan_id", "run_id", "query_id"))
        after = Position(query_id, batch, heartbeat, before, bool(fields["told"]))
        return Epoch(number, parents, plan_id, run_id, after, bool(fields["same_plan"]), bool(fields["withdrawn"]))


class Verdict(enum.Enum):
    """What epochs say of a file."""

    COUNTS = "it was made on the line that the newest epoch is on, before that left the file's epoch"
    GIVEN_UP = "the query went back to before it, and made its batch anew"
    UNTOLD = "records do not tell, or not yet"
    UNRECORDED = "no epoch tells: it is from before there were records of them"


@dataclass(frozen=True)
class _Way:
    """What the epochs on a line say of something, from the newest epoch back to where the line begins.

    Parameters
    ----------
    of_all
        What all of them say.
    of_later
        What those say that came after its own epoch; None: its own epoch is not on the line.
    first
        Number of the oldest epoch of the line that was looked at; 0: the line goes on.
    """

    of_all: Verdict
    of_later: Verdict | None = None
    first: int = 0


@dataclass(frozen=True)
class Epochs:
    """The epochs of a query folder, ascending; the last one is the newest run's."""

    known: tuple[Epoch, ...] = ()

    def __post_init__(self) -> None:
        numbers = [it.number for it in self.known]
        if numbers != sorted(set(numbers)):
            raise ValueError(f"epochs must ascend, not {numbers}")

    @property
    def newest(self) -> Epoch | None:
        """The newest run's; None where none is recorded."""
        return next((it for it in reversed(self.known) if not it.withdrawn), None)

    @property
    def numbers_to(self) -> int:
        """The highest number that was given."""
        return self.known[-1].number if self.known else 0

    def with_epoch(self, epoch: Epoch) -> Epochs:
        """With one more, or another one in the place of the one with its number."""
        others = [it for it in self.known if it.number != epoch.number]
        return Epochs(tuple(sorted((*others, epoch), key=lambda it: it.number))[-EPOCHS_MAX:])

    @cached_property
    def _query_ids(self) -> frozenset[str]:
        return frozenset(it.after.query_id for it in self.known)

    @cached_property
    def _claimed_ids(self) -> frozenset[str]:
        return frozenset(it.after.before[0] for it in self.known if it.after.before[0])

    @cached_property
    def _by_number(self) -> Mapping[int, Epoch]:
        return {it.number: it for it in self.known}

    @property
    def line_is_known(self) -> bool:
        """Whether each run is known to have gone on from which one."""
        epoch = self.newest
        while epoch is not None and len(epoch.parents) == 1:
            epoch = self._by_number.get(epoch.parents[0])
        return epoch is None

    def get(self, number: int) -> Epoch | None:
        """The epoch with a number; None where it is not recorded."""
        return self._by_number.get(number)

    def rank(self, made: Made) -> int:
        """The epoch in which something was made; 0 where that is not one of these epochs."""
        epoch = self._by_number.get(made.epoch)
        return 0 if epoch is None or self._is_of_another(made, epoch) else epoch.number

    def judge(self, made: Made) -> Verdict:
        """Whether what was made then counts for the newest run."""
        found = self._verdicts.get(made)
        if found is None:
            if len(self._verdicts) >= _JUDGED_MAX:
                # A standby service keeps one for days.
                self._verdicts.clear()
            found = self._verdicts[made] = self._judge(made)
        return found

    @cached_property
    def _verdicts(self) -> dict[Made, Verdict]:
        return {}

    def _judge(self, made: Made) -> Verdict:
        newest, epoch = self.newest, self._by_number.get(made.epoch)
        if newest is None:
            return Verdict.UNRECORDED
        if epoch is not None and self._is_of_another(made, epoch):
            epoch = None
        if epoch is newest:
            return Verdict.COUNTS
        verdicts = {self._judged(made, epoch, way) for way in self._ways(made, epoch)}
        return verdicts.pop() if len(verdicts) == 1 else Verdict.UNTOLD

    def _ways(self, made: Made, epoch: Epoch | None) -> set[_Way]:
        """The lines that the newest epoch may be on. There may be many, and few say different things."""
        newest = self.newest
        assert newest is not None, "there is a line"
        found: set[_Way] = set()
        left: dict[int, set[_Way]] = {newest.number: {_Way(Verdict.COUNTS)}}
        for it in reversed(self.known):
            ways = left.pop(it.number, set())
            if epoch is not None and it.number <= epoch.number:
                # What came before its own epoch says nothing of it.
                found |= {replace(way, of_later=way.of_all if it is epoch else None, first=it.number) for way in ways}
                continue
            for way in ways:
                here = _Way(_worse(way.of_all, _cut(made, it)))
                for parent in it.parents:
                    if parent in self._by_number:
                        left.setdefault(parent, set()).add(here)
                    else:
                        found.add(replace(here, first=it.number))
            if not left:
                break
        return found

    def _judged(self, made: Made, epoch: Epoch | None, way: _Way) -> Verdict:
        if epoch is None:
            if way.of_all is not Verdict.GIVEN_UP:
                is_own = made.at.query_id in self._query_ids | self._claimed_ids
                return Verdict.UNTOLD if is_own and way.of_all is Verdict.UNTOLD else Verdict.UNRECORDED
            # Of a release without epochs, which may also have written in between; or its record was removed.
            is_forgotten = len(self.known) == EPOCHS_MAX and 0 < made.epoch < self.known[0].number
            is_known = is_forgotten or made.at.query_id not in self._query_ids
            return Verdict.GIVEN_UP if is_known else Verdict.UNTOLD
        if way.of_later is None:
            # A run without a record, with which the line begins, may have gone on from it, if it came before.
            is_before = epoch.number < way.first and not epoch.withdrawn
            return Verdict.UNTOLD if is_before and way.of_all is not Verdict.GIVEN_UP else Verdict.GIVEN_UP
        # Each later run on the line may have gone back further than the one before it.
        return way.of_later

    def _is_of_another(self, made: Made, epoch: Epoch) -> bool:
        """Whether it is of another epoch with this number: it was made before this one began.

        A query that began with copies of another one's files has that one's numbers in them. And where somebody removed
        the records, numbers may be given again.
        """
        if made.at.query_id != epoch.after.query_id:
            return True
        if epoch is self.newest:
            # A thread that tells an old batch may have begun it late.
            return False
        return made.at.beyond(epoch.after) < (0 if made.quiet and not made.at.is_exact(epoch.after) else 1)


def _cut(made: Made, later: Epoch) -> Verdict:
    """What a run that came later on the line says of what was made before it."""
    beyond = made.at.beyond(later.after)
    if beyond == 1 and later.same_plan:
        # The run before may be this one, by another name.
        return Verdict.UNTOLD
    if beyond == 0 and made.quiet and not made.at.is_exact(later.after):
        return Verdict.UNTOLD
    return Verdict.COUNTS if beyond <= 0 else Verdict.GIVEN_UP


def _worse(one: Verdict, other: Verdict) -> Verdict:
    """What two runs together say of what was made before both."""
    return next(it for it in (Verdict.GIVEN_UP, Verdict.UNTOLD, Verdict.COUNTS) if it in (one, other))


@dataclass(frozen=True)
class Start:
    """What a call tells of its run.

    Parameters
    ----------
    plan_id, run_id
        As `Epoch`.
    after
        The batch before, which is committed.
    made
        When the bucket's input was made: its pointer's epoch, batch and heartbeats. None: there is none in this query
        folder, or it is of format 1, which has no epochs.
    alive
        Its run goes on, though a task of another one has begun an epoch since.
    """

    plan_id: str
    run_id: str
    after: Position
    made: Made | None
    alive: bool = False

    @staticmethod
    def of(
        plan_id: str,
        run_id: str,
        after: Position,
        pointer: Pointer | None,
        epochs: Epochs,
        claimed: tuple[str, int] | None = None,
    ) -> Start:
        """From the pointer that a call was given in the query folder; None: it begins with something else.

        `claimed`: the folder is claimed from this query, after this batch of it.
        """
        epoch = None if pointer is None else epochs.get(pointer.epoch)
        its = after if epoch is None else epoch.after
        if claimed is not None:
            after = replace(after, before=claimed if epoch is None else (its.query_id, claimed[1]))
        if pointer is None or not pointer.heartbeats:
            return Start(plan_id, run_id, after, None)
        at = Position(its.query_id, pointer.batch, pointer.heartbeats, told=its.told)
        return Start(plan_id, run_id, after, Made(pointer.epoch, at))


def sparks_run_id(told: str) -> str:
    """What a task is told as its run, if it is an id as Spark makes them; empty where user code has set another."""
    return told if _SPARKS_RUN_ID.fullmatch(told) else ""


def begin(epochs: Epochs, start: Start) -> tuple[Epochs, int]:
    """The epochs once a run has made a call, and the number of the call's own epoch.

    The epochs are the same where the run's is among them, and the call's input tells nothing new of it. A number is
    never given twice: it is higher than that of each epoch that is known, and that of the pointer, where records are
    gone.
    """
    newest, made = epochs.newest, start.made
    mine = _recorded(epochs, start)
    if mine is not None and start.alive:
        for it in epochs.known:
            if it.number > mine.number or it is mine:
                epochs = epochs.with_epoch(replace(it, withdrawn=it is not mine))
        return epochs, mine.number
    of_newest = newest is not None and (made is not None and made.epoch == newest.number)
    if mine is not None and mine is not newest and not of_newest:
        # A task of an earlier run. A thread that user code keeps may tell of one from the same plan, too, but its input
        # is the newest one's.
        return epochs, mine.number
    if newest is not None and newest.plan_id == start.plan_id and not _is_new_run(epochs, newest, start):
        # Its first calls may not have been told which run they are of.
        newest = replace(newest, run_id=newest.run_id or start.run_id)
        return epochs.with_epoch(_narrowed(epochs, newest, made)), newest.number
    number = max(epochs.numbers_to, 0 if made is None else made.epoch) + 1
    parents: tuple[int, ...] = (0 if newest is None else newest.number,)
    if made is not None and newest is not None:
        # One of the last runs may have been begun by a task that was late.
        recent = [it.number for it in epochs.known[-_RECENT:] if it.number > made.epoch and not it.withdrawn]
        parents = _without_failed(
            epochs, start, (*recent[::-1], made.epoch if epochs.get(made.epoch) is not None else 0)
        )
    elif newest is None and number > 1:
        # The records are gone, and runs after that of the input had numbers too. Another run may have begun here with
        # the records gone: the hash tells it from this one.
        number += _LOST_STEP * (1 + max(0, start.after.batch) + start.after.heartbeat)
        number += zlib.crc32(f"{start.plan_id} {start.run_id}".encode()) % _LOST_STEP
    same_plan = newest is not None and newest.plan_id == start.plan_id
    it = Epoch(number, parents, start.plan_id, start.run_id, start.after, same_plan)
    return epochs.with_epoch(_narrowed(epochs, it, made)), number


def _without_failed(epochs: Epochs, start: Start, numbers: Iterable[int]) -> tuple[int, ...]:
    """Parents without those that began after the same batch as the run itself, which have their parents' place.

    What those made after it was given up either way, and they cut nothing that the run does not cut. So a query that
    fails again and again before its first commit leaves no choice behind.
    """
    found: dict[int, None] = {}
    for number in numbers:
        epoch = epochs.get(number)
        began_here = epoch is not None and start.after.is_exact(epoch.after) and not start.after.beyond(epoch.after)
        found.update(dict.fromkeys(epoch.parents if epoch is not None and began_here else (number,)))
    return tuple(found)


def _recorded(epochs: Epochs, start: Start) -> Epoch | None:
    """The epoch that is known to be of a call's run."""
    mine = [it for it in epochs.known if (it.plan_id, it.run_id) == (start.plan_id, start.run_id)]
    return mine[-1] if mine and start.run_id else None


def _narrowed(epochs: Epochs, newest: Epoch, made: Made | None) -> Epoch:
    """The newest epoch with those parents only with which an input is on its line.

    A bucket that was not called since an earlier epoch has that one's pointer, which tells little of later ones.
    """
    if made is None:
        return newest
    ways = [replace(newest, parents=(parent,)) for parent in newest.parents]
    fitting = tuple(it.parents[0] for it in ways if _fits(epochs.with_epoch(it), made))
    # Else it is of an epoch that was given up, so that is where the run went on from.
    earlier = made.epoch if made.epoch < newest.number and epochs.get(made.epoch) is not None else 0
    return replace(newest, parents=fitting or (earlier,))


def _fits(epochs: Epochs, made: Made) -> bool:
    """Whether an input may be on the line of the newest epoch."""
    return epochs.judge(made) is not Verdict.GIVEN_UP


def _is_new_run(epochs: Epochs, newest: Epoch, start: Start) -> bool:
    """Whether Spark's run id tells of another run of one plan.

    User code may set what tasks are told, and a thread that it keeps may tell of an earlier run (`TaskInfo`). So ids
    that come back tell nothing.
    """
    if not start.run_id or _recorded(epochs, start) is not None:
        return False
    # Where the newest run was not told its id so far, this one may be it.
    return bool(newest.run_id) or (start.made is not None and not _fits(epochs, start.made))
