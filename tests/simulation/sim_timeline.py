"""Runs of one query, their epochs and the files that they leave: which files count as committed, and which as given up.

The query commits batches, fails, and is started again from another plan or the same one. It goes back, returns to a copy
of its checkpoint, and another query claims its folder. It may have begun with copies of another query's files. Tasks of
earlier runs write late or begin late. Some calls do not know their batch, some runs are of a release without epochs, and
sometimes the records are removed. Processes remember their epoch. Uploads are slow. After each step, readers read each
batch; they see only the headers of files and the record of epochs.
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
    """A file that is not committed counts as committed, or the other way round."""


@dataclass(frozen=True)
class _Copy:
    """A copy of a Spark checkpoint: by batch, the pointers of all buckets."""

    committed: tuple[tuple[Pointer, ...], ...]


class TimelineWorld:
    """A query folder of two or three buckets."""

    def __init__(self, numbers: Numbers) -> None:
        self.buckets, self.knows_batch, self.slow_uploads = (
            2 + numbers.below(2),
            numbers.below(4) > 0,
            numbers.below(3) == 0,
        )
        self.counted: Counter[str] = Counter()
        self.record = Epochs()
        self.query_id, self.claim_count = "query 0", 0
        # `old`: the run is of a release without epochs; `renamed`: of release 0.1.0, whose calls do not know their batch.
        self.old = self.renamed = False
        # The query went back or returned, and no run has recorded it yet.
        self.has_moved = False
        self.now_s = 0.0
        # Batches since another run's late first call began an epoch.
        self.lagging_batches = 0
        self.processes = self._new_processes()
        # First calls of runs that another run followed before they were made.
        self.waiting_calls: list[tuple[RunStart, str, Pointer, bool]] = []
        first = tuple(Pointer("counts", bucket, self.buckets, 0, -1, None) for bucket in range(self.buckets))
        # By batch, the pointers that Spark has committed; the first element is what the query began with.
        self.committed: list[tuple[Pointer, ...]] = [first]
        # The same as of the last call, because readers cannot know of a run that has not begun.
        self.readable, self.readable_query = self.committed, self.query_id
        self.copy: _Copy | None = None
        self.files: list[dict[CheckpointRef, LineageHeader]] = [{} for _ in first]
        # Headers of files that are not uploaded yet.
        self.pending_headers: list[LineageHeader] = []
        self.headers: list[LineageHeader] = []
        self.claimed_batch, self.claimed_query = -1, ""
        self.claimed: tuple[Pointer, ...] = ()
        # By call: its run, its query, its input pointer, and whether its batch had data.
        self.calls: list[tuple[RunStart, str, Pointer, bool]] = []
        # Buckets that the failed batch changed: a run from the same plan changes the same ones.
        self.failed_buckets: tuple[int, ...] | None = None
        # Whether the failed batch has data: this is in Spark's log and so holds for any plan.
        self.failed_has_data: bool | None = None
        self.runs: list[str] = []
        self._uuids = 0
        if numbers.below(4) == 0:
            self._copy_another_query(numbers)
        self.start_run(new_plan=True)
        self.old = self.renamed = not self.knows_batch and self.committed == [first] and numbers.below(3) == 0
        self.counted["old untold"] += self.old

    def _new_processes(self) -> list[EpochRegistry]:
        return [EpochRegistry(lambda: self.now_s) for _ in range(2)]

    def _copy_another_query(self, numbers: Numbers) -> None:
        """Begin with copies: in each bucket a file of another query, with that query's epoch."""
        for bucket, pointer in enumerate(self.committed[0]):
            self._uuids += 1
            ref, epoch = CheckpointRef(1, f"{self._uuids:032x}"), 1 + numbers.below(4)
            writer = Writer("another query", "its run", numbers.below(9), "host", 5, epoch, self.knows_batch)
            header = LineageHeader(DELTA, "counts", bucket, ref, None, (), 0, writer, "1")
            self.files[bucket][ref] = header
            copied = replace(pointer, lineage=(LineageEntry(ref, 0, 5),), heartbeats=5)
            self.committed[0] = (*self.committed[0][:bucket], copied, *self.committed[0][bucket + 1 :])
        self.readable = self.committed

    # -- runs --------------------------------------------------------------------------------------

    def start_run(self, *, new_plan: bool, stays_old: bool = False) -> None:
        if new_plan:
            self.plan_id = self._new_plan_id()
            self.runs, self.failed_buckets = [], None
        self.old = self.old and stays_old
        self._uuids += 1
        self.runs.append(str(uuid.UUID(int=self._uuids)) if self.knows_batch else "")

    def _new_plan_id(self) -> str:
        self.counted["plans"] += 1
        return f"{self.counted['plans']:032x}"

    def epoch_of(self, call: RunStart, process: int) -> int:
        """Find a call's epoch as `EpochRegistry.of` does, in one process."""

        def begin_epoch(call: RunStart) -> tuple[Epochs, int]:
            self.record, number = epochs_module.begin_epoch(self.record, call.within(self.record))
            return self.record, number

        return self.processes[process].ask("", call, begin_epoch)

    def call(self, bucket: int, heartbeat: bool, changes: bool, known_run: str, process: int = 0) -> Pointer:
        """Call a bucket in the next batch; returns the pointer that it hands to Spark."""
        pointer, batch, knows_batch = self.committed[-1][bucket], len(self.committed) - 1, bool(known_run)
        if not knows_batch:
            batch = pointer.batch + 1
        after = Position(self.query_id, batch - 1, pointer.heartbeats, told=knows_batch)
        # A query that claims the folder begins with the other query's unchanged pointers.
        input_pointer = self.claimed[bucket] if pointer.batch < 0 and self.claimed else pointer
        claimed_from = (self.claimed_query, self.claimed_batch) if input_pointer is not pointer else None
        epoch = 0
        if not self.old:
            first_input = input_pointer if input_pointer.batch >= 0 else None
            call = RunStart(self.plan_id, known_run, after, first_input, claimed_from)
            self.calls.append((call, self.query_id, input_pointer, heartbeat))
            epoch = self.epoch_of(call, process)
            self.has_moved = False
        self.readable, self.readable_query = list(self.committed), self.query_id
        # Release 0.1.0 does not count heartbeats.
        heartbeats = 0 if self.old and self.renamed else pointer.heartbeats + heartbeat
        new = replace(pointer, batch=batch, heartbeats=heartbeats, epoch=epoch)
        if not changes:
            return new
        quiet = not heartbeat and not self.old
        run_id = known_run or self.plan_id
        query_id = run_id if self.old and self.renamed else self.query_id
        knows_batch = knows_batch or (self.old and not self.renamed)
        writer = Writer(query_id, run_id, batch, "host", heartbeats, epoch, knows_batch, quiet)
        header = self._make_header(pointer, writer)
        self.headers.append(header)
        self.pending_headers.append(header)
        return replace(new, lineage=(*pointer.lineage, LineageEntry(header.ref, 0, heartbeats)), parent=pointer.ref)

    def _make_header(self, pointer: Pointer, writer: Writer) -> LineageHeader:
        self._uuids += 1
        ref = CheckpointRef(pointer.version + 1, f"{self._uuids:032x}")
        lineage = tuple(entry.ref for entry in pointer.lineage)
        return LineageHeader(DELTA, "counts", pointer.bucket, ref, pointer.ref, lineage, 0, writer, "1")

    def batch(self, numbers: Numbers, *, heartbeat: bool, commits: bool) -> None:
        """Run a batch: with a heartbeat all buckets are called, otherwise timeouts call some of them."""
        order = [(bucket + numbers.below(self.buckets)) % self.buckets for bucket in range(self.buckets)]
        order = list(dict.fromkeys([*order, *range(self.buckets)]))
        heartbeat = heartbeat if self.failed_has_data is None else self.failed_has_data
        called = order if heartbeat else order[: 1 + numbers.below(self.buckets)]
        changed = tuple(bucket for bucket in called if numbers.below(3) > 0)
        if self.failed_buckets is not None:
            changed = self.failed_buckets
            called = order if heartbeat else list(changed) or order[:1]
        run_id = self.runs[-1]
        # If the whole first batch of a run from the same plan names another run or none, readers cannot detect this run.
        newest = self.record.newest
        run_has_begun = newest is not None and newest.run_id == run_id
        newest_epochs = {pointer.epoch for pointer in self.committed[-1]}
        run_has_begun = run_has_begun and newest_epochs == {newest.number if newest is not None else 0}
        if run_has_begun and numbers.below(8) == 0:
            # A thread that user code keeps passes on the id of an earlier run.
            earlier_runs = [entry.run_id for entry in self.record.entries if entry.run_id in self.runs]
            run_id = earlier_runs[numbers.below(len(earlier_runs))]
        without_run_id = self.knows_batch and run_has_begun and numbers.below(12) == 0
        self.counted["untold"] += without_run_id
        call_count = len(called) if commits else 1 + numbers.below(len(called))
        new_pointers = list(self.committed[-1])
        for bucket in called[:call_count]:
            process = numbers.below(len(self.processes))
            new_pointers[bucket] = self.call(
                bucket, heartbeat, bucket in changed, "" if without_run_id else run_id, process
            )
        if commits:
            lags = self._is_followed() and heartbeat and run_id == self.runs[-1] and not without_run_id
            self.lagging_batches = self.lagging_batches + 1 if lags else self.lagging_batches * self._is_followed()
            self.counted["followed"] += lags
            if self.lagging_batches > 5:
                raise WrongLineError("after a late first call, readers lag behind for ever")
            self.committed.append(tuple(new_pointers))
            self.readable = self.committed
            self.failed_buckets = self.failed_has_data = None
        else:
            self.failed_buckets, self.failed_has_data = changed, heartbeat

    # -- steps -------------------------------------------------------------------------------------

    def step(self, step: Step) -> None:
        """Take one step, and check what readers see afterwards."""
        numbers = Numbers(step[1:])
        self.now_s += (5, 100)[numbers.below(2)]
        kind = TIMELINE_STEPS[step[0] % len(TIMELINE_STEPS)]
        getattr(self, f"do_{kind}")(numbers)
        self.upload(numbers)
        self.check_readers()

    def upload(self, numbers: Numbers) -> None:
        """Upload deltas; some wait inline until later, but the order of their creation is kept."""
        kept = min(len(self.pending_headers), numbers.below(3)) if self.slow_uploads else 0
        arrived, self.pending_headers = (
            self.pending_headers[: len(self.pending_headers) - kept],
            self.pending_headers[len(self.pending_headers) - kept :],
        )
        for header in arrived:
            self.files[header.bucket][header.ref] = header

    def do_batch(self, numbers: Numbers) -> None:
        self.batch(numbers, heartbeat=True, commits=True)

    def do_quiet(self, numbers: Numbers) -> None:
        """Run a batch without data."""
        if len(self.committed) > 1:
            self.batch(numbers, heartbeat=False, commits=True)

    def _fail(self, numbers: Numbers) -> None:
        if numbers.yes():
            self.batch(numbers, heartbeat=len(self.committed) == 1 or numbers.yes(), commits=False)

    def do_restart(self, numbers: Numbers) -> None:
        """Let the query fail or stop, and start it from another plan."""
        self._fail(numbers)
        self.start_run(new_plan=True, stays_old=self.renamed and numbers.yes())

    def do_crashes(self, numbers: Numbers) -> None:
        """Let the query fail and start from another plan several times, until the cause of the failures is fixed."""
        for _ in range(1 + numbers.below(5)):
            self.do_restart(numbers)
        self.counted["crashes"] += 1

    def do_again(self, numbers: Numbers) -> None:
        """Start the query again from the same plan."""
        if self.knows_batch:
            self._fail(numbers)
            self.start_run(new_plan=False)

    def do_back(self, numbers: Numbers) -> None:
        """Go back to an earlier batch; perhaps keep a copy of the checkpoint."""
        if len(self.committed) > 3:
            self._fail(numbers)
            if self.copy is None or numbers.yes():
                self.copy = _Copy(tuple(self.committed))
            self.committed = self.committed[: 2 + numbers.below(len(self.committed) - 3)]
            self.counted["back"] += 1
            self.has_moved = True
            self.failed_buckets = self.failed_has_data = None
            # Readers cannot detect that an old release went back if it changes nothing.
            self.start_run(new_plan=not self.knows_batch or numbers.below(4) > 0)

    def do_return(self, numbers: Numbers) -> None:
        """Continue from the copy."""
        if self.copy is not None:
            self.committed = list(self.copy.committed)
            self.copy = None
            self.counted["return"] += 1
            self.has_moved = True
            self.failed_buckets = self.failed_has_data = None
            self.start_run(new_plan=not self.knows_batch or numbers.below(4) > 0)

    def do_late(self, numbers: Numbers) -> None:
        """Let an old task write its file once more, under another name."""
        if self.headers:
            header = self.headers[numbers.below(len(self.headers))]
            self._uuids += 1
            self.pending_headers.append(replace(header, ref=replace(header.ref, id=f"{self._uuids:032x}")))
            self.counted["late"] += 1

    def do_task(self, numbers: Numbers) -> None:
        """Let a task of an earlier run begin late and write a file, in a process that may know that run or not."""
        last = {call.run_id: call.after.batch for call, *_ in self.calls}
        # Late tasks are of a run's last batches.
        calls = [entry for entry in self.calls if entry[0].after.batch >= last[entry[0].run_id] - 1]
        calls += 4 * self.waiting_calls
        if calls:
            call, query_id, pointer, heartbeat = calls[numbers.below(len(calls))]
            if call.run_id:
                epoch = self.epoch_of(call, numbers.below(len(self.processes)))
                batch = call.after.batch + 1
                heartbeats = pointer.heartbeats + heartbeat
                writer = Writer(query_id, call.run_id, batch, "host", heartbeats, epoch, quiet=not heartbeat)
                self.pending_headers.append(self._make_header(pointer, writer))
                self.counted["task"] += 1

    def do_old(self, numbers: Numbers) -> None:
        """Continue under a release without epochs."""
        # Readers cannot detect that such a release went back if it changes nothing.
        if self.knows_batch and not (self.has_moved or self.counted["remove"] or self._is_followed()):
            self.waiting_calls.clear()
            self.start_run(new_plan=True)
            self.old = True
            self.counted["old"] += 1

    def do_remove(self, numbers: Numbers) -> None:
        """Remove the records of a stopped query that never went back; then the query continues."""
        is_excluded = self._is_followed() or any(self.counted[kind] for kind in ("back", "old", "untold"))
        if numbers.below(3) == 0 and not is_excluded and len(self.committed) > 1:
            self.record = Epochs()
            self.counted["remove"] += 1
            # All its tasks have ended.
            self.calls.clear()
            self.processes = self._new_processes()
            self.waiting_calls.clear()
            self.start_run(new_plan=True)

    def do_first(self, numbers: Numbers) -> None:
        """Start a run, and then another one before the first run's first call, which waits."""
        if self.knows_batch and not self.counted["old"]:
            pointer, self.plan_id = self.committed[-1][numbers.below(self.buckets)], self._new_plan_id()
            self._uuids += 1
            after = Position(self.query_id, len(self.committed) - 2, pointer.heartbeats)
            call = RunStart(
                self.plan_id, str(uuid.UUID(int=self._uuids)), after, pointer if pointer.batch >= 0 else None
            )
            # The batch has begun, so Spark has its offsets.
            self.failed_has_data = True if self.failed_has_data is None else self.failed_has_data
            self.waiting_calls.append((call, self.query_id, pointer, self.failed_has_data))
            self.start_run(new_plan=True)

    def do_claim(self, numbers: Numbers) -> None:
        """Let another query claim the folder; it counts batches from 0."""
        if self.claim_count < 2 and len(self.committed) > 1 and self.knows_batch:
            self.claim_count += 1
            self.claimed_query, self.query_id = self.query_id, f"query {self.claim_count}"
            self.claimed, self.claimed_batch = self.committed[-1], len(self.committed) - 2
            self.committed = [tuple(replace(pointer, batch=-1) for pointer in self.claimed)]
            # By the epochs, the old query's later files are given up; its last batch was committed completely.
            self.copy = self.failed_has_data = None
            self.start_run(new_plan=True)
            self.counted["claim"] += 1
            self.batch(numbers, heartbeat=True, commits=True)

    def do_begin(self, numbers: Numbers) -> None:
        """Start a run that makes its first call without writing a file, and then another run."""
        self.start_run(new_plan=True)
        self.call(numbers.below(self.buckets), False, False, self.runs[-1])
        self.start_run(new_plan=True)

    # -- what readers see --------------------------------------------------------------------------

    def check_readers(self) -> None:
        buckets = [
            BucketFiles.read_before(
                _FOLDER,
                bucket,
                [(Entry(file_name(ref, DELTA), 1, None, False), header) for ref, header in files.items()],
            )
            for bucket, files in enumerate(self.files)
        ]
        timeline = read_timeline(buckets, "query 0", self.record, renamed=self.renamed)
        for line in timeline.lines:
            if line.unsure:
                self.counted["unsure"] += 1
            if not self._is_followed():
                self._check_heads(line.files.bucket, line.heads, line.unsure)
        if self._is_followed():
            # Until then readers may read the state that the late call continues from.
            self.counted["read while followed"] += 1
            return
        try:
            newest = timeline.newest(unproven=False)
            refs = {} if newest is None else timeline.state_at(newest, unproven=False)
        except MissingCheckpointError:
            self.counted["refused"] += 1
            return
        if newest is None:
            return
        self.counted["read"] += 1
        self._compare(timeline, newest, refs)
        for batch in range(max(START, newest - 5), newest):
            try:
                self._compare(timeline, batch, timeline.state_at(batch, unproven=False))
            except MissingCheckpointError:
                self.counted["refused an older one"] += 1

    def _compare(self, timeline: Timeline, batch: int, refs: Mapping[int, CheckpointRef | None]) -> None:
        pointers = self._find_committed(batch, timeline.clock.unit, timeline.clock.query_id)
        if pointers is None:
            return
        for bucket, ref in refs.items():
            if ref != pointers[bucket].ref:
                raise WrongLineError(
                    f"{timeline.clock.unit} {batch} of bucket {bucket} is {pointers[bucket].ref}, not {ref}"
                )

    def _find_committed(self, at: int, unit: str, query_id: str) -> tuple[Pointer, ...] | None:
        """Return the pointers that Spark has committed; None for batches of another query, which are not kept here."""
        if unit == BATCH:
            if query_id != self.readable_query:
                return None
            if at + 1 >= len(self.readable):
                raise WrongLineError(f"batch {at} counts as committed, but there are {len(self.readable) - 1}")
            return self.readable[at + 1]
        # Before its first batch, the state was that of the other query, of which it has copies.
        candidates = [pointers for pointers in self.readable if max(pointer.heartbeats for pointer in pointers) <= at]
        return candidates[-1] if candidates else None

    def _is_followed(self) -> bool:
        """Whether a late first call began an epoch; readers then lag behind until the current run's next batch."""
        newest = self.record.newest
        return newest is not None and any(newest.run_id == call.run_id for call, *_ in self.waiting_calls)

    def _check_heads(self, bucket: int, heads: Sequence[CheckpointRef], unsure: Sequence[CheckpointRef]) -> None:
        """Check that the newest files are the committed checkpoint, or attempts at the last batch or the next one."""
        files = self.files[bucket]
        lineage = [entry.ref for entry in self.readable[-1][bucket].lineage]
        existing = [ref for ref in lineage if ref in files]
        parents = {None, *lineage}
        for ref in heads:
            if ref not in lineage and files[ref].parent not in parents:
                raise WrongLineError(f"bucket {bucket}: {ref} was given up, but counts as a newest checkpoint")
        if unsure:
            return
        if existing and not heads:
            raise WrongLineError(f"bucket {bucket}: {existing[-1]} is committed, but no file counts as committed")
        if existing and all(ref != existing[-1] and existing[-1] not in files[ref].lineage for ref in heads):
            committed_header = files[existing[-1]]
            if any(
                files[ref].parent != committed_header.parent or _get_time(files[ref]) != _get_time(committed_header)
                for ref in heads
            ):
                raise WrongLineError(f"bucket {bucket}: {existing[-1]} is committed, but {heads} count as newer")


def _get_time(header: LineageHeader) -> tuple[int, int, int]:
    return header.writer.epoch, header.writer.batch, header.writer.heartbeat


def simulate_timeline(steps: Sequence[Step], patches: Sequence[Patch] = ()) -> TimelineWorld:
    """Run a history to its end; raises `WrongLineError` if a file is judged wrongly."""
    world = TimelineWorld(Numbers(steps[0][1:] if steps else b""))
    with ExitStack() as stack:
        stack.enter_context(replace_attributes([(owner, name, make(world)) for owner, name, make in patches]))
        for step in steps:
            world.step(step)
    return world
