"""Runs of one query, their epochs, and the files that they leave: what counts as committed, and what was given up.

The query commits batches, fails, is started again from another plan or the same one, goes back, returns to a copy of
its checkpoint that it had gone back from, and is claimed by another query. It may have begun with copies of another
query's files. Tasks of earlier runs write late, and begin late. Some calls are not told their batch, some runs are of a
release that knows no epochs, and somebody removes the records. Processes remember their epoch. Uploads are slow. After
each step readers see the headers of files and the record of epochs, and nothing else, and read each batch.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from sim_parts import Numbers, Step
from sim_search import replace_attributes

from arrow_schemas.lineage import DELTA, CheckpointRef, LineageHeader, Writer, file_name
from arrow_schemas.pointer import LineageEntry, Pointer
from spark_state_ext.errors import MissingCheckpointError
from spark_state_ext.files.folder import Entry, Folder
from spark_state_ext.reading.committed_checkpoints import BATCH, START, Timeline, read_timeline
from spark_state_ext.timeline import epochs as epochs_module
from spark_state_ext.timeline.bucket_files import BucketFiles
from spark_state_ext.timeline.epochs import Epochs, Position
from spark_state_ext.timeline.records import EpochRegistry, RunStart

__all__ = ["TIMELINE_STEPS", "TimelineWorld", "WrongLineError", "simulate_timeline"]

TIMELINE_STEPS = (
    *("batch", "batch", "batch", "batch", "quiet", "quiet", "restart", "again", "back", "back", "return", "return"),
    *("late", "task", "task", "first"),
    *("claim", "begin", "old", "remove", "crashes"),
)
_FOLDER = Folder("memory://timeline")
Patch = tuple[Any, str, Callable[["TimelineWorld"], Any]]


class WrongLineError(AssertionError):
    """A file was taken for committed which is not, or the other way round."""


@dataclass(frozen=True)
class _Copy:
    """A copy of a checkpoint: of each batch the pointers of all buckets."""

    line: tuple[tuple[Pointer, ...], ...]


class TimelineWorld:
    """A query folder of two or three buckets."""

    def __init__(self, numbers: Numbers) -> None:
        self.buckets, self.told, self.slow = 2 + numbers.below(2), numbers.below(4) > 0, numbers.below(3) == 0
        self.counted: Counter[str] = Counter()
        self.record = Epochs()
        self.query_id, self.claims = "query 0", 0
        # A release that knows no epochs. What is not told its batch began under release 0.1.0, if at all.
        self.old = self.renamed = False
        # It went back or forth, and no run has recorded it yet.
        self.gone_elsewhere = False
        # What each process remembers of a run.
        self.now_s = 0.0
        # Batches since another run's late first call began an epoch.
        self.lagging = 0
        self.processes = self._new_processes()
        # First calls of runs that another one has followed before they could make them.
        self.waiting: list[tuple[RunStart, str, Pointer, bool]] = []
        first = tuple(Pointer("counts", bucket, self.buckets, 0, -1, None) for bucket in range(self.buckets))
        # By batch, what Spark has committed; first what the query began with.
        self.line: list[tuple[Pointer, ...]] = [first]
        # As of the last call: nobody can know of a run that has not begun.
        self.known, self.known_query = self.line, self.query_id
        self.copy: _Copy | None = None
        self.files: list[dict[CheckpointRef, LineageHeader]] = [{} for _ in first]
        # Made, and not uploaded yet.
        self.coming: list[LineageHeader] = []
        self.made: list[LineageHeader] = []
        self.claimed_batch, self.claimed_query = -1, ""
        self.claimed: tuple[Pointer, ...] = ()
        # Of each call, the query that it was of, its pointer, and whether there was data.
        self.calls: list[tuple[RunStart, str, Pointer, bool]] = []
        # A batch that failed is the same again when its plan is.
        self.failed: tuple[int, ...] | None = None
        # And whether it has data, whatever the plan: Spark has its offsets.
        self.failed_heartbeat: bool | None = None
        self.runs: list[str] = []
        self._uuids = 0
        if numbers.below(4) == 0:
            self._copy_another_query(numbers)
        self.start_run(new_plan=True)
        self.old = self.renamed = not self.told and self.line == [first] and numbers.below(3) == 0
        self.counted["old untold"] += self.old

    def _new_processes(self) -> list[EpochRegistry]:
        return [EpochRegistry(lambda: self.now_s) for _ in range(2)]

    def _copy_another_query(self, numbers: Numbers) -> None:
        """What it begins with: a file of another query in each bucket, with that one's epoch."""
        for bucket, pointer in enumerate(self.line[0]):
            self._uuids += 1
            ref, epoch = CheckpointRef(1, f"{self._uuids:032x}"), 1 + numbers.below(4)
            writer = Writer("another query", "its run", numbers.below(9), "host", 5, epoch, self.told)
            header = LineageHeader(DELTA, "counts", bucket, ref, None, (), 0, writer, "1")
            self.files[bucket][ref] = header
            begun = replace(pointer, lineage=(LineageEntry(ref, 0, 5),), heartbeats=5)
            self.line[0] = (*self.line[0][:bucket], begun, *self.line[0][bucket + 1 :])
        self.known = self.line

    # -- runs --------------------------------------------------------------------------------------

    def start_run(self, *, new_plan: bool, stays_old: bool = False) -> None:
        if new_plan:
            self.plan_id = self._new_plan_id()
            self.runs, self.failed = [], None
        self.old = self.old and stays_old
        self._uuids += 1
        self.runs.append(str(uuid.UUID(int=self._uuids)) if self.told else "")

    def _new_plan_id(self) -> str:
        self.counted["plans"] += 1
        return f"{self.counted['plans']:032x}"

    def epoch_of(self, call: RunStart, process: int) -> int:
        """As `EpochRegistry.of`, in a process."""

        def look(call: RunStart) -> tuple[Epochs, int]:
            self.record, number = epochs_module.begin_epoch(self.record, call.within(self.record))
            return self.record, number

        return self.processes[process].ask("", call, look)

    def call(self, bucket: int, heartbeat: bool, changes: bool, told_run: str, process: int = 0) -> Pointer:
        """One call of a bucket in the next batch; the pointer that it hands to Spark."""
        pointer, batch, told = self.line[-1][bucket], len(self.line) - 1, bool(told_run)
        if not told:
            batch = pointer.batch + 1
        after = Position(self.query_id, batch - 1, pointer.heartbeats, told=told)
        # A query that claims the folder begins with the other one's pointers as they were.
        given = self.claimed[bucket] if pointer.batch < 0 and self.claimed else pointer
        claims = (self.claimed_query, self.claimed_batch) if given is not pointer else None
        epoch = 0
        if not self.old:
            begins = given if given.batch >= 0 else None
            call = RunStart(self.plan_id, told_run, after, begins, claims)
            self.calls.append((call, self.query_id, given, heartbeat))
            epoch = self.epoch_of(call, process)
            self.gone_elsewhere = False
        self.known, self.known_query = list(self.line), self.query_id
        # Release 0.1.0 counts none.
        heartbeats = 0 if self.old and self.renamed else pointer.heartbeats + heartbeat
        new = replace(pointer, batch=batch, heartbeats=heartbeats, epoch=epoch)
        if not changes:
            return new
        quiet = not heartbeat and not self.old
        run_id = told_run or self.plan_id
        query_id = run_id if self.old and self.renamed else self.query_id
        told = told or (self.old and not self.renamed)
        writer = Writer(query_id, run_id, batch, "host", heartbeats, epoch, told, quiet)
        header = self._made(pointer, writer)
        self.made.append(header)
        self.coming.append(header)
        return replace(new, lineage=(*pointer.lineage, LineageEntry(header.ref, 0, heartbeats)), parent=pointer.ref)

    def _made(self, pointer: Pointer, writer: Writer) -> LineageHeader:
        self._uuids += 1
        ref = CheckpointRef(pointer.version + 1, f"{self._uuids:032x}")
        lineage = tuple(entry.ref for entry in pointer.lineage)
        return LineageHeader(DELTA, "counts", pointer.bucket, ref, pointer.ref, lineage, 0, writer, "1")

    def batch(self, numbers: Numbers, *, heartbeat: bool, commits: bool) -> None:
        """All buckets are called in a batch with a heartbeat, and some where timeouts alone call them."""
        order = [(it + numbers.below(self.buckets)) % self.buckets for it in range(self.buckets)]
        order = list(dict.fromkeys([*order, *range(self.buckets)]))
        heartbeat = heartbeat if self.failed_heartbeat is None else self.failed_heartbeat
        called = order if heartbeat else order[: 1 + numbers.below(self.buckets)]
        changed = tuple(bucket for bucket in called if numbers.below(3) > 0)
        if self.failed is not None:
            changed = self.failed
            called = order if heartbeat else list(changed) or order[:1]
        told = self.runs[-1]
        # Where a whole first batch of a run from the same plan tells of another run, or of none, nobody can know of it.
        newest = self.record.newest
        has_begun = newest is not None and newest.run_id == told
        has_begun = has_begun and {it.epoch for it in self.line[-1]} == {newest.number if newest is not None else 0}
        if has_begun and numbers.below(8) == 0:
            # A thread that user code keeps passes on what it was told of an earlier run.
            earlier = [it.run_id for it in self.record.entries if it.run_id in self.runs]
            told = earlier[numbers.below(len(earlier))]
        untold = self.told and has_begun and numbers.below(12) == 0
        self.counted["untold"] += untold
        cut = len(called) if commits else 1 + numbers.below(len(called))
        now = list(self.line[-1])
        for bucket in called[:cut]:
            process = numbers.below(len(self.processes))
            now[bucket] = self.call(bucket, heartbeat, bucket in changed, "" if untold else told, process)
        if commits:
            lags = self._is_followed() and heartbeat and told == self.runs[-1] and not untold
            self.lagging = self.lagging + 1 if lags else self.lagging * self._is_followed()
            self.counted["followed"] += lags
            if self.lagging > 5:
                raise WrongLineError("a late first call has readers lag behind for ever")
            self.line.append(tuple(now))
            self.known = self.line
            self.failed = self.failed_heartbeat = None
        else:
            self.failed, self.failed_heartbeat = changed, heartbeat

    # -- steps -------------------------------------------------------------------------------------

    def step(self, step: Step) -> None:
        """One step, and a look at what readers see then."""
        numbers = Numbers(step[1:])
        self.now_s += (5, 100)[numbers.below(2)]
        kind = TIMELINE_STEPS[step[0] % len(TIMELINE_STEPS)]
        getattr(self, f"do_{kind}")(numbers)
        self.upload(numbers)
        self.look()

    def upload(self, numbers: Numbers) -> None:
        """Deltas that wait inline come later; those of a call in the order in which they were made."""
        kept = min(len(self.coming), numbers.below(3)) if self.slow else 0
        arrived, self.coming = self.coming[: len(self.coming) - kept], self.coming[len(self.coming) - kept :]
        for header in arrived:
            self.files[header.bucket][header.ref] = header

    def do_batch(self, numbers: Numbers) -> None:
        self.batch(numbers, heartbeat=True, commits=True)

    def do_quiet(self, numbers: Numbers) -> None:
        """A batch without data."""
        if len(self.line) > 1:
            self.batch(numbers, heartbeat=False, commits=True)

    def _fail(self, numbers: Numbers) -> None:
        if numbers.yes():
            self.batch(numbers, heartbeat=len(self.line) == 1 or numbers.yes(), commits=False)

    def do_restart(self, numbers: Numbers) -> None:
        """The query fails or is stopped, and is started from another plan."""
        self._fail(numbers)
        self.start_run(new_plan=True, stays_old=self.renamed and numbers.yes())

    def do_crashes(self, numbers: Numbers) -> None:
        """It fails and is started from another plan, again and again, until somebody has mended what it fails of."""
        for _ in range(1 + numbers.below(5)):
            self.do_restart(numbers)
        self.counted["crashes"] += 1

    def do_again(self, numbers: Numbers) -> None:
        """It is started from the same plan."""
        if self.told:
            self._fail(numbers)
            self.start_run(new_plan=False)

    def do_back(self, numbers: Numbers) -> None:
        """It goes back to an earlier batch; somebody may have kept a copy of the checkpoint."""
        if len(self.line) > 3:
            self._fail(numbers)
            if self.copy is None or numbers.yes():
                self.copy = _Copy(tuple(self.line))
            self.line = self.line[: 2 + numbers.below(len(self.line) - 3)]
            self.counted["back"] += 1
            self.gone_elsewhere = True
            self.failed = self.failed_heartbeat = None
            # Of an old release that goes back, and changes nothing, nobody can know.
            self.start_run(new_plan=not self.told or numbers.below(4) > 0)

    def do_return(self, numbers: Numbers) -> None:
        """It goes on from the copy."""
        if self.copy is not None:
            self.line = list(self.copy.line)
            self.copy = None
            self.counted["return"] += 1
            self.gone_elsewhere = True
            self.failed = self.failed_heartbeat = None
            self.start_run(new_plan=not self.told or numbers.below(4) > 0)

    def do_late(self, numbers: Numbers) -> None:
        """A task that everybody has forgotten writes its file once more, under another name."""
        if self.made:
            header = self.made[numbers.below(len(self.made))]
            self._uuids += 1
            self.coming.append(replace(header, ref=replace(header.ref, id=f"{self._uuids:032x}")))
            self.counted["late"] += 1

    def do_task(self, numbers: Numbers) -> None:
        """A task of an earlier run begins late, in a process that knows that run or not, and writes a file."""
        last = {call.run_id: call.after.batch for call, *_ in self.calls}
        # What is late is of a run's last batches.
        calls = [it for it in self.calls if it[0].after.batch >= last[it[0].run_id] - 1] + 4 * self.waiting
        if calls:
            call, query_id, pointer, heartbeat = calls[numbers.below(len(calls))]
            if call.run_id:
                epoch = self.epoch_of(call, numbers.below(len(self.processes)))
                batch = call.after.batch + 1
                heartbeats = pointer.heartbeats + heartbeat
                writer = Writer(query_id, call.run_id, batch, "host", heartbeats, epoch, quiet=not heartbeat)
                self.coming.append(self._made(pointer, writer))
                self.counted["task"] += 1

    def do_old(self, numbers: Numbers) -> None:
        """It goes on under a release that knows no epochs."""
        # If it goes back under such a release, and changes nothing, nobody can know.
        if self.told and not (self.gone_elsewhere or self.counted["remove"] or self._is_followed()):
            self.waiting.clear()
            self.start_run(new_plan=True)
            self.old = True
            self.counted["old"] += 1

    def do_remove(self, numbers: Numbers) -> None:
        """Somebody removes the records of a query that is stopped and never went back, which then goes on."""
        no_more = self._is_followed() or any(self.counted[kind] for kind in ("back", "old", "untold"))
        if numbers.below(3) == 0 and not no_more and len(self.line) > 1:
            self.record = Epochs()
            self.counted["remove"] += 1
            # No task of it is left.
            self.calls.clear()
            self.processes = self._new_processes()
            self.waiting.clear()
            self.start_run(new_plan=True)

    def do_first(self, numbers: Numbers) -> None:
        """A run is started and followed by another one; its first call waits for something."""
        if self.told and not self.counted["old"]:
            pointer, self.plan_id = self.line[-1][numbers.below(self.buckets)], self._new_plan_id()
            self._uuids += 1
            after = Position(self.query_id, len(self.line) - 2, pointer.heartbeats)
            call = RunStart(
                self.plan_id, str(uuid.UUID(int=self._uuids)), after, pointer if pointer.batch >= 0 else None
            )
            # The batch has begun, so Spark has its offsets.
            self.failed_heartbeat = True if self.failed_heartbeat is None else self.failed_heartbeat
            self.waiting.append((call, self.query_id, pointer, self.failed_heartbeat))
            self.start_run(new_plan=True)

    def do_claim(self, numbers: Numbers) -> None:
        """Another query takes the folder over, and counts batches from 0."""
        if self.claims < 2 and len(self.line) > 1 and self.told:
            self.claims += 1
            self.claimed_query, self.query_id = self.query_id, f"query {self.claims}"
            self.claimed, self.claimed_batch = self.line[-1], len(self.line) - 2
            self.line = [tuple(replace(it, batch=-1) for it in self.claimed)]
            # Epochs tell what the old query gave up after that; its last batch was committed in whole.
            self.copy = self.failed_heartbeat = None
            self.start_run(new_plan=True)
            self.counted["claim"] += 1
            self.batch(numbers, heartbeat=True, commits=True)

    def do_begin(self, numbers: Numbers) -> None:
        """A run makes its first call, and no file."""
        self.start_run(new_plan=True)
        self.call(numbers.below(self.buckets), False, False, self.runs[-1])
        self.start_run(new_plan=True)

    # -- what readers see --------------------------------------------------------------------------

    def look(self) -> None:
        buckets = [
            BucketFiles.read_before(
                _FOLDER, bucket, [(Entry(file_name(ref, DELTA), 1, None, False), it) for ref, it in files.items()]
            )
            for bucket, files in enumerate(self.files)
        ]
        found = read_timeline(buckets, "query 0", self.record, renamed=self.renamed)
        for line in found.lines:
            if line.unsure:
                self.counted["unsure"] += 1
            if not self._is_followed():
                self._judge_heads(line.files.bucket, line.heads, line.unsure)
        if self._is_followed():
            # What the late call goes on from may be read until then.
            self.counted["read while followed"] += 1
            return
        try:
            newest = found.newest(unproven=False)
            refs = {} if newest is None else found.state_at(newest, unproven=False)
        except MissingCheckpointError:
            self.counted["refused"] += 1
            return
        if newest is None:
            return
        self.counted["read"] += 1
        self._compare(found, newest, refs)
        for batch in range(max(START, newest - 5), newest):
            try:
                self._compare(found, batch, found.state_at(batch, unproven=False))
            except MissingCheckpointError:
                self.counted["refused an older one"] += 1

    def _compare(self, found: Timeline, batch: int, refs: Mapping[int, CheckpointRef | None]) -> None:
        told = self._committed_at(batch, found.clock.unit, found.clock.query_id)
        if told is None:
            return
        for bucket, ref in refs.items():
            if ref != told[bucket].ref:
                raise WrongLineError(f"{found.clock.unit} {batch} of bucket {bucket} is {told[bucket].ref}, not {ref}")

    def _committed_at(self, at: int, unit: str, query_id: str) -> tuple[Pointer, ...] | None:
        """What Spark has committed; None: of another query's batches nothing is kept here."""
        if unit == BATCH:
            if query_id != self.known_query:
                return None
            if at + 1 >= len(self.known):
                raise WrongLineError(f"batch {at} is taken for committed; there are {len(self.known) - 1}")
            return self.known[at + 1]
        # Before its first one, it was the other query's state that it began with copies of.
        until = [it for it in self.known if max(pointer.heartbeats for pointer in it) <= at]
        return until[-1] if until else None

    def _is_followed(self) -> bool:
        """Whether a late first call has begun an epoch: until the run goes on to its next batch, readers lag behind."""
        newest = self.record.newest
        return newest is not None and any(newest.run_id == call.run_id for call, *_ in self.waiting)

    def _judge_heads(self, bucket: int, heads: Sequence[CheckpointRef], unsure: Sequence[CheckpointRef]) -> None:
        """The newest files are the committed checkpoint, attempts beside it, or attempts at what comes next."""
        files = self.files[bucket]
        line = [entry.ref for entry in self.known[-1][bucket].lineage]
        there = [ref for ref in line if ref in files]
        parents = {None, *line}
        for ref in heads:
            if ref not in line and files[ref].parent not in parents:
                raise WrongLineError(f"bucket {bucket}: {ref} was given up, and is taken for a newest checkpoint")
        if unsure:
            return
        if there and not heads:
            raise WrongLineError(f"bucket {bucket}: {there[-1]} is committed, and nothing is taken for it")
        if there and all(ref != there[-1] and there[-1] not in files[ref].lineage for ref in heads):
            beside = files[there[-1]]
            if any(files[ref].parent != beside.parent or _at(files[ref]) != _at(beside) for ref in heads):
                raise WrongLineError(f"bucket {bucket}: {there[-1]} is committed, and {heads} are taken for newer")


def _at(header: LineageHeader) -> tuple[int, int, int]:
    return header.writer.epoch, header.writer.batch, header.writer.heartbeat


def simulate_timeline(steps: Sequence[Step], patches: Sequence[Patch] = ()) -> TimelineWorld:
    """Live through a history; raises `WrongLineError` where something is taken for what it is not."""
    world = TimelineWorld(Numbers(steps[0][1:] if steps else b""))
    with ExitStack() as stack:
        stack.enter_context(replace_attributes([(owner, name, made(world)) for owner, name, made in patches]))
        for step in steps:
            world.step(step)
    return world
