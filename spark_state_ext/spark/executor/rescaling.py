"""Rescaling in place: the first batch with data in which a query has another bucket map than its state.

Spark hands each old bucket's pointer to the call of its label, and to no other. So the plan has Spark read all pointers
of the last batch, and a task writes them down; a call takes the pointers of its bucket's parents from there. In a batch
with data each old bucket is called too, also one that is no more, and compares what was taken with what it was handed:
the batch succeeds only where all were the same.

Batches without data, as Spark has them for timeouts, call some of the old buckets only. These go on as they were, and
note their new pointers.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from arrow_schemas.operator import OperatorFile, operator_file_name
from arrow_schemas.pointer import Pointer
from arrow_schemas.savepoint import NATIVE
from spark_state_ext.backends.registry import FSSPEC, Backend
from spark_state_ext.backends.replication import Restorable, close_all
from spark_state_ext.engine.folders import operator_folder
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.replicas import Replicas
from spark_state_ext.engine.start_from import NO_CLAIM
from spark_state_ext.errors import CorruptFileError, LineageError, MissingCheckpointError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import STARTING_FOLDER
from spark_state_ext.rescale.dividing import RESCALE, Division, begun_pointer, divided_pointer, refuse_requests
from spark_state_ext.rescale.folders import is_rescaled_by, rescaled_folder
from spark_state_ext.rescale.origin import origin_beside
from spark_state_ext.rescale.parents import Parent, note_parent, parent_files, parent_of
from spark_state_ext.savepoints.captured import Captured
from spark_state_ext.savepoints.records import StartRecord, note_start
from spark_state_ext.savepoints.starting import Begun
from spark_state_ext.savepoints.taking import save_bucket

__all__ = ["Move", "Rescales"]


@dataclass(frozen=True)
class _Plan:
    """What a plan knows of the query's state as it was."""

    captured: Captured
    operator_file: OperatorFile
    old_folder: Folder
    notes: Folder
    file: str

    def is_old(self, pointer: Pointer) -> bool:
        """Whether a pointer is from before the query was rescaled."""
        return pointer.query_folder == self.old_folder.name


class Rescales:
    """What a process has read of the states that its queries were planned to be rescaled from."""

    _MAX = 16

    def __init__(self) -> None:
        self._plans: OrderedDict[str, _Plan] = OrderedDict()

    @staticmethod
    def is_no_more(job: Job, bucket: int, stored: Pointer | None) -> bool:
        """Whether a label stands for a bucket that the query had before it was rescaled, and has no more.

        Spark goes on calling it under that plan, also when nothing is left of what the plan has written down.
        """
        return stored is None and job.options.buckets <= bucket < job.rescaled_buckets

    def of(self, job: Job, bucket: int, stored: Pointer | None) -> Move | None:
        """What a call is to do; None: its bucket is not to be rescaled, or was before."""
        if job.rescaled_from is None:
            return None
        if stored is not None and is_rescaled_by(stored.query_folder, job.plan_id):
            # What it came from may be removed by now.
            return None
        try:
            plan = self._plans.get(job.rescaled_from) or self._read(job, job.rescaled_from)
        except MissingCheckpointError as error:
            raise LineageError(
                f"operator {job.operator!r} is not rescaled, as its query has gone on since it was planned, and what "
                f"it was is removed: {error}. Start the program again. Late tasks of batches that are over end so too"
            ) from error
        if stored is not None and not plan.is_old(stored):
            return None
        if stored is None and bucket < min(plan.operator_file.buckets, job.options.buckets):
            # Of the query that was read each of these has one, before and after.
            raise LineageError(
                f"bucket {bucket} of operator {job.operator!r} has no state at this checkpointLocation, and has some "
                f"at rescale={job.options.rescale!r}: rescale is for the query that has its checkpoint there. Leave it "
                "out, and to begin a new query with that state give start_from=RetainedCheckpoint(…)"
            )
        return Move(job, bucket, stored, plan)

    def _read(self, job: Job, file: str) -> _Plan:
        operator = Folder(job.options.root, job.options.storage_options).child(job.operator)
        notes = operator.child(STARTING_FOLDER)
        captured = Captured.decode(notes.get(file), notes.where(file))
        if not captured.pointers:
            raise CorruptFileError(f"{notes.where(file)} has no bucket. Plan the query again.")
        newest = max(captured.pointers.values(), key=lambda pointer: pointer.schema_id)
        old = operator.child(newest.query_folder)
        name = operator_file_name(newest.schema_id)
        operator_file = OperatorFile.decode(old.get(name), old.where(name))
        if captured.pointers.keys() != set(range(operator_file.buckets)):
            raise CorruptFileError(
                f"{notes.where(file)} has {len(captured.pointers)} of {operator_file.buckets} buckets. Plan the query "
                "again."
            )
        plan = self._plans[file] = _Plan(captured, operator_file, old, notes, file)
        while len(self._plans) > self._MAX:
            self._plans.popitem(last=False)
        return plan


