"""Epochs: which run of a query made a file, and whether the file counts. Decisions over values; no I/O and no clock.

Each run of a query has a number, its epoch. Before it writes its first file, it records where it began: after which
batch, and in which epoch that batch was made. A query that goes back begins a new epoch at an earlier batch, and all
files that the epoch before made after that batch are given up. A query may also return to files that it had given up,
if a copy of its checkpoint was kept. So epochs form a tree, and the line from the newest epoch to the root counts.

The idea is PostgreSQL's: timelines, and their history files (`src/backend/access/transam/timeline.c`).
"""

from __future__ import annotations

import enum
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

from arrow_schemas.checksum import read_whole_number
from arrow_schemas.lineage import LineageHeader
from arrow_schemas.pointer import Pointer

__all__ = ["EPOCHS_MAX", "Epoch", "Epochs", "MadeAt", "Position", "Start", "Verdict", "begin_epoch", "parse_run_id"]

# Older epochs are forgotten. Their files are treated like files from before there were epochs (`before_epochs`).
EPOCHS_MAX = 512
_VERDICTS_MAX = 10_000
# If records were removed, the next number is higher by this step for each batch.
_LOST_STEP = 2**20
_RECENT = 3
_SPARKS_RUN_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


@dataclass(frozen=True)
class Position:
    """Position of a query: its last batch, and how it is counted.

    Parameters
    ----------
    query_id
        The query whose batches are counted.
    batch
        Number of the batch.
    heartbeat
        Number of heartbeats. When another query takes the folder over, heartbeats go on, but batches start again.
    before
        If the query took the folder over from another one: the other query's id, and its last batch.
    told
        True if the task knew its batch. Otherwise `batch` counts the bucket's calls, and heartbeats are compared.
    """

    query_id: str
    batch: int
    heartbeat: int
    before: tuple[str, int] = ("", -1)
    told: bool = True

    def beyond(self, other: Position) -> int:
        """Return by how many batches this is after another position; by heartbeats if batches are not comparable."""
        batch = self._batch_of(other)
        if batch is None and not other.heartbeat and self.query_id != other.query_id:
            # Format 1 of the pointer has no heartbeats: files that a query began with were certainly made before it.
            return 0
        return self.heartbeat - other.heartbeat if batch is None else self.batch - batch

    def is_exact(self, other: Position) -> bool:
        """True if batches are compared, and not heartbeats, which do not count batches without data."""
        return self._batch_of(other) is not None

    def _batch_of(self, other: Position) -> int | None:
        """Return another position's batch in this query's count; None if that is unknown."""
        if not (self.told and other.told):
            return None
        if self.query_id == other.query_id:
            return other.batch
        return other.before[1] if self.query_id == other.before[0] else None


@dataclass(frozen=True)
class MadeAt:
    """When a checkpoint was made: in which epoch (0: not recorded), and at which position in it.

    `quiet` is True if it may be a batch without data, which has the heartbeat of the batch before.
    """

    epoch: int
    at: Position
    quiet: bool = True

    @staticmethod
    def of(header: LineageHeader) -> MadeAt:
        """Return when a file was made. A file without an epoch may be of a release that does not record `quiet`."""
        writer = header.writer
        at = Position(writer.query_id, writer.batch, writer.heartbeat, told=writer.told)
        return MadeAt(writer.epoch, at, writer.quiet or not writer.epoch)


