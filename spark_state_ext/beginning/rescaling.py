"""Rescaling in place: the first batch with data in which a query has another bucket map than its state.

Spark hands each old bucket's pointer to the call of its label, and to no other. So the plan has Spark read all pointers
of the last batch, and a task writes them down; a call takes the pointers of its bucket's parents from there. In a batch
with data each old bucket is called too, also one that the query no longer has. It compares what was taken with its own:
the batch succeeds only where all were the same.

Batches without data, as Spark has them for timeouts, call some of the old buckets only. These go on as they were, and
note their new pointers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from arrow_schemas.operator import OperatorFile
from arrow_schemas.pointer import Pointer
from spark_state_ext.beginning.first_call import bring_parent, make_gone_on_error, sources_in
from spark_state_ext.beginning.initial_state import InitialState, divided_pointer
from spark_state_ext.engine.folders import operator_folder
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.replicas import Replicas
from spark_state_ext.engine.start_from import NO_CLAIM
from spark_state_ext.errors import ChangedJobError
from spark_state_ext.files.erase_requests import EraseFolder
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import STARTING_FOLDER
from spark_state_ext.rescale.folders import rescaled_folder
from spark_state_ext.rescale.parents import Parent
from spark_state_ext.savepoints.captured import Captured
from spark_state_ext.savepoints.records import RESCALE, StartRecord

__all__ = ["Rescaling", "is_no_more", "refuse_requests", "refuse_rescaling"]


def refuse_rescaling(
    query_folder: Folder, stored: OperatorFile, wanted: OperatorFile, case_sensitive: bool = False
) -> None:
    """Refuse to rescale a query in place, as far as files tell when it is planned."""
    asked = wanted.bucket_map
    if not (stored.bucket_map.by_hash and asked.by_hash):
        # No hash tells the new bucket of a row.
        stored.refuse_other_map(asked)
    stored.with_map(asked).begins(wanted, case_sensitive=case_sensitive)
    refuse_requests(query_folder, stored)


def refuse_requests(query_folder: Folder, stored: OperatorFile) -> None:
    """Refuse to rescale while an erase request waits: requests are numbered by query folder."""
    numbers = EraseFolder(query_folder).numbers()
    waiting = sorted(numbers.requests - numbers.done)
    if waiting:
        raise ChangedJobError(
            f"operator {stored.operator!r} is not rescaled, as erase request {waiting[0]} in {query_folder.root} is "
            f"not done yet: go on with {stored.bucket_map} and erase_requests=True until erase_status says that it is "
            "done, and rescale then. A request that was withdrawn needs such a run too"
        )


def is_no_more(job: Job, bucket: int, stored: Pointer | None) -> bool:
    """Whether a label stands for a bucket that the query had before it was rescaled, and has no more.

    Spark goes on calling it under that plan, also when nothing is left of what the plan has written down.
    """
    return stored is None and job.options.buckets <= bucket < job.rescaled_buckets


@dataclass(frozen=True)
class Rescaling:
    """What a call does in the first batches of a plan that rescales its query.

    Parameters
    ----------
    job, bucket, stored
        The job, the bucket's number, and the pointer that Spark hands out.
    captured
        The pointers of all old buckets, as the plan has written them down.
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
        """Whether the bucket is one that the query has no more."""
        return self.bucket >= self.job.options.buckets

    def as_before(self) -> Job:
        """The job with the old bucket map, for a call without a heartbeat."""
        return replace(self.job, options=replace(self.job.options, bucket_by=self.operator_file.bucket_map))

    def note(self, pointer: Pointer) -> None:
        """Write down the pointer that such a call has made; of several attempts the last."""
        self._notes.put(f"{self.job.rescaled_from}.{self.bucket}.{pointer.batch}.pointer", pointer.encode())

    def give(self, replicas: Replicas, scratch: Path) -> None:
        """Have the old bucket's state among the parents, and see that it is what Spark hands out."""
        if self.stored is None:
            return
        if self.bucket == 0:
            # One may have come since the query was planned.
            refuse_requests(self.old_folder, self.operator_file)
        wanted = Parent.unsaved(self.operator_file, self.stored)
        sources_of = sources_in(self.job, self.job.options.backends, replicas, scratch)
        parent = bring_parent(self.job, self._folder, wanted, sources_of, scratch)
        if parent.pointer.ref != self.stored.ref:
            shown = f"bucket {self.bucket} is at checkpoint {self.stored.ref}, not {parent.pointer.ref}"
            raise make_gone_on_error(self.job.operator, shown)

    def initial_state(self) -> InitialState:
        """What the bucket begins with."""
        asked = self.job.options.bucket_map
        numbers = asked.overlapping(self.operator_file.bucket_map, self.bucket)
        parents = tuple(Parent.unsaved(self.operator_file, self._find_pointer(number)) for number in numbers)
        pointer = divided_pointer(self.job, self._folder, self.bucket, parents)
        record = StartRecord(RESCALE, self.old_folder.root, "", self.captured.batch, NO_CLAIM, self.job.operator)
        return InitialState(parents, asked, pointer, record, self.old_folder)

    @property
    def _folder(self) -> str:
        """Name of the query folder from now on; the same for all calls of the plan."""
        return rescaled_folder(self.old_folder.name, self.job.plan_id)

    @property
    def _notes(self) -> Folder:
        return operator_folder(self.job).child(STARTING_FOLDER)

    def _find_pointer(self, number: int) -> Pointer:
        """The newest pointer of an old bucket: what Spark hands out, else what was written down."""
        if number == self.bucket and self.stored is not None:
            return self.stored
        pattern = re.compile(rf"{re.escape(str(self.job.rescaled_from))}\.{number}\.(\d+)\.pointer")
        noted = [(int(match[1]), name) for name in self._notes.names() if (match := pattern.fullmatch(name))]
        return Pointer.decode(self._notes.get(max(noted)[1])) if noted else self.captured.pointers[number]