@dataclass(frozen=True)
class Move:
    """What a call does in the first batches of a plan that rescales its query.

    Parameters
    ----------
    job, bucket, stored
        As for `Rescales.of`.
    plan
        What the plan has written down.
    """

    job: Job
    bucket: int
    stored: Pointer | None
    plan: _Plan

    @property
    def ends(self) -> bool:
        """Whether the bucket is one that the query has no more."""
        return self.bucket >= self.job.options.buckets

    @property
    def folder(self) -> str:
        """Name of the query folder from now on; the same for all calls of the plan."""
        return rescaled_folder(self.plan.old_folder.name, self.job.plan_id)

    @property
    def old_folder(self) -> str:
        """Name of the query folder so far."""
        return self.plan.old_folder.name

    @property
    def old_claim(self) -> str | None:
        """Id of the query's claim to that folder; None: it began it itself."""
        return self.plan.captured.pointers[0].claim

    def as_before(self) -> Job:
        """The job with the old bucket map, for a call without a heartbeat."""
        return replace(self.job, options=replace(self.job.options, bucket_by=self.plan.operator_file.bucket_map))

    def note(self, pointer: Pointer) -> None:
        """Write down the pointer that such a call has made; of several attempts the last."""
        name = f"{self.plan.file}.{self.bucket}.{pointer.batch}.pointer"
        self.plan.notes.put(name, pointer.encode())

    def give(self, replicas: Replicas, scratch: Path) -> None:
        """Have the old bucket's state among the parents, and see that it is what Spark hands out."""
        if self.stored is None:
            return
        if self.bucket == 0:
            # One may have come since the query was planned.
            refuse_requests(self.plan.old_folder, self.plan.operator_file)
        parent = self._parent(self.bucket, self.stored, replicas, scratch)
        if parent.pointer.ref != self.stored.ref:
            raise self._gone_on(f"bucket {self.bucket} is at checkpoint {self.stored.ref}, not {parent.pointer.ref}")

    def _gone_on(self, shown: str) -> LineageError:
        return LineageError(
            f"operator {self.job.operator!r} is not rescaled, as its query has gone on since it was planned: {shown}. "
            "Nothing is lost: plan the query anew, as the program does that is started again. The same DataFrame "
            "started again fails again"
        )

    def beginning(self) -> Division:
        """What the bucket begins with, as far as it can be told without reading."""
        asked, stored = self.job.options.bucket_map, self.plan.operator_file.bucket_map
        pointers = [self._known(number) for number in asked.overlapping(stored, self.bucket)]
        parents = [Parent.unsaved(self.plan.operator_file, pointer) for pointer in pointers]
        pointer = divided_pointer(self.job, self.folder, self.bucket, parents)
        return Division(pointer, self.plan.operator_file, self._record(), self.plan.old_folder, None)

    def begun(self, replicas: Replicas, scratch: Path) -> Begun:
        """The pointer to begin with; what it needs is in the query's new folder."""
        asked, stored = self.job.options.bucket_map, self.plan.operator_file.bucket_map
        # Spark's own word before what was written down.
        truth = {} if self.stored is None else {self.bucket: self.stored}
        parents = [
            self._parent(number, truth.get(number), replicas, scratch)
            for number in asked.overlapping(stored, self.bucket)
        ]
        # With the root, where the rest of what tells of a query folder is; the parents may lie with another backend.
        note_start(operator_folder(self.job).child(self.folder), self._record())
        return Begun(begun_pointer(self.job, self._new_folder, self.bucket, parents))

    def _record(self) -> StartRecord:
        old = self.plan.old_folder.root
        return StartRecord(RESCALE, old, "", self.plan.captured.batch, NO_CLAIM, self.job.operator)

    @property
    def _backend(self) -> Backend:
        return next(it for it in self.job.options.backends if it.kind == FSSPEC)

    @property
    def _new_folder(self) -> Folder:
        return Folder(self._backend.root, self._backend.storage_options).child(self.job.operator, self.folder)

    def _parent(self, number: int, truth: Pointer | None, replicas: Replicas, scratch: Path) -> Parent:
        """A parent as it is in the new folder; whoever comes first brings it."""
        folder = self._new_folder
        there = parent_of(folder, number)
        if there is not None:
            return there
        pointer = truth or self._known(number)
        old, target = self.plan.operator_file, parent_files(folder, number)
        timeout_s = self.job.options.commit.commit_timeout_ms / 1000
        backends = self.job.options.backends
        sources: list[Restorable] = [
            *replicas.reading(backends, pointer, scratch, timeout_s),
            # Of a bucket that was rescaled before, and has no snapshot of its own yet.
            *origin_beside(backends, pointer, old.bucket_map, old.row_schema(), scratch),
        ]
        try:
            saved = save_bucket(pointer, sources, target, NATIVE, old.row_schema(), scratch).saved
        finally:
            close_all(sources)
        try:
            return note_parent(folder, Parent(old, saved))
        except LineageError as error:
            # Another call has brought it meanwhile, from another batch.
            raise self._gone_on(f"bucket {number} is brought from {pointer.ref} and from another checkpoint") from error

    def _known(self, number: int) -> Pointer:
        """The newest pointer of an old bucket that was written down."""
        pattern = re.compile(rf"{re.escape(self.plan.file)}\.{number}\.(\d+)\.pointer")
        found: Sequence[tuple[int, str]] = sorted(
            (int(match[1]), name) for name in self.plan.notes.names() if (match := pattern.fullmatch(name))
        )
        if not found:
            return self.plan.captured.pointers[number]
        return Pointer.decode(self.plan.notes.get(found[-1][1]))