@dataclass(frozen=True)
class Epoch:
    """A run of a query.

    Parameters
    ----------
    number
        1, 2, …
    parents
        The epoch that it went on from; 0 if that is not recorded, or the folder was empty. There are several while no
        call has had an input that decides which one it was.
    plan_id
        The plan that the run was started from.
    run_id
        Spark's id of the run (`parse_run_id`); empty if tasks do not know it.
    after
        The last committed position when it began; its first batch is the one after that.
    same_plan
        The epoch before was started from the same plan, and only Spark's run id shows that this is another run.
    withdrawn
        It was begun by a late task of a run that another run had already followed: no epoch goes on from it.
    """

    number: int
    parents: tuple[int, ...]
    plan_id: str
    run_id: str
    after: Position
    same_plan: bool = False
    withdrawn: bool = False

    def to_plain(self) -> list[Any]:
        """Return the epoch as the list in a record."""
        after = [self.after.query_id, self.after.batch, self.after.heartbeat, *self.after.before, self.after.told]
        return [self.number, list(self.parents), self.plan_id, self.run_id, *after, self.same_plan, self.withdrawn]

    @staticmethod
    def of_plain(plain: list[Any]) -> Epoch:
        """Read an epoch from the list in a record."""
        names = ["number", "parents", "plan_id", "run_id", "query_id", "batch", "heartbeat"]
        names += ["before_query_id", "before_batch", "told", "same_plan", "withdrawn"]
        fields: dict[str, Any] = dict(zip(names, plain, strict=True))
        number = read_whole_number(fields, "number", 1)
        parents = tuple(read_whole_number({"parent": parent}, "parent", 0, number - 1) for parent in fields["parents"])
        batch, heartbeat = read_whole_number(fields, "batch", -1), read_whole_number(fields, "heartbeat", 0)
        before = str(fields["before_query_id"]), read_whole_number(fields, "before_batch", -1)
        plan_id, run_id, query_id = (str(fields[name]) for name in ("plan_id", "run_id", "query_id"))
        after = Position(query_id, batch, heartbeat, before, bool(fields["told"]))
        return Epoch(number, parents, plan_id, run_id, after, bool(fields["same_plan"]), bool(fields["withdrawn"]))


class Verdict(enum.Enum):
    """Decision about a file, by epochs."""

    COUNTS = "it was made on the newest epoch's line, before the line left the file's epoch"
    GIVEN_UP = "the query went back to before it, and made its batch again"
    UNKNOWN = "the records do not decide it, or not yet"
    UNRECORDED = "its epoch is not recorded: it was made before epochs were"


@dataclass(frozen=True)
class _Way:
    """Verdicts about a file by the epochs on one possible line, from the newest epoch back to the line's beginning.

    Parameters
    ----------
    of_all
        Verdict of all epochs on the line.
    of_later
        Verdict of the epochs after the file's own epoch; None if that is not on the line.
    first
        Number of the oldest epoch of the line that was looked at; 0 while the line goes on.
    """

    of_all: Verdict
    of_later: Verdict | None = None
    first: int = 0


