"""Rescaling in place: the first batch with data in which a query has another bucket map than its state.

Spark hands an old bucket's pointer only to the call for that bucket's label. So the plan makes Spark read all pointers
of the last batch, and a task records them; each call takes the pointers of its bucket's parents from that record. In a
batch with data, Spark also calls each old bucket, even one that the query no longer has. That call compares the
recorded pointer with its own: the batch succeeds only if all are the same.

Batches without data, which Spark runs for timeouts, call only some of the old buckets. These go on with the old bucket
map, and record their new pointers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from arrow_schemas.operator import OperatorFile
from arrow_schemas.pointer import Pointer
from spark_state_ext.beginning.first_call import bring_parent, make_gone_on_error, make_source_opener
from spark_state_ext.beginning.initial_state import InitialState, make_divided_pointer
from spark_state_ext.engine.folders import operator_folder
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.replicas import Replicas
from spark_state_ext.engine.start_from import NO_CLAIM
from spark_state_ext.errors import ChangedJobError
from spark_state_ext.files.erase_requests import EraseFolder
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import STARTING_FOLDER
from spark_state_ext.rescale.folders import make_rescaled_name
from spark_state_ext.rescale.parents import Parent
from spark_state_ext.savepoints.captured_pointers import Captured
from spark_state_ext.savepoints.start_records import RESCALE, StartRecord

__all__ = ["Rescaling", "is_dropped_bucket", "refuse_requests", "refuse_rescaling"]


def refuse_rescaling(
    query_folder: Folder, stored: OperatorFile, job_file: OperatorFile, case_sensitive: bool = False
) -> None:
    """Raise an error if the files show, when a query is planned, that it cannot be rescaled in place."""
    new_map = job_file.bucket_map
    if not (stored.bucket_map.by_hash and new_map.by_hash):
        # Without hashes the new bucket of a row is unknown.
        stored.refuse_other_map(new_map)
    stored.with_map(new_map).begins(job_file, case_sensitive=case_sensitive)
    refuse_requests(query_folder, stored)


def refuse_requests(query_folder: Folder, stored: OperatorFile) -> None:
    """Raise an error while an erase request waits, as each query folder numbers its own requests."""
    numbers = EraseFolder(query_folder).numbers()
    waiting = sorted(numbers.requests - numbers.done)
    if waiting:
        raise ChangedJobError(
            f"operator {stored.operator!r} is not rescaled, as erase request {waiting[0]} in {query_folder.root} is "
            f"not done yet: go on with {stored.bucket_map} and erase_requests=True until erase_status says that it is "
            "done, then rescale. A withdrawn request needs such a run too"
        )


def is_dropped_bucket(job: Job, bucket: int, stored: Pointer | None) -> bool:
    """True if the query had this bucket before it was rescaled, but no longer has it.

    Spark goes on calling it under that plan, even after the plan's recorded pointers were removed.
    """
    return stored is None and job.options.buckets <= bucket < job.rescaled_buckets


@dataclass(frozen=True)
class Rescaling:
    """A call in the first batches of a plan that rescales its query.

    Parameters
    ----------
    job, bucket, stored
        The job, the bucket's number, and the pointer that Spark hands out.
    captured
        The pointers of all old buckets, as recorded by the plan.
    operator_file
        The operator file that was in force.
    old_folder
        The query folder so far.
    """

    job: Job
    bucket: int
    stored: Pointer | None
    captured: Captured
    operator_file: OperatorFile
    old_folder: Folder

    @property
    def ends(self) -> bool:
        """True if the query no longer has this bucket."""
        return self.bucket >= self.job.options.buckets

    def as_before(self) -> Job:
        """Return the job with the old bucket map, for a call without a heartbeat."""
        return replace(self.job, options=replace(self.job.options, bucket_by=self.operator_file.bucket_map))

    def note(self, pointer: Pointer) -> None:
        """Record the pointer that a call without a heartbeat has made; a later attempt replaces it."""
        self._starting_folder.put(f"{self.job.rescaled_from}.{self.bucket}.{pointer.batch}.pointer", pointer.encode())

    def give(self, replicas: Replicas, scratch: Path) -> None:
        """Bring the old bucket's state to the parents, and raise an error if it differs from the pointer from Spark."""
        if self.stored is None:
            return
        if self.bucket == 0:
            # A request may have been made since the query was planned.
            refuse_requests(self.old_folder, self.operator_file)
        old_bucket = Parent.unsaved(self.operator_file, self.stored)
        sources_of = make_source_opener(self.job, self.job.options.backends, replicas, scratch)
        parent = bring_parent(self.job, self._folder, old_bucket, sources_of, scratch)
        if parent.pointer.ref != self.stored.ref:
            problem = f"bucket {self.bucket} is at checkpoint {self.stored.ref}, not {parent.pointer.ref}"
            raise make_gone_on_error(self.job.operator, problem)

    def initial_state(self) -> InitialState:
        """Return the bucket's initial state."""
        new_map = self.job.options.bucket_map
        numbers = new_map.overlapping(self.operator_file.bucket_map, self.bucket)
        parents = tuple(Parent.unsaved(self.operator_file, self._find_pointer(number)) for number in numbers)
        pointer = make_divided_pointer(self.job, self._folder, self.bucket, parents)
        first_pointer = self.captured.pointers[min(self.captured.pointers)]
        record = StartRecord(
            RESCALE,
            self.old_folder.root,
            "",
            self.captured.batch,
            NO_CLAIM,
            self.job.operator,
            heartbeats=first_pointer.heartbeats,
        )
        return InitialState(parents, new_map, pointer, record, self.old_folder)

    @property
    def _folder(self) -> str:
        """Name of the new query folder; the same for all calls of the plan."""
        return make_rescaled_name(self.old_folder.name, self.job.plan_id)

    @property
    def _starting_folder(self) -> Folder:
        return operator_folder(self.job).child(STARTING_FOLDER)

    def _find_pointer(self, number: int) -> Pointer:
        """Return the newest pointer of an old bucket: the one that Spark hands out, or else the newest recorded one."""
        if number == self.bucket and self.stored is not None:
            return self.stored
        pattern = re.compile(rf"{re.escape(str(self.job.rescaled_from))}\.{number}\.(\d+)\.pointer")
        recorded = [
            (int(match[1]), name) for name in self._starting_folder.names() if (match := pattern.fullmatch(name))
        ]
        return (
            Pointer.decode(self._starting_folder.get(max(recorded)[1])) if recorded else self.captured.pointers[number]
        )