@dataclass(frozen=True)
class Epochs:
    """The epochs of a query folder, ascending; the last one is the newest run's."""

    entries: tuple[Epoch, ...] = ()

    def __post_init__(self) -> None:
        numbers = [epoch.number for epoch in self.entries]
        if numbers != sorted(set(numbers)):
            raise ValueError(f"epochs must be in ascending order, not {numbers}")

    @property
    def newest(self) -> Epoch | None:
        """The newest run's epoch, if any is recorded."""
        return next((epoch for epoch in reversed(self.entries) if not epoch.withdrawn), None)

    @property
    def numbers_to(self) -> int:
        """The highest number of an epoch so far."""
        return self.entries[-1].number if self.entries else 0

    def with_epoch(self, epoch: Epoch) -> Epochs:
        """Return the epochs with one added, or replaced if its number exists."""
        others = [other for other in self.entries if other.number != epoch.number]
        return Epochs(tuple(sorted((*others, epoch), key=lambda each: each.number))[-EPOCHS_MAX:])

    @cached_property
    def _query_ids(self) -> frozenset[str]:
        return frozenset(epoch.after.query_id for epoch in self.entries)

    @cached_property
    def _claimed_ids(self) -> frozenset[str]:
        return frozenset(epoch.after.before[0] for epoch in self.entries if epoch.after.before[0])

    @cached_property
    def _by_number(self) -> Mapping[int, Epoch]:
        return {epoch.number: epoch for epoch in self.entries}

    @property
    def line_is_known(self) -> bool:
        """True if for each run of the line it is known which run it went on from."""
        epoch = self.newest
        while epoch is not None and len(epoch.parents) == 1:
            epoch = self._by_number.get(epoch.parents[0])
        return epoch is None

    def get(self, number: int) -> Epoch | None:
        """Return the epoch with a number; None if it is not recorded."""
        return self._by_number.get(number)

    def rank(self, made_at: MadeAt) -> int:
        """Return the number of the epoch in which a file was made; 0 if it is not one of these epochs."""
        epoch = self._by_number.get(made_at.epoch)
        return 0 if epoch is None or self._is_of_other_epoch(made_at, epoch) else epoch.number

    def judge(self, made_at: MadeAt) -> Verdict:
        """Return whether a file that was made then counts for the newest run."""
        verdict = self._verdicts.get(made_at)
        if verdict is None:
            if len(self._verdicts) >= _VERDICTS_MAX:
                # A standby service keeps this object for days.
                self._verdicts.clear()
            verdict = self._verdicts[made_at] = self._judge(made_at)
        return verdict

    @cached_property
    def _verdicts(self) -> dict[MadeAt, Verdict]:
        return {}

    def _judge(self, made_at: MadeAt) -> Verdict:
        newest, epoch = self.newest, self._by_number.get(made_at.epoch)
        if newest is None:
            return Verdict.UNRECORDED
        if epoch is not None and self._is_of_other_epoch(made_at, epoch):
            epoch = None
        if epoch is newest:
            return Verdict.COUNTS
        verdicts = {self._judge_way(made_at, epoch, way) for way in self._find_ways(made_at, epoch)}
        return verdicts.pop() if len(verdicts) == 1 else Verdict.UNKNOWN

    def _find_ways(self, made_at: MadeAt, epoch: Epoch | None) -> set[_Way]:
        """Return the different verdicts of all lines that the newest epoch may be on."""
        newest = self.newest
        assert newest is not None, "there is a line"
        ways_found: set[_Way] = set()
        open_ways: dict[int, set[_Way]] = {newest.number: {_Way(Verdict.COUNTS)}}
        for line_epoch in reversed(self.entries):
            ways = open_ways.pop(line_epoch.number, set())
            if epoch is not None and line_epoch.number <= epoch.number:
                # Epochs before the file's own epoch do not affect it.
                ways_found |= {
                    replace(way, of_later=way.of_all if line_epoch is epoch else None, first=line_epoch.number)
                    for way in ways
                }
                continue
            for way in ways:
                here = _Way(_worse_verdict(way.of_all, _judge_by_later(made_at, line_epoch)))
                for parent in line_epoch.parents:
                    if parent in self._by_number:
                        open_ways.setdefault(parent, set()).add(here)
                    else:
                        ways_found.add(replace(here, first=line_epoch.number))
            if not open_ways:
                break
        return ways_found

    def _judge_way(self, made_at: MadeAt, epoch: Epoch | None, way: _Way) -> Verdict:
        if epoch is None:
            if way.of_all is not Verdict.GIVEN_UP:
                is_own = made_at.at.query_id in self._query_ids | self._claimed_ids
                return Verdict.UNKNOWN if is_own and way.of_all is Verdict.UNKNOWN else Verdict.UNRECORDED
            # The file is of a release without epochs, which may have written in between, or its record was removed.
            is_forgotten = len(self.entries) == EPOCHS_MAX and 0 < made_at.epoch < self.entries[0].number
            is_known = is_forgotten or made_at.at.query_id not in self._query_ids
            return Verdict.GIVEN_UP if is_known else Verdict.UNKNOWN
        if way.of_later is None:
            # The line begins with an unrecorded run, which may have gone on from this epoch if that came before.
            is_before = epoch.number < way.first and not epoch.withdrawn
            return Verdict.UNKNOWN if is_before and way.of_all is not Verdict.GIVEN_UP else Verdict.GIVEN_UP
        # Each later run on the line may have gone back further than the one before it.
        return way.of_later

    def _is_of_other_epoch(self, made_at: MadeAt, epoch: Epoch) -> bool:
        """True if a file is of another epoch with this number, as it was made before this epoch began.

        A query that began with copies of another query's files has that query's numbers in them. And if the records
        were removed, numbers may be used again.
        """
        if made_at.at.query_id != epoch.after.query_id:
            return True
        if epoch is self.newest:
            # A thread that reports an old batch may have begun this epoch late.
            return False
        return made_at.at.beyond(epoch.after) < (0 if made_at.quiet and not made_at.at.is_exact(epoch.after) else 1)


def _judge_by_later(made_at: MadeAt, later: Epoch) -> Verdict:
    """Return the verdict about a file by a later run on its line."""
    beyond = made_at.at.beyond(later.after)
    if beyond == 1 and later.same_plan:
        # The run before may be the same run under another id.
        return Verdict.UNKNOWN
    if beyond == 0 and made_at.quiet and not made_at.at.is_exact(later.after):
        return Verdict.UNKNOWN
    return Verdict.COUNTS if beyond <= 0 else Verdict.GIVEN_UP


def _worse_verdict(verdict_1: Verdict, verdict_2: Verdict) -> Verdict:
    """Return the worse of two verdicts."""
    return next(
        verdict for verdict in (Verdict.GIVEN_UP, Verdict.UNKNOWN, Verdict.COUNTS) if verdict in (verdict_1, verdict_2)
    )


@dataclass(frozen=True)
class Start:
    """A call's knowledge about its run.

    Parameters
    ----------
    plan_id, run_id
        See `Epoch`.
    after
        The batch before, which is committed.
    made_at
        When the bucket's input was made: its pointer's epoch, batch and heartbeats. None if the bucket has no pointer
        in this query folder, or one of format 1, which has no epochs.
    alive
        Its run goes on, although a task of another run has begun an epoch since.
    """

    plan_id: str
    run_id: str
    after: Position
    made_at: MadeAt | None
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
        """Return the start of a call with this pointer; None if the bucket has no pointer in the query folder.

        `claimed` is the query from which the folder was claimed, and its last batch.
        """
        epoch = None if pointer is None else epochs.get(pointer.epoch)
        position = after if epoch is None else epoch.after
        if claimed is not None:
            after = replace(after, before=claimed if epoch is None else (position.query_id, claimed[1]))
        if pointer is None or not pointer.heartbeats:
            return Start(plan_id, run_id, after, None)
        at = Position(position.query_id, pointer.batch, pointer.heartbeats, told=position.told)
        return Start(plan_id, run_id, after, MadeAt(pointer.epoch, at))


def parse_run_id(run_id: str) -> str:
    """Return a task's run id if it has the form of Spark's ids; empty if user code has set something else."""
    return run_id if _SPARKS_RUN_ID.fullmatch(run_id) else ""


def begin_epoch(epochs: Epochs, start: Start) -> tuple[Epochs, int]:
    """Return the epochs after a call of a run, and the number of the call's own epoch.

    The epochs are unchanged if the run's epoch is among them, and the call's input says nothing new about it. A number
    is never used twice: it is higher than each known epoch's number, and than the pointer's if records are gone.
    """
    newest, made_at = epochs.newest, start.made_at
    own_epoch = _find_own_epoch(epochs, start)
    if own_epoch is not None and start.alive:
        for epoch in epochs.entries:
            if epoch.number > own_epoch.number or epoch is own_epoch:
                epochs = epochs.with_epoch(replace(epoch, withdrawn=epoch is not own_epoch))
        return epochs, own_epoch.number
    of_newest = newest is not None and (made_at is not None and made_at.epoch == newest.number)
    if own_epoch is not None and own_epoch is not newest and not of_newest:
        # This is a task of an earlier run. A thread that user code keeps may also report an earlier run of the same
        # plan, but its input is of the newest run.
        return epochs, own_epoch.number
    if newest is not None and newest.plan_id == start.plan_id and not _is_new_run(epochs, newest, start):
        # The run's first calls may have been without their run id.
        newest = replace(newest, run_id=newest.run_id or start.run_id)
        return epochs.with_epoch(_narrow_parents(epochs, newest, made_at)), newest.number
    number = max(epochs.numbers_to, 0 if made_at is None else made_at.epoch) + 1
    parents: tuple[int, ...] = (0 if newest is None else newest.number,)
    if made_at is not None and newest is not None:
        # A late task may have begun one of the last epochs, or the run returns to what later runs gave up.
        recent = islice(_find_fitting(epochs, start, number, made_at), _RECENT)
        parents = _replace_failed_parents(
            epochs, start, (*recent, made_at.epoch if epochs.get(made_at.epoch) is not None else 0)
        )
    elif newest is None and number > 1:
        # The records are gone, so leave a gap for the numbers of runs after the input's run. The hash separates this
        # run from another one that may have begun here without records.
        number += _LOST_STEP * (1 + max(0, start.after.batch) + start.after.heartbeat)
        number += zlib.crc32(f"{start.plan_id} {start.run_id}".encode()) % _LOST_STEP
    same_plan = newest is not None and newest.plan_id == start.plan_id
    new_epoch = Epoch(number, parents, start.plan_id, start.run_id, start.after, same_plan)
    return epochs.with_epoch(_narrow_parents(epochs, new_epoch, made_at)), number


def _find_fitting(epochs: Epochs, start: Start, number: int, made_at: MadeAt) -> Iterator[int]:
    """Iterate over epochs after the input's that a run with this number may go on from, the newest first."""
    for epoch in reversed(epochs.entries):
        if epoch.number <= made_at.epoch:
            return
        run = Epoch(number, (epoch.number,), start.plan_id, start.run_id, start.after)
        if not epoch.withdrawn and _fits(epochs.with_epoch(run), made_at):
            yield epoch.number


def _replace_failed_parents(epochs: Epochs, start: Start, numbers: Iterable[int]) -> tuple[int, ...]:
    """Replace parents that began after the same batch as this run by their own parents.

    What such a parent made after that batch is given up in any case, and it gave up no more than this run does. So a
    query that fails repeatedly before its first commit does not leave several possible parents.
    """
    parents: dict[int, None] = {}
    for number in numbers:
        epoch = epochs.get(number)
        began_here = epoch is not None and start.after.is_exact(epoch.after) and not start.after.beyond(epoch.after)
        parents.update(dict.fromkeys(epoch.parents if epoch is not None and began_here else (number,)))
    return tuple(parents)


def _find_own_epoch(epochs: Epochs, start: Start) -> Epoch | None:
    """Return the recorded epoch of a call's run, if there is one."""
    own = [epoch for epoch in epochs.entries if (epoch.plan_id, epoch.run_id) == (start.plan_id, start.run_id)]
    return own[-1] if own and start.run_id else None


def _narrow_parents(epochs: Epochs, newest: Epoch, made_at: MadeAt | None) -> Epoch:
    """Return the newest epoch with only those parents that put the call's input on its line.

    A bucket that was last called in an earlier epoch has a pointer of that epoch, which says little about later ones.
    """
    if made_at is None:
        return newest
    variants = [replace(newest, parents=(parent,)) for parent in newest.parents]
    fitting = tuple(epoch.parents[0] for epoch in variants if _fits(epochs.with_epoch(epoch), made_at))
    # If none fits, the input is of an epoch that was given up, and the run went on from that epoch.
    earlier = made_at.epoch if made_at.epoch < newest.number and epochs.get(made_at.epoch) is not None else 0
    return replace(newest, parents=fitting or (earlier,))


def _fits(epochs: Epochs, made_at: MadeAt) -> bool:
    """True if an input may be on the newest epoch's line."""
    return epochs.judge(made_at) is not Verdict.GIVEN_UP


def _is_new_run(epochs: Epochs, newest: Epoch, start: Start) -> bool:
    """True if Spark's run id shows that this is another run of the same plan.

    User code may set the run id of tasks, and a thread that it keeps may report an earlier run (`TaskInfo`). So a run
    id that reappears is not a new run.
    """
    if not start.run_id or _find_own_epoch(epochs, start) is not None:
        return False
    # While the newest run's id is unknown, this may be the same run.
    return bool(newest.run_id) or (start.made_at is not None and not _fits(epochs, start.made_at))
